"""Gather weights that FSDP2 or DeepSpeed ZeRO-3 has split over ranks, and pack them for a push."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from verifiers_rl.sync.plan import TransferPlan
from verifiers_rl.sync.sources import Source, what_to_send


def is_split(model: nn.Module) -> bool:
    """Whether FSDP2 or ZeRO-3 keeps a part of each parameter on each rank."""
    return any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters())


_END = -1


@contextmanager
def gathering(model: nn.Module, lora_sync: Literal["adapter", "merged"]) -> Iterator[None]:
    """Enter on every rank. Inside, rank 0 may push several times, and a push may fail. If the model
    is split over ranks, the other ranks wait here until rank 0 leaves, and take part in gathering
    each tensor.
    """
    if not is_split(model):
        yield
    elif torch.distributed.get_rank() == 0:
        try:
            yield
        finally:
            _announce(_END, model)
    else:
        sources: list[Source] = []
        with torch.no_grad():
            while (index := _announce(_END, model)) != _END:
                # Only after rank 0 did the same: if an adapter is wrong, rank 0 says so.
                sources = sources or list(what_to_send(model, lora_sync)[0].values())
                sources[index].make()
        yield


def _announce(index: int, model: nn.Module) -> int:
    """Broadcast rank 0's index, and return it on every rank."""
    number = torch.tensor(index, device=next(model.parameters()).device)
    torch.distributed.broadcast(number, 0)
    return int(number)


@torch.no_grad()
def buckets_of(
    plan: TransferPlan, sources: dict[str, Source], model: nn.Module
) -> Iterator[Tensor]:
    """Make, cast and pack the tensors of a push, one bucket after the other, on rank 0 inside
    `gathering`: the other ranks hear which source is made.

    Yields:
        (bytes,) uint8 on the model's device, fresh memory each time.
    """
    device, has_helpers, index = next(model.parameters()).device, is_split(model), 0
    for bucket in plan.buckets:
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
        for name, view in bucket.views(buffer):
            if has_helpers:
                _announce(index, model)
            view.copy_(sources[name].make())
            index += 1
        yield buffer
