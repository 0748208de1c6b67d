"""Makes the `EnvRunner` that the orchestrator runs from what a user passes as `env`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

from verifiers_rl.envs.base import (
    InvalidEnvironmentError,
    NotPortableError,
    PortableEnvironment,
    RunnerOptions,
    WeightedEnv,
)
from verifiers_rl.envs.foreign import ForeignEnvironment
from verifiers_rl.envs.mixed import MixedEnvironment, Part
from verifiers_rl.envs.workers import WorkerEnvironment, WorkerPool, count_workers
from verifiers_rl.requests import EnvRunner
from verifiers_rl.types import missing_members

logger = logging.getLogger(__name__)


def warn_of_replies_beyond_use(runner: Any, max_model_len: int, args: Any) -> None:
    """Warn if the server generates more tokens than are used. Classic environments limit a reply
    only by max_tokens and the server's max_model_len.
    """
    if args.max_tokens is None and max_model_len > args.max_seq_len and not runner.bounds_replies:
        logger.warning(
            "the server generates up to max_model_len=%d tokens, of which max_seq_len=%d are used; "
            "start vf-vllm with --max-model-len %d, or set max_tokens",
            max_model_len,
            args.max_seq_len,
            args.max_seq_len,
        )


def _what(env: Any) -> str:
    """Describe what was passed, for an error."""
    if isinstance(env, type):
        return f"the class {env.__name__}; make an object of it, {env.__name__}(config)"
    return type(env).__name__


def _runner(env: Any, options: RunnerOptions) -> EnvRunner:
    """Return the `EnvRunner` of one environment of any kind."""
    if hasattr(env, "run_group") and hasattr(env, "sizes"):  # the user's own EnvRunner
        if lacking := missing_members(env, EnvRunner):
            raise InvalidEnvironmentError(
                f"environment {options.name!r}: {type(env).__name__} has no {', '.join(lacking)}; "
                "requests.EnvRunner says what it needs"
            )
        if len(env.weights) != len(env.sizes("train")):
            raise InvalidEnvironmentError(
                f"environment {options.name!r}: {len(env.weights)} weights and "
                f"{len(env.sizes('train'))} sizes; there must be one of both for each environment"
            )
        if options.sampling_args:
            raise InvalidEnvironmentError(
                f"environment {options.name!r}: sampling does nothing for an EnvRunner of your "
                "own; leave it out, and do in it what it would do"
            )
        return env
    from verifiers_rl.envs.v1 import V1Environment
    from verifiers_rl.envs.v1_loading import load_v1_environment

    if isinstance(env, str):
        env = load_v1_environment({"taskset": {"id": env}})
    if V1Environment.can_run(env):
        return V1Environment(env, options)
    raise InvalidEnvironmentError(
        f"environment {options.name!r}: expected an Env or a Taskset of verifiers.v1, got "
        f"{_what(env)}. Prompts and a reward function become one by "
        "env_from(prompts, reward)"
    )


def _foreign(one: WeightedEnv, options: RunnerOptions) -> Any:
    """Return the environment of another Python."""
    table = {"id": one.env} if isinstance(one.env, str) else one.env
    if not isinstance(table, Mapping) or not ("id" in table or "taskset" in table):
        raise InvalidEnvironmentError(
            f"environment {one.name!r}: with python={one.python!r}, env must be an id or a dict "
            f'such as {{"id": ..., "args": {{...}}}}, not {_what(one.env)}'
        )
    return ForeignEnvironment(table, one.python, options, one.folders)


def _in_workers(
    runner: EnvRunner, pool: WorkerPool, env_workers: int | str, report: Callable[[str], None]
) -> EnvRunner:
    """Return the runner of the same environment in worker processes. If that is not possible,
    return it as it is, and report why.

    Raises:
        InvalidEnvironmentError: that is not possible, and `env_workers` is a number.
    """
    try:
        if not hasattr(runner, "recipe"):
            raise NotPortableError(f"{type(runner).__name__} has no method `recipe`")
        return WorkerEnvironment(cast(PortableEnvironment, runner), pool)
    except NotPortableError as error:
        where = "" if runner.name == "env" else f" {runner.name!r}"
        if env_workers != "auto":
            raise InvalidEnvironmentError(
                f"environment{where}: env_workers={env_workers}: {error}; or set env_workers=0"
            ) from error
        report(
            f"environment{where} runs in a thread of the trainer, which makes both slower: {error}"
        )
        return runner


def longest_wait_s(env: Any) -> float:
    """Return the seconds that a group may wait for a scorer, beside the time of its rollouts."""
    mixed = env if isinstance(env, list | tuple) else ()
    scorers = [one.scorer for one in mixed if isinstance(one, WeightedEnv) and one.scorer]
    return max((scorer.longest_wait_s for scorer in scorers), default=0.0)


def make_runner(
    env: Any,
    base_url: str,
    tokenizer: Any,
    args: Any,
    report: Callable[[str], None] = print,
) -> EnvRunner:
    """Return the runner of one environment, or of a list of `WeightedEnv` that are mixed. Report
    who plays where.

    Args:
        env: an `Env` or a `Taskset` of `verifiers.v1` or a taskset's id, an `EnvRunner`, or
            WeightedEnvs.
        base_url: URL of the inference server, without /v1.
        tokenizer: the model's.
        args: the `RLConfig`.
        report: called with the description of each environment that has one.

    Raises:
        InvalidEnvironmentError: an environment cannot be used for training, or its sampling_args
            are not allowed.
    """
    mixed = list(env) if isinstance(env, list | tuple) else [WeightedEnv(env, "env")]
    if not mixed or not all(isinstance(one, WeightedEnv) for one in mixed):
        raise InvalidEnvironmentError(
            "env: a list of environments must hold WeightedEnv(env, name) only, and at least one; "
            "prompts become an environment by env_from(prompts, reward)"
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
            "importance ratios will be off, watch mismatch_kl%s",
            biased,
            "; sampling_mask = true makes up for top_p, top_k and min_p"
            if {"top_p", "top_k", "min_p"} & {*biased.split(", ")}
            else "",
        )
    num_workers = count_workers(args.env_workers)
    pools: dict[str, WorkerPool] = {}  # by their Python
    parts: list[EnvRunner] = []
    for one, sampled in zip(mixed, sampling, strict=True):
        options = RunnerOptions(
            base_url=base_url,
            tokenizer=tokenizer,
            max_seq_len=args.max_seq_len,
            max_prompt_len=args.max_prompt_len,
            mask_env_responses=args.mask_env_responses,
            timeout_s=args.generation_timeout,
            client_type=args.client_type,
            name=one.name,
            sampling_args=sampled.sampling_args() if one.sampling_args else None,
            eval_sampling_args=sampled.eval_sampling_args() if one.sampling_args else None,
            num_eval_tasks=args.eval_examples,
            tools_in_process=args.tools_in_process,
            chat_template_kwargs=sampled.chat_template_kwargs,
        )
        parts.append(_foreign(one, options) if one.python else _runner(one.env, options))
        if len(mixed) > 1 and parts[-1].name != one.name:
            raise InvalidEnvironmentError(
                f"environment {one.name!r} is an EnvRunner named {parts[-1].name!r}; give both the "
                "same name"
            )
        example = None if one.python else getattr(parts[-1], "example", None)
        if number := num_workers or bool(one.python):  # another Python has one at least
            limits = args.max_concurrent, args.generation_timeout
            pool = pools.setdefault(one.python, WorkerPool(number, *limits, one.python))
            parts[-1] = _in_workers(parts[-1], pool, args.env_workers, report)
        if description := parts[-1].description:
            report(description)
        if one.scorer is not None:
            one.scorer.connect(options, sampled, example)
    one = mixed[0]
    if len(parts) == 1 and all(x is None for x in (one.only, one.eval_examples, one.scorer)):
        return parts[0]
    return MixedEnvironment(
        [
            Part(part, one.weight, one.only, one.eval_examples, one.scorer)
            for part, one in zip(parts, mixed, strict=True)
        ]
    )
