"""A run in a session of tmux: a pane with the servers' logs, and one with the trainer. Both stay
when the run has ended, until somebody presses Enter there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from verifiers_rl.cli.config import RunConfig, words_of
from verifiers_rl.cli.errors import fail
from verifiers_rl.cli.plan import ServerPlan
from verifiers_rl.cli.supervise import LOGS


def session_name(wanted: str) -> str:
    """Return a name that tmux neither changes nor interprets: "." and ":" separate windows and
    panes, "$", "@", "%", "=" and others have a meaning where a session is named.
    """
    name = re.sub(r"[^\w-]", "_", wanted, flags=re.ASCII)
    if not name.strip("_") or name.startswith("-") or name == "default":  # tmux's own server
        fail(f"-s {wanted!r}: give the tmux session another name, of letters and digits")
    return name


def run_in_tmux(config: RunConfig, wanted: str, folder: Path, plans: Sequence[ServerPlan]) -> int:
    """Start the run in a session and show it. Every command is an argument list: tmux runs it
    without a shell. Returns the exit status of tmux.

    The session has a tmux server of its own. This server starts with our environment, which
    therefore is in no command, where all users of this machine could read it.

    Args:
        wanted: the session's name.
        folder: the output_dir, absolute.
        plans: of the servers.
    """
    session = session_name(wanted)
    tmux = ["tmux", "-L", session]
    if run(*tmux, "has-session") == 0:
        fail(
            f"tmux session {session!r} exists; choose another name with -s, or end it: "
            f"tmux -L {session} kill-server"
        )
    stays = ["start-server", ";", "set-option", "-g", "remain-on-exit", "on", ";"]
    width, height = map(str, shutil.get_terminal_size())
    new = ["new-session", "-d", "-s", session, "-x", width, "-y", height, "--"]
    if run(*tmux, *stays, *new, *command_in_session(config)) != 0:
        fail("tmux started no session; start with --no-tmux")
    if logs := [f"{folder}/{LOGS}/{plan.name}.log" for plan in plans]:  # where there is room
        run(*tmux, "split-window", "-d", "-b", "-l", "30%", "--", "tail", "-F", *logs)
    run(
        *tmux,
        "bind-key",
        "-n",
        "Enter",
        "if-shell",
        "-F",
        "#{pane_dead}",
        "kill-session",
        "send-keys Enter",
    )
    print(
        f"vf-rl: running in tmux session {session!r}: tmux -L {session} attach. When the run has "
        f"ended, Enter closes it; its files: {folder}",
        flush=True,
    )
    return 0 if "TMUX" in os.environ else subprocess.call([*tmux, "attach-session"])


def command_in_session(config: RunConfig) -> list[str]:
    return [sys.executable, "-m", "verifiers_rl.cli.rl", *words_of(config), "--no-tmux"]


def run(*words: str) -> int:
    """Return the exit status of a command; what it prints is not shown."""
    return subprocess.run(words, capture_output=True).returncode
