"""The files of rollouts: what is in them, who reads them, what a checkpoint and a kill leave."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers import chat, names_of
from verifiers_rl.report.recording import row_of
from verifiers_rl.report.rollouts import SCHEMA, RolloutWriter
from verifiers_rl.report.run_folder import remove_rollouts
from verifiers_rl.types import Rollout


def make_row(step=1, reward=0.5, split="train", content="so", **others):
    """The columns of a rollout that are not null."""
    messages = chat("hm?", content)
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


def test_every_reader_of_parquet_has_all_rollouts_with_one_schema(tmp_path):
    from datasets import load_dataset
    from pandas import read_parquet

    rewards = [{"name": "x", "value": 1.0}]
    first = make_row(1, reward=0.25, content="Größe\n数", rewards=rewards, mine={"no": "column"})
    failed = make_row(2, None, error="TimeoutError: too late", messages=[])
    write_rows(tmp_path, first, make_row(1, **make_tokens(["a", "ß"])), failed)
    assert names_of(tmp_path / "rollouts") == ["step-000001.parquet", "step-000002.parquet"]
    rows = read(tmp_path)
    assert rows[0].keys() == {*SCHEMA.names}
    assert rows[0]["messages"][1]["content"] == "Größe\n数" and rows[0]["token_ids"] is None
    assert rows[1]["token_texts"] == ["a", "ß"] and rows[1]["loss_mask"] == [False, True]
    assert rows[2]["reward"] is None and rows[2]["error"] == "TimeoutError: too late"
    data = load_dataset(f"{tmp_path}/rollouts", split="train", cache_dir=f"{tmp_path}/c")
    assert len(data) == 3 and data[0]["rewards"] == [{"name": "x", "value": 1.0}]
    frame = read_parquet(tmp_path / "rollouts", columns=["reward", "split"])
    assert frame["reward"].mean() == 0.375


def test_short_steps_share_a_file_more_of_them_in_a_long_run_and_a_checkpoint_ends_it(
    tmp_path, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr("verifiers_rl.report.rollouts.time.monotonic", lambda: now[0])
    writer = RolloutWriter(tmp_path, 1)
    for step, now[0] in enumerate([4, 8, 12, 16, 20, 24, 28, 10_000, 10_015], 1):
        writer.append([make_row(step)], step)
    assert names_of(tmp_path / "rollouts") == [f"step-00000{n}.parquet" for n in (1, 4, 7, 8)]
    writer.checkpoint(9)
    writer.append([make_row(9, split="eval")])
    writer.flush()  # the run ends; one that goes on from step 9 evaluates it again
    assert names_of(tmp_path / "rollouts")[4:] == ["step-000009.parquet", "step-000010.parquet"]
    assert [row["step"] for row in read(tmp_path)] == [*range(1, 10), 9]


def test_a_resumed_run_keeps_the_files_up_to_its_checkpoint(tmp_path):
    write_rows(tmp_path, make_row(0, split="eval"), first=0)  # before the run
    write_rows(tmp_path, *(make_row(step) for step in (1, 2, 3, 4)))
    (tmp_path / "rollouts/.unfinished").write_bytes(b"of a process that was killed")
    remove_rollouts(tmp_path, behind=2)
    write_rows(tmp_path, make_row(3, 0.75), first=3)
    assert [row["step"] for row in read(tmp_path)] == [0, 1, 2, 3]
    remove_rollouts(tmp_path, behind=-1)
    assert names_of(tmp_path / "rollouts") == []


def test_half_a_surrogate_pair_is_a_question_mark_and_a_value_of_another_type_an_error(tmp_path):
    said = Rollout(0, "q", "a\ud800b")
    failed = Rollout(0, "q", error=ValueError("\udfff"))
    writer = RolloutWriter(tmp_path, 1)
    writer.append([row_of(rollout, 1, "train", 0) for rollout in (said, failed)], 1)
    writer.flush()
    well, bad = read(tmp_path)
    assert (well["messages"][1]["content"], bad["error"]) == ("a?b", "ValueError: ?")
    with pytest.raises(pa.ArrowException):
        writer.append([make_row(messages=3)])
