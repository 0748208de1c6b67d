"""NCCL: weights between GPUs. Every wait ends at our own deadline, or when the push is given up.

    trainer (rank 0): draws NCCL's unique id ──► request to /weight_sync/connect ──► worker 1..W
                      ◄══════════════ one communicator of W + 1 ranks ═════════════►

torch's process group looks for the id in a store. So each rank has a store of its own, in memory,
and the workers' already hold the id when they look.

By default torch ends the whole process when a message of NCCL fails or takes longer than its
group's timeout. A server would then die with its trainer. So here the group reports nothing and
times nothing: this module asks whether a message is complete, looks at the clock and at whether
the push was given up, and aborts the group itself.

NCCL refuses two ranks on one GPU. There a group of our own takes its place, over CUDA IPC: its id
is the handle of one bucket in the GPU's memory, which both processes map.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from verifiers_rl.sync.shared_buffers import GivenUpError

logger = logging.getLogger(__name__)

GROUP_TIMEOUT = timedelta(days=7)  # torch's own deadline; ours always comes before it
ABORT_DEADLINE_S = 10.0
# torch numbers the communicators of a group, and looks for the id of each under its number. This
# group has one communicator, of one device a rank, so nothing else is ever asked of the store.
ID_KEY = "0"
ID_BYTES = 128
FROM_RANK_0 = dist.BroadcastOptions()  # which have rank 0 by default
# torch reads these when a group is made.
ERRORS_ARE_OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # clean up after an error, and let the process live
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # it would end the process while an abort takes long
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # it would ask the store from a thread of torch's own
}


class TransportError(RuntimeError):
    """NCCL or CUDA IPC failed, or did not end in time. Another process may know why."""


_making = threading.Lock()  # groups to several servers are made at once, in one environment
_threads: list[threading.Thread] = []  # those that were ever started; one may start another


@atexit.register
def _wait_for_threads() -> None:
    """Python ends threads that still run by unwinding their stacks. In NCCL's code that ends the
    process with SIGABRT, after a run in which all went well.
    """
    for thread in _threads:
        thread.join(ABORT_DEADLINE_S)


def gpu_uuid(device: torch.device) -> str | None:
    """Return the id of the physical GPU, however this process numbers it; None for a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def make_nccl_group(store: dist.Store, rank: int, world_size: int) -> Any:
    """Make a process group, apart from torch's default group. It connects at its first message."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = GROUP_TIMEOUT
    with _making:
        before = {name: os.environ[name] for name in ERRORS_ARE_OURS if name in os.environ}
        os.environ.update(ERRORS_ARE_OURS)
        try:
            return dist.ProcessGroupNCCL(store, rank, world_size, options)
        finally:
            for name in ERRORS_ARE_OURS:
                del os.environ[name]
            os.environ.update(before)


class ProcessGroupTransport:
    """Carries buckets from the trainer (rank 0) to a server's workers: over NCCL, if each has a GPU
    of its own, or on one GPU over CUDA IPC.

    It begins to connect at once, in a thread: NCCL waits in its own code until all ranks are there,
    and knows no deadline, so the thread can be left behind.

    Args:
        rank, world_size: of this process, and the number of processes.
        device: this process's GPU.
        timeout_s: deadline of connecting, and of each message.
        unique_id: of a worker: what the trainer's `unique_id` returned.
        is_given_up: says whether to stop waiting, because another end has given up the push. The
            trainer stops when the server replies, because it does so early only to refuse.
        make_group: in place of `make_nccl_group`, for CUDA IPC.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        unique_id: bytes | None = None,
        is_given_up: Callable[[], bool] = lambda: False,
        make_group: Callable[..., Any] | None = None,
    ) -> None:
        self.device, self.way = device, "CUDA IPC" if make_group else "NCCL"
        self._timeout_s = timeout_s
        self._is_given_up = is_given_up
        self._lock = threading.Lock()  # two threads may close at once
        self._group: Any = None
        self._is_closed = False
        # torch declares its values as str; bytes are fine.
        self._store = cast(Any, dist.HashStore())
        if unique_id is not None:
            self._store.set(ID_KEY, unique_id)
        self._first: Any = None
        self._error: Exception | None = None

        def connect() -> None:
            try:
                group = (make_group or make_nccl_group)(self._store, rank, world_size)
                with self._lock:
                    self._group = group
                if self._is_closed:
                    self.abandon()  # given up before there was a group
                    return
                self._first = group.broadcast([self._buffer(1)], FROM_RANK_0)
            except Exception as error:
                self._error = error  # raised where the caller waits

        self._thread = threading.Thread(target=connect, name="nccl-connect", daemon=True)
        self._thread.start()
        _threads.append(self._thread)

    def unique_id(self) -> bytes:
        """Rank 0: return the id that the workers need; torch has drawn it by then, or failed."""
        self._wait_until(
            lambda: self._store.check([ID_KEY]) or not self._thread.is_alive(),
            f"{self.way}'s unique id",
        )
        return self._store.get(ID_KEY)

    def wait_until_connected(self) -> None:
        """Wait for the other ranks.

        Raises:
            GivenUpError: `is_given_up` says so.
            TransportError: they did not come in time, or it failed.
        """
        self._wait_until(lambda: not self._thread.is_alive(), f"connecting over {self.way}")
        self._finish(self._first, f"connecting over {self.way}")

    def send(self, buffer: Tensor) -> None:
        """Rank 0: send a bucket, uint8 on this GPU; return when it may be filled again."""
        self._broadcast(buffer)()

    def receive(self, num_bytes: int) -> Callable[[], Tensor]:
        """Worker: begin to receive a bucket of so many bytes. The function that is returned waits
        for the bucket and returns it. The bucket then belongs to the worker.
        """
        return self._broadcast(self._buffer(num_bytes))

    def _buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _broadcast(self, buffer: Tensor) -> Callable[[], Tensor]:
        group = self._group
        if group is None:
            raise TransportError("the connection for weights was closed")
        try:
            work = group.broadcast([buffer], FROM_RANK_0)
        except RuntimeError as error:
            raise self._closed_with(error) from error

        def wait_for_it() -> Tensor:
            self._finish(work, f"a message of weights over {self.way}")
            return buffer

        return wait_for_it

    def _finish(self, work: Any, what: str) -> None:
        self._wait_until(work.is_completed, what)
        try:
            work.wait()  # it is over: this only raises what NCCL reported
        except RuntimeError as error:
            raise self._closed_with(error) from error

    def _wait_until(self, is_over: Callable[[], bool], what: str) -> None:
        """Wait; close and raise if it takes too long, or the push was given up or failed."""
        start = time.monotonic()
        pause_s = 20e-6  # a message of 16 MiB takes a millisecond or less
        while not is_over():
            if self._is_closed:
                raise TransportError("the connection for weights was closed")
            # The last message may end, and the server reply, between the two looks.
            if self._is_given_up() and not is_over():
                self.close()
                raise GivenUpError(f"another end left, or failed, during {what}")
            if time.monotonic() - start > self._timeout_s:
                self.close()
                raise TransportError(
                    f"{what} took longer than {self._timeout_s:g} s (vllm_server_timeout)"
                )
            time.sleep(pause_s)  # CUDA has no event that can be awaited up to a deadline
            pause_s = min(1.5 * pause_s, 5e-3)
        if self._error is not None:
            raise self._closed_with(self._error)

    def _closed_with(self, error: Exception) -> RuntimeError:
        """Close, and return what to raise: if another rank left, NCCL's error only follows."""
        follows = self._is_given_up()
        self.close()
        return (GivenUpError if follows else TransportError)(f"{self.way} failed: {error}")

    def abandon(self) -> threading.Thread | None:
        """Abort what is under way, and do not wait for its end. For any thread."""
        with self._lock:
            (group, self._group), self._is_closed = (self._group, None), True
        if group is None:
            return None

        def abort() -> None:
            try:
                group.abort()
            except RuntimeError:
                logger.exception("NCCL could not be aborted")

        thread = threading.Thread(target=abort, name="nccl-abort", daemon=True)
        thread.start()
        _threads.append(thread)
        return thread

    def close(self) -> None:
        """Abort what is under way."""
        if (aborting := self.abandon()) is not None:
            aborting.join(ABORT_DEADLINE_S)
            if aborting.is_alive():
                logger.warning(
                    f"NCCL did not abort within {ABORT_DEADLINE_S:g} s; its memory stays taken"
                )


# --- One GPU --------------------------------------------------------------------------------------

_HEAD = 16  # bytes in front of a bucket: how many messages it was filled with, and how many taken


def share(memory: Tensor) -> list[Any]:
    """Return a handle of this GPU memory, of JSON's types, for `map_in` in another process."""
    parts = memory.untyped_storage()._share_cuda_()
    return [part.hex() if isinstance(part, bytes) else part for part in parts]


def map_in(handle: Sequence[Any], device: torch.device) -> Tensor:
    """Return the memory of another process on this GPU, which may have another number there."""
    _, *parts = (bytes.fromhex(part) if isinstance(part, str) else part for part in handle)
    storage = torch.UntypedStorage._new_shared_cuda(
        torch.empty(0, device=device).get_device(), *parts
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class SharedBucket:
    """In place of NCCL's process group, between the trainer and the only worker on its GPU. It has
    one message at a time, whose work it is itself. Rank 0 fills the bucket and counts that, rank 1
    copies it and counts that. Each side's stream keeps the order.

    Args:
        device, num_bytes: of the bucket; rank 1 learns its size from the handle.
        store: rank 0 puts the handle there, as JSON, where NCCL puts its id.
    """

    def __init__(
        self, device: torch.device, num_bytes: int, store: dist.Store, rank: int, _: int
    ) -> None:
        self._rank, self._number = rank, 0
        self._buffer: Tensor | None = None  # to be filled by rank 1
        if rank == 0:
            memory = torch.zeros(_HEAD + num_bytes, dtype=torch.uint8, device=device)
            memory[0].item()  # the zeros are there before rank 1, on a stream of its own, counts
            store.set(ID_KEY, json.dumps(share(memory)))
        else:
            memory = map_in(json.loads(store.get(ID_KEY)), device)
        self._counts, self._bucket = memory[:_HEAD].view(torch.int64), memory[_HEAD:]

    def broadcast(self, buffers: Sequence[Tensor], _: Any) -> SharedBucket:
        (buffer,) = buffers
        self._number += 1
        if self._rank == 0:
            self._bucket[: len(buffer)] = buffer
            self._counts[0] = self._number
        else:
            self._buffer = buffer
        return self

    def is_completed(self) -> bool:
        """Return whether rank 1 has a copy of the message, which it makes here."""
        if self._counts[1 - self._rank] < self._number:
            return False
        if self._buffer is not None:
            self._buffer.copy_(self._bucket[: len(self._buffer)])
            self._counts[1] = self._number
            self._buffer = None
        return True

    def wait(self) -> None:
        """It is over, and there is nothing to report."""

    abort = wait  # the memory goes with this object
