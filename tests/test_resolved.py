"""`--dry-run`, and the resolved configuration in a run's folder."""

import tomllib
from functools import partial

import pytest

from verifiers_rl.cli import rl
from verifiers_rl.cli.config import load_run_config
from verifiers_rl.cli.resolved import RESOLVED, resolved_text, write_resolved

load = partial(load_run_config, checks_model=False)
FIRST = """
model = "./model"
env_file = "secrets.env"
import_from = ["code"]
[[env]]
id = "number_guess"
[env.args]
api_key = "judge-secret"
note = "kept"
api_keys = ["one-secret"]
logins = { secrets = { a = "two-secret" }, headers = [{ Authorization = "three-secret" }] }
[[env]]
name = "second"
taskset = { id = "number_guess", num_tasks = 3 }
[inference.args]
max_model_len = 4096
[trainer.args]
loss_args = { eps_high = 3.0 }
"""


@pytest.fixture
def run(tmp_path, monkeypatch, run_main):
    """Runs `vf-rl --dry-run` in this process, from another folder than that of its files."""
    folder = tmp_path / "files"
    (folder / "code").mkdir(parents=True)
    (folder / "secrets.env").write_text("SEARCH=very-secret\n")
    (folder / "first.toml").write_text(FIRST)
    (folder / "flat.toml").write_text("max_steps = 7\n[sampling]\ntemperature = 0.9\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")

    return partial(run_main, rl.main, "--dry-run")


FILES = ["@", "../files/first.toml", "@", "../files/flat.toml", "--trainer.gpus", "2"]


def test_a_dry_run_prints_what_would_run_without_secrets_and_starts_nothing(
    run, tmp_path, monkeypatch
):
    started = []
    monkeypatch.setattr("subprocess.Popen.__init__", lambda *args, **_: started.append(args))
    status, printed, said = run(*FILES, "--trainer.args.run_name", '"42"', "--env.1.weight=2")
    assert status == 0, said
    assert "nothing was started" in said and not started
    assert not (tmp_path / "here/outputs").exists()
    files, data = tmp_path / "files", tomllib.loads(printed)
    assert data["model"] == f"{files}/model"
    assert data["env_file"] == [f"{files}/secrets.env"]
    assert data["import_from"] == [str(files), f"{files}/code"]
    expected = {"max_steps": 7, "temperature": 0.9, "run_name": "42"}
    expected["output_dir"] = f"{tmp_path}/here/outputs/42"
    assert data["trainer"]["args"].items() >= expected.items()
    assert data["env"][1]["weight"] == 2 and data["trainer"]["gpus"] == 2
    # What is left out is said.
    assert "-secret" not in printed + said
    assert data["env"][0]["args"] == {"note": "kept", "logins": {"headers": [{}]}}
    assert "is that of a secret: env.0.args.api_key\n" in printed
    # It runs as it is from any folder, and gives itself again.
    written = tmp_path / "here" / RESOLVED
    written.write_text(printed)
    monkeypatch.chdir("/")
    status, repeated, _ = run("@", written)
    again = tomllib.loads(repeated)
    assert again.pop("import_from") == [str(written.parent), *data.pop("import_from")]
    assert again == data


def test_paths_that_are_relative_to_where_the_run_starts_are_absolute_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models/m").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    config = tmp_path / "config.toml"
    for model in ("models/m", "~/models/m"):
        config.write_text(
            f'model = "{model}"\n[env]\nid = "e"\n[inference.args]\nchat_template = "file"\n'
            '[trainer.args]\ndeepspeed = "file"\nresume_from_checkpoint = "file"\n'
        )
        folder, file = f"{tmp_path}/runs/a", f"{tmp_path}/file"
        data = tomllib.loads(resolved_text(load(config), folder))
        assert data["model"] == f"{tmp_path}/models/m"
        assert data["inference"]["args"] == {"chat_template": file}
        expected = {"deepspeed": file, "resume_from_checkpoint": file}
        assert data["trainer"]["args"] == expected | {"output_dir": folder}


def test_processes_of_a_run_read_it_unless_secrets_are_left_out_in_it(tmp_path):
    config, folder = tmp_path / "rl.toml", tmp_path / "run"
    head = 'model = "m"\n[env]\nid = "e"\n[env.args]\nlevel = 3\n'
    for secret, file in (("", folder / RESOLVED), ('api_key = "of-a-judge"\n', config)):
        config.write_text(head + secret)
        read = load(config, ["--trainer.args.max_steps=7"])
        write_resolved(read, str(folder))
        assert read.layers.words[:2] == ["@", str(file)]
        again = load(folder / RESOLVED)
        assert again.envs[0].args == {"level": 3} and again.trainer.args["max_steps"] == 7
    # A table that the command line takes back is not there.
    taken_back = load(config, ["--trainer=none"])
    assert "teacher" not in resolved_text(taken_back, str(folder))
    # It stays as it is where it alone was read.
    (folder / RESOLVED).write_text(head)
    write_resolved(load(folder / RESOLVED), str(folder))
    assert (folder / RESOLVED).read_text() == head
