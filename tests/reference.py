"""The training step in plain float64: whole sequences one by one, full logits, no packing."""

import copy
import math
import random
from collections import Counter

import pytest
import torch
from peft import PeftModel, get_peft_model

from tests.helpers import StubSource
from verifiers_rl.losses import LossInputs
from verifiers_rl.types import Batch

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
MASK_OPTIONS = {
    "ipo": {"max_divergence": 0.0015},
    "sequence_mean": {"min_ratio": 0.95, "max_ratio": 1.1},
}


def reference_policy(model, token_ids, temperature):
    """log softmax after each token, (T, vocabulary) float64."""
    logits = model(input_ids=torch.tensor(token_ids)[None]).logits[0].double()
    return torch.log_softmax(logits / temperature, -1)


def reference_inputs(model, samples, args, start):
    """What the loss function gets of a batch, from loops over whole sequences. Weights are divided
    by the denominator of the batch's loss. `start` is the model that training started from.
    """
    # Of each rollout; a sample that knows of none is one.
    keys = [s.rollout_id if s.rollout_id >= 0 else -1 - i for i, s in enumerate(samples)]
    loss_tokens, rows = Counter(), []
    for key, sample in zip(keys, samples, strict=True):
        loss_tokens[key] += sum(sample.loss_mask)
    denominator = {
        "token": loss_tokens.total(),
        "sequence": sum(number > 0 for number in loss_tokens.values()),
        "constant": args.batch_size * args.max_seq_len,
    }[args.loss_normalization]
    for number, (key, sample) in enumerate(zip(keys, samples, strict=True)):
        policy = reference_policy(model, sample.token_ids, args.temperature)
        at_start = reference_policy(start, sample.token_ids, args.temperature).detach()
        for t in sample.loss_mask.nonzero()[0]:
            weight = 1 / loss_tokens[key] if args.loss_normalization == "sequence" else 1.0
            before, token = policy[t - 1], sample.token_ids[t]
            entropy, sampled = -(before.exp() * before).sum(), sample.inference_logprobs[t]
            sampled = before[token].item() if math.isnan(sampled) else sampled
            row = before[token], sampled, sample.advantages[t], weight / denominator, number
            rows.append((*row, entropy, at_start[t - 1, token]))
    columns = zip(*rows, strict=True)
    columns = [torch.stack([torch.as_tensor(v).double() for v in values]) for values in columns]
    columns[4] = columns[4].long()
    return LossInputs(*columns)


# --- A trainer against it -------------------------------------------------------------------------


def batch_gradients(trainer, samples):
    """Loss, gradients and metrics of one batch through RLTrainer.training_step."""
    trainer.orchestrator = source = StubSource()
    source.get = lambda: Batch(0, 0, samples)
    source.start()
    trainer.model.zero_grad()
    trainer.state.max_steps = 1
    trainer._window.steps.clear()
    loss = trainer.training_step(trainer.model, {})
    grads = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.item(), grads, trainer._window.steps[0]


def with_logprobs_near(model, samples, temperature, seed=0):
    """The samples as if a slightly different policy had sampled them: ratios around 1."""
    rng, model = random.Random(seed), copy.deepcopy(model).double()
    for sample in samples:
        policy = reference_policy(model, sample.token_ids, temperature)
        for t in sample.loss_mask.nonzero()[0]:
            here = policy[t - 1, sample.token_ids[t]].item()
            sample.inference_logprobs[t] = here + rng.uniform(-0.5, 0.5)
    return samples


@torch.no_grad()
def move_away(trainer):
    """Change the model; a fresh one is what training started from."""
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        elif name == "lm_head.weight":
            parameter.mul_(1.2)


def switch_checkpointing_on(trainer):
    """Do as train() does."""
    base = trainer._base_of(trainer.model)
    # Its name from transformers 5.18 on, and before.
    on = getattr(base, "activation_checkpointing_enable", None)
    (on or base.gradient_checkpointing_enable)()
    base.enable_input_require_grads()


def check_against_reference(trainer, make_model, samples):
    """Loss and gradients of a step against a model in float64 that computes sample after sample, to
    1e-5 of the largest gradient. The loss function is the run's own: test_losses.py has its value
    and its gradient worked out by hand.

    Args:
        make_model: makes the model that training started from.

    Returns:
        the step's metrics.
    """
    loss, grads, row = batch_gradients(trainer, samples)
    reference, start, args = make_model().double(), make_model().double(), trainer.args
    if isinstance(trainer.model, PeftModel):
        reference = get_peft_model(reference, trainer.model.peft_config["default"]).double()
    reference.load_state_dict(trainer.model.state_dict())
    inputs = reference_inputs(reference, samples, args, start)
    total = args.complete_loss(None)(inputs).loss
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5, abs=1e-7)
    log_ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).detach()
    ratio = log_ratio.exp()
    means = {"entropy": inputs.entropy, "importance_ratio": ratio}
    means["mismatch_kl"] = ratio - 1 - log_ratio
    for name, values in means.items():
        assert row[name] == pytest.approx(values.mean().item(), rel=1e-5), name
    assert row["importance_ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-5)
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    largest = max(grad.abs().max().item() for grad in expected.values())
    assert largest > 0
    grads = {name: grad.double() for name, grad in grads.items()}
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-5 * largest)
    return row
