"""The checkpoint that is trained and served, before it is loaded."""

from __future__ import annotations

from pathlib import Path

# Names under which transformers' configs give their number of experts.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def model_error(name: str) -> str | None:
    """Return why `name` is not a model that can be loaded, or None if it is one: a folder with a
    config.json, or a name on the hub.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        has_config = (path / "config.json").is_file()
        return None if has_config else f"model {name!r}: the folder has no config.json"
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        return f"model {name!r}: no such folder"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        hf_hub_download(name, "config.json", etag_timeout=10)
    except (OSError, HFValidationError) as error:  # OSError: no such model, or the hub is away
        return (
            f"model {name!r}: neither a folder here nor a model on the hub, as far as the hub "
            f"could be reached ({type(error).__name__})"
        )
    return None
