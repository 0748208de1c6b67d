"""Means over groups of rollouts: of a batch, and of an evaluation. docs/metrics.md defines each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from itertools import chain

import numpy as np

from verifiers_rl.data import group_by_role
from verifiers_rl.types import Rollout

logger = logging.getLogger(__name__)

Groups = Sequence[Sequence[Rollout]]


def batch_metrics(groups: Groups, num_rollouts: int) -> dict[str, float]:
    """Return means over the surviving rollouts of all groups. With several environments, each
    one's means are added under `NAME/`.

    Args:
        num_rollouts: of each group, or episodes, as `GroupRequest` has it. An episode that failed
            has left one rollout, with its error.
    """
    metrics = _of_batch(groups, num_rollouts)
    by_env = _by_env(groups)
    for env, own in by_env.items():
        found = _of_env(own, num_rollouts, 1.0)
        if len(by_env) > 1:
            found |= {**_of_batch(own, num_rollouts), "group_share": len(own) / len(groups)}
        metrics |= {f"{env}/{name}": value for name, value in found.items()}
    return metrics


def evaluation_metrics(groups: Groups, num_rollouts: int) -> dict[str, float]:
    """Return means over all rollouts of an evaluation, where a failed rollout counts as 0, and
    pass@k for groups of k > 1. With several environments, each one's metrics are added under
    `NAME/`. `num_rollouts` is that of `batch_metrics`.
    """
    metrics = _of_evaluation(groups, num_rollouts)
    by_env = _by_env(groups)
    for env, own in by_env.items():
        prefix = f"{env}/" if len(by_env) > 1 else ""
        found = _of_evaluation(own, num_rollouts)
        found |= _of_env(own, num_rollouts, 1 - found["error_share"])
        metrics |= {prefix + name: value for name, value in found.items()}
    return metrics


def _of_batch(groups: Groups, num_rollouts: int) -> dict[str, float]:
    rollouts = [*chain(*groups)]
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
        "restarted_share": [r.num_restarts > 0 for r in rollouts],
        "moved_share": [r.num_moves > 0 for r in rollouts],
        "uniform_group_share": is_uniform,
    }
    return {name: float(np.mean(own)) for name, own in values.items()} | {
        "reward_std": float(np.std(rewards)),
        "error_share": _error_share(groups, num_rollouts),
        "broken_turn_share": num_breaks / max(num_later_turns, 1),
    }


def _of_evaluation(groups: Groups, num_rollouts: int) -> dict[str, float]:
    survivors, error_share = _survivors(groups), _error_share(groups, num_rollouts)
    share = (1 - error_share) / max(len(survivors), 1)  # that each has of a mean
    metrics = {
        "reward": float(sum(rollout.reward for rollout in survivors) * share),
        "error_share": error_share,
        "truncated_share": sum(rollout.is_truncated for rollout in survivors) * share,
        "num_rollouts": float(len(groups) * num_rollouts),
    }
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


def _error_share(groups: Groups, num_rollouts: int) -> float:
    failed = [[rollout.error is not None for rollout in group] for group in groups]
    # A group that fails as a whole may have one rollout that says so.
    num_failed = sum(num_rollouts if all(each) else sum(each) for each in failed)
    return num_failed / (len(groups) * num_rollouts)


def _of_env(groups: Groups, num_rollouts: int, share: float) -> dict[str, float]:
    """Return means of the environment's own metrics, each over the surviving rollouts that have it,
    and the mean reward of each agent, where episodes have several. A metric that is called like
    another number of a batch or an evaluation gets another name.

    Args:
        groups, num_rollouts: of one environment.
        share: a factor of its metrics: those of rollouts that did not survive count as 0.
    """
    survivors, means = _survivors(groups), dict[str, float]()
    one = [survivors[:1]], num_rollouts  # for the names
    taken = {*_of_batch(*one), *_of_evaluation(*one), "group_share", "runtime", "wait_s"}
    names = sorted({*chain(*(rollout.metrics for rollout in survivors))})
    for name in names if names != ["reward"] else ():  # else that is the reward
        free = name
        while free in (*taken, *means, "loss"):
            free += "_score"
            _say_renamed(name, free)
        values = [rollout.metrics[name] for rollout in survivors if name in rollout.metrics]
        means[free] = float(np.mean(values)) * share
    roles = group_by_role(survivors)
    for role in roles if roles[1:] else ():
        means[f"{role[0].role}/reward"] = float(np.mean([rollout.reward for rollout in role]))
    return means


@cache  # once for each name
def _say_renamed(name: str, free: str) -> None:
    logger.warning(
        f"the environment's metric {name!r} is logged as {free!r}, because batches or evaluations "
        "have a number of that name"
    )
