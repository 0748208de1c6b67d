"""Ctrl-C between two optimizer steps, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback


class Interrupts(TrainerCallback):
    """While the optimizer changes the weights, SIGINT and SIGTERM are held back until the end of
    the step. So what is saved after them is the state of a whole step, with its line of logs. A
    second signal during that time ends the process at once. At all other times a signal goes to its
    previous handler at once.
    """

    def __init__(self) -> None:
        self._is_stepping = False
        self._waiting: list[tuple[Any, int, FrameType | None]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_stepping = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_stepping = False
        if not control.should_log:
            self._deliver()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._deliver()

    def _deliver(self) -> None:
        waiting, self._waiting = self._waiting, []
        for handler, number, frame in waiting:
            handler(number, frame)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, hold back signals that have a Python handler, as described above. Only the main
        thread does so, because Python delivers signals there.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handled = {number: handler for number, handler in before.items() if callable(handler)}

        def handle(number: int, frame: FrameType | None) -> None:
            handler = handled[signal.Signals(number)]
            if self._is_stepping and self._waiting:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            elif self._is_stepping:
                self._waiting.append((handler, number, frame))
            else:
                handler(number, frame)

        for number in handled:
            signal.signal(number, handle)
        try:
            yield
        finally:
            self._is_stepping = False
            for number, handler in handled.items():
                signal.signal(number, handler)
