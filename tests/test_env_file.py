"""Secrets for environments: they reach environments, and nothing else."""

import os

import pytest

from tests.helpers import ROOT, check_lines
from verifiers_rl.cli.config import load_run_config
from verifiers_rl.cli.layers import TomlError, read_env_files
from verifiers_rl.envs.v1_changes import local_runtime
from verifiers_rl.process import secret_names
from verifiers_rl.process.secret_names import is_secret, is_secret_key, without_secrets


@pytest.fixture
def environment(monkeypatch):
    """This process's environment, as it was before afterwards."""
    monkeypatch.setattr(secret_names, "_set_here", set())
    before = dict(os.environ)
    yield os.environ
    os.environ.clear()
    os.environ.update(before)


def test_lines_are_names_and_values(tmp_path):
    file, later = tmp_path / "secrets.env", tmp_path / "later.env"
    file.write_text(
        "# of the search\n\nSEARCH=abc=def  # mine\nexport KEY = 'x # y'\nEMPTY=\nQ=\"a b\"\n"
        "R=\"a # b\" # judge\nS='c'# d\n"
    )
    later.write_text("KEY=z\r\n")
    values = {"SEARCH": "abc=def", "KEY": "x # y", "EMPTY": "", "Q": "a b", "R": "a # b", "S": "c"}
    assert read_env_files([file]) == values
    assert read_env_files([file, later]) == {**values, "KEY": "z"}


@pytest.mark.parametrize("line", ["just-a-secret", "a b = c"])
def test_a_wrong_line_is_named_and_not_shown(tmp_path, line):
    (file := tmp_path / "secrets.env").write_text(f"A=1\n{line}\n")
    with pytest.raises(TomlError, match=r"secrets\.env', line 2: must be NAME=VALUE") as caught:
        read_env_files([file])
    assert line not in str(caught.value)


def test_environments_get_them_and_programs_of_a_model_do_not(tmp_path, environment, monkeypatch):
    """That no other child gets them is tested in test_e2e_train.py."""
    environment["OF_SHELL"] = "shell"
    (tmp_path / "secrets.env").write_text("PLAIN_NAME=veiled-9431\nOF_SHELL=other\n")
    toml = tmp_path / "config.toml"
    toml.write_text('env_file = "secrets.env"\nmodel = "m"\n[env]\nid = "e"\n')
    seen, load = {}, "verifiers_rl.envs.v1_loading.load_v1_environment"
    monkeypatch.setattr(load, lambda *_: seen.update(os.environ))
    config = load_run_config(toml, checks_model=False)
    assert "PLAIN_NAME" not in environment  # not before an environment is loaded
    config.load_envs()
    assert (seen["PLAIN_NAME"], seen["OF_SHELL"]) == ("veiled-9431", "shell")
    # Whatever their names. A worker inherits the list of names.
    assert is_secret("PLAIN_NAME") and not is_secret("PATH")
    assert not {"PLAIN_NAME", "OF_SHELL"} & local_runtime.os.environ.keys()
    assert "PATH" in local_runtime.os.environ
    assert "veiled-9431" not in environment[secret_names.LISTED]
    assert without_secrets("if note == 'veiled-9431': pass") == "if note == '***': pass"


@pytest.mark.parametrize(
    "key, value, is_one",
    [
        ("api_key", "x", True),
        ("note", "hf_AbCdEfGhIjKlMnOpQrStUv", True),
        ("url", "https://me:word@example.org", True),
        ("Authorization", "Bearer word", True),
        ("api_keys", ["x", "y"], True),
        ("headers", ["X-Key: sk-AbCdEfGhIjKlMnOpQrStUv"], True),
        ("secrets", {"openai": "x"}, True),
        ("pin_password", 1234, True),
        ("api_key", "", False),
        ("use_auth_token", True, False),
        ("model", "org/hf_converted_checkpoint_of_mine", False),
        ("api_key_var", "OPENAI_API_KEY", False),
        ("eos_token", "<|im_end|>", False),
    ],
)
def test_keys_that_hold_secrets_are_told_from_others(key, value, is_one):
    assert is_secret_key(key, value) == is_one


def test_programs_are_shown_without_their_secrets():
    """Lines of programs in shown_programs.txt, each with what is shown of it (=>)."""
    given = (ROOT / "tests/shown_programs.txt").read_text().splitlines()
    lines = [line.partition(" => ")[0] for line in given]
    check_lines([f"{line} => {without_secrets(line)}" for line in lines], "shown_programs.txt")
