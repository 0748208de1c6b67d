"""Tools that our chat calls in this process, in place of MCP servers in processes of their own.

verifiers starts a server process for each toolset of a taskset, and one in each rollout for each
toolset of a task. It starts none for a toolset whose config has a `url`: that one is served
already, and the harness gets the url. So the toolsets of tasks that are played in our chat get a
`LocalUrl`, and the chat finds the tools in it. All else about tools stays verifiers' and mcp's own:
names, schemas, validation of arguments, conversion of results, and state.

    toolset of a task      an object for each rollout: setup(), setup_task(task), calls, close
    toolset of a taskset   one object for all rollouts: setup() before the first, close at the end

A toolset keeps its process if its config has a url or another runtime than a process on this
machine, if its class has a `register`, `run` or `_serve` of its own, or if a tool takes mcp's
`Context`. See `runs_here`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import verifiers.v1 as vf
from pydantic import TypeAdapter
from verifiers.v1.errors import HarnessError, ToolsetError

_calling_trace: ContextVar[Any] = ContextVar("calling_trace")  # of the rollout that calls a tool


class LiveTools:
    """The tools of one toolset object, ready to be called. It is made as verifiers' server process
    makes it: by its class, from its config alone.

    Attributes:
        tools: by name. A tool has `name`, `description`, `parameters` (a JSON schema) and `run`.
    """

    def __init__(self, given: Any) -> None:
        self.toolset: Any = type(given)(given.config.model_copy(deep=True))
        # verifiers' server process gets and puts the state of a rollout over HTTP.
        self.toolset._pull_state = self._copy_state_from_trace
        self.toolset._push_state = self._copy_state_to_trace
        templates = _tools_of(self.toolset) or {}
        self.tools = {
            name: templates[name].model_copy(update={"fn": function})
            for name, function, _ in _registered(self.toolset)
        }

    async def call(self, trace: Any, name: str, arguments: dict[str, Any]) -> list[Any]:
        """Return the content of the tool's result, or of its error; the model reads both.

        Args:
            trace: of the rollout, which has the state.
        """
        token = _calling_trace.set(trace)
        try:
            return await _content_of(self.tools[name], arguments)
        except SystemExit as error:  # it would end the trainer
            raise HarnessError(f"the tool {name!r} called sys.exit({error.code})") from error
        finally:
            _calling_trace.reset(token)

    async def _copy_state_from_trace(self) -> Any:
        state = _calling_trace.get().state
        return self.toolset._state_adapter.validate_json(_adapter(state).dump_json(state))

    async def _copy_state_to_trace(self, before: bytes) -> None:
        after = self.toolset._state_adapter.dump_json(self.toolset.state)
        if after != before:
            trace = _calling_trace.get()
            trace.state = _adapter(trace.state).validate_json(after)


async def _content_of(tool: Any, arguments: dict[str, Any]) -> list[Any]:
    """Call one of mcp's tools as mcp's server does. Return the content of its result, or of its
    error.
    """
    from mcp.server.mcpserver import Context
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import TextContent

    try:
        result = await tool.run(arguments, convert_result=True, context=Context())
    except ToolError as error:
        return [TextContent(type="text", text=str(error))]
    return list(getattr(result, "content", result))


_adapter_of_class = functools.lru_cache(64)(TypeAdapter)


def _adapter(state: Any) -> TypeAdapter[Any]:
    state_class: Any = type(state)
    return _adapter_of_class(state_class)


class _Registry:
    """Takes what `Toolset.register` gives to an MCP server."""

    def __init__(self) -> None:
        self.given: dict[str, tuple[Any, str | None]] = {}

    def add_tool(self, fn: Any, name: str, description: str | None) -> None:
        self.given.setdefault(name, (fn, description))  # mcp keeps the first too


def _registered(toolset: Any) -> Iterator[tuple[str, Any, str | None]]:
    """Yield name, function and description of each tool. The function wraps the toolset's method so
    that it has the state of the calling rollout.
    """
    registry = _Registry()
    toolset.register(registry)
    for name, (function, description) in registry.given.items():
        yield name, function, description


_templates: WeakKeyDictionary[type, dict[str, Any] | None] = WeakKeyDictionary()


def _tools_of(toolset: Any) -> dict[str, Any] | None:
    """Return mcp's tools of a toolset's class by name, without their functions; None if they need
    a server. mcp takes milliseconds to make the schema of a tool, so each class is asked once.
    """
    from mcp.server.mcpserver.tools import Tool

    cls = type(toolset)
    if cls not in _templates:
        _templates[cls] = None
        if all(_is_stock(cls, name) for name in ("register", "run", "_serve")):
            tools = {
                name: Tool.from_function(function, name=name, description=description)
                for name, function, description in _registered(toolset)
            }
            # One may take something of the MCP request by which it is called.
            if not any(tool.context_kwarg or tool.resolved_params for tool in tools.values()):
                _templates[cls] = {
                    # Without the function, which would keep the class from being collected.
                    name: tool.model_copy(update={"fn": None})
                    for name, tool in tools.items()
                }
    return _templates[cls]


def _is_stock(cls: type, name: str) -> bool:
    return inspect.getattr_static(cls, name) is inspect.getattr_static(vf.Toolset, name)


@asynccontextmanager
async def open_tools(given: Any, task_data: Any = None) -> AsyncIterator[LiveTools]:
    """Make a toolset's object and set it up.

    Args:
        given: a toolset of this class and config.
        task_data: of the rollout. None for a toolset that rollouts share.

    Raises:
        ToolsetError: its constructor, `setup` or `setup_task` failed.
    """
    async with AsyncExitStack() as stack:
        try:
            live = LiveTools(given)
            await stack.enter_async_context(live.toolset._exit_stack)
            await live.toolset.setup()
            if task_data is not None and not _is_stock(type(given), "setup_task"):
                await live.toolset.setup_task(task_data.model_copy(deep=True))
        except Exception as error:  # whatever the toolset's own code raises
            name = given.server_name or type(given).__name__
            raise ToolsetError(
                f"the tools {name!r} were not set up: {type(error).__name__}: {error}"
            ) from error
        yield live


class LocalUrl(str):
    """Stands where a toolset's config has the address of its server.

    Attributes:
        toolset: has the class and the config.
        shared: the tools, if all rollouts share them; None if each rollout makes its own.
    """

    toolset: Any
    shared: LiveTools | None

    def __new__(cls, toolset: Any) -> LocalUrl:
        url = super().__new__(cls, f"in-process:{type(toolset).__name__}")
        url.toolset, url.shared = toolset, None
        return url


def runs_here(toolset: Any) -> bool:
    """Return whether the tools of a toolset can be called in this process by a chat whose agent has
    no runtime but this machine.
    """
    config = toolset.config
    if not isinstance(toolset, vf.Toolset) or config.url:
        return False
    is_local = getattr(config, "colocated", False) or config.runtime.type == "subprocess"
    return is_local and _tools_of(toolset) is not None


def _with_local_url(toolset: Any) -> Any:
    """Return the toolset as verifiers shall see it."""
    if not runs_here(toolset):
        return toolset
    seen = copy.copy(toolset)
    seen.config = toolset.config.model_copy(update={"url": LocalUrl(toolset)})
    return seen


def _toolsets_seen(task: vf.Task, config: Any) -> list[Any]:
    return [_with_local_url(toolset) for toolset in task.toolsets(config)]


class LocalTools:
    """Has the tools of an environment called in this process. All its agents must play in our chat
    on this machine.

    Args:
        env: gets a taskset whose `toolsets` returns toolsets with `LocalUrl`s.

    Attributes:
        has_any: whether there are tools that are called here.
    """

    def __init__(self, env: vf.Env) -> None:
        self._shared = [_with_local_url(one) for one in env.taskset.toolsets(env.taskset.config)]
        of_tasks = type(env.taskset).task_type().toolsets(env.taskset.config.task)
        seen = [*self._shared, *map(_with_local_url, of_tasks)]
        self.has_any = any(isinstance(one.config.url, LocalUrl) for one in seen)
        if self._shared:
            taskset: Any = copy.copy(env.taskset)
            taskset.toolsets = lambda config: self._shared  # hides the class's
            env.taskset = taskset

    def of_task(self, task: vf.Task) -> vf.Task:
        """Return the task with toolsets that have `LocalUrl`s."""
        of_class = inspect.getattr_static(type(task), "toolsets")
        if of_class is inspect.getattr_static(vf.Task, "toolsets"):
            return task  # it has none
        seen: Any = copy.copy(task)
        seen.toolsets = functools.partial(_toolsets_seen, task)  # hides the class's
        return seen

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Hold the toolsets that rollouts share."""
        async with AsyncExitStack() as stack:
            for toolset in self._shared:
                if isinstance(url := toolset.config.url, LocalUrl):
                    url.shared = await stack.enter_async_context(open_tools(url.toolset))
            yield
