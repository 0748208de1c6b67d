"""Loads the public names of a package on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def load_on_first_use(
    package: str, home: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], set[str]]]:
    """Make a package's `__getattr__` and `__dir__` (PEP 562).

    Args:
        package: the package's name.
        home: for each public name, the module inside the package that has it.
    """

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    def names() -> set[str]:
        return {*vars(sys.modules[package]), *home}

    return get, names
