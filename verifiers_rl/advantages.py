"""Rewards of one group to advantages. Pure functions."""

from torch import Tensor


def center_on_group_mean(rewards: Tensor) -> Tensor:
    """Advantage of each rollout over its group: A_i = r_i - mean(r).

    No division by the standard deviation (Dr. GRPO, arXiv:2503.20783).

    Args:
        rewards: (rollouts,) float, the rewards of one group's surviving rollouts.

    Returns:
        (rollouts,) of the same dtype; zeros where all rewards are equal.
    """
    return rewards - rewards.mean()
