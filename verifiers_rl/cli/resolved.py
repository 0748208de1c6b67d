"""The configuration of a run as one TOML in our layout, which runs as it is, from any folder."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from verifiers_rl.cli.config import RunConfig, TomlError
from verifiers_rl.cli.layers import COMMAND_LINE, plain
from verifiers_rl.process.secret_names import is_secret_key
from verifiers_rl.report.run_folder import RunFolderError, holds_a_run

RESOLVED = "resolved.toml"  # in the run's folder
# What may be a path that is relative to where vf-rl was started.
PATHS_OF_TRAINER = ("deepspeed", "fsdp_config", "accelerator_config", "resume_from_checkpoint")
PATHS_OF_SERVER = ("chat_template", "tokenizer", "hf_config_path", "generation_config")
MAX_CODE_MB = 100  # of the folders that travel to the machines
_LEFT_BEHIND = shutil.ignore_patterns(
    *(".*", "__pycache__", "outputs", "checkpoint-*", "wandb", "node_modules"),
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.log", "*.env"),
)


def resolved_text(config: RunConfig, output_dir: str) -> str:
    """Return the TOML of this configuration, without secrets.

    Args:
        output_dir: folder of the run.
    """
    import tomli_w

    data = plain(config.tree)
    first: dict[str, Any] = {"model": config.model}
    if config.env_files:
        first["env_file"] = [str(path) for path in config.env_files]
    first["import_from"] = [str(path) for path in config.folders]
    args = dict(config.trainer_args)
    args.pop("overwrite_output_dir", None)  # is about one start
    args["output_dir"] = str(Path(output_dir).absolute())
    _make_absolute(args, PATHS_OF_TRAINER)
    trainer = {k: v for k, v in data.get("trainer", {}).items() if k != "args"} | {"args": args}
    rest = {k: v for k, v in data.items() if k not in first and k not in ("trainer", "env_file")}
    rest |= config.resolved_tables()
    _make_absolute(rest.get("inference", {}).get("args", {}), PATHS_OF_SERVER)
    for number, env in enumerate(config.envs):
        if env.python:
            envs = rest["env"]
            (envs[number] if isinstance(envs, list) else envs)["python"] = env.python
    for table in config.teachers:
        written = rest["teacher"][table.number]
        written["model"] = table.model
        _make_absolute(written.get("args", {}), PATHS_OF_SERVER)
    secrets: list[str] = []
    told = _without_secrets({**first, **rest, "trainer": trainer}, "", secrets)
    sources = [str(path) for path in config.files]
    if len(config.words) > 2 * len(sources):
        sources.append(COMMAND_LINE)
    how = f"It runs as it is: {config.PROGRAM} @ {RESOLVED}"
    if secrets:
        how = f"Give what it lacks in another file: {config.PROGRAM} @ {RESOLVED} @ secrets.toml"
    head = [f"# What {config.PROGRAM} makes of {', '.join(sources)}. {how}"]
    head += [f"# Left out, because its name or its form is that of a secret: {k}" for k in secrets]
    return "\n".join(head) + "\n" + tomli_w.dumps(told)


def _make_absolute(args: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if isinstance(path := args.get(name), str) and os.path.exists(path):
            args[name] = str(Path(path).absolute())


def _without_secrets(value: Any, at: str, secrets: list[str]) -> Any:
    """Return data without secrets, whose keys are added to `secrets`, and without None."""
    if isinstance(value, list):
        return [_without_secrets(v, f"{at}.{i}", secrets) for i, v in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, inner in value.items():
        name = f"{at}.{key}".lstrip(".")
        if is_secret_key(key, inner):
            secrets.append(name)
        elif inner is not None:
            kept[key] = _without_secrets(inner, name, secrets)
    return kept


def write_resolved(config: RunConfig, output_dir: str) -> Path:
    """Write the TOML of this configuration into the run's folder, unless it alone was read.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    target = Path(os.path.abspath(Path(output_dir).expanduser())) / RESOLVED
    if config.words == ["@", str(target)]:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Other ranks may be reading the file, if it was an input.
        beside = target.with_name(f".{RESOLVED}.new")
        beside.write_text(resolved_text(config, output_dir), "utf-8")
        beside.replace(target)
    except OSError as error:
        raise RunFolderError(
            f"output_dir={output_dir!r} cannot be written: {error.strerror}; choose another"
        ) from error
    return target


def dry_run(config: RunConfig, resume: bool | str | None = None) -> int:
    """Print the resolved configuration, and write it into the run's folder, unless that holds a
    run already. Its values are checked as far as nothing has to be started or loaded for that.
    Returns the exit status.

    Raises:
        TomlError: a value cannot work.
        RunFolderError: the run could not begin in its folder.
    """
    from verifiers_rl.cli.plan import check_folder, check_trainer_options

    args = check_trainer_options(config)
    check_folder(args, resume)
    print(resolved_text(config, args.output_dir), end="")
    sys.stdout.flush()
    if holds_a_run(args.output_dir):
        where = f"{args.output_dir} holds a run, so this was not written there"
    else:
        where = f"this is in {write_resolved(config, args.output_dir)}"
    print(f"{config.PROGRAM}: {where}; nothing was started", file=sys.stderr)
    return 0


def write_code(config: RunConfig, output_dir: str, folder: Path) -> None:
    """Write into a folder what travels to the machines: one TOML, and the folders with its modules.
    Secrets stay here, also the files of `env_file`.

    Raises:
        TomlError: they are too large.
    """
    import tomli_w

    def stays(parent: str, names: list[str]) -> set[str]:
        # The run's own TOMLs travel as the resolved one, which has no secrets.
        own = {path.resolve() for path in (*config.env_files, *config.files)}
        return _LEFT_BEHIND(parent, names) | {n for n in names if Path(parent, n).resolve() in own}

    text = resolved_text(config, output_dir)
    for line in text.splitlines():
        if line.startswith("# Left out"):
            print(f"vf-rl: not sent to the machines of the cluster: {line[2:]}", flush=True)
    data = tomllib.loads(text)
    data.pop("cluster", None)
    data["import_from"] = []
    for number, source in enumerate(config.folders):
        num_bytes = 0
        for parent, folders, files in os.walk(source):
            left = stays(parent, [*folders, *files])
            folders[:] = [name for name in folders if name not in left]
            kept = [Path(parent, name) for name in files if name not in left]
            num_bytes += sum(path.stat().st_size for path in kept if path.is_file())
            if num_bytes > MAX_CODE_MB * 1e6:
                raise TomlError(
                    f"{source}: this folder travels to the machines of the Ray cluster with what "
                    f"is in it, which is more than {MAX_CODE_MB} MB; put the TOML and its modules "
                    "into a folder of their own"
                )
        target = folder / f"code{number}"
        shutil.copytree(source, target, ignore=stays, ignore_dangling_symlinks=True)
        data["import_from"].append(f"./code{number}")
    (folder / "config.toml").write_text(tomli_w.dumps(data), "utf-8")
