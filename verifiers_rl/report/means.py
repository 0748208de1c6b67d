"""Means over groups of rollouts: of a batch, and of an evaluation. docs/metrics.md defines each."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from verifiers_rl.data import group_by_role
from verifiers_rl.types import Rollout

logger = logging.getLogger(__name__)

Groups = Sequence[Sequence[Rollout]]
_BESIDE = ("runtime", "wait_s")  # what is added to the metrics of an evaluation


def batch_metrics(groups: Groups) -> dict[str, float]:
    """Return means over the surviving rollouts of all groups. With several environments, each
    one's means are added under `NAME/`.
    """
    metrics = _of_batch(groups)
    by_env = _by_env(groups)
    for env, own in by_env.items():
        survivors = _survivors(own)
        scores = _mean_scores(survivors, len(survivors))
        found = {name: scores[name] for name in scores if name not in metrics}
        found |= _rewards_of_roles(survivors)
        if len(by_env) > 1:
            found |= {**_of_batch(own), "group_share": len(own) / len(groups)}
        metrics |= {f"{env}/{name}": value for name, value in found.items()}
    return metrics


def evaluation_metrics(groups: Groups) -> dict[str, float]:
    """Return means over all rollouts of an evaluation, where a failed rollout counts as 0, and
    pass@k for groups of k > 1. With several environments, each one's metrics are added under
    `NAME/`.
    """
    metrics = _of_evaluation(groups)
    by_env = _by_env(groups)
    for env, own in by_env.items():
        prefix = f"{env}/" if len(by_env) > 1 else ""
        survivors = _survivors(own)
        scores, ours = _mean_scores(survivors, sum(map(len, own))), _of_evaluation(own)
        if taken := scores.keys() & {*ours, *_BESIDE} - {"reward"}:
            logger.warning(
                "environment %r: evaluations have own metrics of the names %s; rename its scores, "
                "which are not logged",
                env,
                sorted(taken),
            )
        scores |= ours | _rewards_of_roles(survivors)
        metrics |= {prefix + name: value for name, value in scores.items()}
    return metrics


def _of_batch(groups: Groups) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group]
    survivors = _survivors(groups)
    if not survivors:  # all rollouts of these groups failed
        return {"error_share": 1.0}
    is_uniform = [
        all(len({rollout.reward for rollout in role}) == 1 for role in roles)
        for group in groups
        if (roles := group_by_role(group))
    ]
    spoke = [rollout for rollout in survivors if rollout.samples]  # the others took no turn
    num_later_turns = sum(rollout.num_turns - 1 for rollout in spoke)
    num_breaks = sum(len(rollout.samples) - 1 for rollout in spoke)
    rewards = [r.reward for r in survivors]
    values: dict[str, Sequence[float]] = {
        "reward": rewards,
        "completion_tokens": [r.num_sampled_tokens for r in survivors],
        "num_turns": [r.num_turns for r in survivors],
        "truncated_share": [r.is_truncated for r in survivors],
        "error_share": [r.error is not None for r in rollouts],
        "restarted_share": [r.num_restarts > 0 for r in rollouts],
        "moved_share": [r.num_moves > 0 for r in rollouts],
        "uniform_group_share": is_uniform,
    }
    return {name: float(np.mean(own)) for name, own in values.items()} | {
        "reward_std": float(np.std(rewards)),
        "broken_turn_share": num_breaks / max(num_later_turns, 1),
    }


def _of_evaluation(groups: Groups) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group]
    survivors = _survivors(groups)
    metrics = {
        "reward": float(sum(rollout.reward for rollout in survivors) / len(rollouts)),
        "error_share": 1 - len(survivors) / len(rollouts),
        "truncated_share": sum(rollout.is_truncated for rollout in survivors) / len(rollouts),
        "num_rollouts": float(len(rollouts)),
    }
    num_failed = sum(rollout.error is not None for rollout in groups[0])
    num_rollouts = num_failed + max(map(len, group_by_role(groups[0])), default=0)
    if num_rollouts > 1:
        passed = sum(any(r.error is None and r.reward >= 1 for r in group) for group in groups)
        metrics[f"pass@{num_rollouts}"] = passed / len(groups)
    return metrics


def _by_env(groups: Groups) -> dict[str, Groups]:
    """Return the groups of each environment, by its name and in the order of names."""
    envs = sorted({group[0].env for group in groups})
    return {env: [group for group in groups if group[0].env == env] for env in envs}


def _survivors(groups: Groups) -> list[Rollout]:
    return [rollout for group in groups for rollout in group if rollout.error is None]


def _rewards_of_roles(survivors: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean reward of each agent, where episodes have several."""
    roles = group_by_role(survivors)
    rewards = {role[0].role: [rollout.reward for rollout in role] for role in roles}
    return {f"{name}/reward": float(np.mean(own)) for name, own in rewards.items() if roles[1:]}


def _mean_scores(survivors: Sequence[Rollout], num_rollouts: int) -> dict[str, float]:
    """Return means of the environment's own metrics over so many rollouts; those that did not
    survive, and those that lack one, count as 0.
    """
    sums = Counter[str]()
    for rollout in survivors:
        sums.update(rollout.metrics)
    return {name: float(sums[name] / num_rollouts) for name in sorted(sums)}
