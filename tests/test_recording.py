"""What a run writes beside its metrics: run.json, rollouts, what trackers get."""

import hashlib
import io
import os
import subprocess
import sys
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from tests.helpers import StubSource, breaking, make_samples, on
from tests.test_rollouts import read as read_rollouts
from verifiers_rl import RLConfig, env_from
from verifiers_rl.advantages import center_on_group_mean, of_rewards, set_advantages
from verifiers_rl.envs.make import make_runner
from verifiers_rl.envs.workers import WorkerError
from verifiers_rl.process.terminal import describe_error, print_all_characters
from verifiers_rl.report.recording import describe_experiment
from verifiers_rl.report.rollouts import RolloutWriter
from verifiers_rl.report.run_folder import WritingError, read_run
from verifiers_rl.report.trackers import name_wandb_project, print_rollouts
from verifiers_rl.requests import RolloutError
from verifiers_rl.types import Batch, Rollout


def make_group(example, step, num=4, error=None, env="sums"):
    group = []
    for i, sample in enumerate(make_samples(num, seed=100 * step + example, version=step)):
        rollout = Rollout(example, f"q{example}", f"a{i}", env, reward=float(i), samples=[sample])
        rollout.num_turns, rollout.metrics = 1, {"exact": float(i)}
        group.append(rollout)
    if error is not None:
        group[0].error, group[0].samples, group[0].reward = error, [], float("nan")
    set_advantages(group, of_rewards(center_on_group_mean))
    return group


class GroupSource(StubSource):
    """Batches of two groups, of which one rollout failed, and a third that the filter rejected;
    evaluations of two examples.
    """

    def __init__(self):
        super().__init__(12)

    def get(self):
        step, version = self.pending.pop(0)
        error = WorkerError("TimeoutError: a tool took too long <- OSError: no")
        groups = [make_group(3, step), make_group(8, step), make_group(5, step, error=error)]
        kept = [r for group in (groups[0], groups[2]) for r in group if r.error is None]
        samples = [sample for rollout in kept for sample in rollout.samples]
        return Batch(step, version, samples, kept, {"reward": 1.0}, groups=groups)

    def end_evaluation(self):
        metrics, _ = super().end_evaluation()
        return metrics, [make_group(n, 90, num=1, env="words") for n in (0, 1)]


def counts(folder):
    """How many rollouts each step has trained on."""
    rows = read_rollouts(folder)
    return np.bincount([row["step"] for row in rows if row["split"] == "train"]).tolist()


@pytest.fixture
def make(make_trainer):
    def make(source=None, **options):
        options = {"batch_size": 12, "log_rollouts": 1.0, **options}
        return make_trainer(source=source or GroupSource(), **options)

    return make


def test_every_rollout_of_a_run_is_written_with_what_became_of_it(make, folder):
    make(max_steps=4, eval_steps=2, run_name="mine").train()
    rollouts = read_rollouts(folder)
    assert counts(folder) == [0, 12, 12, 12, 12]
    evaluated = [row for row in rollouts if row["split"] == "eval"]
    assert [(row["step"], row["example"], row["group"]) for row in evaluated] == [
        (2, 0, 0), (2, 1, 1), (4, 0, 0), (4, 1, 1),
    ]  # fmt: skip
    assert evaluated[0]["advantage"] is None and not evaluated[0]["in_loss"]
    first = [row for row in rollouts if row["step"] == 1]
    assert [row["group"] for row in first] == [0] * 4 + [1] * 4 + [2] * 4
    assert [row["in_loss"] for row in first] == [True] * 4 + [False] * 5 + [True] * 3
    assert [row["has_tokens"] for row in first] == [row["in_loss"] for row in first]
    error = {"error": "TimeoutError: a tool took too long <- OSError: no", "reward": None}
    assert first[8].items() >= error.items()
    good, sample = first[1], make_group(3, 0)[1].samples[0]
    expected = {"reward": 1.0, "advantage": -0.5, "rewards": [{"name": "exact", "value": 1.0}]}
    expected |= {"token_ids": sample.token_ids.tolist(), "loss_mask": sample.loss_mask.tolist()}
    expected["num_sampled_tokens"] = int((sample.policy_versions >= 0).sum())
    assert {name: good[name] for name in expected} == expected
    assert [message["content"] for message in good["messages"]] == ["q3", "a1"]
    assert np.isfinite(good["trainer_logprobs"]).tolist() == good["loss_mask"]
    run = read_run(folder)
    expected = {"format": 2, "run_name": "mine", "status": "finished", "pid": os.getpid()}
    assert run.items() >= expected.items() and run["versions"]["torch"]
    assert run["args"]["max_steps"] == 4 and "loss" not in run["args"]
    assert run["begun_at"] <= run["ended_at"]


def test_options_are_written_without_tokens_of_accounts(folder):
    @dataclass
    class OwnConfig(RLConfig):
        judge_token: str = ""

    args = OwnConfig(output_dir=folder, max_steps=7, judge_token="secret")
    written = describe_experiment(args)["args"]
    assert written["max_steps"] == 7 and "secret" not in str(written)


def test_nothing_is_written_if_nothing_is_wanted(make, folder, capsys):
    make(max_steps=2, log_rollouts=0, disable_tqdm=False).train()
    assert not (folder / "rollouts").exists() and "│" not in capsys.readouterr().out


COMMANDS = "\x1b]0;title\x07\x1b[2J\x9b2J\r\b"  # title, clear, clear, to the front, one back


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
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
    shown = terminal.buffer.getvalue().decode(encoding)
    assert not {*shown} & {*"\x1b\x07\x9b\r\b"} and "]0;title" in shown
    places = [shown.index(text) for text in ("[bold]one", "-3e+38", "-1.000", "two", "1e+30")]
    assert places == sorted(places) and not any(text in shown for text in ("a0", "a2", "a4"))
    assert max(map(len, shown.splitlines())) <= 100  # a row of the table is one line wide
    error = ValueError(f"the reply was {COMMANDS}")
    error.__cause__ = error  # as `raise error from error` sets it
    assert describe_error(error) == "ValueError: the reply was ]0;title[2J2J"
    assert describe_error(KeyError("a" * 10**6 + "\u202e")).startswith("KeyError: 'aaa")
    assert len(describe_error(ValueError("a\u202e" * 10**6))) < 2100
    mute = type("MuteError", (Exception,), {"__str__": lambda error: 1 / 0})
    assert describe_error(mute()) == "MuteError"


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("disable_tqdm", [False, True])
def test_a_terminal_that_is_gone_does_not_end_a_run(
    make, folder, monkeypatch, caplog, disable_tqdm
):
    monkeypatch.setattr(sys, "stdout", Gone())
    for max_steps in (2, 3):  # the second one says from where it goes on
        trainer = make(max_steps=max_steps, save_steps=2, use_lora=True, disable_tqdm=disable_tqdm)
        trainer.train(resume_from_checkpoint=max_steps == 3)
        assert read_run(folder)["status"] == "finished"
    assert "a table or the progress bar cannot be shown: " in caplog.text
    assert "broken pipe" in caplog.text.lower()


def test_who_plays_where_is_said_if_there_is_room(monkeypatch, caplog):
    closed = io.StringIO()
    closed.close()
    for stream in (Gone(), closed):
        monkeypatch.setattr(sys, "stdout", stream)
        env = env_from(["a"], lambda completion: 1.0)  # which no worker can have
        make_runner(env, "http://unused", None, RLConfig())
    assert caplog.text.count("Broken pipe") == 2  # where it runs, and what it is
    assert caplog.text.count("closed file") == 2


@pytest.mark.parametrize("error, status, split", [
    (RolloutError("all failed"), "failed", "train"),
    (RolloutError("all failed"), "failed", "eval"),
    (KeyboardInterrupt(), "interrupted", None),
])  # fmt: skip
def test_the_file_of_a_run_says_how_it_ended(make, folder, error, status, split):
    if split:  # before the run ends
        error.groups, error.split = [make_group(1, 2, 1, ValueError("bad tool"))], split
    with pytest.raises(type(error)):
        make(breaking(GroupSource(), "get", error)).train()
    assert read_run(folder)["status"] == status
    found = [row for row in read_rollouts(folder) if not row["in_loss"]] if split else []
    expected = [("ValueError: bad tool", split, int(split == "train"))] * bool(split)
    assert [(row["error"], row["split"], row["step"]) for row in found] == expected


@pytest.mark.parametrize("first", [ValueError("the environment broke"), None])
def test_a_full_disk_ends_a_run_and_does_not_hide_its_error(make, monkeypatch, caplog, first):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    def fill(state):
        for name in ("pyarrow.parquet.write_table", "pathlib.Path.write_bytes"):
            monkeypatch.setattr(name, full)
        if first is not None:
            raise first

    trainer = make(max_steps=3)
    trainer.add_callback(on("on_step_end", fill))
    with pytest.raises(type(first) if first else WritingError) as raised:
        trainer.train()
    full_disk = "cannot be written: [Errno 28] No space left"  # said of whichever comes first
    assert (str(first) if first else full_disk) in str(raised.value)
    assert f"run.json {full_disk}" in caplog.text
    assert not trainer.orchestrator.running


def test_a_step_goes_on_while_its_rollouts_are_written_and_a_disk_that_hangs_ends_the_run(
    make, folder, monkeypatch
):
    began, go_on, real = threading.Event(), threading.Event(), RolloutWriter.append

    def slow(*args):
        began.set()
        assert go_on.wait(60)
        return real(*args)

    def look(state):
        if state.global_step == 1:  # the first step's rollouts are not written, and it ran on
            assert began.wait(60) and not [*folder.glob("rollouts/*")]
            go_on.set()

    monkeypatch.setattr(RolloutWriter, "append", slow)
    trainer = make(max_steps=2)
    trainer.add_callback(on("on_step_begin", look))
    trainer.train()
    assert counts(folder) == [0, 12, 12]

    go_on.clear()
    monkeypatch.setattr("verifiers_rl.report.recording.WRITE_S", 0.1)
    with pytest.raises(WritingError, match=r"not written to .*run within 0.1 s"):
        make(max_steps=2, overwrite_output_dir=True).train()
    go_on.set()


def test_a_resumed_run_says_and_records_what_was_changed(
    make, folder, tmp_path, monkeypatch, caplog
):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=tmp_path,
                       check=True, capture_output=True)  # fmt: skip

    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    (tmp_path / "notes.txt").write_text("one\n")
    git("init", "-q"), git("add", "notes.txt"), git("commit", "-qm", "first")
    options = {"save_steps": 1}
    make(max_steps=1, **options).train()
    before = read_run(folder)
    digest, commit = before["code"]["git"]
    assert digest == hashlib.sha256(commit.encode()).hexdigest()
    (tmp_path / "notes.txt").write_text("two\napi_key = '0123-the-key'\n")
    options |= {"learning_rate": 0.5, "adam_beta2": 0.95}  # which do not reach the optimizer
    trainer = make(max_steps=2, temperature=0.5, **options)
    trainer.model.config.name_or_path = "another"
    trainer.train(resume_from_checkpoint=True)
    for said in (
        "max_steps=2; it was 1",
        "temperature=0.5; it was not set",
        "model=another; it was ",
    ):
        assert f"from step 1 on, {said}" in caplog.messages
    said = [text for text in caplog.messages if "a resumed run goes on with its optimizer" in text]
    assert [text.split(":")[0] for text in said] == ["learning_rate=0.5", "adam_beta2=0.95"]
    (group, *_) = trainer.optimizer.param_groups
    assert group["initial_lr"] == 1e-2 and group["betas"][1] == 0.999
    after = read_run(folder)
    assert after["begun_at"] == before["begun_at"]
    changes = {change.pop("name"): change for change in after["changes"]}
    assert changes.keys() == {"max_steps", "temperature", "git", "model"}
    assert changes["max_steps"] == {"step": 1, "before": 1, "now": 2}
    assert changes["git"]["before"][1] == commit
    assert "\n-one\n+two\n+api_key = '***'\n" in changes["git"]["now"][1]


# --- Trackers -------------------------------------------------------------------------------------


def test_wandb_gets_the_project(monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "of the shell")
    for options, project in (({}, "of the shell"), ({"project": "words"}, "words")):
        name_wandb_project(RLConfig(use_cpu=True, report_to="wandb", **options))
        assert os.environ["WANDB_PROJECT"] == project


def test_a_resumed_run_has_each_rollout_once(make, folder):
    options = {"max_steps": 4, "save_steps": 2}
    make(**options).train()
    begun_at = read_run(folder)["begun_at"]
    make(**options).train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert counts(folder) == [0, 12, 12, 12, 12]
    assert read_run(folder)["begun_at"] == begun_at
    make(overwrite_output_dir=True, max_steps=1).train()
    assert counts(folder) == [0, 12]


def test_a_checkpoint_waits_for_the_rollouts_of_its_steps(make, folder):
    seen = []
    trainer = make(max_steps=4, save_steps=2)
    look = on("on_save", lambda state: seen.append(len(read_rollouts(folder))))
    trainer.add_callback(look)  # behind our own
    trainer.train()
    assert seen == [24, 48]
