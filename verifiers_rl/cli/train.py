"""`vf-train @ config.toml`: the trainer alone, against a `vf-vllm` server that runs already.

It takes several files and keys of the command line, as `vf-rl` does.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from verifiers_rl.cli.ending import Interrupt, end_with
from verifiers_rl.process.interrupts import Interrupted

USAGE = "vf-train @ config.toml [@ more.toml] [--KEY VALUE] [--resume [CHECKPOINT] | --overwrite]"


@dataclass(frozen=True)
class Program:
    """A command that trains in its own process.

    Attributes:
        name, usage, about: of the command, for people.
        config_class: returns the class of its configuration, which is imported late.
        add_options: adds options of its own to those about the run's folder.
        run_other: does what these options ask for in place of training, and returns the exit
            status; None: training goes on.
        launch: starts the ranks of a run with several, in place of this process.
    """

    name: str
    usage: str
    about: str
    config_class: Callable[[], Any]
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    run_other: Callable[[argparse.Namespace, Any], int | None] = lambda options, config: None
    launch: Callable[[argparse.Namespace, Any], NoReturn] | None = None

    def say(self, message: object, is_training: bool = False) -> None:
        if is_training:  # a progress bar may be in the middle of a line
            print(file=sys.stderr)
        print(f"{self.name}: {message}", file=sys.stderr)

    def fail(self, message: object, is_training: bool = False) -> NoReturn:
        self.say(f"error: {message}", is_training)
        sys.exit(1)


def _run_config() -> Any:
    from verifiers_rl.cli.config import RunConfig

    return RunConfig


VF_TRAIN = Program("vf-train", USAGE, __doc__, _run_config)


def main(program: Program = VF_TRAIN) -> None:
    # Not for what we start in turn.
    if parent := os.environ.pop("VERIFIERS_RL_DIE_WITH_PARENT", None):
        # Under accelerate its launcher is between us and vf-rl.
        end_with({int(parent), os.getppid()})
    interrupt = Interrupt()
    interrupt.handle_signals()
    try:
        train(interrupt, program)
    except Interrupted:  # train() has said what is saved
        interrupt.release()  # a launcher ends this process when another rank has ended
        raise
    except KeyboardInterrupt:
        if is_first_rank():
            program.say("interrupted before training")
        sys.exit(interrupt.exit_status)


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def train(interrupt: Interrupt, program: Program = VF_TRAIN) -> None:
    from verifiers_rl.cli.config import (
        TomlError,
        add_folder_options,
        check_trainer_args,
        make_importable,
        parse_command_line,
    )
    from verifiers_rl.cli.plan import servers_of_vf_rl
    from verifiers_rl.cli.resolved import write_resolved
    from verifiers_rl.report.run_folder import RunFolderError, prepare_run_folder

    fail = program.fail
    parser = argparse.ArgumentParser(
        prog=program.name, usage=program.usage, description=program.about, allow_abbrev=False
    )
    add_folder_options(parser)
    program.add_options(parser)
    if {"-h", "--help"} & set(sys.argv):
        parser.parse_args(["--help"])
    try:
        options, config = parse_command_line(parser, sys.argv[1:], kind=program.config_class())
        check_trainer_args(config)  # which imports transformers, before the TOML's own modules
        make_importable(config.folders)
        status = program.run_other(options, config)
    except (TomlError, RunFolderError) as error:
        fail(error)
    if status is not None:
        sys.exit(status)
    if config.trainer_gpus > 1 and "LOCAL_RANK" not in os.environ:
        if program.launch is not None:
            program.launch(options, config)
        fail(
            f"{config.source('trainer', 'gpus')}: trainer.gpus={config.trainer_gpus} needs a "
            f"process for each: accelerate launch --num_processes {config.trainer_gpus} "
            f"-m verifiers_rl.cli.train {shlex.join(config.words)}"
        )

    from verifiers_rl.config import ConfigError
    from verifiers_rl.envs.base import InvalidEnvironmentError
    from verifiers_rl.inference.client import InferenceServerError
    from verifiers_rl.orchestrator import RolloutError

    trainer = None
    try:
        config.trainer_class()  # its errors first
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
        trainer = config.make_trainer(args)
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
