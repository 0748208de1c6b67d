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
client_type = "renderer"         # of a classic one: how messages become tokens
command = ["sh", "agent.sh", "{prompt}"]  # a program that plays its tasks; also beside
                                 # [env.taskset], but not beside `python`
[env.args]                       # keys of the taskset, or arguments of its load_environment

                                 # or several: [[env]], each one of these; they have, and one
                                 # [env] may have,
                                 # name = "..."  prefix of its metrics, by default its id,
                                 #   and "env" of one [env]
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
                                 # replicas of one GPU, or of tensor_parallel_size. Where one GPU is
                                 # visible, the server shares it with the trainer
replicas = 1                     # servers of the same model, each with `gpus` GPUs of its own
[inference.args]                 # flags of vf-vllm, so of vLLM, with underscores:
                                 # max_model_len = 2048 is --max-model-len 2048

[trainer]
gpus = 1                         # 0: CPU
class = "my_trainer:MyTrainer"   # in place of RLTrainer: installed, or a module beside this file
[trainer.args]                   # fields of RLConfig; loss and advantage may be "module:function"

[cluster]                        # several machines (docs/scaling.md); [inference] and [trainer]
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
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from verifiers_rl.cli import flat
from verifiers_rl.cli.gpus import default_gpus
from verifiers_rl.cli.layers import (
    Data,
    Key,
    Layers,
    Setting,
    TomlError,
    find,
    is_tables,
    load_leaf,
    nearest_hint,
    overrides_of,
    read_env_files,
    read_file,
)
from verifiers_rl.inference.checkpoint import model_error
from verifiers_rl.option_rules import (
    STRICT,
    ConfigError,
    EnvName,
    NotNegativeInt,
    PositiveInt,
    PositiveNumber,
    Text,
    Texts,
    load_user_code,
    problem_of,
)
from verifiers_rl.process.secret_names import set_secrets

_Made = TypeVar("_Made")
__all__ = ["EnvTable", "RunConfig", "TomlError", "load_run_config"]  # TomlError is of layers

# --- Tables of the TOML: a field is a key, with its type and default ------------------------------


def wrong(problem: str, *key: str) -> PydanticCustomError:
    """Make the error of a check of a table.

    Args:
        key: what is wrong in the table, from there; none: the table.
    """
    return PydanticCustomError("wrong", "{problem}", {"problem": problem, "key": key})


class Table(BaseModel):
    """A table of the TOML.

    Attributes:
        OTHERS: what a wrong key may stand for, beside the keys of the table.
    """

    model_config = STRICT
    OTHERS: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def arrange(cls, data: Data) -> Data:
        """Return what the TOML has, by the keys of this class."""
        return data

    @model_validator(mode="before")
    @classmethod
    def check_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("must be a table")
        data = cls.arrange(data)
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for key in data:
            if key not in known:
                raise wrong(f"is no key here; {nearest_hint(key, [*known, *cls.OTHERS])}", key)
        return data


LEARNING = ("algorithm", "teacher", "distill_coef", "hint")
# Keys beside those of verifiers.v1's own.
_BESIDE_V1 = ("python", "command", "name", "weight", "sampling", "only", "eval_examples", *LEARNING)


class EnvTable(Table):
    """One [env] or [[env]], by its `id` and `args`, or by the keys of verifiers.v1's, `v1`.

    Attributes:
        python: interpreter of its rollout workers; "": the one of the trainer.
        client_type: how messages of a classic one become tokens, see envs/classic.py.
        command: of a program that plays it, see the leaf `envs.agents`.
        algorithm, teacher, distill_coef, hint: how it learns, which the leaf `distill` reads.
    """

    id: str = ""
    args: dict[str, Any] = {}
    name: EnvName | None = None
    weight: PositiveNumber = 1.0
    sampling: dict[str, Any] = {}
    v1: dict[str, Any] | None = Field(None, alias="taskset")
    only: Literal["train", "eval"] | None = None
    eval_examples: PositiveInt | None = None
    python: str = ""
    client_type: str | None = None
    command: list[str] | None = None
    algorithm: Any = None
    teacher: Any = None
    distill_coef: Any = None
    hint: Any = None

    @classmethod
    def arrange(cls, data: Data) -> Data:
        """Put keys of a taskset's environment, which verifiers checks, into one table."""
        if "taskset" not in data:
            return data
        own = {key: value for key, value in data.items() if key in _BESIDE_V1}
        return {**own, "taskset": {k: v for k, v in data.items() if k not in _BESIDE_V1}}

    @model_validator(mode="after")
    def complete(self) -> EnvTable:
        if self.v1 is not None:
            taskset = self.v1["taskset"]
            own = taskset.get("id") if isinstance(taskset, dict) else None
            if not isinstance(own, str):
                raise wrong("must be a table with an id", "taskset")
            self.id = own
        if not self.id:
            raise ValueError("id is missing; set it to a string")
        if self.command is not None and self.python:
            raise wrong("the command may have its own Python; leave python out", "command")
        return self

    @property
    def own_name(self) -> str:
        """Its name, or what its id names."""
        return self.name or self.id.rsplit("/", 1)[-1].split("@", 1)[0]

    @property
    def learns(self) -> bool:
        """Whether it has keys that `distill` reads."""
        return not self.model_fields_set.isdisjoint(LEARNING)

    def load(self, *folders: Path) -> Any:
        """Load it, from what is installed or from these folders. With `python`, whose workers load
        it, return its table.

        Raises:
            InvalidEnvironmentError: it cannot be loaded.
        """
        from verifiers_rl.envs.v1_loading import load_v1_environment

        table = {"id": self.id, "args": self.args} if self.v1 is None else self.v1
        if self.client_type is not None:
            table["client_type"] = self.client_type
        if self.command is not None:
            from verifiers_rl.envs.agents import load_agent_environment

            return load_agent_environment({**table, "command": self.command}, *folders)
        return table if self.python else load_v1_environment(table, *folders)


# Flags of a server that have a place of their own.
_OF_SERVER = {
    "model": "it is a key of its own",
    "host": "vf-rl chooses it; that of the policy is vllm_server_host in [trainer.args]",
    "port": "vf-rl chooses it; that of the policy is vllm_server_port in [trainer.args]",
}


def _spelled(args: Data) -> Data:
    for name in args:
        spelled = name.strip("-").replace("-", "_")
        if hint := _OF_SERVER.get(spelled) or f"write {spelled}" * (spelled != name):
            raise wrong(hint, name)
    return args


Flags = Annotated[dict[str, Any], AfterValidator(_spelled)]  # of a server


class InferenceTable(Table):
    """[inference]. `replicas` is None where the TOML leaves their number open."""

    gpus: NotNegativeInt = Field(default_factory=default_gpus)
    replicas: PositiveInt | None = None
    args: Flags = {}


class TrainerTable(Table):
    """[trainer]."""

    gpus: NotNegativeInt = Field(default_factory=default_gpus)
    class_: str = Field(default="", alias="class")
    args: dict[str, Any] = {}


class ClusterTable(Table):
    """[cluster]: how many machines do what, and the address of the Ray cluster that places the
    processes. Without one, vf-rl is started on each machine.
    """

    address: Text | None = None
    trainer_nodes: PositiveInt | None = None
    inference_nodes: PositiveInt | None = None


class TrainConfig(Table):
    """What each program that trains has in its TOML. `model` is resolved."""

    PROGRAM: ClassVar[str]
    MODULE: ClassVar[str]  # of a process that trains
    TRAINER: ClassVar[str]
    CONFIG: ClassVar[str]
    OTHERS = (*flat.FLAT, "--resume", "--overwrite", "--dry-run", "--check")

    model: str = ""
    import_from: Texts = []
    trainer: TrainerTable = Field(default_factory=TrainerTable)

    _layers: Layers = PrivateAttr()

    @property
    def layers(self) -> Layers:
        """Where each value is from."""
        return self._layers

    @property
    def folders(self) -> list[Path]:
        """Where its modules are: beside its files, the last one first, and `import_from`."""
        beside = [path.parent for path in reversed(self.layers.files)]
        return list(dict.fromkeys([*beside, *map(Path, self.import_from)]))

    @property
    def num_gpus_of_trainer(self) -> int:
        """On all machines."""
        return self.trainer.gpus

    def of_option(self, message: str) -> TomlError:
        """Return the error that says where the option is from with which `message` begins. A key of
        the flat layout is named as it is there.
        """
        name = (re.match(r"\w+(\.\w+)*", message) or [""])[0]
        key = (*flat.ARGS, *name.split("."))
        origin = self.layers.origin(key)
        is_table = isinstance(find(self.layers.tree, key), dict)
        own = name if is_table else origin.written[-1]
        return TomlError(f"{origin.place} {own}{message.removeprefix(name)}")

    def resolve(self, checks_model: bool) -> None:
        """Make paths absolute, here and in the tree.

        Args:
            checks_model: look whether there is such a model, on the hub too.

        Raises:
            TomlError: what a key names is not there.
        """
        self._find_paths("import_from", self.import_from, Path.is_dir, "folder")
        self.model = self.find_model(("model",), self.model, checks_model)

    def find_model(self, key: Key, model: str, checks_model: bool) -> str:
        """Return the model that a key names: its folder, or its name on the hub.

        Raises:
            TomlError: the key is missing, or there is no such model.
        """
        if not model:
            raise self.layers.error(key, "is missing; set it to a string")
        beside = self.layers.beside(model, key)
        if model.startswith(("./", "../")):
            model = str(beside)
        elif os.path.isdir(os.path.expanduser(model)):
            model = os.path.abspath(os.path.expanduser(model))
        if checks_model and (problem := model_error(model)):
            if beside.is_dir():
                problem += f"; for the folder beside the TOML write './{model}'"
            raise TomlError(f"{self.layers.place(*key)} {problem}")
        find(self.layers.tree, key[:-1])[key[-1]] = model
        return model

    def _find_paths(
        self, key: str, names: list[str], exists: Callable[[Path], bool], kind: str
    ) -> None:
        for number, name in enumerate(names):
            if not exists(path := self.layers.beside(name, (key,))):
                raise self.layers.error(
                    (key,),
                    f"there is no {kind} {path}; correct the path, which is relative to what "
                    "names it",
                )
            names[number] = str(path)
        if names:
            self.layers.tree[key] = names

    # --- What the keys name -----------------------------------------------------------------------

    def make_args(self, **others: Any) -> Any:
        """Make the RLConfig, or what the trainer's class has in its place.

        Args:
            others: options beside [trainer.args], which they replace.

        Raises:
            TomlError: a value cannot work.
        """
        kind = self.config_class()
        try:
            return kind(**{**self.trainer.args, **others})
        except (ValueError, TypeError) as error:  # ConfigError is a ValueError
            raise self.of_option(str(error)) from error

    def trainer_class(self) -> Any:
        """`RLTrainer`, or the class that [trainer] names.

        Raises:
            TomlError: no such class.
        """
        if not self.trainer.class_:
            return load_user_code(self.TRAINER, "class")
        from transformers import Trainer

        make_importable(self.folders)
        at = ("trainer", "class")
        try:
            found = load_user_code(self.trainer.class_, "class")
        except ConfigError as error:
            raise TomlError(f"{self.layers.place(*at)} {error}") from error
        if not (isinstance(found, type) and issubclass(found, Trainer)):
            raise self.layers.error(
                at, "must be a class that extends transformers.Trainer, as RLTrainer does"
            )
        return found

    def config_class(self) -> Any:
        """What [trainer.args] are the fields of: `RLConfig`, or the `config_class` of the class
        that [trainer] names. Imports transformers.
        """
        default = load_user_code(self.CONFIG, "class")
        if not self.trainer.class_:
            return default  # without the trainer, which takes seconds to import
        return getattr(self.trainer_class(), "config_class", default)

    def option(self, name: str) -> Any:
        """The value of this option in [trainer.args], or the default of its field."""
        return self.trainer.args.get(name, getattr(self.config_class(), name))

    def prepare(self) -> None:
        """Do what is needed in a process that trains, before it loads anything.

        Raises:
            TomlError: it cannot train.
        """

    def make_trainer(self, args: Any) -> Any:
        """Make the trainer, with all that it needs.

        Raises:
            ConfigError, InvalidEnvironmentError, InferenceServerError, TomlError: it cannot work.
        """
        raise NotImplementedError


def _tables(value: Any) -> Any:
    if isinstance(value, dict):
        return [value]
    if not is_tables(value):
        raise ValueError("must be one [env] or several [[env]]")
    return value


class RunConfig(TrainConfig):
    """The TOML of vf-rl and vf-train.

    Attributes:
        teachers: each [[teacher]], which the leaf `distill` reads.
    """

    PROGRAM = "vf-rl"
    MODULE = "verifiers_rl.cli.train"
    TRAINER, CONFIG = "verifiers_rl.trainer:RLTrainer", "verifiers_rl.config:RLConfig"

    envs: Annotated[list[EnvTable], BeforeValidator(_tables)] = Field(alias="env")
    teachers: list[Any] = Field([], alias="teacher")
    env_files: Texts = Field([], alias="env_file")
    inference: InferenceTable = Field(default_factory=InferenceTable)
    cluster: ClusterTable = ClusterTable()

    @classmethod
    def arrange(cls, data: Data) -> Data:
        return {"env": {}, **data}

    @model_validator(mode="after")
    def check_together(self) -> RunConfig:
        for number, env in enumerate(self.envs):
            for other in self.envs[:number]:
                are_apart = {env.only, other.only} == {"train", "eval"}
                if env.own_name == other.own_name and not are_apart:
                    problem = f"two [[env]] are named {env.own_name!r}; give one another name"
                    raise wrong(problem, "env", str(number))
        if self.trainer.args.get("vllm_servers"):
            if self.inference.model_fields_set or self.cluster.inference_nodes:
                idle = "[inference] and inference_nodes have no effect"
                problem = f"they run already, so {idle}; remove them or these"
                raise wrong(problem, *flat.ARGS, "vllm_servers")
            self.inference.gpus = 0
        if self.cluster.address:  # of machines whose GPUs are not known here
            self.inference.gpus |= "gpus" not in self.inference.model_fields_set
            self.trainer.gpus |= "gpus" not in self.trainer.model_fields_set
        return self

    def resolve(self, checks_model: bool) -> None:
        self._find_paths("env_file", self.env_files, Path.is_file, "file")
        super().resolve(checks_model)
        for number, env in enumerate(self.envs):
            if os.sep in env.python:  # else it is looked for as a shell does
                # Not resolved: an interpreter knows its packages by the link that starts it.
                at = (*self.path_of_env(number), "python")
                env.python = str(self.layers.beside(env.python, at))
                find(self.layers.tree, at[:-1])["python"] = env.python
        if self.teachers or any(env.learns for env in self.envs):
            load_leaf("distill.tables", "distillation").complete(self, checks_model)

    @property
    def num_gpus_of_trainer(self) -> int:
        return self.trainer.gpus * (self.cluster.trainer_nodes or 1)

    def make_trainer(self, args: Any) -> Any:
        envs = self.load_envs()
        if len(envs) == 1 and not self.envs[0].name:
            envs[0].name = "env"  # as in a script
        return self.trainer_class()(self.model, envs, args)

    def load_envs(self, with_teachers: bool = True) -> list[Any]:
        """Return the `WeightedEnv` of each environment, as `RLTrainer(env=...)` takes them. The
        variables of `env_file` are in this process's environment from then on.

        Args:
            with_teachers: False: where environments only run, and nothing learns from them.

        Raises:
            InvalidEnvironmentError: one cannot be loaded; the message names its file.
            TomlError: `env_file` cannot be read, or a teacher was to be started and is not.
        """
        from verifiers_rl.envs.base import InvalidEnvironmentError, WeightedEnv

        set_secrets(read_env_files(map(Path, self.env_files)))
        scorers: dict[int, Any] = {}
        if with_teachers and any(env.learns for env in self.envs):
            scorers = load_leaf("distill.tables", "distillation").make_scorers(self)
        loaded = []
        for number, table in enumerate(self.envs):
            try:
                env = table.load(*self.folders)
            except InvalidEnvironmentError as error:
                where = self.layers.error(self.path_of_env(number), str(error))
                raise InvalidEnvironmentError(str(where)) from error
            loaded.append(
                WeightedEnv(
                    env,
                    table.own_name,
                    table.weight,
                    table.sampling,
                    table.only,
                    table.eval_examples,
                    scorers.get(number),
                    table.python,
                    self.folders,
                )
            )
        return loaded

    def path_of_env(self, number: int) -> Key:
        """Return where the keys of this environment are."""
        return self.layers.key_at(("env", number))


# --- Reading --------------------------------------------------------------------------------------


def load_run_config(
    files: Path | Sequence[Path],
    words: Sequence[str] = (),
    checks_model: bool = True,
    kind: type[TrainConfig] = RunConfig,
) -> Any:
    """Read, compose and check the configuration; nothing heavy is imported.

    Args:
        files: a later one wins.
        words: keys of the command line and their values, in order; they win over all files.
        checks_model: look whether there is such a model, on the hub too.
        kind: class of the result.

    Raises:
        TomlError: with one line that says what to change.
    """
    given = [files] if isinstance(files, Path) else files
    paths = [Path(os.path.abspath(path.expanduser())) for path in given]
    try:
        settings = [one for path in paths for one in flat.settings_of(read_file(path), str(path))]
        for override in overrides_of(words):
            settings += flat.settings_of_word(*override)
        files_words = [word for path in paths for word in ("@", str(path))]
        layers = Layers(paths, [*files_words, *words], without_replaced(settings))
        return read_layers(layers, kind, checks_model)
    except RecursionError as error:
        where = ", ".join(map(str, paths))
        raise TomlError(f"{where}: tables and lists are in each other too deeply") from error


def read_layers(
    layers: Layers, kind: type[TrainConfig] = RunConfig, checks_model: bool = True
) -> Any:
    """Check a configuration that is composed; see `load_run_config`."""
    config: Any = read_table(layers, (), kind.model_validate)
    config._layers = layers
    config.resolve(checks_model)
    return config


_OF_THE_BEST = {"trainer.args.load_best_model_at_end", "trainer.args.metric_for_best_model"}
_OF_EVALUATIONS = _OF_THE_BEST | {
    "trainer.args.eval_steps",
    "trainer.args.eval_on_start",
    "data.eval",
    "data.eval_split",
}
# An option, a value of it (None: any), and what is refused or without effect beside it.
_REPLACES: Sequence[tuple[str, str | None, set[str]]] = (
    ("eval_strategy", "no", _OF_EVALUATIONS),
    ("save_strategy", "no", _OF_THE_BEST),
    ("max_steps", None, {"trainer.args.num_train_epochs"}),
    ("num_train_epochs", None, {"trainer.args.max_steps"}),
)


def without_replaced(settings: list[Setting]) -> list[Setting]:
    """Return the settings without what a later layer has made useless: where it sets an option of
    `_REPLACES`, earlier layers lose the others. Within a layer both are an error.
    """
    for name, value, gone in _REPLACES:
        found = [one for one in settings if one.key == (*flat.ARGS, name)]
        if found and value in (None, found[-1].value):
            first = [one.source for one in settings].index(found[-1].source)  # of its layer
            earlier = [one for one in settings[:first] if ".".join(one.key) not in gone]
            settings = earlier + settings[first:]
    return settings


def read_table(layers: Layers, at: Key, make: Callable[[Data], _Made]) -> _Made:
    """Return what pydantic makes of a table of a configuration.

    Raises:
        TomlError: a key is unknown, or has a value that does not fit.
    """
    try:
        return make(find(layers.tree, at))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        below = first.get("ctx", {}).get("key", ())
        key = layers.key_at((*at, *first["loc"], *below))
        raise layers.error(key, problem_of(error, first["loc"])) from error


def make_importable(folders: Iterable[Path]) -> None:
    """Modules in these folders, beside the TOML, can be imported. Of two, the first one's."""
    for folder in reversed(list(folders)):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


# --- The command line -----------------------------------------------------------------------------

PARSER: dict[str, Any] = {"allow_abbrev": False, "prefix_chars": "-@"}  # how parsers are made
# Options that are about one start, and the words of the command line that set them.
STARTS = {"resume_from_checkpoint": "--resume", "overwrite_output_dir": "--overwrite"}


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add `--dry-run`, and what to do with a run that the output_dir holds already."""
    parser.add_argument(
        "--dry-run", action="store_true", help="only print the resolved configuration"
    )
    group = parser.add_mutually_exclusive_group()
    add = partial(group.add_argument, dest="start", action="store_const")
    add("--resume", const="resume_from_checkpoint", help="go on from the newest checkpoint")
    add("--overwrite", const="overwrite_output_dir", help="replace the run of the output_dir")


def words_of(config: TrainConfig, files: Sequence[str] = ()) -> list[str]:
    """Return the words of a command that start this run, with what they do to the output_dir.

    Args:
        files: words that give the configuration; by default its own.
    """
    starts = (word for option, word in STARTS.items() if config.trainer.args.get(option) is True)
    return [*(files or config.layers.words), *starts]


def parse_command_line(
    parser: argparse.ArgumentParser,
    argv: list[str],
    kind: type[TrainConfig] = RunConfig,
) -> tuple[argparse.Namespace, Any]:
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
    options, rest = parser.parse_known_args(argv)
    if not options.files:
        raise TomlError(
            "no configuration: give one as `@ config.toml`. A script stands first, as in "
            "`vf-rl train.py`, and takes none of these options"
        )
    checks_model = not getattr(options, "dry_run", False)
    config = load_run_config(options.files, rest, checks_model, kind)
    if start := getattr(options, "start", None):
        config.trainer.args[start] = True
    return options, config
