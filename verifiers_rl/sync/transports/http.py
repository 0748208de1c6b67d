"""HTTP: a push is the body of the trainer's own request to the server.

    trainer: send() keeps the buffers ──► body of the request ──► vf-vllm's process
                                                                       │ its call of the workers
    worker:  receive() cuts the buffers out of the body  ◄─────────────┘

So nothing but the server's port has to be reachable: a tunnel, or a network that translates
addresses, may lie between the two. All of the push is in memory on both sides, so it carries an
adapter only. Generation goes on while the body travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from verifiers_rl.sync.transports.tcp import bytes_of

MAX_BODY_BYTES = 2**31  # an adapter of rank 64 on a model of 70 B parameters has 1.7e9
_PIECE_BYTES = 2**20  # of the body at a time; httpx copies what is left of a piece at each write


class BodyTransport:
    """HTTP: buffers that were sent wait here for the request, and those of a request's body for the
    worker. There is no connection, so giving up only forgets the buffers.
    """

    def __init__(self) -> None:
        self._sent: list[Tensor] = []
        self._body = torch.empty(0, dtype=torch.uint8)
        self._is_closed = False

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, buffer: Tensor) -> None:
        """Keep the buffer, which must not be filled again, for `take_body`."""
        if self._is_closed:
            raise RuntimeError("the connection for weights was closed")
        self._sent.append(buffer)

    def take_body(self) -> tuple[int, Iterator[bytes]]:
        """Rank 0: return the body of the request: its bytes, and its pieces."""
        sent, self._sent = self._sent, []
        pieces = (
            bytes(bytes_of(buffer)[start : start + _PIECE_BYTES])
            for buffer in sent
            for start in range(0, len(buffer), _PIECE_BYTES)
        )
        return sum(map(len, sent)), pieces

    def put_body(self, body: bytes) -> None:
        """Worker: take the body of one push; what is left of an earlier one is forgotten."""
        self._body = torch.frombuffer(bytearray(body), dtype=torch.uint8)

    def receive(self, num_bytes: int) -> Callable[[], Tensor]:
        buffer, self._body = self._body[:num_bytes].clone(), self._body[num_bytes:]
        if len(buffer) < num_bytes:
            raise RuntimeError(f"the body of the push ends {num_bytes - len(buffer)} bytes early")
        return lambda: buffer

    def abandon(self) -> None:
        self.close()

    def close(self) -> None:
        self._is_closed, self._sent = True, []
