"""Several environments as one, mixed by weight."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.types import EnvRunner, Rollout, Split


class MixedEnvironment:
    """An `EnvRunner` of several environments, whose examples are numbered consecutively.

    Raises:
        InvalidEnvironmentError: two environments have the same name.
    """

    def __init__(self, parts: Sequence[EnvRunner], weights: Sequence[float]) -> None:
        names = [part.name for part in parts]
        if twice := [name for name in names if names.count(name) > 1]:
            raise InvalidEnvironmentError(
                f"two environments are named {twice[0]!r}; give one another name"
            )
        self.parts = list(parts)
        self.name = ", ".join(names)
        self.description = "\n".join(part.description for part in parts if part.description)
        self.weights = [
            weight * own / sum(part.weights)
            for part, weight in zip(parts, weights, strict=True)
            for own in part.weights
        ]
        self.bounds_replies = all(part.bounds_replies for part in parts)
        self.num_overlong_prompts = sum(part.num_overlong_prompts for part in parts)
        self.first_prompt = parts[0].first_prompt
        # A sum, because each environment keeps its connections open for a while.
        self.files_per_rollout = sum(part.files_per_rollout for part in parts)

    def sizes(self, split: Split) -> list[int]:
        return [size for part in self.parts for size in part.sizes(split)]

    async def open(self) -> None:
        await asyncio.gather(*(part.open() for part in self.parts))

    async def close(self) -> None:
        await asyncio.gather(*(part.close() for part in self.parts))

    async def run_group(self, split: Split, index: int, *args: Any, **kwargs: Any) -> list[Rollout]:
        starts = [0, *accumulate(self.sizes(split))]
        which = bisect.bisect_right(starts, index) - 1
        part = self.parts[which]
        return await part.run_group(split, index - starts[which], *args, **kwargs)
