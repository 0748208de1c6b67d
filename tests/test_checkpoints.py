"""Checkpoints, resumed runs, the final model. With stand-ins for server and environment."""

import json
import os
import re
import shlex
import shutil
import signal
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.family_steps import loads_as_saved
from tests.helpers import (
    ROOT,
    StubSink,
    StubSource,
    breaking,
    checkpoints_of,
    evaluated,
    make_tiny_model,
    names_of,
    on,
    values_in,
    weights_of,
    write_model,
)
from tests.test_rollouts import read as read_rollouts
from verifiers_rl import RLTrainer, checkpoints
from verifiers_rl.config import ConfigError
from verifiers_rl.process import disk
from verifiers_rl.process.interrupts import Interrupted
from verifiers_rl.report import recording
from verifiers_rl.report.run_folder import (
    RunFolderError,
    closing_lines,
    enter_run_folder,
    newest_checkpoint,
    read_metrics,
    read_run,
)


class KilledError(BaseException):
    """Stands for SIGKILL."""


def die(*args):
    raise KilledError


@pytest.fixture
def make_run(make_trainer):
    """Makes trainers of six steps, each of several microbatches."""
    options = {"max_tokens_per_microbatch": 32, "max_steps": 6, "max_off_policy_steps": 0}
    options["save_steps"] = 2
    return lambda *args, **given: make_trainer(*args, **options | given)


def ends_at(step, when="on_step_begin", number=signal.SIGTERM):
    """Sends this process a signal at the begin of a step, counted from 1, or where `when` says
    while so many steps are done as at its begin.
    """

    def end(state):
        if state.global_step == step - 1:
            os.kill(os.getpid(), number)

    return on(when, end)


def interrupt(make_run, *ends, **options):
    """Run until each of these, and go on from there."""
    for number, end in enumerate(ends):
        with pytest.raises(Interrupted):
            make_run(callbacks=[end], **options).train(resume_from_checkpoint=number > 0)


def resume(make_run, **options):
    trainer = make_run(**options)
    trainer.train(resume_from_checkpoint=True)
    return trainer


def steps_of(folder):
    return [row["step"] for row in read_metrics(folder)]


def numbers_of(folder):
    """What a run has logged, without what depends on the clock, the machine and the push."""
    left_out = ("runtime", "per_second", "_s", "memory", "staleness", "policy_version")
    return [
        {name: value for name, value in row.items() if not any(part in name for part in left_out)}
        for row in read_metrics(folder)
    ]


def same_as_uninterrupted(make_run, tmp_path, *ends, **options):
    straight = make_run(output_dir=f"{tmp_path}/straight", **options)
    whole = straight.train()
    interrupt(make_run, *ends, **options)
    resumed = make_run(**options)
    result = resumed.train(resume_from_checkpoint=True)
    assert result.training_loss == pytest.approx(whole.training_loss, rel=1e-5)  # of all steps
    rows, expected = numbers_of(tmp_path / "run"), numbers_of(tmp_path / "straight")
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-5, abs=1e-6), wanted["step"]
    assert_close(weights_of(resumed.model), weights_of(straight.model), rtol=1e-5, atol=1e-6)
    return resumed


def best_in_2():
    """Evaluations in which the weights of version 2 are the best."""
    return StubSource(reward_of=lambda version: 0.9 if version == 2 else 0.1)


# --- Signals --------------------------------------------------------------------------------------


def test_a_signal_ends_the_run_at_the_next_microbatch_and_saves_the_steps_before(make_run, folder):
    begun = []

    class Counting(RLTrainer):
        def microbatch_loss(self, *args):
            begun.append(self.state.global_step)
            if begun.count(3) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().microbatch_loss(*args)

    trainer = make_run(max_tokens_per_microbatch=16, save_steps=100, kind=Counting)
    with pytest.raises(Interrupted) as caught:
        trainer.train()
    assert begun.count(2) > 1 and begun.count(3) == 1 and caught.value.code == 143
    assert checkpoints_of(folder) == ["checkpoint-3"] and not trainer.orchestrator.running
    assert read_run(folder)["status"] == "interrupted"


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(make_run, tmp_path):
    ends = (ends_at(2), ends_at(3, "on_optimizer_step", signal.SIGINT), ends_at(6))
    resumed = same_as_uninterrupted(make_run, tmp_path, *ends, save_steps=100)
    assert resumed.orchestrator.submitted == [(5, "policy", 5)]
    steps = [row["step"] for row in read_rollouts(tmp_path / "run")]
    assert steps == [step for step in range(1, 7) for _ in range(8)]


def test_a_step_that_is_repeated_has_the_dropout_that_it_had(make_run, tmp_path):
    class Ends(RLTrainer):
        def microbatch_loss(self, *args):
            if self.state.global_step == 2 and not len(args[-1]._sums):  # the first one of step 3
                os.kill(os.getpid(), signal.SIGTERM)
            return super().microbatch_loss(*args)

    options = {"use_lora": True, "lora_dropout": 0.5, "save_steps": 100, "max_steps": 4}
    options["max_tokens_per_microbatch"] = 16
    interrupt(lambda callbacks, **given: make_run(kind=Ends, **given), None, **options)
    same_as_uninterrupted(make_run, tmp_path, **options)


@pytest.mark.parametrize("save_steps", [2, 100])
def test_lines_of_logs_over_several_steps_are_those_of_an_unbroken_run(
    make_run, tmp_path, save_steps
):
    same_as_uninterrupted(
        make_run, tmp_path, ends_at(3), ends_at(5), logging_steps=3, save_steps=save_steps
    )


def test_weights_in_the_middle_of_a_step_are_not_saved(make_run, folder):
    """As with DeepSpeed, whose backward takes the optimizer's step, or with two updates a batch."""

    class Failing(RLTrainer):
        def train_on(self, *args):
            loss = super().train_on(*args)
            if self.state.global_step == 1:
                self.update_now(self.model)
                raise ValueError("it broke")
            return loss

    with pytest.raises(ValueError, match="it broke"):
        make_run(kind=Failing, save_steps=100).train()
    assert newest_checkpoint(folder) is None


@pytest.mark.parametrize("place", ["loss", "on_step_end", "on_log"])
def test_an_error_anywhere_costs_no_step_that_is_done(make_run, folder, capfd, place):
    """As of a GPU that is out of memory, a tracker without its network, a callback."""

    def fail(state):
        if state.global_step == 3:
            raise ValueError("it broke")

    class Failing(RLTrainer):
        def microbatch_loss(self, *args):
            if place == "loss":
                fail(self.state)
            return super().microbatch_loss(*args)

    callbacks = [on(place, fail)]
    with pytest.raises(ValueError, match="it broke"):
        make_run(kind=Failing, save_steps=100, callbacks=callbacks).train()
    assert checkpoints_of(folder) == ["checkpoint-3"]
    assert capfd.readouterr().err.count("the run ends at step 3; the newest checkpoint is") == 1
    assert read_run(folder)["status"] == "failed"
    resume(make_run, save_steps=100)
    assert steps_of(folder)[-4:] == [4, 5, 6, 6]
    assert {row["step"] for row in read_rollouts(folder)} == {1, 2, 3, 4, 5, 6}


def test_an_error_that_a_callback_has_caught_costs_no_later_step(make_run, folder):
    trainer = make_run(save_steps=100)

    def fail(state):
        if state.global_step == 3:
            raise ValueError("it broke")
        if state.global_step == 1:
            with suppress(ValueError):
                trainer._on_rank_0(partial(int, "no number"))

    trainer.add_callback(on("on_step_end", fail))
    trainer.add_callback(on("on_save", lambda state: {}["of a tracker"]))
    with pytest.raises(ValueError, match="it broke"):
        trainer.train()
    assert checkpoints_of(folder) == ["checkpoint-1", "checkpoint-3"]


def test_weights_that_the_optimizer_has_changed_in_part_are_not_saved(make_run, folder):
    trainer = make_run(save_steps=100)

    def fail(state):
        if state.global_step == 1:
            breaking(trainer.optimizer, "step", ValueError("it broke"))

    trainer.add_callback(on("on_step_begin", fail))
    with pytest.raises(ValueError, match="it broke"):
        trainer.train()
    assert newest_checkpoint(folder) is None


def test_a_resumed_run_saves_evaluates_and_logs_as_often_as_its_options_say(make_run, folder):
    interrupt(make_run, ends_at(3), save_steps=100, logging_steps=2, eval_steps=4)
    resume(make_run, save_steps=1, logging_steps=1, eval_steps=1)
    assert checkpoints_of(folder) == [f"checkpoint-{step}" for step in (2, 3, 4, 5, 6)]
    assert [step for step, _ in evaluated(folder)] == [3, 4, 5, 6]
    rows = [row["step"] for row in read_metrics(folder) if "loss" in row]
    assert rows == [2, 3, 4, 5, 6]


def test_a_signal_behind_the_last_step_ends_the_run_when_its_model_is_saved(make_run, folder):
    interrupt(make_run, ends_at(3, "on_train_end"), max_steps=2)
    assert (folder / "model.safetensors").is_file()
    assert read_run(folder)["status"] == "finished"


# --- Complete or absent ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["_save_rng_state", "sync_tree", "put_in_place", "remove_folder"])
def test_a_save_that_is_broken_off_leaves_whole_checkpoints_only(
    make_run, folder, monkeypatch, place
):
    options = {"save_steps": 1, "save_total_limit": 1, "max_steps": 3}
    trainer = make_run(**options)
    owner = trainer if place == "_save_rng_state" else checkpoints
    original = getattr(owner, place)

    def kill_in_step_2(*args, **kwargs):
        return die() if trainer.state.global_step == 2 else original(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(owner, place, kill_in_step_2)
        trainer.train()
    whole = ["checkpoint-1", "checkpoint-2"] if place == "remove_folder" else ["checkpoint-1"]
    assert checkpoints_of(folder) == whole
    contents = [names_of(folder / name) for name in whole]
    assert {"trainer_state.json", "optimizer.pt"} <= {*contents[0]}
    assert contents[0] == contents[-1]
    resume(make_run, **options)
    assert checkpoints_of(folder) == ["checkpoint-3"]
    assert names_of(folder, "_*") in ([], ["_unfinished"]) and steps_of(folder) == [1, 2, 3, 3]


def test_code_that_changes_the_working_directory_does_not_move_the_run(
    make_run, tmp_path, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    leave = on("on_step_begin", lambda state: os.chdir(tmp_path / "elsewhere"))
    make_run(output_dir="run", callbacks=[leave], save_steps=1).train()
    assert names_of(tmp_path / "run") and steps_of(tmp_path / "run")[:2] == [1, 2]
    assert (tmp_path / "run" / "config.json").is_file()
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_everything_is_on_the_disk_before_a_checkpoint_has_its_name(make_run, monkeypatch):
    done = []

    def spy(module, name):
        original = getattr(module, name)

        def spying(path, *args):
            done.append((name, Path(path).name))
            return original(path, *args)

        monkeypatch.setattr(module, name, spying)

    trainer = make_run(max_steps=1, save_steps=1)
    for module, name in ((recording, "sync"), (disk, "sync"), (checkpoints, "put_in_place")):
        spy(module, name)
    trainer.train()
    named = done.index(("put_in_place", "checkpoint-1"))
    before = {name for _, name in done[:named]}
    assert {"rollouts", "metrics.jsonl", "rl_state.json", "optimizer.pt", "checkpoint-1"} <= before
    assert done[named + 1] == ("sync", "run")  # the folder that has the new name


BEST = {"eval_steps": 1, "load_best_model_at_end": True, "save_steps": 1}


def test_the_last_and_the_best_checkpoints_stay_and_are_found_in_a_folder_that_was_moved(
    make_run, tmp_path, folder
):
    make_run(save_steps=1, save_total_limit=2).train()
    assert checkpoints_of(folder) == ["checkpoint-5", "checkpoint-6"]
    pushed = []  # by the last trainer, the versions' heads

    def keep(model, version):
        pushed.append(model.lm_head.weight.detach().clone())

    options = {"source": best_in_2(), "sink": StubSink(keep), "save_total_limit": 2, **BEST}
    interrupt(make_run, ends_at(5), overwrite_output_dir=True, **options)
    moved = folder.rename(tmp_path / "moved")
    trainer = resume(make_run, output_dir=moved, **options)
    assert checkpoints_of(moved) == ["checkpoint-2", "checkpoint-6"]
    assert trainer.state.best_model_checkpoint == f"{moved}/checkpoint-2"
    state = json.loads((moved / "checkpoint-6/trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == trainer.state.best_model_checkpoint
    saved = load_file(moved / "checkpoint-2/model.safetensors")
    for weight in (trainer.model.lm_head.weight, pushed[-1]):  # which the server ends with
        assert torch.equal(saved["lm_head.weight"], weight)


def test_a_best_checkpoint_that_is_damaged_is_not_loaded(make_run, folder):
    def damage(state):
        if state.global_step == 6:
            change_a_byte(folder / "checkpoint-2/model.safetensors")

    trainer = make_run(source=best_in_2(), callbacks=[on("on_step_end", damage)], **BEST)
    with pytest.raises(RunFolderError, match=r"-2 is damaged.*: model.safetensors\."):
        trainer.train()


def test_best_weights_are_not_saved_as_those_of_the_last_step(make_run, folder):
    def lose(model, version):
        if version in sink.pushed:  # the best weights, behind the last step
            raise ValueError("the server is gone")

    sink = StubSink(lose)
    with pytest.raises(ValueError, match="is gone"):
        make_run(**BEST, save_strategy="best", source=best_in_2(), sink=sink).train()
    assert checkpoints_of(folder) == ["checkpoint-1", "checkpoint-2"]


def test_checkpoints_behind_the_one_that_is_resumed_are_set_aside(make_run, folder):
    make_run().train()
    with pytest.raises(Interrupted):
        make_run(callbacks=[ends_at(4)]).train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert newest_checkpoint(folder).name == "checkpoint-3"
    resume(make_run)
    assert steps_of(folder) == [1, 2, 3, 4, 5, 6, 6]
    assert names_of(folder / "_abandoned") == ["checkpoint-4", "checkpoint-6"]
    make_run(max_steps=1, overwrite_output_dir=True).train()
    assert not (folder / "_abandoned").exists()


def test_the_orchestrators_state_and_a_part_of_ones_own_are_kept_in_checkpoints(make_run):
    class Part(StubSource):
        loaded = None

        def state_dict(self, step):
            return {"untrained": [step, 7]}

        def load_state_dict(self, state):
            self.loaded = state

    def run(max_steps, **own):
        trainer = make_run(source=Part(), max_steps=max_steps, save_steps=1)
        trainer.checkpoints.kept |= own
        trainer.train(resume_from_checkpoint=max_steps > 1)
        return trainer.orchestrator.loaded

    own = Part()
    assert run(1) is None
    assert run(2, own=own) == {"untrained": [1, 7]} and own.loaded is None  # saved with the next
    assert run(3, own=own) == own.loaded == {"untrained": [2, 7]}
    resume(make_run, max_steps=4)  # with an orchestrator that keeps nothing


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_refused_with_its_file_and_an_older_one_offered(make_run, folder):
    make_run(max_steps=2, save_steps=1, use_lora=True).train()
    options = {"max_steps": 3, "use_lora": True}
    args = make_run(**options).args
    newest, kept = (folder / name for name in ("checkpoint-2", "kept"))
    newest.rename(kept)
    files = {str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()}
    assert files >= {"optimizer.pt", "scheduler.pt", "rl_state.json", "rng_state.pth"}
    assert files >= {"adapter_model.safetensors", "trainer_state.json", "manifest.json"}
    damaged = shutil.copytree(kept, folder / "checkpoint-0")  # is not offered
    change_a_byte(damaged / "optimizer.pt")
    cut = lambda path: path.write_bytes(path.read_bytes()[:-9])  # noqa: E731
    for damage, name in product((Path.unlink, cut, change_a_byte), files):
        shutil.copytree(kept, newest)
        damage(newest / name)
        said = rf"{newest} is damaged.*: {name}\. .*another one \({folder}/checkpoint-1\)"
        with pytest.raises(RunFolderError, match=said):
            enter_run_folder(args, True)
        shutil.rmtree(newest)
    shutil.rmtree(damaged)
    shutil.copytree(kept, newest)
    assert enter_run_folder(args, True) == str(newest)
    (newest / "scheduler.pt").unlink()
    make_run(**options).train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    assert steps_of(folder) == [1, 2, 3, 3]
    for name in ("checkpoint-1", "checkpoint-2"):
        shutil.rmtree(folder / name)
    change_a_byte(folder / "checkpoint-3/optimizer.pt")
    with pytest.raises(RunFolderError, match=r"damaged.*: optimizer.pt\..*start anew with"):
        resume(make_run, max_steps=4, use_lora=True)


@pytest.mark.parametrize(
    "name, value, own",
    [
        ("use_lora", False, {}),
        ("r", 8, {"lora_rank": 8}),
        ("lora_alpha", 3200, {}),
        ("use_rslora", True, {"lora_use_rslora": True}),
        ("optim", "sgd", {}),
        ("target_modules", ["q_proj"], {"lora_target_modules": ["q_proj"]}),
        ("modules_to_save", ["lm_head"], {"lora_modules_to_save": ["lm_head"]}),
        ("TRAINER", "SFTTrainer", None),
    ],
)
def test_a_checkpoint_of_other_weights_or_another_kind_of_run_is_refused(
    make_run, name, value, own
):
    make_run(max_steps=1, save_steps=1, use_lora=True).train()
    changed = {} if own is None else own or {name: value}
    trainer = make_run(max_steps=2, **{"use_lora": True, **changed})
    if own is None:
        setattr(trainer.args, name, value)
    with pytest.raises(RunFolderError, match=rf"{name}=.*checkpoint-1 is of a run with .*as its"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"r": 8}, "r=8: .* of a run with 4. Resume with that .*peft_config"),
        ({"lora_alpha": 99}, "lora_alpha=99: .* of a run with 8"),
        ({"target_modules": ["v_proj"]}, r"target_modules={'v_proj'}: .* of a run with {'q_proj'}"),
        ({"lora_dropout": 0.1}, None),  # which a resumed run may change
    ],
)
def test_a_checkpoint_of_an_adapter_of_another_peft_config_is_refused(make_run, changed, said):
    before = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]}
    make_run(max_steps=1, save_steps=1, peft_config=LoraConfig(**before)).train()
    trainer = make_run(max_steps=2, peft_config=LoraConfig(**before | changed))
    with pytest.raises(RunFolderError, match=said) if said else nullcontext():
        trainer.train(resume_from_checkpoint=True)


def test_a_second_resume_says_the_rate_that_the_optimizer_has(make_run, caplog):
    options = {"save_steps": 1, "learning_rate": 1e-2}
    make_run(max_steps=1, save_steps=1, learning_rate=1e-3).train()
    resume(make_run, max_steps=2, **options)
    caplog.clear()
    resume(make_run, max_steps=3, **options)
    assert "learning_rate=0.01: a resumed run goes on with its optimizer, so learning_rate stays " \
        "0.001" in caplog.text  # fmt: skip


def test_a_second_run_of_a_trainer_begins_without_the_steps_of_the_first(make_run, folder):
    trainer = make_run(logging_steps=4, overwrite_output_dir=True, save_strategy="no")
    versions = []
    for _ in range(2):
        trainer.train()
        versions.append(values_in(read_metrics(folder), "policy_version"))
    assert versions[0] == versions[1] == [1.5]  # the mean of steps 0 to 3


# --- Evaluations ----------------------------------------------------------------------------------

EVALUATED = {"eval_steps": 2}


def versioned():
    """Its evaluations give the policy version that they evaluate."""
    return StubSource(reward_of=float)


@pytest.mark.parametrize(
    "step, when, options",
    [
        (3, "on_step_begin", {"max_off_policy_steps": 0}),
        (3, "on_step_end", {"max_off_policy_steps": 0}),
        (3, "on_step_begin", {"max_off_policy_steps": 1}),
        (4, "on_step_end", {"max_off_policy_steps": 1}),
        (3, "on_step_end", {"max_off_policy_steps": 2}),
        (4, "on_step_begin", {"max_off_policy_steps": 2}),
        (3, "on_step_end", {"max_off_policy_steps": 1, "metric_for_best_model": "reward"}),
    ],
)
def test_evaluations_of_an_interrupted_run_are_neither_lost_nor_logged_twice(
    make_run, folder, step, when, options
):
    options |= {**EVALUATED, "eval_on_start": True}
    interrupt(make_run, ends_at(step, when), source=versioned(), **options)
    resume(make_run, source=versioned(), **options)
    steps = [step for step, _ in evaluated(folder)]
    assert len(steps) == len(set(steps)) == 4
    assert [int(value) for _, value in evaluated(folder)] == steps
    # One that runs when a signal comes behind the next step is made with its weights.
    moved = set(steps) - {0, 2, 4, 6}
    assert len(moved) <= 1 and moved <= {1, 3, 5}


def test_before_a_checkpoint_the_evaluation_of_earlier_weights_is_awaited(make_run):
    trainer = make_run(save_steps=3, max_steps=4, max_off_policy_steps=1, **EVALUATED)
    save, calls, saved = trainer.checkpoints.save, trainer.orchestrator.calls, []
    trainer.checkpoints.save = lambda *args: (saved.append(len(calls)), save(*args))
    trainer.train()
    before = calls[: saved[0]]
    assert before[-1] == "evaluated 2" and before.index("evaluate 2") < before.index("submit 3")


# --- The final model ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["on_train_end", "put_in_place", "push"])
def test_a_run_that_is_killed_behind_its_last_step_is_finished_by_resuming(
    make_run, folder, monkeypatch, place
):
    options = {"max_steps": 2, **(EVALUATED if place != "push" else {})}
    callbacks = [on(place, die)] if place == "on_train_end" else []
    sink = breaking(StubSink(), "push", KilledError(), [2] if place == "push" else [])
    if place == "put_in_place":
        put = checkpoints.put_in_place
        monkeypatch.setattr(
            checkpoints, place,
            lambda path, target: die() if target.suffix == ".safetensors" else put(path, target),
        )  # fmt: skip
    with pytest.raises(KilledError):
        make_run(source=versioned(), sink=sink, callbacks=callbacks, **options).train()
    monkeypatch.undo()
    assert (folder / "model.safetensors").exists() == (place == "push")
    resumed = resume(make_run, source=versioned(), **options)
    saved = load_file(folder / "model.safetensors")
    assert_close(saved, weights_of(resumed.model), rtol=0, atol=0)
    assert evaluated(folder) == ([] if place == "push" else [(2, 2.0)])
    rows = read_metrics(folder)
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]
    assert sum("train_runtime" in row for row in rows) == 1
    assert resumed.weight_sync.pushed[-1] == 2
    with pytest.raises(RunFolderError, match="already at step 2 of 2: raise max_steps"):
        resume(make_run, **options)


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
def test_the_final_model_is_saved_as_a_plain_one_too(make_run, tmp_path, folder, capfd, tied):
    base = write_model(tmp_path / "base", make_tiny_model(tied))
    modules = None if tied else ["lm_head"]
    options = {"use_lora": True, "lora_rank": 8, "lora_modules_to_save": modules}
    trainer = make_run(base, save_final="merged", max_steps=3, **options)
    trainer.train()
    lines = capfd.readouterr().out.strip().splitlines()
    assert lines[-2:] == [f"adapter: {folder}", f"merged: {folder}/merged"]
    assert loads_as_saved(trainer, base, folder) < 2e-5
    model = AutoModelForCausalLM.from_pretrained(folder / "merged")
    given = {name: weight.double() for name, weight in weights_of(model).items()}
    assert_close(given, merged_by_hand(trainer.model), rtol=1e-6, atol=1e-7)
    start = weights_of(make_tiny_model(tied))
    assert max((given[name] - start[name]).abs().max() for name in start) > 1e-3
    assert AutoTokenizer.from_pretrained(folder / "merged").vocab_size
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert not (folder / "README.md").exists()
    assert not list((folder / "_unfinished").glob("*"))
    # More steps without it: an old one would be served.
    make_run(base, max_steps=4, **options).train(resume_from_checkpoint=True)
    assert not (folder / "merged").exists() and "merged" not in closing_lines(folder)[-1]


def test_a_merged_model_has_the_dtype_of_the_base_model_here(make_run, tmp_path, folder):
    base = write_model(tmp_path / "base")
    make_run(base, use_lora=True, save_final="merged", max_steps=1, bf16=True).train()
    saved = load_file(folder / "merged/model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}


def test_a_model_that_cannot_be_merged_is_an_error_at_the_start(make_run):
    dora = LoraConfig(task_type="CAUSAL_LM", use_dora=True, target_modules=["q_proj"])
    for options in ({}, {"use_lora": True, "peft_config": dora}):
        with pytest.raises(ConfigError, match=r"^save_final='merged': "):
            make_run(save_final="merged", **options)


# --- The hub --------------------------------------------------------------------------------------


def test_what_the_docs_upload_is_the_model_and_no_rollouts(make_run, tmp_path, folder):
    base, options = write_model(tmp_path / "base"), {"max_steps": 2, "save_steps": 1}
    page = (ROOT / "docs/resume.md").read_text()
    (command,) = re.findall(r"^hf upload NAME outputs/rl (.*)$", page, re.MULTILINE)
    patterns = shlex.split(command)
    assert set(patterns[::2]) == {"--include"}
    for use_lora, model in ((True, "adapter_model.safetensors"), (False, "model.safetensors")):
        run = make_run(base, use_lora=use_lora, overwrite_output_dir=True, **options)
        run.train()
        paths = [p.relative_to(folder) for p in folder.rglob("*") if p.is_file()]
        names = set(filter_repo_objects(map(str, paths), allow_patterns=patterns[1::2]))
        config = {"adapter_config.json"} if use_lora else {"config.json", "generation_config.json"}
        tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
        assert names == config | tokenizer | {model}
    with pytest.raises(ConfigError, match=r"^push_to_hub: a run uploads nothing; upload its final"):
        run.push_to_hub()
    with pytest.raises(ConfigError, match=r"^push_to_hub: a run uploads nothing"):
        args, own = run.args.set_push_to_hub("me/run", token="hf_secret"), run.processing_class
        RLTrainer(base, None, args, own, orchestrator=StubSource(), weight_sync=StubSink())


def test_an_evaluation_that_decides_over_the_best_is_made_up_for(make_run, folder):
    options = {"source": best_in_2(), "load_best_model_at_end": True, **EVALUATED}
    interrupt(make_run, ends_at(3, "on_step_end"), **options)
    assert newest_checkpoint(folder).name == "checkpoint-2"
    trainer = resume(make_run, **options)
    assert evaluated(folder) == [(2, 0.9), (4, 0.1), (6, 0.1)]
    assert trainer.state.best_global_step == 2
    best = load_file(folder / "checkpoint-2/model.safetensors")
    assert torch.equal(best["lm_head.weight"], trainer.model.lm_head.weight)
