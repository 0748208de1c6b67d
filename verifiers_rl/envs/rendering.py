"""Conversations as tokens, by the chat template of the model's tokenizer, as vLLM renders them."""

from __future__ import annotations

import functools
import json
from array import array
from typing import Any

from jinja2 import TemplateError

NUM_KEPT = 256  # renderings in memory, 4 bytes a token; the rollouts of a group share a prompt


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
        {**call, "function": {**function, "arguments": as_object(function["arguments"])}}
        for call in message.get("tool_calls") or []
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls} if calls else message


def as_object(arguments: Any) -> Any:
    """Return the arguments of a tool call as an object; as they are if they are no JSON."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):  # such as a number of 5,000 digits
        return arguments  # the model's mistake; the environment answers it


class Renderer:
    """Renders messages with a tokenizer's chat template. It keeps the last `NUM_KEPT` renderings,
    so the rollouts of a group render their prompt once, and a template that has tools renders them
    once. Threads may share it.

    Args:
        tokenizer: the model's; None for an environment whose messages nobody renders.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added: dict[str, int] = {}  # tokens of the shortest prompt, by its roles
        self._render_json = functools.lru_cache(NUM_KEPT)(self._render)

    def render(self, messages: list[Any], is_prompt: bool = True, **template: Any) -> list[int]:
        """Return token ids of messages, with the beginning of a reply if `is_prompt`. `template`
        goes to the chat template. Without messages (a user opens the conversation) return [].
        """
        if not messages:
            return []
        return self._render_json(json.dumps([messages, is_prompt, template])).tolist()

    def is_longer(self, prompt: list[Any], limit: int, **template: Any) -> bool:
        """Return whether a first prompt has more tokens than `limit`.

        A token has a byte or more. So only prompts of many bytes are rendered, and the first one
        with these roles, which shows what the template adds, and whether it takes them.

        Raises:
            ValueError: the template refuses the prompt.
        """
        roles = ", ".join(message["role"] for message in prompt)
        if len(json.dumps(prompt)) + self._added.get(roles, limit) <= limit:
            return False
        try:
            num_tokens = len(self.render(prompt, **template))
        except Exception as error:  # what the template raises, and what Python does in it
            if not roles.endswith("user"):
                return False  # somebody else opens the conversation, and the template gets more
            raise ValueError(
                f"the model's chat template refuses its prompt, of the roles {roles}: {error}. "
                "Change the prompt, or the tokenizer's chat_template"
            ) from error
        self._added[roles] = min(num_tokens, self._added.get(roles, num_tokens))
        return num_tokens > limit

    def extend(
        self, tokens: list[int], messages: list[Any], num_new: int, **template: Any
    ) -> list[int] | None:
        """Return the tokens of a conversation so far, which end with a reply, and behind them what
        the template writes for the last `num_new` messages; None if it cannot be told.

        A short reply stands in for the real one. The tokens of the real one are known, and the
        template may render it otherwise than it was sampled. Its tool calls are rendered without
        arguments: some templates refuse those that are no JSON object, a mistake of the model that
        the environment answers. A reply that ended with no special token, as one does at a `stop`
        string, is followed by the token that ends the template's replies.
        """
        new = messages[len(messages) - num_new :]
        if not new or any(message["role"] == "assistant" for message in new):
            return None
        is_ended = tokens[-1] in self._special_ids
        end = tokens[-1] if is_ended else self._tokenizer.eos_token_id
        question = {"role": "user", "content": "?"}
        reply: dict[str, Any] = {"role": "assistant", "content": "."}
        if calls := messages[-num_new - 1].get("tool_calls"):
            reply["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": {}}} for call in calls
            ]
        try:
            num_before = self.render([question], is_prompt=False, **template).count(end)
            after = self.render([question, reply, *new], **template)
        except TemplateError:  # it refuses such a conversation
            return None
        ends = [at for at, token in enumerate(after) if token == end]
        return tokens + after[ends[num_before] + is_ended :] if len(ends) > num_before else None

    @functools.cached_property
    def _special_ids(self) -> set[int]:
        return {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}

    def _render(self, request: str) -> array[int]:
        # The request is parsed again: then nothing can enter the rendering that is not in its key.
        messages, is_prompt, template = json.loads(request)
        return array(
            "i",
            self._tokenizer.apply_chat_template(
                [as_vllm_renders(message) for message in messages],
                add_generation_prompt=is_prompt,
                return_dict=False,
                **template,
            ),
        )
