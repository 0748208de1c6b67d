"""TCP: between machines, and where there is no GPU."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from verifiers_rl.process.connections import close_all, receive_into
from verifiers_rl.sync.transports.meeting import OthersLeftError


class SocketTransport:
    """TCP: the trainer sends each buffer to each worker over its connection of the meeting.

    Args:
        connections: of rank 0, to all workers; of a worker, to rank 0.
    """

    def __init__(self, connections: Sequence[socket.socket], rank: int) -> None:
        self._connections = connections
        # Rank 0 sends to all at once; a worker receives the next buffer while it loads one.
        self._threads = ThreadPoolExecutor(len(connections), "weight-sync")

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, buffer: Tensor) -> None:
        view = bytes_of(buffer)
        sending = [self._start(connection.sendall, view) for connection in self._connections]
        wait(sending)
        for one in sending:
            self._result(one)

    def receive(self, num_bytes: int) -> Callable[[], Tensor]:
        buffer = self.buffer(num_bytes)
        coming = self._start(receive_into, self._connections[0], bytes_of(buffer))

        def wait_for_it() -> Tensor:
            self._result(coming)
            return buffer

        return wait_for_it

    def _start(self, work: Callable[..., None], *args: Any) -> Future[None]:
        try:
            return self._threads.submit(work, *args)
        except RuntimeError as error:
            raise RuntimeError("the connection for weights was closed") from error

    def _result(self, future: Future[None]) -> None:
        try:
            future.result()
        except OSError as error:
            raise OthersLeftError(f"the connection for weights broke: {error}") from error

    def abandon(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. A buffer that is being sent is cut off."""
        close_all(self._connections)
        self._threads.shutdown(wait=False)


def bytes_of(buffer: Tensor) -> memoryview:
    """View the memory of a uint8 tensor on the CPU, for sockets."""
    array: Any = buffer.numpy()  # numpy's types lack the buffer protocol
    return memoryview(array)
