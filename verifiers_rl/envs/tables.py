"""Makes the environment that a table names: [env] in a TOML, or the dict of a `WeightedEnv`.

{"id": ..., "args": {...}}      a taskset of verifiers.v1 and keys of its config
{"taskset": {"id": ...}, ...}   keys of verifiers.v1's EnvConfig
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verifiers_rl.envs.base import (
    HOW_TO_MAKE_PYTHON,
    InvalidEnvironmentError,
    RunnerOptions,
    add_folders,
    module_name,
)


def load_table(table: Mapping[str, Any], folders: Sequence[Path] = ()) -> Any:
    """Load an environment of verifiers.v1.

    Args:
        folders: its module may be there, beside those that are installed.

    Raises:
        InvalidEnvironmentError: there is none, it cannot be loaded, or it is a classic one.
    """
    from verifiers_rl.envs.v1_loading import load_v1_environment

    if "taskset" in table:
        return load_v1_environment(table, *folders)
    add_folders(folders)
    env_id = table["id"]
    found: Any = None
    with suppress(ModuleNotFoundError):  # `load_v1_environment` says what is missing
        found = importlib.import_module(module_name(env_id))
    if hasattr(found, "load_environment") and not hasattr(found, "__all__"):
        raise InvalidEnvironmentError(
            f"[env] id={env_id!r} is a classic environment, which needs an older verifiers; "
            f"{HOW_TO_MAKE_PYTHON} beside the id"
        )
    return load_v1_environment({"taskset": {"id": env_id, **table.get("args", {})}}, *folders)


# --- In a rollout worker of another Python --------------------------------------------------------


def make_environment(recipe: Mapping[str, Any]) -> Any:
    """Make the `EnvRunner` of the recipe of a `foreign.ForeignEnvironment`, with its examples. It
    is a classic one if the verifiers of this Python has those.

    Raises:
        InvalidEnvironmentError: it cannot be made here.
        Exception: whatever the loading of a classic one raises.
    """
    options = RunnerOptions(**recipe["options"])
    if options.tokenizer:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch
        from transformers import AutoTokenizer

        options = replace(options, tokenizer=AutoTokenizer.from_pretrained(options.tokenizer))
    table, folders = recipe["table"], [Path(folder) for folder in recipe["folders"]]
    if find_spec("verifiers.legacy") is None:
        from verifiers_rl.envs.v1 import V1Environment

        return V1Environment(load_table(table, folders), options)
    if "taskset" in table:
        raise InvalidEnvironmentError(
            f"a taskset needs verifiers 0.4 or later, and this Python has {version('verifiers')}"
        )
    from verifiers_rl.envs.classic import ClassicEnvironment

    add_folders(folders)
    verifiers: Any = importlib.import_module("verifiers")
    env_id: str = table["id"]
    env = verifiers.load_environment(env_id.split("@", 1)[0], **table.get("args", {}))
    return ClassicEnvironment(env, options)
