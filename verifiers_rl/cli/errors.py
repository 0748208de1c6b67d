"""Checks that turn a wrong setting into one clear line before anything heavy starts."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn


def folder_error(output_dir: str) -> str | None:
    """Why nothing can be written into this folder, or None. Leaves nothing behind."""
    folder = Path(output_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        # Permissions do not tell of a read-only or full disk.
        with tempfile.TemporaryDirectory(prefix=".vf-rl-", dir=existing):
            return None
    except OSError as error:
        return (
            f"output_dir={output_dir!r} cannot be written: {existing}: {error.strerror}; "
            "choose another"
        )


def tracker_error(report_to: Any) -> str | None:
    """Why one of these trackers cannot be used, or None."""
    from transformers.integrations import integration_utils

    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    known = integration_utils.INTEGRATION_TO_CALLBACK
    for name in names:
        if name in ("none", "all"):
            continue
        if name not in known:
            return f"report_to={name!r}: no such tracker; known: {', '.join(sorted(known))}"
        # is_wandb_available, is_comet_available for comet_ml, is_azureml_available, ...
        stems = (name, name.removesuffix("_ml"), name.replace("_", ""), f"{name}kit")
        found = [getattr(integration_utils, f"is_{stem}_available", None) for stem in stems]
        is_available = next(filter(None, found), None)
        if is_available is not None and not is_available():
            return f"report_to={name!r}: it is not installed; uv pip install {name}"
    return None


def fail(message: object) -> NoReturn:
    print(f"vf-rl: error: {message}", file=sys.stderr)
    sys.exit(1)
