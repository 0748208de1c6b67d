"""Losses: pure functions `LossInputs -> LossOutputs` over one microbatch.

A loss returns a SUM over its loss tokens. The trainer divides once by the loss tokens of the global
batch, so the gradient does not depend on how the batch was split. To try your own, pass any such
function as `RLTrainer(loss_fn=...)`; extra knobs go through `functools.partial`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

# exp(20) is 5e8: far beyond any useful ratio, far below overflow in float32.
MAX_LOG_RATIO = 20.0


@dataclass(slots=True)
class LossInputs:
    """Flat tensors over the N predicted tokens of a microbatch.

    Attributes:
        trainer_logprobs: (N,) float32, with gradient, at the sampling temperature.
        inference_logprobs: (N,) float32, from the server that sampled the tokens.
        advantages: (N,) float32, times the weight that `loss_normalization` gives the token. Every
            loss below is proportional to it.
        loss_mask: (N,) bool.
        sequence_ids: (N,) int64, the same number for tokens of one sample.
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    sequence_ids: Tensor


@dataclass(slots=True)
class LossOutputs:
    """What a loss returns.

    Attributes:
        loss: scalar, the sum over loss tokens.
        metrics: (N,) detached tensors by name; the trainer logs their mean over the batch's loss
            tokens.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


LossFn = Callable[[LossInputs], LossOutputs]


def check_outputs(outputs: Any, inputs: LossInputs) -> None:
    """Raise TypeError or ValueError where a loss function does not keep its contract."""
    if not isinstance(outputs, LossOutputs):
        raise TypeError(f"loss_fn returned {type(outputs).__name__}; expected LossOutputs(loss)")

    def kind(value: Any) -> str:
        return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

    if not isinstance(outputs.loss, Tensor) or outputs.loss.dim() > 0:
        raise ValueError(
            f"loss_fn returned a loss of {kind(outputs.loss)}; expected a scalar tensor, the sum "
            "over the loss tokens"
        )
    if inputs.trainer_logprobs.requires_grad and not outputs.loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss without gradient: it must be computed from "
            "inputs.trainer_logprobs, and not be detached"
        )
    for name, values in outputs.metrics.items():
        if not isinstance(values, Tensor) or values.shape != inputs.loss_mask.shape:
            raise ValueError(
                f"loss_fn returned the metric {name!r} of {kind(values)}; expected one number a "
                f"token, {kind(inputs.loss_mask)}"
            )


def log_importance_ratio(inputs: LossInputs) -> Tensor:
    """log r_t = trainer_logprob_t - inference_logprob_t,
    clamped to +-20 so that exp stays finite. (N,)

    A -inf on the inference side (a token outside the server's top-p set) clamps too;
    NaN cannot arise from it.
    """
    log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_gradient(inputs: LossInputs, weight: Tensor) -> Tensor:
    """- sum_t stop_gradient(weight_t) * A_t * logprob_t over the loss tokens. Scalar.

    Args:
        inputs: one microbatch.
        weight: (N,).
    """
    weighted = weight.detach() * inputs.advantages * inputs.trainer_logprobs
    return -torch.where(inputs.loss_mask, weighted, 0.0).sum()


def cispo(inputs: LossInputs, eps_high: float = 4.0) -> LossOutputs:
    """CISPO (MiniMax-M1, arXiv:2506.13585):
    policy gradient weighted by a capped, detached importance ratio.

    L = - sum_t stop_gradient(min(r_t, 1 + eps_high)) * A_t * logprob_t,
    r_t = exp(trainer - inference logprob).
    Unlike PPO's clip, a token beyond the bound keeps a gradient; only its weight is capped.

    Args:
        inputs: one microbatch.
        eps_high: the cap is 1 + eps_high; no unit.

    Returns:
        The summed loss, and `clipped_share`, 1 where the cap was active.
    """
    ratio = log_importance_ratio(inputs).exp().detach()  # (N,)
    loss = policy_gradient(inputs, ratio.clamp(max=1 + eps_high))
    return LossOutputs(loss, {"clipped_share": (ratio > 1 + eps_high).float()})


def reinforce(inputs: LossInputs) -> LossOutputs:
    """REINFORCE (Williams, 1992), as if the tokens were sampled by the present policy.

    L = - sum_t A_t * logprob_t. No importance ratio: biased where weights are stale.
    """
    return LossOutputs(policy_gradient(inputs, torch.ones_like(inputs.advantages)))


def truncated_is(inputs: LossInputs, max_ratio: float = 2.0) -> LossOutputs:
    """Token-level truncated importance sampling (Yao et al., 2025, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training"), with one optimizer step a batch.

    L = - sum_t stop_gradient(min(r_t, max_ratio)) * A_t * logprob_t. The formula of `cispo` under
    the name and with the bound of its own literature.

    Args:
        inputs: one microbatch.
        max_ratio: the cap of the ratio, > 0.

    Returns:
        The summed loss, and `clipped_share`, 1 where the cap was active.
    """
    return cispo(inputs, eps_high=max_ratio - 1)


def icepop(inputs: LossInputs, min_ratio: float = 0.5, max_ratio: float = 5.0) -> LossOutputs:
    """IcePop (Ring-1T, arXiv:2510.18855): tokens whose ratio leaves an interval are dropped.

    L = - sum_t stop_gradient(r_t if min_ratio <= r_t <= max_ratio else 0) * A_t * logprob_t.

    Args:
        inputs: one microbatch.
        min_ratio, max_ratio: the interval, 0 <= min_ratio < max_ratio.

    Returns:
        The summed loss, and `masked_share`, 1 where a token was dropped.
    """
    ratio = log_importance_ratio(inputs).exp().detach()
    is_masked = (ratio < min_ratio) | (ratio > max_ratio)
    loss = policy_gradient(inputs, torch.where(is_masked, 0.0, ratio))
    return LossOutputs(loss, {"masked_share": is_masked.float()})


def ppo(inputs: LossInputs, eps_low: float = 0.2, eps_high: float = 0.28) -> LossOutputs:
    """PPO's clip (arXiv:1707.06347) as in GRPO (arXiv:2402.03300), with the two bounds of DAPO
    (arXiv:2503.14476).

    L = - sum_t min(r_t * A_t, clip(r_t, 1 - eps_low, 1 + eps_high) * A_t); the old policy is the
    one that sampled. A token beyond the bound in the direction of its advantage has no gradient.

    Args:
        inputs: one microbatch.
        eps_low, eps_high: bounds of the ratio, 1 - eps_low and 1 + eps_high; 0 <= eps_low < 1.

    Returns:
        The summed loss, and `clipped_share`, 1 where the clip was active.
    """
    ratio = log_importance_ratio(inputs).exp()
    return _clipped_surrogate(inputs, ratio, eps_low, eps_high)


def gspo(inputs: LossInputs, eps_low: float = 3e-4, eps_high: float = 4e-4) -> LossOutputs:
    """GSPO (arXiv:2507.18071): PPO's clip on the ratio of whole sequences.

    s = exp(mean over the sequence's loss tokens of log r_t),
    L = - sum_t min(s * A_t, clip(s, 1 - eps_low, 1 + eps_high) * A_t).
    With `loss_normalization="sequence"` this is the paper's objective, one term a sequence.

    Args:
        inputs: one microbatch.
        eps_low, eps_high: bounds of the ratio; 0 <= eps_low < 1.

    Returns:
        The summed loss, and `clipped_share`, 1 on the tokens of clipped sequences.
    """
    log_ratio = torch.where(inputs.loss_mask, log_importance_ratio(inputs), 0.0)
    num_sequences = int(inputs.sequence_ids.max()) + 1
    zeros = log_ratio.new_zeros(num_sequences)
    totals = zeros.index_add(0, inputs.sequence_ids, log_ratio)  # (sequences,)
    counts = zeros.index_add(0, inputs.sequence_ids, inputs.loss_mask.to(log_ratio.dtype))
    ratio = (totals / counts.clamp(min=1)).exp()[inputs.sequence_ids]  # (N,)
    return _clipped_surrogate(inputs, ratio, eps_low, eps_high)


def _clipped_surrogate(
    inputs: LossInputs, ratio: Tensor, eps_low: float, eps_high: float
) -> LossOutputs:
    unclipped = ratio * inputs.advantages
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high) * inputs.advantages
    loss = -torch.where(inputs.loss_mask, torch.minimum(unclipped, clipped), 0.0).sum()
    return LossOutputs(loss, {"clipped_share": (clipped < unclipped).float()})


def dppo(inputs: LossInputs, max_divergence: float = 0.2) -> LossOutputs:
    """DPPO with the binary total-variation mask (arXiv:2602.04879, eq. 11 and 12).

    L = - sum_t M_t * r_t * A_t. M_t is 0 where the update leads away from the sampling policy
    (A_t > 0 and r_t > 1, or A_t < 0 and r_t < 1) and the token's probability has moved by more than
    max_divergence already: abs(p_trainer - p_inference). Else 1.

    Args:
        inputs: one microbatch.
        max_divergence: a difference of probabilities, 0 to 1.

    Returns:
        The summed loss, and `masked_share`, 1 where M_t is 0.
    """
    ratio = log_importance_ratio(inputs).exp()
    moved = (inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()).abs()
    leads_away = (ratio - 1) * inputs.advantages > 0
    is_masked = (leads_away & (moved > max_divergence)).detach()
    kept = inputs.loss_mask & ~is_masked
    loss = -torch.where(kept, ratio * inputs.advantages, 0.0).sum()
    return LossOutputs(loss, {"masked_share": is_masked.float()})


LOSSES: dict[str, Callable[..., LossOutputs]] = {
    function.__name__: function
    for function in (cispo, ppo, truncated_is, icepop, dppo, gspo, reinforce)
}


def make_loss(name: str, options: dict[str, float]) -> LossFn:
    """The named loss with these options.

    Raises:
        ValueError: no such loss, or an option it does not have, or a value below 0; says which
            there are.
    """
    if name not in LOSSES:
        raise ValueError(f"loss={name!r}: must be one of {', '.join(LOSSES)}")
    known = [p for p in inspect.signature(LOSSES[name]).parameters if p != "inputs"]
    if not isinstance(options, dict):
        raise ValueError(f"loss_args={options!r}: must be a table such as {{eps_high = 4.0}}")
    for option, value in options.items():
        if option not in known:
            raise ValueError(
                f"loss_args has {option!r}, which loss={name!r} does not take; "
                f"it takes {', '.join(known) or 'none'}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ValueError(f"loss_args: {option}={value!r} must be a number >= 0")
    if options.get("eps_low", 0) >= 1:
        raise ValueError(f"loss_args: eps_low={options['eps_low']!r} must be below 1")
    loss = partial(LOSSES[name], **options)
    bounds = inspect.signature(loss).parameters
    if name == "icepop" and bounds["min_ratio"].default >= bounds["max_ratio"].default:
        raise ValueError(
            f"loss_args: min_ratio={bounds['min_ratio'].default!r} must be below "
            f"max_ratio={bounds['max_ratio'].default!r}"
        )
    return loss


def weigh_samples(
    num_loss_tokens: Sequence[int], normalization: str, constant: float
) -> tuple[list[float], float]:
    """How a batch's sum over loss tokens becomes its loss: sum_t weight_t * l_t / denominator.

    "token": the mean over loss tokens. "sequence": the mean over samples of each one's mean.
    "constant": the sum over a number that no batch changes (Dr. GRPO, arXiv:2503.20783).

    Args:
        num_loss_tokens: of each sample of the global batch.
        normalization: one of the three.
        constant: the denominator of "constant".

    Returns:
        The weight of each sample's loss tokens, and the denominator, > 0.
    """
    if normalization == "sequence":
        weights = [1 / max(n, 1) for n in num_loss_tokens]
        return weights, max(sum(n > 0 for n in num_loss_tokens), 1)
    ones = [1.0] * len(num_loss_tokens)
    return ones, constant if normalization == "constant" else max(sum(num_loss_tokens), 1)


def reference_kl(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL(trainer || reference) at each sampled token by the k3 estimator
    (http://joschu.net/blog/kl-approx.html), as in GRPO: d - 1 - log d, d = p_reference / p_trainer.

    Args:
        trainer_logprobs: (N,), with gradient.
        reference_logprobs: (N,).

    Returns:
        (N,) nats, >= 0.
    """
    log_ratio = reference_logprobs - trainer_logprobs
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - 1 - log_ratio
