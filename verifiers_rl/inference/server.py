"""`vf-vllm`: vLLM's own OpenAI server with weight sync switched on.

All of vLLM's flags pass through. vf-vllm adds logprobs as sampled (`processed_logprobs`), a worker
extension that receives weights, control routes that need the run's token, and one route for
chats. It listens on 127.0.0.1 unless told otherwise.

    server.py          flags, and the start; flags.py: those that follow from the checkpoint
    gateway.py         who may use the server; the route for rollouts
    generation.py      a request of that route, and the lines of its reply
    weight_routes.py   a trainer that takes the server and sends weights
    engine.py          vLLM's engine client; engine_calls.py: what the routes ask of it
    scheduler.py       in vLLM's engine processes: keeps logprobs until a reply has ended
    worker.py          in vLLM's worker processes: receives weights and loads them
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from verifiers_rl.inference.checkpoint import model_error
from verifiers_rl.inference.client import LOOPBACK, TOKEN_VARIABLE, keep_alive, token_file
from verifiers_rl.inference.flags import fit_to_checkpoint
from verifiers_rl.inference.generation import NUM_TIES
from verifiers_rl.inference.plugin import SERVER_PID, end_with_server
from verifiers_rl.inference.port import PortError, reserve_port
from verifiers_rl.process.ending import end_with_starter
from verifiers_rl.process.limits import raise_open_files
from verifiers_rl.process.terminal import end_without_noise
from verifiers_rl.types import MAX_MASK

# Names by which vLLM imports parts of ours.
WORKER_EXTENSION = "verifiers_rl.inference.worker.WeightSyncWorker"
GATEWAY = "verifiers_rl.inference.gateway.Gateway"
# Flags of vLLM that start API processes or engines beside this process and its engines.
OTHER_PROCESSES = (
    "api_server_count",
    "headless",
    "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
    "data_parallel_rank",
    "data_parallel_multi_port_external_lb",
    "data_parallel_start_rank",
    "data_parallel_size_local",
)
NUM_CONNECTIONS = 8192  # at a time, if the system allows it: one for each rollout in flight
END_DEADLINE_S = 30.0
MAX_SOCKET_FOLDER = 70  # bytes: the path of a socket has 107, and its name 37 of these

# A process that vf-vllm spawned imports this module first. vLLM's engine loads its plugins later:
# it first waits minutes for its server, which may have ended.
if SERVER_PID in os.environ:
    end_with_server()


def server_cores(cores: list[int], num_workers: int = 1) -> str:
    """Divide the first half of these cores among vLLM's workers, in the format of
    VLLM_CPU_OMP_THREADS_BIND: "0,1|2,3" for two workers.

    The trainer has the rest. vLLM pins its threads to cores. A trainer that has a thread on such a
    core waits for this thread in every parallel region: with server and trainer both on all of 2
    cores, the trainer's steps took four times as long.
    """
    share = max(len(cores) // 2 // num_workers, 1)
    cores = sorted(cores) * num_workers  # where there are more workers than cores
    chunks = [cores[i * share : (i + 1) * share] for i in range(num_workers)]
    return "|".join(",".join(map(str, chunk)) for chunk in chunks)


def make_parser() -> Any:
    """Return vLLM's parser with our defaults, which prints an error without 290 lines of usage."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class FlagParser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            print(f"vf-vllm: error: {' '.join(message.split())}", file=sys.stderr)
            sys.exit(2)

    parser = make_arg_parser(FlagParser(prog="vf-vllm", description=__doc__))
    parser.add_argument(
        "--open",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Generate for whoever asks, without a token or key.",
    )
    parser.set_defaults(
        model=None,  # vLLM's is a model that nobody has asked for
        host="127.0.0.1",
        allowed_origins=[],  # vLLM's default lets in the scripts of every web page
        # vLLM's is 0: several servers would sample the same replies to the prompt of a group.
        seed=secrets.randbelow(2**31),
        logprobs_mode="processed_logprobs",
        max_logprobs=MAX_MASK + NUM_TIES,
        worker_extension_cls=WORKER_EXTENSION,
        disable_uvicorn_access_log=True,  # a line for each rollout hides everything else
        gpu_memory_utilization=0.88,  # vLLM's 0.92 leaves a push no room for its largest layers
    )
    return parser


def generation_keys(args: Any, token: str) -> list[str]:
    """Return the keys of which a request for rollouts must show one; none with --open, which serves
    all requests. vLLM's own keys are removed from `args` and the environment, because with them
    vLLM would refuse the run's token.
    """
    given = [key for key in args.api_key or [os.environ.get("VLLM_API_KEY")] if key]
    args.api_key = None
    os.environ.pop("VLLM_API_KEY", None)
    return [] if args.open else [token, *given]


def limit_requests(config: Any) -> None:
    """Lower the limits of a request to what the served model has, in vLLM's config and environment.
    An engine dies of more logprobs than its model has tokens. More completions than it samples at a
    time occupy it.
    """
    model = config.model_config
    model.max_logprobs = min(model.max_logprobs, model.get_vocab_size())
    os.environ.setdefault("VLLM_MAX_N_SEQUENCES", str(config.scheduler_config.max_num_seqs))


def num_workers(args: Any) -> int:
    return args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size


def error_of_flags(args: Any) -> str | None:
    """Return what is wrong with these flags whatever the model is, or None."""
    if args.logprobs_mode != "processed_logprobs":
        return (
            f"--logprobs-mode {args.logprobs_mode}: training needs processed_logprobs, "
            "the ones tokens were sampled with"
        )
    # When one of several workers cannot wake, vLLM takes the others' answers for those of its next
    # call. The trainer makes room on the GPU of its rank 0 only.
    if args.enable_sleep_mode and num_workers(args) > 1:
        return (
            "--enable-sleep-mode: not with several workers (--tensor-, --pipeline- and "
            "--data-parallel-size); leave it out, or these"
        )
    allowed = {"api_server_count": 1, "data_parallel_size_local": args.data_parallel_size}
    for name in OTHER_PROCESSES:
        value = getattr(args, name, None)
        if value is not None and value is not False and value != allowed.get(name):  # rank 0 counts
            return (
                f"--{name.replace('_', '-')} {value}: a vf-vllm is one API process with all its "
                "engines (--data-parallel-size) on one machine; leave the flag out. For more, "
                "start several vf-vllm and list them in the trainer's vllm_servers"
            )
    return None


def fit_to_cpu(args: Any) -> str | None:
    """Set the variables of a machine without a GPU. Return what is wrong with a flag, or None."""
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        return "VLLM_BATCH_INVARIANT: vLLM has no such mode on a CPU; unset it"
    if args.speculative_config:
        return (
            "--speculative-config: vLLM's CPU build samples drafted tokens from another "
            "distribution than the model's; leave it out, or use a GPU"
        )
    if args.enable_return_routed_experts:
        return (
            "--enable-return-routed-experts: vLLM's CPU build returns no experts; leave it out "
            "(the trainer's router_replay), or use a GPU"
        )
    cores = server_cores(list(os.sched_getaffinity(0)), num_workers(args))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    # In GiB. By default vLLM takes a large share of the memory.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return None


def save_token(port: int, token: str) -> Path:
    """Write the token readable by this user only.

    Raises:
        OSError, RuntimeError: this user has no folder for it.
    """
    path = token_file(port)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    path.touch(0o600, exist_ok=False)  # else it is a file of somebody else
    path.write_text(token, "utf-8")
    return path


def make_token(port: int) -> None:
    """Draw the run's token and leave it for trainers of this user on this machine."""
    os.environ[TOKEN_VARIABLE] = token = secrets.token_urlsafe(32)
    try:
        path = save_token(port, token)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home is known
        sys.exit(
            f"vf-vllm: error: the run's token cannot be left for trainers: {error}. Set HOME or "
            f"XDG_CACHE_HOME to a folder of this user, or {TOKEN_VARIABLE} here and for the trainer"
        )
    # Not the token itself: printed text often ends up in a file that others can read.
    print(
        "vf-vllm: a trainer on this machine finds the server's token in "
        f"{path}; on another one, set {TOKEN_VARIABLE} to what is in that file",
        file=sys.stderr,
    )


def sockets_error() -> str | None:
    """Return why vLLM's processes cannot connect by sockets in the folder for temporary files, or
    None.
    """
    folder = os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()
    if len(os.fsencode(folder)) <= MAX_SOCKET_FOLDER:
        return None
    return (
        f"{folder!r} is too long a folder for vLLM's sockets, whose paths need one of at most "
        f"{MAX_SOCKET_FOLDER} bytes; set TMPDIR or VLLM_RPC_BASE_PATH to a shorter one"
    )


async def serve(args: Any) -> None:
    """Serve as vLLM does, with our engine client, until the server is told to end."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.system_utils import decorate_logs

    from verifiers_rl.inference.engine import RolloutEngine

    def interrupt(*_: Any) -> NoReturn:  # uvicorn replaces this handler once the model is loaded
        raise KeyboardInterrupt("terminated")

    decorate_logs("APIServer", skip_if_decorated=True)
    signal.signal(signal.SIGTERM, interrupt)
    address, sock = setup_server(args, reuse_port=False)
    keep_alive(sock)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    context = UsageContext.OPENAI_API_SERVER
    config = engine_args.create_engine_config(usage_context=context)
    limit_requests(config)
    scheduling = config.scheduler_config
    if scheduling.scheduler_cls is None:
        kind = "AsyncRolloutScheduler" if scheduling.async_scheduling else "RolloutScheduler"
        scheduling.scheduler_cls = f"verifiers_rl.inference.scheduler.{kind}"
    with sock:
        engine = RolloutEngine.from_vllm_config(
            config,
            usage_context=context,
            enable_log_requests=engine_args.enable_log_requests,
            aggregate_engine_logging=engine_args.aggregate_engine_logging,
            disable_log_stats=engine_args.disable_log_stats,
        )
        try:
            await engine.reset_mm_cache()  # vLLM's trial inputs
            ending = await build_and_serve(engine, address, sock, args)
        finally:
            engine.shutdown(timeout=config.shutdown_timeout)
        with suppress(TimeoutError):  # uvicorn waits for replies, and one may never end
            await asyncio.wait_for(ending, END_DEADLINE_S)


def main() -> None:
    end_with_starter()
    if problem := sockets_error():  # first: the rest takes a minute
        sys.exit(f"vf-vllm: error: {problem}")
    os.environ[SERVER_PID] = str(os.getpid())  # before vLLM loads its plugins
    raise_open_files(NUM_CONNECTIONS)  # vLLM itself asks for a fixed number, or gives up
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # verifiers declares its tools as strict. vLLM would then sample under a grammar. Logprobs under
    # the grammar's mask are not those of the policy that is trained.
    os.environ.setdefault("VLLM_ENFORCE_STRICT_TOOL_CALLING", "0")
    os.environ.setdefault("VLLM_MAX_STOP_STRINGS", "64")  # vLLM's 4 would refuse every rollout
    try:
        import torch
        import uvloop
        from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    except ModuleNotFoundError as error:
        sys.exit(
            f"vf-vllm: {error}. Install vLLM: "
            "uv pip install -e '.[vllm]' (GPU) or -e '.[cpu]' --torch-backend=cpu, in a clone"
        )
    parser = make_parser()
    args = parser.parse_args()
    if args.model is None:
        parser.error("--model is required: a folder or a name on the hub")
    if problem := error_of_flags(args):
        parser.error(problem)
    try:
        # First: the hub may be slow.
        args.port, reservation = reserve_port(args.host, args.port)
    except PortError as error:
        parser.error(str(error))
    if problem := model_error(args.model):
        parser.error(problem)
    args.model = os.path.expanduser(args.model)  # of --model=~/m, which a shell leaves as it is
    if args.host not in LOOPBACK:
        print(
            f"vf-vllm: WARNING: --host {args.host} lets other machines reach this server; to "
            f"generate, they need {TOKEN_VARIABLE} or an --api-key, and with --open neither",
            file=sys.stderr,
        )
    if problem := fit_to_checkpoint(args, sys.argv):
        parser.error(problem)
    if not torch.cuda.is_available() and (problem := fit_to_cpu(args)):
        parser.error(problem)
    validate_parsed_serve_args(args)
    if not os.environ.get(TOKEN_VARIABLE):
        make_token(args.port)
    if torch.version.cuda is None:  # torchvision may be built for CUDA: startup/sitecustomize.py
        path = [str(Path(__file__).parent / "startup"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    args.middleware = [GATEWAY, *args.middleware]  # those of --middleware run before it
    args.generation_keys = generation_keys(args, os.environ[TOKEN_VARIABLE])
    cli_env_setup()
    status = 0
    with reservation:
        try:
            uvloop.run(serve(args))
        except KeyboardInterrupt:  # before the model was loaded
            status = 130
    end_without_noise(status)


if __name__ == "__main__":
    main()
