"""Where the trainer and the server's workers meet: sockets between processes that know one secret.

The trainer listens; each worker connects once. The trainer draws a secret for each meeting, and
sends it in its request to the server's control route, which needs the run's token. On a connection
both sides prove that they know the secret, by HMAC over numbers that both have drawn. A stranger is
disconnected: it learns no address, key or weight, and takes no worker's place.

What follows on these sockets is not encrypted: on an address other than loopback, use a network
that you trust.
"""

from __future__ import annotations

import base64
import json
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from verifiers_rl.process.connections import (
    HELLO_S,
    MAX_STRANGERS,
    MeetingError,
    check_trainer,
    check_worker,
    close_all,
    probe,
    receive_exactly,
)

_LENGTH = struct.Struct("!I")
_MAX_FRAME = 2**20
WORKER_LEFT = "a worker of the server left"
TRAINER_LEFT = "the trainer left, or closed because another worker did,"
_NO_DELAY = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class OthersLeftError(MeetingError):
    """Another process left the meeting: it failed, died or gave up. It knows why, or its log."""


def new_secret() -> str:
    return secrets.token_hex(32)


def host_meeting(
    listener: socket.socket, num_workers: int, secret: str, timeout_s: float
) -> list[socket.socket]:
    """The trainer's side: return connections to workers 1 .. num_workers, in this order. Takes over
    the listener and closes it.

    Raises:
        MeetingError: not all workers came within `timeout_s`.
    """
    found: dict[int, socket.socket] = {}
    lock, is_open = threading.Lock(), True
    asked = threading.BoundedSemaphore(MAX_STRANGERS)
    all_here, last_came = socket.socketpair()
    deadline = time.monotonic() + timeout_s

    def ask(connection: socket.socket) -> None:
        try:
            connection.settimeout(HELLO_S)
            rank = check_worker(connection, secret)
            with lock:
                if not is_open or not 1 <= rank <= num_workers or rank in found:
                    raise MeetingError(f"rank {rank} is not awaited")
                connection.settimeout(timeout_s)
                connection.setsockopt(*_NO_DELAY)
                probe(connection)
                found[rank] = connection
                if len(found) == num_workers:
                    last_came.send(b"1")
        except (OSError, MeetingError):
            connection.close()  # a stranger, or a worker that left, as the count below shows
        finally:
            asked.release()

    try:
        with listener, all_here, last_came, selectors.DefaultSelector() as selector:
            listener.setblocking(False)  # a client may be gone before accept()
            for one in (listener, all_here):
                selector.register(one, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                ready = {key.fileobj for key, _ in selector.select(left)}
                if all_here in ready:
                    break
                if listener in ready:
                    try:
                        connection, _ = listener.accept()
                    except BlockingIOError:
                        continue
                    if asked.acquire(blocking=False):
                        threading.Thread(target=ask, args=(connection,), daemon=True).start()
                    else:
                        connection.close()
            with lock:
                is_open = False
        if len(found) < num_workers:
            raise MeetingError(
                f"{len(found)} of {num_workers} workers of the server came within {timeout_s:g} s "
                "(vllm_server_timeout)"
            )
    except BaseException:
        close_all(found.values())
        raise
    return [found[rank] for rank in range(1, num_workers + 1)]


def join_meeting(host: str, port: int, rank: int, secret: str, timeout_s: float) -> socket.socket:
    """A worker's side: connect to the trainer.

    Raises:
        MeetingError: nobody listens there, or another process than the trainer does.
    """
    try:
        connection = socket.create_connection((host, port), timeout_s)
    except OSError as error:
        raise MeetingError(
            f"no trainer at {host}:{port}: {error}. If the server's machine cannot connect to the "
            "trainer's, weight_sync_backend='http' carries an adapter"
        ) from error
    try:
        connection.settimeout(min(timeout_s, HELLO_S))
        check_trainer(connection, rank, secret)
        connection.settimeout(timeout_s)
        connection.setsockopt(*_NO_DELAY)
        probe(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise MeetingError(f"the trainer at {host}:{port} hung up: {error}") from error
        raise
    return connection


class HostStore(dist.Store):
    """torch's key-value store, kept by the trainer for its workers. The ranks of NCCL find each
    other through it. Unlike with torch's TCPStore, only processes that have a connection of the
    meeting can read and write.

    A worker that leaves ends the meeting for all: every connection is closed, which tells the other
    workers not to wait for messages that will not come.
    """

    def __init__(self, connections: Sequence[socket.socket], timeout_s: float) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._connections = connections
        self._timeout_s = timeout_s
        self._has_ended = False
        for connection in connections:
            connection.settimeout(None)  # a worker may send no request for a long time
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def set(self, key: str, value: Any) -> None:
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._changed:
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for the keys; raise MeetingError if one is not set in time or a worker left."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()

        def is_decided() -> bool:
            return self._has_ended or all(key in self._values for key in keys)

        with self._changed:
            is_in_time = self._changed.wait_for(is_decided, timeout_s)
            if any(key not in self._values for key in keys):
                if is_in_time:
                    raise OthersLeftError(WORKER_LEFT)
                raise MeetingError(
                    f"no answer of a worker within {timeout_s:g} s (vllm_server_timeout)"
                )

    def who_left(self) -> str | None:
        """Return who left the meeting, as the beginning of a sentence, or None."""
        return WORKER_LEFT if self._has_ended else None

    def close(self) -> None:
        close_all(self._connections)

    def _serve(self, connection: socket.socket) -> None:
        """Answer a worker's calls until it leaves."""
        try:
            while True:
                name, *arguments = _receive_message(connection)
                _send_message(connection, self._answer(name, arguments))
        except OSError:
            pass  # it left
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()
            self.close()

    def _answer(self, name: str, arguments: list[Any]) -> list[Any]:
        answer: Any = None
        try:
            if name == "set":
                self.set(arguments[0], base64.b64decode(arguments[1]))
            elif name == "get":
                answer = base64.b64encode(self.get(arguments[0])).decode()
            elif name == "wait":
                self.wait(arguments[0], timedelta(seconds=arguments[1]))
            elif name == "add":
                answer = self.add(*arguments)
            elif name == "check":
                answer = self.check(*arguments)
            elif name == "delete_key":
                answer = self.delete_key(*arguments)
        except MeetingError as error:
            return ["error", str(error)]
        return ["ok", answer]


class GuestStore(dist.Store):
    """A worker's view of the trainer's `HostStore`."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        super().__init__()
        self._connection = connection
        self._timeout_s = timeout_s
        # Longer than the host's deadline, so that the host's error comes first: it says more.
        connection.settimeout(timeout_s + HELLO_S)
        self._lock = threading.Lock()

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._call("set", key, base64.b64encode(data).decode())

    def get(self, key: str) -> bytes:
        return base64.b64decode(self._call("get", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("check", list(keys)))

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete_key", key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        self._call("wait", list(keys), min(seconds, self._timeout_s))

    def who_left(self) -> str | None:
        """Return who left the meeting, as the beginning of a sentence, or None."""
        if not self._lock.acquire(blocking=False):
            return None  # a call is under way, and finds out itself
        try:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            # The trainer only answers, so there is nothing to read but the connection's end.
            is_over = bool(poll.poll(0)) and not self._connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            is_over = True  # it broke, or this side closed it
        finally:
            self._lock.release()
        return TRAINER_LEFT if is_over else None

    def close(self) -> None:
        close_all([self._connection])

    def _call(self, *message: Any) -> Any:
        try:
            with self._lock:
                _send_message(self._connection, list(message))
                status, answer = _receive_message(self._connection)
        except OSError as error:
            raise OthersLeftError(f"{TRAINER_LEFT}: {error}") from error
        if status != "ok":
            raise MeetingError(answer)
        return answer


def _send_message(connection: socket.socket, message: list[Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive_message(connection: socket.socket) -> list[Any]:
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    if length > _MAX_FRAME:
        raise ConnectionError(f"a message of {length} bytes")
    return json.loads(receive_exactly(connection, length))
