"""The checkpoint that is served: whether it is there, and the flags of vLLM that follow from it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from verifiers_rl.inference.quantization import fit_quantization
from verifiers_rl.inference.vllm_versions import online_quantizations

# Names under which transformers' configs give their number of experts.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


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
    if "vision_config" in config and hasattr(args, "language_model_only") and not wants_images:
        args.language_model_only = True
    if getattr(args, "quantization", None) or getattr(args, "quantization_config", None):
        is_cpu = not torch.cuda.is_available()
        if problem := fit_quantization(args, config, online_quantizations(), is_cpu):
            return problem
    if torch.cuda.is_available():
        return None
    if args.enable_lora and any(text.get(name) for name in NUM_EXPERTS):
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


def model_error(name: str) -> str | None:
    """Return why `name` is not a model that can be loaded, or None if it is one: a folder with a
    config.json, or a name on the hub.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        has_config = (path / "config.json").is_file()
        return None if has_config else f"model {name!r}: the folder has no config.json"
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        return f"model {name!r}: no such folder"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        hf_hub_download(name, "config.json", etag_timeout=10)
    except LocalEntryNotFoundError:
        return (
            f"model {name!r}: neither a folder here nor in the local cache, "
            "and the hub could not be reached"
        )
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        return (
            f"model {name!r}: neither a folder here nor a model on the hub ({type(error).__name__})"
        )
    return None
