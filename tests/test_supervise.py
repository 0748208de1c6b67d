"""The loop that starts servers and trainer, and starts a server again that died."""

import dataclasses
import json
import signal
from pathlib import Path

import pytest

from tests.configs import make_config
from verifiers_rl.cli import supervise
from verifiers_rl.cli.children import Child
from verifiers_rl.cli.plan import MAX_RESTARTS, SERVERS_VARIABLE, ServerPlan
from verifiers_rl.cli.supervise import Supervised

SERVER = ServerPlan("inference", ("inference",), "m", {}, 0)
TEACHER = ServerPlan("teacher-big", ("teacher", "0"), "m", {}, 0, is_needed=True)
GENERATOR = dataclasses.replace(SERVER, is_needed=True, max_restarts=0)


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
def run(monkeypatch, kept_handlers):
    """Runs servers and trainer to their end."""
    monkeypatch.setattr(supervise, "POLL_S", 0.0)
    monkeypatch.setattr(supervise, "BACKOFF_S", 0.0)
    monkeypatch.setattr(supervise, "answers", lambda address: True)

    def run(launcher, *plans):
        config = make_config("inference.args.max_modellen = 32")
        status = supervise.supervise(config, plans or [SERVER], launcher)
        assert launcher.is_closed
        return status

    return run


@pytest.mark.parametrize("statuses", [[3], [0, 5], [0, 0]])
def test_the_status_is_the_first_bad_one_of_the_ranks_and_servers_end_with_them(run, statuses):
    trainers = [Played(f"trainer-{n}", s, polls=5) for n, s in enumerate(statuses)]
    launcher = Launcher(trainers, inference=[Played("inference")])
    assert run(launcher) == max(statuses)
    assert launcher.started[0].signals == [signal.SIGTERM, signal.SIGKILL]
    assert json.loads(launcher.env[SERVERS_VARIABLE]) == {"inference": "10.0.0.1:7"}


@pytest.mark.parametrize(
    "plan, lives, num_started, expected",
    [
        (SERVER, True, 2, 7),  # the trainer's status
        (SERVER, False, 1 + MAX_RESTARTS, 7),
        (TEACHER, False, 1 + MAX_RESTARTS, 1),
        (GENERATOR, False, 1, 1),
    ],
    ids=["lives", "dies", "teacher", "generate"],
)
def test_a_server_that_dies_is_started_again_and_not_for_ever(
    run, capsys, plan, lives, num_started, expected
):
    # Ready, dead, and then ready again, or never.
    again = Played("again") if lives else Played("again", 9, polls=0)
    kind = plan.name.partition("-")[0]
    launcher = Launcher(
        [Played("trainer", 7, polls=200)], **{kind: [Played("first", 9, polls=4), again]}
    )
    assert run(launcher, plan) == expected and len(launcher.started) == num_started
    said = capsys.readouterr()
    starts = f"{plan.name} ended with status 9; starting it again in 0 s"
    assert said.out.count(starts) == num_started - 1
    given_up = f"{plan.name} ended with status 9 and is not started again"
    assert (given_up in said.err) == (not lives)
    assert (signal.SIGTERM in launcher.trainers[0].signals) == plan.is_needed


def test_restarts_wait_longer_and_longer_until_the_server_was_ready(monkeypatch, capsys):
    started, now = [], 0.0
    monkeypatch.setattr(supervise.time, "monotonic", lambda: now)
    monkeypatch.setattr(supervise, "answers", lambda address: len(started) in (1, 4))

    def start(plan):
        started.append(Played("inference", 1))
        return started[-1]

    server = Supervised(SERVER, start, make_config())
    for delay in (1, 2, 4, 1, 2):
        server.poll()
        started[-1].polls = 0
        server.poll()
        assert f"starting it again in {delay} s" in capsys.readouterr().out
        now += delay
        server.poll()
    assert len(started) == 6


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
        (["vf-vllm: error: TMPDIR='/t': has 107 bytes"], 1, ": TMPDIR='/t': has 107 bytes"),
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


BAD_FLAG = "unrecognized arguments: --max-modellen 5"


@pytest.mark.parametrize(
    "lines, said, num_shown",
    [
        ([f"vf-vllm: error: {BAD_FLAG}", "bye"], f"[inference.args] max_modellen: {BAD_FLAG}", 0),
        (
            [*"x" * 99, "OSError: \x1b[2Jno", "last"],
            "inference ended with status 2 before it was ready: OSError: ",
            28,
        ),
    ],
)
def test_a_server_that_did_not_start_is_one_line_with_its_log(
    run, monkeypatch, capsys, lines, said, num_shown
):
    monkeypatch.setattr(supervise, "answers", lambda address: False)
    server = Played("inference", 2, polls=2, lines=lines)
    server.log = Path("/runs/mine/logs/inference.log")
    assert run(Launcher([Played("trainer")], inference=[server])) == 1
    shown = capsys.readouterr().err
    assert said in shown and "\x1b" not in shown
    assert shown.count("x\n") == num_shown
    assert ("; see /runs/mine/logs/inference.log" in shown) == bool(num_shown)


def test_lost_ranks_end_the_run_with_the_command_to_resume(run, capsys):
    trainers = [Played("trainer-0"), Played("trainer-1", 1, polls=3, lost=True)]
    launcher = Launcher(trainers, inference=[Played("inference")])
    assert run(launcher) == 1
    said = capsys.readouterr().err
    assert "trainer-1 ended with status 1. Go on from the last checkpoint: vf-rl" in said
    assert "/a/rl.toml --resume" in said and signal.SIGTERM in trainers[0].signals


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
    assert run(Launcher([trainer], inference=[server])) == 128 + signal.SIGTERM
    assert "vf-rl: interrupted by SIGTERM: ending the run" in capsys.readouterr().out
    assert signal.SIGTERM in trainer.signals and signal.SIGTERM in server.signals
