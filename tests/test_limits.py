"""Files and sockets that may be open."""

import os
import resource

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


def test_the_soft_limit_is_raised_as_far_as_is_wanted(few_files):
    assert 90 < limits.raise_open_files(50) <= 101  # it is high enough
    assert 490 < limits.raise_open_files(500) <= 501
