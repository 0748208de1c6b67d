"""What a run writes about its rollouts, and how to read it. docs/rollouts_on_disk.md has each key.

    rollouts.jsonl     one rollout a line; appended
    rollouts.index     one record of 32 bytes a line: where the line is, and what people filter by
    rollout_tokens/    one .npz a step: numbers of each token, for a share of the rollouts

A process may be killed at any time, so a reader takes the records whose bytes are all there and
ignores the rest. The writer removes such a rest when it opens the files, and makes an index that is
missing or broken again from the lines. This module imports nothing heavy.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from verifiers_rl.json_text import as_json

ROLLOUTS = "rollouts.jsonl"
INDEX = "rollouts.index"
TOKENS = "rollout_tokens"
RUN = "run.json"

RECORD = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u4"),
        ("step", "<i4"),
        ("group", "<i4"),
        ("example", "<i4"),
        ("reward", "<f4"),
        ("env", "<u2"),
        ("flags", "<u2"),
    ]
)
IS_EVAL, HAS_ERROR, IS_TRUNCATED, HAS_TOKENS, NOT_IN_LOSS = 1, 2, 4, 8, 16

# Arrays of a token in rollout_tokens; `rows`, `starts`, `text` and `text_ends` are beside them.
TOKEN_DTYPES: dict[str, type] = {
    "sample": np.int32,
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "inference_logprobs": np.float32,
    "trainer_logprobs": np.float32,
    "entropy": np.float32,
    "advantages": np.float32,
    "policy_versions": np.int32,
    "is_masked": np.bool_,
}
_LARGEST = 2**31 - 1  # of an example's number in the index


def line_of(row: Mapping[str, Any], record: bytes = b"") -> bytes:
    """Return the line of a rollout.

    Args:
        row: its keys and values.
        record: more of them, as a JSON object in UTF-8; see `Rollout.record`.
    """
    text = as_json(row)
    if len(record) > 2:
        text = text[:-1] + b", " + record[1:]
    return text + b"\n"


def record_of(row: Mapping[str, Any], offset: int, length: int, env: int) -> tuple[Any, ...]:
    """Return the record of a line in the index.

    Args:
        row: the rollout.
        offset, length: where its line is, in bytes.
        env: position of its environment in run.json.
    """
    flags = IS_EVAL * (row["split"] == "eval") | HAS_ERROR * (row.get("error") is not None)
    flags |= IS_TRUNCATED * bool(row.get("is_truncated"))
    flags |= HAS_TOKENS * bool(row.get("has_tokens")) | NOT_IN_LOSS * (not row.get("in_loss"))
    reward = row.get("reward")
    return (
        offset, length, row["step"], row["group"], min(row["example"], _LARGEST),
        math.nan if reward is None else reward, env, flags,
    )  # fmt: skip


# --- Reading --------------------------------------------------------------------------------------


class Rollouts:
    """The rollouts that a run has written so far, as `read_rollouts` found them.

    Attributes:
        folder: of the run.
        index: (R,) `RECORD`, one for each rollout, in the order in which they were written.
        envs: names of the environments, which `index["env"]` numbers.
    """

    def __init__(self, folder: Path, index: np.ndarray, envs: list[str]) -> None:
        self.folder, self.index, self.envs = folder, index, envs

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: Any) -> Any:
        """Return the rollout on this line, from 0, or those of a slice."""
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        record = self.index[number]
        with (self.folder / ROLLOUTS).open("rb") as file:
            file.seek(int(record["offset"]))
            return json.loads(file.read(int(record["length"])))

    def tokens(self, number: int) -> dict[str, np.ndarray] | None:
        """Return the arrays of a rollout's tokens, (T,) each, and `text`, T strings. None if it has
        none on disk. `TOKEN_DTYPES` names the arrays. A character that several tokens make is the
        text of the last one; that of the others is "".
        """
        number = range(len(self))[number]
        record = self.index[number]
        path = tokens_file(self.folder, int(record["step"]))
        if not record["flags"] & HAS_TOKENS or not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as arrays:
            (found,) = np.nonzero(arrays["rows"] == number)
            if not len(found):
                return None
            start, stop = arrays["starts"][found[0] : found[0] + 2].tolist()
            values = {name: arrays[name][start:stop] for name in TOKEN_DTYPES}
            text, ends = arrays["text"].tobytes(), [0, *arrays["text_ends"].tolist()]
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        pieces = [decode(text[ends[i] : ends[i + 1]], i + 1 == stop) for i in range(start, stop)]
        return {**values, "text": np.array(pieces)}


def read_rollouts(folder: str | Path) -> Rollouts:
    """Return the rollouts of a run, finished or running, in the order in which they were written.
    A rollout's line is read when the rollout is taken. Changes nothing on disk.

    Raises:
        FileNotFoundError: the run has written no rollouts.
    """
    folder = Path(folder).expanduser()
    if not (folder / ROLLOUTS).is_file():
        raise FileNotFoundError(
            f"{folder / ROLLOUTS}: no such file; a run with log_rollouts writes it in its first "
            "step"
        )
    try:
        envs = list(read_run(folder).get("envs", []))
    except ValueError:  # run.json is broken: each line has the name of its environment too
        envs = []
    index = _read_index(folder)
    if index is None:
        with (folder / ROLLOUTS).open("rb") as file:
            records = list(_scan(file, 0, envs))
        index = np.array(records, RECORD)
    return Rollouts(folder, index, envs)


def read_run(folder: str | Path) -> dict[str, Any]:
    """Return run.json of a run; {} if there is none."""
    path = Path(folder) / RUN
    return json.loads(path.read_text()) if path.is_file() else {}


def tokens_file(folder: Path, step: int) -> Path:
    return folder / TOKENS / f"step-{step:08d}.npz"


def _read_index(folder: Path) -> np.ndarray | None:
    """Return the records that can be used: whole, one after the other, and with all of their bytes
    in rollouts.jsonl. None if there is no index.
    """
    path = folder / INDEX
    if not path.is_file():
        return None
    content = path.read_bytes()
    index = np.frombuffer(content, RECORD, len(content) // RECORD.itemsize)
    ends = index["offset"] + index["length"]
    starts = np.concatenate([np.zeros(1, ends.dtype), ends])[:-1]
    size = (folder / ROLLOUTS).stat().st_size
    is_good = (index["offset"] == starts) & (index["length"] > 0) & (ends <= size)
    return index if is_good.all() else index[: int(is_good.argmin())]


def _scan(file: BinaryIO, offset: int, envs: list[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the records of the lines from `offset` on, up to one that is unfinished. An environment
    that is not in `envs` is appended to it.
    """
    file.seek(offset)
    for line in file:
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        if not isinstance(row, dict):
            return
        if row["env"] not in envs:
            envs.append(row["env"])
        yield record_of(row, offset, len(line), envs.index(row["env"]))
        offset += len(line)


# --- Writing --------------------------------------------------------------------------------------


class RolloutWriter:
    """Appends rollouts to the files of a run. Each `append` writes lines and records once, and the
    operating system has them when it returns: a SIGKILL of this process loses nothing after that.

    Args:
        folder: of the run; made if it does not exist.
        up_to_step: rows of later steps are removed; None: all rows stay.
        evaluates_again: the rows of this step's evaluation are removed; None: they stay.
    """

    def __init__(
        self,
        folder: str | Path,
        up_to_step: int | None = None,
        evaluates_again: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.envs: list[str] = list(read_run(self.folder).get("envs", []))
        self._recover()
        if up_to_step is not None:
            self._cut(up_to_step, evaluates_again)
        self._lines = (self.folder / ROLLOUTS).open("ab", buffering=0)
        self._index = (self.folder / INDEX).open("ab", buffering=0)
        self.num_rows = os.fstat(self._index.fileno()).st_size // RECORD.itemsize

    def append(
        self,
        rows: Sequence[Mapping[str, Any]],
        records: Sequence[bytes] | None = None,
        tokens: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Append rollouts.

        Args:
            rows: one for each rollout.
            records: for each, more of its keys, see `line_of`.
            tokens: arrays of rollouts of one step, as in rollout_tokens; `rows` counts from the
                first of these rollouts.
        """
        if not rows:
            return
        if new := [env for env in dict.fromkeys(r["env"] for r in rows) if env not in self.envs]:
            self.envs += new
            write_run(self.folder, {"envs": self.envs})
        lines = list(map(line_of, rows, records or [b""] * len(rows)))
        offset = os.fstat(self._lines.fileno()).st_size
        index = np.empty(len(rows), RECORD)
        for i, (row, line) in enumerate(zip(rows, lines, strict=True)):
            index[i] = record_of(row, offset, len(line), self.envs.index(row["env"]))
            offset += len(line)
        if tokens is not None and len(tokens["rows"]):  # first, so that no line promises too much
            step = rows[int(tokens["rows"][0])]["step"]
            arrays = {**tokens, "rows": np.asarray(tokens["rows"], np.int64) + self.num_rows}
            _write_aside(tokens_file(self.folder, step), arrays)
        _write_all(self._lines, b"".join(lines))
        _write_all(self._index, index.tobytes())
        self.num_rows += len(rows)

    def sync(self) -> None:
        """Wait until the disk has what was appended, so that a loss of power leaves it."""
        for file in (self._lines, self._index):
            os.fsync(file.fileno())

    def close(self) -> None:
        self._lines.close()
        self._index.close()

    def _recover(self) -> None:
        """Make the files agree: remove an unfinished line, and index the lines without record."""
        lines, index = self.folder / ROLLOUTS, _read_index_or_none(self.folder)
        if index is None:
            (self.folder / INDEX).unlink(missing_ok=True)
            if not lines.is_file():
                shutil.rmtree(self.folder / TOKENS, ignore_errors=True)
                return
            index = np.empty(0, RECORD)
        with lines.open("rb+") as file:
            end = int(index[-1]["offset"] + index[-1]["length"]) if len(index) else 0
            num_known = len(self.envs)
            index = np.concatenate([index, np.array(list(_scan(file, end, self.envs)), RECORD)])
            end = int(index[-1]["offset"] + index[-1]["length"]) if len(index) else 0
            file.truncate(end)
        if len(self.envs) > num_known:
            write_run(self.folder, {"envs": self.envs})
        _replace(self.folder / INDEX, index.tobytes())

    def _cut(self, up_to_step: int, evaluates_again: int | None) -> None:
        """Remove the rows of later steps, and those of the evaluation of a step. An evaluation of
        an earlier step may come behind them.
        """
        for path in (self.folder / TOKENS).glob("step-*.npz"):
            if int(path.stem.removeprefix("step-")) > up_to_step:
                path.unlink()
        index = _read_index_or_none(self.folder)
        if index is None:
            return
        is_late = index["step"] > up_to_step
        if evaluates_again is not None:
            is_late |= (index["step"] == evaluates_again) & (index["flags"] & IS_EVAL > 0)
        if not is_late.any():
            return
        first = int(is_late.argmax())
        kept = index[first:][~is_late[first:]]
        lines = self.folder / ROLLOUTS
        unfinished = lines.with_name(f".{ROLLOUTS}.{os.getpid()}")
        with lines.open("rb") as old, unfinished.open("wb") as new:
            _copy(old, new, int(index[first]["offset"]))
            for record in kept:
                old.seek(int(record["offset"]))
                new.write(old.read(int(record["length"])))
            new.flush()
            os.fsync(new.fileno())
        index = np.concatenate([index[:first], kept])
        lengths = index["length"].astype(np.uint64)
        index["offset"] = np.cumsum(lengths) - lengths
        # If the process is killed in between, the index is missing, and is made again.
        (self.folder / INDEX).unlink()
        unfinished.replace(lines)
        _replace(self.folder / INDEX, index.tobytes())


def write_run(folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change keys of run.json, and return all of them. The file is replaced at once."""
    run = {**read_run(folder), **changes}
    _replace(folder / RUN, as_json(run))
    return run


def remove_rollouts(folder: Path) -> None:
    """Remove all that a run has written about its rollouts, and run.json."""
    for name in (ROLLOUTS, INDEX, RUN):
        (folder / name).unlink(missing_ok=True)
    if (folder / TOKENS).is_dir():
        for path in (folder / TOKENS).glob("step-*.npz"):
            path.unlink()
        if not any((folder / TOKENS).iterdir()):
            (folder / TOKENS).rmdir()


def _read_index_or_none(folder: Path) -> np.ndarray | None:
    return _read_index(folder) if (folder / ROLLOUTS).is_file() else None


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _write_aside(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, **dict(arrays))  # type: ignore[arg-type]
    unfinished.replace(path)


def _write_all(file: Any, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def _copy(source: BinaryIO, target: BinaryIO, num_bytes: int) -> None:
    while num_bytes:
        num_bytes -= target.write(source.read(min(num_bytes, 2**22)))
