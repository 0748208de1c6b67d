"""The files of rollouts on disk."""

import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.fake_run import write_fake_run
from tests.helpers import ROOT
from verifiers_rl import read_rollouts
from verifiers_rl.report.rollouts import (
    HAS_ERROR,
    HAS_TOKENS,
    INDEX,
    IS_EVAL,
    IS_TRUNCATED,
    NOT_IN_LOSS,
    RECORD,
    ROLLOUTS,
    TOKENS,
    RolloutWriter,
    read_run,
    tokens_file,
)


def make_row(step, split="train", **others):
    row = {"step": step, "split": split, "env": "sums", "example": 7, "group": 2, "reward": 0.5}
    return {**row, "in_loss": split == "train", "messages": [], **others}


def token_arrays(rows, text=b"abc"):
    """Arrays for these rows, each with the tokens `a` and `bc`."""
    size = 2 * len(rows)
    floats = np.arange(size, dtype=np.float32)
    return {
        "rows": np.array(rows), "starts": np.arange(0, size + 1, 2),
        "sample": np.zeros(size, np.int32), "token_ids": np.arange(size, dtype=np.int32),
        "loss_mask": np.ones(size, bool), "inference_logprobs": -floats,
        "trainer_logprobs": np.full(size, np.nan, np.float32), "entropy": floats,
        "advantages": floats, "policy_versions": np.zeros(size, np.int32),
        "is_masked": np.zeros(size, bool), "text": np.frombuffer(text * len(rows), np.uint8),
        "text_ends": np.array([end for n in range(len(rows)) for end in (3 * n + 1, 3 * n + 3)]),
    }  # fmt: skip


def write(folder, *appends, up_to_step=None):
    writer = RolloutWriter(folder, up_to_step)
    for rows in appends:
        writer.append(rows)
    writer.close()


def steps_of(folder):
    """By the index, and by the lines that it points at."""
    rollouts = read_rollouts(folder)
    steps = rollouts.index["step"].tolist()
    assert steps == [row["step"] for row in rollouts]
    lines = (folder / ROLLOUTS).read_bytes().splitlines(keepends=True)
    assert rollouts.index["length"].tolist() == [len(line) for line in lines[: len(steps)]]
    return steps


def test_what_was_written_is_read_again_by_row_and_by_index(tmp_path):
    error = {"type": "TimeoutError", "message": "late"}
    rows = [
        make_row(3, is_truncated=True, has_tokens=True, example=2**40, text="數"),
        make_row(3, "eval", env="words", reward=None, error=error),
        make_row(3, reward=math.nan, advantage=math.inf, rewards={"x": np.float32(0.25)}),
    ]
    write(tmp_path, rows)
    rollouts = read_rollouts(tmp_path)
    assert rollouts.envs == read_run(tmp_path)["envs"] == ["sums", "words"]
    assert rollouts[0] == rows[0] and rollouts[-2:][0] == rows[1]
    assert (rollouts[2]["reward"], rollouts[2]["advantage"]) == (None, None)
    assert rollouts[2]["rewards"] == {"x": 0.25}
    index = rollouts.index
    flags = [IS_TRUNCATED | HAS_TOKENS, IS_EVAL | HAS_ERROR | NOT_IN_LOSS, 0]
    assert index["flags"].tolist() == flags
    assert index["env"].tolist() == [0, 1, 0] and index["group"].tolist() == [2, 2, 2]
    assert index["reward"][0] == 0.5 and np.isnan(index["reward"][1:]).all()
    assert index["example"].tolist() == [2**31 - 1, 7, 7]
    assert RECORD.itemsize == 32 and (tmp_path / INDEX).stat().st_size == 96


def test_the_record_that_a_worker_made_is_in_the_line_as_it_came(tmp_path):
    writer = RolloutWriter(tmp_path)
    row = make_row(1)
    del row["messages"]
    writer.append([row, row], [b'{"messages": [1], "turns": []}', b"{}"])
    writer.close()
    assert read_rollouts(tmp_path)[0] == {**row, "messages": [1], "turns": []}
    assert read_rollouts(tmp_path)[1] == row


def test_tokens_are_found_by_the_line_of_their_rollout(tmp_path):
    writer = RolloutWriter(tmp_path)
    writer.append([make_row(1)])
    with_tokens = [make_row(2), make_row(2, has_tokens=True), make_row(2, has_tokens=True)]
    writer.append(with_tokens, tokens=token_arrays([1, 2], "aß".encode()))
    writer.close()
    rollouts = read_rollouts(tmp_path)
    assert [rollouts.tokens(i) is None for i in range(4)] == [True, True, False, False]
    last = rollouts.tokens(-1)
    assert last["inference_logprobs"].tolist() == [-2, -3] and last["text"].tolist() == ["a", "ß"]
    assert np.isnan(last["trainer_logprobs"]).all()
    tokens_file(tmp_path, 2).unlink()
    assert rollouts.tokens(2) is None


def test_a_reader_ignores_what_a_killed_writer_left_unfinished(tmp_path):
    write(tmp_path, [make_row(1), make_row(2)])
    with (tmp_path / ROLLOUTS).open("ab") as lines, (tmp_path / INDEX).open("ab") as index:
        lines.write(b'{"step": 3, "sp')
        index.write(b"\0" * 40)  # one record of nothing, and a part of one
    assert steps_of(tmp_path) == [1, 2]
    # A line without a record is whole: the writer takes it up, and removes the rest.
    whole = json.dumps(make_row(3)).encode() + b"\n"
    lines = (tmp_path / ROLLOUTS).read_bytes()
    (tmp_path / ROLLOUTS).write_bytes(lines[: lines.rindex(b"\n") + 1] + whole + b'{"st')
    write(tmp_path, [make_row(4)])
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_a_record_whose_line_is_not_all_there_is_not_used(tmp_path):
    write(tmp_path, [make_row(1), make_row(2)])
    with (tmp_path / ROLLOUTS).open("rb+") as lines:
        lines.truncate((tmp_path / ROLLOUTS).stat().st_size - 1)
    assert len(read_rollouts(tmp_path)) == 1
    write(tmp_path, [make_row(5)])
    assert steps_of(tmp_path) == [1, 5]


def test_a_missing_index_is_made_again_from_the_lines(tmp_path):
    write(tmp_path, [make_row(1), make_row(2, env="words", reward=1.0)])
    before = read_rollouts(tmp_path).index.copy()
    (tmp_path / INDEX).unlink()
    (tmp_path / "run.json").unlink()
    assert np.array_equal(read_rollouts(tmp_path).index, before)
    assert not (tmp_path / INDEX).exists()  # a reader changes nothing
    (tmp_path / "run.json").write_text('{"envs": ["oth')
    assert read_rollouts(tmp_path).envs == ["sums", "words"]
    (tmp_path / "run.json").unlink()
    write(tmp_path, [make_row(3, env="words")])
    again = read_rollouts(tmp_path)
    assert np.array_equal(again.index[:2], before) and again.envs == ["sums", "words"]
    assert again.index["env"].tolist() == [0, 1, 1]


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint(tmp_path):
    writer = RolloutWriter(tmp_path)
    for step in (1, 2, 3, 4):
        rows = [make_row(step, has_tokens=True), make_row(step)]
        writer.append(rows, tokens=token_arrays([0]))
        if step == 3:
            writer.append([make_row(2, "eval", example=99)])  # it ended late
    writer.close()
    # Written from the start again: killed in the middle of this, the index would be missing.
    write(tmp_path, [make_row(3, example=5)], up_to_step=2)
    assert steps_of(tmp_path) == [1, 1, 2, 2, 2, 3]
    rollouts = read_rollouts(tmp_path)
    assert rollouts[4]["example"] == 99 and rollouts[5]["example"] == 5
    names = sorted(path.name for path in (tmp_path / TOKENS).iterdir())
    assert names == ["step-00000001.npz", "step-00000002.npz"]
    assert rollouts.tokens(2) is not None
    write(tmp_path, up_to_step=0)
    assert steps_of(tmp_path) == []


WRITE_FOREVER = """
import sys
from pathlib import Path
from tests.test_rollouts import RolloutWriter, make_row, token_arrays
writer = RolloutWriter(Path(sys.argv[1]))
for step in range(1, 10**6):
    rows = [make_row(step, text="x" * 300, has_tokens=True) for _ in range(50)]
    writer.append(rows, tokens=token_arrays(list(range(50))))
    if step == 20:
        print("begun", flush=True)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_anywhere_leaves_whole_rollouts(tmp_path):
    total = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOREVER, str(tmp_path)], cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        before = read_rollouts(tmp_path)  # while it is written
        assert before[len(before) - 1]["text"] == "x" * 300
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        process.stdout.close()
        rollouts = read_rollouts(tmp_path)
        assert len(rollouts) >= max(len(before), total + 1000)
        total = len(rollouts)
        for row in rollouts:
            assert row["text"] == "x" * 300
    assert set(np.bincount(rollouts.index["step"])[1:20]) <= {150}  # of three runs
    write(tmp_path, up_to_step=5)
    assert steps_of(tmp_path) == 3 * [step for step in range(1, 6) for _ in range(50)]


def test_a_run_without_rollouts_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"rollouts.jsonl: no such file; a run with log_ro"):
        read_rollouts(tmp_path)


def test_an_invented_run_has_rollouts_of_all_kinds(tmp_path):
    write_fake_run(tmp_path, num_rollouts=2000, num_steps=40, tokens_of=0.1)
    rollouts = read_rollouts(tmp_path)
    assert 1500 < len(rollouts) <= 2000 and sorted(rollouts.envs) == ["calculator", "trivia"]
    for flag in (IS_EVAL, HAS_ERROR, IS_TRUNCATED, HAS_TOKENS, NOT_IN_LOSS):
        assert (rollouts.index["flags"] & flag).any()
    (first, *_) = np.flatnonzero(rollouts.index["flags"] & HAS_TOKENS)
    tokens = rollouts.tokens(int(first))
    said = [m["content"] for m in rollouts[int(first)]["messages"] if m["role"] == "assistant"]
    assert said[0].split()[-1] in "".join(tokens["text"])
    assert len({len(values) for values in tokens.values()}) == 1
