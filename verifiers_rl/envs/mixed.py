"""Several environments as one: mixed by weight in training, one beside the other in evaluations."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.requests import EnvRunner, GroupRequest, GroupScorer
from verifiers_rl.types import Rollout, Split


@dataclass(frozen=True)
class Part:
    """One of several environments.

    Attributes:
        runner: runs its groups.
        weight: its share of the training groups, up to a common factor.
        only: it is used for this split only; None: for both.
        eval_examples: it has at most so many examples in an evaluation; None for no limit.
        scorer: scores its training rollouts, too.
    """

    runner: EnvRunner
    weight: float = 1.0
    only: Split | None = None
    eval_examples: int | None = None
    scorer: GroupScorer | None = None

    def sizes(self, split: Split) -> list[int]:
        """Return the sizes of this split in its environments, as far as they are used."""
        sizes = self.runner.sizes(split)
        if split == "eval" and self.eval_examples is not None:
            sizes = [min(size, self.eval_examples) for size in sizes]
        return sizes


class MixedEnvironment:
    """An `EnvRunner` of several environments, whose examples are numbered consecutively.

    Raises:
        InvalidEnvironmentError: two environments of one split have the same name, or none is for
            training.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts: dict[Split, list[Part]] = {
            split: [part for part in parts if part.only in (None, split)]
            for split in ("train", "eval")
        }
        for used in self._parts.values():
            names = [part.runner.name for part in used]
            if twice := [name for name in names if names.count(name) > 1]:
                raise InvalidEnvironmentError(
                    f"two environments are named {twice[0]!r}; give one another name"
                )
        if not self._parts["train"]:
            raise InvalidEnvironmentError(
                "no environment is for training: all have only='eval'; add one, or leave it out"
            )
        self.parts = [part.runner for part in parts]
        scorers = [part.scorer for part in parts if part.scorer is not None]
        self._opened: list[EnvRunner | GroupScorer] = [*self.parts, *scorers]
        self.name = ", ".join(dict.fromkeys(part.name for part in self.parts))
        self.description = "\n".join(part.description for part in self.parts if part.description)
        self.weights = [
            part.weight * own / sum(part.runner.weights)
            for part in self._parts["train"]
            for own in part.runner.weights
        ]
        self.bounds_replies = all(part.bounds_replies for part in self.parts)
        self.num_overlong_prompts = sum(part.num_overlong_prompts for part in self.parts)
        self.first_prompt = self._parts["train"][0].runner.first_prompt
        # A sum, because each environment keeps its connections open for a while.
        self.files_per_rollout = sum(part.files_per_rollout for part in self.parts)

    def sizes(self, split: Split) -> list[int]:
        return [size for part in self._parts[split] for size in part.sizes(split)]

    async def open(self) -> None:
        await asyncio.gather(*(one.open() for one in self._opened))

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self._opened))

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run the group in its environment, and let the scorer of that environment score it."""
        parts = self._parts[request.split]
        starts = [0, *accumulate(sum(part.sizes(request.split)) for part in parts)]
        which = bisect.bisect_right(starts, request.index) - 1
        part, own = parts[which], replace(request, index=request.index - starts[which])
        group = await part.runner.run_group(own)
        if request.split == "train" and part.scorer is not None:
            await part.scorer.score([r for r in group if r.error is None], own)
        return group
