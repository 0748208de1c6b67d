"""Checks values by their declared types and the rules beside these, with pydantic: the options of
`RLConfig`, and the keys of a TOML. The end of an error about an unknown name. Functions and classes
that a user names as "module:name", in an option or in a TOML.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import re
import typing
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    Strict,
    TypeAdapter,
    ValidationError,
)


class ConfigError(ValueError):
    """An option has a value that cannot work. The message names field, value and fix."""


STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[
    list[Text], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]
PositiveInt = Annotated[int, Field(ge=1)]
NotNegativeInt = Annotated[int, Field(ge=0)]
PositiveNumber = Annotated[float, Field(gt=0)]
NotNegativeNumber = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelow1 = Annotated[float, Field(ge=0, lt=1)]


def did_you_mean(name: str, known: Collection[str], otherwise: str = "") -> str:
    """Return "did you mean 'x'?" with a known name that begins so, or with the nearest one.

    Args:
        name: what was given.
        known: the names that exist.
        otherwise: is returned if none of them is near.
    """
    longer = [one for one in known if len(name) > 3 and one.startswith(name)]
    near = longer or difflib.get_close_matches(name, known, 1, cutoff=0.7)
    return f"did you mean {near[0]!r}?" if near else otherwise


def must(text: str, holds: Callable[[Any], bool]) -> AfterValidator:
    """Make a rule that refuses values, other than None, for which `holds` is false."""

    def check(value: Any) -> Any:
        if value is not None and not holds(value):
            raise ValueError(f"must {text}")
        return value

    return AfterValidator(check)


EnvName = Annotated[  # part of the names of metrics
    str,
    must(
        "be a name of letters, digits, blanks and '_.:@+-', such as 'math'",
        lambda name: bool(re.fullmatch(r"[\w.:@+-][\w .:@+-]*", name)),
    ),
]


def can_be_path(value: str) -> bool:
    """Return whether the system can have a file or folder of this name, where `~` is a home. Raises
    UnicodeEncodeError, a ValueError, for half a surrogate pair.
    """
    path = os.fsencode(os.path.expanduser(value))
    if path.startswith(b"~") or b"\0" in path or len(path) > 4000:  # the run's own are longer
        return False
    return all(len(name) <= 255 for name in path.split(b"/"))


PATH_RULE = (
    "have no NUL, no name of more than 255 bytes, not 4,000 in all, and no ~ of an unknown user"
)


def _server_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("must be like http://host:8000")
    return value.rstrip("/").removesuffix("/v1")


Algorithm = Literal["rl", "opd", "opsd"]  # how an environment learns
Url = Annotated[str, AfterValidator(_server_url)]  # of a server; without /v1 behind it


def names_user_code(value: str) -> bool:
    """Return whether this value has the form "module:name"."""
    return bool(re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value))


def load_user_code(value: str, field: str) -> Any:
    """Import and return what "module:name" names.

    Args:
        value: its module is installed, or is beside the script that runs or the TOML.
        field: the option that has this value, for errors.

    Raises:
        ConfigError: the value has another form, there is no such module, or the module has no
            callable of this name. An error of the module's own code is raised as it is.
    """
    if not names_user_code(value):
        raise ConfigError(f"{field}={value!r}: must be of the form module:name")
    module_name, _, name = value.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the missing module is one that this module imports
        raise ConfigError(
            f"{field}={value!r}: no module {error.name!r}, neither installed nor beside the TOML "
            "or the script that runs"
        ) from error
    if not callable(found := getattr(module, name, None)):
        what = "it is not callable" if hasattr(module, name) else f"it has no {name!r}"
        raise ConfigError(f"{field}={value!r}: in {module.__file__}, {what}")
    return found


def one_of(names: Iterable[str]) -> AfterValidator:
    """Make a rule that accepts these names and "module:name"."""
    text = f"be one of {', '.join(names)}, or module:function"
    return must(text, lambda value: value in names or names_user_code(value))


def checked_as(kind: Any) -> GetPydanticSchema:
    """Have an inherited field checked as another type than `TrainingArguments` declares."""
    return GetPydanticSchema(lambda _, schema_of: schema_of(kind))


@functools.cache
def checkers(cls: Any) -> dict[str, TypeAdapter[Any]]:
    """Return what checks each field of a config class, its `INHERITED_RULES` included."""
    kinds = typing.get_type_hints(cls, include_extras=True)
    checked: dict[str, Any] = {}
    for f in fields(cls):
        kind: Any = kinds[f.name]
        for part in typing.get_args(kind):
            if isinstance(part, type) and issubclass(part, Enum):
                kind = Annotated[part, Strict(False)]  # a string must be the value of a member
        if rule := getattr(cls, "INHERITED_RULES", {}).get(f.name):
            kind = Annotated[kind, rule]
        checked[f.name] = TypeAdapter(kind, config=STRICT)
    return checked


def problem_of(error: ValidationError, place: tuple[int | str, ...] | None = None) -> str:
    """Return what a value must be, from pydantic's error about it.

    Args:
        place: of the value, where the error may be about several.
    """
    problems: dict[str, None] = {}
    for one in error.errors(include_url=False):
        if place not in (None, one["loc"]):
            continue
        text = re.sub(r"^\w+ should", "must", one["msg"].removeprefix("Value error, "))
        text = text.replace("a valid dictionary", "a table").replace(
            "valid string", "text in quotes"
        )
        names = re.findall(r"'([^']+)'", one.get("ctx", {}).get("expected", ""))
        problems[did_you_mean(str(one["input"]), names) or text] = None
    return " or ".join(problems)
