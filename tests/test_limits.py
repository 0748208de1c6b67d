"""Files and sockets that may be open."""

import os
import resource
import subprocess
import sys

import pytest

from verifiers_rl.process import limits

FILES = resource.RLIMIT_NOFILE


@pytest.fixture
def few_files():
    """A soft limit of 100 more than are open."""
    soft, hard = resource.getrlimit(FILES)
    resource.setrlimit(FILES, (len(os.listdir("/dev/fd")) + 100, hard))
    yield
    resource.setrlimit(FILES, (soft, hard))


def num_that_can_be_opened():
    return resource.getrlimit(FILES)[0] - len(os.listdir("/dev/fd"))


def test_the_soft_limit_is_raised_as_far_as_is_wanted(few_files):
    limits.raise_open_files(50)
    assert 90 < num_that_can_be_opened() <= 101  # it is high enough
    limits.raise_open_files(500)
    assert 490 < num_that_can_be_opened() <= 501


def test_a_low_hard_limit_is_reached_and_no_error():
    # In a process of its own: a hard limit cannot be raised again.
    script = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (300, 512))\n"
    script += "from verifiers_rl.process.limits import raise_open_files\n"
    script += "raise_open_files(9999); print(r.getrlimit(r.RLIMIT_NOFILE))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "(512, 512)\n"
