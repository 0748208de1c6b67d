"""Connections between processes on several machines that know one secret.

One side listens, and the others connect, each with a number. Both sides prove that they know the
secret, by HMAC over numbers that both have drawn. A stranger is disconnected and learns nothing.
What follows on the connection is not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable

HELLO_S = 10.0  # for a handshake; a stranger may send nothing
AGAIN_S = 1.0  # until the next attempt to accept a connection
MAX_STRANGERS = 64  # connections whose proof is awaited at a time
# A machine that is lost closes no connection. TCP probes a silent one after so many seconds, again
# after so many, so many times.
KEEPALIVE = (10, 5, 3)
WORKERS_VARIABLE = "VERIFIERS_RL_WORKERS_AT"  # host:port where the trainer lets rollout workers in
_NONCE = 32
_PROOF = 32
_RANK = struct.Struct("!I")


class MeetingError(RuntimeError):
    """The others did not come, are not who they should be, or went away."""


class Door:
    """Listens, and passes on each connection of a process that knows the secret.

    Args:
        on_guest: called with the number that the process has given and the connection, on a thread
            of its own. The connection has the timeout `HELLO_S`.

    Raises:
        OSError: nobody can listen at this address.
    """

    def __init__(
        self, host: str, port: int, secret: str, on_guest: Callable[[int, socket.socket], None]
    ) -> None:
        self._secret, self._on_guest = secret, on_guest
        self._asked = threading.BoundedSemaphore(MAX_STRANGERS)
        self._is_closed = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()
        close_all([self._listener])  # which wakes the thread

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or this process has no file left, which may pass
                self._is_closed.wait(AGAIN_S)
                continue
            if self._asked.acquire(blocking=False):
                threading.Thread(target=self._ask, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _ask(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(HELLO_S)
            number = check_worker(connection, self._secret)
        except (OSError, MeetingError):
            connection.close()  # a stranger
            return
        finally:
            self._asked.release()
        self._on_guest(number, connection)


def _proof(secret: str, role: bytes, rank: int, trainers: bytes, workers: bytes) -> bytes:
    message = role + _RANK.pack(rank) + trainers + workers
    return hmac.digest(secret.encode(), message, "sha256")


def check_worker(connection: socket.socket, secret: str) -> int:
    """Return the worker's rank. The worker proves first, so a stranger learns nothing."""
    trainers = secrets.token_bytes(_NONCE)
    connection.sendall(trainers)
    (rank,) = _RANK.unpack(receive_exactly(connection, _RANK.size))
    workers = receive_exactly(connection, _NONCE)
    given = receive_exactly(connection, _PROOF)
    if not hmac.compare_digest(given, _proof(secret, b"worker", rank, trainers, workers)):
        raise MeetingError("not a worker of this run")
    connection.sendall(_proof(secret, b"trainer", rank, trainers, workers))
    return rank


def check_trainer(connection: socket.socket, rank: int, secret: str) -> None:
    workers = secrets.token_bytes(_NONCE)
    trainers = receive_exactly(connection, _NONCE)
    proof = _proof(secret, b"worker", rank, trainers, workers)
    connection.sendall(_RANK.pack(rank) + workers + proof)
    given = receive_exactly(connection, _PROOF)
    if not hmac.compare_digest(given, _proof(secret, b"trainer", rank, trainers, workers)):
        raise MeetingError("what listens there is not this run's trainer")


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill the view.

    Raises:
        ConnectionError: the other end closed the connection before the view was full.
        TimeoutError: nothing came within the connection's timeout.
    """
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other end closed the connection")
        view = view[count:]


def keep(connection: socket.socket) -> None:
    """Let the connection stay open in silence, and end when the other machine is lost."""
    connection.settimeout(None)
    probe(connection)
    idle_s, interval_s, count = KEEPALIVE
    # While data is under way nothing is probed: this bounds how long it may stay unreceived.
    _set_tcp(connection, "TCP_USER_TIMEOUT", 18, 1000 * (idle_s + interval_s * count))


def probe(connection: socket.socket) -> None:
    """Let a read on this connection fail when the other machine is lost."""
    idle_s, interval_s, count = KEEPALIVE
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set_tcp(connection, "TCP_KEEPIDLE", 4, idle_s)
    _set_tcp(connection, "TCP_KEEPINTVL", 5, interval_s)
    _set_tcp(connection, "TCP_KEEPCNT", 6, count)


def _set_tcp(connection: socket.socket, name: str, number: int, value: int) -> None:
    """Set an option; the number is Linux's, where Python's module has no name for it."""
    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name, number), value)


def close_all(connections: Iterable[socket.socket]) -> None:
    """Close the connections, and wake threads that wait for data on them."""
    for connection in connections:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already
        connection.close()
