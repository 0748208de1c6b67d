"""`vf-setup`: a workspace holds what its README says, its TOMLs are runs, its environment loads."""

import re
import runpy
import shlex
import sys
from unittest.mock import create_autospec

import pytest

import verifiers_rl
from tests.helpers import run_python
from verifiers_rl.cli import setup

NAMES = list(setup.examples())


@pytest.fixture
def make_workspace(tmp_path, run_main):
    def make(name):
        words = tmp_path / "work", "--example", name.replace("_", "-")
        status, _, error = run_main(setup.main, *words)
        assert status == 0, error
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
    files = {word for words in commands(readme) for word in words}
    files = {word for word in files if word.endswith((".py", ".toml", ".yaml"))}
    links = {*re.findall(r"\]\(([^)\s]+)\)", readme)}
    files |= {link for link in links if not link.startswith("https://")}
    rows = {*re.findall(r"^\| .*?`([\w./]+)`.*? \|", readme, re.MULTILINE)}
    assert all((folder / name).exists() for name in files | rows)
    assert rows >= {path.name for path in folder.glob("*.toml")} | {"train.py", "accelerate/"}
    for path in folder.rglob("*"):
        if path.suffix in setup.TEXTS:
            text = path.read_text()
            assert "examples/" not in text and "../" not in text, path


@pytest.mark.parametrize("name, calls, options", [
    ("alphabet_sort", ["train"], {"max_steps": 100, "learning_rate": 3e-4}),
    ("reverse_text", ["evaluate", "train", "evaluate"], {"groups_per_batch": 8}),
    ("skeleton", ["evaluate", "train", "evaluate"], {}),
])  # fmt: skip
def test_the_script_of_a_workspace_is_its_run(
    make_workspace, monkeypatch, unknown_models, name, calls, options
):
    """With a stand-in for RLTrainer. The model would be made before."""
    monkeypatch.setenv("PYTHONPATH", "")
    trainer, folder = create_autospec(verifiers_rl.RLTrainer), make_workspace(name)
    for module in (name, "my_env", "my_loss"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(verifiers_rl, "RLTrainer", trainer, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    runpy.run_path(f"{folder}/train.py", run_name="__main__")
    assert [name for name, *_ in trainer.return_value.method_calls] == calls
    made = trainer.call_args.kwargs
    assert {option: getattr(made["args"], option) for option in options} == options
    if name == "skeleton":
        assert made["loss_fn"].__module__ == "my_loss"
    else:
        assert made["model"] == f"{folder}/outputs/warm_start"


@pytest.mark.slow
def test_the_tests_of_the_skeleton_pass_as_they_are(make_workspace):
    folder = make_workspace("skeleton")
    (words,) = [words for words in commands((folder / "README.md").read_text())
                if words[:3] == ["python", "-m", "pytest"]]  # fmt: skip
    words += ["-q", "-W", "error", "-p", "no:cacheprovider"]
    done = run_python(*words[1:], folder=folder)
    assert re.search(r"\b1[0-9] passed", done.stdout), done.stdout


def test_files_that_are_there_are_named_and_left(tmp_path, run_main):
    (tmp_path / "rl.toml").write_text("mine")
    (tmp_path / "accelerate").mkdir()
    status, _, error = run_main(setup.main, tmp_path, "--example", "gsm8k")
    assert status == 1 and "holds rl.toml, accelerate already; choose another folder" in error
    assert (tmp_path / "rl.toml").read_text() == "mine" and len([*tmp_path.iterdir()]) == 2
