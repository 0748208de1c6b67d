"""verifiers' `null` harness, in the caller's event loop: a chat with tools, without a program.

verifiers' own `null` harness starts a Python process for each rollout. A harness may run without
one, as long as all model calls go to the interception endpoint (`verifiers.v1.Harness.launch`). An
agent with `harness = { id = "null" }` gets the harness of this module.

The endpoint is an aiohttp application in this process, and the chat of a run calls it in memory.
Behind a socket, a call is parsed and written by an HTTP client and by an HTTP server, which takes
longer than the endpoint's own work (benchmarks/README.md).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http import HttpVersion11, RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from verifiers.v1 import Harness, HarnessConfig, ProgramResult
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import HarnessSession
from yarl import URL

from verifiers_rl.envs.rendering import as_object
from verifiers_rl.envs.tools import LocalUrl, Tools, open_tools
from verifiers_rl.process.loop_thread import run_contained

__all__ = ["ChatHarness"]  # what verifiers finds in this module
# Id of the harness. verifiers' own commands know it as "verifiers_rl", and then load all that this
# package exports, with torch, which a rollout worker may not have.
IN_PROCESS = "verifiers_rl_chat"
sys.modules[IN_PROCESS] = sys.modules[__name__]  # where verifiers looks for it
CHAT, GATE = "/v1/chat/completions", "/tool"  # model calls; questions whether a tool may be called
# Takes a path and the JSON of a request; returns the JSON of the reply, or raises RefusedError.
Post = Callable[[str, dict[str, Any]], Awaitable[Any]]


def first_messages(data: Any) -> list[dict[str, Any]]:
    """Return the first prompt of a task's data as messages for a chat template."""
    messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*messages, {"role": "user", "content": data.prompt}]
    return [*messages, *map(message_to_wire, data.prompt or [])]


class RefusedError(Exception):
    """The endpoint refuses the next request of the rollout; its status and reason."""


class ChatHarnessConfig(HarnessConfig):
    id: str = IN_PROCESS


class ChatHarness(Harness[ChatHarnessConfig]):
    """Chats with a system prompt, messages and tools, until a reply calls no tool. The endpoint
    applies turn limits and stop conditions: it refuses the next request.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def session(self, *given: Any, **options: Any) -> HarnessSession:
        """Open the rollout's own tools that this process has; they last until it ends."""
        session, stack = _ChatSession(self, *given, **options), AsyncExitStack()
        servers: dict[str, Any] = dict(session.mcp_urls)
        async with stack:  # if one cannot be opened, the others are closed
            for server, url in servers.items():
                if isinstance(url, LocalUrl):
                    own = open_tools(url.toolset, session.trace.task.data)
                    servers[server] = url.shared or await stack.enter_async_context(own)
            session.mcp_urls, session.tools = servers, stack.pop_all()
        return session

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, Any],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        runner, tools = self._endpoint_of(trace, secret), Tools(self.config.tool_timeout, trace)
        try:
            async with AsyncExitStack() as stack:
                if runner is not None:
                    post = post_in_memory(runner, secret)
                else:  # verifiers' own commands and `vf-rl generate` play it too
                    http = await stack.enter_async_context(aiohttp.ClientSession())
                    post = partial(post_over_http, http, endpoint.removesuffix("/v1"), secret)
                await tools.connect_all(stack, mcp_urls)
                is_gated = tool_interception_url is not None
                return await self._chat(post, ctx.model, data, tools, is_gated)
        except RefusedError as refused:
            return ProgramResult(1, "", str(refused))
        except BaseExceptionGroup as group:  # from a session's task group; it contains the cause
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            raise error from None

    def _endpoint_of(self, trace: Any, secret: str) -> web.AppRunner | None:
        """Return the interception server at which a rollout with this secret is registered; None
        if that is not one of a run's, which `v1_client.TokenClientConfig` knows.
        """
        of_run = getattr(trace.agent.config.client, "_runner", None)
        serving = of_run and of_run.env._interception
        for server in getattr(serving, "servers", [serving]):
            if secret in getattr(server, "sessions", ()):
                return server.runner
        return None

    async def _chat(
        self, post: Post, model: str, data: Any, tools: Tools, is_gated: bool
    ) -> ProgramResult:
        messages = first_messages(data)
        while True:
            body = {"model": model, "messages": messages}
            if tools.schemas:
                body["tools"] = tools.schemas
            message = (await post(CHAT, body))["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return ProgramResult(0, "", "")
            for call in message["tool_calls"]:
                function = call["function"]
                if is_gated:  # the taskset may refuse calls
                    asked = {"tool_call_id": call["id"], "name": function["name"]}
                    arguments = as_object(function["arguments"] or "{}")
                    decision = await post(GATE, asked | {"arguments": arguments})
                    if decision["action"] == "stop":
                        return ProgramResult(1, "", decision["reason"])
                    if decision["action"] == "deny":
                        messages.append(decision["message"])
                        continue
                content = await tools.call(function)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


class _ChatSession(HarnessSession):
    """A rollout in the chat, with the tools that it has in this process."""

    tools: AsyncExitStack

    async def close(self) -> None:
        await super().close()
        await self.tools.aclose()


def reply_of(status: int, body: bytes) -> Any:
    """Return the JSON of a reply.

    Raises:
        RefusedError: it is an error.
    """
    if status != 200:
        raise RefusedError(f"{status}: {body.decode(errors='replace')}")
    return json.loads(body)


async def post_over_http(
    http: aiohttp.ClientSession, root: str, secret: str, path: str, body: dict[str, Any]
) -> Any:
    """Post to the endpoint at this address, which is without /v1; see `Post`."""
    headers = {"Authorization": f"Bearer {secret}"}
    timeout = aiohttp.ClientTimeout(total=None)  # the rollout has a deadline
    async with http.post(root + path, json=body, headers=headers, timeout=timeout) as reply:
        return reply_of(reply.status, await reply.read())


def post_in_memory(runner: web.AppRunner, secret: str) -> Post:
    """Return what calls the application without a socket. It raises whatever the application
    raises; an HTTP server would reply 500.

    Each request runs in a task of its own, as it would behind a socket: verifiers cancels the tasks
    of a rollout's requests when the rollout ends, and the request then ends with an ExitError.

    Args:
        runner: of the endpoint's application.
        secret: the rollout's.
    """
    server: Any = runner.server
    protocol = server()  # requests must have one; it is never connected
    headers = CIMultiDict({"Authorization": f"Bearer {secret}", "Content-Type": "application/json"})
    fixed = CIMultiDictProxy(headers), (), False, None, False, False

    async def call(path: str, data: bytes) -> Any:
        loop = asyncio.get_running_loop()
        payload = aiohttp.StreamReader(protocol, limit=len(data) + 1, loop=loop)
        payload.feed_data(data)
        payload.feed_eof()
        message = RawRequestMessage("POST", path, HttpVersion11, *fixed, URL(path))
        task: Any = asyncio.current_task()
        writer: Any = None  # for replies that are streamed, and we ask for none
        request = server.request_factory(message, payload, protocol, writer, task)
        return await server.request_handler(request)

    async def post(path: str, body: dict[str, Any]) -> Any:
        response = await run_contained(call(path, json.dumps(body).encode()))
        return reply_of(response.status, response.body)

    return post
