"""Environments of both generations of `verifiers` as one: what the orchestrator runs.

    environments_classic.py  `verifiers.Environment`, up to verifiers 0.3
    environments_v1.py       `verifiers.v1`: tasksets, agents, episodes; v1_loading.py makes them

Each imports its own part of `verifiers`, and only where there is an environment of its kind.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, Literal

from verifiers_rl.envs.chat_template import reason_against_chat_template
from verifiers_rl.limits import rollouts_at_once
from verifiers_rl.types import Rollout

logger = logging.getLogger(__name__)

Split = Literal["train", "eval"]


class InvalidEnvironmentError(ValueError):
    """The environment cannot be used for training; the message says why and what to change."""


def check_classic(what: str) -> None:
    """Raise InvalidEnvironmentError where the installed verifiers has no classic environments.

    Args:
        what: the classic thing that is asked for.
    """
    if find_spec("verifiers.legacy") is None:
        raise InvalidEnvironmentError(
            f"{what} is a classic environment, and verifiers {version('verifiers')} has those of "
            "verifiers.v1 only. Install verifiers<0.4 with the vLLM that goes with it: "
            "`make CLASSIC=1 install`, or uv pip "
            "install -e '.[classic,vllm]' ([classic,cpu] --torch-backend=cpu), in a clone"
        )


def versions_of_tokens(spans: Sequence[tuple[int, int]], num_tokens: int) -> list[int]:
    """The policy version of each token, from (first token, version) pairs in order."""
    ends = [start for start, _ in spans[1:]] + [num_tokens]
    versions: list[int] = []
    for (_, sampled_by), end in zip(spans, ends, strict=True):
        versions += [sampled_by] * (min(end, num_tokens) - len(versions))
    return versions


def _field(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, dict) else getattr(message, name, None)


def text_of(messages: Any) -> str:
    """Messages as text for people."""
    if messages is None or isinstance(messages, str):
        return messages or ""
    lines = []
    for message in messages:
        content = _field(message, "content")
        text = content if isinstance(content, str) else "" if content is None else str(content)
        for call in _field(message, "tool_calls") or []:
            text += f" [{_field(call, 'name')}({_field(call, 'arguments')})]"
        lines.append(text if len(messages) == 1 else f"{_field(message, 'role')}: {text}")
    return "\n".join(lines)


@dataclass
class WeightedEnv:
    """One of several environments to train on.

    Attributes:
        env: an `Env` or a `Taskset` of `verifiers.v1` or a taskset's id, or a classic
            `verifiers.Environment`.
        name: prefix of its metrics.
        weight: its share of the groups, up to a common factor.
        sampling_args: in place of the run's, such as {"max_tokens": 64} or {"top_p": 0.9}. Not
            `temperature`: the trainer takes all logprobs at one.
    """

    env: Any
    name: str
    weight: float = 1.0
    sampling_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.weight, int | float) or not 0 < self.weight < math.inf:
            raise InvalidEnvironmentError(
                f"environment {self.name!r}: weight={self.weight!r} must be a number > 0"
            )


class MixedEnvironment:
    """Several environments as one; their examples are counted through all in turn.

    Raises:
        InvalidEnvironmentError: two of one name.
    """

    def __init__(self, parts: Sequence[Any], weights: Sequence[float]) -> None:
        names = [part.name for part in parts]
        if twice := [name for name in names if names.count(name) > 1]:
            raise InvalidEnvironmentError(
                f"two environments are named {twice[0]!r}; give one another name"
            )
        self.parts = list(parts)
        self.weights = list(weights)
        self.bounds_replies = all(part.bounds_replies for part in parts)
        self.num_overlong_prompts = sum(part.num_overlong_prompts for part in parts)

    def sizes(self, split: Split) -> list[int]:
        return [size for part in self.parts for size in part.sizes(split)]

    @property
    def is_multi_turn(self) -> bool:
        return any(part.is_multi_turn for part in self.parts)

    @property
    def first_prompt(self) -> list[Any]:
        return self.parts[0].first_prompt

    @property
    def eval_dataset(self) -> Any:
        return self.parts[0].eval_dataset

    async def open(self) -> None:
        await asyncio.gather(*(part.open() for part in self.parts))

    async def close(self) -> None:
        await asyncio.gather(*(part.close() for part in self.parts))

    async def run_group(self, split: Split, index: int, *args: Any, **kwargs: Any) -> list[Rollout]:
        starts = [0, *accumulate(self.sizes(split))]
        which = bisect.bisect_right(starts, index) - 1
        part = self.parts[which]
        return await part.run_group(split, index - starts[which], *args, **kwargs)


def warn_of_replies_beyond_use(runner: Any, max_model_len: int, args: Any) -> None:
    """Classic environments leave the length of a reply to max_tokens and the server."""
    if args.max_tokens is None and max_model_len > args.max_seq_len and not runner.bounds_replies:
        logger.warning(
            "the server goes on to max_model_len=%d tokens, of which max_seq_len=%d are used; "
            "start vf-vllm with --max-model-len %d, or set max_tokens",
            max_model_len,
            args.max_seq_len,
            args.max_seq_len,
        )


def _runner_class(env: Any, name: str) -> Any:
    homes = {base.__module__ for base in type(env).__mro__}
    if any(home.startswith("verifiers.v1.") for home in homes):
        from verifiers_rl.envs.v1 import V1Environment

        return V1Environment
    if any(home.startswith("verifiers.") for home in homes):
        from verifiers_rl.envs.classic import ClassicEnvironment

        return ClassicEnvironment
    raise InvalidEnvironmentError(
        f"environment {name!r}: expected an Env or a Taskset of verifiers.v1, or a classic "
        f"verifiers.Environment, got {type(env).__name__}"
    )


def make_runner(
    env: Any,
    base_url: str,
    tokenizer: Any,
    args: Any,
    report: Callable[[str], None] = print,
) -> Any:
    """What the orchestrator runs: one environment, or a list of `WeightedEnv` mixed. Its
    `max_concurrent` is `args.max_concurrent`, or less where fewer files may be open; what is played
    where is printed.

    Args:
        env: an `Env` or a `Taskset` of `verifiers.v1` or a taskset's id, a classic
            `verifiers.Environment`, or WeightedEnvs.
        base_url: of the inference server, without /v1.
        tokenizer: the model's.
        args: the `RLConfig`.
        report: takes a line for each environment that says what is played where.

    Raises:
        InvalidEnvironmentError: one cannot be used for training, or sampled so.
    """
    mixed = list(env) if isinstance(env, list | tuple) else [WeightedEnv(env, "env")]
    if not mixed or not all(isinstance(one, WeightedEnv) for one in mixed):
        raise InvalidEnvironmentError(
            "env: a list of environments must hold WeightedEnv(env, name) only, and at least one"
        )
    sampling = []
    for one in mixed:
        try:
            sampling.append(args.with_sampling(one.sampling_args))
        except ValueError as error:
            raise InvalidEnvironmentError(f"environment {one.name!r}, sampling: {error}") from error
    for biased in {", ".join(one.sampling_changes_probabilities()) for one in sampling} - {""}:
        logger.warning(
            "%s: the server samples from another distribution than the trainer's softmax; "
            "importance ratios will be off, watch mismatch_kl",
            biased,
        )
    parts: list[Any] = []
    for one, sampled in zip(mixed, sampling, strict=True):
        options = {
            "base_url": base_url,
            "tokenizer": tokenizer,
            "max_seq_len": args.max_seq_len,
            "max_prompt_len": args.max_prompt_len,
            "mask_env_responses": args.mask_env_responses,
            "timeout_s": args.generation_timeout,
            "client_type": args.client_type,
            "name": one.name,
            "sampling_args": sampled.sampling_args() if one.sampling_args else None,
        }
        environment = one.env
        if isinstance(environment, str):
            from verifiers_rl.envs.v1_loading import load_v1_environment

            environment = load_v1_environment({"taskset": {"id": environment}})
        runner_class = _runner_class(environment, one.name)
        if args.env_workers:
            if not runner_class.RUNS_IN_WORKERS:
                raise InvalidEnvironmentError(
                    f"environment {one.name!r}: env_workers={args.env_workers}: environments of "
                    "verifiers.v1 run in the trainer's process only; leave env_workers out"
                )
            from verifiers_rl.envs.workers import WorkerEnvironment

            options |= {"num_workers": args.env_workers, "max_concurrent": args.max_concurrent}
            parts.append(WorkerEnvironment(environment, **options))
            continue
        if not runner_class.RUNS_IN_WORKERS:
            options["num_eval_tasks"] = args.eval_examples
        parts.append(runner_class(environment, **options))
        if description := getattr(parts[-1], "description", ""):
            report(description)
    runner: Any = parts[0]
    if len(parts) > 1:
        runner = MixedEnvironment(parts, [one.weight for one in mixed])
    # Each environment keeps connections for a while; a classic rollout holds one, to the server.
    files_per_rollout = sum(getattr(part, "files_per_rollout", 1) for part in parts)
    runner.max_concurrent = rollouts_at_once(args.max_concurrent, files_per_rollout)
    renders_anew = args.client_type == "openai_chat_completions" and runner.is_multi_turn
    if renders_anew and tokenizer and (problem := reason_against_chat_template(tokenizer)):
        logger.warning(
            "%s: each turn will start a sequence of its own, and be trained as one. "
            'client_type="openai_chat_completions_token" goes on with the tokens as sampled',
            problem,
        )
    return runner
