"""Rollouts whose tokens follow from the run's seed: `deterministic = true`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from verifiers_rl.inference import current_group_seed, derive_seed
from verifiers_rl.types import EnvRunner, Progress, Rollout, Slots, Split


class SeededEnvironment:
    """An `EnvRunner` whose requests for rollouts have seeds.

    The seed of a group follows from the run's seed, the policy version with which it began, its
    example, and how often it has begun before with both. So it depends neither on the other groups
    nor on the order in which they end. With `max_off_policy_steps = 0` a resumed run has the seeds
    that it had. With 1, its first batch is sampled from newer weights. A batch that is begun again
    after a lost server gets other seeds.

    Args:
        env: runs the groups. The requests of a user's own `EnvRunner` get seeds if it sends them
            through `ServerClient` and calls `begin_rollout`.
        seed: of the run.
    """

    def __init__(self, env: EnvRunner, seed: int) -> None:
        self._env, self._seed = env, seed
        self._num_begun: Counter[tuple[Split, int, int]] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    async def run_group(
        self,
        split: Split,
        index: int,
        num_rollouts: int,
        model: str,
        sampling_args: dict[str, Any],
        policy_version: int,
        slots: Slots | Progress,
    ) -> list[Rollout]:
        """Do as `EnvRunner.run_group`."""
        place = split, policy_version, index
        self._num_begun[place] += 1
        group_seed = derive_seed(self._seed, *place, self._num_begun[place])
        before = current_group_seed.set(group_seed)
        try:
            return await self._env.run_group(
                split, index, num_rollouts, model, sampling_args, policy_version, slots
            )
        finally:
            current_group_seed.reset(before)
