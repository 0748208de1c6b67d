"""The loop that starts servers and trainer, and starts a server again that died."""

import dataclasses
import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.configs import make_config
from verifiers_rl.cli import supervise
from verifiers_rl.cli.children import Child
from verifiers_rl.cli.plan import MAX_RESTARTS, SERVERS_VARIABLE, ServerPlan
from verifiers_rl.inference.client import TOKEN_VARIABLE

SERVER = ServerPlan("inference", ("inference",), "m", {}, 0)
TEACHER = ServerPlan("teacher-big", ("teacher", "0"), "m", {}, 0, is_needed=True)


class Played(Child):
    """A process that ends after it was polled so many times, or at a signal."""

    def __init__(self, name, status=0, polls=10**9, lines=()):
        super().__init__(name, ("10.0.0.1", 7))
        self.status, self.polls, self._lines, self.signals = status, polls, lines, []

    def poll(self):
        self.polls -= 1
        return None if self.polls > 0 else self.status

    def wait(self, seconds):
        return self.poll() is not None

    def signal(self, number):
        self.signals.append(number)
        if self.polls > 0:
            self.polls, self.status = 0, 128 + number

    def last_lines(self):
        return list(self._lines)


class Launcher:
    """Starts played processes: servers, of which the last one again and again, and trainers."""

    def __init__(self, trainers, *servers):
        self.trainers, self.servers, self.started = trainers, [*servers], []

    def open(self): ...

    def start_server(self, plan):
        self.started.append(self.servers.pop(0) if len(self.servers) > 1 else self.servers[0])
        return self.started[-1]

    def start_trainers(self, env):
        self.env = env
        return iter(self.trainers)

    def close(self): ...


@pytest.fixture
def run(monkeypatch, kept_handlers):
    """Runs servers and trainer to their end."""
    monkeypatch.setattr(supervise, "POLL_S", 0.0)
    monkeypatch.setattr(supervise, "BACKOFF_S", 0.0)
    monkeypatch.setattr(supervise, "answers", lambda address: True)

    def run(launcher, plan=SERVER):
        config = make_config("inference.args.max_modellen = 32")
        return supervise.supervise(config, [plan], launcher)

    return run


@pytest.mark.parametrize("statuses", [[3], [0, 5]])
def test_the_status_is_the_first_bad_one_of_the_ranks_and_servers_end_with_them(run, statuses):
    trainers = [Played(f"trainer-{n}", s, polls=5) for n, s in enumerate(statuses)]
    launcher = Launcher(trainers, Played("inference"))
    assert run(launcher) == statuses[-1]
    assert launcher.started[0].signals == [signal.SIGTERM, signal.SIGKILL]
    assert json.loads(launcher.env[SERVERS_VARIABLE]) == {"inference": "10.0.0.1:7"}


@pytest.mark.parametrize(
    "plan, lives, num_started, expected",
    [
        (SERVER, True, 2, 7),  # the trainer's status
        (SERVER, False, 1 + MAX_RESTARTS, 7),
        (TEACHER, False, 1 + MAX_RESTARTS, 1),
        (dataclasses.replace(TEACHER, max_restarts=0), False, 1, 1),
    ],
)
def test_a_server_that_dies_is_started_again_and_not_for_ever(
    run, capsys, plan, lives, num_started, expected
):
    # Ready, dead, and then ready again, or never.
    again = Played("again") if lives else Played("again", 9, polls=0)
    launcher = Launcher([Played("trainer", 7, polls=200)], Played("first", 9, polls=4), again)
    assert run(launcher, plan) == expected and len(launcher.started) == num_started
    assert (f"{plan.name} ended with status 9 and is" in capsys.readouterr().err) == (not lives)
    assert (signal.SIGTERM in launcher.trainers[0].signals) == plan.is_needed


@pytest.mark.parametrize(
    "lines, status, said",
    [
        (
            [
                "(EngineCore pid=9) ERROR 11-26 01:02:03 [core.py:110] Traceback (most recent",
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
            ["PermissionError: [Errno 13] Permission denied: '/.cache'"],
            1,
            ": PermissionError: [Errno 13] Permission denied: '/.cache' (set HOME to a folder",
        ),
    ],
)
def test_the_line_that_says_why_a_server_did_not_start_is_found(lines, status, said, monkeypatch):
    monkeypatch.setenv("HOME", "/nowhere")
    assert supervise.cause_in(lines, status).startswith(said)


BAD_FLAG = "unrecognized arguments: --max-modellen 5"


@pytest.mark.parametrize(
    "lines, said",
    [
        ([f"vf-vllm: error: {BAD_FLAG}", "bye"], f"before it was ready: {BAD_FLAG}; see /logs"),
        (["OSError: \x1b[2Jno"], "status 2 before it was ready: OSError: [2Jno; see /logs/one.log"),
    ],
)
def test_a_server_that_did_not_start_is_one_line_with_its_log(
    run, monkeypatch, capsys, lines, said
):
    monkeypatch.setattr(supervise, "answers", lambda address: False)
    server = Played("inference", 2, polls=2, lines=lines)
    server.log = Path("/logs/one.log")
    assert run(Launcher([Played("trainer")], server)) == 1
    shown = capsys.readouterr().err
    assert said in shown and "\x1b" not in shown


def test_lost_ranks_end_the_run_with_the_command_to_resume(run, capsys):
    trainers = [Played("trainer-0"), Played("trainer-1", 1, polls=1)]
    trainers[1].is_lost = True
    assert run(Launcher(trainers, Played("inference"))) == 1
    said = capsys.readouterr().err
    assert "trainer-1 ended with status 1. Go on from the last checkpoint: vf-rl" in said
    assert "/a/rl.toml --resume" in said and signal.SIGTERM in trainers[0].signals


def test_servers_that_run_already_and_a_teacher_that_is_started_have_the_users_token(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(TOKEN_VARIABLE, "the user's")
    config = make_config("inference.gpus = 0", "trainer.gpus = 0")
    here = supervise.ThisMachine(config, [TEACHER], tmp_path)
    here.open()
    here.close()
    assert os.environ[TOKEN_VARIABLE] == "the user's"


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("status", [7, 128 + signal.SIGTERM])
def test_an_output_that_is_full_or_closed_later_changes_no_status(run, monkeypatch, status):
    class Waiting(Played):
        def wait(self, seconds):
            for name in ("stdout", "stderr"):
                monkeypatch.setattr(sys, name, Full())
            if status != 7 and not self.signals:
                signal.raise_signal(signal.SIGTERM)
            return super().wait(seconds)

    launcher = Launcher([Waiting("trainer", 7, polls=200)], Played("inference", 9, polls=4))
    assert run(launcher) == status
    assert status != 7 or len(launcher.started) == 1 + MAX_RESTARTS


def test_a_signal_ends_the_run_also_where_ray_raises_an_interrupt_of_its_own(run, capsys):
    class Waiting(Played):
        def wait(self, seconds):
            try:
                if not self.signals:
                    signal.raise_signal(signal.SIGTERM)
            except KeyboardInterrupt:
                raise KeyboardInterrupt from None  # what Ray's code makes of it
            return super().wait(seconds)

    trainer, server = Waiting("trainer"), Played("inference")
    assert run(Launcher([trainer], server)) == 128 + signal.SIGTERM
    assert "vf-rl: interrupted by SIGTERM: ending the run" in capsys.readouterr().err
    assert signal.SIGTERM in trainer.signals and signal.SIGTERM in server.signals
