"""Runs many groups at once: those of a batch, in which a group that the filter rejects is replaced,
and those of an evaluation.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from verifiers_rl.data import describe_error
from verifiers_rl.process.waiting import result_of
from verifiers_rl.report.means import evaluation_metrics
from verifiers_rl.requests import Progress
from verifiers_rl.types import Rollout

logger = logging.getLogger(__name__)

LOOK_S = 30.0  # between two looks at the server


class RolloutError(RuntimeError):
    """No batch could be generated. The message says what failed most often, or what to change.

    Attributes:
        groups: those whose rollouts all failed.
    """

    groups: Sequence[Sequence[Rollout]] = ()


async def run_groups(
    run: Callable[[int], Coroutine[Any, Any, list[Rollout]]],
    passes: Callable[[list[Rollout]], bool],
    examples: Iterable[int],
    num_groups: int,
    replace_until: float,
) -> list[tuple[list[Rollout], bool]]:
    """Run `num_groups` groups at once. When one is complete and does not pass, the group of the
    next example begins in its place.

    Args:
        run: runs the group of an example.
        passes: says whether a complete group passes.
        examples: `num_groups` or more; no group begins when all are used.
        replace_until: event loop's time after which no replacement begins.

    Returns:
        All groups in the order of their examples, each with whether it passes.
    """
    unused = iter(enumerate(examples))
    complete: dict[int, tuple[list[Rollout], bool]] = {}

    async def fill(place: int, example: int) -> None:
        while True:
            group = await run(example)
            complete[place] = group, (is_good := passes(group))
            if is_good or asyncio.get_running_loop().time() > replace_until:
                return
            if (following := next(unused, None)) is None:
                return
            place, example = following

    await _all_of([fill(*next(unused)) for _ in range(num_groups)])
    return [complete[place] for place in sorted(complete)]


async def evaluate(
    run: Callable[[int], Coroutine[Any, Any, list[Rollout]]],
    examples: Sequence[int],
    check_server: Callable[[], None],
    keep: Callable[[list[list[Rollout]]], None],
) -> dict[str, float]:
    """Run the groups of these examples at once, and return their means and the seconds that they
    took.

    Args:
        run: runs the group of an example.
        check_server: see `Orchestrator`.
        keep: gets the groups when all are complete.
    """
    start = asyncio.get_running_loop().time()
    groups = await while_served(_all_of([run(example) for example in examples]), check_server)
    await asyncio.to_thread(check_server)
    keep(groups)
    tell_of_failures(groups)
    return {
        **evaluation_metrics(groups),
        "runtime": asyncio.get_running_loop().time() - start,
    }


async def _all_of(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all at once, and return their results. If one raises, or this is cancelled, the others
    are cancelled.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)  # which passes on that it is cancelled
    except Exception:
        for task in tasks:
            task.cancel()
        raise


async def while_served(rollouts: Awaitable[Any], check_server: Callable[[], None]) -> Any:
    """Wait for rollouts and return their result. Look at the server meanwhile: if it hangs, or its
    machine is lost, no request ever fails.

    Raises:
        Whatever `check_server` or the rollouts raise.
    """
    waiting = asyncio.ensure_future(rollouts)
    try:
        while not (await asyncio.wait({waiting}, timeout=LOOK_S))[0]:
            await asyncio.to_thread(check_server)
        return waiting.result()
    finally:
        waiting.cancel()


def tell_of_failures(groups: Sequence[Sequence[Rollout]]) -> None:
    """Warn of rollouts that failed. Raises RolloutError if all did."""
    rollouts = [rollout for group in groups for rollout in group]
    errors = [rollout.error for rollout in rollouts if rollout.error is not None]
    kinds = Counter(describe_error(error) for error in errors)
    if len(errors) == len(rollouts):
        failure = RolloutError(
            f"all {len(rollouts)} rollouts failed; most often: {kinds.most_common(1)[0][0]}. "
            "The first one's traceback is above"
        )
        failure.groups = groups
        raise failure from errors[0]
    for kind, count in kinds.most_common():
        logger.warning("%d of %d rollouts failed and are left out: %s", count, len(rollouts), kind)


def result_of_rollouts(
    future: Future[Any],
    progress: Progress,
    num_rollouts: int,
    waves: int,
    num_batches: int,
    rollout_timeout_s: float,
) -> Any:
    """Wait for what needs these rollouts, with a deadline.

    In each wave of rollouts that run at a time, rollouts and their scoring may each take the
    rollout's deadline. In each batch, replacements may begin one such deadline later. This
    deadline is a minute longer than these, for work that they could not end.
    """
    deadline_s = (2 * waves + num_batches) * rollout_timeout_s + 60.0
    try:
        return result_of(future, deadline_s, lambda: f"rollouts: {progress}")
    except TimeoutError:
        if future.done():
            raise  # a TimeoutError of the rollouts themselves
        raise TimeoutError(
            f"{num_rollouts} rollouts did not end within {deadline_s:g} s, three times "
            f"generation_timeout ({rollout_timeout_s:g} s) or more: does the environment "
            "block its event loop?"
        ) from None
