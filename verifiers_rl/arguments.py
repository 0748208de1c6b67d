"""Checks the arguments of `RLTrainer` before anything is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import Trainer

from verifiers_rl.advantages import AdvantageFn
from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.data import ExampleOrder
from verifiers_rl.did_you_mean import did_you_mean
from verifiers_rl.inference.checkpoint import model_error
from verifiers_rl.losses import LossFn
from verifiers_rl.process import parent
from verifiers_rl.report.trackers import tracker_error
from verifiers_rl.types import BatchSource, WeightSink, missing_members

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


class Replaced(NamedTuple):
    """Parts that the caller gives in place of the `RLTrainer`'s own; None keeps its own part."""

    loss_fn: LossFn | None = None
    advantage_fn: AdvantageFn | None = None
    example_order: ExampleOrder | None = None
    orchestrator: BatchSource | None = None
    weight_sync: WeightSink | None = None


def check_arguments(
    model: Any,
    env: Any,
    args: Any,
    processing_class: Any,
    replaced: Replaced,
    others: Mapping[str, Any],
) -> None:
    """Raise ConfigError for arguments that cannot work or would have no effect.

    Args:
        model, env, args, processing_class: as `RLTrainer` takes them.
        replaced: the parts that the caller gives.
        others: the arguments that go to `transformers.Trainer`.
    """
    if parent.is_rollout_worker:
        raise ConfigError(
            'an RLTrainer is made outside of `if __name__ == "__main__":`, where a rollout worker '
            "makes it again when it imports the script; move it inside, or set env_workers=0"
        )
    if not isinstance(args, RLConfig):
        raise ConfigError(f"args: expected an RLConfig, got {type(args).__name__}")
    for name in others:
        if name in _WITHOUT_EFFECT:
            raise ConfigError(f"{name} has no effect in RLTrainer: {_WITHOUT_EFFECT[name]}")
        if name not in (known := inspect.signature(Trainer.__init__).parameters):
            hint = did_you_mean(name, known, "options belong into RLConfig; see docs/from_trl.md")
            raise ConfigError(f"RLTrainer takes no argument {name!r}: {hint}")
    if isinstance(processing_class, str):
        raise ConfigError(
            f"processing_class={processing_class!r}: expected a tokenizer, such as "
            "AutoTokenizer.from_pretrained(...); leave it out for the model's own"
        )
    _check_replaced(env, replaced)
    is_path = isinstance(model, str) and model.startswith(("/", ".", "~"))
    is_path = is_path and not (Path(model).expanduser() / "adapter_config.json").is_file()
    if problem := (model_error(model) if is_path else None) or tracker_error(args.report_to):
        raise ConfigError(problem)


def _check_replaced(env: Any, replaced: Replaced) -> None:
    """Raise ConfigError if a part lacks what is called, or makes another argument useless."""
    for name in ("loss_fn", "advantage_fn", "example_order"):
        function = getattr(replaced, name)
        if function is None:
            continue
        if not callable(function):
            option = {"loss_fn": "loss", "advantage_fn": "advantage"}.get(name)
            named = f"; one that has a name is set by RLConfig({option}=...)" if option else ""
            raise ConfigError(f"{name}={function!r} is no function{named}")
    for name, protocol in (("orchestrator", BatchSource), ("weight_sync", WeightSink)):
        part = getattr(replaced, name)
        lacking = missing_members(part, protocol) if part is not None else []
        if lacking:
            raise ConfigError(
                f"{name}: {type(part).__name__} has no {', '.join(lacking)}; "
                f"types.{protocol.__name__} says what it needs"
            )
    if replaced.orchestrator is not None:
        given = (env, replaced.advantage_fn, replaced.example_order)
        names = ("env", "advantage_fn", "example_order")
        for name, part in zip(names, given, strict=True):
            if part is not None:
                raise ConfigError(
                    f"{name}: without effect beside orchestrator, which makes the batches; give it "
                    "to your orchestrator, and leave it out here"
                )
    elif env is None:
        raise ConfigError("env is None: pass an environment, or an orchestrator that has its own")
