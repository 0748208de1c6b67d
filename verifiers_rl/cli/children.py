"""The processes that `vf-rl` starts: their output, and their ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from contextlib import nullcontext, suppress
from pathlib import Path

from verifiers_rl.cli.plan import Address
from verifiers_rl.process.secret_names import environment_without_secrets

STOP_GRACE_S = 20.0
POLL_S = 0.5  # between two looks at a child
NUM_SHOWN_LINES = 30  # of the output of a process that did not start
NUM_LAST_LINES = 300  # as many have both tracebacks of a server whose engine did not start


class ChildError(RuntimeError):
    """A process that the run needs did not start, or does not live; the message says why."""


class Child(ABC):
    """A process of the run, and what it starts: here (`LocalChild`), or on a machine of a Ray
    cluster (`cluster.ray_engine.RayChild`).

    Attributes:
        name: what messages call it.
        address: where it listens, if it does; None as long as that is unknown.
        is_lost: it has ended with its machine.
        log: the file with its output; None: that is in ours.
    """

    is_lost = False
    log: Path | None = None

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
        self.log = log
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
        text = "" if self.log is None else self.log.read_text("utf-8", "replace")
        return [line for line in text.splitlines() if line.strip()][-NUM_LAST_LINES:]
