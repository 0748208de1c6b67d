"""The training step in plain float64 loops: whole sequences one by one, full logits, no packing."""

import copy
import math
import random

import pytest
import torch
from peft import PeftModel, get_peft_model

from tests.helpers import StubSource
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
    "ratio": {"min_ratio": 0.8, "max_ratio": 1.3},
    "ppo": {"eps_low": 0.3, "eps_high": 0.1},
    "ipo": {"max_divergence": 0.0015},
    "dppo": {"max_divergence": 0.0015},
    "sequence_mean": {"min_ratio": 0.95, "max_ratio": 1.1},
    "sequence_product": {"min_ratio": 0.8, "max_ratio": 1.5},
}


def reference_policy(model, token_ids, temperature):
    """log softmax after each token, (T, vocabulary) float64."""
    logits = model(input_ids=torch.tensor(token_ids)[None]).logits[0].double()
    return torch.log_softmax(logits / temperature, -1)


def token_loss(name, logprob, sampled, advantage, options, sequence_ratio):
    """What one token adds; `logprob` carries the gradient, `sampled` is the server's."""
    options = {"eps_high": 1.0, **options} if name == "truncated_is" else options
    ratio = (logprob - sampled).exp()
    plain = math.exp(logprob.item() - sampled)
    if name == "reinforce":
        return -advantage * logprob
    if name in ("cispo", "truncated_is"):
        return -min(plain, 1 + options["eps_high"]) * advantage * logprob
    if name == "icepop":
        inside = options["min_ratio"] <= plain <= options["max_ratio"]
        return -plain * advantage * logprob if inside else 0.0 * logprob
    if name == "dppo":
        moved = abs(math.exp(logprob.item()) - math.exp(sampled))
        away = (plain > 1) if advantage > 0 else (plain < 1)
        return 0.0 * logprob if away and moved > options["max_divergence"] else -ratio * advantage
    if name == "gspo":
        ratio = sequence_ratio
    low, high = 1 - options["eps_low"], 1 + options["eps_high"]
    if advantage >= 0:
        return -advantage * (ratio if ratio.item() < high else torch.tensor(high))
    return -advantage * (ratio if ratio.item() > low else torch.tensor(low))


def is_masked(masks, probability, sampled, advantage, of_sample):
    """Whether a token gets no gradient under these masks.

    Args:
        masks: as `RLConfig.gradient_masks`.
        probability, sampled: of the token, under the trainer's policy and the server's.
        of_sample: the ratios of all loss tokens of its sample.
    """
    ratio, moved = probability / sampled, abs(probability - sampled)
    product = math.prod(of_sample)
    found = False
    for name, bounds in masks.items():
        if name in ("ratio", "sequence_mean", "sequence_product"):
            mean = product ** (1 / len(of_sample))
            value = {"ratio": ratio, "sequence_mean": mean, "sequence_product": product}[name]
            found |= not bounds["min_ratio"] <= value <= bounds["max_ratio"]
        elif name == "ipo":
            found |= moved > bounds["max_divergence"]
        elif name == "dppo":
            away = ratio > 1 if advantage > 0 else ratio < 1
            found |= advantage != 0 and away and moved > bounds["max_divergence"]
        else:
            assert name == "ppo"
            found |= advantage > 0 and ratio > 1 + bounds["eps_high"]
            found |= advantage < 0 and ratio < 1 - bounds["eps_low"]
    return found


def reference_loss(
    model, samples, temperature, name, options, normalization, constant, kl_beta, start,
    entropy_beta, masks,
):  # fmt: skip
    """The loss of a batch. `start` is the model that training started from."""
    total, num_tokens = 0.0, 0
    # Of each rollout; a sample that knows of none is one.
    keys = [s.rollout_id if s.rollout_id >= 0 else -1 - i for i, s in enumerate(samples)]
    loss_tokens = dict.fromkeys(keys, 0)
    for key, sample in zip(keys, samples, strict=True):
        loss_tokens[key] += sum(sample.loss_mask)
    num_rollouts = sum(number > 0 for number in loss_tokens.values())
    for key, sample in zip(keys, samples, strict=True):
        policy = reference_policy(model, sample.token_ids, temperature)
        places = [t for t in range(1, len(sample.token_ids)) if sample.loss_mask[t]]
        logprobs = [policy[t - 1, sample.token_ids[t]] for t in places]
        sampled = sample.inference_logprobs[places].tolist()
        advantages = sample.advantages.tolist()
        if not places:
            continue
        differences = [p - q for p, q in zip(logprobs, sampled, strict=True)]
        sequence_ratio = torch.stack(differences).mean().exp()
        weight = 1 / loss_tokens[key] if normalization == "sequence" else 1.0
        ratios = [math.exp(difference.item()) for difference in differences]
        for t, p, q in zip(places, logprobs, sampled, strict=True):
            loss = token_loss(name, p, q, advantages[t], options, sequence_ratio)
            if is_masked(masks, math.exp(p.item()), math.exp(q), advantages[t], ratios):
                loss = 0.0 * loss
            if kl_beta:
                with torch.no_grad():
                    at_start = reference_policy(start, sample.token_ids, temperature)
                d = (at_start[t - 1, sample.token_ids[t]] - p).exp()
                loss = loss + kl_beta * (d - 1 - d.log())
            if entropy_beta:
                before = policy[t - 1]
                loss = loss + entropy_beta * (before.exp() * before).sum()
            total = total + weight * loss
        num_tokens += len(places)
    denominators = {"token": num_tokens, "sequence": num_rollouts, "constant": constant}
    return total / denominators[normalization]


@torch.no_grad()
def reference_means(model, samples, temperature):
    """Of a batch's loss tokens: mean entropy, mean and largest ratio r to the server's probability,
    and mismatch_kl, the mean of r - 1 - log r.
    """
    entropies, ratios = [], []
    for sample in samples:
        policy = reference_policy(model, sample.token_ids, temperature)
        for t in range(1, len(sample.token_ids)):
            if sample.loss_mask[t]:
                before = policy[t - 1]
                entropies.append(-sum(p.exp() * p for p in before).item())
                sampled = float(sample.inference_logprobs[t])
                ratio = math.exp(before[sample.token_ids[t]].item() - sampled)
                ratios.append(ratio)
    kls = [ratio - 1 - math.log(ratio) for ratio in ratios]
    found = {"entropy": entropies, "importance_ratio": ratios, "mismatch_kl": kls}
    means = {name: sum(values) / len(values) for name, values in found.items()}
    return means | {"importance_ratio_max": max(ratios)}


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


def with_logprobs_near(model, samples, temperature):
    """The samples as if a slightly different policy had sampled them: ratios around 1."""
    rng, model = random.Random(0), copy.deepcopy(model).double()
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
    """Loss and gradients of a step against the float64 loops, to 1e-5 of the largest gradient.

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
    expected = reference_loss(
        reference, samples, args.temperature, args.loss, args.loss_args, args.loss_normalization,
        args.batch_size * args.max_seq_len, args.kl_beta, start, args.entropy_beta, args.masks(),
    )  # fmt: skip
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    for name, value in reference_means(reference, samples, args.temperature).items():
        assert row[name] == pytest.approx(value, rel=1e-5), name
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    largest = max(grad.abs().max().item() for grad in expected.values())
    assert largest > 0
    grads = {name: grad.double() for name, grad in grads.items()}
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-5 * largest)
    return row
