"""`[cluster] engine = "ray"`: Ray chooses the machines of a run, and this process watches it.

Each node of the run (cli/nodes.py) is an actor with GPUs of its own. It runs `vf-rl` on its machine
as a child process, with the four variables that say which node it is. So Ray places and finds lost
machines; who meets whom, and how a run ends, is the same as without Ray.

    this process ──► Ray ──► actor of node 0 ──► vf-rl ──► the trainer's first ranks
                        ├──► actor of node 1 ──► vf-rl ──► further ranks       (packed together)
                        ├──► actor of node 2 ──► vf-rl ──► rollout workers     (spread)
                        └──► actor of node 3 ──► vf-rl ──► vf-vllm             (spread)
"""

from __future__ import annotations

import argparse
import os
import queue
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from verifiers_rl.cli.children import STOP_GRACE_S
from verifiers_rl.cli.config import RunConfig, TomlError, folder_words
from verifiers_rl.cli.ending import SAVE_GRACE_S
from verifiers_rl.cli.nodes import COMMAND_VARIABLE
from verifiers_rl.cli.resolved import write_code
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.process.interrupts import handle_signals
from verifiers_rl.process.waiting import WaitingLine

PROGRAM = ("-m", "verifiers_rl.cli.rl")
MAX_RESTARTS = 5  # of one node
READ_S = 1.0  # between two looks at the output of a node


class NodeActor:
    """Runs one `vf-rl` on the machine where Ray has placed it. Methods run on threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def find_place(self, num_ports: int) -> tuple[str, int]:
        """Return this machine's address, and the first of so many free ports in a row."""
        import ray

        address = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        while True:
            with ExitStack() as stack:
                first = stack.enter_context(socket.create_server((address, 0), family=family))
                port = first.getsockname()[1]
                try:
                    for further in range(port + 1, port + num_ports):
                        stack.enter_context(socket.create_server((address, further), family=family))
                except (OSError, OverflowError):
                    continue  # one of them is taken
                return address, port

    def start(self, words: list[str], variables: dict[str, str]) -> None:
        """Start Python with these words and variables. It ends with this process."""
        own = {"VERIFIERS_RL_DIE_WITH_PARENT": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        # `vf-rl` knows nothing of Ray, whose variables have the cluster's token.
        others = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        self._process = subprocess.Popen(
            [sys.executable, *words],
            env={**others, **own, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._collect, args=(self._process.stdout,), daemon=True).start()

    def _collect(self, output: Any) -> None:
        for line in iter(output.readline, b""):
            for part in line.replace(b"\r", b"\n").split(b"\n"):
                if part.strip():
                    self._lines.put(part.decode(errors="replace").rstrip())
        self._lines.put(None)

    def read(self) -> tuple[list[str], int | None]:
        """Wait for output; return its lines, and the exit status when there will be no more."""
        assert self._process is not None
        lines: list[str] = []
        deadline = time.monotonic() + READ_S
        while len(lines) < 1000 and (left_s := deadline - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=0.05 if lines else left_s)
            except queue.Empty:
                break
            if line is None:
                return lines, self._process.wait()
            lines.append(line)
        return lines, None

    def signal(self, number: int) -> None:
        """Send a signal to `vf-rl`, which ends what it has started."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class RayRun:
    """A run on a Ray cluster. `run` returns its exit status.

    Args:
        words: of `vf-rl` on each machine.
        command: the command that was given here, for messages.

    Raises:
        TomlError: servers that run already need a token, which is not set.
    """

    def __init__(self, ray: Any, config: RunConfig, words: Sequence[str], command: str) -> None:
        self._ray, self._config, self._words, self._command = ray, config, words, command
        table = config.cluster
        self.num_trainers = table.trainer_nodes or 1
        # Replicas are nodes of their own, so that Ray can spread them.
        self.num_servers = (table.inference_nodes or 1) * config.inference_replicas
        if config.trainer_args.get("vllm_servers"):
            self.num_servers = 0
            if not os.environ.get(TOKEN_VARIABLE):
                place = config.place("trainer", "args", "vllm_servers")
                raise TomlError(
                    f"{place} has vllm_servers, which run already, and {TOKEN_VARIABLE} is not "
                    "set; set it to their token"
                )
        self.num_envs = table.env_nodes or 0
        self.size = self.num_trainers + self.num_envs + self.num_servers
        self._token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)
        self._actors: dict[int, Any] = {}
        self._groups: list[Any] = []
        # For each node, by its rank: its group, its place in the group, and its CPUs and GPUs.
        self._places: list[tuple[Any, int, dict[str, int]]] = []
        self._start_s: float = config.option("vllm_server_timeout")
        self._master = ("", 0)
        self._events: queue.SimpleQueue[tuple[int, int | None]] = queue.SimpleQueue()
        self._restarts = dict.fromkeys(range(self.size), 0)
        self._stopped: int | None = None

    def place(self, timeout_s: float) -> None:
        """Reserve CPUs and GPUs of all nodes: trainers together, the others spread.

        Raises:
            TomlError: the cluster has no place for them.
        """
        config, ray = self._config, self._ray
        num_workers = str(config.option("env_workers"))
        cpus_of_envs = int(num_workers) if num_workers.isdigit() else 1
        for count, cpus, gpus, strategy, name in (  # in the order of their ranks
            (self.num_trainers, 1, config.trainer_gpus, "PACK", "trainer"),
            (self.num_envs, cpus_of_envs, 0, "SPREAD", "cluster"),
            (self.num_servers, 1, config.inference_gpus, "SPREAD", "inference"),
        ):
            if not count:
                continue
            bundle = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
            group = ray.util.placement_group([bundle] * count, strategy=strategy)
            self._groups.append(group)
            self._places += [(group, index, bundle) for index in range(count)]
            deadline = time.monotonic() + timeout_s
            with WaitingLine(partial("{} places for {}".format, count, name)) as line:
                while not group.wait(1.0):
                    line.show()
                    if time.monotonic() > deadline:
                        free = ray.available_resources()
                        key = "env_nodes" if name == "cluster" else "gpus"
                        value = count if name == "cluster" else gpus
                        raise TomlError(
                            f"{config.source(name, key)}: {name}.{key}={value}: each of {count} "
                            f"nodes needs {gpus} GPUs and {cpus} CPUs, and Ray found no place in "
                            f"{timeout_s:g} s (vllm_server_timeout); free are "
                            f"{free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs"
                        )

    def start_node(self, rank: int) -> None:
        """Start a node in its place; its output and its end become events.

        Raises:
            TomlError: Ray's process there does not answer.
        """
        ray, (group, index, bundle) = self._ray, self._places[rank]
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
        gpus = bundle.get("GPU", 0)
        actor = ray.remote(NodeActor).options(
            num_cpus=bundle["CPU"], num_gpus=gpus, scheduling_strategy=strategy, max_concurrency=4,
            name=f"vf-rl-{os.getpid()}-{secrets.token_hex(2)}-{rank}",
        ).remote()  # fmt: skip
        self._actors[rank] = actor
        address, port = self._get(rank, actor.find_place.remote(max(gpus, 3)))
        if self._stopped is not None:  # a signal came while Ray sought a place
            self._events.put((rank, 128 + self._stopped))
            return
        if rank == 0:
            self._master = (address, port)
        print(f"vf-rl: node {rank} of {self.size} is on {address}", flush=True)
        variables = {TOKEN_VARIABLE: self._token, COMMAND_VARIABLE: self._command}
        words = [*PROGRAM, *self._words]
        if self.size > 1:
            words += [f"--cluster.trainer_nodes={self.num_trainers}"]
            if self.num_envs:
                words += [f"--cluster.env_nodes={self.num_envs}"]
            if self.num_servers:
                words += [f"--cluster.inference_nodes={self.num_servers}"]
                serves = rank >= self.size - self.num_servers
                words += [f"--trainer.args.vllm_server_port={port}"] * serves
            host, master_port = self._master
            variables |= {"MASTER_ADDR": host, "MASTER_PORT": str(master_port)}
            variables |= {"WORLD_SIZE": str(self.size), "RANK": str(rank)}
        self._get(rank, actor.start.remote(words, variables))
        if self._stopped is not None and rank == 0:  # the signal may have come before there was one
            actor.signal.remote(signal.SIGTERM)
        threading.Thread(target=self._follow, args=(rank, actor), daemon=True).start()

    def _get(self, rank: int, call: Any) -> Any:
        try:
            return self._ray.get(call, timeout=self._start_s)
        except self._ray.exceptions.GetTimeoutError as error:
            raise TomlError(
                f"node {rank} of {self.size} has a place on {self._machine_of(rank)}, but Ray "
                f"started no process there within {self._start_s:g} s (vllm_server_timeout); see "
                "Ray's logs on that machine (/tmp/ray/session_latest/logs), and whether a firewall "
                "lets its ports pass; `ray stop` there leaves it out of the next run"
            ) from error

    def _machine_of(self, rank: int) -> str:
        """Return the address of the machine where Ray has reserved a node's place."""
        group, index, _ = self._places[rank]
        node_id = self._ray.util.placement_group_table(group)["bundles_to_node_id"].get(index)
        addresses = {one["NodeID"]: one["NodeManagerAddress"] for one in self._ray.nodes()}
        return addresses.get(node_id, f"a machine that is gone ({node_id})")

    def _follow(self, rank: int, actor: Any) -> None:
        """Print what a node prints, until its end or until its machine is lost."""
        status = None
        try:
            while status is None:
                lines, status = self._ray.get(actor.read.remote())
                for line in lines:
                    print(f"[node {rank}] {line}", flush=True)
        except self._ray.exceptions.RayError:
            status = None  # its machine, or its actor, is gone
        if self._actors.get(rank) is actor:
            self._events.put((rank, status))

    def run(self) -> int:
        running: set[int] = set()
        status, deadline = 0, float("inf")
        for rank in range(self.size):
            if self._stopped is None:
                self.start_node(rank)
                running.add(rank)
        while running and time.monotonic() < deadline:
            if self._stopped is not None:
                deadline = min(deadline, time.monotonic() + SAVE_GRACE_S + 60.0)
            try:
                rank, ended = self._events.get(timeout=READ_S)
            except queue.Empty:
                continue
            is_over = deadline < float("inf") or self._stopped is not None
            may_move = rank >= self.num_trainers
            if ended is None and may_move and not is_over and self._restart(rank):
                continue
            running.discard(rank)
            if ended is None and rank < self.num_trainers and not is_over:
                print(
                    f"vf-rl: error: the machine of node {rank}, with ranks of the trainer, is lost."
                    f" Go on from the last checkpoint: {self._command} --resume",
                    file=sys.stderr,
                )
            if rank < self.num_trainers and not is_over:
                # The others end by themselves, because they have lost it or are told.
                deadline = time.monotonic() + SAVE_GRACE_S + 60.0
            if rank < self.num_trainers:
                if not any(one < self.num_trainers for one in running):
                    # One that is placed again just now finds no run, and would wait for it.
                    deadline = min(deadline, time.monotonic() + 2 * STOP_GRACE_S)
                failed = 1 if ended is None else (128 - ended if ended < 0 else ended)
                status = failed if rank == 0 else status or failed
        return status if self._stopped is None else 128 + self._stopped

    def _restart(self, rank: int) -> bool:
        """Start a node without ranks, whose machine is lost, where Ray finds a place."""
        self._restarts[rank] += 1
        if self._restarts[rank] > MAX_RESTARTS:
            print(f"vf-rl: node {rank} is lost again, and is not placed again", file=sys.stderr)
            return False
        print(f"vf-rl: node {rank} is lost; Ray places it again", flush=True)
        old = self._actors.pop(rank, None)

        def start() -> None:
            try:
                if old is not None:
                    self._ray.kill(old)
                self.start_node(rank)
            except (self._ray.exceptions.RayError, TomlError) as error:
                print(f"vf-rl: node {rank}: {error}", file=sys.stderr)
                self._events.put((rank, None))

        threading.Thread(target=start, daemon=True).start()
        return True

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Ask node 0 to end, which tells the others; at a second signal, end all at once."""
        is_second, self._stopped = self._stopped is not None, number
        for rank, actor in list(self._actors.items()):
            if is_second:
                self._ray.kill(actor)
            elif rank == 0:
                actor.signal.remote(signal.SIGTERM)
        if not is_second:
            print(f"\nvf-rl: {signal.Signals(number).name}: ending all nodes", flush=True)

    def close(self) -> None:
        for actor in list(self._actors.values()):
            self._ray.kill(actor)  # `vf-rl` ends with it
        for group in self._groups:
            self._ray.util.remove_placement_group(group)


def run_on_ray(config: RunConfig, options: argparse.Namespace) -> int:
    """Run the configuration on a Ray cluster; return the exit status of its trainer.

    Raises:
        TomlError: Ray is not installed, does not answer, or has no place for the run.
    """
    where = config.place("cluster", "engine")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise TomlError(
            f"{where} engine='ray' needs Ray, which is not installed: pip install "
            "'verifiers-rl[ray]', the same version on all machines"
        ) from error
    from verifiers_rl.cli.plan import check_trainer_options

    if "vllm_server_host" in config.trainer_args:
        raise TomlError(
            f"{config.place('trainer', 'args', 'vllm_server_host')} vllm_server_host has no "
            "meaning where Ray chooses the machines; remove it"
        )
    args = check_trainer_options(config)
    command = shlex.join(["vf-rl", *config.words])
    if isinstance(options.resume, str):  # other machines have other working directories
        options.resume = os.path.abspath(options.resume)
    words = ["@", "config.toml", "--no-tmux", *folder_words(options), *replica_words(config)]
    with tempfile.TemporaryDirectory(prefix="vf-rl-") as folder:
        write_code(config, str(args.output_dir), Path(folder))
        os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"  # of a job that Ray itself has started
        package = str(Path(__file__).parents[1])
        try:
            ray.init(
                address=config.cluster.address,
                runtime_env={"working_dir": folder, "py_modules": [package]},
                log_to_driver=False,
                logging_level="warning",
            )
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise TomlError(
                f"{config.place('cluster', 'address')} address={config.cluster.address!r}: no Ray "
                f"cluster answers there ({str(error).splitlines()[0]}); start one: ray start --head"
            ) from error
    run = RayRun(ray, config, words, command)
    try:
        run.place(config.option("vllm_server_timeout"))
        handle_signals(run.on_signal)
        return run.run()
    except ray.exceptions.RayError as error:
        print(f"vf-rl: error: {error}", file=sys.stderr)
        return 1
    finally:
        run.close()
        ray.shutdown()


def replica_words(config: RunConfig) -> list[str]:
    """Return the words by which a node starts one replica, because each has a node of its own.
    Without `replicas`, a node divides its GPUs by itself.
    """
    return ["--inference.replicas=1"] if config.has_replicas else []
