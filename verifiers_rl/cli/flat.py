"""The flat layout of prime-rl's and hosted training's users, translated into ours, a file or a key
of the command line at a time. Everything behind this module knows our layout only (cli/config.py).
`model`, `env`, `teacher`, `env_file`, `import_from` and `cluster` are the same in both.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

from verifiers_rl.cli.layers import (
    COMMAND_LINE,
    Data,
    Key,
    Setting,
    TomlError,
    is_tables,
    leaves,
    nearest_hint,
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
    **{
        f"sampling.{name}": name
        for name in (
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "stop",
            "include_stop_str_in_output",
        )
    },
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
    "eval.interval": "eval_steps",
    "eval.num_examples": "eval_examples",
    "eval.rollouts_per_example": "eval_rollouts_per_example",
    "eval.eval_base_model": "eval_on_start",
    "checkpoints.interval": "save_steps",
}
# The other flat keys that are read, and what they mean.
MEANINGS = {
    "difficulty_filter.enabled": "false leaves the filter out. Default true; with no bound beside "
    "it, groups of one reward are replaced (`group_filter.min_reward_variance = 1e-6`)",
    "kl_penalty.enabled": "false leaves the penalty out. Default true, if the table is there",
    "wandb": "the table also sets `report_to` to wandb",
    "eval": "the table also sets `eval_strategy`; `interval` is 100 by default, and "
    "`eval_base_model` true",
    "eval.env": "environments for evaluations only: their `only` is `eval`, and that of the others "
    "is `train`. Without one, evaluations use those of training",
}
# What a table that is switched off sets, so that it also switches off that of an earlier file.
_NEUTRAL: dict[str, Data] = {
    "difficulty_filter": {"min_reward_variance": 0.0, "min_reward": None, "max_reward": None},
    "kl_penalty": {"beta": 0.0, "target_kl": None},
}
# What a table that is there sets, and what it sets where no file does.
_IMPLIED: dict[str, Data] = {
    "wandb": {"report_to": ["wandb"]},
    "eval": {"eval_strategy": "steps"},
}
_DEFAULTS: dict[str, Data] = {
    "eval": {"eval_steps": 100, "eval_on_start": True},
    "difficulty_filter": {"group_filter.min_reward_variance": 1e-6},
}
PRIME_RL = ("orchestrator", "model", "optim", "ckpt", "environment")  # its own tables
FLAT = tuple(dict.fromkeys(key.split(".")[0] for key in (*MOVED, *MEANINGS)))
EVAL_EXAMPLES = 256  # the default of the option


def settings_of(data: Data, source: str) -> list[Setting]:
    """Return what a file, or a key of the command line, sets.

    Raises:
        TomlError: it is for prime-rl itself, a flat key is unknown, or two keys set the same.
    """
    if names := [f"[{key}]" for key in PRIME_RL if isinstance(data.get(key), dict)]:
        raise TomlError(
            f"{source}: {', '.join(names)}: this is a file for prime-rl itself, whose tables are "
            'not read here; write model = "NAME", [[env]], [sampling] and so on, as "Two layouts" '
            "in docs/configuration.md shows"
        )
    flat = {key: inner for key, inner in data.items() if key in FLAT}
    rest = {key: inner for key, inner in data.items() if key not in FLAT}
    if isinstance(flat.get("eval"), dict) and "env" in flat["eval"]:
        _join_evaluated(rest, flat["eval"], source)
    found = {key: Setting(key, value, source, key) for key, value in leaves(rest)}
    implied = []
    for name, table in flat.items():
        if not isinstance(table, dict):
            continue
        is_on = table.pop("enabled", True) if name in _NEUTRAL else True
        if not isinstance(is_on, bool):
            one = Setting((), is_on, source, (name, "enabled"))
            raise one.error("must be true or false")
        defaults = _DEFAULTS.get(name, {}) if name == "eval" or not table else {}
        for origin, options in ((source, _IMPLIED.get(name, {})), ("", defaults)):
            for option, value in options.items():
                implied.append(Setting(at := (*ARGS, *option.split(".")), value, origin, at))
        if not is_on:
            flat[name] = _NEUTRAL[name]
    for key, value in leaves(flat):
        if value != {}:
            one = _moved(Setting(key, value, source, key))
            if (before := found.setdefault(one.key, one)).value != value:
                same = f"{'.'.join(before.written)}={before.value!r}"
                raise one.error(f"{same} sets the same; remove one of the two")
    return [*implied, *found.values()]


def _moved(one: Setting) -> Setting:
    """Return a setting of the flat layout in ours."""
    written = ".".join(one.key)
    if written in MOVED:
        return replace(one, key=(*ARGS, *MOVED[written].split(".")))
    start, key = ".".join([*one.key[:-1], ""]), one.key[-1]
    names = [name for name in (*MOVED, *MEANINGS) if name.startswith(start)]
    if any(name.startswith(f"{written}.") for name in names):
        raise one.error(f"must be a table, [{written}]")
    known = {name.removeprefix(start).split(".")[0] for name in names}
    raise one.error(f"is no key here; {nearest_hint(key, known)}")


def _join_evaluated(rest: Data, table: Data, source: str) -> None:
    """Put the [[eval.env]]s behind the environments of training, in `rest`. Each has at most
    `num_examples` of its own or of [eval], and the run's limit is the largest of these.

    Args:
        table: [eval]; loses the environments.
    """
    evaluated, trained = table.pop("env"), rest.get("env")
    if not is_tables(evaluated) or not (isinstance(trained, dict) or is_tables(trained)):
        raise TomlError(f"{source}: [eval] env: write [[eval.env]]s beside the [[env]]s of a file")
    limit = table.get("num_examples", EVAL_EXAMPLES)
    for env in evaluated:
        env["only"] = "eval"
        env.setdefault("eval_examples", env.pop("num_examples", limit))
    trained = trained if isinstance(trained, list) else [trained]
    rest["env"] = [{"only": "train", **env} for env in trained] + evaluated
    limits = [env["eval_examples"] for env in evaluated]
    if all(type(limit) is int for limit in limits):
        table["num_examples"] = max(limits)


def settings_of_word(key: Key, value: Any) -> list[Setting]:
    """Return what one key of the command line sets.

    Raises:
        TomlError: see `settings_of`.
    """
    if key[0] not in FLAT:
        return [Setting(key, value, COMMAND_LINE, key)]
    data = reduce(lambda inner, part: {part: inner}, reversed(key), value)
    return settings_of(data, COMMAND_LINE)
