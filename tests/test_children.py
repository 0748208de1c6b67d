"""Processes of a run, here and behind actors of Ray: one contract."""

import signal

import pytest

from tests.conftest import is_running, wait_until
from verifiers_rl.cli.children import LocalChild


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of this machine alone."""
    ray = pytest.importorskip("ray", reason="the ray extra is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_DEDUP_LOGS", "0")
        patch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
        ray.init(
            address="local", num_cpus=4, include_dashboard=False, object_store_memory=80_000_000
        )
        try:
            yield ray
        finally:
            ray.shutdown()


@pytest.fixture(params=["local", pytest.param("ray", marks=[pytest.mark.slow])])
def start(request, tmp_path):
    """Starts a child with this code and these words."""
    started = []

    def start(code, *words):
        command, env = ["-c", code, *map(str, words)], {"OF_THE_RUN": "1"}
        if request.param == "local":
            child = LocalChild("one", command, env, tmp_path / "log")
        else:
            from verifiers_rl.cluster.ray_engine import RayChild

            ray = request.getfixturevalue("cluster")
            group = ray.util.placement_group([{"CPU": 1}])
            assert group.wait(60)
            child = RayChild("one", ray, (group, 0, 0), lambda address: (command, env), 60.0)
            child.find_address()
        started.append(child)
        return child

    yield start
    for child in started:
        child.stop(0.0)


@pytest.mark.parametrize(
    "end, status, said",
    [("raise SystemExit(3)", 3, "status 3"), ("os.kill(0, 9)", 128 + signal.SIGKILL, "status 137")],
)
def test_it_has_an_end_and_last_lines(start, end, status, said):
    child = start(f"import os; print('a\\rb\\n\\nc', os.environ['OF_THE_RUN'], flush=True); {end}")
    assert child.wait(30.0) and child.poll() == status
    assert child.end == f"ended with {said}" and not child.is_lost
    assert child.last_lines()[-3:] == ["a", "b", "c 1"]


def test_what_it_has_started_is_ended_with_it(start, tmp_path):
    code = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {sleeper.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
while True:
    time.sleep(300)
"""
    child = start(code, tmp_path / "pids")
    wait_until((tmp_path / "pids").exists)
    pids = list(map(int, (tmp_path / "pids").read_text().split()))
    assert child.poll() is None and all(map(is_running, pids))
    child.stop(0.5)
    wait_until(lambda: not any(map(is_running, pids)))
    assert child.poll() is not None


def test_it_is_asked_to_end_once(start, tmp_path):
    code = """
import os, signal, sys, time
up, asked, again = sys.argv[1:]
def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one would end it, with status 143
    open(asked, "w").close()
    while not os.path.exists(again):
        time.sleep(0.05)
    time.sleep(0.5)
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
open(up, "w").close()
time.sleep(300)
"""
    up, asked, again = (tmp_path / name for name in ("up", "asked", "again"))
    child = start(code, up, asked, again)
    wait_until(up.exists)
    child.terminate()
    wait_until(asked.exists)
    child.terminate()
    again.touch()
    child.stop()
    assert child.poll() == 3
