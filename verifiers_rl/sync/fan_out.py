"""One push to one or several servers: gathered and packed once, sent to all at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from verifiers_rl.inference import InferenceServerError, ServerLostError
from verifiers_rl.process.waiting import WaitingLine
from verifiers_rl.sync.buckets import SharedBuckets
from verifiers_rl.sync.gather import announced
from verifiers_rl.sync.sources import what_to_send

if TYPE_CHECKING:
    from verifiers_rl.sync.weight_sync import WeightSync

# Seconds that a push waits for a server that makes no progress while the others do.
STALL_S = 60.0


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
    errors: list[Exception | None] = [None] * len(syncs)
    new = [i for i, sync in enumerate(syncs) if not sync.is_connected]
    _on_each(syncs, new, errors, lambda i: syncs[i].connect(model, sending), stall_s)
    living = [i for i, error in enumerate(errors) if error is None]
    plan = next((syncs[i].plan for i in living if i not in new), None)
    plan = plan or next((syncs[i].plan for i in living), None)
    for i in living:
        if syncs[i].plan != plan:
            syncs[i].forget_server()
            errors[i] = InferenceServerError(
                f"the server at {syncs[i].client.base_url} computes in another dtype than the "
                "others; start all servers with the same --dtype and --lora-dtype"
            )
    living = [i for i in living if errors[i] is None]
    if plan is None or not living:
        return errors
    device = next(model.parameters()).device
    with announced(sending[0], model) as sources:
        shared = SharedBuckets(
            plan, sources, len(living), device, stall_s,
            lambda n: syncs[living[n]].forget_server(),
        )  # fmt: skip

        def send(i: int) -> None:
            number = living.index(i)
            try:
                syncs[i].send(shared.for_server(number), policy_version, in_flight)
            finally:
                shared.leave(number)

        _on_each(syncs, living, errors, send, stall_s)
    if shared.source_error is not None:
        for i in living:
            syncs[i].forget_server()
        raise shared.source_error
    return errors


def _on_each(
    syncs: Sequence[WeightSync],
    indices: Sequence[int],
    errors: list[Exception | None],
    work: Callable[[int], Any],
    stall_s: float,
) -> None:
    """Run `work` for each of these servers, each on a thread, and fill in their errors. When the
    first has succeeded, the others have as long again, and `stall_s` more.
    """
    done: dict[int, Exception | None] = {}
    changed = threading.Condition()

    def run(i: int) -> None:
        error: Exception | None = None
        try:
            work(i)
        except Exception as failure:
            error = failure
        with changed:
            done[i] = error
            changed.notify_all()

    def describe() -> str:
        return f"weights to reach the servers: {len(done)} of {len(indices)}"

    start = time.monotonic()
    # What each server waits for has a deadline of its own, and this one is later.
    deadline = start + max((4 * syncs[i].timeout_s + 120.0 for i in indices), default=0.0)
    has_first = False
    for i in indices:
        threading.Thread(target=run, args=(i,), name="weight-sync", daemon=True).start()
    try:
        with WaitingLine(describe) as line, changed:
            while len(done) < len(indices):
                now = time.monotonic()
                if not has_first and None in done.values():
                    has_first, deadline = True, min(deadline, now + (now - start) + stall_s)
                if now > deadline:
                    break
                changed.wait(max(min(deadline - now, 1.0), 0.01))
                line.show()
            ended = dict(done)
    except BaseException:  # a signal
        for i in indices:
            syncs[i].forget_server()
        raise
    for i in indices:
        if i in ended:
            errors[i] = ended[i]
        else:
            syncs[i].forget_server()
            errors[i] = ServerLostError(
                f"the weight sync with {syncs[i].client.base_url} did not end in time, or made no "
                "progress while the others did (vllm_server_timeout)"
            )
