"""What differs between `verifiers.v1` of verifiers 0.3 and of 0.4, and what is changed inside it.

`v1.py` and `chat_harness.py` use what both have.
"""

from __future__ import annotations

import functools
import os
import re
from importlib import import_module
from importlib.metadata import version
from typing import Any

from verifiers.v1 import MessageNode, errors
from verifiers.v1.runtimes import subprocess as local_runtime
from verifiers.v1.session import RolloutSession

# Whether a harness can ask before each tool call if the taskset refuses it.
CAN_GATE_TOOLS = hasattr(RolloutSession, "decide_tool")
_MCP_MAJOR = int(version("mcp").split(".")[0])


def _new_list() -> list[Any]:
    return []


def make_nodes_cheap() -> None:
    """verifiers makes the nodes of a trace by pydantic's `model_construct`, which inspects the
    signature of each `default_factory` anew. That of `list` has to be parsed from a docstring: a
    node takes 0.3 to 0.8 ms, and 0.03 with a function of ours in its place.
    """
    for node_field in MessageNode.model_fields.values():
        if node_field.default_factory is list:
            node_field.default_factory = _new_list


make_nodes_cheap()

_SECRET_NAME = re.compile(
    r"(TOKENS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(_|$)"
    r"|(^|_)(API|ACCESS|PRIVATE)?(KEYS?|PATS?|PASS|AUTH)(_|$)|._PWD$"
)
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def is_secret(variable: str, value: str = "") -> bool:
    """Whether an environment variable, by its name or as a URL with a password, holds what a
    program may not know.
    """
    by_name = _SECRET_NAME.search(variable.upper())
    return by_name is not None or _PASSWORD_IN_URL.search(value) is not None


class _OsWithoutSecrets:
    """The module `os`, whose `environ` lacks what is secret."""

    @property
    def environ(self) -> dict[str, str]:
        return {n: value for n, value in os.environ.items() if not is_secret(n, value)}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def hide_secrets_from_programs() -> None:
    """Programs that the model writes, harnesses and tool servers on this machine get this process's
    environment from verifiers, which takes out only what is named like an API key. What verifiers
    passes on explicitly they still get: `runtime_env()` of a task, `env` and `forward_env` of a
    harness.
    """
    local_runtime.os = _OsWithoutSecrets()


hide_secrets_from_programs()


def tokens_so_far(turn: Any) -> list[int] | None:
    """Prompt and reply of the turn before this one; None if its messages extend no reply."""
    before = getattr(turn, "previous_token_ids", None) or turn.previous_renderer_token_ids
    tokens = before()
    return None if tokens is None else [*tokens[0], *tokens[1]]


def prompt_too_long(turn: Any, reason: str, chat_harness: str) -> Exception:
    """What a client raises for a prompt without room for a reply. In 0.3 the trace ends by that, as
    truncated and without an error. 0.4 leaves it to the harness; for ours it ends here.

    Args:
        reason: with words by which harnesses know what it is about.
        chat_harness: our harness's id.
    """
    if hasattr(errors, "OverlongPromptError"):
        return errors.OverlongPromptError(reason)
    if turn is not None and turn.trace.agent.config.harness.id == chat_harness:
        turn.trace.stop("context_length")
    return errors.ProviderError(reason, status_code=400)


def is_infinite(taskset: Any) -> bool:
    """Whether it yields tasks without end; the first n of one are not infinite."""
    return not taskset.bounded if hasattr(taskset, "bounded") else taskset.INFINITE


def is_for_training(branch: Any) -> bool:
    """False for an attempt at a compaction that the harness gave up (0.4)."""
    return getattr(branch, "trainable", True)


def advantages_of(branch: Any) -> list[float] | None:
    """The advantages that the environment has given to the tokens of a branch, (T,), 0 where a
    token was not sampled; None where it gave none, or verifiers does not have them.
    """
    return getattr(branch, "advantages", None)


def ran_out_of_time(trace: Any) -> bool:
    """Whether a deadline of the agent passed. In 0.3 that is one of the trace's errors."""
    return getattr(trace, "is_timeout", False)


def tools_http_client(timeout_s: float) -> Any:
    """An HTTP client as `mcp` would make it for a tool server, but with TLS's certificates read
    once: reading them for each connection took half of a rollout's time.

    Args:
        timeout_s: how long a tool may take.
    """
    httpx: Any = import_module("httpx2" if _MCP_MAJOR >= 2 else "httpx")
    return httpx.AsyncClient(
        verify=_certificates(httpx),
        timeout=httpx.Timeout(30.0, read=timeout_s + 30.0),  # the harness's own comes first
        follow_redirects=_MCP_MAJOR >= 2,  # before, `mcp` itself follows those that it should
    )


@functools.cache
def _certificates(httpx: Any) -> Any:
    return httpx.create_ssl_context()
