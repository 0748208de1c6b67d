"""What differs between `verifiers.v1` of verifiers 0.3 and of 0.4.

`environments_v1.py` and `chat_harness.py` use what both have.
"""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.metadata import version
from typing import Any

from verifiers.v1 import errors

_MCP_MAJOR = int(version("mcp").split(".")[0])


def tokens_so_far(turn: Any) -> list[int] | None:
    """Prompt and reply of the turn before this one; None if its messages extend no reply."""
    before = getattr(turn, "previous_token_ids", None) or turn.previous_renderer_token_ids
    tokens = before()
    return None if tokens is None else [*tokens[0], *tokens[1]]


def prompt_too_long(turn: Any, reason: str) -> Exception:
    """What a client raises so that the trace ends as truncated, without an error."""
    if hasattr(errors, "OverlongPromptError"):
        return errors.OverlongPromptError(reason)
    if turn is not None:  # 0.4 leaves it to the harness; with a trace that has stopped, any may end
        turn.trace.stop("context_length")
    return errors.ProviderError(reason, status_code=400)


def is_infinite(taskset: Any) -> bool:
    """Whether it yields tasks without end; the first n of one are not infinite."""
    return not taskset.bounded if hasattr(taskset, "bounded") else taskset.INFINITE


def is_for_training(branch: Any) -> bool:
    """False for an attempt at a compaction that the harness gave up (0.4)."""
    return getattr(branch, "trainable", True)


def ran_out_of_time(trace: Any) -> bool:
    """Whether a deadline of the agent passed. In 0.3 that is one of the trace's errors."""
    return getattr(trace, "is_timeout", False)


def tools_http_client() -> Any:
    """An HTTP client as `mcp` would make it for a tool server, but with TLS's certificates read
    once: reading them for each connection took half of a rollout's time.
    """
    httpx: Any = import_module("httpx2" if _MCP_MAJOR >= 2 else "httpx")
    return httpx.AsyncClient(
        verify=_certificates(httpx),
        timeout=httpx.Timeout(30.0, read=300.0),
        follow_redirects=_MCP_MAJOR >= 2,  # before, `mcp` itself follows those that it should
    )


@functools.cache
def _certificates(httpx: Any) -> Any:
    return httpx.create_ssl_context()
