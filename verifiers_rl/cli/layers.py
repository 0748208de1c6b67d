"""A configuration in layers: TOML files, one after the other, then keys of the command line.

    vf-rl @ base.toml @ mine.toml --trainer.args.max_steps 10

A later layer wins. Tables are merged key by key; everything else, lists and [[env]] too, is
replaced, and so is a table that the command line gives as a whole. Each value keeps where it is
from, for the errors about it.
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from verifiers_rl.did_you_mean import did_you_mean

COMMAND_LINE = "the command line"


class TomlError(ValueError):
    """The configuration cannot be used; the message names the file, the key and the fix."""


@dataclass(frozen=True)
class Value:
    """A value that is no table, and where it is from.

    Attributes:
        value: as TOML has it.
        source: path of a file, or `COMMAND_LINE`.
        key: the parts of its key as they are written there. Items of [[env]] have numbers, from 0.
        text: on the command line, the value as it is written there.
    """

    value: Any
    source: str
    key: tuple[str, ...]
    text: str | None = None

    @property
    def place(self) -> str:
        """Where it is: the source and the table."""
        table = table_name(self.key[:-1])
        return f"{self.source}: {table}" if table else f"{self.source}:"

    def implies(self, value: Any, *key: str) -> Value:
        """Return the value of another key that follows from this one."""
        return Value(value, self.source, key or self.key)


Tree = dict[str, Union["Tree", Value]]


class Tables(Tree):
    """The items of an array of tables such as [[env]], by their numbers as text."""


class Whole(Tree):
    """A table that the command line gives as one value. It replaces what is below it."""


def table_name(parts: Sequence[str]) -> str:
    """Return a table's name as in a TOML: "[trainer.args]", "[[env]] 2: [env.args]"."""
    item = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    if item is None:
        return f"[{'.'.join(parts)}]" if parts else ""
    array = ".".join(parts[:item])
    name = f"[[{array}]] {int(parts[item]) + 1}"
    inside = parts[item + 1 :]
    return f"{name}: [{'.'.join([array, *inside])}]" if inside else name


def nearest_hint(key: str, known: Iterable[str], advice: str = "") -> str:
    """Return the end of an error about an unknown key: the nearest known one, or all and advice."""
    known = list(known)
    otherwise = f"known: {', '.join(sorted(known))}" + (f"; {advice}" if advice else "")
    return did_you_mean(key, known, otherwise)


# --- From files and from the command line ---------------------------------------------------------


def read_layer(path: Path) -> Tree:
    """Read a TOML.

    Raises:
        TomlError: there is no such file, or it is no TOML.
    """
    try:
        data = tomllib.loads(path.read_text("utf-8-sig"))  # some editors begin with a mark
    except OSError as error:
        raise TomlError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TomlError(f"{path}: {error}") from error
    return _as_tree(data, (), str(path))


def _as_tree(data: dict[str, Any], at: tuple[str, ...], source: str) -> Tree:
    tree: Tree = {}
    for name, value in data.items():
        # Flags of servers have one spelling, so that a later layer replaces them.
        is_flag = at[:1] in (("inference",), ("teacher",)) and at[-1] == "args"
        key = name.lstrip("-").replace("-", "_") if is_flag else name
        here = (*at, key)
        if isinstance(value, dict):
            tree[key] = _as_tree(value, here, source)
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            items = {str(number): item for number, item in enumerate(value)}
            tree[key] = Tables(_as_tree(items, here, source))
        else:
            tree[key] = Value(value, source, here)
    return tree


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
        elif not found or (word.startswith("-") and not _is_number(word)):
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


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


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


def layer_of(key: str, text: str) -> Tree:
    """Return the layer of one key of the command line.

    Raises:
        TomlError: the key has an empty part.
    """
    parts = tuple(key.split("."))
    if not all(parts):
        raise TomlError(f"{COMMAND_LINE}: --{key}={text}: a key is of the form a.b.c")
    # Not where a word is the environment's or the server's own.
    is_none = text.lower() == "none" and parts[0] not in ("env", "inference")
    value, layer = None if is_none else parse_value(text), Tree()
    if isinstance(value, dict):
        put(layer, parts, Whole(_as_tree(value, parts, COMMAND_LINE)))
    else:
        put(layer, parts, Value(value, COMMAND_LINE, parts, text))
    return layer


# --- Composing ------------------------------------------------------------------------------------


def merge(below: Tree, above: Tree) -> Tree:
    """Return a layer under a later one. Keys of the later one may name items of an array of tables
    by their numbers.

    Raises:
        TomlError: there is no such item, or several and no number.
    """
    merged = copy.copy(below)  # of its class
    for key, later in above.items():
        earlier = below.get(key)
        if (
            not isinstance(later, dict)
            or not isinstance(earlier, dict)
            or isinstance(later, Tables | Whole)
        ):
            merged[key] = later
        elif not isinstance(earlier, Tables):
            merged[key] = merge(earlier, later)
        elif all(part.isdigit() for part in later):
            if missing := [part for part in later if part not in earlier]:
                raise _item_error(
                    later,
                    f"there is no item {missing[0]}; the last one of the {len(earlier)} {key} is "
                    f"{len(earlier) - 1}",
                )
            merged[key] = merge(earlier, later)
        elif key in ("env", "teacher") and not {"id", "taskset"} & later.keys():
            raise _item_error(
                later,
                f"there are {len(earlier)} [[{key}]]; begin with the number of one, such as "
                f"--{key}.0.{next(iter(later))}",
            )
        else:
            merged[key] = later
    return merged


def _item_error(later: Tree, problem: str) -> TomlError:
    first = next(values_in(later), None)  # an empty table has none
    place = f"{first.source}: {'.'.join(first.key)}: " if first else ""
    return TomlError(place + problem)


def values_in(tree: Tree | Value) -> Iterator[Value]:
    if isinstance(tree, Value):
        yield tree
        return
    for inner in tree.values():
        yield from values_in(inner)


def plain(tree: Tree | Value) -> Any:
    """Return the data without where it is from."""
    if isinstance(tree, Value):
        return copy.deepcopy(tree.value)
    if isinstance(tree, Tables):
        return [plain(item) for item in tree.values()]
    return {key: plain(inner) for key, inner in tree.items()}


def find(tree: Tree, path: Iterable[str]) -> Tree | Value | None:
    """Return what is at this path, or None."""
    here: Tree | Value | None = tree
    for part in path:
        if not isinstance(here, dict):
            return None
        here = here.get(part)
    return here


def put(tree: Tree, path: Sequence[str], value: Tree | Value) -> None:
    """Put a value at this path, in tables that are made where there are none."""
    for part in path[:-1]:
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = tree[part] = {}
        tree = inner
    tree[path[-1]] = value
