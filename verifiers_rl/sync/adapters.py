"""Which LoRA adapters vLLM serves. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Options of PEFT's LoraConfig that change what an adapter computes.
_NOT_PLAIN = (
    *("use_dora", "lora_bias", "kasa_config", "alora_invocation_tokens"),
    *("use_qalora", "use_bdlora", "arrow_config", "monteclora_config"),
)
# Values of LoraConfig.init_lora_weights that leave the base weights as they are. Any other value,
# also one of a later PEFT, may move a part of the base weights into the adapter.
_KEEPS_BASE_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def not_plain(config: Mapping[str, Any]) -> list[str]:
    """Return the options that make this PEFT config something other than plain LoRA."""
    return [name for name in _NOT_PLAIN if config.get(name)]


def reason_against_serving(config: Mapping[str, Any]) -> str | None:
    """Return why vLLM, with a plain LoRA adapter of this PEFT config beside its base model, would
    compute something other than PEFT; None if both compute the same.
    """
    kind = config.get("init_lora_weights")
    if kind not in _KEEPS_BASE_WEIGHTS:
        return (
            f"init_lora_weights={kind!r} changes the base weights, and an adapter of them does not "
            "fit the server's"
        )
    for name in ("rank_pattern", "alpha_pattern"):
        if config.get(name):
            return f"{name}={config[name]!r}: vLLM has one rank and alpha for an adapter"
    bias = config.get("bias", "none")
    return None if bias == "none" else f"bias={bias!r}: vLLM takes no biases in an adapter"
