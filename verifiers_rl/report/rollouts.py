"""What a run writes about its rollouts: parquet, which pandas, DuckDB and `datasets` read.
docs/rollouts_on_disk.md has each column.

    rollouts/step-000120.parquet    all rollouts that ended since the file before, up to step 120

A file is written aside and renamed, so each one that is there is whole. A checkpoint waits until
all rollouts so far are in files, and later ones have larger numbers. So a resumed run removes the
files with larger numbers than its checkpoint, and repeats their steps.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from verifiers_rl.process.disk import put_in_place, sync
from verifiers_rl.report.run_folder import rollouts_file

# Seconds between two files, and their share of the run so far: short steps share a file, so that
# even a long run has no more than some thousands.
FILE_S, FILE_SHARE = 10.0, 1 / 500
_ROWS = 256  # of a row group, the least that a reader takes out of a file

_MESSAGE = pa.struct(
    {
        "role": pa.string(),
        "content": pa.string(),
        "reasoning_content": pa.string(),
        "tool_calls": pa.list_(
            pa.struct(
                {
                    "id": pa.string(),
                    "type": pa.string(),
                    "function": pa.struct({"name": pa.string(), "arguments": pa.string()}),
                }
            )
        ),
        "tool_call_id": pa.string(),
    }
)
_TURN = pa.struct(
    {
        "message": pa.int32(),
        "begin_s": pa.float64(),
        "end_s": pa.float64(),
        "num_prompt_tokens": pa.int32(),
        "num_sampled_tokens": pa.int32(),
        "policy_version": pa.int32(),
        "finish_reason": pa.string(),
    }
)
NUMBERS = pa.schema(
    {
        "step": pa.int32(),
        "split": pa.string(),
        "env": pa.string(),
        "role": pa.string(),
        "example": pa.int64(),
        "group": pa.int32(),
        "reward": pa.float64(),
        "rewards": pa.list_(pa.struct({"name": pa.string(), "value": pa.float64()})),
        "advantage": pa.float64(),
        "is_truncated": pa.bool_(),
        "in_loss": pa.bool_(),
        "error": pa.string(),
        "num_turns": pa.int32(),
        "num_tokens": pa.int32(),
        "num_sampled_tokens": pa.int32(),
        "oldest_version": pa.int32(),
        "newest_version": pa.int32(),
        "generation_s": pa.float64(),
        "has_tokens": pa.bool_(),
    }
)
# What `Rollout.record` has, which is made where the rollout ran.
TEXTS = pa.schema(
    {
        "begun_at": pa.float64(),
        "messages": pa.list_(_MESSAGE),
        "other_branches": pa.list_(pa.list_(_MESSAGE)),
        "turns": pa.list_(_TURN),
    }
)
TOKENS = pa.schema(
    {
        "sample": pa.list_(pa.int32()),
        "token_ids": pa.list_(pa.int32()),
        "token_texts": pa.list_(pa.string()),
        "loss_mask": pa.list_(pa.bool_()),
        "inference_logprobs": pa.list_(pa.float32()),
        "trainer_logprobs": pa.list_(pa.float32()),
        "entropy": pa.list_(pa.float32()),
        "advantages": pa.list_(pa.float32()),
        "policy_versions": pa.list_(pa.int32()),
        "is_masked": pa.list_(pa.bool_()),
    }
)
SCHEMA = pa.schema([*NUMBERS, *TEXTS, *TOKENS])


def table_of(rows: Sequence[Mapping[str, Any]], records: Sequence[bytes]) -> pa.Table:
    """Return rollouts as a table of `SCHEMA`.

    Args:
        rows: for each rollout the columns of `NUMBERS` and `TOKENS` that are not null.
        records: for each the columns of `TEXTS`, as a JSON object on one line in UTF-8.

    Raises:
        pa.ArrowInvalid: a record is no such object.
    """
    texts = pyarrow.json.read_json(
        io.BytesIO(b"\n".join(records)),
        pyarrow.json.ReadOptions(use_threads=False, block_size=2 * max(map(len, records)) + 2),
        pyarrow.json.ParseOptions(TEXTS, unexpected_field_behavior="ignore"),
    )
    columns = {
        field.name: pa.array([row.get(field.name) for row in rows], field.type)
        for field in (*NUMBERS, *TOKENS)
    }
    columns |= {name: texts[name] for name in TEXTS.names}
    return pa.table(columns).select(SCHEMA.names).cast(SCHEMA)


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

    def append(
        self,
        rows: Sequence[Mapping[str, Any]],
        records: Sequence[bytes],
        step: int | None = None,
    ) -> None:
        """Append the rollouts of a step or of an evaluation. See `table_of`.

        Args:
            step: that trained on them; None: it was an evaluation.
        """
        if rows:
            self._tables.append(table_of(rows, records))
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
        """Write what was appended."""
        if not self._tables:
            return
        path = rollouts_file(self._folder, self._number)
        path.parent.mkdir(parents=True, exist_ok=True)
        # An evaluation that ended behind the step's own rows.
        before = [pq.read_table(path, schema=SCHEMA)] if path.is_file() else []
        unfinished = path.with_name(".unfinished")
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
