"""A run on several machines: each is a node, and runs the same `vf-rl @ config.toml`.

Four variables, those of torch's launchers, tell a node its place: WORLD_SIZE nodes, of which this
one is RANK, meet at MASTER_ADDR:MASTER_PORT. Node 0 listens there, and the others connect. They
prove to each other that they know the run's token, say where their servers are, and stay connected
until the run ends. So every node learns where all servers are, whether another node is lost, and
when the run is over. The trainer's ranks meet at MASTER_PORT + 1, through torch's elastic launch.
Rollout workers on other nodes connect to the trainer at MASTER_PORT + 2.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from verifiers_rl.cli.config import RunConfig, TomlError
from verifiers_rl.cli.teachers import refuse_several_machines
from verifiers_rl.inference.client import TOKEN_VARIABLE

VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
COMMAND_VARIABLE = "VERIFIERS_RL_COMMAND"  # what the user typed, where another process started us


@dataclass(frozen=True)
class Node:
    """This machine's place in a run of several.

    Attributes:
        rank: its number. Node 0 has the trainer's rank 0.
        num_nodes: of the run.
        host, port: of node 0, where all meet.
        num_trainers: so many nodes train, the first ones.
        num_servers: so many nodes run servers, the last ones.
        num_envs: so many nodes run rollout workers, the first ones that do not train.
    """

    rank: int
    num_nodes: int
    host: str
    port: int
    num_trainers: int
    num_servers: int
    num_envs: int = 0

    @property
    def trains(self) -> bool:
        return self.rank < self.num_trainers

    @property
    def serves(self) -> bool:
        return self.does_serve(self.rank)

    def does_serve(self, rank: int) -> bool:
        return rank >= self.num_nodes - self.num_servers

    def does_roll_out(self, rank: int) -> bool:
        return 0 <= rank - self.num_trainers < self.num_envs

    @property
    def workers_port(self) -> int:
        """Of node 0, where rollout workers of other nodes connect to the trainer."""
        return self.port + 2


def take_variables(environment: Any = os.environ) -> tuple[int, int, str, int] | None:
    """Return RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and remove them, because what we start
    would take them for its own. None if they are not set, or name one node alone.

    Raises:
        TomlError: some are missing, or have values that cannot be.
    """
    given = [name for name in VARIABLES if environment.get(name)]
    if not given:
        return None
    if "LOCAL_RANK" in environment:
        raise TomlError(
            "LOCAL_RANK is set, as by torchrun. vf-rl starts the ranks itself: start it once on "
            "each machine, without a launcher"
        )
    if missing := [name for name in VARIABLES if name not in given]:
        raise TomlError(
            f"{', '.join(given)} set, {', '.join(missing)} not: for a run on several machines set "
            "all four on each; for one on this machine unset all"
        )
    size = _number(environment, "WORLD_SIZE", 1, None)
    rank = _number(environment, "RANK", 0, size - 1)
    port = _number(environment, "MASTER_PORT", 1, 65533)  # the next two are taken too
    host = environment["MASTER_ADDR"]
    for name in VARIABLES:
        del environment[name]
    return (rank, size, host, port) if size > 1 else None


def _number(environment: Mapping[str, str], name: str, low: int, high: int | None) -> int:
    text = environment[name]
    value = int(text) if text.isascii() and text.isdigit() else -1
    if value < low or (high is not None and value > high):
        limits = f"from {low} to {high}" if high is not None else f"of at least {low}"
        why = " (WORLD_SIZE is the number of machines, and the first has RANK=0)"
        raise TomlError(
            f"{name}={text!r} must be a whole number {limits}{why if name == 'RANK' else ''}"
        )
    return value


def node_of(config: RunConfig, variables: tuple[int, int, str, int] | None) -> Node | None:
    """Return this machine's place by the variables and [cluster]; None for a run on one machine.

    Raises:
        TomlError: they contradict each other, or the run's token is missing.
    """
    table = config.cluster
    if table.engine or variables is not None:
        refuse_several_machines(config)
    if variables is None:
        counts = {"trainer_nodes": table.trainer_nodes, "inference_nodes": table.inference_nodes}
        counts |= {"env_nodes": table.env_nodes}
        for name, count in counts.items():
            if not table.engine and count is not None:
                raise TomlError(
                    f"{config.place('cluster', name)} {name}={count} is about several machines: "
                    f'set {", ".join(VARIABLES)} on each, or engine = "ray"'
                )
        return None
    rank, size, host, port = variables
    if table.engine:
        raise TomlError(
            f"{config.place('cluster', 'engine')} engine={table.engine!r}: Ray gives each process "
            f"its place, and {', '.join(VARIABLES)} are set too; unset them, or remove engine"
        )
    run_already = bool(config.trainer_args.get("vllm_servers"))
    num_envs = table.env_nodes or 0
    num_trainers = size - num_envs if table.trainer_nodes is None else table.trainer_nodes
    num_servers = size if table.inference_nodes is None else table.inference_nodes
    num_servers = 0 if run_already else num_servers
    for name, count in (("trainer_nodes", num_trainers), ("inference_nodes", num_servers)):
        if count > size:
            raise TomlError(
                f"{config.place('cluster', name)} {name}={count} is more than the {size} machines "
                "(WORLD_SIZE)"
            )
    if num_trainers < 1 or num_trainers + num_envs > size:
        raise TomlError(
            f"{config.place('cluster', 'env_nodes')} env_nodes={num_envs} needs as many machines "
            f"that do not train, of {size} (WORLD_SIZE); lower it, or set trainer_nodes (it is "
            f"{max(num_trainers, 0)}) to at most {max(size - num_envs, 1)}"
        )
    if num_trainers + num_envs + num_servers < size:
        raise TomlError(
            f"{config.source('cluster')}: [cluster] trainer_nodes={num_trainers}, "
            f"env_nodes={num_envs} and inference_nodes={num_servers} leave machines without work: "
            f"WORLD_SIZE is {size}"
        )
    if "vllm_server_host" in config.trainer_args:
        raise TomlError(
            f"{config.place('trainer', 'args', 'vllm_server_host')} vllm_server_host is of one "
            "machine; remove it: the servers of each node listen where node 0 reaches the node"
        )
    if not os.environ.get(TOKEN_VARIABLE):
        raise TomlError(
            f"{TOKEN_VARIABLE} is not set, and WORLD_SIZE={size}: all nodes need one token. Set it "
            "to the same value on each, such as what `openssl rand -hex 24` prints once"
        )
    return Node(rank, size, host, port, num_trainers, num_servers, num_envs)


def fit_to_node(config: RunConfig, node: Node) -> None:
    """Leave in the configuration what this node starts. Its servers listen on its own address."""
    if not node.serves:
        config.inference_gpus = config.inference_replicas = 0
    if not node.trains:
        config.trainer_gpus = 0
    config.trainer_args["vllm_server_host"] = own_address(node)


def own_address(node: Node) -> str:
    """Return the address of this machine that node 0 reaches; nothing is sent.

    Raises:
        TomlError: MASTER_ADDR has no address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(node.host, node.port, type=socket.SOCK_DGRAM)[
            0
        ]
        if node.rank == 0:
            own = str(address[0])
            if own.startswith("127.") and node.host not in (own, "localhost"):
                raise TomlError(
                    f"MASTER_ADDR={node.host!r} is {own} on this machine, which other machines "
                    "cannot reach; set it to this machine's address in their network"
                )
            return own
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TomlError(
            f"MASTER_ADDR={node.host!r} cannot be reached: {error.strerror}; set it to the name or "
            "address of the machine with RANK=0"
        ) from error


def interface_of(address: str) -> str | None:
    """Return the network interface that has this IPv4 address, or None."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
