"""`vf-rl generate @ config.toml -n 4 --min-reward 1.0 -o data.jsonl`: rollouts of the run's
environments as data for `vf-sft`.

The model of the TOML answers: `vf-rl` starts its server, unless `vllm_servers` names one that runs
already. With --base-url and --served-model, any OpenAI-compatible endpoint does. Each line of the
file has the messages and the tools of a rollout, its reward, environment and example.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from verifiers_rl.cli.children import answers, ended_early, ended_within
from verifiers_rl.cli.config import RunConfig, TomlError, make_importable, parse_command_line
from verifiers_rl.cli.errors import fail, folder_error
from verifiers_rl.cli.plan import assign_gpus, check_trainer_options, server_command, server_env
from verifiers_rl.cli.servers import SupervisedServer
from verifiers_rl.inference.client import (
    TOKEN_VARIABLE,
    InferenceClient,
    InferenceServerError,
    generation_key,
)
from verifiers_rl.inference.port import PortError, reserve_port

USAGE = (
    "vf-rl generate @ config.toml [--KEY VALUE] -n ROLLOUTS [--min-reward REWARD] [--examples N]\n"
    "                       [--split train|eval] [--base-url URL --served-model NAME] -o FILE"
)
KEY_VARIABLE = "VERIFIERS_RL_GENERATION_KEY"  # of our own server, for this process
POLL_S = 0.5


class OptionError(ValueError):
    """An option of the command cannot work."""


def generate(argv: list[str]) -> int:
    """Check everything that can be wrong, then generate. Returns the exit status."""
    from verifiers_rl.envs.base import InvalidEnvironmentError, WeightedEnv

    parser = argparse.ArgumentParser(
        prog="vf-rl generate", usage=USAGE, description=__doc__, allow_abbrev=False
    )
    parser.add_argument("-n", "--rollouts", type=int, default=1, help="of each example")
    parser.add_argument(
        "--min-reward", type=float, default=-math.inf, help="rollouts below it are left out"
    )
    parser.add_argument("--examples", type=int, help="so many, the first ones; default: all")
    parser.add_argument("--split", choices=("train", "eval"), default="train")
    parser.add_argument("--base-url", help="of an endpoint that runs already, with /v1")
    parser.add_argument("--served-model", help="the model's name there")
    parser.add_argument(
        "--api-key-var", default="OPENAI_API_KEY", help="variable with the key of --base-url"
    )
    parser.add_argument("--server-log", type=Path, help="the server's output goes to this file")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a new .jsonl file")
    parser.set_defaults(overwrite=False)
    if {"-h", "--help"} & set(argv):
        parser.parse_args(["--help"])
    try:
        options, config = parse_command_line(parser, argv)
        _check(options)
        args = check_trainer_options(config)
        make_importable(config.folders)
        env = config.load_envs(with_teachers=False)
        if not config.is_mix:
            env = [WeightedEnv(env, config.envs[0].name)]
        with _endpoint(options, config) as endpoint:
            return asyncio.run(_write_all(options, args, env, endpoint))
    except (
        InferenceServerError,
        InvalidEnvironmentError,
        OptionError,
        PortError,
        TomlError,
    ) as error:
        fail(error, "vf-rl generate")
    except KeyboardInterrupt:
        print("\nvf-rl generate: interrupted; the file has the rows so far", file=sys.stderr)
        return 128 + signal.SIGINT


def _check(options: argparse.Namespace) -> None:
    """Raise OptionError for options that cannot work."""
    for name in ("rollouts", "examples"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name} {value}: must be an integer >= 1")
    if (options.base_url is None) != (options.served_model is None):
        raise OptionError("--base-url and --served-model: give both, or none for the TOML's model")
    if options.output.suffix != ".jsonl":
        raise OptionError(f"-o {options.output}: must end in .jsonl")
    if options.output.exists():
        raise OptionError(f"-o {options.output}: is there already; choose another, or remove it")
    if problem := folder_error(str(options.output.absolute().parent)):
        raise OptionError(f"-o {options.output}: {problem.partition(' ')[2]}")


@contextmanager
def _endpoint(options: argparse.Namespace, config: RunConfig) -> Iterator[Any]:
    """Yield where the model answers, and end the server behind it if we have started it.

    Raises:
        InferenceServerError: there is no server.
    """
    from verifiers_rl.envs.generate import Endpoint

    if options.base_url is not None:
        os.environ.setdefault(options.api_key_var, "none")  # a server may need no key
        yield Endpoint(options.base_url, options.served_model, options.api_key_var)
        return
    timeout_s = config.option("vllm_server_timeout")
    if named := config.trainer_args.get("vllm_servers"):
        host, _, port = named[0].rpartition(":")
        with _answering(InferenceClient(host, int(port), timeout_s)) as endpoint:
            yield endpoint
        return
    host, port = config.option("vllm_server_host"), config.option("vllm_server_port")
    config.trainer_args["use_lora"], config.teachers = False, []  # nothing will be trained
    gpus = assign_gpus(config)
    config.inference_replicas = 1
    with reserve_port(host, port):
        os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)
        client = InferenceClient(host, port, timeout_s)
        print(f"vf-rl generate: starting the server, up to {timeout_s:g} s", flush=True)
        server = SupervisedServer(
            "inference", "the server", server_command(config, host, port),
            server_env(config, gpus[0], 0), client, options.server_log,
        )  # fmt: skip
        try:
            with _ending_by_signals():
                deadline = time.monotonic() + timeout_s
                while not answers(client):
                    if ended_within(server.child, POLL_S):
                        raise ended_early(server.child, options.server_log, config)
                    if time.monotonic() > deadline:
                        raise InferenceServerError(
                            f"the server did not answer within {timeout_s:g} s "
                            "(vllm_server_timeout)"
                        )
                with _answering(client) as endpoint:
                    yield endpoint
        finally:
            server.child.mute()
            server.child.stop()


@contextmanager
def _answering(client: InferenceClient) -> Iterator[Any]:
    """Yield the endpoint of a `vf-vllm` once it answers."""
    from verifiers_rl.envs.generate import Endpoint

    try:
        client.wait_until_ready()
        os.environ[KEY_VARIABLE] = generation_key(client.base_url)
        yield Endpoint(f"{client.base_url}/v1", client.served_model_name, KEY_VARIABLE)
    finally:
        os.environ.pop(KEY_VARIABLE, None)
        client.close()


@contextmanager
def _ending_by_signals() -> Iterator[None]:
    """Let SIGTERM raise, as Ctrl-C does, so that the server is ended."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def _write_all(options: argparse.Namespace, args: Any, env: Any, endpoint: Any) -> int:
    """Generate with each environment, one after the other."""
    from verifiers_rl.envs.generate import make_generating_environments
    from verifiers_rl.process.limits import rollouts_at_once
    from verifiers_rl.types import Slots

    environments = make_generating_environments(env, args, endpoint, options.split)
    num_kept = 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("x", encoding="utf-8") as file:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

        for environment in environments:
            slots = Slots(rollouts_at_once(args.max_concurrent, environment.files_per_rollout))
            await environment.open()
            try:
                counts = await environment.write(
                    options.split, options.examples, options.rollouts, options.min_reward, slots,
                    write,
                )  # fmt: skip
            finally:
                await environment.close()
            print(f"vf-rl generate: {environment.name}: {counts}", flush=True)
            num_kept += counts.num_kept
    if not num_kept:
        options.output.unlink()
        raise OptionError(
            f"--min-reward {options.min_reward:g}: no rollout reached it, so nothing is written"
        )
    print(f"vf-rl generate: {options.output}: {num_kept} rows; train on them by vf-sft")
    return 0
