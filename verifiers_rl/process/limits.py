"""How many files and sockets this process may have open."""

from __future__ import annotations

import os
import resource

RESERVED = 200  # files of everything except rollouts: checkpoints, logs, the weight sync, threads


def raise_open_files(num_wanted: int) -> int:
    """Raise this process's soft limit of open files so that `num_wanted` more files can be opened,
    or fewer if the hard limit is lower.

    Returns:
        how many more files can be opened.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return num_wanted
    num_open = len(os.listdir("/dev/fd"))
    if soft < num_open + num_wanted:
        is_bounded = hard != resource.RLIM_INFINITY
        soft = min(num_open + num_wanted, hard) if is_bounded else num_open + num_wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft - num_open


def rollouts_at_once(max_concurrent: int, files_per_rollout: int) -> int:
    """Return `max_concurrent`, or fewer (and print it) if too few files may be open for that."""
    if not files_per_rollout:
        return max_concurrent
    num_files = raise_open_files(max_concurrent * files_per_rollout + RESERVED) - RESERVED
    fitting = max(num_files // files_per_rollout, 1)
    if fitting < max_concurrent:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        print(
            f"max_concurrent={max_concurrent}: {fitting} rollouts run at a time, because each "
            f"holds {files_per_rollout} of the {hard} files that a process here may have open "
            "(the hard limit, `ulimit -Hn`)",
            flush=True,
        )
    return min(fitting, max_concurrent)
