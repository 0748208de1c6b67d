import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import free_port, processes_of
from tests.helpers import (
    ROOT,
    load_example,
    make_tiny_model,
    write_environment,
)
from verifiers_rl.cli import plan, rl, train
from verifiers_rl.cli.config import RunConfig, TomlError, load_run_config
from verifiers_rl.cli.plan import server_flags
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.inference.port import reserve_port
from verifiers_rl.inference.server import server_cores
from verifiers_rl.sft.main import SFTRunConfig


@pytest.fixture
def model_folder(tmp_path):
    make_tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def write_toml(tmp_path, model_folder):
    def write(text='[env]\nid = "e"\n', model=f'model = "./{"model"}"\n'):
        path = tmp_path / "config.toml"
        path.write_text(model + text)
        return path

    return write


@pytest.fixture
def run_here(monkeypatch, capfd):
    """Runs vf-rl or vf-train to its end in this process, which saves the imports of another one."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    modules = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the TOML's folder is put there
    monkeypatch.setenv(TOKEN_VARIABLE, os.environ[TOKEN_VARIABLE])  # vf-rl sets one of its own

    def run_here(command, *words):
        monkeypatch.setattr(sys, "argv", [f"vf-{command}", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            (rl if command == "rl" else train).main()
        stdout, stderr = capfd.readouterr()
        return SimpleNamespace(returncode=ended.value.code, stdout=stdout, stderr=stderr)

    yield run_here
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name in {"tiny_env", "given"} & (set(sys.modules) - modules):
        del sys.modules[name]  # another test has another one


def test_a_missing_model_is_one_clear_error(write_toml, tmp_path):
    with pytest.raises(TomlError, match="model is missing"):
        load_run_config(write_toml(model=""))
    with pytest.raises(TomlError, match="no such folder"):
        load_run_config(write_toml(model='model = "./nowhere"\n'))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TomlError, match=r"the folder has no config\.json"):
        load_run_config(write_toml(model='model = "./empty"\n'))
    with pytest.raises(TomlError, match="No such file"):
        load_run_config(tmp_path / "none.toml")


def test_a_model_beside_the_toml_is_found_by_a_dot(write_toml, monkeypatch, tmp_path):
    # The hub's client has read HF_HUB_OFFLINE by now; it would wait for the hub.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    toml = write_toml(model='model = "model"\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(TomlError, match=r"write '\./model'$"):
        load_run_config(toml)


def test_a_toml_of_other_editors_is_read_or_refused_in_one_line(write_toml, model_folder):
    toml = write_toml()
    toml.write_bytes(b"\xef\xbb\xbf" + toml.read_bytes())
    assert load_run_config(toml).model == str(model_folder)
    toml.write_bytes('model = "modèle"'.encode("latin-1"))
    with pytest.raises(TomlError, match=r"config\.toml: 'utf-8' codec can't decode"):
        load_run_config(toml)


def test_flags_follow_from_keys_and_values():
    args = {
        "max_model_len": 8,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "a": ["x", "y"],
        "b": {"c": 1},
    }
    assert server_flags(args) == [
        "--max-model-len", "8", "--enforce-eager", "--no-enable-prefix-caching",
        "--a", "x", "y", "--b", '{"c": 1}',
    ]  # fmt: skip


def test_vf_train_becomes_the_launcher_of_a_rank_for_each_gpu(write_toml, monkeypatch):
    class Became(Exception):
        pass

    def execv(path, words):
        raise Became(words)

    toml = write_toml('[env]\nid = "e"\n[trainer]\ngpus = 2\n')
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(os, "execv", execv)
    for command, kind in (("train", RunConfig), ("sft", SFTRunConfig)):
        table = '[data]\ntrain = "a.jsonl"\n' if command == "sft" else '[env]\nid = "e"\n'
        toml.write_text(f'model = "./model"\n{table}[trainer]\ngpus = 2\n')
        monkeypatch.setattr(kind, "prepare", lambda self: None)
        monkeypatch.setattr(sys, "argv", [f"vf-{command}", "@", str(toml), "--resume"])
        with pytest.raises(Became) as became:
            train.train(f"vf-{command}", kind)
        words = became.value.args[0]
        assert words[:4] == [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        assert words[-5:] == ["-m", kind.MODULE, "@", str(toml), "--resume"]
        assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "120"


def test_a_flag_of_the_toml_is_ours_only_where_it_is_not_set(write_toml):
    toml = '[env]\nid = "e"\n[inference]\ngpus = 2\n[inference.args]\n'
    config = load_run_config(
        write_toml(f"{toml}max_model_len = 9999\npipeline_parallel_size = 2\n")
    )
    flags = plan.plan_servers(config)[0].command("h", 7)
    # Ours, which follow from the trainer's options, would win as the last.
    assert (
        flags.count("--max-model-len") == 1 and flags[flags.index("--max-model-len") + 1] == "9999"
    )
    assert "--tensor-parallel-size" not in flags
    with pytest.raises(TomlError, match=r"max_model_len=64: must be at least max_seq_len=2048 of"):
        plan.plan_servers(load_run_config(write_toml(f"{toml}max_model_len = 64\n")))
    with pytest.raises(TomlError, match="has 'port'; set vllm_server_port in"):
        load_run_config(write_toml(f"{toml}port = 3\n"))
    with pytest.raises(TomlError, match="has 'max-model-len'; write max_model_len"):
        load_run_config(write_toml(f'{toml}"max-model-len" = 64\n'))


# Importing vLLM takes many seconds. This process does it once, and each case is a fork of it.
UP_TO_VLLM = """
import json, os, sys
import verifiers_rl  # before vLLM, for torchvision
import torch, uvloop
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from verifiers_rl.inference import server

make_arg_parser(FlexibleArgumentParser())  # vLLM keeps what it finds out about its options

async def stop(args):
    sys.exit(f"vLLM would listen on {args.host}, behind {args.middleware}")

server.serve = stop
for line in sys.stdin:
    words, environment, *outputs = json.loads(line)
    if (child := os.fork()) == 0:
        for descriptor, path in enumerate(outputs, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = words
        try:
            server.main()
        except SystemExit as ended:  # as Python ends, but unloading vLLM takes seconds
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1 if isinstance(ended.code, str) else ended.code or 0)
        sys.exit("the server's main() returned")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def vf_vllm(tmp_path_factory):
    """Runs vf-vllm up to where vLLM would listen, in a process of its own."""
    folder = tmp_path_factory.mktemp("vf_vllm")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", UP_TO_VLLM], **pipes) as process:

        def run(*words, environment=None):
            outputs = [folder / "stdout", folder / "stderr"]
            case = [words, environment or dict(os.environ), *map(str, outputs)]
            print(json.dumps(case), file=process.stdin, flush=True)
            status = process.stdout.readline()
            assert status, "the process that imports vLLM has ended"
            stdout, stderr = (path.read_text() for path in outputs)
            return SimpleNamespace(returncode=int(status), stdout=stdout, stderr=stderr)

        yield run


@pytest.mark.slow
def test_listening_beyond_this_machine_is_warned_of(vf_vllm, model_folder):
    def output(*flags):
        return vf_vllm("--model", str(model_folder), *flags, "--port", str(free_port())).stderr

    beyond = output("--host", "0.0.0.0", "--middleware", "mine.Routes")
    # The last is the first that a request meets: routes of one's own are served.
    assert beyond.rstrip().endswith("Gateway', 'mine.Routes']")
    assert "WARNING: --host 0.0.0.0 lets other machines reach this server" in beyond
    assert "vLLM would listen on 0.0.0.0" in beyond
    alone = output()
    assert "vLLM would listen on 127.0.0.1" in alone and "WARNING: --host" not in alone


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, "", "the run's own"])
def test_vf_vllm_alone_makes_a_token_and_says_where_it_is(vf_vllm, model_folder, tmp_path, given):
    environment = {k: v for k, v in os.environ.items() if k != TOKEN_VARIABLE}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache")} | (
        {TOKEN_VARIABLE: given} if given is not None else {}
    )
    words = ["--model", str(model_folder), "--port", str(free_port())]
    done = vf_vllm(*words, environment=environment)
    assert "vLLM would listen on" in done.stderr
    named = re.findall(r"finds the server's token in (\S+);", done.stderr)
    saved = [str(path) for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert named == saved and len(saved) == (0 if given else 1)
    for path in saved:  # what is printed often ends in a log that others can read
        token = Path(path).read_text()
        assert len(token) > 20 and token not in done.stderr + done.stdout


@pytest.mark.slow
def test_a_bad_flag_of_vllm_and_a_taken_port_are_one_line(vf_vllm, model_folder):
    port = free_port()
    words = ["--port", str(port), "--model", str(model_folder)]
    command = [sys.executable, "-m", "verifiers_rl.inference.server", *words]
    options = {"stderr": subprocess.PIPE, "text": True}
    with (
        reserve_port("127.0.0.1", port),
        subprocess.Popen([*command, "--max-modle-len", "5"], **options) as bad,  # loads vLLM
    ):
        taken = vf_vllm(*words)
        said = [text.splitlines() for text in (bad.communicate(timeout=120)[1], taken.stderr)]
    assert (bad.returncode, taken.returncode) == (2, 1)
    line = "vf-vllm: error: --max-modle-len: no such flag; did you mean --max-model-len?"
    assert said[0][-1] == line and not any("usage:" in line for line in said[0])
    message = f"vf-vllm: cannot listen on 127.0.0.1:{port}: another vf-rl or vf-vllm has reserved"
    assert said[1][-1].startswith(message)


def test_on_the_cpu_the_server_leaves_half_of_the_cores_to_the_trainer():
    assert [server_cores([0, 1, 2, 3]), server_cores([4, 7, 9]), server_cores([5])] == [
        "0,1",
        "4",
        "5",
    ]
    tensor_parallel = [server_cores(list(range(8)), 2), server_cores([0, 1], 2)]
    assert tensor_parallel == ["0,1|2,3", "0|1"]


@pytest.mark.slow
def test_the_training_script_describes_a_valid_run(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "reverse_text"))
    script = load_example("reverse_text/train")
    seen, calls = {}, []

    class Recorder:
        def __init__(self, **options):
            seen.update(options)

        def evaluate(self):
            calls.append("evaluate")

        def train(self):
            calls.append("train")

    monkeypatch.setattr(script, "RLTrainer", Recorder)
    script.main()
    assert calls == ["evaluate", "train", "evaluate"]
    assert seen["args"].groups_per_batch == 8
    train, held_out = (
        {task.data.prompt for task in taskset}
        for taskset in (seen["env"], seen["env"].eval_taskset)
    )
    assert len(train) == 4096 and len(held_out) == 256 and not train & held_out


def run(module, *args, **environment):
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[env]\n", "[env]: id is missing"),
        (
            '[env]\nid = "e"\n[trainer]\ngpus = 0\n[trainer.args]\nbatch_size = 100\n',
            "batch_size=100: must be a multiple of rollouts_per_example=16",
        ),
    ],
)
def test_a_wrong_toml_ends_vf_train_with_status_1(write_toml, run_here, text, message):
    check_refusal(run_here("train", "@", write_toml(text)), "train", message)


@pytest.mark.parametrize("command", ["rl", "train"])
def test_the_process_of_either_command_ends_with_status_1(write_toml, command):
    done = run(f"verifiers_rl.cli.{command}", "@", write_toml("[env]\n"))
    check_refusal(done, command, "[env]: id is missing")


def check_refusal(done, command, message):
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith(f"vf-{command}: error: ")
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("how", ["listens", "reserves"])
def test_a_port_in_use_is_one_clear_error(write_toml, run_here, how):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) if how == "listens" else reserve_port("", port):
        toml = write_toml(
            '[env]\nid = "e"\n[inference]\ngpus = 0\n[trainer]\ngpus = 0\n'
            f"[trainer.args]\nvllm_server_port = {port}\n"
        )
        done = run_here("rl", "@", toml)  # "e" is no environment: the port comes first
    assert done.returncode == 1
    reason = "Address already in use" if how == "listens" else "another vf-rl or vf-vllm has"
    assert f"cannot listen on 127.0.0.1:{port}: {reason}" in done.stderr
    assert "vllm_server_port" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def write_run(tmp_path, write_toml):
    """The environment `tiny_env` and a TOML that trains a tiny model on it."""

    def write(questions, trainer_args):
        env = write_environment(tmp_path, "tiny_env", dict.fromkeys(questions, ""))
        load_example("warm_start").make_tokenizer().save_pretrained(tmp_path / "model")
        return write_toml(
            f"{env}[inference]\ngpus = 0\n[trainer]\ngpus = 0\n[trainer.args]\n{trainer_args}"
        )

    return write


@pytest.mark.parametrize("command", ["rl", "train"])
def test_a_used_folder_is_one_clear_error_before_anything_starts(
    write_toml, tmp_path, monkeypatch, capsys, command
):
    (tmp_path / "run" / "checkpoint-4").mkdir(parents=True)
    state = tmp_path / "run" / "checkpoint-4" / "trainer_state.json"
    state.write_text('{"global_step": 4}')
    toml = write_toml(
        '[env]\nid = "e"\n[inference]\ngpus = 0\n[trainer]\ngpus = 0\n[trainer.args]\n'
        f'output_dir = "{tmp_path}/run"\nmax_steps = 4\n'
    )

    def said(*words):
        monkeypatch.setattr(sys, "argv", [f"vf-{command}", "@", str(toml), *words])
        with pytest.raises(SystemExit) as ended:
            rl.main() if command == "rl" else train.train()
        assert ended.value.code == 1
        return capsys.readouterr().err.splitlines()[-1]

    assert said().startswith(
        f"vf-{command}: error: output_dir='{tmp_path}/run' holds a run already"
    )
    assert "checkpoint-4 is already at step 4 of 4: raise max_steps" in said("--resume")
    state.unlink()
    assert "holds no finished checkpoint to resume from" in said("--resume")


@pytest.mark.slow
def test_no_server_is_one_clear_error(write_run, run_here, tmp_path):
    options = f'output_dir = "{tmp_path}/run"\nvllm_server_port = 1\nvllm_server_timeout = 0.5\n'
    done = run_here("train", "@", write_run(["a"], options))
    assert done.returncode == 1
    assert "no server at http://127.0.0.1:1 after 0.5 s (vllm_server_timeout)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("", "'env': it has no tasks"),
        ("raise KeyError('nothing here')", "KeyError: 'nothing here'"),
    ],
)
def test_an_environment_that_cannot_work_ends_vf_rl_before_its_server_is_up(
    write_run, run_here, tmp_path, monkeypatch, code, why
):
    # A server that is never up. The trainer is the real one.
    server = ["-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(plan.ServerPlan, "command", lambda *_: server)
    monkeypatch.setenv("VF_RL_TEST", str(tmp_path))
    toml = write_run([], f"vllm_server_port = {free_port()}\nmax_seq_len = 32\n")
    path = tmp_path / "tiny_env.py"
    path.write_text(f"{code}\n{path.read_text()}")
    done = run_here("rl", "@", toml, "--no-tmux")
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith("vf-train: error: ") and why in said
    assert processes_of(tmp_path) == {}
