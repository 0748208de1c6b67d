"""What `RLTrainer` is called with, looked at before anything is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Trainer

from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.foreign_names import HINTS
from verifiers_rl.inference.checkpoint import model_error
from verifiers_rl.report.trackers import tracker_error

_DATA = "data and rewards belong to env: env_from(prompts, reward, eval_dataset=...)"
_WITHOUT_EFFECT = {
    "train_dataset": _DATA,
    "eval_dataset": _DATA,
    "data_collator": _DATA,
    "compute_metrics": "an evaluation logs the metrics of the environment",
    "preprocess_logits_for_metrics": "an evaluation logs the metrics of the environment",
    "compute_loss_func": "pass loss_fn",
    "model_init": "pass model",
}
_OTHERS_NAMES = {
    "tokenizer": "here it is processing_class",
    "reward_funcs": _DATA,
    "reward_processing_classes": _DATA,
    "rollout_func": _DATA,
    "environment_factory": _DATA,
    "tools": _DATA,
}


def check_arguments(
    model: Any, args: Any, processing_class: Any, loss_fn: Any, others: Mapping[str, Any]
) -> None:
    """Raise ConfigError for what cannot work or would do nothing.

    Args:
        model, args, processing_class, loss_fn: as `RLTrainer` takes them.
        others: what goes to `transformers.Trainer`.
    """
    if not isinstance(args, RLConfig):
        raise ConfigError(f"args: expected an RLConfig, got {type(args).__name__}")
    for name in others:
        if name in _WITHOUT_EFFECT:
            raise ConfigError(f"{name} has no effect in RLTrainer: {_WITHOUT_EFFECT[name]}")
        if name not in inspect.signature(Trainer.__init__).parameters:
            hint = _OTHERS_NAMES.get(name) or HINTS.get(name) or "see RLTrainer and RLConfig"
            raise ConfigError(f"RLTrainer takes no argument {name!r}: {hint}")
    if isinstance(processing_class, str):
        raise ConfigError(
            f"processing_class={processing_class!r}: expected a tokenizer, such as "
            "AutoTokenizer.from_pretrained(...); leave it out for the model's own"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(
            f"loss_fn={loss_fn!r} is no function; a loss that has a name is RLConfig(loss=...)"
        )
    if loss_fn is not None and (args.loss, args.loss_args) != ("cispo", {}):
        raise ConfigError(
            f"loss={args.loss!r}, loss_args={args.loss_args!r}: without effect beside loss_fn; "
            "remove them, or loss_fn"
        )
    is_path = isinstance(model, str) and model.startswith(("/", ".", "~"))
    is_path = is_path and not (Path(model).expanduser() / "adapter_config.json").is_file()
    if problem := (model_error(model) if is_path else None) or tracker_error(args.report_to):
        raise ConfigError(problem)
