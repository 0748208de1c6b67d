"""End a process when the process that started it ends."""

from __future__ import annotations

import os
import sys
from typing import Any

# Set in a rollout worker, which may import the script that trains.
is_rollout_worker = False
# Set in a script that `vf-rl` has started (cli/train.py). Before rank 0 waits for the server, this
# is called with the policy, its PEFT config or None, and the options.
ask_for_server: Any = None


def die_with_parent(parent: int) -> None:
    """Get SIGTERM when the process that started us dies, however it dies.

    Uses prctl(PR_SET_PDEATHSIG). If `parent` is gone already, this process ends at once.
    """
    import ctypes
    import signal

    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")
