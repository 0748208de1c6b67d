"""[[teacher]] of a TOML, and the keys of an [[env]] that learns from one.

[[teacher]] with base_url ──────────────────────────────────────────────► Teacher
[[teacher]] with gpus ──► vf-rl starts a server ──► SERVERS_VARIABLE ──► Teacher, in vf-train

What a teacher does is of the leaf `verifiers_rl.distill`, which only a TOML that has one loads.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import ValidationError

from verifiers_rl.cli.layers import Key, TomlError, is_tables, nearest_hint, table_name
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.option_rules import NotNegativeInt, PositiveInt, PositiveNumber, Url, must

if TYPE_CHECKING:
    from verifiers_rl.cli.config import RunConfig
    from verifiers_rl.distill import Distillation, Teacher

# JSON: where the servers are that vf-rl has started, by the names of their plans.
SERVERS_VARIABLE = "VERIFIERS_RL_SERVERS"
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
        at: where its keys are in the tree of the configuration.
        model: resolved.
        gpus: of the server that `vf-rl` starts; 0: CPU; None: the server runs already.
        args: flags of that server.
        base_url, key_variable, timeout_s, max_concurrent: see `Teacher`.
    """

    NOT_KEYS: ClassVar[tuple[str, ...]] = ("at",)

    at: Key
    name: Annotated[str, _is_name] = ""
    model: str = ""
    gpus: NotNegativeInt | None = None
    args: dict[str, Any] = field(default_factory=dict)
    base_url: Url | None = None
    key_variable: str = ""
    timeout_s: PositiveNumber | None = None
    max_concurrent: PositiveInt = 64

    @property
    def is_started(self) -> bool:
        """Whether `vf-rl` starts its server."""
        return self.gpus is not None

    def teacher(self, own: str, timeout_s: float) -> Teacher:
        """Return it as the environments of the run know it.

        Args:
            own: host and port of the server that `vf-rl` has started.
            timeout_s: of such a server, if the TOML says nothing.
        """
        from verifiers_rl.distill import Teacher

        url, key, longest_s = self.base_url or "", self.key_variable, 300.0
        if self.is_started:
            url, key, longest_s = f"http://{own}", TOKEN_VARIABLE, timeout_s
        longest_s = self.timeout_s or longest_s
        return Teacher(self.model, url, self.name, key, longest_s, self.max_concurrent)


def started_servers() -> dict[str, str]:
    """Return host:port of each server that `vf-rl` has started for this process."""
    return dict(json.loads(os.environ.get(SERVERS_VARIABLE, "{}")))


def read_teachers(config: RunConfig) -> list[TeacherTable]:
    """Return the [[teacher]]s, checked. `check_use` looks for their models.

    Raises:
        TomlError: a key is unknown, or has a value that cannot work.
    """
    found, tables = config.tree.get("teacher", []), list[TeacherTable]()
    if found and not is_tables(found):
        raise config.error(("teacher",), "write one or several [[teacher]]")
    for number in range(len(found)):
        tables.append(table := _read_teacher(config, ("teacher", str(number))))
        if table.name in [other.name for other in tables[:-1]]:
            raise TomlError(
                f"{config.place(*table.at, 'name')}: two [[teacher]] are named {table.name!r}; "
                "give one another name"
            )
    return tables


def _read_teacher(config: RunConfig, at: Key) -> TeacherTable:
    table = config.read_table(at, TeacherTable, at=at)
    if not table.name:
        raise config.error((*at, "name"), "is missing; set the name by which an [[env]] calls it")
    others, problem = (
        {"key_variable"},
        ("is of a server that runs already, and without base_url vf-rl starts it; set base_url"),
    )
    if table.base_url:
        others, problem = (
            {"gpus", "args"},
            ("is of a server that vf-rl starts, and base_url of one that runs already; remove one"),
        )
    for key in config.table(*at).keys() & others:
        raise config.error((*at, key), problem)
    config.refuse_flags(at, _ELSEWHERE)
    if table.gpus is None and not table.base_url:  # on a CPU, all servers are
        table.gpus = int(bool(config.inference_gpus or config.trainer_gpus))
    table.model = config.find_model((*at, "model"), checks_model=False)
    return table


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
            key = (*config.path_of_env(number), "teacher")
            raise config.error(key, f"is the name of no [[teacher]]; {hint}")
    make_scorers(config, are_started=False)
    for table in config.teachers:
        if table.name not in {env.teacher for env in config.envs}:
            raise TomlError(
                f"{config.source(*table.at)}: {table_name(table.at)}: no environment learns "
                f"from teacher {table.name!r}; set teacher = {json.dumps(table.name)} in an "
                "[[env]], or remove it"
            )
        if checks_model:
            config.find_model((*table.at, "model"), checks_model)


def make_scorers(config: RunConfig, are_started: bool = True) -> dict[int, Distillation]:
    """Return what scores the rollouts of environments that learn from a teacher, by their numbers.

    Args:
        are_started: False: no server is asked; the values are checked.

    Raises:
        TomlError: a value cannot work; or `vf-rl` starts a teacher, and has not started this
            process.
    """
    learning = {number: env.learning for number, env in enumerate(config.envs) if env.learning}
    if not learning:
        return {}
    from verifiers_rl.distill import Distillation

    started, teachers, scorers = started_servers(), {}, {}
    # A teacher loads as the other servers do.
    timeout_s = config.option("vllm_server_timeout") if are_started else 300.0
    for table in config.teachers:
        own = started.get(f"teacher-{table.name}", "")
        if are_started and table.is_started and not own:
            raise TomlError(
                f"{config.source(*table.at)}: {table_name(table.at)}: teacher {table.name!r} has "
                "no base_url: vf-rl starts such a teacher, and nothing else does. Start its "
                "server, and set base_url in place of gpus and args"
            )
        teachers[table.name] = table.teacher(own, timeout_s)
    for number, given in learning.items():
        options, at = {"algorithm": "rl", **given}, config.path_of_env(number)
        if "teacher" in given:
            options["teacher"] = teachers[given["teacher"]]
        try:
            scorers[number] = Distillation(**options)
        except ValidationError as error:
            problem = error.errors()[0]["msg"].removeprefix("Value error, ")
            key = (re.match(r"\w+", problem) or [""])[0]
            raise TomlError(f"{config.place(*at, key)}: {problem}") from error
        if config.envs[number].only == "eval":
            first = (*at, next(iter(given)))
            raise config.error(first, "has no effect beside only='eval'; remove one of both")
    return scorers
