"""What `lora_sync` means: which LoRA adapters vLLM serves, and which are sent merged.

Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from verifiers_rl.option_rules import ConfigError

# Options of PEFT's LoraConfig that change what an adapter computes.
_NOT_PLAIN = (
    *("use_dora", "lora_bias", "kasa_config", "alora_invocation_tokens"),
    *("use_qalora", "use_bdlora", "arrow_config", "monteclora_config"),
)
# Values of LoraConfig.init_lora_weights that leave the base weights as they are. Any other value,
# also one of a later PEFT, may move a part of the base weights into the adapter.
_KEEPS_BASE_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def choose_lora_sync(
    wanted: Literal["auto", "adapter", "merged"], status: dict[str, Any]
) -> Literal["adapter", "merged"]:
    """Return what is sent with LoRA to a server of this status.

    "auto" follows from how the server was started, whatever carries the weights. One with
    --enable-lora takes adapters only. One without it takes merged weights only, and they are sent
    where that loses nothing, in float32: vLLM on a CPU samples from merged weights 2.5 times as
    fast as through an adapter, which is worth more than the bytes of a push. In bfloat16 the
    merged weights would lose small changes to rounding, so there an adapter is wanted, and the
    server's refusal names the flag.
    """
    if wanted != "auto":
        return wanted
    is_exact = status["dtype"] == "float32"
    return "merged" if is_exact and status["lora_dtype"] is None else "adapter"


def check_adapter(config: Any, lora_sync: str) -> None:
    """Raise ConfigError for a PEFT config that the server could not reproduce."""
    from peft import LoraConfig

    as_dict = config.to_dict()
    if not isinstance(config, LoraConfig) or not_plain(as_dict):
        raise ConfigError(
            f"peft_config={' with '.join([type(config).__name__, *not_plain(as_dict)])}: only "
            "plain LoRA can be sent to vLLM (no DoRA, no lora_bias)"
        )
    if lora_sync == "merged" or config.modules_to_save:  # which are sent merged only
        return
    if experts := getattr(config, "target_parameters", None):
        raise ConfigError(
            f"peft_config.target_parameters={sorted(experts)}: the adapter reaches into tensors "
            "that hold the experts of a layer, and such an adapter is sent merged only; set "
            "lora_sync='merged', or leave these layers out of lora_target_modules, as its default "
            "does"
        )
    if reason := reason_against_serving(as_dict):
        raise ConfigError(f"peft_config.{reason}; set lora_sync='merged'")


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
