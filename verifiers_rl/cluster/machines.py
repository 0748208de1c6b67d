"""The four variables of torch's launchers, on several machines that each run the same
`vf-rl @ config.toml`: they become a Ray cluster, and the run is one on it (ray_engine.py).

    RANK=0          starts Ray's head at MASTER_ADDR:MASTER_PORT, waits for WORLD_SIZE machines,
                    runs, tells the others how the run has ended, and ends the head
    RANK=1, 2, ...  joins the head, and waits until the run or the head has ended

What a machine has started of Ray ends with its `vf-rl`, however that ends.
"""

from __future__ import annotations

import hmac
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from verifiers_rl.cli.children import NUM_SHOWN_LINES, POLL_S, Child, ChildError, LocalChild
from verifiers_rl.cli.config import ClusterTable, RunConfig, TomlError
from verifiers_rl.cli.plan import MACHINE_VARIABLES as VARIABLES
from verifiers_rl.cluster.ray_engine import END, END_VARIABLE, run_on_ray
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.process.ending import SAVE_GRACE_S, end_with_starter, handle_signals
from verifiers_rl.process.waiting import wait_until

LOST_S = 25  # so long a machine does without the head


@dataclass(frozen=True)
class Machine:
    """This machine's place among several.

    Attributes:
        rank: its number; 0 has Ray's head.
        size: how many there are.
        host, port: of the head.
    """

    rank: int
    size: int
    host: str
    port: int


def take_variables(environment: MutableMapping[str, str]) -> Machine | None:
    """Return what the four variables say, and remove them, because what we start would take them
    for its own. None if they are not set, or name one machine alone.

    Raises:
        TomlError: some are missing, or have values that cannot be.
    """
    texts = [environment.pop(name, "") for name in VARIABLES]
    if not any(texts):
        return None
    if "LOCAL_RANK" in environment:
        raise TomlError(
            "LOCAL_RANK is set, as by torchrun. vf-rl starts the ranks itself: start it once on "
            "each machine, without a launcher"
        )
    port, size, rank = (int(text) if text.isdecimal() else -1 for text in texts[1:])
    if not (texts[0] and 0 < port < 65536 and 0 <= rank < size):
        given = [f"{name}={text!r}" for name, text in zip(VARIABLES, texts, strict=True)]
        raise TomlError(
            f"{', '.join(given)}: must be the host and the port of Ray's head, the number of "
            "machines, and the number of this one, from 0 to WORLD_SIZE - 1. For a run on several "
            "machines set all four on each; for one on this machine unset all"
        )
    return Machine(rank, size, texts[0], port) if size > 1 else None


def machine_of(config: RunConfig) -> Machine | None:
    """Return this machine's place by the variables, and make the configuration that of a run on
    Ray; None for a run on one machine, or on a cluster that is there already.

    Raises:
        TomlError: they contradict [cluster], or the token is missing.
    """
    machine, table = take_variables(os.environ), config.cluster
    if machine is None:
        if not table.address and table != ClusterTable():
            raise config.layers.error(
                ("cluster",),
                f"is about several machines: set {', '.join(VARIABLES)} on each, or address",
            )
        return None
    if table.address:
        raise config.layers.error(
            ("cluster", "address"),
            f"is of a Ray cluster that runs already, and {', '.join(VARIABLES)}, which start one, "
            "are set too; unset them, or remove address",
        )
    if not os.environ.get(TOKEN_VARIABLE):
        raise TomlError(
            f"{TOKEN_VARIABLE} is not set, and WORLD_SIZE={machine.size}: all machines need one "
            "token. Set it to the same value on each, such as what `openssl rand -hex 24` prints "
            "once"
        )
    table.address = f"{machine.host}:{machine.port}"
    if table.inference_nodes is None and not config.trainer.args.get("vllm_servers"):
        table.inference_nodes = max(machine.size - (table.trainer_nodes or 1), 1)
    return machine


def run_on_machines(config: RunConfig) -> int | None:
    """Run on a Ray cluster, or do this machine's part of such a run; return the run's exit status.
    None: the configuration is of a run on this machine alone.

    Raises:
        TomlError: see `machine_of`, `find_head` and `ray_engine.run_on_ray`.
        ChildError: Ray does not run here, or see `join`.
    """
    if (machine := machine_of(config)) is None:
        return run_on_ray(config) if config.cluster.address else None
    timeout_s = config.option("vllm_server_timeout")
    address = find_head(machine) if machine.rank == 0 else ""
    # Ray's own ports ask for this token. Our token itself stays with our processes.
    token = hmac.digest(os.environ[TOKEN_VARIABLE].encode(), b"ray", "sha256").hex()
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(LOST_S))
    with tempfile.TemporaryDirectory(prefix="vf-rl-") as folder:
        if machine.rank:
            return join(machine, timeout_s, Path(folder))
        config.cluster.address = f"{address}:{machine.port}"
        where = f"Ray's head for {machine.size} machines at {config.cluster.address}"
        print(f"vf-rl: this machine is {where}")
        words = [
            "--head",
            "--node-ip-address",
            address,
            "--port",
            str(machine.port),
            "--include-dashboard",
            "false",
        ]
        with ray_here(words, Path(folder), where, timeout_s):
            return run_on_ray(config, machine.size)


def find_head(machine: Machine) -> str:
    """Return the address of this machine, which is to have Ray's head.

    Raises:
        TomlError: MASTER_ADDR has none, or one that other machines cannot reach.
    """
    host = machine.host
    try:
        address = str(socket.getaddrinfo(host, machine.port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise TomlError(
            f"MASTER_ADDR={host!r} cannot be reached: {error.strerror}; set it to the name or "
            "address of the machine with RANK=0"
        ) from error
    if address.startswith("127.") and host not in (address, "localhost"):
        raise TomlError(
            f"MASTER_ADDR={host!r} is {address} on this machine, which other machines "
            "cannot reach; set it to this machine's address in their network"
        )
    return address


def join(machine: Machine, timeout_s: float, folder: Path) -> int:
    """Let the run use this machine, until it has ended; return its exit status.

    Args:
        folder: for files of this machine.

    Raises:
        ChildError: there is no head within `timeout_s`, or it is lost.
    """
    where, address = f"Ray's head at {machine.host}:{machine.port}", ""
    print(f"vf-rl: machine {machine.rank} of {machine.size} joins {where}")

    def listens() -> bool:
        nonlocal address
        try:  # its name may have no address before its machine is up
            with socket.create_connection((machine.host, machine.port), 5.0) as connection:
                address = str(connection.getpeername()[0])
        except OSError:
            return False
        return True

    if not wait_until(listens, where, timeout_s):
        raise ChildError(
            f"nothing answers at {where} after {timeout_s:g} s (vllm_server_timeout): start "
            "vf-rl with RANK=0 there, and let a firewall pass MASTER_PORT"
        )
    deadline, stopped = math.inf, 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal deadline, stopped
        is_second, stopped = bool(stopped), number
        # The launcher that sends it here sends it to rank 0 too, which saves a checkpoint.
        deadline = 0.0 if is_second else time.monotonic() + SAVE_GRACE_S + 60.0
        print(f"\nvf-rl: {signal.Signals(number).name}: waiting for the end of the run")

    words = ["--address", f"{address}:{machine.port}"]
    with ray_here(words, folder, f"Ray on this machine, which joins {where},", timeout_s) as ray:
        handle_signals(on_signal)  # until here a signal ends this process, and Ray with it
        while time.monotonic() < deadline:
            is_lost = ray.wait(POLL_S)  # looked at first: the head ends when it has told the status
            for end in folder.glob(f"{END}*"):
                return int(end.name.removeprefix(END))
            if is_lost:
                raise ChildError(
                    f"{where} is lost, and the run with it; see the output of the machine "
                    "with RANK=0"
                )
        return 128 + stopped


@contextmanager
def ray_here(words: list[str], folder: Path, what: str, timeout_s: float) -> Iterator[Child]:
    """Inside, Ray's processes of this machine run. They end with their starter.

    Args:
        folder: gets a file with their output.

    Raises:
        ChildError: they have ended at once, or do not say in time that they run.
    """
    # Nothing of ours goes through Ray's memory for objects.
    words = [*words, "--object-store-memory", "100000000", "--disable-usage-stats", "--block"]
    words = ["-m", "verifiers_rl.cluster.machines", "start", *words]
    ray = LocalChild("ray", words, {END_VARIABLE: str(folder)}, folder / "ray.log")

    def has_started() -> bool:
        return any("Ray runtime started" in line for line in ray.last_lines())

    try:
        if not wait_until(lambda: ray.wait(POLL_S) or has_started(), what, timeout_s):
            raise ChildError(f"{what} does not run after {timeout_s:g} s (vllm_server_timeout)")
        if not has_started():
            print("\n".join(ray.last_lines()[-NUM_SHOWN_LINES:]), file=sys.stderr)
            raise ChildError(f"{what} {ray.end}; its last lines are above")
        yield ray
    finally:
        ray.stop()


def main() -> None:
    """Be the program `ray`, and end with the process that started us."""
    end_with_starter()
    from ray.scripts.scripts import main as ray

    run: Callable[[], None] = ray
    run()


if __name__ == "__main__":
    main()
