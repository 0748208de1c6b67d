"""The files of a run's rollouts, as the page reads them: the numbers by which people filter, 28
bytes a rollout, are kept; texts and tokens are read when they are shown.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verifiers_rl.report.rollouts import NUMBERS, SCHEMA, TEXTS
from verifiers_rl.report.run_folder import rollouts_file

INDEX = np.dtype(
    [
        ("step", "i4"),
        ("group", "i4"),
        ("example", "i8"),
        ("num_tokens", "i4"),
        ("reward", "f4"),
        ("env", "u2"),
        ("flags", "u2"),
    ]
)
IS_EVAL, HAS_ERROR, IS_TRUNCATED, HAS_TOKENS, IN_LOSS = 1, 2, 4, 8, 16
_KEPT = [
    "step",
    "group",
    "example",
    "num_tokens",
    "reward",
    "env",
    "split",
    "error",
    "is_truncated",
    "has_tokens",
    "in_loss",
]
_MESSAGE = [
    f"{{}}.list.element.{name}"
    for name in ("content", "reasoning_content", "tool_calls.list.element.function")
]
_SEARCHED = [
    "error",
    *(name.format("messages") for name in _MESSAGE),
    *(name.format("other_branches.list.element") for name in _MESSAGE),
]
Stamp = tuple[int, int, int]


def stamp_of(path: Path | int) -> Stamp:
    """Return what tells a file from one that replaces it. Raises OSError if it is none, such as a
    pipe, for which a reader would wait.
    """
    stat = os.stat(path)
    if not S_ISREG(stat.st_mode):
        raise OSError(f"{path} is no file")
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class RolloutFile:
    """One file of rollouts.

    Args:
        path: of the file.
        stamp: of the file that is meant; another one under its name is not read.

    Attributes:
        num_rows: rollouts in it.

    Raises:
        OSError, ValueError: here and in each method: it cannot be read, or is another file by now
            (FileNotFoundError).
    """

    def __init__(self, path: Path, stamp: Stamp) -> None:
        self.path, self.stamp = path, stamp
        self._index: np.ndarray | None = None
        self._matched: tuple[str, np.ndarray] | None = None
        self.num_rows: int = self._read(lambda file: file.metadata.num_rows)

    def _read(self, what: Any) -> Any:
        with self.path.open("rb") as file:
            if stamp_of(file.fileno()) != self.stamp:
                raise FileNotFoundError(f"{self.path}: it was replaced")
            parquet = pq.ParquetFile(file)
            found = [*parquet.schema_arrow]
            if lacking := [field.name for field in SCHEMA if field not in found]:
                raise ValueError(
                    f"it has no column {lacking[0]!r}, or not as this version writes it"
                )
            return what(parquet)

    def index(self, envs: dict[str, int]) -> np.ndarray:
        """Return the numbers of its rollouts, (R,) `INDEX`.

        Args:
            envs: numbers of environments by name; new ones are added.
        """
        if self._index is None:
            table = self._read(lambda file: file.read(_KEPT, use_threads=False))
            columns = {name: table[name].combine_chunks() for name in _KEPT}
            index = np.zeros(len(table), INDEX)
            for name in ("step", "group", "example", "num_tokens"):
                index[name] = _numbers(columns[name])
            scored = _numbers(pc.indices_nonzero(columns["reward"].is_valid()))
            index["reward"] = np.nan
            index["reward"][scored] = _numbers(columns["reward"])[scored]
            by_name = columns["env"].dictionary_encode()
            numbers = [envs.setdefault(env, len(envs)) for env in by_name.dictionary.to_pylist()]
            index["env"] = np.array(numbers, "u2")[_numbers(by_name.indices)]
            for flag, values in (
                (IS_EVAL, pc.match_substring(columns["split"], "eval")),
                (HAS_ERROR, columns["error"].is_valid()),
                (IS_TRUNCATED, columns["is_truncated"]),
                (HAS_TOKENS, columns["has_tokens"]),
                (IN_LOSS, columns["in_loss"]),
            ):
                index["flags"][_numbers(pc.indices_nonzero(values))] |= flag
            self._index = index
        return self._index

    def rows(self, places: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return columns of the rollouts at these places of the file."""

        def read(file: pq.ParquetFile) -> list[dict[str, Any]]:
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            starts = np.cumsum([0, *sizes])
            groups: dict[int, pa.Table] = {}
            rows = []
            for place in places:
                number = int(np.searchsorted(starts, place, "right")) - 1
                if number not in groups:
                    groups[number] = file.read_row_group(number, columns, use_threads=False)
                rows += groups[number].slice(place - starts[number], 1).to_pylist()
            return rows

        return self._read(read)

    def matches(self, text: str) -> np.ndarray:
        """Return which of its rollouts have a text with this one inside, in any case, (R,) bool."""
        if self._matched is None or self._matched[0] != text:
            table = self._read(lambda file: file.read(_SEARCHED, use_threads=False))
            found = np.zeros(len(table), bool)
            for column in table.itercolumns():
                _mark(found, np.arange(len(table)), column.combine_chunks(), text)
            self._matched = text, found
        return self._matched[1]


def _mark(found: np.ndarray, rows: np.ndarray, values: Any, text: str) -> None:
    """Set `found` at the rows that have this text.

    Args:
        rows: of each of the values, which may be lists and structs of strings.
    """
    if pa.types.is_list(values.type):
        _mark(found, rows[_numbers(pc.list_parent_indices(values))], pc.list_flatten(values), text)
    elif pa.types.is_struct(values.type):
        for part in values.flatten():
            _mark(found, rows, part, text)
    else:
        is_in = pc.match_substring(values, text, ignore_case=True)
        found[rows[_numbers(pc.indices_nonzero(is_in))]] = True


def _numbers(values: pa.Array) -> np.ndarray:
    """Return the memory of an array of numbers; where it is null, that is any number. pyarrow's
    `to_numpy` imports pandas, which takes 40 MB and a third of a second.
    """
    kind = "f" if pa.types.is_floating(values.type) else "i"
    dtype = np.dtype(f"{kind}{values.type.byte_width}")
    return np.frombuffer(values.buffers()[1], dtype, len(values), values.offset * dtype.itemsize)


class Rollouts:
    """The rollouts that a run had written at some time, in their order.

    Args:
        files: in their order.
        envs: numbers of environments by name.

    Attributes:
        index: (R,) `INDEX`, one for each rollout.
        envs: names of the environments, which `index["env"]` numbers.
    """

    def __init__(self, files: Sequence[RolloutFile], envs: dict[str, int]) -> None:
        self._files = files
        self._starts = np.cumsum([0, *(file.num_rows for file in files)])
        parts = [file.index(envs) for file in files]
        self.index = np.concatenate([np.zeros(0, INDEX), *parts])
        self.envs = list(envs)

    def __len__(self) -> int:
        return len(self.index)

    def _place_of(self, number: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._starts, number, "right")) - 1
        return file, number - int(self._starts[file])

    def rows(
        self, numbers: Sequence[int], columns: Sequence[str] = (*NUMBERS.names, *TEXTS.names)
    ) -> list[dict[str, Any]]:
        """Return columns of these rollouts; each column takes time."""
        places: dict[int, list[int]] = {}
        for number in numbers:
            file, place = self._place_of(number)
            places.setdefault(file, []).append(place)
        rows = {file: iter(self._files[file].rows(own, columns)) for file, own in places.items()}
        return [next(rows[self._place_of(number)[0]]) for number in numbers]

    def weights(self, number: int, recorded: Sequence[float]) -> dict[str, np.ndarray]:
        """Return the weights that losses give the tokens of a rollout, (T,) each by the loss, as
        `vf-rl replay` has written them; NaN: the token is not in the loss. {} if nothing is written
        of its step, or if it is of another run that had the folder before.

        Args:
            recorded: (T,) `trainer_logprobs` of the rollout.
        """
        step, file = int(self.index["step"][number]), self._place_of(number)[0]
        folder = self._files[file].path.parents[1]
        path = folder / "replay" / rollouts_file(folder, step).name  # which replay.py writes
        flags, groups = self.index["flags"], self.index["group"]
        # The batch of the step, in its order; see `read_rows` of replay.py.
        is_in = (self.index["step"] == step) & (flags & (IS_EVAL | HAS_ERROR) == 0)
        is_in &= np.isin(groups, groups[is_in & (flags & IN_LOSS > 0)])
        if not path.is_file() or not is_in[number]:
            return {}
        place = int(is_in[:number].sum())
        found = pq.read_table(path, filters=[("rollout", "=", place)]).to_pydict()
        tokens = np.array(found["token"], int)
        then = np.array(found["trainer_logprob"], np.float32)
        now = np.array(recorded, np.float32)
        if len(tokens) and tokens.max() >= len(now):
            return {}
        if not np.array_equal(now[tokens], then, equal_nan=True):
            return {}
        weights = {name: np.full(len(now), np.nan) for name in [*found][3:]}
        for name, values in weights.items():
            values[tokens] = found[name]
        return weights

    def has_text(self, number: int, text: str) -> bool:
        """Return whether a text of a rollout contains this one, in any case."""
        file, place = self._place_of(number)
        return bool(self._files[file].matches(text)[place])
