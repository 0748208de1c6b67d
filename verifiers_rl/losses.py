"""Losses: pure functions `LossInputs -> LossOutputs` over one microbatch.

A loss returns a SUM over the tokens that it is given, all of which carry loss. The trainer divides
this sum once by a number of the global batch, so the gradient does not depend on how the batch was
split. To try your own loss, pass any such function as `RLTrainer(loss_fn=...)`, or name it in a
TOML: `loss = "my_losses:my_loss"`. Extra parameters go through `functools.partial` or `loss_args`.

In the formulas below each term of a sum over tokens t is also multiplied by the token's weight w_t,
which is 1 unless `loss_normalization` says otherwise.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from verifiers_rl.types import Column

# exp(20) is 5e8: far beyond any useful ratio, far below overflow in float32.
MAX_LOG_RATIO = 20.0


@dataclass(slots=True)
class LossInputs:
    """Flat tensors over the N >= 1 loss tokens of a microbatch, one sample after the other, and in
    each sample from the first loss token to the last. If a microbatch has none, the loss is called
    with one other token, for the names of its metrics, and its result is not used.

    Attributes:
        trainer_logprobs: (N,) float32, with gradient, at the sampling temperature.
        inference_logprobs: (N,) float32, from the server that sampled the tokens.
        advantages: (N,) float32.
        weights: (N,) float32, the weight of the token in the batch's loss, which follows from
            `loss_normalization`; 0 where one of `gradient_masks` marks the token. A loss multiplies
            each of its terms by this weight.
        sequence_ids: (N,) int64, below N, the same number for the tokens of one sample.
        entropy: (N,) float32 in nats, of the distribution that predicts the token. It has a
            gradient if the loss declares `@needs("entropy_gradient")`.
        reference_logprobs: (N,) float32 without gradient, under the reference: the model without
            its adapter, or else the model that training started from. None unless the loss
            declares `@needs("reference_logprobs")`.
        extras: columns of the tokens that their samples have besides, (N, ...) by the name that
            they have in `Sample.extras`; and those that the loss declares, see `types.Column`.
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    sequence_ids: Tensor
    entropy: Tensor
    reference_logprobs: Tensor | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class LossOutputs:
    """What a loss returns.

    Attributes:
        loss: scalar, the sum over loss tokens.
        metrics: (N,) detached tensors by name; the trainer logs their mean over the loss tokens of
            the batch that were computed, see `needs`.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


LossFn = Callable[[LossInputs], LossOutputs]
MaskFn = Callable[[LossInputs], Tensor]
Need = Literal["entropy_gradient", "reference_logprobs", "nonzero_advantages", Column]
_T = TypeVar("_T", bound=Callable[..., Any])
_R = TypeVar("_R")


def needs(*what: Need) -> Callable[[_T], _T]:
    """Declare what a loss needs, so that nothing is computed in vain.

    Args:
        what: "entropy_gradient" for an `entropy` with gradient; "reference_logprobs", which cost a
            forward pass under the reference, and without LoRA a copy of the model;
            "nonzero_advantages" if its gradient is zero at tokens with an advantage of 0: samples
            that have no other tokens are then not computed; a `types.Column` to have it among the
            `extras`.
    """
    if unknown := set(what) - set(get_args(Need)):
        raise ValueError(f"needs({unknown.pop()!r}): must be of {', '.join(get_args(Need))}")

    def declare(loss_fn: _T) -> _T:
        loss_fn.needs = needs_of(loss_fn) | set(what)  # type: ignore[attr-defined]
        return loss_fn

    return declare


def needs_of(loss_fn: Any) -> frozenset[Need]:
    """Return what this loss declares by `needs`, also through `functools.partial`."""
    own: frozenset[Need] = getattr(loss_fn, "needs", frozenset())
    return own | needs_of(loss_fn.func) if isinstance(loss_fn, partial) else own


def add_terms(loss_fn: LossFn, *terms: LossFn) -> LossFn:
    """Return the loss plus these terms, with the metrics of all. The result has them as `terms`.

    Raises (when called):
        TypeError, ValueError: one of them does not keep the contract of a loss.
    """

    def total(inputs: LossInputs) -> LossOutputs:
        try:
            parts = [function(inputs) for function in (loss_fn, *terms)]
        except (KeyError, TypeError, AttributeError) as error:
            # What a loss does not ask for is None, or not among the extras.
            missing = [n for n in get_args(Need) if n in error.args and n not in inputs.extras]
            if inputs.reference_logprobs is None and "NoneType" in str(error):
                missing = ["reference_logprobs"]
            if not missing:
                raise
            fix = f'if it reads that input, write @needs("{missing[0]}") above it'
            raise TypeError(f"the loss met {error!r}: {fix}") from error
        for outputs in parts:
            check_outputs(outputs, inputs)
        metrics = {name: values for part in parts for name, values in part.metrics.items()}
        return LossOutputs(sum((part.loss for part in parts[1:]), parts[0].loss), metrics)

    total.terms = terms  # type: ignore[attr-defined]
    every = [needs_of(function) for function in (loss_fn, *terms)]
    what = frozenset[Need]().union(*every)
    if not all("nonzero_advantages" in own for own in every):
        what -= {"nonzero_advantages"}  # where one of them has a gradient, the sum has
    return needs(*what)(total)


def _kind(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_outputs(outputs: Any, inputs: LossInputs) -> None:
    """Raise TypeError or ValueError if a loss function does not keep its contract."""
    if not isinstance(outputs, LossOutputs):
        raise TypeError(f"loss_fn returned {type(outputs).__name__}; expected LossOutputs(loss)")
    if not isinstance(outputs.loss, Tensor) or outputs.loss.dim() > 0:
        raise ValueError(
            f"loss_fn returned a loss of {_kind(outputs.loss)}; expected a scalar tensor, the sum "
            "over the loss tokens"
        )
    if inputs.trainer_logprobs.requires_grad and not outputs.loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss without gradient: it must be computed from "
            "inputs.trainer_logprobs, and not be detached"
        )
    for name, values in outputs.metrics.items():
        if not isinstance(values, Tensor) or values.shape != inputs.weights.shape:
            raise ValueError(
                f"loss_fn returned the metric {name!r} of {_kind(values)}; expected one number a "
                f"token, {_kind(inputs.weights)}"
            )


def log_importance_ratio(inputs: LossInputs) -> Tensor:
    """log r_t = trainer_logprob_t - inference_logprob_t,
    clamped to +-20 so that exp stays finite. (N,)

    An inference logprob of -inf (a token outside the server's top-p set) is clamped too,
    and does not give NaN.
    """
    log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratios(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return, for each token, the mean and the sum of log r over its sample's loss tokens. (N,)
    each.
    """
    log_ratio = log_importance_ratio(inputs)
    zeros = torch.zeros_like(log_ratio)  # no fewer than samples; their number is on the device
    totals = zeros.index_add(0, inputs.sequence_ids, log_ratio)
    counts = zeros.index_add(0, inputs.sequence_ids, torch.ones_like(log_ratio)).clamp(min=1)
    return (totals / counts)[inputs.sequence_ids], totals[inputs.sequence_ids]


def policy_gradient(inputs: LossInputs, ratio: Tensor) -> Tensor:
    """- sum_t w_t * stop_gradient(ratio_t) * A_t * logprob_t. Scalar.

    Args:
        inputs: one microbatch, whose `weights` are w.
        ratio: (N,).
    """
    per_token = ratio.detach() * inputs.advantages * inputs.trainer_logprobs
    return -(inputs.weights * per_token).sum()


# --- Masks, for any loss --------------------------------------------------------------------------
# Each returns (N,) bool: True where a token gets no gradient. Such a token still counts in the
# denominator of the batch's loss.


@torch.no_grad()
def ratio_mask(inputs: LossInputs, min_ratio: float = 0.5, max_ratio: float = 5.0) -> Tensor:
    """Tokens whose ratio r_t leaves [min_ratio, max_ratio] (IcePop, Ring-1T, arXiv:2510.18855).

    Args:
        inputs: one microbatch.
        min_ratio, max_ratio: the interval, 0 <= min_ratio < max_ratio.
    """
    return _leaves(log_importance_ratio(inputs).exp(), min_ratio, max_ratio)


def _leaves(ratio: Tensor, min_ratio: float, max_ratio: float) -> Tensor:
    return (ratio < min_ratio) | (ratio > max_ratio)


@torch.no_grad()
def ppo_mask(inputs: LossInputs, eps_low: float = 0.2, eps_high: float = 0.28) -> Tensor:
    """Tokens that have left PPO's bounds in the direction of their advantage: A_t > 0 and
    r_t > 1 + eps_high, or A_t < 0 and r_t < 1 - eps_low (MiniMax-M1, arXiv:2506.13585, eq. 7).
    These are the tokens that the loss `ppo` clips.

    Args:
        inputs: one microbatch.
        eps_low, eps_high: bounds of the ratio, 1 - eps_low and 1 + eps_high; 0 <= eps_low < 1.
    """
    ratio, advantages = log_importance_ratio(inputs).exp(), inputs.advantages
    is_high = (advantages > 0) & (ratio > 1 + eps_high)
    return is_high | ((advantages < 0) & (ratio < 1 - eps_low))


@torch.no_grad()
def ipo_mask(inputs: LossInputs, max_divergence: float = 0.3) -> Tensor:
    """Tokens whose probability has moved too far, abs(p_trainer - p_inference) > max_divergence, in
    either direction (IPO, https://docs.primeintellect.ai/prime-rl/ipo). This is the binary total
    variation of the two policies.

    Args:
        inputs: one microbatch.
        max_divergence: a difference of probabilities, 0 to 1.
    """
    moved = inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()
    return moved.abs() > max_divergence


@torch.no_grad()
def dppo_mask(inputs: LossInputs, max_divergence: float = 0.2) -> Tensor:
    """Tokens of `ipo_mask` that the update would move further: A_t > 0 and r_t > 1, or A_t < 0 and
    r_t < 1 (DPPO, arXiv:2602.04879, eq. 12).

    Args:
        inputs: one microbatch.
        max_divergence: a difference of probabilities, 0 to 1.
    """
    leads_away = log_importance_ratio(inputs) * inputs.advantages > 0
    return leads_away & ipo_mask(inputs, max_divergence)


@torch.no_grad()
def sequence_mean_mask(
    inputs: LossInputs, min_ratio: float = 0.9, max_ratio: float = 1.1
) -> Tensor:
    """All tokens of samples whose geometric mean of ratios, exp(mean_t log r_t), leaves
    [min_ratio, max_ratio] (Liu et al., 2025, "When Speed Kills Stability"). Unlike the product, the
    mean does not depend on the sample's length.

    Args:
        inputs: one microbatch.
        min_ratio, max_ratio: the interval, 0 <= min_ratio < max_ratio.
    """
    return _leaves(sequence_log_ratios(inputs)[0].exp(), min_ratio, max_ratio)


@torch.no_grad()
def sequence_product_mask(
    inputs: LossInputs, min_ratio: float = 0.1, max_ratio: float = 10.0
) -> Tensor:
    """All tokens of samples whose product of ratios, the ratio of the whole sample, leaves
    [min_ratio, max_ratio] (Liu et al., 2025, "When Speed Kills Stability").

    Args:
        inputs: one microbatch.
        min_ratio, max_ratio: the interval, 0 <= min_ratio < max_ratio.
    """
    log_ratio = sequence_log_ratios(inputs)[1].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return _leaves(log_ratio.exp(), min_ratio, max_ratio)


# By the name that `RLConfig(gradient_masks=...)` takes.
MASKS: dict[str, Callable[..., Tensor]] = {
    "ratio": ratio_mask,
    "ppo": ppo_mask,
    "ipo": ipo_mask,
    "dppo": dppo_mask,
    "sequence_mean": sequence_mean_mask,
    "sequence_product": sequence_product_mask,
}


# Where `gradient_masks` is not set; by the name of the loss, so a function that is passed as
# `loss_fn` has none, `cispo` neither. Why: docs/losses.md.
DEFAULT_MASKS: dict[str, dict[str, dict[str, float]]] = {
    "cispo": {"dppo": {"max_divergence": 0.05}},
}


def with_masks(loss_fn: LossFn, masks: Mapping[str, MaskFn]) -> LossFn:
    """Return the loss without the gradient of the tokens that at least one of the masks marks.

    A masked token gets the weight 0, so the loss must multiply each of its terms by `weights`.

    Args:
        masks: by name. For each, the loss gets a metric `masked_share/NAME`.

    Raises (when called):
        TypeError: a mask returns something else than (N,) bool.
    """
    if not masks:
        return loss_fn

    @needs(*needs_of(loss_fn).union(*map(needs_of, masks.values())))
    def masked(inputs: LossInputs) -> LossOutputs:
        is_masked = torch.zeros_like(inputs.weights, dtype=torch.bool)
        metrics = {}
        for name, mask in masks.items():
            marked = mask(inputs)
            is_bool = isinstance(marked, Tensor) and marked.dtype == torch.bool
            if not is_bool or marked.shape != is_masked.shape:
                raise TypeError(
                    f"the mask {name!r} returned {_kind(marked)}; expected a tensor of bool, "
                    f"{_kind(is_masked)}"
                )
            metrics[f"masked_share/{name}"] = marked.float()
            is_masked = is_masked | marked
        outputs = loss_fn(replace(inputs, weights=inputs.weights.masked_fill(is_masked, 0.0)))
        check_outputs(outputs, inputs)
        return LossOutputs(outputs.loss, outputs.metrics | metrics)

    return masked


# --- Losses ---------------------------------------------------------------------------------------


@needs("nonzero_advantages")
def cispo(inputs: LossInputs, eps_high: float = 4.0) -> LossOutputs:
    """CISPO (MiniMax-M1, arXiv:2506.13585):
    policy gradient weighted by a capped, detached importance ratio.

    L = - sum_t stop_gradient(min(r_t, 1 + eps_high)) * A_t * logprob_t,
    r_t = exp(trainer - inference logprob).
    Unlike under PPO's clip, a token beyond the bound keeps a gradient; only its ratio is capped.

    This function has no mask. `RLConfig(loss="cispo")`, the default, calls it under the mask of
    `DEFAULT_MASKS`: tokens that moved too far lose their gradient. `RLTrainer(loss_fn=cispo)` calls
    it as it is; for the default's learning, set `gradient_masks` beside it.

    Args:
        inputs: one microbatch.
        eps_high: the cap is 1 + eps_high; no unit.

    Returns:
        The summed loss, and `clipped_share`, 1 where the cap was active.
    """
    ratio = log_importance_ratio(inputs).exp()  # (N,)
    loss = policy_gradient(inputs, ratio.clamp(max=1 + eps_high))
    return LossOutputs(loss, {"clipped_share": (ratio > 1 + eps_high).float()})


@needs("nonzero_advantages")
def reinforce(inputs: LossInputs) -> LossOutputs:
    """REINFORCE (Williams, 1992), as if the current policy had sampled the tokens.

    L = - sum_t A_t * logprob_t. Without an importance ratio, it is biased if weights are stale.
    """
    return LossOutputs(policy_gradient(inputs, torch.ones_like(inputs.advantages)))


@needs("nonzero_advantages")
def icepop(inputs: LossInputs, min_ratio: float = 0.5, max_ratio: float = 5.0) -> LossOutputs:
    """IcePop (Ring-1T, arXiv:2510.18855): tokens whose ratio leaves an interval are dropped.

    L = - sum_t stop_gradient(r_t if min_ratio <= r_t <= max_ratio else 0) * A_t * logprob_t.

    Args:
        inputs: one microbatch.
        min_ratio, max_ratio: the interval, 0 <= min_ratio < max_ratio.

    Returns:
        The summed loss, and `masked_share`, 1 where a token was dropped.
    """
    ratio = log_importance_ratio(inputs).exp()
    is_masked = ratio_mask(inputs, min_ratio, max_ratio)
    loss = policy_gradient(inputs, torch.where(is_masked, 0.0, ratio))
    return LossOutputs(loss, {"masked_share": is_masked.float()})


@needs("nonzero_advantages")
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
    return _clipped_surrogate(inputs, log_importance_ratio(inputs).exp(), eps_low, eps_high)


@needs("nonzero_advantages")
def gspo(inputs: LossInputs, eps_low: float = 3e-4, eps_high: float = 4e-4) -> LossOutputs:
    """GSPO (arXiv:2507.18071): PPO's clip on the ratio of whole sequences.

    s = exp(mean over the sequence's loss tokens of log r_t),
    L = - sum_t min(s * A_t, clip(s, 1 - eps_low, 1 + eps_high) * A_t).
    With `loss_normalization="sequence"` this is the paper's objective, if each rollout is one
    sample.

    Args:
        inputs: one microbatch.
        eps_low, eps_high: bounds of the ratio; 0 <= eps_low < 1.

    Returns:
        The summed loss, and `clipped_share`, 1 on the tokens of clipped sequences.
    """
    return _clipped_surrogate(inputs, sequence_log_ratios(inputs)[0].exp(), eps_low, eps_high)


def _clipped_surrogate(
    inputs: LossInputs, ratio: Tensor, eps_low: float, eps_high: float
) -> LossOutputs:
    unclipped = ratio * inputs.advantages
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high) * inputs.advantages
    loss = -(inputs.weights * torch.minimum(unclipped, clipped)).sum()
    return LossOutputs(loss, {"clipped_share": (clipped < unclipped).float()})


@needs("nonzero_advantages")
def dppo(inputs: LossInputs, max_divergence: float = 0.2) -> LossOutputs:
    """DPPO with the binary total-variation mask (arXiv:2602.04879, eq. 11 and 12).

    L = - sum_t M_t * r_t * A_t. M_t is 0 where `dppo_mask` holds, else 1.

    Args:
        inputs: one microbatch.
        max_divergence: a difference of probabilities, 0 to 1.

    Returns:
        The summed loss, and `masked_share`, 1 where M_t is 0.
    """
    ratio = log_importance_ratio(inputs).exp()
    is_masked = dppo_mask(inputs, max_divergence)
    per_token = torch.where(is_masked, 0.0, ratio * inputs.advantages)
    loss = -(inputs.weights * per_token).sum()
    return LossOutputs(loss, {"masked_share": is_masked.float()})


def cross_entropy(inputs: LossInputs) -> LossOutputs:
    """The loss of supervised finetuning (`vf-sft`), without rewards: L = - sum_t logprob_t."""
    return LossOutputs(-(inputs.weights * inputs.trainer_logprobs).sum())


# By the name that `RLConfig(loss=...)` takes. "truncated_is" is token-level truncated importance
# sampling (Yao et al., 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
# Training"): with one optimizer step a batch it is CISPO's formula with a cap of 2.
LOSSES: dict[str, Callable[..., LossOutputs]] = {
    "cispo": cispo,
    "ppo": ppo,
    "truncated_is": partial(cispo, eps_high=1.0),
    "icepop": icepop,
    "dppo": dppo,
    "gspo": gspo,
    "reinforce": reinforce,
}


def bind_options(
    function: Callable[..., _R], what: str, options: dict[str, Any]
) -> Callable[..., _R]:
    """Return the loss or the mask with these options in place of its defaults.

    Args:
        function: one of `LOSSES` or `MASKS`, or a user's own.
        what: the field of the options and its owner, for errors, as "loss_args of loss='cispo'".
        options: values by name.

    Raises:
        ValueError: the function does not have an option, or (for one of `LOSSES` and `MASKS`) a
            value is out of range. The message says which options or values are possible.
    """
    signature = inspect.signature(function)
    try:
        values = signature.bind(None, **options)  # the inputs
    except TypeError as error:
        known = ", ".join([*signature.parameters][1:]) or "none"
        raise ValueError(f"{what}: {error}; there is {known}") from error
    if function in (*LOSSES.values(), *MASKS.values()):
        for option, value in options.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
                raise ValueError(f"{what}: {option}={value!r} must be a number >= 0")
        values.apply_defaults()
        of = values.arguments
        if of.get("eps_low", 0) >= 1 or of.get("min_ratio", 0) >= of.get("max_ratio", math.inf):
            raise ValueError(
                f"{what}: {options!r}: eps_low must be below 1, and min_ratio below max_ratio"
            )
    return partial(function, **options)


# --- Terms beside the loss ------------------------------------------------------------------------


@needs("reference_logprobs")
def reference_kl(inputs: LossInputs, beta: float) -> LossOutputs:
    """beta * sum_t w_t * KL_t, which keeps the policy near its reference.

    KL(trainer || reference) at each sampled token by the k3 estimator
    (http://joschu.net/blog/kl-approx.html), as in GRPO: d - 1 - log d, d = p_reference / p_trainer.

    Args:
        inputs: one microbatch.
        beta: weight of the term (`kl_beta`), >= 0.

    Returns:
        The term, and `reference_kl`, (N,) nats, >= 0, without beta.
    """
    assert inputs.reference_logprobs is not None
    log_ratio = inputs.reference_logprobs - inputs.trainer_logprobs
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kl = log_ratio.exp() - 1 - log_ratio
    return LossOutputs(beta * (inputs.weights * kl).sum(), {"reference_kl": kl.detach()})


class AdaptiveKL:
    """`reference_kl` with a weight that changes from step to step, so that the KL stays near a
    target: beta <- beta * (1 + 0.1 * clip(KL / target - 1, -0.2, 0.2)) (Ziegler et al., 2019,
    arXiv:1909.08593, section 2.2).

    Args:
        beta: the weight at the start (`kl_beta`), > 0.
        target: the KL to hold (`kl_target`), nats per token, > 0.
    """

    needs: frozenset[Need] = frozenset({"reference_logprobs"})

    def __init__(self, beta: float, target: float) -> None:
        self.beta = beta
        self.target = target

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        outputs = reference_kl(inputs, self.beta)
        beta = torch.full_like(inputs.weights, self.beta)
        return LossOutputs(outputs.loss, {**outputs.metrics, "kl_beta": beta})

    def update(self, token_means: Mapping[str, float]) -> None:
        """Change the weight for the next step, by the `reference_kl` of this one: its mean over
        the loss tokens, nats. Without loss tokens the weight stays.
        """
        if "reference_kl" in token_means:
            error = min(max(token_means["reference_kl"] / self.target - 1, -0.2), 0.2)
            self.beta *= 1 + 0.1 * error

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the weight for a checkpoint; see `checkpoints.Stateful`."""
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.beta = state["beta"]


def adaptive_kl_of(loss_fn: LossFn) -> AdaptiveKL | None:
    """Return the `AdaptiveKL` among the terms of a loss, see `add_terms`; None if it has none."""
    terms = getattr(loss_fn, "terms", ())
    return next((term for term in terms if isinstance(term, AdaptiveKL)), None)


@needs("entropy_gradient")
def entropy_bonus(inputs: LossInputs, beta: float) -> LossOutputs:
    """- beta * sum_t w_t * H_t, which rewards a policy that stays undecided (A3C,
    arXiv:1602.01783). H_t is the entropy in nats of the whole distribution that predicts token t.

    Args:
        inputs: one microbatch.
        beta: weight of the term (`entropy_beta`), >= 0.
    """
    return LossOutputs(-beta * (inputs.weights * inputs.entropy).sum())


def weigh_samples(
    num_loss_tokens: np.ndarray, rollouts: np.ndarray, normalization: str, constant: float
) -> tuple[np.ndarray, float]:
    """Choose the weights w and the denominator of a batch's loss, sum_t w_t * l_t / denominator.

    "token": the mean over loss tokens. "sequence": the mean over rollouts of each rollout's mean.
    "constant": the sum, divided by the same number in all batches (Dr. GRPO, arXiv:2503.20783).

    Args:
        num_loss_tokens: (S,) int, for each sample of the global batch.
        rollouts: (S,) int, a number that the samples of one rollout share.
        normalization: one of the three.
        constant: the denominator of "constant".

    Returns:
        The weight of each sample's loss tokens, (S,), and the denominator, > 0.
    """
    if normalization == "sequence":
        _, own = np.unique(rollouts, return_inverse=True)
        totals = np.bincount(own, num_loss_tokens)
        return 1 / np.maximum(totals, 1)[own], max(int(np.count_nonzero(totals)), 1)
    denominator = constant if normalization == "constant" else max(num_loss_tokens.sum(), 1)
    return np.ones(len(num_loss_tokens)), float(denominator)
