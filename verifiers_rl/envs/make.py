"""From what a user passes as `env` to what the orchestrator runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from verifiers_rl.envs.base import InvalidEnvironmentError, WeightedEnv
from verifiers_rl.envs.chat_template import reason_against_chat_template
from verifiers_rl.envs.mixed import MixedEnvironment
from verifiers_rl.process.limits import rollouts_at_once

logger = logging.getLogger(__name__)


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


def _what(env: Any) -> str:
    """What was passed, for an error."""
    if isinstance(env, type):
        return f"the class {env.__name__}; make an object of it, {env.__name__}(config)"
    return type(env).__name__


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
        f"verifiers.Environment, got {_what(env)}. Prompts and a reward function become one by "
        "env_from(prompts, reward)"
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
