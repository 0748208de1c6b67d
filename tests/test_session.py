"""A run in a session of tmux."""

import os
import pty
import shutil
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

from tests.configs import make_config
from tests.conftest import processes_of, wait_until
from tests.helpers import ROOT
from verifiers_rl.cli import rl

CONFIG = make_config("inference.gpus = 0")


def run_in_tmux(folder):
    return rl.run_in_tmux(CONFIG, "qwen3-0.6b", folder, [SimpleNamespace(name="inference")])


def test_the_command_in_a_session_is_the_run_itself():
    config = make_config("trainer.args.resume_from_checkpoint = true")
    words = rl.command_in_session(config)[2:]
    assert words == ["verifiers_rl.cli.rl", "@", "/a/rl.toml", "--resume", "--no-tmux"]


@pytest.mark.parametrize(
    ("wanted", "name"),
    [("qwen3-0.6b", "qwen3-0_6b"), ("=$é x", "____x"), ("-x", None), ("default", None)],
)
def test_a_session_has_a_name_that_tmux_keeps(wanted, name):
    if name is None:
        with pytest.raises(SystemExit):
            rl.session_name(wanted)
    else:
        assert rl.session_name(wanted) == name


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
DRIVER = """
import sys
from pathlib import Path
from types import SimpleNamespace
from tests.configs import make_config
from verifiers_rl.cli import rl

code, folder = sys.argv[1:]
rl.command_in_session = lambda *_: [sys.executable, "-c", code, folder]
plans = [SimpleNamespace(name="inference")]
sys.exit(rl.run_in_tmux(make_config("inference.gpus = 0"), "qwen3-0.6b", Path(folder), plans))
"""


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
@pytest.mark.parametrize("is_attached", [True, False])
def test_a_run_in_a_session_ends_in_good_order_and_stays_to_be_read(
    tmp_path, monkeypatch, capsys, is_attached
):
    variables = {"TMUX_TMPDIR": str(tmp_path), "VF_RL_TEST": str(tmp_path), "TERM": "xterm"}
    variables["HF_TOKEN"] = "hf_secret"
    monkeypatch.delenv("TMUX", raising=False)
    if not is_attached:  # as from within another session, with room for one pane
        variables |= {"TMUX": f"{tmp_path}/tmux,1,0", "COLUMNS": "20", "LINES": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    leader, terminal = pty.openpty()
    os.set_blocking(leader, False)
    command = [sys.executable, "-c", DRIVER, CODE, str(tmp_path)]
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, cwd=ROOT
    )
    os.close(terminal)
    shown = bytearray()

    def tmux(*words):
        words = ["tmux", "-L", "qwen3-0_6b", *words]
        return subprocess.run(words, capture_output=True, text=True, timeout=10).stdout

    def panes():
        return tmux("list-panes", "-F", "#{pane_id} #{pane_start_command}").splitlines()

    def wait_for(condition):
        def is_so():
            with suppress(OSError):  # nothing was written just now
                shown.extend(os.read(leader, 65536))  # tmux waits for a terminal that is not read
            return condition()

        wait_until(is_so, 60, lambda: shown)

    try:
        wait_for((tmp_path / "up").exists)
        wait_for(lambda: len(panes()) == 1 + is_attached)
        wait_for(lambda: b"tmux -L qwen3-0_6b attach" in shown)
        # All users of a machine can read a command's words.
        assert not any("hf_secret" in line for line in processes_of(tmp_path).values())
        (own,) = [pane.split()[0] for pane in panes() if "tail" not in pane]
        with pytest.raises(SystemExit):
            run_in_tmux(tmp_path)
        assert "tmux session 'qwen3-0_6b' exists" in capsys.readouterr().err
        tmux("send-keys", "-t", own, "C-c")
        # tmux does not always know the exit status.
        wait_for(lambda: tmux("display-message", "-p", "-t", own, "#{pane_dead}") == "1\n")
        assert (tmp_path / "saved").read_text() == "hf_secret"
        if is_attached:
            os.write(leader, b"\r")  # Enter closes the session
        wait_for(lambda: process.poll() is not None)
        assert process.returncode == 0
    finally:
        tmux("kill-server")
        process.kill()
        process.wait()
        os.close(leader)
    wait_until(lambda: processes_of(tmp_path) == {})
