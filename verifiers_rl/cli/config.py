"""The configuration that `vf-rl` and `vf-train` read: one TOML, or several that are composed.

model = "Qwen/Qwen3-0.6B"        # a name on the hub or a folder;
                                 # ./ and ../ are relative to this file
env_file = "secrets.env"         # NAME=VALUE lines for environments, or a list of such files
import_from = ["../shared"]      # more folders with modules; this file's own is one

[env.taskset]                    # of verifiers.v1; [env] has the keys of its EnvConfig
id = "reverse_text"              # installed, or a module beside this file; or owner/name
[env.agent.harness]              # of its agent; by default a chat, unless the taskset has one
id = "null"
[env.eval_taskset]               # what differs in the taskset of evaluations

[env]                            # or by its id alone
id = "reverse_text"              # a taskset, or a classic environment in another Python
python = "venv/bin/python"       # the Python of its rollout workers; relative to this file
[env.args]                       # keys of the taskset, or arguments of its load_environment

                                 # or several: [[env]], each one of these; they have, and one
                                 # [env] may have,
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
gpus = 1                         # of each replica; 0: CPU. Without `replicas`, several GPUs become
                                 # replicas of one GPU, or of tensor_parallel_size
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
address = "auto"                 # of a Ray cluster that runs already, which the run is on; "auto":
                                 # the one of this machine. Without it, MASTER_ADDR, MASTER_PORT,
                                 # WORLD_SIZE and RANK make one
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import Field, TypeAdapter, ValidationError

from verifiers_rl.cli import flat
from verifiers_rl.cli.env_file import read_env_files
from verifiers_rl.cli.layers import (
    MISSING,
    Data,
    Key,
    Setting,
    TomlError,
    compose,
    find,
    is_tables,
    nearest_hint,
    overrides_of,
    place_of,
    read_file,
    table_name,
)
from verifiers_rl.cli.teachers import TeacherTable, check_use, make_scorers, read_teachers
from verifiers_rl.inference.checkpoint import model_error
from verifiers_rl.option_rules import (
    Algorithm,
    NotNegativeInt,
    PositiveInt,
    PositiveNumber,
    checkers,
    must,
    of_type,
    problem_of,
)
from verifiers_rl.process.secret_names import set_secrets
from verifiers_rl.user_code import UserCodeError, load_user_code, names_user_code

_Kind = TypeVar("_Kind")
_Text = Annotated[str, Field(min_length=1)]
__all__ = ["EnvTable", "RunConfig", "TomlError", "load_run_config"]  # TomlError is of layers

# --- Tables of the TOML: a field is a key, with its type and default ------------------------------


@dataclass
class EnvTable:
    """One [env] or [[env]], by its `id` and `args`, or by the keys of verifiers.v1's, `v1`.

    Attributes:
        python: interpreter of its rollout workers; "": the one of the trainer.
        algorithm, teacher, distill_coef, hint: see `learning`.
    """

    NOT_KEYS: ClassVar[tuple[str, ...]] = ("v1",)

    id: _Text = ""
    args: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    weight: PositiveNumber = 1.0
    sampling: dict[str, Any] = field(default_factory=dict)
    v1: dict[str, Any] | None = None
    only: Literal["train", "eval"] | None = None
    eval_examples: PositiveInt | None = None
    python: str = ""
    algorithm: Algorithm | None = None
    teacher: str | None = None
    distill_coef: PositiveNumber | None = None
    hint: str | None = None

    def __post_init__(self) -> None:
        self.name = self.name or self.id.rsplit("/", 1)[-1].split("@", 1)[0]

    @property
    def learning(self) -> dict[str, Any]:
        """The fields of `Distillation` that are set; `teacher` is the name of a [[teacher]]."""
        given = {name: getattr(self, name) for name in LEARNING}
        return {name: value for name, value in given.items() if value is not None}

    def load(self, *folders: Path) -> Any:
        """Load it, from what is installed or from these folders. With `python`, whose workers load
        it, return its table.

        Raises:
            InvalidEnvironmentError: it cannot be loaded, or `python` cannot run workers.
        """
        from verifiers_rl.envs.foreign import check_python
        from verifiers_rl.envs.v1_loading import load_v1_environment

        table = {"id": self.id, "args": self.args} if self.v1 is None else self.v1
        if not self.python:
            return load_v1_environment(table, *folders)
        check_python(self.python)
        return table


LEARNING = ("algorithm", "teacher", "distill_coef", "hint")
# Keys beside those of verifiers.v1's own. All but `python` make [env] one of several.
_BESIDE_V1 = ("python", "name", "weight", "sampling", "only", "eval_examples", *LEARNING)


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
    """[cluster]: how many machines do what, and the address of the Ray cluster that places the
    processes. Without one, vf-rl is started on each machine.
    """

    address: Annotated[str | None, Field(min_length=1)] = None
    trainer_nodes: PositiveInt | None = None
    inference_nodes: PositiveInt | None = None


@dataclass
class RunConfig:
    """A checked configuration. `model` is resolved.

    Attributes:
        path: of its file; of several, the last.
        files: all of its files.
        words: the words of a command that give the same configuration.
        tree: all keys, in our layout; models and paths are resolved.
        settings: that are composed in it, in their order.
    """

    PROGRAM = "vf-rl"
    MODULE = "verifiers_rl.cli.train"  # of a process that trains
    TRAINER, CONFIG = "verifiers_rl.trainer:RLTrainer", "verifiers_rl.config:RLConfig"
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
    tree: Data = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
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

    # --- Keys, and errors about them --------------------------------------------------------------

    def _origin(self, key: Key) -> Setting:
        """Return the newest setting of this key. Of a table, its source; where no layer has the
        key, all files.
        """
        for one in reversed(self.settings):
            below = key[len(one.key) :]
            if one.source and one.key[: len(key)] == key[: len(one.key)]:
                if one.key == key:
                    return one
                if find(one.value, below) is not MISSING:
                    return Setting(key, None, one.source, key)
        return Setting(key, None, ", ".join(map(str, self.files)), key)

    def source(self, *key: str) -> str:
        """Where a key or a table is from: the file, or all files if none of them has it."""
        return self._origin(key).source

    def folder_of(self, *key: str) -> Path:
        """Return the folder to which paths in the value of a key are relative."""
        source = Path(self.source(*key))
        return source.parent if source in self.files else Path.cwd()

    def beside(self, name: str, *key: str) -> Path:
        """Return the absolute path that the value of a key names."""
        return Path(os.path.normpath(self.folder_of(*key) / Path(name).expanduser()))

    def place(self, *key: str) -> str:
        """Where the value of a key is from, for an error about it: the source and the table."""
        return place_of(self.source(*key), self._origin(key).written)

    def error(self, key: Key, problem: str) -> TomlError:
        """Return the error about this key: "FILE: [table] key=value: problem"."""
        place, value = self.place(*key), find(self.tree, key)
        place += ":" * place[-1].isdigit()  # behind "[[env]] 2"
        is_value = value is not MISSING and not isinstance(value, dict) and not is_tables(value)
        shown = f"{self._origin(key).written[-1]}={value!r}" if is_value else key[-1]
        return TomlError(f"{place} {shown}: {problem}")

    def of_option(self, message: str) -> TomlError:
        """Return the error that says where the option is from with which `message` begins. A key of
        the flat layout is named as it is there.
        """
        name = (re.match(r"\w+(\.\w+)*", message) or [""])[0]
        key = (*flat.ARGS, *name.split("."))
        is_table = isinstance(find(self.tree, key), dict)
        own = name if is_table else self._origin(key).written[-1]
        return TomlError(f"{self.place(*key)} {own}{message.removeprefix(name)}")

    def table(self, *at: str) -> Data:
        """Return the data of a table; {} if there is none.

        Raises:
            TomlError: it is no table.
        """
        data = find(self.tree, at)
        if data is MISSING:
            return {}
        if not isinstance(data, dict):
            raise self.error(at, "must be a table")
        return data

    def read(self, key: Key, checker: TypeAdapter[Any]) -> Any:
        """Return the value of a key, checked; on the command line, in the form that it asks for.

        Raises:
            TomlError: it does not fit.
        """
        value = self.typed(key, checker)
        try:
            return checker.validate_python(value)
        except ValidationError as error:
            raise self.error(key, problem_of(error)) from error

    def typed(self, key: Key, checker: TypeAdapter[Any]) -> Any:
        """Return the value of a key; on the command line, in the form that `checker` asks for."""
        text, value = self._origin(key).text, copy.deepcopy(find(self.tree, key))
        return value if text is None else of_type(text, value, checker)

    def read_table(
        self,
        at: Key,
        kind: type[_Kind],
        /,
        elsewhere: Iterable[str] = (),
        **others: Any,
    ) -> _Kind:
        """Return a table as an object of this dataclass.

        Args:
            elsewhere: keys that are read by somebody else.
            others: fields that are no keys, its `NOT_KEYS`.

        Raises:
            TomlError: a key is no field of the class, or has a value that does not fit its type.
        """
        checks = {k.rstrip("_"): (k, checker) for k, checker in checkers(cast(Any, kind)).items()}
        for name in getattr(kind, "NOT_KEYS", ()):
            del checks[name]
        for key in self.table(*at):
            if key in checks:
                name, checker = checks[key]
                others[name] = self.read((*at, key), checker)
            elif key not in elsewhere:
                advice = f"options belong into [{at[0]}.args]" if "args" in checks else ""
                hint = nearest_hint(key, [*checks, *elsewhere], advice)
                raise TomlError(f"{self.place(*at, key)} has an unknown key {key!r}; {hint}")
        return kind(**others)

    def refuse_flags(self, at: Key, hints: dict[str, str]) -> None:
        """Raise TomlError if the flags of a server have one of these."""
        for name in hints.keys() & self.table(*at, "args").keys():
            raise TomlError(f"{self.place(*at, 'args', name)} has {name!r}; {hints[name]}")

    def find_model(self, at: Key, checks_model: bool) -> str:
        """Return the model that this key names: its folder, or its name on the hub.

        Raises:
            TomlError: the key is missing, or there is no such model.
        """
        model = self.read(at, TypeAdapter(str)) if find(self.tree, at) is not MISSING else ""
        if not model:
            raise TomlError(f"{self.place(*at)} model is missing; set it to a string")
        folder = self.folder_of(*at)
        if model.startswith(("./", "../")):
            model = str((folder / model).resolve())
        elif os.path.isdir(os.path.expanduser(model)):
            model = os.path.abspath(os.path.expanduser(model))
        if checks_model and (problem := model_error(model)):
            if (folder / model).is_dir():
                problem += f"; for the folder beside the TOML write './{model}'"
            raise TomlError(f"{self.place(*at)} {problem}")
        self.table(*at[:-1])[at[-1]] = model
        return model

    def read_paths(self, key: str, exists: Callable[[Path], bool], kind: str) -> list[Path]:
        """Return the paths that a key names: one, or a list of several.

        Raises:
            TomlError: it names none, or one does not exist.
        """
        if self.tree.get(key) is None:
            return []
        names = self.read((key,), TypeAdapter(_Text | list[_Text]))
        paths = []
        for name in [names] if isinstance(names, str) else names:
            if not exists(path := self.beside(name, key)):
                raise self.error(
                    (key,),
                    f"there is no {kind} {path}; correct the path, which is relative to what "
                    "names it",
                )
            paths.append(path)
        self.tree[key] = list(map(str, paths))
        return paths

    # --- What the keys name -----------------------------------------------------------------------

    def make_args(self, **others: Any) -> Any:
        """Make the RLConfig, or what the trainer's class has in its place.

        Args:
            others: options beside [trainer.args], which they replace.

        Raises:
            TomlError: a value cannot work.
        """
        try:
            return self.config_class()(**{**self.trainer_args, **others})
        except (ValueError, TypeError) as error:  # ConfigError is a ValueError
            raise self.of_option(str(error)) from error

    def trainer_class(self) -> Any:
        """`RLTrainer`, or the class that [trainer] names.

        Raises:
            TomlError: no such class.
        """
        if not self.trainer_class_name:
            return load_user_code(self.TRAINER, "class")
        from transformers import Trainer

        make_importable(self.folders)
        at = ("trainer", "class")
        try:
            found = load_user_code(self.trainer_class_name, "class")
        except UserCodeError as error:
            raise TomlError(f"{self.place(*at)} {error}") from error
        if not (isinstance(found, type) and issubclass(found, Trainer)):
            raise self.error(
                at, "must be a class that extends transformers.Trainer, as RLTrainer does"
            )
        return found

    def config_class(self) -> Any:
        """What [trainer.args] are the fields of: `RLConfig`, or the `config_class` of the class
        that [trainer] names. Imports transformers.
        """
        default = load_user_code(self.CONFIG, "class")
        if not self.trainer_class_name:
            return default  # without the trainer, which takes seconds to import
        return getattr(self.trainer_class(), "config_class", default)

    def make_trainer(self, args: Any) -> Any:
        """Make the trainer, with all that it needs.

        Raises:
            ConfigError, InvalidEnvironmentError, InferenceServerError, TomlError: it cannot work.
        """
        return self.trainer_class()(self.model, self.load_envs(), args)

    def check_own(self) -> None:
        """Fill in and check what a class that extends this one has of its own."""

    def prepare(self) -> None:
        """Do what is needed in a process that trains, before it loads anything.

        Raises:
            TomlError: it cannot train.
        """

    def option(self, name: str) -> Any:
        """The value of this option in [trainer.args], or the default of its field."""
        return self.trainer_args.get(name, getattr(self.config_class(), name))

    def load_envs(self, with_teachers: bool = True) -> Any:
        """What `RLTrainer(env=...)` takes: the environment of [env], or those of the [[env]]s. The
        variables of `env_file` are in this process's environment from then on.

        Args:
            with_teachers: False: where environments only run, and nothing learns from them.

        Raises:
            InvalidEnvironmentError: one cannot be loaded; the message names its file.
            TomlError: `env_file` cannot be read, or a teacher was to be started and is not.
        """
        from verifiers_rl.envs.base import InvalidEnvironmentError, WeightedEnv

        set_secrets(read_env_files(self.env_files))
        scorers = make_scorers(self) if with_teachers else {}
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

    def path_of_env(self, number: int) -> Key:
        """Return where the keys of this environment are."""
        return ("env", str(number)) if is_tables(self.tree.get("env")) else ("env",)

    def _of_env(self, number: int, message: str) -> str:
        """Return the error of an environment with the source of its keys in front: of the key that
        the message is about, or of the environment.
        """
        own = self.path_of_env(number)
        about = re.match(r"\[env\.?([\w.]*)\] (?:has an unknown key )?'?(\w+)", message)
        key = (*own, *filter(None, about[1].split(".")), about[2]) if about else own
        known = key if find(self.tree, key) is not MISSING else own
        item = "" if about and len(own) == 1 else f" {table_name(own)}:"
        return f"{self.source(*known)}:{item} {message}"


# --- Reading --------------------------------------------------------------------------------------

# Tables that another program reads.
ELSEWHERE = {
    "data": "it is of vf-sft, which trains on a dataset",
    "env": "vf-sft has no environment; `vf-rl generate --split eval` measures a model on one",
    "inference": "vf-sft starts no server",
    "cluster": "vf-sft runs on one machine",
    "teacher": "the dataset is vf-sft's teacher; distillation on rollouts is of vf-rl",
}
# Flags of the server that have a place of their own.
_OF_SERVER = {
    "model": "set model at the top level instead",
    "host": "set vllm_server_host in [trainer.args] instead",
    "port": "set vllm_server_port in [trainer.args] instead",
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
    settings = [one for path in paths for one in flat.settings_of(read_file(path), str(path))]
    settings += [one for pair in overrides for one in flat.settings_of_word(*pair)]
    tree = compose(settings)
    if find(tree, (*flat.ARGS, "eval_strategy")) == "no":
        tree = compose(one for one in settings if one.source)
    words = [word for path in paths for word in ("@", str(path))]
    words += [f"--{key}={text}" for key, text in overrides]
    config = kind(
        paths[-1], model="", envs=[], files=paths, words=words, tree=tree, settings=settings
    )
    _check(config, checks_model, options)
    return config


def _check(config: RunConfig, checks_model: bool, options: Iterable[str]) -> None:
    """Fill in the fields from the data.

    Raises:
        TomlError: a key is unknown, or has a value that cannot work.
    """
    for key in config.tree:
        if key not in config.TABLES:
            known = {*config.TABLES, *flat.FLAT, *options}
            hint = ELSEWHERE.get(key) or nearest_hint(key, known)
            problem = f"the top level has an unknown key {key!r}; {hint}"
            raise TomlError(f"{config.place(key)} {problem}")
    inference = config.read_table(("inference",), InferenceTable)
    trainer = config.read_table(("trainer",), TrainerTable)
    config.inference_gpus, config.trainer_gpus = inference.gpus, trainer.gpus
    config.inference_args, config.trainer_args = inference.args, trainer.args
    config.trainer_class_name = trainer.class_
    config.inference_replicas = inference.replicas or 1
    config.has_replicas = inference.replicas is not None
    config.cluster = config.read_table(("cluster",), ClusterTable)
    at = (*flat.ARGS, "vllm_servers")
    if config.trainer_args.get("vllm_servers"):
        idle = "[inference]" if "inference" in config.tree else ""
        idle = idle or "[cluster] inference_nodes" * bool(config.cluster.inference_nodes)
        if idle:
            raise config.error(at, f"they run already, so {idle} has no effect; remove one of both")
        config.inference_gpus = 0
    config.refuse_flags(("inference",), _OF_SERVER)
    config.env_files = config.read_paths("env_file", Path.is_file, "file")
    config.import_from = config.read_paths("import_from", Path.is_dir, "folder")
    config.model = config.find_model(("model",), checks_model)
    config.teachers = read_teachers(config)
    if config.NEEDS_ENV:
        _read_envs(config)
    check_use(config, checks_model)
    config.check_own()


def _read_envs(config: RunConfig) -> None:
    """Fill in the environments of [env] or the [[env]]s."""
    found = config.tree.get("env", {})
    if not isinstance(found, dict) and not is_tables(found):
        raise config.error(("env",), "must be one [env] or several [[env]]")
    for number in range(len(found) if is_tables(found) else 1):
        at = config.path_of_env(number)
        table = _read_env(config, at)
        config.envs.append(table)
        for other in config.envs[:-1]:
            are_apart = {table.only, other.only} == {"train", "eval"}
            if table.name == other.name and not are_apart:
                raise TomlError(
                    f"{config.place(*at, 'name')}: two [[env]] are named {table.name!r}; give one "
                    "another name"
                )
    config.is_mix = is_tables(found) or not {*_BESIDE_V1[1:]}.isdisjoint(found)


def _read_env(config: RunConfig, at: Key) -> EnvTable:
    given = config.table(*at)
    # The other keys of a taskset's environment are checked by verifiers.
    of_v1 = {k: v for k, v in given.items() if k not in _BESIDE_V1} if "taskset" in given else None
    env = config.read_table(at, EnvTable, elsewhere=of_v1 or ())
    if of_v1 is not None:
        taskset = of_v1["taskset"]
        if not isinstance(taskset, dict) or not isinstance(taskset.get("id"), str):
            raise config.error((*at, "taskset"), "must be a table with an id")
        env.id, env.v1 = taskset["id"], of_v1
        env.__post_init__()
    if not env.id:
        raise TomlError(f"{config.place(*at, 'id')}: id is missing; set it to a string")
    if os.sep in env.python:  # else it is looked for as a shell does
        # Not resolved: an interpreter knows its packages by the link that it is started by.
        given["python"] = env.python = str(config.beside(env.python, *at, "python"))
    return env


def check_trainer_args(config: RunConfig) -> None:
    """Give values of the command line the types of their options. Imports transformers.

    Raises:
        TomlError: a key of [trainer.args] is no field of the trainer's config.
    """
    from verifiers_rl.config import unknown_option_hint

    kind = config.config_class()
    for name in config.trainer_args:
        place = config.place(*flat.ARGS, name)
        if name not in checkers(kind):
            hint = unknown_option_hint(name, kind)
            raise TomlError(f"{place} has an unknown key {name!r}; {hint}")
        if find(config.tree, (*flat.ARGS, name)) is not MISSING:  # else the program has set it
            config.trainer_args[name] = config.typed((*flat.ARGS, name), checkers(kind)[name])


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
        name = key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
            continue
        values = value if isinstance(value, list) else [value]
        texts = [json.dumps(one) if isinstance(one, dict) else str(one) for one in values]
        flags += [f"--{name}", *texts]
    return flags


# --- The command line -----------------------------------------------------------------------------

PARSER: dict[str, Any] = {"allow_abbrev": False, "prefix_chars": "-@"}  # how parsers are made


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add `--dry-run`, and what to do with a run that the output_dir holds already."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only print the resolved configuration, and write it into the run's folder",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    group.add_argument(
        "--overwrite", action="store_true", help="replace the run that the output_dir holds"
    )


def folder_words(options: argparse.Namespace) -> list[str]:
    """The options about the output_dir as words of a command."""
    return ["--overwrite"] * options.overwrite + ["--resume"] * options.resume


def parse_command_line(
    parser: argparse.ArgumentParser,
    argv: list[str],
    checks_model: bool = True,
    kind: type[RunConfig] = RunConfig,
) -> tuple[argparse.Namespace, RunConfig]:
    """Return the program's own options, and the configuration of the files and the other keys.

    Args:
        parser: of the program's own options; made with `PARSER`.
        kind: class of the configuration.

    Raises:
        TomlError: there is no `@ FILE`, or see `load_run_config`.
    """
    parser.add_argument(
        "@", dest="files", action="append", type=Path, metavar="FILE", help="a TOML; the last wins"
    )
    # @FILE is @ FILE.
    words: list[str] = []
    for word in argv:
        words += ["@", word[1:]] if word.startswith("@") and word[1:] else [word]
    options, rest = parser.parse_known_args(words)
    if not options.files:
        raise TomlError("no configuration: give one as `@ config.toml`")
    own = re.findall(r"(?<!\S)--([a-z][\w-]*)", parser.format_help())
    checks_model = checks_model and not getattr(options, "dry_run", False)
    config = load_run_config(options.files, overrides_of(rest), checks_model, own, kind)
    if options.overwrite:
        config.trainer_args["overwrite_output_dir"] = True
    return options, config
