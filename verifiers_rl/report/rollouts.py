"""What a run writes about its rollouts: parquet, which pandas, DuckDB and `datasets` read.
docs/watching.md has each column.

    rollouts/step-000120.parquet    all rollouts that ended since the file before, up to step 120

A file is written aside and renamed, so each one that is there is whole. A checkpoint waits until
all rollouts so far are in files, and later ones have larger numbers. So a resumed run removes the
files with larger numbers than its checkpoint, and repeats their steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verifiers_rl.process.disk import put_in_place, sync
from verifiers_rl.report.run_folder import rollouts_file, writing

# Seconds between two files, and their share of the run so far: short steps share a file, so that
# even a long run has no more than some thousands.
FILE_S, FILE_SHARE = 10.0, 1 / 500
_ROWS = 256  # of a row group, the least that a reader takes out of a file


def _objects(**columns: pa.DataType) -> pa.DataType:
    """Return the type of a list of objects."""
    return pa.list_(pa.struct(columns))


_TEXT, _COUNT, _NUMBER, _IS = pa.string(), pa.int32(), pa.float64(), pa.bool_()
_MESSAGES = _objects(
    role=_TEXT,
    content=_TEXT,
    reasoning_content=_TEXT,
    tool_calls=_objects(
        id=_TEXT, type=_TEXT, function=pa.struct({"name": _TEXT, "arguments": _TEXT})
    ),
    tool_call_id=_TEXT,
)
NUMBERS = pa.schema(
    {
        "step": _COUNT,
        "split": _TEXT,
        "env": _TEXT,
        "role": _TEXT,
        "example": pa.int64(),
        "group": _COUNT,
        "reward": _NUMBER,
        "rewards": _objects(name=_TEXT, value=_NUMBER),
        "advantage": _NUMBER,
        "is_truncated": _IS,
        "in_loss": _IS,
        "error": _TEXT,
        "num_turns": _COUNT,
        "num_tokens": _COUNT,
        "num_sampled_tokens": _COUNT,
        "oldest_version": _COUNT,
        "newest_version": _COUNT,
        "generation_s": _NUMBER,
        "has_tokens": _IS,
    }
)
# What `Rollout.record` has, which is made where the rollout ran.
TEXTS = pa.schema(
    {
        "begun_at": _NUMBER,
        "messages": _MESSAGES,
        "other_branches": pa.list_(_MESSAGES),
        "turns": _objects(
            message=_COUNT,
            begin_s=_NUMBER,
            end_s=_NUMBER,
            num_prompt_tokens=_COUNT,
            num_sampled_tokens=_COUNT,
            policy_version=_COUNT,
            finish_reason=_TEXT,
        ),
    }
)
_COUNTS, _NUMBERS, _ARE = pa.list_(_COUNT), pa.list_(pa.float32()), pa.list_(_IS)  # of tokens
TOKENS = pa.schema(
    {
        "sample": _COUNTS,
        "token_ids": _COUNTS,
        "token_texts": pa.list_(_TEXT),
        "loss_mask": _ARE,
        "inference_logprobs": _NUMBERS,
        "trainer_logprobs": _NUMBERS,
        "entropy": _NUMBERS,
        "advantages": _NUMBERS,
        "policy_versions": _COUNTS,
        "is_masked": _ARE,
    }
)
SCHEMA = pa.schema([*NUMBERS, *TEXTS, *TOKENS])


def check_schema(schema: pa.Schema) -> None:
    """Raise ValueError if a file with this schema is none that a run of this version has written;
    it may have more columns.
    """
    if lacking := [field.name for field in SCHEMA if field not in [*schema]]:
        raise ValueError(f"it has no column {lacking[0]!r}, or not as this version writes it")


class RolloutWriter:
    """Writes the files of a run's rollouts. After `flush`, the disk has what was appended.

    Args:
        folder: of the run.
        first: the first file has this number, or a later one.
    """

    def __init__(self, folder: Path, first: int) -> None:
        self._folder, self._number = folder, first
        self._tables: list[pa.Table] = []
        self._began_at, self._written_at = time.monotonic(), -FILE_S

    def append(self, rows: Sequence[Mapping[str, Any]], step: int | None = None) -> None:
        """Append the rollouts of a step or of an evaluation.

        Args:
            rows: for each rollout the columns of `SCHEMA` that are not null. Others are left out.
            step: that trained on them; None: it was an evaluation.

        Raises:
            pa.ArrowException: a value is of another type.
        """
        if rows:
            self._tables.append(pa.Table.from_pylist(rows, SCHEMA))
        if step is not None:
            self._number, now = step, time.monotonic()
            if now - self._written_at >= max(FILE_S, FILE_SHARE * (now - self._began_at)):
                self.flush()

    def checkpoint(self, step: int) -> None:
        """Write what was appended. What follows goes into files that a run which goes on from the
        checkpoint of this step removes.
        """
        self.flush()
        self._number = step + 1

    def flush(self) -> None:
        """Write what was appended.

        Raises:
            WritingError: it cannot be written.
        """
        if not self._tables:
            return
        path = rollouts_file(self._folder, self._number)
        unfinished = path.with_name(".unfinished")
        with writing(path, "make room there, or set log_rollouts=0"):
            path.parent.mkdir(parents=True, exist_ok=True)
            # An evaluation that ended behind the step's own rows.
            before = [pq.read_table(path, schema=SCHEMA)] if path.is_file() else []
            pq.write_table(
                pa.concat_tables([*before, *self._tables]),
                unfinished,
                row_group_size=_ROWS,
                compression="zstd",
                use_dictionary=False,
                write_statistics=False,
            )
            sync(unfinished)
            put_in_place(unfinished, path)
        self._tables, self._written_at = [], time.monotonic()
