"""Model calls of agents of `verifiers.v1`: from verifiers' interception endpoint to `vf-vllm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx
import openai
import verifiers.v1 as vf
from jinja2 import TemplateError
from pydantic import PrivateAttr
from verifiers.v1.dialects import Dialect
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import server as interception

from verifiers_rl.envs.v1_loading import IN_PROCESS
from verifiers_rl.inference import (
    ServerClient,
    pack_ids,
    policy_versions,
    unpack_experts,
    unpack_mask,
    unpack_sampled,
)

if TYPE_CHECKING:
    from verifiers_rl.envs.v1 import V1Environment


class TokenClientConfig(vf.TrainClientConfig):
    """Says to which of our environments a model call belongs, and its sampling options."""

    sampling: dict[str, Any]
    _environment: Any = PrivateAttr()  # a V1Environment


def prompt_too_long(turn: PendingTurn | None, reason: str) -> ProviderError:
    """Return the exception for a prompt that leaves no room for a reply. verifiers leaves it to the
    harness to end the trace then; for ours, this function ends it.

    Args:
        reason: contains the words by which harnesses recognize this error.
    """
    if turn is not None and turn.trace.agent.config.harness.id == IN_PROCESS:
        turn.trace.stop("context_length")
    return ProviderError(reason, status_code=400)


class TokenClient(vf.Client):
    """Passes model calls from the endpoint to `vf-vllm`'s `/v1/chat/completions/tokens`."""

    def __init__(self, config: TokenClientConfig) -> None:
        self._env: V1Environment = config._environment
        self._sampling = {**config.sampling}
        self._sampling |= self._sampling.pop("extra_body", {})
        self._http = ServerClient(f"{config.base_url}/v1", self._env.options.timeout_s)

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: vf.SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(
                f"{type(dialect).__name__}: only chat completions can be trained on; use a harness "
                "that asks for them",
                status_code=400,
            )
        own = sampling.model_dump(exclude_none=True)  # the agent's
        extra = {k: v for k, v in own.pop("extra_body", {}).items() if v is not None}
        options = self._sampling | extra | own
        template = {"tools": body.get("tools")}
        for layer in (body, self._sampling, extra, own):  # a later one wins
            template |= layer.get("chat_template_kwargs") or {}
        options.pop("chat_template_kwargs", None)
        try:
            prompt_ids = self._prompt_ids(body["messages"], turn, template)
        except ValueError as error:  # the prompt has an image
            raise ProviderError(str(error), status_code=400) from error
        room = self._env.options.max_seq_len - len(prompt_ids)
        if room < 1:
            raise prompt_too_long(
                turn,
                f"maximum context length: {len(prompt_ids)} tokens fill max_seq_len="
                f"{self._env.options.max_seq_len}",
            )
        request = body | options | {"tokens": pack_ids(prompt_ids), "packed_tokens": True}
        # If a program asks for a stream, verifiers makes one from the whole reply. The only
        # limit is max_tokens below.
        for name in ("stream", "stream_options", "max_completion_tokens"):
            request.pop(name, None)
        wants_experts = request.pop("routed_experts", False)  # the server's flag returns them
        if request.get("sampling_mask") and request.get("top_k") in (None, -1, 0):
            request["top_k"] = self._sampling["top_k"]  # an agent has taken the limit away
        agent = turn.trace.agent.name if turn is not None else ""
        self._env.warn_of_bias(agent, request, self._sampling)
        request["max_tokens"] = min(options.get("max_tokens") or room, room)
        # The tokens are the prompt. vLLM renders messages all the same, so it gets a short one.
        request["messages"] = [{"role": "user", "content": "."}]
        policy_versions.set(None)
        http = self._http.of_rollout(self._env.session_of(session_id))
        try:
            reply = await http.post(
                "/chat/completions/tokens", cast_to=httpx.Response, body=request
            )
        except openai.OpenAIError as error:
            if "context length" in str(error):
                raise prompt_too_long(turn, str(error)) from error
            status = getattr(error, "status_code", 503)
            raise ProviderError(str(error), status_code=status) from error
        completion = reply.json()
        (choice,) = completion["choices"]
        packed = completion.pop("packed_tokens")
        token_ids, logprobs = unpack_sampled(packed)
        experts = choice.pop("routed_experts", None)
        response = dialect.parse_response(dialect.validate_response(completion))
        response.raw = completion
        response.tokens = vf.TurnTokens(
            prompt_ids=prompt_ids,
            completion_ids=token_ids.tolist(),
            completion_logprobs=logprobs.tolist(),
        )
        if session_id and (spans := policy_versions.get()):
            self._env.versions.setdefault(session_id, []).append((response.message, spans))
        if session_id and wants_experts and experts is not None:
            unpacked = unpack_experts(experts)
            self._env.experts.setdefault(session_id, []).append((response.message, unpacked))
        if session_id and (mask := unpack_mask(packed)) is not None:
            self._env.masks.setdefault(session_id, []).append((response.message, mask))
        return response

    def _prompt_ids(
        self, messages: list[Any], turn: PendingTurn | None, template: dict[str, Any]
    ) -> list[int]:
        """Return the tokens so far and those of new messages; render all again if that fails."""
        before = turn.previous_renderer_token_ids() if turn is not None else None
        if turn is not None and before is not None:  # prompt and reply of the turn before
            tokens = [*before[0], *before[1]]
            last = turn.prefix_node_ids[-1]
            was_cut = any(c.node == last and c.finish_reason == "length" for c in turn.trace.calls)
            all_new = turn.tail and all(message.role != "assistant" for message in turn.tail)
            if all_new and not was_cut:
                added = self._tokens_after(messages, len(turn.tail), tokens[-1], template)
                if added is not None:
                    return tokens + added
        return self._env.render(messages, **template)

    def _tokens_after(
        self, messages: list[Any], num_new: int, last_token: int, template: dict[str, Any]
    ) -> list[int] | None:
        """Return what the template writes after a reply that ended with `last_token`, for the last
        `num_new` messages; None if it cannot be told.

        A short reply stands in for the real one. The tokens of the real one are known, and the
        template may render it otherwise than it was sampled. A reply that ended with no special
        token, as one does at a `stop` string, is followed by the token that ends the template's
        replies.
        """
        is_ended = last_token in self._env.special_ids
        end = last_token if is_ended else self._env.end_id
        question = {"role": "user", "content": "?"}
        reply = {**messages[-num_new - 1], "content": "."}
        reply = {k: reply[k] for k in ("role", "content", "tool_calls") if reply.get(k)}
        try:
            before = self._env.render([question], is_prompt=False, **template)
            after = self._env.render([question, reply, *messages[-num_new:]], **template)
        except TemplateError:
            return None  # the template refuses such a conversation
        ends = [at for at, token in enumerate(after) if token == end]
        num_before = before.count(end)
        return after[ends[num_before] + is_ended :] if len(ends) > num_before else None

    async def relay(self, *args: Any, **kwargs: Any) -> Any:
        raise ProviderError("streamed replies cannot be trained on", status_code=400)

    async def close(self) -> None:
        await self._http.close()


_stock_resolve_client = interception.resolve_client


def _resolve_client(config: Any) -> vf.Client:
    """Make a client from its configuration. verifiers' own function knows only two kinds."""
    if isinstance(config, TokenClientConfig):
        return TokenClient(config)
    return _stock_resolve_client(config)


# Not needed once the configuration of a client can name its class.
interception.resolve_client = _resolve_client
