"""What a push may carry: names, shapes and dtypes of the served model's tensors. They are known
before any memory is allocated for the push.
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
    dtype = lora.lora_dtype if adapter is not None else vllm_config.model_config.dtype
    model = trained_model(config)
    check_plan(plan, model, str(dtype).removeprefix("torch."))
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


def check_plan(plan: TransferPlan, model: Any, dtype: str) -> None:
    """Raise ValueError, which names the tensor, unless the plan is what this model takes: all
    parameters of its text, as a checkpoint has them, or both matrices of each adapted module.

    Args:
        model: from `trained_model`.
        dtype: of the server's weights, or of its adapters.
    """
    sources = full_sources(model)
    if plan.adapter is None:
        sources = in_checkpoint_form(model, sources)
    expected = {name: source.shape for name, source in sources.items()}
    if plan.adapter is not None:
        expected = _adapter_shapes(plan, plan.adapter.r, expected)
    if plan.dtype != dtype:
        raise ValueError(f"the tensors have dtype {plan.dtype!r}, the server's {dtype!r}")
    for name, shape in plan.tensors.items():
        if name not in expected:
            raise ValueError(f"the served model has no tensor {name!r}: is it another model?")
        if shape != expected[name]:
            raise ValueError(
                f"tensor {name!r} has shape {list(shape)}, the served model's has "
                f"{list(expected[name])}"
            )
    if missing := sorted(expected.keys() - plan.tensors.keys()):
        raise ValueError(f"no weights for {missing[:5]}: is it another model?")


def _adapter_shapes(
    plan: TransferPlan, rank: int, shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of both matrices for each module of which the plan has at least one."""
    expected: dict[str, tuple[int, ...]] = {}
    for name in plan.tensors:
        module = name.removeprefix(_PEFT_PREFIX).rpartition(".lora_")[0]
        weight = shapes.get(f"{module}.weight", ())
        if len(weight) != 2 or ".lora_embedding_" in name:
            raise ValueError(
                f"tensor {name!r} belongs to no linear layer of the served model; "
                "set lora_sync='merged' if it is an embedding's"
            )
        prefix = f"{_PEFT_PREFIX}{module}"
        expected[f"{prefix}.lora_A.weight"] = (rank, weight[1])
        expected[f"{prefix}.lora_B.weight"] = (weight[0], rank)
    return expected
