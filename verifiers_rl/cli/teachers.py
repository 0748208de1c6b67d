"""[[teacher]] of a TOML, and the keys of an [[env]] that learns from one.

[[teacher]] with base_url ──────────────────────────────────────────────► Teacher
[[teacher]] with gpus ──► vf-rl starts a server ──► TEACHERS_VARIABLE ──► Teacher, in vf-train

What a teacher does is of the leaf `verifiers_rl.distill`, which only a TOML that has one loads.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from verifiers_rl.cli.layers import Key, TomlError, is_tables, nearest_hint, table_name
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.option_rules import NotNegativeInt, must

if TYPE_CHECKING:
    from verifiers_rl.cli.config import RunConfig
    from verifiers_rl.distill import Distillation, Teacher

TEACHERS_VARIABLE = "VERIFIERS_RL_TEACHERS"  # JSON: the URLs of those that vf-rl has started
_OPTIONS = ("base_url", "key_variable", "timeout_s", "max_concurrent")  # of `Teacher`
_UNUSED_URL = "http://127.0.0.1"  # where only the other values of a teacher are checked
# Flags of a teacher's server that have a place of their own, or none.
_ELSEWHERE = {
    "model": "set model in [[teacher]] instead",
    **dict.fromkeys(("host", "port", "api_key"), "vf-rl chooses it; remove it"),
}


_is_name = must(
    "be a short name of letters, digits, '_', '-' and '.', by which an [[env]] calls it",
    lambda value: bool(re.fullmatch(r"[\w.-]+", value, re.ASCII)),
)


@dataclass
class TeacherTable:
    """One [[teacher]].

    Attributes:
        number: its place among them, from 0.
        model: resolved.
        gpus: of the server that `vf-rl` starts; 0: CPU; None: the server runs already.
        args: flags of that server.
        base_url, key_variable, timeout_s, max_concurrent: see `Teacher`, which checks them.
    """

    NOT_KEYS: ClassVar[tuple[str, ...]] = ("number",)

    number: int
    name: Annotated[str, _is_name] = ""
    model: str = ""
    gpus: NotNegativeInt | None = None
    args: dict[str, Any] = field(default_factory=dict)
    base_url: Any = None
    key_variable: Any = None
    timeout_s: Any = None
    max_concurrent: Any = None

    @property
    def is_started(self) -> bool:
        """Whether `vf-rl` starts its server."""
        return self.gpus is not None

    @property
    def at(self) -> tuple[str, str]:
        """Where its keys are in the tree of the configuration."""
        return "teacher", str(self.number)

    def teacher(self, **others: Any) -> Teacher:
        from verifiers_rl.distill import Teacher

        given = {name: getattr(self, name) for name in _OPTIONS}
        options = {name: value for name, value in given.items() if value is not None}
        return Teacher(
            self.model, **{"name": self.name, "base_url": _UNUSED_URL, **options, **others}
        )


def read_teachers(config: RunConfig) -> list[TeacherTable]:
    """Return the [[teacher]]s, checked. `check_use` looks for their models.

    Raises:
        TomlError: a key is unknown, or has a value that cannot work.
    """
    found = config.tree.get("teacher")
    if found is None:
        return []
    if not is_tables(found):
        raise config.error(("teacher",), "write one or several [[teacher]]")
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
    table = config.read_table(at, TeacherTable, advice, number=number)
    if not table.name:
        raise config.error((*at, "name"), "is missing; set the name by which an [[env]] calls it")
    for key in config.table(*at).keys() & (
        {"gpus", "args"} if table.base_url else {"key_variable"}
    ):
        raise config.error(
            (*at, key),
            "is of a server that vf-rl starts, and base_url of one that runs already; remove one"
            if table.base_url
            else "is of a server that runs already, and without base_url vf-rl starts it; set "
            "base_url",
        )
    for key in _ELSEWHERE.keys() & table.args.keys():
        raise TomlError(f"{config.place(*at, 'args', key)} has {key!r}; {_ELSEWHERE[key]}")
    if table.gpus is None and not table.base_url:  # on a CPU, all servers are
        table.gpus = int(bool(config.inference_gpus or config.trainer_gpus))
    table.model = config.find_model((*at, "model"), checks_model=False)
    try:
        table.teacher()
    except TeacherError as problem:
        raise of_key(config, at, problem, f"teacher {table.name!r}: ") from problem
    return table


def of_key(config: RunConfig, at: Key, error: Exception, prefix: str = "") -> TomlError:
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
        if (name := env.teacher) is not None and name not in names:
            hint = nearest_hint(name, names) if names else "there is no [[teacher]]; add one"
            path = (*config.path_of_env(number), "teacher")
            raise config.error(path, f"is the name of no [[teacher]]; {hint}")
    _scorers(config, lambda table: table.teacher())
    used = {env.teacher for env in config.envs}
    for table in config.teachers:
        if table.name not in used:
            raise TomlError(
                f"{config.source(*table.at)}: {table_name(table.at)}: no environment learns "
                f"from teacher {table.name!r}; set teacher = {json.dumps(table.name)} in an "
                "[[env]], or remove it"
            )
        if checks_model:
            config.find_model((*table.at, "model"), checks_model)


def make_scorers(config: RunConfig) -> dict[int, Distillation]:
    """Return what scores the rollouts of environments that learn from a teacher, by their numbers.

    Raises:
        TomlError: a value cannot work; or `vf-rl` starts a teacher, and has not started this
            process.
    """
    return _scorers(config, lambda table: _started_or_not(config, table))


def _scorers(config: RunConfig, make: Callable[[TeacherTable], Teacher]) -> dict[int, Distillation]:
    learning = {number: env.learning for number, env in enumerate(config.envs) if env.learning}
    if not learning:
        return {}
    from verifiers_rl.distill import Distillation
    from verifiers_rl.envs.base import InvalidEnvironmentError

    teachers = {table.name: make(table) for table in config.teachers}
    scorers = {}
    for number, given in learning.items():
        options, at = {"algorithm": "rl", **given}, config.path_of_env(number)
        if "teacher" in given:
            options["teacher"] = teachers[given["teacher"]]
        try:
            scorers[number] = Distillation(**options)
        except InvalidEnvironmentError as error:
            raise of_key(config, at, error) from error
        if config.envs[number].only == "eval":
            key = next(iter(given))
            raise config.error((*at, key), "has no effect beside only='eval'; remove one of both")
    return scorers


def _started_or_not(config: RunConfig, table: TeacherTable) -> Teacher:
    if not table.is_started:
        return table.teacher()
    urls = json.loads(os.environ.get(TEACHERS_VARIABLE, "{}"))
    if table.name not in urls:
        raise TomlError(
            f"{config.source(*table.at)}: {table_name(table.at)}: teacher {table.name!r} has "
            "no base_url: vf-rl starts such a teacher, and nothing else does. Start its server, "
            "and set base_url in place of gpus and args"
        )
    options: dict[str, Any] = {"base_url": urls[table.name], "key_variable": TOKEN_VARIABLE}
    if table.timeout_s is None:  # it loads as the other servers do
        options["timeout_s"] = config.option("vllm_server_timeout")
    return table.teacher(**options)
