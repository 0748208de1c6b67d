"""Rooms that nothing else needs: whoever forks may delete one, with its tests."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from verifiers_rl.cli.layers import TomlError


def load_leaf(module: str, purpose: str) -> Any:
    """Import a module of a leaf, such as "cluster.machines".

    Raises:
        TomlError: the leaf is not there.
    """
    try:
        return import_module(f"verifiers_rl.{module}")
    except ModuleNotFoundError as error:
        leaf = f"verifiers_rl.{module.partition('.')[0]}"
        if not f"{error.name}.".startswith(f"{leaf}."):
            raise  # something that the leaf imports
        raise TomlError(f"{purpose} needs {leaf}, which is not in this copy; restore it") from error
