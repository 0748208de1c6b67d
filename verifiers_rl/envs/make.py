"""Makes what the orchestrator runs of what a user passes as `env`: one environment, or several."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verifiers_rl.envs.base import (
    InvalidEnvironmentError,
    NotPortableError,
    RunnerOptions,
    WeightedEnv,
)
from verifiers_rl.envs.foreign import ForeignEnvironment
from verifiers_rl.envs.workers import WorkerEnvironment, WorkerPool, count_workers
from verifiers_rl.process.terminal import show
from verifiers_rl.requests import EnvRunner, GroupRequest, GroupScorer
from verifiers_rl.types import Rollout, Split, missing_members

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One environment of a run.

    Attributes:
        given: its weight, name, scorer, and for what it is used.
        runner: runs its groups.
        sampling: its own sampling options of a split, in place of the run's.
    """

    given: WeightedEnv
    runner: EnvRunner
    sampling: Mapping[Split, dict[str, Any]]

    def sizes(self, split: Split) -> list[int]:
        """Return the sizes of this split, as far as it is used."""
        limit = self.given.eval_examples if split == "eval" else None
        return [min(size, limit or size) for size in self.runner.sizes(split)]


class Environments:
    """The `EnvRunner` of a run: one environment, or several, mixed by weight in training and one
    beside the other in evaluations. Their examples are numbered consecutively.

    Attributes:
        scoring_timeout_s: a group may wait so long for a scorer, beside the time of its rollouts.

    Raises:
        InvalidEnvironmentError: two environments of one split have the same name, or none is for
            training.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts: dict[Split, list[Part]] = {
            split: [part for part in parts if part.given.only in (None, split)]
            for split in ("train", "eval")
        }
        for used in self.parts.values():
            names = [part.given.name for part in used]
            if twice := [name for name in names if names.count(name) > 1]:
                raise InvalidEnvironmentError(
                    f"two environments are named {twice[0]!r}; give one another name"
                )
        for part in parts:
            if part.given.eval_examples is not None and len(part.runner.weights) > 1:
                raise InvalidEnvironmentError(
                    f"environment {part.given.name!r}: eval_examples is for one environment, and "
                    f"its runner has {len(part.runner.weights)}; leave it out"
                )
        if not self.parts["train"]:
            raise InvalidEnvironmentError(
                "no environment is for training: all have only='eval'; add one, or leave it out"
            )
        self.weights = [
            part.given.weight * own / sum(part.runner.weights)
            for part in self.parts["train"]
            for own in part.runner.weights
        ]
        scorers = [part.given.scorer for part in parts if part.given.scorer is not None]
        if len({*map(id, scorers)}) < len(scorers):
            raise InvalidEnvironmentError(
                "one scorer, such as a Distillation, is given to two environments; make one for "
                "each, because it has the examples of its environment"
            )
        self.scoring_timeout_s = max((scorer.longest_wait_s for scorer in scorers), default=0.0)
        self._opened: list[EnvRunner | GroupScorer] = [*(part.runner for part in parts), *scorers]

    def sizes(self, split: Split) -> list[int]:
        return [size for part in self.parts[split] for size in part.sizes(split)]

    async def open(self) -> None:
        # A set, because workers that several environments share are opened and closed once.
        await asyncio.gather(*(open_one() for open_one in {one.open for one in self._opened}))

    async def close(self) -> None:
        await asyncio.gather(*(close_one() for close_one in {one.close for one in self._opened}))

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run the group in its environment, and let the scorer of that environment score it."""
        index, split = request.index, request.split
        for part in self.parts[split]:
            if index < (size := sum(part.sizes(split))):
                break
            index -= size
        sampling = part.sampling.get(split, request.sampling_args)
        own = replace(request, index=index, sampling_args=sampling)
        group = await part.runner.run_group(own)
        if len(part.runner.weights) == 1:
            for rollout in group:
                rollout.env, rollout.example_id = part.given.name, index
        if split == "train" and part.given.scorer is not None:
            await part.given.scorer.score([r for r in group if r.error is None], own)
        return group


def _runner(one: WeightedEnv, options: RunnerOptions) -> Any:
    """Return the `EnvRunner` of one environment of any kind."""
    env, what = one.env, type(one.env).__name__
    if one.python:
        table = {"id": env} if isinstance(env, str) else env
        if not isinstance(table, Mapping) or not ("id" in table or "taskset" in table):
            raise InvalidEnvironmentError(
                f"environment {one.name!r}: with python={one.python!r}, env must be an id or a "
                f'dict such as {{"id": ..., "args": {{...}}}}, not {what}'
            )
        return ForeignEnvironment(table, one.python, options, one.folders)
    if hasattr(env, "run_group"):  # the user's own EnvRunner
        if lacking := missing_members(env, EnvRunner):
            raise InvalidEnvironmentError(
                f"environment {one.name!r}: {what} has no {', '.join(lacking)}; "
                "requests.EnvRunner says what it needs"
            )
        return env
    from verifiers_rl.envs.dataset import DatasetEnvironment, ExampleTaskset
    from verifiers_rl.envs.v1 import V1Environment
    from verifiers_rl.envs.v1_loading import load_v1_environment

    if isinstance(env, str):
        env = load_v1_environment({"id": env})
    if type(env) is ExampleTaskset:  # others have an agent
        return DatasetEnvironment(env, options)
    return V1Environment(env, options)


def make_runner(
    env: Any,
    base_url: str,
    tokenizer: Any,
    args: Any,
) -> Environments:
    """Return the runner of one environment, or of a list of `WeightedEnv` that are mixed. Print
    who plays where.

    Args:
        env: an `Env` or a `Taskset` of `verifiers.v1` or a taskset's id, an `EnvRunner`, or
            WeightedEnvs.
        base_url: URL of the inference server, without /v1.
        tokenizer: the model's.
        args: the `RLConfig`.

    Raises:
        InvalidEnvironmentError: an environment cannot be used for training, or its sampling_args
            are not allowed.
    """
    given = list(env) if isinstance(env, list | tuple) else [WeightedEnv(env, "env")]
    if not given or not all(isinstance(one, WeightedEnv) for one in given):
        raise InvalidEnvironmentError(
            "env: a list of environments must hold WeightedEnv(env, name) only, and at least one; "
            "prompts become an environment by env_from(prompts, reward)"
        )
    pools: dict[str, WorkerPool] = {}  # by their Python
    parts, biased = [], set()
    for one in given:
        try:
            sampled = args.with_sampling(one.sampling_args)
        except ValueError as error:
            raise InvalidEnvironmentError(f"environment {one.name!r}, sampling: {error}") from error
        biased.add(", ".join(sampled.sampling_changes_probabilities()))
        options = RunnerOptions(
            base_url,
            tokenizer,
            args.max_seq_len,
            args.max_prompt_len,
            args.mask_env_responses,
            args.generation_timeout,
            one.name,
            args.max_concurrent,
            args.eval_examples,
            sampled.chat_template_kwargs,
        )
        runner = _runner(one, options)
        if one.scorer is not None:
            example = getattr(runner, "example", None)  # another Python has none here
            one.scorer.connect(options, sampled, example)
        # Another Python has one worker at least.
        if number := count_workers(args.env_workers) or int(bool(one.python)):
            pool = WorkerPool(number, args.generation_timeout, one.python)
            try:
                if not hasattr(runner, "recipe"):
                    raise NotPortableError(f"{type(runner).__name__} has no method `recipe`")
                runner = WorkerEnvironment(runner, pools.setdefault(one.python, pool))
            except NotPortableError as error:
                if args.env_workers != "auto":
                    raise InvalidEnvironmentError(
                        f"environment {one.name!r}: env_workers={number}: {error}; or set "
                        "env_workers=0"
                    ) from error
                where = "in a thread of the trainer, which makes both slower"
                show(print, f"environment {one.name!r} runs {where}: {error}")
        if description := getattr(runner, "description", ""):
            show(print, description)
        sampling: dict[Split, dict[str, Any]] = {}
        if one.sampling_args:
            sampling = {"train": sampled.sampling_args(), "eval": sampled.eval_sampling_args()}
        parts.append(Part(one, runner, sampling))
    for names in biased - {""}:
        logger.warning(
            f"{names}: the server samples from another distribution than the trainer's softmax; "
            "importance ratios will be off, watch mismatch_kl; sampling_mask = true makes up for "
            "top_p, top_k and min_p"
        )
    made = Environments(parts)
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    if evaluates and not any(made.sizes("eval")):
        raise InvalidEnvironmentError(
            f"eval_strategy={args.eval_strategy.value!r}: no environment has an example for "
            "evaluations that fits; add some, or leave eval_strategy and eval_on_start out"
        )
    return made
