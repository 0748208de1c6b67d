"""Means over groups of rollouts: of a batch, and of an evaluation. docs/metrics.md defines each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verifiers_rl.data import group_by_role
from verifiers_rl.types import Rollout


def batch_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Return means over the surviving rollouts of all groups. With several environments, each
    one's means are added under `NAME/`. docs/metrics.md defines each metric.
    """
    metrics = _group_metrics(groups)
    envs = sorted({rollout.env for group in groups for rollout in group})
    for env in envs:
        own = [group for group in groups if group[0].env == env]
        survivors = [rollout for group in own for rollout in group if rollout.error is None]
        if len(envs) > 1:
            metrics |= {f"{env}/{name}": value for name, value in _group_metrics(own).items()}
            metrics[f"{env}/group_share"] = len(own) / len(groups)
        metrics |= _rewards_of_roles(env, survivors)
        for name in sorted({name for rollout in survivors for name in rollout.metrics}):
            if name not in metrics:
                values = [rollout.metrics.get(name, 0.0) for rollout in survivors]
                metrics[f"{env}/{name}"] = float(np.mean(values))
    return metrics


def _lost_tokens(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Return the mean length of replies that timed out, if there are any."""
    lost = [r.num_lost_tokens for group in groups for r in group if r.num_lost_tokens is not None]
    return {"timed_out_tokens": float(np.mean(lost))} if lost else {}


def _rewards_of_roles(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    roles = group_by_role(rollouts)
    if len(roles) < 2:
        return {}
    return {
        f"{prefix}/{role[0].role}/reward": float(np.mean([r.reward for r in role]))
        for role in roles
    }


def _group_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group if rollout.error is None]
    num_all = sum(len(group) for group in groups)
    if not rollouts:  # all rollouts of these groups failed
        return {"error_share": 1.0}
    num_restarted = sum(rollout.num_restarts > 0 for group in groups for rollout in group)
    num_moved = sum(rollout.num_moves > 0 for group in groups for rollout in group)
    rewards = np.array([rollout.reward for rollout in rollouts])
    tokens = np.array([rollout.num_sampled_tokens for rollout in rollouts])
    roles = [
        found for group in groups if (found := group_by_role(group))
    ]  # of groups with survivors
    uniform = [all(len({r.reward for r in role}) == 1 for role in found) for found in roles]
    num_later_turns = sum(rollout.num_turns - 1 for rollout in rollouts)
    num_breaks = sum(len(rollout.samples) - 1 for rollout in rollouts)
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "completion_tokens": float(tokens.mean()),
        "num_turns": float(np.mean([rollout.num_turns for rollout in rollouts])),
        "truncated_share": float(np.mean([rollout.is_truncated for rollout in rollouts])),
        "error_share": 1 - len(rollouts) / num_all,
        "restarted_share": num_restarted / num_all,
        "moved_share": num_moved / num_all,
        **_lost_tokens(groups),
        "uniform_group_share": float(np.mean(uniform)),
        "broken_turn_share": num_breaks / max(num_later_turns, 1),
    }


def evaluation_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Return means over all rollouts of an evaluation, where a failed rollout counts as 0, and
    pass@k for groups of k > 1. With several environments, each one's metrics are added under
    `NAME/`.
    """
    envs = sorted({rollout.env for group in groups for rollout in group})
    metrics = _evaluation_metrics(groups)
    for env in envs:
        own = [group for group in groups if group[0].env == env]
        prefix = f"{env}/" if len(envs) > 1 else ""
        for name, value in (_mean_scores(own) | _evaluation_metrics(own)).items():
            metrics[prefix + name] = value
    return metrics


def _mean_scores(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Return means of the environment's own metrics; a failed rollout counts as 0."""
    rollouts = [rollout for group in groups for rollout in group]
    survivors = [rollout for rollout in rollouts if rollout.error is None]
    names = sorted({name for rollout in survivors for name in rollout.metrics})
    return {n: sum(r.metrics.get(n, 0.0) for r in survivors) / len(rollouts) for n in names}


def _evaluation_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group]
    survivors = [rollout for rollout in rollouts if rollout.error is None]
    metrics = {
        "reward": sum(r.reward for r in survivors) / len(rollouts),
        "error_share": 1 - len(survivors) / len(rollouts),
        "truncated_share": sum(r.is_truncated for r in survivors) / len(rollouts),
        "num_rollouts": float(len(rollouts)),
    }
    num_failed = sum(r.error is not None for r in groups[0])
    num_rollouts = num_failed + max((len(role) for role in group_by_role(groups[0])), default=0)
    if num_rollouts > 1:
        passed = sum(any(r.error is None and r.reward >= 1 for r in group) for group in groups)
        metrics[f"pass@{num_rollouts}"] = passed / len(groups)
    return metrics
