"""`vf-train @ config.toml`: the trainer alone, against a `vf-vllm` server that runs already.

It takes several files and keys of the command line, as `vf-rl` does. `vf-rl train.py` starts a rank
of a script by this program too, which then is that script.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from verifiers_rl.cli.config import (
    PARSER,
    RunConfig,
    TomlError,
    TrainConfig,
    add_run_options,
    make_importable,
    parse_command_line,
    words_of,
)
from verifiers_rl.cli.errors import fail
from verifiers_rl.cli.plan import (
    REQUEST_VARIABLE,
    check_start,
    options_of_servers,
    trainer_command,
)
from verifiers_rl.inference.client import InferenceServerError
from verifiers_rl.option_rules import ConfigError
from verifiers_rl.process import parent
from verifiers_rl.process.ending import end_by_signals, end_with_starter, interrupt_by_signals
from verifiers_rl.process.interrupts import Interrupted
from verifiers_rl.process.terminal import print_all_characters, printable
from verifiers_rl.report.run_folder import RunFolderError, WritingError, replace_file

# Options that decide how a server is started; see cli/plan.py.
OF_SERVER = (
    "vllm_server_host",
    "vllm_server_port",
    "vllm_servers",
    "vllm_server_timeout",
    "output_dir",
    "max_seq_len",
    "max_off_policy_steps",
    "lora_sync",
    "lora_modules_to_save",
    "deterministic",
    "router_replay",
)
USAGE = "[--dry-run] @ config.toml [@ more.toml] [--KEY VALUE] [--resume | --overwrite]"
ABOUT = "A KEY is one of the TOML's, such as trainer.args.max_steps; it replaces the files' value."


def main(name: str = "vf-train", kind: type[TrainConfig] = RunConfig) -> None:
    """Be a command that trains in this process.

    Args:
        name: of the command.
        kind: of its configuration.
    """
    end_with_starter()
    interrupt_by_signals()
    print_all_characters()
    try:
        # Not for what the script starts in turn, which would be taken for the script.
        if request := os.environ.pop(REQUEST_VARIABLE, None):
            parent.ask_for_server = partial(ask_for_server, Path(request))
            del sys.argv[0]
            sys.argv[0] = os.path.abspath(sys.argv[0])  # the script may change the folder
            sys.path[0] = os.path.dirname(sys.argv[0])
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            train(name, kind)
    except Interrupted:
        end_by_signals()  # a launcher ends this process when another rank has ended
        raise


def ask_for_server(path: Path, policy: Any, adapter: Any, args: Any) -> None:
    """Ask the `vf-rl` that has started this script for a server, see `cli.rl.run_script`.

    Args:
        path: of the request, a TOML.
        policy: the model that is trained.
        adapter: its PEFT config, if the server is sent one.
        args: the `RLConfig`.

    Raises:
        ConfigError: the script needs no server, has one of another model, or the model is from no
            folder or hub.
    """
    import tomllib

    import tomli_w

    model, rank = policy.name_or_path, getattr(adapter, "r", 0)
    if args.vllm_servers:
        raise ConfigError(
            f"vllm_servers={args.vllm_servers!r}: vf-rl starts a server for a script; leave them "
            "out, or start the script by python, which uses them"
        )
    if not model:
        raise ConfigError(
            "model: vf-rl cannot start a server of a model without a name; save it by "
            "save_pretrained, and give RLTrainer the folder"
        )
    options = {name: value for name in OF_SERVER if (value := getattr(args, name))}
    # The request is in another folder than the one to which the path is relative.
    model = os.path.abspath(model) if os.path.isdir(model) else model
    if path.exists() and (served := tomllib.loads(path.read_text("utf-8"))["model"]) != model:
        raise ConfigError(
            f"model={model!r}: vf-rl has started a server of {served} for this script, and starts "
            "one alone; train the other model in a script of its own"
        )
    request = {
        "model": model,
        "env": {"id": "script"},
        "inference": {
            "args": {
                "dtype": "auto" if args.bf16 else "float32",  # in which the trainer computes
                "enforce_eager": args.device.type == "cpu",  # where compiling takes too long
            }
        },
        "trainer": {"args": {**options, "use_lora": rank > 0, "lora_rank": rank}},
    }
    replace_file(path, tomli_w.dumps(request).encode())


def train(name: str = "vf-train", kind: type[TrainConfig] = RunConfig) -> None:
    from verifiers_rl.cli.resolved import dry_run, write_resolved

    usage = f"{name} {USAGE}"
    parser = argparse.ArgumentParser(prog=name, usage=usage, description=ABOUT, **PARSER)
    add_run_options(parser)
    try:
        options, config = parse_command_line(parser, sys.argv[1:], kind=kind)
        config.config_class()  # imports transformers, before the TOML's own modules
        make_importable(config.folders)
        config.prepare()
        if options.dry_run:
            sys.exit(dry_run(config))
        if config.trainer.gpus > 1 and "LOCAL_RANK" not in os.environ:
            command = trainer_command(config, words_of(config))
            os.execv(sys.executable, [sys.executable, *command])
    except (TomlError, RunFolderError) as error:
        fail(error, name)

    from verifiers_rl.envs.base import InvalidEnvironmentError
    from verifiers_rl.orchestrator import RolloutError

    trainer = None
    try:
        device = {"use_cpu": True} if config.trainer.gpus == 0 else {}
        args = config.make_args(**device, **options_of_servers())
        args.complete_loss(None), args.make_advantage()  # code of the TOML, before environments
        # As train() will, but now. On one rank: the others may look when its run has begun.
        if os.environ.get("RANK", "0") == "0":
            check_start(config, args)
            write_resolved(config, args.output_dir)
        trainer = config.make_trainer(args)
        interrupt_by_signals()  # verifiers' environments put handlers of their own
        trainer.train()
    except ConfigError as error:
        fail(config.of_option(str(error)), name)
    except (
        InvalidEnvironmentError,
        InferenceServerError,
        RolloutError,
        RunFolderError,
        TomlError,
        WritingError,
    ) as error:
        if isinstance(error, RolloutError) and error.__cause__ is not None:
            print(printable("".join(traceback.format_exception(error.__cause__))), file=sys.stderr)
        if trainer is not None:
            print(file=sys.stderr)  # a progress bar may be in the middle of a line
        fail(error, name)


if __name__ == "__main__":
    main()
