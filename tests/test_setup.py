"""`vf-setup`: a workspace holds what its README says, its TOMLs are runs, its environment loads."""

import ast
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib

import pytest
import yaml

import verifiers_rl
from tests.helpers import ROOT
from verifiers_rl.cli import plan, setup
from verifiers_rl.cli.config import load_run_config

NAMES = list(setup.examples())
# The others are installed from elsewhere, or need another Python.
OURS = ("skeleton", "reverse_text", "alphabet_sort", "letter_hunt", "calculator", "math_python")


@pytest.fixture
def run_setup(monkeypatch, capsys):
    """Runs vf-setup with these words. Returns its exit status and what it printed."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["vf-setup", *map(str, words)])
        status = 0
        try:
            setup.main()
        except SystemExit as ended:
            status = ended.code
        return status, "".join(capsys.readouterr())

    return run


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


@pytest.mark.parametrize("name", NAMES)
def test_the_tomls_of_a_workspace_are_runs(name, make_workspace, monkeypatch):
    monkeypatch.setattr("verifiers_rl.cli.config.model_error", lambda name: None)
    for path in make_workspace(name).glob("*.toml"):
        args = plan.check_trainer_options(load_run_config(path))
        assert args.output_dir.startswith("outputs/")
        text = path.read_text()
        for line in re.findall(r"^# (loss\w* = .*?)$", text, re.MULTILINE):  # to be uncommented
            text = text.replace(f"# {line}", line)
        assert tomllib.loads(text)


@pytest.mark.parametrize("name", OURS)
def test_the_environment_of_a_workspace_loads(name, make_workspace, monkeypatch):
    monkeypatch.setattr("verifiers_rl.cli.config.model_error", lambda name: None)
    monkeypatch.setenv("PYTHONPATH", "")  # which loading changes
    monkeypatch.setattr(sys, "path", [*sys.path])
    for path in make_workspace(name).glob("*.toml"):
        config = load_run_config(path)
        (table,) = config.envs
        for module in (table.id, "my_loss"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        (env,) = (one.env for one in config.load_envs())
        assert env.taskset.config.id == name.replace("skeleton", "my_env")
        assert str(path.parent) in sys.modules[table.id].__file__
        if name != "math_python":  # which downloads
            assert len([*env.taskset]) > 1000 and len([*env.eval_taskset]) == 256
        monkeypatch.delitem(sys.modules, table.id)


def test_accelerates_files_are_there_and_lead_to_each_other(make_workspace):
    folder = make_workspace("reverse_text")
    kinds = set()
    for path in (folder / "accelerate").glob("*.yaml"):
        config = yaml.safe_load(path.read_text())
        kinds.add(config["distributed_type"])
        if "deepspeed_config" in config:
            named = config["deepspeed_config"]["deepspeed_config_file"]
            assert json.loads((folder / named).read_text())["zero_optimization"]
    assert kinds == {"FSDP", "DEEPSPEED"}
    assert len([*(folder / "accelerate").iterdir()]) == 5


def test_without_an_example_it_is_an_environment_of_ones_own(tmp_path, run_setup):
    status, said = run_setup(tmp_path)
    assert status == 0
    assert {*setup.workspace_files("skeleton")} == {
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()
    }
    assert f"    cd {tmp_path}\n    less README.md\n" in said


def test_the_script_of_a_workspace_is_the_run_of_its_toml(make_workspace, monkeypatch):
    made, calls = {}, []

    class Recorder:
        def __init__(self, **options):
            made.update(options)

        def train(self):
            calls.append("train")

    monkeypatch.setattr("verifiers_rl.cli.config.model_error", lambda name: None)
    monkeypatch.setattr(verifiers_rl, "RLTrainer", Recorder, raising=False)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "alphabet_sort", raising=False)
    folder = make_workspace("alphabet_sort")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    runpy.run_path(str(folder / "train.py"), run_name="__main__")
    assert calls == ["train"] and made["model"] == str(folder / "outputs" / "warm_start")
    assert (made["args"].max_steps, made["args"].learning_rate) == (100, 3e-4)
    (one,) = made["env"]
    assert made["args"].use_cpu is True and one.env.taskset.config.instruction == ""
    assert next(iter(one.env.eval_taskset)).data.prompt.isalpha()
    monkeypatch.setattr(sys, "argv", ["train.py", str(folder / "rl_gpu.toml")])
    monkeypatch.setattr(verifiers_rl, "RLConfig", lambda **options: options, raising=False)
    runpy.run_path(str(folder / "train.py"), run_name="__main__")
    assert made["model"] == "Qwen/Qwen3-0.6B" and made["args"]["use_cpu"] is False


@pytest.mark.slow
def test_the_tests_of_the_skeleton_pass_as_they_are(make_workspace):
    folder = make_workspace("skeleton")
    (words,) = [words for words in commands((folder / "README.md").read_text())
                if words[:3] == ["python", "-m", "pytest"]]  # fmt: skip
    command = [sys.executable, *words[1:], "-q", "-W", "error", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b1[0-9] passed", done.stdout), done.stdout


def test_files_that_are_there_are_named_and_left(tmp_path, run_setup):
    (tmp_path / "rl.toml").write_text("mine")
    (tmp_path / "accelerate").mkdir()
    status, said = run_setup(tmp_path, "--example", "gsm8k")
    assert status == 1 and "vf-setup: error: " in said
    assert "holds rl.toml, accelerate already; choose another folder" in said
    assert (tmp_path / "rl.toml").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["accelerate", "rl.toml"]


def test_an_unknown_example_is_one_clear_error(tmp_path, run_setup):
    status, said = run_setup(tmp_path, "--example", "wordl")
    assert status == 2 and "--example: invalid choice: 'wordl' (choose from 'skeleton', " in said
    assert not [*tmp_path.iterdir()]


def test_its_help_has_each_example_and_what_it_is(run_setup):
    status, said = run_setup("--help")
    assert status == 0
    for name in NAMES:
        assert re.search(rf"^  {name.replace('_', '-')} +\S.{{8}}", said, re.MULTILINE), name
    index = (ROOT / "examples" / "README.md").read_text()
    assert all(f"({name}/README.md)" in index for name in NAMES)


def test_a_wheel_has_the_examples_where_they_are_looked_for():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    targets = pyproject["tool"]["hatch"]["build"]["targets"]
    folder = setup.PACKAGE / "examples"
    assert targets["wheel"]["sources"] == {"examples": str(folder.relative_to(ROOT))}
    assert "examples" in targets["wheel"]["only-include"]
    assert "examples" in targets["sdist"]["include"]
