"""Print what the process waits for, and for how long already."""

from __future__ import annotations

import time
from collections.abc import Callable

from verifiers_rl.process.interrupts import raise_if_interrupted, say

QUIET_S = 5.0  # shorter waits are not worth a line
LONGEST_SILENCE_S = 60.0
POLL_S = 0.2  # between two looks at what is awaited


class WaitingLine:
    """Lines on stderr that say what is awaited, after 5, 10, 20, ... s, later every 60 s.

    Args:
        describe: returns what is awaited and its progress: "rollouts of step 3: 12 of 64".
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe, self._start, self._next_s = describe, time.monotonic(), QUIET_S

    def show(self) -> None:
        """Print the line if it is time; call this about once a second. Raises Interrupted if a
        signal asks the run to end.
        """
        raise_if_interrupted()
        waited_s = time.monotonic() - self._start
        if waited_s >= self._next_s:
            self._next_s += min(self._next_s, LONGEST_SILENCE_S)
            say(f"waiting for {self._describe()} after {waited_s:.0f} s")


def wait_until(is_done: Callable[[], bool], what: str, timeout_s: float) -> bool:
    """Wait, and say so. Return whether it is done in time.

    Raises:
        Interrupted: a signal asks the run to end.
    """
    deadline, line = time.monotonic() + timeout_s, WaitingLine(lambda: what)
    while not is_done():
        if time.monotonic() > deadline:
            return False
        line.show()
        time.sleep(POLL_S)
    return True
