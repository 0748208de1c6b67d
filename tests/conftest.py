"""Fixtures of the end-to-end tests: a small trained model, and real vf-vllm servers."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: processes side by side share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import pytest
from filelock import FileLock

from tests.helpers import (
    EXAMPLE_MODULE,
    StubRunner,
    StubSink,
    StubSource,
    environment_with,
    make_tiny_model,
    make_tokenizer,
    run_python,
    stub_servers,
)
from verifiers_rl import Orchestrator, RLConfig, RLTrainer
from verifiers_rl.cli.config import load_run_config
from verifiers_rl.cli.supervise import answers
from verifiers_rl.inference.client import TOKEN_VARIABLE

# A shell starts commands in the background with Ctrl-C ignored, and a process passes that on.
signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = ["classic"]  # test_foreign.py runs these in the Python that they are for

# All tests of a file run in one process, which has the file's servers. The longest files come
# first, or one process would have nothing to do at the end.
LONGEST_FIRST = (
    *("test_e2e_sync", "test_e2e_train", "test_cli", "test_e2e_rollouts", "test_check"),
    *("test_sharding", "test_trainer"),
)


def pytest_collection_modifyitems(items):
    def place(item):
        name = item.path.stem
        return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)  # which keeps the order within a file


def pytest_report_header():
    return f"verifiers {version('verifiers')}"


def wait_until(condition, seconds=30.0, what=lambda: ""):
    """Wait for what nobody tells of; `what` is shown if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Started:
    """A process with its output in a file. It ends with the block, and what it has started.

    Attributes:
        port, url: where it listens on loopback, if it does.
    """

    def __init__(self, command, environment, log, port=None):
        self.command, self.environment, self.log = command, environment, log
        self.port, self.url = port, f"http://127.0.0.1:{port}"

    def __enter__(self):
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):  # the SIGKILL below
                self.process.wait(20)
        with suppress(ProcessLookupError):  # all gone
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def said(self):
        return self.log.read_text(errors="replace")

    def wait_until(self, condition, seconds=240.0):
        """Wait for this while the process runs."""
        deadline = time.monotonic() + seconds
        while True:
            is_over = self.process.poll() is not None or time.monotonic() > deadline
            if condition():
                return
            if is_over:
                raise RuntimeError(self.said()[-6000:])
            time.sleep(0.2)

    def wait_for(self, pattern):
        """Wait for this in its output."""
        self.wait_until(lambda: re.search(pattern, self.said()))


@contextmanager
def running_server(
    model,
    log,
    *flags,
    port=None,
    dtype="float32",
    module="verifiers_rl.inference.server",
):
    port = port or free_port()
    command = [sys.executable, "-m", module, "--model", model]
    command += ["--port", str(port), "--dtype", dtype, "--enforce-eager"]
    command += ["--max-model-len", "128", *flags]
    # vLLM then has more control routes. Tests' own servers are in the repository.
    environment = environment_with(VLLM_SERVER_DEV_MODE="1")
    # It ends with this process, also where that is killed. Linux would end it with another thread.
    if threading.current_thread() is threading.main_thread():
        environment["VERIFIERS_RL_DIE_WITH_PARENT"] = str(os.getpid())
    with Started(command, environment, log, port) as started:
        started.wait_until(lambda: answers(("127.0.0.1", port)))
        yield started


@pytest.fixture(scope="session")
def run_server(tmp_path_factory):
    """As `running_server`, with a log in a folder of its own."""

    def run_server(model, *flags, **options):
        log = tmp_path_factory.mktemp("server") / "server.log"
        return running_server(model, log, *flags, **options)

    return run_server


@pytest.fixture(scope="session", autouse=True)
def token():
    """One token for all servers and trainers of this test run."""
    patch = pytest.MonkeyPatch()
    patch.setenv(TOKEN_VARIABLE, secrets.token_urlsafe(16))
    yield os.environ[TOKEN_VARIABLE]
    patch.undo()


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory):
    """The example's model, trained a little shorter than in the demo, once for all processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "warm_start"
    with FileLock(f"{folder}.lock", timeout=500):
        if not folder.is_dir():
            train_warm_start(folder)
    return folder


def train_warm_start(folder):
    unfinished = folder.with_name("warm_start_unfinished")
    words = ["examples/warm_start.py", EXAMPLE_MODULE, unfinished]
    run_python(*words, "--clean-steps", "220", "--noisy-steps", "40")
    unfinished.rename(folder)


def is_running(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


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


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


def options_of_tiny_run(folder, **options):
    """It saves checkpoints only with `save_steps`, and evaluates only with `eval_steps`."""
    defaults = {
        "output_dir": folder,
        "use_cpu": True,
        "use_lora": False,
        "micro_batch_size": 4,
        "max_seq_len": 32,
        "learning_rate": 1e-2,
        "save_strategy": "steps" if "save_steps" in options else "no",
        "eval_strategy": "steps" if "eval_steps" in options else "no",
        "disable_tqdm": True,
    }
    return defaults | options


@pytest.fixture
def folder(tmp_path):
    """Of the runs that `make_trainer` makes."""
    return tmp_path / "run"


@pytest.fixture
def make_trainer(tokenizer, folder):
    """Makes trainers of a tiny model, with stand-ins for environment and server."""

    def make(
        model=None, source=None, sink=None, loss_fn=None, callbacks=(), peft_config=None,
        kind=RLTrainer, **options,
    ):  # fmt: skip
        options = {"batch_size": 8, "rollouts_per_example": 4, "max_steps": 3, **options}
        args = RLConfig(**options_of_tiny_run(folder, **options))
        return kind(
            model or make_tiny_model(), None, args, tokenizer,
            loss_fn, peft_config, orchestrator=source or StubSource(),
            weight_sync=sink or StubSink(), callbacks=list(callbacks),
        )  # fmt: skip

    return make


@pytest.fixture
def make_whole(tokenizer, tmp_path, monkeypatch):
    """Makes trainers with their own parts, except stand-ins for the servers and the rollouts."""
    runner, servers = StubRunner(), stub_servers(monkeypatch)
    monkeypatch.setattr("verifiers_rl.wiring.make_runner", lambda *args: runner)

    def make(kind=RLTrainer, env="env", parts=None, **options):
        options |= {"output_dir": f"{tmp_path}/run", "use_cpu": True, "disable_tqdm": True}
        args = RLConfig(**options, overwrite_output_dir=True, save_strategy="no")
        return kind(make_tiny_model(), env, args, tokenizer, **parts or {})

    make.runner, make.servers = runner, servers
    return make


@pytest.fixture
def kept_handlers():
    """Signal handlers as they were, afterwards."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def kept_path(monkeypatch):
    """Python's path as it was, afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def run_main(monkeypatch, capfd, kept_handlers, kept_path):
    """Runs main() of a command with these words in this process, which saves imports. Returns its
    exit status, and what it printed to stdout and stderr.
    """
    monkeypatch.setenv(TOKEN_VARIABLE, os.environ[TOKEN_VARIABLE])  # vf-rl sets one of its own

    def run_main(main, *words):
        monkeypatch.setattr(sys, "argv", ["vf", *map(str, words)])
        capfd.readouterr()
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code
        return status, *capfd.readouterr()

    return run_main


@pytest.fixture
def unknown_models(monkeypatch):
    """Models of TOMLs are not looked for."""
    monkeypatch.setattr("verifiers_rl.cli.config.model_error", lambda name: None)


@pytest.fixture
def compose(tmp_path):
    """Writes files, each into a folder of its own, and loads them under these words."""

    def compose(*texts, words=""):
        files = []
        for number, text in enumerate(texts):
            files.append(tmp_path / str(number) / "config.toml")
            files[-1].parent.mkdir(exist_ok=True)
            files[-1].write_text(text)
        words = words.split() if isinstance(words, str) else words
        return load_run_config(files, words, checks_model=False)

    return compose


@pytest.fixture
def make_orchestrator(tmp_path):
    made = []

    def make(
        runner, check_server=lambda: None, *, advantage_fn=None, example_order=None, **options
    ):
        options = {"batch_size": 8, "rollouts_per_example": 4, **options}
        args = RLConfig(output_dir=tmp_path, use_cpu=True, **options)
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
