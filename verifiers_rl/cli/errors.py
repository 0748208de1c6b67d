"""Checks that turn a wrong setting into one clear line before anything heavy starts."""

from __future__ import annotations

from pathlib import Path


def model_error(name: str) -> str | None:
    """Why `name` is not a model that can be loaded, or None:
    a folder with a config.json, or a name on the hub.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        has_config = (path / "config.json").is_file()
        return None if has_config else f"model {name!r}: the folder has no config.json"
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        return f"model {name!r}: no such folder"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        hf_hub_download(name, "config.json", etag_timeout=10)
    except LocalEntryNotFoundError:
        return (
            f"model {name!r}: neither a folder here nor in the local cache, "
            "and the hub could not be reached"
        )
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        return (
            f"model {name!r}: neither a folder here nor a model on the hub ({type(error).__name__})"
        )
    return None
