"""`vf-setup`: a workspace holds what its README says, its TOMLs are runs, its environment loads."""

import ast
import json
import re
import runpy
import shlex
import sys
import tomllib
from unittest.mock import Mock

import pytest
import yaml

import verifiers_rl
from tests.helpers import ROOT, run_python
from verifiers_rl.cli import plan, setup
from verifiers_rl.cli.config import load_run_config

NAMES = list(setup.examples())
# The others are installed from elsewhere, or need another Python.
OURS = ("skeleton", "reverse_text", "alphabet_sort", "letter_hunt", "calculator", "math_python")
OURS += ("kuhn_poker",)


@pytest.fixture
def run_setup(run_main):
    """Runs vf-setup with these words. Returns its exit status and what it printed."""

    def run_setup(*words):
        status, stdout, stderr = run_main(setup.main, *words)
        return status, stdout + stderr

    return run_setup


@pytest.fixture
def make_workspace(tmp_path, run_setup):
    def make(name):
        status, said = run_setup(tmp_path / "work", "--example", name.replace("_", "-"))
        assert status == 0, said
        return tmp_path / "work"

    return make


def commands(readme):
    """The words of each line of its blocks of commands."""
    for block in re.findall(r"^```bash\n(.*?)^```", readme, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line)


@pytest.mark.parametrize("name", NAMES)
def test_a_workspace_holds_what_its_readme_says(name, make_workspace):
    folder = make_workspace(name)
    readme = (folder / "README.md").read_text()
    assert "train.py" in readme and "vf-rl --check @ rl.toml" in readme
    for words in commands(readme):
        for word in words:
            if word.endswith((".py", ".toml", ".yaml")):
                assert (folder / word).is_file(), words
    for link in re.findall(r"\]\(([^)\s]+)\)", readme):
        assert link.startswith("https://") or (folder / link).is_file(), link
    for path in folder.rglob("*"):
        if path.suffix in setup.TEXTS:
            text = path.read_text()
            assert "examples/" not in text and "../" not in text, path
        if path.suffix == ".py":
            ast.parse(path.read_text())
    rows = re.findall(r"^\| .*?`([\w./]+)`.*? \|", readme, re.MULTILINE)
    assert {*rows} >= {path.name for path in folder.glob("*.toml")} | {"train.py", "accelerate/"}
    assert all((folder / row).exists() for row in rows), rows


@pytest.fixture
def no_models(monkeypatch):
    """Models are made or downloaded later. Loading changes what is to be found."""
    monkeypatch.setattr("verifiers_rl.cli.config.model_error", lambda name: None)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("name", NAMES)
def test_the_tomls_of_a_workspace_are_runs_and_its_environment_loads(
    name, make_workspace, monkeypatch, no_models
):
    for path in make_workspace(name).glob("*.toml"):
        config = load_run_config(path)
        args = plan.check_trainer_options(config)
        assert args.output_dir.startswith("outputs/")
        text = path.read_text()
        for line in re.findall(r"^# (loss\w* = .*?)$", text, re.MULTILINE):  # to be uncommented
            text = text.replace(f"# {line}", line)
        assert tomllib.loads(text)
        if name in OURS:
            (table,) = config.envs
            for module in (table.id, "my_loss"):
                monkeypatch.delitem(sys.modules, module, raising=False)
            (env,) = (one.env for one in config.load_envs())
            assert env.taskset.config.id == name.replace("skeleton", "my_env")
            assert str(path.parent) in sys.modules[table.id].__file__
            if name != "math_python":  # which downloads
                assert len([*env.taskset]) > 1000 and len([*env.eval_taskset]) in (256, 1024)
            monkeypatch.delitem(sys.modules, table.id)


def test_accelerates_files_are_there_and_lead_to_each_other(make_workspace):
    folder = make_workspace("reverse_text")
    kinds = set()
    for path in (folder / "accelerate").glob("*.yaml"):
        config = yaml.safe_load(path.read_text())
        kinds.add(config["distributed_type"])
        if "deepspeed_config" in config:
            named = folder / config["deepspeed_config"]["deepspeed_config_file"]
            assert json.loads(named.read_text())["zero_optimization"]
    assert kinds == {"FSDP", "DEEPSPEED"} and len([*(folder / "accelerate").iterdir()]) == 5


@pytest.fixture
def run_script(make_workspace, monkeypatch, no_models):
    """Runs a workspace's train.py with these words and a stand-in for RLTrainer. Returns what was
    called, and the arguments of RLTrainer.
    """

    def run_script(name, *words):
        trainer, folder = Mock(), make_workspace(name)
        for module in (name, "my_env", "my_loss"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setattr(verifiers_rl, "RLTrainer", trainer, raising=False)
        monkeypatch.setattr(sys, "argv", ["train.py", *(str(folder / word) for word in words)])
        runpy.run_path(str(folder / "train.py"), run_name="__main__")
        calls = [name for name, *_ in trainer.return_value.method_calls]
        return folder, calls, trainer.call_args.kwargs

    return run_script


def test_the_script_of_a_workspace_is_the_run_of_its_toml(run_script):
    folder, calls, made = run_script("alphabet_sort")
    assert calls == ["train"] and made["model"] == str(folder / "outputs" / "warm_start")
    assert (made["args"].max_steps, made["args"].learning_rate) == (100, 3e-4)
    (one,) = made["env"]
    assert made["args"].use_cpu is True and one.env.taskset.config.instruction == ""
    assert next(iter(one.env.eval_taskset)).data.prompt.isalpha()


def test_the_script_of_a_workspace_takes_another_toml(run_script, monkeypatch):
    monkeypatch.setattr(verifiers_rl, "RLConfig", lambda **options: options, raising=False)
    _, _, made = run_script("alphabet_sort", "rl_gpu.toml")
    assert made["model"] == "Qwen/Qwen3-0.6B" and made["args"]["use_cpu"] is False


def test_the_script_of_reverse_text_evaluates_on_tasks_of_its_own(run_script):
    folder, calls, made = run_script("reverse_text")
    assert calls == ["evaluate", "train", "evaluate"] and made["args"].groups_per_batch == 8
    assert made["model"] == str(folder / "outputs" / "warm_start")
    assert (len([*made["env"]]), len([*made["env"].eval_taskset])) == (4096, 256)


def test_the_script_of_the_skeleton_has_its_own_loss(run_script):
    _, calls, made = run_script("skeleton")
    assert calls == ["evaluate", "train", "evaluate"]
    assert made["loss_fn"].__module__ == "my_loss"


@pytest.mark.slow
def test_the_tests_of_the_skeleton_pass_as_they_are(make_workspace):
    folder = make_workspace("skeleton")
    (words,) = [words for words in commands((folder / "README.md").read_text())
                if words[:3] == ["python", "-m", "pytest"]]  # fmt: skip
    words += ["-q", "-W", "error", "-p", "no:cacheprovider"]
    done = run_python(*words[1:], folder=folder)
    assert re.search(r"\b1[0-9] passed", done.stdout), done.stdout


def test_files_that_are_there_are_named_and_left(tmp_path, run_setup):
    (tmp_path / "rl.toml").write_text("mine")
    (tmp_path / "accelerate").mkdir()
    status, said = run_setup(tmp_path, "--example", "gsm8k")
    assert status == 1 and "vf-setup: error: " in said
    assert "holds rl.toml, accelerate already; choose another folder" in said
    assert (tmp_path / "rl.toml").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"accelerate", "rl.toml"}


def test_its_help_and_the_index_have_each_example(run_setup):
    status, said = run_setup("--help")
    assert status == 0
    index = (ROOT / "examples" / "README.md").read_text()
    for name in NAMES:
        assert re.search(rf"^  {name.replace('_', '-')} +\S.{{8}}", said, re.MULTILINE), name
        assert f"({name}/README.md)" in index
