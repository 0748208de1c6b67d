"""The GPUs of this machine, as far as this process may use them."""

from __future__ import annotations

import os
import subprocess
from functools import cache

LIST_DEADLINE_S = 30.0


def visible_gpus() -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES names, each GPU once, or else the numbers of those that
    `nvidia-smi` lists. torch could say it too, but takes seconds to import.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(_num_listed())]
    names = dict.fromkeys(name.strip() for name in visible.split(","))
    return [name for name in names if name not in ("", "-1")]  # -1 stands for none


def default_gpus() -> int:
    """Return how many GPUs a server or a trainer has whose TOML does not say it."""
    return int(bool(visible_gpus()))


@cache  # it may take seconds
def _num_listed() -> int:
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=LIST_DEADLINE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0  # there is no driver, or it hangs
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
