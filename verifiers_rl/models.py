"""Loads the model that is trained, in the dtype that training needs, with its adapter.

The hub has many models as a text model with a vision tower beside it. Some of them transformers
loads as a text model alone (Qwen3.5, Llama 4), others only as the whole (Gemma 3, Qwen3-VL,
Mistral 3). Of the whole, the text is trained and sent; the rest keeps its weights.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.inference.checkpoint import NUM_EXPERTS
from verifiers_rl.process.terminal import show
from verifiers_rl.router_replay import routers_of
from verifiers_rl.sync.sources import adapter_of, base_of, check_reference, text_parameters

logger = logging.getLogger(__name__)

# Kinds of quantised checkpoints that transformers can load as plain weights.
_DEQUANTIZED = ("mxfp4", "fp8")


def absolute_path(model: Any) -> Any:
    """Return a folder as an absolute path, so that a saved adapter finds its base model from any
    directory. Return anything else unchanged.
    """
    if not isinstance(model, str):
        return model
    folder = os.path.abspath(os.path.expanduser(model))
    return folder if os.path.isdir(folder) else model


def tokenizer_of(model: Any) -> Any:
    """Return the tokenizer in a model's folder, or under its name on the hub."""
    return AutoTokenizer.from_pretrained(model if isinstance(model, str) else model.name_or_path)


def load_policy(model: Any, args: RLConfig, peft_config: Any = None) -> Any:
    """Load the policy to train, see `_load`. With `args.torch_compile`, compile its layers."""
    policy = _load(model, args, peft_config)
    for parameter in policy.parameters():
        # PEFT copies modules_to_save, and trains biases, in the dtype of the frozen weights.
        is_half = parameter.dtype in (torch.bfloat16, torch.float16)
        if parameter.requires_grad and is_half and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.float()
    base = base_of(policy)
    config = base.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        # The model would take it beside a mask of another form.
        logger.warning("output_router_logits set to False: the routers' auxiliary loss is not used")
        config.output_router_logits = False
    if args.torch_compile:
        for block in decoder_blocks(base):
            block.compile(dynamic=True)  # in place: names and types of modules stay
    return policy


def _load(model: Any, args: RLConfig, peft_config: Any) -> Any:
    """Load the policy to train.

    Full finetuning keeps float32 master weights, because bfloat16 rounds small updates away. Under
    an adapter, the frozen weights stay in bfloat16 if `args.bf16` computes in it.

    Args:
        model: a folder, a name on the hub, or a loaded model. If the model or the folder has an
            adapter, that adapter is trained further.
        args: `use_lora`, `bf16` and the options of LoRA.
        peft_config: any PEFT config in place of the LoRA that `args` describes.
    """
    if isinstance(model, str):
        dtype = torch.bfloat16 if args.use_lora and args.bf16 else torch.float32
        model = _load_folder(model, dtype)
    # `active_adapters` is a method of a transformers model that has loaded an adapter by itself.
    if hasattr(model, "peft_config") and model.active_adapters != ["default"]:
        raise ConfigError(
            "model: its active adapter must be a PeftModel's and be called 'default': load it with "
            "PeftModel.from_pretrained(base, folder, is_trainable=True), or pass its folder"
        )
    _set_attention(model, args.attn_implementation)
    switch_off_dropout(model)
    if hasattr(model, "peft_config"):
        if peft_config:
            raise ConfigError(
                "peft_config: the model has an adapter already; merge it, or leave this out"
            )
        return model
    if num_frozen := freeze_all_but_text(model):
        logger.info(f"{num_frozen / 1e6:.1f} M weights beside the text model stay as they are")
    if peft_config is None and not args.use_lora:
        if any(hasattr(p, "ds_id") for p in model.parameters()):
            return model  # loaded under ZeRO-3: DeepSpeed keeps the master weights
        if any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()):
            logger.warning("the model's weights become float32 masters for full finetuning")
        return model.float()
    from peft import LoraConfig, get_peft_model

    peft_config = peft_config or LoraConfig(
        task_type="CAUSAL_LM",
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=args.lora_target_modules or default_target_modules(model),
        modules_to_save=args.lora_modules_to_save,
        use_rslora=args.lora_use_rslora,
    )
    with warnings.catch_warnings():
        # peft asks transformers for a property by its deprecated name.
        warnings.filterwarnings(
            "ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning
        )
        return get_peft_model(model, peft_config)


def _load_folder(model: str, dtype: torch.dtype) -> Any:
    """Load a model, or a model with its adapter, from a folder or a name on the hub."""
    if not os.path.isfile(os.path.join(model, "adapter_config.json")):
        return _load_base(model, dtype)
    from peft import PeftConfig, PeftModel

    peft_config = PeftConfig.from_pretrained(model)
    base = _load_base(str(peft_config.base_model_name_or_path), dtype, peft_config.revision)
    return PeftModel.from_pretrained(base, model, is_trainable=True)


def _load_base(model: str, dtype: torch.dtype, revision: str | None = None) -> Any:
    options: dict[str, Any] = {"dtype": dtype, "revision": revision or "main"}
    config = AutoConfig.from_pretrained(model, revision=options["revision"])
    quantization = getattr(config, "quantization_config", None) or {}
    is_quantized = quantization.get("quant_method") in _DEQUANTIZED
    if is_quantized:  # load it as plain weights, which can be trained
        config.quantization_config = {**quantization, "dequantize": True}
        options["config"] = config
    loaded = auto_class(config.model_type).from_pretrained(model, **options)
    if is_quantized:
        loaded = loaded.to(dtype)
        # Else plain weights would be saved under the names of quantised ones.
        loaded._weight_conversions = None
    return loaded


def _set_attention(model: Any, implementation: str | None) -> None:
    base = base_of(model)
    before = base.config._attn_implementation
    if implementation is None or before == implementation:
        return
    try:
        base.set_attn_implementation(implementation)
    except (ImportError, ValueError, KeyError) as error:
        raise ConfigError(f"attn_implementation={implementation!r}: {error}") from error
    # Transformers may have taken one of the package `kernels` in place of flash-attn, and says so.
    if base.config._attn_implementation == before:
        raise ConfigError(
            f"attn_implementation={implementation!r}: {type(base).__name__} keeps {before!r}"
        )


def num_experts(config: Any) -> int:
    """Return how many experts a layer of the model has by its text config; 0 if it has none."""
    counts = (getattr(config, name, None) for name in NUM_EXPERTS)
    return next((n for n in counts if isinstance(n, int) and n > 0), 0)


# Linear layers by which a mixture of experts chooses and weighs its experts. A small change of
# their weights changes which experts a token gets.
_ROUTERS = ("gate", "router", "shared_expert_gate")


# PEFT refuses to adapt this layer of Mamba, whose kernels read the weight past the adapter.
_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
_REFUSED_BY_PEFT = ("out_proj",)


def decoder_blocks(model: Any) -> list[nn.Module]:
    """Return the decoder's blocks, which transformers calls layers, in their order."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    num_blocks = model.config.get_text_config().num_hidden_layers
    return [
        block
        for blocks in decoder.modules()
        if isinstance(blocks, nn.ModuleList) and len(blocks) == num_blocks
        for block in blocks
    ]


def default_target_modules(model: Any) -> list[str]:
    """Return the names of the linear layers of the decoder's blocks that PEFT can adapt, without
    head, vision tower, routers and experts. PEFT itself shortens 20 names or more: for most models
    to q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.

    Raises:
        ConfigError: the model has no such layers.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    refused = _REFUSED_BY_PEFT if model.config.model_type in _MAMBA else ()
    inside = {id(layer) for block in decoder_blocks(model) for layer in block.modules()}
    wanted = []
    for name, layer in model.named_modules():
        parts = name.split(".")
        is_left_out = parts[-1] in (*_ROUTERS, *refused) or "experts" in parts
        if isinstance(layer, nn.Linear) and id(layer) in inside and not is_left_out:
            wanted.append(name)
    if not wanted:
        raise ConfigError(
            f"lora_target_modules: {type(model).__name__} has no linear layers that are known; "
            "name its layers, or set use_lora=False"
        )
    config = LoraConfig(target_modules=wanted)
    # A layer's experts may be one tensor. PEFT takes some names for its parts in a checkpoint, and
    # would adapt the experts; this takes such names out of `target_modules`.
    convert_peft_config_for_transformers(config, model, None)
    return sorted(config.target_modules or ())


def switch_off_dropout(model: nn.Module) -> None:
    """Set dropout to 0, but that of an adapter: the server samples without it, and must sample from
    the trained policy.
    """
    switched_off = set()
    for name, module in model.named_modules():
        if "lora_dropout" in name.split("."):
            continue
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        for name, value in list(vars(module).items()):
            is_rate = "dropout" in name or (is_dropout and name == "p")
            if is_rate and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                switched_off.add(type(module).__name__)
    if switched_off:
        logger.warning(f"dropout of the model is switched off in {sorted(switched_off)}")


def _unties(model: Any) -> bool:
    """Return whether an adapter changes a weight that layers of the model share: each use of it
    would have a change of its own.
    """
    uses = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    adapted = [
        before
        for module in model.modules()
        for name in ("base_layer", "original_module")
        if (before := getattr(module, name, None)) is not None
    ]
    return any(uses[id(one)] > 1 for before in adapted for one in before.parameters())


def check_policy(
    model: Any, args: RLConfig, needs: Collection[str] = (), optimizer: Any = None
) -> None:
    """Raise ConfigError if the options do not fit the model. Print how much an adapter trains.

    Args:
        needs: what the loss needs, see `losses.needs_of`.
        optimizer: the caller's own, if there is one.
    """
    adapter = adapter_of(model)
    if args.process_index == 0 and adapter is not None:
        show(model.print_trainable_parameters)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not trained:
        raise ConfigError(
            "model: all its weights are frozen; PeftModel.from_pretrained needs is_trainable=True"
        )
    groups = getattr(optimizer, "param_groups", [])
    if groups and trained - {id(weight) for group in groups for weight in group["params"]}:
        raise ConfigError(
            "optimizers: it lacks trained weights, such as those of an adapter that is added here; "
            "make it of a model with its adapter (get_peft_model), pass optimizer_cls_and_kwargs, "
            "or freeze these weights (requires_grad = False)"
        )
    if _unties(model):
        raise ConfigError(
            "the adapter changes a weight that this model uses twice, such as for its embedding "
            "and its head, as do the server and a saved model: leave it out of "
            "lora_target_modules and lora_modules_to_save, or set use_lora=False"
        )
    if "reference_logprobs" in needs and adapter is not None:
        check_reference(adapter)
    if args.router_replay and not routers_of(model):
        raise ConfigError(
            f"router_replay=True: {type(model).__name__} has no router that chooses experts; leave "
            "it out"
        )


# --- The text inside a model ----------------------------------------------------------------------


def auto_class(model_type: str) -> Any:
    """Return the auto class of transformers that loads a checkpoint of this type for training."""
    of_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if model_type in of_images and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM  # whose error lists the types that it knows


def freeze_all_but_text(model: nn.Module) -> int:
    """Freeze the parameters beside the text model, and return how many numbers they have."""
    text = {id(parameter) for parameter in text_parameters(model).values()}
    frozen = [p for p in model.parameters() if id(p) not in text]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in frozen)
