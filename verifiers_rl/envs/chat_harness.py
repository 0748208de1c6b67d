"""verifiers' `null` harness, in the caller's event loop: a chat with tools, without a program.

verifiers' own `null` harness starts a Python process for each rollout. A harness may run without
one, as long as all model calls go to the interception endpoint (`verifiers.v1.Harness.launch`). An
agent with `harness = { id = "null" }` gets the harness of this module.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import aiohttp
from verifiers.v1 import Harness, HarnessConfig, HarnessError, ProgramResult
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import HarnessSession

from verifiers_rl.envs.endpoint import CHAT, GATE, Endpoint, LocalEndpoint, RemoteEndpoint
from verifiers_rl.envs.local_tools import LiveTools, LocalUrl, open_tools

CONNECT_S = 60.0  # deadline of connecting to all tool servers of a rollout


def interception_of(env: Any, secret: str) -> Any:
    """Return the `aiohttp.web.AppRunner` of the interception server at which a rollout with this
    secret is registered; None if the rollout has a server of its own.
    """
    serving = getattr(env, "_interception", None)
    for server in getattr(serving, "servers", [serving]):
        if secret in getattr(server, "sessions", ()):
            return server.runner
    return None


def tools_http_client(timeout_s: float) -> Any:
    """Make an HTTP client as `mcp` would make it for a tool server, but read the TLS certificates
    only once. Reading them for each connection took half of a rollout's time.

    Args:
        timeout_s: how long a tool may take, seconds.
    """
    import httpx2

    return httpx2.AsyncClient(
        verify=_certificates(),
        timeout=httpx2.Timeout(
            30.0, read=timeout_s + 30.0
        ),  # the harness's own deadline is earlier
        follow_redirects=True,
    )


@functools.cache
def _certificates() -> Any:
    import httpx2

    return httpx2.create_ssl_context()


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

    async def session(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, Any],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> HarnessSession:
        """Open the rollout's own tools that this process has; they last until it ends."""
        servers, tools = dict(mcp_urls), AsyncExitStack()
        try:
            for server, url in mcp_urls.items():
                if isinstance(url, LocalUrl):
                    servers[server] = url.shared or await tools.enter_async_context(
                        open_tools(url.toolset, trace.task.data)
                    )
        except BaseException:
            await tools.aclose()
            raise
        arguments = (ctx, trace, runtime, endpoint, secret, servers, data, tool_interception_url)
        return _ChatSession(tools, self, *arguments)

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
        environment = getattr(ctx.client, "_environment", None)
        runner = environment and interception_of(environment.env, secret)
        try:
            async with AsyncExitStack() as stack:
                reached: Endpoint
                if runner is not None:
                    reached = LocalEndpoint(runner, secret)
                else:
                    http = await stack.enter_async_context(aiohttp.ClientSession())
                    reached = RemoteEndpoint(http, endpoint.removesuffix("/v1"), secret)
                tools = _Tools(self.config.tool_timeout, trace)
                await tools.connect_all(stack, mcp_urls)
                is_gated = tool_interception_url is not None
                return await self._chat(reached, ctx.model, data, tools, is_gated)
        except BaseExceptionGroup as group:  # from a session's task group; it contains the cause
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            raise error from None

    async def _chat(
        self, endpoint: Endpoint, model: str, data: Any, tools: _Tools, is_gated: bool
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
            status, reply = await endpoint.post(CHAT, body)
            if status != 200:
                return _failed(status, reply)
            message = json.loads(reply)["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return ProgramResult(0, "", "")
            for call in message["tool_calls"]:
                if is_gated:  # the taskset may refuse calls
                    status, reply = await endpoint.post(GATE, _gate_request(call))
                    if status != 200:
                        return _failed(status, reply)
                    decision = json.loads(reply)
                    if decision["action"] == "stop":
                        return ProgramResult(1, "", decision["reason"])
                    if decision["action"] == "deny":
                        messages.append(decision["message"])
                        continue
                content = await tools.call(call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


class _ChatSession(HarnessSession):
    """A rollout in the chat, with the tools that it has in this process."""

    def __init__(self, tools: AsyncExitStack, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tools = tools

    async def close(self) -> None:
        await super().close()
        await self._tools.aclose()


def _failed(status: int, reply: bytes) -> ProgramResult:
    return ProgramResult(1, "", f"{status}: {reply.decode(errors='replace')}")


def _gate_request(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call in the form that verifiers' interception expects."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError:
        arguments = function["arguments"]
    return {"tool_call_id": call["id"], "name": function["name"], "arguments": arguments}


class _Tools:
    """The tools of a rollout, with names `<server>_<tool>`. Tools of a server without a name keep
    their names. A server is one of MCP, or `LiveTools` in this process.
    """

    def __init__(self, timeout_s: float, trace: Any) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._timeout_s = timeout_s
        self._trace = trace
        # Each takes the arguments and returns the content of the result.
        self._calls: dict[str, Callable[[dict[str, Any]], Awaitable[list[Any]]]] = {}

    async def connect_all(self, stack: AsyncExitStack, servers: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                for server, where in servers.items():
                    if isinstance(where, LiveTools):
                        self._add_local(server, where)
                    else:
                        await self._connect(stack, server, where)
        except TimeoutError as error:
            raise HarnessError(
                f"the tool servers {list(servers)} did not answer within {CONNECT_S:g} s"
            ) from error

    async def _connect(self, stack: AsyncExitStack, server: str, url: str) -> None:
        from mcp import ClientSession
        from mcp.client.streamable_http import streamable_http_client

        http = await stack.enter_async_context(tools_http_client(self._timeout_s))
        streams = await stack.enter_async_context(streamable_http_client(url, http_client=http))
        session = await stack.enter_async_context(ClientSession(*streams[:2]))
        await session.initialize()

        async def call(name: str, arguments: dict[str, Any]) -> list[Any]:
            return (await session.call_tool(name, arguments)).content

        for tool in (await session.list_tools()).tools:
            # This is the name in MCP. The attribute's name depends on the version of `mcp`.
            parameters = tool.model_dump(by_alias=True)["inputSchema"]
            self._add(server, tool.name, tool.description, parameters, partial(call, tool.name))

    def _add_local(self, server: str, live: LiveTools) -> None:
        for name, tool in live.tools.items():
            call = partial(live.call, self._trace, name)
            self._add(server, name, tool.description, tool.parameters, call)

    def _add(
        self, server: str, tool: str, description: str | None, parameters: Any, call: Any
    ) -> None:
        name = f"{server}_{tool}" if server else tool
        if name in self._calls:
            raise ValueError(f"two tools are named {name!r}")
        self._calls[name] = call
        function = {"name": name, "description": description or "", "parameters": parameters}
        self.schemas.append({"type": "function", "function": function})

    async def call(self, function: dict[str, Any]) -> str:
        """Call a tool. Return its result, or what is wrong with the call; the model reads both."""
        name = function["name"]
        if name not in self._calls:
            return f"error: there is no tool {name!r}"
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except json.JSONDecodeError as error:
            return f"error: the arguments are no JSON: {error}"
        if not isinstance(arguments, dict):
            return f"error: the arguments must be a JSON object, not {arguments!r}"
        try:
            async with asyncio.timeout(self._timeout_s):
                content = await self._calls[name](arguments)
        except TimeoutError as error:
            raise HarnessError(
                f"the tool {name!r} did not answer within {self._timeout_s:g} s (tool_timeout)"
            ) from error
        return "\n".join(block.text if block.type == "text" else str(block) for block in content)
