"""A generation request at `vf-vllm`: what is read of it before vLLM handles it, and what is told
beside vLLM's reply.

    gateway.py ──► vLLM's handler ──► engine.py ──► vLLM's handler ──► gateway.py
    TokenRequest    parses fields,      prompt, salt, first   message with       headers,
    Generation      renders messages    token, versions       tool calls         packed tokens

vLLM's handlers know nothing of this. The engine finds the `Generation` in a context variable of the
request's task.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextvars import ContextVar
from typing import Any

import numpy as np

from verifiers_rl.inference.packed_tokens import FIELD, MASK_FIELD, pack_sampled, unpack_ids
from verifiers_rl.types import MAX_MASK

# vLLM's lower bound in OpenAI's form, which cannot say -inf.
LOWEST_LOGPROB = -9999.0
# top_k keeps all tokens that are as likely as the k-th. With logits in bfloat16 there are several.
NUM_TIES = 32


class TokenRequest:
    """What a request of the token route asks for beside a chat's own fields.

    Args:
        fields: of the request. Those that vLLM must not see are removed.
        vocab_size, max_model_len: of the model.

    Raises:
        ValueError: `tokens` are no token ids of the model, or too many, or they cannot be packed.

    Attributes:
        token_ids: the prompt.
        is_packed: the reply has its tokens packed.
        num_logprobs: the likeliest tokens, of which a sampling mask is made; 0 if it wants none.
    """

    def __init__(self, fields: Any, vocab_size: int, max_model_len: int) -> None:
        if not isinstance(fields, dict):
            raise ValueError("the body must be a JSON object")
        self.token_ids = take_prompt(fields, vocab_size, max_model_len)
        self._room = max_model_len - len(self.token_ids)
        self.is_packed, has_mask = fields.pop(FIELD, False), fields.pop(MASK_FIELD, False)
        for name, value in ((FIELD, self.is_packed), (MASK_FIELD, has_mask)):
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: must be true or false")
        self.num_logprobs = 0
        of_several = fields.get("n") not in (None, 1) or fields.get("use_beam_search")
        if self.is_packed and (of_several or fields.get("stream")):
            raise ValueError(f"{FIELD}: only a whole reply of one completion has packed tokens")
        if has_mask:
            top_k = fields.get("top_k")
            if not self.is_packed:
                raise ValueError(f"{MASK_FIELD}: needs {FIELD}")
            if type(top_k) is not int or not 1 <= top_k <= MAX_MASK:
                raise ValueError(f"{MASK_FIELD}: needs top_k from 1 to {MAX_MASK}, not {top_k!r}")
            self.num_logprobs = min(top_k + NUM_TIES, vocab_size)
        # The tokens take the place of the rendered messages, of which one token is enough. So a
        # template may add much that the tokens do not have.
        fields["truncate_prompt_tokens"] = 1
        if self.is_packed:  # vLLM makes OpenAI's form of what is requested here
            for name in ("return_token_ids", "logprobs", "top_logprobs", "logprob_token_ids"):
                fields.pop(name, None)

    def fit(self, prompt: Any, sampling: Any) -> Any:
        """Return the engine's prompt with these tokens, and set what must be sampled for them."""
        if prompt.get("type", "token") != "token":
            raise ValueError("tokens: a prompt with images or audio cannot be given as tokens")
        sampling.max_tokens = min(sampling.max_tokens or self._room, self._room)
        if self.is_packed:
            sampling.logprobs, sampling.flat_logprobs = self.num_logprobs, True
        prompt = {name: value for name, value in prompt.items() if name != "prompt"}
        return prompt | {"prompt_token_ids": self.token_ids}


def take_prompt(fields: dict[str, Any], vocab_size: int, max_model_len: int) -> list[int]:
    """Take `tokens` out of the fields: a list of ids, or the same packed.

    Raises:
        ValueError: they are no token ids of the model, or too many.
    """
    tokens = fields.pop("tokens", None)
    if isinstance(tokens, str):
        try:
            tokens = unpack_ids(tokens).tolist()
        except ValueError as error:
            raise ValueError(
                f"tokens: must be a list of token ids, or base64 of int32: {error}"
            ) from error
    if not isinstance(tokens, list) or not tokens:
        raise ValueError("tokens: must be a list of token ids, at least one, or base64 of int32")
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"tokens: {token!r} is no token id below {vocab_size}")
    if len(tokens) >= max_model_len:  # verifiers recognizes an overlong prompt by these words
        raise ValueError(
            f"tokens: a prompt of {len(tokens)} is longer than the model's context length "
            f"less one for the reply (--max-model-len {max_model_len})"
        )
    return tokens


class Generation:
    """A generation request, from its arrival to its reply.

    Args:
        limit_s: how long its reply may take from its first token on; None for no limit.
        tokens: what a request of the token route asks for.

    Attributes:
        deadline: from its first token on, if it has a limit.
        queued_s: seconds from its arrival to its first token; None before that.
        num_completions: of its reply.
        versions: which policy sampled which tokens of the last completion, as a header says it;
            None if one of them is of no policy, or of two mixed.
        packed: a JSON field for its reply; None if it asks for none, or before its end.
        state: what vLLM's output processor keeps of a request for one completion.
    """

    def __init__(self, limit_s: float | None = None, tokens: TokenRequest | None = None) -> None:
        self.tokens = tokens
        self.deadline = asyncio.Timeout(None)
        self.queued_s: float | None = None
        self.versions: str | None = None
        self.packed: bytes | None = None
        self.num_completions = 0
        self._arrived = time.monotonic()
        self._limit_s = limit_s
        self.state: Any = None

    def begin(self) -> None:
        """Its first token is there."""
        if self.queued_s is None:
            self.queued_s = time.monotonic() - self._arrived
            if self._limit_s is not None:
                self.deadline.reschedule(asyncio.get_running_loop().time() + self._limit_s)

    def end(self, completion: Any) -> None:
        """All of a completion is there, vLLM's `CompletionOutput`."""
        spans = completion.weight_versions or []
        if spans and all(span.version.isdigit() for span in spans):
            self.versions = ",".join(f"{span.start}:{span.version}" for span in spans)
        if self.tokens is not None and self.tokens.is_packed:
            kept = self.state.logprobs_processor.logprobs  # `engine.SampledTokens`
            logprobs = np.asarray(kept.logprobs, np.float32).clip(min=LOWEST_LOGPROB)
            mask = (kept.counts, kept.allowed) if self.tokens.num_logprobs else None
            packed = pack_sampled(completion.token_ids, logprobs, mask)
            self.packed = f'"{FIELD}":{json.dumps(packed)},'.encode()

    def splice(self, body: bytes) -> bytes:
        """Return a reply, which is a JSON object, with its packed tokens, if it has any."""
        return body[:1] + (self.packed or b"") + body[1:]

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return 0 if self.state is None else self.state.detokenizer.num_output_tokens()


current_generation: ContextVar[Generation | None] = ContextVar("generation", default=None)
