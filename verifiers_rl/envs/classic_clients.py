"""How rollouts of classic environments reach `vf-vllm`: through the clients of `verifiers`, on our
HTTP transport. They keep what the server says about the policies that sampled its tokens.

    openai_chat_completions        sends messages. The server renders the whole conversation again
                                   at each turn. The sequence of tokens breaks if the text does not
                                   tokenize to what was sampled, or a template rewrites past turns
    openai_chat_completions_token  sends tokens, rendered by the trainer's own tokenizer. From the
                                   second turn on, these are the tokens so far and those of the new
                                   messages, so that the sequence continues exactly
    renderer                       sends tokens at each turn, made by the `renderers` package: exact
                                   for the model families that it knows, without tools for others
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

import httpx
from jinja2 import TemplateError
from verifiers.legacy.clients import OpenAIChatCompletionsClient
from verifiers.legacy.clients.openai_chat_completions_token_client import (
    OpenAIChatCompletionsTokenClient,
)
from verifiers.legacy.errors import EmptyModelResponseError
from verifiers.legacy.types import ResponseTokens

from verifiers_rl.envs.rendering import Renderer
from verifiers_rl.inference import (
    ServerClient,
    pack_ids,
    policy_versions,
    unpack_experts,
    unpack_mask,
    unpack_sampled,
)


class _KeepsVersionsAndEmptyReplies:
    """What every client here adds to its base: it keeps policy versions, and accepts empty replies.

    A policy that ends its turn at once has sampled a token like any other, and must be able to
    unlearn it. The stock clients raise EmptyModelResponseError for such a reply, which would remove
    the rollout from the batch.
    """

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        policy_versions.set(None)
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
        return parsed


class ChatClient(_KeepsVersionsAndEmptyReplies, OpenAIChatCompletionsClient):
    """Sends messages."""


_CHAT_PATH, _TOKENS_PATH = "/chat/completions", "/chat/completions/tokens"
# A request with one of these has its messages rendered by the server.
_OF_THE_SERVERS_RENDERING = (
    *("add_generation_prompt", "add_special_tokens", "chat_template"),
    *("continue_final_message", "documents"),
)
_prompt_ids: ContextVar[list[int]] = ContextVar("prompt_ids")  # of the request of this task


class _PackingClient(ServerClient):
    """Sends requests to the token route: their messages become tokens here, packed, and so are the
    tokens of the reply. A conversation that cannot be rendered here goes on as messages.
    """

    def __init__(self, base_url: str, timeout_s: float, renderer: Renderer) -> None:
        super().__init__(base_url, timeout_s)
        self._renderer = renderer

    async def post(self, path: str, *, cast_to: Any, **kwargs: Any) -> Any:
        tokens: list[int] = []
        if path == _TOKENS_PATH:
            tokens = kwargs["body"]["tokens"]
        elif path == _CHAT_PATH and cast_to is httpx.Response:
            tokens = self._render(kwargs["body"])
        if tokens:
            _prompt_ids.set(tokens)
            kwargs["body"] = {
                **kwargs["body"],
                "tokens": pack_ids(tokens),
                "packed_tokens": True,
                # The tokens are the prompt. vLLM renders messages all the same, so it gets a short
                # one.
                "messages": [{"role": "user", "content": "."}],
            }
            path = _TOKENS_PATH
        return await super().post(path, cast_to=cast_to, **kwargs)

    def _render(self, body: dict[str, Any]) -> list[int]:
        """Return the tokens of the messages; none if only the server can render them."""
        if any(name in body for name in _OF_THE_SERVERS_RENDERING):
            return []
        template = {"tools": body.get("tools"), **body.get("chat_template_kwargs", {})}
        try:
            return self._renderer.render(body["messages"], **template)
        except (TemplateError, ValueError):  # the server says what is wrong, or renders an image
            return []


class TokenClient(_KeepsVersionsAndEmptyReplies, OpenAIChatCompletionsTokenClient):
    """Sends tokens, through `/v1/chat/completions/tokens`.

    They come from the trainer's own tokenizer, because asking the server for them takes two more
    requests per turn. A turn that cannot continue the tokens exactly (for example after a truncated
    reply) is rendered from messages, and starts a new sample.
    """

    def __init__(self, client: Any, renderer: Renderer) -> None:
        super().__init__(client)
        self._renderer = renderer
        self.logger.setLevel(logging.ERROR)  # hides a warning per fallback; see broken_turn_share

    async def from_native_response(self, response: Any) -> Any:
        parsed = await super().from_native_response(response)
        if (packed := getattr(response, "packed_tokens", None)) is not None:
            token_ids, logprobs = unpack_sampled(packed)
            prompt_ids = _prompt_ids.get()
            parsed.message.tokens = ResponseTokens(
                prompt_ids=prompt_ids,
                prompt_mask=[0] * len(prompt_ids),
                completion_ids=token_ids.tolist(),
                completion_mask=[1] * len(token_ids),
                completion_logprobs=logprobs.tolist(),
            )
            parsed.sampling_mask = unpack_mask(packed)
            parsed.experts = unpack_experts(packed)
        return parsed

    async def tokenize(
        self,
        messages: Any,
        tools: Any,
        model: str,
        extra_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        options = {**(extra_kwargs or {})}
        options |= options.pop("chat_template_kwargs", {})
        is_prompt = options.pop("add_generation_prompt", True)
        return self._renderer.render(messages, is_prompt, tools=tools, **options)


def _make_renderer_client(client: Any, tokenizer: Any) -> Any:
    from renderers import create_renderer
    from verifiers.legacy.clients.renderer_client import RendererClient

    class ExactRendererClient(_KeepsVersionsAndEmptyReplies, RendererClient):
        """Sends tokens to vLLM's `/inference/v1/generate`."""

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: dict[str, Any], *args: Any, **kwargs: Any
        ) -> Any:
            # The base passes on only options that it knows, and drops these silently.
            extra = {**sampling_args.get("extra_body", {})}
            extra.pop("return_token_ids", None)  # the base always gets them
            for name in ("presence_penalty", "frequency_penalty", "stop"):
                if name in sampling_args:
                    extra[name] = sampling_args[name]
            sampling_args = {**sampling_args, "extra_body": extra}
            return await super().get_native_response(prompt, model, sampling_args, *args, **kwargs)

    return ExactRendererClient(client, renderer=create_renderer(tokenizer))


def make_client(client_type: str, base_url: str, tokenizer: Any, timeout_s: float) -> Any:
    """Make a client of this type. Called on the event loop that will use it.

    Args:
        client_type: see the head of this module.
        base_url: URL of the server, without /v1.
        tokenizer: the model's; `openai_chat_completions` does not use it.
        timeout_s: deadline of one request.
    """
    url = f"{base_url}/v1"
    match client_type:
        case "openai_chat_completions":
            return ChatClient(ServerClient(url, timeout_s))
        case "openai_chat_completions_token":
            renderer = Renderer(tokenizer)
            return TokenClient(_PackingClient(url, timeout_s, renderer), renderer)
        case "renderer":
            return _make_renderer_client(ServerClient(url, timeout_s), tokenizer)
    raise ValueError(f"client_type={client_type!r}")
