"""CUDA IPC: on one GPU that both sides share."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


class SharedBufferTransport:
    """CUDA IPC: one buffer in the memory of the GPU that trainer and workers share.

    NCCL refuses two ranks on one GPU. Here rank 0 allocates one buffer of the largest bucket, the
    workers map it into their own address space, and a store tells when it is filled and when all
    workers have read it. The handle travels as base64 in the store; nobody unpickles it.

    Args:
        store: the meeting's store, which has the deadline of every wait.
        rank, world_size: of this process (0: the trainer), and the number of processes.
        device: this process's name for the GPU.
        num_bytes: size of the largest bucket.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, device: torch.device, num_bytes: int
    ) -> None:
        self._num_workers = world_size - 1
        self._store = store
        self._device = device
        self._round = 0
        if rank == 0:
            self._memory: Any = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            store.set("handle", export_cuda_buffer(self._memory))
            self._await_workers("open")
        else:
            self._memory = open_cuda_buffer(store.get("handle"), device)
            self._report("open")

    def buffer(self, num_bytes: int) -> Tensor:
        return self._memory[:num_bytes]

    def send(self, buffer: Tensor) -> None:
        self._round += 1
        self._synchronize()
        self._store.set(f"filled/{self._round}", "")
        self._await_workers(f"read/{self._round}")
        self._store.delete_key(f"filled/{self._round}")

    def receive(self, num_bytes: int) -> Callable[[], Tensor]:
        """The function that is returned copies the shared buffer. Rank 0 fills the buffer again
        while the worker loads the copy.
        """
        self._round += 1
        return partial(self._read, self._round, num_bytes)

    def _read(self, round_: int, num_bytes: int) -> Tensor:
        self._store.wait([f"filled/{round_}"])
        own = self._memory[:num_bytes].clone()  # loading may keep views of it longer
        self._synchronize()
        self._report(f"read/{round_}")
        return own

    def abandon(self) -> None:
        """Do nothing: only the sending thread waits, and it waits for the store, not the GPU."""

    def close(self) -> None:
        """The GPU's memory is freed when both sides have left."""
        store, self._memory, self._store = self._store, None, None
        if store is not None:
            store.close()

    def _report(self, event: str) -> None:
        if self._store.add(f"{event}/count", 1) == self._num_workers:
            self._store.set(f"{event}/all", "")

    def _await_workers(self, event: str) -> None:
        self._store.wait([f"{event}/all"])
        self._store.delete_key(f"{event}/all")
        self._store.delete_key(f"{event}/count")

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def export_cuda_buffer(buffer: Tensor) -> str:
    """Return a plain-text handle by which another process maps this buffer (cudaIpcMemHandle)."""
    _, *fields = buffer.untyped_storage()._share_cuda_()
    return ",".join(
        base64.b64encode(f).decode() if isinstance(f, bytes) else str(int(f)) for f in fields
    )


def open_cuda_buffer(handle: bytes, device: torch.device) -> Tensor:
    """Map the uint8 buffer behind a handle of `export_cuda_buffer` into this process."""
    memory, size, offset, counter, counter_offset, event, must_wait = handle.decode().split(",")
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0,
        base64.b64decode(memory),
        int(size),
        int(offset),
        base64.b64decode(counter),
        int(counter_offset),
        base64.b64decode(event),
        bool(int(must_wait)),
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
