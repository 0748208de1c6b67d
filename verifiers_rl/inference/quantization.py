"""`--quantization` of vf-vllm: whether the server can quantise the weights of a push.

Some kinds of quantisation vLLM makes of plain weights ("online"). Its reload does that again with
the weights of a push, layer by layer. Others need a checkpoint that is quantised already, and such
a server takes no full weights, only an adapter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from typing import Any

PER_TENSOR = "fp8_per_tensor"


def fit_quantization(
    args: argparse.Namespace, config: dict[str, Any], online: Collection[str], is_cpu: bool
) -> str | None:
    """Give `--quantization` the name by which this vLLM knows it, and warn of what it costs. Return
    why the server could not take the weights of a push, or None.

    Args:
        args: vLLM's parsed flags, of which `quantization` or `quantization_config` is set.
        config: of the checkpoint.
        online: kinds that this vLLM makes of plain weights.
        is_cpu: whether vLLM runs on a CPU.
    """
    asked = args.quantization
    if "quantization_config" in config:
        return None  # a server of such a checkpoint refuses full weights when a trainer connects
    shown = f"--quantization {asked}" if asked else "--quantization-config"
    if is_cpu:
        return (
            f"{shown}: vLLM's CPU build cannot quantise the weights of a push; leave it out, or "
            "use a GPU"
        )
    if asked == "fp8" and PER_TENSOR in online:
        args.quantization = PER_TENSOR  # "fp8" now means a checkpoint in FP8
    elif asked is not None and asked not in online and not args.enable_lora:
        return (
            f"{shown}: needs a checkpoint that is quantised, and such a server takes no full "
            f"weights; choose one of {', '.join(sorted(online))}, or train an adapter "
            "(--enable-lora)"
        )
    elif asked is None:
        return (
            "--quantization-config: has no effect on plain weights alone; add --quantization online"
        )
    print(
        f"vf-vllm: WARNING: {shown}: the server rounds weights that the trainer does not round. "
        "mismatch_kl says how far both policies are apart, and the importance ratio corrects for "
        "it; see docs/mismatch.md",
        file=sys.stderr,
        flush=True,
    )
    return None
