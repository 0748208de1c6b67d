"""`vf-rl train.py`: what server a script asks for, and how the script, its server and vf-rl end."""

import re
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
from peft import LoraConfig

import verifiers_rl
from tests.conftest import free_port, processes_of
from tests.helpers import ROOT, run_python, running_python, write_model
from tests.test_ending import NOISY_SERVER, read_until
from verifiers_rl import RLConfig
from verifiers_rl.cli import plan, rl
from verifiers_rl.cli.config import load_run_config
from verifiers_rl.cli.train import ask_for_server
from verifiers_rl.report.run_folder import read_metrics

# --- What a script asks for -----------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path):
    """The configuration of what a trainer with this adapter and these options asks for."""

    def asked(adapter=None, model="org/model", **options):
        args = RLConfig(**{"output_dir": f"{tmp_path}/run", **options})
        policy = SimpleNamespace(name_or_path=model)
        ask_for_server(tmp_path / "script.toml", policy, adapter, args)
        return load_run_config(tmp_path / "script.toml", checks_model=False)

    return asked


LORA, FLOAT32 = {"enable_lora": True}, {"dtype": "float32"}


@pytest.mark.parametrize(
    "adapter, options, flags",
    [
        # Of the adapter, not of the options.
        (LoraConfig(r=20), {"bf16": True, "lora_rank": 4}, {**LORA, "max_lora_rank": 32}),
        # The trainer computes in float32, so merged weights are as good.
        (LoraConfig(r=16), {}, FLOAT32),
        (None, {"deterministic": True}, {**FLOAT32, "enable_chunked_prefill": False}),
    ],
)
def test_a_servers_flags_follow_from_what_the_script_trains(asked, adapter, options, flags):
    port = free_port()
    config = asked(adapter, use_cpu=True, vllm_server_port=port, **options)
    (server,) = plan.plan_servers(config)
    expected = {"dtype": "auto", "enforce_eager": True, "max_model_len": 2048}
    assert server.args == expected | flags
    assert (server.model, server.host, server.port) == ("org/model", "127.0.0.1", port)


@pytest.mark.parametrize(
    "model, options, problem",
    [
        ("org/model", {"vllm_servers": ["a:1"]}, r"vllm_servers=\['a:1'\]: vf-rl starts a server"),
        ("", {}, "model: vf-rl cannot start a server of a model without a name"),
        ("org/other", {}, "'org/other': vf-rl has started a server of org/model "),
    ],
)
def test_a_second_trainer_has_the_server_unless_vf_rl_can_start_none_for_it(
    asked, model, options, problem
):
    assert asked(use_cpu=True).model == asked(use_cpu=True, max_steps=5).model == "org/model"
    with pytest.raises(ValueError, match=problem):
        asked(model=model, use_cpu=True, **options)


# --- How it ends ----------------------------------------------------------------------------------


def test_a_script_without_a_trainer_has_its_words_and_its_status(run_main, tmp_path):
    (tmp_path / "beside.py").write_text("")
    script = tmp_path / "train.py"
    script.write_text("import sys, beside\nprint(sys.argv[1:], __name__)\nsys.exit(3)\n")
    status, out, error = run_main(rl.main, script, "--steps", "5")
    assert status == 3 and "['--steps', '5'] __main__" in out
    assert "train.py ended with status 3 and made no RLTrainer that needs a server" in error
    status, _, error = run_main(rl.main, "nowhere.py")
    assert status == 1 and error == "vf-rl: error: nowhere.py: there is no such script\n"


# A vf-rl whose server is a few lines.
VF_RL = f"""
from verifiers_rl.cli import plan, rl, supervise
plan.ServerPlan.command = lambda *_: ["-c", {NOISY_SERVER!r}]
supervise.answers = lambda address: True
rl.main()
"""
SAVING_TRAINER = """
import signal, sys, time

def save(*_):
    time.sleep(0.5)
    print("step 5 is saved")
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
print("training")
time.sleep(300)
"""
# Asks for a server as an RLTrainer does, without what that imports, and does not train.
ASKS = """
import os, time
from types import SimpleNamespace
from verifiers_rl.cli.train import OF_SERVER
from verifiers_rl.process import parent

options = dict.fromkeys(OF_SERVER) | dict(output_dir="outputs/run", vllm_server_port={port})
args = SimpleNamespace(bf16=False, device=SimpleNamespace(type="cpu"), **options)
parent.ask_for_server(SimpleNamespace(name_or_path="{model}"), None, args)
log = "outputs/run/logs/inference.log"
while not os.path.exists(log) or "is up" not in open(log).read():
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_server, number", [(False, signal.SIGTERM), (True, signal.SIGINT)])
def test_a_signal_lets_the_script_save_and_ends_all(tmp_path, has_server, number):
    asks = ASKS.format(port=free_port(), model=write_model(tmp_path / "model")) * has_server
    (tmp_path / "train.py").write_text(asks + SAVING_TRAINER)
    (temporary := tmp_path / "temporary").mkdir()
    variables = {"VF_RL_TEST": tmp_path, "TMPDIR": temporary}
    with running_python("-u", "-c", VF_RL, "train.py", folder=tmp_path, **variables) as process:
        read_until(process, "training")
        process.send_signal(number)
        output, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in error
    assert output.splitlines()[-1] == "step 5 is saved"  # what servers print is in logs
    assert "nanobind" not in output
    assert processes_of(tmp_path) == {} and not list(temporary.iterdir())


# --- The script of the README ---------------------------------------------------------------------


@pytest.mark.e2e
def test_the_script_of_the_readme_runs_as_it_stands_on_a_cpu(warm_start, tmp_path):
    """Word for word, but for its number of steps. The tiny model is there already."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[:1]
    assert "env_from(" in block and len(block.splitlines()) <= 25
    shutil.copytree(warm_start, tmp_path / "outputs/tiny")
    port = free_port()  # 8000 may be in use
    text = block.replace("max_steps=100", f"max_steps=8, vllm_server_port={port}")
    (tmp_path / "train.py").write_text(f"import sys\n{text}    sys.exit(5)\n")
    run_python(
        "-m", "verifiers_rl.cli.rl", "train.py", folder=tmp_path, status=5, VF_RL_TEST=tmp_path
    )
    assert processes_of(tmp_path) == {}
    (metrics,) = tmp_path.glob("outputs/*/metrics.jsonl")
    steps = [row for row in read_metrics(metrics.parent) if "loss" in row]
    assert [row["error_share"] for row in steps] == [0] * 8
    rewards = [row["reward"] for row in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.1, rewards


# --- The tiny model -------------------------------------------------------------------------------


def test_a_new_tiny_model_is_that_of_the_demo(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("verifiers_rl.tiny.subprocess.run", lambda *call, **_: calls.extend(call))
    folder = verifiers_rl.tiny_model(f"{tmp_path}/new")
    ((python, program, task, target),) = calls
    assert (python, target) == (sys.executable, folder) and program.is_file()
    assert "def demonstrations(" in task.read_text()
