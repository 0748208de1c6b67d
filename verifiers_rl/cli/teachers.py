"""[[teacher]] of a TOML, and the keys of an [[env]] that learns from one.

[[teacher]] with base_url ──────────────────────────────────────────────► Teacher
[[teacher]] with gpus ──► vf-rl starts a server ──► TEACHERS_VARIABLE ──► Teacher, in vf-train

What a teacher does is of the leaf `verifiers_rl.distill`, which only a TOML that has one loads.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verifiers_rl.cli.layers import Tables, TomlError, Value, find, nearest_hint
from verifiers_rl.inference.client import TOKEN_VARIABLE

if TYPE_CHECKING:
    from verifiers_rl.cli.config import RunConfig
    from verifiers_rl.distill import Distillation, Teacher

TEACHERS_VARIABLE = "VERIFIERS_RL_TEACHERS"  # JSON: the URLs of those that vf-rl has started
# Keys of an [[env]], and the types of their values.
LEARNING: dict[str, Any] = {"algorithm": str, "teacher": str, "distill_coef": float, "hint": str}
_OPTIONS = ("base_url", "key_variable", "timeout_s", "max_concurrent")  # of `Teacher`
_UNUSED_URL = "http://127.0.0.1"  # where only the other values of a teacher are checked
# Flags of a teacher's server that have a place of their own, or none.
_ELSEWHERE = {
    "model": "set model in [[teacher]] instead",
    **dict.fromkeys(("host", "port", "api_key"), "vf-rl chooses it; remove it"),
}


@dataclass
class TeacherTable:
    """One [[teacher]], checked.

    Attributes:
        number: its place among them, from 0.
        model: resolved.
        gpus: of the server that `vf-rl` starts; 0: CPU; None: the server runs already.
        args: flags of that server.
        options: the other fields of `Teacher`, as far as they are set.
    """

    number: int
    name: str
    model: str
    gpus: int | None = None
    args: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_started(self) -> bool:
        """Whether `vf-rl` starts its server."""
        return self.gpus is not None

    @property
    def at(self) -> tuple[str, str]:
        """Where its keys are in the tree of the configuration."""
        return "teacher", str(self.number)

    def teacher(self, **others: Any) -> Teacher:
        """Make the `Teacher`; these fields replace those of the table. Without a URL in either, it
        cannot be asked.
        """
        from verifiers_rl.distill import Teacher

        options = {"base_url": _UNUSED_URL, **self.options, **others}
        return Teacher(self.model, name=self.name, **options)


def read_teachers(config: RunConfig) -> list[TeacherTable]:
    """Return the [[teacher]]s, checked. `check_use` looks for their models.

    Raises:
        TomlError: a key is unknown, or has a value that cannot work.
    """
    found = config.tree.get("teacher")
    if found is None:
        return []
    if not isinstance(found, Tables):
        raise TomlError(
            f"{config.source('teacher')}: teacher must be one or several [[teacher]], each with a "
            "name, a model, and gpus or base_url"
        )
    tables = [_read_teacher(config, number) for number in range(len(found))]
    names = [table.name for table in tables]
    for table in tables:
        if table.name in names[: table.number]:
            raise TomlError(
                f"{config.place(*table.at, 'name')}: two [[teacher]] are named {table.name!r}; "
                "give one another name"
            )
    return tables


def _read_teacher(config: RunConfig, number: int) -> TeacherTable:
    from verifiers_rl.distill import TeacherError

    at = ("teacher", str(number))
    advice = "flags of its server belong into [teacher.args]"
    config.check_keys(at, ["name", "model", *_OPTIONS, "gpus", "args"], advice)
    given = config.table(*at)
    for key in ("name", "base_url", "key_variable"):
        value = find(config.tree, (*at, key))
        if isinstance(value, Value) and value.text is not None:
            given[key] = value.text  # on the command line, strings need no quotes
    name: Any = given.get("name")
    is_started = "base_url" not in given
    # On a CPU, all servers are.
    gpus = given.get("gpus", int(bool(config.inference_gpus or config.trainer_gpus)))
    args = given.get("args", {})
    for key, holds, rule in (
        (
            "name",
            isinstance(name, str) and re.fullmatch(r"[\w.-]+", name, re.ASCII),
            "a short name of letters, digits, '_', '-' and '.', by which an [[env]] calls it",
        ),
        ("gpus", type(gpus) is int and gpus >= 0, "an integer >= 0 (0: CPU)"),
        ("args", isinstance(args, dict), "a table"),
    ):
        if not holds:
            raise TomlError(f"{config.place(*at, key)}: {key}={given.get(key)!r} must be {rule}")
    for key in given.keys() & ({"key_variable"} if is_started else {"gpus", "args"}):
        raise TomlError(
            f"{config.place(*at, key)}: {key} is of a server that "
            + (
                "runs already, and without base_url vf-rl starts it; set base_url"
                if is_started
                else "vf-rl starts, and base_url of one that runs already; remove one of the two"
            )
        )
    for key in _ELSEWHERE.keys() & args.keys():
        raise TomlError(f"{config.place(*at, 'args', key)} has {key!r}; {_ELSEWHERE[key]}")
    model = config.find_model((*at, "model"), checks_model=False)
    options = {key: given[key] for key in _OPTIONS if key in given}
    table = TeacherTable(number, name, model, gpus if is_started else None, args, options)
    try:
        table.teacher()
    except TeacherError as problem:
        raise of_key(config, at, problem, f"teacher {name!r}: ") from problem
    return table


def of_key(config: RunConfig, at: tuple[str, ...], error: Exception, prefix: str = "") -> TomlError:
    """Return the error that says where the key is from with which the message begins."""
    text = str(error).removeprefix(prefix)
    key = (re.match(r"\w+", text) or [""])[0]
    return TomlError(f"{config.place(*at, key)}: {text}")


def check_use(config: RunConfig, checks_model: bool) -> None:
    """Look at the teachers beside the environments.

    Args:
        checks_model: look whether there are their models.

    Raises:
        TomlError: what an [[env]] says about learning cannot work, no environment learns from one
            of the teachers, or there is no such model.
    """
    names = [one.name for one in config.teachers]
    for number, env in enumerate(config.envs):
        name = env.learning.get("teacher")
        if name is not None and name not in names:
            hint = nearest_hint(name, names) if names else "there is no [[teacher]]; add one"
            raise TomlError(
                f"{config.place('env', str(number), 'teacher')}: teacher={name!r} is the name of "
                f"no [[teacher]]; {hint}"
            )
    _scorers(config, lambda table: table.teacher())
    used = {env.learning.get("teacher") for env in config.envs}
    for table in config.teachers:
        if table.name not in used:
            first = "" if config.is_mix else " (write [[env]] in place of [env])"
            raise TomlError(
                f"{config.source(*table.at)}: {config.name_of(*table.at)}: no environment learns "
                f"from teacher {table.name!r}; set teacher = {json.dumps(table.name)} in an "
                f"[[env]]{first}, or remove it"
            )
        if checks_model:
            config.find_model((*table.at, "model"), checks_model)


def make_scorers(
    config: RunConfig, urls: Mapping[str, str] | None = None
) -> dict[int, Distillation]:
    """Return what scores the rollouts of environments that learn from a teacher, by their numbers.

    Args:
        urls: of the teachers that `vf-rl` starts; None: as `vf-rl` tells a process that it starts.

    Raises:
        TomlError: a value cannot work; or `vf-rl` starts a teacher, and has not started this
            process.
    """
    return _scorers(config, lambda table: _started_or_not(config, table, urls))


def _scorers(config: RunConfig, make: Callable[[TeacherTable], Teacher]) -> dict[int, Distillation]:
    learning = {number: env.learning for number, env in enumerate(config.envs) if env.learning}
    if not learning:
        return {}
    from verifiers_rl.distill import Distillation
    from verifiers_rl.envs.base import InvalidEnvironmentError

    teachers = {table.name: make(table) for table in config.teachers}
    scorers = {}
    for number, given in learning.items():
        options, at = {"algorithm": "rl", **given}, ("env", str(number))
        if "teacher" in given:
            options["teacher"] = teachers[given["teacher"]]
        try:
            scorers[number] = Distillation(**options)
        except InvalidEnvironmentError as error:
            raise of_key(config, at, error) from error
        if config.envs[number].only == "eval":
            key = next(iter(given))
            raise TomlError(
                f"{config.place(*at, key)}: {key} has no effect beside only='eval'; remove one of "
                "the two"
            )
    return scorers


def _started_or_not(
    config: RunConfig, table: TeacherTable, urls: Mapping[str, str] | None
) -> Teacher:
    if not table.is_started:
        return table.teacher()
    if urls is None:
        urls = json.loads(os.environ.get(TEACHERS_VARIABLE, "{}"))
    if table.name not in urls:
        raise TomlError(
            f"{config.source(*table.at)}: {config.name_of(*table.at)}: teacher {table.name!r} has "
            "no base_url: vf-rl starts such a teacher, and nothing else does. Start its server, "
            "and set base_url in place of gpus and args"
        )
    options: dict[str, Any] = {"base_url": urls[table.name], "key_variable": TOKEN_VARIABLE}
    if "timeout_s" not in table.options:  # it loads as the other servers do
        options["timeout_s"] = config.option("vllm_server_timeout")
    return table.teacher(**options)


def refuse_several_machines(config: RunConfig) -> None:
    """Raise TomlError if `vf-rl` would start a teacher."""
    for table in config.teachers:
        if table.is_started:
            raise TomlError(
                f"{config.place(*table.at, 'gpus')}: vf-rl starts teacher {table.name!r} in a run "
                "on one machine only. Start its server yourself, and set base_url in place of gpus "
                "and args"
            )
