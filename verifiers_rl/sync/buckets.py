"""The two ends of one push: buckets made by the trainer, received by the workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verifiers_rl.sync.plan import TransferPlan, bucket_num_bytes, bucket_views

if TYPE_CHECKING:
    from verifiers_rl.sync.sources import Source


def make_buckets(
    plan: TransferPlan,
    sources: dict[str, Source],
    device: torch.device,
    before_each: Callable[[int], object] = lambda index: None,
) -> Iterator[Tensor]:
    """Rank 0's end: make, cast and pack the tensors, one bucket after the other.

    Args:
        device: of the buckets.
        before_each: called with the index of each source before it is made.

    Yields:
        (bytes,) uint8, fresh memory each time.
    """
    index = 0
    for bucket in plan.buckets():
        buffer = torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8, device=device)
        for name, view in bucket_views(bucket, buffer):
            before_each(index)
            with torch.no_grad():
                view.copy_(sources[name].make())
            index += 1
        yield buffer


def receive_buckets(
    plan: TransferPlan, receive: Callable[[int], Callable[[], Tensor]], timeout_s: float
) -> Iterator[list[tuple[str, Tensor]]]:
    """The workers' end: yield the named tensors of each bucket in turn. While the caller loads
    them, the next bucket is packed and sent.

    Args:
        receive: begins to receive a buffer of so many bytes; what it returns waits for the buffer.

    Raises:
        RuntimeError: the trainer went away.
        TimeoutError: all buckets together took longer than `timeout_s`, loading included.
    """
    deadline = time.monotonic() + timeout_s
    buckets = list(plan.buckets())
    coming = receive(bucket_num_bytes(buckets[0]))
    for bucket, following in zip_longest(buckets, buckets[1:]):
        buffer = coming()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"a push of weights took longer than {timeout_s:g} s (vllm_server_timeout)"
            )
        if following is not None:
            coming = receive(bucket_num_bytes(following))
        yield bucket_views(bucket, buffer)
