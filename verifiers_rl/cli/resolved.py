"""The configuration of a run as one TOML in our layout, which runs as it is, from any folder."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

from verifiers_rl.cli.config import STARTS, TrainConfig, make_importable
from verifiers_rl.cli.layers import COMMAND_LINE
from verifiers_rl.option_rules import ConfigError
from verifiers_rl.process.secret_names import is_secret_key
from verifiers_rl.report.run_folder import RESOLVED, replace_file

# Flags and options that may be a path, which is relative to where vf-rl was started.
PATHS = (
    "deepspeed",
    "fsdp_config",
    "accelerator_config",
    "resume_from_checkpoint",
    "chat_template",
    "tokenizer",
    "hf_config_path",
    "generation_config",
)
LEFT_OUT = "Left out, because its name or its form is that of a secret: "


def resolved(config: TrainConfig, output_dir: str) -> tuple[dict[str, Any], list[str]]:
    """Return the data of this configuration's TOML, and the keys of secrets, which it lacks.

    Args:
        output_dir: folder of the run, absolute.
    """
    data = copy.deepcopy(config.layers.tree)
    data["import_from"] = list(map(str, config.folders))
    args = {**config.trainer.args, "output_dir": output_dir}
    args = {name: value for name, value in args.items() if name not in STARTS or value is not True}
    data["trainer"] = {**data.get("trainer", {}), "args": args}
    for table in (data["trainer"], data.get("inference", {}), *data.get("teacher", [])):
        _make_absolute(table.get("args", {}))
    secrets: list[str] = []
    return _without_secrets(data, "", secrets), secrets


def resolved_text(config: TrainConfig, output_dir: str) -> str:
    """Return the TOML of `resolved`, with comments that say what it is."""
    import tomli_w

    data, secrets = resolved(config, output_dir)
    sources = list(map(str, config.layers.files))
    if any(one.source == COMMAND_LINE for one in config.layers.settings):
        sources.append(COMMAND_LINE)
    how = f"It runs as it is: {config.PROGRAM} @ {RESOLVED}"
    if secrets:
        how = f"Give what it lacks in another file: {config.PROGRAM} @ {RESOLVED} @ secrets.toml"
    head = [f"# What {config.PROGRAM} makes of {', '.join(sources)}. {how}"]
    return "\n".join([*head, *(f"# {LEFT_OUT}{key}" for key in secrets), tomli_w.dumps(data)])


def _make_absolute(args: dict[str, Any]) -> None:
    for name in PATHS:
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


def write_resolved(config: TrainConfig, output_dir: str) -> Path:
    """Write the TOML of this configuration into the run's folder, unless it alone was read. What
    this process starts then reads it, so that all run the same whatever happens to the files; where
    secrets are left out in it, they read the files.
    """
    target = Path(output_dir, RESOLVED)
    words, text = ["@", str(target)], resolved_text(config, output_dir)
    if config.layers.words != words:
        # Other ranks may be reading the file, if it was an input.
        replace_file(target, text.encode())
    if LEFT_OUT not in text:
        config.layers.words = words
    return target


def dry_run(config: TrainConfig) -> int:
    """Print the resolved configuration. Its values are checked as far as nothing has to be started
    for that; losses, masks and advantages of the user are imported. Returns the exit status.

    Raises:
        TomlError: a value cannot work.
        RunFolderError: the run could not begin in its folder.
    """
    from verifiers_rl.cli.plan import check_start, check_trainer_options

    args = check_trainer_options(config)
    make_importable(config.folders)
    try:
        args.complete_loss(None), args.make_advantage()
    except ConfigError as error:
        raise config.of_option(str(error)) from error
    check_start(config, args)
    print(resolved_text(config, args.output_dir), end="")
    print(f"{config.PROGRAM}: nothing was started", file=sys.stderr)
    return 0
