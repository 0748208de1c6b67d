"""Keeps the processes of a run until the trainer ends: starts them, here or elsewhere, and starts a
server again that died.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Protocol

from verifiers_rl.cli.children import (
    NUM_SHOWN_LINES,
    POLL_S,
    STOP_GRACE_S,
    Child,
    ChildError,
    LocalChild,
)
from verifiers_rl.cli.config import RunConfig, TomlError, words_of
from verifiers_rl.cli.plan import (
    Address,
    ServerPlan,
    assign_gpus,
    host_and_port,
    trainer_command,
    trainer_env,
)
from verifiers_rl.inference.client import TOKEN_VARIABLE, InferenceClient, InferenceServerError
from verifiers_rl.inference.port import RESERVED_VARIABLE, PortError, reserve_port
from verifiers_rl.process.ending import SAVE_GRACE_S, handle_signals
from verifiers_rl.process.interrupts import Interrupted, say
from verifiers_rl.process.terminal import printable
from verifiers_rl.report.run_folder import WritingError, writing

BACKOFF_S = 1.0  # before the first restart, doubled before each further one
LOGS = "logs"  # in the run's folder
_REFUSED = re.compile("vf-vllm: (?:error: )?(.*)")  # how vf-vllm refuses to start
# The last line of a traceback, behind what vLLM puts in front of each line.
_CAUSE = re.compile(r"(?:.*[)\]] )?((?:\w+\.)*\w*(?:Error|Exception)(?:: .+)?)")


def cause_in(lines: Sequence[str], status: int | None) -> str:
    """Return what the output of a server that did not start says of the reason, as the end of a
    sentence: the first exception, because later ones follow from it. "" if it says nothing.
    """
    refused = [match[1] for line in lines if (match := _REFUSED.fullmatch(line))]
    causes = [match[1] for line in lines if (match := _CAUSE.fullmatch(line))]
    why = next(iter(refused + causes), "")
    if re.search("No space left|shared memory|shm", why) or status == 128 + signal.SIGBUS:
        why += " (shared memory, /dev/shm, or the disk is full; docker run --shm-size=8g)"
    if "PermissionError" in why and not os.access(os.path.expanduser("~"), os.W_OK):
        why += " (set HOME to a folder that this user can write, for caches)"
    return printable(f": {why.strip()}") if why else ""


class Supervised:
    """A server of the run that is started again when it dies.

    Args:
        plan: of the server.
        start: starts it.

    Attributes:
        watch: looks at it once a step, and starts it again some time after its death. Raises
            ChildError: it ended before it was ready for the first time, or it is needed and has
            died too often.
    """

    def __init__(self, plan: ServerPlan, start: Callable[[ServerPlan], Child]) -> None:
        self.plan, self._start, self.child = plan, start, start(plan)
        self.watch = self._watch()

    def _watch(self) -> Iterator[None]:
        plan, was_ready, num_deaths = self.plan, False, 0
        while True:
            while self.child.poll() is None:
                if (num_deaths or not was_ready) and answers(self.child.address):
                    was_ready, num_deaths = True, 0
                yield
            self.child.stop()  # ends vLLM's own children too, if they outlive it
            ended = f"{plan.name} {self.child.end}"
            see = f"see {self.child.log or 'its output above'}"
            if not was_ready:
                lines = self.child.last_lines()
                print(printable("\n".join(lines[-NUM_SHOWN_LINES:])), file=sys.stderr)
                why = cause_in(lines, self.child.poll())
                raise ChildError(f"{ended} before it was ready{why}; {see}")
            num_deaths += 1
            if num_deaths > plan.max_restarts or (plan.is_needed and self.child.is_lost):
                break
            delay_s = BACKOFF_S * 2.0 ** (num_deaths - 1)
            say(f"vf-rl: {ended}; starting it again in {delay_s:g} s")
            start_at = time.monotonic() + delay_s
            while time.monotonic() < start_at:
                yield
            self.child = self._start(plan)
        problem = f"{ended} and is not started again; {see}"
        if plan.is_needed:
            raise ChildError(problem)
        say(f"vf-rl: {problem}")


def set_token() -> None:
    """Give the run a token, which all that this process starts inherits: the user's, which servers
    that run already know too, or a new one.
    """
    os.environ[TOKEN_VARIABLE] = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)


def answers(address: Address | None) -> bool:
    """Return whether the `vf-vllm` there is up."""
    if address is None:
        return False
    try:
        InferenceClient(*address).status()
    except InferenceServerError:
        return False
    return True


class Launcher(Protocol):
    """Starts the processes of a run: on this machine, or on those of a Ray cluster."""

    def open(self) -> None:
        """Reserve what they need."""

    def start_server(self, plan: ServerPlan) -> Child: ...

    def start_trainers(self, env: dict[str, str]) -> Iterator[Child]:
        """Start the trainer: the ranks of a machine each, rank 0 first. They end together.

        Args:
            env: variables of all of them.
        """

    def close(self) -> None:
        """Give back what was reserved."""


class ThisMachine:
    """The `Launcher` of a run on this machine: its processes are children of this one. When it is
    made, it assigns GPUs, and gives each plan a port that is reserved until `close`.

    Args:
        plans: of all servers.
        logs: a folder, in which NAME.log gets the output of the server of this name.
        trainer: what follows `python` in its command, or the trainer, if it runs already; by
            default that of the configuration. Its output is ours.

    Raises:
        TomlError: a port is taken, or see `assign_gpus`.
    """

    def __init__(
        self,
        config: RunConfig,
        plans: Sequence[ServerPlan],
        logs: Path,
        trainer: list[str] | Child | None = None,
    ) -> None:
        self._config, self._plans, self._logs, self._trainer = config, plans, logs, trainer
        self.gpus = assign_gpus(config, plans)
        with ExitStack() as reserved:
            for plan in plans:
                try:
                    plan.port, reservation = reserve_port(plan.host, plan.port)
                except PortError as error:
                    option = "vllm_server_port in [trainer.args]"
                    raise TomlError(str(error).replace("--port", option)) from error
                reserved.enter_context(reservation)
            self._reserved = reserved.pop_all()

    def open(self) -> None:
        """Set the token of the run, and begin empty logs.

        Raises:
            WritingError: a log cannot be written.
        """
        if not self._plans:
            return
        set_token()
        with writing(self._logs, "choose another output_dir"):
            self._logs.mkdir(parents=True, exist_ok=True)
            for plan in self._plans:
                self._log(plan).write_bytes(b"")
        print(f"vf-rl: the servers' output is in {self._logs}")

    def _log(self, plan: ServerPlan) -> Path:
        return self._logs / f"{plan.name}.log"

    def start_server(self, plan: ServerPlan) -> Child:
        env = {
            **plan.env,
            "CUDA_VISIBLE_DEVICES": self.gpus[plan.name],
            RESERVED_VARIABLE: str(plan.port),
        }
        address = plan.host, plan.port
        return LocalChild(plan.name, plan.command(*address), env, self._log(plan), address=address)

    def start_trainers(self, env: dict[str, str]) -> Iterator[Child]:
        if isinstance(self._trainer, Child):
            yield self._trainer
            return
        words = self._trainer or trainer_command(self._config, words_of(self._config))
        yield LocalChild("trainer", words, {**env, "CUDA_VISIBLE_DEVICES": self.gpus["trainer"]})

    def close(self) -> None:
        self._reserved.close()


def supervise(config: RunConfig, plans: Sequence[ServerPlan], launcher: Launcher) -> int:
    """Start servers and trainer, restart a server when it dies, and end all when the trainer ends.
    The trainer waits while the servers load. Returns the trainer's exit status.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        raise Interrupted(number)

    timeout_s = config.option("vllm_server_timeout")
    servers, trainers, signals = list[Supervised](), list[Child](), list[int]()
    handle_signals(on_signal)
    deadline, grace_s = math.inf, SAVE_GRACE_S
    try:
        launcher.open()
        for plan in plans:
            servers.append(Supervised(plan, launcher.start_server))
        addresses = {}
        for server in servers:
            addresses[server.plan.name] = address = server.child.find_address()
            where = host_and_port(*address)
            print(f"vf-rl: starting {server.plan.name} on {where}, up to {timeout_s:g} s")
        for trainer in launcher.start_trainers(trainer_env(addresses)):
            trainers.append(trainer)
        while True:
            running = [trainer for trainer in trainers if trainer.poll() is None]
            if lost := next((trainer for trainer in trainers if trainer.is_lost), None):
                grace_s = STOP_GRACE_S  # without its ranks, the others cannot save
                raise ChildError(
                    f"{lost.name} {lost.end}. Go on from the last checkpoint: "
                    f"{shlex.join(['vf-rl', *config.layers.words])} --resume"
                )
            if not running:
                return next((status for trainer in trainers if (status := trainer.poll())), 0)
            for server in servers:
                next(server.watch, None)
            # The trainer ends by itself without servers, and ranks when others have ended.
            if len(running) < len(trainers):
                deadline = min(deadline, time.monotonic() + SAVE_GRACE_S + 60.0)
            if time.monotonic() > deadline:
                raise ChildError("the trainer did not end after other ranks")
            running[0].wait(POLL_S)
    except (ChildError, TomlError, WritingError) as error:
        print(f"vf-rl: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # Ray, while it waits, raises one without a number in place of ours
        say(
            f"vf-rl: {Interrupted(signals[0])}: ending the run, which saves what it has (up to "
            f"{SAVE_GRACE_S:g} s), and the servers; Ctrl-C ends all at once"
        )
        return 128 + signals[0]
    finally:
        others = [server.child for server in servers]

        def end_at_once(number: int, frame: FrameType | None) -> None:
            for child in (*trainers, *others):
                child.signal(signal.SIGKILL)

        # From here on no signal raises, so that the clean-up is completed.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closing terminal may send several
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end_at_once)
        for group, patience_s in ((trainers, grace_s), (others, STOP_GRACE_S)):
            for child in group:
                child.terminate()
            for child in group:
                child.stop(patience_s)
        launcher.close()
