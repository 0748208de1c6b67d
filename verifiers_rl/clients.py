"""How rollouts reach `vf-vllm`: the clients of `verifiers`, on one HTTP transport, keeping what the
server says about the policies that sampled its tokens.

    openai_chat_completions        messages in. The server renders the whole conversation anew at
                                   each turn; text that does not tokenise to what was sampled, or a
                                   template that rewrites the past, breaks the sequence of tokens
    openai_chat_completions_token  from the second turn on, the tokens so far and those of the new
                                   messages in: the sequence goes on exactly
    renderer                       tokens in at each turn, made by the `renderers` package: exact
                                   for the model families that it knows, without tools for others
"""

from __future__ import annotations

import json
import logging
import os
from contextvars import ContextVar
from typing import Any

import aiohttp
import httpx
from openai import APIConnectionError, APITimeoutError, AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.legacy.clients import OpenAIChatCompletionsClient
from verifiers.legacy.clients.openai_chat_completions_token_client import (
    OpenAIChatCompletionsTokenClient,
)
from verifiers.legacy.errors import EmptyModelResponseError

policy_versions: ContextVar[list[tuple[int, int]] | None] = ContextVar(
    "policy_versions", default=None
)


class ServerClient(AsyncOpenAI):
    """AsyncOpenAI with one short way for `post(..., cast_to=httpx.Response)`, which is how all
    clients here send their requests: aiohttp, without the layers of openai and httpx. With hundreds
    of small requests at once these take longer than all the rest of a rollout
    (benchmarks/rollouts.py). What it raises is openai's; a lost connection and a status of 500
    and more it tries once again.

    Args:
        base_url: of the API, with /v1.
        timeout_s: deadline of one request.
    """

    def __init__(self, base_url: str, timeout_s: float) -> None:
        key = os.environ.get("VLLM_API_KEY", "none")
        # No proxy: it is our own server.
        http = DefaultAsyncHttpxClient(trust_env=False, timeout=timeout_s)
        super().__init__(base_url=base_url, api_key=key, http_client=http, max_retries=1)
        self._session = aiohttp.ClientSession(
            # The server closes connections that idle for 5 s; requests must not run into that.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )

    async def post(self, path: str, *, cast_to: Any, **kwargs: Any) -> Any:
        if cast_to is not httpx.Response:
            return await super().post(path, cast_to=cast_to, **kwargs)
        url = path if "://" in path else str(self.base_url).rstrip("/") + path
        headers = (kwargs.get("options") or {}).get("headers")
        data = json.dumps(kwargs["body"]).encode()

        def request() -> httpx.Request:  # for errors only: it takes longer than the rest here
            return httpx.Request("POST", url)

        for retries_left in (1, 0):
            try:
                async with self._session.post(url, data=data, headers=headers) as reply:
                    content = await reply.read()
                if reply.status < 500:
                    break
            except TimeoutError as error:  # aiohttp's own are both this and a ClientError
                raise APITimeoutError(request()) from error
            except aiohttp.ClientError as error:
                if not retries_left:
                    raise APIConnectionError(request=request()) from error
        _remember_policy_versions(reply.headers.get("X-Policy-Versions"))
        response = httpx.Response(reply.status, content=content)
        if response.is_error:
            response.request = request()
            raise self._make_status_error_from_response(response)
        return response

    async def close(self) -> None:
        await self._session.close()
        await super().close()


def _remember_policy_versions(header: str | None) -> None:
    """The X-Policy-Versions header of a reply, "0:3,17:4" as [(0, 3), (17, 4)]."""
    if header:
        spans = [span.split(":") for span in header.split(",")]
        policy_versions.set([(int(start), int(version)) for start, version in spans])


class _Exact:
    """What every client here adds to its base: policy versions, and an empty reply is a reply.

    A policy that ends its turn at once has sampled a token like any other, and must be able to
    unlearn it. The stock clients raise EmptyModelResponseError, and the rollout would leave the
    batch.
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
        # Set by `ServerClient.post` in this very task, which has awaited the request.
        parsed.policy_versions = policy_versions.get()
        if parsed.message.content is None and not parsed.message.tool_calls:
            parsed.message.content = ""
        return parsed


class ChatClient(_Exact, OpenAIChatCompletionsClient):
    """Messages in."""


class TokenClient(_Exact, OpenAIChatCompletionsTokenClient):
    """Messages in at the first turn, tokens in after it, through `/v1/chat/completions/tokens`.

    The tokens of new messages come from the trainer's own tokenizer: asking the server for them
    takes two more requests a turn. A turn that cannot go on exactly (after a truncated reply, say)
    falls back to messages, and starts a new sample.
    """

    def __init__(self, client: Any, tokenizer: Any) -> None:
        super().__init__(client)
        self.tokenizer = tokenizer
        self.logger.setLevel(logging.ERROR)  # it warns at each fallback; broken_turn_share counts

    async def tokenize(
        self,
        messages: Any,
        tools: Any,
        model: str,
        extra_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        options = {"add_generation_prompt": True, **(extra_kwargs or {})}
        options |= options.pop("chat_template_kwargs", {})
        return self.tokenizer.apply_chat_template(
            [as_vllm_renders(message) for message in messages],
            tools=tools,
            return_dict=False,
            **options,
        )


def as_vllm_renders(message: dict[str, Any]) -> dict[str, Any]:
    """As vLLM gives it to a chat template: arguments of tool calls as an object, not as JSON, and
    parts of text as one text.
    """
    if isinstance(parts := message.get("content"), list):
        message = {**message, "content": "\n".join(part["text"] for part in parts)}
    calls = [
        {**call, "function": {**function, "arguments": _as_object(function["arguments"])}}
        for call in message.get("tool_calls") or []
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls} if calls else message


def _as_object(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        return arguments  # the model's mistake, which the environment answers


def _make_renderer_client(client: Any, tokenizer: Any) -> Any:
    from renderers import create_renderer
    from verifiers.legacy.clients.renderer_client import RendererClient

    class ExactRendererClient(_Exact, RendererClient):
        """Tokens in, to vLLM's `/inference/v1/generate`."""

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: dict[str, Any], *args: Any, **kwargs: Any
        ) -> Any:
            # The base passes on only what it knows; these would be dropped without a word.
            extra = {**sampling_args.get("extra_body", {})}
            extra.pop("return_token_ids", None)  # it always gets them
            for name in ("presence_penalty", "frequency_penalty"):
                if name in sampling_args:
                    extra[name] = sampling_args[name]
            sampling_args = {**sampling_args, "extra_body": extra}
            return await super().get_native_response(prompt, model, sampling_args, *args, **kwargs)

    return ExactRendererClient(client, renderer=create_renderer(tokenizer))


def make_client(client_type: str, base_url: str, tokenizer: Any, timeout_s: float) -> Any:
    """A client of this type; to be called on the event loop that will use it.

    Args:
        client_type: see the head of this module.
        base_url: of the server, without /v1.
        tokenizer: the model's; `openai_chat_completions` does without.
        timeout_s: deadline of one request.
    """
    client = ServerClient(f"{base_url}/v1", timeout_s)
    match client_type:
        case "openai_chat_completions":
            return ChatClient(client)
        case "openai_chat_completions_token":
            return TokenClient(client, tokenizer)
        case "renderer":
            return _make_renderer_client(client, tokenizer)
    raise ValueError(f"client_type={client_type!r}")


def reason_against_chat_template(tokenizer: Any) -> str | None:
    """Why turns rendered from messages would not extend the tokens before them, or None.

    A reply with thinking is rendered as history, as the next turn's prompt has it. Templates that
    drop the thinking of past turns (Qwen3's, DeepSeek-R1's) do not give back what was sampled.
    """
    from jinja2 import TemplateError

    question, reply, answer = (
        {"role": "user", "content": "q"},
        "<think>\nthinking\n</think>\n\nanswer",
        {"role": "user", "content": "next"},
    )
    try:
        prompt, history = (
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            for messages in (
                [question],
                [question, {"role": "assistant", "content": reply}, answer],
            )
        )
    except TemplateError:
        return None  # it takes no such conversation; the server will say so
    if history.startswith(prompt + reply):
        return None
    dropped = "rewrites" if "thinking" in history.lower() else "drops the thinking of"
    return f"the chat template of {tokenizer.name_or_path!r} {dropped} past turns"
