"""Samples as bytes, to be sent to another process: to other ranks, and from rollout workers. It
imports no torch, which a rollout worker need not load.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verifiers_rl.types import Sample

# The fields of a token as they are sent. Booleans are last, because the others must begin at a
# multiple of 4 bytes.
_SEND_ORDER = sorted(Sample.DTYPES, key=lambda name: -np.dtype(Sample.DTYPES[name]).itemsize)
BYTES_PER_TOKEN = sum(np.dtype(dtype).itemsize for dtype in Sample.DTYPES.values())


def flatten_samples(samples: Sequence[Sample], num_bytes: int | None = None) -> np.ndarray:
    """Return all arrays of the samples in one, as bytes: (BYTES_PER_TOKEN * tokens,) uint8, or
    `num_bytes` if that is more; then those at the end mean nothing.
    """
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    flat = np.empty(max(BYTES_PER_TOKEN * num_tokens, num_bytes or 0), np.uint8)
    if samples:
        for name, field in _views_of_fields(flat, num_tokens).items():
            np.concatenate([getattr(sample, name) for sample in samples], out=field)
    return flat


def unflatten_samples(flat: np.ndarray, lengths: Sequence[int]) -> list[Sample]:
    """Invert `flatten_samples`, but for rollout ids. The arrays of the samples are views of `flat`.

    Args:
        flat: (BYTES_PER_TOKEN * tokens,) uint8. More at its end is ignored.
        lengths: number of tokens of each sample.
    """
    if not lengths:
        return []
    views = _views_of_fields(flat, sum(lengths))
    fields = [np.split(views[name], np.cumsum(lengths)[:-1]) for name in Sample.DTYPES]
    return [Sample(*arrays) for arrays in zip(*fields, strict=True)]


def _views_of_fields(flat: np.ndarray, num_tokens: int) -> dict[str, np.ndarray]:
    views = {}
    start = 0
    for name in _SEND_ORDER:
        dtype = np.dtype(Sample.DTYPES[name])
        stop = start + num_tokens * dtype.itemsize
        views[name] = flat[start:stop].view(dtype)
        start = stop
    return views
