import json
import math
import os
import random
import re
import signal
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from tests.helpers import (
    ROOT,
    StubSink,
    StubSource,
    load_example,
    make_samples,
    make_tiny_llama,
    make_tiny_model,
    make_tiny_moe,
    stub_servers,
)
from tests.reference import reference_loss, reference_means, reference_policy
from verifiers_rl import LossOutputs, RLConfig, RLTrainer, cispo, logprobs
from verifiers_rl.config import ConfigError
from verifiers_rl.data import example_index
from verifiers_rl.inference.client import InferenceServerError, ServerLostError
from verifiers_rl.losses import MASKS, LossInputs, needs
from verifiers_rl.packing import ModelSupport, collate
from verifiers_rl.process.interrupts import Interrupted
from verifiers_rl.report.means import batch_metrics
from verifiers_rl.report.metrics import ShortProgress, TokenMeans, model_flops
from verifiers_rl.report.run_folder import RunFolderError, metrics_file, read_metrics
from verifiers_rl.sync.sources import what_to_send
from verifiers_rl.types import Batch, Rollout


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_example("warm_start").make_tokenizer()


@pytest.fixture
def make_trainer(tokenizer, tmp_path):
    def make(model=None, source=None, loss_fn=None, trainer_options=None, **options):
        defaults = {
            "output_dir": str(tmp_path / "run"),
            "use_cpu": True,
            "use_lora": False,
            "batch_size": 8,
            "rollouts_per_example": 4,
            "micro_batch_size": 4,
            "max_seq_len": 32,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        args = RLConfig(**{**defaults, **options})
        return RLTrainer(
            model or make_tiny_model(),
            env=None,
            args=args,
            processing_class=tokenizer,
            loss_fn=loss_fn,
            orchestrator=source or StubSource(),
            weight_sync=StubSink(),
            **(trainer_options or {}),
        )

    return make


def batch_gradients(trainer, samples):
    """Loss and gradients of one batch through RLTrainer.training_step."""

    class OneBatch(StubSource):
        def get(self):
            self._step = None
            return Batch(0, 0, samples)

    trainer.orchestrator = OneBatch()
    trainer.orchestrator.start()
    trainer.model.zero_grad()
    trainer.state.max_steps = 1
    loss = trainer.training_step(trainer.model, {})
    grads = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.item(), grads


# Bounds that some of the samples' tokens cross and others do not.
LOSS_OPTIONS = {
    "cispo": {"eps_high": 0.1},
    "ppo": {"eps_low": 0.3, "eps_high": 0.1},
    "truncated_is": {"eps_high": 0.1},
    "icepop": {"min_ratio": 0.8, "max_ratio": 1.3},
    "dppo": {"max_divergence": 0.0015},
    "gspo": {"eps_low": 0.05, "eps_high": 0.05},
    "reinforce": {},
}


def check_against_reference(trainer, make_model, samples, adapter=None, **options):
    """Loss and gradients of a step against the float64 loops, to 1e-5 of the largest gradient."""
    loss, grads = batch_gradients(trainer, samples)
    reference, start = make_model().double(), make_model().double()
    if adapter is not None:
        reference = get_peft_model(reference, trainer.model.peft_config["default"]).double()
        reference.load_state_dict(adapter)
    args = trainer.args
    expected = reference_loss(
        reference,
        samples,
        args.temperature,
        args.loss,
        args.loss_args,
        args.loss_normalization,
        constant=args.batch_size * args.max_seq_len,
        kl_beta=args.kl_beta,
        start=start,
        entropy_beta=args.entropy_beta,
        masks=args.masks(),
    )
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    for name, value in reference_means(reference, samples, args.temperature).items():
        assert trainer._window.steps[0][name] == pytest.approx(value, rel=1e-5), name
    expected_grads = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert grads.keys() == expected_grads.keys()
    largest = max(grad.abs().max().item() for grad in expected_grads.values())
    assert largest > 0
    for name, grad in expected_grads.items():
        torch.testing.assert_close(
            grads[name].double(), grad, rtol=1e-5, atol=1e-5 * largest, msg=name
        )


def switch_checkpointing_on(trainer):
    """Do as train() does."""
    base = trainer._base_of(trainer.model)
    # Its name from transformers 5.18 on, and before.
    on = getattr(base, "activation_checkpointing_enable", None)
    (on or base.gradient_checkpointing_enable)()
    base.enable_input_require_grads()


def away_from_the_start(trainer):
    """Change the adapter; a fresh one is the model that training started from. Its weights."""
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return trainer.model.state_dict()


def with_logprobs_near(model, samples, temperature, seed=0):
    """The samples as if a slightly different policy had sampled them: ratios around 1."""
    rng = random.Random(seed)
    for sample in samples:
        policy = reference_policy(model.double(), sample.token_ids, temperature)
        for t in range(1, len(sample.token_ids)):
            if sample.loss_mask[t]:
                here = policy[t - 1, sample.token_ids[t]].item()
                sample.inference_logprobs[t] = here + rng.uniform(-0.5, 0.5)
    return samples


# Every loss once, every layout and model several times.
LAYOUT_OF_LOSS = list(zip(sorted(LOSS_OPTIONS), cycle(["packed", "flat", "padded"]), strict=False))


@pytest.mark.parametrize(("loss", "layout"), LAYOUT_OF_LOSS)
@pytest.mark.parametrize("make_model", [make_tiny_model, make_tiny_llama])
def test_every_loss_equals_a_float64_reference(make_trainer, make_model, loss, layout):
    samples = with_logprobs_near(make_model(), make_samples(6, seed=1, longest=14), 0.7)
    options = {"loss": loss, "loss_args": LOSS_OPTIONS[loss], "max_tokens_per_microbatch": 40}
    trainer = make_trainer(make_model(), temperature=0.7, **options)
    trainer.support = ModelSupport(layout)
    check_against_reference(trainer, make_model, samples)
    share = trainer._window.steps[0].get(
        "clipped_share", trainer._window.steps[0].get("masked_share")
    )
    assert loss == "reinforce" or 0 < share < 1  # both sides of the bound were seen


# Bounds that some of the samples' tokens cross and others do not.
MASK_OPTIONS = {
    "ratio": {"min_ratio": 0.8, "max_ratio": 1.3},
    "ppo": {"eps_low": 0.3, "eps_high": 0.1},
    "ipo": {"max_divergence": 0.0015},
    "dppo": {"max_divergence": 0.0015},
    "sequence_mean": {"min_ratio": 0.95, "max_ratio": 1.1},
    "sequence_product": {"min_ratio": 0.8, "max_ratio": 1.5},
}


@pytest.mark.parametrize("mask", MASK_OPTIONS)
def test_every_mask_equals_a_float64_reference(make_trainer, mask):
    assert MASK_OPTIONS.keys() == MASKS.keys()
    samples = with_logprobs_near(make_tiny_model(), make_samples(6, seed=1, longest=14), 0.7)
    masks = {mask: MASK_OPTIONS[mask]}
    options = {"loss_args": LOSS_OPTIONS["cispo"], "gradient_masks": masks, "kl_beta": 0.1}
    trainer = make_trainer(temperature=0.7, max_tokens_per_microbatch=40, **options)
    check_against_reference(trainer, make_tiny_model, samples)
    assert 0 < trainer._window.steps[0][f"masked_share/{mask}"] < 1


def test_masks_add_up_under_another_loss(make_trainer):
    samples = with_logprobs_near(make_tiny_model(), make_samples(6, seed=1, longest=14), 0.7)
    masks = {name: MASK_OPTIONS[name] for name in ("ipo", "sequence_mean")}
    options = {"loss": "gspo", "loss_args": LOSS_OPTIONS["gspo"], "gradient_masks": masks}
    trainer = make_trainer(temperature=0.7, loss_normalization="sequence", **options)
    check_against_reference(trainer, make_tiny_model, samples)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of peft, about patterns of its own
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_lora_on_experts_is_trained_saved_and_merged(
    make_trainer, tmp_path, gradient_checkpointing
):
    folder, run = tmp_path / "base", tmp_path / "run"
    make_tiny_moe().save_pretrained(folder)
    layers = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    trainer = make_trainer(
        str(folder), use_lora=True, lora_target_modules=layers, save_final="merged",
        gradient_checkpointing=gradient_checkpointing,
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert moved == trained and sum("experts" in name for name in moved) == 8
    ids = torch.arange(3, 43)[None]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    loaded = [AutoModelForCausalLM.from_pretrained(run / "merged")]
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=ids).logits
        assert (plain(input_ids=ids).logits - expected).abs().max() > 1e-3
        loaded.append(PeftModel.from_pretrained(plain, str(run)))
        for model in loaded:
            assert (model.eval()(input_ids=ids).logits - expected).abs().max() < 2e-5


WAYS = product([False, True], [False, True], [1, 7, 10_000])
KINDS = [
    ("token", "ppo", make_tiny_llama),
    ("sequence", "gspo", make_tiny_model),
    ("constant", "cispo", make_tiny_model),
    ("token", "icepop", make_tiny_model),
    ("token", "dppo", make_tiny_llama),
    ("sequence", "truncated_is", make_tiny_llama),
    ("sequence", "reinforce", make_tiny_model),
]


@pytest.mark.parametrize(("way", "kind"), list(zip(WAYS, cycle(KINDS), strict=False)))
def test_the_step_equals_the_reference_under_every_option(make_trainer, monkeypatch, way, kind):
    from verifiers_rl import forward as module

    (use_lora, gradient_checkpointing, chunk_size), (normalization, loss, make_base) = way, kind
    monkeypatch.setattr(module, "chunk_size_for", lambda *_: chunk_size)
    samples = with_logprobs_near(make_base(), make_samples(5, seed=3, longest=14), 1.0)
    samples[1].rollout_id = samples[3].rollout_id = 0  # a rollout broken into two samples
    trainer = make_trainer(
        make_base(),
        loss=loss,
        loss_args=LOSS_OPTIONS[loss],
        use_lora=use_lora,
        lora_rank=4,
        gradient_checkpointing=gradient_checkpointing,
        loss_normalization=normalization,
        kl_beta=0.1,
        entropy_beta=0.2,
        temperature=1.0,
        max_tokens_per_microbatch=40,
    )
    if gradient_checkpointing:
        switch_checkpointing_on(trainer)
    adapter = None
    if use_lora:
        adapter = away_from_the_start(trainer)
    else:  # away from the frozen copy
        with torch.no_grad():
            trainer.model.lm_head.weight.mul_(1.2)

    def make_model():
        model = make_base()
        if not use_lora and make_model.calls == 0:  # the policy is made first, its start second
            model.lm_head.weight.data.mul_(1.2)
        make_model.calls += 1
        return model

    make_model.calls = 0
    check_against_reference(trainer, make_model, samples, adapter)
    assert trainer._window.steps[0]["reference_kl"] > 1e-4


@pytest.mark.parametrize("chunk_size", [7, 10_000])
@pytest.mark.parametrize(
    "head",
    [
        {"lora_target_modules": ["q_proj", "lm_head"]},
        {"lora_target_modules": ["q_proj"], "lora_modules_to_save": ["lm_head"]},
    ],
)
def test_a_head_that_peft_has_wrapped_equals_the_reference(
    make_trainer, monkeypatch, chunk_size, head
):
    from verifiers_rl import forward as module

    monkeypatch.setattr(module, "chunk_size_for", lambda *_: chunk_size)
    samples = with_logprobs_near(make_tiny_model(), make_samples(5, seed=3, longest=14), 0.7)
    trainer = make_trainer(
        use_lora=True, lora_rank=4, kl_beta=0.1, max_tokens_per_microbatch=40, **head,
        loss="ppo", loss_args=LOSS_OPTIONS["ppo"],
    )  # fmt: skip
    with torch.no_grad():  # away from what training started from
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    check_against_reference(trainer, make_tiny_model, samples, trainer.model.state_dict())
    assert trainer._window.steps[0]["reference_kl"] > 1e-4
    assert any(
        "lm_head" in name and parameter.grad.any()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    )


class Shifted(LlamaForCausalLM):
    """Adds a constant to the logits of each token, behind the head."""

    def forward(self, position_ids=None, **kwargs):
        outputs = super().forward(position_ids=position_ids, **kwargs)
        outputs.logits = outputs.logits + torch.arange(outputs.logits.shape[-1]) / 100
        return outputs


def make_shifted():
    torch.manual_seed(0)
    return Shifted(make_tiny_llama().config).float()


def make_bloom():
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=261, hidden_size=32, n_layer=2, n_head=4)
    return BloomForCausalLM(config).float()


def make_mamba():
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=261, hidden_size=32, num_hidden_layers=2, state_size=4)
    return MambaForCausalLM(config).float()


@pytest.mark.parametrize(
    ("make_model", "warning", "layout"),
    [
        (make_bloom, "samples are padded, one a row: it takes no position_ids", "padded"),
        (make_mamba, "samples are padded, one a row: ", "padded"),
    ],
)
def test_a_model_of_another_kind_is_trained_exactly_and_the_warning_says_why(
    make_trainer, caplog, make_model, warning, layout
):
    samples = with_logprobs_near(make_model(), make_samples(5, seed=3, longest=14), 0.7)
    loss = {"loss": "cispo", "loss_args": LOSS_OPTIONS["cispo"], "kl_beta": 0.1}
    trainer = make_trainer(make_model(), **loss, max_tokens_per_microbatch=40)
    check_against_reference(trainer, make_model, samples)
    assert warning in caplog.text and trainer.support.layout == layout
    assert caplog.text.count("are padded") == 1


def test_a_model_that_changes_its_logits_behind_the_head_is_refused(make_trainer):
    with pytest.raises(ConfigError, match="model: the logits of Shifted are not those of its head"):
        batch_gradients(make_trainer(make_shifted()), make_samples(4))


@pytest.mark.parametrize("use_lora", [False, True])
def test_in_bfloat16_the_reference_computes_as_the_policy_does(make_trainer, use_lora):
    trainer = make_trainer(bf16=True, use_lora=use_lora, kl_beta=0.1, max_steps=1)
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "reference_kl" in row]
    assert row["reference_kl"] == 0.0  # the policy is still what it started from


@pytest.mark.parametrize("max_tokens", [1, 20, 45, 10_000])
def test_the_gradient_does_not_depend_on_split_or_order(make_trainer, max_tokens):
    samples = make_samples(7, seed=2)
    for normalization in ("token", "sequence"):
        options = {"loss_normalization": normalization}
        trainer = make_trainer(max_tokens_per_microbatch=max_tokens, **options)
        loss, grads = batch_gradients(trainer, samples[::-1])
        expected_loss, expected = batch_gradients(
            make_trainer(micro_batch_size=7, **options), samples
        )
        assert math.isclose(loss, expected_loss, rel_tol=1e-5)
        for name in expected:
            torch.testing.assert_close(grads[name], expected[name], rtol=1e-5, atol=1e-6, msg=name)
        num_tokens = [len(sample.token_ids) for sample in samples]
        most = {1: 7, 10_000: 1}.get(max_tokens)
        if most is not None:
            assert trainer._window.steps[0]["num_microbatches"] == most
        assert trainer._window.steps[0]["num_tokens"] == sum(num_tokens)


def test_the_gradients_of_two_parts_of_a_batch_add_up_to_that_of_all(make_trainer):
    samples = make_samples(7, seed=2)
    options = {"loss_normalization": "constant"}  # the same number in each part
    expected_loss, expected = batch_gradients(make_trainer(**options), samples)
    trainer = make_trainer(**options)
    batch, means, first = Batch(0, 0, samples), TokenMeans(), np.arange(7) < 3
    losses = [trainer.train_on(trainer.model, batch, means, part) for part in (first, ~first)]
    assert sum(losses).item() == pytest.approx(expected_loss, rel=1e-5)
    assert trainer._counts.num_samples == 7
    assert trainer._counts.num_loss_tokens == batch.num_loss_tokens
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("use_lora", [True, False])
def test_gradient_checkpointing_changes_memory_not_gradients(make_trainer, use_lora):
    def run(checkpointing):
        torch.manual_seed(0)
        options = {"gradient_checkpointing": checkpointing, "use_lora": use_lora}
        trainer = make_trainer(max_steps=1, overwrite_output_dir=True, **options)
        assert trainer.support.shares_prefixes  # which runs the model too
        counted = []
        layer = trainer._base_of(trainer.model).model.layers[0].input_layernorm
        layer.register_forward_hook(lambda *_: counted.append(1))
        grads = {}

        class Spy(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
                grads.update(
                    {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
                )

        trainer.add_callback(Spy())
        trainer.train()
        return grads, len(counted)

    plain, forwards = run(False)
    checkpointed, forwards_with_recomputation = run(True)
    assert forwards_with_recomputation == 2 * forwards
    assert plain.keys() == checkpointed.keys() and plain
    for name in plain:
        torch.testing.assert_close(checkpointed[name], plain[name], rtol=1e-4, atol=1e-6, msg=name)


def test_no_update_is_made_with_a_batch_without_loss_tokens(make_trainer):
    """Adam would go on by its momentum, and weight decay shrink the weights."""

    class OneWithoutLoss(StubSource):
        def get(self):
            batch = super().get()
            if batch.step == 1:
                for sample in batch.samples:
                    sample.loss_mask[:] = False
            return batch

    seen = []
    trainer = make_trainer(
        source=OneWithoutLoss(),
        weight_decay=0.1,
        trainer_options={
            "callbacks": [
                AtStepEnd(lambda: seen.append([p.detach().clone() for p in trained.parameters()]))
            ]
        },
    )
    trained = trainer.model
    trainer.train()
    first, second, third = (torch.cat([p.flatten() for p in step]) for step in seen)
    assert torch.equal(first, second) and not torch.equal(second, third)
    rows = [row for row in trainer.state.log_history if "skipped_update_share" in row]
    assert [row["skipped_update_share"] for row in rows] == [0.0, 1.0, 0.0]
    assert [row["loss"] == 0.0 for row in rows] == [False, True, False]


@pytest.mark.parametrize(("loss", "layout"), LAYOUT_OF_LOSS)
def test_extreme_samples_give_finite_gradients_and_are_counted(make_trainer, loss, layout):
    samples = make_samples(3, seed=1) + make_samples(1, longest=1, prompt=1) + make_samples(1)
    samples[0].inference_logprobs[-1] = -math.inf
    samples[1].inference_logprobs[-1] = -700.0
    samples[2].inference_logprobs[-1] = 0.0
    samples[-1].loss_mask[:] = False
    trainer = make_trainer(loss=loss, loss_args=LOSS_OPTIONS[loss], max_tokens_per_microbatch=1)
    trainer.support = ModelSupport(layout)
    value, grads = batch_gradients(trainer, samples)
    assert math.isfinite(value) and all(torch.isfinite(grad).all() for grad in grads.values())
    assert any(grad.any() for grad in grads.values())
    (metrics,) = trainer._window.steps
    assert metrics["num_microbatches"] == 4 and metrics["num_masked_samples"] == 1
    assert metrics["clamped_share"] == pytest.approx(2 / metrics["num_loss_tokens"])


def test_a_loss_that_is_not_finite_stops_before_the_optimizer(make_trainer):
    def broken(inputs):
        outputs = cispo(inputs)
        return LossOutputs(outputs.loss / 0.0 if calls else outputs.loss, {})

    calls = []
    at_step = AtStepEnd(lambda: calls.append(1))
    options = {"save_strategy": "steps", "save_steps": 100, "micro_batch_size": 8}
    trainer = make_trainer(
        loss_fn=broken, trainer_options={"callbacks": [at_step]}, **options
    )  # fmt: skip
    with pytest.raises(FloatingPointError, match=r"the loss of this batch is (nan|-?inf)"):
        trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    checkpoints = [path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")]
    assert checkpoints == ["checkpoint-1"]


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_stops_before_the_optimizer(make_trainer, max_grad_norm):
    """The loss is 0 and finite; the derivative of the root is infinite there."""

    def root_of_distance(inputs):
        distance = inputs.trainer_logprobs - inputs.trainer_logprobs.detach()
        term = distance.abs().sqrt().sum() if calls else 0.0
        outputs = cispo(inputs)
        return LossOutputs(outputs.loss + term, outputs.metrics)

    calls = []
    trainer = make_trainer(
        loss_fn=root_of_distance,
        trainer_options={"callbacks": [AtStepEnd(lambda: calls.append(1))]},
        max_grad_norm=max_grad_norm,
        save_strategy="steps",
        save_steps=100,
    )
    message = "the gradient of this batch is infinite or NaN, and its loss is not"
    with pytest.raises(FloatingPointError, match=message):
        trainer.train()
    assert trainer.weight_sync.pushed == [0, 1]  # the weights of step 0 and of step 1
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    (checkpoint,) = Path(trainer.args.output_dir).glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-1"
    saved = load_file(checkpoint / "model.safetensors")
    assert saved and all(torch.isfinite(tensor).all() for tensor in saved.values())


def test_dropout_of_the_model_is_switched_off_and_that_of_lora_is_not(make_trainer, caplog):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=261, n_embd=32, n_layer=2, n_head=4)).float()
    assert model.config.resid_pdrop == 0.1
    samples = make_samples(4)
    trainer = make_trainer(model)
    assert batch_gradients(trainer, samples)[0] == batch_gradients(trainer, samples)[0]
    assert "dropout of the model is switched off in ['Dropout']" in caplog.text
    # That of a base model whose adapter is trained further, too.
    base = GPT2LMHeadModel(GPT2Config(vocab_size=261, n_embd=32, n_layer=2, n_head=4)).float()
    lora = LoraConfig(target_modules=["c_attn"], lora_dropout=0.25, fan_in_fan_out=True)
    trainer = make_trainer(get_peft_model(base, lora))
    kept = {m.p for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout)}
    assert kept == {0.0, 0.25}
    llama = make_tiny_llama()
    llama.model.layers[1].self_attn.attention_dropout = 0.5
    options = {"use_lora": True, "lora_dropout": 0.5}
    trainer = make_trainer(llama, **options)
    assert llama.model.layers[1].self_attn.attention_dropout == 0.0
    kept = {m.p for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout)}
    assert kept == {0.5}


@pytest.mark.parametrize("use_lora", [False, True])
def test_the_head_never_sees_more_than_a_chunk(make_trainer, monkeypatch, use_lora):
    from verifiers_rl import forward as module

    monkeypatch.setattr(module, "chunk_size_for", lambda *_: 7)
    rows = []
    trainer = make_trainer(use_lora=use_lora)
    assert trainer.support.shares_prefixes  # tried before what is counted
    real = torch.nn.functional.linear

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


def test_in_bfloat16_chunks_do_not_round_the_gradient_of_the_head(make_trainer, monkeypatch):
    from verifiers_rl import forward as module

    samples = make_samples(8, longest=25)

    def head_gradient(chunk_size, bf16):
        monkeypatch.setattr(module, "chunk_size_for", lambda *_: chunk_size)
        trainer = make_trainer(bf16=bf16, micro_batch_size=8)
        with trainer.compute_loss_context_manager():
            return batch_gradients(trainer, samples)[1]["lm_head.weight"]

    exact, whole, chunks = (
        head_gradient(*options) for options in ((1000, False), (1000, True), (1, True))
    )
    error_of_whole, error_of_chunks = ((g - exact).norm() / exact.norm() for g in (whole, chunks))
    assert 0 < error_of_chunks < 1.2 * error_of_whole


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
        away_from_the_start(trainer)
        assert trainer.support.shares_prefixes  # tried before casts are counted
        with Casts() as casts:
            loss, grads = batch_gradients(trainer, make_samples(6))
        return loss, grads, len(casts.made), trainer._window.steps[0]["num_microbatches"]

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
    assert trainer.support.shares_prefixes  # tried before casts are counted
    with Casts() as casts:
        batch_gradients(trainer, make_samples(6))
    num = trainer._window.steps[0]["num_microbatches"]
    assert num > 1 and casts.made.count(((261, 32), torch.bfloat16)) == num


def test_tokens_that_no_policy_sampled_have_ratio_one(make_trainer):
    (sample,) = make_samples(1, seed=4)
    known = [t for t in range(len(sample.token_ids)) if sample.loss_mask[t]]
    for t in known:
        sample.inference_logprobs[t] = math.nan
    trainer = make_trainer()
    loss, _ = batch_gradients(trainer, [sample])
    expected = 0.0
    log_softmax = torch.log_softmax(
        make_tiny_model()(torch.tensor(sample.token_ids)[None]).logits[0] / 0.7, -1
    )
    for t in known:
        expected -= sample.advantages[t] * log_softmax[t - 1, sample.token_ids[t]].item()
    assert math.isclose(loss, expected / len(known), rel_tol=1e-4)
    assert trainer._window.steps[0]["importance_ratio"] == 1.0


def test_options_reach_the_parts_that_talk_to_the_server(tokenizer, tmp_path, monkeypatch):
    # What each does is tested with its part; here, that it gets there.
    runner = SimpleNamespace(weights=[1.0], scoring_timeout_s=0.0)
    stub_servers(monkeypatch)
    monkeypatch.setattr("verifiers_rl.wiring.make_runner", lambda *args: runner)
    options = {
        "vllm_server_host": "gpu-box",
        "vllm_server_port": 7,
        "vllm_server_timeout": 11.0,
        "weight_sync_backend": "http",
        "lora_sync": "merged",
        "batch_size": 24,
        "rollouts_per_example": 6,
        "eval_sampling": {"temperature": 0.0},
        "shuffle": False,
        "advantage": "std",
    }
    folder = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    args = RLConfig(**folder, **options)
    trainer = RLTrainer(make_tiny_model(), "env", args, tokenizer)
    (replica,) = trainer.weight_sync.replicas
    assert (replica.url, replica.client.timeout_s) == ("http://gpu-box:7", 11.0)
    sync = replica.sync
    assert (sync.backend, sync.lora_sync, sync.timeout_s) == ("http", "merged", 11.0)
    orchestrator = trainer.orchestrator
    assert orchestrator.args is args and orchestrator.env is runner
    assert orchestrator.router is trainer.weight_sync
    assert orchestrator.check_server == trainer.weight_sync.check_server
    assert orchestrator.sampling["eval"]["temperature"] == 0.0
    assert orchestrator.example_order(range(4), [40]) == [0, 1, 2, 3]  # shuffled it would not be
    group = [Rollout(0, "", reward=reward) for reward in (0.0, 1.0)]
    assert orchestrator.advantage_fn(group) == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
    assert args.max_groups_per_batch == 4 and orchestrator.group_filter.lets_all_pass

    group_filter = {"min_reward": 0.5, "max_oversampling": 2.0}
    options = {"group_filter": group_filter, "batch_size": 24, "seed": 3}
    args = RLConfig(**folder, **options, rollouts_per_example=6)
    orchestrator = RLTrainer(make_tiny_model(), "env", args, tokenizer).orchestrator
    assert orchestrator.group_filter.min_reward == 0.5 and args.max_groups_per_batch == 8
    expected = [example_index(position, 40, True, seed=3) for position in range(4)]
    assert orchestrator.example_order(range(4), [40]) == expected != [0, 1, 2, 3]


def test_a_weight_sync_of_ones_own_goes_with_the_orchestrator_of_the_environment(
    tokenizer, tmp_path, monkeypatch
):
    made = {}

    def make_orchestrator(runner, args, check_server, **options):
        made.update(options, runner=runner, check_server=check_server)
        return StubSource()

    runner = SimpleNamespace(weights=[1.0], scoring_timeout_s=0.0)
    servers = stub_servers(monkeypatch)
    monkeypatch.setattr("verifiers_rl.wiring.make_runner", lambda *args: runner)
    monkeypatch.setattr("verifiers_rl.trainer.Orchestrator", make_orchestrator)
    args = RLConfig(output_dir=str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no")
    sink, own = StubSink(), {"advantage_fn": lambda group: [0.0], "example_order": lambda p, s: [0]}
    trainer = RLTrainer(make_tiny_model(), "env", args, tokenizer, weight_sync=sink, **own)
    assert made["check_server"] == sink.check_server and made["runner"] is runner
    assert {name: made[name] for name in own} == own
    trainer.train()
    assert sink.pushed == [0, 1] and servers[0].weights is None

    # The other way round: batches of one's own, and weights to the server.
    compared = []
    monkeypatch.setattr("verifiers_rl.wiring.check_agreement", lambda *args: compared.append(args))
    args.overwrite_output_dir = True
    trainer = RLTrainer(make_tiny_model(), None, args, tokenizer, orchestrator=StubSource())
    trainer.train()
    assert servers[1].policy_version == 1 and servers[1].held == []
    sources, _ = what_to_send(trainer.model, trainer.weight_sync.lora_sync)
    assert sources.keys() == servers[1].weights.keys()
    assert all(torch.equal(sources[n].make(), there) for n, there in servers[1].weights.items())
    assert [(client, name) for _, client, name, *_ in compared] == [(servers[1], "base")]

    runner.weights = [1.0, 2.0]
    with pytest.raises(ConfigError, match=r"example_order decides .* weights \[1.0, 2.0\]"):
        RLTrainer(make_tiny_model(), "env", args, tokenizer, example_order=own["example_order"])


# --- The loop -------------------------------------------------------------------------------------


def test_one_batch_stays_pending_and_weights_change_only_between_batches(make_trainer):
    source = StubSource()
    trainer = make_trainer(source=source, max_off_policy_steps=1)
    sink = trainer.weight_sync
    trainer.train()
    # (step, model, version): batch k + 1 is sampled by the weights that step k starts from.
    assert source.submitted == [(0, "policy", 0), (1, "policy", 0), (2, "policy", 1)]
    assert sink.pushed == [0, 1, 3]
    assert not source.running


def test_with_more_off_policy_steps_so_many_batches_are_ahead(make_trainer):
    source = StubSource()
    trainer = make_trainer(source=source, max_off_policy_steps=3, max_steps=6)
    sink = trainer.weight_sync
    trainer.train()
    assert source.calls[:6] == ["submit 0", "get 0", "submit 1", "submit 2", "submit 3", "get 1"]
    assert source.calls[6:] == ["submit 4", "get 2", "submit 5", "get 3", "get 4", "get 5"]
    # No batch is older than three steps.
    assert [version for _, _, version in source.submitted] == [0, 0, 0, 0, 1, 2]
    assert sink.pushed == [0, 1, 2, 6]
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["staleness"] for row in logged] == [0.0, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert [row["staleness_max"] for row in logged] == [0.0, 1.0, 2.0, 3.0, 3.0, 3.0]


def test_a_lost_server_gets_all_batches_ahead_again(make_trainer):
    trainer = make_trainer(source=FragileSource(lost_in=[2]), max_off_policy_steps=2, max_steps=5)
    trainer.weight_sync = FragileSink()
    trainer.train()
    calls = [call for call in trainer.orchestrator.calls if not call.startswith("get")]
    assert calls == [
        "submit 0", "submit 1", "submit 2", "submit 3",
        "discard", "submit 2", "submit 3", "submit 4",
    ]  # fmt: skip
    assert [version for _, _, version in trainer.orchestrator.submitted] == [0, 0, 0, 1, 2, 2, 2]


def test_max_off_policy_steps_0_generates_with_the_newest_weights(make_trainer):
    source = StubSource()
    trainer = make_trainer(source=source, max_off_policy_steps=0)
    sink = trainer.weight_sync
    trainer.train()
    assert source.submitted == [(0, "policy", 0), (1, "policy", 1), (2, "policy", 2)]
    assert sink.pushed == [0, 1, 2, 3]
    assert [row["staleness"] for row in trainer.state.log_history if "staleness" in row] == [
        0.0,
        0.0,
        0.0,
    ]


def test_one_optimizer_step_a_batch_and_metrics_are_logged(make_trainer):
    steps = []

    class Count(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    trainer = make_trainer(micro_batch_size=2, trainer_options={"callbacks": [Count()]})
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    assert steps == [0, 1, 2]
    assert any(not torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    lines = Path(trainer.args.output_dir, "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    logged = [row for row in rows if "loss" in row]
    assert [row["step"] for row in logged] == [1, 2, 3]
    expected = {
        "reward",
        "grad_norm",
        "learning_rate",
        "entropy",
        "importance_ratio",
        "importance_ratio_max",
    }
    expected |= {
        "mismatch_kl",
        "clipped_share",
        "advantage_abs",
        "num_tokens",
        "num_microbatches",
        "padding_share",
        "clamped_share",
        "peak_memory_gb",
        "staleness",
        "wait_s",
        "train_s",
        "step_s",
        "tokens_per_s",
    }
    assert expected <= logged[0].keys()
    assert [row["staleness"] for row in logged] == [0.0, 1.0, 1.0]


def metric_steps(folder):
    return [
        (row["step"], name)
        for row in map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
        for name in ("loss", "eval_reward")
        if name in row
    ]


def test_the_row_of_an_evaluation_before_training_stays(make_trainer, tmp_path):
    before = {"step": 0, "eval_reward": 0.9}  # of another process
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(before) + "\n")
    trainer = make_trainer(max_steps=2)
    trainer.evaluate()
    trainer.train()
    steps = [(0, "eval_reward"), (1, "loss"), (2, "loss")]
    assert metric_steps(trainer.args.output_dir) == steps


def test_a_resumed_run_has_one_row_for_each_step(make_trainer, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make_trainer(**options).train()
    resumed = make_trainer(**options)
    resumed.evaluate()
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    steps = [(0, "eval_reward"), *((step, "loss") for step in (1, 2, 3, 4))]
    assert metric_steps(resumed.args.output_dir) == steps


def test_logged_numbers_are_means_over_the_steps_between_two_lines(make_trainer):
    def history(logging_steps):
        options = {"logging_steps": logging_steps, "overwrite_output_dir": True}
        trainer = make_trainer(max_steps=4, **options)
        trainer.train()
        return [row["entropy"] for row in trainer.state.log_history if "entropy" in row]

    each, pairs = history(1), history(2)
    assert pairs == pytest.approx([(each[0] + each[1]) / 2, (each[2] + each[3]) / 2])


def test_logged_values_by_hand(make_trainer):
    samples = make_samples(4, seed=1)
    by_length = sorted(samples, key=lambda sample: -len(sample.token_ids))
    trainer = make_trainer(max_tokens_per_microbatch=10_000)
    trainer.support = ModelSupport("padded")
    trainer._window.on_step_begin(None, None, None)
    batch_gradients(trainer, samples)
    trainer._window.on_step_end(None, None, None)
    trainer.log({"loss": 0.0})
    (row,) = trainer.state.log_history
    lengths = [len(sample.token_ids) for sample in by_length]
    assert len(set(lengths)) > 1  # some are padded
    assert row["padding_share"] == pytest.approx(1 - sum(lengths) / (4 * lengths[0]))
    sizes = [abs(a) for s in samples for a, m in zip(s.advantages, s.loss_mask, strict=True) if m]
    assert row["advantage_abs"] == pytest.approx(sum(sizes) / len(sizes))
    assert (row["num_tokens"], row["num_loss_tokens"]) == (sum(lengths), len(sizes))
    assert row["tokens_per_s"] == pytest.approx(sum(lengths) / row["step_s"])
    assert row["step_s"] >= row["train_s"] + row["wait_s"] > 0
    assert trainer.floating_point_ops({}) == model_flops(trainer.model, sum(lengths), len(sizes))


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_seconds_of_a_step_are_without_a_blocking_evaluation_and_those_of_waiting_without_the_push(
    make_trainer, monkeypatch, logging_steps
):
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds)

    class Slow(StubSource):
        def get(self):
            clock.seconds += 2.0
            return super().get()

        def end_evaluation(self):
            clock.seconds += 50.0
            return super().end_evaluation()

    class SlowSink(StubSink):
        def push(self, *args):
            clock.seconds += 3.0
            return super().push(*args)

    for module in ("trainer", "report.metrics", "evaluation"):
        monkeypatch.setattr(f"verifiers_rl.{module}.time", clock)
    trainer = make_trainer(
        source=Slow(), max_steps=4, logging_steps=logging_steps, eval_strategy="steps",
        eval_steps=1, metric_for_best_model="reward",
    )  # fmt: skip
    trainer.weight_sync = SlowSink()
    trainer.train()
    rows = [row for row in trainer.state.log_history if "step_s" in row]
    assert [row["wait_s"] for row in rows] == [2.0] * (4 // logging_steps)
    # Before the first batch one push; after that each evaluation makes the push of the next step.
    assert [row["step_s"] for row in rows] == ([5.0, 2.0, 2.0, 2.0], [3.5, 2.0])[logging_steps - 1]


def test_the_server_ends_with_the_best_weights_where_these_are_loaded(make_trainer):
    class Best(StubSource):
        def begin_evaluation(self, *args):
            self.eval_metrics = {"reward": {1: 0.9}.get(args[-1], 0.1)}
            super().begin_evaluation(*args)

    class Remembering(StubSink):
        def push(self, model, *args):
            self.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
            return super().push(model, *args)

    trainer = make_trainer(
        source=Best(),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
    )
    trainer.weight_sync = sink = Remembering()
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    best = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    for name, weight in best.items():
        assert torch.equal(sink.weights[name], weight), name
    assert torch.equal(trainer.model.lm_head.weight, best["lm_head.weight"])


@pytest.mark.parametrize("when", ["while it waits", "the step is not counted yet"])
def test_ctrl_c_saves_the_last_whole_step(make_trainer, when):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)

    class Waiting(StubSource):
        def get(self):
            if self.pending[0][0] == 2 and when == "while it waits":
                interrupt()
            return super().get()

    class BehindOptimizer(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 1 and when == "the step is not counted yet":
                interrupt()

    before = signal.getsignal(signal.SIGINT)
    trainer = make_trainer(
        source=Waiting(),
        trainer_options={"callbacks": [BehindOptimizer()]},
        save_strategy="steps",
        save_steps=100,
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    (checkpoint,) = Path(trainer.args.output_dir).glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-2"
    saved = load_file(checkpoint / "model.safetensors")
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(saved[name], parameter), name
    assert [row["step"] for row in read_metrics(metrics_file(trainer.args.output_dir))] == [1, 2]
    assert signal.getsignal(signal.SIGINT) is before
    assert not trainer.orchestrator.running


def test_an_interrupt_leaves_a_finished_checkpoint_of_its_step_alone(make_trainer):
    class AtTheEnd(StubSource):
        def get(self):
            if self.pending[0][0] == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().get()

    trainer = make_trainer(source=AtTheEnd(), save_strategy="steps", save_steps=1)
    written = []
    save = trainer.checkpoints.save

    def saving(*args, **kwargs):
        written.append(trainer.state.global_step)
        save(*args, **kwargs)

    trainer.checkpoints.save = saving
    with pytest.raises(Interrupted, match="SIGTERM"):
        trainer.train()
    assert written == [1, 2]


def test_a_server_that_is_lost_after_the_last_step_does_not_cost_the_model(make_trainer):
    class LastPushFails(StubSink):
        def push(self, model, policy_version):
            if policy_version == 3:
                raise InferenceServerError("gone")
            return super().push(model, policy_version)

    trainer = make_trainer(max_steps=3)
    trainer.weight_sync = LastPushFails()
    with pytest.raises(InferenceServerError, match="gone"):
        trainer.train()
    saved = load_file(Path(trainer.args.output_dir) / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], trainer.model.lm_head.weight)


def test_a_mismatch_of_the_first_step_is_told_whatever_is_logged_together(make_trainer, caplog):
    class OfAnotherModel(StubSource):
        def get(self):
            batch = super().get()
            for sample in batch.samples:
                sample.inference_logprobs -= 1.0
            return batch

    make_trainer(source=OfAnotherModel(), logging_steps=3).train()
    assert caplog.text.count("in the first step") == 1


def test_an_evaluation_alone_does_not_change_the_file_of_a_finished_run(make_trainer):
    make_trainer().train()
    before = metrics_file(make_trainer().args.output_dir).read_bytes()
    make_trainer().evaluate()
    assert metrics_file(make_trainer().args.output_dir).read_bytes() == before


def test_a_used_folder_is_refused_unless_it_is_overwritten_or_resumed(make_trainer, capfd):
    options = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(max_steps=2, **options).train()
    folder = make_trainer().args.output_dir
    with pytest.raises(RunFolderError, match=r"holds a run already .*overwrite_output_dir=True"):
        make_trainer(max_steps=1, **options).train()
    with pytest.raises(RunFolderError, match="already at step 2 of 2: raise max_steps"):
        make_trainer(max_steps=2, **options).train(resume_from_checkpoint=True)
    capfd.readouterr()
    make_trainer(max_steps=3, **options).train(resume_from_checkpoint=True)
    assert f"resuming from {folder}/checkpoint-2" in capfd.readouterr().out
    assert (Path(folder) / "checkpoint-3").is_dir()
    make_trainer(max_steps=1, overwrite_output_dir=True, **options).train()
    assert [path.name for path in Path(folder).glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.parametrize("use_lora", [False, True])
def test_training_ends_with_the_final_model_saved_and_how_to_serve_it(
    make_trainer, tmp_path, capfd, use_lora
):
    make_tiny_model().save_pretrained(tmp_path / "base")
    trainer = make_trainer(str(tmp_path / "base"), use_lora=use_lora)
    trainer.train()
    folder = Path(trainer.args.output_dir)
    if use_lora:
        saved = load_file(folder / "adapter_model.safetensors")
        name = next(name for name in saved if "lora_B" in name)
        parameter = trainer.model.get_parameter(name.replace(".weight", ".default.weight"))
    else:
        saved, name = load_file(folder / "model.safetensors"), "lm_head.weight"
        parameter = trainer.model.lm_head.weight
    assert parameter.any() and torch.equal(saved[name], parameter)
    lines = capfd.readouterr().out.strip().splitlines()
    assert lines[-1] == f"{'adapter' if use_lora else 'model'}: {folder}"


def test_a_custom_loss_replaces_cispo(make_trainer):
    calls = []

    def doubled(inputs: LossInputs) -> LossOutputs:
        calls.append(len(inputs.trainer_logprobs))
        outputs = cispo(inputs)
        return LossOutputs(2 * outputs.loss, {"my_metric": torch.full_like(inputs.advantages, 7.0)})

    samples = make_samples(4)
    loss, _ = batch_gradients(make_trainer(), samples)
    trainer = make_trainer(loss_fn=doubled)
    twice, _ = batch_gradients(trainer, samples)
    assert math.isclose(twice, 2 * loss, rel_tol=1e-6)
    assert sum(calls) == sum(s.num_loss_tokens for s in samples)
    assert trainer._window.steps[0]["my_metric"] == pytest.approx(7.0)


def test_a_custom_loss_reads_the_extras_that_were_given_to_the_samples(make_trainer):
    def weighed(inputs: LossInputs) -> LossOutputs:
        return cispo(replace(inputs, advantages=inputs.advantages * inputs.extras["factor"]))

    samples = make_samples(4)
    loss, _ = batch_gradients(make_trainer(), samples)
    for sample in samples:
        sample.extras["factor"] = np.full(len(sample.token_ids), 2, np.float32)
    twice, _ = batch_gradients(make_trainer(loss_fn=weighed), samples)
    assert math.isclose(twice, 2 * loss, rel_tol=1e-6)


def test_a_resumed_run_says_which_changed_options_do_not_reach_its_optimizer(make_trainer, caplog):
    options = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(max_steps=2, **options).train()
    changed = {"learning_rate": 0.5, "adam_beta2": 0.95, "lr_scheduler_type": "linear"}
    resumed = make_trainer(max_steps=3, **options, **changed)
    resumed.train(resume_from_checkpoint=True)
    (group, *_) = resumed.optimizer.param_groups
    assert group["initial_lr"] == 1e-2 and group["betas"][1] == 0.999
    said = [text for text in caplog.messages if "a resumed run goes on with its optimizer" in text]
    assert [text.split(":")[0] for text in said] == ["learning_rate=0.5", "adam_beta2=0.95"]
    assert "so learning_rate stays 0.01. To change it, begin a new run" in said[0]


def test_resume_continues_with_the_same_weights_and_the_next_examples(
    make_trainer, tmp_path, caplog
):
    straight = make_trainer(max_steps=4, output_dir=str(tmp_path / "a"))
    straight.train()
    options = {
        "max_steps": 4,
        "output_dir": str(tmp_path / "b"),
        "save_strategy": "steps",
        "save_steps": 2,
    }

    class StopAfterTwo(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    # Off-policy by one, a resumed run samples its first batch with newer weights than the unbroken
    # one; the stub's batches do not depend on weights, so the weights must agree.
    make_trainer(**options, trainer_options={"callbacks": [StopAfterTwo()]}).train()
    source = StubSource()
    resumed = make_trainer(**options, source=source)
    resumed.train(resume_from_checkpoint=True)
    assert "a resumed run" not in caplog.text
    assert [(step, version) for step, _, version in source.submitted] == [(2, 2), (3, 2)]
    for (name, expected), actual in zip(
        straight.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7, msg=name)


def test_a_kl_target_moves_the_weight_of_the_penalty_and_a_resumed_run_goes_on_with_it(
    make_trainer, tmp_path
):
    kl = {"use_lora": True, "lora_rank": 2, "kl_beta": 0.5, "kl_target": 1e-3, "max_steps": 6}

    def rows(trainer):
        return [row for row in trainer.state.log_history if "kl_beta" in row]

    straight = make_trainer(**kl, output_dir=str(tmp_path / "a"))
    straight.train()
    found = rows(straight)
    assert found[0]["reference_kl"] == 0 < found[-1]["reference_kl"]
    expected = 0.5
    for row in found:
        assert row["kl_beta"] == pytest.approx(expected, rel=1e-6)
        error = min(max(row["reference_kl"] / 1e-3 - 1, -0.2), 0.2)
        expected *= 1 + 0.1 * error
    assert found[1]["kl_beta"] == pytest.approx(0.49)  # at the start the KL is 0
    fixed = make_trainer(**{**kl, "kl_target": None}, output_dir=str(tmp_path / "b"))
    fixed.train()
    assert not rows(fixed)

    saved = {"output_dir": str(tmp_path / "c"), "save_strategy": "steps", "save_steps": 3}
    make_trainer(**kl, **saved).train()
    resumed = make_trainer(**{**kl, "kl_beta": 9.0}, **saved)  # the checkpoint's counts
    resumed.train(resume_from_checkpoint=f"{tmp_path}/c/checkpoint-3")
    assert [row["step"] for row in rows(resumed)][-3:] == [4, 5, 6]
    for row, same in zip(rows(resumed)[-3:], found[3:], strict=True):
        assert row["kl_beta"] == same["kl_beta"] and row["loss"] == pytest.approx(same["loss"])


def eval_rows(trainer):
    return [
        (row["step"], row["eval_reward"])
        for row in trainer.state.log_history
        if "eval_reward" in row
    ]


def test_an_evaluation_runs_beside_the_next_step_and_is_logged_at_its_own(make_trainer):
    seen = []

    class Told(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            seen.append((state.global_step, metrics["eval_reward"]))

    class Versioned(StubSource):
        def end_evaluation(self):
            self.eval_metrics = {"reward": float(self.evaluates)}
            return super().end_evaluation()

    source = Versioned()
    trainer = make_trainer(
        source=source, eval_strategy="steps", eval_steps=2, eval_on_start=True, max_steps=5,
        trainer_options={"callbacks": [Told()]},
    )  # fmt: skip
    sink = trainer.weight_sync
    trainer.train()
    # Each begins behind the push that the next step makes anyway, and ends before the push after.
    assert source.calls == [
        "evaluate 0", "submit 0", "get 0", "submit 1", "get 1", "evaluated 0", "submit 2",
        "get 2", "evaluate 2", "submit 3", "get 3", "evaluated 2", "submit 4",
        "get 4", "evaluate 4", "evaluated 4", "evaluate 5", "evaluated 5",
    ]  # fmt: skip
    assert sink.pushed == [0, 1, 2, 3, 4, 5]
    # Trainer also evaluates behind the last step. The server then has the final weights.
    assert eval_rows(trainer) == seen == [(0, 0.0), (2, 2.0), (4, 4.0), (5, 5.0)]
    rows = metric_steps(trainer.args.output_dir)
    assert [row for row in rows if row[1] == "eval_reward"] == [
        (step, "eval_reward") for step in (0, 2, 4, 5)
    ]
    assert trainer.state.global_step == 5


def test_an_evaluation_makes_no_push_that_would_not_be_made(make_trainer):
    def pushed(**options):
        trainer = make_trainer(max_steps=6, overwrite_output_dir=True, **options)
        sink = trainer.weight_sync
        trainer.train()
        return sink.pushed

    for ahead in (0, 1, 2):
        plain = pushed(max_off_policy_steps=ahead)
        evaluated = pushed(max_off_policy_steps=ahead, eval_strategy="steps", eval_steps=2)
        assert set(evaluated) - set(plain) <= {4}  # where no batch is requested any more
        assert len(evaluated) == len(set(evaluated))


def test_the_last_evaluation_is_awaited_and_logged_before_files_are_closed(make_trainer):
    order = []

    class Closing(TrainerCallback):
        def on_evaluate(self, *args, **kwargs):
            order.append("evaluated")

        def on_train_end(self, *args, **kwargs):
            order.append("closed")

    trainer = make_trainer(
        eval_strategy="steps", eval_steps=3, trainer_options={"callbacks": [Closing()]}
    )
    trainer.train()
    assert order == ["evaluated", "closed"]
    assert eval_rows(trainer) == [(3, 0.5)] and trainer.orchestrator.calls[-1] == "evaluated 3"
    saved = metric_steps(trainer.args.output_dir)
    assert (3, "eval_reward") in saved


@pytest.mark.parametrize(
    "options",
    [
        {"metric_for_best_model": "reward"},
        {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2},
        {"save_strategy": "best"},
    ],
)
def test_an_evaluation_that_decides_over_checkpoints_is_awaited_at_once(make_trainer, options):
    source = StubSource()
    trainer = make_trainer(source=source, eval_strategy="steps", eval_steps=2, **options)
    trainer.train()
    assert source.calls[:8] == [
        "submit 0", "get 0", "submit 1", "get 1", "submit 2",
        "wait", "evaluate 2", "evaluated 2",
    ]  # fmt: skip
    assert trainer.state.best_metric == 0.5 and eval_rows(trainer)[0] == (2, 0.5)


def test_evaluate_called_in_training_gives_its_metrics_at_once(make_trainer):
    got = []
    trainer = make_trainer(
        eval_strategy="steps", eval_steps=1, max_steps=3,
        trainer_options={"callbacks": [AtStepEnd(lambda: got.append(trainer.evaluate()))]},
    )  # fmt: skip
    trainer.train()
    assert [metrics["eval_reward"] for metrics in got] == [0.5] * 3
    steps = [step for step, _ in eval_rows(trainer)]
    assert sorted(set(steps)) == [1, 2, 3]


def test_an_error_of_a_running_evaluation_interrupts_the_step(make_trainer):
    class Failing(StubSource):
        def raise_if_failed(self):
            if self.evaluates is not None:
                raise ValueError("the evaluation broke")

    with pytest.raises(ValueError, match="the evaluation broke"):
        make_trainer(source=Failing(), eval_strategy="steps", eval_steps=1).train()


def test_what_the_orchestrator_needs_to_continue_is_in_the_checkpoint(make_trainer):
    class Remembering(StubSource):
        loaded = None

        def state_dict(self, step):
            return {"untrained": [step, 7]}

        def load_state_dict(self, state):
            self.loaded = state

    options = {"save_strategy": "steps", "save_steps": 1}
    first = Remembering()
    make_trainer(source=first, max_steps=2, **options).train()
    assert first.loaded is None
    again = Remembering()
    make_trainer(source=again, max_steps=3, **options).train(resume_from_checkpoint=True)
    assert again.loaded == {"untrained": [2, 7]}
    nothing_saved = StubSource()
    make_trainer(source=nothing_saved, max_steps=4, **options).train(resume_from_checkpoint=True)


def test_evaluate_works_before_and_after_training(make_trainer):
    trainer = make_trainer()
    assert trainer.evaluate()["eval_reward"] == 0.5
    trainer.train()
    assert trainer.evaluate()["eval_reward"] == 0.5
    assert not trainer.orchestrator.running


def test_an_error_in_the_thread_stops_training_and_the_thread(make_trainer):
    class Failing(StubSource):
        def get(self):
            raise ValueError("the environment broke")

    source = Failing()
    with pytest.raises(ValueError, match="the environment broke"):
        make_trainer(source=source).train()
    assert not source.running


def test_an_error_in_mid_step_leaves_a_checkpoint_of_the_steps_before(make_trainer):
    class FailsLater(StubSource):
        def raise_if_failed(self):
            if self.submitted[-1][0] == 2:
                raise ValueError("the next batch broke")

    trainer = make_trainer(source=FailsLater(), save_strategy="steps", save_steps=100)
    with pytest.raises(ValueError, match="the next batch broke"):
        trainer.train()
    assert [path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")] == [
        "checkpoint-1"
    ]


def test_a_full_disk_costs_the_checkpoint_and_does_not_hide_why_the_run_ends(
    make_trainer, monkeypatch, caplog
):
    class Failing(StubSource):
        def raise_if_failed(self):
            if self.submitted[-1][0] == 2:
                raise ValueError("the next batch broke")

    trainer = make_trainer(source=Failing(), save_strategy="steps", save_steps=100)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.checkpoints, "save", full)
    with pytest.raises(ValueError, match="the next batch broke"):
        trainer.train()
    assert "no checkpoint of the steps so far: [Errno 28] No space left" in caplog.text


class FragileSource(StubSource):
    """Its server is lost in `get` of these steps, as often as they are listed."""

    def __init__(self, lost_in):
        super().__init__()
        self.lost_in = lost_in

    def get(self):
        if self.pending[0][0] in self.lost_in:
            self.lost_in.remove(self.pending[0][0])
            raise ServerLostError("no answer from the inference server")
        return super().get()


class FragileSink(StubSink):
    """Its server is lost in the pushes of these versions; `comes_back` or not."""

    def __init__(self, lost_in=(), comes_back=True):
        super().__init__()
        self.lost_in, self.comes_back = list(lost_in), comes_back
        self.waits = 0

    def push(self, model, policy_version):
        if policy_version in self.lost_in:
            self.lost_in.remove(policy_version)
            self.policy_version = None
            raise ServerLostError("no answer from the inference server")
        return super().push(model, policy_version)

    def wait_for_server(self):
        super().wait_for_server()
        self.waits += 1
        if not self.comes_back:
            raise InferenceServerError("no server after 1 s (vllm_server_timeout)")


def test_a_server_lost_while_generating_gets_its_weights_and_the_batch_again(make_trainer):
    trainer = make_trainer(source=FragileSource(lost_in=[1, 1]), max_steps=3)
    trainer.weight_sync = FragileSink()
    trainer.train()
    assert trainer.state.global_step == 3 and trainer.weight_sync.waits == 2
    # Step 1's batch was asked for with version 0, and twice again with the weights of then, 1.
    assert [(s, v) for s, _, v in trainer.orchestrator.submitted] == [
        (0, 0),
        (1, 0),
        (1, 1),
        (1, 1),
        (2, 1),
    ]
    assert trainer.weight_sync.pushed == [0, 1, 1, 3]


def test_a_server_lost_in_a_push_costs_no_batch(make_trainer):
    trainer = make_trainer(max_steps=3)
    trainer.weight_sync = FragileSink(lost_in=[1, 3])  # 3: the last push, after the last step
    trainer.train()
    assert trainer.state.global_step == 3 and trainer.weight_sync.waits == 2
    assert [step for step, _, _ in trainer.orchestrator.submitted] == [0, 1, 2]
    assert trainer.weight_sync.pushed[-1] == 3


@pytest.mark.parametrize(
    ("options", "steps"), [({}, [3, 4, 5]), ({"metric_for_best_model": "reward"}, [2, 4, 5])]
)
def test_an_evaluation_in_which_the_server_is_lost_begins_again(make_trainer, options, steps):
    class Fragile(StubSource):
        lost = 1

        def end_evaluation(self):
            if self.lost:
                self.lost -= 1
                raise ServerLostError("no answer")
            return super().end_evaluation()

    trainer = make_trainer(
        source=Fragile(), eval_strategy="steps", eval_steps=2, max_steps=5, **options
    )
    trainer.weight_sync = FragileSink()
    trainer.train()
    assert trainer.weight_sync.waits == 1
    # The server had lost the weights of step 2 when step 3 was done.
    rows = [row["step"] for row in trainer.state.log_history if "eval_reward" in row]
    assert rows == steps
    assert trainer.orchestrator.calls.count("discard") == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_an_evaluation_that_fails_ends_training_with_a_checkpoint(make_trainer, tmp_path, at_once):
    class Failing(StubSource):
        def end_evaluation(self):
            raise InferenceServerError("all of its rollouts failed")

    options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 5, "save_steps": 100}
    options |= {"metric_for_best_model": "reward"} if at_once else {}
    trainer = make_trainer(source=Failing(), save_strategy="steps", **options)
    with pytest.raises(InferenceServerError, match="all of its rollouts failed"):
        trainer.train()
    assert (tmp_path / "run" / f"checkpoint-{2 if at_once else 3}").is_dir()


def test_several_gpus_in_one_process_are_refused(make_trainer, monkeypatch):
    monkeypatch.setattr(RLConfig, "n_gpu", 2)
    with pytest.raises(ConfigError, match=r"2 GPUs are visible to one process.*accelerate launch"):
        make_trainer()


@pytest.mark.parametrize("save_strategy", ["steps", "no"])
def test_a_server_that_stays_away_ends_training_with_a_checkpoint(
    make_trainer, tmp_path, save_strategy
):
    options = {"max_steps": 4, "save_strategy": save_strategy, "save_steps": 100}
    trainer = make_trainer(source=FragileSource(lost_in=[2]), **options)
    trainer.weight_sync = FragileSink(comes_back=False)
    with pytest.raises(InferenceServerError, match="vllm_server_timeout"):
        trainer.train()
    weights = trainer.model.lm_head.weight.clone()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert checkpoint.is_dir() == (save_strategy == "steps")
    if checkpoint.is_dir():
        resumed = make_trainer(**options)
        steps = []
        resumed.add_callback(AtFirstStep(lambda m: steps.append(m.lm_head.weight.clone())))
        resumed.train(resume_from_checkpoint=True)
        assert torch.equal(steps[0], weights)
        assert resumed.orchestrator.submitted[0][0] == 2


def test_a_server_lost_again_and_again_ends_training(make_trainer):
    trainer = make_trainer(source=FragileSource(lost_in=[1] * 9))
    trainer.weight_sync = FragileSink()
    with pytest.raises(ServerLostError):
        trainer.train()
    assert trainer.weight_sync.waits == 2


class AtStepEnd(TrainerCallback):
    def __init__(self, look):
        self.look = look

    def on_step_end(self, *args, **kwargs):
        self.look()


class AtFirstStep(TrainerCallback):
    def __init__(self, look):
        self.look = look

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.look(model)


def test_the_progress_bar_shows_the_reward(make_trainer):
    postfixes = []
    trainer = make_trainer(disable_tqdm=False)
    (progress,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, ShortProgress)]

    class Spy(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            postfixes.append(progress.training_bar.postfix)

    trainer.add_callback(Spy())
    trainer.train()
    assert postfixes == [None, "reward=0.250", "reward=0.250"]


# --- The model ------------------------------------------------------------------------------------


def test_lora_options_reach_the_adapter(make_trainer):
    trainer = make_trainer(
        use_lora=True,
        lora_rank=4,
        lora_alpha=8,
        lora_dropout=0.25,
        lora_target_modules=["q_proj"],
        lora_modules_to_save=["lm_head"],
        lora_use_rslora=True,
    )
    config = trainer.model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout, config.use_rslora) == (
        4,
        8,
        0.25,
        True,
    )
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert trained and all(
        "q_proj.lora_" in name or "lm_head.modules_to_save" in name for name in trained
    )
    layer = trainer._base_of(trainer.model).model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == 8 / math.sqrt(4)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # of peft
@pytest.mark.parametrize(
    "options",
    [
        {"lora_modules_to_save": ["embed_tokens"]},
        {"lora_target_modules": ["q_proj", "embed_tokens"]},
        {"lora_target_modules": ["q_proj", "lm_head"]},
    ],
)
def test_an_adapter_that_unties_embedding_and_head_is_refused(make_trainer, options):
    with pytest.raises(ConfigError, match="this model uses one weight for both"):
        make_trainer(make_tiny_model(tie_word_embeddings=True), use_lora=True, **options)
    make_trainer(make_tiny_model(), use_lora=True, **options)


def test_a_peft_config_replaces_the_options(make_trainer):
    config = LoraConfig(r=2, target_modules=["v_proj"])
    trainer = make_trainer(use_lora=False, trainer_options={"peft_config": config})
    assert trainer.model.peft_config["default"].r == 2


@pytest.mark.parametrize(
    ("use_lora", "bf16", "expected"),
    [(False, True, torch.float32), (True, True, torch.bfloat16), (True, False, torch.float32)],
)
def test_full_finetuning_keeps_float32_masters(
    make_trainer, tokenizer, tmp_path, use_lora, bf16, expected
):
    folder = tmp_path / "model"
    make_tiny_model().save_pretrained(folder)
    trainer = make_trainer(str(folder), use_lora=use_lora, bf16=bf16)
    assert trainer._base_of(trainer.model).model.norm.weight.dtype == expected
    trained = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    assert trained == {torch.float32}
    trainer.train()


def test_a_model_in_half_precision_becomes_float32_masters(make_trainer, caplog):
    trainer = make_trainer(make_tiny_model().bfloat16(), use_lora=False)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert "float32 masters" in caplog.text


def test_with_deepspeed_a_second_train_is_refused(make_trainer):
    trainer = make_trainer()
    trainer.is_deepspeed_enabled, trainer.model_wrapped = True, torch.nn.Module()
    with pytest.raises(RuntimeError, match=r"train\(\) works once per RLTrainer"):
        trainer.train()


def test_the_seed_decides_over_a_new_adapter(make_trainer):
    def adapter(seed):
        model = make_trainer(use_lora=True, seed=seed).model
        return torch.cat([p.flatten() for n, p in model.named_parameters() if "lora_A" in n])

    assert torch.equal(adapter(1), adapter(1))
    assert not torch.equal(adapter(1), adapter(2))


# --- What a loss may ask for --------------------------------------------------------------------


def test_what_a_loss_needs_is_computed_only_for_it(make_trainer):
    seen = {}

    def plain(inputs):
        seen["plain"] = (inputs.entropy.requires_grad, inputs.reference_logprobs)
        return cispo(inputs)

    @needs("entropy_gradient", "reference_logprobs")
    def needy(inputs):
        seen["needy"] = (inputs.entropy.requires_grad, inputs.reference_logprobs)
        away = inputs.trainer_logprobs - inputs.reference_logprobs
        return LossOutputs((inputs.weights * (away.square() - inputs.entropy)).sum())

    assert make_trainer(loss_fn=plain)._reference is None
    batch_gradients(make_trainer(loss_fn=plain), make_samples(4))
    assert seen["plain"] == (False, None)
    trainer = make_trainer(loss_fn=needy)
    loss, _ = batch_gradients(trainer, make_samples(4))
    has_gradient, reference = seen["needy"]
    assert has_gradient and not reference.requires_grad
    # Before any step the policy is its reference: what is left is the entropy.
    assert loss == pytest.approx(-trainer._window.steps[0]["entropy"], rel=1e-5)
    # With LoRA the reference is the model under its adapter, and nothing is copied.
    assert make_trainer(loss_fn=needy, use_lora=True, lora_rank=4)._reference is None


def test_a_microbatch_without_loss_tokens_adds_nothing_whatever_the_loss_makes_of_it(make_trainer):
    def divided_by_a_spread(inputs):  # NaN for one token
        logprobs = inputs.trainer_logprobs
        loss = (inputs.weights * inputs.advantages * logprobs).sum() / logprobs.detach().std(
            correction=0
        )
        return LossOutputs(loss)

    trainer = make_trainer(loss_fn=divided_by_a_spread)
    trainer.support, means = ModelSupport(), TokenMeans()
    # What a rank gets that has no samples left.
    loss = trainer.microbatch_loss(trainer.model, collate({}, [], [], pad_token_id=0), means)
    loss.backward()
    assert loss.item() == 0.0
    grads = [p.grad for p in trainer.model.parameters() if p.requires_grad]
    assert all(grad is not None and not grad.any() for grad in grads)
    assert set(means.reduce(1, 1).values()) == {0.0}


def test_the_option_of_attention_reaches_the_step(make_trainer, tmp_path):
    folder = tmp_path / "model"
    make_tiny_model().save_pretrained(folder)
    for model in (str(folder), make_tiny_model()):
        trainer = make_trainer(model, attn_implementation="eager")
        assert trainer.model.config._attn_implementation == "eager"
        batch_gradients(trainer, make_samples(4))
    with pytest.raises(ConfigError, match=r"attn_implementation='flash': "):
        make_trainer(attn_implementation="flash")


@pytest.mark.parametrize("use_lora", [False, True])
def test_the_head_multiplies_in_the_dtype_that_is_set(make_trainer, monkeypatch, use_lora):
    seen, real = [], logprobs.token_logprobs_and_entropy

    def recorded(logits, *args, **kwargs):
        seen.append(logits.dtype)
        return real(logits, *args, **kwargs)

    monkeypatch.setattr(logprobs, "token_logprobs_and_entropy", recorded)
    for head_dtype, expected in (("model", torch.bfloat16), ("float32", torch.float32)):
        trainer = make_trainer(bf16=True, use_lora=use_lora, head_dtype=head_dtype)
        batch_gradients(trainer, make_samples(4))
        assert set(seen) == {expected}
        seen.clear()


# --- What is logged -----------------------------------------------------------------------------


def test_every_logged_metric_is_documented(make_trainer):
    table = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `([\w@/]+)`", table, re.MULTILINE))
    logged = set(batch_metrics([[Rollout(0, "", reward=1.0)]]))
    for loss in ("cispo", "icepop"):
        options = {"kl_beta": 0.1, "entropy_beta": 0.1, "overwrite_output_dir": True}
        trainer = make_trainer(loss=loss, max_steps=1, **options)
        trainer.train()
        logged |= {name for row in trainer.state.log_history for name in row}
    logged = {re.sub(r"^masked_share/.*", "masked_share/NAME", name) for name in logged}
    own = {name for name in logged if not name.startswith("train_")} - {
        "step",
        "epoch",
        "total_flos",
    }
    assert {"loss", "grad_norm", "reference_kl", "masked_share", "clipped_share", "sync_s"} < own
    assert "masked_share/NAME" in own
    # From the real server and its orchestrator, and of a GPU.
    own |= {"sync_bytes", "generation_s", "num_samples", "filtered_share", "mfu"}
    assert own <= documented, own - documented
