import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers import run_python, running_python
from verifiers_rl.process.ending import handle_signals
from verifiers_rl.process.interrupts import Interrupted, Interrupts, raise_if_interrupted
from verifiers_rl.process.waiting import wait_until


def kill(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_raised_at_the_next_check_and_nowhere_before(number, capfd):
    before = signal.getsignal(number)
    interrupts, passed = Interrupts(), []
    with pytest.raises(Interrupted) as caught, interrupts.handled(None, says=True):
        interrupts.check()
        kill(number)
        passed.append("the code behind the signal")
        interrupts.check_all(waits=False)
    assert passed and signal.getsignal(number) is before
    assert caught.value.code == 128 + number and isinstance(caught.value, KeyboardInterrupt)
    assert capfd.readouterr().err.count(f"{signal.Signals(number).name}: the microbatch") == 1
    interrupts.check()  # of an earlier run


def test_a_sighup_that_nohup_has_switched_off_stays_off(monkeypatch):
    handlers = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.SIG_IGN,
                signal.SIGHUP: signal.SIG_IGN}  # fmt: skip
    monkeypatch.setattr(signal, "getsignal", handlers.get)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    handle_signals("ours")
    assert [*handlers.values()] == ["ours", "ours", signal.SIG_IGN]


def test_a_wait_ends_with_a_signal():
    raise_if_interrupted()  # without a run
    with pytest.raises(Interrupted), Interrupts().handled(None, says=False):
        threading.Timer(0.1, kill, [signal.SIGINT]).start()
        wait_until(lambda: False, "nothing", 30.0)


def test_a_signal_to_a_forked_process_ends_that_one_and_is_none_to_the_run():
    code = """
import multiprocessing, sys, time
from verifiers_rl.process.interrupts import Interrupts
interrupts = Interrupts()
fork = multiprocessing.get_context("fork")
with interrupts.handled(None, says=True):
    begun = fork.Event()
    child = fork.Process(target=lambda: (begun.set(), time.sleep(60)))
    child.start()
    assert begun.wait(30)
    child.terminate()
    child.join(30)
    print(child.exitcode, interrupts.number)
    stays = fork.Process(target=time.sleep, args=(60,))
    stays.start()
print("ended while", stays.is_alive())
stays.kill()
stays.join(30)
"""
    done = run_python("-W", "ignore::DeprecationWarning", "-c", code)
    assert done.stdout == "-15 None\nended while True\n" and not done.stderr


def test_other_threads_have_no_signals_and_are_not_interrupted():
    def run(handler):
        with Interrupts().handled(None, says=False):
            assert signal.getsignal(signal.SIGTERM) is handler
        raise_if_interrupted()

    with pytest.raises(Interrupted), Interrupts().handled(None, says=False):
        kill(signal.SIGTERM)
        with ThreadPoolExecutor(1) as other:
            other.submit(run, signal.getsignal(signal.SIGTERM)).result(10)


STUCK = """
import hashlib, sys
from verifiers_rl.process import interrupts
interrupts.SAME_S = 0.3
with interrupts.Interrupts().handled(None, says=True):
    print("begun", flush=True)
    # Minutes in C, where Python's own handlers do not run.
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def test_a_second_signal_ends_a_process_at_once_also_while_it_is_in_c():
    with running_python("-c", STUCK) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # a launcher's copy of the first one
        assert "SIGINT: the microbatch" in process.stderr.readline() + process.stderr.readline()
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
