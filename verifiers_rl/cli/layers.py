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
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from dotenv.parser import parse_stream

from verifiers_rl.option_rules import PATH_RULE, can_be_path, did_you_mean
from verifiers_rl.process.secret_names import is_secret_key

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
        value: as in a TOML. A file's is a table only if that is empty. None takes back what an
            earlier layer has.
        source: path of the file, or `COMMAND_LINE`; "" for a value where no layer has one.
        written: the key as it is written there.
    """

    key: Key
    value: Any
    source: str
    written: Key

    @property
    def place(self) -> str:
        """Where it is from, for an error about it: the source and the table. Items of [[env]] have
        numbers from 0, as on the command line: [env.1.args].
        """
        table = ".".join(self.written[:-1])
        return f"{self.source}: [{table}]" if table else f"{self.source}:"

    def error(self, problem: str) -> TomlError:
        """Return the error about it: "FILE: [table] key=value: problem". A secret is not shown."""
        if isinstance(self.value, dict):
            return TomlError(f"{self.source}: [{'.'.join(self.written)}]: {problem}")
        name = self.written[-1]
        if self.value is MISSING:
            return TomlError(f"{self.place} {name} {problem}")
        shown = "***" if is_secret_key(name, self.value) else repr(self.value)
        return TomlError(f"{self.place} {name}={shown}: {problem}")


def nearest_hint(key: str, known: Collection[str]) -> str:
    """Return the end of an error about an unknown key: the nearest known one, or all."""
    return did_you_mean(key, known, f"known: {', '.join(sorted(known))}")


def load_leaf(module: str, purpose: str) -> Any:
    """Import a module of a leaf, such as "cluster.machines": a room that nothing else needs, and
    that a fork may delete, with its tests.

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


# --- From files and from the command line ---------------------------------------------------------


def read_file(path: Path) -> Data:
    """Read a TOML.

    Raises:
        TomlError: there is no such file, or it is no TOML.
    """
    try:
        # Some editors begin with a mark.
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise TomlError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8 either
        raise TomlError(f"{path}: {error}") from error


def read_env_files(files: Iterable[Path]) -> dict[str, str]:
    """Return the variables of files with lines of NAME=VALUE, which are secrets of environments; a
    later file wins. No value is printed.

    Raises:
        TomlError: a file cannot be read, or a line is not NAME=VALUE. The line itself is not shown.
    """
    variables: dict[str, str] = {}
    for path in files:
        where = f"env_file={str(path)!r}"
        try:
            with path.open(encoding="utf-8-sig") as lines:
                found = list(parse_stream(lines))
        except (OSError, UnicodeDecodeError) as error:
            raise TomlError(f"{where}: {getattr(error, 'strerror', error)}; correct it") from error
        for one in found:
            if one.error or (one.key is not None and one.value is None):
                line = one.original.line + one.original.string.rstrip().count("\n")
                raise TomlError(f"{where}, line {line}: must be NAME=VALUE, or begin with #")
            if one.key is not None:
                variables[one.key] = one.value or ""
    return variables


def overrides_of(words: Iterable[str]) -> list[tuple[Key, Any]]:
    """Return the keys and values of the command line: `--a.b value`, `--a.b=value`, `--a.b v1 v2`
    for a list, and `--a.b` alone for true. `none` is no value, but in the tables of environments
    and servers, where a word is their own.

    Raises:
        TomlError: a word belongs to no key, or a key has an empty part.
    """
    found: list[tuple[Key, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            # In TOML and in Python a key has underscores.
            key = tuple(name.replace("-", "_").split("."))
            if not all(key):
                raise TomlError(f"{COMMAND_LINE}: {word}: a key is of the form a.b.c")
            found.append((key, [value] if has_value else []))
        elif not found or (word.startswith("-") and not _NUMBER.fullmatch(word)):
            raise TomlError(
                f"{COMMAND_LINE}: {word!r} belongs to no key; files are given as `@ config.toml`, "
                "keys as `--trainer.args.max_steps 10`"
            )
        else:
            found[-1][1].append(word)
    settings = []
    for key, texts in found:
        is_own = key[0] in ("env", "inference")  # where "none" is a word of theirs
        is_none = [text.lower() for text in texts] == ["none"] and not is_own
        values = [None if is_none else parse_value(text) for text in texts] or [True]
        settings.append((key, values if len(values) > 1 else values[0]))
    return settings


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
    except ValueError:
        pass  # most often a string without quotes
    if text.startswith(("{", "[")):
        try:
            return json.loads(text)
        except ValueError:
            pass  # a string that begins so
    return text


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
                name = ".".join(key[:depth])
                raise TomlError(
                    f"{COMMAND_LINE}: {'.'.join(key)}: there are {len(here)} [[{name}]]; give one "
                    f"as {name}.N, with N from 0 to {len(here) - 1}"
                )
            at = int(part)
        inner = here[at] if isinstance(here, list) else here.get(at)
        if depth == len(key) - 1:
            if setting.value is None:
                if inner is not None:  # what an earlier layer has
                    del here[at]
            # An empty table of a file leaves a table as it is.
            elif is_word or setting.value != {} or not isinstance(inner, dict):
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


@dataclass
class Layers:
    """The layers of one configuration.

    Attributes:
        files: absolute paths; a later one wins.
        words: the words of a command that give the same configuration.
        settings: what all layers set, in their order.
        tree: all keys, in our layout.
    """

    files: list[Path]
    words: list[str]
    settings: list[Setting]
    tree: Data = field(init=False)

    def __post_init__(self) -> None:
        self.tree = compose(self.settings)

    def origin(self, key: Key) -> Setting:
        """Return the newest setting of this key. Of a table, its source; where no layer has the
        key, all files.
        """
        for one in reversed(self.settings):
            below = key[len(one.key) :]
            if one.source and one.key[: len(key)] == key[: len(one.key)]:
                if one.key == key:
                    return one
                if find(one.value, below) is not MISSING:
                    return Setting(key, None, one.source, key)
        return Setting(key, None, ", ".join(map(str, self.files)), key)

    def beside(self, name: str, key: Key) -> Path:
        """Return the absolute path that the value of a key names: relative to the file that has the
        key, or to where the command is given.

        Raises:
            TomlError: it cannot be a path.
        """
        if not can_be_path(name):
            raise self.error(key, f"must {PATH_RULE}")
        source = Path(self.origin(key).source)
        folder = source.parent if source in self.files else Path.cwd()
        return Path(os.path.normpath(folder / Path(name).expanduser()))

    def place(self, *key: str) -> str:
        """Where the value of a key is from, for an error about it: the source and the table."""
        return self.origin(key).place

    def error(self, key: Key, problem: str) -> TomlError:
        """Return the error about this key, with its value in the tree; see `Setting.error`."""
        return replace(self.origin(key), value=find(self.tree, key)).error(problem)

    def key_at(self, location: Iterable[object]) -> Key:
        """Return the key of this place in the tree, as pydantic names places. What is below a value
        that is no table has the key of that value, and [env] is the first one of a list.
        """
        key: Key = ()
        for part in map(str, location):
            here = find(self.tree, key)
            is_inside = isinstance(here, dict) or here is MISSING
            key += (part,) * (is_tables(here) if part.isdigit() else is_inside)
        return key
