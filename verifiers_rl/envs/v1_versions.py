"""What differs between `verifiers.v1` of verifiers 0.3 and of 0.4, and what we change inside it.

`v1.py` and `chat_harness.py` use only what both versions have.
"""

from __future__ import annotations

import functools
import inspect
import os
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from verifiers.v1 import MessageNode, errors, runtimes
from verifiers.v1.runtimes import subprocess as local_runtime
from verifiers.v1.session import RolloutSession
from verifiers.v1.utils import loaders

from verifiers_rl.process.secret_names import is_secret

# Whether a harness can ask before each tool call if the taskset refuses it.
CAN_GATE_TOOLS = hasattr(RolloutSession, "decide_tool")
_MCP_MAJOR = int(version("mcp").split(".")[0])


def _new_list() -> list[Any]:
    return []


# `inspect.signature` returns this instead of looking it up.
_new_list.__signature__ = inspect.signature(_new_list)  # type: ignore[attr-defined]


def make_nodes_cheap() -> None:
    """Replace `list` as the default factory in nodes of a trace. verifiers makes nodes by
    pydantic's `model_construct`, which inspects the signature of each `default_factory` every time.
    The signature of `list` is parsed from a docstring, so a node takes 0.3 to 0.8 ms. With a
    function of ours that has its signature it takes 0.02 ms.
    """
    for node_field in MessageNode.model_fields.values():
        if node_field.default_factory is list:
            node_field.default_factory = _new_list


make_nodes_cheap()

# verifiers looks for the class of an agent's harness in each rollout: among modules, then in one.
loaders.harness_class = functools.cache(loaders.harness_class)


class _OsWithoutSecrets:
    """The module `os` with an `environ` without secrets."""

    @property
    def environ(self) -> dict[str, str]:
        return {n: value for n, value in os.environ.items() if not is_secret(n, value)}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def hide_secrets_from_programs() -> None:
    """Hide secret environment variables from programs that the model writes, and from harnesses and
    tool servers on this machine. verifiers passes this process's environment on to them, without
    variables that are named like an API key. They still get what verifiers passes on explicitly:
    `runtime_env()` of a task, `env` and `forward_env` of a harness.
    """
    local_runtime.os = _OsWithoutSecrets()


hide_secrets_from_programs()


class _LazyRuntime(local_runtime.SubprocessRuntime):
    """verifiers' runtime on this machine, which makes its folder when something first uses it. A
    rollout in our chat uses it only if its task does. To make and to remove a folder, which happens
    on another thread, takes a tenth of the time of a short rollout.
    """

    _folder: Path | None = None
    _is_made = False

    @property
    def workdir(self) -> Path | None:
        if self._folder is not None and not self._is_made:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._is_made = True
        return self._folder

    @workdir.setter
    def workdir(self, folder: Path | None) -> None:
        self._folder = folder

    async def start(self) -> None:
        self._folder = local_runtime.CACHE_DIR / "runtimes" / "subprocess" / self.name
        self.info.id = str(self._folder)

    async def teardown(self) -> None:
        if self._is_made:
            await super().teardown()

    def cleanup(self) -> None:
        if self._is_made:
            super().cleanup()


runtimes.SubprocessRuntime = _LazyRuntime  # `make_runtime` looks it up here


def tokens_so_far(turn: Any) -> list[int] | None:
    """Return prompt and reply of the turn before; None if this turn's messages extend no reply."""
    before = getattr(turn, "previous_token_ids", None) or turn.previous_renderer_token_ids
    tokens = before()
    return None if tokens is None else [*tokens[0], *tokens[1]]


def prompt_too_long(turn: Any, reason: str, chat_harness: str) -> Exception:
    """Return the exception for a prompt that leaves no room for a reply. In 0.3, it ends the trace
    as truncated and without an error. 0.4 leaves that to the harness; for ours, this function ends
    the trace.

    Args:
        reason: contains the words by which harnesses recognize this error.
        chat_harness: our harness's id.
    """
    if hasattr(errors, "OverlongPromptError"):
        return errors.OverlongPromptError(reason)
    if turn is not None and turn.trace.agent.config.harness.id == chat_harness:
        turn.trace.stop("context_length")
    return errors.ProviderError(reason, status_code=400)


def is_infinite(taskset: Any) -> bool:
    """Return whether a taskset has no end. One limited to its first n tasks has an end."""
    return not taskset.bounded if hasattr(taskset, "bounded") else taskset.INFINITE


def is_for_training(branch: Any) -> bool:
    """Return False for a compaction attempt that the harness gave up (0.4), else True."""
    return getattr(branch, "trainable", True)


def advantages_of(branch: Any) -> list[float] | None:
    """Return the advantages that the environment has given to the tokens of a branch, (T,), 0 where
    a token was not sampled. None if it gave none, or if this verifiers has no advantages.
    """
    return getattr(branch, "advantages", None)


def ran_out_of_time(trace: Any) -> bool:
    """Return whether a deadline of the agent passed. In 0.3 it is one of the trace's errors."""
    return getattr(trace, "is_timeout", False)


def tools_http_client(timeout_s: float) -> Any:
    """Make an HTTP client as `mcp` would make it for a tool server, but read the TLS certificates
    only once. Reading them for each connection took half of a rollout's time.

    Args:
        timeout_s: how long a tool may take, seconds.
    """
    httpx: Any = import_module("httpx2" if _MCP_MAJOR >= 2 else "httpx")
    return httpx.AsyncClient(
        verify=_certificates(httpx),
        timeout=httpx.Timeout(30.0, read=timeout_s + 30.0),  # the harness's own deadline is earlier
        follow_redirects=_MCP_MAJOR >= 2,  # older `mcp` follows the right ones itself
    )


@functools.cache
def _certificates(httpx: Any) -> Any:
    return httpx.create_ssl_context()


def mcp_tools() -> Any:
    """Return mcp's class of a tool: a function, its JSON schema, the validation of its arguments
    and the conversion of its result.
    """
    server = "mcpserver" if _MCP_MAJOR >= 2 else "fastmcp"
    return import_module(f"mcp.server.{server}.tools").Tool


def needs_request(tool: Any) -> bool:
    """Return whether a tool takes something of the MCP request by which it is called."""
    return bool(tool.context_kwarg or getattr(tool, "resolved_params", None))


async def content_of(tool: Any, arguments: dict[str, Any]) -> list[Any]:
    """Call one of mcp's tools as mcp's server does. Return the content of its result, or of its
    error.
    """
    if _MCP_MAJOR >= 2:
        exceptions = import_module("mcp.server.mcpserver.exceptions")
        types = import_module("mcp_types")
        options = {"context": import_module("mcp.server.mcpserver").Context()}
    else:
        exceptions = import_module("mcp.server.fastmcp.exceptions")
        types, options = import_module("mcp.types"), {}
    try:
        result = await tool.run(arguments, convert_result=True, **options)
    except exceptions.ToolError as error:
        return [types.TextContent(type="text", text=str(error))]
    if isinstance(result, tuple):  # in mcp 1, beside the result as JSON
        return list(result[0])
    return list(getattr(result, "content", result))


def interception_of(env: Any, secret: str) -> Any:
    """Return the `aiohttp.web.AppRunner` of the interception server at which a rollout with this
    secret is registered; None if the rollout has a server of its own.
    """
    serving = getattr(env, "_interception", None)
    for server in getattr(serving, "servers", [serving]):
        if secret in getattr(server, "sessions", ()):
            return server.runner
    return None
