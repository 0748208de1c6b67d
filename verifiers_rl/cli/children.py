"""The processes that `vf-rl` starts: their output, their ends, and who is started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from verifiers_rl.cli.config import RunConfig
from verifiers_rl.cli.plan import Address, ServerPlan
from verifiers_rl.inference.client import InferenceClient, InferenceServerError
from verifiers_rl.process.secret_names import environment_without_secrets
from verifiers_rl.process.waiting import WaitingLine

STOP_GRACE_S = 20.0
POLL_S = 0.5  # between two looks at a child
MAX_RESTARTS = 5  # in a row, without being ready in between
NUM_LAST_LINES = 30
BACKOFF_S = 1.0  # before the first restart, doubled before each further one


class ChildError(RuntimeError):
    """A process that the run needs did not start, or does not live; the message says why."""


class Child(ABC):
    """A process of the run, and what it starts: here (`LocalChild`), or on a machine of a Ray
    cluster (`ray_engine.RayChild`).

    Attributes:
        name: what messages call it.
        address: where it listens, if it does; None as long as that is unknown.
        is_lost: it has ended with its machine.
    """

    is_lost = False

    def __init__(self, name: str, address: Address | None = None) -> None:
        self.name, self.address = name, address
        self._is_asked = False

    @abstractmethod
    def poll(self) -> int | None:
        """Return its exit status, 128 + signal if a signal ended it; None while it runs."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Wait for its end, at most so long. Return whether it has ended."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal to the process and what it has started, which may outlive it."""

    @abstractmethod
    def last_lines(self) -> list[str]:
        """Return the last lines of its log."""

    @property
    def end(self) -> str:
        """How it has ended, for messages."""
        return f"ended with status {self.poll()}"

    def find_address(self) -> Address:
        """Wait until it has an address.

        Raises:
            ChildError: it has ended before.
        """
        while self.address is None:
            if self.wait(POLL_S):
                raise ChildError(f"{self.name} {self.end}")
        return self.address

    def terminate(self) -> None:
        """Ask it to end, once: a second request would end it without a checkpoint."""
        if not self._is_asked and self.poll() is None:
            self._is_asked = True
            self.signal(signal.SIGTERM)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ask it to end, kill it after a grace period, and wait until it is gone."""
        self.terminate()
        self.wait(grace_s)
        self.signal(signal.SIGKILL)
        self.wait(STOP_GRACE_S)


class LocalChild(Child):
    """A Python process of this machine, in its own process group. It does not inherit the variables
    of an `env_file`, and it ends when we do.

    Args:
        words: what follows `python`.
        env: what its environment has besides ours.
        log: a file that gets its output; None: its output is ours.
        drop: variables of ours whose names begin so are left out.
    """

    def __init__(
        self,
        name: str,
        words: list[str],
        env: dict[str, str],
        log: Path | None = None,
        drop: str = "\0",
        address: Address | None = None,
    ) -> None:
        super().__init__(name, address)
        self._log = log
        kept = {k: v for k, v in environment_without_secrets().items() if not k.startswith(drop)}
        own = {"VERIFIERS_RL_DIE_WITH_PARENT": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        with nullcontext() if log is None else log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                env={**kept, **env, **own},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        status = self._process.poll()
        return 128 - status if status is not None and status < 0 else status

    def wait(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def last_lines(self) -> list[str]:
        text = "" if self._log is None else self._log.read_text(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-NUM_LAST_LINES:]


class Supervised:
    """A server of the run that is started again when it dies.

    Args:
        plan: of the server.
        start: starts it.
        config: of the run.

    Attributes:
        was_ready: it has worked once.
        is_given_up: it has died too often.
    """

    def __init__(
        self, plan: ServerPlan, start: Callable[[ServerPlan], Child], config: RunConfig
    ) -> None:
        self.plan, self._start, self._config = plan, start, config
        self.is_given_up = self.was_ready = False
        self._num_deaths = 0
        self._start_at: float | None = None
        self.child = start(plan)

    def poll(self) -> None:
        """Start it again some time after its death.

        Raises:
            ChildError: it ended before it was ready for the first time, or it is needed and has
                died too often.
        """
        if self.is_given_up:
            return
        if self._start_at is not None:
            if time.monotonic() >= self._start_at:
                self._start_at, self.child = None, self._start(self.plan)
            return
        if self.child.poll() is None:
            if (self._num_deaths or not self.was_ready) and answers(self.child.address):
                self.was_ready, self._num_deaths = True, 0
            return
        if not self.was_ready:
            raise self._ended_early()
        self.child.stop()  # ends vLLM's own children too, if they outlive it
        self._num_deaths += 1
        ended = f"{self.plan.what} {self.child.end}"
        if self._num_deaths > MAX_RESTARTS or (self.plan.is_needed and self.child.is_lost):
            self.is_given_up = True
            if self.plan.is_needed:
                raise ChildError(f"{ended} and is not started again; see its log")
            print(f"vf-rl: {ended} and is not started again; see its log", file=sys.stderr)
            return
        delay_s = BACKOFF_S * 2.0 ** (self._num_deaths - 1)
        # A new line: the trainer's progress bar may be in the middle of one.
        print(f"\nvf-rl: {ended}; starting it again in {delay_s:g} s", flush=True)
        self._start_at = time.monotonic() + delay_s

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until it works.

        Raises:
            ChildError: it ended, or does not work within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        line = WaitingLine(lambda: f"{self.plan.what}, up to {timeout_s:g} s,")
        while not self.was_ready:
            if time.monotonic() > deadline:
                raise ChildError(
                    f"{self.plan.what} was not ready after {timeout_s:g} s; raise "
                    "vllm_server_timeout"
                )
            self.child.wait(POLL_S)
            self.poll()
            line.show()

    def _ended_early(self) -> ChildError:
        """Return the error of a first start that failed: about a flag of its table, if its last
        lines say so. Otherwise prints these lines.
        """
        self.child.stop()
        lines, at = self.child.last_lines(), self.plan.at
        for text in reversed([line.partition("error: ")[2] for line in lines]):
            for flag in re.findall(r"--(?:no-)?([\w-]+)", text):
                name = flag.replace("-", "_")
                if name in self._config.table(*at, "args"):
                    return ChildError(f"{self._config.place(*at, 'args', name)} {name}: {text}")
        print("\n".join(lines), file=sys.stderr)
        return ChildError(f"{self.plan.what} {self.child.end} before it was ready; see above")


def answers(address: Address | None) -> bool:
    """Return whether the `vf-vllm` there is up."""
    if address is None:
        return False
    try:
        InferenceClient(*address).status()
    except InferenceServerError:
        return False
    return True
