"""What moves buckets from the trainer to the workers: the protocol, and how to make each one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from verifiers_rl.sync.plan import Backend
from verifiers_rl.sync.transports.http import BodyTransport
from verifiers_rl.sync.transports.meeting import GuestStore, HostStore, host_meeting, join_meeting
from verifiers_rl.sync.transports.nccl import ProcessGroupTransport
from verifiers_rl.sync.transports.tcp import SocketTransport


class Transport(Protocol):
    """Moves rank 0's buffers to all workers."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Rank 0: a uint8 buffer (num_bytes,) to fill."""
        ...

    def send(self, buffer: Tensor) -> None:
        """Rank 0: send the buffer; return when it may be filled again."""
        ...

    def receive(self, num_bytes: int) -> Callable[[], Tensor]:
        """Worker: begin to receive. The function that is returned waits for the buffer and returns
        it. The buffer then belongs to the worker.
        """
        ...

    def abandon(self) -> None:
        """Rank 0: give up, because the workers are lost. Called from another thread than the one
        that sends; returns at once. A send that is under way ends, or runs until its deadline
        without blocking the GPU.
        """
        ...

    def close(self) -> None: ...


class Meeting(NamedTuple):
    """Where the trainer and the workers meet, and who this process is there (0: the trainer)."""

    host: str
    port: int
    secret: str
    rank: int
    world_size: int
    timeout_s: float


def make_transport(
    backend: Backend,
    meeting: Meeting | None,
    device: torch.device,
    listener: socket.socket | None = None,
) -> Transport:
    """Meet the other ranks. Rank 0 is the trainer, and waits for the workers on `listener`.

    Args:
        meeting: None for "http", which has none.
        device: of this process's model.

    Raises:
        RuntimeError: the other ranks did not come, or went away.
    """
    if meeting is None:
        return BodyTransport()
    timeout_s, world_size = meeting.timeout_s, meeting.world_size
    if listener is not None:
        connections = host_meeting(listener, world_size - 1, meeting.secret, timeout_s)
    else:
        connections = [
            join_meeting(meeting.host, meeting.port, meeting.rank, meeting.secret, timeout_s)
        ]
    if backend == "tcp":
        return SocketTransport(connections, meeting.rank)
    store: HostStore | GuestStore = (
        HostStore(connections, timeout_s) if listener else GuestStore(connections[0], timeout_s)
    )
    return ProcessGroupTransport(store, meeting.rank, world_size, device, timeout_s)


def gpu_uuid(device: torch.device) -> str | None:
    """Return the id of the physical GPU, however this process numbers it; None for a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)
