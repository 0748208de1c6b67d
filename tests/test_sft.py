"""Supervised finetuning by `SFTTrainer`, without a server."""

import json

import numpy as np
import pytest
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.conftest import options_of_tiny_run
from tests.helpers import (
    chat,
    make_tiny_llama,
    make_tiny_model,
    make_tokenizer,
    run_script,
    values_in,
    write_model,
)
from tests.reference import reference_policy
from verifiers_rl import LossOutputs
from verifiers_rl.config import ConfigError
from verifiers_rl.losses import cross_entropy
from verifiers_rl.packing import ModelSupport
from verifiers_rl.report.run_folder import read_metrics
from verifiers_rl.sft import SFTConfig, SFTTrainer
from verifiers_rl.sft.trainer import DatasetSource, make_samples


def conversations(num=12):
    """Rows of different lengths: some of one turn, some of two."""
    rows = []
    for i in range(num):
        text = "abcdefghij"[i % 7 : i % 7 + 1 + i % 9]
        said = [text, text[::-1], "?", "ok"][: 4 if i % 3 == 0 else 2]
        rows.append({"messages": chat(*said)})
    return rows


@pytest.fixture
def make_trainer(tokenizer, folder):
    def make(model=None, rows=None, held_out=None, others=None, **options):
        return SFTTrainer(
            model or make_tiny_model(),
            SFTConfig(**options_of_tiny_run(folder, **{"batch_size": 4, **options})),
            rows or conversations(),
            held_out,
            processing_class=tokenizer,
            **(others or {}),
        )

    return make


def mean_loss(model, samples, weights=None):
    """Mean cross entropy over loss tokens, sample by sample in float64."""
    total, count = 0.0, 0.0
    for sample, weight in zip(samples, weights or [1.0] * len(samples), strict=True):
        logprobs = reference_policy(model, sample.token_ids, 1.0)
        for t in sample.loss_mask.nonzero()[0]:
            total = total - weight * logprobs[t - 1, sample.token_ids[t]]
            count += weight
    return total / count


# --- The loss and the step ------------------------------------------------------------------------


def steps_of(folder):
    """The rows of metrics.jsonl but the last, which is of the whole run."""
    return read_metrics(folder)[:-1]


def gradients_of_a_step(trainer):
    trainer.orchestrator.start()
    trainer.state.max_steps = trainer.args.max_steps
    trainer.model.zero_grad()
    loss = trainer.training_step(trainer.model, {}).item()
    return loss, {n: p.grad.clone() for n, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    "make_model, layout, normalization",
    [(make_tiny_model, "packed", "sequence"), (make_tiny_llama, "flat", "token")],
)
def test_a_step_equals_a_float64_reference_however_rows_are_packed(
    make_trainer, make_model, layout, normalization
):
    trainer = make_trainer(
        make_model(), batch_size=8, max_tokens_per_microbatch=40, loss_normalization=normalization
    )
    trainer.tried_support = ModelSupport(layout)
    loss, grads = gradients_of_a_step(trainer)
    assert trainer._window.steps[0]["num_microbatches"] > 1
    samples = trainer.batch.samples
    assert len(samples) == 8 and sum(s.num_loss_tokens for s in samples) > 30
    of_sequence = normalization == "sequence"
    weights = [1 / sample.num_loss_tokens if of_sequence else 1.0 for sample in samples]
    reference = make_model().double()
    expected = mean_loss(reference, samples, weights)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    largest = max(p.grad.abs().max().item() for p in reference.parameters())
    for name, parameter in reference.named_parameters():
        assert_close(grads[name].double(), parameter.grad, rtol=1e-5, atol=1e-5 * largest, msg=name)


def test_an_own_loss_takes_the_place_of_cross_entropy(make_trainer):
    def half(inputs):
        return LossOutputs(cross_entropy(inputs).loss / 2)

    whole, _ = gradients_of_a_step(make_trainer())
    assert gradients_of_a_step(make_trainer(others={"loss_fn": half}))[0] == pytest.approx(
        whole / 2
    )


# --- Which rows, how often ------------------------------------------------------------------------


def batches(source, steps):
    found = []
    for step in steps:
        source.submit(step, "", step)
        batch = source.get()
        found.append([int(sample.token_ids[0]) for sample in batch.samples])
    return found


def source_of(num, batch_size, shuffle):
    source = DatasetSource(SFTConfig(batch_size=batch_size, shuffle=shuffle, seed=1, use_cpu=True))
    source.rows = [[(np.array([i, 0], np.int32), np.array([False, True]))] for i in range(num)]
    return source


def test_each_epoch_has_each_row_once_and_its_last_batch_what_is_left():
    plain = source_of(5, 2, shuffle=False)
    assert batches(plain, range(4)) == [[0, 1], [2, 3], [4], [0, 1]]
    shuffled = source_of(5, 3, shuffle=True)
    first, second, third, fourth = batches(shuffled, range(4))
    assert sorted(first + second) == sorted(third + fourth) == list(range(5))
    assert first + second != third + fourth
    # As a resumed run does, whose steps before are not taken again.
    assert batches(source_of(5, 3, shuffle=True), [3]) == [fourth]


def test_a_run_with_more_epochs_goes_on_behind_a_finished_one_with_the_same_rows_and_batches(
    make_trainer, folder
):
    options = {"save_steps": 100, "batch_size": 5}
    make_trainer(**options).train()  # 12 rows in batches of 5, 5 and 2
    options["num_train_epochs"] = 2.0
    for changes, problem in (
        ({"batch_size": 3}, "batch_size=3: it was 5 before the checkpoint"),
        ({"rows": conversations(13)}, "num_rows=13: it was 12 before the checkpoint"),
        ({"rows": conversations(12)[::-1]}, "rows=.*: it was .* before the checkpoint"),
        ({"seed": 7}, "seed=7: it was 42 before the checkpoint"),
        ({"shuffle": False}, "shuffle=False: it was True before the checkpoint"),
    ):
        with pytest.raises(ConfigError, match=problem):
            make_trainer(**options | changes).train(True)
    make_trainer(**options).train(True)
    epochs = [row["epoch"] for row in steps_of(folder)]
    assert epochs == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])


def test_a_conversation_of_several_samples_is_one_rollout():
    (tokens,), one = source_of(2, 1, shuffle=False).rows
    samples = make_samples([[tokens, tokens], one])
    assert [(sample.rollout_id, sample.group_id) for sample in samples] == [(0, 0), (0, 0), (1, 1)]


# --- A run ----------------------------------------------------------------------------------------


def test_a_run_learns_and_leaves_the_model_of_an_rl_run(make_trainer, folder, capsys):
    trainer = make_trainer(held_out=conversations(5), num_train_epochs=10.0, eval_steps=10)
    trainer.train()
    rows = read_metrics(folder)
    losses = values_in(rows, "loss")
    assert len(losses) == 30 and losses[-1] < losses[0] / 5
    steps = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    assert sorted(steps) == [10, 20, 30] and steps[30] < steps[10]
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    assert steps[30] == pytest.approx(mean_loss(model, trainer._held_out).item(), rel=1e-4)
    assert not {"importance_ratio", "mismatch_kl", "staleness", "reward"} & rows[0].keys()
    out = capsys.readouterr().out
    assert "data for training: 12 rows with" in out and f"model: {folder}" in out


def test_a_resumed_run_is_the_run_that_was_not_stopped(make_trainer, tmp_path):
    options = {"save_steps": 4, "num_train_epochs": 3.0, "use_lora": True, "lora_dropout": 0.2}
    straight = make_trainer(output_dir=f"{tmp_path}/straight", **options)
    straight.train()
    make_trainer(**options).train()
    resumed = make_trainer(**options)
    resumed.train(resume_from_checkpoint=f"{tmp_path}/run/checkpoint-4")
    losses = [[(row["step"], row["loss"]) for row in steps_of(tmp_path / name)]
              for name in ("straight", "run")]  # fmt: skip
    assert losses[0] == losses[1] and len(losses[0]) == 9
    assert_close(resumed.model.state_dict(), straight.model.state_dict(), rtol=0, atol=0)


def test_a_server_of_the_saved_model_stops_where_replies_end(make_trainer, folder, capsys):
    model = make_tiny_model()
    model.generation_config.eos_token_id = 0
    trainer = make_trainer(model, use_lora=True, save_final="merged", max_steps=1)
    end = trainer.processing_class.convert_tokens_to_ids("<|end|>")
    trainer.train()
    merged = GenerationConfig.from_pretrained(folder / "merged")
    assert merged.eos_token_id == [0, end] and end
    said = "replies end with '<|end|>', and the model's server does"
    assert capsys.readouterr().out.count(said) == 1


SCRIPT = """
import json, sys
import tests.sharding_on_cpu
from accelerate.state import AcceleratorState
from tests.helpers import make_tokenizer
from tests.test_sft import conversations
from verifiers_rl.sft import SFTConfig, SFTTrainer

folder, options, *kinds = sys.argv[1:]
for kind in kinds:
    sharding = {"fsdp": True, "fsdp_config": {"version": 2}} if kind == "fsdp2" else {}
    args = SFTConfig(
        output_dir=f"{folder}/{kind}", use_cpu=True, use_lora=False, max_seq_len=32,
        save_strategy="no", disable_tqdm=True, **sharding, **json.loads(options),
    )
    trainer = SFTTrainer(
        f"{folder}/base", args, conversations() if args.process_index == 0 else None,
        conversations(5) if args.process_index == 0 else [],
        processing_class=make_tokenizer(),
    )
    trainer.train()
    AcceleratorState._reset_state()
"""


@pytest.mark.slow
def test_two_ranks_equal_one(make_trainer, tmp_path):
    base, one = write_model(tmp_path / "base"), tmp_path / "one"
    options = {"batch_size": 5, "max_tokens_per_microbatch": 40, "learning_rate": 0.3}
    options |= {"num_train_epochs": 2.0, "optim": "sgd", "eval_strategy": "steps", "eval_steps": 2}
    run_script(tmp_path, SCRIPT, tmp_path, json.dumps(options), "ddp", "fsdp2")
    make_trainer(base, held_out=conversations(5), output_dir=one, **options).train()
    weights = AutoModelForCausalLM.from_pretrained(one).state_dict()
    for kind in ("ddp", "fsdp2"):
        rows = steps_of(tmp_path / kind)
        assert len(rows) == 6 + 3  # the last batch of an epoch has 2 rows
        for row, wanted in zip(rows, steps_of(one), strict=True):
            for name in wanted.keys() & {"loss", "eval_loss", "grad_norm", "num_tokens", "epoch"}:
                assert row[name] == pytest.approx(wanted[name], rel=1e-5), (kind, name)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / kind).state_dict()
        assert_close(model, weights, rtol=1e-5, atol=1e-6)


# --- Options --------------------------------------------------------------------------------------


def test_arguments_that_cannot_work_are_named(make_trainer):
    with pytest.raises(ConfigError, match="there is nothing to evaluate on"):
        make_trainer(eval_steps=1)
    with pytest.raises(ConfigError, match="SFTTrainer takes no argument 'formatting_func'"):
        make_trainer(others={"formatting_func": str})


@pytest.mark.parametrize(
    "texts, where",
    [
        ((["a", "a<new>"], []), "data for training, row 1"),
        ((["a"], ["<new>b"]), "data for evaluations, row 0"),
    ],
)
def test_a_token_that_the_model_has_no_embedding_for_is_named(texts, where):
    tokenizer = make_tokenizer("<new>")  # behind the model's 261
    data = [[{"text": text} for text in own] or None for own in texts]
    with pytest.raises(ConfigError, match=rf"{where}: it has token 261 \('<new>'\).* 261 rows"):
        SFTTrainer(make_tiny_model(), SFTConfig(use_cpu=True), *data, processing_class=tokenizer)
