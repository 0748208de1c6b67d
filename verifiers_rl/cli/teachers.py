"""[[teacher]] of a TOML, and what an [[env]] says about learning from one.

[[teacher]] with base_url ──────────────────────────────────────────────► Teacher
[[teacher]] with gpus ──► vf-rl starts a server ──► TEACHERS_VARIABLE ──► Teacher, in vf-train
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from verifiers_rl.cli.layers import Tables, TomlError, Value, find, nearest_hint

if TYPE_CHECKING:
    from verifiers_rl.cli.config import EnvTable, RunConfig
    from verifiers_rl.inference.teacher import Teacher

TEACHERS_VARIABLE = "VERIFIERS_RL_TEACHERS"  # JSON: the URLs of those that vf-rl has started
KEY_VARIABLE = "VERIFIERS_RL_TEACHER_KEY"  # their API key
_UNUSED_URL = "http://127.0.0.1"  # where only the other values of a teacher are checked
# Flags of a teacher's server that have a place of their own, or none.
_ELSEWHERE = {
    "model": "set model in [[teacher]] instead",
    "host": "vf-rl chooses it; remove it",
    "port": "vf-rl chooses it; remove it",
    "api_key": "vf-rl makes one that no other user of this machine can see; remove it",
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
        from verifiers_rl.inference.teacher import Teacher

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
    tables: list[TeacherTable] = []
    for number in range(len(found)):
        tables.append(_read_teacher(config, number))
        if tables[-1].name in {table.name for table in tables[:-1]}:
            raise TomlError(
                f"{config.place(*tables[-1].at, 'name')}: two [[teacher]] are named "
                f"{tables[-1].name!r}; give one another name"
            )
    return tables


def _read_teacher(config: RunConfig, number: int) -> TeacherTable:
    from verifiers_rl.inference.teacher import Teacher, TeacherError

    at = ("teacher", str(number))
    of_teacher = [f.name for f in fields(Teacher)]
    config.check_keys(at, [*of_teacher, "gpus", "args"], "flags of its server belong into "
                      "[teacher.args]")  # fmt: skip
    given = with_texts(config, at, ("name", "base_url", "key_variable"))

    def error(key: str, problem: str) -> TomlError:
        shown = f"{key}={given[key]!r} " if key in given else ""
        return TomlError(f"{config.place(*at, key)}: {shown}{problem}")

    if "name" not in given:
        raise error("name", "name is missing; set it to what [[env]] calls it")
    name = given["name"]
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise error("name", "must be a short name of letters, digits, '_', '-' and '.'")
    gpus, args = given.get("gpus"), given.get("args", {})
    if "base_url" in given:
        for key in ("gpus", "args"):
            if key in given:
                raise error(key, "is of a server that vf-rl starts, and base_url is of one that "
                            "runs already; remove one of the two")  # fmt: skip
    elif "gpus" not in given and (config.inference_gpus or config.trainer_gpus):
        raise TomlError(
            f"{config.source(*at)}: {config.name_of(*at)}: teacher {name!r} has neither gpus nor "
            "base_url; set gpus, for a server that vf-rl starts, or base_url, of one that runs"
        )
    else:
        gpus = 0 if gpus is None else gpus
        if type(gpus) is not int or gpus < 0:
            raise error("gpus", "must be an integer >= 0 (0: CPU)")
        if "key_variable" in given:
            raise error("key_variable", "is for a teacher with base_url: vf-rl makes a key for one "
                        "that it starts; remove it")  # fmt: skip
        if not isinstance(args, dict):
            raise error("args", "must be a table")
        for key in _ELSEWHERE.keys() & args.keys():
            raise TomlError(f"{config.place(*at, 'args', key)} has {key!r}; {_ELSEWHERE[key]}")
    model = config.find_model((*at, "model"), checks_model=False)
    own = ("name", "model", "gpus", "args")
    options = {key: value for key, value in given.items() if key not in own}
    table = TeacherTable(number, name, model, gpus, args, options)
    try:
        table.teacher()
    except TeacherError as problem:
        text = str(problem).removeprefix(f"teacher {name!r}: ")
        key = (re.match(r"\w+", text) or [""])[0]
        raise TomlError(f"{config.place(*at, key)}: {text}") from problem
    return table


def with_texts(config: RunConfig, at: tuple[str, ...], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the data of a table, in which these keys are strings: on the command line, strings
    need no quotes.

    Raises:
        TomlError: one of them is no string.
    """
    given = config.table(*at)
    for key in keys:
        if key in given and not isinstance(given[key], str):
            value = find(config.tree, (*at, key))
            if not isinstance(value, Value) or value.text is None:
                place = config.place(*at, key)
                raise TomlError(f"{place}: {key}={given[key]!r} must be a string")
            given[key] = value.text
    return given


# --- The environments that learn from them --------------------------------------------------------


def learning_options(others: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of `WeightedEnv` that an [[env]] sets by their own names, and their
    defaults.

    Args:
        others: fields of `EnvTable`, which have other meanings or checks.
    """
    from verifiers_rl.envs.base import WeightedEnv

    elsewhere = ("env", "sampling_args", *others)
    return {f.name: f.default for f in fields(WeightedEnv) if f.name not in elsewhere}


def check_learning(config: RunConfig, at: tuple[str, ...], table: EnvTable) -> None:
    """Raise TomlError if what an [[env]] says about learning cannot work."""
    from verifiers_rl.envs.base import InvalidEnvironmentError, WeightedEnv

    teacher = table.learning.get("teacher")
    names = [one.name for one in config.teachers]
    if teacher is not None and teacher not in names:
        hint = nearest_hint(teacher, names) if names else "there is no [[teacher]]; add one"
        raise TomlError(
            f"{config.place(*at, 'teacher')}: teacher={teacher!r} is the name of no [[teacher]]; "
            f"{hint}"
        )
    try:
        WeightedEnv(None, table.name, only=table.only, **table.learning)
    except InvalidEnvironmentError as error:
        text = str(error).removeprefix(f"environment {table.name!r}: ")
        key = (re.match(r"\w+", text) or [""])[0]
        raise TomlError(f"{config.place(*at, key)}: {text}") from error


def gives_logprobs(config: RunConfig, table: TeacherTable) -> bool:
    """Return whether an environment learns from this teacher's logprobs, not only its answers."""
    return any(
        env.learning.get("teacher") == table.name and env.learning.get("algorithm") != "sft"
        for env in config.envs
    )


def check_use(config: RunConfig, checks_model: bool) -> None:
    """Look at the teachers beside the environments.

    Args:
        checks_model: look whether there are their models. That of a teacher which only answers, at
            a server that runs already, is a name at that server.

    Raises:
        TomlError: no environment learns from one of them, or there is no such model.
    """
    used = {table.learning.get("teacher") for table in config.envs}
    for table in config.teachers:
        if table.name not in used:
            first = "" if config.is_mix else " (write [[env]] in place of [env])"
            raise TomlError(
                f"{config.source(*table.at)}: {config.name_of(*table.at)}: no environment learns "
                f"from teacher {table.name!r}; set teacher = {json.dumps(table.name)} in an "
                f"[[env]]{first}, or remove it"
            )
        if checks_model and (table.is_started or gives_logprobs(config, table)):
            config.find_model((*table.at, "model"), checks_model)


def make_teachers(
    config: RunConfig, urls: Mapping[str, str] | None = None
) -> Mapping[str, Teacher]:
    """Return the teachers of a run by their names.

    Args:
        urls: of those that `vf-rl` starts; None: as `vf-rl` tells a process that it starts.

    Raises:
        TomlError: `vf-rl` starts one of them, and has not started this process.
    """
    if urls is None:
        urls = json.loads(os.environ.get(TEACHERS_VARIABLE, "{}"))
    teachers = {}
    for table in config.teachers:
        options: dict[str, Any] = {}
        if table.is_started:
            if table.name not in urls:
                raise TomlError(
                    f"{config.source(*table.at)}: {config.name_of(*table.at)}: teacher "
                    f"{table.name!r} has no base_url: vf-rl starts such a teacher, and nothing else"
                    " does. Start its server, and set base_url in place of gpus and args"
                )
            options = {"base_url": urls[table.name], "key_variable": KEY_VARIABLE}
            if "timeout_s" not in table.options:  # it loads as the other servers do
                options["timeout_s"] = config.option("vllm_server_timeout")
        teachers[table.name] = table.teacher(**options)
    return teachers


def refuse_several_machines(config: RunConfig) -> None:
    """Raise TomlError if `vf-rl` would start a teacher."""
    for table in config.teachers:
        if table.is_started:
            raise TomlError(
                f"{config.place(*table.at, 'gpus')}: vf-rl starts teacher {table.name!r} in a run "
                "on one machine only. Start its server yourself, and set base_url in place of gpus "
                "and args"
            )
