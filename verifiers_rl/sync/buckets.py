"""The two ends of one push: buckets sent by the trainer, received by the workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verifiers_rl.sync.plan import TransferPlan, bucket_num_bytes, bucket_views
from verifiers_rl.sync.transports import Transport

if TYPE_CHECKING:
    from verifiers_rl.sync.sources import Source


class WorkersLeftError(RuntimeError):
    """The workers no longer receive. Only the workers or the server know why."""


def send_buckets(plan: TransferPlan, sources: dict[str, Source], transport: Transport) -> None:
    """Rank 0's end: make, cast and send one bucket after the other.

    Raises:
        WorkersLeftError: a bucket could not be sent. An error of a source is raised unchanged.
    """
    with torch.no_grad():
        for bucket in plan.buckets():
            buffer = transport.buffer(bucket_num_bytes(bucket))
            for name, view in bucket_views(bucket, buffer):
                view.copy_(sources[name].make())
            try:
                transport.send(buffer)
            except RuntimeError as error:
                raise WorkersLeftError(f"weights could not be sent: {error}") from error


def receive_buckets(
    plan: TransferPlan, transport: Transport, timeout_s: float
) -> Iterator[list[tuple[str, Tensor]]]:
    """The workers' end: yield the named tensors of each bucket in turn. While the caller loads
    them, the next bucket is packed and sent.

    Raises:
        RuntimeError: the trainer went away.
        TimeoutError: all buckets together took longer than `timeout_s`, loading included.
    """
    deadline = time.monotonic() + timeout_s
    buckets = list(plan.buckets())
    coming = transport.receive(bucket_num_bytes(buckets[0]))
    for bucket, following in zip_longest(buckets, buckets[1:]):
        buffer = coming()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"a push of weights took longer than {timeout_s:g} s (vllm_server_timeout)"
            )
        if following is not None:
            coming = transport.receive(bucket_num_bytes(following))
        yield bucket_views(bucket, buffer)
