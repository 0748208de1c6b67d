"""A run in a session of tmux."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import processes_of
from tests.test_plan import make_config
from verifiers_rl.cli import session
from verifiers_rl.cli.plan import plan_servers


def run_in_tmux(folder, name="s"):
    config = make_config(inference_gpus=0)
    options = SimpleNamespace(session=name, resume=None, overwrite=False)
    return session.run_in_tmux(config, options, folder, plan_servers(config))


def test_a_tmux_that_does_not_start_is_one_clear_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(session.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit):
        run_in_tmux(tmp_path)
    assert "tmux started no session; start with --no-tmux" in capsys.readouterr().err
    assert not list(tmp_path.glob(".environment-*"))


def test_tmux_is_shown_nothing_of_the_environment(tmp_path, monkeypatch):
    # All users of a machine can read a command's words.
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    calls, environments = [], []

    def run(command, **options):
        calls.append(command)
        if command[1] == "new-session":
            (given,) = [Path(word) for word in command if "environment" in word]
            assert given.stat().st_mode & 0o777 == 0o600
            environments.append(json.loads(given.read_text()))
            pane = command[command.index("--") + 1 :]
            status_file = Path(pane[pane.index(str(given)) + 1])
            status_file.write_text("3")
        return SimpleNamespace(returncode=int(command[1] == "has-session"))

    monkeypatch.setattr(session.subprocess, "run", run)
    assert run_in_tmux(tmp_path) == 3
    assert environments[0]["HF_TOKEN"] == "hf_secret" and "TMUX" not in environments[0]
    assert not any("hf_secret" in word for command in calls for word in command)


@pytest.mark.parametrize(
    ("wanted", "name"),
    [("my-run_2", "my-run_2"), ("qwen3-0.6b", "qwen3-0_6b"), ("=$é x", "____x"), ("-x", None)],
)
def test_a_session_has_a_name_that_tmux_keeps(wanted, name):
    if name is None:
        with pytest.raises(SystemExit):
            session.session_name(wanted)
    else:
        assert session.session_name(wanted) == name


@pytest.fixture
def tmux(tmp_path, monkeypatch):
    """A tmux server of this test's own, in which we are already: nothing is attached."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    monkeypatch.setenv("TMUX", f"{tmp_path}/tmux,1,0")
    monkeypatch.setenv("VF_RL_TEST", str(tmp_path))
    # The first session starts the server, which goes on with it.
    yield
    subprocess.run(["tmux", "kill-server"], capture_output=True)
    deadline = time.monotonic() + 20
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(tmp_path) == {}


def of_session(monkeypatch, code, *words):
    """The tmux session runs this code in place of vf-rl."""
    command = [sys.executable, "-c", code, *map(str, words)]
    monkeypatch.setattr(session, "command_in_session", lambda *_: command)


@pytest.mark.parametrize("lines", ["24", "2"])  # with room for two panes, and for one
def test_what_the_run_printed_last_is_shown_when_its_session_is_gone(
    tmux, tmp_path, monkeypatch, capsys, lines
):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", lines)
    (tmp_path / "config.json").write_text("{}")  # a model
    of_session(monkeypatch, "import time; time.sleep(0.3)")
    assert run_in_tmux(tmp_path, "qwen3-0.6b") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("vf-rl: running in tmux session 'qwen3-0_6b'")
    assert said[-1] == f"model: {tmp_path}"


def test_ctrl_c_in_the_session_ends_the_run_in_good_order(tmux, tmp_path, monkeypatch, capsys):
    code = """
import signal, sys, time
from pathlib import Path

def save(*_):
    time.sleep(0.5)
    Path(sys.argv[1], "saved").write_text("")
    sys.exit(130)

signal.signal(signal.SIGINT, save)
Path(sys.argv[1], "up").write_text("")
time.sleep(60)
"""
    of_session(monkeypatch, code, tmp_path)

    def press_ctrl_c():
        deadline = time.monotonic() + 30
        while not (tmp_path / "up").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        subprocess.run(["tmux", "send-keys", "-t", "=s:.1", "C-c"], env=os.environ)

    threading.Thread(target=press_ctrl_c).start()
    assert run_in_tmux(tmp_path) == 130
    assert (tmp_path / "saved").exists()
    assert capsys.readouterr().out.splitlines()[-1] == f"its files: {tmp_path}"
