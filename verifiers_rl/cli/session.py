"""A run in a session of tmux: a pane with the servers' logs, and one with the trainer."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from verifiers_rl.cli import pane
from verifiers_rl.cli.config import RunConfig, folder_words
from verifiers_rl.cli.errors import fail
from verifiers_rl.cli.plan import ServerPlan
from verifiers_rl.report.run_folder import closing_lines


def session_name(wanted: str) -> str:
    """Return a name that tmux neither changes nor interprets: "." and ":" separate windows and
    panes, "$", "@", "%", "=" and others have a meaning where a session is named.
    """
    name = re.sub(r"[^\w-]", "_", wanted, flags=re.ASCII)
    if not name.strip("_") or name.startswith("-"):
        fail(f"-s {wanted!r}: give the tmux session a name of letters and digits")
    return name


def run_in_tmux(
    config: RunConfig, options: argparse.Namespace, folder: Path, plans: Sequence[ServerPlan]
) -> int:
    """Run the supervisor in one pane and show the servers' logs in another. Returns the trainer's
    exit status.

    Every command is an argument list: tmux runs it without a shell.

    Args:
        folder: the output_dir, absolute.
        plans: of the servers.
    """
    session = session_name(options.session)
    if is_running(session):
        fail(
            f"tmux session {session!r} exists; choose another name with -s, or end it: "
            f"tmux kill-session -t {session}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    status_file = folder / f".exit-status-{secrets.token_hex(4)}"
    log = folder / "inference.log"
    logs = [str(plan.log(log)) for plan in plans]
    # In a file, not as words of a command: all users of this machine can read those.
    environment = folder / f".environment-{secrets.token_hex(4)}"
    variables = {k: v for k, v in os.environ.items() if k not in ("TMUX", "TMUX_PANE")}
    with os.fdopen(os.open(environment, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(variables, file)
    command = [sys.executable, pane.__file__, str(environment), str(status_file), session]
    command += command_in_session(config, options, log)
    width, height = map(str, shutil.get_terminal_size())
    new = ["new-session", "-d", "-s", session, "-x", width, "-y", height, "--", *command]
    if tmux(*new) != 0:
        environment.unlink(missing_ok=True)
        fail("tmux started no session; start with --no-tmux")
    if logs:  # a terminal that is too small gets no second pane
        target = ["-l", "30%", "-t", f"={session}:"]
        tmux("split-window", "-d", "-b", *target, "--", "tail", "-F", *logs)
    print(f"vf-rl: running in tmux session {session!r}: tmux attach -t {session}", flush=True)
    if "TMUX" not in os.environ:
        subprocess.run(["tmux", "attach-session", "-t", f"={session}"])
    if not status_file.exists():
        print(f"vf-rl: the run continues in tmux session {session!r}", flush=True)
    while not status_file.exists() and is_running(session):
        time.sleep(0.5)  # the run is a child of tmux, so we cannot wait for it
    if not status_file.exists():
        print("vf-rl: error: the session ended before the run did", file=sys.stderr)
        return 1
    status = int(status_file.read_text())
    status_file.unlink()
    shown = f"; its servers' logs: {', '.join(logs)}" if logs else ""
    print(f"vf-rl: the run ended with status {status}{shown}", flush=True)
    # The session that showed these lines is gone.
    print("\n".join(closing_lines(folder) if status == 0 else [f"its files: {folder}"]), flush=True)
    return status


def command_in_session(config: RunConfig, options: argparse.Namespace, log: Path) -> list[str]:
    me = [sys.executable, "-m", "verifiers_rl.cli.rl", *config.words]
    return [*me, "--no-tmux", "--server-log", str(log), *folder_words(options)]


def is_running(session: str) -> bool:
    return tmux("has-session", "-t", f"={session}") == 0


def tmux(*words: str) -> int:
    """Return the exit status of a command of tmux; what it prints is not shown."""
    return subprocess.run(["tmux", *words], capture_output=True).returncode
