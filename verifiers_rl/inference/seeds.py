"""Seeds of rollout requests, for `deterministic = true`: each request gets its own, which follows
from the run's seed and from the place of its rollout.

    SeededEnvironment   sets the seed of a group
    environment         begins a rollout of the group: `begin_rollout`
    ServerClient        takes the seed of each request of this rollout
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from typing import Any


def derive_seed(*parts: int | str) -> int:
    """Return a seed from 0 to 2**63 - 1 that follows from these parts and their order."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def with_seed(body: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the body of a request with this seed, unless it has its own. Requests of
    /inference/v1/generate have their sampling options in a field.
    """
    if isinstance(sampling := body.get("sampling_params"), dict):
        return {**body, "sampling_params": {"seed": seed, **sampling}}
    return {"seed": seed, **body}


class RolloutSeeds:
    """The seeds of one rollout's requests, in their order.

    Args:
        group_seed: of its group.
        number: of the rollout in the group.
    """

    def __init__(self, group_seed: int, number: int) -> None:
        self._group_seed, self._number = group_seed, number
        self._num_taken = 0

    def take(self) -> int:
        self._num_taken += 1
        return derive_seed(self._group_seed, self._number, self._num_taken)


# Of the group that runs in this task; None without seeds.
current_group_seed: ContextVar[int | None] = ContextVar("group_seed", default=None)
# Of the rollout that runs in this task, or in one that it has started.
current_seeds: ContextVar[RolloutSeeds | None] = ContextVar("rollout_seeds", default=None)


def begin_rollout(number: int) -> RolloutSeeds | None:
    """Let the requests of this task have the seeds of a rollout, from the first one on; None if its
    group has no seed.

    Args:
        number: of the rollout in its group.
    """
    group_seed = current_group_seed.get()
    seeds = None if group_seed is None else RolloutSeeds(group_seed, number)
    current_seeds.set(seeds)
    return seeds
