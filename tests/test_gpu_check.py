"""`make gpu-check` itself, with checks that need no GPU."""

import re
from pathlib import Path

import pytest

from tests.helpers import run_python

# In a process of its own, because it ends all its descendants.
SCRIPT = """
import sys, time
from pathlib import Path
sys.path.append("benchmarks")
import gpu_check
from gpu_check import Check, run_all, table

gpu_check.GRACE_S = 0.5

def python(code, *args):
    return [sys.executable, "-c", code, *args]

folder = Path(sys.argv[1])
hangs = '''
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
own = subprocess.Popen(sleeper, start_new_session=True)
# Its parent ends, so it is nobody's child.
orphan = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True).pid)"
read, write = os.pipe()
subprocess.Popen([sys.executable, "-c", orphan, *sleeper], stdout=write).wait()
open(sys.argv[1], "w").write(f"{os.getpid()} {own.pid} {os.read(read, 20).decode()}")
time.sleep(600)
'''
checks = [
    Check("good", python("print('figure: 1 | 2'); print('figure: 3 | 4')"), 20),
    Check("bad", python("raise ValueError('no such | thing')"), 20),
    Check("hangs", python(hangs, str(folder / "pids")), 5),
    Check("silent", python("pass"), 20),
    Check("needs more", python("1/0"), 20, num_gpus=8),
    Check("needs a package", python("1/0"), 20, packages=["no_such_package"]),
    Check("tests", python("print('2 passed in 1s')"), 20, figure=None, is_test=True),
    Check("no tests", python("print('SKIPPED [1] x.py:1: no GPU'); print('1 skipped in 1s')"), 20,
          figure=None, is_test=True),
    Check("sees its environment", python("import os; print('figure:', os.environ['X'])"), 20,
          env={"X": "y"}),
]
rows = run_all(checks, 2, folder, minutes=1)
print("\\n".join(table(rows)))
late = run_all(checks[:1], 2, folder, minutes=0.1)
print("\\n".join(table(late)))
"""


@pytest.mark.slow
def test_checks_that_fail_or_hang_do_not_stop_the_others_and_leave_nothing_behind(tmp_path):
    done = run_python("-c", SCRIPT, tmp_path, CUDA_VISIBLE_DEVICES="")
    said = re.sub(r"\| \d+ \|", "| N |", f"\n{done.stdout}")
    for line in (
        "| check | result | s | figure |",
        "| good | pass | N | 3 / 4 |",
        "| bad | FAIL (status 1: ValueError: no such / thing) | ",
        "| hangs | FAIL (not done after 5 s: ",
        "| silent | FAIL (it printed no figure) | ",
        "| needs more | skipped (needs 8 GPUs) | ",
        "| needs a package | skipped (not installed: no_such_package) | ",
        "| tests | pass | N | 2 passed in 1s |",
        "| no tests | skipped (SKIPPED [1] x.py:1: no GPU) | ",
        "| sees its environment | pass | N | y |",
        "| good | skipped (no time left) | ",  # the second time
    ):
        assert f"\n{line}" in said
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 3
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
