"""What a push may carry: names, shapes and dtypes of the served model, known before any memory is
allocated for it.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from verifiers_rl.weight_sync import TransferPlan, full_sources, in_checkpoint_form

_ADAPTER_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_[AB]\.weight")


def expected_shapes(config: Any, kind: Literal["full", "adapter"]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters of this Hugging Face config's model, a tied LM head once:
    for "full" weights as its checkpoint has them, for an "adapter" as the model itself.

    The architecture is built on torch's meta device: no weights, no memory.

    Raises:
        ValueError: transformers does not know the architecture.
    """
    import torch
    import transformers

    name = (config.architectures or ["none"])[0]
    architecture = getattr(transformers, name, None)
    if architecture is None:
        raise ValueError(
            f"transformers has no architecture {name!r}: its weights cannot be checked"
        )
    with torch.device("meta"):
        model = architecture._from_config(config)
    sources = full_sources(model)
    if kind == "full":
        sources = in_checkpoint_form(model, sources)
    return {name: source.shape for name, source in sources.items()}


def check_plan(plan: TransferPlan, shapes: dict[str, tuple[int, ...]], dtype: str) -> None:
    """Raise ValueError, which names the tensor, unless the plan is what this model takes.

    Args:
        shapes: of `expected_shapes`, those of the plan's kind.
        dtype: of the server's weights, or of its adapters.
    """
    names = [spec.name for spec in plan.tensors]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"tensor {twice!r} comes twice")
    expected = shapes if plan.kind == "full" else _adapter_shapes(plan, shapes)
    for spec in plan.tensors:
        if spec.name not in expected:
            raise ValueError(f"the served model has no tensor {spec.name!r}: is it another model?")
        if spec.shape != expected[spec.name]:
            raise ValueError(
                f"tensor {spec.name!r} has shape {list(spec.shape)}, "
                f"the served model's has {list(expected[spec.name])}"
            )
        if spec.dtype != dtype:
            raise ValueError(f"tensor {spec.name!r} has dtype {spec.dtype!r}, not {dtype!r}")
    if missing := sorted(expected.keys() - set(names)):
        raise ValueError(f"no weights for {missing[:5]}: is it another model?")


def _adapter_shapes(
    plan: TransferPlan, shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Both matrices of every module that the plan names one of."""
    rank = plan.adapter["r"]
    expected: dict[str, tuple[int, ...]] = {}
    for spec in plan.tensors:
        match = _ADAPTER_NAME.fullmatch(spec.name)
        weight = shapes.get(f"{match['module']}.weight", ()) if match else ()
        if match is None or len(weight) != 2:
            raise ValueError(
                f"tensor {spec.name!r} belongs to no linear layer of the served model; "
                "set lora_sync='merged' if it is an embedding's"
            )
        prefix = f"base_model.model.{match['module']}"
        expected[f"{prefix}.lora_A.weight"] = (rank, weight[1])
        expected[f"{prefix}.lora_B.weight"] = (weight[0], rank)
    return expected
