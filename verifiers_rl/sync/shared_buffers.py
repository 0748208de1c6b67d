"""Memory that `vf-vllm`'s process shares with its workers, for one connection of a trainer.

    vf-vllm's process:  body of the trainer's request ──► buffer 0, 1, 0, 1, ...
    each worker:        copies a buffer and counts it; when all have, it is filled again

One word of it says that the push is over, because the trainer left, a worker failed, or the push
took too long. Workers look at this word wherever they wait, in NCCL too, so nobody waits for
weights that will not come, and only vf-vllm's process has to look at the clock.

The memory has no name, so it is freed when the last process lets go of it, however that one ends.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

_PAGE = 4096
_GIVEN_UP, _FILLED, _COUNTS = 0, 1, 2  # words; from _COUNTS on, one for each worker
_POLL_S = 2e-4  # memory has no event that can be awaited up to a deadline
_fence = threading.Lock()


class GivenUpError(RuntimeError):
    """Another process ended the push: the trainer, or a worker that failed and knows why."""


def _order_writes() -> None:
    """Let no processor show what is written after this before what was written before it."""
    with _fence:
        pass


class SharedBuffers:
    """The memory, as each of its processes sees it.

    Args:
        path: of the memory, among the open files of the process that has made it.
        num_workers: how many processes copy each buffer.
        num_buffers, buffer_bytes: 0 where NCCL carries the weights.
    """

    def __init__(self, path: str, num_workers: int, num_buffers: int, buffer_bytes: int) -> None:
        head = -(-8 * (_COUNTS + num_workers) // _PAGE) * _PAGE
        size = head + num_buffers * buffer_bytes
        with open(path, "r+b") as file:
            os.ftruncate(file.fileno(), size)
            memory = mmap.mmap(file.fileno(), size)
        self.num_buffers = num_buffers
        self._words = np.frombuffer(memory, np.int64, _COUNTS + num_workers)
        self._buffers = np.frombuffer(memory, np.uint8)[head:].reshape(num_buffers, buffer_bytes)

    def give_up(self) -> None:
        self._words[_GIVEN_UP] = 1

    def is_given_up(self) -> bool:
        return bool(self._words[_GIVEN_UP])

    async def fill(self, body: AsyncIterator[bytes], sizes: Sequence[int]) -> AsyncIterator[None]:
        """Cut a body into buffers of these sizes; yield after each. A buffer is filled again once
        all workers have copied it.

        Raises:
            ValueError: the body ends early.
        """
        piece = memoryview(b"")
        for size in sizes:
            number = int(self._words[_FILLED])
            while number - self._words[_COUNTS:].min() >= self.num_buffers:
                await asyncio.sleep(_POLL_S)
            room = memoryview(self._buffers[number % self.num_buffers])[:size]
            while room:
                piece = piece or memoryview(await anext(body, b""))
                if not piece:
                    raise ValueError(f"the body ends {len(room)} bytes before a bucket does")
                taken = piece[: len(room)]
                room[: len(taken)] = taken
                room, piece = room[len(taken) :], piece[len(taken) :]
            _order_writes()
            self._words[_FILLED] = number + 1
            yield

    def receive(self, worker: int, num_bytes: int) -> Tensor:
        """Wait for this worker's next buffer; return a copy of it.

        Args:
            worker: its number, from 0 on.

        Raises:
            GivenUpError: the push is over.
        """
        number = int(self._words[_COUNTS + worker])
        while self._words[_FILLED] <= number:
            if self.is_given_up():
                raise GivenUpError("the trainer left, or another worker failed")
            time.sleep(_POLL_S)
        _order_writes()
        copy = torch.from_numpy(self._buffers[number % self.num_buffers, :num_bytes]).clone()
        _order_writes()
        self._words[_COUNTS + worker] = number + 1
        return copy


@contextmanager
def shared_with_workers(
    num_workers: int, num_buffers: int, buffer_bytes: int
) -> Iterator[tuple[SharedBuffers, tuple[str, int, int, int]]]:
    """Yield new memory, and what `SharedBuffers` takes to find it in another process of this user,
    on this machine, inside.
    """
    with open(os.memfd_create("weights"), "r+b") as file:
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        address = (path, num_workers, num_buffers, buffer_bytes)
        yield SharedBuffers(*address), address
