"""How vf-train ends early: by Ctrl-C or SIGTERM, or with the process that started it."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterable
from types import FrameType

from verifiers_rl.process.parent import die_with_parent

SAVE_GRACE_S = 120.0  # between the request to end and SIGKILL; a checkpoint is saved meanwhile


class Interrupt:
    """Turns the first SIGINT or SIGTERM into KeyboardInterrupt, and ends the process at once upon a
    second one. `RLTrainer.train` has handlers of its own; these are for the time around it.

    Attributes:
        number: the signal that came; None before it.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    def handle_signals(self) -> None:
        """Install our handlers. Call this again after code that may install handlers of its own."""
        if self.number is None:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The default action ends the process also while C code holds the main thread.
        self.release()
        if self.number is not None:
            os.kill(os.getpid(), number)
        self.number = number
        raise KeyboardInterrupt

    def release(self) -> None:
        """Let signals end the process at once."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    @property
    def exit_status(self) -> int:
        return 128 + (self.number or signal.SIGINT)


def end_with(pids: Iterable[int], grace_s: float = SAVE_GRACE_S) -> None:
    """End this process when one of the given processes ends, for whatever reason: by SIGTERM, and
    by SIGKILL `grace_s` seconds later. Linux only.

    The kernel's parent-death signal (`process.parent`) covers only the direct parent. The parent of
    a rank is accelerate's launcher, which outlives a killed vf-rl.
    """
    if not hasattr(os, "pidfd_open"):
        return
    poll = select.poll()
    for pid in pids:
        try:
            poll.register(os.pidfd_open(pid), select.POLLIN)
        except ProcessLookupError:
            sys.exit("the process that started this one is gone")
        except OSError:  # a sandbox may forbid it: watch only the direct parent, no SIGKILL
            die_with_parent(os.getppid())
            return

    def watch() -> None:
        poll.poll()
        for descriptor in (1, 2):
            # Printing into a pipe without a reader would raise, also while a checkpoint is saved.
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)  # this process should end meanwhile
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end_with", daemon=True).start()
