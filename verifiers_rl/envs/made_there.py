"""Makes the environment of another Python, in its rollout worker; see foreign.py. Nothing that runs
in the trainer's process imports this module.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from verifiers_rl.envs.base import InvalidEnvironmentError, RunnerOptions, add_folders


def make_environment(recipe: Mapping[str, Any]) -> Any:
    """Make the `EnvRunner` of a `ForeignEnvironment`'s recipe, with its examples. It is a classic
    one if the verifiers of this Python has those.

    Raises:
        InvalidEnvironmentError: it cannot be made here.
        Exception: whatever the loading of a classic one raises.
    """
    options, table, folders = RunnerOptions(**recipe["options"]), recipe["table"], recipe["folders"]
    if options.tokenizer is not None:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        tokenizer.name_or_path = recipe["model"]  # the `renderers` package knows models by it
        options = replace(options, tokenizer=tokenizer)
    if find_spec("verifiers.legacy") is None:
        from verifiers_rl.envs.v1 import V1Environment
        from verifiers_rl.envs.v1_loading import load_v1_environment

        return V1Environment(load_v1_environment(table, *folders), options)
    if unknown := sorted(table.keys() - {"id", "args", "client_type"}):
        raise InvalidEnvironmentError(
            f"unknown keys: {', '.join(unknown)}; a classic environment has id, args (of its "
            "load_environment) and client_type, and a taskset needs verifiers 0.4 or later; this "
            f"Python has {version('verifiers')}"
        )
    from verifiers_rl.envs.classic import CLIENT_TYPES, ClassicEnvironment

    add_folders(*folders)
    verifiers: Any = importlib.import_module("verifiers")
    env = verifiers.load_environment(table["id"].split("@", 1)[0], **table.get("args", {}))
    return ClassicEnvironment(env, options, table.get("client_type", CLIENT_TYPES[0]))
