"""Files and sockets that may be open."""

from tests.helpers import run_python


def test_a_low_hard_limit_is_reached_and_no_error():
    # In a process of its own: a hard limit cannot be raised again.
    script = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (300, 512))\n"
    script += "from verifiers_rl.process.limits import raise_open_files\n"
    script += "raise_open_files(9999); print(r.getrlimit(r.RLIMIT_NOFILE))"
    assert run_python("-c", script).stdout == "(512, 512)\n"
