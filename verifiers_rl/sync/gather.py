"""Gather weights that FSDP2 or DeepSpeed ZeRO-3 has split over ranks, for a push."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

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


@contextmanager
def announced(sources: dict[str, Source], model: nn.Module) -> Iterator[dict[str, Source]]:
    """Wrap rank 0's sources inside `gathering`, so that the other ranks hear which one is made.

    Sources are made in a thread that may outlive a failed push. Its collectives must not mix with
    later ones, so nothing more is gathered after this context.
    """
    if not is_split(model):
        yield sources
        return
    lock, is_open = threading.Lock(), True

    def make(index: int, source: Source) -> Tensor:
        with lock:
            if not is_open:
                raise RuntimeError("this push of weights was given up")
            _announce(index, model)
            return source.make()

    try:
        yield {
            name: source._replace(make=partial(make, index, source))
            for index, (name, source) in enumerate(sources.items())
        }
    finally:
        with lock:
            is_open = False
