"""A configuration in layers: TOML files, one after the other, then keys of the command line.

    vf-rl @ base.toml @ mine.toml --trainer.args.max_steps 10

Each layer is a list of settings, and the configuration is the tree in which they are put one after
the other. So a later layer wins: tables are merged key by key; everything else, lists and [[env]]
too, is replaced, and so is a table that the command line gives as a whole. All settings are kept,
so that an error about a value can say where it is from.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers_rl.did_you_mean import did_you_mean

COMMAND_LINE = "the command line"
MISSING: Any = object()  # what `find` returns for a key that is not there
Key = tuple[str, ...]  # the parts of a key; items of [[env]] have numbers, from 0
Data = dict[str, Any]  # of a TOML
_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+|inf|nan)(e[-+]?\d+)?", re.IGNORECASE)


class TomlError(ValueError):
    """The configuration cannot be used; the message names the file, the key and the fix."""


@dataclass(frozen=True)
class Setting:
    """A value that a file or the command line gives to one key.

    Attributes:
        key: in our layout.
        value: as in a TOML. A file's is a table only if that is empty.
        source: path of the file, or `COMMAND_LINE`; "" for a value where no layer has one.
        written: the key as it is written there.
        text: the value as it is written on the command line.
    """

    key: Key
    value: Any
    source: str
    written: Key
    text: str | None = None


def table_name(parts: Sequence[str]) -> str:
    """Return a table's name as in a TOML: "[trainer.args]", "[[env]] 2: [env.args]"."""
    item = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    if item is None:
        return f"[{'.'.join(parts)}]" if parts else ""
    array = ".".join(parts[:item])
    name = f"[[{array}]] {int(parts[item]) + 1}"
    inside = parts[item + 1 :]
    return f"{name}: [{'.'.join([array, *inside])}]" if inside else name


def place_of(source: str, key: Key) -> str:
    """Return where a key is: the source and the table."""
    return f"{source}: {table_name(key[:-1])}" if key[1:] else f"{source}:"


def nearest_hint(key: str, known: Iterable[str], advice: str = "") -> str:
    """Return the end of an error about an unknown key: the nearest known one, or all and advice."""
    known = list(known)
    otherwise = f"known: {', '.join(sorted(known))}" + (f"; {advice}" if advice else "")
    return did_you_mean(key, known, otherwise)


# --- From files and from the command line ---------------------------------------------------------


def read_file(path: Path) -> Data:
    """Read a TOML.

    Raises:
        TomlError: there is no such file, or it is no TOML.
    """
    try:
        # Some editors begin with a mark.
        return _with_spelled_flags(tomllib.loads(path.read_text("utf-8-sig")))
    except OSError as error:
        raise TomlError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TomlError(f"{path}: {error}") from error


def _with_spelled_flags(data: Data) -> Data:
    """Give flags of servers one spelling, so that a later layer replaces them."""
    teachers: Any = data.get("teacher")
    for table in (data.get("inference"), *(teachers if is_tables(teachers) else ())):
        if isinstance(table, dict) and "args" in table:
            table["args"] = _spelled(table["args"])
    return data


def _spelled(flags: Any) -> Any:
    if not isinstance(flags, dict):
        return flags
    return {name.lstrip("-").replace("-", "_"): value for name, value in flags.items()}


def overrides_of(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the keys and values of the command line: `--a.b value`, `--a.b=value`, `--a.b v1 v2`
    for a list, and `--a.b` alone for true.

    Raises:
        TomlError: a word belongs to no key.
    """
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, has_value, value = word[2:].partition("=")
            # In TOML and in Python a key has underscores.
            found.append((key.replace("-", "_"), [value] if has_value else []))
        elif not found or (word.startswith("-") and not _NUMBER.fullmatch(word)):
            raise TomlError(
                f"{COMMAND_LINE}: {word!r} belongs to no key; files are given as `@ config.toml`, "
                "keys as `--trainer.args.max_steps 10`"
            )
        else:
            found[-1][1].append(word)
    texts = []
    for key, values in found:
        if len(values) > 1:
            values = [json.dumps([parse_value(value) for value in values])]
        texts.append((key, values[0] if values else "true"))
    return texts


def parse_value(text: str) -> Any:
    """Return a value of the command line: one of TOML, True or False, or a list or table of JSON,
    else the text itself.
    """
    if text in ("True", "False"):
        return text == "True"
    try:
        parsed = tomllib.loads(f"value = {text}")
        if parsed.keys() == {"value"}:  # else the text has more lines
            return parsed["value"]
    except tomllib.TOMLDecodeError:
        pass  # most often a string without quotes
    if text.startswith(("{", "[")):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            pass  # a string that begins so
    return text


def read_word(key: str, text: str) -> tuple[Key, Any]:
    """Return the parts of a key of the command line, and its value.

    Raises:
        TomlError: the key has an empty part.
    """
    parts = tuple(key.split("."))
    if not all(parts):
        raise TomlError(f"{COMMAND_LINE}: --{key}={text}: a key is of the form a.b.c")
    # Not where a word is the environment's or the server's own.
    is_none = text.lower() == "none" and parts[0] not in ("env", "inference")
    value = None if is_none else parse_value(text)
    are_flags = parts[0] in ("inference", "teacher") and parts[-1] == "args"
    return parts, _spelled(value) if are_flags else value


# --- Composing ------------------------------------------------------------------------------------


def is_tables(value: Any) -> bool:
    """Return whether this is an array of tables such as [[env]]."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def compose(settings: Iterable[Setting]) -> Data:
    """Return the tree of all settings. Those without a source come first.

    Raises:
        TomlError: a key of the command line names no item of an array of tables.
    """
    tree: Data = {}
    for one in sorted(settings, key=lambda one: bool(one.source)):
        _put(tree, one)
    return tree


def find(data: Any, key: Key) -> Any:
    """Return what is at this key, or `MISSING`."""
    for part in key:
        if is_tables(data) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        elif isinstance(data, dict) and part in data:
            data = data[part]
        else:
            return MISSING
    return data


def _put(tree: Data, setting: Setting) -> None:
    here: Any = tree
    key, is_word = setting.key, setting.source == COMMAND_LINE
    for depth, part in enumerate(key):
        at: Any = part
        if isinstance(here, list):
            if not (part.isdigit() and int(part) < len(here)):
                name = key[depth - 1]
                shown = ".".join([*key[:depth], "0", *key[depth + part.isdigit() :]])
                raise TomlError(
                    f"{COMMAND_LINE}: {'.'.join(key)}: there are {len(here)} [[{name}]]; give the "
                    f"number of one, from 0 to {len(here) - 1}, such as --{shown}"
                )
            at = int(part)
        inner = here[at] if isinstance(here, list) else here.get(at)
        if depth == len(key) - 1:
            # An empty table of a file leaves a table as it is.
            if is_word or setting.value != {} or not isinstance(inner, dict):
                here[at] = copy.deepcopy(setting.value)
        elif not isinstance(inner, dict) and not (is_word and is_tables(inner)):
            inner = here[at] = {}
        here = inner


def leaves(data: Data, at: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Iterate over the keys of values that are no tables, or empty ones, and these values."""
    for name, inner in data.items():
        if isinstance(inner, dict) and inner:
            yield from leaves(inner, (*at, name))
        else:
            yield (*at, name), inner
