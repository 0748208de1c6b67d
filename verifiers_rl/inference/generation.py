"""A request of the token route at `vf-vllm`: what is read of it before vLLM handles it, and the
lines of its reply.

    gateway.py ──► vLLM's handler ──► engine.py ──► vLLM's handler ──► reply_in_lines
    TokenRequest    parses fields,     prompt, salt,    message with     versions,
                    renders messages   seeds            tool calls       packed tokens

vLLM's handlers know nothing of this. The engine finds the `TokenRequest` in a context variable of
the request's task.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, StrictBool, StrictInt

from verifiers_rl.inference.packed_tokens import (
    FIELD,
    MASK_FIELD,
    SEEDS,
    pack_sampled,
    unpack_numbers,
)
from verifiers_rl.types import MAX_MASK

# Why vLLM has ended a completion before its end. Each is asked for again, by itself.
FAILED = ("abort", "error")
# vLLM's lower bound in OpenAI's form, which cannot say -inf.
LOWEST_LOGPROB = -9999.0
# top_k keeps all tokens that are as likely as the k-th. With logits in bfloat16 there are several.
NUM_TIES = 32
# Characters of a grammar, a schema or the choices that a reply must follow. vLLM compiles them in
# the server's process, which answers nobody meanwhile.
MAX_GRAMMAR = 2**16
# Fields of a request of the token route. vLLM does not know the first three, and makes OpenAI's
# form of what is requested by the others.
NOT_FOR_VLLM = (
    "tokens",
    SEEDS,
    MASK_FIELD,
    "return_token_ids",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
)

Seed = Annotated[StrictInt, Field(ge=0, lt=2**63)]


def check_grammar(structured: Any) -> None:
    """Raise ValueError if what a reply must follow, vLLM's `StructuredOutputsParams`, is too long
    to be compiled.
    """
    if structured is not None and (length := len(repr(structured))) > MAX_GRAMMAR:
        raise ValueError(
            f"structured outputs: a grammar, schema or list of choices of {length} characters is "
            f"longer than {MAX_GRAMMAR}"
        )


class TokenFields(BaseModel):
    """What a request of the token route has beside a chat's own fields, and how it may not ask for
    its reply. `seeds` says how many completions it has, see packed_tokens.py.
    """

    tokens: str
    seeds: Annotated[list[Seed | None], Field(min_length=1)]
    sampling_mask: StrictBool = False
    n: Literal[1] | None = None
    use_beam_search: Literal[False] | None = None
    stream: Literal[False] | None = None


class TokenRequest:
    """What a request of the token route asks for beside a chat's own fields.

    Args:
        fields: of the request. Those that vLLM must not see are removed.
        vocab_size, max_model_len: of the model.

    Raises:
        ValueError: `fields` are no `TokenFields`, `tokens` are no token ids of the model, or too
            many, or a sampling mask has no bound.

    Attributes:
        token_ids: the prompt.
        seeds: of the completions; each is a line of the reply.
        num_logprobs: the likeliest tokens, of which a sampling mask is made; 0 if it wants none.
    """

    def __init__(self, fields: Any, vocab_size: int, max_model_len: int) -> None:
        asked = TokenFields.model_validate(fields)
        self.token_ids = read_prompt(asked.tokens, vocab_size, max_model_len)
        self._room = max_model_len - len(self.token_ids)
        self.seeds = asked.seeds
        fields["n"] = len(self.seeds)  # vLLM knows how many it allows
        self.num_logprobs = 0
        if asked.sampling_mask:
            top_k = fields.get("top_k")
            if type(top_k) is not int or not 1 <= top_k <= MAX_MASK:
                raise ValueError(f"{MASK_FIELD}: needs top_k from 1 to {MAX_MASK}, not {top_k!r}")
            self.num_logprobs = min(top_k + NUM_TIES, vocab_size)
        # The tokens take the place of the rendered messages, of which one token is enough. So a
        # template may add much that the tokens do not have.
        fields["truncate_prompt_tokens"] = 1
        for name in NOT_FOR_VLLM:
            fields.pop(name, None)

    def fit(self, prompt: Any, sampling: Any) -> Any:
        """Return the engine's prompt with these tokens, and set what must be sampled for them."""
        if prompt.get("type", "token") != "token":
            raise ValueError("tokens: a prompt with images or audio cannot be given as tokens")
        sampling.max_tokens = min(sampling.max_tokens or self._room, self._room)
        sampling.logprobs = self.num_logprobs
        prompt = {name: value for name, value in prompt.items() if name != "prompt"}
        return prompt | {"prompt_token_ids": self.token_ids}

    def line_of(self, completion: Any, reply: str) -> str:
        """Return a completion, vLLM's `CompletionOutput`, as a line: its number, which policies
        sampled its tokens, and vLLM's reply with packed tokens. It names no policy if a token is of
        none, or of two mixed.
        """
        spans = completion.weight_versions or []
        is_known = all(span.version.isdigit() for span in spans)
        versions = ",".join(f"{span.start}:{span.version}" for span in spans) if is_known else ""
        ids, logprobs, _ = join_logprobs(completion.logprobs)  # see `engine.keep_arrays`
        mask = allowed_of(ids, logprobs) if self.num_logprobs else None
        packed = pack_sampled(completion.token_ids, logprobs[:, 0].clip(LOWEST_LOGPROB), mask)
        return f'{completion.index} {versions} {{"{FIELD}":{json.dumps(packed)},{reply[1:]}\n'


def read_prompt(text: str, vocab_size: int, max_model_len: int) -> list[int]:
    """Return packed ids.

    Raises:
        ValueError: they are no token ids of the model, or too many.
    """
    try:
        token_ids = unpack_numbers(text)
    except ValueError as error:
        raise ValueError(f"tokens: must be token ids, base64 of int32: {error}") from error
    if not len(token_ids):
        raise ValueError("tokens: must be at least one token id")
    if len(wrong := token_ids[(token_ids < 0) | (token_ids >= vocab_size)]):
        raise ValueError(f"tokens: {wrong[0]} is no token id below {vocab_size}")
    if len(token_ids) >= max_model_len:  # verifiers recognizes an overlong prompt by these words
        raise ValueError(
            f"tokens: a prompt of {len(token_ids)} is longer than the model's context length "
            f"less one for the reply (--max-model-len {max_model_len})"
        )
    return token_ids.tolist()


def join_logprobs(parts: Sequence[Any]) -> list[np.ndarray]:
    """Join vLLM's `LogprobsLists` of a request: ids and logprobs, (tokens, K), and ranks of sampled
    tokens. The sampled token comes first, then the K - 1 likeliest ones in their order. A part has
    as many as the request of its step that asked for most.
    """
    width = min(logprobs.shape[1] for _, logprobs, *_ in parts)
    cut = [(ids[:, :width], logprobs[:, :width], ranks) for ids, logprobs, ranks, _ in parts]
    return [np.concatenate(column) for column in zip(*cut, strict=True)]


def allowed_of(ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many tokens could be sampled at each position, and their ids. The sampling options
    give probability 0 to the others.
    """
    is_allowed = logprobs > -np.inf
    # The sampled token is not among the likeliest ones where many more are as likely as it is.
    is_allowed[:, 0] = ~((ids[:, 1:] == ids[:, :1]) & is_allowed[:, 1:]).any(1)
    return is_allowed.sum(1), ids[is_allowed]


# What a request of the token route asks for; None in others. Of the request's task.
current_request: ContextVar[TokenRequest | None] = ContextVar("request", default=None)


def reply_in_lines(chat: Any) -> None:
    """Let vLLM's chat handler send the completions of a request of the token route one by one. Each
    is the reply that it would be to a request of its own, and is sent as soon as it has ended. One
    that fails has no line.
    """
    reply_to = chat.chat_completion_full_generator

    async def reply(
        request: Any, outputs: AsyncIterator[Any], *args: Any, parser: Any = None, **options: Any
    ) -> Any:
        asked = current_request.get()
        if asked is None:
            return await reply_to(request, outputs, *args, parser=parser, **options)

        async def only(output: Any) -> AsyncIterator[Any]:
            yield output

        async def lines(asked: TokenRequest) -> AsyncIterator[str]:
            async for output in outputs:
                own = parser  # it keeps what it has parsed
                if parser is not None:
                    template = chat._effective_chat_template_kwargs(request)
                    own = chat._make_parser(request, chat.renderer.tokenizer, template)
                ended = output.outputs[0]
                if ended.finish_reason not in FAILED:
                    whole = await reply_to(request, only(output), *args, parser=own, **options)
                    yield asked.line_of(ended, whole.model_dump_json())

        # What goes wrong before the first line has a status of its own.
        replies = lines(asked)
        if (first := await anext(replies, None)) is None:
            raise RuntimeError("the engine has ended every completion before its end")
        return joined(first, replies)

    chat.chat_completion_full_generator = reply


async def joined(first: str, others: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for one in others:
        yield one
