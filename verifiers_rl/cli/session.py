"""A run in a session of tmux: one pane for each server, one for the trainer."""

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
from pathlib import Path

from verifiers_rl.cli import pane
from verifiers_rl.cli.config import RunConfig, folder_words
from verifiers_rl.cli.errors import fail
from verifiers_rl.cli.plan import log_of, servers_to_start
from verifiers_rl.report.run_folder import closing_lines


def session_name(wanted: str) -> str:
    """Return a name that tmux neither changes nor interprets.

    tmux replaces "." and ":" in a new name, but then looks for the session under the original name.
    "$", "@", "%" and others have a special meaning where a session is named.
    """
    name = re.sub(r"[^\w-]", "_", wanted, flags=re.ASCII)
    if not name.strip("_") or name.startswith("-"):
        fail(f"-s {wanted!r}: give the tmux session a name of letters and digits")
    return name


def run_in_tmux(config: RunConfig, options: argparse.Namespace, folder: Path) -> int:
    """Run the supervisor in one pane and show the server's log in the other. Returns the trainer's
    exit status.

    Every command is an argument list: tmux runs it without a shell.

    Args:
        folder: the output_dir, absolute.
    """
    session = session_name(options.session)
    if session != options.session:
        print(f"vf-rl: the tmux session is named {session!r}", flush=True)
    if is_running(session):
        fail(
            f"tmux session {session!r} exists; choose another name with -s, or end it: "
            f"tmux kill-session -t {session}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    log, status_file = folder / "inference.log", folder / f".exit-status-{secrets.token_hex(4)}"
    num_logs = len(servers_to_start(config))
    logs = [log_of(log, number, num_logs) for number in range(num_logs)]
    for one in logs:
        one.write_bytes(b"")
    # In a file, not as words of a command: all users of this machine can read those.
    environment = folder / f".environment-{secrets.token_hex(4)}"
    variables = {k: v for k, v in os.environ.items() if k not in ("TMUX", "TMUX_PANE")}
    with os.fdopen(os.open(environment, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(variables, file)
    program = [sys.executable, str(Path(pane.__file__))]
    me = command_in_session(config, options, log)
    command = [*program, str(environment), str(status_file), session, *me]
    width, height = shutil.get_terminal_size()
    size = ["-x", str(width), "-y", str(height)]
    started = subprocess.run(["tmux", "new-session", "-d", "-s", session, *size, "--", *command])
    if started.returncode != 0:
        environment.unlink(missing_ok=True)
        fail("tmux started no session; start with --no-tmux")
    # This may fail: the terminal is too small for a second pane, or the run has ended already.
    target = ["-l", "30%", "-t", f"={session}:"]
    for number, one in enumerate(logs):
        tail = ["--", "tail", "-F", str(one)]
        subprocess.run(["tmux", "split-window", "-d", "-b", *target, *tail], capture_output=True)
        # The panes of further servers beside the first one's, which is above the trainer's.
        share = 100 - 100 // (len(logs) - number)
        target = ["-h", "-l", f"{share}%", "-t", f"={session}:.0"]
    if "TMUX" in os.environ:
        print(
            f"vf-rl: running in tmux session {session!r}; switch to it: "
            f"tmux switch-client -t {session}",
            flush=True,
        )
    else:
        subprocess.run(["tmux", "attach-session", "-t", f"={session}"])
    if not status_file.exists():
        print(
            f"vf-rl: the run continues in tmux session {session!r}; back to it: "
            f"tmux attach -t {session}",
            flush=True,
        )
    while not status_file.exists() and is_running(session):
        time.sleep(0.5)  # the run is a child of tmux, so we cannot wait for it
    if not status_file.exists():
        print("vf-rl: error: the session ended before the run did", file=sys.stderr)
        return 1
    status = int(status_file.read_text())
    status_file.unlink()
    shown = f"; the server's log is {', '.join(map(str, logs))}" if logs else ""
    print(f"vf-rl: the run ended with status {status}{shown}", flush=True)
    # The session that showed these lines is gone.
    print("\n".join(closing_lines(folder) if status == 0 else [f"its files: {folder}"]), flush=True)
    return status


def command_in_session(config: RunConfig, options: argparse.Namespace, log: Path) -> list[str]:
    me = [sys.executable, "-m", "verifiers_rl.cli.rl", *config.words]
    return [*me, "--no-tmux", "--in-session", "--server-log", str(log), *folder_words(options)]


def is_running(session: str) -> bool:
    command = ["tmux", "has-session", "-t", f"={session}"]
    return subprocess.run(command, capture_output=True).returncode == 0
