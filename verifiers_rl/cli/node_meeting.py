"""The meeting of the nodes of a run (cli/nodes.py): a connection from each to node 0, all the time.

    other node ──► its servers, its configuration ──► node 0
    other node ◄── all servers, once all are there ◄── node 0      the run begins
    other node ──► its trainer has ended, or why it cannot go on
    other node ◄── how the run has ended ◄── node 0                the run is over

A connection that ends means that the machine at its other end is lost.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
import time
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.metadata import version
from typing import Any

from verifiers_rl.cli.config import RunConfig
from verifiers_rl.cli.nodes import Node
from verifiers_rl.inference.client import TOKEN_VARIABLE, InferenceClient, InferenceServerError
from verifiers_rl.process.connections import (
    HELLO_S,
    Door,
    MeetingError,
    check_trainer,
    close_all,
    keep,
    receive_exactly,
)
from verifiers_rl.process.waiting import WaitingLine

_LENGTH = struct.Struct("!I")
_MAX_FRAME = 2**20


class NodeError(RuntimeError):
    """The nodes cannot begin, or cannot go on; the message says why and what to do.

    Attributes:
        is_lost: a node with ranks of the trainer is lost, so no rank can save any more.
        does_not_start: what this node should run would not start elsewhere either.
    """

    def __init__(self, message: str, is_lost: bool = False, does_not_start: bool = False) -> None:
        super().__init__(message)
        self.is_lost = is_lost
        self.does_not_start = does_not_start


@dataclass
class Hello:
    """What a node says of itself: its servers, each as host:port, and what must be the same on all
    nodes.
    """

    servers: list[str] = field(default_factory=list)
    same: dict[str, Any] = field(default_factory=dict)


def hello_of(config: RunConfig, node: Node, servers: list[str]) -> Hello:
    same: dict[str, Any] = {"WORLD_SIZE": node.num_nodes, "trainer_nodes": node.num_trainers}
    same |= {"inference_nodes": node.num_servers, "env_nodes": node.num_envs}
    same |= {"model": config.model, "verifiers_rl": version("verifiers_rl")}
    same["number of [[env]]"] = len(config.envs)
    for number, env in enumerate(config.envs):
        text = json.dumps(asdict(env), sort_keys=True, default=str)
        same[f"[[env]] {number} ({env.name})"] = sha256(text.encode()).hexdigest()[:12]
    return Hello(servers, same)


@dataclass
class End:
    """How the run has ended, as node 0 says it. The others have `grace_s` to end too."""

    status: int
    grace_s: float


class HostMeeting:
    """Node 0's side. `begin` waits for the others; from then on, call `look` again and again.

    Args:
        resume: the command that goes on with the run.
        patience_s: how long our own trainer may go on when another node's has failed.

    Raises:
        NodeError: nobody can listen on MASTER_ADDR:MASTER_PORT.
    """

    join: str | None = None

    def __init__(self, node: Node, own: Hello, token: str, resume: str, patience_s: float) -> None:
        self._node = node
        self._resume, self._patience_s = resume, patience_s
        self._hellos = {0: own}
        self._connections: dict[int, socket.socket] = {}
        self._ended: dict[int, int] = {}
        self._deadline: float | None = None
        self._has_begun = False
        self._events: queue.SimpleQueue[tuple[int, socket.socket, Any]] = queue.SimpleQueue()
        try:
            self._door = Door(node.host, node.port, token, self._serve)
        except OSError as error:
            raise NodeError(
                f"cannot listen on {node.host}:{node.port}: {error.strerror}; MASTER_ADDR must be "
                "an address of the machine with RANK=0, and MASTER_PORT be free there"
            ) from error

    @property
    def servers(self) -> list[str]:
        return [one for rank in sorted(self._hellos) for one in self._hellos[rank].servers]

    def begin(self, timeout_s: float) -> None:
        """Wait for all other nodes, then tell them where the servers are.

        Raises:
            NodeError: not all came, or one is about another run.
        """
        node, deadline = self._node, time.monotonic() + timeout_s

        def missing() -> str:
            return ", ".join(str(n) for n in range(node.num_nodes) if n not in self._hellos)

        with WaitingLine(lambda: f"nodes {missing()} of {node.num_nodes}") as line:
            while len(self._hellos) < node.num_nodes:
                self.look(1.0)
                line.show()
                if time.monotonic() > deadline and missing():
                    raise NodeError(
                        f"node {missing()} of {node.num_nodes} did not come to "
                        f"{node.host}:{node.port} within {timeout_s:g} s (vllm_server_timeout); "
                        "start vf-rl on each machine, and let a firewall pass MASTER_PORT"
                    )
        self._has_begun = True
        for rank, connection in self._connections.items():
            self._tell(rank, connection, {"servers": self.servers})

    def look(self, wait_s: float = 0.0) -> End | None:
        """Handle what came from the other nodes; wait for the first message at most so long.

        Raises:
            NodeError: the run cannot go on.
        """
        while True:
            try:
                rank, connection, message = self._events.get(timeout=max(wait_s, 1e-3))
            except queue.Empty:
                break
            wait_s = 0.0
            if isinstance(message, dict) and "same" in message:
                self._greet(rank, connection, Hello(**message))
            elif connection is not self._connections.get(rank):
                connection.close()  # of a node that has come again
            elif message is None:
                self._lose(rank)
            elif "error" in message:
                raise NodeError(f"node {rank}: {message['error']}")
            elif "ended" in message:
                self._ended[rank] = message["ended"]
                if message["ended"] and self._deadline is None:
                    self._deadline = time.monotonic() + self._patience_s
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise NodeError(f"the trainer ended on another node: {self._ended}; see its output")
        return None

    def _greet(self, rank: int, connection: socket.socket, hello: Hello) -> None:
        node, refused = self._node, ""
        own = self._hellos[0].same
        differs = [name for name, value in own.items() if hello.same.get(name) != value]
        if differs:
            name = differs[0]
            refused = (
                f"node {rank} has {name}={hello.same.get(name)!r}, node 0 has "
                f"{name}={own[name]!r}; start the same configuration on all nodes"
            )
        elif not 0 < rank < node.num_nodes or (rank in self._connections and not self._has_begun):
            refused = f"there is a node with RANK={rank} already; give each node its own"
        elif self._has_begun and rank < node.num_trainers:
            refused = (
                f"the run has begun, and node {rank} has ranks of the trainer, which cannot join "
                f"it; end it, then go on from its last checkpoint: {self._resume}"
            )
        if refused:
            self._tell(rank, connection, {"refused": refused})
            connection.close()
            if not self._has_begun:
                raise NodeError(refused)
            return
        if self._has_begun:
            known = set(hello.servers) <= set(self._hellos[rank].servers)
            join = None if known else self._one_that_answers(rank)
            print(f"\nvf-rl: node {rank} is here again", flush=True)
            self._tell(rank, connection, {"servers": self.servers, "join": join})
        if rank in self._connections:
            close_all([self._connections[rank]])
        self._connections[rank], self._hellos[rank] = connection, hello

    def _one_that_answers(self, except_rank: int) -> str | None:
        """Return the URL of a server of another node, for `vf-vllm --join`."""
        for rank, hello in self._hellos.items():
            for one in hello.servers if rank != except_rank else ():
                host, _, port = one.rpartition(":")
                client = InferenceClient(host.strip("[]"), int(port))
                try:
                    client.status()
                    return client.base_url
                except InferenceServerError:
                    continue
                finally:
                    client.close()
        return None

    def _lose(self, rank: int) -> None:
        self._connections.pop(rank).close()
        if not self._has_begun:
            raise NodeError(f"node {rank} left before the run began; see its output")
        if rank in self._ended:
            return
        if rank < self._node.num_trainers:
            raise NodeError(
                f"node {rank} is lost, with ranks of the trainer. Go on from the last checkpoint, "
                f"on all nodes: {self._resume}",
                is_lost=True,
            )
        what = ["servers"] * self._node.does_serve(rank)
        what += ["rollout workers"] * self._node.does_roll_out(rank)
        print(
            f"\nvf-rl: node {rank} is lost; the run goes on with the other {' and '.join(what)}. "
            f"Start vf-rl with RANK={rank} again to bring its own back",
            flush=True,
        )

    def end(self, status: int, grace_s: float) -> None:
        """Tell the others that the run has ended, and leave."""
        self._door.close()
        for rank, connection in self._connections.items():
            self._tell(rank, connection, {"end": status, "grace_s": grace_s})
            try:
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # that node is gone

    def status(self, own: int) -> int:
        """Return the run's exit status: our trainer's, or that of another node's if ours is 0."""
        return own or next((status for status in self._ended.values() if status), 0)

    def _tell(self, rank: int, connection: socket.socket, message: dict[str, Any]) -> None:
        try:
            _send(connection, message)
        except OSError:
            self._events.put((rank, connection, None))

    def _serve(self, rank: int, connection: socket.socket) -> None:
        try:
            hello = _receive(connection)
        except (OSError, ValueError):
            connection.close()
            return
        keep(connection)
        self._events.put((rank, connection, hello))
        _read_all(connection, lambda message: self._events.put((rank, connection, message)))


class GuestMeeting:
    """The side of all nodes but node 0.

    Attributes:
        servers: all servers of the run.
        join: a server that serves, if ours have to join a run that has begun.
        is_late: the run had begun when this node came.
    """

    def __init__(self, node: Node, own: Hello, token: str) -> None:
        self._node, self._own, self._token = node, own, token
        self.servers: list[str] = []
        self.join: str | None = None
        self.is_late = False
        self._connection: socket.socket | None = None
        self._end: End | None = None
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def begin(self, timeout_s: float) -> None:
        """Connect to node 0, and wait until all nodes are there.

        Raises:
            NodeError: node 0 does not answer in time, has another token, or refuses.
        """
        node = self._node
        where, deadline = f"{node.host}:{node.port}", time.monotonic() + timeout_s
        with WaitingLine(lambda: f"node 0 at {where}") as line:
            while True:
                try:
                    connection = socket.create_connection((node.host, node.port), HELLO_S)
                    break
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise NodeError(
                            f"no node 0 at {where} after {timeout_s:g} s (vllm_server_timeout): "
                            f"{error.strerror or error}; start vf-rl with RANK=0 there"
                        ) from error
                line.show()
                time.sleep(0.25)  # nothing to await: node 0 may not exist yet
        self._connection = connection
        try:
            check_trainer(connection, node.rank, self._token)
        except (OSError, MeetingError) as error:
            raise NodeError(
                f"node 0 at {where} has another token, or is no vf-rl ({error}); set "
                f"{TOKEN_VARIABLE} to the same value on all nodes"
            ) from error
        _send(connection, {"servers": self._own.servers, "same": self._own.same})
        keep(connection)
        reader = threading.Thread(
            target=_read_all, args=(connection, self._events.put), name="nodes", daemon=True
        )
        reader.start()
        left = f"node 0 at {where} left before the run began; see its output"
        with WaitingLine(lambda: "the other nodes") as line:
            while True:
                try:
                    reply = self._events.get(timeout=1.0)
                    break
                except queue.Empty:
                    line.show()
        if reply is None or "end" in reply:
            raise NodeError(left)
        if "refused" in reply:
            raise NodeError(reply["refused"])
        self.servers, self.join = reply["servers"], reply.get("join")
        self.is_late = "join" in reply

    def look(self, wait_s: float = 0.0) -> End | None:
        """Return how the run has ended, once node 0 says so; wait for that at most so long.

        Raises:
            NodeError: node 0 is lost.
        """
        if self._end is not None:
            return self._end
        try:
            message = self._events.get(timeout=max(wait_s, 1e-3))
        except queue.Empty:
            return None
        if message is None:
            raise NodeError("node 0 is lost, and the run with it; see its output", is_lost=True)
        self._end = End(int(message["end"]), float(message["grace_s"]))
        return self._end

    def tell(self, message: dict[str, Any]) -> None:
        """Tell node 0: {"ended": status of our trainer}, or {"error": why we cannot go on}."""
        try:
            if self._connection is not None:
                _send(self._connection, message)
        except OSError:
            pass  # it is lost, as the next look says


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(body)) + body)


def _receive(connection: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    if length > _MAX_FRAME:
        raise ValueError(f"a message of {length} bytes")
    return json.loads(receive_exactly(connection, length))


def _read_all(connection: socket.socket, put: Any) -> None:
    """Pass on all messages of a connection, and None at its end."""
    try:
        while True:
            put(_receive(connection))
    except (OSError, ValueError):
        put(None)
