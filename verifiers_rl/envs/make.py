"""Makes the `EnvRunner` that the orchestrator runs from what a user passes as `env`."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from verifiers_rl.did_you_mean import did_you_mean
from verifiers_rl.envs.base import (
    InvalidEnvironmentError,
    NotPortableError,
    PortableEnvironment,
    RunnerOptions,
    WeightedEnv,
    beside,
    check_classic,
    how_to_install,
    module_name,
)
from verifiers_rl.envs.mixed import MixedEnvironment, Part
from verifiers_rl.envs.workers import WorkerEnvironment, WorkerPool, count_workers
from verifiers_rl.process.connections import WORKERS_VARIABLE
from verifiers_rl.types import EnvRunner, missing_members

logger = logging.getLogger(__name__)


def load_by_id(env_id: str, args: Mapping[str, Any], folders: Sequence[Path] = ()) -> Any:
    """Load what an id alone names: a classic environment, whose module has `load_environment`, or
    else a taskset of verifiers.v1.

    Args:
        args: arguments of `load_environment`, or keys of the taskset's config.
        folders: its module may be there, beside those that are installed.

    Raises:
        InvalidEnvironmentError: there is none, it cannot be loaded, or it is a classic one and the
            installed verifiers has none of those.
    """
    for folder in reversed(folders):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    module = module_name(env_id)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise InvalidEnvironmentError(
                f"id={env_id!r}: its module imports {error.name!r}, which is missing"
            ) from error
        if find_spec(f"verifiers.v1.tasksets.{module}") is None:
            known = [one.name for one in pkgutil.iter_modules([str(path) for path in folders])]
            hint = did_you_mean(module, known, "install it, or correct the id")
            raise InvalidEnvironmentError(
                f"[env] id={env_id!r}: no module {module!r} is installed{beside(folders)}; "
                f"{how_to_install(env_id) or hint}"
            ) from error
        found = None  # verifiers' own
    is_classic = hasattr(found, "load_environment")
    if is_classic and find_spec("verifiers.legacy") is None:
        is_classic = not hasattr(found, "__all__")  # one that is of both kinds
    if is_classic:
        check_classic(f"[env] id={env_id!r}")
        from verifiers_rl.envs.classic import load_environment

        return load_environment(env_id, dict(args), *folders)
    from verifiers_rl.envs.v1_loading import load_v1_environment

    return load_v1_environment({"taskset": {"id": env_id, **args}}, *folders)


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
                "types.EnvRunner says what it needs"
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
    if find_spec("verifiers.legacy") is not None:
        from verifiers_rl.envs.classic import ClassicEnvironment

        if ClassicEnvironment.can_run(env):
            return ClassicEnvironment(env, options)
    raise InvalidEnvironmentError(
        f"environment {options.name!r}: expected an Env or a Taskset of verifiers.v1, or a classic "
        f"verifiers.Environment, got {_what(env)}. Prompts and a reward function become one by "
        "env_from(prompts, reward)"
    )


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


def make_pool(args: Any, address: tuple[str, int] | None = None) -> WorkerPool:
    """Return the worker processes that these options ask for.

    Args:
        address: where workers of other machines connect.
    """
    return WorkerPool(
        count_workers(args.env_workers), args.max_concurrent, args.generation_timeout, address
    )


def _address_for_workers() -> tuple[str, int] | None:
    host, _, port = os.environ.get(WORKERS_VARIABLE, "").rpartition(":")
    return (host.strip("[]"), int(port)) if host else None


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
    pool: WorkerPool | None = None,
) -> EnvRunner:
    """Return the runner of one environment, or of a list of `WeightedEnv` that are mixed. Report
    who plays where.

    Args:
        env: an `Env` or a `Taskset` of `verifiers.v1` or a taskset's id, a classic
            `verifiers.Environment`, an `EnvRunner`, or WeightedEnvs.
        base_url: URL of the inference server, without /v1.
        tokenizer: the model's.
        args: the `RLConfig`.
        report: called with the description of each environment that has one.
        pool: takes up the environments; None: a new one, as `args` say.

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
    pool = pool or make_pool(args, _address_for_workers())
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
        parts.append(_runner(one.env, options))
        if len(mixed) > 1 and parts[-1].name != one.name:
            raise InvalidEnvironmentError(
                f"environment {one.name!r} is an EnvRunner named {parts[-1].name!r}; give both the "
                "same name"
            )
        example = getattr(parts[-1], "example", None)
        if num_workers:
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
