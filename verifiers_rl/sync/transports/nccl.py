"""NCCL: between GPUs. Every wait ends at our own deadline, or when another side leaves.

By default torch ends the whole process when a message of NCCL fails or takes longer than its
group's timeout. A server would then die with its trainer. So here the group reports nothing and
times nothing: this module asks whether a message is complete, looks at the clock and at the
meeting's connections meanwhile, and aborts the group itself.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from verifiers_rl.sync.transports.meeting import GuestStore, HostStore, OthersLeftError

logger = logging.getLogger(__name__)

GROUP_TIMEOUT = timedelta(days=7)  # torch's own deadline; ours always comes before it
ABORT_DEADLINE_S = 10.0
LOOK_EVERY_S = 0.1  # at the connections of the others
# torch reads these when a group is made.
ERRORS_ARE_OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # clean up after an error, and let the process live
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # it would end the process while an abort takes long
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # it would ask the store from a thread of torch's own
}

_making = threading.Lock()  # servers are met at the same time, and have one environment


def make_nccl_group(store: HostStore | GuestStore, rank: int, world_size: int) -> Any:
    """Make a process group, apart from torch's default group. It connects at its first message."""
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    options._timeout = GROUP_TIMEOUT
    with _making, _environment(ERRORS_ARE_OURS):
        return dist.ProcessGroupNCCL(store, rank, world_size, options)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class ProcessGroupTransport:
    """NCCL: a process group between the trainer (rank 0) and the server's workers. Each rank has
    its own GPU.

    Args:
        store: the meeting's store.
        rank, world_size: of this process (0: the trainer), and the number of processes.
        device: this process's GPU.
        timeout_s: deadline of connecting, and of each message.

    Raises:
        OthersLeftError: another rank left the meeting.
        RuntimeError: the ranks did not connect in time, or NCCL failed.
    """

    def __init__(
        self,
        store: HostStore | GuestStore,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.device = device
        self._store = store
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # two threads may close at once
        self._group: Any = None
        self._is_closed = False
        started: list[Any] = []
        errors: list[Exception] = []

        def connect() -> None:
            try:
                group = make_nccl_group(store, rank, world_size)
                with self._lock:
                    self._group = group
                if self._is_closed:
                    self.abandon()  # given up before there was a group
                    return
                started.append(self._start(self.buffer(1), group))
            except Exception as error:
                errors.append(error)  # raised below, in the caller's thread

        # NCCL waits in its own code until all ranks are connected, and knows no deadline. This
        # thread can be left behind there.
        thread = threading.Thread(target=connect, name="nccl-connect", daemon=True)
        thread.start()
        self._wait_until(lambda: not thread.is_alive(), "connecting over NCCL")
        if errors:
            raise self._error_of(errors[0]) from errors[0]
        self._finish(started[0], "connecting over NCCL")

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def send(self, buffer: Tensor) -> None:
        self._broadcast(buffer)()

    def receive(self, num_bytes: int) -> Callable[[], Tensor]:
        return self._broadcast(self.buffer(num_bytes))

    def _broadcast(self, buffer: Tensor) -> Callable[[], Tensor]:
        """Start a broadcast from rank 0; the function that is returned waits for its end."""
        group = self._group
        if group is None:
            raise RuntimeError("the connection for weights was closed")
        try:
            work = self._start(buffer, group)
        except RuntimeError as error:
            raise self._error_of(error) from error

        def wait_for_it() -> Tensor:
            self._finish(work, "a message of weights over NCCL")
            return buffer

        return wait_for_it

    def _start(self, buffer: Tensor, group: Any) -> Any:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = 0
        return group.broadcast([buffer], options)

    def _finish(self, work: Any, what: str) -> None:
        self._wait_until(work.is_completed, what)
        try:
            work.wait()  # it is over: this only raises what NCCL reported
        except RuntimeError as error:
            raise self._error_of(error) from error

    def _wait_until(self, is_over: Callable[[], bool], what: str) -> None:
        """Wait; close and raise if it takes too long, or another rank left."""
        start = last_look = time.monotonic()
        pause_s = 20e-6  # a message of 16 MiB takes a millisecond or less
        while not is_over():
            now = time.monotonic()
            if self._is_closed:
                raise RuntimeError("the connection for weights was closed")
            if now - start > self._timeout_s:
                self.close()
                raise RuntimeError(
                    f"{what} took longer than {self._timeout_s:g} s (vllm_server_timeout)"
                )
            if now - last_look > LOOK_EVERY_S:
                last_look = now
                if (who := self._store.who_left()) is not None:
                    self.close()
                    raise OthersLeftError(f"{who} during {what}")
            time.sleep(pause_s)  # CUDA has no event that can be awaited up to a deadline
            pause_s = min(1.5 * pause_s, 5e-3)

    def _error_of(self, error: Exception) -> RuntimeError:
        """Close, and return what to raise: if another rank left, NCCL's error only follows."""
        who = None if self._is_closed else self._store.who_left()
        self.close()
        if who is not None:
            return OthersLeftError(f"{who}; NCCL: {error}")
        return RuntimeError(f"NCCL failed: {error}")

    def abandon(self) -> None:
        """Close, and do not wait for the end of an unfinished message."""
        self._leave()

    def close(self) -> None:
        """Leave the meeting, which tells the others, and abort what is under way."""
        if (aborting := self._leave()) is not None:
            aborting.join(ABORT_DEADLINE_S)
            if aborting.is_alive():
                logger.warning(
                    "NCCL did not abort within %g s; its memory stays taken", ABORT_DEADLINE_S
                )

    def _leave(self) -> threading.Thread | None:
        with self._lock:
            (group, self._group), self._is_closed = (self._group, None), True
        self._store.close()
        if group is None:
            return None

        def abort() -> None:
            try:
                group.abort()
            except RuntimeError:
                logger.exception("NCCL could not be aborted")

        thread = threading.Thread(target=abort, name="nccl-abort", daemon=True)
        thread.start()
        return thread
