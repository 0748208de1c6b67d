"""Losses: pure functions `LossInputs -> LossOutputs` over one microbatch.

A loss returns a SUM over its loss tokens. The trainer divides once by the loss tokens of the global
batch, so the gradient does not depend on how the batch was split. To try your own, pass any such
function as `RLTrainer(loss_fn=...)`; extra knobs go through `functools.partial`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
        advantages: (N,) float32.
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


def log_importance_ratio(inputs: LossInputs) -> Tensor:
    """log r_t = trainer_logprob_t - inference_logprob_t,
    clamped to +-20 so that exp stays finite. (N,)

    A -inf on the inference side (a token outside the server's top-p set) clamps too;
    NaN cannot arise from it.
    """
    log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def cispo(inputs: LossInputs, eps_high: float = 4.0) -> LossOutputs:
    """CISPO (MiniMax-M1, arXiv:2506.13585):
    policy gradient weighted by a clipped, detached importance ratio.

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
    weight = ratio.clamp(max=1 + eps_high) * inputs.advantages
    loss = -torch.where(inputs.loss_mask, weight * inputs.trainer_logprobs, 0.0).sum()
    return LossOutputs(loss, {"clipped_share": (ratio > 1 + eps_high).float()})
