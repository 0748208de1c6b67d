"""verifiers' `null` harness, in the caller's event loop: a chat with tools, without a program.

verifiers' own `null` harness starts a Python process for each rollout. A harness may run without
one, as long as all model calls go to the interception endpoint (`verifiers.v1.Harness.launch`). An
agent with `harness = { id = "null" }` gets the harness of this module.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import aiohttp
from verifiers.v1 import Harness, HarnessConfig, HarnessError, ProgramResult
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import HarnessSession

from verifiers_rl.envs.endpoint import Post, RefusedError, post_in_memory, reply_of
from verifiers_rl.envs.local_tools import LocalServer, LocalUrl, open_tools

CHAT, GATE = "/v1/chat/completions", "/tool"  # model calls; questions whether a tool may be called
CONNECT_S = 60.0  # deadline of connecting to all tool servers of a rollout


def interception_of(client: Any, secret: str) -> Any:
    """Return the `aiohttp.web.AppRunner` of the interception server at which a rollout with this
    secret is registered; None if that is not one of our environment's.
    """
    runner = getattr(client, "_runner", None)  # of a `v1_client.TokenClientConfig`
    serving = getattr(runner and runner.env, "_interception", None)
    for server in getattr(serving, "servers", [serving]):
        if secret in getattr(server, "sessions", ()):
            return server.runner
    return None


class ChatHarnessConfig(HarnessConfig):
    id: str = "verifiers_rl"


class ChatHarness(Harness[ChatHarnessConfig]):
    """Chats with a system prompt, messages and tools over MCP, until a reply calls no tool. The
    endpoint applies turn limits and stop conditions: it refuses the next request.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def session(self, *given: Any, **options: Any) -> HarnessSession:
        """Open the rollout's own tools that this process has; they last until it ends."""
        session = _ChatSession(self, *given, **options)
        session.mcp_urls = servers = dict(session.mcp_urls)
        try:
            for server, url in servers.items():
                if isinstance(url, LocalUrl):
                    servers[server] = url.shared or await session.tools.enter_async_context(
                        open_tools(url.toolset, session.trace.task.data)
                    )
        except BaseException:
            await session.tools.aclose()
            raise
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
        runner = interception_of(ctx.client, secret)
        try:
            async with AsyncExitStack() as stack:
                if runner is not None:
                    post = post_in_memory(runner, secret)
                else:
                    http = await stack.enter_async_context(aiohttp.ClientSession())
                    post = partial(_post, http, endpoint.removesuffix("/v1"), secret)
                tools = _Tools(self.config.tool_timeout, trace)
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

    async def _chat(
        self, post: Post, model: str, data: Any, tools: _Tools, is_gated: bool
    ) -> ProgramResult:
        system_prompt, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = []
        if system_prompt:
            messages.append({"role": "system", "content": system_prompt})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        while True:
            body = {"model": model, "messages": messages}
            if tools.schemas:
                body["tools"] = tools.schemas
            message = (await post(CHAT, body))["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return ProgramResult(0, "", "")
            for call in message["tool_calls"]:
                if is_gated:  # the taskset may refuse calls
                    function = call["function"]
                    asked = {"tool_call_id": call["id"], "name": function["name"]}
                    decision = await post(GATE, asked | {"arguments": _arguments(function)})
                    if decision["action"] == "stop":
                        return ProgramResult(1, "", decision["reason"])
                    if decision["action"] == "deny":
                        messages.append(decision["message"])
                        continue
                content = await tools.call(call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


class _ChatSession(HarnessSession):
    """A rollout in the chat, with the tools that it has in this process."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.tools = AsyncExitStack()

    async def close(self) -> None:
        await super().close()
        await self.tools.aclose()


async def _post(
    http: aiohttp.ClientSession, root: str, secret: str, path: str, body: dict[str, Any]
) -> Any:
    """Post to verifiers' interception endpoint; return its reply.

    Args:
        root: the endpoint's address without /v1.
        secret: the rollout's.

    Raises:
        RefusedError: the endpoint refuses the request.
    """
    headers = {"Authorization": f"Bearer {secret}"}
    timeout = aiohttp.ClientTimeout(total=None)  # the rollout has a deadline
    async with http.post(root + path, json=body, headers=headers, timeout=timeout) as reply:
        return reply_of(reply.status, await reply.read())


def _arguments(function: dict[str, Any]) -> Any:
    """Return the arguments of a call as JSON; the text itself if it is none."""
    try:
        return json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError:
        return function["arguments"]


class _Tools:
    """The tools of a rollout, with names `<server>_<tool>`. Tools of a server without a name keep
    their names. A server is one of MCP, or a `LocalServer`.
    """

    def __init__(self, timeout_s: float, trace: Any) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._timeout_s = timeout_s
        self._trace = trace
        # Each takes the arguments and returns mcp's result.
        self._calls: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {}

    async def connect_all(self, stack: AsyncExitStack, servers: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                for server, where in servers.items():
                    if isinstance(where, LocalServer):
                        tools, call = await where.list_tools(), partial(where.call, self._trace)
                    else:
                        client = await self._connect(stack, where)
                        tools, call = (await client.list_tools()).tools, client.call_tool
                    for tool in tools:
                        self._add(server, tool, partial(call, tool.name))
        except TimeoutError as error:
            raise HarnessError(
                f"the tool servers {list(servers)} did not answer within {CONNECT_S:g} s"
            ) from error

    async def _connect(self, stack: AsyncExitStack, url: str) -> Any:
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        # As mcp makes it, but without reading the TLS certificates where none are needed, which
        # took half of a rollout's time. The harness's own deadline is earlier than this one.
        timeout = httpx2.Timeout(30.0, read=self._timeout_s + 30.0)
        is_tls = url.startswith("https:")
        made = httpx2.AsyncClient(verify=is_tls, timeout=timeout, follow_redirects=True)
        http = await stack.enter_async_context(made)
        transport = streamable_http_client(url, http_client=http)
        return await stack.enter_async_context(Client(transport, mode="legacy"))

    def _add(self, server: str, tool: Any, call: Any) -> None:
        name = f"{server}_{tool.name}" if server else tool.name
        if name in self._calls:
            raise ValueError(f"two tools are named {name!r}")
        self._calls[name] = call
        # This is the name in MCP. The attribute's name depends on the version of `mcp`.
        parameters = tool.model_dump(by_alias=True)["inputSchema"]
        function = {"name": name, "description": tool.description or "", "parameters": parameters}
        self.schemas.append({"type": "function", "function": function})

    async def call(self, function: dict[str, Any]) -> str:
        """Call a tool. Return its result, or what is wrong with the call; the model reads both."""
        name, arguments = function["name"], _arguments(function)
        if name not in self._calls:
            return f"error: there is no tool {name!r}"
        if not isinstance(arguments, dict):
            return f"error: the arguments must be a JSON object, not {arguments!r}"
        try:
            async with asyncio.timeout(self._timeout_s):
                content = (await self._calls[name](arguments)).content
        except TimeoutError as error:
            raise HarnessError(
                f"the tool {name!r} did not answer within {self._timeout_s:g} s (tool_timeout)"
            ) from error
        return "\n".join(block.text if block.type == "text" else str(block) for block in content)
