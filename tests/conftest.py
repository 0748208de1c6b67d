"""Fixtures of the end-to-end tests: a small trained model, and real vf-vllm servers."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: processes side by side share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
from filelock import FileLock

from tests.helpers import EXAMPLE_MODULE, ROOT
from verifiers_rl import Orchestrator, RLConfig
from verifiers_rl.inference.client import TOKEN_VARIABLE, InferenceClient, InferenceServerError

# A shell starts commands in the background with Ctrl-C ignored, and a process passes that on.
signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = ["classic"]  # test_foreign.py runs these in the Python that they are for

# All tests of a file run in one process, which has the file's servers. The longest files come
# first, or one process would have nothing to do at the end.
LONGEST_FIRST = (
    *("test_e2e_sync", "test_e2e_train", "test_cli", "test_e2e_rollouts", "test_check"),
    *("test_sharding", "test_trainer"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.stem
        return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)  # which keeps the order within a file


def pytest_report_header() -> str:
    return f"verifiers {version('verifiers')}"


@dataclass
class Server:
    """A running vf-vllm."""

    port: int
    process: subprocess.Popen
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@contextmanager
def running_server(
    model: Path,
    log: Path,
    *flags: str,
    port: int | None = None,
    dtype: str = "float32",
    module: str = "verifiers_rl.inference.server",
) -> Iterator[Server]:
    port = port or free_port()
    command = [sys.executable, "-m", module, "--model", str(model)]
    command += ["--port", str(port), "--dtype", dtype, "--enforce-eager"]
    command += ["--max-model-len", "128", *flags]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}  # vLLM then has more control routes
    # It ends with this process, also where that is killed. Linux would end it with another thread.
    if threading.current_thread() is threading.main_thread():
        environment["VERIFIERS_RL_DIE_WITH_PARENT"] = str(os.getpid())
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        client = InferenceClient("127.0.0.1", port)
        deadline = time.monotonic() + 240
        while True:
            try:
                client.status()
                break
            except InferenceServerError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{error}\n{log.read_text()[-6000:]}") from error
            time.sleep(0.5)
        yield Server(port, process, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                pass  # the SIGKILL below
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all gone
        process.wait()


@pytest.fixture(scope="session", autouse=True)
def token() -> Iterator[str]:
    """One token for all servers and trainers of this test run."""
    patch = pytest.MonkeyPatch()
    patch.setenv(TOKEN_VARIABLE, secrets.token_urlsafe(16))
    yield os.environ[TOKEN_VARIABLE]
    patch.undo()


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's model, trained a little shorter than in the demo, once for all processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "warm_start"
    with FileLock(f"{folder}.lock", timeout=500):
        if not folder.is_dir():
            train_warm_start(folder)
    return folder


def train_warm_start(folder: Path) -> None:
    unfinished = folder.with_name("warm_start_unfinished")
    command = [sys.executable, str(ROOT / "examples" / "warm_start.py")]
    command += [str(EXAMPLE_MODULE), str(unfinished)]
    command += ["--clean-steps", "220", "--noisy-steps", "40"]
    subprocess.run(command, check=True, capture_output=True, timeout=500)
    unfinished.rename(folder)


def processes_of(folder):
    """Ids and command lines of the running processes that this test's vf-rl has started."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"VF_RL_TEST={folder}" in (path / "environ").read_text(errors="replace"):
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:
            pass  # it ended meanwhile, or is not ours
    return found


@pytest.fixture
def make_orchestrator(tmp_path):
    made = []

    def make(
        runner, check_server=lambda: None, *, advantage_fn=None, example_order=None, **options
    ):
        options = {"batch_size": 8, "rollouts_per_example": 4, **options}
        args = RLConfig(output_dir=str(tmp_path), use_cpu=True, **options)
        orchestrator = Orchestrator(
            runner, args, check_server, advantage_fn=advantage_fn, example_order=example_order
        )
        orchestrator.start()
        made.append(orchestrator)
        return orchestrator

    yield make
    for orchestrator in made:
        orchestrator.stop()
    assert not [t for t in threading.enumerate() if t.name == "orchestrator"]
