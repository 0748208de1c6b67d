"""The two ends of one push: buckets made by the trainer, received by the workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verifiers_rl.sync.plan import TransferPlan, bucket_num_bytes, bucket_views

if TYPE_CHECKING:
    from verifiers_rl.sync.sources import Source


class LeftBehindError(RuntimeError):
    """The other servers go on without this one."""


class SharedBuckets:
    """Rank 0's end of a push to one or several servers: each bucket is made once, for all.

    Each server has a thread that runs through `for_server`. The thread that needs a bucket first
    makes it. A server may be `WINDOW` buckets ahead of the slowest one, so that memory stays
    bounded. If the others have waited for the slowest one for `stall_s`, they go on without it.

    Args:
        plan: of all servers.
        sources: made in their order, one at a time.
        num_servers: how many threads call `for_server`.
        device: on which buckets are packed.
        stall_s: see above.
        on_stalled: called with the number of a server that the others go on without.
    """

    WINDOW = 2

    def __init__(
        self,
        plan: TransferPlan,
        sources: dict[str, Source],
        num_servers: int,
        device: torch.device,
        stall_s: float,
        on_stalled: Callable[[int], None],
    ) -> None:
        self._buckets = list(plan.buckets())
        self._sources, self._device = sources, device
        self._next = dict.fromkeys(range(num_servers), 0)  # the bucket that each sends; not those
        self._stall_s, self._on_stalled = stall_s, on_stalled  # that have left
        self._made: dict[int, Tensor] = {}
        self._is_making = False
        self._changed = threading.Condition()
        self.source_error: Exception | None = None  # it is the same for all servers

    def for_server(self, server: int) -> Iterator[Tensor]:
        """Yield all buckets in turn, (bytes,) uint8 each. Asking for the next one says that the
        last one was sent.

        Raises:
            LeftBehindError: the others go on without this server. An error of a source is raised
                unchanged, to all.
        """
        for index in range(len(self._buckets)):
            yield self._wait_for(index, server)
            with self._changed:
                if server not in self._next:
                    raise LeftBehindError("the other servers went on without this one")
                self._next[server] = index + 1
                self._forget_sent()

    def leave(self, server: int) -> None:
        """The others need not wait for this server any more: it has all buckets, or has failed."""
        with self._changed:
            self._next.pop(server, None)
            self._forget_sent()

    def _forget_sent(self) -> None:
        slowest = min(self._next.values(), default=len(self._buckets))
        self._made = {index: made for index, made in self._made.items() if index >= slowest}
        self._changed.notify_all()

    def _wait_for(self, index: int, server: int) -> Tensor:
        """Return the bucket. Make it, if no other thread has begun to."""
        while True:
            with self._changed:
                self._await_turn(index, server)
                if index in self._made:
                    return self._made[index]
                self._is_making = True
            try:
                made = self._make(index)
            except Exception as error:
                self.source_error = error
                raise
            finally:
                with self._changed:
                    self._is_making = False
                    self._changed.notify_all()
            with self._changed:
                self._made[index] = made
                self._changed.notify_all()

    def _await_turn(self, index: int, server: int) -> None:
        """Wait until the bucket is there, or until this thread may make it."""
        seen, since = dict(self._next), time.monotonic()
        while True:
            if self.source_error is not None:
                raise self.source_error
            if server not in self._next:
                raise LeftBehindError("the other servers went on without this one")
            slowest = min(self._next, key=self._next.__getitem__)
            if index in self._made:
                return
            if not self._is_making:
                if index < self._next[slowest] + self.WINDOW:
                    return
                if self._next[slowest] != seen.get(slowest):
                    seen, since = dict(self._next), time.monotonic()
                elif time.monotonic() - since > self._stall_s:
                    del self._next[slowest]
                    self._on_stalled(slowest)
                    self._forget_sent()
                    continue
            self._changed.wait(min(self._stall_s / 4, 1.0))

    @torch.no_grad()
    def _make(self, index: int) -> Tensor:
        bucket = self._buckets[index]
        buffer = torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8, device=self._device)
        for name, view in bucket_views(bucket, buffer):
            view.copy_(self._sources[name].make())
        return buffer


def receive_buckets(
    plan: TransferPlan, receive: Callable[[int], Callable[[], Tensor]], timeout_s: float
) -> Iterator[list[tuple[str, Tensor]]]:
    """The workers' end: yield the named tensors of each bucket in turn. While the caller loads
    them, the next bucket is packed and sent.

    Args:
        receive: begins to receive a buffer of so many bytes; what it returns waits for the buffer.

    Raises:
        RuntimeError: the trainer went away.
        TimeoutError: all buckets together took longer than `timeout_s`, loading included.
    """
    deadline = time.monotonic() + timeout_s
    buckets = list(plan.buckets())
    coming = receive(bucket_num_bytes(buckets[0]))
    for bucket, following in zip_longest(buckets, buckets[1:]):
        buffer = coming()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"a push of weights took longer than {timeout_s:g} s (vllm_server_timeout)"
            )
        if following is not None:
            coming = receive(bucket_num_bytes(following))
        yield bucket_views(bucket, buffer)
