"""The trained adapter merged into its base model, as a plain model on disk."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from verifiers_rl.sync.sources import gather_full, merged_sources, plain_name


@torch.no_grad()
def save_merged(model: Any, tokenizer: Any, folder: Path, *, writes: bool) -> None:
    """Save the base model of a PEFT model with its adapter merged in, as transformers and vLLM load
    it. Each weight is merged in float32 and saved in the dtype that the base model has here. The
    model in memory does not change.

    Args:
        model: the PEFT model. If it is split over ranks, all ranks must call this, because each
            weight is gathered.
        tokenizer: saved beside it; None for none.
        folder: exists.
        writes: whether this rank writes. It holds the whole model in CPU memory.

    Raises:
        RuntimeError: a weight of the base model is not among the merged ones.
    """
    base = model.get_base_model()
    merged = merged_sources(model)
    # A vision tower's, too. Tied parameters come once.
    held = {
        plain_name(name): tensor
        for name, tensor in chain(base.named_parameters(), base.named_buffers())
        if ".lora_" not in name and ".modules_to_save." not in name
    }
    weights: dict[str, Tensor] = {}
    for name in {**merged, **held}:
        source = merged.get(name)
        tensor = source.make() if source else gather_full(held[name])  # on every rank
        if writes:
            dtype = held[name].dtype if name in held else tensor.dtype
            weights[name] = tensor.to(dtype).cpu().contiguous()
    if not writes:
        return
    plain = _plain_model(base)
    wanted = plain.state_dict().keys()
    tied = set(getattr(plain, "all_tied_weights_keys", None) or {})
    if missing := wanted - weights.keys() - tied:
        raise RuntimeError(
            f"the merged model lacks {sorted(missing)[:3]}; set save_final='adapter'"
        )
    plain.save_pretrained(folder, state_dict={n: t for n, t in weights.items() if n in wanted})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _plain_model(base: Any) -> Any:
    """Return the base model without weights, and without what PEFT and FSDP2 have changed."""
    # FSDP2 gives each module a class of its own, whose third base is the original class.
    kind = type(base).__mro__[2] if isinstance(base, FSDPModule) else type(base)
    with torch.device("meta"):
        plain = kind(deepcopy(base.config))
    if getattr(base, "generation_config", None) is not None:
        plain.generation_config = deepcopy(base.generation_config)
    return plain
