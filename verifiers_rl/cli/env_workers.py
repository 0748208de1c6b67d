"""The rollout workers of a machine that does not train. `vf-rl` runs this module on the machines of
`[cluster] env_nodes`: it loads the environments of the configuration, as the trainer does, and
keeps `env_workers` processes that run them for the trainer.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

from verifiers_rl.cli.errors import fail


def main() -> None:
    """Run until the process that started us ends us.

    The words of the command: host and port where the trainer lets workers in, then those of the
    configuration.
    """
    if parent := os.environ.pop("VERIFIERS_RL_DIE_WITH_PARENT", None):
        from verifiers_rl.process.parent import die_with_parent

        die_with_parent(int(parent))
    from verifiers_rl.cli.config import TomlError
    from verifiers_rl.config import ConfigError
    from verifiers_rl.envs.base import InvalidEnvironmentError
    from verifiers_rl.envs.messages import EnvWorkerError
    from verifiers_rl.envs.worker_host import WorkerHost
    from verifiers_rl.envs.workers import secret_of_workers
    from verifiers_rl.inference.client import TOKEN_VARIABLE, InferenceServerError

    host, _, port = sys.argv[1].rpartition(":")
    try:
        setup, num_workers = prepare(sys.argv[2:])
    except (
        *(ConfigError, InferenceServerError, InvalidEnvironmentError),
        *(OSError, TomlError),
    ) as error:
        fail(error)
    secret = secret_of_workers(os.environ[TOKEN_VARIABLE])
    workers = WorkerHost((host, int(port)), secret, setup)

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for later in (signal.SIGTERM, signal.SIGINT):
            signal.signal(later, signal.SIG_IGN)
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    print(f"{num_workers} rollout worker(s) for the trainer at {host}:{port}", flush=True)
    try:
        workers.run(num_workers)
    except EnvWorkerError as error:
        fail(error)
    finally:
        workers.close()


def prepare(words: list[str]) -> tuple[bytes, int]:
    """Load the environments; return what a worker reads first, and how many workers to keep.

    Args:
        words: of the configuration.

    Raises:
        ConfigError, InvalidEnvironmentError, TomlError: they cannot be loaded, or a worker could
            not make them again.
        InferenceServerError: a teacher has another vocabulary.
        OSError: there is no tokenizer.
    """
    from transformers import AutoTokenizer

    from verifiers_rl.cli.config import (
        check_trainer_args,
        load_run_config,
        make_importable,
        overrides_of,
        toml_arguments,
    )
    from verifiers_rl.cli.plan import servers_of_vf_rl
    from verifiers_rl.envs.make import make_pool, make_runner
    from verifiers_rl.envs.workers import count_workers
    from verifiers_rl.inference.client import InferenceClient

    files, keys = toml_arguments(words)
    config = load_run_config(files, overrides_of(keys))
    check_trainer_args(config)  # which imports transformers, before the TOML's own modules
    make_importable(config.folders)
    args: Any = config.make_args(use_cpu=True, bf16=False)
    if servers := servers_of_vf_rl():
        args.vllm_servers = servers
    args.env_workers = count_workers(args.env_workers)  # so that no environment stays here
    client = InferenceClient(*args.servers()[0])
    pool = make_pool(args)
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    envs = config.load_envs(with_teachers=False)  # the trainer asks the teachers
    make_runner(envs, client.base_url, tokenizer, args, report=lambda text: None, pool=pool)
    client.close()
    return pool.setup(), args.env_workers


if __name__ == "__main__":
    main()
