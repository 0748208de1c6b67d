"""The loop that starts servers and trainer, and starts a server again that died."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.configs import make_config
from verifiers_rl.cli import supervise
from verifiers_rl.cli.children import Child
from verifiers_rl.cli.plan import MAX_RESTARTS, SERVERS_VARIABLE, ServerPlan
from verifiers_rl.cli.supervise import Supervised

SERVER = ServerPlan("inference", "the server", ("inference",), "m", {}, 0)
TEACHER = ServerPlan("teacher-big", "teacher 'big'", ("teacher", "0"), "m", {}, 0, is_needed=True)


class Played(Child):
    """A process that ends after it was polled so many times, or at a signal."""

    def __init__(self, name, status=0, polls=10**9, lost=False, lines=()):
        super().__init__(name, ("10.0.0.1", 7))
        self.status, self.polls, self._lines, self._is_lost = status, polls, lines, lost
        self.signals = []

    def poll(self):
        self.polls -= 1
        if self.polls > 0:
            return None
        self.is_lost = self._is_lost
        return self.status

    def wait(self, seconds):
        return self.poll() is not None

    def signal(self, number):
        self.signals.append(number)
        if self.polls > 0:
            self.polls, self.status = 0, 128 + number

    def last_lines(self):
        return list(self._lines)


class Launcher:
    """Starts played processes: the next ones of each server, and these trainers."""

    def __init__(self, trainers, **servers):
        self.trainers, self.servers = trainers, servers
        self.started, self.env, self.is_closed = [], None, False

    def open(self):
        pass

    def start_server(self, plan):
        own = self.servers[plan.name.partition("-")[0]]
        child = own.pop(0) if len(own) > 1 else own[0]
        self.started.append(child)
        return child

    def start_trainers(self, env):
        self.env = env
        yield from self.trainers

    def close(self):
        self.is_closed = True


@pytest.fixture
def run(monkeypatch):
    """Runs servers and trainer to their end."""
    monkeypatch.setattr(supervise, "POLL_S", 0.0)
    monkeypatch.setattr(supervise, "BACKOFF_S", 0.0)
    monkeypatch.setattr(supervise, "answers", lambda address: True)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}

    def run(launcher, *plans):
        config = make_config({"inference": {"args": {"max_modellen": 32}}})
        status = supervise.supervise(config, plans or [SERVER], launcher)
        assert launcher.is_closed
        return status

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("statuses", [[0], [3], [0, 5], [0, 0]])
def test_the_status_is_the_first_bad_one_of_the_ranks_and_servers_end_with_them(run, statuses):
    trainers = [Played(f"trainer-{n}", s, polls=5) for n, s in enumerate(statuses)]
    launcher = Launcher(trainers, inference=[Played("inference")])
    assert run(launcher) == max(statuses)
    assert launcher.started[0].signals == [signal.SIGTERM, signal.SIGKILL]
    assert json.loads(launcher.env[SERVERS_VARIABLE]) == {"inference": "10.0.0.1:7"}


@pytest.mark.parametrize("then", ["lives", "dies"])
@pytest.mark.parametrize("plan", [SERVER, TEACHER], ids=["server", "teacher"])
def test_a_server_that_dies_is_started_again_and_not_for_ever(run, capsys, plan, then):
    # Ready, dead, and then ready again, or never.
    again = Played("again") if then == "lives" else Played("again", 9, polls=0)
    kind = plan.name.partition("-")[0]
    servers = {kind: [Played("first", 9, polls=4), again]}
    trainers = [Played("trainer", 7, polls=200)]
    launcher = Launcher(trainers, **servers)
    status = run(launcher, plan)
    said = capsys.readouterr()
    assert f"{plan.what} ended with status 9; starting it again in 0 s" in said.out
    given_up = f"{plan.what} ended with status 9 and is not started again"
    if then == "lives":
        assert status == 7 and len(launcher.started) == 2 and given_up not in said.err
    else:
        assert len(launcher.started) == 1 + MAX_RESTARTS and given_up in said.err
        assert status == (1 if plan.is_needed else 7)


def test_restarts_wait_longer_and_longer_until_the_server_was_ready(monkeypatch, capsys):
    times, started = [0.0], []
    monkeypatch.setattr(supervise.time, "monotonic", lambda: times[0])
    monkeypatch.setattr(supervise, "answers", lambda address: started[-1].is_ready)

    def start(plan):
        child = Played("inference", 1)
        child.is_ready = len(started) in (0, 3)
        started.append(child)
        return child

    server = Supervised(SERVER, start, make_config())
    delays = []
    for _ in range(5):
        server.poll()
        started[-1].polls = 0
        server.poll()
        delays.append(float(capsys.readouterr().out.split()[-2]))
        times[0] += delays[-1]
        server.poll()
    assert delays == [1.0, 2.0, 4.0, 1.0, 2.0]


def test_one_of_two_servers_that_dies_does_not_end_the_other_one(run):
    plans = [ServerPlan(f"{k}-0", k, ("inference",), "m", {}, 0) for k in ("stays", "dies")]
    dies = [Played("dies", 9, polls=4), Played("again")]
    launcher = Launcher([Played("t", polls=60)], stays=[Played("stays")], dies=dies)
    assert run(launcher, *plans) == 0
    assert [child.name for child in launcher.started] == ["stays", "dies", "again"]


def test_a_bad_flag_of_a_server_is_named_as_in_the_toml(run, monkeypatch, capsys):
    monkeypatch.setattr(supervise, "answers", lambda address: False)
    complaint = "vf-vllm: error: --max-modellen: no such flag; did you mean --max-model-len?"
    for lines, said in (
        ((complaint, "bye"), "max_modellen: --max-modellen: no such flag; did you mean --max-mod"),
        (
            ("Traceback", "OSError"),
            "the server ended with status 2 before it was ready: OSError; see ",
        ),
    ):
        servers = [Played("inference", 2, polls=2, lines=lines)]
        assert run(Launcher([Played("trainer")], inference=servers)) == 1
        shown = capsys.readouterr().err
        assert said in shown and ("OSError" in shown) == ("OSError" in lines)


@pytest.mark.parametrize(
    ("lines", "status", "said"),
    [
        (
            [
                "(EngineCore pid=9) ERROR 11-26 01:02:03 [core.py:110] Traceback (most recent",
                "(EngineCore pid=9) ERROR 11-26 01:02:03 [core.py:110]     raise RuntimeError(",
                "(EngineCore pid=9) ERROR 11-26 01:02:03 [core.py:110] RuntimeError: unable to "
                "allocate shared memory(shm) for file </torch_1>: No space left on device (28)",
                "RuntimeError: Engine core initialization failed. See root cause above.",
            ],
            1,
            ": RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space "
            "left on device (28) (shared memory, /dev/shm, or the disk is full; docker run --shm-",
        ),
        (["INFO loading", "(EngineCore pid=9) INFO half"], 128 + 7, ": (shared memory, /dev/shm"),
        (
            ["torch.OutOfMemoryError: CUDA out of memory", "bye"],
            1,
            ": torch.OutOfMemoryError: CUDA",
        ),
        (["vf-vllm: error: TMPDIR='/t': has 107 bytes"], 1, ": TMPDIR='/t': has 107 bytes"),
        (["vf-vllm: model 'm': no such folder"], 1, ": model 'm': no such folder"),
        (
            ["PermissionError: [Errno 13] Permission denied: '/.cache'"],
            1,
            ": PermissionError: [Errno 13] Permission denied: '/.cache' (set HOME to a folder",
        ),
        (["INFO loading"], -9, ""),
    ],
)
def test_the_line_that_says_why_a_server_did_not_start_is_found(lines, status, said, monkeypatch):
    monkeypatch.setenv("HOME", "/nowhere")
    assert supervise.cause_in(lines, status).startswith(said)
    assert bool(supervise.cause_in(lines, status)) == bool(said)


def test_the_log_of_a_server_that_did_not_start_is_named(run, monkeypatch, capsys):
    monkeypatch.setattr(supervise, "answers", lambda address: False)
    server = Played("inference", 1, polls=2, lines=["x"] * 99 + ["OSError: \x1b[2Jno", "last"])
    server.log = Path("/runs/mine/logs/inference.log")
    assert run(Launcher([Played("trainer")], inference=[server])) == 1
    shown = capsys.readouterr().err
    assert "before it was ready: OSError: " in shown and "\x1b" not in shown
    assert "no; see /runs/mine/logs/inference.log" in shown and shown.count("x\n") == 28


def test_lost_ranks_end_the_run_with_the_command_to_resume(run, capsys):
    trainers = [Played("trainer-0"), Played("trainer-1", 1, polls=3, lost=True)]
    launcher = Launcher(trainers, inference=[Played("inference")])
    assert run(launcher) == 1
    said = capsys.readouterr().err
    assert "trainer-1 ended with status 1. Go on from the last checkpoint: vf-rl" in said
    assert "/a/rl.toml --resume" in said and signal.SIGTERM in trainers[0].signals


def test_a_lost_teacher_ends_the_run(run, capsys):
    launcher = Launcher([Played("t")], teacher=[Played("teacher", 1, polls=4, lost=True)])
    assert run(launcher, TEACHER) == 1
    assert "teacher 'big' ended with status 1 and is not started again" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_trainer_save_and_then_ends_the_servers(run, number):
    trainer, server = Played("trainer"), Played("inference")
    launcher = Launcher([trainer], inference=[server])
    threading.Timer(0.2, os.kill, [os.getpid(), number]).start()
    assert run(launcher) == 128 + number
    assert trainer.signals[0] == server.signals[0] == signal.SIGTERM


def test_a_server_that_nothing_starts_again_ends_the_run(run, capsys):
    plan = ServerPlan("inference", "the server", ("inference",), "m", {}, 0, is_needed=True)
    plan.max_restarts = 0
    launcher = Launcher([Played("generate")], inference=[Played("first", 137, polls=4)])
    assert run(launcher, plan) == 1 and len(launcher.started) == 1
    assert "the server ended with status 137 and is not started again" in capsys.readouterr().err
    assert launcher.trainers[0].signals[0] == signal.SIGTERM
