"""`vf-train @ config.toml`: the trainer alone, against a `vf-vllm` server that runs already."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

USAGE = "vf-train @ config.toml [--resume [CHECKPOINT]]"


def fail(message: object) -> NoReturn:
    print(f"vf-train: error: {message}", file=sys.stderr)
    sys.exit(1)


def main() -> None:
    from verifiers_rl.cli.config import (
        TomlError,
        check_trainer_args,
        load_run_config,
        toml_argument,
    )

    # Under accelerate its launcher is our parent, and ends its workers itself.
    parent = os.environ.pop("VERIFIERS_RL_DIE_WITH_PARENT", None)
    if parent and "LOCAL_RANK" not in os.environ:
        from verifiers_rl.inference.parent import die_with_parent

        die_with_parent(int(parent))
    parser = argparse.ArgumentParser(prog="vf-train", usage=USAGE, description=__doc__)
    parser.add_argument(
        "--resume", nargs="?", const=True, help="go on from this checkpoint, by default the newest"
    )
    if {"-h", "--help"} & set(sys.argv):
        parser.parse_args(["--help"])
    try:
        path, rest = toml_argument(sys.argv[1:])
        options = parser.parse_args(rest)
        config = load_run_config(path)
        check_trainer_args(config)
    except TomlError as error:
        fail(error)
    if config.trainer_gpus > 1 and "LOCAL_RANK" not in os.environ:
        fail(
            f"{config.path}: trainer.gpus={config.trainer_gpus} needs a process for each: "
            f"accelerate launch --num_processes {config.trainer_gpus} -m verifiers_rl.cli.train "
            f"@ {config.path}"
        )

    from verifiers_rl.config import ConfigError, RLConfig
    from verifiers_rl.environments import InvalidEnvironmentError
    from verifiers_rl.inference.client import InferenceServerError
    from verifiers_rl.orchestrator import RolloutError
    from verifiers_rl.trainer import RLTrainer

    try:
        args = RLConfig(**{"use_cpu": config.trainer_gpus == 0, **config.trainer_args})
        trainer = RLTrainer(config.model, config.load_envs(), args)
        trainer.train(resume_from_checkpoint=options.resume)
    except (ConfigError, InvalidEnvironmentError, InferenceServerError) as error:
        fail(error)
    except RolloutError as error:
        import traceback

        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        fail(error)
    trainer.save_model()


if __name__ == "__main__":
    main()
