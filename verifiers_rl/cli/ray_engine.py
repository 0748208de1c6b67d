"""`[cluster] engine = "ray"`: Ray chooses the machines of a run, and this process supervises it.

Each process of the run is the child of an actor, which Ray places on a machine with enough GPUs.
This process starts and ends them through their actors, as it does with children of its own in a run
on one machine (`supervise.supervise`), and prints their output.

    this process ──► Ray ──► actor ──► the trainer's first ranks
                        ├──► actor ──► further ranks            (packed together)
                        └──► actor ──► vf-vllm                  (spread)

A process whose machine is lost gets another actor, which Ray places again.
"""

from __future__ import annotations

import argparse
import copy
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from verifiers_rl.cli.children import (
    Child,
    ChildError,
    Supervised,
    answers,
    lines_of,
    signal_group,
    start_python,
)
from verifiers_rl.cli.config import RunConfig, TomlError
from verifiers_rl.cli.plan import (
    SERVERS_VARIABLE,
    check_parallel_sizes,
    check_trainer_options,
    host_and_port,
    server_command,
    server_env,
    trainer_command,
    trainer_env,
)
from verifiers_rl.cli.resolved import write_code
from verifiers_rl.cli.supervise import supervise
from verifiers_rl.inference.client import (
    TOKEN_VARIABLE,
    InferenceClient,
    InferenceServerError,
)
from verifiers_rl.process.waiting import WaitingLine

READ_S = 1.0  # between two looks at the output of a process
ADDRESS = tuple[str, int]


class ProcessActor:
    """Runs one process on the machine where Ray has placed it. Methods run on threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def find_address(self, wanted: ADDRESS | None) -> ADDRESS:
        """Return this machine's address, and a free port: that of `wanted`, if it is an address of
        this machine and its port is free.
        """
        import ray

        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        ports = [wanted[1], 0] if wanted is not None and wanted[0] == host else [0]
        for port in ports:
            with suppress(OSError), socket.create_server((host, port), family=family) as server:
                return host, server.getsockname()[1]
        raise OSError(f"{host} has no free port")

    def start(self, words: list[str], variables: dict[str, str], host: str) -> None:
        """Start Python with these words and variables. It ends with this process."""
        # It knows nothing of Ray, whose variables have the cluster's token.
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        # gloo takes the interface of the machine's name otherwise, which is often the loopback's.
        for name, addresses in psutil.net_if_addrs().items():
            if host in [one.address for one in addresses]:
                env.setdefault("GLOO_SOCKET_IFNAME", name)
        env |= variables
        self._process = start_python(words, env, subprocess.PIPE, subprocess.STDOUT)
        threading.Thread(target=self._collect, args=(self._process.stdout,), daemon=True).start()

    def _collect(self, output: Any) -> None:
        for line in lines_of(output):
            self._lines.put(line)
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
        """Send a signal to the process and what it has started."""
        if self._process is not None:
            signal_group(self._process, number)


class RayChild(Child):
    """A process in a place that Ray has reserved. It starts in the background.

    Args:
        place: placement group, index in it, and its CPUs and GPUs.
        plan: returns the words and the variables of the process at an address: of its machine, with
            a port that is free there.
        timeout_s: how long Ray may take to start an actor in the place.
        wanted: an address that it had before, and takes again if it can.

    Attributes:
        address: see `plan`; None until it has one.
    """

    def __init__(
        self,
        name: str,
        ray: Any,
        place: tuple[Any, int, dict[str, int]],
        plan: Callable[[ADDRESS], tuple[list[str], dict[str, str]]],
        timeout_s: float,
        wanted: ADDRESS | None = None,
    ) -> None:
        super().__init__(name)
        self._ray, self._place, self._timeout_s = ray, place, timeout_s
        self.address: ADDRESS | None = None
        self._status: int | None = None
        self._why_lost = ""
        self._has_address, self._has_ended = threading.Event(), threading.Event()
        group, index, bundle = place
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
        self._actor = ray.remote(ProcessActor).options(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_concurrency=4,
            scheduling_strategy=strategy,
        ).remote()  # fmt: skip
        find = self._actor.find_address.remote(wanted)
        self._reader = threading.Thread(target=self._follow, args=(plan, find), daemon=True)
        self._reader.start()

    def _follow(self, plan: Any, find: Any) -> None:
        """Start the process, and print its output until its end or that of its machine."""
        ray, status = self._ray, None
        try:
            self.address = ray.get(find, timeout=self._timeout_s)
            print(f"vf-rl: {self.name} is on {self.address[0]}", flush=True)
            words, env = plan(self.address)  # first: who waits for the address needs what it notes
            self._has_address.set()
            start = self._actor.start.remote(words, env, self.address[0])
            ray.get(start, timeout=self._timeout_s)
            while status is None:
                lines, status = ray.get(self._actor.read.remote())
                self._show(lines)
        except ray.exceptions.GetTimeoutError:
            self._why_lost = (
                f"has a place on {self._machine()}, but Ray started no process there within "
                f"{self._timeout_s:g} s (vllm_server_timeout); see Ray's logs on that machine "
                "(/tmp/ray/session_latest/logs), and whether a firewall lets its ports pass"
            )
        except ray.exceptions.RayError:
            self._why_lost = f"is lost with its machine, {self._machine()}"
        self.is_lost = status is None
        status = 1 if status is None else status
        self._status = 128 - status if status < 0 else status
        self._has_ended.set()
        self._has_address.set()

    def _machine(self) -> str:
        """Return the address of the machine where Ray has reserved the place."""
        if self.address is not None:
            return self.address[0]
        group, index, _ = self._place
        node_id = self._ray.util.placement_group_table(group)["bundles_to_node_id"].get(index)
        addresses = {one["NodeID"]: one["NodeManagerAddress"] for one in self._ray.nodes()}
        return addresses.get(node_id, "a machine that is gone")

    def find_address(self) -> ADDRESS:
        """Wait until it has an address.

        Raises:
            ChildError: Ray's process does not start.
        """
        self._has_address.wait()  # `_follow` has the deadline
        if self.address is None:
            raise ChildError(f"{self.name} {self.end}")
        return self.address

    @property
    def end(self) -> str:
        return self._why_lost or super().end

    def poll(self) -> int | None:
        return self._status

    def wait(self, seconds: float) -> bool:
        return self._has_ended.wait(seconds)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._ray.kill(self._actor)  # what it has started ends with it

    def _signal(self, number: int) -> None:
        self._actor.signal.remote(number)


class RayMachines:
    """See `supervise.Machines`.

    Args:
        sent: the configuration as it is on the machines. It becomes that of one place.
        num_machines: wait until the cluster has so many.

    Raises:
        TomlError: servers that run already need a token, which is not set.
    """

    def __init__(
        self, ray: Any, sent: RunConfig, options: argparse.Namespace, num_machines: int = 1
    ) -> None:
        self._ray, self._config, self._options = ray, sent, options
        self._num_machines = num_machines
        table = sent.cluster
        self.num_trainers = table.trainer_nodes or 1
        # Each replica has a place of its own, so that Ray can spread them.
        self.num_servers = (table.inference_nodes or 1) * sent.inference_replicas
        sent.inference_replicas = 1
        if sent.trainer_args.get("vllm_servers"):
            self.num_servers = 0
            if not os.environ.get(TOKEN_VARIABLE):
                place = sent.place("trainer", "args", "vllm_servers")
                raise TomlError(
                    f"{place} has vllm_servers, which run already, and {TOKEN_VARIABLE} is not "
                    "set; set it to their token"
                )
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)
        self._own = {TOKEN_VARIABLE: token}
        os.environ[TOKEN_VARIABLE] = token  # to ask servers whether they are up
        self._groups: list[Any] = []
        self._addresses: dict[int, ADDRESS] = {}  # of servers, by their number
        self._timeout_s = 0.0
        self.servers: list[Supervised] = []
        self.others: list[Supervised] = []
        self.trainers: list[Child] = []

    def start(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._wait_for_machines()
        config = self._config
        trainer_places = self._reserve(self.num_trainers, config.trainer_gpus, "trainer")
        server_places = self._reserve(self.num_servers, config.inference_gpus, "inference")
        for number, place in enumerate(server_places):
            what = f"inference-{number}" if self.num_servers > 1 else "inference"
            start = partial(self._start_server, what, number, place)
            is_ready = partial(self._is_up, number)
            self.servers.append(Supervised(what, start, is_ready, config, ("inference",)))
        for server in self.servers:
            server.child.find_address()  # type: ignore[attr-defined]
        for number, place in enumerate(trainer_places):
            name = f"trainer-{number}" if self.num_trainers > 1 else "trainer"
            plan = partial(self._plan_trainer, number)
            child = RayChild(name, self._ray, place, plan, timeout_s)
            self.trainers.append(child)
            if number == 0:
                self._master = child.find_address()

    def _wait_for_machines(self) -> None:
        deadline = time.monotonic() + self._timeout_s

        def count() -> int:
            return sum(node["Alive"] for node in self._ray.nodes())

        with WaitingLine(lambda: f"machines: {count()} of {self._num_machines}") as line:
            while (found := count()) < self._num_machines:
                if time.monotonic() > deadline:
                    raise TomlError(
                        f"{found} of WORLD_SIZE={self._num_machines} machines joined within "
                        f"{self._timeout_s:g} s (vllm_server_timeout); start vf-rl with the four "
                        "variables on each, and let a firewall pass Ray's ports"
                    )
                line.show()
                time.sleep(0.25)

    def _reserve(self, count: int, gpus: int, table: str) -> list[tuple[Any, int, dict[str, int]]]:
        """Reserve places: those of the trainer packed together, the others spread.

        Raises:
            TomlError: the cluster has no place for them.
        """
        if not count:
            return []
        ray, config = self._ray, self._config
        bundle = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}
        strategy = "PACK" if table == "trainer" else "SPREAD"
        group = ray.util.placement_group([bundle] * count, strategy=strategy)
        self._groups.append(group)
        deadline = time.monotonic() + self._timeout_s
        with WaitingLine(lambda: f"{count} places for {table}") as line:
            while not group.wait(1.0):
                line.show()
                if time.monotonic() > deadline:
                    free = ray.available_resources()
                    raise TomlError(
                        f"{config.source(table, 'gpus')}: {table}.gpus={gpus}: each of {count} "
                        f"places needs {gpus} GPUs and 1 CPU, and Ray found none in "
                        f"{self._timeout_s:g} s (vllm_server_timeout); free are "
                        f"{free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs"
                    )
        return [(group, index, bundle) for index in range(count)]

    def _start_server(self, name: str, number: int, place: Any) -> Child:
        before = self._addresses.pop(number, None)

        def plan(address: ADDRESS) -> tuple[list[str], dict[str, str]]:
            words = server_command(self._config, *address)
            if before is not None and before != address:
                # The trainer hears of the new address from the servers that it knows.
                for known in list(self._addresses.values()):
                    with suppress(InferenceServerError):  # lost too
                        InferenceClient(*known).join(*address)
            self._addresses[number] = address
            env = server_env(self._config, "", number)
            return words, self._env(env, self._config.inference_gpus)

        return RayChild(name, self._ray, place, plan, self._timeout_s, before)

    def _env(self, env: dict[str, str], gpus: int) -> dict[str, str]:
        """Return the variables of a process, with the run's token."""
        if gpus:
            del env["CUDA_VISIBLE_DEVICES"]  # Ray has set them
        return env | self._own

    def _is_up(self, number: int) -> bool:
        address = self._addresses.get(number)
        return address is not None and answers(*address)

    def _servers_named(self) -> list[str]:
        return [host_and_port(*self._addresses[number]) for number in sorted(self._addresses)]

    def _plan_trainer(self, number: int, address: ADDRESS) -> tuple[list[str], dict[str, str]]:
        master = address if number == 0 else self._master
        config, named = self._config, self._servers_named()
        env = self._env(trainer_env("", named), config.trainer_gpus)
        if named:  # also if it is one
            env[SERVERS_VARIABLE] = " ".join(named)
        if not config.trainer_gpus:
            env["ACCELERATE_USE_CPU"] = "true"
        words = trainer_command(config, self._options, number, self.num_trainers, master)
        return words, env

    def close(self) -> None:
        for group in self._groups:
            self._ray.util.remove_placement_group(group)


def run_on_ray(
    config: RunConfig,
    options: argparse.Namespace,
    num_machines: int = 1,
    on_end: Callable[[Any, int], None] = lambda ray, status: None,
) -> int:
    """Run the configuration on a Ray cluster; return the exit status of its trainer.

    Args:
        num_machines: wait until the cluster has so many.
        on_end: called with Ray and the status before we leave the cluster.

    Raises:
        TomlError: Ray is not installed, does not answer, or the configuration cannot run there.
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
    if "vllm_server_host" in config.trainer_args:
        raise TomlError(
            f"{config.place('trainer', 'args', 'vllm_server_host')} vllm_server_host has no "
            "meaning where Ray chooses the machines; remove it"
        )
    args = check_trainer_options(config)
    check_parallel_sizes(config)
    if isinstance(options.resume, str):  # other machines have other working directories
        options.resume = os.path.abspath(options.resume)
    sent = copy.copy(config)
    sent.words = ["@", "config.toml"]
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
    status = 1
    try:
        status = supervise(config, RayMachines(ray, sent, options, num_machines))
    except ray.exceptions.RayError as error:
        print(f"vf-rl: error: {error}", file=sys.stderr)
    finally:
        on_end(ray, status)
        ray.shutdown()
    return status
