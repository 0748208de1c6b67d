"""Folders that are complete or absent, whenever the process or the machine ends."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

_REPLACED = "replaced-"  # how the name of a folder begins that is being replaced


def sync(path: Path) -> None:
    """Wait until the disk has the content of this file, or the names in this folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do this for files only, and bring names there at once.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until the disk has all files of a folder, and those of the folders in it."""
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(path) / name)
        sync(Path(path))


def put_in_place(path: Path, target: Path) -> None:
    """Rename a file or folder to `target`, on the same disk. What has that name is removed.

    A file is replaced at once. A folder that is replaced is renamed first, so that a process that
    is killed meanwhile leaves no part of it under its name; see `restore_replaced`.
    """
    old = path.with_name(f"{_REPLACED}{target.name}")
    if target.is_symlink():
        target.unlink()
    elif target.is_dir():
        target.rename(old)
    path.replace(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_replaced(aside: Path, folder: Path) -> None:
    """Give folders their names back that a process lost when it was killed in `put_in_place`,
    between its two renames.

    Args:
        aside: where it had what was to be put in place.
        folder: where it put it.
    """
    for old in aside.glob(f"{_REPLACED}*"):
        target = folder / old.name.removeprefix(_REPLACED)
        if not target.exists():
            old.rename(target)


def remove_folder(folder: Path, aside: Path) -> None:
    """Remove a folder. It is renamed first, to a name in the folder `aside` on the same disk, so
    that a process that is killed meanwhile leaves no part of it under its name.
    """
    aside.mkdir(exist_ok=True)
    renamed = aside / f"removed-{folder.name}"
    shutil.rmtree(renamed, ignore_errors=True)
    folder.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)
