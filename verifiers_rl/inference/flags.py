"""The flags of vLLM that follow from the checkpoint that is served."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from verifiers_rl.inference.checkpoint import NUM_EXPERTS


def fit_to_checkpoint(args: argparse.Namespace, argv: Sequence[str]) -> str | None:
    """Set the flags that the served checkpoint needs. Return what is wrong with a flag, or None.

    The vision tower of a checkpoint is left out: only text is trained, and the memory of the tower
    is better used for the KV cache. `--no-language-model-only` or `--limit-mm-per-prompt` keeps it.

    Args:
        args: vLLM's parsed flags, which are changed.
        argv: the command line; a flag that it names is not changed.
    """
    import torch
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(args.model, revision=args.revision)
    text = config.get("text_config") or config
    wants_images = "--no-language-model-only" in argv or args.limit_mm_per_prompt
    if "vision_config" in config and not wants_images:
        args.language_model_only = True
    is_cpu = not torch.cuda.is_available()
    has_quantization = args.quantization or args.quantization_config
    if has_quantization and (problem := fit_quantization(args, config, is_cpu)):
        return problem
    if not is_cpu:
        return None
    if args.enable_lora and has_experts(config):
        return (
            "--enable-lora: on a CPU, vLLM's engine dies of an adapter beside experts; "
            "leave it out and set the trainer's lora_sync='merged'"
        )
    if "linear_conv_kernel_dim" in text:
        if args.dtype == "auto":
            args.dtype = "bfloat16"
        elif args.dtype != "bfloat16":
            return (
                f"--dtype {args.dtype}: on a CPU, vLLM has kernels for the linear attention of "
                f"{text.get('model_type')!r} in bfloat16 only; set --dtype bfloat16"
            )
    return None


def has_experts(config: dict[str, Any]) -> bool:
    """Return whether a checkpoint with this config is of a mixture of experts."""
    text = config.get("text_config") or config
    return any(text.get(name) for name in NUM_EXPERTS)


def fit_quantization(args: argparse.Namespace, config: dict[str, Any], is_cpu: bool) -> str | None:
    """Give `--quantization` the name by which vLLM knows it, and warn of what it costs. Return why
    the server could not take the weights of a push, or None.

    Some kinds of quantisation vLLM makes of plain weights ("online"). Its reload does that again
    with the weights of a push, layer by layer. Others need a checkpoint that is quantised already,
    and such a server takes no full weights, only an adapter.
    """
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    asked = args.quantization
    if "quantization_config" in config:
        return None  # a server of such a checkpoint refuses full weights when a trainer connects
    shown = f"--quantization {asked}" if asked else "--quantization-config"
    if is_cpu:
        return (
            f"{shown}: vLLM's CPU build cannot quantise the weights of a push; leave it out, or "
            "use a GPU"
        )
    if asked is None:
        return f"{shown}: has no effect on plain weights alone; add --quantization online"
    if asked == "fp8":  # which means a checkpoint in FP8
        args.quantization = "fp8_per_tensor"
    elif asked not in ONLINE_QUANT_SHORTHAND_NAMES and not args.enable_lora:
        return (
            f"{shown}: needs a checkpoint that is quantised, and such a server takes no full "
            f"weights; choose one of {', '.join(sorted(ONLINE_QUANT_SHORTHAND_NAMES))}, or train "
            "an adapter (--enable-lora)"
        )
    if has_experts(config) and not (args.enforce_eager or args.enable_lora):
        return (
            f"{shown}: with experts, CUDA graphs would go on reading the scales that a push has "
            "replaced; add --enforce-eager, or train an adapter (--enable-lora)"
        )
    print(
        f"vf-vllm: WARNING: {shown}: the server rounds weights that the trainer does not round. "
        "mismatch_kl says how far both policies are apart, and the importance ratio corrects for "
        "it; see docs/mismatch.md",
        file=sys.stderr,
    )
    return None
