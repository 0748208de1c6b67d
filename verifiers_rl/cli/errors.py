"""Checks that turn a wrong setting into one clear line before anything heavy starts."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from verifiers_rl.process.terminal import printable


def folder_error(output_dir: str) -> str | None:
    """Return why nothing can be written into this folder, or None. Leaves nothing behind."""
    folder = existing = Path(output_dir).absolute()
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        # A real write: permissions do not show that a disk is full or read-only.
        with tempfile.TemporaryDirectory(prefix=".vf-rl-", dir=existing):
            return None
    except OSError as error:
        return (
            f"output_dir={output_dir!r} cannot be written: {existing}: {error.strerror}; "
            "choose another"
        )


def files_error(folder: Path, names: Iterable[str]) -> str | None:
    """Return why no files of these names can be made in the folder, or None."""
    if problem := folder_error(str(folder)):
        return problem.removeprefix("output_dir=")
    try:
        held = [name for name in names if (folder / name).exists()]
    except OSError as error:  # a name is too long
        return f"{folder}: {error.strerror}; choose another name"
    return f"{folder} holds {', '.join(held)} already; choose another folder" if held else None


def fail(message: object, program: str = "vf-rl") -> NoReturn:
    print(printable(f"{program}: error: {message}"), file=sys.stderr)
    sys.exit(1)
