"""One push to one or several servers: gathered and packed once, sent to all at the same time.

    this thread: makes a bucket ──► a queue for each server ──► a thread for each: sends it

A queue holds `WINDOW` buckets, so memory stays bounded: this thread waits for the slowest server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Full, Queue
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from verifiers_rl.inference import InferenceServerError, ServerLostError
from verifiers_rl.process.waiting import WaitingLine
from verifiers_rl.sync.gather import buckets_of
from verifiers_rl.sync.sources import what_to_send

if TYPE_CHECKING:
    from verifiers_rl.sync.weight_sync import WeightSync

# Seconds that a push waits for a server that makes no progress while the others do.
STALL_S = 60.0
WINDOW = 2
LOOK_S = 0.5


class Work(threading.Thread):
    """Work for one server, in a daemon thread: one that hangs can be left behind."""

    def __init__(self, sync: WeightSync, work: Callable[[Work], Any]) -> None:
        super().__init__(name="weight-sync", daemon=True)
        self.sync, self._work = sync, work
        self.buckets: Queue[Tensor | None] = Queue(WINDOW)  # None: no more come
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work(self)
        except Exception as error:
            self.error = self.error or error  # the first says why
        finally:
            self.put(None, 0)  # NCCL's thread may wait for a bucket

    def incoming(self) -> Iterator[Tensor]:
        while (bucket := self.buckets.get()) is not None:
            yield bucket

    def put(self, bucket: Tensor | None, timeout_s: float) -> bool:
        """Hand over a bucket; return whether there was room in time, or the work has ended."""
        try:
            self.buckets.put(bucket, timeout_s > 0, timeout_s)
        except Full:
            return not self.is_alive()
        return True

    def leave_behind(self, error: Exception | None) -> None:
        """Wait for it no longer."""
        self.error = self.error or error
        self.sync.forget_server()  # a thread that sends ends by this,
        self.put(None, 0)  # and one that waits for a bucket by that


def push_to_all(
    syncs: Sequence[WeightSync],
    model: nn.Module,
    policy_version: int,
    in_flight: Literal["recompute", "keep"],
    stall_s: float = STALL_S,
) -> list[Exception | None]:
    """Replace the policy of these servers by this model's weights.

    Each server has a deadline of its own. One that fails, or that makes no progress for `stall_s`
    while the others do, does not hold up the others.

    Args:
        syncs: one for each server; those that are not connected are connected first.
        policy_version, in_flight: see `WeightSync.push`.

    Returns:
        For each server, the error by which it has failed, or None.

    Raises:
        Whatever a source raises: then no server has the weights.
        Interrupted: a signal asks the run to end.
    """
    sending = what_to_send(model, syncs[0].lora_sync)
    new = [sync for sync in syncs if not sync.is_connected]
    works = [Work(sync, lambda work: work.sync.connect(model, sending)) for sync in new]
    _wait_for(works, stall_s)
    errors = {work.sync: work.error for work in works if work.error is not None}
    living = [sync for sync in syncs if sync not in errors]
    plan = min(living, key=new.__contains__).plan if living else None  # of an old one, if any
    for sync in living:
        if sync.plan != plan:
            sync.forget_server()
            errors[sync] = InferenceServerError(
                f"the server at {sync.client.base_url} computes in another dtype than the "
                "others; start all servers with the same --dtype and --lora-dtype"
            )
    works = [
        Work(sync, lambda work: work.sync.send(work.incoming(), policy_version, in_flight))
        for sync in living
        if sync not in errors
    ]
    try:
        if plan is not None:
            for bucket in buckets_of(plan, sending[0], model):
                _hand_over(bucket, works, stall_s)
                if not any(work.is_alive() for work in works):
                    break
            _hand_over(None, works, stall_s)
    except BaseException:
        for work in works:
            work.leave_behind(None)
        raise
    _wait_for(works, stall_s)
    errors |= {work.sync: work.error for work in works if work.error is not None}
    return [errors.get(sync) for sync in syncs]


def _hand_over(bucket: Tensor | None, works: Sequence[Work], stall_s: float) -> None:
    """Give a bucket to all that live. One that has no room for it while others had is left behind
    after `stall_s`; the last one has the deadline of its request.
    """
    todo, start = list(works), time.monotonic()
    with WaitingLine(lambda: f"{len(todo)} of {len(works)} servers to take weights") as line:
        while todo := [work for work in todo if not work.put(bucket, LOOK_S / len(todo))]:
            line.show()
            others = [work for work in works if work not in todo and work.error is None]
            if others and time.monotonic() - start > stall_s:
                for work in todo:
                    work.leave_behind(_too_slow(work))


def _wait_for(works: Sequence[Work], stall_s: float) -> None:
    """Wait for the end of all work. When the first has succeeded, the others have as long again,
    and `stall_s` more.
    """
    start = time.monotonic()
    # What each server waits for has a deadline of its own, and this one is later.
    deadline = start + max((4 * work.sync.timeout_s + 120.0 for work in works), default=0.0)
    try:
        with WaitingLine(lambda: f"weights to reach {len(works)} servers") as line:
            while running := [work for work in works if work.is_alive()]:
                now = time.monotonic()
                if any(not work.is_alive() and work.error is None for work in works):
                    deadline = min(deadline, now + (now - start) + stall_s)
                if now > deadline:
                    for work in running:
                        work.leave_behind(_too_slow(work))
                    return
                running[0].join(LOOK_S)
                line.show()
    except BaseException:  # a signal
        for work in works:
            work.leave_behind(None)
        raise


def _too_slow(work: Work) -> ServerLostError:
    return ServerLostError(
        f"the weight sync with {work.sync.client.base_url} did not end in time, or made no "
        "progress while the others did (vllm_server_timeout)"
    )
