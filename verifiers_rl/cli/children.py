"""The processes that `vf-rl` starts: their output, their deadlines, the messages at their end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import IO

from verifiers_rl.cli.config import RunConfig
from verifiers_rl.inference.client import InferenceClient, InferenceServerError
from verifiers_rl.process.secret_names import environment_without_secrets

STOP_GRACE_S = 20.0


class Child:
    """A child process in its own process group. Its output goes to a file, to our output with a
    prefix, or to our output unchanged. It does not inherit the variables of an `env_file`.

    Attributes:
        last_lines: the last lines that were printed with a prefix.
        last_printed: name of the child that printed last.
    """

    last_printed = ""

    def __init__(
        self, name: str, command: list[str], env: dict[str, str], log: Path | None, inherit: bool
    ) -> None:
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=30)
        self._is_muted = False
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] | None = log.open("ab") if log else None
        output = None if inherit else self._log or subprocess.PIPE
        # It gets its own process group, so that it can be ended with all its children.
        self.process = subprocess.Popen(
            command,
            env={
                **environment_without_secrets(),
                **env,
                "VERIFIERS_RL_DIE_WITH_PARENT": str(os.getpid()),
                "PYTHONUNBUFFERED": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if inherit else subprocess.STDOUT,
            start_new_session=True,
        )
        self._printer: threading.Thread | None = None
        if self.process.stdout is not None:
            self._printer = threading.Thread(
                target=self._print, args=(self.process.stdout,), daemon=True
            )
            self._printer.start()

    def _print(self, output: IO[bytes]) -> None:
        # A progress bar redraws its line with a carriage return and no newline: split at both.
        for line in iter(output.readline, b""):
            for part in line.replace(b"\r", b"\n").split(b"\n"):
                if part.strip() and not self._is_muted:
                    text = part.decode(errors="replace").rstrip()
                    self.last_lines.append(text)
                    Child.last_printed = self.name
                    try:
                        print(f"[{self.name}] {text}", flush=True)
                    except OSError:  # the terminal is gone; a full pipe would block the child
                        self.mute()

    def mute(self) -> None:
        """Stop printing the output of the child."""
        self._is_muted = True

    def wait_for_output(self) -> None:
        """Wait until all output of a child that has ended is printed."""
        if self._printer is not None:
            self._printer.join(5.0)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Send SIGTERM to the whole group, SIGKILL after a grace period; wait until it is gone."""
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                pass  # SIGKILL follows below
        self.kill()
        self.process.wait()
        self.wait_for_output()
        if self._printer is not None and not self._printer.is_alive() and self.process.stdout:
            self.process.stdout.close()
        if self._log is not None:
            self._log.close()

    def kill(self) -> None:
        """Send SIGKILL to the whole group, also to processes that a dead leader left behind."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass  # the whole group is gone already


def ended_within(child: Child, seconds: float) -> bool:
    try:
        child.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def status_of(child: Child) -> int:
    """Return the exit status of a child that has ended; 128 + signal if a signal ended it."""
    status = child.process.returncode
    return 128 - status if status < 0 else status


def answers(client: InferenceClient) -> bool:
    try:
        client.status()
    except InferenceServerError:
        return False
    return True


def ended_early(
    server: Child,
    log: Path | None,
    config: RunConfig,
    what: str = "the server",
    at: tuple[str, ...] = ("inference",),
) -> InferenceServerError:
    """Return the error to raise when a server's first start failed. Prints the end of its log,
    unless a single flag is the reason.

    Args:
        what: what messages call the server.
        at: the table of the TOML that has its `args`.
    """
    server.wait_for_output()
    lines = log.read_text(errors="replace").splitlines() if log else list(server.last_lines)
    if problem := flag_problem(lines, config, at):
        return InferenceServerError(problem)
    if log is not None:
        print("\n".join(lines[-30:]), file=sys.stderr)
    return InferenceServerError(
        f"{what} ended with status {server.process.returncode} before it was ready; "
        "see its output above"
    )


def flag_problem(
    lines: list[str], config: RunConfig, at: tuple[str, ...] = ("inference",)
) -> str | None:
    """Return what the server's parser says about a flag, with the flag's name in the TOML."""
    of_teacher = at != ("inference",)
    args = config.teachers[int(at[1])].args if of_teacher else config.inference_args
    said = [line.partition("error: ")[2] for line in lines if "error: " in line]
    for text in reversed(said):
        flags = (word.replace("-", "_") for word in re.findall(r"--(?:no-)?([\w-]+)", text))
        for flag in flags:
            if flag in args:
                return f"{config.place(*at, 'args', flag)} {flag}: {text}"
    return None
