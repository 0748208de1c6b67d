"""Files to begin with: a workspace, or a fork of the trainer.

`vf-setup [DIR] [--example NAME]` writes a workspace, a folder in which a run can begin.

The files are those of examples/: a folder of it (without --example its skeleton of an environment
of one's own), and what all workspaces share. A wheel has examples/ inside the package.

In examples/, commands and paths are for the repository's root. In a workspace they are for the
workspace, so `examples/NAME/` and `examples/` are removed from the texts.

`vf-rl --eject [DIR]` writes my_trainer.py and my_orchestrator.py, copies of trainer.py and
orchestrator.py. Both run unchanged, because all of their imports are absolute; the orchestrator of
the one is the other.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import verifiers_rl
from verifiers_rl.cli.errors import fail, files_error

PACKAGE = Path(verifiers_rl.__file__).parent
EXAMPLES = next(
    path for path in (PACKAGE / "examples", PACKAGE.parent / "examples") if path.is_dir()
)
SKELETON = "skeleton"
TEXTS = (".json", ".md", ".py", ".toml", ".yaml")
COPIES = {"trainer.py": "my_trainer.py", "orchestrator.py": "my_orchestrator.py"}
IMPORT = "from verifiers_rl.orchestrator import Orchestrator\n"
OWN_IMPORT = "from my_orchestrator import Orchestrator\n"
FUTURE = "from __future__ import annotations\n\n"


def main() -> None:
    known = examples()
    shown = (f"  {name.replace('_', '-'):17} {about}\n" for name, about in known.items())
    parser = argparse.ArgumentParser(
        prog="vf-setup",
        description="Write a workspace, a folder in which a run can begin.",
        epilog=f"examples:\n{''.join(shown)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(), metavar="DIR", help="default: this folder"
    )
    parser.add_argument(
        "--example",
        metavar="NAME",
        default=SKELETON,
        type=lambda name: name.replace("-", "_"),
        choices=known,
        help="default: an environment, its test and a loss of your own to change",
    )
    options = parser.parse_args()
    files = workspace_files(options.example)
    if problem := files_error(options.folder, dict.fromkeys(path.split("/")[0] for path in files)):
        fail(problem, "vf-setup")
    for path, content in files.items():
        target = options.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    where = shlex.quote(str(options.folder))
    print(f"vf-setup: wrote {', '.join(files)} into {where}")
    print(f"vf-setup: begin with README.md there\n\n    cd {where}\n    less README.md")


def examples() -> dict[str, str]:
    """Return the names of the examples, the skeleton first, and the title of each one's README."""
    found = {}
    names = sorted(path.parent.name for path in EXAMPLES.glob("*/rl.toml"))
    for name in sorted(names, key=SKELETON.__ne__):
        if name != "classic":  # which needs a Python of its own
            title = (EXAMPLES / name / "README.md").read_text("utf-8").partition("\n")[0]
            found[name] = title.partition(": ")[2]
    return found


def workspace_files(name: str) -> dict[str, bytes]:
    """Return the content of a workspace's files, by their paths in it."""
    sources = {path.name: path for path in sorted((EXAMPLES / name).iterdir()) if path.is_file()}
    sources.setdefault("train.py", EXAMPLES / "train.py")
    if "warm_start.py" in sources["README.md"].read_text("utf-8"):  # a tiny model, for a CPU
        sources["warm_start.py"] = EXAMPLES / "warm_start.py"
    accelerate = sorted((EXAMPLES / "accelerate").iterdir())
    sources |= {f"accelerate/{path.name}": path for path in accelerate}
    files = {path: of_workspace(source, name) for path, source in sources.items()}
    files["README.md"] += b"\n" + of_workspace(EXAMPLES / "workspace.md", name)
    return files


def of_workspace(path: Path, name: str) -> bytes:
    """Return the content of a file, with paths as they are in a workspace."""
    if path.suffix not in TEXTS:
        return path.read_bytes()
    text = path.read_text("utf-8").replace(f"examples/{name}/", "").replace("examples/", "")
    return text.replace("](../", "](").encode()


# --- A fork ---------------------------------------------------------------------------------------


def eject(folder: Path) -> int:
    """Write both copies into the folder, and say how they are used. Returns the exit status 0, or
    ends the program if the folder has one of them already, or cannot be written.
    """
    if problem := files_error(folder, COPIES.values()):
        fail(problem)
    folder.mkdir(parents=True, exist_ok=True)
    for name, copy in COPIES.items():
        text = (PACKAGE / name).read_text("utf-8")
        text = text.replace(IMPORT, OWN_IMPORT)  # of trainer.py
        # First, because on a CPU it makes torchvision importable for transformers.
        text = text.replace(FUTURE, f"{FUTURE}import verifiers_rl  # before transformers\n", 1)
        version = verifiers_rl.__version__
        head = f"# Copied from verifiers_rl {version}, {name}, by `vf-rl --eject`.\n"
        (folder / copy).write_text(head + text, "utf-8")
    print(
        f"vf-rl: wrote {folder / 'my_trainer.py'}, a copy of trainer.py,\n"
        f"       and {folder / 'my_orchestrator.py'}, a copy of orchestrator.py that it uses.\n"
        "Both run as they are. A TOML beside them uses them with these lines:\n\n"
        '[trainer]\nclass = "my_trainer:RLTrainer"\n\n'
        "and a script beside them with `from my_trainer import RLTrainer`.\n"
        "docs/architecture.md says which method is for what."
    )
    return 0


if __name__ == "__main__":
    main()
