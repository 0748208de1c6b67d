"""How a process ends early: by Ctrl-C or SIGTERM, or with the process that started it."""

from __future__ import annotations

import os
import select
import signal
import stat
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from verifiers_rl.process.interrupts import Interrupted
from verifiers_rl.process.parent import die_with_parent

SAVE_GRACE_S = 120.0  # between the request to end and SIGKILL; a checkpoint is saved meanwhile
NUMBERS = (signal.SIGINT, signal.SIGTERM)


def handle_signals(handler: Any) -> None:
    """Let this handler take what ends a process, but not a SIGHUP that `nohup` has switched off."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def interrupt_by_signals() -> None:
    """Let the first SIGINT or SIGTERM raise `Interrupted`, and a second one end the process at
    once. `RLTrainer.train` has handlers of its own; these are for the time around it. Call this
    again after code that may install handlers.
    """
    for number in NUMBERS:
        signal.signal(number, _interrupt)


def end_by_signals() -> None:
    """Let signals end the process at once, also while C code holds the main thread."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    end_by_signals()
    raise Interrupted(number)


def end_with_starter() -> None:
    """End this process when the `vf-rl` that started it ends, if one did, or its parent: a launcher
    may be between the two, and outlives a killed `vf-rl`.
    """
    # Not for what we start in turn.
    if starter := os.environ.pop("VERIFIERS_RL_DIE_WITH_PARENT", None):
        end_with({int(starter), os.getppid()})


def end_with(pids: Iterable[int], grace_s: float = SAVE_GRACE_S) -> None:
    """End this process when one of the given processes ends, for whatever reason: by SIGTERM, and
    by SIGKILL `grace_s` seconds later. Linux only.
    """
    poll = select.poll()
    for pid in pids:
        try:
            poll.register(os.pidfd_open(pid), select.POLLIN)
        except ProcessLookupError:  # it has ended before we could look
            os.kill(os.getpid(), signal.SIGKILL)
        except OSError:  # a sandbox, or a kernel before 5.3, has no pidfds
            return die_with_parent(os.getppid())

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
