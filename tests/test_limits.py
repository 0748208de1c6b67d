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


def test_the_soft_limit_is_raised_as_far_as_is_wanted(few_files, capsys):
    assert 90 < limits.raise_open_files(50) <= 101  # it is high enough
    assert limits.rollouts_at_once(100, files_per_rollout=3) == 100
    assert 490 < limits.raise_open_files(0) <= 501
    assert capsys.readouterr().out == ""


def test_a_low_hard_limit_bounds_the_rollouts_in_flight():
    # In a process of its own: a hard limit cannot be raised again.
    script = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (300, 512))\n"
    script += "from verifiers_rl.process.limits import rollouts_at_once\n"
    script += "print(rollouts_at_once(512, 3), r.getrlimit(r.RLIMIT_NOFILE)[0])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    line, found = done.stdout.splitlines()
    fitting, soft = map(int, found.split())
    assert soft == 512 and (512 - 200 - 50) // 3 < fitting <= (512 - 200) // 3
    assert line.startswith(f"max_concurrent=512: {fitting} rollouts run at a time, because each ")
    assert "holds 3 of the 512 files" in line
