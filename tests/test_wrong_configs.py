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
    """What vf-rl says to a TOML and words, without its name; it must be one line. What begins with
    `# vf-sft: ` is for that command. `# an environment: ` is for what loads the environments.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.syspath_prepend(str(ROOT / "tests/v1"))
    (tmp_path / "needy.py").write_text("import not_there\n")
    (tmp_path / "unlucky.py").write_text("raise ValueError('no luck')\n")
    code = "number = 3\ndef loss(inputs, scale=1.0): ...\n"
    (tmp_path / "my_code.py").write_text(code)
    path = tmp_path / "mine.toml"

    def said(text, words=""):
        path.write_text(f"{text}\n")
        if text.startswith("# an environment: "):
            with pytest.raises(InvalidEnvironmentError) as caught:
                load_run_config(path, checks_model=False).load_envs()
            head, lines = "", str(caught.value)
        else:
            command, name = (sft, "vf-sft") if text.startswith("# vf-sft: ") else (rl, "vf-rl")
            words = ["--dry-run", "@", "mine.toml", *words.split()]
            status, stdout, lines = run_main(command.main, *words)
            assert status == 1 and stdout == "" and not (tmp_path / "outputs").exists()
            head = f"{name}: error: "
        (line,) = lines.splitlines()
        assert line.startswith(head)
        return line.removeprefix(head).replace(f"{tmp_path}/", "").replace(f"{tmp_path}", "FOLDER")

    return said


def test_a_wrong_configuration_is_one_line_that_says_what_to_change(said):
    """In wrong_configs.txt, each with its words of the command line ($) and what is said (=>)."""
    lines = []
    for case in (ROOT / "tests/wrong_configs.txt").read_text().strip().split("\n\n"):
        *given, _ = case.splitlines()
        words = [line.removeprefix("$ ") for line in given if line.startswith("$ ")]
        toml = "\n".join(line for line in given if not line.startswith("$ "))
        lines += [*given, f"=> {said(toml, *words)}", ""]
    check_lines(lines[:-1], "wrong_configs.txt")


@pytest.mark.parametrize(
    "text, words",
    [
        ("model = " + "[" * 9999 + "]" * 9999, ""),
        (f"[{'.'.join('a' * 9999)}]\nb = 1", ""),
        ("", "--env.args.a " + "[" * 9999 + "]" * 9999),
    ],
)
def test_lists_in_lists_are_one_line_too(said, text, words):
    assert said(text, words).endswith(": tables and lists are in each other too deeply")
