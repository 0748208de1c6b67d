"""Processes that end with the one that started them."""

from __future__ import annotations

import os
import sys


def die_with_parent(parent: int) -> None:
    """On Linux, get SIGTERM when the process that started us dies, however it dies.

    By prctl(PR_SET_PDEATHSIG); where `parent` is gone already, ends this process at once.
    """
    if sys.platform != "linux":
        return
    import ctypes
    import signal

    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")
