"""The hidden states behind each layer of a model, for `vf-rl --check-layers`: in vLLM's worker, and
of the trainer's model.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from torch import Tensor, nn


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the layers of a language model: its longest list of modules that is named `layers`,
    without those of a vision tower.

    Raises:
        ValueError: it has none.
    """
    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and name.rpartition(".")[2] == "layers"
        and not re.search("vision|visual|audio|mtp", name)
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no list of layers")
    return max(found, key=len)


class LayerStates:
    """Keeps what each layer returns for the last token of the next prompt of `num_tokens` tokens
    that goes through the model in one piece, without tokens in a cache.

    Args:
        model: must not be compiled, or nothing is kept.
        num_tokens: of the prompt.
    """

    def __init__(self, model: nn.Module, num_tokens: int) -> None:
        layers = decoder_layers(model)
        self._num_tokens = num_tokens
        self._states: list[list[float]] = [[] for _ in layers]
        self._hooks = [
            layer.register_forward_hook(partial(self._keep, number))
            for number, layer in enumerate(layers)
        ]

    def _keep(self, number: int, layer: nn.Module, args: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        shape = outputs[0].shape  # (tokens, hidden) in vLLM, (1, tokens, hidden) in transformers
        if self._states[number] or shape[:-1].numel() < self._num_tokens:
            return
        # vLLM's layers return their own part, and beside it the sum of those before.
        parts = [o for o in outputs if isinstance(o, Tensor) and o.shape == shape]
        rows = [part.reshape(-1, shape[-1])[self._num_tokens - 1].float() for part in parts]
        self._states[number] = sum(rows[1:], rows[0]).tolist()

    def take(self) -> list[list[float]]:
        """Return the states, (layers, hidden), and keep no more. A layer that another worker has,
        or that was not called, has none: an empty list.
        """
        for hook in self._hooks:
            hook.remove()
        return self._states
