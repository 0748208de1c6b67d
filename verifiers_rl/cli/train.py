"""`vf-train @ config.toml`: the trainer alone, against a `vf-vllm` server that runs already.

It takes several files and keys of the command line, as `vf-rl` does.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import NoReturn

from verifiers_rl.cli.ending import Interrupt, end_with
from verifiers_rl.process.interrupts import Interrupted

USAGE = "vf-train @ config.toml [@ more.toml] [--KEY VALUE] [--resume [CHECKPOINT] | --overwrite]"


def say(message: object, is_training: bool = False) -> None:
    if is_training:  # a progress bar may be in the middle of a line
        print(file=sys.stderr)
    print(f"vf-train: {message}", file=sys.stderr)


def fail(message: object, is_training: bool = False) -> NoReturn:
    say(f"error: {message}", is_training)
    sys.exit(1)


def main() -> None:
    # Not for what we start in turn.
    if parent := os.environ.pop("VERIFIERS_RL_DIE_WITH_PARENT", None):
        # Under accelerate its launcher is between us and vf-rl.
        end_with({int(parent), os.getppid()})
    interrupt = Interrupt()
    interrupt.handle_signals()
    try:
        train(interrupt)
    except Interrupted:  # train() has said what is saved
        interrupt.release()  # a launcher ends this process when another rank has ended
        raise
    except KeyboardInterrupt:
        if is_first_rank():
            say("interrupted before training")
        sys.exit(interrupt.exit_status)


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def train(interrupt: Interrupt) -> None:
    from verifiers_rl.cli.config import (
        TomlError,
        add_folder_options,
        check_trainer_args,
        make_importable,
        parse_command_line,
    )
    from verifiers_rl.cli.resolved import write_resolved
    from verifiers_rl.cli.servers import servers_of_vf_rl

    parser = argparse.ArgumentParser(
        prog="vf-train", usage=USAGE, description=__doc__, allow_abbrev=False
    )
    add_folder_options(parser)
    if {"-h", "--help"} & set(sys.argv):
        parser.parse_args(["--help"])
    try:
        options, config = parse_command_line(parser, sys.argv[1:])
        check_trainer_args(config)  # which imports transformers, before the TOML's own modules
        make_importable(config.folders)
    except TomlError as error:
        fail(error)
    if config.trainer_gpus > 1 and "LOCAL_RANK" not in os.environ:
        fail(
            f"{config.source('trainer', 'gpus')}: trainer.gpus={config.trainer_gpus} needs a "
            f"process for each: accelerate launch --num_processes {config.trainer_gpus} "
            f"-m verifiers_rl.cli.train {shlex.join(config.words)}"
        )

    from verifiers_rl.config import ConfigError
    from verifiers_rl.envs.base import InvalidEnvironmentError
    from verifiers_rl.inference.client import InferenceServerError
    from verifiers_rl.orchestrator import RolloutError
    from verifiers_rl.report.run_folder import RunFolderError, prepare_run_folder

    trainer = None
    try:
        trainer_class = config.trainer_class()
        args = config.make_args(**({"use_cpu": True} if config.trainer_gpus == 0 else {}))
        if servers := servers_of_vf_rl():
            args.vllm_servers = servers
        # As train() will, but now. On one rank: the others may look when its run has begun.
        if is_first_rank():
            prepare_run_folder(
                str(args.output_dir),
                resume=options.resume or args.resume_from_checkpoint,
                overwrite=args.overwrite_output_dir,
                max_steps=args.max_steps,
            )
            write_resolved(config, args.output_dir)
        trainer = trainer_class(config.model, config.load_envs(), args)
        interrupt.handle_signals()  # verifiers' environments put handlers of their own
        trainer.train(resume_from_checkpoint=options.resume)
    except (
        ConfigError,
        InvalidEnvironmentError,
        InferenceServerError,
        RunFolderError,
        TomlError,
    ) as error:
        fail(error, is_training=trainer is not None)
    except RolloutError as error:
        import traceback

        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        fail(error, is_training=True)


if __name__ == "__main__":
    main()
