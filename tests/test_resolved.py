"""`--dry-run`, and the resolved configuration in a run's folder."""

import os
import tomllib
from functools import partial

import pytest

from tests.test_run_folder import save
from verifiers_rl.cli import rl
from verifiers_rl.cli.config import load_run_config
from verifiers_rl.cli.resolved import RESOLVED, resolved_text, write_resolved

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
    assert not (tmp_path / "here" / "outputs").exists()
    files, data = tmp_path / "files", tomllib.loads(printed)
    assert data["model"] == str(files / "model")
    assert data["env_file"] == [str(files / "secrets.env")]
    assert data["import_from"] == [str(files), str(files / "code")]
    args = data["trainer"]["args"]
    assert (args["max_steps"], args["temperature"], args["run_name"]) == (7, 0.9, "42")
    assert args["output_dir"] == str(tmp_path / "here" / "outputs" / "42")
    assert data["env"][1]["weight"] == 2 and data["trainer"]["gpus"] == 2
    # What is left out is said.
    assert "-secret" not in printed + said
    assert data["env"][0]["args"] == {"note": "kept", "logins": {"headers": [{}]}}
    left_out = "# Left out, because its name or its form is that of a secret: env.0.args.api_key"
    assert left_out in printed
    assert "Give what it lacks in another file: vf-rl @ resolved.toml @ " in printed


def test_it_runs_as_it_is_from_any_folder_and_gives_itself_again(run, tmp_path, monkeypatch):
    _, printed, _ = run(*FILES)
    written = tmp_path / "here" / RESOLVED
    written.write_text(printed)
    files = [tmp_path / "files" / name for name in ("first.toml", "flat.toml")]
    first = load_run_config(files, [("trainer.gpus", "2")], checks_model=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = load_run_config(written, checks_model=False)
    assert (again.model, again.envs[1:], again.env_files, again.trainer.gpus) == (
        first.model, first.envs[1:], first.env_files, 2,
    )  # fmt: skip
    assert again.folders == [written.parent, *first.folders]
    assert first.trainer.args.items() <= again.trainer.args.items()
    _, repeated, _ = run("@", str(written))
    assert tomllib.loads(repeated)["trainer"] == tomllib.loads(printed)["trainer"]


def test_a_dry_run_refuses_what_the_run_would_refuse(run, tmp_path):
    checkpoint = save(tmp_path / "here" / "outputs" / "rl", 3)
    status, printed, said = run(*FILES)
    assert (status, printed) == (1, "") and "holds a run already (checkpoint-3)" in said
    for option in ("--resume", "--overwrite"):
        status, printed, said = run(*FILES, option)
        assert status == 0 and "nothing was started" in said
        assert "max_steps = 7" in printed and os.listdir(checkpoint.parent) == ["checkpoint-3"]


def test_paths_that_are_relative_to_where_the_run_starts_are_absolute_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models" / "m").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    options = ("deepspeed", "resume_from_checkpoint", "fsdp_config", "accelerator_config")
    args = "".join(f'{option} = "file"\n' for option in options)
    config = tmp_path / "config.toml"
    for model in ("models/m", "~/models/m"):
        config.write_text(
            f'model = "{model}"\n[env]\nid = "e"\n[inference.args]\nchat_template = "file"\n'
            f"[trainer.args]\n{args}"
        )
        text = resolved_text(load_run_config(config, checks_model=False), "runs/a")
        data, file = tomllib.loads(text), str(tmp_path / "file")
        assert data["model"] == f"{tmp_path}/models/m"
        assert data["inference"]["args"] == {"chat_template": file}
        expected = {**dict.fromkeys(options, file), "output_dir": f"{tmp_path}/runs/a"}
        assert data["trainer"]["args"] == expected


def test_a_run_writes_it_into_its_folder_unless_that_file_alone_was_read(tmp_path):
    config = tmp_path / RESOLVED
    config.write_text('model = "m"\n[env]\nid = "e"\n')
    read = load_run_config(config, checks_model=False)
    assert write_resolved(read, str(tmp_path / "there" / "..")) == config
    assert config.read_text().startswith('model = "m"')
    # With a key of the command line, or another file, the file has what runs.
    later = tmp_path / "later.toml"
    later.write_text("[trainer.args]\nseed = 5\n")
    read = load_run_config([config, later], [("trainer.args.max_steps", "9")], checks_model=False)
    text = write_resolved(read, str(tmp_path)).read_text()
    assert "max_steps = 9" in text and "seed = 5" in text
    assert sorted(os.listdir(tmp_path)) == ["later.toml", RESOLVED]


def test_processes_of_a_run_read_it_unless_secrets_are_left_out_in_it(tmp_path):
    config, folder = tmp_path / "rl.toml", tmp_path / "run"
    head = 'model = "m"\n[env]\nid = "e"\n[env.args]\nlevel = 3\n'
    for secret, file in (("", folder / RESOLVED), ('api_key = "of-a-judge"\n', config)):
        config.write_text(head + secret)
        read = load_run_config(config, [("trainer.args.max_steps", "7")], checks_model=False)
        write_resolved(read, str(folder))
        assert read.layers.words[:2] == ["@", str(file)]
        again = load_run_config(folder / RESOLVED, checks_model=False)
        assert again.envs[0].args["level"] == 3 and again.trainer.args["max_steps"] == 7
        assert "of-a-judge" not in (folder / RESOLVED).read_text()
