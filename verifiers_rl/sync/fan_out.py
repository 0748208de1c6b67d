"""One push to one or several servers: gathered and packed once, sent to all at the same time.

    this thread:              makes bucket 1 ──► makes bucket 2 ───► makes bucket 3
    a thread of each server:                     sends bucket 1      sends bucket 2

The next bucket is sent when all have taken the one before. So memory stays bounded, and this thread
waits for the slowest server.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from verifiers_rl.inference import ServerLostError
from verifiers_rl.process.waiting import WaitingLine
from verifiers_rl.sync.gather import buckets_of
from verifiers_rl.sync.sources import what_to_send

if TYPE_CHECKING:
    from verifiers_rl.sync.weight_sync import WeightSync

# Seconds that a push waits for a server that makes no progress while the others do.
STALL_S = 60.0
LOOK_S = 0.5


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
        syncs: one for each server, all of one dtype; those that are not connected are connected
            first.
        policy_version, in_flight: see `WeightSync.push`.

    Returns:
        For each server, the error by which it has failed, or None.

    Raises:
        Whatever a source raises: then no server has the weights.
        Interrupted: a signal asks the run to end.
    """
    sources, adapter = what_to_send(model, syncs[0].lora_sync)
    together = Together(syncs, stall_s)
    try:
        together.begin(lambda sync: sync.connect(model, sources, adapter))
        together.begin(lambda sync: sync.begin_push(policy_version, in_flight))
        together.wait()
        plans = [sync.plan for sync in together.living]
        if plans and plans[0] is not None:
            for bucket in buckets_of(plans[0], sources, model):
                together.begin(partial(lambda sync, bucket: sync.send(bucket), bucket=bucket))
                if not together.living:
                    break
        together.begin(lambda sync: sync.finish_push())
        together.wait()
    except BaseException:
        for sync in together.living:
            sync.forget_server()  # which ends what its thread does
        raise
    finally:
        together.threads.shutdown(wait=False)
    return [together.errors.get(sync) for sync in syncs]


class Together:
    """Work with several servers at once, each on a thread of its own.

    Attributes:
        errors: of the servers that have failed.
    """

    def __init__(self, syncs: Sequence[WeightSync], stall_s: float) -> None:
        self.errors: dict[WeightSync, Exception] = {}
        self.threads = ThreadPoolExecutor(len(syncs), "weight-sync")
        self._syncs, self._stall_s = syncs, stall_s
        self._running: dict[Future[Any], WeightSync] = {}

    @property
    def living(self) -> list[WeightSync]:
        return [sync for sync in self._syncs if sync not in self.errors]

    def begin(self, work: Callable[[WeightSync], Any]) -> None:
        """Begin work with each living server, once the work before has ended."""
        self.wait()
        self._running = {self.threads.submit(work, sync): sync for sync in self.living}

    def wait(self) -> None:
        """Wait until the work has ended. When the first server has succeeded, the others have as
        long again, and `stall_s` more; until then, only the deadlines of their requests.
        """
        start, deadline, todo = time.monotonic(), math.inf, {*self._running}
        with WaitingLine(
            lambda: f"{len(todo)} of {len(self._running)} servers to take weights"
        ) as line:
            while todo:
                done, todo = wait(todo, LOOK_S, FIRST_COMPLETED)
                now = time.monotonic()
                for future in done:
                    if (error := future.exception()) is not None:
                        self._lose(self._running[future], error)
                    else:
                        deadline = min(deadline, now + (now - start) + self._stall_s)
                if now > deadline:
                    for future in todo:
                        self._lose(self._running[future], None)
                    break
                line.show()
        self._running = {}

    def _lose(self, sync: WeightSync, error: Any) -> None:
        self.errors[sync] = error or ServerLostError(
            f"the weight sync with {sync.client.base_url} did not end in time, or made no "
            "progress while the others did (vllm_server_timeout)"
        )
        sync.forget_server()  # a thread that hangs ends by this
