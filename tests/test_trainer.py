import copy
import math
import re
import signal
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PrinterCallback,
    TrainerCallback,
)
from transformers.trainer_callback import ProgressCallback

from tests.family_steps import loads_as_saved
from tests.helpers import (
    ROOT,
    StubSink,
    StubSource,
    breaking,
    checkpoints_of,
    evaluated,
    logged,
    make_samples,
    make_tiny_llama,
    make_tiny_model,
    make_tiny_moe,
    on,
    weights_of,
    write_model,
)
from tests.reference import (
    LOSS_OPTIONS,
    MASK_OPTIONS,
    batch_gradients,
    check_against_reference,
    move_away,
    reference_policy,
    switch_checkpointing_on,
    with_logprobs_near,
)
from verifiers_rl import LossOutputs, RLTrainer, cispo
from verifiers_rl.config import ConfigError
from verifiers_rl.data import example_index
from verifiers_rl.inference import InferenceServerError, ServerLostError
from verifiers_rl.losses import MASKS, needs
from verifiers_rl.packing import ModelSupport, collate
from verifiers_rl.process.interrupts import Interrupted
from verifiers_rl.report.means import batch_metrics
from verifiers_rl.report.metrics import ShortProgress, StepMetrics, model_flops
from verifiers_rl.report.run_folder import WritingError
from verifiers_rl.sync.sources import what_to_send
from verifiers_rl.types import Batch, Rollout

# Whether and how the head is part of an adapter; whether layers and how large chunks are computed
# again. The lists below have other lengths, so that each meets many of the others.
WAYS = [
    *product([{}, {"use_lora": True}], [False, True], [1, 7, 10_000]),
    ({"use_lora": True, "lora_target_modules": ["q_proj", "lm_head"]}, False, 7),
    ({"use_lora": True, "lora_modules_to_save": ["lm_head"]}, False, 10_000),
]
MASKS_IN_TURN = [*([name] for name in MASK_OPTIONS), ["ipo", "sequence_mean"], *[None] * 7]
CASES = [
    *zip(
        WAYS,
        cycle(LOSS_OPTIONS),
        MASKS_IN_TURN,
        cycle(["sequence", "token", "constant", "token", "sequence"]),
        cycle(["packed", "flat", "padded", "packed"]),
        cycle([make_tiny_llama, make_tiny_model]),
        strict=False,
    )
]


@pytest.mark.parametrize(
    "way, loss, masks, normalization, layout, make_model",
    CASES,
)
def test_the_step_equals_a_float64_reference(
    make_trainer, monkeypatch, way, loss, masks, normalization, layout, make_model
):
    assert MASK_OPTIONS.keys() == MASKS.keys()
    lora, gradient_checkpointing, chunk_size = way
    monkeypatch.setattr("verifiers_rl.forward.chunk_size_for", lambda *_: chunk_size)
    options = {"gradient_masks": {name: MASK_OPTIONS[name] for name in masks}} if masks else {}
    trainer = make_trainer(
        make_model(), loss=loss, loss_args=LOSS_OPTIONS[loss], loss_normalization=normalization,
        gradient_checkpointing=gradient_checkpointing, kl_beta=0.1, temperature=0.7, lora_rank=4,
        entropy_beta=0.2 if make_model is make_tiny_llama else 0.0, max_tokens_per_microbatch=40,
        **lora, **options,
    )  # fmt: skip
    trainer.tried_support = ModelSupport(layout)
    if gradient_checkpointing:
        switch_checkpointing_on(trainer)
    move_away(trainer)
    samples = with_logprobs_near(trainer.model, make_samples(6, seed=1, longest=14), 0.7)
    samples[1].rollout_id = samples[3].rollout_id = 0  # a rollout broken into two samples
    row = check_against_reference(trainer, make_model, samples)
    assert row["reference_kl"] > 1e-4
    shares = [row[f"masked_share/{name}"] for name in masks or ()]
    if loss != "reinforce":
        shares.append(row.get("clipped_share", row.get("masked_share")))
    assert all(0 < share < 1 for share in shares)  # both sides of each bound were seen


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of peft, about patterns of its own
def test_lora_on_experts_is_trained_saved_and_merged(make_trainer, tmp_path, folder):
    base = write_model(tmp_path / "base", make_tiny_moe())
    trainer = make_trainer(
        base, use_lora=True, save_final="merged", gradient_checkpointing=True,
        lora_target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"],
    )  # fmt: skip
    before = weights_of(trainer.model)
    trainer.train()
    moved = {n for n, p in weights_of(trainer.model).items() if not torch.equal(p, before[n])}
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert moved == trained and sum("experts" in name for name in moved) == 8
    assert loads_as_saved(trainer, base, folder) < 2e-5


class Shifted(LlamaForCausalLM):
    """Adds a constant to the logits of each token, behind the head."""

    def forward(self, position_ids=None, **kwargs):
        outputs = super().forward(position_ids=position_ids, **kwargs)
        outputs.logits = outputs.logits + torch.arange(outputs.logits.shape[-1]) / 100
        return outputs


def test_a_model_that_changes_its_logits_behind_the_head_is_refused(make_trainer):
    trainer = make_trainer(Shifted(make_tiny_llama().config).float())
    with pytest.raises(ConfigError, match="model: the logits of Shifted are not those of its head"):
        batch_gradients(trainer, make_samples(4))


SMALL = {"vocab_size": 261, "hidden_size": 32}


def make_bloom():
    torch.manual_seed(0)
    return BloomForCausalLM(BloomConfig(**SMALL, n_layer=2, n_head=4)).float()


def make_mamba():
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(**SMALL, num_hidden_layers=2, state_size=4)).float()


@pytest.mark.parametrize("make_model", [make_bloom, make_mamba])
def test_a_model_whose_rows_cannot_be_shared_is_trained_exactly(make_trainer, caplog, make_model):
    samples = with_logprobs_near(make_model(), make_samples(5, seed=3, longest=14), 0.7)
    trainer = make_trainer(make_model(), loss_args=LOSS_OPTIONS["cispo"], kl_beta=0.1)
    check_against_reference(trainer, make_model, samples)
    assert caplog.text.count("are padded") == 1 and trainer.tried_support.layout == "padded"


@pytest.mark.parametrize("use_lora", [False, True])
def test_in_bfloat16_the_reference_computes_as_the_policy_does(make_trainer, use_lora):
    trainer = make_trainer(bf16=True, use_lora=use_lora, kl_beta=0.1, max_steps=1)
    trainer.train()
    assert logged(trainer, "reference_kl") == [0.0]  # the policy is still what it started from


@pytest.mark.parametrize("max_tokens, number", [(1, 7), (20, None), (10_000, 1)])
def test_the_gradient_does_not_depend_on_split_or_order(make_trainer, max_tokens, number):
    samples = make_samples(7, seed=2)
    for normalization in ("token", "sequence"):
        options = {"loss_normalization": normalization}
        expected, gradients, _ = batch_gradients(
            make_trainer(micro_batch_size=7, **options), samples
        )
        trainer = make_trainer(max_tokens_per_microbatch=max_tokens, **options)
        loss, found, row = batch_gradients(trainer, samples[::-1])
        assert loss == pytest.approx(expected, rel=1e-5)
        assert_close(found, gradients, rtol=1e-5, atol=1e-6)
        assert row["num_microbatches"] == number or number is None
        assert row["num_tokens"] == sum(len(sample.token_ids) for sample in samples)


def test_the_gradients_of_two_parts_of_a_batch_add_up_to_that_of_all(make_trainer):
    samples = make_samples(7, seed=2)
    options = {"loss_normalization": "constant"}  # the same number in each part
    expected, gradients, _ = batch_gradients(make_trainer(**options), samples)
    trainer = make_trainer(**options)
    first, batch = np.arange(7) < 3, Batch(0, 0, samples)
    parts, metrics = (first, ~first), StepMetrics(batch)
    losses = [trainer.train_on(trainer.model, batch, metrics, part) for part in parts]
    assert sum(losses).item() == pytest.approx(expected, rel=1e-5)
    found = {name: p.grad for name, p in trainer.model.named_parameters()}
    assert_close(found, gradients, rtol=1e-5, atol=1e-6)


def test_gradient_checkpointing_changes_memory_not_gradients(make_trainer):
    """With LoRA: see `test_lora_on_experts_is_trained_saved_and_merged`."""

    def run(checkpointing):
        counted, options = [], {"optim": "sgd", "learning_rate": 1.0, "max_steps": 1}
        trainer = make_trainer(
            overwrite_output_dir=True, gradient_checkpointing=checkpointing, **options
        )
        assert trainer.tried_support.shares_prefixes  # which runs the model too
        first = trainer.model.model.layers[0].input_layernorm
        first.register_forward_hook(lambda *_: counted.append(1))
        trainer.train()
        return weights_of(trainer.model), len(counted)

    (plain, forwards), (checkpointed, with_recomputation) = run(False), run(True)
    assert with_recomputation == 2 * forwards
    assert_close(checkpointed, plain, rtol=1e-4, atol=1e-6)


def test_no_update_is_made_with_a_batch_without_loss_tokens(make_trainer):
    """Adam would go on by its momentum, and weight decay shrink the weights."""

    class OneWithoutLoss(StubSource):
        def get(self):
            batch = super().get()
            for sample in batch.samples:
                sample.loss_mask[:] &= batch.step != 1
            return batch

    seen = []
    keep = on("on_step_end", lambda state: seen.append(weights_of(trainer.model)))
    trainer = make_trainer(source=OneWithoutLoss(), weight_decay=0.1, callbacks=[keep])
    trainer.train()
    first, second, third = (torch.cat([p.flatten() for p in step.values()]) for step in seen)
    assert torch.equal(first, second) and not torch.equal(second, third)
    assert logged(trainer, "skipped_update_share") == [0.0, 1.0, 0.0]
    assert [loss == 0.0 for loss in logged(trainer, "loss")] == [False, True, False]


@pytest.mark.parametrize(
    "loss, layout",
    [*zip(LOSS_OPTIONS, cycle(["packed", "flat", "padded"]), strict=False)],
)
def test_extreme_samples_give_finite_gradients_and_are_counted(make_trainer, loss, layout):
    samples = make_samples(3, seed=1) + make_samples(1, longest=1, prompt=1) + make_samples(1)
    for sample, logprob in zip(samples, (-math.inf, -700.0, 0.0), strict=False):
        sample.inference_logprobs[-1] = logprob
    samples[-1].loss_mask[:] = False
    trainer = make_trainer(loss=loss, loss_args=LOSS_OPTIONS[loss], max_tokens_per_microbatch=1)
    trainer.tried_support = ModelSupport(layout)
    value, grads, row = batch_gradients(trainer, samples)
    assert math.isfinite(value) and all(torch.isfinite(grad).all() for grad in grads.values())
    assert any(grad.any() for grad in grads.values())
    assert (row["num_microbatches"], row["num_masked_samples"]) == (4, 1)
    assert row["clamped_share"] == pytest.approx(2 / row["num_loss_tokens"])


def root_of_distance(inputs, loss):
    """A finite loss, whose derivative is infinite."""
    distance = inputs.trainer_logprobs - inputs.trainer_logprobs.detach()
    return loss + distance.abs().sqrt().sum()


@pytest.mark.parametrize(
    "change, max_grad_norm, message",
    [
        (lambda inputs, loss: loss / 0.0, 1.0, r"the loss of this batch is (nan|-?inf)"),
        (root_of_distance, 0.0, "the gradient of this batch is infinite or NaN, and its loss is n"),
        (root_of_distance, 1.0, "the gradient of this batch is infinite or NaN, and its loss is n"),
    ],
)
def test_what_is_not_finite_stops_before_the_optimizer(
    make_trainer, folder, change, max_grad_norm, message
):
    def broken(inputs):
        outputs = cispo(inputs)
        is_second = trainer.state.global_step == 1
        loss = change(inputs, outputs.loss) if is_second else outputs.loss
        return LossOutputs(loss, outputs.metrics)

    trainer = make_trainer(loss_fn=broken, save_steps=100, max_grad_norm=max_grad_norm)
    with pytest.raises(FloatingPointError, match=message):
        trainer.train()
    assert trainer.weight_sync.pushed == [0, 1]  # the weights of step 0 and of step 1
    assert checkpoints_of(folder) == ["checkpoint-1"]
    saved = load_file(folder / "checkpoint-1/model.safetensors")
    for tensor in (*saved.values(), *trainer.model.parameters()):
        assert torch.isfinite(tensor).all()


def test_dropout_of_the_model_is_switched_off_and_that_of_lora_is_not(make_trainer):
    def kept(trainer):
        return {m.p for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout)}

    config = GPT2Config(vocab_size=261, n_embd=32, n_layer=2, n_head=4)
    assert config.resid_pdrop == 0.1
    trainer = make_trainer(GPT2LMHeadModel(config).float())
    losses = {batch_gradients(trainer, make_samples(4))[0] for _ in range(2)}
    assert len(losses) == 1 and kept(trainer) == {0.0}
    # That of a base model whose adapter is trained further, too.
    lora = LoraConfig(target_modules=["c_attn"], lora_dropout=0.25, fan_in_fan_out=True)
    assert kept(make_trainer(get_peft_model(GPT2LMHeadModel(config), lora))) == {0.0, 0.25}
    llama = make_tiny_llama()
    llama.model.layers[1].self_attn.attention_dropout = 0.5
    assert kept(make_trainer(llama, use_lora=True, lora_dropout=0.5)) == {0.5}
    assert llama.model.layers[1].self_attn.attention_dropout == 0.0


@pytest.mark.parametrize("use_lora", [False, True])
def test_the_head_never_sees_more_than_a_chunk(make_trainer, monkeypatch, use_lora):
    monkeypatch.setattr("verifiers_rl.forward.chunk_size_for", lambda *_: 7)
    rows, real = [], torch.nn.functional.linear
    trainer = make_trainer(use_lora=use_lora)
    assert trainer.tried_support.shares_prefixes  # tried before what is counted

    def linear(hidden, weight, bias=None):
        if weight.shape[0] == 261:
            rows.append(hidden.shape[:-1].numel())
        return real(hidden, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    samples = make_samples(6)
    batch_gradients(trainer, samples)
    assert sum(s.num_loss_tokens for s in samples) == 35 + 2  # in two microbatches
    # A trained head takes all chunks but the last of each again in backward.
    assert rows == [7] * 5 + ([] if use_lora else [7] * 4) + [2]


class Casts(TorchDispatchMode):
    """Records the shape and the dtype of each copy into another dtype."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype != args[0].dtype:
            self.made.append((tuple(result.shape), result.dtype))
        return result


def test_inputs_of_an_adapter_are_not_cast_to_float32_and_back(make_trainer, monkeypatch):
    def run():
        trainer = make_trainer(make_tiny_model().to(torch.bfloat16), use_lora=True, bf16=True)
        move_away(trainer)
        assert trainer.tried_support.shares_prefixes  # tried before casts are counted
        with Casts() as casts:
            loss, grads, row = batch_gradients(trainer, make_samples(6))
        return loss, grads, len(casts.made), row["num_microbatches"]

    loss, grads, num_casts, num_microbatches = run()
    monkeypatch.setattr(
        "verifiers_rl.trainer.disable_input_dtype_casting", lambda *_: nullcontext()
    )
    loss_with_casts, grads_with_casts, more_casts, _ = run()
    assert loss == loss_with_casts and grads.keys() == grads_with_casts.keys()
    assert all(torch.equal(grads[name], grads_with_casts[name]) for name in grads)
    # Of 7 adapters in each of 2 layers, there and back, in forward and in backward; the input of
    # the first three has no gradient.
    assert more_casts - num_casts == num_microbatches * (2 * 7 * 4 - 3 * 2)


@pytest.mark.parametrize("use_lora", [False, True])
def test_the_head_is_cast_once_a_microbatch(make_trainer, monkeypatch, use_lora):
    """Whatever the number of its chunks, which are computed again in backward."""
    monkeypatch.setattr("verifiers_rl.forward.chunk_size_for", lambda *_: 3)
    trainer = make_trainer(bf16=True, use_lora=use_lora, max_tokens_per_microbatch=24)
    assert trainer.tried_support.shares_prefixes  # tried before casts are counted
    with Casts() as casts:
        batch_gradients(trainer, make_samples(6))
    num = trainer._window.steps[0]["num_microbatches"]
    assert num > 1 and casts.made.count(((261, 32), torch.bfloat16)) == num


def test_tokens_that_no_policy_sampled_have_ratio_one(make_trainer):
    (sample,) = make_samples(1, seed=4)
    known = sample.loss_mask.nonzero()[0]
    sample.inference_logprobs[known] = math.nan
    loss, _, row = batch_gradients(make_trainer(temperature=0.7), [sample])
    policy = reference_policy(make_tiny_model(), sample.token_ids, 0.7)
    terms = [sample.advantages[t] * policy[t - 1, sample.token_ids[t]].item() for t in known]
    assert loss == pytest.approx(-sum(terms) / len(known), rel=1e-4)
    assert row["importance_ratio"] == 1.0


# --- The parts of a trainer -----------------------------------------------------------------------


def test_options_reach_the_parts_that_talk_to_the_server(make_whole):
    # What each does is tested with its part; here, that it gets there.
    trainer = make_whole(
        vllm_server_host="gpu-box", vllm_server_port=7, vllm_server_timeout=11.0, shuffle=False,
        weight_sync_backend="http", lora_sync="merged", advantage="std",
    )  # fmt: skip
    (replica,) = trainer.weight_sync.replicas
    sync, orchestrator = replica.sync, trainer.orchestrator
    assert (replica.url, trainer.weight_sync.timeout_s) == ("http://gpu-box:7", 11.0)
    assert (sync.backend, sync.lora_sync, sync.timeout_s) == ("http", "merged", 11.0)
    assert orchestrator.env is make_whole.runner and orchestrator.router is trainer.weight_sync
    assert orchestrator.check_server == trainer.weight_sync.check_server
    assert orchestrator.example_order(range(4), [40]) == [0, 1, 2, 3]  # shuffled it would not be
    group = [Rollout(0, "", reward=reward) for reward in (0.0, 1.0)]
    assert orchestrator.advantage_fn(group) == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
    expected = [example_index(position, 40, True, seed=3) for position in range(4)]
    assert make_whole(seed=3).orchestrator.example_order(range(4), [40]) == expected


def test_each_part_can_be_replaced_beside_the_others(make_whole, monkeypatch):
    own = {"advantage_fn": lambda group: [0.0], "example_order": lambda positions, sizes: [0]}
    sink = StubSink()
    orchestrator = make_whole(parts={"weight_sync": sink, **own}).orchestrator
    assert orchestrator.check_server == sink.check_server
    assert orchestrator.advantage_fn is own["advantage_fn"]
    assert orchestrator.example_order is own["example_order"]

    # The other way round: batches of one's own, and weights to the server.
    compared = []
    monkeypatch.setattr("verifiers_rl.wiring.check_agreement", lambda *args: compared.append(args))
    trainer = make_whole(env=None, parts={"orchestrator": StubSource()}, max_steps=1)
    trainer.train()
    server = make_whole.servers[-1]
    assert server.policy_version == 1 and server.held == []
    sources, _ = what_to_send(trainer.model, trainer.weight_sync.lora_sync)
    sent = {name: source.make() for name, source in sources.items()}
    assert_close(sent, dict(server.weights), rtol=0, atol=0)
    assert [(client, name) for _, client, name, *_ in compared] == [(server, "base")] * 2

    make_whole.runner.weights = [1.0, 2.0]
    with pytest.raises(ConfigError, match=r"example_order decides .* weights \[1.0, 2.0\]"):
        make_whole(parts={"example_order": own["example_order"]})


# --- The loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_server_that_shares_the_gpu_sleeps_in_each_step_where_none_is_ahead(
    make_trainer, num_ahead
):
    source = StubSource()
    sink = StubSink(lambda model, version: source.calls.append(f"push {version}"))
    sink.sleeps, sink.sleep = True, lambda: source.calls.append("sleep")
    make_trainer(source=source, sink=sink, max_off_policy_steps=num_ahead, **EVALUATED).train()
    if num_ahead:
        assert "sleep" not in source.calls
        return
    assert source.calls == [
        "push 0", "submit 0", "get 0", "sleep",
        "push 1", "submit 1", "get 1", "sleep",
        "push 2", "evaluate 2", "submit 2", "get 2", "evaluated 2", "sleep",
        "push 3", "evaluate 3", "evaluated 3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "ahead, versions, pushed",
    [
        (0, [0, 1, 2], [0, 1, 2, 3]),
        (1, [0, 0, 1], [0, 1, 3]),
        (3, [0, 0, 0, 0, 1, 2], [0, 1, 2, 6]),
    ],
)
def test_weights_are_sent_and_batches_are_requested_ahead_before_a_step_waits(
    make_trainer, ahead, versions, pushed
):
    steps, num_steps = [], len(versions)
    count = on("on_optimizer_step", lambda state: steps.append(state.global_step))
    trainer = make_trainer(
        callbacks=[count], max_off_policy_steps=ahead, max_steps=num_steps, micro_batch_size=2
    )
    trainer.train()
    assert steps == [*range(num_steps)]  # one optimizer step a batch
    # (step, model, version): with one ahead, batch k + 1 has the weights that step k starts from.
    expected = [(step, "policy", version) for step, version in enumerate(versions)]
    assert trainer.orchestrator.submitted == expected
    assert trainer.weight_sync.pushed == pushed and not trainer.orchestrator.running
    staleness = [step - version for step, version in enumerate(versions)]
    assert logged(trainer, "staleness") == logged(trainer, "staleness_max") == staleness
    if ahead == 3:
        calls = ["submit 0", "submit 1", "submit 2", "submit 3", "get 0", "submit 4", "get 1"]
        assert trainer.orchestrator.calls[:7] == calls


def test_a_deterministic_run_sends_no_weights_while_a_batch_is_generated(make_trainer):
    trainer = make_trainer(deterministic=True)
    trainer.train()
    calls = ["wait", "submit 0", "submit 1", "get 0", "wait", "submit 2", "get 1", "wait", "get 2"]
    assert trainer.orchestrator.calls == calls


def test_logged_values_by_hand(make_trainer):
    samples = make_samples(4, seed=1)
    trainer = make_trainer(max_tokens_per_microbatch=10_000)
    trainer.tried_support = ModelSupport("padded")
    batch_gradients(trainer, samples)
    trainer._window.on_step_end(None, trainer.state, None)
    trainer.log({"loss": 0.0})
    (row,) = trainer.state.log_history
    lengths = sorted(len(sample.token_ids) for sample in samples)
    assert len(set(lengths)) > 1  # some are padded
    assert row["padding_share"] == pytest.approx(1 - sum(lengths) / (4 * lengths[-1]))
    sizes = np.concatenate([abs(sample.advantages[sample.loss_mask]) for sample in samples])
    assert row["advantage_abs"] == pytest.approx(sizes.mean())
    assert (row["num_tokens"], row["num_loss_tokens"]) == (sum(lengths), len(sizes))
    assert row["tokens_per_s"] == pytest.approx(sum(lengths) / row["step_s"])
    assert row["step_s"] >= row["train_s"] + row["wait_s"] > 0
    assert trainer.floating_point_ops({}) == model_flops(trainer.model, sum(lengths), len(sizes))


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_seconds_of_a_step_are_without_a_blocking_evaluation_and_those_of_waiting_without_the_push(
    make_trainer, monkeypatch, logging_steps
):
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds)
    for module in ("trainer", "report.metrics", "evaluation"):
        monkeypatch.setattr(f"verifiers_rl.{module}.time", clock)

    def slow(part, method, seconds):
        original = getattr(part, method)

        def call(*args):
            clock.seconds += seconds
            return original(*args)

        setattr(part, method, call)
        return part

    trainer = make_trainer(
        source=slow(slow(StubSource(), "get", 2.0), "end_evaluation", 50.0),
        sink=slow(StubSink(), "push", 3.0), max_steps=4, logging_steps=logging_steps,
        eval_steps=1, metric_for_best_model="reward",
    )  # fmt: skip
    trainer.train()
    assert logged(trainer, "wait_s") == [2.0] * (4 // logging_steps)
    # Before the first batch one push; after that each evaluation makes the push of the next step.
    assert logged(trainer, "step_s") == ([5.0, 2.0, 2.0, 2.0], [3.5, 2.0])[logging_steps - 1]


def test_a_custom_loss_reads_the_extras_of_samples_and_logs_metrics(make_trainer, monkeypatch):
    monkeypatch.setattr("verifiers_rl.loss_check.NUM_TRIES", 0)  # which calls the loss, too
    calls = []

    def weighed(inputs):
        calls.append(len(inputs.trainer_logprobs))
        outputs = cispo(replace(inputs, advantages=inputs.advantages * inputs.extras["factor"]))
        return LossOutputs(outputs.loss, {"my_metric": torch.full_like(inputs.advantages, 7.0)})

    samples = make_samples(4)
    loss, *_ = batch_gradients(make_trainer(), samples)
    for sample in samples:
        sample.extras["factor"] = np.full(len(sample.token_ids), 2, np.float32)
    twice, _, row = batch_gradients(make_trainer(loss_fn=weighed), samples)
    assert twice == pytest.approx(2 * loss, rel=1e-6)
    assert sum(calls) == sum(s.num_loss_tokens for s in samples)
    assert row["my_metric"] == pytest.approx(7.0)


def test_the_rate_rises_over_the_steps_of_the_warmup_and_stays(make_trainer):
    trainer = make_trainer(max_steps=5, learning_rate=1e-3, warmup_steps=2)
    trainer.train()
    rates = logged(trainer, "learning_rate")
    assert rates[0] < rates[1] < rates[2] == rates[3] == rates[4] == 1e-3


def test_a_kl_target_moves_the_weight_of_the_penalty_and_a_resumed_run_goes_on_with_it(
    make_trainer,
):
    kl = {"use_lora": True, "lora_rank": 2, "kl_beta": 0.5, "kl_target": 1e-3, "max_steps": 6}
    kl["save_steps"] = 3
    straight = make_trainer(**kl)
    straight.train()
    distances, betas = logged(straight, "reference_kl"), logged(straight, "kl_beta")
    assert distances[0] == 0 < distances[-1]
    expected = 0.5
    for distance, beta in zip(distances, betas, strict=True):
        assert beta == pytest.approx(expected, rel=1e-6)
        expected *= 1 + 0.1 * min(max(distance / 1e-3 - 1, -0.2), 0.2)
    assert betas[1] == pytest.approx(0.49)  # at the start the KL is 0
    resumed = make_trainer(**kl | {"kl_beta": 9.0})  # the checkpoint's counts
    resumed.train(resume_from_checkpoint=f"{straight.args.output_dir}/checkpoint-3")
    assert logged(resumed, "kl_beta")[-3:] == betas[3:]
    assert logged(resumed, "loss")[-3:] == pytest.approx(logged(straight, "loss")[3:])


# --- Evaluations ----------------------------------------------------------------------------------

EVALUATED = {"eval_steps": 2}


def test_an_evaluation_runs_beside_the_next_step_and_is_logged_at_its_own(make_trainer, folder):
    trainer = make_trainer(
        source=StubSource(reward_of=float), eval_on_start=True, max_steps=5, **EVALUATED
    )
    trainer.train()
    # Each begins behind the push that the next step makes anyway, and ends before the push after.
    assert trainer.orchestrator.calls == [
        "evaluate 0", "submit 0", "submit 1", "get 0", "evaluated 0", "submit 2", "get 1",
        "evaluate 2", "submit 3", "get 2", "evaluated 2", "submit 4", "get 3",
        "evaluate 4", "get 4", "evaluated 4", "evaluate 5", "evaluated 5",
    ]  # fmt: skip
    assert trainer.weight_sync.pushed == [0, 1, 2, 3, 4, 5]
    # Trainer also evaluates behind the last step. The server then has the final weights.
    assert evaluated(folder) == [(0, 0.0), (2, 2.0), (4, 4.0), (5, 5.0)]
    assert trainer.state.global_step == 5


@pytest.mark.parametrize(
    "options",
    [
        {"metric_for_best_model": "reward"},
        {"load_best_model_at_end": True, "save_steps": 2},
        {"save_strategy": "best"},
    ],
)
def test_an_evaluation_that_decides_over_checkpoints_is_awaited_at_once(
    make_trainer, folder, options
):
    trainer = make_trainer(**EVALUATED, **options)
    trainer.train()
    assert trainer.orchestrator.calls[:8] == [
        "submit 0", "submit 1", "get 0", "submit 2", "get 1",
        "wait", "evaluate 2", "evaluated 2",
    ]  # fmt: skip
    assert trainer.state.best_metric == 0.5 and evaluated(folder)[0] == (2, 0.5)


def test_a_metric_for_the_best_model_that_evaluations_lack_is_named_with_those_that_they_have(
    make_trainer,
):
    def best(name, metrics):
        source = StubSource()
        end = source.end_evaluation
        source.end_evaluation = lambda: (metrics, end()[1])
        options = {"load_best_model_at_end": True, "save_steps": 2, "metric_for_best_model": name}
        trainer = make_trainer(source=source, overwrite_output_dir=True, **EVALUATED, **options)
        trainer.train()
        return trainer.state.best_metric

    names = {"reward": 0.5, "score": 2.0, "pass@2": 1.0}
    said = "metric_for_best_model='scroe': evaluations have reward, score, pass@2; set one of these"
    with pytest.raises(ConfigError, match=said):
        best("scroe", names)
    assert (best("eval_score", names), best("pass@2", names)) == (2.0, 1.0)
    # A failed rollout counts as 0, whatever it would have had.
    assert best("score", {"reward": 0.0, "error_share": 1.0}) == 0.0


def test_evaluations_of_a_source_of_ones_own_need_no_reward(make_trainer):
    source = StubSource()
    end = source.end_evaluation
    source.end_evaluation = lambda: ({"bleu": 3.0}, end()[1])
    metrics = make_trainer(source=source).evaluate()
    assert metrics["eval_bleu"] == 3.0 and "eval_reward" not in metrics


def test_evaluate_called_in_training_gives_its_metrics_at_once(make_trainer, folder):
    got = []
    evaluate = on("on_step_end", lambda state: got.append(trainer.evaluate()["eval_reward"]))
    trainer = make_trainer(eval_steps=1, callbacks=[evaluate])
    trainer.train()
    assert got == [0.5] * 3
    assert {step for step, _ in evaluated(folder)} == {1, 2, 3}


def test_an_evaluation_that_a_callback_asks_for_is_never_lost(make_trainer, folder):
    asks = TrainerCallback()

    def ask(args, state, control, **rest):
        control.should_evaluate = state.global_step in (1, 3)  # the last step

    asks.on_step_end = ask
    trainer = make_trainer(callbacks=[asks], source=StubSource(reward_of=float))
    trainer.train()
    assert evaluated(folder) == [(1, 1.0), (3, 3.0)]


def test_of_a_processor_the_tokenizer_is_used(make_trainer, tokenizer):
    """As models with a vision tower have it. Mistral's tokenizers have another one inside."""

    def make(model, env, args, tokenizer, *parts, **others):
        return RLTrainer(model, env, args, processor, *parts, **others)

    processor = SimpleNamespace(tokenizer=tokenizer)
    trainer = make_trainer(kind=make, max_steps=1)
    trainer.train()
    assert trainer.processing_class is tokenizer
    processor = copy.copy(tokenizer)
    processor.tokenizer = "of mistral-common"
    assert make_trainer(kind=make).processing_class is processor


# --- Errors, and a server that is lost ------------------------------------------------------------

LOST = ServerLostError("no answer from the inference server")
AT_ONCE = {"metric_for_best_model": "reward"}


@pytest.mark.parametrize(
    "part, method, error, calls, options, checkpoint",
    [
        ("source", "get", ValueError("the environment broke"), range(9), {}, []),
        ("source", "end_evaluation", InferenceServerError("all failed"), [0], EVALUATED, [3]),
        ("source", "end_evaluation", ValueError("it"), [0], EVALUATED | AT_ONCE, [2]),
        ("sink", "wait_for_server", InferenceServerError("none after 1 s"), [0], {}, [2]),
        ("source", "get", LOST, range(1, 9), {}, [1]),  # again and again
    ],
)
def test_an_error_ends_training_with_a_checkpoint_of_the_steps_before(
    make_trainer, folder, part, method, error, calls, options, checkpoint
):
    parts = {"source": StubSource(), "sink": StubSink()}
    breaking(parts[part], method, error, calls)
    if method == "wait_for_server":
        breaking(parts["source"], "get", LOST, [2])
    options = {"save_steps": 100, "max_steps": 5, **options}
    trainer = make_trainer(**parts, **options)
    with pytest.raises(type(error), match=str(error)):
        trainer.train()
    assert checkpoints_of(folder) == [f"checkpoint-{step}" for step in checkpoint]
    assert not trainer.orchestrator.running
    assert trainer.weight_sync.num_waits == (2 if error is LOST else 0)


def test_a_full_disk_costs_the_checkpoint_and_does_not_hide_why_the_run_ends(make_trainer, caplog):
    source = breaking(StubSource(), "get", ValueError("the next batch broke"), [2])
    trainer = make_trainer(source=source, save_steps=100)
    breaking(trainer.checkpoints, "save", OSError(28, "No space left on device"))
    with pytest.raises(ValueError, match="the next batch broke"):
        trainer.train()
    assert "no checkpoint of the steps so far: [Errno 28] No space left" in caplog.text


def test_other_ranks_hear_of_a_signal_while_the_environment_loads(make_trainer, monkeypatch):
    trainer, said = make_trainer(), []
    breaking(trainer.orchestrator, "start", Interrupted(signal.SIGTERM))
    monkeypatch.setattr(
        "verifiers_rl.distributed.broadcast_values", lambda values: said.append(values) or values
    )
    with pytest.raises(Interrupted):
        trainer.train()
    assert said[-1] == {"signal": signal.SIGTERM}


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("No space left on device"),
        RuntimeError("inline_container.cc: pos"),
        OSError(28, "No space left on device"),
    ],
)
def test_a_disk_without_room_for_weights_is_a_full_disk(make_trainer, monkeypatch, error):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr("transformers.Trainer._save_checkpoint", full)
    with pytest.raises(WritingError, match=r"checkpoint-2 cannot be written: .*; make room there"):
        make_trainer(save_steps=2).train()


@pytest.mark.parametrize(
    "method, lost_in, ahead, versions, pushed",
    [
        # All pending batches are asked for again, with the version of then.
        ("get", [1, 2], 1, [(0, 0), (1, 0), *[(2, 1), (1, 1)] * 2, (2, 1)], [0, 1, 1, 1, 3]),
        (
            "get",
            [2],
            2,
            [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (2, 2), (3, 2), (4, 2)],
            [0, 1, 2, 2, 5],
        ),
        # In a push, also in that after the last step.
        ("push", [1, 3], 1, [(0, 0), (1, 0), (1, 1), (2, 1)], [0, 1, 3]),
    ],
)
def test_a_server_that_was_lost_gets_its_weights_and_the_batches_again(
    make_trainer, method, lost_in, ahead, versions, pushed
):
    source, sink = StubSource(), StubSink()
    breaking(source if method == "get" else sink, method, LOST, lost_in)
    make_trainer(
        source=source, sink=sink, max_off_policy_steps=ahead, max_steps=versions[-1][0] + 1
    ).train()
    assert [(step, version) for step, _, version in source.submitted] == versions
    assert sink.pushed == pushed and sink.num_waits == len(lost_in)


@pytest.mark.parametrize("options, steps", [({}, [3, 4, 5]), (AT_ONCE, [2, 4, 5])])
def test_an_evaluation_in_which_the_server_is_lost_begins_again(
    make_trainer, folder, options, steps
):
    source = breaking(StubSource(), "end_evaluation", LOST, [0])
    trainer = make_trainer(source=source, max_steps=5, **EVALUATED, **options)
    trainer.train()
    assert trainer.weight_sync.num_waits == source.calls.count("discard") == 1
    # The server had lost the weights of step 2 when step 3 was done.
    assert [step for step, _ in evaluated(folder)] == steps


def test_several_gpus_in_one_process_are_refused(make_trainer, monkeypatch):
    monkeypatch.setattr("verifiers_rl.RLConfig.n_gpu", 2)
    with pytest.raises(ConfigError, match=r"2 GPUs are visible to one process.*accelerate launch"):
        make_trainer()


def test_without_a_progress_bar_the_metrics_of_each_line_are_printed_once(make_trainer, capsys):
    make_trainer(max_steps=2, logging_steps=1).train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{'")]
    assert ["'reward': '0.25'" in line for line in lines] == [True, True, False]


@pytest.mark.parametrize("disable_tqdm, kind", [(True, PrinterCallback), (False, ProgressCallback)])
def test_a_callback_of_ones_own_that_extends_trainers_stays(
    make_trainer, capsys, disable_tqdm, kind
):
    logged = []

    class Own(kind):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logged.append(logs)

    trainer = make_trainer(max_steps=2, disable_tqdm=disable_tqdm, callbacks=[Own()])
    kinds = [type(one) for one in trainer.callback_handler.callbacks]
    assert Own in kinds and (ShortProgress in kinds) != disable_tqdm and kind not in kinds
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{'")]
    assert (len(logged), len(lines)) == (3, 2 + disable_tqdm)  # the last line is the summary


def test_a_run_without_an_end_needs_no_memory_for_its_steps(make_trainer):
    trainer = make_trainer(max_steps=10**6)
    tracemalloc.start()
    try:
        steps = trainer.get_train_dataloader()
        assert len(steps) == 10**6 and next(iter(steps)) == {"step": [0]}
        assert tracemalloc.get_traced_memory()[1] < 10**6  # bytes
    finally:
        tracemalloc.stop()


def test_the_progress_bar_shows_the_reward(make_trainer):
    shown = []
    trainer = make_trainer(disable_tqdm=False)
    (progress,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, ShortProgress)]
    trainer.add_callback(
        on("on_step_end", lambda state: shown.append(progress.training_bar.postfix))
    )
    trainer.train()
    assert shown == [None, "reward=0.250", "reward=0.250"]


# --- The model ------------------------------------------------------------------------------------


def test_lora_options_reach_the_adapter_and_a_peft_config_replaces_them(make_trainer):
    trainer = make_trainer(
        use_lora=True, lora_rank=4, lora_alpha=8, lora_dropout=0.25, lora_use_rslora=True,
        lora_target_modules=["q_proj"], lora_modules_to_save=["lm_head"],
    )  # fmt: skip
    config = trainer.model.peft_config["default"]
    found = config.r, config.lora_alpha, config.lora_dropout, config.use_rslora
    assert found == (4, 8, 0.25, True)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    kinds = ("q_proj.lora_", "lm_head.modules_to_save")
    assert trained and all(any(kind in name for kind in kinds) for name in trained)
    layer = trainer._base_of(trainer.model).model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == 8 / math.sqrt(4)
    config = LoraConfig(r=2, target_modules=["v_proj"])
    assert make_trainer(peft_config=config).model.peft_config["default"].r == 2


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # of peft
@pytest.mark.parametrize(
    "options",
    [
        {"lora_modules_to_save": ["embed_tokens"]},
        {"lora_target_modules": ["q_proj", "embed_tokens"]},
        {"lora_target_modules": ["q_proj", "lm_head"]},
        {"lora_target_modules": ["q_proj", "down_proj"]},
    ],
)
def test_an_adapter_that_changes_a_weight_that_is_used_twice_is_refused(make_trainer, options):
    def make(ties):
        model = make_tiny_model(tie_word_embeddings=ties)
        if ties:  # as in blocks of Zamba2
            first, second = model.model.layers
            second.mlp.down_proj.weight = first.mlp.down_proj.weight
        return make_trainer(model, use_lora=True, **options)

    with pytest.raises(ConfigError, match="changes a weight that this model uses twice"):
        make(ties=True)
    make(ties=False)


def test_what_is_trained_has_float32_masters(make_trainer, tmp_path):
    base, half = write_model(tmp_path / "model"), make_tiny_model().bfloat16()
    for model, use_lora, bf16, expected in (
        (base, False, True, torch.float32),
        (base, True, True, torch.bfloat16),
        (base, True, False, torch.float32),
        (half, False, False, torch.float32),
    ):
        options = {"use_lora": use_lora, "bf16": bf16, "max_steps": 1}
        trainer = make_trainer(model, overwrite_output_dir=True, **options)
        assert trainer._base_of(trainer.model).model.norm.weight.dtype == expected
        trained = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
        assert trained == {torch.float32}
        trainer.train()
    # What PEFT copies of a model in bfloat16, too.
    options = {"lora_modules_to_save": ["lm_head"], "bf16": True, "use_lora": True, "max_steps": 1}
    trainer = make_trainer(base, overwrite_output_dir=True, **options)
    head = trainer.model.get_output_embeddings()
    assert head.modules_to_save["default"].weight.dtype == torch.float32
    assert head.original_module.weight.dtype == torch.bfloat16
    trainer.train()


def test_with_deepspeed_a_second_train_is_refused(make_trainer):
    trainer = make_trainer()
    trainer.is_deepspeed_enabled, trainer.model_wrapped = True, torch.nn.Module()
    with pytest.raises(RuntimeError, match=r"train\(\) works once per RLTrainer"):
        trainer.train()


def test_the_seed_decides_over_a_new_adapter(make_trainer):
    def adapter(seed):
        weights = weights_of(make_trainer(use_lora=True, seed=seed).model)
        return torch.cat([p.flatten() for n, p in weights.items() if "lora_A" in n])

    assert torch.equal(adapter(1), adapter(1))
    assert not torch.equal(adapter(1), adapter(2))


# --- What a loss may ask for ----------------------------------------------------------------------


def test_what_a_loss_needs_is_computed_only_for_it(make_trainer):
    seen = []

    def plain(inputs):
        seen[:] = inputs.entropy.requires_grad, inputs.reference_logprobs
        return cispo(inputs)

    @needs("entropy_gradient", "reference_logprobs")
    def needy(inputs):
        seen[:] = inputs.entropy.requires_grad, inputs.reference_logprobs
        away = inputs.trainer_logprobs - inputs.reference_logprobs
        return LossOutputs((inputs.weights * (away.square() - inputs.entropy)).sum())

    trainer = make_trainer(loss_fn=plain)
    batch_gradients(trainer, make_samples(4))
    assert trainer._reference is None and seen == [False, None]
    loss, _, row = batch_gradients(make_trainer(loss_fn=needy), make_samples(4))
    has_gradient, reference = seen
    assert has_gradient and not reference.requires_grad
    # Before any step the policy is its reference: what is left is the entropy.
    assert loss == pytest.approx(-row["entropy"], rel=1e-5)
    # With LoRA the reference is the model under its adapter, and nothing is copied.
    assert make_trainer(loss_fn=needy, use_lora=True, lora_rank=4)._reference is None


def test_a_microbatch_without_loss_tokens_adds_nothing_whatever_the_loss_makes_of_it(make_trainer):
    def divided_by_a_spread(inputs):  # NaN for one token
        logprobs = inputs.trainer_logprobs
        return LossOutputs(logprobs.sum() / logprobs.detach().std(correction=0))

    trainer = make_trainer(loss_fn=divided_by_a_spread)
    trainer.tried_support, metrics = ModelSupport(), StepMetrics(Batch(0, 0, []))
    # What a rank gets that has no samples left.
    loss = trainer.microbatch_loss(trainer.model, collate([], [], [], pad_token_id=0), metrics)
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in trainer.model.parameters())
    metrics.reduce()
    assert (metrics.num_microbatches, metrics.num_tokens, metrics.means) == (1, 0, {})
    assert not metrics._sums.any()  # nor is it NaN


def test_the_option_of_attention_reaches_the_step(make_trainer, tmp_path):
    for model in (write_model(tmp_path / "model"), make_tiny_model()):
        trainer = make_trainer(model, attn_implementation="eager")
        assert trainer.model.config._attn_implementation == "eager"
        batch_gradients(trainer, make_samples(4))
    with pytest.raises(ConfigError, match=r"attn_implementation='flash': "):
        make_trainer(attn_implementation="flash")


def test_every_logged_metric_is_documented(make_trainer):
    table = (ROOT / "docs/metrics.md").read_text()
    documented = set(re.findall(r"^\| `([\w@/]+)`", table, re.MULTILINE))
    found = set(batch_metrics([[Rollout(0, "", reward=1.0)]], 1))
    for loss in ("cispo", "icepop"):
        trainer = make_trainer(
            loss=loss, max_steps=1, kl_beta=0.1, entropy_beta=0.1, overwrite_output_dir=True
        )
        trainer.train()
        found |= {name for row in trainer.state.log_history for name in row}
    found = {re.sub(r"^masked_share/.*", "masked_share/NAME", name) for name in found}
    own = {name for name in found if not name.startswith("train_")}
    own -= {"step", "epoch", "total_flos"}
    names = {"loss", "grad_norm", "reference_kl", "masked_share", "clipped_share", "sync_s"}
    assert names | {"masked_share/NAME"} < own
    # From the real server and its orchestrator, and of a GPU.
    own |= {"sync_bytes", "generation_s", "num_samples", "filtered_share", "mfu"}
    assert own <= documented, own - documented
