"""Functions and classes that a user names as "module:name", in an option or in a TOML."""

from __future__ import annotations

import importlib
import re
from typing import Any


class UserCodeError(ValueError):
    """The name cannot be loaded; the message says which field has it, and why."""


def names_user_code(value: str) -> bool:
    """Return whether this value has the form "module:name"."""
    return bool(re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value))


def load_user_code(value: str, field: str) -> Any:
    """Import and return what "module:name" names.

    Args:
        value: its module is installed, or is beside the script that runs or the TOML.
        field: the option that has this value, for errors.

    Raises:
        UserCodeError: the value has another form, there is no such module, or the module has no
            callable of this name. An error of the module's own code is raised as it is.
    """
    if not names_user_code(value):
        raise UserCodeError(f"{field}={value!r}: must be of the form module:name")
    module_name, _, name = value.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the missing module is one that this module imports
        raise UserCodeError(
            f"{field}={value!r}: no module {error.name!r}, neither installed nor beside the TOML "
            "or the script that runs"
        ) from error
    if not callable(found := getattr(module, name, None)):
        what = "it is not callable" if hasattr(module, name) else f"it has no {name!r}"
        raise UserCodeError(f"{field}={value!r}: in {module.__file__}, {what}")
    return found
