"""How vLLM's running model takes new weights, where vLLM's own reload loses some of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

NamedTensor = tuple[str, torch.Tensor]


def adapter_name_mapper(model: Any) -> Any:
    """Return what renames an adapter's tensors for this vLLM model; None if nothing does.

    It must only rename: vLLM's adapter manager stacks q, k and v itself.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


def layers_without_adapter(manager: Any, tensor_names: list[str]) -> list[str]:
    """Return the layers of these tensors (PEFT's names) that vLLM's adapter manager would drop."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = adapter_name_mapper(manager.model)
    layers = {parse_fine_tuned_lora_name(name, mapper)[0] for name in tensor_names}
    packed = [part for parts in manager.packed_modules.values() for part in parts]
    return sorted(layers - set(manager.modules) - set(packed))


def repack_for_cpu(model: Any) -> None:
    """Pack the weights that vLLM's reload leaves unpacked. vLLM's CPU kernels use packed weights.

    The reload packs an LM head that has its own weights. It does not pack one that is tied to the
    embedding, which would keep giving the old logits. It packs experts at the first load only.

    Raises:
        RuntimeError: this vLLM packs experts in another way.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    has_packed = False
    for name, module in model.named_modules(remove_duplicate=False):
        quant_method = getattr(module, "quant_method", None)
        is_head = name.rpartition(".")[2] == "lm_head"
        if is_head and isinstance(quant_method, UnquantizedEmbeddingMethod):
            quant_method.process_weights_after_loading(module)
        if (kernel := getattr(quant_method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(module)
            has_packed = True
    if not has_packed and any("w13_weight" in name for name, _ in model.named_parameters()):
        raise RuntimeError(
            "on a CPU this vLLM cannot take new weights of this mixture of experts; use a GPU"
        )


def lost_in_reload(model: Any, loaded: set[str]) -> list[str]:
    """Return those of the parameters that a vLLM model says it has loaded, and that its reload has
    not taken.

    During a reload, a parameter has no memory, and its `weight_loader` collects what is loaded.
    Some models copy into the parameter instead, which then has no effect.

    Args:
        model: between `initialize_layerwise_reload` and `finalize_layerwise_reload`.
        loaded: what its `load_weights` has returned.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    modules = dict(model.named_modules())
    lost = []
    for name in loaded:
        prefix, _, own = name.rpartition(".")
        if prefix not in modules:
            continue
        parameter = getattr(modules[prefix], own, None)
        if not isinstance(parameter, torch.Tensor) or parameter.device.type != "meta":
            continue  # it has memory: the layer is complete, or its parameter stayed in place
        if own not in {given for given, _ in get_layerwise_info(modules[prefix]).loaded_weights}:
            lost.append(name)
    return sorted(lost)


def in_reloadable_form(
    model: Any, tensors: Iterable[NamedTensor], sinks: list[NamedTensor]
) -> Iterator[NamedTensor]:
    """Yield tensors of a checkpoint in the form in which vLLM's reload takes them. Of gpt-oss, the
    reload would lose experts that come together, and the attention sinks.

    Args:
        model: vLLM's; the tensors of any other model than gpt-oss stay as they are.
        sinks: gets gpt-oss's, which the model loads itself when the reload has ended.
    """
    is_gpt_oss = type(model).__name__ == "GptOssForCausalLM"
    for name, tensor in tensors:
        prefix, experts, part = name.rpartition(".mlp.experts.")
        if is_gpt_oss and name.endswith(".sinks"):
            sinks.append((name, tensor.clone()))
        elif is_gpt_oss and experts:
            for number, one in enumerate(tensor):
                yield f"{prefix}{experts}{number}.{part}", one
        else:
            yield name, tensor


def take_sinks(model: Any, dtype: torch.dtype) -> None:
    """Let attention take gpt-oss's sinks, which came behind the reload. FlashInfer keeps a copy of
    them in float32.

    Args:
        dtype: of the model.
    """
    for module in model.modules():
        attention: Any = getattr(module, "impl", None)
        if hasattr(attention, "process_weights_after_loading"):
            attention.process_weights_after_loading(dtype)
