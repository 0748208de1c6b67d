"""How many files and sockets this process may have open."""

from __future__ import annotations

import os
import resource

# A connection to the server, one to the endpoint with both ends here, those of tool servers and of
# an agent's program, and a share of everything else.
FILES_OF_ROLLOUT = 16


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
