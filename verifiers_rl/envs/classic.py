"""Classic environments: `verifiers.Environment`, which verifiers has up to 0.3. This module runs in
the rollout workers of a Python that has that verifiers (`python = ...`), and nowhere else.

Model calls go through the clients of verifiers, on our HTTP transport:

    openai_chat_completions        sends messages. The server renders the whole conversation again
                                   at each turn. The sequence of tokens breaks if the text does not
                                   tokenize to what was sampled, or a template rewrites past turns
    openai_chat_completions_token  sends tokens, rendered by the model's tokenizer here. From the
                                   second turn on, these are the tokens so far and those of the new
                                   messages, so that the sequence continues exactly
    renderer                       sends tokens at each turn, made by the `renderers` package: exact
                                   for the model families that it knows, without tools for others
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import httpx
import numpy as np
import verifiers as vf
from jinja2 import TemplateError
from verifiers.legacy.clients import OpenAIChatCompletionsClient
from verifiers.legacy.clients.openai_chat_completions_token_client import (
    OpenAIChatCompletionsTokenClient,
)
from verifiers.legacy.clients.renderer_client import RendererClient
from verifiers.legacy.errors import EmptyModelResponseError
from verifiers.legacy.types import ResponseTokens
from verifiers.legacy.utils.async_utils import maybe_call_with_named_args

from verifiers_rl.envs.base import (
    InvalidEnvironmentError,
    RunnerOptions,
    check_logprobs,
    how_to_install,
    text_of,
    versions_of_tokens,
)
from verifiers_rl.envs.records import record_of_state
from verifiers_rl.envs.rendering import Renderer, as_vllm_renders
from verifiers_rl.inference import (
    RolloutDeadline,
    RolloutSession,
    ServerClient,
    SessionLostError,
    pack_ids,
    policy_versions,
    unpack_experts,
    unpack_mask,
    unpack_sampled,
)
from verifiers_rl.process.limits import rollouts_at_once
from verifiers_rl.requests import GroupRequest
from verifiers_rl.types import (
    ALLOWED_TOKENS,
    ROUTED_EXPERTS,
    Rollout,
    Sample,
    Split,
    join_column,
    join_experts,
)

logger = logging.getLogger(__name__)


def load_environment(env_id: str, args: dict[str, Any]) -> Any:
    """Do as `verifiers.load_environment`; all that it raises is an InvalidEnvironmentError."""
    try:
        return vf.load_environment(env_id.split("@", 1)[0], **args)
    except (ValueError, RuntimeError) as error:
        cause = error.__cause__ or error
        hint = how_to_install(env_id) if isinstance(cause, ImportError) else ""
        raise InvalidEnvironmentError(
            f"id={env_id!r} with args {args}: {type(cause).__name__}: {cause}"
            + (f"; {hint}" if hint else "")
        ) from error


# --- From turns to samples ------------------------------------------------------------------------


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
            whose `policy_versions` says which weights sampled them, `sampling_mask` from which
            tokens, and `experts` by which experts.
        policy_version: version for steps whose response has none.
        mask_env_responses: leave tokens that the environment put between turns out of the loss.

    Raises:
        ValueError: a step has no token ids, or its numbers of tokens and logprobs differ.
    """
    chains: list[list[dict[str, Any]]] = []
    so_far: list[int] = []
    for turn, step in enumerate(steps):
        tokens = step["tokens"]
        if tokens is None:
            raise ValueError(f"turn {turn}: the server returned no token ids or logprobs")
        reply, logprobs = tokens["completion_ids"], tokens["completion_logprobs"]
        if len(reply) != len(logprobs):
            raise ValueError(f"turn {turn}: {len(reply)} tokens but {len(logprobs)} logprobs")
        check_logprobs(logprobs)
        if chains and tokens["prompt_ids"][: len(so_far)] == so_far:
            chains[-1].append(step)
        else:
            chains.append([step])
        so_far = [*tokens["prompt_ids"], *reply]
    return [_sample_of(chain, policy_version, mask_env_responses) for chain in chains]


def _sample_of(chain: list[dict[str, Any]], policy_version: int, masks_env: bool) -> Sample:
    """Return the sample of turns, each of which continues the tokens of the turn before."""
    first, last = chain[0]["tokens"], chain[-1]["tokens"]
    token_ids = np.array([*last["prompt_ids"], *last["completion_ids"]], np.int32)
    n, begin = len(token_ids), len(first["prompt_ids"])
    in_loss, versions = np.zeros(n, bool), np.full(n, -1, np.int32)
    logprobs = np.zeros(n, np.float32)
    if not masks_env:  # NaN: no policy sampled these. The trainer's logprob is used, so ratio 1.
        in_loss[begin:], logprobs[begin:] = True, math.nan
    masks: list[tuple[int, np.ndarray | None]] = []
    experts, stop = [], 0
    for step in chain:
        tokens, response, before = step["tokens"], step.get("response"), stop
        start, num = len(tokens["prompt_ids"]), len(tokens["completion_ids"])
        stop = start + num
        in_loss[start:stop], logprobs[start:stop] = True, tokens["completion_logprobs"]
        spans = getattr(response, "policy_versions", None) or [(0, policy_version)]
        versions[start:stop] = versions_of_tokens(spans, num)
        masks += [(start - before, None), (num, getattr(response, "sampling_mask", None))]
        experts.append(getattr(response, "experts", None))
    extras = {ALLOWED_TOKENS: join_column(masks), ROUTED_EXPERTS: join_experts(n, experts)}
    known = {name: column for name, column in extras.items() if column is not None}
    return Sample(token_ids, in_loss, logprobs, versions, extras=known)


# --- Rollouts -------------------------------------------------------------------------------------


class ClassicEnvironment:
    """A classic `verifiers.Environment` or `EnvGroup` in a rollout worker, with its examples.
    `verifiers` cuts a sequence at `max_seq_len`, and marks it as truncated.

    Raises:
        InvalidEnvironmentError: its dataset cannot be read, or no training example is left.
    """

    description = ""

    def __init__(self, env: Any, options: RunnerOptions) -> None:
        self.env, self.options, self.name = env, options, options.name
        self.num_overlong_prompts = 0
        self.weights = [1.0]
        self._client: Any = None
        # Each rollout holds a connection to the server.
        self._slots = asyncio.Semaphore(rollouts_at_once(options.max_concurrent, 1))
        env.set_max_seq_len(options.max_seq_len)
        _keep_reward_errors(env.rubric)
        try:
            splits = {"train": env.get_dataset(), "eval": env.get_eval_dataset()}
        except (ValueError, IndexError) as error:
            raise InvalidEnvironmentError(
                f"the environment's dataset cannot be read: {error}"
            ) from error
        self._examples = {name: self._without_overlong(split) for name, split in splits.items()}
        if not len(self._examples["train"]):
            raise InvalidEnvironmentError(
                "the environment's training dataset is empty; "
                f"{self.num_overlong_prompts} examples were longer than max_prompt_len"
            )
        try:
            for message in self._examples["train"][0]["prompt"]:
                as_vllm_renders(dict(message))
        except ValueError as error:
            raise InvalidEnvironmentError(f"the first training example: {error}") from error

    def _without_overlong(self, dataset: Any) -> Any:
        """Return the dataset without the examples whose first prompt is too long."""
        limit, render = self.options.max_prompt_len, Renderer(self.options.tokenizer).render
        if limit is None:
            return dataset
        template = self.options.chat_template_kwargs
        kept = [
            i for i, row in enumerate(dataset) if len(render(row["prompt"], **template)) <= limit
        ]
        if num_left_out := len(dataset) - len(kept):
            self.num_overlong_prompts += num_left_out
            logger.warning("%d prompts longer than max_prompt_len=%d left out", num_left_out, limit)
        return dataset.select(kept)

    def sizes(self, split: Split) -> list[int]:
        """Return the number of examples of this split, as a list of one."""
        return [len(self._examples[split])]

    async def open(self) -> None:
        """Make the HTTP client; called on the event loop that will use it."""
        options = self.options
        self._client = make_client(
            options.client_type, options.base_url, options.tokenizer, options.timeout_s
        )

    async def close(self) -> None:
        await self._client.close()

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Roll out and score one row of the dataset. An error fails only its own rollout.

        Rollouts run through `env.rollout` one by one, not through `env.run_group`. There, an
        exception in one of them (for example in a tool) would lose the whole group.
        """
        example = {"example_id": request.index, **self._examples[request.split][request.index]}
        prompt = text_of(example["prompt"][-1:])
        group = [Rollout(0, prompt, env=self.name) for _ in range(request.num_rollouts)]
        played = await asyncio.gather(
            *(self._play(rollout, n, example, request) for n, rollout in enumerate(group))
        )
        states = [state for state, one in zip(played, group, strict=True) if one.error is None]
        try:
            async with asyncio.timeout(request.timeout_s) as deadline:
                if states:
                    await self.env.rubric.score_group(states)
                for state in states:
                    await self.env.rubric.cleanup(state)
        except Exception as error:  # whatever the environment's scoring raises
            is_late = deadline.expired() and isinstance(error, TimeoutError)
            for rollout in group:
                rollout.error = rollout.error or (
                    _late("scoring a group", request) if is_late else error
                )
        for rollout, state in zip(group, played, strict=True):
            self._complete(rollout, state, request.policy_version)
        return group

    async def _play(
        self, rollout: Rollout, number: int, row: dict[str, Any], request: GroupRequest
    ) -> Any:
        """Play one rollout. Return verifiers' state of it; None if there is none."""
        async with self._slots, request.begin(number) as session:
            while True:
                state = await self._play_once(rollout, row, request, session)
                try:  # all of it again, also if the environment has hidden that a reply is missing
                    if not await session.move():
                        return state
                except SessionLostError as lost:
                    rollout.error = rollout.error or lost
                    return state
                rollout.num_moves = session.num_moves

    async def _play_once(
        self,
        rollout: Rollout,
        row: dict[str, Any],
        request: GroupRequest,
        session: RolloutSession,
    ) -> Any:
        deadline, start = RolloutDeadline(request.timeout_s), time.monotonic()
        client = self._client.of_rollout(session)
        sampling_args = dict(request.sampling_args)
        state, rollout.error = None, None
        try:
            async with deadline:
                state = await self.env.rollout(row, client, request.model, sampling_args)
            rollout.generation_s, rollout.error = time.monotonic() - start, state.get("error")
            if state.get("timed_out"):
                raise TimeoutError(
                    "the environment's own timeout_seconds passed, or its code raised TimeoutError"
                )
        except Exception as error:  # whatever the environment's own code raises
            rollout.error = _late("a rollout", request) if deadline.is_cause_of(error) else error
        rollout.num_lost_tokens = deadline.num_lost_tokens
        if rollout.num_lost_tokens is not None:  # the environment may have hidden the error
            rollout.error = _late("a rollout", request)
        return state

    def _complete(self, rollout: Rollout, state: Any, policy_version: int) -> None:
        """Fill in what is known after scoring: the samples and the reward, or the error."""
        if state is None:
            return
        rollout.record = record_of_state(state)
        rollout.error = rollout.error or state.get("error")
        if rollout.error is not None:
            return
        masks_env = self.options.mask_env_responses
        try:
            samples = samples_from_trajectory(state["trajectory"], policy_version, masks_env)
            if not any((sample.policy_versions >= 0).any() for sample in samples):
                raise ValueError(
                    "no token was sampled: the prompt and max_tokens exceed the server's "
                    "max_model_len, or the environment took no turn"
                )
            reward = float(state["reward"])
            if not math.isfinite(reward):
                raise ValueError(f"the environment's reward is {reward}")
        except (ValueError, TypeError) as error:
            rollout.error = error
            return
        rollout.samples = samples
        rollout.reward = reward
        rollout.completion = text_of(state["completion"])
        rollout.metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        rollout.num_turns = len(state["trajectory"])
        rollout.is_truncated = bool(state["is_truncated"])


def _late(what: str, request: GroupRequest) -> TimeoutError:
    return TimeoutError(f"{what} took longer than generation_timeout ({request.timeout_s:g} s)")


def _keep_reward_errors(rubric: Any) -> None:
    """Make an exception in a reward function fail its rollout. `verifiers` logs it and scores 0,
    which would train the model on a number that nobody computed.
    """
    for inner in getattr(rubric, "rubrics", []):
        _keep_reward_errors(inner)

    async def call_one(func: Any, state: Any) -> float:
        try:
            return float(await maybe_call_with_named_args(func, **rubric.score_objects(state)))
        except Exception as error:  # whatever the function raises
            state["error"] = error
            return 0.0

    async def call_group(func: Any, states: list[Any]) -> list[float]:
        try:
            return await maybe_call_with_named_args(func, **rubric.group_score_objects(states))
        except Exception as error:  # whatever the function raises
            for state in states:
                state["error"] = error
            return [0.0] * len(states)

    rubric._call_individual_reward_func, rubric._call_group_reward_func = call_one, call_group


# --- Clients --------------------------------------------------------------------------------------

_CHAT, _TOKENS, _GENERATE = (
    "/chat/completions",
    "/chat/completions/tokens",
    "/inference/v1/generate",
)
# The prompt of the last request of this task, and the packed tokens of its reply.
_sampled: ContextVar[tuple[list[int], dict[str, Any]] | None] = ContextVar("sampled", default=None)


class _TokenRoute(ServerClient):
    """Sends all requests to the token route of `vf-vllm`: their messages become tokens here. A
    conversation that cannot be rendered here goes on as messages.
    """

    def __init__(self, base_url: str, timeout_s: float, renderer: Renderer) -> None:
        super().__init__(base_url, timeout_s)
        self._renderer = renderer

    async def post(self, path: str, *, cast_to: Any, **kwargs: Any) -> Any:
        body: Any = kwargs.get("body")
        is_generate = path.endswith(_GENERATE)
        if is_generate:  # its options are those of a chat, in a field
            prompt = body["token_ids"]
            rest = {key: body[key] for key in ("model", "cache_salt", "priority") if key in body}
            body = {**rest, **body["sampling_params"]}
            body.pop("routed_experts_prompt_start", None)
        elif path == _TOKENS:
            prompt = body["tokens"]
        else:
            prompt = self._render(body) if path == _CHAT and cast_to is httpx.Response else []
        if not prompt:
            return await super().post(path, cast_to=cast_to, **kwargs)
        # The tokens are the prompt. vLLM renders messages all the same, so it gets a short one.
        short = [{"role": "user", "content": "."}]
        packed = {"tokens": pack_ids(prompt), "packed_tokens": True, "messages": short}
        kwargs["body"] = {**body, **packed}
        wants_experts = kwargs["body"].pop("routed_experts", False)
        reply = await super().post(_TOKENS, cast_to=httpx.Response, **kwargs)
        completion = json.loads(reply.content)
        experts = completion["choices"][0].get("routed_experts") if wants_experts else None
        _sampled.set((prompt, completion["packed_tokens"] | {"routed_experts": experts}))
        if not is_generate:
            return reply
        token_ids, logprobs = unpack_sampled(completion["packed_tokens"])
        pairs = zip(token_ids.tolist(), logprobs.tolist(), strict=True)
        choice = {
            "token_ids": token_ids.tolist(),
            "logprobs": {"content": [{"token": f"token_id:{t}", "logprob": lp} for t, lp in pairs]},
            "finish_reason": completion["choices"][0]["finish_reason"],
        }
        generated = {"request_id": completion["id"], "choices": [choice]}
        return httpx.Response(200, content=json.dumps(generated).encode())

    def _render(self, body: dict[str, Any]) -> list[int]:
        """Return the tokens of the messages; none if only the server can render them."""
        template = {"tools": body.get("tools"), **body.get("chat_template_kwargs", {})}
        try:
            return self._renderer.render(body["messages"], **template)
        except (TemplateError, ValueError):  # the server says what is wrong, or renders an image
            return []


class _KeepsAll:
    """What every client here adds to its base: it keeps what the server says of its tokens, and
    accepts empty replies.

    A policy that ends its turn at once has sampled a token like any other, and must be able to
    unlearn it. The stock clients raise EmptyModelResponseError for such a reply, which would remove
    the rollout from the batch.
    """

    def of_rollout(self, session: RolloutSession) -> Any:
        """Return the client for the requests of one rollout."""
        client: Any = copy.copy(self)
        client._client = client.client.of_rollout(session)
        return client

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        policy_versions.set(None)
        _sampled.set(None)
        return await super().get_native_response(*args, **kwargs)  # type: ignore[misc]

    async def raise_from_native_response(self, response: Any) -> None:
        try:
            await super().raise_from_native_response(response)  # type: ignore[misc]
        except EmptyModelResponseError:
            if response is None or not (isinstance(response, dict) or response.choices):
                raise

    async def from_native_response(self, response: Any) -> Any:
        parsed = await super().from_native_response(response)  # type: ignore[misc]
        # `ServerClient.post` has set it in this task, because this task awaited the request.
        parsed.policy_versions = policy_versions.get()
        if parsed.message.content is None and not parsed.message.tool_calls:
            parsed.message.content = ""
        if (sampled := _sampled.get()) is not None:
            prompt_ids, packed = sampled
            token_ids, logprobs = unpack_sampled(packed)
            parsed.message.tokens = ResponseTokens(
                prompt_ids=prompt_ids,
                prompt_mask=[0] * len(prompt_ids),
                completion_ids=token_ids.tolist(),
                completion_mask=[1] * len(token_ids),
                completion_logprobs=logprobs.tolist(),
            )
            experts = packed["routed_experts"]
            parsed.experts = None if experts is None else unpack_experts(experts)
            parsed.sampling_mask = unpack_mask(packed)
        return parsed


class ChatClient(_KeepsAll, OpenAIChatCompletionsClient):
    """Sends messages."""


class TokenClient(_KeepsAll, OpenAIChatCompletionsTokenClient):
    """Sends tokens. They come from the tokenizer here, because asking the server for them takes two
    more requests per turn. A turn that cannot continue the tokens exactly (for example after a
    truncated reply) is rendered from messages, and starts a new sample.
    """

    def __init__(self, client: Any, renderer: Renderer) -> None:
        super().__init__(client)
        self._renderer = renderer
        self.logger.setLevel(logging.ERROR)  # hides a warning per fallback; see broken_turn_share

    async def tokenize(
        self, messages: Any, tools: Any, model: str, extra_kwargs: Any = None, **kwargs: Any
    ) -> list[int]:
        options = {**(extra_kwargs or {})}
        options |= options.pop("chat_template_kwargs", {})
        is_prompt = options.pop("add_generation_prompt", True)
        return self._renderer.render(messages, is_prompt, tools=tools, **options)


class ExactRendererClient(_KeepsAll, RendererClient):
    """Sends tokens that the `renderers` package makes."""

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        # The base drops options that it does not know, except in extra_body.
        extra = {**sampling_args, **sampling_args.get("extra_body", {})}
        extra.pop("extra_body", None)
        return await super().get_native_response(
            prompt, model, {"extra_body": extra}, *args, **kwargs
        )


def make_client(client_type: str, base_url: str, tokenizer: Any, timeout_s: float) -> Any:
    """Make a client of this type. Called on the event loop that will use it.

    Args:
        client_type: see the head of this module.
        base_url: URL of the server, without /v1.
        tokenizer: the model's; `openai_chat_completions` does not use it.
        timeout_s: deadline of one request.
    """
    url, renderer = f"{base_url}/v1", Renderer(tokenizer)
    if client_type == "openai_chat_completions":
        return ChatClient(ServerClient(url, timeout_s))
    route = _TokenRoute(url, timeout_s, renderer)
    if client_type == "openai_chat_completions_token":
        return TokenClient(route, renderer)
    from renderers import create_renderer

    return ExactRendererClient(route, renderer=create_renderer(tokenizer))
