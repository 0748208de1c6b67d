import json
import os
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import free_port, processes_of
from tests.helpers import (
    make_tiny_model,
    write_environment,
)
from tests.test_run_folder import save
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
    def write(text='[env]\nid = "e"\n', model='model = "./model"\n'):
        path = tmp_path / "config.toml"
        path.write_text(model + text)
        return path

    return write


@pytest.fixture
def error_of(run_main):
    """Runs vf-rl or vf-train to its bad end; returns its last line."""

    def error_of(command, *words):
        status, _, said = run_main(command.main, *words)
        assert status == 1 and "Traceback" not in said
        return said.splitlines()[-1]

    return error_of


def test_a_model_or_a_file_that_is_not_there_is_one_clear_error(write_toml, monkeypatch, tmp_path):
    # The hub's client has read HF_HUB_OFFLINE by now; it would wait for the hub.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for model, problem in (
        ("./nowhere", "no such folder"),
        ("./empty", r"the folder has no config\.json"),
        ("model", r"write '\./model'$"),  # it is beside the TOML
    ):
        with pytest.raises(TomlError, match=problem):
            load_run_config(write_toml(model=f'model = "{model}"\n'))
    with pytest.raises(TomlError, match="No such file"):
        load_run_config(tmp_path / "none.toml")


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


@pytest.mark.parametrize(
    "command, kind, table",
    [("train", RunConfig, '[env]\nid = "e"'), ("sft", SFTRunConfig, '[data]\ntrain = "a.jsonl"')],
)
def test_vf_train_becomes_the_launcher_of_a_rank_for_each_gpu(
    write_toml, monkeypatch, command, kind, table
):
    class Became(Exception):
        pass

    def execv(path, words):
        raise Became(words)

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(kind, "prepare", lambda self: None)
    toml = write_toml(f"{table}\n[trainer]\ngpus = 2\n")
    monkeypatch.setattr(sys, "argv", [f"vf-{command}", "@", str(toml), "--resume"])
    with pytest.raises(Became) as became:
        train.train(f"vf-{command}", kind)
    words = became.value.args[0]
    assert words[:4] == [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    assert words[-5:] == ["-m", kind.MODULE, "@", str(toml), "--resume"]
    assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "120"


def test_a_flag_of_the_toml_is_ours_only_where_it_is_not_set(write_toml):
    toml = '[env]\nid = "e"\n[inference]\ngpus = 2\n[inference.args]\n'
    toml += "pipeline_parallel_size = 2\n"
    (server,) = plan.plan_servers(load_run_config(write_toml(f"{toml}max_model_len = 9999\n")))
    flags = server.command("h", 7)
    # Ours, which follow from the trainer's options, would win as the last.
    assert flags.count("--max-model-len") == 1 and "9999" in flags
    assert "--tensor-parallel-size" not in flags
    with pytest.raises(TomlError, match=r"max_model_len=64: must be at least max_seq_len=2048 of"):
        plan.plan_servers(load_run_config(write_toml(f"{toml}max_model_len = 64\n")))


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
@pytest.mark.parametrize("is_of_a_run", [False, True])
def test_vf_vllm_alone_says_where_its_token_is_and_who_reaches_it(
    vf_vllm, model_folder, tmp_path, is_of_a_run
):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = ["--model", str(model_folder), "--port", str(free_port())]
    if not is_of_a_run:
        environment[TOKEN_VARIABLE] = ""
        words += ["--host", "0.0.0.0", "--middleware", "mine.Routes"]
    said = vf_vllm(*words, environment=environment)
    warns = "WARNING: --host 0.0.0.0 lets other machines reach this server" in said.stderr
    assert warns == (not is_of_a_run)
    assert f"vLLM would listen on {'127.0.0.1' if is_of_a_run else '0.0.0.0'}" in said.stderr
    # The last is the first that a request meets: routes of one's own are served.
    assert said.stderr.rstrip().endswith("]" if is_of_a_run else "Gateway', 'mine.Routes']")
    named = re.findall(r"finds the server's token in (\S+);", said.stderr)
    saved = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert named == list(map(str, saved)) and len(saved) == (not is_of_a_run)
    for path in saved:  # what is printed often ends in a log that others can read
        token = path.read_text()
        assert len(token) > 20 and token not in said.stderr + said.stdout


@pytest.mark.slow
def test_a_bad_flag_of_vllm_and_a_taken_port_are_one_line(vf_vllm, model_folder):
    port = free_port()
    words = ["--port", str(port), "--model", str(model_folder)]
    bad = vf_vllm(*words, "--max-modle-len", "5")
    line = "vf-vllm: error: unrecognized arguments: --max-modle-len"
    assert (bad.returncode, bad.stderr.splitlines()[-1]) == (2, line)
    assert "usage:" not in bad.stderr
    with reserve_port("127.0.0.1", port)[1]:
        taken = vf_vllm(*words)
    message = f"vf-vllm: cannot listen on 127.0.0.1:{port}: another vf-rl or vf-vllm has reserved"
    assert taken.returncode == 1 and taken.stderr.splitlines()[-1].startswith(message)


@pytest.mark.parametrize(
    "cores, num_workers, bound",
    [([4, 7, 9], 1, "4"), ([5], 1, "5"), ([*range(8)], 2, "0,1|2,3"), ([0, 1], 2, "0|1")],
)
def test_on_the_cpu_the_server_leaves_half_of_the_cores_to_the_trainer(cores, num_workers, bound):
    assert server_cores(cores, num_workers) == bound


ON_A_CPU = "[inference]\ngpus = 0\n[trainer]\ngpus = 0\n[trainer.args]\n"


@pytest.mark.parametrize("how", ["listens", "reserves"])
def test_a_port_in_use_is_one_clear_error(write_toml, error_of, how):
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)) if how == "listens" else reserve_port("", port)[1]
    ):
        toml = write_toml(f'[env]\nid = "e"\n{ON_A_CPU}vllm_server_port = {port}\n')
        said = error_of(rl, "@", toml)  # "e" is no environment: the port comes first
    reason = "Address already in use" if how == "listens" else "another vf-rl or vf-vllm has"
    assert f"cannot listen on 127.0.0.1:{port}: {reason}" in said and "vllm_server_port" in said


@pytest.mark.parametrize("command", [rl, train])
def test_a_used_folder_is_one_clear_error_before_anything_starts(
    write_toml, tmp_path, error_of, command
):
    save(tmp_path / "run", 4)
    options = f'output_dir = "{tmp_path}/run"\nmax_steps = 4\n'
    toml = write_toml(f'[env]\nid = "e"\n{ON_A_CPU}{options}')
    assert f": error: output_dir='{tmp_path}/run' holds a run already" in error_of(
        command, "@", toml
    )
    said = error_of(command, "@", toml, "--resume")
    assert "checkpoint-4 is already at step 4 of 4: raise max_steps" in said


@pytest.mark.slow
def test_an_environment_that_cannot_work_ends_vf_rl_before_its_server_is_up(
    write_toml, error_of, tmp_path, monkeypatch, tokenizer
):
    # A server that is never up. The trainer is the real one.
    server = ["-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(plan.ServerPlan, "command", lambda *_: server)
    monkeypatch.setenv("VF_RL_TEST", str(tmp_path))
    env = write_environment(tmp_path, "tiny_env", [])
    tokenizer.save_pretrained(tmp_path / "model")
    options = f'output_dir = "{tmp_path}/run"\nvllm_server_port = {free_port()}\nmax_seq_len = 32\n'
    toml = write_toml(env + ON_A_CPU + options)
    said = error_of(rl, "@", toml)
    assert said.startswith("vf-train: error: ") and "'env': it has no tasks" in said
    assert processes_of(tmp_path) == {}
