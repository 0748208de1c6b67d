"""The trainer uses the experts that the server chose (R3, arXiv:2510.11370).

A router scores all experts of a layer and takes the best few. The weights of both sides are equal,
their rounding is not, so now and then they take different ones, and the token's logprob differs by
much. With replay, a token goes to the experts that the server returned. How they are weighed is
left to the model: its own scores, taken at these experts. So gradients reach the router through the
scores, and none through the choice, as without replay.

    router's forward    logits ──► scores ──► topk ──► weights, experts
                                                ▲
                          the experts of the server replace the choice here; where the server
                          returned none (-1), the choice stays

This needs no class of any model: in transformers, every router takes its experts with one topk over
a row of scores for each token.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _ReplacedChoice(TorchFunctionMode):
    """While open, a topk that chooses `top_k` of `num_experts` for each token takes these.

    Args:
        experts: (tokens, top_k) int64; -1 for the router's own choice.
        num_experts: of the layer.
    """

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        super().__init__()
        self._experts, self._num_experts = experts, num_experts
        self.num_choices = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        values, chosen = func(*args, **(kwargs or {}))
        scores, tokens = args[0], len(self._experts)
        is_choice = scores.shape == (tokens, self._num_experts)
        if not is_choice or chosen.shape != self._experts.shape:
            return values, chosen  # of groups of experts
        self.num_choices += 1
        experts = torch.where(self._experts < 0, chosen, self._experts)
        return scores.gather(1, experts), experts


def routers_of(model: nn.Module) -> list[tuple[int, Any]]:
    """Return the routers of a model, each with the number of its layer."""
    found = []
    for name, module in model.named_modules():
        num_experts, weight = getattr(module, "num_experts", None), getattr(module, "weight", None)
        layer = re.search(r"\blayers\.(\d+)\.", name)
        is_router = isinstance(getattr(module, "top_k", None), int) and num_experts is not None
        shape = getattr(weight, "ds_shape", getattr(weight, "shape", (None,)))  # ZeRO-3 empties it
        if is_router and layer and shape[0] == num_experts:
            found.append((int(layer[1]), module))
    return found


def replay_experts(model: Any, experts: Tensor | None) -> None:
    """Let the routers of this model use given experts in the next forward, and where its backward
    computes that again.

    Args:
        model: its routers are changed when the first experts come.
        experts: (B, T, layers, top_k) integers, -1 where unknown. None: all routers choose.
    """
    if not hasattr(model, "replayed_experts"):
        if experts is None:
            return
        for layer, router in routers_of(model):
            router.forward = _replaying(model, layer, router)
    model.replayed_experts = experts


def _replaying(model: Any, layer: int, router: Any) -> Any:
    forward = router.forward

    def replay(*args: Any, **kwargs: Any) -> Any:
        if model.replayed_experts is None:
            return forward(*args, **kwargs)
        experts = model.replayed_experts[:, :, layer].flatten(0, 1).long()
        with _ReplacedChoice(experts, router.num_experts) as mode:
            outputs = forward(*args, **kwargs)
        if mode.num_choices != 1:
            raise RuntimeError(
                f"router_replay: {type(router).__name__} chose its experts "
                f"{mode.num_choices} times, not once; set router_replay = false"
            )
        return outputs

    return replay
