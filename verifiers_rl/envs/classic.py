"""Classic `verifiers` environments: load one, run one group, turn its trajectories into token-exact
samples.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import verifiers as vf

from verifiers_rl.did_you_mean import did_you_mean
from verifiers_rl.envs.base import (
    InvalidEnvironmentError,
    NotPortableError,
    RunnerOptions,
    check_logprobs,
    how_to_install,
    module_name,
    text_of,
    versions_of_tokens,
)
from verifiers_rl.envs.chat_template import as_vllm_renders, reason_against_chat_template
from verifiers_rl.envs.classic_clients import make_client
from verifiers_rl.envs.records import record_of_state
from verifiers_rl.inference import LeaseLostError, RolloutDeadline, begin_rollout
from verifiers_rl.types import Progress, Rollout, Sample, SamplingMask, Slots, Split, join_experts

logger = logging.getLogger(__name__)


def load_environment(env_id: str, env_args: dict[str, Any] | None = None, *folders: Path) -> Any:
    """Do as `verifiers.load_environment`, and also find a module in these folders that is not
    installed.

    Raises:
        InvalidEnvironmentError: there is no such module, or its `load_environment` is missing,
            does not take an argument, or raised.
    """
    for folder in reversed(folders):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
            importlib.invalidate_caches()
    args = env_args or {}
    where = f" (looked in {', '.join(map(str, folders))} and the installed packages)"
    try:
        env = vf.load_environment(env_id.split("@", 1)[0], **args)
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        cause = error.__cause__ or error
        hint = _unknown_argument(env_id, args)
        if isinstance(cause, ImportError):
            hint = how_to_install(env_id)
        raise InvalidEnvironmentError(
            f"cannot load environment {env_id!r} with args {args}{where if folders else ''}: "
            f"{type(cause).__name__}: {cause}" + (f"; {hint}" if hint else "")
        ) from error
    # The module may have loaded another environment and changed it. Workers load the environment by
    # its id and arguments, so these must be the ones given here.
    if isinstance(env, vf.Environment):
        env.env_id, env.env_args = env_id, args
    return env


def _unknown_argument(env_id: str, args: dict[str, Any]) -> str:
    """Return what is wrong with the names of the arguments; "" if nothing is."""
    loads = getattr(sys.modules.get(module_name(env_id)), "load_environment", None)
    if loads is None:
        return ""
    parameters = inspect.signature(loads).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return ""
    unknown = [name for name in args if name not in parameters]
    if not unknown:
        return ""
    known = f"known: {', '.join(parameters) or 'none'}"
    return f"it takes no {unknown[0]!r}; {did_you_mean(unknown[0], parameters, known)}"


def samples_from_trajectory(
    steps: Sequence[dict[str, Any]], policy_version: int, mask_env_responses: bool = True
) -> list[Sample]:
    """Merge the turns of one rollout into as few samples as stay token-exact.

    If the prompt of a turn begins with all tokens so far, the turn continues the sample, and the
    tokens that the environment added between are appended without loss. Otherwise (a template that
    drops thinking, a compaction) the turn starts a new sample. So every sampled token is in exactly
    one sample, after exactly the tokens that were its context when it was sampled.

    Args:
        steps: the trajectory. Each step has `tokens` as the server returned them, and `response`,
            whose `policy_versions` says which weights sampled them, and whose `sampling_mask` from
            which tokens.
        policy_version: version for steps whose response has none.
        mask_env_responses: leave tokens that the environment put between turns out of the loss.

    Raises:
        ValueError: a step has no token ids, or its numbers of tokens and logprobs differ.
    """
    samples: list[Sample] = []
    masks: list[tuple[int, SamplingMask | None]] = []  # of the parts of the last sample
    experts: list[np.ndarray | None] = []  # of its replies
    for turn, step in enumerate(steps):
        tokens = step["tokens"]
        if tokens is None:
            raise ValueError(f"turn {turn}: the server returned no token ids or logprobs")
        prompt = np.asarray(tokens["prompt_ids"], np.int32)
        completion = np.asarray(tokens["completion_ids"], np.int32)
        logprobs = np.asarray(tokens["completion_logprobs"], np.float32)
        if len(completion) != len(logprobs):
            raise ValueError(f"turn {turn}: {len(completion)} tokens but {len(logprobs)} logprobs")
        check_logprobs(logprobs)
        n = len(samples[-1].token_ids) if samples else 0
        if samples and np.array_equal(prompt[:n], samples[-1].token_ids):
            sample = samples.pop()
            parts = [
                (
                    sample.token_ids,
                    sample.loss_mask,
                    sample.inference_logprobs,
                    sample.policy_versions,
                ),
                # NaN: no policy sampled these. The loss uses the trainer's logprob, so ratio 1.
                _segment(prompt[n:], not mask_env_responses, 0 if mask_env_responses else math.nan),
            ]
        else:
            parts = [_segment(prompt, False, 0)]
            masks, experts, n = [], [], 0
        spans = getattr(step.get("response"), "policy_versions", None) or [(0, policy_version)]
        versions = versions_of_tokens(spans, len(completion))
        parts.append((completion, np.ones(len(completion), bool), logprobs, versions))
        mask = getattr(step.get("response"), "sampling_mask", None)
        masks += [(len(prompt) - n, None), (len(completion), mask)]
        experts.append(getattr(step.get("response"), "experts", None))
        fields = [*map(np.concatenate, zip(*parts, strict=True))]
        samples.append(
            Sample(
                *fields,
                sampling_mask=SamplingMask.join(masks),
                routed_experts=join_experts(len(fields[0]), experts),
            )
        )
    return samples


def _segment(
    token_ids: np.ndarray, in_loss: bool, logprob: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the fields of tokens that no policy sampled, in the order of `Sample`."""
    n = len(token_ids)
    no_version = np.full(n, -1, np.int32)
    return token_ids, np.full(n, in_loss), np.full(n, logprob, np.float32), no_version


class ClassicExampleRunner:
    """The `ExampleRunner` of a classic `verifiers.Environment`, also of an `EnvGroup`.

    `verifiers` cuts a sequence at `max_seq_len`, and marks it as truncated.

    Raises:
        InvalidEnvironmentError: `env` is not a classic environment.
    """

    files_per_rollout = 1  # a connection to the server

    def __init__(self, env: Any, options: RunnerOptions) -> None:
        if not self.can_run(env):
            raise InvalidEnvironmentError(
                "env: expected a verifiers.Environment, or an Env or a Taskset of verifiers.v1, "
                f"got {type(env).__name__}; pass the result of verifiers.load_environment(...)"
            )
        self.env = env
        self.options = options
        self.name = options.name
        self._client: Any = None
        env.set_max_seq_len(options.max_seq_len)
        _report_reward_errors(env.rubric)

    @staticmethod
    def can_run(env: Any) -> bool:
        return isinstance(env, vf.Environment)

    async def open(self) -> None:
        """Make the HTTP client; called on the event loop that will use it."""
        self._client = make_client(
            self.options.client_type,
            self.options.base_url,
            self.options.tokenizer,
            self.options.timeout_s,
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def run_example(
        self,
        example: dict[str, Any],
        num_rollouts: int,
        model: str,
        sampling_args: dict[str, Any],
        policy_version: int,
        slots: Any,
    ) -> list[Rollout]:
        """Roll out and score one row of the dataset `num_rollouts` times. An error fails only its
        own rollout.

        Rollouts run through `env.rollout` one by one, not through `env.run_group`. There, an
        exception in one of them (for example in a tool) would lose the whole group.
        """
        row = example["row"]
        runs = [self._run(row, model, sampling_args, slots, n) for n in range(num_rollouts)]
        results = await asyncio.gather(*runs)
        states = [state for state, error in results if error is None]
        scoring_error: Exception | None = None
        if states:
            try:
                async with asyncio.timeout(self.options.timeout_s) as deadline:
                    await self.env.rubric.score_group(states)
                for state in states:
                    await self.env.rubric.cleanup(state)
            except Exception as error:  # whatever the environment's scoring raises
                scoring_error = self._explain(error, deadline.expired(), "scoring a group")
        return [
            self._rollout(row, state, error or scoring_error, policy_version)
            for state, error in results
        ]

    async def _run(
        self,
        row: dict[str, Any],
        model: str,
        sampling_args: dict[str, Any],
        slots: Any,
        number: int,
    ) -> tuple[Any, BaseException | None]:
        async with slots as lease:
            while True:
                begin_rollout(number)
                state, error = await self._play(row, model, sampling_args)
                try:  # all of it again, also if the environment has hidden that a reply is missing
                    if lease is None or not await lease.move():
                        break
                except LeaseLostError as lost:
                    error = error or lost
                    break
        if state is not None and lease is not None:
            state["verifiers_rl_num_moves"] = lease.num_moves
        return state, error

    async def _play(
        self, row: dict[str, Any], model: str, sampling_args: dict[str, Any]
    ) -> tuple[Any, BaseException | None]:
        deadline = RolloutDeadline(self.options.timeout_s)
        start = time.monotonic()
        try:
            async with deadline:
                state = await self.env.rollout(row, self._client, model, dict(sampling_args))
        except Exception as error:  # whatever the environment's own code raises
            return None, self._explain(error, deadline.expired(), "a rollout")
        state["verifiers_rl_generation_s"] = time.monotonic() - start
        if deadline.num_lost_tokens is not None:  # the environment may have hidden the error
            state["verifiers_rl_lost_tokens"] = deadline.num_lost_tokens
            return state, self._explain(TimeoutError(), True, "a rollout")
        if state.get("timed_out"):
            return state, TimeoutError(
                "the environment's own timeout_seconds passed, or its code raised TimeoutError"
            )
        return state, state.get("error")

    def _explain(self, error: Exception, is_late: bool, what: str) -> Exception:
        """Return the error. If our deadline caused it, return an error that says so instead. The
        environment may have a deadline of its own.
        """
        if not (is_late and isinstance(error, TimeoutError)):
            return error
        return TimeoutError(
            f"{what} took longer than generation_timeout ({self.options.timeout_s:g} s)"
        )

    def _rollout(
        self,
        row: dict[str, Any],
        state: Any,
        error: BaseException | None,
        policy_version: int,
    ) -> Rollout:
        prompt = _last_text(row.get("prompt"))
        rollout = Rollout(example_id=0, prompt=prompt, env=self.name)
        if state is not None:
            rollout.num_moves = state.get("verifiers_rl_num_moves", 0)
            rollout.record = record_of_state(state, policy_version)
        error = error or (state.get("error") if state is not None else None)
        if error is None:
            try:
                rollout.samples = samples_from_trajectory(
                    state["trajectory"], policy_version, self.options.mask_env_responses
                )
                if not rollout.num_sampled_tokens:
                    raise ValueError(
                        "no token was sampled: the prompt and max_tokens exceed the server's "
                        "max_model_len, or the environment took no turn"
                    )
                rollout.reward = float(state["reward"])
                if not math.isfinite(rollout.reward):
                    raise ValueError(f"the environment's reward is {rollout.reward}")
            except (ValueError, TypeError) as bad_result:
                error = bad_result
        if error is not None:
            rollout.error = error
            rollout.num_lost_tokens = (state or {}).get("verifiers_rl_lost_tokens")
            rollout.reward = math.nan
            rollout.samples = []
            return rollout
        rollout.completion = text_of(state["completion"])
        rollout.metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        rollout.num_turns = len(state["trajectory"])
        rollout.is_truncated = bool(state["is_truncated"])
        rollout.generation_s = state["verifiers_rl_generation_s"]
        return rollout


@dataclass(frozen=True)
class ClassicRecipe:
    """The `EnvRecipe` of a `ClassicEnvironment`.

    Attributes:
        env_id, env_args: what `verifiers.load_environment` takes.
        looks: `fingerprint` of the environment.
        options: those of the `ClassicEnvironment`.
    """

    env_id: str
    env_args: dict[str, Any]
    looks: list[Any]
    options: RunnerOptions

    def make(self) -> ClassicExampleRunner:
        env = load_environment(self.env_id, self.env_args)
        if fingerprint(env) != self.looks:
            raise InvalidEnvironmentError(
                f"loaded by its id, {self.env_id!r}, it has (class, examples, rewards) "
                f"{fingerprint(env)}, and the trainer's {self.looks}: what is changed after "
                "load_environment is not in the workers; set env_workers=0"
            )
        return ClassicExampleRunner(env, self.options)


def fingerprint(env: Any) -> list[Any]:
    """Return what must be equal in two environments if they are the same."""
    names: list[str] = []
    rubrics = [env.rubric]
    for rubric in rubrics:
        rubrics += getattr(rubric, "rubrics", [])
        for func in map(inspect.unwrap, rubric.funcs):
            names.append(getattr(func, "__name__", type(func).__name__))
    return [type(env).__name__, len(env.get_dataset()), sorted(names)]


class ClassicEnvironment(ClassicExampleRunner):
    """The `EnvRunner` of a classic `verifiers.Environment`, also of an `EnvGroup`.

    Raises:
        InvalidEnvironmentError: `env` is not a classic environment, its dataset cannot be read, or
            no training example is left.
    """

    bounds_replies = False
    description = ""

    def __init__(self, env: Any, options: RunnerOptions) -> None:
        super().__init__(env, options)
        self.weights = [1.0]
        self.num_overlong_prompts = 0
        try:
            splits = {"train": env.get_dataset(), "eval": env.get_eval_dataset()}
        except (ValueError, IndexError) as error:
            raise InvalidEnvironmentError(
                f"the environment's dataset cannot be read: {error}"
            ) from error
        self._examples = {
            name: self._without_overlong(split, options.tokenizer, options.max_prompt_len)
            for name, split in splits.items()
        }
        if not len(self._examples["train"]):
            left_out = (
                f", {self.num_overlong_prompts} were longer than max_prompt_len"
                if options.max_prompt_len
                else ""
            )
            raise InvalidEnvironmentError(f"the environment's training dataset is empty{left_out}")
        try:
            self.first_prompt = list(self._examples["train"][0]["prompt"])
            for message in self.first_prompt:
                as_vllm_renders(dict(message))
        except ValueError as error:
            raise InvalidEnvironmentError(f"the first training example: {error}") from error
        renders_anew = options.client_type == "openai_chat_completions" and self._is_multi_turn
        template_problem = (
            reason_against_chat_template(options.tokenizer)
            if renders_anew and options.tokenizer
            else None
        )
        if template_problem:
            logger.warning(
                "%s: each turn will start a sequence of its own, and be trained as one. "
                'client_type="openai_chat_completions_token" goes on with the tokens as sampled',
                template_problem,
            )

    def sizes(self, split: Split) -> list[int]:
        """Return the number of examples of this split, as a list of one."""
        return [len(self._examples[split])]

    @property
    def _is_multi_turn(self) -> bool:
        envs = getattr(self.env, "envs", [self.env])  # several in an EnvGroup
        return any(getattr(env, "max_turns", 1) != 1 for env in envs)

    def recipe(self) -> ClassicRecipe:
        if not self.env.env_id:  # and it cannot be pickled: a Parser of verifiers has a lambda
            raise NotPortableError(
                "it has no id to load it by in another process; make it with "
                "verifiers.load_environment(id, ...)"
            )
        return ClassicRecipe(
            self.env.env_id, self.env.env_args, fingerprint(self.env), self.options
        )

    async def example(self, split: Split, index: int) -> dict[str, Any]:
        row = {**self._examples[split][index]}
        row.setdefault("example_id", index)
        return {"row": row}

    def prompt_of(self, example: dict[str, Any]) -> str:
        return _last_text(example["row"].get("prompt"))

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
        """Do as `ClassicExampleRunner.run_example`, for this example of its split."""
        group = await self.run_example(
            await self.example(split, index),
            num_rollouts,
            model,
            self.options.sampling_of(split, sampling_args),
            policy_version,
            slots,
        )
        for rollout in group:
            rollout.example_id = index
        return group

    def _without_overlong(self, dataset: Any, tokenizer: Any, max_prompt_len: int | None) -> Any:
        """Return the dataset without the examples whose first prompt is too long."""
        if max_prompt_len is None or tokenizer is None:
            return dataset

        def is_short(example: dict[str, Any]) -> bool:
            ids = tokenizer.apply_chat_template(
                example["prompt"],
                add_generation_prompt=True,
                return_dict=False,
                **self.options.chat_template_kwargs,
            )
            return len(ids) <= max_prompt_len

        kept = [i for i, example in enumerate(dataset) if is_short(example)]
        if len(kept) < len(dataset):
            self.num_overlong_prompts += len(dataset) - len(kept)
            logger.warning(
                "%d prompts longer than max_prompt_len=%d left out",
                len(dataset) - len(kept),
                max_prompt_len,
            )
        return dataset.select(kept)


def _report_reward_errors(rubric: Any) -> None:
    """Make an exception in a reward function fail its rollout.

    `verifiers` logs the exception and scores 0, which would train the model on a number that nobody
    computed. Each function is wrapped, so that the exception is also stored in the rollout's state,
    where `_rollout` looks for errors.
    """
    for inner in getattr(rubric, "rubrics", []):
        _report_reward_errors(inner)
    rubric.funcs = [
        _with_errors_in_state(func, rubric._is_group_func(func)) for func in rubric.funcs
    ]


def _with_errors_in_state(func: Callable[..., Any], is_group: bool) -> Callable[..., Any]:
    if getattr(func, "_errors_in_state", False):
        return func
    wanted = "states" if is_group else "state"
    signature = inspect.signature(func)
    passes_on = wanted in signature.parameters or any(
        p.kind is p.VAR_KEYWORD for p in signature.parameters.values()
    )

    @functools.wraps(func)
    async def wrapper(**kwargs: Any) -> Any:
        states = kwargs[wanted] if is_group else [kwargs[wanted]]
        if not passes_on:
            del kwargs[wanted]
        try:
            result = func(**kwargs)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            for state in states:
                state["error"] = error
            raise

    # verifiers passes only what the signature names, so add the state to it.
    if wanted not in signature.parameters:
        extra = inspect.Parameter(wanted, inspect.Parameter.KEYWORD_ONLY)
        parameters = list(signature.parameters.values())
        at = len(parameters) - bool(
            parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        )
        signature = signature.replace(parameters=[*parameters[:at], extra, *parameters[at:]])
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper._errors_in_state = True  # type: ignore[attr-defined]
    return wrapper


def _last_text(prompt: Any) -> str:
    return text_of(prompt[-1:]) if isinstance(prompt, list) else text_of(prompt)
