"""`vf-rl --eject [DIR]`: copies of trainer.py and orchestrator.py, as the start of a fork.

    my_trainer.py         trainer.py; its orchestrator is the copy beside it
    my_orchestrator.py    orchestrator.py

Both run unchanged, because all of their imports are absolute.
"""

from __future__ import annotations

from pathlib import Path

import verifiers_rl
from verifiers_rl.cli.errors import fail, files_error

COPIES = {"trainer.py": "my_trainer.py", "orchestrator.py": "my_orchestrator.py"}
IMPORT = "from verifiers_rl.orchestrator import Orchestrator\n"
OWN_IMPORT = "from my_orchestrator import Orchestrator\n"


def eject(folder: Path) -> int:
    """Write both copies into the folder, and say how they are used. Returns the exit status 0, or
    ends the program if the folder has one of them already, or cannot be written.
    """
    if problem := files_error(folder, COPIES.values()):
        fail(problem)
    folder.mkdir(parents=True, exist_ok=True)
    for name, copy in COPIES.items():
        text = (Path(verifiers_rl.__file__).parent / name).read_text()
        if name == "trainer.py":
            assert text.count(IMPORT) == 1
            text = text.replace(IMPORT, OWN_IMPORT)
        version = verifiers_rl.__version__
        head = f"# Copied from verifiers_rl {version}, {name}, by `vf-rl --eject`.\n"
        (folder / copy).write_text(head + text)
    print(
        f"vf-rl: wrote {folder / 'my_trainer.py'}, a copy of trainer.py,\n"
        f"       and {folder / 'my_orchestrator.py'}, a copy of orchestrator.py that it uses.\n"
        "Both run as they are. A TOML beside them uses them with these lines:\n\n"
        '[trainer]\nclass = "my_trainer:RLTrainer"\n\n'
        "and a script beside them with `from my_trainer import RLTrainer`."
    )
    return 0
