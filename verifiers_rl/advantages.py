"""Compute advantages from the rewards of one group. Pure functions.

Each function of `ADVANTAGES` takes (rollouts,) float, the rewards of one group's surviving
rollouts, and returns as many advantages of the same dtype. If the rewards are equal, the advantages
are zero. `RLTrainer(advantage_fn=...)` takes an `AdvantageFn`, which sees the rollouts themselves.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiers_rl.data import group_by_role
from verifiers_rl.types import LARGEST_REWARD, Rollout

# Takes the surviving rollouts of one group (and of one agent, if an episode has several). Returns
# for each rollout a number, or (for process rewards) a sequence with a number for each token of its
# samples, one sample after the other. The numbers of tokens without loss are ignored.
AdvantageFn = Callable[[list[Rollout]], Sequence[float | Sequence[float]] | Tensor]


def as_numbers(advantages: Any, num_rollouts: int) -> list[np.ndarray]:
    """What an `AdvantageFn` returned, as arrays: () or (tokens,) float64 for each rollout.

    Raises:
        ValueError: not one number, or one sequence of numbers, for each rollout.
    """
    try:
        numbers = [np.asarray(advantage, dtype=np.float64) for advantage in advantages]
    except (TypeError, ValueError, RuntimeError) as error:  # of a tensor with a gradient
        raise ValueError(
            f"advantage_fn returned {reprlib.repr(advantages)} for {num_rollouts} rollouts; "
            "expected a list with a number for each, or a sequence of numbers, one for each token"
        ) from error
    if len(numbers) != num_rollouts:
        raise ValueError(
            f"advantage_fn returned {len(numbers)} advantages for {num_rollouts} rollouts"
        )
    return numbers


def check_magnitude(advantage: float | np.ndarray) -> None:
    """Raise ValueError if an advantage, or that of a token, is NaN or too large for float32."""
    magnitude = np.abs(advantage).max(initial=0.0)
    if not magnitude <= (largest := 10 * LARGEST_REWARD):  # NaN is not, either
        raise ValueError(f"an advantage is {magnitude:g}; its size must be {largest:g} at most")


def of_rewards(function: Callable[[Tensor], Tensor]) -> AdvantageFn:
    """Make an `AdvantageFn` from a function of the rewards, which are passed in float64."""

    def advantages(group: list[Rollout]) -> list[float]:
        rewards = torch.tensor([rollout.reward for rollout in group], dtype=torch.float64)
        return function(rewards).tolist()

    return advantages


def center_on_group_mean(rewards: Tensor) -> Tensor:
    """A_i = r_i - mean(r).

    No division by the standard deviation (Dr. GRPO, arXiv:2503.20783).
    """
    if len(rewards) and bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)  # their mean may be rounded to another number
    return rewards - rewards.mean()


def scale_by_group_std(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + eps), std with n - 1 (GRPO, arXiv:2402.03300).

    Groups that nearly always or nearly never succeed weigh as much as all others.
    """
    centered = center_on_group_mean(rewards)
    if len(rewards) < 2:
        return centered
    return centered / (rewards.std() + eps)


def leave_one_out(rewards: Tensor) -> Tensor:
    """A_i = r_i - mean of the other rewards (RLOO, arXiv:2402.14740): an unbiased baseline."""
    return center_on_group_mean(rewards) * len(rewards) / max(len(rewards) - 1, 1)


def scale_by_group_mean(rewards: Tensor) -> Tensor:
    """A_i = (r_i - mean(r)) / mean(r), zeros where mean(r) = 0 (MaxRL, arXiv:2602.02710).

    Derived for rewards of 0 and 1: the larger the group, the more closely this follows the gradient
    of the log-likelihood. Hard examples weigh more.

    Raises:
        ValueError: a reward is negative.
    """
    if (rewards < 0).any():
        raise ValueError(
            f"advantage='maxrl' needs rewards >= 0, got {rewards.min().item():g}; "
            "shift the rewards or set advantage='mean'"
        )
    mean = rewards.mean()
    return center_on_group_mean(rewards) / mean if mean > 0 else rewards * 0


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": center_on_group_mean,
    "std": scale_by_group_std,
    "leave_one_out": leave_one_out,
    "maxrl": scale_by_group_mean,
}


def set_advantages(
    group: Sequence[Rollout],
    advantage_fn: AdvantageFn,
    mask_truncated: bool = False,
    zero_truncated: bool = False,
) -> None:
    """Set the advantages of a group's surviving rollouts, each agent's with its own baseline.
    Advantages that an environment has set itself are kept. To either, `added_advantages` are added.

    Args:
        mask_truncated, zero_truncated: `RLConfig.mask_truncated_completions` and
            `zero_truncated_completions`.

    Raises:
        ValueError: `advantage_fn` breaks its contract, or an advantage is NaN or too large.
    """
    for survivors in group_by_role(group):
        for rollout in survivors:
            if rollout.is_truncated and zero_truncated:
                rollout.reward = 0.0
            if rollout.is_truncated and mask_truncated:
                rollout.leave_out_of_loss()
        if not all(rollout.has_own_advantages for rollout in survivors):
            advantages = as_numbers(advantage_fn(survivors), len(survivors))
            for rollout, advantage in zip(survivors, advantages, strict=True):
                if not rollout.has_own_advantages:
                    rollout.set_advantage(advantage)
        for rollout in survivors:
            if rollout.added_advantages is not None:
                own = np.concatenate([sample.advantages for sample in rollout.samples])
                rollout.set_advantage(own + rollout.added_advantages)
            check_magnitude(rollout.advantage)
            for sample in rollout.samples:
                check_magnitude(sample.advantages)
