"""[[teacher]] of a TOML, and the keys of an [[env]] that learns from one.

[[teacher]] with base_url ──────────────────────────────────────────────► Teacher
[[teacher]] with gpus ──► vf-rl starts a server ──► SERVERS_VARIABLE ──► Teacher, in vf-train
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import Field, model_validator

from verifiers_rl.cli.config import LEARNING, RunConfig, Table, read_table, refuse_flags, wrong
from verifiers_rl.cli.layers import Data, is_tables, nearest_hint
from verifiers_rl.cli.plan import started_servers
from verifiers_rl.distill.scoring import Distillation
from verifiers_rl.distill.teacher import Teacher
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.option_rules import NotNegativeInt, PositiveInt, PositiveNumber, Url, must

# Flags of a teacher's server that have a place of their own, or none.
_ELSEWHERE = {
    "model": "set model in [[teacher]] instead",
    **dict.fromkeys(("host", "port", "api_key"), "vf-rl chooses it; remove it"),
}
_is_name = must(
    "be a short name of letters, digits, '_', '-' and '.', by which an [[env]] calls it",
    lambda value: bool(re.fullmatch(r"[\w.-]+", value, re.ASCII)),
)


class TeacherTable(Table):
    """One [[teacher]].

    Attributes:
        model: resolved.
        gpus: of the server that `vf-rl` starts; 0: CPU; None: the server runs already.
        args: flags of that server.
        base_url, key_variable, timeout_s, max_concurrent: see `Teacher`.
    """

    name: Annotated[str, _is_name] = ""
    model: str = ""
    gpus: NotNegativeInt | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    base_url: Url | None = None
    key_variable: str = ""
    timeout_s: PositiveNumber | None = None
    max_concurrent: PositiveInt = 64

    @model_validator(mode="after")
    def check_together(self) -> TeacherTable:
        if not self.name:
            raise wrong("is missing; set the name by which an [[env]] calls it", "name")
        others, problem = (
            {"key_variable"},
            "is of a server that runs already, and without base_url vf-rl starts it; set base_url",
        )
        if self.base_url:
            others, problem = (
                {"gpus", "args"},
                "is of a server that vf-rl starts, and base_url of one that runs already; remove "
                "one",
            )
        for key in self.model_fields_set & others:
            raise wrong(problem, key)
        refuse_flags(self.args, _ELSEWHERE)
        return self


def complete(config: RunConfig, checks_model: bool) -> None:
    """Read the teachers, and look at them beside the environments.

    Raises:
        TomlError: a key is unknown or has a value that cannot work, what an [[env]] says about
            learning cannot work, no environment learns from one of the teachers, or there is no
            such model.
    """
    layers, found, tables = config.layers, config.teachers, list[TeacherTable]()
    if found and not is_tables(found):
        raise layers.error(("teacher",), "write one or several [[teacher]]")
    for number in range(len(found)):
        at = ("teacher", str(number))
        table = read_table(layers, at, TeacherTable.model_validate)
        if table.gpus is None and not table.base_url:  # on a CPU, all servers are
            table.gpus = int(bool(config.inference.gpus or config.trainer.gpus))
        table.model = config.find_model((*at, "model"), table.model, checks_model)
        if table.name in [other.name for other in tables]:
            problem = f"two [[teacher]] are named {table.name!r}; give one another name"
            raise layers.error(at, problem)
        tables.append(table)
    config.teachers, names = tables, [table.name for table in tables]
    for number, env in enumerate(config.envs):
        if env.teacher is not None and env.teacher not in names:
            hint = "there is no [[teacher]]; add one"
            hint = nearest_hint(str(env.teacher), names) if names else hint
            key = (*config.path_of_env(number), "teacher")
            raise layers.error(key, f"is the name of no [[teacher]]; {hint}")
    make_scorers(config, are_started=False)
    for number, name in enumerate(names):
        if name not in {env.teacher for env in config.envs}:
            raise layers.error(
                ("teacher", str(number)),
                f"no environment learns from teacher {name!r}; set teacher = {json.dumps(name)} "
                "in an [[env]], or remove it",
            )


def make_scorers(config: RunConfig, are_started: bool = True) -> dict[int, Distillation]:
    """Return what scores the rollouts of environments that learn from a teacher, by their numbers.

    Args:
        are_started: False: no server is asked; the values are checked.

    Raises:
        TomlError: a value cannot work; or `vf-rl` starts a teacher, and has not started this
            process.
    """
    layers, started = config.layers, started_servers()
    teachers, scorers = dict[str, Teacher](), dict[int, Distillation]()
    for number, table in enumerate(config.teachers):
        given = table.model_dump(exclude={"gpus", "args"}, exclude_none=True)
        if not table.base_url and are_started:
            if not (own := started.get(f"teacher-{table.name}")):
                raise layers.error(
                    ("teacher", str(number)),
                    f"teacher {table.name!r} has no base_url: vf-rl starts such a teacher, and "
                    "nothing else does. Start its server, and set base_url in place of gpus and "
                    "args",
                )
            # It loads as the other servers do.
            given.setdefault("timeout_s", config.option("vllm_server_timeout"))
            given |= {"base_url": f"http://{own}", "key_variable": TOKEN_VARIABLE}
        teachers[table.name] = Teacher(**{"base_url": "http://not-started", **given})

    def make(table: Data) -> Distillation:
        given = {"algorithm": "rl", **{key: table[key] for key in LEARNING if key in table}}
        if "teacher" in given:
            given["teacher"] = teachers[given["teacher"]]
        return Distillation(**given)

    for number, env in enumerate(config.envs):
        if not env.learns:
            continue
        at = config.path_of_env(number)
        scorers[number] = read_table(layers, at, make)
        if env.only == "eval":
            key = next(key for key in LEARNING if key in env.model_fields_set)
            raise layers.error((*at, key), "has no effect beside only='eval'; remove one of both")
    return scorers
