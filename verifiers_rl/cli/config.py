"""The one TOML that `vf-rl` and `vf-train` read.

model = "Qwen/Qwen3-0.6B"        # a name on the hub or a folder;
                                 # ./ and ../ are relative to this file

[env.taskset]                    # of verifiers.v1; [env] has the keys of its EnvConfig
id = "reverse_text_v1"           # installed, or a module beside this file
[env.harness]                    # of its only agent; short for [env.agent.harness]
id = "null"
[env.eval_taskset]               # what differs in the taskset of evaluations

[env]                            # or a classic environment (verifiers<0.4)
id = "reverse_text"
[env.args]                       # keyword arguments of its load_environment

                                 # or several: [[env]], each one of these and also
                                 # name = "..."  prefix of its metrics, by default its id
                                 # weight = 1    its share of the groups
                                 # sampling = {max_tokens = 64}  in place of [trainer.args]'s

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
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from verifiers_rl.inference.checkpoint import model_error
from verifiers_rl.user_code import UserCodeError, load_user_code, names_user_code


class TomlError(ValueError):
    """The TOML cannot be used; the message names the file, the key and the fix."""


@dataclass
class EnvTable:
    """One [env] or [[env]]: classic ones have `id` and `args`, those of verifiers.v1 `v1`."""

    id: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    weight: float = 1.0
    sampling: dict[str, Any] = field(default_factory=dict)
    v1: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.name = self.name or self.id

    def load(self, search_path: Path) -> Any:
        if self.v1 is None:
            from verifiers_rl.envs.base import check_classic

            check_classic(f"[env] id={self.id!r} without [env.taskset]")
            from verifiers_rl.envs.classic import load_environment

            return load_environment(self.id, self.args, search_path)
        from verifiers_rl.envs.v1 import load_v1_environment

        return load_v1_environment(self.v1, search_path)


@dataclass
class RunConfig:
    """A checked TOML. `model` is resolved; `folder` is the TOML's own."""

    path: Path
    model: str
    envs: list[EnvTable]
    is_mix: bool = False
    inference_gpus: int = 1
    inference_replicas: int = 1
    has_replicas: bool = False  # the TOML sets their number
    inference_args: dict[str, Any] = field(default_factory=dict)
    trainer_gpus: int = 1
    trainer_args: dict[str, Any] = field(default_factory=dict)
    trainer_class_name: str = ""

    @property
    def folder(self) -> Path:
        return self.path.parent

    def trainer_class(self) -> Any:
        """`RLTrainer`, or the class that [trainer] names.

        Raises:
            TomlError: no such class.
        """
        if not self.trainer_class_name:
            from verifiers_rl.trainer import RLTrainer

            return RLTrainer
        from transformers import Trainer

        make_importable(self.folder)
        try:
            found = load_user_code(self.trainer_class_name, "class")
        except UserCodeError as error:
            raise TomlError(f"{self.path}: [trainer] {error}") from error
        if not (isinstance(found, type) and issubclass(found, Trainer)):
            raise TomlError(
                f"{self.path}: [trainer] class={self.trainer_class_name!r}: must be a class that "
                "extends transformers.Trainer, as RLTrainer does"
            )
        return found

    def config_class(self) -> Any:
        """What [trainer.args] are the fields of: `RLConfig`, or the `config_class` of the class
        that [trainer] names. Imports transformers.
        """
        from verifiers_rl.config import RLConfig

        if not self.trainer_class_name:
            return RLConfig  # without the trainer, which takes seconds to import
        return getattr(self.trainer_class(), "config_class", RLConfig)

    def option(self, name: str) -> Any:
        """The value of this option in [trainer.args], or the default of its field."""
        defaults = {f.name: f.default for f in fields(self.config_class())}
        return self.trainer_args.get(name, defaults[name])

    def load_own_code(self) -> None:
        """Load what the TOML names as "module:name", to see whether it can be.

        Raises:
            ConfigError, TomlError: it cannot.
        """
        args = self.trainer_args
        masks = args.get("gradient_masks")
        names = [args.get("loss"), args.get("advantage")]
        names += masks if isinstance(masks, dict) else []
        if self.trainer_class_name or any(names_user_code(str(name)) for name in names):
            import transformers  # noqa: F401  # before a module beside the TOML hides a library

            make_importable(self.folder)
            checked = self.config_class()(**{**args, "use_cpu": True, "bf16": False})
            checked.make_loss()
            checked.make_masks()
            checked.make_advantage()

    def load_envs(self) -> Any:
        """What `RLTrainer(env=...)` takes: the environment of [env], or those of the [[env]]s.

        Raises:
            InvalidEnvironmentError: one cannot be loaded.
        """
        from verifiers_rl.envs.base import WeightedEnv

        loaded = [env.load(search_path=self.folder) for env in self.envs]
        if not self.is_mix:
            return loaded[0]
        return [
            WeightedEnv(env, table.name, table.weight, table.sampling)
            for env, table in zip(loaded, self.envs, strict=True)
        ]


def load_run_config(path: Path, checks_model: bool = True) -> RunConfig:
    """Read and check the TOML; nothing heavy is imported.

    Args:
        checks_model: look whether there is such a model, on the hub too.

    Raises:
        TomlError: with one line that says what to change.
    """
    path = path.expanduser().absolute()
    try:
        data = tomllib.loads(path.read_text("utf-8-sig"))  # some editors begin with a mark
    except OSError as error:
        raise TomlError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TomlError(f"{path}: {error}") from error

    def table(parent: dict[str, Any], name: str) -> dict[str, Any]:
        value = parent.get(name.split(".")[-1], {})
        if not isinstance(value, dict):
            raise TomlError(f"{path}: [{name}] must be a table, not {value!r}")
        return value

    check_keys(data, ("model", "env", "inference", "trainer"), f"{path}: the top level")
    inference, trainer = (table(data, name) for name in ("inference", "trainer"))
    for name, section, what in (
        ("inference", inference, "flags of the server"),
        ("trainer", trainer, "options of the trainer"),
    ):
        advice = f"{what} belong into [{name}.args]"
        known = ("gpus", "class" if name == "trainer" else "replicas", "args")
        check_keys(section, known, f"{path}: [{name}]", advice)
    class_name = trainer.get("class", "")
    if "class" in trainer and not (isinstance(class_name, str) and names_user_code(class_name)):
        raise TomlError(f"{path}: [trainer] class={class_name!r}: must be of the form module:name")
    if not isinstance(data.get("model"), str) or not data["model"]:
        raise TomlError(f"{path}: model is missing; set it to a string")
    gpus = {}
    for name, section in (("inference", inference), ("trainer", trainer)):
        gpus[name] = section.get("gpus", 1)
        if not isinstance(gpus[name], int) or isinstance(gpus[name], bool) or gpus[name] < 0:
            raise TomlError(f"{path}: {name}.gpus={gpus[name]!r} must be an integer >= 0 (0: CPU)")
    replicas = inference.get("replicas", 1)
    if type(replicas) is not int or replicas < 1:
        raise TomlError(f"{path}: inference.replicas={replicas!r} must be an integer >= 1")
    if table(trainer, "trainer.args").get("vllm_servers"):
        if inference:
            raise TomlError(
                f"{path}: [trainer.args] has vllm_servers, which run already, so [inference] has "
                "no effect; remove one of the two"
            )
        gpus["inference"] = 0
    model = data["model"]
    if model.startswith(("./", "../")):
        model = str((path.parent / model).resolve())
    if checks_model and (problem := model_error(model)):
        if (path.parent / model).is_dir():
            problem += f"; for the folder beside the TOML write './{model}'"
        raise TomlError(f"{path}: {problem}")
    config = RunConfig(
        path=path,
        model=model,
        envs=_env_tables(path, data.get("env", {})),
        is_mix=isinstance(data.get("env"), list),
        inference_gpus=gpus["inference"],
        inference_replicas=replicas,
        has_replicas="replicas" in inference,
        inference_args=with_underscores(
            table(inference, "inference.args"), f"{path}: [inference.args]"
        ),
        trainer_gpus=gpus["trainer"],
        trainer_class_name=class_name,
        trainer_args=table(trainer, "trainer.args"),
    )
    elsewhere = {
        "model": "model at the top level",
        "host": "vllm_server_host in [trainer.args]",
        "port": "vllm_server_port in [trainer.args]",
    }
    for name in elsewhere.keys() & config.inference_args.keys():
        raise TomlError(f"{path}: [inference.args] has {name!r}; set {elsewhere[name]} instead")
    return config


def _env_tables(path: Path, data: Any) -> list[EnvTable]:
    """[env] or the [[env]]s, checked."""
    is_mix = isinstance(data, list)
    if not isinstance(data, dict) and not (is_mix and data):
        raise TomlError(f"{path}: env must be one [env] or several [[env]], not {data!r}")
    tables: list[EnvTable] = []
    for number, env in enumerate(data if is_mix else [data]):
        where = f"{path}: [[env]] {number + 1}" if is_mix else f"{path}: [env]"
        if not isinstance(env, dict):
            raise TomlError(f"{where} must be a table, not {env!r}")
        # One environment alone has no share, and its sampling is the run's.
        ours = ("name", "weight", "sampling") if is_mix else ()
        if "taskset" in env:  # its other keys are checked by verifiers
            v1 = {key: value for key, value in env.items() if key not in ours}
            taskset = env["taskset"]
            if not isinstance(taskset, dict) or not isinstance(taskset.get("id"), str):
                raise TomlError(f"{where}: taskset={taskset!r} must be a table with an id")
            env = {key: env[key] for key in ours if key in env} | {"id": taskset["id"], "v1": v1}
        else:
            check_keys(env, ("id", "args", *ours), where)
        for key, kind in (("id", str), ("name", str), ("args", dict), ("sampling", dict)):
            if key in env and not isinstance(env[key], kind):
                expected = "string" if kind is str else "table"
                raise TomlError(f"{where}: {key}={env[key]!r} must be a {expected}")
        if not env.get("id"):
            raise TomlError(f"{where}: id is missing; set it to a string")
        weight = env.get("weight", 1.0)
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < float("inf"):
            raise TomlError(f"{where}: weight={weight!r} must be a number > 0")
        tables.append(EnvTable(**env))
        if tables[-1].name in [table.name for table in tables[:-1]]:
            raise TomlError(
                f"{path}: two [[env]] are named {tables[-1].name!r}; give one another name"
            )
    return tables


def with_underscores(table: dict[str, Any], where: str) -> dict[str, Any]:
    """The keys of flags in one spelling, so that a key is found however it was written.

    Raises:
        TomlError: a flag is there in two spellings.
    """
    args: dict[str, Any] = {}
    for key, value in table.items():
        name = key.lstrip("-").replace("-", "_")
        if name in args:
            raise TomlError(f"{where} has {name!r} in two spellings; remove one, such as {key!r}")
        args[name] = value
    return args


def check_keys(table: dict[str, Any], known: Iterable[str], where: str, advice: str = "") -> None:
    """Raise TomlError for the first key that is not known, with the nearest known one, or else with
    the advice.
    """
    known = list(known)
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            if advice and not near:
                hint += f"; {advice}"
            raise TomlError(f"{where} has an unknown key {key!r}; {hint}")


def check_trainer_args(config: RunConfig) -> None:
    """Raise TomlError for a key of [trainer.args] that is no field of the trainer's config.
    Imports transformers.
    """
    from verifiers_rl.config import unknown_option_hint

    known = {f.name for f in fields(config.config_class())}
    if unknown := [name for name in config.trainer_args if name not in known]:
        hints = "; ".join(
            f"{name!r}; {unknown_option_hint(name, config.config_class())}" for name in unknown
        )
        raise TomlError(f"{config.path}: [trainer.args] has an unknown key {hints}")


def make_importable(folder: Path) -> None:
    """Modules in this folder, the TOML's, can be imported."""
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


def toml_argument(argv: list[str]) -> tuple[Path, list[str]]:
    """The file after `@` (or attached to it, or right after --check), and the other arguments.

    Raises:
        TomlError: no `@ FILE`.
    """
    for i, word in enumerate(argv):
        if word == "--check" and argv[i + 1 :] and not argv[i + 1].startswith(("@", "-")):
            return Path(argv[i + 1]), argv[: i + 1] + argv[i + 2 :]
        if word == "@" and i + 1 < len(argv):
            return Path(argv[i + 1]), argv[:i] + argv[i + 2 :]
        if word.startswith("@") and len(word) > 1:
            return Path(word[1:]), argv[:i] + argv[i + 1 :]
    raise TomlError("no configuration: give one as `@ config.toml`")
