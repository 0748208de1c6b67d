import os
import socket
import sys

import pytest

from tests.conftest import free_port, processes_of
from tests.helpers import run_python, write_environment, write_model
from tests.test_run_folder import save
from verifiers_rl.cli import plan, rl, train
from verifiers_rl.cli.config import RunConfig, TomlError, load_run_config
from verifiers_rl.cli.plan import server_flags
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.inference.server import server_cores
from verifiers_rl.sft.main import SFTRunConfig


@pytest.fixture
def model_folder(tmp_path):
    return write_model(tmp_path / "model")


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


def test_a_model_that_is_not_there_is_one_clear_error(write_toml, monkeypatch, tmp_path):
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


def test_a_toml_of_other_editors_is_read_or_refused_in_one_line(write_toml, model_folder):
    toml = write_toml()
    toml.write_bytes(b"\xef\xbb\xbf" + toml.read_bytes())
    assert load_run_config(toml).model == model_folder
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
    write_toml, monkeypatch, run_main, command, kind, table
):
    def execv(path, words):
        raise InterruptedError(*words)

    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(kind, "prepare", lambda self: None)
    toml = write_toml(f"{table}\n[trainer]\ngpus = 2\n")
    with pytest.raises(InterruptedError) as became:
        run_main(lambda: train.train(f"vf-{command}", kind), "@", toml, "--resume")
    words = " ".join(became.value.args)
    assert words.startswith(f"{sys.executable} -m torch.distributed.run --nproc-per-node=2 ")
    assert words.endswith(f"-m {kind.MODULE} @ {toml} --resume")
    assert " --shutdown-timeout=120 " in words


def test_a_flag_of_the_toml_is_ours_only_where_it_is_not_set(write_toml):
    toml = '[env]\nid = "e"\n[inference.args]\nmax_model_len = '
    (server,) = plan.plan_servers(load_run_config(write_toml(f"{toml}9999\n")))
    # Ours, which follows from the trainer's options, would win as the last.
    assert " ".join(server.command("h", 7)).count("--max-model-len 9999") == 1
    with pytest.raises(TomlError, match=r"max_model_len=64: must be at least max_seq_len=2048 of"):
        plan.plan_servers(load_run_config(write_toml(f"{toml}64\n")))


# vf-vllm up to where vLLM would listen.
UP_TO_VLLM = """
import sys
from verifiers_rl.inference import server

async def stop(args):
    sys.exit(f"vLLM would listen on {args.host}, behind {args.middleware}")

server.serve = stop
server.main()
"""


@pytest.mark.slow
def test_vf_vllm_alone_says_where_its_token_is_and_who_reaches_it(model_folder, tmp_path):
    words = ["--model", model_folder, "--port", free_port()]
    words += ["--host", "0.0.0.0", "--middleware", "mine.Routes"]
    variables = {"XDG_CACHE_HOME": tmp_path / "cache", TOKEN_VARIABLE: ""}
    said = run_python("-c", UP_TO_VLLM, *words, status=1, **variables).stderr
    assert "WARNING: --host 0.0.0.0 lets other machines reach this server" in said
    # The last is the first that a request meets: routes of one's own are served.
    assert said.rstrip().endswith("Gateway', 'mine.Routes']")
    (saved,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert f"finds the server's token in {saved};" in said
    token = saved.read_text()  # what is printed often ends in a log that others can read
    assert len(token) > 20 and token not in said


@pytest.mark.parametrize(
    "cores, num_workers, bound", [([4, 7, 9], 1, "4"), ([*range(8)], 2, "0,1|2,3")]
)
def test_on_the_cpu_the_server_leaves_half_of_the_cores_to_the_trainer(cores, num_workers, bound):
    assert server_cores(cores, num_workers) == bound


ON_A_CPU = "[inference]\ngpus = 0\n[trainer]\ngpus = 0\n[trainer.args]\n"


def test_a_port_in_use_is_one_clear_error(write_toml, error_of):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        toml = write_toml(f'[env]\nid = "e"\n{ON_A_CPU}vllm_server_port = {port}\n')
        said = error_of(rl, "@", toml)  # "e" is no environment: the port comes first
    reason = f"cannot listen on 127.0.0.1:{port}: Address already in use"
    assert reason in said and "vllm_server_port" in said


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
    write_toml, error_of, tmp_path, monkeypatch
):
    # A server that is never up. The trainer is the real one.
    server = ["-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(plan.ServerPlan, "command", lambda *_: server)
    monkeypatch.setenv("VF_RL_TEST", str(tmp_path))
    env = write_environment(tmp_path, "tiny_env", [])
    options = f'output_dir = "{tmp_path}/run"\nvllm_server_port = {free_port()}\nmax_seq_len = 32\n'
    toml = write_toml(env + ON_A_CPU + options)
    said = error_of(rl, "@", toml)
    assert said.startswith("vf-train: error: ") and "'env': it has no tasks" in said
    assert processes_of(tmp_path) == {}
