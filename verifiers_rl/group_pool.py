"""The groups that run for training, and which of them the next batch takes.

    submit(step)  ──►  add: one request for each group of a batch
                       begin: at once ("planned"), or while a rollout has a place ("ready")
                       a group that the filter rejects is replaced, in the same request
    get()         ◄──  take: the requests of the next batch, once their groups are complete

"planned": a batch has the groups that were requested for it, and waits for the slowest.
"ready": a batch has the first groups that are complete. A late group joins a later batch, and none
is dropped for being slow, because that would favour short answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from verifiers_rl.data import describe_error
from verifiers_rl.process.waiting import result_of
from verifiers_rl.report.means import evaluation_metrics
from verifiers_rl.types import BatchOrder, Progress, Rollout, Slots, Split

logger = logging.getLogger(__name__)

LOOK_S = 30.0  # between two looks at the server


class RolloutError(RuntimeError):
    """No batch could be generated. The message says what failed most often, or what to change.

    Attributes:
        groups: those whose rollouts all failed.
    """

    groups: Sequence[Sequence[Rollout]] = ()


@dataclass(eq=False)
class GroupRequest:
    """One group that a batch will have, and those that the filter rejected in its place.

    Attributes:
        step: the step whose submission requested it.
        model: the model name in its rollout requests.
        examples: the examples that its submission may still use, each with its position in the
            order of examples; shared by the requests of one submission.
        replace_until: event loop's time after which no replacement begins.
        progress: counts its rollouts.
        position, example: those of its last group.
        policy_version: version of the weights when its last group began; None before that.
        finished: its groups that are complete, each with its position before and, behind it,
            whether it passes the filter.
        is_complete: no group of it runs or will run.
        error: what ended it; whoever takes the next batch raises this error.
    """

    step: int
    model: str
    examples: Iterator[tuple[int, int]]
    replace_until: float
    progress: Progress
    position: int = -1
    example: int = -1
    policy_version: int | None = None
    finished: list[tuple[int, list[Rollout], bool]] = field(default_factory=list)
    is_complete: bool = False
    error: BaseException | None = None

    @property
    def num_in_flight(self) -> int:
        """Rollouts that have begun and still have, or wait for, a place at the server."""
        return 0 if self.is_complete else self.progress.num_requested - self.progress.num_done


def choose_ready(
    requests: Sequence[GroupRequest], step: int, num_groups: int, max_off_policy_steps: int
) -> list[GroupRequest] | None:
    """Choose the `num_groups` complete groups of this step that began first. Return None if there
    are fewer, or if the groups left behind would then become too old.

    The groups left behind go into the later batches at the latest in the order in which they
    began: the first `num_groups` of them at step + 1, the next at step + 2, and so on. Each must
    be trained at most `max_off_policy_steps` steps after the step whose weights it began with.
    """

    def version(request: GroupRequest) -> float:
        return float("inf") if request.policy_version is None else request.policy_version

    complete = [request for request in requests if request.is_complete]
    chosen = sorted(complete, key=version)[:num_groups]
    left = sorted((request for request in requests if request not in chosen), key=version)
    in_time = all(
        step + 1 + number // num_groups <= version(request) + max_off_policy_steps
        for number, request in enumerate(left)
    )
    return chosen if in_time and len(chosen) == num_groups else None


class GroupPool:
    """Runs the groups that were requested. All methods run on the orchestrator's event loop.

    Args:
        order: how a batch is made of them.
        num_groups: groups of a batch.
        num_rollouts: rollouts of a group.
        max_off_policy_steps: the most steps between the weights that a group begins with and the
            step that trains on it. The pool keeps to it in "ready"; in "planned" it follows from
            the number of batches that the trainer requests in advance.
        slots: places at the server, shared by all rollouts.
        max_concurrent: the number of these places. In "ready" a group begins only while one of
            them is free: a group that waits in a queue would become old there.
        run: runs a group. Takes split, example, number of rollouts, model name, policy version and
            progress.
        finish: takes the position and the group, sets the group's advantages, and returns whether
            it passes the filter.
    """

    def __init__(
        self,
        order: BatchOrder,
        num_groups: int,
        num_rollouts: int,
        max_off_policy_steps: int,
        slots: Slots,
        max_concurrent: int,
        run: Callable[[Split, int, int, str, int, Progress], Awaitable[list[Rollout]]],
        finish: Callable[[int, list[Rollout]], bool],
    ) -> None:
        self.order = order
        self.num_groups = num_groups
        self.num_rollouts = num_rollouts
        self.max_off_policy_steps = max_off_policy_steps
        self.slots = slots
        self.max_concurrent = max_concurrent
        self._run_group = run
        self._finish = finish
        self._policy_version = 0
        self._requests: list[GroupRequest] = []  # of batches that were not taken
        self._waiting: deque[GroupRequest] = deque()  # those of them that have not begun
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def add(
        self,
        step: int,
        model: str,
        policy_version: int,
        examples: Iterator[tuple[int, int]],
        replace_until: float,
    ) -> None:
        """Request the groups of one more batch. Groups that begin from now on begin with these
        weights.
        """
        self._policy_version = policy_version
        for _ in range(self.num_groups):
            progress = Progress(self.slots, self._begin_waiting)
            request = GroupRequest(step, model, examples, replace_until, progress)
            request.position, request.example = next(examples)
            self._requests.append(request)
            self._waiting.append(request)
        self._begin_waiting()

    async def take(self, step: int) -> list[GroupRequest]:
        """Wait for the groups of this step's batch, and remove them from the pool.

        Raises:
            Whatever running a group has raised.
        """
        while (chosen := self._choose(step)) is None:
            self._changed.clear()
            await self._changed.wait()
        self._requests = [request for request in self._requests if request not in chosen]
        return chosen

    def begin_no_more(self) -> None:
        """Let no group begin that has not begun yet."""
        self._waiting.clear()

    def clear(self) -> None:
        """Give up all groups."""
        self.begin_no_more()
        self._requests = []
        for task in self._tasks:
            task.cancel()

    def progress(self, step: int) -> str:
        """Say how many rollouts are done, of those requested up to this step. On any thread."""
        counted = [request.progress for request in self._requests if request.step <= step]
        num_requested = sum(progress.num_requested for progress in counted)
        return f"{sum(progress.num_done for progress in counted)} of {num_requested}"

    def _choose(self, step: int) -> list[GroupRequest] | None:
        awaited = self._requests
        if self.order == "planned":
            awaited = [request for request in awaited if request.step == step]
        for request in awaited:
            if request.error is not None:
                raise request.error
        if self.order == "planned":
            return awaited if all(request.is_complete for request in awaited) else None
        return choose_ready(awaited, step, self.num_groups, self.max_off_policy_steps)

    def _begin_waiting(self) -> None:
        while self._waiting and self._has_place():
            request = self._waiting.popleft()
            self._begin(request)
            task = asyncio.create_task(self._run(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _has_place(self) -> bool:
        num_in_flight = sum(request.num_in_flight for request in self._requests)
        return self.order == "planned" or num_in_flight < self.max_concurrent

    def _begin(self, request: GroupRequest) -> None:
        request.policy_version = self._policy_version
        request.progress.num_requested += self.num_rollouts

    async def _run(self, request: GroupRequest) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                group = await self._run_group(
                    "train", request.example, self.num_rollouts, request.model,
                    request.policy_version or 0, request.progress,
                )  # fmt: skip
                passes = self._finish(request.position, group)
                request.finished.append((request.position, group, passes))
                if passes or loop.time() > request.replace_until:
                    break
                if (replacement := next(request.examples, None)) is None:
                    break
                request.position, request.example = replacement
                self._begin(request)
        except BaseException as error:
            request.error = error  # raised to whoever takes the next batch
        request.is_complete = True
        self._changed.set()
        if isinstance(request.error, asyncio.CancelledError):
            raise request.error
        self._begin_waiting()


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


async def evaluate(
    run: Callable[[int], Coroutine[Any, Any, list[Rollout]]],
    examples: Sequence[int],
    check_server: Callable[[], None],
    keep: Callable[[list[list[Rollout]]], None],
) -> dict[str, float]:
    """Run the groups of these examples at once, and return their means and the seconds that they
    took. If one raises or this is cancelled, the others are cancelled.

    Args:
        run: runs the group of an example.
        check_server: see `Orchestrator`.
        keep: gets the groups when all are complete.
    """
    start = asyncio.get_running_loop().time()
    tasks = [asyncio.create_task(run(example)) for example in examples]
    try:
        groups = await while_served(asyncio.gather(*tasks), check_server)
    finally:
        for task in tasks:
            task.cancel()
    await asyncio.to_thread(check_server)
    keep(groups)
    tell_of_failures(groups)
    return {
        **evaluation_metrics(groups),
        "runtime": asyncio.get_running_loop().time() - start,
    }


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
    progress: Callable[[], str],
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
        return result_of(future, deadline_s, lambda: f"rollouts: {progress()}")
    except TimeoutError:
        if future.done():
            raise  # a TimeoutError of the rollouts themselves
        raise TimeoutError(
            f"{num_rollouts} rollouts did not end within {deadline_s:g} s, three times "
            f"generation_timeout ({rollout_timeout_s:g} s) or more: does the environment "
            "block its event loop?"
        ) from None
