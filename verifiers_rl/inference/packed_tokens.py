"""Token ids and logprobs as bytes, base64 in JSON, on both sides of `vf-vllm`'s token route.

OpenAI's form of a reply takes about 100 bytes of JSON a token, and both sides make several Python
objects of them. Packed, a token takes 11 bytes, and neither side makes an object for it.

    request  "tokens": <ids of the prompt>, "seeds": [3, 5, ...]
    reply    1 0:3,17:4 {"packed_tokens": {"token_ids": <ids>, "logprobs": <their logprobs>}, ...}
             0 0:3 {"packed_tokens": ...}

Each seed, which may be null, asks for one completion. It is sent as soon as it has ended, as a line
with its place in the list, its versions, and the JSON of vLLM's reply, with a space between them.
`0:3,17:4` is version 3 of the policy from the first token on and version 4 from the 18th; it is
empty if a token is of none. vLLM labels the tokens itself. Ids are little-endian int32, logprobs
little-endian float32.

With `"sampling_mask": true` in the request, the reply also has the tokens that top-p, top-k and
min-p allowed at each position, 5.3 bytes for each of them and 5.3 a position:

    reply    "packed_tokens": {..., "num_allowed": <how many, a position>, "allowed": <their ids>}

vLLM itself returns the experts of each token of prompt and reply but the last, whose experts no
step has chosen: layers x top_k x 1.33 bytes a token, twice that above 256 experts.
"""

from __future__ import annotations

import io
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FIELD = "packed_tokens"
MASK_FIELD = "sampling_mask"
SEEDS = "seeds"
_ID, _LOGPROB = np.dtype("<i4"), np.dtype("<f4")


def pack_numbers(numbers: Sequence[int] | np.ndarray, dtype: Any = _ID) -> str:
    """Return numbers as base64: token ids, or those of another type, such as logprobs."""
    return b64encode(np.asarray(numbers, dtype).tobytes()).decode()


def unpack_numbers(text: str, dtype: Any = _ID) -> np.ndarray:
    """Invert `pack_numbers`: (tokens,) int32, or numbers of another type.

    Raises:
        ValueError: this is not base64, or not a whole number of them.
    """
    return np.frombuffer(b64decode(text, validate=True), dtype)


def pack_sampled(
    token_ids: Sequence[int] | np.ndarray,
    logprobs: np.ndarray,
    mask: tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray] | None = None,
) -> dict[str, str]:
    """Return the value of the reply's `packed_tokens`. `mask`: how many tokens could be sampled, a
    position, and their ids.
    """
    packed = {"token_ids": pack_numbers(token_ids), "logprobs": pack_numbers(logprobs, _LOGPROB)}
    if mask is not None:
        packed |= {"num_allowed": pack_numbers(mask[0]), "allowed": pack_numbers(mask[1])}
    return packed


def unpack_sampled(packed: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Invert `pack_sampled`: ids (tokens,) int32 and logprobs (tokens,) float32."""
    return unpack_numbers(packed["token_ids"]), unpack_numbers(packed["logprobs"], _LOGPROB)


def unpack_experts(text: str) -> np.ndarray:
    """Return a choice's `routed_experts`, an array of numpy's file format in base64: (tokens of
    prompt and reply without the last, layers, top_k) int16.

    Raises:
        ValueError: this is no such array.
    """
    return np.load(io.BytesIO(b64decode(text, validate=True)), allow_pickle=False).astype(np.int16)


def unpack_mask(packed: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return how many tokens the server could choose from for each sampled token, and the ids of
    all of these; None if the reply does not say so.
    """
    if "num_allowed" not in packed:
        return None
    return unpack_numbers(packed["num_allowed"]), unpack_numbers(packed["allowed"])


def allowed_tokens(counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the column of a sampling mask: (tokens, K) int32, the ids of each token with -1 behind
    them.

    Args:
        counts: (tokens,), ids of each token; 0 where any token could be chosen.
        ids: (sum of counts,).
    """
    allowed = np.full((len(counts), max(counts.max(initial=1), 1)), -1, np.int32)
    allowed[np.arange(allowed.shape[1]) < counts[:, None]] = ids
    return allowed
