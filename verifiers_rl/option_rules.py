"""Which values an option may have: rules inside the types of `RLConfig`'s fields, and a check of
the types themselves. Each error names the value and the fix.
"""

from __future__ import annotations

import builtins
import functools
import json
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

from verifiers_rl.did_you_mean import did_you_mean
from verifiers_rl.user_code import names_user_code


class ConfigError(ValueError):
    """An option has a value that cannot work. The message names field, value and fix."""


# Takes a value that is not None, and returns what is wrong with it, or None.
Rule = Callable[[Any], str | None]


def must(text: str, holds: Callable[[Any], bool]) -> Rule:
    """Make a rule that refuses values for which `holds` is false."""
    return lambda value: None if holds(value) else f"must {text}"


positive = must("be a number > 0", lambda value: value > 0)
not_negative = must("be a number >= 0", lambda value: value >= 0)
share_below_1 = must("be >= 0 and < 1", lambda value: 0 <= value < 1)
PositiveInt = Annotated[int, must("be an integer >= 1", lambda value: value >= 1)]
NotNegativeInt = Annotated[int, must("be an integer >= 0", lambda value: value >= 0)]
PositiveNumber = Annotated[float, positive]
NotNegativeNumber = Annotated[float, not_negative]
ShareBelow1 = Annotated[float, share_below_1]
Penalty = Annotated[float, must("be from -2 to 2", lambda value: -2 <= value <= 2)]


def rules_of(kind: Any) -> list[Rule]:
    """Return the rules in a declared type, including those in the parts of a union."""
    if typing.get_origin(kind) is Annotated:
        return [rule for rule in kind.__metadata__ if callable(rule)]
    return [rule for part in typing.get_args(kind) for rule in rules_of(part)]


@functools.cache
def declared(cls: Any) -> dict[str, tuple[Any, list[Rule]]]:
    """Return the type of each field of a dataclass, and the rules in it."""
    kinds = typing.get_type_hints(cls)
    with_rules = typing.get_type_hints(cls, include_extras=True)
    return {f.name: (kinds[f.name], rules_of(with_rules[f.name])) for f in fields(cls)}


def problem_of(value: Any, kind: Any, rules: Iterable[Rule]) -> str | None:
    """Return what is wrong with a value of this type and of these rules, or None."""
    if not fits(value, kind):
        return type_rule(value, kind)
    problems = (rule(value) for rule in rules if value is not None)
    problem = next((problem for problem in problems if problem is not None), None)
    or_none = NoneType in _parts(kind) and problem is not None and "must" in problem
    return f"{problem}, or left out" if or_none else problem


def address_of(server: str) -> tuple[str, int] | None:
    """Return host and port of "host:port" or "[IPv6]:port"; None if it is no such text."""
    host, _, port = server.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    return (host, int(port)) if host and "/" not in host and is_port else None


def are_addresses(servers: list[str]) -> bool:
    """Return whether these are addresses of different servers, and at least one."""
    addresses = [address_of(server) for server in servers]
    return bool(addresses) and None not in addresses and len({*addresses}) == len(addresses)


def usable(reasons_against: Mapping[str, str]) -> Rule:
    """Make a rule that refuses names which begin or end with a key; its value is the reason."""

    def problem(value: str) -> str | None:
        for part, reason in reasons_against.items():
            if value.startswith(part) or value.endswith(part):
                return f"cannot be used here: {reason}"
        return None

    return problem


def one_of(names: Iterable[str]) -> Rule:
    """Make a rule that accepts these names and "module:name"."""
    return must(
        f"be one of {', '.join(names)}, or module:function",
        lambda value: value in names or names_user_code(value),
    )


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _parts(kind: Any) -> list[Any]:
    """Return the types of a union. Beside an enum, `str` is left out, because the string has to be
    the value of a member.
    """
    is_union = typing.get_origin(kind) in (typing.Union, UnionType)
    kinds = list(typing.get_args(kind)) if is_union else [kind]
    return [one for one in kinds if one is not str] if any(map(_is_enum, kinds)) else kinds


def _choices(kind: Any) -> list[Any]:
    """Return the values of a Literal or an enum."""
    if _is_enum(kind):
        return [member.value for member in kind]
    return list(typing.get_args(kind)) if typing.get_origin(kind) is Literal else []


def from_json(name: str, value: str) -> Any:
    """Parse the value of an option that came as JSON. Raises ConfigError."""
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{name}={value!r}: not valid JSON: {error}") from error


def fits(value: Any, kind: Any) -> bool:
    """Return whether the value is of this type. An integer is also a number; a bool is neither."""
    kinds = _parts(kind)
    if len(kinds) > 1:
        return any(fits(value, one) for one in kinds)
    kind, inner = kinds[0], typing.get_args(kinds[0])
    if kind is Any:
        return True
    if choices := _choices(kind):
        return any(value == choice and isinstance(value, type(choice)) for choice in choices)
    if kind in (int, float):
        is_number = isinstance(value, int if kind is int else int | float)
        return is_number and not isinstance(value, bool) and math.isfinite(value)
    if not isinstance(value, typing.get_origin(kind) or kind):
        return False
    if isinstance(value, list | dict) and inner:  # types of items, or of keys and values
        items = value.values() if isinstance(value, dict) else value
        return all(fits(item, inner[-1]) for item in items)
    return True


def of_type(value: Any, text: str, kind: Any) -> Any:
    """Return a value of a command line in the form that the declared type of its option asks for.

    Args:
        value: as TOML would read the text.
        text: as it was written.
        kind: the declared type. If it has no form for the text, the value is returned as it is.
    """
    kinds = _parts(kind)
    if NoneType in kinds and text.lower() == "none":
        return None
    if fits(value, kind):
        return value
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if fits(text, kind):
        return text
    for one in ([value], [text]):
        if fits(one, kind):
            return one
    return value


_TYPE_NAMES = {
    bool: ("true or false", "true or false"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
}


def _describe(kind: Any) -> str:
    if choices := _choices(kind):
        return f"one of {', '.join(map(str, choices))}"
    inner = (typing.get_args(kind) or (None,))[-1]
    of_inner = f" of {_TYPE_NAMES[inner][1]}" if inner in _TYPE_NAMES else ""
    match typing.get_origin(kind) or kind:
        case builtins.list:
            return f"a list{of_inner}"
        case builtins.dict:
            return f"a table (a dict in Python){of_inner}"
    return _TYPE_NAMES[kind][0] if kind in _TYPE_NAMES else kind.__name__


def type_rule(value: Any, kind: Any) -> str:
    """Describe what a value that does not fit must be."""
    kinds = [one for one in _parts(kind) if one is not NoneType]
    choices = [str(choice) for one in kinds for choice in _choices(one)]
    near = [choice for choice in choices if choice.startswith(str(value))]
    hint = f"did you mean {near[0]!r}?" if near else did_you_mean(str(value), choices)
    if hint and len(choices) > 8:  # too many to read
        return hint
    try:
        is_quoted = isinstance(value, str) and fits(json.loads(value.lower()), kind)
    except ValueError:
        is_quoted = False
    rule = f"must be {' or '.join(map(_describe, kinds))}{' without quotes' if is_quoted else ''}"
    return f"{rule}, or left out" if NoneType in _parts(kind) else rule
