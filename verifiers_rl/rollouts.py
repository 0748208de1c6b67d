"""What is computed from groups of rollouts: order of examples, filters, metrics. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifiers_rl.types import Rollout


def example_index(position: int, num_examples: int, shuffle: bool, seed: int) -> int:
    """The example at this position of an endless run:
    every epoch has each once, in an order of its own.
    """
    epoch, offset = divmod(position, num_examples)
    if not shuffle:
        return offset
    return int(np.random.default_rng((seed, epoch)).permutation(num_examples)[offset])


@dataclass(frozen=True)
class GroupFilter:
    """Which groups are worth training on, by the rewards of their surviving rollouts. A group
    without survivors passes: were it replaced, an environment that always fails would end later.

    Attributes:
        min_reward_variance: a smaller variance (over n) does not pass; 0 lets all pass.
        min_reward, max_reward: bounds of the mean; None for none.
    """

    min_reward_variance: float = 0.0
    min_reward: float | None = None
    max_reward: float | None = None

    @property
    def lets_all_pass(self) -> bool:
        return self == GroupFilter()

    def passes(self, group: Sequence[Rollout]) -> bool:
        if self.lets_all_pass:
            return True
        rewards = np.array([rollout.reward for rollout in group if rollout.error is None])
        return not len(rewards) or bool(
            rewards.var() >= self.min_reward_variance
            and (self.min_reward is None or rewards.mean() >= self.min_reward)
            and (self.max_reward is None or rewards.mean() <= self.max_reward)
        )


def describe_error(error: BaseException) -> str:
    """One line: the exception and what caused it."""
    parts = []
    link: BaseException | None = error
    while link is not None:
        parts.append(f"{type(link).__name__}: {link}".removesuffix(": ").splitlines()[0])
        link = link.__cause__
    return " <- ".join(parts)


def batch_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Means over the surviving rollouts of all groups; docs/metrics.md defines each."""
    rollouts = [rollout for group in groups for rollout in group if rollout.error is None]
    rewards = np.array([rollout.reward for rollout in rollouts])
    tokens = np.array([rollout.num_sampled_tokens for rollout in rollouts])
    num_all = sum(len(group) for group in groups)
    uniform = [len({r.reward for r in group if r.error is None}) <= 1 for group in groups]
    metrics = {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "completion_tokens": float(tokens.mean()),
        "num_turns": float(np.mean([rollout.num_turns for rollout in rollouts])),
        "truncated_share": float(np.mean([rollout.is_truncated for rollout in rollouts])),
        "error_share": 1 - len(rollouts) / num_all,
        "uniform_group_share": float(np.mean(uniform)),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.metrics}):
        if name not in metrics:
            metrics[f"env/{name}"] = float(
                np.mean([rollout.metrics.get(name, 0.0) for rollout in rollouts])
            )
    return metrics


def evaluation_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Means over all rollouts of an evaluation, errors as 0, and pass@k for groups of k > 1."""
    rollouts = [rollout for group in groups for rollout in group]
    survivors = [rollout for rollout in rollouts if rollout.error is None]
    names = {name for rollout in survivors for name in rollout.metrics}
    metrics = {
        name: sum(r.metrics.get(name, 0.0) for r in survivors) / len(rollouts)
        for name in sorted(names)
    }
    metrics["reward"] = sum(r.reward for r in survivors) / len(rollouts)
    metrics["error_share"] = 1 - len(survivors) / len(rollouts)
    metrics["truncated_share"] = sum(r.is_truncated for r in survivors) / len(rollouts)
    metrics["num_rollouts"] = float(len(rollouts))
    if (num_rollouts := len(groups[0])) > 1:
        passed = sum(any(r.error is None and r.reward >= 1 for r in group) for group in groups)
        metrics[f"pass@{num_rollouts}"] = passed / len(groups)
    return metrics
