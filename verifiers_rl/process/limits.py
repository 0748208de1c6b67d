"""How many files and sockets this process may have open."""

from __future__ import annotations

import os
import resource

# A connection to the server, one to the endpoint with both ends here, those of tool servers and of
# an agent's program, and a share of everything else.
FILES_OF_ROLLOUT = 16


def raise_open_files(num_wanted: int) -> None:
    """Raise this process's soft limit of open files so that `num_wanted` more files can be opened,
    or fewer if the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/dev/fd")) + num_wanted
    if soft < wanted:  # neither limit can be infinite: the kernel has one of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
