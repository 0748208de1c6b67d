"""The model that is trained: loaded in the dtype that training needs, under its adapter."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from verifiers_rl.config import ConfigError, RLConfig

logger = logging.getLogger(__name__)


def absolute_path(model: Any) -> Any:
    """A folder as an absolute path, so that what is saved finds its base model from anywhere;
    anything else as it is.
    """
    if not isinstance(model, str):
        return model
    folder = os.path.abspath(os.path.expanduser(model))
    return folder if os.path.isdir(folder) else model


def load_policy(model: Any, args: RLConfig, peft_config: Any = None) -> Any:
    """The policy to train.

    Full finetuning keeps float32 masters: in bfloat16 a small update is rounded away. Under an
    adapter the frozen weights stay in bfloat16 where `args.bf16` computes in it.

    Args:
        model: a folder, a name on the hub, or a model that is there already; one that has an
            adapter is trained on under that adapter, a folder of one too.
        args: `use_lora`, `bf16` and the options of LoRA.
        peft_config: any PEFT config in place of the LoRA that `args` describes.
    """
    if isinstance(model, str):
        dtype = torch.bfloat16 if args.use_lora and args.bf16 else torch.float32
        if os.path.isfile(os.path.join(model, "adapter_config.json")):
            from peft import AutoPeftModelForCausalLM

            model = AutoPeftModelForCausalLM.from_pretrained(model, dtype=dtype, is_trainable=True)
        else:
            model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    if hasattr(model, "peft_config"):
        return model
    switch_off_dropout(model)
    if peft_config is None and not args.use_lora:
        if any(hasattr(p, "ds_id") for p in model.parameters()):
            return model  # loaded under ZeRO-3: DeepSpeed keeps the masters
        if any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()):
            logger.warning("the model's weights become float32 masters for full finetuning")
        return model.float()
    from peft import LoraConfig, get_peft_model

    targets: Any = args.lora_target_modules or default_target_modules(model)
    peft_config = peft_config or LoraConfig(
        task_type="CAUSAL_LM",
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        # A command line makes a list of it.
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        modules_to_save=args.lora_modules_to_save,
        use_rslora=args.lora_use_rslora,
    )
    with warnings.catch_warnings():
        # peft asks transformers for a property by its deprecated name.
        warnings.filterwarnings(
            "ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning
        )
        return get_peft_model(model, peft_config)


# Linear layers by which a mixture of experts chooses and weighs them: a small change there changes
# which experts a token gets.
_ROUTERS = ("gate", "router", "shared_expert_gate")


def linear_layers(model: Any) -> dict[str, torch.nn.Linear]:
    """The linear layers of the decoder's blocks by name: no head, no vision tower, no router and no
    expert. In a PEFT model, those inside its adapters.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    num_blocks = model.config.get_text_config().num_hidden_layers
    inside = {
        id(layer)
        for blocks in decoder.modules()
        if isinstance(blocks, torch.nn.ModuleList) and len(blocks) == num_blocks
        for layer in blocks.modules()
    }
    found = {}
    for name, layer in model.named_modules():
        name = name.removesuffix(".base_layer")
        parts = name.split(".")
        is_choice = parts[-1] in _ROUTERS or "experts" in parts or "lora_" in name
        if isinstance(layer, torch.nn.Linear) and id(layer) in inside and not is_choice:
            found[name] = layer
    return found


def default_target_modules(model: Any) -> list[str]:
    """Names for PEFT of all `linear_layers`: the shortest that mean no other module. Of most models
    that is q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.

    Raises:
        ConfigError: there are none.
    """
    wanted = linear_layers(model)
    if not wanted:
        raise ConfigError(
            f"lora_target_modules: {type(model).__name__} has no linear layers that are known; "
            "name its layers, or set use_lora=False"
        )
    others = [name for name, _ in model.named_modules() if name and name not in wanted]
    # Experts may be one tensor a layer, which PEFT takes for the layers of a checkpoint.
    has_experts = any(name.endswith(".experts") for name in others)
    names: dict[str, None] = {}
    for name in wanted:
        parts = name.split(".")
        for start in reversed(range(len(parts))):
            short = ".".join(parts[start:])
            is_of_experts = has_experts and short in ("gate_proj", "up_proj", "down_proj")
            if not is_of_experts and not any(f".{o}".endswith(f".{short}") for o in others):
                break
        names[short] = None
    return list(names)


def describe_adapter(policy: Any) -> str:
    """What share of the model an adapter changes, in one line."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    config = policy.peft_config["default"]
    if not isinstance(config, LoraConfig):
        return f"an adapter of {type(config).__name__}"
    base = policy.get_base_model()
    all_layers = linear_layers(base)
    adapted = {
        name: module.get_base_layer()
        for name, module in base.named_modules()
        if isinstance(module, LoraLayer)
    }
    inside = adapted.keys() & all_layers.keys()
    kinds = sorted({name.rpartition(".")[2] for name in adapted})
    left_out = sorted({name.rpartition(".")[2] for name in all_layers.keys() - inside})
    num_weights = sum(_num_weights(layer) for layer in all_layers.values())
    share = sum(_num_weights(all_layers[name]) for name in inside) / max(num_weights, 1)
    line = (
        f"LoRA of rank {config.r} on {len(inside)} of {len(all_layers)} linear layers of the "
        f"decoder, {share:.0%} of their weights ({', '.join(kinds)})"
    )
    if others := len(adapted) - len(inside):
        line += f", and on {others} other layers"
    if any(name.endswith(".experts") for name, _ in base.named_modules()):
        left_out.append("the experts")
    return line + (f"; without {', '.join(left_out)}" if left_out else "")


def _num_weights(layer: Any) -> int:
    return int(getattr(layer.weight, "ds_numel", layer.weight.numel()))  # ZeRO-3 leaves it empty


def switch_off_dropout(model: torch.nn.Module) -> None:
    """The policy that is trained is the one that the server samples with, which has none."""
    switched_off = set()
    for module in model.modules():
        is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd)
        for name, value in list(vars(module).items()):
            is_rate = "dropout" in name or (is_dropout and name == "p")
            if is_rate and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                switched_off.add(type(module).__name__)
    if switched_off:
        logger.warning("dropout of the model is switched off in %s", sorted(switched_off))


def check_policy(model: Any, args: RLConfig) -> None:
    """Raise ConfigError where the options do not go with what is trained; warn of what is not
    exact; say what an adapter changes.
    """
    if args.process_index == 0 and hasattr(model, "peft_config"):
        print(describe_adapter(model), flush=True)
    warn_of_changing_rope(model, args.max_seq_len)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not args.ddp_find_unused_parameters:
        return
    in_forward = {id(p) for p in model.get_input_embeddings().parameters()}  # a tied head
    if any(p.requires_grad and id(p) not in in_forward for p in head.parameters()):
        raise ConfigError(
            "ddp_find_unused_parameters=True: where the LM head is trained it must be False: the "
            "head runs outside of forward, so DDP would take it for unused"
        )


def warn_of_changing_rope(model: Any, max_seq_len: int) -> None:
    """Some models rotate all of a batch by what its longest sequence needs, once that is longer
    than they were first trained for, and vLLM by what the longest possible one needs.
    """
    config: Any = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("longrope", "dynamic"):
        return
    first = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if max_seq_len > first:
        logger.warning(
            "rope_type=%r: logprobs of sequences depend on the longest one beside them, and differ "
            "from the server's, where max_seq_len=%d is above %d; lower it for exact ones",
            rope["rope_type"],
            max_seq_len,
            first,
        )
