"""The tensors of a model that travel: all weights, merged weights, or the adapter alone."""

from __future__ import annotations

import re
from collections.abc import Callable
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

from verifiers_rl.option_rules import ConfigError
from verifiers_rl.sync.adapters import not_plain, reason_against_serving
from verifiers_rl.text_model import text_parameters


class Source(NamedTuple):
    """A tensor to send: shape, dtype, and the function that makes it when its bucket is packed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


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
    return Source(
        tuple(getattr(tensor, "ds_shape", tensor.shape)), tensor.dtype, partial(gather_full, tensor)
    )


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


def adapter_sources(model: Any) -> tuple[dict[str, Source], dict[str, Any]]:
    """Return a PEFT model's LoRA tensors by PEFT's names, and their config as plain values."""
    from peft import get_peft_model_state_dict

    config = model.peft_config["default"].to_dict()
    plain = {key: config[key] for key in ("r", "lora_alpha", "use_rslora", "bias")}
    targets = config["target_modules"]
    plain["target_modules"] = [targets] if isinstance(targets, str) else sorted(targets)
    # Not from model.state_dict(): ZeRO-3 can gather the parameters themselves only.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = get_peft_model_state_dict(model, state_dict=parameters)
    return {name: source_of(tensor) for name, tensor in tensors.items()}, plain


def merged_sources(model: Any) -> dict[str, Source]:
    """Return the weights of a PEFT model with its adapter merged in, under the base model's names.

    They come in the order of the base model's parameters, because vLLM holds back the parts of a
    layer until it has all of them. A wrapped layer gives W + scale * B A in float32, a tensor of
    experts the same of each expert, a module of `modules_to_save` its trained copy. The trainer's
    own tensors do not change, so nothing drifts.
    """
    from peft.tuners.lora import LoraLayer, ParamWrapper
    from peft.utils import ModulesToSaveWrapper

    base = model.get_base_model()
    changed: dict[str, Source] = {}
    for prefix, module in base.named_modules():
        if isinstance(module, ParamWrapper):
            weight = source_of(module.get_param())
            make = partial(_merged_parameter, module)
            changed[plain_name(f"{prefix}.{module.parameter_name}")] = weight._replace(make=make)
        elif isinstance(module, LoraLayer):
            weight = source_of(cast(Any, module.get_base_layer()).weight)
            changed[f"{prefix}.weight"] = weight._replace(make=partial(_merged_weight, module))
        elif isinstance(module, ModulesToSaveWrapper):
            trained = module.modules_to_save["default"]
            changed |= {f"{prefix}.{n}": source_of(p) for n, p in trained.named_parameters()}
    merged: dict[str, Source] = {}
    for name, source in full_sources(base).items():
        if ".lora_" not in name:
            name = plain_name(name)
            merged.setdefault(name, changed.get(name) or source)
    return merged


def plain_name(name: str) -> str:
    """Return the name that a parameter of a PEFT model has in the base model. PEFT may have put
    several layers of its own around it.
    """
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.default)(?=\.)", "", name)


@torch.no_grad()
def _merged_weight(module: Any) -> Tensor:
    weight = gather_full(module.get_base_layer().weight).float()
    scale = module.scaling["default"]
    if "default" in module.lora_embedding_A:
        a = gather_full(module.lora_embedding_A["default"]).float()  # (r, vocabulary)
        b = gather_full(module.lora_embedding_B["default"]).float()  # (embedding, r)
        return weight + scale * (b @ a).T
    a = gather_full(module.lora_A["default"].weight).float()  # (r, in)
    b = gather_full(module.lora_B["default"].weight).float()  # (out, r)
    return torch.addmm(weight, b, a, alpha=scale)


@torch.no_grad()
def _merged_parameter(module: Any) -> Tensor:
    """Merge what PEFT's `target_parameters` adapts: a matrix, or one for each expert."""
    weight = gather_full(module.get_param()).float()
    scale = module.scaling["default"]
    a = gather_full(module.lora_A["default"].weight).float()  # (experts * r, in)
    b = gather_full(module.lora_B["default"].weight).float()  # (out, r * experts)
    if weight.ndim == 2:
        return torch.addmm(weight, b, a, alpha=scale)
    num_experts = len(weight)
    a = a.reshape(num_experts, -1, a.shape[-1])  # (experts, r, in)
    b = b.reshape(len(b), -1, num_experts).permute(2, 0, 1)  # (experts, out, r)
    if getattr(module.get_base_layer(), "is_transposed", False):  # (experts, in, out)
        return torch.baddbmm(weight, a.transpose(1, 2), b.transpose(1, 2), alpha=scale)
    return torch.baddbmm(weight, b, a, alpha=scale)  # (experts, out, in)


def full_sources(model: nn.Module) -> dict[str, Source]:
    """Return all parameters of the text; a tied LM head comes once, as the input embedding."""
    return {name: source_of(parameter) for name, parameter in text_parameters(model).items()}


def in_checkpoint_form(model: Any, sources: dict[str, Source]) -> dict[str, Source]:
    """Return the sources under the names and in the parts of a checkpoint, as vLLM loads them.

    transformers may keep others: it has the experts of a layer in one tensor, for example.
    """
    if not isinstance(model, PreTrainedModel):
        return sources
    if isinstance(model, FSDPModule):
        # transformers looks conversions up by the model's class, and FSDP2 has replaced it. The MRO
        # has FSDP2's class, then FSDPModule, then the original class. An empty model of the
        # original class is used for the look-up.
        with torch.device("meta"):
            model = type(model).__mro__[2](deepcopy(model.config))
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

    def converted(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return revert_weight_conversion(plain, {name: tensor})

    result: dict[str, Source] = {}
    for name, source in sources.items():
        meta = torch.empty(source.shape, dtype=source.dtype, device="meta")
        parts = _Parts(partial(converted, name), source)
        for number, (part, tensor) in enumerate(converted(name, meta).items()):
            if part in result:
                raise ValueError(f"tensor {part!r} has parts in several parameters; not supported")
            make = partial(parts.make, part, is_first=number == 0)
            result[part] = source._replace(shape=tuple(tensor.shape), make=make)
    return result


class _Parts:
    """The parts of one parameter in a checkpoint. They are made in order, and the parameter is
    gathered only for the first part. So ranks that take part after a failed push stay in step.
    """

    def __init__(self, convert: Callable[[Tensor], dict[str, Tensor]], source: Source) -> None:
        self._convert, self._source = convert, source
        self._made: dict[str, Tensor] = {}

    def make(self, part: str, is_first: bool) -> Tensor:
        if is_first:
            self._made = self._convert(self._source.make())
        return self._made.pop(part)


def choose_lora_sync(
    wanted: Literal["auto", "adapter", "merged"], status: dict[str, Any]
) -> Literal["adapter", "merged"]:
    """Return what is sent with LoRA, to a server of this status. One that was started with
    --enable-lora takes adapters only.
    """
    if wanted != "auto":
        return wanted
    is_exact = status["dtype"] == "float32"
    return "merged" if is_exact and status["lora_dtype"] is None else "adapter"


def what_to_send(
    model: Any, lora_sync: Literal["adapter", "merged"]
) -> tuple[dict[str, Source], dict[str, Any]]:
    """Return the tensors that travel, and their config if they are an adapter, else {}."""
    if not hasattr(model, "peft_config"):
        return in_checkpoint_form(model, full_sources(model)), {}
    config = model.peft_config["default"]
    check_adapter(config, lora_sync)
    if lora_sync == "merged" or config.modules_to_save:
        # vLLM takes no fully trained modules inside an adapter.
        return in_checkpoint_form(model.get_base_model(), merged_sources(model)), {}
    return adapter_sources(model)
