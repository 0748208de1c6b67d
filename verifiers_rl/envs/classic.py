"""Classic environments: `verifiers.Environment`, which verifiers has up to 0.3. This module runs in
the rollout workers of a Python that has that verifiers (`python = ...`), and nowhere else.

`_Client` stands in for verifiers' clients. It sends tokens, which it makes of messages here, by the
environment's `client_type`:

    openai_chat_completions_token  the tokens so far, unchanged, and those of new messages
    openai_chat_completions        all messages at each turn, rendered anew
    renderer                       as the first, by the `renderers` package: its own code for the
                                   families of models that it knows, the chat template for others
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any

from openai.types.chat import ChatCompletion
from renderers import create_renderer
from verifiers.legacy.clients.openai_chat_completions_client import (
    OpenAIChatCompletionsClient,
    handle_openai_overlong_prompt,
)
from verifiers.legacy.errors import OverlongPromptError
from verifiers.legacy.utils.async_utils import maybe_call_with_named_args

from verifiers_rl.envs.base import (
    InvalidEnvironmentError,
    RunnerOptions,
    Turn,
    finite_reward,
    samples_from_turns,
)
from verifiers_rl.envs.records import record_of_state, text_of
from verifiers_rl.envs.rendering import Renderer
from verifiers_rl.inference import RolloutSession, ServerClient
from verifiers_rl.process.limits import FILES_OF_ROLLOUT, raise_open_files
from verifiers_rl.process.loop_thread import gather_or_cancel, run_contained
from verifiers_rl.requests import GroupRequest
from verifiers_rl.types import Rollout, Split

logger = logging.getLogger(__name__)

CLIENT_TYPES = ("openai_chat_completions_token", "openai_chat_completions", "renderer")


# --- Rollouts -------------------------------------------------------------------------------------


class ClassicEnvironment:
    """A classic `verifiers.Environment` or `EnvGroup` in a rollout worker, with its examples.

    Args:
        client_type: how messages become tokens, see above.

    Raises:
        InvalidEnvironmentError: its dataset cannot be read, or no training example is left; or no
            client has this type, or takes `chat_template_kwargs`.
    """

    def __init__(
        self, env: Any, options: RunnerOptions, client_type: str = CLIENT_TYPES[0]
    ) -> None:
        self.env, self.options, self.name = env, options, options.name
        self._client_type = client_type
        if client_type not in CLIENT_TYPES:
            raise InvalidEnvironmentError(
                f"environment {self.name!r}: client_type={client_type!r}: must be one of "
                f"{', '.join(CLIENT_TYPES)}"
            )
        if client_type == "renderer" and options.chat_template_kwargs:
            raise InvalidEnvironmentError(
                f"environment {self.name!r}: the renderers package does not take "
                "chat_template_kwargs; choose another client_type"
            )
        self.weights, self.description = [1.0], ""
        raise_open_files(FILES_OF_ROLLOUT * options.max_concurrent)
        env.set_max_seq_len(options.max_seq_len)
        _keep_reward_errors(env.rubric)
        try:
            splits = {"train": env.get_dataset(), "eval": env.get_eval_dataset()}
            self._examples = {name: self._without_overlong(split) for name, split in splits.items()}
            if not len(self._examples["train"]):
                raise ValueError(f"no example; {len(splits['train'])} had overlong prompts")
        except (ValueError, IndexError) as error:
            raise InvalidEnvironmentError(f"environment {self.name!r}: data: {error}") from error

    def _without_overlong(self, dataset: Any) -> Any:
        """Return the dataset without the examples whose first prompt is too long."""
        options = self.options
        if options.tokenizer is None or not len(dataset):
            return dataset  # an empty one has no columns
        is_longer, limit = Renderer(options.tokenizer).is_longer, options.prompt_limit
        template, prompts = options.chat_template_kwargs, dataset["prompt"]
        kept = [i for i, prompt in enumerate(prompts) if not is_longer(prompt, limit, **template)]
        if num_left_out := len(prompts) - len(kept):
            logger.warning(f"{num_left_out} {options.why_overlong} left out")
        return dataset.select(kept)

    def sizes(self, split: Split) -> list[int]:
        """Return the number of examples of this split, as a list of one."""
        return [len(self._examples[split])]

    async def open(self) -> None:
        """Make the connections, on the event loop that will use them."""
        self._http = ServerClient(f"{self.options.base_url}/v1", self.options.timeout_s)
        make_renderer = _RendererOfPackage if self._client_type == "renderer" else Renderer
        self._renderer = make_renderer(self.options.tokenizer)
        self.close = self._http.close

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Roll out and score one row of the dataset. An error fails only its own rollout.

        Rollouts run through `env.rollout` one by one, not through `env.run_group`. There, an
        exception in one of them (for example in a tool) would lose the whole group.
        """
        row = {"example_id": request.index, **self._examples[request.split][request.index]}
        states: list[Any] = [None] * request.num_rollouts  # verifiers' own, of those played

        async def play(number: int, session: RolloutSession) -> list[Rollout]:
            rollout = Rollout(request.index, text_of(row["prompt"][-1:]), env=self.name)
            http = self._http.of_rollout(session)
            extends = self._client_type != "openai_chat_completions"
            client = _Client(http, self._renderer, self.options.max_seq_len, extends)
            sampling, start = {**request.sampling_args}, time.monotonic()
            try:
                async with session.limited(request.timeout_s):
                    playing = self.env.rollout(row, client, request.model, sampling)
                    states[number] = state = await run_contained(playing)
                rollout.generation_s = time.monotonic() - start
                rollout.record, rollout.error = record_of_state(state), state.get("error")
                if state.get("timed_out"):
                    raise TimeoutError("the environment's timeout_seconds, or a TimeoutError in it")
            except Exception as error:  # whatever the environment's own code raises
                rollout.error = error
            return [rollout]

        runs = (request.play(n, partial(play, n)) for n in range(request.num_rollouts))
        group = [rollout for (rollout,) in await gather_or_cancel(runs)]
        played = [*zip(group, states, strict=True)]
        if scored := [state for rollout, state in played if rollout.error is None]:
            try:
                async with asyncio.timeout(request.timeout_s) as deadline:
                    await self.env.rubric.score_group(scored)
                    for state in scored:
                        await self.env.rubric.cleanup(state)
            except Exception as error:  # whatever the environment's scoring raises
                late = f"scoring took longer than generation_timeout ({request.timeout_s:g} s)"
                reason = TimeoutError(late) if deadline.expired() else error
                for rollout in group:
                    rollout.error = rollout.error or reason
        for rollout, state in played:
            rollout.error = rollout.error or state.get("error")
            try:
                if rollout.error is None:
                    self._complete(rollout, state, request.policy_version)
            except (ValueError, TypeError) as error:
                rollout.error = error
        return group

    def _complete(self, rollout: Rollout, state: Any, policy_version: int) -> None:
        """Fill in what is known after scoring: the samples and the reward. Raises ValueError or
        TypeError if the rollout cannot be trained on.
        """
        turns: list[Any] = [getattr(step["response"], "turn", None) for step in state["trajectory"]]
        if None in turns:
            raise ValueError("a turn has no reply of the policy, but one of the environment's own")
        # If it just took no turn, it has no sample, and its reward counts.
        if not turns and state.get("prompt_too_long"):
            raise ValueError("no token was sampled: the prompt fills max_seq_len")
        masks_env = self.options.mask_env_responses
        samples = samples_from_turns(turns, policy_version, masks_env)
        rollout.samples, rollout.reward = samples, finite_reward(state["reward"])
        rollout.completion = text_of(state["completion"])
        rollout.metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        rollout.num_turns = len(turns)
        rollout.is_truncated = bool(state["is_truncated"])


def _keep_reward_errors(rubric: Any) -> None:
    """Make an exception in a reward function fail its rollout. `verifiers` logs it and scores 0,
    which would train the model on a number that nobody computed.
    """
    of_group = [env.rubric for env in getattr(rubric, "env_map", {}).values()]  # of an EnvGroup
    for inner in [*getattr(rubric, "rubrics", []), *of_group]:
        _keep_reward_errors(inner)

    # `state` is that of a rollout, or those of a group.
    async def call(objects_of: Any, func: Any, state: Any) -> Any:
        is_group = isinstance(state, list)
        try:
            result = await run_contained(maybe_call_with_named_args(func, **objects_of(state)))
            return result if is_group else float(result)
        except Exception as error:  # whatever the function raises
            for failed in state if is_group else [state]:
                failed["error"] = error
            return [0.0] * len(state) if is_group else 0.0

    rubric._call_individual_reward_func = partial(call, rubric.score_objects)
    rubric._call_group_reward_func = partial(call, rubric.group_score_objects)


# --- The client -----------------------------------------------------------------------------------


def _plain(message: Any) -> dict[str, Any]:
    """Return what makes two messages the same one."""
    fields = ("role", "content", "tool_calls", "tool_call_id")
    return {name: message[name] for name in fields if message.get(name)}


class _RendererOfPackage:
    """Makes tokens as `Renderer` does, with the `renderers` package."""

    def __init__(self, tokenizer: Any) -> None:
        self._renderer = create_renderer(tokenizer)

    def render(self, messages: list[Any], tools: Any = None) -> list[int]:
        return self._renderer.render_ids(messages, tools=tools, add_generation_prompt=True)

    def extend(
        self, tokens: list[int], messages: list[Any], num_new: int, tools: Any = None
    ) -> list[int] | None:
        # It takes a prompt and a reply, and joins them.
        extended = self._renderer.bridge_to_next_turn(
            tokens[:1], tokens[1:], messages[-num_new:], tools=tools
        )
        return extended and extended.token_ids


class _Client(OpenAIChatCompletionsClient):
    """Sends the model calls of one rollout to the token route of `vf-vllm`. It ends a sequence at
    `max_seq_len`, keeps in `turn` of a response what `samples_from_turns` needs, and accepts empty
    replies.

    A policy that ends its turn at once has sampled a token like any other, and must be able to
    unlearn it. The stock client raises EmptyModelResponseError for such a reply, which would remove
    the rollout from the batch.
    """

    def __init__(
        self,
        http: ServerClient,
        renderer: Renderer | _RendererOfPackage,
        max_seq_len: int,
        extends: bool,
    ) -> None:
        super().__init__(http)
        self._renderer, self._max_seq_len, self._extends = renderer, max_seq_len, extends
        self._turns: list[tuple[list[Any], list[int]]] = []  # messages with the reply; their tokens

    @handle_openai_overlong_prompt
    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> Any:
        """Return the messages and their tokens with the `ChatReply`."""
        body = {**sampling_args, "model": model}
        if tools:
            body["tools"] = tools
        prompt_ids = self._prompt_ids(prompt, body)
        if (room := self._max_seq_len - len(prompt_ids)) < 1:
            raise OverlongPromptError
        body["max_tokens"] = min(body.get("max_tokens") or room, room)
        reply = await self.client.reply_to(body, prompt_ids, is_first=not self._turns)
        return prompt, prompt_ids, reply

    def _prompt_ids(self, messages: list[Any], body: dict[str, Any]) -> list[int]:
        """Return the tokens so far and those of new messages, or all of them rendered. Raises
        jinja2.TemplateError or ValueError if they cannot be.
        """
        template = {"tools": body.get("tools"), **body.get("chat_template_kwargs", {})}
        plain = [*map(_plain, messages)]
        for said, tokens in reversed(self._turns if self._extends else []):
            num_new = len(plain) - len(said)
            if num_new > 0 and plain[: len(said)] == said:
                extended = self._renderer.extend(tokens, messages, num_new, **template)
                if extended is not None:
                    return extended
        return self._renderer.render(messages, **template)

    async def raise_from_native_response(self, response: Any) -> None:
        """Accept it."""

    async def from_native_response(self, response: Any) -> Any:
        messages, prompt_ids, reply = response
        completion = ChatCompletion.model_validate(reply.completion)
        parsed = await super().from_native_response(completion)
        (choice,) = reply.completion["choices"]
        if choice["finish_reason"] != "length":  # what ends the reply is among its tokens
            said = [*map(_plain, [*messages, choice["message"]])]
            self._turns.append((said, prompt_ids + reply.sampled[0].tolist()))
        parsed.turn, message = Turn(prompt_ids, reply), parsed.message
        if message.content is None and not message.tool_calls:
            message.content = ""
        return parsed
