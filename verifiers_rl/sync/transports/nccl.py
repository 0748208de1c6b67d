"""NCCL: between GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from verifiers_rl.sync.transports.meeting import GuestStore, HostStore


class ProcessGroupTransport:
    """NCCL: a process group between the trainer (rank 0) and the server's workers, separate from
    the default group. Each rank has its own GPU.

    Args:
        store: the meeting's store.
        rank, world_size: of this process (0: the trainer), and the number of processes.
        device: this process's GPU.
        timeout_s: deadline of every message.
    """

    def __init__(
        self,
        store: HostStore | GuestStore,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        import torch.distributed as dist

        self.device = device
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._group: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)
        self._store: HostStore | GuestStore | None = store
        self._lock = threading.Lock()  # two threads may close at once
        # Meet now, not at the first push.
        self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))()

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def send(self, buffer: Tensor) -> None:
        self._broadcast(buffer)()

    def receive(self, num_bytes: int) -> Callable[[], Tensor]:
        return self._broadcast(self.buffer(num_bytes))

    def _broadcast(self, buffer: Tensor) -> Callable[[], Tensor]:
        """Start a broadcast from rank 0; the function that is returned waits for its end."""
        import torch.distributed as dist

        group = self._group
        if group is None:
            raise RuntimeError("the connection for weights was closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work = group.broadcast([buffer], options)

        def wait_for_it() -> Tensor:
            work.wait()
            torch.cuda.current_stream(buffer.device).synchronize()
            return buffer

        return wait_for_it

    def abandon(self) -> None:
        self.close()  # else the broadcast blocks the trainer's stream until its deadline

    def close(self) -> None:
        with self._lock:
            (group, self._group), (store, self._store) = (self._group, None), (self._store, None)
        if group is not None:
            group.abort()
        if store is not None:
            store.close()
