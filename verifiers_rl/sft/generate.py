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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from verifiers_rl.cli.children import POLL_S, Child, ChildError
from verifiers_rl.cli.config import RunConfig, TomlError, make_importable, parse_command_line
from verifiers_rl.cli.errors import fail, folder_error
from verifiers_rl.cli.plan import (
    assign_gpus,
    check_trainer_options,
    split_gpus,
    start_server,
)
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
# The key of our own server, for this process; "none" at an endpoint for which nobody names a key.
KEY_VARIABLE = "VERIFIERS_RL_GENERATION_KEY"
OPENAI = "api.openai.com"


class OptionError(ValueError):
    """An option of the command cannot work."""


def generate(argv: list[str]) -> int:
    """Check everything that can be wrong, then generate. Returns the exit status."""
    from verifiers_rl.envs.base import InvalidEnvironmentError, WeightedEnv
    from verifiers_rl.envs.generate import GenerationError

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
        "--api-key-var",
        help=f"variable with the key of --base-url; default: OPENAI_API_KEY at https://{OPENAI}, "
        "no key elsewhere",
    )
    parser.add_argument("--server-log", type=Path, help="the server's output goes to this file")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a new .jsonl file")
    parser.set_defaults(overwrite=False)
    if {"-h", "--help"} & set(argv):
        parser.parse_args(["--help"])
    options: argparse.Namespace | None = None
    try:
        options, config = parse_command_line(parser, argv)
        _check(options)
        args = check_trainer_options(config)
        make_importable(config.folders)
        env = config.load_envs(with_teachers=False)
        if not config.is_mix:
            env = [WeightedEnv(env, config.envs[0].name)]
        with _endpoint(options, config, args) as (endpoint, server):
            return asyncio.run(_write_all(options, args, env, endpoint, server))
    except (
        ChildError,
        GenerationError,
        InferenceServerError,
        InvalidEnvironmentError,
        OptionError,
        PortError,
        TomlError,
    ) as error:
        fail(error, "vf-rl generate")
    except KeyboardInterrupt:
        has_rows = options is not None and options.output.exists()
        what = "the file has the rows so far" if has_rows else "nothing is written"
        print(f"\nvf-rl generate: interrupted; {what}", file=sys.stderr)
        return 128 + signal.SIGINT


def _check(options: argparse.Namespace) -> None:
    """Raise OptionError for options that cannot work."""
    for name in ("rollouts", "examples"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name} {value}: must be an integer >= 1")
    if (options.base_url is None) != (options.served_model is None):
        raise OptionError("--base-url and --served-model: give both, or none for the TOML's model")
    if options.api_key_var is not None and options.base_url is None:
        raise OptionError("--api-key-var: without effect unless --base-url is given; remove it")
    if options.output.suffix != ".jsonl":
        raise OptionError(f"-o {options.output}: must end in .jsonl")
    if options.output.exists():
        raise OptionError(f"-o {options.output}: is there already; choose another, or remove it")
    if problem := folder_error(str(options.output.absolute().parent)):
        raise OptionError(f"-o {options.output}: {problem.partition(' ')[2]}")


def key_variable(base_url: str, given: str | None) -> str:
    """Return the variable with the key of an endpoint. OPENAI_API_KEY goes to OpenAI only, unless
    it is `given`.

    Raises:
        OptionError: the variable is not set.
    """
    url = urlsplit(base_url)
    host = url.hostname or ""
    is_openai = url.scheme == "https" and (host == OPENAI or host.endswith(f".{OPENAI}"))
    name = given or ("OPENAI_API_KEY" if is_openai else None)
    if name is None:
        return KEY_VARIABLE
    if not os.environ.get(name):
        raise OptionError(f"--api-key-var {name}: the variable is not set; set it to the key")
    return name


@contextmanager
def _endpoint(
    options: argparse.Namespace, config: RunConfig, args: Any
) -> Iterator[tuple[Any, Child | None]]:
    """Yield where the model answers, and the server behind it if we have started it. End that
    afterwards.

    Raises:
        InferenceServerError: there is no server.
        OptionError: see `key_variable`.
    """
    from verifiers_rl.envs.generate import Endpoint

    if options.base_url is not None:
        variable = key_variable(options.base_url, options.api_key_var)
        os.environ[KEY_VARIABLE] = "none"  # verifiers sends some key
        try:
            yield Endpoint(options.base_url, options.served_model, variable), None
        finally:
            os.environ.pop(KEY_VARIABLE, None)
        return
    timeout_s = args.vllm_server_timeout
    (host, port), *others = args.servers()
    if args.vllm_servers:
        if others:
            print(f"vf-rl generate: of vllm_servers, only {args.vllm_servers[0]} answers")
        with _answering(InferenceClient(host, port, timeout_s)) as endpoint:
            yield endpoint, None
        return
    make_one_server(config)
    gpus = assign_gpus(config)[0]
    with reserve_port(host, port):
        os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)
        server = start_server(config, gpus, (host, port), options.server_log)
        try:
            with _ending_by_signals():
                server.wait_until_ready(timeout_s)
                with _answering(InferenceClient(host, port)) as endpoint:
                    yield endpoint, server.child
        finally:
            server.child.mute()
            server.child.stop()


def make_one_server(config: RunConfig) -> None:
    """Give all GPUs to one server, because nothing is trained. Its replicas are vLLM's own."""
    config.trainer_args["use_lora"] = False
    config.trainer_gpus, config.teachers = 0, []
    split_gpus(config)
    if config.inference_gpus and config.inference_replicas > 1:
        copies = config.inference_args.get("data_parallel_size", 1) * config.inference_replicas
        config.inference_args["data_parallel_size"] = copies
        config.inference_gpus *= config.inference_replicas
    config.inference_replicas = 1


@contextmanager
def _answering(client: InferenceClient) -> Iterator[Any]:
    """Yield the endpoint of a `vf-vllm` once it answers."""
    from verifiers_rl.envs.generate import Endpoint

    try:
        client.wait_until_ready()
        os.environ[KEY_VARIABLE] = generation_key(client.base_url)
        base_url, model = f"{client.base_url}/v1", client.served_model_name
        yield Endpoint(base_url, model, KEY_VARIABLE, is_vllm=True)
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


async def _write_all(
    options: argparse.Namespace, args: Any, env: Any, endpoint: Any, server: Child | None
) -> int:
    """Generate with each environment, one after the other, as long as our own server lives.

    Raises:
        GenerationError: no rollout of an environment succeeds.
        ChildError: the server has ended.
        OptionError: there is no row to write.
    """
    from verifiers_rl.envs.generate import make_generating_environments

    environments = make_generating_environments(env, args, endpoint, options.split)
    writing = asyncio.create_task(_write(options, args, environments))
    watching = [asyncio.create_task(_raise_at_end_of(server))] if server is not None else []
    tasks = [writing, *watching]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return 0


async def _raise_at_end_of(server: Child) -> None:
    """Wait until our server ends, then raise ChildError."""
    while not await asyncio.to_thread(server.wait, POLL_S):
        pass
    raise ChildError(f"the server {server.end}, see its output; rows that were written before stay")


async def _write(options: argparse.Namespace, args: Any, environments: Any) -> None:
    """Write the rows of each environment. A file without any is removed."""
    from verifiers_rl.process.limits import rollouts_at_once
    from verifiers_rl.types import Slots

    num_kept = 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("x", encoding="utf-8") as file:

        def write(row: dict[str, Any]) -> None:
            nonlocal num_kept
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            num_kept += 1

        try:
            for environment in environments:
                slots = Slots(rollouts_at_once(args.max_concurrent, environment.files_per_rollout))
                await environment.open()
                try:
                    counts = await environment.write(
                        options.split, options.examples, options.rollouts, options.min_reward,
                        slots, write,
                    )  # fmt: skip
                finally:
                    await environment.close()
                print(f"vf-rl generate: {environment.name}: {counts}", flush=True)
        finally:
            if not num_kept:
                options.output.unlink(missing_ok=True)
    if not num_kept:
        raise OptionError(
            f"--min-reward {options.min_reward:g}: no rollout reached it and ended by itself, so "
            "nothing is written"
        )
    print(f"vf-rl generate: {options.output}: {num_kept} rows; train on them by vf-sft")
