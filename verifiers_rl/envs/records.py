"""What people read of a rollout beside its numbers: messages, turns, times, parts of the reward.

It is made where the rollout ran, as JSON, and goes through the trainer's process unparsed into
rollouts.jsonl; docs/rollouts_on_disk.md has each key. Times of messages and turns are in seconds
since `begun_at`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verifiers_rl.envs.base import field_of as _field
from verifiers_rl.json_text import as_json


def record_of_trace(
    trace: Any, versions: Mapping[int, list[tuple[int, int]]], policy_version: int
) -> bytes:
    """Return the record of a `verifiers.v1.Trace`, also of one that failed on its way.

    Args:
        versions: the policy versions of a reply's tokens, by the `id` of its message.
        policy_version: version for replies that are not in `versions`.
    """
    begin = trace.timing.start
    calls = [call for call in trace.calls if call.node is not None]
    turn_of = {call.node: turn for turn, call in enumerate(calls)}
    spans = [_span(call.time.start, call.time.end, begin) for call in calls]
    places = {id(node): place for place, node in enumerate(trace.nodes)}

    def message_of(node: Any, last_turn: int) -> dict[str, Any]:
        message = _message(node.message)
        turn = turn_of.get(places[id(node)])
        if turn is not None:
            message |= {"turn": turn, **spans[turn]}
        elif last_turn >= 0:  # what came after a reply: until the next call began
            message |= _between(spans, last_turn)
        return message

    branches = []
    for branch in trace.branches:
        messages: list[dict[str, Any]] = []
        last_turn = -1
        for node in branch.nodes:
            messages.append(message_of(node, last_turn))
            last_turn = messages[-1].get("turn", last_turn)
        branches.append(messages)
    turns = []
    for call, span in zip(calls, spans, strict=True):
        node = trace.nodes[call.node]
        own = versions.get(id(node.message)) or [(0, policy_version)]
        turns.append(
            {
                **span,
                "num_prompt_tokens": _num_tokens_up_to(trace, call.node) - len(node.logprobs),
                "num_sampled_tokens": len(node.logprobs),
                "policy_version": own[-1][1],
                "finish_reason": call.finish_reason,
            }
        )
    record: dict[str, Any] = {
        "begun_at": begin,
        "rewards": {name: reward.score for name, reward in trace.rewards.items() if reward}
        | {name: value for name, value in trace.metrics.items() if value is not None},
        "messages": branches.pop() if branches else [],
        "turns": turns,
    }
    if branches:
        record["other_branches"] = branches
    return as_json(record)


def record_of_state(state: Mapping[str, Any], policy_version: int) -> bytes:
    """Return the record of a classic environment's state.

    Args:
        policy_version: version for turns whose response has none.
    """
    timing = state.get("timing") or {}
    begun_at = _field(timing, "start_time") or _field(timing, "start") or None
    messages = [*_messages(state.get("prompt"), "user")]
    messages += _messages(state.get("completion"), "assistant")
    steps = state.get("trajectory") or []
    turns = []
    for step in steps:
        tokens, response = step.get("tokens") or {}, step.get("response")
        own = getattr(response, "policy_versions", None) or [(0, policy_version)]
        turns.append(
            {
                "num_prompt_tokens": len(tokens.get("prompt_ids") or []),
                "num_sampled_tokens": len(tokens.get("completion_ids") or []),
                "policy_version": own[-1][1],
                "finish_reason": _finish_reason(response),
            }
        )
    replies = [message for message in messages if message["role"] == "assistant"]
    # Prompts can have replies too, such as examples; the last ones are those of the turns.
    if len(replies) >= len(turns):
        for turn, message in enumerate(replies[len(replies) - len(turns) :]):
            message["turn"] = turn
    rewards = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
    record = {"begun_at": begun_at, "rewards": rewards, "messages": messages, "turns": turns}
    return as_json(record)


def _span(start: float, end: float, begin: float) -> dict[str, float | None]:
    def since(time: float) -> float | None:
        return round(time - begin, 6) if time else None

    return {"begin_s": since(start), "end_s": since(end)}


def _num_tokens_up_to(trace: Any, place: int | None) -> int:
    """Return the tokens of a node and of those before it on its path."""
    num_tokens = 0
    while place is not None:
        num_tokens += len(trace.nodes[place].token_ids)
        place = trace.nodes[place].parent
    return num_tokens


def _between(spans: Sequence[dict[str, float | None]], turn: int) -> dict[str, float | None]:
    after = spans[turn + 1]["begin_s"] if turn + 1 < len(spans) else None
    return {"begin_s": spans[turn]["end_s"], "end_s": after}


def _finish_reason(response: Any) -> str | None:
    message = _field(response, "message")
    found = _field(message, "finish_reason")
    if found is None and (choices := _field(response, "choices")):
        found = _field(choices[0], "finish_reason")
    return None if found is None else str(found)


def _messages(messages: Any, role: str) -> list[dict[str, Any]]:
    if isinstance(messages, str):  # of an environment without chat
        return [{"role": role, "content": messages}]
    return [_message(message) for message in messages or []]


def _message(message: Any) -> dict[str, Any]:
    result: dict[str, Any] = {
        "role": _field(message, "role"),
        "content": _text(_field(message, "content")),
    }
    if reasoning := _field(message, "reasoning_content"):
        result["reasoning"] = str(reasoning)
    if calls := _field(message, "tool_calls"):
        result["tool_calls"] = [_call(call) for call in calls]
    if call_id := _field(message, "tool_call_id"):
        result["tool_call_id"] = call_id
    return result


def _call(call: Any) -> dict[str, Any]:
    function = _field(call, "function") or call  # as OpenAI has it, or verifiers
    return {
        "id": _field(call, "id"),
        "name": _field(function, "name"),
        "arguments": str(_field(function, "arguments")),
    }


def _text(content: Any) -> str:
    """Return a message's content as text; an image is named and not kept."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        text = part if isinstance(part, str) else _field(part, "text")
        parts.append(str(text) if text is not None else f"[{_field(part, 'type')}]")
    return "\n".join(parts)
