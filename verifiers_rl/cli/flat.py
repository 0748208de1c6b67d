"""The flat layout of prime-rl's and hosted training's users, translated into ours, a file or a key
of the command line at a time. Everything behind this module knows our layout only (cli/config.py).
`model`, `env`, `teacher`, `env_file`, `import_from` and `cluster` are the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from verifiers_rl.cli.layers import (
    Tables,
    TomlError,
    Tree,
    Value,
    find,
    nearest_hint,
    put,
    table_name,
    values_in,
)

ARGS = ("trainer", "args")
# The flat key, and the option of [trainer.args] that it sets.
MOVED = {
    "name": "run_name",
    "max_steps": "max_steps",
    "batch_size": "batch_size",
    "rollouts_per_example": "rollouts_per_example",
    "learning_rate": "learning_rate",
    "warmup_steps": "warmup_steps",
    "lora_alpha": "lora_alpha",
    "oversampling_factor": "group_filter.max_oversampling",
    "max_async_level": "max_off_policy_steps",
    "max_inflight_rollouts": "max_concurrent",
    "seq_len": "max_seq_len",
    "sampling.max_tokens": "max_tokens",
    "sampling.temperature": "temperature",
    "sampling.top_p": "top_p",
    "sampling.top_k": "top_k",
    "sampling.min_p": "min_p",
    "sampling.repetition_penalty": "repetition_penalty",
    "sampling.presence_penalty": "presence_penalty",
    "sampling.frequency_penalty": "frequency_penalty",
    "sampling.stop": "stop",
    "sampling.include_stop_str_in_output": "include_stop_str_in_output",
    "sampling.enable_thinking": "chat_template_kwargs.enable_thinking",
    "sampling.reasoning_effort": "chat_template_kwargs.reasoning_effort",
    "lora.enabled": "use_lora",
    "lora.r": "lora_rank",
    "lora.rank": "lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.target_modules": "lora_target_modules",
    "difficulty_filter.min_reward_variance": "group_filter.min_reward_variance",
    "difficulty_filter.min_reward": "group_filter.min_reward",
    "difficulty_filter.max_reward": "group_filter.max_reward",
    "kl_penalty.beta": "kl_beta",
    "kl_penalty.target_kl": "kl_target",
    "wandb.project": "project",
    "wandb.name": "run_name",
    "wandb.entity": "wandb_entity",
    "eval.interval": "eval_steps",
    "eval.num_examples": "eval_examples",
    "eval.rollouts_per_example": "eval_rollouts_per_example",
    "eval.eval_base_model": "eval_on_start",
    "checkpoints.interval": "save_steps",
}
# The other flat keys that are read, and what they mean.
MEANINGS = {
    "env_files": "another name of `env_file`",
    "difficulty_filter.enabled": "false leaves the filter out. Default true; with no bound beside "
    "it, groups of one reward are replaced (`group_filter.min_reward_variance = 1e-6`)",
    "kl_penalty.enabled": "false leaves the penalty out. Default true, if the table is there",
    "wandb": "the table also sets `report_to` to wandb",
    "eval": "the table also sets `eval_strategy`; `interval` is 100 by default, and "
    "`eval_base_model` true",
    "eval.env": "environments for evaluations only: their `only` is `eval`, and that of the others "
    "is `train`. Without one, evaluations use those of training",
}
# Keys that cannot be honoured, and what to do.
REFUSED = {
    "trajectory_strategy": "turns are one sequence wherever their tokens allow it; remove it",
    "checkpoint_id": "give the folder of a model or an adapter as `model`, or resume with --resume",
    "val": "evaluations are set by [eval]; remove it",
    "buffer": "groups are filtered by [difficulty_filter]; remove it",
    "adapters": "each checkpoint and the end of a run have the adapter; remove it",
    "orchestrator": "this layout of prime-rl is not read; docs/configuration.md has both that are",
    "checkpoints.keep_cloud": "checkpoints stay on this machine; remove it, or give "
    "--trainer.args.save_total_limit",
    "sampling.seed": "rollouts of a group must differ; remove it. The order of examples follows "
    "from --trainer.args.seed",
    "sampling.n": "a group has rollouts_per_example rollouts; remove it",
    "sampling.min_tokens": "replies would be sampled from another distribution than the trainer's; "
    "remove it",
    "sampling.temp_scheduler": "the temperature is the same in all steps; set temperature",
    "sampling.extra_body": "write its keys under [sampling], and variables of the chat template "
    "into --trainer.args.chat_template_kwargs",
    "eval.env.rollouts_per_example": "it is the same for all environments; set it under [eval]",
    "gradient_accumulation_steps": "1 only: a batch is one optimizer step, split as memory allows; "
    "set batch_size to all rollouts of a step, and remove it",
    "loss": "'rl' only; the loss of a policy is --trainer.args.loss",
}
# Values of such keys that are what happens anyway.
_HARMLESS = {"gradient_accumulation_steps": 1, "loss": "rl"}
# What a table that is switched off sets, so that it also switches off that of an earlier file.
_NEUTRAL: dict[str, dict[str, Any]] = {
    "difficulty_filter": {"min_reward_variance": 0.0, "min_reward": None, "max_reward": None},
    "kl_penalty": {"beta": 0.0, "target_kl": None},
}
# What a table that is there sets, and what it sets where no file does.
_IMPLIED: dict[str, dict[str, Any]] = {
    "wandb": {"report_to": ["wandb"]},
    "eval": {"eval_strategy": "steps"},
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "eval": {"eval_steps": 100, "eval_on_start": True},
    "difficulty_filter": {"group_filter.min_reward_variance": 1e-6},
}
OURS = ("inference", "trainer")
COMMON = ("model", "env", "teacher", "env_file", "import_from", "cluster")
FLAT = tuple(dict.fromkeys(key.split(".")[0] for key in (*MOVED, *MEANINGS, *REFUSED)))
EVAL_ENV = "[[eval.env]]"  # the key of these tables until all layers are together
EVAL_EXAMPLES = 256  # the default of the option


def translate(layer: Tree, source: str, defaults: Tree) -> Tree:
    """Return a layer in our layout.

    Args:
        source: of the layer.
        defaults: gets what its tables set where no layer does.

    Raises:
        TomlError: it mixes both layouts, or a flat key is unknown or cannot be honoured.
    """
    flat = {key: inner for key, inner in layer.items() if key in FLAT}
    made = {key: inner for key, inner in layer.items() if key not in FLAT}
    if flat and (ours := [f"[{key}]" for key in made if key in OURS]):
        theirs = [key if isinstance(flat[key], Value) else f"[{key}]" for key in flat]
        raise TomlError(
            f"{source}: two layouts are mixed: {', '.join(theirs)} of the flat one with "
            f"{', '.join(ours)} of ours; write one of them, or put them into two files"
        )
    if (files := flat.pop("env_files", None)) is not None:
        made["env_file"] = files
    if isinstance(evaluation := flat.get("eval"), dict) and "env" in evaluation:
        envs = evaluation["env"]
        items = envs if isinstance(envs, dict) else {"0": envs}
        named = {number: _with_our_names(env) for number, env in items.items()}
        made[EVAL_ENV] = Tables(named) if isinstance(envs, Tables) else named
        flat["eval"] = {key: evaluation[key] for key in evaluation if key != "env"}
    for name, table in flat.items():
        first = next(values_in(table), Value(None, source, (name,)))
        for option, value in _IMPLIED.get(name, {}).items():
            put(made, (*ARGS, option), first.implies(value, name, option))
        is_open = name == "eval" or (isinstance(table, dict) and not table.keys() - {"enabled"})
        for option, value in _DEFAULTS.get(name, {}).items() if is_open else ():
            path = (*ARGS, *option.split("."))
            put(defaults, path, first.implies(value, name, path[-1]))
        if name in _NEUTRAL and isinstance(table, dict):
            flat[name] = _unless_off(name, table)
    for path, value in _leaves(flat):
        key = ".".join(path)
        _check_refused(path, value)
        if key in MOVED:
            at = (*ARGS, *MOVED[key].split("."))
            before = find(made, at)
            if isinstance(before, Value) and before.value != value.value:
                raise TomlError(
                    f"{value.place} {path[-1]}={value.value!r}: {'.'.join(before.key)}="
                    f"{before.value!r} sets the same; remove one of the two"
                )
            put(made, at, value)
        elif key not in _HARMLESS:
            start = ".".join([*path[:-1], ""])
            names = (name for name in (*MOVED, *MEANINGS) if name.startswith(start))
            known = {name.removeprefix(start).split(".")[0] for name in names}
            raise TomlError(
                f"{value.place} has an unknown key {path[-1]!r}; {nearest_hint(path[-1], known)}"
            )
    return made


def _leaves(tree: Tree, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Value]]:
    for key, inner in tree.items():
        if isinstance(inner, Value):
            yield (*at, key), inner
        else:
            yield from _leaves(inner, (*at, key))


def _check_refused(path: tuple[str, ...], value: Value) -> None:
    """Raise TomlError for a key that cannot be honoured, or one in such a table."""
    for end in range(1, len(path) + 1):
        key = ".".join(path[:end])
        if key in REFUSED and (key not in _HARMLESS or value.value != _HARMLESS[key]):
            place = f"{value.source}: {table_name(path[:end])}"
            if end == len(path):
                place = f"{value.place} {path[-1]}={value.value!r}:"
            raise TomlError(f"{place} cannot be honoured: {REFUSED[key]}")


def _unless_off(name: str, table: Tree) -> Tree:
    """Return a table without `enabled`; if that is false, values that have no effect."""
    enabled = table.get("enabled")
    if not isinstance(enabled, Value):
        return table
    if not isinstance(enabled.value, bool):
        raise TomlError(f"{enabled.place} enabled={enabled.value!r}: must be true or false")
    if enabled.value:
        return {key: inner for key, inner in table.items() if key != "enabled"}
    return {key: enabled.implies(value, name, key) for key, value in _NEUTRAL[name].items()}


def _with_our_names(env: Any) -> Any:
    """Return one [[eval.env]] with our names of its keys."""
    if not isinstance(env, dict):
        raise TomlError(
            f"{env.place} {env.key[-1]}={env.value!r}: write one or several [[eval.env]]"
        )
    if "rollouts_per_example" in env:
        _check_refused(("eval", "env", "rollouts_per_example"), env["rollouts_per_example"])
    return {("eval_examples" if key == "num_examples" else key): env[key] for key in env}


def join_evaluations(tree: Tree) -> None:
    """Put the [[eval.env]]s of all layers behind the environments of training. Each has at most
    `num_examples` of its own or of [eval], and the run's limit is the largest of these.
    """
    evaluated, trained = tree.pop(EVAL_ENV, None), tree.get("env")
    if not isinstance(evaluated, dict) or not isinstance(trained, dict):
        return
    first, at = next(values_in(evaluated)), (*ARGS, "eval_examples")
    limit = find(tree, at) or first.implies(EVAL_EXAMPLES, "eval", "num_examples")
    envs: list[Any] = [*trained.values()] if isinstance(trained, Tables) else [trained]
    for env in envs:
        env.setdefault("only", first.implies("train"))
    limits = []
    for own in cast(list[Tree], [*evaluated.values()]):
        own["only"] = first.implies("eval")
        limits.append(cast(Value, own.setdefault("eval_examples", limit)))
        envs.append(own)
    tree["env"] = Tables({str(number): env for number, env in enumerate(envs)})
    if all(isinstance(one.value, int) for one in limits):
        put(tree, at, max(limits, key=lambda one: one.value))
