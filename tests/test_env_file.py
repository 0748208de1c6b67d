"""Secrets for environments: they reach environments, and nothing else."""

import json
import os
import sys

import pytest

from verifiers_rl.cli.children import LocalChild
from verifiers_rl.cli.config import load_run_config
from verifiers_rl.cli.layers import TomlError, read_env_files
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


@pytest.mark.parametrize("line", ["just-a-secret", "a b = c", "=x"])
def test_a_wrong_line_is_named_and_not_shown(tmp_path, line):
    file = tmp_path / "secrets.env"
    file.write_text(f"A=1\n{line}\n")
    with pytest.raises(TomlError, match=r"secrets\.env', line 2: must be NAME=VALUE") as caught:
        read_env_files([file])
    assert line not in str(caught.value)
    with pytest.raises(TomlError, match=r"none\.env': No such file or directory"):
        read_env_files([tmp_path / "none.env"])


def test_files_are_relative_to_the_toml_and_may_be_several(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("a.env", "sub/b.env"):
        (tmp_path / name).write_text("A=1\n")
    toml = tmp_path / "sub" / "config.toml"
    toml.write_text('env_file = ["../a.env", "b.env"]\nmodel = "m"\n[env]\nid = "e"\n')
    for words, names in (
        ([], ["a.env", "sub/b.env"]),
        ([("env_file", "a.env")], ["a.env"]),  # relative to where the command is given
        ([("env_file", "none")], []),
    ):
        config = load_run_config(toml, words, checks_model=False)
        assert config.env_files == [str(tmp_path / name) for name in names]


def test_environments_get_them_and_other_children_and_programs_do_not(
    tmp_path, environment, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    environment["OF_SHELL"] = "shell"
    environment["HF_TOKEN"] = "of the shell"
    (tmp_path / "secrets.env").write_text("PLAIN_NAME=hidden\nOF_SHELL=other\nHF_TOKEN=another\n")
    toml = tmp_path / "config.toml"
    toml.write_text('env_file = "secrets.env"\nmodel = "m"\n[env]\nid = "e"\n')
    seen = {}
    monkeypatch.setattr(
        "verifiers_rl.envs.v1_loading.load_v1_environment",
        lambda *_: seen.update(os.environ) or "loaded",
    )
    config = load_run_config(toml, checks_model=False)
    assert "PLAIN_NAME" not in environment  # not before an environment is loaded
    assert [one.env for one in config.load_envs()] == ["loaded"]
    assert (seen["PLAIN_NAME"], seen["OF_SHELL"]) == ("hidden", "shell")

    # What vf-rl starts, as the server of --check, inherits what it would without the file.
    program = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    child = LocalChild("server", ["-c", program, str(tmp_path / "got")], {})
    assert child.wait(20)
    child.stop()
    got = json.loads((tmp_path / "got").read_text())
    assert "PLAIN_NAME" not in got and got["HF_TOKEN"] == "of the shell"

    # What a model runs gets none, whatever its name. A worker inherits the list of names.
    from verifiers_rl.envs.v1_changes import local_runtime

    assert is_secret("PLAIN_NAME") and not is_secret("PATH")
    assert not {"PLAIN_NAME", "OF_SHELL", "HF_TOKEN"} & local_runtime.os.environ.keys()
    assert "PATH" in local_runtime.os.environ
    assert "hidden" not in environment[secret_names.LISTED]


@pytest.mark.parametrize(
    ("key", "value", "is_one"),
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


HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('api_key = "0123456789"  # 0123456789', 'api_key = "***"  # ***'),
        ("env['OPENAI_API_KEY'] = 'abcdefgh'", "env['OPENAI_API_KEY'] = '***'"),
        ('login("hf_AbCdEfGhIjKlMnOpQrStUv")', 'login("***")'),
        ("+HF_TOKEN=hf_AbCdEfGhIjKlMnOpQrStUv", "+HF_TOKEN=***"),
        ('db = "postgres://me:word@host/x"', 'db = "***"'),
        (f'setdefault("WANDB_API_KEY", "{HEX}")', 'setdefault("WANDB_API_KEY", "***")'),
        (f'wandb.login(key="{HEX}")', 'wandb.login(key="***")'),
        (f'"wandb.login(key=\\"{HEX}\\")\\n",', '"wandb.login(key=\\"***\\")\\n",'),
        (f"+export WANDB_API_KEY={HEX}\n", "+export WANDB_API_KEY=***\n"),
        (f"env['GITHUB_TOKEN'] = '{HEX}'", "env['GITHUB_TOKEN'] = '***'"),
        ("git+https://me:word@host/x", "git+https://***@host/x"),
        ('pad_token = "<|endoftext|>"', None),
        ('Literal["token", "sequence", "constant"]', None),
        ("token = tokens[0]; api_key = read(path)", None),
        ('sorted(rows, key="completion"); EOS_TOKEN = "<|im_end|>"', None),
        (f"commit = {HEX}", None),
    ],
)
def test_programs_are_shown_without_their_secrets(text, shown):
    assert without_secrets(text) == (shown or text)


def test_programs_are_shown_without_what_this_process_holds_as_a_secret(environment):
    secret_names.set_secrets({"JUDGE_NOTE": "veiled-9431"})
    assert without_secrets("if note == 'veiled-9431': pass") == "if note == '***': pass"
