"""The flat layout of prime-rl's and hosted training's users, translated into ours.

Everything behind this module knows our layout only (cli/config.py). `model`, `env`, `teacher`,
`env_file`, `import_from` and `cluster` are the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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

ARGS = "trainer.args."
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
    "gradient_accumulation_steps": "1 only: a batch is one optimizer step, however it is split",
    "env_files": "another name of `env_file`",
    "loss": '"rl" only: what this trainer does',
    "difficulty_filter.enabled": "false leaves the filter out. Default true; with no bound beside "
    "it, groups of one reward are replaced (`group_filter.min_reward_variance = 1e-6`)",
    "kl_penalty.enabled": "false leaves the penalty out. Default true, if the table is there",
    "wandb": "the table also adds wandb to `report_to`",
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
}
OURS = ("inference", "trainer")
COMMON = ("model", "env", "teacher", "env_file", "import_from", "cluster")
FLAT = tuple(dict.fromkeys(key.split(".")[0] for key in (*MOVED, *MEANINGS, *REFUSED)))
EVAL_EXAMPLES = 256  # the default of the option
EVAL_STEPS = 100
SAME_REWARDS = 1e-6  # a variance below this: all rewards of the group are equal


def split(layer: Tree, source: str) -> tuple[Tree, Tree]:
    """Return the keys of a layer that are of our layout or of both, and those of the flat one.

    Raises:
        TomlError: it has keys of our layout alone and of the flat one alone.
    """
    flat = {key: inner for key, inner in layer.items() if key in FLAT}
    rest = {key: inner for key, inner in layer.items() if key not in FLAT}
    if flat and (ours := [key for key in rest if key in OURS]):
        names = [_shown(key, inner) for key, inner in flat.items()]
        raise TomlError(
            f"{source}: two layouts are mixed: {', '.join(names)} of the flat one with "
            f"{', '.join(f'[{key}]' for key in ours)} of ours; write one of them, or put them into "
            "two files"
        )
    return rest, flat


def _shown(key: str, inner: Tree | Value) -> str:
    option = f" (in ours [trainer.args] {MOVED[key]})" if key in MOVED else ""
    return f"{key}{option}" if isinstance(inner, Value) else f"[{key}]"


def translate(flat: Tree, ours: Tree) -> tuple[Tree, Tree]:
    """Return flat keys as keys of our layout, and our layout's keys beside them.

    Args:
        flat: all layers' flat keys.
        ours: all layers' other keys. Their `env` gets the environments of [[eval.env]].

    Raises:
        TomlError: a key is unknown, or cannot be honoured.
    """
    flat, made = _copied(flat), Tree()
    given: dict[str, Value] = {}  # what set an option, by our name

    def to(option: str, value: Value) -> None:
        before = given.get(option)
        if before is not None and before.value != value.value and before.layer == value.layer:
            raise TomlError(
                f"{value.place} {value.key[-1]}={value.value!r}: {'.'.join(before.key)}="
                f"{before.value!r} sets the same; remove one of the two"
            )
        if before is None or value.layer >= before.layer:
            given[option] = value
            put(made, (ARGS + option).split("."), value)

    _check_accumulation(flat)
    if (files := flat.pop("env_files", None)) is not None:
        put(made, ["env_file"], files)
    _filter(flat)
    _penalty(flat)
    ours = _evaluations(flat, ours, to)
    if (wandb := _table(flat, "wandb")) is not None:
        some = _newest(wandb, "wandb")
        to("report_to", some.implies(_with_wandb(ours), "wandb", "report_to"))
    for path, value in _leaves(flat):
        key = ".".join(path)
        refused = next((known for known in REFUSED if f"{key}.".startswith(f"{known}.")), None)
        if refused is not None:
            name = refused.split(".")[-1]
            is_key = refused == key
            place = (
                value.place
                if is_key
                else f"{value.source}: {table_name(path[: refused.count('.') + 1])}"
            )
            shown = f" {name}={value.value!r}:" if is_key else ""
            raise TomlError(f"{place}{shown} cannot be honoured: {REFUSED[refused]}")
        if key not in MOVED:
            table = ".".join(path[:-1])
            known = _keys_of(table)
            raise TomlError(
                f"{value.place} has an unknown key {path[-1]!r}; {nearest_hint(path[-1], known)}"
            )
        to(MOVED[key], value)
    return made, ours


def _keys_of(table: str) -> list[str]:
    """Return the known flat keys of a table."""
    names = [*MOVED, *MEANINGS]
    start = f"{table}." if table else ""
    return sorted({key.removeprefix(start).split(".")[0] for key in names if key.startswith(start)})


def _leaves(tree: Tree, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Value]]:
    for key, inner in tree.items():
        if isinstance(inner, Value):
            yield (*at, key), inner
        else:
            yield from _leaves(inner, (*at, key))


def _items(tables: Tables) -> list[Tree]:
    """Return copies of the items of an array of tables."""
    return [dict(item) for item in tables.values() if isinstance(item, dict)]


def _newest(table: Tree, *name: str) -> Value:
    """Return the newest value of a table, which says where the table is from. An empty table has a
    stand-in.
    """
    stand_in = Value(None, table_name(name), (*name, ""), 0)
    return max(values_in(table), key=lambda value: value.layer, default=stand_in)


def _with_wandb(ours: Tree) -> list[Any]:
    """Return the trackers of our layout, and wandb."""
    found = find(ours, (*ARGS.split(".")[:2], "report_to"))
    names = found.value if isinstance(found, Value) else []
    names = names if isinstance(names, list) else [names]
    others = [name for name in names if name != "none"]
    return others if {"all", "wandb"} & {*map(str, others)} else [*others, "wandb"]


def _copied(tree: Tree) -> Tree:
    return {
        key: _copied(inner) if isinstance(inner, dict) and not isinstance(inner, Tables) else inner
        for key, inner in tree.items()
    }


def _table(flat: Tree, name: str) -> Tree | None:
    """Return a table of the flat layout, or None.

    Raises:
        TomlError: it is no table.
    """
    table = flat.get(name)
    if table is None or (isinstance(table, dict) and not isinstance(table, Tables)):
        return table
    value = next(values_in(table))
    raise TomlError(f"{value.source}: [{name}] must be a table, not {value.value!r}")


def _switched_off(table: Tree) -> Value | None:
    """Take `enabled` out of a table, and return it if it is false.

    Raises:
        TomlError: it is neither true nor false.
    """
    enabled = table.pop("enabled", None)
    if enabled is None:
        return None
    assert isinstance(enabled, Value)
    if not isinstance(enabled.value, bool):
        raise TomlError(f"{enabled.place} enabled={enabled.value!r}: must be true or false")
    return None if enabled.value else enabled


def _neutral(off: Value, **options: Any) -> Tree:
    """Return a table that has no effect, in place of one that is switched off."""
    return {name: off.implies(value, *off.key[:-1], name) for name, value in options.items()}


def _check_accumulation(flat: Tree) -> None:
    steps, loss = flat.pop("gradient_accumulation_steps", None), flat.pop("loss", None)
    if isinstance(steps, Value) and steps.value != 1:
        times = f" * {steps.value}" if type(steps.value) is int and steps.value > 1 else ""
        raise TomlError(
            f"{steps.place} gradient_accumulation_steps={steps.value!r}: a batch is one optimizer "
            "step, which is split as memory allows; set batch_size to all rollouts of a step "
            f"(batch_size{times}), and remove it"
        )
    if isinstance(loss, Value) and loss.value != "rl":
        raise TomlError(
            f"{loss.place} loss={loss.value!r}: must be 'rl', or left out; the loss of a policy is "
            "--trainer.args.loss"
        )


def _filter(flat: Tree) -> None:
    table = _table(flat, "difficulty_filter")
    if table is None:
        return
    where = _newest(table, "difficulty_filter")
    if (off := _switched_off(table)) is not None:
        bounds = {"min_reward_variance": 0.0, "min_reward": None, "max_reward": None}
        flat["difficulty_filter"] = _neutral(off, **bounds)
    elif not table:
        name = "min_reward_variance"
        table[name] = where.default(SAME_REWARDS, "difficulty_filter", name)


def _penalty(flat: Tree) -> None:
    table = _table(flat, "kl_penalty")
    if table is None:
        return
    where = _newest(table, "kl_penalty")
    if (off := _switched_off(table)) is not None:
        flat["kl_penalty"] = _neutral(off, beta=0.0, target_kl=None)
    elif "beta" not in table:
        raise TomlError(
            f"{where.source}: [kl_penalty] lacks beta, the weight of the penalty (the first one, "
            "with target_kl); set it, such as beta = 0.01"
        )


def _evaluations(flat: Tree, ours: Tree, to: Any) -> Tree:
    """Translate what [eval] means beside its moved keys. Return our layout's keys, with those of
    its environments in `env`.
    """
    table = _table(flat, "eval")
    if table is None:
        return ours
    some = _newest(table, "eval")
    envs = table.pop("env", None)
    strategy = some.implies("steps", "eval", "eval_strategy")
    to("eval_strategy", strategy)
    given = find(ours, (*ARGS.split(".")[:2], "eval_strategy"))
    if not isinstance(given, Value) or given.value == "steps" or given.layer < strategy.layer:
        for option, default in (("interval", EVAL_STEPS), ("eval_base_model", True)):
            table.setdefault(option, some.default(default, "eval", option))
    number = table.get("num_examples")
    _check_number(number)
    if envs is None:
        return ours
    if not isinstance(envs, dict):
        raise TomlError(f"{envs.place} env={envs.value!r} must be one or several [[eval.env]]")
    own_ones = envs if isinstance(envs, Tables) else Tables({"0": envs})
    limits: list[Value] = []
    used: list[Tree] = []
    default_limit = some.default(EVAL_EXAMPLES, "eval", "num_examples")
    default_limit = number if isinstance(number, Value) else default_limit
    for env in _items(own_ones):
        first = _newest(env, "eval", "env")
        if isinstance(rollouts := env.pop("rollouts_per_example", None), Value):
            raise TomlError(
                f"{rollouts.place} rollouts_per_example={rollouts.value!r}: is the same for all "
                "environments of evaluations; set it under [eval]"
            )
        limit = env.pop("num_examples", default_limit)
        _check_number(limit)
        assert isinstance(limit, Value)
        limits.append(limit)
        only = replace(first, value="eval", text=None)
        used.append({**env, "only": only, "eval_examples": limit})
    table["num_examples"] = max(limits, key=lambda limit: limit.value)
    trained = ours.get("env", {})
    of_training: list[Tree] = []
    if isinstance(trained, Tables):
        of_training = _items(trained)
    elif isinstance(trained, dict) and trained:
        of_training = [dict(trained)]
    for env in of_training:
        env.setdefault("only", replace(_newest(env, "env"), value="train", text=None))
    both = Tables({str(i): env for i, env in enumerate([*of_training, *used])})
    return {**ours, "env": both if of_training else trained}


def _check_number(number: Tree | Value | None) -> None:
    """Raise TomlError for a number of examples that is none."""
    if number is None:
        return
    if not isinstance(number, Value):
        raise TomlError(f"{_newest(number, 'eval').source}: num_examples must be an integer >= 1")
    if type(number.value) is not int or number.value < 1:
        all_of_them = " (all of them)" if number.value == -1 else ""
        raise TomlError(
            f"{number.place} num_examples={number.value!r}{all_of_them}: must be an integer >= 1; "
            "write how many, such as 1000: fewer are used where there are fewer"
        )
