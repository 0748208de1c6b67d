"""The trackers of `report_to`: wandb, tensorboard and so on."""

from __future__ import annotations

from typing import Any


def tracker_error(report_to: Any) -> str | None:
    """Return why one of these trackers cannot be used, or None."""
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
