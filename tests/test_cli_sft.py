"""`vf-sft`: what its command line and its TOML mean, and a run."""

import json
import tomllib

import pytest

from tests.helpers import run_python, write_model
from tests.test_sft import conversations
from verifiers_rl.cli.config import load_run_config
from verifiers_rl.report.run_folder import read_metrics
from verifiers_rl.sft import main as sft

TOML = """
model = "./base"

[data]
train = "train.jsonl"

[trainer]
gpus = 0
[trainer.args]
use_lora = false
max_seq_len = 64
batch_size = 4
num_train_epochs = 2
save_strategy = "no"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a TOML, its data and its model."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which vf-sft sets
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "base")
    lines = "\n".join(json.dumps(row) for row in conversations(6))
    (tmp_path / "train.jsonl").write_text(lines)
    (tmp_path / "sft.toml").write_text(TOML)
    return tmp_path


@pytest.mark.slow
def test_a_toml_and_parts_of_a_file_become_a_model(folder, run_main):
    words = ["@", "sft.toml", "--data.split", "train[:4]", "--data.eval_split", "train[4:]"]
    words += ["--trainer.args.eval_strategy", "steps", "--trainer.args.eval_steps", "2"]
    done = run_python("-m", "verifiers_rl.sft.main", *words, folder=folder)
    assert "data for training: 4 rows with" in done.stdout
    assert "data for evaluations: 2 rows with" in done.stdout
    run = folder / "outputs/sft"
    rows = read_metrics(run)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert [row["step"] for row in rows if "eval_loss" in row] == [2]
    resolved = tomllib.loads((run / "resolved.toml").read_text())
    assert resolved["data"]["train"] == [f"{folder}/train.jsonl"]
    assert (run / "model.safetensors").is_file()
    status, _, said = run_main(sft.main, *words)
    assert status == 1 and "vf-sft: error: output_dir=" in said


def test_data_is_found_beside_its_toml_or_on_the_hub(folder):
    words = ["--data.train", "train.jsonl", "org/name", "--data.eval_split=test"]
    words.append("--trainer.args.eval_strategy=steps")
    data = load_run_config(folder / "sft.toml", words, kind=sft.SFTRunConfig).data
    assert data.train == data.eval == [f"{folder}/train.jsonl", "org/name"]
