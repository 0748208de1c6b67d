"""What people read of a rollout beside its numbers: messages, turns, times.

It is made where the rollout ran, as JSON, and goes through the trainer's process unparsed to the
writer of rollouts; docs/watching.md has each key. Messages are as the chat API of OpenAI
has them, so `vf-sft` reads them too. Times are in seconds since `begun_at`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from verifiers_rl.json_text import as_json


def record_of_trace(trace: Any, said: Iterable[Any], policy_version: int) -> bytes:
    """Return the record of a `verifiers.v1.Trace`, also of one that failed on its way.

    Args:
        said: what the policy has said in it, see `v1_client.Said`.
        policy_version: version of replies that do not say which policy sampled them.
    """
    begin = trace.timing.start
    branches = [branch.nodes for branch in trace.branches]
    nodes = branches.pop() if branches else []
    place_of = {id(node): place for place, node in enumerate(nodes)}
    tokens_of = {id(one.message): one.turn for one in said}
    turns = []
    for call in trace.calls:
        if call.node is None:
            continue
        node = trace.nodes[call.node]
        if (turn := tokens_of.get(id(node.message))) is None:
            continue  # what the environment said in the place of a reply
        turns.append(
            {
                "message": place_of.get(id(node)),
                "begin_s": call.time.start - begin,
                "end_s": call.time.end - begin,
                "num_prompt_tokens": len(turn.prompt_ids),
                "num_sampled_tokens": len(turn.reply.sampled[0]),
                "policy_version": (turn.reply.policy_versions or [(0, policy_version)])[-1][1],
                "finish_reason": call.finish_reason,
            }
        )
    record: dict[str, Any] = {
        "begun_at": begin,
        "messages": [message_of(node.message) for node in nodes],
        "turns": turns,
    }
    if branches:
        record["other_branches"] = [[message_of(node.message) for node in own] for own in branches]
    return as_json(record)


def record_of_state(state: Mapping[str, Any]) -> bytes:
    """Return the record of a classic environment's state: its messages, without turns."""
    messages: list[Any] = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        given = state.get(name) or []
        # A text is that of an environment without chat.
        messages += [{"role": role, "content": given}] if isinstance(given, str) else given
    begun_at = state["timing"].start_time
    return as_json({"begun_at": begun_at, "messages": [*map(message_of, messages)], "turns": []})


def without_none(value: Any) -> Any:
    """Return a value of a row without keys that are None, at any depth: in a table, each object of
    a column has the keys of all. Arrays, which pandas makes of lists, become lists. JSON that is a
    string stays as it is.
    """
    if isinstance(value, Mapping):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple | np.ndarray):
        return [without_none(inner) for inner in value]
    return value


def message_of(message: Any) -> dict[str, Any]:
    """Return a message as OpenAI's chat API has it, with its content as one text; an image is named
    and not kept.

    Args:
        message: a dict or an object of pydantic, as are its parts.
    """
    given = dict(message)
    content = given.get("content") or ""
    if not isinstance(content, str):
        parts = [dict(part) for part in content]
        content = "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)
    result: dict[str, Any] = {"role": given["role"], "content": content}
    for name in ("reasoning_content", "tool_call_id"):
        if value := given.get(name):
            result[name] = str(value)
    if calls := given.get("tool_calls"):
        result["tool_calls"] = [_call(dict(call)) for call in calls]
    return result


def text_of(messages: Any) -> str:
    """Return messages as text for people."""
    if messages is None or isinstance(messages, str):
        return messages or ""
    lines = []
    for message in map(message_of, messages):
        calls = [call["function"] for call in message.get("tool_calls", [])]
        parts = [message["content"], *(f"[{call['name']}({call['arguments']})]" for call in calls)]
        lines.append((f"{message['role']}: " if len(messages) > 1 else "") + " ".join(parts))
    return "\n".join(lines)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or call)  # as OpenAI has it, or verifiers
    named = {name: str(function.get(name)) for name in ("name", "arguments")}
    return {"id": str(call.get("id")), "type": "function", "function": named}
