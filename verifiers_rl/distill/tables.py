"""[[teacher]] of a TOML, and the keys of an [[env]] that learns from one.

[[teacher]] with base_url ──────────────────────────────────────────────► Teacher
[[teacher]] with gpus ──► vf-rl starts a server ──► SERVERS_VARIABLE ──► Teacher, in vf-train
"""

from __future__ import annotations

from pydantic import Field, model_validator

from verifiers_rl.cli.config import LEARNING, Flags, RunConfig, Table, read_table, wrong
from verifiers_rl.cli.layers import Data, nearest_hint
from verifiers_rl.cli.plan import started_servers
from verifiers_rl.distill.teacher import Distillation, Teacher
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.option_rules import NotNegativeInt, PositiveInt, PositiveNumber, Url


class TeacherTable(Table):
    """One [[teacher]]: a `Teacher`, or `gpus` (0: CPU) and flags of a server that vf-rl starts."""

    name: str = Field("", pattern=r"^[\w.-]+$", validate_default=True)  # also of its log
    model: str = ""
    gpus: NotNegativeInt | None = None
    args: Flags = Field(default_factory=dict)
    base_url: Url | None = None
    key_variable: str = ""
    timeout_s: PositiveNumber | None = None
    max_concurrent: PositiveInt = 64

    @model_validator(mode="after")
    def check_together(self) -> TeacherTable:
        others = {"gpus", "args"} if self.base_url else {"key_variable"}
        for key in self.model_fields_set & others:
            raise wrong("without base_url vf-rl starts the server, with it none; remove it", key)
        return self


def complete(config: RunConfig, checks_model: bool) -> None:
    """Read the teachers, and look at them beside the environments.

    Raises:
        TomlError: a value cannot work, alone or beside the environments.
    """
    found: dict[str, TeacherTable] = {}
    for number in range(len(config.teachers)):
        at = ("teacher", str(number))
        table = read_table(config.layers, at, TeacherTable.model_validate)
        if table.gpus is None and not table.base_url:  # on a CPU, all servers are
            table.gpus = int(bool(config.inference.gpus or config.trainer.gpus))
        table.model = config.find_model((*at, "model"), table.model, checks_model)
        if found.setdefault(table.name, table) is not table:
            raise config.layers.error((*at, "name"), "is another's; give it one of its own")
    config.teachers = [*found.values()]
    make_scorers(config, are_started=False)
    for number, name in enumerate(found):
        if name not in {env.teacher for env in config.envs}:
            problem = f"no [[env]] has teacher = {name!r}; remove it"
            raise config.layers.error(("teacher", str(number)), problem)


def make_scorers(config: RunConfig, are_started: bool = True) -> dict[int, Distillation]:
    """Return what scores the rollouts of environments that learn from a teacher, by their numbers.

    Args:
        are_started: False: no server is asked; the values are checked.

    Raises:
        TomlError: a value cannot work; or `vf-rl` starts a teacher, and has not started this
            process.
    """
    started, teachers, scorers = started_servers(), dict[str, Teacher](), dict[int, Distillation]()
    for number, table in enumerate(config.teachers):
        given = table.model_dump(exclude={"name", "gpus", "args"}, exclude_none=True)
        if not table.base_url:
            own = started.get(f"teacher-{table.name}", "" if are_started else "not-started")
            if not own:
                problem = "is missing, and only vf-rl starts a teacher without it"
                raise config.layers.error(("teacher", str(number), "base_url"), problem)
            given.setdefault("timeout_s", config.option("vllm_server_timeout"))  # to load
            given |= {"base_url": f"http://{own}", "key_variable": TOKEN_VARIABLE}
        teachers[table.name] = Teacher(**given)

    def make(table: Data) -> Distillation:
        given = {"algorithm": "rl", **{key: table[key] for key in LEARNING if key in table}}
        given |= {"teacher": teachers[table["teacher"]]} if "teacher" in table else {}
        return Distillation(**given)

    for number, env in enumerate(config.envs):
        at = config.path_of_env(number)
        if env.teacher is not None and env.teacher not in [*teachers]:
            hint = nearest_hint(str(env.teacher), teachers) if teachers else "add one"
            raise config.layers.error((*at, "teacher"), f"is the name of no [[teacher]]; {hint}")
        if env.learns and env.only == "eval":
            raise config.layers.error(at, "only='eval': evaluations ask no teacher; remove one")
        if env.learns:
            scorers[number] = read_table(config.layers, at, make)
    return scorers
