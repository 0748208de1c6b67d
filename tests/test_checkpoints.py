"""Checkpoints, resumed runs, the final model. With stand-ins for server and environment."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.helpers import StubSink, StubSource, load_example, make_tiny_model
from tests.test_rollouts import read as read_rollouts
from verifiers_rl import RLConfig, RLTrainer, WeightedEnv, checkpoints
from verifiers_rl.checkpoints import environment_names
from verifiers_rl.config import ConfigError
from verifiers_rl.process import disk
from verifiers_rl.process.interrupts import Interrupted
from verifiers_rl.report.run_folder import (
    RunFolderError,
    closing_lines,
    enter_run_folder,
    is_our_card,
    metrics_file,
    newest_checkpoint,
    read_metrics,
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_example("warm_start").make_tokenizer()


@pytest.fixture
def make_trainer(tokenizer, tmp_path):
    def make(model=None, source=None, callbacks=(), sink=None, kind=RLTrainer, **options):
        peft_config = options.pop("peft_config", None)
        defaults = {
            "output_dir": str(tmp_path / "run"),
            "use_cpu": True,
            "use_lora": False,
            "batch_size": 8,
            "rollouts_per_example": 4,
            "max_tokens_per_microbatch": 32,
            "max_seq_len": 32,
            "max_steps": 6,
            "learning_rate": 1e-2,
            "max_off_policy_steps": 0,
            "save_steps": 2,
            "disable_tqdm": True,
        }
        return kind(
            model or make_tiny_model(), None, RLConfig(**{**defaults, **options}), tokenizer,
            peft_config=peft_config, orchestrator=source or StubSource(),
            weight_sync=sink or StubSink(), callbacks=list(callbacks),
        )  # fmt: skip

    return make


class EndsAt(TrainerCallback):
    """Sends this process a signal at the begin of a step, counted from 1, or where `when` says
    while so many steps are done as at its begin.
    """

    def __init__(self, step, when="on_step_begin", number=signal.SIGTERM):
        self.step, self.number = step, number
        setattr(self, when, self._end)

    def _end(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)


def rows_of(trainer):
    """What a run has logged, without what depends on the clock, the machine and the push."""
    left_out = ("runtime", "per_second", "_s", "memory", "staleness", "policy_version")
    rows = read_metrics(metrics_file(trainer.args.output_dir))
    return [
        {k: v for k, v in row.items() if not any(part in k for part in left_out)} for row in rows
    ]


def check_same_rows(rows, expected):
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        assert row.keys() == wanted.keys()
        for name, value in wanted.items():
            assert row[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (row["step"], name)


def interrupt_and_resume(make_trainer, *ends, **options):
    """A run that ends and goes on at each of these; the last trainer."""
    for number, end in enumerate(ends):
        with pytest.raises(Interrupted):
            make_trainer(callbacks=[end], **options).train(resume_from_checkpoint=number > 0)
    trainer = make_trainer(**options)
    trainer.train(resume_from_checkpoint=True)
    return trainer


def same_as_uninterrupted(make_trainer, tmp_path, *ends, **options):
    straight = make_trainer(output_dir=str(tmp_path / "straight"), **options)
    straight.train()
    resumed = interrupt_and_resume(make_trainer, *ends, **options)
    check_same_rows(rows_of(resumed), rows_of(straight))
    for (name, parameter), other in zip(
        straight.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        torch.testing.assert_close(other, parameter, rtol=1e-5, atol=1e-6, msg=name)
    return resumed


# --- Signals --------------------------------------------------------------------------------------


def test_a_signal_ends_the_run_at_the_next_microbatch_and_saves_the_steps_before(
    make_trainer, capfd
):
    begun = []

    class Counting(RLTrainer):
        def microbatch_loss(self, *args):
            begun.append(self.state.global_step)
            if begun.count(3) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().microbatch_loss(*args)

    trainer = make_trainer(max_tokens_per_microbatch=16, save_steps=100, kind=Counting)
    with pytest.raises(Interrupted) as caught:
        trainer.train()
    assert begun.count(2) > 1 and begun.count(3) == 1 and caught.value.code == 143
    folder = Path(trainer.args.output_dir)
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-3"]
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"
    said = f"the run ends at step 3; the newest checkpoint is {folder}/checkpoint-3; go on"
    assert capfd.readouterr().err.strip().splitlines()[-1].startswith(said)


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(make_trainer, tmp_path):
    ends = (EndsAt(2), EndsAt(3, "on_optimizer_step", signal.SIGINT), EndsAt(6))
    resumed = same_as_uninterrupted(make_trainer, tmp_path, *ends, save_steps=100)
    rollouts = read_rollouts(Path(resumed.args.output_dir))
    assert [row["step"] for row in rollouts] == [step for step in range(1, 7) for _ in range(8)]


def test_a_step_that_is_repeated_has_the_dropout_that_it_had(make_trainer, tmp_path):
    class Ends(RLTrainer):
        def microbatch_loss(self, *args):
            if self.state.global_step == 2 and not len(args[-1]._sums):  # the first one of step 3
                os.kill(os.getpid(), signal.SIGTERM)
            return super().microbatch_loss(*args)

    options = {"use_lora": True, "lora_dropout": 0.5, "save_steps": 100, "max_steps": 4}
    options["max_tokens_per_microbatch"] = 16
    with pytest.raises(Interrupted):
        make_trainer(kind=Ends, **options).train()
    same_as_uninterrupted(make_trainer, tmp_path, **options)


@pytest.mark.parametrize("save_steps", [2, 100])
def test_lines_of_logs_over_several_steps_are_those_of_an_unbroken_run(
    make_trainer, tmp_path, save_steps
):
    options = {"logging_steps": 3, "save_steps": save_steps}
    same_as_uninterrupted(make_trainer, tmp_path, EndsAt(3), EndsAt(5), **options)


def test_weights_in_the_middle_of_a_step_are_not_saved(make_trainer, capfd):
    """As with DeepSpeed, whose backward takes the optimizer's step."""

    class Failing(RLTrainer):
        def train_on(self, *args):
            loss = super().train_on(*args)
            if self.state.global_step == 1:
                self.checkpoints.can_repeat_step = False
                with self.checkpoints.saving_on_error():
                    raise ValueError("it broke")
            return loss

    trainer = make_trainer(kind=Failing, save_steps=100)
    with pytest.raises(ValueError, match="it broke"):
        trainer.train()
    assert newest_checkpoint(trainer.args.output_dir) is None
    assert "the run ends at step 1; nothing of its steps is saved" in capfd.readouterr().err


def test_an_upload_a_wait_and_a_lost_server_end_with_a_signal(make_trainer, monkeypatch):
    monkeypatch.setattr("verifiers_rl.process.waiting.POLL_S", 0.01)
    from concurrent.futures import Future

    from verifiers_rl.inference.client import InferenceClient, ServerLostError
    from verifiers_rl.process.waiting import result_of

    class Waiting(StubSource):
        def get(self):
            if self.pending[0][0] == 1:
                threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
                result_of(Future(), 60.0, lambda: "rollouts that never come")
            return super().get()

    with pytest.raises(Interrupted):
        make_trainer(source=Waiting()).train()

    class Lost(StubSink):
        def wait_for_server(self):
            threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
            InferenceClient("127.0.0.1", 1, 60.0).wait_until_ready()

    class LosesIt(StubSource):
        def get(self):
            raise ServerLostError("gone")

    with pytest.raises(Interrupted):
        make_trainer(source=LosesIt(), sink=Lost(), overwrite_output_dir=True).train()


def test_a_signal_behind_the_last_step_ends_the_run_when_its_model_is_saved(make_trainer):
    trainer = make_trainer(max_steps=2, callbacks=[EndsAt(3, "on_train_end")])
    with pytest.raises(Interrupted):
        trainer.train()
    assert (Path(trainer.args.output_dir) / "model.safetensors").is_file()
    assert json.loads((Path(trainer.args.output_dir) / "run.json").read_text())["status"] == (
        "finished"
    )


# --- Complete or absent ---------------------------------------------------------------------------


class KilledError(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("place", ["write", "sync_tree", "put_in_place", "remove_folder"])
def test_a_save_that_is_broken_off_leaves_whole_checkpoints_only(make_trainer, monkeypatch, place):
    options = {"save_steps": 1, "save_total_limit": 1, "max_steps": 3}
    trainer = make_trainer(**options)
    folder, names = Path(trainer.args.output_dir), []

    def die(*args, **kwargs):
        if trainer.state.global_step == 2:
            raise KilledError
        return original(*args, **kwargs)

    if place == "write":
        original = trainer._save_rng_state
        monkeypatch.setattr(trainer, place := "_save_rng_state", die)
    else:
        original = getattr(checkpoints, place)
        monkeypatch.setattr(checkpoints, place, die)
    with pytest.raises(KilledError):
        trainer.train()
    monkeypatch.undo()
    whole = {path.name for path in folder.glob("checkpoint-*")}
    expected = {"checkpoint-1", "checkpoint-2"} if place == "remove_folder" else {"checkpoint-1"}
    assert whole == expected
    names = [{path.name for path in (folder / name).iterdir()} for name in sorted(whole)]
    assert all("trainer_state.json" in n and "optimizer.pt" in n for n in names)
    assert all(n == names[0] for n in names)
    resumed = make_trainer(**options)
    resumed.train(resume_from_checkpoint=True)
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-3"]
    assert [path.name for path in folder.glob("_*")] in ([], ["_unfinished"])
    assert [r["step"] for r in rows_of(resumed)] == [1, 2, 3, 3]


def test_a_kill_between_the_two_renames_of_a_checkpoint_that_is_replaced_leaves_the_old_one(
    make_trainer, monkeypatch
):
    trainer = make_trainer(max_steps=1, save_steps=1)
    trainer.train()
    folder = Path(trainer.args.output_dir)
    new = folder / "_unfinished" / "checkpoint-1"
    shutil.copytree(folder / new.name, new)

    def die(*args):
        raise KilledError

    monkeypatch.setattr(disk.Path, "replace", die)
    with pytest.raises(KilledError):
        disk.put_in_place(new, folder / new.name)
    monkeypatch.undo()
    assert not (folder / new.name).exists()
    resumed = make_trainer(max_steps=2, save_steps=1)
    resumed.train(resume_from_checkpoint=True)
    assert [r["step"] for r in rows_of(resumed)] == [1, 2, 2]
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
    # What was replaced in the end does not come back.
    (folder / "_unfinished" / "replaced-checkpoint-2").mkdir(parents=True)
    disk.restore_replaced(folder / "_unfinished", folder)
    assert (folder / "checkpoint-2" / "trainer_state.json").is_file()


def test_everything_is_on_the_disk_before_a_checkpoint_has_its_name(make_trainer, monkeypatch):
    done = []

    def spy(module, name):
        original = getattr(module, name)

        def spying(path, *args):
            done.append((name, Path(path).name))
            return original(path, *args)

        monkeypatch.setattr(module, name, spying)

    trainer = make_trainer(max_steps=1, save_steps=1)
    trainer._files.checkpoint = lambda: done.append(("sync", "rollouts"))
    spy(checkpoints, "sync")
    spy(disk, "sync")
    spy(checkpoints, "put_in_place")
    trainer.train()
    named = done.index(("put_in_place", "checkpoint-1"))
    before = {name for _, name in done[:named]}
    assert {"rollouts", "metrics.jsonl", "rl_state.json", "optimizer.pt", "checkpoint-1"} <= before
    assert done[named + 1] == ("sync", "run")  # the folder that has the new name


def test_the_last_and_the_best_checkpoints_stay(make_trainer):
    class Best(StubSource):
        def begin_evaluation(self, *args):
            self.eval_metrics = {"reward": {2: 0.9}.get(args[-1], 0.1)}
            super().begin_evaluation(*args)

    def kept(**options):
        trainer = make_trainer(source=Best(), save_steps=1, overwrite_output_dir=True, **options)
        trainer.train()
        folder = Path(trainer.args.output_dir)
        return sorted(path.name for path in folder.glob("checkpoint-*")), trainer

    assert kept(save_total_limit=2)[0] == ["checkpoint-5", "checkpoint-6"]
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    names, trainer = kept(save_total_limit=2, **best)
    assert names == ["checkpoint-2", "checkpoint-6"]
    assert trainer.state.best_model_checkpoint == f"{trainer.args.output_dir}/checkpoint-2"
    state = json.loads(
        (Path(trainer.args.output_dir) / names[1] / "trainer_state.json").read_text()
    )
    assert state["best_model_checkpoint"] == trainer.state.best_model_checkpoint


def test_the_best_checkpoint_is_found_in_a_folder_that_was_moved(make_trainer, tmp_path):
    class Best(StubSource):
        def begin_evaluation(self, *args):
            self.eval_metrics = {"reward": {2: 0.9}.get(args[-1], 0.1)}
            super().begin_evaluation(*args)

    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    best |= {"save_steps": 1, "save_total_limit": 1, "source": Best()}
    with pytest.raises(Interrupted):
        make_trainer(callbacks=[EndsAt(5)], **best).train()
    (tmp_path / "run").rename(tmp_path / "moved")
    trainer = make_trainer(output_dir=str(tmp_path / "moved"), **best)
    trainer.train(resume_from_checkpoint=True)
    saved = load_file(tmp_path / "moved" / "checkpoint-2" / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], trainer.model.lm_head.weight)


def test_checkpoints_behind_the_one_that_is_resumed_are_set_aside(make_trainer, capfd):
    make_trainer(max_steps=6).train()
    folder = Path(make_trainer().args.output_dir)
    with pytest.raises(Interrupted):
        make_trainer(callbacks=[EndsAt(4)]).train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert f"checkpoint-6 has steps that are repeated: it is now {folder}/_abandoned" in (
        capfd.readouterr().out
    )
    assert newest_checkpoint(folder).name == "checkpoint-3"
    resumed = make_trainer()
    resumed.train(resume_from_checkpoint=True)
    assert [row["step"] for row in rows_of(resumed)] == [1, 2, 3, 4, 5, 6, 6]
    assert sorted(p.name for p in (folder / "_abandoned").iterdir()) == [
        "checkpoint-4",
        "checkpoint-6",
    ]
    make_trainer(max_steps=1, overwrite_output_dir=True).train()
    assert not (folder / "_abandoned").exists()


def test_a_part_of_ones_own_is_kept_in_checkpoints(make_trainer):
    class Coefficient:
        value = 1.0

        def state_dict(self, step):
            return {"value": self.value, "step": step}

        def load_state_dict(self, state):
            self.value = state["value"]

    first, second = Coefficient(), Coefficient()
    first.value = 0.25
    trainer = make_trainer(max_steps=4, callbacks=[EndsAt(3)])
    trainer.checkpoints.kept["coefficient"] = first
    with pytest.raises(Interrupted):
        trainer.train()
    trainer = make_trainer(max_steps=4)
    trainer.checkpoints.kept["coefficient"] = second
    trainer.checkpoints.kept["new"] = Coefficient()  # of which the checkpoint knows nothing
    trainer.train(resume_from_checkpoint=True)
    assert second.value == 0.25


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_refused_with_its_file_and_an_older_one_offered(make_trainer):
    make_trainer(max_steps=2, save_steps=1, use_lora=True).train()
    options = {"max_steps": 3, "use_lora": True}
    args = make_trainer(**options).args
    newest, kept = (Path(args.output_dir) / name for name in ("checkpoint-2", "kept"))
    newest.rename(kept)
    names = {str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()}
    assert names >= {"optimizer.pt", "scheduler.pt", "rl_state.json", "rng_state.pth"}
    assert names >= {"adapter_model.safetensors", "trainer_state.json", "manifest.json"}
    for damage, problem in (
        (Path.unlink, "{} is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "{} has .* bytes and had "),
        (change_a_byte, "the content of {} has changed"),
    ):
        for name in names:
            shutil.copytree(kept, newest)
            damage(newest / name)
            said = problem.format(name) if name != "manifest.json" else "manifest.json "
            with pytest.raises(RunFolderError, match=rf"{newest} is damaged: {said}") as error:
                enter_run_folder(args, True)
            assert "checkpoint-1 is whole: go on from it by --trainer.args.resume" in str(
                error.value
            )
            shutil.rmtree(newest)
    shutil.copytree(kept, newest)
    assert enter_run_folder(args, True) == str(newest)
    (newest / "scheduler.pt").unlink()
    older = newest.with_name("checkpoint-1")
    trainer = make_trainer(**options)
    trainer.train(resume_from_checkpoint=str(older))
    assert [row["step"] for row in rows_of(trainer)] == [1, 2, 3, 3]
    shutil.rmtree(older)
    shutil.rmtree(newest)
    change_a_byte(newest.with_name("checkpoint-3") / "optimizer.pt")
    with pytest.raises(
        RunFolderError, match=r"content of optimizer.pt has changed.*start anew with"
    ):
        make_trainer(max_steps=4, use_lora=True).train(resume_from_checkpoint=True)


# --- Evaluations ----------------------------------------------------------------------------------


class Versioned(StubSource):
    """Its evaluations give the policy version that they evaluate."""

    def end_evaluation(self):
        self.eval_metrics = {"reward": float(self.evaluates)}
        return super().end_evaluation()


def evaluated(trainer):
    rows = read_metrics(metrics_file(trainer.args.output_dir))
    return [(row["step"], row["eval_reward"]) for row in rows if "eval_reward" in row]


@pytest.mark.parametrize(
    ("ahead", "options"), [(0, {}), (1, {}), (2, {}), (1, {"metric_for_best_model": "reward"})]
)
def test_evaluations_of_an_interrupted_run_are_neither_lost_nor_logged_twice(
    make_trainer, ahead, options
):
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, **options}
    for step in (3, 4):
        for when in ("on_step_begin", "on_step_end"):
            common = {"source": Versioned(), "max_off_policy_steps": ahead, **options}
            common["overwrite_output_dir"] = True
            with pytest.raises(Interrupted):
                make_trainer(callbacks=[EndsAt(step, when)], **common).train()
            common |= {"source": Versioned(), "overwrite_output_dir": False}
            trainer = make_trainer(**common)
            trainer.train(resume_from_checkpoint=True)
            steps = [step for step, _ in evaluated(trainer)]
            assert len(steps) == len(set(steps)) == 4, (step, when, steps)
            assert [int(value) for _, value in evaluated(trainer)] == steps
            # One that runs when a signal comes behind the next step is made with its weights.
            moved = set(steps) - {0, 2, 4, 6}
            assert len(moved) <= 1 and all(other in (1, 3, 5) for other in moved), (step, when)


def test_before_a_checkpoint_the_evaluation_of_earlier_weights_is_awaited(make_trainer):
    source = Versioned()
    trainer = make_trainer(
        source=source, eval_strategy="steps", eval_steps=2, save_steps=3, max_steps=4,
        max_off_policy_steps=1,
    )  # fmt: skip
    saved = []
    save = trainer.checkpoints.save
    trainer.checkpoints.save = lambda *args: (saved.append(len(source.calls)), save(*args))
    trainer.train()
    before = source.calls[: saved[0]]
    assert before[-1] == "evaluated 2" and before.index("evaluate 2") < before.index("submit 3")


def test_an_evaluation_that_decides_over_the_best_is_made_up_for(make_trainer):
    class FirstIsBest(Versioned):
        def end_evaluation(self):
            version = self.evaluates
            super().end_evaluation()
            return {"reward": 1.0 if version == 2 else 0.0}

    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    with pytest.raises(Interrupted):
        make_trainer(callbacks=[EndsAt(3, "on_step_end")], source=FirstIsBest(), **options).train()
    folder = Path(make_trainer().args.output_dir)
    assert newest_checkpoint(folder).name == "checkpoint-2"
    trainer = make_trainer(source=FirstIsBest(), **options)
    trainer.train(resume_from_checkpoint=True)
    assert evaluated(trainer) == [(2, 1.0), (4, 0.0), (6, 0.0)]
    assert trainer.state.best_global_step == 2
    best = load_file(folder / "checkpoint-2" / "model.safetensors")
    assert torch.equal(best["lm_head.weight"], trainer.model.lm_head.weight)


def test_what_a_killed_run_had_logged_of_an_evaluation_is_logged_once(make_trainer):
    """The checkpoint of step 2 is older than the end of the evaluation of step 2."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "max_off_policy_steps": 1}

    class Dies(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KilledError

    killed = make_trainer(source=Versioned(), callbacks=[], **options)
    killed.add_callback(Dies())  # behind those that write
    with pytest.raises(KilledError):
        killed.train()
    assert (2, 2.0) in evaluated(killed)
    resumed = make_trainer(source=Versioned(), **options)
    resumed.train(resume_from_checkpoint=True)
    assert evaluated(resumed) == [(2, 2.0), (4, 4.0), (6, 6.0)]


# --- The final model ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["on_train_end", "put_in_place", "push"])
def test_a_run_that_is_killed_behind_its_last_step_is_finished_by_resuming(
    make_trainer, monkeypatch, place
):
    options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}

    def die(*args, **kwargs):
        raise KilledError

    class Dies(TrainerCallback):
        on_train_end = die

    sink = StubSink()
    trainer = make_trainer(
        source=Versioned(), sink=sink, callbacks=[Dies()] if place == "on_train_end" else [],
        **options,
    )  # fmt: skip
    folder = Path(trainer.args.output_dir)
    if place == "put_in_place":
        put = checkpoints.put_in_place
        monkeypatch.setattr(
            checkpoints, place,
            lambda path, target: die() if target.suffix == ".safetensors" else put(path, target),
        )  # fmt: skip
    elif place == "push":
        push = sink.push
        sink.push = lambda model, version: die() if version == 2 else push(model, version)
        options["eval_strategy"] = trainer.args.eval_strategy = "no"
        del options["eval_steps"]
    with pytest.raises(KilledError):
        trainer.train()
    monkeypatch.undo()
    assert (folder / "model.safetensors").exists() == (place == "push")
    resumed = make_trainer(source=Versioned(), **options)
    resumed.train(resume_from_checkpoint=True)
    saved = load_file(folder / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], resumed.model.lm_head.weight)
    assert evaluated(resumed) == ([] if place == "push" else [(2, 2.0)])
    rows = read_metrics(metrics_file(folder))
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]
    assert sum("train_runtime" in row for row in rows) == 1
    assert resumed.weight_sync.pushed[-1] == 2
    with pytest.raises(RunFolderError, match="already at step 2 of 2: raise max_steps"):
        make_trainer(**options).train(resume_from_checkpoint=True)


def merged_by_hand(model):
    """W + B A alpha / r of each layer, in float64."""
    weights = {n: p.detach().double() for n, p in model.get_base_model().named_parameters()}
    result = {}
    for name, weight in weights.items():
        if "lora_" in name or ".original_module." in name:
            continue
        plain = name.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
        if ".base_layer." in name:
            a, b = (name.replace("base_layer", f"lora_{x}.default") for x in "AB")
            weight = weight + weights[b] @ weights[a] * (16 / 8)
        result[plain] = weight
    return result


@pytest.mark.parametrize("tied", [False, True])
def test_the_final_model_is_saved_as_a_plain_one_too(make_trainer, tmp_path, capfd, tied):
    modules = None if tied else ["lm_head"]
    make_tiny_model(tied).save_pretrained(tmp_path / "base")
    trainer = make_trainer(
        str(tmp_path / "base"), use_lora=True, save_final="merged", lora_rank=8, max_steps=3,
        lora_modules_to_save=modules,
    )  # fmt: skip
    trainer.train()
    folder = Path(trainer.args.output_dir)
    model = AutoModelForCausalLM.from_pretrained(folder / "merged")
    expected = merged_by_hand(trainer.model)
    given = dict(model.named_parameters())
    assert given.keys() == expected.keys()
    start = dict(make_tiny_model(tied).named_parameters())
    for name, weight in expected.items():
        torch.testing.assert_close(given[name].double(), weight, rtol=1e-6, atol=1e-7, msg=name)
    assert any((weight - start[name]).abs().max() > 1e-3 for name, weight in expected.items())
    ids = torch.arange(5)[None]
    theirs, ours = model(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder / "merged").vocab_size
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert (folder / "adapter_model.safetensors").is_file()
    lines = capfd.readouterr().out.strip().splitlines()
    assert lines[-2:] == [f"adapter: {folder}", f"merged: {folder}/merged"]
    card = (folder / "README.md").read_text()
    assert f"An adapter of `{tmp_path}/base`, trained by reinforcement learning with" in card
    assert "- 3 steps with a batch size of 8\n" in card and "- reward: " in card
    data = ModelCard(card).data.to_dict()  # a local folder is no model of the hub
    assert data["library_name"] == "peft" and "base_model" not in data
    assert (folder / "merged" / "README.md").read_text() == card
    assert not list((folder / "_unfinished").glob("*"))
    # More steps without it: an old one would be served.
    options = {"use_lora": True, "lora_rank": 8, "lora_modules_to_save": modules}
    make_trainer(str(tmp_path / "base"), max_steps=4, **options).train(resume_from_checkpoint=True)
    assert not (folder / "merged").exists()
    assert "merged" not in closing_lines(folder)[-1]


def test_a_merged_model_has_the_dtype_of_the_base_model_here(make_trainer, tmp_path):
    make_tiny_model().save_pretrained(tmp_path / "base")
    options = {"use_lora": True, "save_final": "merged", "max_steps": 1, "bf16": True}
    trainer = make_trainer(str(tmp_path / "base"), **options)
    trainer.train()
    saved = load_file(Path(trainer.args.output_dir) / "merged" / "model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}


def test_a_model_that_cannot_be_merged_is_an_error_at_the_start(make_trainer):
    with pytest.raises(ConfigError, match=r"save_final='merged': without effect where all weights"):
        make_trainer(save_final="merged")
    dora = LoraConfig(task_type="CAUSAL_LM", use_dora=True, target_modules=["q_proj"])
    with pytest.raises(
        ConfigError, match=r"save_final='merged': peft_config=LoraConfig with use_d"
    ):
        make_trainer(peft_config=dora, save_final="merged", use_lora=True)


# --- The hub --------------------------------------------------------------------------------------


class StubHub:
    """Takes the place of HfApi; what each upload has, by its path in the repository."""

    uploads = []  # noqa: RUF012

    def create_repo(self, name, **options):
        return SimpleNamespace(repo_id=f"me/{Path(name).name}")

    def upload_folder(self, *, folder_path, allow_patterns, ignore_patterns, **rest):
        from huggingface_hub.utils import filter_repo_objects

        paths = [p.relative_to(folder_path) for p in Path(folder_path).rglob("*") if p.is_file()]
        names = filter_repo_objects(
            sorted(map(str, paths)),
            allow_patterns=allow_patterns,
            ignore_patterns=ignore_patterns,
        )
        self.uploads.append((rest, list(names)))
        return "the commit"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", StubHub)
    # Trainer's own: a function from transformers 5.17 on, create_repo before.
    import transformers.trainer as theirs

    if hasattr(theirs, "hf_api"):
        monkeypatch.setattr(theirs, "hf_api", StubHub)
    else:
        monkeypatch.setattr(theirs, "create_repo", StubHub().create_repo)
    StubHub.uploads = []
    return StubHub


MODEL = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
RUN = {"metrics.jsonl"}


def test_the_hub_gets_the_model_and_its_card_and_no_rollouts(make_trainer, hub, tmp_path):
    make_tiny_model().save_pretrained(tmp_path / "base")
    trainer = make_trainer(
        str(tmp_path / "base"), use_lora=True, save_final="merged", push_to_hub=True,
        hub_token="hf_secret", max_steps=2, save_steps=1, hub_revision="main",
    )  # fmt: skip
    folder = Path(trainer.args.output_dir)
    (folder / "inference.log").write_text("prompts of people")
    trainer.train()
    assert (folder / "rollouts").is_dir() and (folder / "training_args.bin").is_file()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if b"hf_secret" in path.read_bytes()]
    ((rest, names),) = hub.uploads
    assert rest["repo_id"] == "me/run" and rest["token"] == "hf_secret"
    assert rest["commit_message"] == "End of training" and rest["revision"] == "main"
    assert set(names) >= MODEL | RUN and "merged/model.safetensors" in names
    assert {"tokenizer.json", "merged/config.json", "merged/README.md"} <= set(names)
    private = ("rollout", "run.json", "training_args", ".log", "checkpoint", "_unfinished")
    assert not [name for name in names if any(part in name for part in private)]
    assert is_our_card(folder / "README.md")
    assert trainer.push_to_hub(commit_message="again", blocking=True) == "the commit"
    assert hub.uploads[-1][1] == names and hub.uploads[-1][0]["commit_message"] == "again"


def test_environments_are_named_by_their_ids_where_they_have_one():
    class MyTaskset:
        config = SimpleNamespace(id="")

    env = SimpleNamespace(config=SimpleNamespace(taskset=SimpleNamespace(id="fix_it")))
    assert environment_names(env) == environment_names("fix_it") == ["fix_it"]
    assert environment_names(MyTaskset()) == ["MyTaskset"] and environment_names(None) == []
    assert environment_names([WeightedEnv(env, "a"), WeightedEnv(env, "b")]) == ["a", "b"]


def test_the_hub_gets_no_checkpoints():
    with pytest.raises(ConfigError, match="hub_strategy='checkpoint' has no effect in RLTrainer"):
        RLConfig(push_to_hub=True, hub_strategy="checkpoint")
