"""The tensors of a model that travel: all weights, merged weights, or the adapter alone. They are
gathered where FSDP2 or DeepSpeed ZeRO-3 has split them over ranks, and packed for a push.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from verifiers_rl.distributed import host_group
from verifiers_rl.option_rules import ConfigError
from verifiers_rl.sync.plan import AdapterConfig, TransferPlan, checksum_of


class Source(NamedTuple):
    """A tensor to send: shape, dtype, and the function that makes it when its bucket is packed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


# Options of PEFT's LoraConfig that change what an adapter computes.
_NOT_PLAIN = (
    "use_dora",
    "lora_bias",
    "kasa_config",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "monteclora_config",
    "trainable_token_indices",
    "layer_replication",
)
# Values of LoraConfig that leave the base weights as they are. Any other init_lora_weights, also
# one of a later PEFT, may move a part of the base weights into the adapter.
_KEEPS_BASE_WEIGHTS = {
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
    "bias": ("none",),
}
_CAN_BE_SERVED = {
    **_KEEPS_BASE_WEIGHTS,
    **dict.fromkeys(("target_parameters", "rank_pattern", "alpha_pattern"), ()),
}


def base_of(model: Any) -> Any:
    """Return the causal LM inside a PEFT model; any other model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def adapter_of(model: Any) -> Any:
    """Return the PEFT config of a model's adapter; None if it has none."""
    return getattr(model, "peft_config", {}).get("default")


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

    not_plain = [name for name in _NOT_PLAIN if getattr(config, name, None)]
    if not isinstance(config, LoraConfig) or not_plain:
        raise ConfigError(
            f"peft_config={' with '.join([type(config).__name__, *not_plain])}: only "
            "plain LoRA can be sent to vLLM (no DoRA, no lora_bias)"
        )
    if str(config.init_lora_weights).startswith("pissa_niter"):
        raise ConfigError(
            "peft_config.init_lora_weights='pissa_niter_...' changes the base weights at random, "
            "and a checkpoint would be loaded onto others; set 'pissa'"
        )
    if lora_sync == "merged" or config.modules_to_save:  # which are sent merged only
        return
    _check_values(
        config,
        _CAN_BE_SERVED,
        "in vLLM, an adapter has one rank and alpha, no biases, and no part in tensors that hold "
        "the experts of a layer, and the base weights are the checkpoint's; set lora_sync='merged'",
    )


def check_reference(config: Any) -> None:
    """Raise ConfigError if the model without this adapter is not the one at the start, which a KL
    penalty compares with.
    """
    _check_values(
        config,
        _KEEPS_BASE_WEIGHTS,
        "it changes the base weights, which are the reference of the loss (kl_beta, "
        "reference_logprobs); leave it out, or the penalty",
    )


def _check_values(config: Any, allowed: dict[str, tuple[Any, ...]], reason: str) -> None:
    """Raise ConfigError if a field of this config has another value than these, or an empty one."""
    for name, values in allowed.items():
        value = getattr(config, name, None)
        if value and value not in values:
            raise ConfigError(f"peft_config.{name}={value!r}: {reason}")


# --- What travels ---------------------------------------------------------------------------------


def what_to_send(
    model: Any, lora_sync: Literal["adapter", "merged"]
) -> tuple[dict[str, Source], AdapterConfig | None]:
    """Return the tensors that travel, and their config if they are an adapter."""
    if (config := adapter_of(model)) is None:
        return in_checkpoint_form(model, full_sources(model)), None
    check_adapter(config, lora_sync)
    if lora_sync == "merged" or config.modules_to_save:
        # vLLM takes no fully trained modules inside an adapter.
        return in_checkpoint_form(model.get_base_model(), merged_sources(model)), None
    return adapter_sources(model)


def text_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the text model by name, in the model's order, each once."""
    parts, any_model = [model], cast(Any, model)
    config: Any = getattr(model, "config", None)
    has_parts = hasattr(config, "get_text_config") and hasattr(model, "get_decoder")
    if has_parts and config.get_text_config() is not config:
        parts = [any_model.get_decoder(), any_model.get_output_embeddings()]
    inside = {id(p) for part in parts if part is not None for p in part.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) in inside}


def gather_full(tensor: Tensor) -> Tensor:
    """Gather a tensor that FSDP2 or DeepSpeed ZeRO-3 has split over ranks; return others unchanged.

    For a split tensor this is a collective: every rank calls it, in the same order.
    """
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor


def source_of(tensor: Any) -> Source:
    # ZeRO-3 leaves an empty tensor behind and keeps the shape beside it.
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    return Source(shape, tensor.dtype, lambda: gather_full(tensor))


def full_sources(model: nn.Module) -> dict[str, Source]:
    """Return all parameters of the text; a tied LM head comes once, as the input embedding."""
    return {name: source_of(parameter) for name, parameter in text_parameters(model).items()}


def adapter_sources(model: Any) -> tuple[dict[str, Source], AdapterConfig]:
    """Return a PEFT model's LoRA tensors by PEFT's names, and their config."""
    from peft import get_peft_model_state_dict

    config = adapter_of(model).to_dict()
    targets = config["target_modules"]
    config["target_modules"] = [targets] if isinstance(targets, str) else sorted(targets)
    # Not from model.state_dict(): ZeRO-3 can gather the parameters themselves only.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = get_peft_model_state_dict(model, state_dict=parameters, save_embedding_layers=False)
    return {name: source_of(tensor) for name, tensor in tensors.items()}, AdapterConfig(**config)


def merged_sources(model: Any) -> dict[str, Source]:
    """Return the weights of a PEFT model with its adapter merged in, under the base model's names.

    They come in the order of the base model's parameters, because vLLM holds back the parts of a
    layer until it has all of them. What LoRA adapts is merged, a module of `modules_to_save` gives
    its trained copy. The trainer's own tensors do not change, so nothing drifts.
    """
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    adapted = {
        plain_name(f"{prefix}.{getattr(module, 'parameter_name', 'weight')}"): module
        for prefix, module in base.named_modules()
        if isinstance(module, LoraLayer)
    }
    merged: dict[str, Source] = {}
    for name, source in full_sources(base).items():
        if ".lora_" in name or ".original_module." in name:  # which a trained copy replaces
            continue
        name = plain_name(name)
        if (module := adapted.get(name)) is not None:
            source = source._replace(make=partial(_merge, module, source))
        merged[name] = source
    return merged


def plain_name(name: str) -> str:
    """Return the name that a parameter of a PEFT model has in the base model. PEFT may have put
    several layers of its own around it.
    """
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.default)(?=\.)", "", name)


@torch.no_grad()
def _merge(module: Any, adapted: Source) -> Tensor:
    """Return W + scale * B A in float32, for a tensor of experts the same of each expert.

    Args:
        module: the LoRA layer.
        adapted: W.
    """
    is_embedding = "default" in module.lora_embedding_A
    if is_embedding:
        a, b = module.lora_embedding_A["default"], module.lora_embedding_B["default"]
    else:
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
    weight = adapted.make().float()
    a, b = gather_full(a).float(), gather_full(b).float()  # (r, in), (out, r)
    add: Any = torch.addmm
    is_transposed = is_embedding or getattr(module, "fan_in_fan_out", False)
    if weight.ndim == 3:
        a = a.reshape(len(weight), -1, a.shape[-1])  # (experts, r, in)
        b = b.reshape(len(b), -1, len(weight)).permute(2, 0, 1)  # (experts, out, r)
        add = torch.baddbmm
        is_transposed = getattr(module.get_base_layer(), "is_transposed", False)
    if is_transposed:  # W: (in, out)
        a, b = b.mT, a.mT
    return add(weight, b, a, alpha=module.scaling["default"])


def without_weights(model: Any) -> Any:
    """Return an empty model of this one's config, without what PEFT and FSDP2 have changed."""
    # FSDP2 gives each module a class of its own, whose third base is the original class.
    kind = type(model).__mro__[2] if isinstance(model, FSDPModule) else type(model)
    with torch.device("meta"):
        return kind(deepcopy(model.config))


def in_checkpoint_form(model: Any, sources: dict[str, Source]) -> dict[str, Source]:
    """Return the sources under the names and in the parts of a checkpoint, as vLLM loads them.

    transformers may keep others: it has the experts of a layer in one tensor, for example. Such a
    parameter is made with its first part, and only then: ranks that take part in a push that is
    begun again stay in step.
    """
    if not isinstance(model, PreTrainedModel):
        return sources
    if isinstance(model, FSDPModule):
        # transformers looks conversions up by the model's class, and FSDP2 has replaced it.
        model = without_weights(model)
    # The default conversions, not those that loading a checkpoint with other names left on the
    # model: the model that the server compares with (expected.py) has the default ones.
    conversions = [
        conversion
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if type(conversion).__name__ != "PrefixChange"  # as transformers does for a new model
    ]
    if not conversions:
        return sources
    plain: Any = SimpleNamespace(
        config=model.config, get_parameter=model.get_parameter, _weight_conversions=conversions
    )
    made: dict[str, Tensor] = {}  # parts that come next
    result: dict[str, Source] = {}

    def make(name: str, part: str) -> Tensor:
        if part not in made:  # the first one
            made.clear()
            made.update(revert_weight_conversion(plain, {name: sources[name].make()}))
        return made.pop(part)

    for name, source in sources.items():
        meta = torch.empty(source.shape, dtype=source.dtype, device="meta")
        for part, tensor in revert_weight_conversion(plain, {name: meta}).items():
            if part in result:
                raise ValueError(f"tensor {part!r} has parts in several parameters; not supported")
            result[part] = source._replace(
                shape=tuple(tensor.shape), make=partial(make, name, part)
            )
    return result


# --- Gather and pack ------------------------------------------------------------------------------


def is_split(model: nn.Module) -> bool:
    """Whether FSDP2 or ZeRO-3 keeps a part of each parameter on each rank."""
    return any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters())


_END = -1


@contextmanager
def gathering(model: nn.Module, lora_sync: Literal["adapter", "merged"]) -> Iterator[None]:
    """Enter on every rank. Inside, rank 0 may push several times, and a push may fail. If the model
    is split over ranks, the other ranks wait here until rank 0 leaves, and take part in gathering
    each tensor.
    """
    hosts = host_group()
    if hosts is None or not is_split(model):
        yield
    elif torch.distributed.get_rank() == 0:
        try:
            yield
        finally:
            hosts.broadcast_number(_END)
    else:
        sources: list[Source] = []
        with torch.no_grad():
            while (index := hosts.broadcast_number(_END)) != _END:
                # Only after rank 0 did the same: if an adapter is wrong, rank 0 says so.
                sources = sources or list(what_to_send(model, lora_sync)[0].values())
                sources[index].make()
        yield


@torch.no_grad()
def buckets_of(
    plan: TransferPlan, sources: dict[str, Source], model: nn.Module
) -> Iterator[Tensor]:
    """Make, cast and pack the tensors of a push, one bucket after the other, on rank 0 inside
    `gathering`: the other ranks hear which source is made.

    Yields:
        (num_bytes,) uint8 on the model's device, fresh memory each time.
    """
    device, index = next(model.parameters()).device, 0
    helpers = host_group() if is_split(model) else None
    for bucket in plan.buckets:
        message = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
        for name, view in bucket.views(message):
            if helpers is not None:
                helpers.broadcast_number(index)
            view.copy_(sources[name].make())
            index += 1
        message.view(torch.int64)[-1] = checksum_of(message)
        yield message
