"""`[cluster] address`: Ray chooses the machines of a run, and this process supervises it.

Each process of the run is the child of an actor, which Ray places on a machine with enough GPUs.
This process starts and ends them through their actors, as it does with children of its own in a run
on one machine (`supervise.supervise`). Ray brings their output here.

    this process ──► Ray ──► actor ──► the trainer's first ranks
                        ├──► actor ──► further ranks            (packed together)
                        └──► actor ──► vf-vllm                  (spread)

A server whose machine is lost gets another actor, which Ray places again.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import tomli_w

from verifiers_rl.cli.children import POLL_S, Child, LocalChild
from verifiers_rl.cli.config import RunConfig, TomlError, words_of
from verifiers_rl.cli.plan import (
    Address,
    ServerPlan,
    check_trainer_options,
    plan_servers,
    trainer_command,
)
from verifiers_rl.cli.resolved import LEFT_OUT, resolved
from verifiers_rl.cli.supervise import set_token, supervise
from verifiers_rl.inference.client import TOKEN_VARIABLE, InferenceClient, InferenceServerError
from verifiers_rl.process.waiting import wait_until

# In the environment of Ray on a machine: the folder that gets a file with the run's status in its
# name, which is there at once.
END_VARIABLE, END = "VERIFIERS_RL_END_FOLDER", "ended-"
TELL_S = 30.0  # deadline for telling the other machines that the run has ended
OUTPUT_S = 1.0  # so long Ray takes to bring the last lines of a process here
MAX_CODE_MB = 100  # of the folders that travel to the machines
_LEFT_BEHIND = shutil.ignore_patterns(
    ".*",
    "__pycache__",
    "outputs",
    "checkpoint-*",
    "wandb",
    "node_modules",
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.log",
    "*.env",
)


class ProcessActor:
    """Runs one process on the machine where Ray has placed it. Methods run on threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._child: LocalChild | None = None

    def __repr__(self) -> str:  # which Ray puts in front of its output
        return self._name

    def find_address(self, wanted: Address | None) -> Address:
        """Return this machine's address, and a free port: that of `wanted`, if it is an address of
        this machine and its port is free.
        """
        import ray

        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if wanted is not None and wanted[0] == host:
            with suppress(OSError), socket.create_server(wanted, family=family):
                return wanted
        with socket.create_server((host, 0), family=family) as server:
            return host, server.getsockname()[1]

    def run(self, words: list[str], env: dict[str, str], host: str) -> tuple[int, list[str]]:
        """Run Python with these words and variables, until its end or ours. Return its exit status
        and its last lines.
        """
        # gloo takes the interface of the machine's name otherwise, which is often the loopback's.
        for name, addresses in psutil.net_if_addrs().items():
            if host in [one.address for one in addresses]:
                env = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", name), **env}
        # The file of our own output, which Ray brings to the supervisor.
        log = Path("/proc/self/fd/1").resolve()
        # It knows nothing of Ray, whose variables have the cluster's token.
        self._child = child = LocalChild(self._name, words, env, log, drop="RAY_")
        while not child.wait(60.0):
            pass
        # Ray has marks of its own there, such as ":actor_name:".
        return child.poll() or 0, [line for line in child.last_lines() if line[0] != ":"]

    def signal(self, number: int) -> None:
        """Send a signal to the process and what it has started."""
        if self._child is not None:
            self._child.signal(number)


class RayChild(Child):
    """A process in a place that Ray has reserved. It starts when it is polled, as soon as the place
    has an address.

    Args:
        place: placement group, index in it, and its GPUs.
        plan: returns the words and the variables of the process at an address: of its machine, with
            a port that is free there.
        timeout_s: how long Ray may take to start an actor in the place.
        wanted: an address that it had before, and takes again if it can.
    """

    def __init__(
        self,
        name: str,
        ray: Any,
        place: tuple[Any, int, int],
        plan: Callable[[Address], tuple[list[str], dict[str, str]]],
        timeout_s: float,
        wanted: Address | None = None,
    ) -> None:
        super().__init__(name)
        self._ray, self._plan, self._timeout_s = ray, plan, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._status: int | None = None
        self._last_lines: list[str] = []
        self._why_lost = ""
        group, index, gpus = place
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
        options = {"num_cpus": 1, "num_gpus": gpus, "max_concurrency": 4}
        actor = ray.remote(ProcessActor).options(**options, scheduling_strategy=strategy)
        self._actor = actor.remote(name)
        self._awaited = self._actor.find_address.remote(wanted)

    def wait(self, seconds: float) -> bool:
        """Wait for its address, then for its end. Starts it in between."""
        if self._status is not None:
            return True
        ray = self._ray
        try:
            if ray.wait([self._awaited], timeout=seconds)[0]:
                result = ray.get(self._awaited)
                if self.address is not None:
                    self._status, self._last_lines = result
                else:
                    self.address = host, port = result
                    print(f"vf-rl: {self.name} is on {host}")
                    self._awaited = self._actor.run.remote(*self._plan((host, port)), host)
            elif self.address is None and time.monotonic() > self._deadline:
                self._lose(
                    f"has a place, but Ray started no process there within {self._timeout_s:g} s "
                    "(vllm_server_timeout); see Ray's logs (/tmp/ray/session_latest/logs), and "
                    "whether a firewall lets its ports pass"
                )
        except ray.exceptions.RayTaskError as error:  # of the actor's own code
            self._status, self._why_lost = 1, f"could not be run: {error.cause}"
        except ray.exceptions.RayError:
            where = self.address[0] if self.address else "before it had an address"
            self._lose(f"is lost with its machine, {where}")
        return self._status is not None

    def _lose(self, why: str) -> None:
        self._status, self.is_lost, self._why_lost = 1, True, why

    def poll(self) -> int | None:
        self.wait(0.0)
        return self._status

    @property
    def end(self) -> str:
        return self._why_lost or super().end

    def last_lines(self) -> list[str]:
        return self._last_lines

    def signal(self, number: int) -> None:
        self._actor.signal.remote(number)
        if number == signal.SIGKILL:
            self._ray.kill(self._actor)  # what it has started ends with it


class RayMachines:
    """See `supervise.Launcher`.

    Args:
        plans: of all servers.
        num_machines: wait until the cluster has so many.
    """

    def __init__(
        self,
        ray: Any,
        config: RunConfig,
        plans: Sequence[ServerPlan],
        num_machines: int,
    ) -> None:
        self._ray, self._config, self._plans = ray, config, plans
        self._num_machines = num_machines
        self._timeout_s = config.option("vllm_server_timeout")
        set_token()  # also for this process, which asks servers whether they are up
        self._places: dict[str, Any] = {}
        self._addresses: dict[str, Address] = {}  # of servers

    def open(self) -> None:
        """Wait for the machines, and reserve places: those of the trainer packed together, the
        others spread.

        Raises:
            TomlError: there are not enough machines, or they have no place.
        """

        def count() -> int:
            return sum(node["Alive"] for node in self._ray.nodes())

        wanted, timeout_s = self._num_machines, self._timeout_s
        if not wait_until(lambda: count() >= wanted, f"{wanted} machines", timeout_s):
            raise TomlError(
                f"{count()} of WORLD_SIZE={wanted} machines joined within {timeout_s:g} s "
                "(vllm_server_timeout); start vf-rl with the four variables on each, and let a "
                "firewall pass Ray's ports"
            )
        gpus = self._config.trainer.gpus
        count_trainers = self._config.cluster.trainer_nodes or 1
        self._reserve("PACK", {f"trainer-{n}": gpus for n in range(count_trainers)})
        self._reserve("SPREAD", {plan.name: plan.gpus for plan in self._plans})

    def _reserve(self, strategy: str, gpus: dict[str, int]) -> None:
        if not gpus:
            return
        bundles = [{"CPU": 1, "GPU": count} if count else {"CPU": 1} for count in gpus.values()]
        group = self._ray.util.placement_group(bundles, strategy=strategy)
        shown = ", ".join(f"{name} {count}" for name, count in gpus.items())
        if not wait_until(lambda: group.wait(POLL_S), f"places for {shown}", self._timeout_s):
            free = self._ray.available_resources()
            raise TomlError(
                f"{self._config.layers.files[-1]}: Ray found no places with these GPUs, and 1 CPU "
                f"each, within {self._timeout_s:g} s (vllm_server_timeout): {shown}; free are "
                f"{free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs"
            )
        self._places |= {name: (group, n, gpus[name]) for n, name in enumerate(gpus)}

    def start_server(self, plan: ServerPlan) -> Child:
        before = self._addresses.pop(plan.name, None)

        def at(address: Address) -> tuple[list[str], dict[str, str]]:
            if before not in (None, address) and not plan.is_needed:
                # The trainer hears of the new address from the servers that it knows.
                join = "/weight_sync/join?host={}&port={}".format(*address)
                policy = [one.name for one in self._plans if not one.is_needed]
                for known in map(self._addresses.get, policy):
                    if known is not None:
                        with suppress(InferenceServerError):
                            InferenceClient(*known).post(join).begin().answer()
            self._addresses[plan.name] = address
            return plan.command(*address), self._env(plan.env, plan.gpus)

        return RayChild(plan.name, self._ray, self._places[plan.name], at, self._timeout_s, before)

    def _env(self, env: dict[str, str], gpus: int) -> dict[str, str]:
        """Return the variables of a process, with the run's token. Ray has set those of GPUs."""
        own = {} if gpus else {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
        return {**env, **own, TOKEN_VARIABLE: os.environ[TOKEN_VARIABLE]}

    def start_trainers(self, env: dict[str, str]) -> Iterator[Child]:
        # What travels is one TOML.
        config, words = self._config, words_of(self._config, ("@", "config.toml"))
        number = config.cluster.trainer_nodes or 1
        # One rank is alone, whatever has started Ray there, such as srun.
        env = self._env({"WORLD_SIZE": "1", **env}, config.trainer.gpus)
        first: Child | None = None
        for n in range(number):

            def at(own: Address, n: int = n, first: Child | None = first) -> Any:
                master = first.find_address() if first else own
                return trainer_command(config, words, n, number, master), env

            name = "trainer" if number == 1 else f"trainer-{n}"
            child = RayChild(name, self._ray, self._places[f"trainer-{n}"], at, self._timeout_s)
            first = first or child
            yield child

    def close(self) -> None:
        time.sleep(OUTPUT_S)


def write_code(config: RunConfig, output_dir: str, folder: Path) -> None:
    """Write into a folder what travels to the machines: one TOML, and the folders with its modules.
    Secrets stay here, also the files of `env_file`.

    Raises:
        TomlError: they are too large.
    """
    # The run's own TOMLs travel as the resolved one, which has no secrets.
    own = {path.resolve() for path in (*map(Path, config.env_files), *config.layers.files)}

    num_bytes = 0

    def stays(parent: str, names: list[str]) -> set[str]:
        nonlocal num_bytes
        left = _LEFT_BEHIND(parent, names) | {n for n in names if Path(parent, n).resolve() in own}
        files = [Path(parent, name) for name in names if name not in left]
        num_bytes += sum(path.stat().st_size for path in files if path.is_file())
        if num_bytes > MAX_CODE_MB * 1e6:
            raise TomlError(
                f"{parent}: this folder travels to the machines of the Ray cluster, and that is "
                f"more than {MAX_CODE_MB} MB with those before it; put the TOML and its modules "
                "into a folder of their own"
            )
        return left

    data, secrets = resolved(config, output_dir)
    for key in secrets:
        print(f"vf-rl: not sent to the machines of the cluster: {LEFT_OUT}{key}")
    data.pop("cluster", None)
    data["import_from"] = []
    for number, source in enumerate(config.folders):
        target = folder / f"code{number}"
        shutil.copytree(source, target, ignore=stays, ignore_dangling_symlinks=True)
        data["import_from"].append(f"./code{number}")
    (folder / "config.toml").write_text(tomli_w.dumps(data), "utf-8")


def tell_others(ray: Any, status: int) -> None:
    """Tell all machines that the run has ended."""
    at, nodes = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy, ray.nodes()
    tell, ids = ray.remote(_write_end).options, [node["NodeID"] for node in nodes if node["Alive"]]
    calls = [tell(num_cpus=0, scheduling_strategy=at(n, soft=False)).remote(status) for n in ids]
    ray.wait(calls, num_returns=len(calls), timeout=TELL_S)


def _write_end(status: int) -> None:
    Path(os.environ[END_VARIABLE], f"{END}{status}").touch()


def run_on_ray(config: RunConfig, num_machines: int = 1) -> int:
    """Run the configuration on a Ray cluster; return the exit status of its trainer.

    Args:
        num_machines: wait until the cluster has so many, and tell them how the run has ended.

    Raises:
        TomlError: Ray is not installed, does not answer, or the configuration cannot run there.
    """
    try:
        # Not before: Ray reads RAY_AUTH_MODE, which `machines` has set, while it is imported.
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise TomlError(
            f"{config.layers.place('cluster', 'address')} a run on several machines needs Ray, "
            "which is not installed: pip install 'verifiers-rl[ray]', the same version on all "
            "machines"
        ) from error
    if "vllm_server_host" in config.trainer.args:
        raise config.layers.error(
            ("trainer", "args", "vllm_server_host"),
            "has no meaning where Ray chooses the machines; remove it",
        )
    args = check_trainer_options(config)
    with tempfile.TemporaryDirectory(prefix="vf-rl-") as folder:
        write_code(config, str(args.output_dir), Path(folder))
        os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"  # of a job that Ray itself has started
        os.environ["RAY_DEDUP_LOGS"] = "0"
        package = str(Path(__file__).parents[1])
        try:
            ray.init(
                address=config.cluster.address,
                runtime_env={"working_dir": folder, "py_modules": [package]},
                logging_level="warning",
            )
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise config.layers.error(
                ("cluster", "address"),
                f"no Ray cluster answers there ({str(error).splitlines()[0]}); start one: ray "
                "start --head",
            ) from error
    status = 1
    try:
        plans = plan_servers(config)
        machines = RayMachines(ray, config, plans, num_machines)
        status = supervise(config, plans, machines)
    except ray.exceptions.RayError as error:
        print(f"vf-rl: error: {error}", file=sys.stderr)
    finally:
        if num_machines > 1:
            tell_others(ray, status)
        ray.shutdown()
    return status
