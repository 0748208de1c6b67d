"""A run in a session of tmux."""

import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests.conftest import processes_of
from tests.test_plan import make_config
from verifiers_rl.cli import session
from verifiers_rl.cli.plan import plan_servers


def run_in_tmux(folder, name="s"):
    config = make_config(inference_gpus=0)
    options = SimpleNamespace(session=name, resume=False, overwrite=False)
    return session.run_in_tmux(config, options, folder, plan_servers(config))


def test_a_tmux_that_does_not_start_is_one_clear_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(session.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit):
        run_in_tmux(tmp_path)
    assert "tmux started no session; start with --no-tmux" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("my-run_2", "my-run_2"),
        ("qwen3-0.6b", "qwen3-0_6b"),
        ("=$é x", "____x"),
        ("-x", None),
        ("default", None),
    ],
)
def test_a_session_has_a_name_that_tmux_keeps(wanted, name):
    if name is None:
        with pytest.raises(SystemExit):
            session.session_name(wanted)
    else:
        assert session.session_name(wanted) == name


CODE = """
import os, signal, sys, time
from pathlib import Path

def save(*_):
    time.sleep(0.5)
    Path(sys.argv[1], "saved").write_text(os.environ["HF_TOKEN"])
    sys.exit(130)

signal.signal(signal.SIGINT, save)
Path(sys.argv[1], "up").write_text("")
time.sleep(60)
"""


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
@pytest.mark.parametrize("lines", ["24", "2"])  # with room for two panes, and for one
def test_a_run_in_a_session_ends_in_good_order_and_stays_to_be_read(
    tmp_path, monkeypatch, capsys, lines
):
    monkeypatch.setenv("TMUX", f"{tmp_path}/tmux,1,0")  # nothing is attached
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.setenv("VF_RL_TEST", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", lines)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    words = []
    start = session.run
    monkeypatch.setattr(session, "run", lambda *given: words.extend(given) or start(*given))
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    monkeypatch.setattr(session, "command_in_session", lambda *_: command)

    def tmux(*given):
        command = ["tmux", "-L", "qwen3-0_6b", *given]
        return subprocess.run(command, capture_output=True, text=True).stdout

    try:
        assert run_in_tmux(tmp_path, "qwen3-0.6b") == 0
        said = capsys.readouterr().out
        assert "running in tmux session 'qwen3-0_6b': tmux -L qwen3-0_6b attach" in said
        # All users of a machine can read a command's words.
        assert not any("hf_secret" in word for word in words)
        wait_until((tmp_path / "up").exists)
        panes = tmux("list-panes", "-F", "#{pane_id} #{pane_start_command}").splitlines()
        assert len(panes) == (2 if lines == "24" else 1)
        (own,) = [pane.split()[0] for pane in panes if "tail" not in pane]
        with pytest.raises(SystemExit):
            run_in_tmux(tmp_path, "qwen3-0.6b")
        assert "tmux session 'qwen3-0_6b' exists" in capsys.readouterr().err
        tmux("send-keys", "-t", own, "C-c")
        # tmux does not always know the exit status.
        wait_until(lambda: tmux("display-message", "-p", "-t", own, "#{pane_dead}") == "1\n")
        assert (tmp_path / "saved").read_text() == os.environ["HF_TOKEN"]
    finally:
        tmux("kill-server")
    wait_until(lambda: processes_of(tmp_path) == {})
