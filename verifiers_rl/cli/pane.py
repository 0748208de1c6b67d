"""Runs a command in a tmux pane. Its environment is read from a file, which is then removed; its
exit status is written to another file. The session then ends, after Enter if the command failed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path


def main() -> None:
    environment, status_file, session, *command = sys.argv[1:]
    variables = json.loads(Path(environment).read_text())
    Path(environment).unlink()
    # Ctrl-C reaches the command and this process. The command ends in good order, and we wait for
    # that. This is a handler, because the command would inherit SIG_IGN.
    signal.signal(signal.SIGINT, lambda *_: None)
    status = subprocess.call(command, env=variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    temporary = Path(status_file + ".tmp")
    temporary.write_text(str(status))
    temporary.rename(status_file)
    if status == 0:
        subprocess.run(["tmux", "kill-session", "-t", f"={session}"])
    else:
        try:
            input(f"vf-rl ended with status {status}; Enter closes this session. ")
        except (EOFError, KeyboardInterrupt):
            pass  # also closes the session
        subprocess.run(["tmux", "kill-session", "-t", f"={session}"])


if __name__ == "__main__":
    main()
