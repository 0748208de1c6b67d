"""A wrong configuration ends vf-rl with one line, which names the file, the key, the value and the
fix.
"""

import pytest

from tests.helpers import ROOT, check_lines
from verifiers_rl.cli import rl
from verifiers_rl.cli.config import load_run_config
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.sft import main as sft


@pytest.fixture
def said(tmp_path, monkeypatch, run_main):
    """What vf-rl says to a TOML and words, without its name; it must be one line."""
    monkeypatch.chdir(tmp_path)

    def said(text, words=""):
        (tmp_path / "mine.toml").write_text(f"{text}\n")
        command, name = (sft, "vf-sft") if text.startswith("# vf-sft: ") else (rl, "vf-rl")
        words = ["--dry-run", "@", "mine.toml", *words.split()]
        status, stdout, stderr = run_main(command.main, *words)
        assert status == 1 and stdout == ""
        (line,) = stderr.splitlines()
        assert not (tmp_path / "outputs").exists()
        assert line.startswith(f"{name}: error: ")
        return line.removeprefix(f"{name}: error: ").replace(f"{tmp_path}/", "")

    return said


def test_a_wrong_configuration_is_one_line_that_says_what_to_change(said):
    """In wrong_configs.txt, each with its words of the command line ($) and what is said (=>)."""
    lines = []
    for case in (ROOT / "tests" / "wrong_configs.txt").read_text().strip().split("\n\n"):
        *given, _ = case.splitlines()
        words = [line.removeprefix("$ ") for line in given if line.startswith("$ ")]
        toml = "\n".join(line for line in given if not line.startswith("$ "))
        lines += [*given, f"=> {said(toml, *words)}", ""]
    check_lines(lines[:-1], "wrong_configs.txt")


def test_lists_in_lists_are_one_line_too(said):
    line = "mine.toml: tables and lists are in each other more than 50 levels deep"
    assert said("model = " + "[" * 9999 + "]" * 9999) == line


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            '[env.taskset]\nid = "someone/no-such-game@1.2"\n',
            "[env]: taskset 'someone/no-such-game@1.2' not found (tried to import 'no_such_game') "
            "nor beside the TOML in {folder}: No module named 'no_such_game'; install it: prime "
            "env install someone/no-such-game@1.2",
        ),
        (
            '[[env]]\nid = "small_tasks"\n[[env]]\nname = "b"\n[env.taskset]\nid = "small_tasks"\n'
            "num_taks = 3\n",
            "[[env]] 2: [env.taskset] has an unknown key 'num_taks'; did you mean 'num_tasks'?",
        ),
    ],
)
def test_a_wrong_environment_is_one_line_with_its_file(tmp_path, monkeypatch, table, expected):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "v1"))
    monkeypatch.setenv("PYTHONPATH", "")
    path = tmp_path / "mine.toml"
    path.write_text('model = "org/model"\n' + table)
    with pytest.raises(InvalidEnvironmentError) as caught:
        load_run_config(path, checks_model=False).load_envs()
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and "\n" not in line
    assert expected.format(folder=tmp_path) in line
