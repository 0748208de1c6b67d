"""verifiers' `null` harness, in the caller's event loop: a chat with tools, without a program.

verifiers' own `null` harness starts a Python process for each rollout. A harness may run without
one, as long as all model calls go to the interception endpoint (`verifiers.v1.Harness.launch`). An
agent with `harness = { id = "null" }` gets the harness of this module.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, nullcontext
from typing import Any

import aiohttp
from verifiers.v1 import Harness, HarnessConfig, HarnessError, ProgramResult
from verifiers.v1.dialects.chat import message_to_wire

from verifiers_rl.envs.v1_versions import CAN_GATE_TOOLS, tools_http_client

CONNECT_S = 60.0  # deadline of connecting to all tool servers of a rollout


class ChatHarnessConfig(HarnessConfig):
    id: str = "verifiers_rl"


class ChatHarness(Harness[ChatHarnessConfig]):
    """Chats with a system prompt, messages and tools over MCP, until a reply calls no tool. The
    endpoint applies turn limits and stop conditions: it refuses the next request.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = CAN_GATE_TOOLS
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        try:
            # The rollouts of an environment share its connections to the endpoint.
            shared = getattr(getattr(ctx.client, "_environment", None), "endpoint_session", None)
            async with nullcontext(shared) if shared else aiohttp.ClientSession() as session:
                return await self._chat(
                    session, ctx.model, endpoint, secret, mcp_urls, data, tool_interception_url
                )
        except BaseExceptionGroup as group:  # from a session's task group; it contains the cause
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            raise error from None

    async def _chat(
        self,
        session: aiohttp.ClientSession,
        model: str,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        gate_url: str | None,
    ) -> ProgramResult:
        system_prompt, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = []
        if system_prompt:
            messages.append({"role": "system", "content": system_prompt})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            tools = _Tools(self.config.tool_timeout)
            try:
                async with asyncio.timeout(CONNECT_S):
                    for server, url in mcp_urls.items():
                        await tools.connect(stack, server, url)
            except TimeoutError as error:
                raise HarnessError(
                    f"the tool servers {list(mcp_urls)} did not answer within {CONNECT_S:g} s"
                ) from error
            # Requests need no deadline, because the rollout has one.
            options: Any = {
                "headers": {"Authorization": f"Bearer {secret}"},
                "timeout": aiohttp.ClientTimeout(total=None),
            }
            while True:
                body = {"model": model, "messages": messages}
                if tools.schemas:
                    body["tools"] = tools.schemas
                async with session.post(
                    f"{endpoint}/chat/completions", json=body, **options
                ) as reply:
                    if reply.status != 200:
                        return ProgramResult(1, "", f"{reply.status}: {await reply.text()}")
                    message = (await reply.json())["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    if gate_url is not None:  # the taskset may refuse calls
                        async with session.post(
                            gate_url, json=_gate_request(call), **options
                        ) as reply:
                            if reply.status != 200:
                                return ProgramResult(1, "", f"{reply.status}: {await reply.text()}")
                            decision = await reply.json()
                        if decision["action"] == "stop":
                            return ProgramResult(1, "", decision["reason"])
                        if decision["action"] == "deny":
                            messages.append(decision["message"])
                            continue
                    content = await tools.call(call["function"])
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": content}
                    )


def _gate_request(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call in the form that verifiers' interception expects."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError:
        arguments = function["arguments"]
    return {"tool_call_id": call["id"], "name": function["name"], "arguments": arguments}


class _Tools:
    """The tools of a rollout's MCP servers, with names `<server>_<tool>`. Tools of a server without
    a name keep their names.
    """

    def __init__(self, timeout_s: float) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._timeout_s = timeout_s
        self._homes: dict[str, tuple[Any, str]] = {}  # session, name on its server

    async def connect(self, stack: AsyncExitStack, server: str, url: str) -> None:
        from mcp import ClientSession
        from mcp.client.streamable_http import streamable_http_client

        http = await stack.enter_async_context(tools_http_client(self._timeout_s))
        streams = await stack.enter_async_context(streamable_http_client(url, http_client=http))
        session = await stack.enter_async_context(ClientSession(*streams[:2]))
        await session.initialize()
        for tool in (await session.list_tools()).tools:
            name = f"{server}_{tool.name}" if server else tool.name
            if name in self._homes:
                raise ValueError(f"two tools are named {name!r}")
            self._homes[name] = session, tool.name
            function = {
                "name": name,
                "description": tool.description or "",
                # This is the name in MCP. The attribute's name depends on the version of `mcp`.
                "parameters": tool.model_dump(by_alias=True)["inputSchema"],
            }
            self.schemas.append({"type": "function", "function": function})

    async def call(self, function: dict[str, Any]) -> str:
        """Call a tool. Return its result, or what is wrong with the call; the model reads both."""
        name = function["name"]
        if name not in self._homes:
            return f"error: there is no tool {name!r}"
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except json.JSONDecodeError as error:
            return f"error: the arguments are no JSON: {error}"
        if not isinstance(arguments, dict):
            return f"error: the arguments must be a JSON object, not {arguments!r}"
        session, name_there = self._homes[name]
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await session.call_tool(name_there, arguments)
        except TimeoutError as error:
            raise HarnessError(
                f"the tool {name!r} did not answer within {self._timeout_s:g} s (tool_timeout)"
            ) from error
        return "\n".join(
            block.text if block.type == "text" else str(block) for block in result.content
        )
