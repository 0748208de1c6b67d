"""The server's side of `POST /v1/chat/completions/tokens`, inside vLLM's handler of chats.

fields of the request ──► TokenRequest ──► vLLM renders the messages; the tokens replace
                                           them as the prompt
reply ◄── packed tokens are spliced in ◄── vLLM makes its reply, without an object a token
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from verifiers_rl.inference.packed_tokens import (
    EXPERTS_FIELD,
    FIELD,
    MASK_FIELD,
    pack_experts,
    pack_sampled,
    unpack_ids,
)
from verifiers_rl.inference.vllm_versions import (
    keep_logprobs_as_numbers,
    possible_tokens,
    sampled_logprobs,
)
from verifiers_rl.types import MAX_MASK, SamplingMask

# vLLM's lower bound in OpenAI's form, which cannot say -inf.
LOWEST_LOGPROB = -9999.0
# top_k keeps all tokens that are as likely as the k-th. With logits in bfloat16 there are several.
NUM_TIES = 32


class TokenRequest:
    """A request of the token route, from its fields to its reply.

    Args:
        fields: of the request. Those that vLLM must not see are removed.
        vocab_size, max_model_len: of the model.

    Raises:
        ValueError: `tokens` are no token ids of the model, or too many, or they cannot be packed.

    Attributes:
        token_ids: the prompt.
        is_packed: the reply has its tokens packed.
        has_experts: beside them, the reply has the experts of its tokens and of the prompt's.
        has_mask: beside them, the reply has the tokens that could be sampled in their place.
    """

    def __init__(self, fields: dict[str, Any], vocab_size: int, max_model_len: int) -> None:
        self.token_ids = take_prompt(fields, vocab_size, max_model_len)
        self.is_packed = fields.pop(FIELD, False)
        self.has_mask = fields.pop(MASK_FIELD, False)
        self.has_experts = fields.pop(EXPERTS_FIELD, False)
        if not isinstance(self.has_experts, bool):
            raise ValueError(f"{EXPERTS_FIELD}={self.has_experts!r}: must be true or false")
        if self.has_experts and not self.is_packed:
            raise ValueError(f"{EXPERTS_FIELD}: needs {FIELD}")
        self.state: Any = None  # vLLM's, of this request
        self._spliced = b""  # into the reply, behind its first byte
        if not isinstance(self.is_packed, bool):
            raise ValueError(f"{FIELD}={self.is_packed!r}: must be true or false")
        if self.is_packed:
            if fields.get("stream"):
                raise ValueError(f"{FIELD}: a streamed reply has no packed tokens")
            if fields.get("n") not in (None, 1) or fields.get("use_beam_search"):
                raise ValueError(f"{FIELD}: only a reply of one completion has packed tokens")
            # vLLM makes OpenAI's form of what is requested here. Only the sampled tokens' logprobs
            # are needed, and they are taken before that.
            fields |= {"return_token_ids": False, "logprobs": True, "top_logprobs": 0}
            fields.pop("logprob_token_ids", None)
        if not isinstance(self.has_mask, bool):
            raise ValueError(f"{MASK_FIELD}={self.has_mask!r}: must be true or false")
        if self.has_mask:
            top_k = fields.get("top_k")
            if not self.is_packed:
                raise ValueError(f"{MASK_FIELD}: needs {FIELD}")
            if type(top_k) is not int or not 1 <= top_k <= MAX_MASK:
                raise ValueError(f"{MASK_FIELD}: needs top_k from 1 to {MAX_MASK}, not {top_k!r}")
            fields["top_logprobs"] = min(top_k + NUM_TIES, vocab_size)

    def take_sampled(
        self, token_ids: Sequence[int], logprobs: np.ndarray, mask: SamplingMask | None = None
    ) -> None:
        """Take what vLLM has sampled for this request, to be spliced into the reply."""
        packed: dict[str, Any] = {
            **pack_sampled(token_ids, logprobs.clip(min=LOWEST_LOGPROB), mask)
        }
        if self.has_experts and self.state.routed_experts_chunks:
            packed |= pack_experts(np.concatenate(self.state.routed_experts_chunks))
        self._spliced = f'"{FIELD}":{json.dumps(packed)},'.encode()

    def splice(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return this ASGI message of vLLM's reply with the packed tokens, if it has any."""
        if message["type"] == "http.response.start":
            if message["status"] != 200:
                self._spliced = b""  # an error
            headers = [
                (name, str(int(value) + len(self._spliced)).encode())
                if name.lower() == b"content-length"
                else (name, value)
                for name, value in message["headers"]
            ]
            return {**message, "headers": headers}
        if message["type"] == "http.response.body" and message.get("body") and self._spliced:
            body = message["body"]  # a JSON object
            message = {**message, "body": body[:1] + self._spliced + body[1:]}
            self._spliced = b""
        return message


def take_prompt(fields: dict[str, Any], vocab_size: int, max_model_len: int) -> list[int]:
    """Take `tokens` out of the fields: a list of ids, or the same packed.

    Raises:
        ValueError: they are no token ids of the model, or too many.
    """
    tokens = fields.pop("tokens", None)
    if isinstance(tokens, str):
        try:
            ids = unpack_ids(tokens)
        except ValueError as error:
            raise ValueError(
                f"tokens: must be a list of token ids, or base64 of int32: {error}"
            ) from error
        wrong = ids[(ids < 0) | (ids >= vocab_size)][:1].tolist()
        tokens = ids.tolist()
    else:
        if not isinstance(tokens, list):
            tokens = []  # refused below
        wrong = [t for t in tokens if type(t) is not int or not 0 <= t < vocab_size]
    if not tokens:
        raise ValueError("tokens: must be a list of token ids, at least one, or base64 of int32")
    if wrong:
        raise ValueError(f"tokens: {wrong[0]!r} is no token id below {vocab_size}")
    if len(tokens) >= max_model_len:  # verifiers recognizes an overlong prompt by these words
        raise ValueError(
            f"tokens: a prompt of {len(tokens)} is longer than the model's context length "
            f"less one for the reply (--max-model-len {max_model_len})"
        )
    return tokens


current_request: ContextVar[TokenRequest | None] = ContextVar("token_request", default=None)


def take_over(chat: Any, engine: Any) -> None:
    """Make vLLM's chat handler and output processor serve `current_request` where it is set.

    The handler still renders the messages, so their tools are checked as usual. The length of the
    messages is not checked, because a template may add much that the tokens do not have.
    """
    render, make_logprobs = chat.render_chat_request, chat._create_chat_logprobs
    processor = engine.output_processor
    add = processor.add_request

    async def render_chat_request(request: Any) -> Any:
        current = current_request.get()
        if current is None:
            return await render(request)
        asked, request.truncate_prompt_tokens = request.truncate_prompt_tokens, 1
        try:
            rendered = await render(request)
        finally:
            request.truncate_prompt_tokens = asked
        if not isinstance(rendered, tuple):  # then it is vLLM's error
            return rendered
        conversation, (prompt,) = rendered
        if prompt.get("type", "token") != "token":
            raise ValueError("tokens: a prompt with images or audio cannot be given as tokens")
        prompt = {name: value for name, value in prompt.items() if name != "prompt"}
        return conversation, [prompt | {"prompt_token_ids": current.token_ids}]

    def add_request(added: Any, *args: Any, **kwargs: Any) -> None:
        add(added, *args, **kwargs)
        current = current_request.get()
        if current is not None and current.is_packed:
            state = processor.request_states[added.request_id]
            keep_logprobs_as_numbers(state, current.has_mask)
            current.state = state

    def create_chat_logprobs(*args: Any, **kwargs: Any) -> Any:
        current = current_request.get()
        if current is None or not current.is_packed:
            return make_logprobs(*args, **kwargs)
        kept = kwargs["top_logprobs"]
        mask = SamplingMask(*possible_tokens(kept)) if current.has_mask else None
        current.take_sampled(kwargs["token_ids"], sampled_logprobs(kept), mask)
        return make_logprobs(**kwargs | {"token_ids": [], "top_logprobs": []})

    chat.render_chat_request = render_chat_request
    chat._create_chat_logprobs = create_chat_logprobs
    processor.add_request = add_request
