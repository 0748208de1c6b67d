"""The processes that `vf-rl` starts: their output, their ends, and who is started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import IO, Any

from verifiers_rl.cli.config import RunConfig
from verifiers_rl.inference.client import InferenceClient, InferenceServerError
from verifiers_rl.process.secret_names import environment_without_secrets
from verifiers_rl.process.waiting import WaitingLine

STOP_GRACE_S = 20.0
POLL_S = 0.5  # between two looks at a child
MAX_RESTARTS = 5  # in a row, without being ready in between
BACKOFF_S = 1.0  # before the first restart, doubled before each further one


class ChildError(RuntimeError):
    """A process that the run needs did not start, or does not live; the message says why."""


class Child:
    """A process of the run, and what it starts: here (`LocalChild`), or on another machine
    (`ray_engine.RayChild`).

    Attributes:
        last_lines: the last lines of its output, unless that goes to a file.
        last_printed: name of the child that printed last.
        is_lost: it has ended with its machine.
    """

    last_printed = ""
    is_lost = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=30)
        self._is_muted = self._is_asked = False
        self._reader: threading.Thread | None = None

    def poll(self) -> int | None:
        """Return its exit status, 128 + signal if a signal ended it; None while it runs."""
        raise NotImplementedError

    def wait(self, seconds: float) -> bool:
        """Wait for its end, at most so long. Return whether it has ended."""
        raise NotImplementedError

    def _signal(self, number: int) -> None:
        """Send a signal to the process and what it has started."""
        raise NotImplementedError

    @property
    def end(self) -> str:
        """How it has ended, for messages."""
        return f"ended with status {self.poll()}"

    def terminate(self) -> None:
        """Ask it to end, once: a second request would end it without a checkpoint."""
        if not self._is_asked and self.poll() is None:
            self._is_asked = True
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, also to processes that a dead leader has left behind."""
        self._signal(signal.SIGKILL)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ask it to end, kill it after a grace period, and wait until it is gone."""
        self.terminate()
        self.wait(grace_s)
        self.kill()
        self.wait(STOP_GRACE_S)
        self.wait_for_output()

    def mute(self) -> None:
        """Stop printing its output."""
        self._is_muted = True

    def wait_for_output(self) -> None:
        """Wait until all output of a child that has ended is printed."""
        if self._reader is not None:
            self._reader.join(5.0)

    def _show(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.last_lines.append(line)
            if self._is_muted:
                continue
            Child.last_printed = self.name
            try:
                print(f"[{self.name}] {line}", flush=True)
            except OSError:  # the terminal is gone; a full pipe would block the child
                self.mute()


class LocalChild(Child):
    """A Python process of this machine, in its own process group. Its output goes to a file, to our
    output with a prefix, or to our output unchanged. It does not inherit the variables of an
    `env_file`, and it ends when we do.

    Args:
        words: what follows `python`.
        env: what its environment has besides ours.
        log: a file for its output, or None.
        inherit: its output is ours, without a prefix.
    """

    def __init__(
        self,
        name: str,
        words: list[str],
        env: dict[str, str],
        log: Path | None = None,
        inherit: bool = False,
    ) -> None:
        super().__init__(name)
        with ExitStack() as stack:
            output: Any = None if inherit else subprocess.PIPE
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(log.open("ab"))
            self._process = start_python(
                words,
                {**environment_without_secrets(), **env},
                stdout=output,
                stderr=None if inherit else subprocess.STDOUT,
            )
        if self._process.stdout is not None:
            lines = lines_of(self._process.stdout)
            self._reader = threading.Thread(target=self._show, args=(lines,), daemon=True)
            self._reader.start()

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

    def _signal(self, number: int) -> None:
        signal_group(self._process, number)


def start_python(
    words: list[str], env: dict[str, str], stdout: Any, stderr: Any
) -> subprocess.Popen[bytes]:
    """Start a Python process that ends with this one, and can be ended with all its children."""
    own = {"VERIFIERS_RL_DIE_WITH_PARENT": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *words],
        env=env | own,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to what `start_python` has started, unless the whole group is gone."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def lines_of(output: IO[bytes]) -> Iterator[str]:
    """Yield the lines that a process prints, until it closes its output. A progress bar redraws its
    line with a carriage return and no newline, so lines end at both.
    """
    with output:
        for line in iter(output.readline, b""):
            for part in line.replace(b"\r", b"\n").split(b"\n"):
                if part.strip():
                    yield part.decode(errors="replace").rstrip()


class Supervised:
    """A child that is started again when it dies: a server of the policy or of a teacher, or the
    rollout workers of another machine.

    Args:
        what: what messages call it.
        start: starts it.
        is_ready: whether the child works. One that ends before it does so ends the run.
        config: of the run.
        at: the table of the TOML that has its flags as `args`; () if none has.
        log: the file with its output, or None.
        is_needed: the run ends when it has died too often.

    Attributes:
        was_ready: it has worked once.
        is_given_up: it has died too often.
    """

    def __init__(
        self,
        what: str,
        start: Callable[[], Child],
        is_ready: Callable[[], bool],
        config: RunConfig,
        at: tuple[str, ...] = (),
        log: Path | None = None,
        is_needed: bool = False,
    ) -> None:
        self.what, self._start, self._is_ready = what, start, is_ready
        self._config, self._at, self._log, self._is_needed = config, at, log, is_needed
        self.is_given_up = False
        self.was_ready, self._num_deaths = False, 0
        self._start_at: float | None = None
        self.child = start()

    def look(self) -> None:
        """Start it again some time after its death.

        Raises:
            ChildError: it ended before it was ready for the first time, or it has died too often
                and is needed.
        """
        if self.is_given_up:
            return
        if self._start_at is not None:
            if time.monotonic() >= self._start_at:
                self._start_at = None
                self.child = self._start()
            return
        if self.child.poll() is None:
            if (self._num_deaths or not self.was_ready) and self._is_ready():
                self.was_ready, self._num_deaths = True, 0
            return
        if not self.was_ready:
            raise self._ended_early()
        self.child.stop()  # ends vLLM's own children too, if they outlive it
        self._num_deaths += 1
        ended = f"{self.what} {self.child.end}"
        if self._num_deaths > MAX_RESTARTS:
            self.is_given_up = True
            if self._is_needed:
                raise ChildError(f"{ended}, too often; see its log")
            print(f"vf-rl: {ended} and is not restarted; see its log", file=sys.stderr)
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
        with WaitingLine(lambda: f"{self.what}, up to {timeout_s:g} s,") as line:
            while not self.was_ready:
                if time.monotonic() > deadline:
                    raise ChildError(
                        f"{self.what} was not ready after {timeout_s:g} s; raise "
                        "vllm_server_timeout"
                    )
                self.child.wait(POLL_S)
                self.look()
                line.show()

    def _ended_early(self) -> ChildError:
        """Return the error of a first start that failed. Prints the end of the log, unless a single
        flag is the reason.
        """
        self.child.wait_for_output()
        lines = list(self.child.last_lines)
        if self._log is not None:
            lines = self._log.read_text(errors="replace").splitlines()
        if problem := flag_problem(lines, self._config, self._at):
            return ChildError(problem)
        if self._log is not None:
            print("\n".join(lines[-30:]), file=sys.stderr)
        return ChildError(f"{self.what} {self.child.end} before it was ready; see its output above")


def flag_problem(lines: list[str], config: RunConfig, at: tuple[str, ...]) -> str | None:
    """Return what a server's parser says about a flag, with the flag's name in the TOML."""
    args = config.inference_args if at == ("inference",) else {}
    if at[:1] == ("teacher",):
        args = config.teachers[int(at[1])].args
    said = [line.partition("error: ")[2] for line in lines if "error: " in line]
    for text in reversed(said):
        flags = (word.replace("-", "_") for word in re.findall(r"--(?:no-)?([\w-]+)", text))
        for flag in flags:
            if flag in args:
                return f"{config.place(*at, 'args', flag)} {flag}: {text}"
    return None


def answers(host: str, port: int) -> bool:
    """Return whether the `vf-vllm` there is up."""
    with closing(InferenceClient(host, port)) as client:
        try:
            client.status()
        except InferenceServerError:
            return False
    return True
