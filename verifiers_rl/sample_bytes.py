"""Samples as bytes, to be sent to another process: to other ranks, and from rollout workers. It
imports no torch, which a rollout worker need not load.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verifiers_rl.types import HEAD_BYTES, Sample, SamplingMask

# The fields of a token as they are sent. Booleans are last, because the others must begin at a
# multiple of 4 bytes.
_SEND_ORDER = sorted(Sample.DTYPES, key=lambda name: -np.dtype(Sample.DTYPES[name]).itemsize)
BYTES_PER_TOKEN = sum(np.dtype(dtype).itemsize for dtype in Sample.DTYPES.values())


def flatten_samples(samples: Sequence[Sample], num_bytes: int | None = None) -> np.ndarray:
    """Return all arrays of the samples in one, as bytes: uint8, BYTES_PER_TOKEN for each token and
    then `num_optional_bytes` of each sample. It has `num_bytes` if that is more; then those at the
    end mean nothing.
    """
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    stop = BYTES_PER_TOKEN * num_tokens
    size = stop + sum(sample.num_optional_bytes for sample in samples)
    flat = np.empty(max(size, num_bytes or 0), np.uint8)
    if samples:
        for name, field in _views_of_fields(flat, num_tokens).items():
            np.concatenate([getattr(sample, name) for sample in samples], out=field)
    for sample in samples:
        start, stop = stop, stop + sample.num_optional_bytes
        _put_optional(sample, flat[start:stop])
    return flat


def unflatten_samples(
    flat: np.ndarray, lengths: Sequence[int], optional_bytes: Sequence[int] | None = None
) -> list[Sample]:
    """Invert `flatten_samples`, but for rollout ids. The arrays of the samples are views of `flat`.

    Args:
        flat: from `flatten_samples`. More at its end is ignored.
        lengths: number of tokens of each sample.
        optional_bytes: `num_optional_bytes` of each; None: 0.
    """
    if not lengths:
        return []
    num_tokens = sum(lengths)
    views = _views_of_fields(flat, num_tokens)
    fields = [np.split(views[name], np.cumsum(lengths)[:-1]) for name in Sample.DTYPES]
    samples = [Sample(*arrays) for arrays in zip(*fields, strict=True)]
    stop = BYTES_PER_TOKEN * num_tokens
    for sample, size in zip(samples, optional_bytes or [], strict=optional_bytes is not None):
        start, stop = stop, stop + size
        # Views of 4 bytes an element need such a beginning.
        _take_optional(sample, flat[start:stop].copy() if start % 4 else flat[start:stop])
    return samples


def _put_optional(sample: Sample, room: np.ndarray) -> None:
    """Write the fields that may be None: the sizes of both (-1 ids: there is no mask), the mask,
    the experts.
    """
    if not len(room):
        return
    mask, experts = sample.sampling_mask, sample.routed_experts
    head = np.array([-1, 0, 0, 0], np.int32)
    parts = [head]
    if mask is not None:
        head[0] = len(mask.token_ids)
        parts += [mask.counts, mask.token_ids]
    if experts is not None:
        head[1:3] = experts.shape[1:]
        parts.append(experts.ravel())
    content = np.concatenate([part.view(np.uint8) for part in parts])
    room[: len(content)] = content


def _take_optional(sample: Sample, content: np.ndarray) -> None:
    """Read what `_put_optional` wrote."""
    if not len(content):
        return
    num_ids, num_layers, top_k, _ = content[:HEAD_BYTES].view(np.int32).tolist()
    length, start = len(sample.token_ids), HEAD_BYTES
    if num_ids >= 0:
        start += 4 * (length + num_ids)
        numbers = content[HEAD_BYTES:start].view(np.int32)
        sample.sampling_mask = SamplingMask(numbers[:length], numbers[length:])
    if num_layers:
        experts = content[start : start + 2 * length * num_layers * top_k].view(np.int16)
        sample.routed_experts = experts.reshape(length, num_layers, top_k)


def _views_of_fields(flat: np.ndarray, num_tokens: int) -> dict[str, np.ndarray]:
    views = {}
    start = 0
    for name in _SEND_ORDER:
        dtype = np.dtype(Sample.DTYPES[name])
        stop = start + num_tokens * dtype.itemsize
        views[name] = flat[start:stop].view(dtype)
        start = stop
    return views
