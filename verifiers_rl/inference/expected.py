"""What a push may carry: names and shapes of the served model's tensors. They are known before any
memory is allocated for the push.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verifiers_rl.sync import full_sources, in_checkpoint_form
from verifiers_rl.sync.plan import TransferPlan

_PEFT_PREFIX = "base_model.model."


def fit_to_server(plan: TransferPlan, vllm_config: Any) -> TransferPlan:
    """Check that a server with vLLM's config takes this plan; return it with the tensors under the
    names that the served class loads.

    Raises:
        ValueError: the server does not take it; says what to change.
    """
    config, lora = vllm_config.model_config.hf_config, vllm_config.lora_config
    adapter = plan.adapter
    if adapter is not None and (lora is None or lora.max_lora_rank < adapter.r):
        raise ValueError(
            f"the trainer sends a LoRA adapter of rank {adapter.r}; start vf-vllm with "
            f"--enable-lora --max-lora-rank {adapter.r} (or more)"
        )
    if adapter is None and lora is not None:
        raise ValueError("the trainer sends full weights; start vf-vllm without --enable-lora")
    quantization = getattr(config, "quantization_config", None)
    if adapter is None and isinstance(quantization, dict):
        raise ValueError(
            "the trainer sends full weights, and the served checkpoint is quantised "
            f"({quantization.get('quant_method')}), so vLLM has no place for them; serve a "
            "checkpoint that is not quantised, or train an adapter with lora_sync='adapter'"
        )
    model = trained_model(config)
    check_plan(plan, model)
    return as_served(plan, model, config)


def as_served(plan: TransferPlan, model: Any, config: Any) -> TransferPlan:
    """Return the plan with its tensors under the names that the served class loads. If the
    checkpoint has a vision tower beside the text model, the text model's tensors carry a prefix in
    the checkpoint. transformers knows this prefix.

    Args:
        model: from `trained_model`.
        config: of the checkpoint.
    """
    prefixes = [
        conversion.reverse_transform()
        for conversion in get_model_conversion_mapping(model, add_legacy=False)[::-1]
        if type(conversion).__name__ == "PrefixChange"
    ]
    # Of the others, a text model names the attribute in which the whole model has it.
    inside = model.base_model_prefix
    attribute = "" if prefixes or not inside or hasattr(model, inside) else f"{inside}."
    if type(model).__name__ in config.architectures or not (prefixes or attribute):
        return plan

    def served(name: str) -> str:
        wrapper = _PEFT_PREFIX if plan.adapter is not None else ""
        name = name.removeprefix(wrapper)
        for prefix in prefixes:
            name, _ = prefix.rename_source_key(name)
        return f"{wrapper}{attribute}{name}"

    tensors = {served(name): shape for name, shape in plan.tensors.items()}
    return TransferPlan(**{**dict(plan), "tensors": tensors})


def trained_model(config: Any) -> Any:
    """Build what a trainer loads from a checkpoint with this Hugging Face config, on torch's meta
    device: without weights, and in no memory.

    If the checkpoint has a vision tower, this is the text model, where transformers has one: the
    rest is not trained, and the server keeps its own weights for it.

    Raises:
        ValueError: transformers does not know the architecture.
    """
    name = (config.architectures or ["none"])[0]
    architecture = getattr(transformers, name, None)
    if architecture is None:
        raise ValueError(
            f"transformers has no architecture {name!r}: its weights cannot be checked"
        )
    # vLLM has config classes of its own, which lack fields that transformers' models read.
    own = getattr(transformers, CONFIG_MAPPING_NAMES.get(config.model_type, ""), type(config))
    if not isinstance(config, own):
        config = own.from_dict(config.to_dict())
    text = getattr(
        transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, ""), architecture
    )
    if isinstance(config.get_text_config(), text.config_class):
        config = config.get_text_config()
    with torch.device("meta"):
        return text._from_config(config)


def check_plan(plan: TransferPlan, model: Any) -> None:
    """Raise ValueError, which names a tensor, unless the plan is what this model takes: all
    parameters of its text, as a checkpoint has them, or matrices for some of its linear layers.

    Args:
        model: from `trained_model`.
    """
    sources = full_sources(model)
    if plan.adapter is None:
        sources = in_checkpoint_form(model, sources)
    expected = {name: source.shape for name, source in sources.items()}
    compared, hint = {**expected, **plan.tensors}, ""
    if plan.adapter is not None:
        expected, compared = adapter_shapes(expected, plan.adapter.r), plan.tensors
        hint = " Only linear layers can have an adapter; lora_sync='merged' sends those of others."
    for name in compared:
        ours, theirs = plan.tensors.get(name), expected.get(name)
        if ours != theirs:
            raise ValueError(
                f"tensor {name!r} has shape {theirs} in the served model, {ours} at the trainer "
                f"(None: there is none). Is it another model?{hint}"
            )


def adapter_shapes(shapes: dict[str, tuple[int, ...]], rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of both LoRA matrices of each linear layer, by PEFT's names.

    Args:
        shapes: of the model's tensors.
    """
    return {
        f"{_PEFT_PREFIX}{name.removesuffix('weight')}lora_{matrix}.weight": shape
        for name, weight in shapes.items()
        if len(weight) == 2
        for matrix, shape in (("A", (rank, weight[1])), ("B", (weight[0], rank)))
    }
