"""The configuration that `vf-rl` and `vf-train` read: one TOML, or several that are composed.

model = "Qwen/Qwen3-0.6B"        # a name on the hub or a folder;
                                 # ./ and ../ are relative to this file
env_file = "secrets.env"         # NAME=VALUE lines for environments, or a list of such files
import_from = ["../shared"]      # more folders with modules; this file's own is one

[env.taskset]                    # of verifiers.v1; [env] has the keys of its EnvConfig
id = "reverse_text"              # installed, or a module beside this file; or owner/name
[env.harness]                    # of its only agent; short for [env.agent.harness]
id = "null"
[env.eval_taskset]               # what differs in the taskset of evaluations

[env]                            # or by its id alone
id = "reverse_text"              # a taskset, or a classic environment in another Python
python = "venv/bin/python"       # the Python of its rollout workers; relative to this file
[env.args]                       # keys of the taskset, or arguments of its load_environment

                                 # or several: [[env]], each one of these and also
                                 # name = "..."  prefix of its metrics, by default its id
                                 # weight = 1    its share of the groups
                                 # sampling = {max_tokens = 64}  in place of [trainer.args]'s
                                 # only = "eval"  for evaluations only, or "train"
                                 # eval_examples = 50  at most so many in an evaluation
                                 # algorithm = "opd"  how it learns: docs/distillation.md
                                 # teacher = "big"  name of the [[teacher]] that it learns from
                                 # distill_coef = 0.5  weight of the teacher
                                 # hint = "It is {answer}."  what the teacher of "opsd" knows

[[teacher]]                      # a model that environments learn from
name = "big"                     # of letters, digits, "_", "-" and "."
model = "Qwen/Qwen3-8B"          # with the tokenizer of the model above
gpus = 1                         # vf-rl starts its server on GPUs of its own; 0: CPU
                                 # base_url = "http://10.0.0.2:8000"  of a server that runs already,
                                 # in place of gpus
                                 # key_variable = "BIG_KEY"  environment variable with its API key
                                 # timeout_s = 300  the longest wait for an answer, in seconds
                                 # max_concurrent = 64  requests of one environment at a time
[teacher.args]                   # flags of the server that vf-rl starts, as in [inference.args]

[inference]
gpus = 1                         # of each replica; 0: CPU. Without `replicas`, vf-rl divides
                                 # several GPUs into replicas by the model's size
replicas = 1                     # servers of the same model, each with `gpus` GPUs of its own
[inference.args]                 # flags of vf-vllm, so of vLLM: max_model_len = 2048, or
                                 # "max-model-len" = 2048, is --max-model-len 2048

[trainer]
gpus = 1                         # 0: CPU
class = "my_trainer:MyTrainer"   # in place of RLTrainer: installed, or a module beside this file
[trainer.args]                   # fields of RLConfig; loss and advantage may be "module:function"

[cluster]                        # several machines (docs/clusters.md); [inference] and [trainer]
                                 # are of each
trainer_nodes = 2                # places for ranks, each with `[trainer] gpus`; by default 1
inference_nodes = 2              # places for servers, each for all replicas; by default 1, and with
                                 # the four variables all machines that are left
engine = "ray"                   # the run is on a Ray cluster that runs already; without it,
                                 # MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK make one
address = "auto"                 # of the Ray cluster; "auto": the one of this machine
"""

from __future__ import annotations

import argparse
import importlib
import json
import keyword
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from verifiers_rl.cli import flat
from verifiers_rl.cli.env_file import read_env_files
from verifiers_rl.cli.layers import (
    COMMAND_LINE,
    Tables,
    TomlError,
    Tree,
    Value,
    find,
    layer_of,
    merge,
    nearest_hint,
    newest,
    overrides_of,
    plain,
    put,
    read_layer,
    table_name,
    values_in,
)
from verifiers_rl.cli.teachers import (
    LEARNING,
    TeacherTable,
    check_use,
    make_scorers,
    read_teachers,
)
from verifiers_rl.inference.checkpoint import model_error
from verifiers_rl.option_rules import (
    NotNegativeInt,
    PositiveInt,
    PositiveNumber,
    declared,
    must,
    of_type,
    problem_of,
)
from verifiers_rl.process.secret_names import set_secrets
from verifiers_rl.user_code import UserCodeError, load_user_code, names_user_code

_Kind = TypeVar("_Kind")
__all__ = ["EnvTable", "RunConfig", "TomlError", "load_run_config"]  # TomlError is of layers


@dataclass
class EnvTable:
    """One [env] or [[env]], by its `id` and `args`, or by the keys of verifiers.v1's, `v1`.

    Attributes:
        python: interpreter of its rollout workers; "": the one of the trainer.
        learning: fields of `Distillation` by their names; `teacher` is the name of a [[teacher]].
    """

    id: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    weight: PositiveNumber = 1.0
    sampling: dict[str, Any] = field(default_factory=dict)
    v1: dict[str, Any] | None = None
    only: Literal["train", "eval"] | None = None
    eval_examples: PositiveInt | None = None
    python: str = ""
    learning: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.name or self.id.rsplit("/", 1)[-1].split("@", 1)[0]

    def load(self, *folders: Path) -> Any:
        """Load it, from what is installed or from these folders. With `python`, whose workers load
        it, return its table.

        Raises:
            InvalidEnvironmentError: it cannot be loaded, or `python` cannot run workers.
        """
        from verifiers_rl.envs.foreign import check_python
        from verifiers_rl.envs.tables import load_table

        table = {"id": self.id, "args": self.args} if self.v1 is None else self.v1
        if not self.python:
            return load_table(table, folders)
        check_python(self.python)
        return table


@dataclass
class InferenceTable:
    """[inference]."""

    gpus: NotNegativeInt = 1
    replicas: PositiveInt | None = None
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainerTable:
    """[trainer]."""

    gpus: NotNegativeInt = 1
    class_: Annotated[str, must("be of the form module:name", names_user_code)] = ""
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class ClusterTable:
    """[cluster]: how many machines do what, and what places the processes."""

    engine: Annotated[
        str,
        must("be 'ray'; leave it out to start vf-rl on each machine", {"ray"}.__contains__),
    ] = ""
    address: Annotated[str, must("be 'auto', or the host:port of a Ray cluster", bool)] = "auto"
    trainer_nodes: PositiveInt | None = None
    inference_nodes: PositiveInt | None = None


@dataclass
class RunConfig:
    """A checked configuration. `model` is resolved.

    Attributes:
        path: of its file; of several, the last.
        files: all of its files.
        words: the words of a command that give the same configuration.
        tree: all keys in our layout, each with where it is from.
    """

    PROGRAM = "vf-rl"
    TABLES: ClassVar[tuple[str, ...]] = (*flat.COMMON, *flat.OURS)  # of the top level
    NEEDS_ENV = True

    path: Path
    model: str
    envs: list[EnvTable]
    is_mix: bool = False
    teachers: list[TeacherTable] = field(default_factory=list)
    inference_gpus: int = 1
    inference_replicas: int = 1
    has_replicas: bool = False  # the TOML sets their number
    inference_args: dict[str, Any] = field(default_factory=dict)
    trainer_gpus: int = 1
    trainer_args: dict[str, Any] = field(default_factory=dict)
    trainer_class_name: str = ""
    files: list[Path] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    tree: Tree = field(default_factory=dict)
    env_files: list[Path] = field(default_factory=list)
    import_from: list[Path] = field(default_factory=list)
    cluster: ClusterTable = field(default_factory=ClusterTable)

    def __post_init__(self) -> None:
        self.files = self.files or [self.path]
        self.words = self.words or ["@", str(self.path)]

    @property
    def folders(self) -> list[Path]:
        """Where its modules are: beside its files, the last one first, and `import_from`."""
        beside = [path.parent for path in reversed(self.files)]
        return list(dict.fromkeys([*beside, *self.import_from]))

    def source(self, *path: str) -> str:
        """Where a key or a table is from: the file, or all files if none of them has it."""
        found = find(self.tree, path)
        first = next(values_in(found), None) if found is not None else None
        return first.source if first is not None else ", ".join(map(str, self.files))

    def place(self, *path: str) -> str:
        """Where the value of a key is from, for an error about it: the source and the table."""
        found = find(self.tree, path)
        if isinstance(found, Value):
            return found.place
        table = self.name_of(*path[:-1])
        return f"{self.source(*path)}: {table}" if table else f"{self.source(*path)}:"

    def table(self, *at: str) -> dict[str, Any]:
        """Return the data of a table; {} if there is none.

        Raises:
            TomlError: it is no table.
        """
        found = find(self.tree, at)
        if found is None:
            return {}
        data = plain(found)
        if not isinstance(data, dict):
            raise TomlError(f"{self.source(*at)}: {table_name(at)} must be a table, not {data!r}")
        return data

    def check_keys(self, at: tuple[str, ...], known: Iterable[str], advice: str = "") -> None:
        """Raise TomlError for a key of this table that is not known, with the nearest known one."""
        for key in self.table(*at):
            if key not in known:
                raise TomlError(
                    f"{self.source(*at, key)}: {self.name_of(*at)} has an unknown key {key!r}; "
                    f"{nearest_hint(key, known, advice)}"
                )

    def find_model(self, at: tuple[str, ...], checks_model: bool) -> str:
        """Return the model that this key names: its folder, or its name on the hub.

        Raises:
            TomlError: the key is missing, or there is no such model.
        """
        value, place = find(self.tree, at), self.place(*at)
        if isinstance(value, Value) and value.text is not None:
            value = Value(value.text, value.source, value.key, value.layer)
        if not isinstance(value, Value) or not isinstance(value.value, str) or not value.value:
            raise TomlError(f"{place} model is missing; set it to a string")
        model, folder = value.value, folder_of(value)
        if model.startswith(("./", "../")):
            model = str((folder / model).resolve())
        elif os.path.isdir(os.path.expanduser(model)):
            model = os.path.abspath(os.path.expanduser(model))
        if checks_model and (problem := model_error(model)):
            if (folder / model).is_dir():
                problem += f"; for the folder beside the TOML write './{model}'"
            raise TomlError(f"{place} {problem}")
        return model

    def name_of(self, *path: str) -> str:
        """The name of a table as it is written: an item of `env` may be an [[eval.env]]."""
        end = 2 if path[1:2] and path[1].isdigit() else 1
        first = next(values_in(find(self.tree, path[:end]) or {}), None)
        if path[:1] != ("env",) or first is None:
            return table_name(path)
        written = first.key.index("env") + 1
        written += first.key[written].isdigit()
        return table_name((*first.key[:written], *path[end:]))

    def of_option(self, message: str) -> TomlError:
        """Return the error that says where the option is from with which `message` begins. A key of
        the flat layout is named as it is there.
        """
        name = (re.match(r"\w+(\.\w+)*", message) or [""])[0]
        found = find(self.tree, ("trainer", "args", *name.split(".")))
        if isinstance(found, Value):
            own = found.key[-1]
            return TomlError(f"{found.place} {own}{message.removeprefix(name)}")
        return TomlError(f"{self.place('trainer', 'args', name)} {message}")

    def make_args(self, **others: Any) -> Any:
        """Make the RLConfig, or what the trainer's class has in its place.

        Args:
            others: options beside [trainer.args], which they replace.

        Raises:
            TomlError: a value cannot work.
        """
        from verifiers_rl.config import ConfigError

        try:
            return self.config_class()(**{**self.trainer_args, **others})
        except (ConfigError, ValueError, TypeError) as error:
            raise self.of_option(str(error)) from error

    def trainer_class(self) -> Any:
        """`RLTrainer`, or the class that [trainer] names.

        Raises:
            TomlError: no such class.
        """
        if not self.trainer_class_name:
            return self.default_trainer_class()
        from transformers import Trainer

        make_importable(self.folders)
        place = self.place("trainer", "class")
        try:
            found = load_user_code(self.trainer_class_name, "class")
        except UserCodeError as error:
            raise TomlError(f"{place} {error}") from error
        if not (isinstance(found, type) and issubclass(found, Trainer)):
            raise TomlError(
                f"{place} class={self.trainer_class_name!r}: must be a class that "
                "extends transformers.Trainer, as RLTrainer does"
            )
        return found

    def config_class(self) -> Any:
        """What [trainer.args] are the fields of: `RLConfig`, or the `config_class` of the class
        that [trainer] names. Imports transformers.
        """
        default = self.default_config_class()
        if not self.trainer_class_name:
            return default  # without the trainer, which takes seconds to import
        return getattr(self.trainer_class(), "config_class", default)

    def default_trainer_class(self) -> Any:
        from verifiers_rl.trainer import RLTrainer

        return RLTrainer

    def default_config_class(self) -> Any:
        from verifiers_rl.config import RLConfig

        return RLConfig

    def make_trainer(self, args: Any) -> Any:
        """Make the trainer, with all that it needs.

        Raises:
            ConfigError, InvalidEnvironmentError, InferenceServerError, TomlError: it cannot work.
        """
        return self.trainer_class()(self.model, self.load_envs(), args)

    def check_own(self) -> None:
        """Fill in and check what a class that extends this one has of its own."""

    def resolved_tables(self) -> dict[str, Any]:
        """Return tables of its own as `resolved.toml` has them."""
        return {}

    def option(self, name: str) -> Any:
        """The value of this option in [trainer.args], or the default of its field."""
        defaults = {f.name: f.default for f in fields(self.config_class())}
        return self.trainer_args.get(name, defaults[name])

    def load_own_code(self) -> None:
        """Load what the TOML names as "module:name", to see whether it can be.

        Raises:
            TomlError: it cannot.
        """
        args = self.trainer_args
        masks = args.get("gradient_masks")
        names = [args.get("loss"), args.get("advantage")]
        names += masks if isinstance(masks, dict) else []
        if self.trainer_class_name or any(names_user_code(str(name)) for name in names):
            import transformers  # noqa: F401  # before a module beside the TOML hides a library

            from verifiers_rl.option_rules import ConfigError

            make_importable(self.folders)
            check_trainer_args(self)
            checked = self.make_args(use_cpu=True, bf16=False)
            try:
                checked.make_loss()
                checked.make_masks()
                checked.make_advantage()
            except ConfigError as error:
                raise self.of_option(str(error)) from error

    def load_envs(self, with_teachers: bool = True, urls: Mapping[str, str] | None = None) -> Any:
        """What `RLTrainer(env=...)` takes: the environment of [env], or those of the [[env]]s. The
        variables of `env_file` are in this process's environment from then on.

        Args:
            with_teachers: False: where environments only run, and nothing learns from them.
            urls: see `make_scorers`.

        Raises:
            InvalidEnvironmentError: one cannot be loaded; the message names its file.
            TomlError: `env_file` cannot be read, or a teacher was to be started and is not.
        """
        from verifiers_rl.envs.base import InvalidEnvironmentError, WeightedEnv

        set_secrets(read_env_files(self.env_files))
        scorers = make_scorers(self, urls) if with_teachers else {}
        loaded = []
        for number, env in enumerate(self.envs):
            try:
                loaded.append(env.load(*self.folders))
            except InvalidEnvironmentError as error:
                raise InvalidEnvironmentError(self._of_env(number, str(error))) from error
        if not self.is_mix and not self.envs[0].python:
            return loaded[0]
        return [
            WeightedEnv(env, table.name, table.weight, table.sampling, table.only,
                        table.eval_examples, scorers.get(number), table.python, self.folders)
            for number, (env, table) in enumerate(zip(loaded, self.envs, strict=True))
        ]  # fmt: skip

    def _of_env(self, number: int, message: str) -> str:
        """Return the error of an environment with the source of its keys in front: of the key that
        the message is about, or of the environment.
        """
        own = ["env", str(number)] if self.is_mix else ["env"]
        about = re.match(r"\[env\.?([\w.]*)\] (?:has an unknown key )?'?(\w+)", message)
        if about is None:
            return f"{self.source(*own)}: {self.name_of(*own)} {message}"
        path = [*own, *filter(None, about[1].split(".")), about[2]]
        known = path if find(self.tree, path) is not None else own
        item = f" {self.name_of(*own)}:" if self.is_mix else ""
        return f"{self.source(*known)}:{item} {message}"


# --- Reading --------------------------------------------------------------------------------------

# Tables that another program reads.
ELSEWHERE = {
    "data": "it is of vf-sft, which trains on a dataset",
    "inference": "it starts no server. For evaluations on an environment, start vf-vllm, and set "
    "vllm_server_port in [trainer.args]",
    "cluster": "it runs on one machine",
    "teacher": "its teacher is the dataset; distillation on rollouts is of vf-rl",
}


def load_run_config(
    files: Path | Sequence[Path],
    overrides: Sequence[tuple[str, str]] = (),
    checks_model: bool = True,
    options: Iterable[str] = (),
    kind: type[RunConfig] = RunConfig,
) -> RunConfig:
    """Read, compose and check the configuration; nothing heavy is imported.

    Args:
        files: a later one wins.
        overrides: keys of the command line and their values, in order; they win over all files.
        checks_model: look whether there is such a model, on the hub too.
        options: the program's own, which a mistyped key may have meant.
        kind: class of the result.

    Raises:
        TomlError: with one line that says what to change.
    """
    given = [files] if isinstance(files, Path) else files
    paths = [Path(os.path.abspath(path.expanduser())) for path in given]
    ours, theirs = Tree(), Tree()
    for number, path in enumerate(paths):
        own, of_flat = flat.split(_one_spelling(read_layer(path, number)), str(path))
        ours, theirs = merge(ours, own), merge(theirs, of_flat)
    for number, (key, text) in enumerate(overrides, len(paths)):
        layer = layer_of(key, text, number)
        own, of_flat = flat.split(layer, COMMAND_LINE)
        ours, theirs = merge(ours, own), merge(theirs, of_flat)
    translated, ours = flat.translate(theirs, ours)
    words = [word for path in paths for word in ("@", str(path))]
    return _checked(
        kind(
            path=paths[-1],
            model="",
            envs=[],
            files=paths,
            words=[*words, *(f"--{key}={text}" for key, text in overrides)],
            tree=newest(translated, ours),
        ),
        checks_model,
        options,
    )


def _one_spelling(layer: Tree) -> Tree:
    """Give the flags of servers in a layer one spelling, so that a later layer replaces them
    however they are written.
    """
    teachers = layer.get("teacher")
    numbers = teachers if isinstance(teachers, Tables) else ()
    for at in (("inference", "args"), *(("teacher", number, "args") for number in numbers)):
        args = find(layer, at)
        if isinstance(args, dict) and not isinstance(args, Tables):
            put(layer, at, {key.lstrip("-").replace("-", "_"): args[key] for key in args})
    return layer


def _checked(config: RunConfig, checks_model: bool, options: Iterable[str]) -> RunConfig:
    """Fill in the fields from the tree.

    Raises:
        TomlError: a key is unknown, or has a value that cannot work.
    """
    tree, place = config.tree, config.place
    top = config.TABLES
    of_command = [f"--{key}" for key in (*top, *flat.FLAT)]
    for key in tree:
        if key not in top:
            source = config.source(key)
            known, shown = [*top, *flat.FLAT], key
            if source == COMMAND_LINE:
                known, shown = [*of_command, *options], f"--{key}"
            if key in ELSEWHERE:
                raise TomlError(f"{source}: {config.PROGRAM} reads no {key!r}: {ELSEWHERE[key]}")
            raise TomlError(
                f"{source}: the top level has an unknown key {shown!r}; "
                f"{nearest_hint(shown, known)}"
            )
    advice = "{} belong into [{}.args]"
    inference = read_table(
        config, ("inference",), InferenceTable, advice.format("flags of the server", "inference")
    )
    trainer = read_table(
        config, ("trainer",), TrainerTable, advice.format("options of the trainer", "trainer")
    )
    config.inference_gpus, config.trainer_gpus = inference.gpus, trainer.gpus
    config.inference_args, config.trainer_args = inference.args, trainer.args
    config.trainer_class_name = trainer.class_
    config.inference_replicas = inference.replicas or 1
    config.has_replicas = inference.replicas is not None
    servers = find(tree, ("trainer", "args", "vllm_servers"))
    if isinstance(servers, Value) and (servers.text or "").lower() == "none":
        config.trainer_args["vllm_servers"] = None  # before all types are known
    if config.trainer_args.get("vllm_servers"):
        if "inference" in tree:
            raise TomlError(
                f"{place('trainer', 'args', 'vllm_servers')} has vllm_servers, which run already, "
                "so [inference] has no effect; remove one of the two"
            )
        config.inference_gpus = 0
    elsewhere = {
        "model": "model at the top level",
        "host": "vllm_server_host in [trainer.args]",
        "port": "vllm_server_port in [trainer.args]",
    }
    for name in elsewhere.keys() & config.inference_args.keys():
        where = place("inference", "args", name)
        raise TomlError(f"{where} has {name!r}; set {elsewhere[name]} instead")
    config.env_files = _paths(config, "env_file", Path.is_file, "file")
    config.import_from = _paths(config, "import_from", Path.is_dir, "folder")
    config.model = config.find_model(("model",), checks_model)
    config.is_mix = isinstance(tree.get("env"), Tables)
    config.teachers = read_teachers(config)
    config.envs = _env_tables(config) if config.NEEDS_ENV or "env" in tree else []
    check_use(config, checks_model)
    config.cluster = _cluster(config)
    config.check_own()
    return config


def check_values(
    config: RunConfig, at: tuple[str, ...], values: dict[str, Any], known: Mapping[str, Any]
) -> None:
    """Check values of a table, and give those of the command line their types.

    Args:
        known: the type and the rules of each key, as from `option_rules.declared`.

    Raises:
        TomlError: a value does not fit.
    """
    for key in values.keys() & known.keys():
        kind, rules = known[key]
        given = find(config.tree, (*at, key))
        if isinstance(given, Value) and given.text is not None:
            values[key] = of_type(values[key], given.text, kind)
        if (problem := problem_of(values[key], kind, rules)) is not None:
            place = config.place(*at, key)
            colon = ":" if place[-1].isdigit() else ""  # of "[[env]] 2"
            raise TomlError(f"{place}{colon} {key}={values[key]!r}: {problem}")


def read_table(
    config: RunConfig, at: tuple[str, ...], kind: type[_Kind], advice: str = ""
) -> _Kind:
    """Return a table of the configuration as an object of this dataclass.

    Args:
        advice: the end of an error about an unknown key.

    Raises:
        TomlError: a key is no field of the class, or has a value that does not fit its type.
    """
    known = {
        name.rstrip("_"): one for name, one in declared(cast(Any, kind)).items()
    }  # class_ is "class"
    config.check_keys(at, known, advice)
    given = config.table(*at)
    check_values(config, at, given, known)
    return kind(**{f"{key}_" if keyword.iskeyword(key) else key: given[key] for key in given})


def _cluster(config: RunConfig) -> ClusterTable:
    """[cluster], checked. Whether its counts fit the machines is for Ray to see."""
    table, place = read_table(config, ("cluster",), ClusterTable), config.place
    given = config.table("cluster")
    if "address" in given and not table.engine:
        raise TomlError(
            f"{place('cluster', 'address')} address={table.address!r} is of a Ray cluster; add "
            'engine = "ray", or remove it'
        )
    if "inference_nodes" in given and config.trainer_args.get("vllm_servers"):
        raise TomlError(
            f"{place('trainer', 'args', 'vllm_servers')} has vllm_servers, which run already, so "
            "[cluster] inference_nodes has no effect; remove one of the two"
        )
    return table


def folder_of(value: Value) -> Path:
    """Return the folder to which paths in a value are relative."""
    return Path.cwd() if value.source == COMMAND_LINE else Path(value.source).parent


def _paths(config: RunConfig, key: str, exists: Any, kind: str) -> list[Path]:
    """Return the paths that a key names: one, or a list of several.

    Raises:
        TomlError: it names none, or one does not exist.
    """
    value = config.tree.get(key)
    if value is None:
        return []
    names = value.value if isinstance(value, Value) else None
    names = [names] if isinstance(names, str) else names
    if not isinstance(value, Value) or not isinstance(names, list):
        raise TomlError(
            f"{config.source(key)}: {key}={plain(value)!r}: must be a string, or a list of strings"
        )
    paths = []
    for name in names:
        if not isinstance(name, str) or not name:
            raise TomlError(f"{value.place} {key}={name!r}: must be the path of a {kind}")
        path = Path(os.path.normpath(folder_of(value) / Path(name).expanduser()))
        if not exists(path):
            raise TomlError(
                f"{value.place} {key}={name!r}: there is no {kind} {path}; correct the path, which "
                "is relative to what names it"
            )
        paths.append(path)
    return paths


def _env_tables(config: RunConfig) -> list[EnvTable]:
    """[env] or the [[env]]s, checked."""
    found = config.tree.get("env", {})
    is_mix = isinstance(found, Tables)
    if not isinstance(found, dict):
        raise TomlError(
            f"{found.source}: env must be one [env] or several [[env]], not {found.value!r}"
        )
    tables: list[EnvTable] = []
    of_mix = ["name", "weight", "sampling", "only", "eval_examples", *LEARNING]
    for number in range(len(found) if is_mix else 1):
        at = ("env", str(number)) if is_mix else ("env",)
        env = config.table(*at)
        where = f"{config.source(*at)}: {config.name_of(*at)}"

        def place(key: str, at: tuple[str, ...] = at) -> str:
            return config.place(*at, key)

        # One environment alone has no share, and its sampling is the run's.
        ours = ["python", *of_mix] if is_mix else ["python"]
        learns = [key for key in (LEARNING if is_mix else ("algorithm", "teacher")) if key in env]
        if learns and "teacher" not in config.TABLES:
            raise TomlError(
                f"{place(learns[0])}: {config.PROGRAM} reads no {learns[0]!r}: its environments "
                "only evaluate; remove it. Distillation on rollouts is of vf-rl"
            )
        if learns and not is_mix:
            raise TomlError(
                f"{place(learns[0])}: {learns[0]} is of one of several environments; write [[env]] "
                "in place of [env], for one environment too"
            )
        if "taskset" in env:  # its other keys are checked by verifiers
            v1 = {key: value for key, value in env.items() if key not in ours}
            taskset = env["taskset"]
            if not isinstance(taskset, dict) or not isinstance(taskset.get("id"), str):
                raise TomlError(f"{where}: taskset={taskset!r} must be a table with an id")
            env = {key: env[key] for key in ours if key in env} | {"id": taskset["id"], "v1": v1}
        else:
            config.check_keys(at, ["id", "args", *ours])
        learning = {key: (kind, ()) for key, kind in LEARNING.items()}
        check_values(config, at, env, {**declared(cast(Any, EnvTable)), **learning})
        if not env.get("id"):
            raise TomlError(f"{where}: id is missing; set it to a string")
        if os.sep in env.get("python", ""):  # else it is looked for as a shell does
            folder = folder_of(cast(Value, find(config.tree, (*at, "python"))))
            # Not resolved: an interpreter knows its packages by the link that it is started by.
            env["python"] = os.path.normpath(folder / Path(env["python"]).expanduser())
        learned = {key: env.pop(key) for key in LEARNING if is_mix and key in env}
        tables.append(EnvTable(**env, learning=learned))
        if any(_share_a_name(tables[-1], other) for other in tables[:-1]):
            raise TomlError(
                f"{place('name')}: two [[env]] are named {tables[-1].name!r}; give one another name"
            )
    return tables


def _share_a_name(one: EnvTable, other: EnvTable) -> bool:
    """Return whether two environments of one split have one name."""
    are_apart = {one.only, other.only} == {"train", "eval"}
    return one.name == other.name and not are_apart


def check_trainer_args(config: RunConfig) -> None:
    """Give values of the command line the types of their options. Imports transformers.

    Raises:
        TomlError: a key of [trainer.args] is no field of the trainer's config.
    """
    import typing

    from verifiers_rl.config import unknown_option_hint

    kind = config.config_class()
    known = {f.name for f in fields(kind)}
    values = find(config.tree, ("trainer", "args"))
    for name in config.trainer_args:
        if name not in known:
            hint = unknown_option_hint(name, kind)
            place = config.place("trainer", "args", name)
            raise TomlError(f"{place} has an unknown key {name!r}; {hint}")
    declared = typing.get_type_hints(kind)
    for name, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, Value) and value.text is not None:
            config.trainer_args[name] = of_type(value.value, value.text, declared[name])


def make_importable(folders: Iterable[Path]) -> None:
    """Modules in these folders, beside the TOML, can be imported. Of two, the first one's."""
    for folder in reversed(list(folders)):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def server_flags(args: dict[str, Any]) -> list[str]:
    """Keys and values of [inference.args] as command line flags:
    true is --key, false is --no-key.
    """
    flags: list[str] = []
    for key, value in args.items():
        flag = "--" + key.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is False:
            flags.append("--no-" + flag[2:])
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


# --- The command line -----------------------------------------------------------------------------


def add_folder_options(parser: argparse.ArgumentParser) -> None:
    """What to do with a run that the output_dir holds already."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="CHECKPOINT",
        help="go on from this checkpoint, by default the newest",
    )
    group.add_argument(
        "--overwrite", action="store_true", help="replace the run that the output_dir holds"
    )


def folder_words(options: argparse.Namespace) -> list[str]:
    """The options of `add_folder_options` as words of a command."""
    if options.overwrite:
        return ["--overwrite"]
    if options.resume is None:
        return []
    return ["--resume"] if options.resume is True else ["--resume", str(options.resume)]


def toml_arguments(argv: list[str]) -> tuple[list[Path], list[str]]:
    """The files after `@` (or attached to it, or right after --check), and the other words.

    Raises:
        TomlError: no `@ FILE`.
    """
    files: list[Path] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "@":
            file = next(words, None)
            if file is None:
                raise TomlError("no file after @: give one as `@ config.toml`")
            files.append(Path(file))
        elif word.startswith("@"):
            files.append(Path(word[1:]))
        elif rest[-1:] == ["--check"] and not files and not word.startswith("-"):
            files.append(Path(word))
        else:
            rest.append(word)
    if not files:
        raise TomlError("no configuration: give one as `@ config.toml`")
    return files, rest


def parse_command_line(
    parser: argparse.ArgumentParser,
    argv: list[str],
    checks_model: bool = True,
    kind: type[RunConfig] = RunConfig,
) -> tuple[argparse.Namespace, RunConfig]:
    """Return the program's own options, and the configuration of the files and the other keys.

    Args:
        parser: of the program's own options; made with `allow_abbrev=False`.
        kind: class of the configuration.

    Raises:
        TomlError: see `load_run_config`.
    """
    files, rest = toml_arguments(argv)
    own = re.findall(r"--[a-z][\w-]+", parser.format_help())
    # A word with a space would be the checkpoint of `--resume` before it: `--env.args.p="a b"`.
    is_key = [word.startswith("--") and word.partition("=")[0] not in own for word in rest]
    rest = [
        word.replace(" ", "\0") if key else word for word, key in zip(rest, is_key, strict=True)
    ]
    options, words = parser.parse_known_args(rest)
    words = [word.replace("\0", " ") for word in words]
    if getattr(options, "dry_run", False):
        checks_model = False
    config = load_run_config(files, overrides_of(words), checks_model, own, kind)
    if options.overwrite:
        config.trainer_args["overwrite_output_dir"] = True
    return options, config
