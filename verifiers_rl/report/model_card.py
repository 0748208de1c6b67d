"""The README.md of a run: what was trained, on what, how, and how to serve it. It states only what
the run itself knows.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from verifiers_rl.config import RLConfig
from verifiers_rl.report.run_folder import (
    CARD,
    CARD_MARK,
    MERGED,
    METRICS,
    closing_lines,
    is_hub_name,
    is_our_card,
    serve_command,
    summary,
)

_INHERITED = (
    *("max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed"),
)
# Options that concern the machine, or that the card states elsewhere.
_LEFT_OUT = re.compile(
    "(lora|vllm|eval|weight_sync|micro)_.*|use_lora|overwrite_output_dir|env_workers|"
    "max_concurrent|max_tokens_per_microbatch|generation_timeout|log_rollouts|client_type|"
    "tools_in_process|save_final"
)


def finish_run_folder(model: Any, args: RLConfig, state: Any, env: Any = None) -> None:
    """Write the card of the final model, once that is saved, and print the closing lines of the
    run. The arguments are those of `write_model_card`.
    """
    folder = Path(args.output_dir or "")
    write_model_card(folder, model, args, state, env)
    print("\n".join(closing_lines(folder)), flush=True)


def write_model_card(
    folder: Path,
    model: Any,
    args: RLConfig,
    state: Any,
    env: Any = None,
    is_merged: bool = False,
) -> None:
    """Write README.md for the model or adapter that is saved in the folder. A README.md that
    somebody else wrote stays.

    Args:
        model: the trained model, with its adapter.
        state: the Trainer's state.
        env: the environment, as passed to `RLTrainer`.
        is_merged: the folder has the model with its adapter merged in.
    """
    path = folder / CARD
    if path.is_file() and not is_our_card(path) and not _is_empty_card(path.read_text()):
        return
    has_merged = (folder / MERGED / CARD).is_file()
    path.write_text(model_card(model, args, state, env, is_merged, has_merged))


def model_card(
    model: Any,
    args: RLConfig,
    state: Any,
    env: Any = None,
    is_merged: bool = False,
    has_merged: bool = False,
) -> str:
    adapter = _adapter_of(model)
    base = str((adapter or {}).get("base_model_name_or_path") or model.name_or_path)
    named = f"`{base}`" if base else "a model without a name"
    what = f"All weights of {named}, trained"
    if adapter is not None:
        what = f"A {_describe_adapter(adapter)} for {named}, trained"
        if is_merged:
            what = f"{named} with a {_describe_adapter(adapter)} merged in, trained"
            what, adapter = what[0].upper() + what[1:], None
    name = args.run_name or "rl"
    lines = [
        "---",
        *([f"base_model: {base}"] if is_hub_name(base) else []),
        f"library_name: {'transformers' if adapter is None else 'peft'}",
        "pipeline_tag: text-generation",
        "tags:",
        f"- {args.METHOD.replace(' ', '-')}",
        "- verifiers_rl",
        "---",
        CARD_MARK,
        f"# {name}",
        "",
        f"{what} by {args.METHOD} with verifiers_rl {version('verifiers_rl')}"
        f"{_with_version('verifiers')}.",
        "",
    ]
    steps = f"- Optimizer steps: {state.global_step}, each on {args.batch_size}"
    if args.METHOD == RLConfig.METHOD:
        lines.append(f"- Environment: {', '.join(environment_names(env)) or 'not known'}")
        lines.append(f"{steps} rollouts in groups of {args.rollouts_per_example}")
    else:
        lines.append(f"{steps} rows of the data")
    if args.load_best_model_at_end and state.best_global_step:
        lines.append(f"- Weights: those of step {state.best_global_step}, the best evaluation")
    metrics = Path(args.output_dir or "") / METRICS
    if metrics.is_file():
        lines += [f"- {line}" for line in summary(metrics).splitlines()]
    lines += ["- License: not known here; see the base model's", ""]
    if options := changed_options(args):
        lines += [
            f"Options that differ from the defaults of `{type(args).__name__}`, without what a "
            f"script may have passed to `{args.TRAINER}`, such as a `loss_fn`:",
            "",
            *("```", *(f"{option} = {value!r}" for option, value in options.items()), "```", ""),
        ]
    folder_name = Path(args.output_dir or "").resolve().name  # as in the run's closing lines
    if has_merged:
        lines += [f"The folder `{MERGED}` has the base model with this adapter merged in.", ""]
    if command := serve_command("vllm serve", ".", folder_name, adapter):
        lines += ["To serve it, in this folder:", "", "```", command, "```", ""]
    return "\n".join(lines)


def changed_options(args: RLConfig) -> dict[str, Any]:
    """Return the options of the algorithm whose value differs from the default."""
    inherited = {f.name for f in fields(TrainingArguments)}
    changed = {}
    for f in fields(args):
        if f.name in _INHERITED or (f.name not in inherited and not _LEFT_OUT.fullmatch(f.name)):
            value = getattr(args, f.name)
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            if value != default:
                changed[f.name] = getattr(value, "value", value)  # an enum's value
    return changed


def environment_names(env: Any) -> list[str]:
    """Return the id of each environment, or the name of its class if it has no id."""
    return [_environment_name(one) for one in (env if isinstance(env, list | tuple) else [env])]


def _environment_name(env: Any) -> str:
    if env is None:
        return "not known"
    if name := getattr(env, "name", None):  # a WeightedEnv
        return str(name)
    config = getattr(env, "config", None)
    of_taskset = getattr(getattr(config, "taskset", None), "id", None)
    known = (env if isinstance(env, str) else None, of_taskset, getattr(config, "id", None))
    name = next((one for one in (*known, getattr(env, "env_id", None)) if one), None)
    return str(name or type(env).__name__)


def _adapter_of(model: Any) -> dict[str, Any] | None:
    configs = getattr(model, "peft_config", None)
    return next(iter(configs.values())).to_dict() if configs else None


def _describe_adapter(adapter: dict[str, Any]) -> str:
    kind = str(getattr(adapter["peft_type"], "value", adapter["peft_type"]))
    kind = {"LORA": "LoRA"}.get(kind, kind)
    rank = f" of rank {adapter['r']}" if isinstance(adapter.get("r"), int) else ""
    modules = adapter.get("target_modules")
    names = ", ".join(sorted(modules)) if isinstance(modules, list | set | tuple) else modules
    return f"{kind} adapter{rank}" + (f" ({names})" if names else "")


def _with_version(package: str) -> str:
    try:
        return f" and {package} {version(package)}"
    except PackageNotFoundError:
        return ""


def _is_empty_card(text: str) -> bool:
    """Return whether this is the empty card that PEFT writes beside every adapter."""
    return "# Model Card for Model ID" in text
