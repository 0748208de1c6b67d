"""The text model inside a checkpoint: the class of transformers that trains it, and its parameters.

The hub has many models as a text model with a vision tower beside it. Some of them transformers
loads as a text model alone (Qwen3.5, Llama 4), others only as the whole (Gemma 3, Qwen3-VL,
Mistral 3). Of the whole, the text is trained and sent; the rest keeps its weights.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)


def auto_class(model_type: str) -> Any:
    """Return the auto class of transformers that loads a checkpoint of this type for training."""
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForCausalLM
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM  # whose error lists the types that it knows


def _has_more_than_text(model: Any) -> bool:
    """Return whether the model has parts beside its text model."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or not hasattr(model, "get_decoder"):
        return False
    return config.get_text_config() is not config


def text_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the text model by name, in the model's order, each once."""
    parameters = dict(model.named_parameters())
    if not _has_more_than_text(model):
        return parameters
    any_model: Any = model
    parts = [any_model.get_decoder(), any_model.get_output_embeddings()]
    inside = {id(p) for part in parts if part is not None for p in part.parameters()}
    return {name: p for name, p in parameters.items() if id(p) in inside}


def freeze_all_but_text(model: nn.Module) -> int:
    """Freeze the parameters beside the text model, and return how many numbers they have."""
    if not _has_more_than_text(model):
        return 0
    text = {id(parameter) for parameter in text_parameters(model).values()}
    frozen = [p for p in model.parameters() if id(p) not in text]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in frozen)
