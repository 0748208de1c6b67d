"""Conversations as tokens, by the trainer's own chat template."""

from __future__ import annotations

import functools
import json
from array import array
from typing import Any

from verifiers_rl.envs.chat_template import as_vllm_renders

NUM_KEPT = 256  # renderings in memory, 4 bytes a token; the rollouts of a group share a prompt


class Renderer:
    """Renders messages with a tokenizer's chat template. It keeps the last `NUM_KEPT` renderings,
    so the rollouts of a group render their prompt once, and a template that has tools renders them
    once. Threads may share it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._render_json = functools.lru_cache(NUM_KEPT)(self._render)

    def render(self, messages: list[Any], is_prompt: bool = True, **template: Any) -> list[int]:
        """Return token ids of messages, with the beginning of a reply if `is_prompt`. `template`
        goes to the chat template. Without messages (a user opens the conversation) return [].
        """
        if not messages:
            return []
        return self._render_json(json.dumps([messages, is_prompt, template])).tolist()

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
