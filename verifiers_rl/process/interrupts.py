"""SIGINT and SIGTERM during a run: raised between two microbatches and in waits, on all ranks.

    a signal ──► noted at once; a line says what happens next
                 raised as `Interrupted` where the weights next are those of a whole step
    a second ──► the process ends at once, also while C code holds the main thread (one that comes
                 within a second is taken for the first)

Handlers raise nothing, so no code of a step or a checkpoint is broken off anywhere else.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from verifiers_rl.process.terminal import show

# Launchers pass on what the terminal or the scheduler has sent to the ranks already. So a further
# signal in this time after the first one is the same one.
SAME_S = 1.0
_NO_SIGNAL = 0  # tells the listener to end
EXIT_S = 120.0  # deadline for rank 0 to close its files and its environment; the others wait for it


class Interrupted(SystemExit, KeyboardInterrupt):
    """A signal has ended the run. If nothing catches it, the process ends with status 128 + signal,
    without a traceback.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"interrupted by {signal.Signals(self.number).name}"


@dataclass
class Interrupts:
    """The signal that has come, if one has, on this rank or on another one.

    Attributes:
        number: of the signal; None before it.
    """

    number: int | None = None
    _says: bool = False
    _ranks: Any = None
    _others: Callable[[], int] | None = None  # waits for the largest number of all ranks

    # --- Where a run may end ----------------------------------------------------------------------

    def check(self) -> None:
        """Raise Interrupted if a signal has come to this process."""
        if self.number is not None:
            raise Interrupted(self.number)

    def check_all(self, *, waits: bool) -> None:
        """Raise Interrupted on every rank if a signal has come to any. All ranks call this equally
        often.

        Args:
            waits: for the other ranks. Without it nothing waits for them: what they say is raised
                by the next call, which each rank reaches when all have begun this one.
        """
        if self._ranks is None:
            self.check()
            return
        self._raise_of_all()
        self._others = self._ranks.begin_max(self.number or 0)
        if waits:
            self._raise_of_all()

    def _raise_of_all(self) -> None:
        others, self._others = self._others, None
        if others is not None and (number := others()):
            if self.number is None:
                self._say_what_follows(number)
            self.number = number
            raise Interrupted(number)

    # --- Signals ----------------------------------------------------------------------------------

    @contextmanager
    def handled(self, ranks: Any, says: bool) -> Iterator[None]:
        """Inside, note SIGINT and SIGTERM, and end the process at a second one. On the main thread
        only, because Python sets handlers there; elsewhere the handlers stay as they are. If a
        signal came that nothing inside has raised, leaving raises it.

        Args:
            ranks: all processes of the run, a `distributed.HostGroup`; None for one process.
            says: whether this process tells people what follows a signal.
        """
        global _active
        self._ranks, self._says = ranks, says
        before, _active = _active, self
        try:
            with self._listening():
                yield
        except Interrupted:
            if ranks is not None:
                # A launcher ends the other ranks when one has ended, and rank 0 has files open.
                ranks.barrier("all ranks to end", EXIT_S)
            raise
        finally:
            number, self.number = self.number, None
            _active, self._ranks, self._others = before, None, None
        if number is not None:
            raise Interrupted(number)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: handler
            for number in (signal.SIGINT, signal.SIGTERM)
            # One that is ignored (nohup, a job in the background) stays so. None: not Python's own.
            if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
        }
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        listener = threading.Thread(
            target=self._listen, args=(reading, set(before)), name="signals", daemon=True
        )
        listener.start()
        # Python's own handlers run between two bytecodes of the main thread, so not while it waits
        # in C for another rank. The number of a signal goes through this pipe at once.
        pipe_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        try:
            for number in before:
                signal.signal(number, self._note)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(pipe_before)
            os.write(writing, bytes([_NO_SIGNAL]))
            listener.join()
            os.close(writing)
            os.close(reading)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number

    def _listen(self, pipe: int, numbers: set[int]) -> None:
        first_s: float | None = None
        while (number := os.read(pipe, 1)[0]) != _NO_SIGNAL:
            if number not in numbers:
                continue
            if first_s is None:
                first_s = time.monotonic()
                self._say_what_follows(number)
            elif time.monotonic() - first_s > SAME_S:
                os._exit(128 + number)

    def _say_what_follows(self, number: int) -> None:
        if self._says:
            say(
                f"{signal.Signals(number).name}: the microbatch that runs is finished, then the "
                "steps so far are saved; a second signal ends the run at once"
            )


_active: Interrupts | None = None  # that of the run in this process


def _let_go_in_child() -> None:
    """A signal to a forked process, such as one of an environment's pool, is none to the run. It
    has its usual effect there.
    """
    if _active is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) == _active._note:
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_let_go_in_child)


def raise_if_interrupted() -> None:
    """Raise Interrupted if a signal asks the run to end. For loops of the main thread that wait; in
    other threads, and without a run, this does nothing.
    """
    if _active is not None and threading.current_thread() is threading.main_thread():
        _active.check()


def say(text: str) -> None:
    """Print a line to stderr. A progress bar may be in the middle of a line there."""
    show(print, f"\n{text}", file=sys.stderr)
