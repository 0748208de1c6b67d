"""What a run will start, and on which GPUs: decided and checked before anything is started."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import tempfile
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any

from verifiers_rl.cli.children import STOP_GRACE_S, LocalChild, Supervised, answers
from verifiers_rl.cli.config import (
    RunConfig,
    TomlError,
    check_trainer_args,
    folder_words,
    server_flags,
)
from verifiers_rl.cli.ending import SAVE_GRACE_S
from verifiers_rl.cli.errors import folder_error
from verifiers_rl.cli.teachers import TeacherTable
from verifiers_rl.inference.port import RESERVED_VARIABLE
from verifiers_rl.process.waiting import WaitingLine
from verifiers_rl.report.run_folder import RunFolderError, prepare_run_folder

ENV_DEADLINE_S = 120.0  # for loading the environments before the run
SERVERS_VARIABLE = "VERIFIERS_RL_SERVERS"  # tells the trainer where several servers are


def check_folder(args: Any, resume: bool | str | None) -> Path | None:
    """Return the checkpoint that the run resumes from, or None.

    Raises:
        RunFolderError: the run cannot begin in its output_dir, or cannot write there.
    """
    checkpoint = prepare_run_folder(
        args.output_dir,
        resume=resume or args.resume_from_checkpoint,
        overwrite=args.overwrite_output_dir,
        max_steps=args.max_steps,
    )
    if problem := folder_error(args.output_dir):
        raise RunFolderError(problem)
    return checkpoint


# The server needs as many GPUs as the product of these.
PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
)


class LoadedEnvironments:
    """Loads the environments once before the server starts, in a separate process. That process
    starts when the context is entered, because importing what environments need takes seconds.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def __enter__(self) -> LoadedEnvironments:
        self._folder = tempfile.TemporaryDirectory(prefix="vf-rl-")
        self._answer = Path(self._folder.name) / "answer"
        words = ["-m", "verifiers_rl.cli.load", str(self._answer), *self._config.words]
        self._child = LocalChild("environment", words, {})
        self._deadline = time.monotonic() + ENV_DEADLINE_S
        return self

    def __exit__(self, *error: object) -> None:
        self._child.mute()
        self._child.stop()
        self._folder.cleanup()

    def check(self) -> None:
        """Wait until they are loaded. Slow ones are left to the trainer, which waits longer.

        Raises:
            TomlError: one of them cannot be loaded.
        """
        with WaitingLine(lambda: "the environment to load") as line:
            while not self._child.wait(1.0) and not self._answer.exists():
                if time.monotonic() > self._deadline:
                    print(
                        f"vf-rl: the environment is not loaded after {ENV_DEADLINE_S:g} s; "
                        "starting anyway",
                        flush=True,
                    )
                    return
                line.show()
        self._child.wait(STOP_GRACE_S)  # threads of the environment may delay its end
        if not self._answer.exists():
            self._child.wait_for_output()
            raise TomlError(
                f"{self._config.source('env')}: loading the environment {self._child.end}; see its "
                "output above"
            )
        if problem := self._answer.read_text():
            self._child.wait_for_output()
            raise TomlError(problem)


def check_trainer_options(config: RunConfig) -> Any:
    """Build the RLConfig once, so that a wrong option is an error here and not after the server's
    start. The result says nothing about devices.
    """
    check_trainer_args(config)
    for name in ("fsdp", "deepspeed"):
        value = config.trainer_args.get(name)
        if value and config.trainer_gpus * (config.cluster.trainer_nodes or 1) < 2:
            raise config.of_option(
                f"{name}={value!r}: spreads the trainer over GPUs; "
                f"trainer.gpus={config.trainer_gpus} must be at least 2"
            )
    # On the CPU: this process must not touch a GPU.
    return config.make_args(use_cpu=True, bf16=False)


def assign_gpus(config: RunConfig) -> tuple[str, ...]:
    """Return CUDA_VISIBLE_DEVICES of the servers together, of the trainer, and of each teacher that
    `vf-rl` starts; "" means CPU.

    Raises:
        TomlError: more GPUs are requested than are visible, a server's flags do not divide its
            GPUs, or a server gets no GPU and vLLM is a GPU build.
    """
    teachers = teachers_to_start(config)
    on_cpu: list[tuple[str, ...]] = [(*one.at, "gpus") for one in teachers if not one.gpus]
    if not config.inference_gpus and servers_to_start(config):
        on_cpu.insert(0, ("inference", "gpus"))
    if on_cpu and (build := gpu_build_of_vllm()):
        raise TomlError(
            f"{config.source(*on_cpu[0])}: {'.'.join(on_cpu[0])}=0, and {build} needs a GPU; set "
            "it to 1 or more, or install vLLM's CPU build: `make CPU=1 install` in a clone"
        )
    check_parallel_sizes(config)
    of_servers = config.inference_gpus * config.inference_replicas
    counts = [of_servers, config.trainer_gpus, *(table.gpus or 0 for table in teachers)]
    wanted = sum(counts)
    if not wanted:
        return ("",) * len(counts)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        import torch

        ids = [str(i) for i in range(torch.cuda.device_count())]
    else:
        ids = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    if wanted > len(ids):
        num_replicas = config.inference_replicas
        each = f" for each of {num_replicas} replicas" if num_replicas > 1 else ""
        names = [f"inference.gpus={config.inference_gpus}{each}"]
        names += [f"trainer.gpus={config.trainer_gpus}"]
        names += [f"gpus={table.gpus} of teacher {table.name!r}" for table in teachers]
        raise TomlError(
            f"{config.source('inference')}: {', '.join(names[:-1])} and {names[-1]} need {wanted} "
            f"GPUs, {len(ids)} are visible; lower them, or set all to 0 to run on the CPU"
        )
    ends = list(accumulate(counts))
    return tuple(",".join(ids[end - count : end]) for count, end in zip(counts, ends, strict=True))


def check_parallel_sizes(config: RunConfig) -> None:
    """Raise TomlError unless the parallel sizes in each server's flags use all of its GPUs."""
    _check_sizes(config, ("inference",), config.inference_args, config.inference_gpus)
    for table in teachers_to_start(config):
        _check_sizes(config, table.at, table.args, table.gpus or 0)


def _check_sizes(
    config: RunConfig, at: tuple[str, ...], args: dict[str, Any], num_gpus: int
) -> None:
    sizes = {name: args[name] for name in PARALLEL_SIZES if name in args}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise TomlError(
                f"{config.place(*at, 'args', name)} {name}={size!r} must be a whole number from 1 "
                "on"
            )
    if not num_gpus:
        return  # on a CPU each rank is only a process
    product = math.prod(sizes.values())
    if num_gpus % product:
        must = "divide"
    elif "tensor_parallel_size" in sizes and product != num_gpus:
        must = "be"
    else:
        return
    shown = " * ".join(f"{name}={size}" for name, size in sizes.items())
    raise TomlError(
        f"{config.place(*at, 'args', next(iter(sizes)))} {shown}: the product {product} must "
        f"{must} {'.'.join(at)}.gpus={num_gpus}; change one of them"
    )


def servers_to_start(config: RunConfig) -> list[tuple[str, int]]:
    """Return host and port of each server that `vf-rl` starts: the ports from vllm_server_port on.
    If the TOML names servers that run already, it starts none.
    """
    if config.trainer_args.get("vllm_servers"):
        return []
    host, port = config.option("vllm_server_host"), config.option("vllm_server_port")
    return [(host, port + number) for number in range(config.inference_replicas)]


def teachers_to_start(config: RunConfig) -> list[TeacherTable]:
    """Return the teachers whose servers `vf-rl` starts."""
    return [table for table in config.teachers if table.is_started]


def server_env(config: RunConfig, gpus: str, number: int) -> dict[str, str]:
    """Return the variables of one of the servers: its GPUs, or its cores.

    Args:
        gpus: of all servers, as `assign_gpus` gives them.
    """
    each = config.inference_gpus
    ids = gpus.split(",")[number * each : (number + 1) * each]
    env = {"CUDA_VISIBLE_DEVICES": ",".join(ids)}
    if not each:
        return env | _cores(config, number, config.inference_args)
    if config.option("deterministic") and "VLLM_BATCH_INVARIANT" not in os.environ:
        env["VLLM_BATCH_INVARIANT"] = "1"
    return env


def teacher_env(config: RunConfig, table: TeacherTable, gpus: str) -> dict[str, str]:
    """Return the variables of a teacher's server: its GPUs, or its cores."""
    env = {"CUDA_VISIBLE_DEVICES": gpus}
    if gpus:
        return env
    on_cpu = [one.number for one in teachers_to_start(config) if not one.gpus]
    number = _num_servers_on_cpu(config) + on_cpu.index(table.number)
    return env | _cores(config, number, table.args)


def _num_servers_on_cpu(config: RunConfig) -> int:
    return 0 if config.inference_gpus else len(servers_to_start(config))


def _cores(config: RunConfig, number: int, args: dict[str, Any]) -> dict[str, str]:
    """Return the variable with the cores of one of several servers on a CPU; of one alone, {}:
    `vf-vllm` chooses them.

    Args:
        number: its place among them; those of teachers are the last.
        args: its flags.
    """
    total = sum(not table.gpus for table in teachers_to_start(config))
    total += _num_servers_on_cpu(config)
    if total < 2 or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return {}
    from verifiers_rl.inference.server import server_cores

    num_workers = math.prod(args.get(name, 1) for name in PARALLEL_SIZES)
    cores = server_cores(sorted(os.sched_getaffinity(0)), total * num_workers).split("|")
    own = cores[number * num_workers : (number + 1) * num_workers]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(own)}


# Weights may take this share of a GPU's memory. The rest is for keys and values, whose number
# limits how many rollouts run at a time.
WEIGHTS_SHARE = 0.4


def choose_split(num_gpus: int, weight_bytes: float, gpu_bytes: float) -> tuple[int, int]:
    """Divide the server's GPUs: as many replicas as possible, each on as few GPUs as hold the
    weights in WEIGHTS_SHARE of their memory. Replicas do not wait for each other, and the GPUs of
    one replica do, several times in each layer.

    Returns:
        Replicas, and GPUs of each. All GPUs in one replica if fewer do not hold the weights.
    """
    sizes = [
        size for size in range(1, num_gpus + 1) if num_gpus % size == 0 and not size & size - 1
    ]
    fits = [size for size in sizes if weight_bytes / size <= WEIGHTS_SHARE * gpu_bytes]
    each = fits[0] if fits else num_gpus
    return num_gpus // each, each


def split_gpus(config: RunConfig) -> None:
    """Decide how many replicas the server's GPUs become, where the TOML leaves it open, and say it
    in one line. Where the sizes of model or GPU are unknown, they become one replica.
    """
    asked = config.has_replicas or any(name in config.inference_args for name in PARALLEL_SIZES)
    if config.inference_gpus < 2 or asked or config.trainer_args.get("vllm_servers"):
        return
    gpu_bytes = memory_of_gpu()
    weight_bytes = size_of_weights(config) if gpu_bytes else None
    if not gpu_bytes or not weight_bytes:
        return
    replicas, each = choose_split(config.inference_gpus, weight_bytes, gpu_bytes)
    print(
        f"vf-rl: {config.inference_gpus} GPUs for inference: {replicas} replica(s) of {each} "
        f"GPU(s), because weights of {weight_bytes / 1e9:.1f} GB should take at most "
        f"{WEIGHTS_SHARE:.0%} of {each} x {gpu_bytes / 1e9:.0f} GB; set inference.replicas or "
        "tensor_parallel_size for another split",
        flush=True,
    )
    config.inference_replicas, config.inference_gpus = replicas, each


def memory_of_gpu() -> float | None:
    """Return the bytes of the smallest GPU, or None if it is unknown. CUDA is not started here,
    because this process lives as long as the run and would keep some of that memory.
    """
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        return min(float(line) for line in done.stdout.split()) * 2**20
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def size_of_weights(config: RunConfig) -> float | None:
    """Return the bytes of the model's weights at the server; None for a model that transformers
    cannot make.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model))
    except (OSError, ValueError, ImportError):
        return None
    each = 4 if config.inference_args.get("dtype") == "float32" else 2
    return float(sum(parameter.numel() for parameter in model.parameters())) * each


def gpu_build_of_vllm() -> str | None:
    """Return name and version of the installed vLLM if it is a GPU build, else None."""
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return None  # vllm-cpu, or no vLLM, which the server reports
    return None if "cpu" in installed else f"vllm {installed}"


def server_command(config: RunConfig, host: str, port: int) -> list[str]:
    """Return the command of `vf-vllm`, with the TOML's flags and, where it does not set them, flags
    that follow from the trainer's options.
    """
    args = dict(config.inference_args)
    args.setdefault("max_model_len", config.option("max_seq_len"))
    lora_sync = config.option("lora_sync")
    if lora_sync == "auto" and args.get("dtype") == "float32":
        lora_sync = "merged"  # as the trainer will choose
    merged = lora_sync == "merged" or config.option("lora_modules_to_save")
    if config.option("use_lora") and not merged:
        args.setdefault("enable_lora", True)
        args.setdefault("max_lora_rank", smallest_lora_rank(config.option("lora_rank")))
    if config.option("router_replay"):
        args.setdefault("enable_return_routed_experts", True)
    if config.option("deterministic") and not config.inference_gpus:
        args.setdefault("enable_chunked_prefill", False)  # see server.takes_seeds
    return _vf_vllm(config.model, args, config.inference_gpus, host, port)


def start_server(
    config: RunConfig, gpus: str, address: tuple[str, int], log: Path | None, number: int = 0
) -> Supervised:
    """Start one of the servers of this machine.

    Args:
        gpus: of all servers, as `assign_gpus` gives them.
        address: of the server, for which we have reserved the port, also for restarts.
        log: the file for the output of all of them.
        number: of this one.
    """
    (host, port), total = address, config.inference_replicas
    name, what = "inference", "the server"
    if total > 1:
        name, what = f"inference-{number}", f"the server on port {port}"
    log = log and log_of(log, number, total)
    words, env = server_command(config, host, port), server_env(config, gpus, number)
    return _start(config, name, what, address, words, env, ("inference",), log)


def log_of_teacher(server_log: Path, name: str) -> Path:
    """Return the file for the output of a teacher's server, beside the log of the other servers."""
    return server_log.with_name(f"teacher-{name}.log")


def start_teacher(
    config: RunConfig, table: TeacherTable, gpus: str, address: tuple[str, int], log: Path | None
) -> Supervised:
    """Start the server of a teacher: a `vf-vllm` that gets no weights.

    Args:
        gpus, address, log: see `start_server`; the GPUs are its own.
    """
    name, words = f"teacher-{table.name}", teacher_command(config, table, *address)
    env, what = teacher_env(config, table, gpus), f"teacher {table.name!r}"
    log = log and log_of_teacher(log, table.name)
    return _start(config, name, what, address, words, env, table.at, log, is_needed=True)


def _start(
    config: RunConfig,
    name: str,
    what: str,
    address: tuple[str, int],
    words: list[str],
    env: dict[str, str],
    at: tuple[str, ...],
    log: Path | None,
    is_needed: bool = False,
) -> Supervised:
    host, port = address
    timeout_s = config.option("vllm_server_timeout")
    print(f"vf-rl: starting {what} on {host}:{port}, up to {timeout_s:g} s", flush=True)
    start = partial(LocalChild, name, words, {**env, RESERVED_VARIABLE: str(port)}, log)
    return Supervised(what, start, lambda: answers(host, port), config, at, log, is_needed)


def teacher_command(config: RunConfig, table: TeacherTable, host: str, port: int) -> list[str]:
    """Return the command of a teacher's server. It takes the longest sample and one token more."""
    args = {"max_model_len": config.option("max_seq_len") + 1, **table.args}
    return _vf_vllm(table.model, args, table.gpus or 0, host, port)


def _vf_vllm(model: str, args: dict[str, Any], num_gpus: int, host: str, port: int) -> list[str]:
    """Return the command of a `vf-vllm` that uses all of its GPUs."""
    product = math.prod(args.get(name, 1) for name in PARALLEL_SIZES)
    if "tensor_parallel_size" not in args and num_gpus > product:
        args["tensor_parallel_size"] = num_gpus // product
    args |= {"host": host, "port": port}
    return ["-m", "verifiers_rl.inference.server", "--model", model, *server_flags(args)]


def trainer_env(gpus: str, servers: list[str]) -> dict[str, str]:
    """Return the variables of the trainer: its GPUs, and the servers if they are several."""
    env = {"CUDA_VISIBLE_DEVICES": gpus}
    # A launcher of several ranks kills them after this time, by default 30 s.
    if "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in os.environ:
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(round(SAVE_GRACE_S))
    if len(servers) > 1:
        env[SERVERS_VARIABLE] = " ".join(servers)
    return env


def host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def servers_of_vf_rl() -> list[str] | None:
    """Return the addresses of the servers that `vf-rl` has started, if they are several."""
    given = os.environ.get(SERVERS_VARIABLE)
    return given.split() if given else None


def log_of(log: Path, number: int, num_servers: int) -> Path:
    """Return the file for the output of one of several servers: server-1.log for server.log."""
    return log if num_servers == 1 else log.with_stem(f"{log.stem}-{number}")


def smallest_lora_rank(rank: int) -> int:
    """Return the smallest --max-lora-rank of vLLM that is enough for this rank."""
    return next((size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def trainer_command(
    config: RunConfig,
    options: argparse.Namespace,
    number: int = 0,
    num_machines: int = 1,
    master: tuple[str, int] = ("127.0.0.1", 0),
) -> list[str]:
    """Return the command of the trainer's ranks on one of its machines.

    Args:
        number: of the machine.
        master: where the ranks of all machines meet. Port 0: a free one, on one machine.
    """
    words = ["-m", "verifiers_rl.cli.train", *config.words, *folder_words(options)]
    if num_machines == 1 and config.trainer_gpus < 2:
        return words
    return [*launcher_command(max(config.trainer_gpus, 1), number, num_machines, master), *words]


def launcher_command(
    num_ranks: int,
    number: int = 0,
    num_machines: int = 1,
    master: tuple[str, int] = ("127.0.0.1", 0),
) -> list[str]:
    """Return the words of torch's launcher, in front of those of a rank; see `trainer_command`."""
    host, port = master
    words = ["-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    words += [f"--nnodes={num_machines}", f"--node-rank={number}"]
    return [*words, f"--master-addr={host}", f"--master-port={port}"]
