"""What moves buckets from the trainer to the workers: the protocol, and which one there is."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from verifiers_rl.sync.plan import Backend
from verifiers_rl.sync.transports.ipc import SharedBufferTransport
from verifiers_rl.sync.transports.meeting import GuestStore, HostStore, host_meeting, join_meeting
from verifiers_rl.sync.transports.nccl import ProcessGroupTransport
from verifiers_rl.sync.transports.tcp import SocketTransport


class Transport(Protocol):
    """Moves rank 0's buffers to all workers."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Rank 0: a uint8 buffer (num_bytes,) to fill."""
        ...

    def send(self, buffer: Tensor) -> None:
        """Rank 0: returns when the buffer may be filled again."""
        ...

    def receive(self, num_bytes: int) -> Callable[[], Tensor]:
        """Worker: begin to receive. The call that is returned waits for the buffer, which is the
        worker's own.
        """
        ...

    def abandon(self) -> None:
        """Rank 0, in another thread than the one that sends: the others are lost. Returns at once;
        what is under way ends, or goes on to its deadline without holding up the GPU.
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
    meeting: Meeting,
    device: torch.device,
    bucket_bytes: int,
    listener: socket.socket | None = None,
) -> Transport:
    """Meet the others: rank 0 is the trainer and waits for them on `listener`.

    Args:
        device: of this process's model.
        bucket_bytes: of the largest buffer.

    Raises:
        RuntimeError: the others did not come, or went away.
    """
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
    if backend == "ipc":
        return SharedBufferTransport(store, meeting.rank, world_size, device, bucket_bytes)
    return ProcessGroupTransport(store, meeting.rank, world_size, device, timeout_s)


def gpu_uuid(device: torch.device) -> str | None:
    """Which physical GPU this is, however this process numbers it; None for a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)
