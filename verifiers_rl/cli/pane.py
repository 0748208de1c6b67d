"""Runs a command in a tmux pane and leaves its exit status in a file,
then ends the session when all went well.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> None:
    status_file, session, *command = sys.argv[1:]
    status = subprocess.call(command)
    temporary = Path(status_file + ".tmp")
    temporary.write_text(str(status))
    temporary.rename(status_file)
    if status == 0:
        subprocess.run(["tmux", "kill-session", "-t", f"={session}"])
    else:
        input(f"vf-rl ended with status {status}; Enter closes this session. ")
        subprocess.run(["tmux", "kill-session", "-t", f"={session}"])


if __name__ == "__main__":
    main()
