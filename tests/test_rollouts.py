"""The files of rollouts: what is in them, who reads them, what a checkpoint and a kill leave."""

import itertools
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers import ROOT
from verifiers_rl.report import rollouts
from verifiers_rl.report.rollouts import SCHEMA, RolloutWriter
from verifiers_rl.report.run_folder import remove_rollouts


def make_row(step=1, reward=0.5, split="train", content="so", **others):
    """The columns of a rollout that are not null."""
    messages = [{"role": "user", "content": "hm?"}, {"role": "assistant", "content": content}]
    row = {"step": step, "split": split, "env": "sums", "example": 7, "group": 0, "reward": reward}
    row |= {"in_loss": split == "train", "is_truncated": False, "has_tokens": False}
    return {**row, "num_tokens": len(content), "messages": messages, **others}


def write_rows(folder, *rows, first=1):
    """Write one file for each run of rows of one step."""
    writer = RolloutWriter(folder, first)
    for (step, split), own in itertools.groupby(rows, lambda row: (row["step"], row["split"])):
        writer.append(list(own), step if split == "train" else None)
        writer.flush()
    writer.flush()


def make_tokens(texts, **others):
    """The columns of tokens, one for each text."""
    size = len(texts)
    columns = {
        "sample": np.zeros(size, np.int32), "token_ids": np.arange(size, dtype=np.int32),
        "token_texts": texts, "loss_mask": np.arange(size) > 0,
        "inference_logprobs": np.full(size, -1.0, np.float32),
        "trainer_logprobs": np.full(size, np.nan, np.float32),
        "entropy": np.full(size, 0.5, np.float32), "advantages": np.ones(size, np.float32),
        "policy_versions": np.full(size, 4, np.int32), "is_masked": np.zeros(size, bool),
    }  # fmt: skip
    return {"has_tokens": True, **columns, **others}


def read(folder):
    return pq.read_table(folder / "rollouts").to_pylist()


def names(folder):
    return sorted(path.name for path in (folder / "rollouts").iterdir())


def test_every_reader_of_parquet_has_all_rollouts_with_one_schema(tmp_path):
    from datasets import load_dataset
    from pandas import read_parquet

    first = make_row(1, reward=0.25, content="Größe\n数", rewards=[{"name": "x", "value": 1.0}])
    failed = make_row(2, None, error="TimeoutError: too late", turns=[], messages=[])
    others = make_row(2, split="eval"), make_row(3)
    write_rows(tmp_path, first, make_row(1, **make_tokens(["a", "ß"])), failed, *others)
    assert names(tmp_path) == [f"step-00000{n}.parquet" for n in (1, 2, 3)]
    for path in (tmp_path / "rollouts").iterdir():
        assert pq.read_schema(path).names == SCHEMA.names
    rows = read(tmp_path)
    places = [(row["step"], row["split"]) for row in rows]
    assert places == [*[(1, "train")] * 2, (2, "train"), (2, "eval"), (3, "train")]
    assert rows[0]["messages"][1]["content"] == "Größe\n数" and rows[0]["token_ids"] is None
    assert rows[1]["token_texts"] == ["a", "ß"] and rows[1]["loss_mask"] == [False, True]
    assert rows[2]["reward"] is None and rows[2]["error"] == "TimeoutError: too late"
    data = load_dataset(str(tmp_path / "rollouts"), split="train", cache_dir=str(tmp_path / "c"))
    assert data[0]["rewards"] == [{"name": "x", "value": 1.0}] and len(data) == 5
    assert data[1]["inference_logprobs"] == [-1.0, -1.0]
    frame = read_parquet(tmp_path / "rollouts", columns=["reward", "split"])
    assert frame.groupby("split")["reward"].mean().to_dict() == {"eval": 0.5, "train": 1.25 / 3}


def test_a_conversation_is_a_row_that_supervised_finetuning_reads(tmp_path):
    from verifiers_rl.sft.conversations import read_dataset

    function = {"name": "add", "arguments": '{"a": 1}'}
    calling = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    calling["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
    write_rows(tmp_path, make_row(messages=[{"role": "user", "content": "1+1?"}, calling]))
    (row,) = read_dataset([str(tmp_path / "rollouts/step-000001.parquet")])
    assert row["messages"][1] == {**calling, "tool_call_id": None}


def test_what_is_no_column_is_left_out_and_another_type_is_an_error(tmp_path):
    message = {"role": "user", "content": "hm?", "name": "x"}
    writer = RolloutWriter(tmp_path, 1)
    writer.append([make_row(1, mine={"a": [1]}), make_row(1, begun_at=2.5, messages=[message])])
    writer.flush()
    rows = read(tmp_path)
    assert [row["begun_at"] for row in rows] == [None, 2.5] and rows[0].keys() == {*SCHEMA.names}
    assert rows[1]["messages"][0]["content"] == "hm?" and "name" not in rows[1]["messages"][0]
    with pytest.raises(pa.ArrowException):
        writer.append([make_row(messages=3)])


def test_short_steps_share_a_file_and_a_checkpoint_ends_it(tmp_path, monkeypatch):
    clock = itertools.count(0, 4)
    monkeypatch.setattr(rollouts.time, "monotonic", lambda: float(next(clock)))
    writer = RolloutWriter(tmp_path, 1)
    for step in range(1, 8):
        writer.append([make_row(step)], step)
    assert names(tmp_path) == ["step-000001.parquet", "step-000004.parquet", "step-000007.parquet"]
    writer.append([make_row(6, split="eval")])
    writer.checkpoint(7)  # into the file of step 7, which is there
    assert names(tmp_path)[-1] == "step-000007.parquet" and len(read(tmp_path)) == 8
    writer.append([make_row(7, split="eval")])
    writer.flush()  # the run ends; one that goes on from step 7 evaluates it again
    assert names(tmp_path)[-1] == "step-000008.parquet"
    assert [row["step"] for row in read(tmp_path)] == [*range(1, 8), 6, 7]


def test_files_become_rarer_in_a_long_run(tmp_path, monkeypatch):
    now, written = [0.0], []
    monkeypatch.setattr(rollouts.time, "monotonic", lambda: now[0])
    writer = RolloutWriter(tmp_path, 1)

    def flush():
        written.append(1)
        writer._written_at = now[0]

    monkeypatch.setattr(writer, "flush", flush)
    for step in range(1, 10_000):
        now[0] += 10.1
        writer.append([], step)
    assert 500 < len(written) < 2200  # of a run of 28 hours


def test_a_resumed_run_keeps_the_files_up_to_its_checkpoint(tmp_path):
    write_rows(tmp_path, make_row(0, split="eval"), first=0)  # before the run
    write_rows(tmp_path, *(make_row(step) for step in (1, 2, 3, 4)))
    (tmp_path / "rollouts/.unfinished").write_bytes(b"of a process that was killed")
    remove_rollouts(tmp_path, behind=2)
    write_rows(tmp_path, make_row(3, example=5), first=3)
    assert [(row["step"], row["example"]) for row in read(tmp_path)] == [
        (0, 7), (1, 7), (2, 7), (3, 5),
    ]  # fmt: skip
    remove_rollouts(tmp_path, behind=-1)
    assert names(tmp_path) == []


WRITE_FOREVER = """
import sys
from pathlib import Path
from tests.test_rollouts import make_row, write_rows
for step in range(1, 10**6):
    rows = [make_row(step, content="x" * 300) for _ in range(50)]
    write_rows(Path(sys.argv[1]), *rows, first=step)
    if step == 20:
        print("begun", flush=True)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_anywhere_leaves_whole_files(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOREVER, str(tmp_path)], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    assert len(read(tmp_path)) >= 1000  # while it is written
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    rows = read(tmp_path)
    assert {row["messages"][1]["content"] for row in rows} == {"x" * 300}
    assert set(np.bincount([row["step"] for row in rows])[1:]) == {50}


def test_half_a_surrogate_pair_of_a_model_is_a_question_mark(tmp_path):
    messages = [{"role": "assistant", "content": "a\ud800b"}]
    write_rows(tmp_path, make_row(messages=messages), make_row(error="\udfff"))
    first, second = read(tmp_path)
    assert (first["messages"][0]["content"], second["error"]) == ("a?b", "?")
