"""Folders that are complete or absent, whenever the process or the machine ends."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path


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
    for path in [*sorted(folder.rglob("*"), reverse=True), folder]:  # a folder after what it has
        sync(path)


def put_in_place(path: Path, target: Path) -> None:
    """Rename a file or folder to `target`, on the same disk. What has that name is removed: a file
    at once, a folder by `remove_folder`.
    """
    if target.is_symlink():
        target.unlink()
    elif target.is_dir():
        remove_folder(target, path.parent)
    path.replace(target)
    sync(target.parent)


def remove_folder(folder: Path, aside: Path) -> None:
    """Remove a folder. It is renamed first, to a name in the folder `aside` on the same disk, so
    that a process that is killed meanwhile leaves no part of it under its name.
    """
    renamed = aside / f"removed-{folder.name}"
    folder.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)
