"""What a run writes beside its metrics: run.json, rollouts, what trackers get."""

import hashlib
import io
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from transformers import TrainerCallback

from tests.helpers import StubSource, make_samples
from tests.test_rollouts import read as read_rollouts
from verifiers_rl.config import RLConfig
from verifiers_rl.data import describe_error
from verifiers_rl.envs.workers import WorkerError
from verifiers_rl.process.terminal import print_all_characters
from verifiers_rl.report.recording import describe_experiment, row_of
from verifiers_rl.report.rollouts import RolloutWriter
from verifiers_rl.report.run_folder import WritingError, read_run
from verifiers_rl.report.trackers import print_rollouts
from verifiers_rl.requests import RolloutError
from verifiers_rl.types import Batch, Rollout


def make_group(example, step, num=4, error=None, env="sums"):
    group = []
    for i, sample in enumerate(make_samples(num, seed=100 * step + example, version=step)):
        rollout = Rollout(example, f"q{example}", f"a{i}", env, reward=float(i), samples=[sample])
        rollout.num_turns, rollout.advantage = 1, i - 1.5
        rollout.metrics = {"exact": float(i)}
        group.append(rollout)
    if error is not None:
        group[0].error, group[0].samples, group[0].reward = error, [], float("nan")
    return group


class GroupSource(StubSource):
    """Batches of two groups, of which one rollout failed, and a third that the filter rejected;
    evaluations of two examples.
    """

    def __init__(self):
        super().__init__(12)
        self.evaluated = []

    def get(self):
        step, version = self.pending.pop(0)
        error = WorkerError("TimeoutError: a tool took too long <- OSError: no")
        groups = [make_group(3, step), make_group(8, step), make_group(5, step, error=error)]
        kept = [r for group in (groups[0], groups[2]) for r in group if r.error is None]
        samples = [sample for rollout in kept for sample in rollout.samples]
        return Batch(step, version, samples, kept, {"reward": 1.0}, groups=groups)

    def end_evaluation(self):
        groups = [make_group(n, 90, num=1, env="words") for n in (0, 1)]
        self.evaluated.append((self.evaluates, groups))
        return super().end_evaluation()


class PopLeft(list):
    def popleft(self):
        return self.pop(0)


def counts(tmp_path):
    """How many rollouts each step has trained on."""
    rows = read_rollouts(tmp_path / "run")
    return np.bincount([row["step"] for row in rows if row["split"] == "train"]).tolist()


@pytest.fixture
def make(make_trainer):
    def make(source=None, **options):
        source = source or GroupSource()
        source.evaluated = PopLeft()
        options = {"batch_size": 12, "log_rollouts": 1.0, **options}
        return make_trainer(source=source, **options)

    return make


def test_every_rollout_of_a_run_is_written_with_what_became_of_it(make, tmp_path):
    trainer = make(max_steps=4, eval_strategy="steps", eval_steps=2, run_name="mine")
    began = time.time()
    trainer.train()
    rollouts = read_rollouts(tmp_path / "run")
    assert counts(tmp_path) == [0, 12, 12, 12, 12]
    evaluated = [row for row in rollouts if row["split"] == "eval"]
    assert [(row["step"], row["example"], row["group"]) for row in evaluated] == [
        (2, 0, 0), (2, 1, 1), (4, 0, 0), (4, 1, 1),
    ]  # fmt: skip
    assert {row["env"] for row in evaluated} == {"words"}
    assert evaluated[0]["advantage"] is None and not evaluated[0]["in_loss"]
    first = [row for row in rollouts if row["step"] == 1]
    assert [row["group"] for row in first] == [0] * 4 + [1] * 4 + [2] * 4
    assert [row["in_loss"] for row in first] == [True] * 4 + [False] * 5 + [True] * 3
    assert [row["has_tokens"] for row in first] == [row["in_loss"] for row in first]
    failed = first[8].items()
    assert failed >= dict.fromkeys(("reward", "advantage", "oldest_version", "token_ids")).items()
    assert ("error", "TimeoutError: a tool took too long <- OSError: no") in failed
    good, sample = first[1], make_group(3, 0)[1].samples[0]
    expected = {"reward": 1.0, "advantage": -0.5, "rewards": [{"name": "exact", "value": 1.0}]}
    expected |= {"num_tokens": len(sample.token_ids), "token_ids": sample.token_ids.tolist()}
    expected["num_sampled_tokens"] = int((sample.policy_versions >= 0).sum())
    assert {name: good[name] for name in expected} == expected
    assert [(m["role"], m["content"]) for m in good["messages"]] == [
        ("user", "q3"), ("assistant", "a1"),
    ]  # fmt: skip
    assert np.isfinite(good["trainer_logprobs"]).tolist() == sample.loss_mask.tolist()
    run = read_run(tmp_path / "run")
    expected = {"format": 2, "run_name": "mine", "status": "finished", "max_steps": 4}
    assert run.items() >= {**expected, "pid": os.getpid()}.items() and run["versions"]["torch"]
    assert run["args"]["max_steps"] == 4 and "loss" not in run["args"]
    assert began - 1 < run["begun_at"] <= run["ended_at"] <= time.time()


def test_options_are_written_without_tokens_of_accounts(tmp_path):
    @dataclass
    class OwnConfig(RLConfig):
        judge_token: str = ""

    args = OwnConfig(output_dir=str(tmp_path), max_steps=7, judge_token="secret")
    written = describe_experiment(args)["args"]
    assert written["max_steps"] == 7 and "secret" not in str(written)


def test_nothing_is_written_if_nothing_is_wanted(make, tmp_path, capsys):
    make(max_steps=2, log_rollouts=0, disable_tqdm=False).train()
    assert not (tmp_path / "run/rollouts").exists() and "│" not in capsys.readouterr().out
    assert read_run(tmp_path / "run")["status"] == "finished"


def test_people_see_some_rollouts_of_each_logged_step(make, capsys):
    make(max_steps=1, disable_tqdm=False).train()
    shown = capsys.readouterr().out
    assert "step 1" in shown and "a0" in shown and "a3" in shown and "a1" not in shown


COMMANDS = "\x1b]0;title\x07\x1b[2J\x9b2J\r\b"  # title, clear, clear, to the front, one back


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_no_text_of_a_model_ends_a_run_or_commands_the_terminal(monkeypatch, encoding):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    print_all_characters()
    group = make_group(1, 0, num=5)[::-1]
    first, last = group[3], group[1]  # of these five by their rewards
    first.prompt, first.completion = f"\u6f22{COMMANDS}?", "\ud800 \u2192 [bold]one\ntwo"
    first.reward, last.reward = -3e38, 1e30
    print_rollouts(group, 1)
    print("\u6f22")  # whatever else is printed
    shown = terminal.buffer.getvalue().decode(encoding)
    assert not {*shown} & {*"\x1b\x07\x9b\r\b"} and "]0;title" in shown
    places = [shown.index(text) for text in ("[bold]one", "-3e+38", "-0.500", "two", "1e+30")]
    assert places == sorted(places) and not any(text in shown for text in ("a0", "a2", "a4"))
    assert max(map(len, shown.splitlines())) <= 100  # a row of the table is one line wide
    error = ValueError(f"the reply was {COMMANDS}")
    assert describe_error(error) == "ValueError: the reply was ]0;title[2J2J"


def test_a_terminal_that_is_gone_does_not_end_a_run(make, tmp_path, monkeypatch, caplog):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    trainer = make(max_steps=2, disable_tqdm=False)
    monkeypatch.setattr(sys, "stdout", Gone())
    trainer.train()
    assert read_run(tmp_path / "run")["status"] == "finished"
    assert "a table of rollouts cannot be shown: broken pipe" in caplog.text


def test_a_resumed_run_has_each_rollout_once(make, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make(**options).train()
    begun_at = read_run(tmp_path / "run")["begun_at"]
    make(**options).train(resume_from_checkpoint=f"{tmp_path}/run/checkpoint-2")
    assert counts(tmp_path) == [0, 12, 12, 12, 12]
    assert read_run(tmp_path / "run")["begun_at"] == begun_at
    make(overwrite_output_dir=True, max_steps=1).train()
    assert counts(tmp_path) == [0, 12]


def test_a_run_removes_the_rollouts_of_one_that_left_no_other_trace(make, tmp_path):
    make(max_steps=1, save_strategy="no").train()
    for path in (tmp_path / "run").iterdir():
        if path.is_file():
            path.unlink()
    make(max_steps=2).train()
    assert counts(tmp_path) == [0, 12, 12]


def test_an_evaluation_that_was_begun_again_is_written_once(make, tmp_path):
    class Twice(GroupSource):
        def end_evaluation(self):
            self.evaluated.append((self.evaluates, [make_group(7, 70, num=3)]))  # discarded
            return super().end_evaluation()

    make(Twice(), max_steps=2, eval_strategy="steps", eval_steps=1).train()
    rows = [row for row in read_rollouts(tmp_path / "run") if row["split"] == "eval"]
    assert [row["step"] for row in rows] == [1, 1, 2, 2]
    assert {row["example"] for row in rows} == {0, 1}


class Failing(GroupSource):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def get(self):
        if self.pending[0][0] == 2:
            raise self.error
        return super().get()


@pytest.mark.parametrize("error, status", [
    (RolloutError("all failed"), "failed"), (KeyboardInterrupt(), "interrupted"),
])  # fmt: skip
def test_the_file_of_a_run_says_how_it_ended(make, tmp_path, error, status):
    num_failed = 2 * (status == "failed")
    error.groups = [make_group(1, 2, num_failed, ValueError("bad tool"))] if num_failed else []
    with pytest.raises(type(error)):
        make(Failing(error), max_steps=4).train()
    assert read_run(tmp_path / "run")["status"] == status
    assert counts(tmp_path) == [0, 12, 12, 2][: 3 + bool(num_failed)]
    if num_failed:  # written before the run ends
        *_, first, _ = read_rollouts(tmp_path / "run")
        assert (first["error"], first["in_loss"]) == ("ValueError: bad tool", False)


@pytest.mark.parametrize("file_s, num_steps", [(0.0, 3), (10.0, 4)])
def test_rollouts_that_cannot_be_written_fail_the_run(
    make, tmp_path, monkeypatch, file_s, num_steps
):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    class NoRoom(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                deadline = time.monotonic() + 60  # for the thread that writes the first step
                while not [*tmp_path.glob("run/rollouts/step-000001.parquet")]:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                monkeypatch.setattr("pyarrow.parquet.write_table", full)

    monkeypatch.setattr("verifiers_rl.report.rollouts.FILE_S", file_s)
    trainer = make(max_steps=4, save_strategy="no")
    trainer.add_callback(NoRoom())
    with pytest.raises(WritingError, match=r"run/rollouts/.* cannot be written: .*No space left"):
        trainer.train()
    assert trainer.state.global_step == num_steps  # at the step behind, or at the end
    assert read_run(tmp_path / "run")["status"] == "failed"
    assert not trainer.orchestrator.running


@pytest.mark.parametrize("first", [ValueError("the environment broke"), None])
def test_a_full_disk_does_not_hide_the_error_of_a_run(make, tmp_path, monkeypatch, caplog, first):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    class NoRoom(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            for name in ("pyarrow.parquet.write_table", "pathlib.Path.write_bytes"):
                monkeypatch.setattr(name, full)
            if first is not None:
                raise first

    trainer = make(max_steps=3)
    trainer.add_callback(NoRoom())
    with pytest.raises(type(first) if first else WritingError) as raised:
        trainer.train()
    assert str(raised.value) == str(first) if first else "run/rollouts/step-" in str(raised.value)
    assert "run/run.json cannot be written: [Errno 28] No space left" in caplog.text
    assert "make room there" in caplog.text
    assert not trainer.orchestrator.running


def test_a_step_goes_on_while_its_rollouts_are_written_and_a_disk_that_hangs_ends_the_run(
    make, tmp_path, monkeypatch
):
    began, go_on, real = threading.Event(), threading.Event(), RolloutWriter.append

    def slow(*args):
        began.set()
        assert go_on.wait(60)
        return real(*args)

    class SecondStep(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:  # the first step's rollouts are not written, and it ran on
                assert began.wait(60) and not [*tmp_path.glob("run/rollouts/*")]
                go_on.set()

    monkeypatch.setattr(RolloutWriter, "append", slow)
    trainer = make(max_steps=2)
    trainer.add_callback(SecondStep())
    trainer.train()
    assert counts(tmp_path) == [0, 12, 12]

    go_on.clear()
    monkeypatch.setattr("verifiers_rl.report.recording.WRITE_S", 0.1)
    trainer = make(max_steps=2, overwrite_output_dir=True)
    with pytest.raises(WritingError, match=r"not written to .*run within 0.1 s"):
        trainer.train()
    go_on.set()


def test_a_checkpoint_waits_for_the_rollouts_of_its_steps(make, tmp_path):
    seen = []

    class Look(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            seen.append(len(read_rollouts(Path(args.output_dir))))

    trainer = make(max_steps=4, save_strategy="steps", save_steps=2)
    trainer.add_callback(Look())  # behind our own
    trainer.train()
    assert seen == [24, 48]


def test_a_resumed_run_says_and_records_what_was_changed(make, tmp_path, monkeypatch, caplog):
    def git(*words):
        return subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True).stdout

    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    (tmp_path / "notes.txt").write_text("one\n")
    git("init", "-q"), git("add", "notes.txt")
    git("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first")
    options = {"save_strategy": "steps", "save_steps": 1}
    make(max_steps=1, **options).train()
    run = read_run(tmp_path / "run")
    commit = git("rev-parse", "HEAD").decode()
    assert run["code"]["git"][1] == commit and run["changes"] == []
    assert run["code"]["git"][0] == hashlib.sha256(commit.encode()).hexdigest()
    (tmp_path / "notes.txt").write_text("two\n")
    caplog.clear()
    make(max_steps=2, temperature=0.5, **options).train(resume_from_checkpoint=True)
    said = [text for text in caplog.messages if text.startswith("from step 1 on, ")]
    assert said[:2] == [
        "from step 1 on, max_steps=2; it was 1",
        "from step 1 on, temperature=0.5; it was None",
    ]
    changes = {change.pop("name"): change for change in read_run(tmp_path / "run")["changes"]}
    assert changes.keys() == {"max_steps", "temperature", "git"}
    assert changes["max_steps"] == {"step": 1, "before": 1, "now": 2}
    assert "\n-one\n+two\n" in changes["git"]["now"][1]


def test_what_is_left_out_of_the_loss_is_said():
    rollout = make_group(1, 0)[0]
    assert not row_of(rollout, 1, "train", 0)["in_loss"]
    Batch(0, 0, rollout.samples, [rollout])
    assert row_of(rollout, 1, "train", 0)["in_loss"]
    rollout.leave_out_of_loss()
    assert not row_of(rollout, 1, "train", 0)["in_loss"]


# --- Trackers -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_wandb_gets_the_project(make, tmp_path, monkeypatch):
    import wandb

    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("PROJECT", "ENTITY"):
        monkeypatch.setenv(f"WANDB_{name}", "of the shell")  # restored afterwards
    make(max_steps=2, report_to="wandb", project="words").train()
    assert (wandb.run.project, wandb.run.entity) == ("words", "of the shell")
    wandb.finish()
    wandb.teardown()  # its service process writes the last bytes when it ends
    assert list(tmp_path.rglob("run-*.wandb"))
