"""What is computed from groups of rollouts: order of examples, filters, metrics. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from verifiers_rl.types import Rollout

# Size of a stream, which has no end. A number that no run reaches, so that examples of several
# environments are counted through all in turn with streams among them.
ENDLESS = 2**60


def describe_sizes(sizes: Sequence[int]) -> str:
    """How many examples these environments have, for people."""
    num_streams = sum(size >= ENDLESS for size in sizes)
    streams = {0: [], 1: ["a stream"]}.get(num_streams, [f"{num_streams} streams"])
    num_examples = sum(size for size in sizes if size < ENDLESS)
    return " and ".join([*streams, *([str(num_examples)] if num_examples or not streams else [])])


def example_index(position: int, num_examples: int, shuffle: bool, seed: int) -> int:
    """The example at this position of an endless run:
    every epoch has each once, in an order of its own. A stream has its own order and one epoch.
    """
    if num_examples >= ENDLESS:
        return position
    epoch, offset = divmod(position, num_examples)
    if not shuffle:
        return offset
    return int(_epoch_order(num_examples, seed, epoch)[offset])


@lru_cache(maxsize=32)  # a step asks for many positions of an epoch or two, of each environment
def _epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_examples)


class ExampleOrder:
    """Which example each position of an endless run has, over one or several environments.

    Positions are dealt to the environments in proportion to their weights by a low-discrepancy
    sequence (multiples of the golden ratio modulo 1), so that every stretch of the run has about
    its share of each; within an environment, `example_index` says what comes next. All of it
    follows from the position: nothing has to be saved.

    Args:
        sizes: examples of each environment; `ENDLESS` of a stream.
        weights: share of each, up to a common factor; equal by default.
        shuffle, seed: see `example_index`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] | None = None,
        shuffle: bool = True,
        seed: int = 42,
    ) -> None:
        shares = np.array(weights or [1.0] * len(sizes), dtype=np.float64)
        self._borders = np.cumsum(shares / shares.sum())[:-1]
        self._sizes = list(sizes)
        self._shuffle = shuffle
        self._seed = seed

    def at(self, positions: range) -> list[int]:
        """The examples of these positions, counted through all environments in turn."""
        if len(self._sizes) == 1:
            return [example_index(p, self._sizes[0], self._shuffle, self._seed) for p in positions]
        golden = (5**0.5 - 1) / 2
        dealt = np.searchsorted(self._borders, np.arange(positions.stop) * golden % 1, "right")
        counts = np.bincount(dealt[: positions.start], minlength=len(self._sizes))
        examples = []
        for env in dealt[positions.start :].tolist():
            own = example_index(int(counts[env]), self._sizes[env], self._shuffle, self._seed)
            examples.append(sum(self._sizes[:env]) + own)
            counts[env] += 1
        return examples


def by_role(group: Sequence[Rollout]) -> list[list[Rollout]]:
    """The surviving rollouts of each agent."""
    roles: dict[str, list[Rollout]] = {}
    for rollout in group:
        if rollout.error is None:
            roles.setdefault(rollout.role, []).append(rollout)
    return list(roles.values())


@dataclass(frozen=True)
class GroupFilter:
    """Which groups are worth training on, by the rewards of their surviving rollouts; with several
    agents, those of any. A group without survivors passes: were it replaced, an environment that
    always fails would end later.

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
        roles = by_role(group)
        return not roles or any(map(self._passes, roles))

    def _passes(self, survivors: Sequence[Rollout]) -> bool:
        rewards = np.array([rollout.reward for rollout in survivors])
        return bool(
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
    """Means over the surviving rollouts of all groups, and of each environment's where there are
    several; docs/metrics.md defines each.
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


def _rewards_of_roles(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    roles = by_role(rollouts)
    if len(roles) < 2:
        return {}
    return {
        f"{prefix}/{role[0].role}/reward": float(np.mean([r.reward for r in role]))
        for role in roles
    }


def _group_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group if rollout.error is None]
    num_all = sum(len(group) for group in groups)
    if not rollouts:  # all of this environment's failed
        return {"error_share": 1.0}
    rewards = np.array([rollout.reward for rollout in rollouts])
    tokens = np.array([rollout.num_sampled_tokens for rollout in rollouts])
    roles = [found for group in groups if (found := by_role(group))]  # not where all failed
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
        "uniform_group_share": float(np.mean(uniform)),
        "broken_turn_share": num_breaks / max(num_later_turns, 1),
    }


def evaluation_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Means over all rollouts of an evaluation, errors as 0, and pass@k for groups of k > 1; of
    each environment too where there are several.
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
    """Means of the environment's own metrics, errors as 0."""
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
    num_rollouts = num_failed + max((len(role) for role in by_role(groups[0])), default=0)
    if num_rollouts > 1:
        passed = sum(any(r.error is None and r.reward >= 1 for r in group) for group in groups)
        metrics[f"pass@{num_rollouts}"] = passed / len(groups)
    return metrics
