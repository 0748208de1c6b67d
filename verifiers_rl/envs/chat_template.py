"""Chat templates: how vLLM passes messages to one, and whether it rewrites past turns."""

from __future__ import annotations

import json
from typing import Any


def as_vllm_renders(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as vLLM passes it to a chat template: the arguments of tool calls are an
    object, not JSON, and several parts of text are one text.

    Raises:
        ValueError: a part of the message is not text.
    """
    if isinstance(parts := message.get("content"), list):
        for part in parts:
            if not isinstance(part.get("text"), str):
                raise ValueError(
                    f"a message of the role {message.get('role')!r} has a part of the type "
                    f"{part.get('type')!r}: images and other media are not trained yet, only text"
                )
        message = {**message, "content": "\n".join(part["text"] for part in parts)}
    calls = [
        {**call, "function": {**function, "arguments": _as_object(function["arguments"])}}
        for call in message.get("tool_calls") or []
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls} if calls else message


def _as_object(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        return arguments  # the model's mistake; the environment answers it


def reason_against_chat_template(tokenizer: Any) -> str | None:
    """Return why turns rendered from messages would not extend the tokens before them; None if they
    do.

    The test renders a reply with thinking as history, as the next turn's prompt contains it.
    Templates that drop the thinking of past turns (Qwen3's, DeepSeek-R1's) do not reproduce what
    was sampled.
    """
    from jinja2 import TemplateError

    question, reply, answer = (
        {"role": "user", "content": "q"},
        "<think>\nthinking\n</think>\n\nanswer",
        {"role": "user", "content": "next"},
    )
    try:
        prompt, history = (
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            for messages in (
                [question],
                [question, {"role": "assistant", "content": reply}, answer],
            )
        )
    except TemplateError:
        return None  # it refuses such a conversation; the server will report that
    if history.startswith(prompt + reply):
        return None
    dropped = "rewrites" if "thinking" in history.lower() else "drops the thinking of"
    return f"the chat template of {tokenizer.name_or_path!r} {dropped} past turns"
