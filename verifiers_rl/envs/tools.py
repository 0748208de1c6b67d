"""The tools of a rollout in our chat: called in this process, or over MCP.

verifiers starts a server process for each toolset of a taskset, and one in each rollout for each
toolset of a task. It starts none for a toolset whose config has a `url`: that one is served
already, and the harness gets the url. So the toolsets of tasks that are played in our chat get a
`LocalUrl`, and the chat finds the tools in it. A toolset registers its tools at an MCP server
without a socket, so all about tools but state stays verifiers' and mcp's own.

    toolset of a task      an object for each rollout: setup(), setup_task(task), calls, close
    toolset of a taskset   one object for all rollouts: setup() before the first, close at the end

A toolset keeps its process if its config has a url or another runtime than a process on this
machine, if its class has a `register`, `run` or `_serve` of its own, or if a tool takes mcp's
`Context`. See `runs_here`.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.errors import HarnessError, ToolsetError

from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.rendering import as_object

CONNECT_S = 60.0  # deadline of connecting to all tool servers of a rollout
_calling_trace: ContextVar[Any] = ContextVar("calling_trace")  # of the rollout that calls a tool


class LocalServer:
    """The tools of one toolset object, ready to be called. It is made as verifiers' server process
    makes it: by its class, from its config alone.
    """

    def __init__(self, given: Any) -> None:
        from mcp.server.mcpserver import MCPServer

        self.toolset: Any = type(given)(given.config.model_copy(deep=True))
        # verifiers' server process gets and puts the state of a rollout over HTTP.
        self.toolset._pull_state = self._copy_state_from_trace
        self.toolset._push_state = self._copy_state_to_trace
        self._mcp = MCPServer(type(given).__name__)
        self.toolset.register(self._mcp)
        self.list_tools = self._mcp.list_tools

    async def call(self, trace: Any, name: str, arguments: dict[str, Any]) -> Any:
        """Return mcp's result of the tool.

        Args:
            trace: of the rollout, which has the state.

        Raises:
            ToolError: the tool has raised, or does not take the arguments.
        """
        _calling_trace.set(trace)  # for this rollout's task, until its next call
        try:
            return await self._mcp.call_tool(name, arguments)
        except SystemExit as error:  # it would end the trainer
            raise HarnessError(f"the tool {name!r} called sys.exit({error.code})") from error

    async def _copy_state_from_trace(self) -> Any:
        state = _calling_trace.get().state
        return self.toolset._state_adapter.validate_json(state.model_dump_json())

    async def _copy_state_to_trace(self, before: bytes) -> None:
        after = self.toolset._state_adapter.dump_json(self.toolset.state)
        if after != before:
            trace = _calling_trace.get()
            trace.state = type(trace.state).model_validate_json(after)


@asynccontextmanager
async def open_tools(given: Any, task_data: Any = None) -> AsyncIterator[LocalServer]:
    """Make a toolset's object and set it up.

    Args:
        given: a toolset of this class and config.
        task_data: of the rollout. None for a toolset that rollouts share.

    Raises:
        ToolsetError: its constructor, `setup` or `setup_task` failed.
    """
    async with AsyncExitStack() as stack:
        try:
            server = LocalServer(given)
            await stack.enter_async_context(server.toolset._exit_stack)
            await server.toolset.setup()
            if task_data is not None:
                await server.toolset.setup_task(task_data.model_copy(deep=True))
        except Exception as error:  # whatever the toolset's own code raises
            name = given.server_name or type(given).__name__
            raise ToolsetError(
                f"the tools {name!r} were not set up: {type(error).__name__}: {error}"
            ) from error
        yield server


class LocalUrl(str):
    """Stands where a toolset's config has the address of its server.

    Attributes:
        toolset: has the class and the config.
        shared: the tools, if all rollouts share them; None if each rollout makes its own.
    """

    toolset: Any
    shared: LocalServer | None = None


@functools.lru_cache(64)
def _needs_server(cls: Any) -> bool:
    """Return whether a class serves its tools by code of its own, or a tool takes something of the
    MCP request by which it is called.

    Raises:
        InvalidEnvironmentError: mcp can make no tool of one of its functions.
    """
    from mcp.server.mcpserver.tools import Tool

    of = inspect.getattr_static
    if any(of(cls, name) is not of(vf.Toolset, name) for name in ("register", "run", "_serve")):
        return True
    for name, function in inspect.getmembers(cls, inspect.isfunction):
        if getattr(function, "tool", False):
            try:
                tool = Tool.from_function(function)
            except Exception as error:  # such as mcp's InvalidSignature, which is no ValueError
                raise InvalidEnvironmentError(f"the tool {cls.__name__}.{name}: {error}") from error
            if tool.context_kwarg or tool.resolved_params:
                return True
    return False


def runs_here(toolset: Any) -> bool:
    """Return whether the tools of a toolset can be called in this process by a chat whose agent has
    no runtime but this machine.
    """
    config = toolset.config
    if not isinstance(toolset, vf.Toolset) or config.url:
        return False
    is_local = getattr(config, "colocated", False) or config.runtime.type == "subprocess"
    cls: Any = type(toolset)
    return is_local and not _needs_server(cls)


def with_local_urls(owner: Any) -> Any:
    """Return a copy of a task or a taskset whose toolsets have `LocalUrl`s."""
    toolsets = [*map(copy.copy, owner.toolsets(owner.config))]
    for toolset in filter(runs_here, toolsets):
        url = LocalUrl(f"in-process:{type(toolset).__name__}")
        url.toolset = copy.copy(toolset)
        toolset.config = toolset.config.model_copy(update={"url": url})
    seen = copy.copy(owner)
    seen.toolsets = lambda config: toolsets  # hides the class's
    return seen


@asynccontextmanager
async def open_shared(taskset: Any) -> AsyncIterator[None]:
    """Hold the toolsets of a taskset that rollouts share and that have `LocalUrl`s."""
    async with AsyncExitStack() as stack:
        for toolset in taskset.toolsets(taskset.config):
            if isinstance(url := toolset.config.url, LocalUrl):
                url.shared = await stack.enter_async_context(open_tools(url.toolset))
        yield


# --- For the chat ---------------------------------------------------------------------------------


class Tools:
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
        http = await stack.enter_async_context(
            httpx2.AsyncClient(
                verify=url.startswith("https:"),
                timeout=self._timeout_s + 30.0,
                follow_redirects=True,
            )
        )
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
        from mcp.server.mcpserver.exceptions import ToolError

        name, arguments = function["name"], as_object(function["arguments"] or "{}")
        if name not in self._calls:
            return f"error: there is no tool {name!r}"
        if not isinstance(arguments, dict):
            return f"error: the arguments must be a JSON object, not {arguments!r}"
        try:
            async with asyncio.timeout(self._timeout_s):
                content = (await self._calls[name](arguments)).content
        except ToolError as error:
            return str(error)
        except TimeoutError as error:
            raise HarnessError(
                f"the tool {name!r} did not answer within {self._timeout_s:g} s (tool_timeout)"
            ) from error
        if media := {block.type for block in content if hasattr(block, "data")}:
            raise HarnessError(
                f"the tool {name!r} returned {', '.join(media)}, and only text is trained; let it "
                "return text"
            )
        return "\n".join(block.text if block.type == "text" else str(block) for block in content)
