"""`vf-rl generate @ config.toml -n 4 --min-reward 1.0 -o data.jsonl`: rollouts of the run's
environments as data for `vf-sft`.

The model of the TOML answers: `vf-rl` starts its server, unless `vllm_servers` names one that runs
already. With --endpoint, any OpenAI-compatible one does. Each line of the file has the messages and
the tools of a rollout, its reward, environment and example.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verifiers_rl.cli.config import (
    PARSER,
    ClusterTable,
    RunConfig,
    make_importable,
    parse_command_line,
)
from verifiers_rl.cli.errors import fail, files_error
from verifiers_rl.cli.plan import check_trainer_options, plan_servers, split_gpus, started_servers
from verifiers_rl.cli.supervise import LOGS, ThisMachine, supervise
from verifiers_rl.config import UNTRAINED, RLConfig, default_options
from verifiers_rl.data import ENDLESS
from verifiers_rl.envs.base import InvalidEnvironmentError, RunnerOptions
from verifiers_rl.inference.client import InferenceClient, InferenceServerError, generation_key
from verifiers_rl.json_text import as_json
from verifiers_rl.process.loop_thread import LoopThread, gather_or_cancel, run_contained
from verifiers_rl.process.terminal import describe_error
from verifiers_rl.report.run_folder import WritingError, writing
from verifiers_rl.sync import ServerPool
from verifiers_rl.types import Split

if TYPE_CHECKING:
    from verifiers_rl.envs.played import PlayedEnvironment

USAGE = (
    "vf-rl generate @ config.toml [--KEY VALUE] -n ROLLOUTS [--min-reward REWARD] [--examples N]\n"
    "                       [--split train|eval] [--endpoint URL MODEL] -o FILE"
)
# The key of our own server, for this process; "none" at an endpoint for which nobody names a key.
KEY_VARIABLE = "VERIFIERS_RL_GENERATION_KEY"
# A model or a judge that answers so may answer soon: its rollout is tried again, for 15 s in all.
WHEN_BUSY = {"status_code": [429, "5xx"], "max_retries": 5}
NUM_TRIED = 10  # if the first ones to end all fail, the others are not tried


class GenerationError(RuntimeError):
    """An option of the command cannot work, or no rollout becomes a row."""


class Endpoint(NamedTuple):
    """Where the model answers.

    Attributes:
        base_url: with /v1.
        model: its name in requests.
        key_variable: environment variable that has the key.
        is_vllm: it is a `vf-vllm`.
    """

    base_url: str
    model: str
    key_variable: str = KEY_VARIABLE
    is_vllm: bool = False


def main(argv: list[str]) -> int:
    """Check everything that can be wrong, then generate. Returns the exit status.

    Raises:
        TomlError: the configuration cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="vf-rl generate", usage=USAGE, description=__doc__, **PARSER
    )
    parser.add_argument("-n", "--rollouts", type=int, default=1, help="of each example")
    parser.add_argument(
        "--min-reward", type=float, default=-math.inf, help="rollouts below it are left out"
    )
    parser.add_argument("--examples", type=int, help="so many, the first ones; default: all")
    parser.add_argument("--split", choices=("train", "eval"), default="train")
    parser.add_argument(
        "--endpoint", nargs=2, metavar=("URL", "MODEL"), help="that runs already; the URL with /v1"
    )
    parser.add_argument("--api-key-var", help="variable with the key of --endpoint; default: none")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a new .jsonl file")
    options, config = parse_command_line(parser, argv)
    try:
        _check(options)
        args = check_trainer_options(config)
        if options.endpoint is None and not args.vllm_servers and not started_servers():
            return _generate_with_server(config, options, argv)
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        make_importable(config.folders)
        env = config.load_envs(with_teachers=False)
        players = make_players(env, args, _endpoint(options, args), options.split)
        # Not in this thread, where a signal would raise its SystemExit in a task.
        thread = LoopThread("generating")
        try:
            thread.run(_write(options, players)).result()
        finally:
            thread.stop(partial(asyncio.sleep, 0))
    except (GenerationError, InferenceServerError, InvalidEnvironmentError, WritingError) as error:
        fail(error, "vf-rl generate")
    except KeyboardInterrupt:
        print("\nvf-rl generate: interrupted; rows that were written stay", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise GenerationError for options that cannot work."""
    num, output, variable = options.examples, options.output, options.api_key_var
    no_file = files_error(output.absolute().parent, [output.name])
    problems = {
        f"--rollouts {options.rollouts}: must be an integer >= 1": options.rollouts < 1,
        f"--examples {num}: must be an integer >= 1": num is not None and num < 1,
        "--api-key-var: without effect unless --endpoint is given; remove it": (
            variable and not options.endpoint
        ),
        f"--api-key-var {variable}: the variable is not set; set it to the key": (
            variable and not os.environ.get(variable)
        ),
        f"-o {output}: must end in .jsonl": output.suffix != ".jsonl",
        f"-o {output}: {no_file}": no_file,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise GenerationError(problem)


def _generate_with_server(config: RunConfig, options: argparse.Namespace, argv: list[str]) -> int:
    """Start the server, and this command once more beside it, in place of a trainer. Rows that were
    written stay if the server ends, and nothing starts it again.
    """
    make_one_server(config)
    plans = plan_servers(config)
    for plan in plans:
        plan.is_needed, plan.max_restarts = True, 0
    words = ["-m", "verifiers_rl.cli.rl", "generate", *argv]
    logs = options.output.absolute().parent / LOGS
    return supervise(config, plans, ThisMachine(config, plans, logs, words))


def _endpoint(options: argparse.Namespace, args: Any) -> Endpoint:
    """Return where the model answers, once it does.

    Raises:
        InferenceServerError: there is no server.
    """
    if options.endpoint is not None:
        os.environ[KEY_VARIABLE] = "none"  # verifiers sends some key
        url, model = options.endpoint
        return Endpoint(url, model, options.api_key_var or KEY_VARIABLE)
    if len(args.vllm_servers or ()) > 1:
        print(f"vf-rl generate: of vllm_servers, only {args.vllm_servers[0]} answers")
    client = InferenceClient(*args.servers()[0])
    status = ServerPool([client], timeout_s=args.vllm_server_timeout).wait_until_ready()
    os.environ[KEY_VARIABLE] = generation_key(client.base_url)
    return Endpoint(f"{client.base_url}/v1", status["served_model_name"], is_vllm=True)


def make_one_server(config: RunConfig) -> None:
    """Give all GPUs to one server, because nothing is trained. Its replicas are vLLM's own."""
    config.trainer.args["use_lora"] = False
    config.trainer.gpus, config.teachers, config.cluster = 0, [], ClusterTable()
    split_gpus(config)
    table = config.inference
    if table.gpus and (copies := table.replicas or 1) > 1:
        table.args["data_parallel_size"] = table.args.get("data_parallel_size", 1) * copies
        table.gpus *= copies
    table.replicas = 1


def make_players(
    given: Sequence[Any], args: Any, endpoint: Endpoint, split: Split = "train"
) -> list[PlayedEnvironment]:
    """Return what plays each of these `WeightedEnv` that is for this split.

    Args:
        args: the `RLConfig`; its sampling options go into the requests.
        endpoint: of the model.

    Raises:
        InvalidEnvironmentError: one of them cannot be played.
        GenerationError: there is none.
    """
    from verifiers_rl.envs.played import PlayedEnvironment

    made = []
    for one in given:
        if one.only not in (None, split):
            continue
        options = RunnerOptions(
            endpoint.base_url,
            None,
            args.max_seq_len,
            name=one.name,
            timeout_s=args.generation_timeout,
            max_concurrent=args.max_concurrent,
            num_eval_tasks=args.eval_examples,
        )
        sampling = sampling_of(args.with_sampling(one.sampling_args), endpoint.is_vllm)
        player = PlayedEnvironment(
            one.env, options, endpoint.model, endpoint.key_variable, sampling
        )
        own = player.env.config.retries  # which come first
        player.env.config.retries = type(own)(**dict(own) | {"rules": [*own.rules, WHEN_BUSY]})
        made.append(player)
    if not made:
        raise GenerationError(f"--split {split}: no environment is for it")
    return made


def sampling_of(args: Any, is_vllm: bool) -> dict[str, Any]:
    """Return the sampling options of a request.

    Args:
        args: the `RLConfig`.
        is_vllm: for a `vf-vllm`, where an option that is left out has the value that the model's
            generation_config.json says: all of them, as a rollout of a run has them. Otherwise
            those that are set, because not every endpoint knows all.
    """
    sent = args.changed(UNTRAINED).sampling_args()
    if is_vllm:
        return sent
    neutral = args.changed(default_options(RLConfig) | {"temperature": None}).sampling_args()
    return {name: value for name, value in sent.items() if value != neutral.get(name)}


async def _write(options: argparse.Namespace, players: Sequence[PlayedEnvironment]) -> None:
    """Write the rows of each environment. Without any there is no file."""
    options.output.parent.mkdir(parents=True, exist_ok=True)

    def write(row: dict[str, Any]) -> None:
        with writing(options.output), options.output.open("ab") as file:
            file.write(as_json(row) + b"\n")

    num_kept = 0
    for player in players:
        num_kept += await write_rows(player, options, write)
    if not num_kept:
        raise GenerationError(
            f"nothing is written: each rollout failed, was cut (max_tokens, max_seq_len), or is "
            f"below --min-reward {options.min_reward:g}; the lines above have their numbers"
        )
    print(f"vf-rl generate: {options.output}: {num_kept} rows; train on them by vf-sft")


async def write_rows(
    player: PlayedEnvironment,
    options: argparse.Namespace,
    write: Callable[[dict[str, Any]], None],
) -> int:
    """Play the first `examples` (None: all) of a split `rollouts` times each, and write each row
    that no limit cut and that has at least `min_reward`, as soon as its rollout has ended. Print
    what became of the rollouts.

    Returns:
        The number of rows.

    Raises:
        GenerationError: all examples of a stream are requested, or no rollout succeeds.
    """
    size = player.sizes(options.split)[0]
    if options.examples is None and size >= ENDLESS:
        raise GenerationError(
            f"environment {player.name!r}: its tasks are a stream without end: say how many "
            "examples by --examples"
        )
    num, rewards, errors = Counter[str](), list[float](), list[str]()
    numbers = range(min(options.examples or size, size))
    unplayed = (number for number in numbers for _ in range(options.rollouts))
    total = len(numbers) * options.rollouts

    async def play_next() -> None:  # in each place
        for number in unplayed:
            try:
                rows = await run_contained(player.play(options.split, number))
            except Exception as error:  # whatever the environment's own code raises
                errors.append(describe_error(error))
                if not rewards and len(errors) >= min(NUM_TRIED, total):
                    raise GenerationError(
                        f"environment {player.name!r}: no rollout succeeded, and the first "
                        f"{len(errors)} failed. The first error: {errors[0]}"
                    ) from error
                continue
            for row, is_cut in rows:
                rewards.append(row["reward"])
                num["cut"] += is_cut
                if not is_cut and row["reward"] >= options.min_reward:
                    num["written"] += 1
                    write(row)

    await player.open()
    try:
        num_at_once = min(player.options.max_concurrent, total)
        await gather_or_cancel(play_next() for _ in range(num_at_once))
    finally:
        await player.close()
    said = f"{num['written']} of {len(rewards) + len(errors)} rollouts written"
    said += f", mean reward {sum(rewards) / max(len(rewards), 1):.3f}"
    if num["cut"]:
        said += f"; {num['cut']} left out, because a length limit cut a turn"
    if errors:
        said += f"; {len(errors)} failed, the first by {errors[0]}"
    print(f"vf-rl generate: {player.name}: {said}")
    return num["written"]
