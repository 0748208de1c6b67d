"""The thread that generates the next batch while the trainer works on this one.

    trainer (main thread)                 orchestrator (daemon thread, its own event loop)
    submit(step, version)  ──────────────►  run its groups against the server, all at once
    ... optimizer step on the batch before ...
    get()  ◄──────────────────────────────  Batch: advantages set, failed rollouts left out

By default at most one batch is pending, and weights change only between `get` and the next
`submit`, so all tokens of a batch have one policy version. If several batches are pending, the
later ones use the server while the earlier ones wait for their slowest rollouts. Weights then
change during generation, and every token carries its version. A step's examples depend only on its
number and the seed, so a resumed run continues with the next examples and needs no saved position.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from verifiers_rl.advantages import AdvantageFn, as_numbers, center_on_group_mean, of_rewards
from verifiers_rl.data import (
    ExampleOrder,
    GroupFilter,
    describe_error,
    examples_at,
    group_by_role,
    order_examples,
)
from verifiers_rl.inference.client import ServerLostError
from verifiers_rl.process.limits import rollouts_at_once
from verifiers_rl.process.waiting import result_of
from verifiers_rl.report.means import batch_metrics, evaluation_metrics
from verifiers_rl.types import LOAD_S, Batch, EnvRunner, Progress, Rollout, Slots, Split

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 30.0


class RolloutError(RuntimeError):
    """No batch could be generated. The message says what failed most often, or what to change."""


class Orchestrator:
    """Generates batches in the background.

    Args:
        env: runs groups of rollouts.
        check_server: raises ServerLostError if the server is gone or has lost the policy. Called
            when rollouts fail, to tell a dead server from a failing environment. Called also at the
            end of each batch, because a restarted server samples from the wrong weights.
        batch_size: rollouts of a batch.
        rollouts_per_example: rollouts of a group.
        sampling_args: the sampling options in each rollout request.
        max_concurrent: rollouts in flight at a time; fewer if too few files may be open.
        rollout_timeout_s: deadline of one rollout. A batch runs in waves of `max_concurrent`
            rollouts, and each wave may take this long.
        example_order: chooses the training examples; default: shuffled, environments in equal
            shares.
        group_filter: a finished group that does not pass is replaced by a new one. Replacements
            start only in the first `rollout_timeout_s` of a batch, times the pending batches.
        max_groups: the most groups that are generated for a batch. Each step reserves this many
            examples of the epoch, used or not. Default: the groups of a batch.
        advantage_fn: computes advantages from a group's surviving rollouts; default: rewards minus
            their mean. Advantages that an environment has set itself are kept.
        mask_truncated_completions, zero_truncated_completions: see `RLConfig`.
    """

    def __init__(
        self,
        env: EnvRunner,
        check_server: Callable[[], None],
        *,
        batch_size: int,
        rollouts_per_example: int,
        sampling_args: dict[str, Any],
        max_concurrent: int = 512,
        rollout_timeout_s: float = 600.0,
        example_order: ExampleOrder = order_examples,
        group_filter: GroupFilter | None = None,
        max_groups: int | None = None,
        advantage_fn: AdvantageFn | None = None,
        mask_truncated_completions: bool = False,
        zero_truncated_completions: bool = False,
    ) -> None:
        self.env = env
        self.check_server = check_server
        self.batch_size = batch_size
        self.rollouts_per_example = rollouts_per_example
        self.sampling_args = sampling_args
        self.max_concurrent = rollouts_at_once(max_concurrent, env.files_per_rollout)
        self.rollout_timeout_s = rollout_timeout_s
        self.example_order = example_order
        self.group_filter = group_filter or GroupFilter()
        self.num_groups = batch_size // rollouts_per_example
        self.max_groups = max_groups or self.num_groups
        self.advantage_fn = advantage_fn or of_rewards(center_on_group_mean)
        self.mask_truncated_completions = mask_truncated_completions
        self.zero_truncated_completions = zero_truncated_completions
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._slots: Slots
        # Each batch, how many were pending after its submission, and its progress.
        self._pending: deque[tuple[Future[Batch], int, Progress]] = deque()

    # --- Called by the trainer --------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and open the environment's client."""
        self._loop = asyncio.new_event_loop()
        self._slots = Slots(self.max_concurrent)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="orchestrator", daemon=True
        )
        self._thread.start()
        deadline_s = max(self.rollout_timeout_s, LOAD_S) + 60.0  # a minute more than its own
        try:
            result_of(self._run(self.env.open()), deadline_s, lambda: "the environment to load")
        except TimeoutError as error:
            raise TimeoutError(f"the environment was not ready within {deadline_s:g} s") from error
        gc.collect()
        # Rollouts make thousands of small objects a second, so Python often collects garbage. Each
        # time it would walk all of torch and transformers and stop all threads for half a second.
        gc.freeze()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def submit(self, step: int, model: str, policy_version: int) -> None:
        """Begin to generate the batch of this step. Rollout requests carry `model` as model name.
        `get` takes the batches in the order of their submission.
        """
        num_batches = len(self._pending) + 1  # that share the server so far, with this one
        progress = Progress(self._slots)
        batch = self._run(self._generate(step, model, policy_version, num_batches, progress))
        self._pending.append((batch, num_batches, progress))

    def raise_if_failed(self) -> None:
        """Raise the error of the first pending batch, if that batch has failed. Returns at once.
        A lost server may come back, so only `get` raises that error.
        """
        if self._pending and self._pending[0][0].done():
            error = self._pending[0][0].exception()
            if error is not None and not isinstance(error, ServerLostError):
                raise error

    def discard(self) -> None:
        """Give up all pending batches."""
        while self._pending:
            self._pending.popleft()[0].cancel()

    def wait(self) -> None:
        """Wait until all pending batches are generated, without taking them."""
        for pending in self._pending:
            self._wait_for(*pending)

    def _wait_for(self, batch: Future[Batch], num_batches: int, progress: Progress) -> Batch:
        num_batches = max(num_batches, len(self._pending))
        num_rollouts = self.max_groups * self.rollouts_per_example * num_batches
        return self._result(batch, progress, num_rollouts, num_batches)

    def get(self) -> Batch:
        """Wait for the first pending batch and take it.

        Raises:
            RolloutError: every rollout failed, or advantages cannot be computed from their rewards;
                the cause is chained.
            ServerLostError: the server is gone, or has lost the policy.
            TimeoutError: it took longer than its deadline.
        """
        assert self._pending, "no batch was submitted"
        batch = self._wait_for(*self._pending[0])
        self._pending.popleft()
        return batch

    def evaluate(
        self, num_examples: int, num_rollouts: int, model: str, policy_version: int
    ) -> dict[str, float]:
        """Evaluate the first `num_examples` of each environment's eval split, `num_rollouts` times
        each. Returns means; a failed rollout counts as reward 0. docs/metrics.md defines each.
        """
        indices: list[int] = []
        start = 0
        for size in self.env.sizes("eval"):
            indices += range(start, start + min(num_examples, size))
            start += size
        if not indices:
            raise RolloutError("the environment's eval split is empty; set eval_strategy='no'")
        progress = Progress(self._slots)
        running = self._run_groups(
            "eval", indices, num_rollouts, model, policy_version, progress, len(indices)
        )
        groups = self._result(self._run(running), progress, len(indices) * num_rollouts)
        return evaluation_metrics([group for group, _ in groups])

    def stop(self) -> None:
        """Cancel pending batches, close the environment's client and join the thread."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        gc.unfreeze()
        shut_down = self._run(self._shut_down())
        self._loop = self._thread = None
        self._pending.clear()
        try:
            shut_down.result(timeout=2 * STOP_DEADLINE_S)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=STOP_DEADLINE_S)
            if thread.is_alive():
                raise RuntimeError("the orchestrator's thread is blocked by an environment")
            loop.close()

    # --- On the thread ----------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        assert self._loop is not None, "call start() first"
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _result(
        self, future: Future[Any], progress: Progress, num_rollouts: int, num_batches: int = 1
    ) -> Any:
        """Wait for the future, with a deadline.

        In each wave of max_concurrent, rollouts and their scoring may each take the rollout's
        deadline. In each batch, replacements may begin one such deadline later. This deadline is a
        minute longer than these, for work that they could not end.
        """
        waves = -(-num_rollouts // self.max_concurrent)
        deadline_s = (2 * waves + num_batches) * self.rollout_timeout_s + 60.0
        try:
            return result_of(future, deadline_s, lambda: f"rollouts: {progress}")
        except TimeoutError:
            if future.done():
                raise  # a TimeoutError of the rollouts themselves
            raise TimeoutError(
                f"{num_rollouts} rollouts did not end within {deadline_s:g} s, three times "
                f"generation_timeout ({self.rollout_timeout_s:g} s) or more: does the environment "
                "block its event loop?"
            ) from None

    async def _shut_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others and (left := (await asyncio.wait(others, timeout=STOP_DEADLINE_S))[1]):
            logger.warning("%d tasks of the environment do not end when cancelled", len(left))
        await self.env.close()

    async def _generate(
        self, step: int, model: str, policy_version: int, num_batches: int, progress: Progress
    ) -> Batch:
        positions = range(step * self.max_groups, (step + 1) * self.max_groups)
        try:
            indices = examples_at(self.example_order, positions, self.env.sizes("train"))
        except ValueError as error:
            raise RolloutError(str(error)) from error
        start = asyncio.get_running_loop().time()

        def finish(group: list[Rollout]) -> bool:
            try:
                self._set_advantages(group)
            except ValueError as error:
                raise RolloutError(str(error)) from error
            return self.group_filter.passes(group)

        groups = await self._run_groups(
            "train", indices, self.rollouts_per_example, model, policy_version, progress,
            self.num_groups, finish, num_batches * self.rollout_timeout_s,
        )  # fmt: skip
        kept = [group for group, passes in groups if passes]
        if len(kept) < self.num_groups:
            logger.warning(
                "%d of the %d groups generated pass, %d are wanted: loosen %s or raise "
                "max_oversampling", len(kept), len(groups), self.num_groups, self.group_filter,
            )  # fmt: skip
        rollouts = [rollout for group in kept for rollout in group if rollout.error is None]
        if not rollouts:  # show people those that did not pass; no step is taken
            rollouts = [r for group, _ in groups for r in group if r.error is None]
            rollouts = rollouts[: self.batch_size]
            for rollout in rollouts:
                rollout.leave_out_of_loss()
        samples = [sample for rollout in rollouts for sample in rollout.samples]
        metrics = batch_metrics([group for group, _ in groups])
        metrics["num_samples"] = float(len(samples))
        metrics["filtered_share"] = 1 - sum(passes for _, passes in groups) / len(groups)
        metrics["generation_s"] = asyncio.get_running_loop().time() - start
        return Batch(step, policy_version, samples, rollouts, metrics)

    async def _run_groups(
        self,
        split: Split,
        indices: list[int],
        num_rollouts: int,
        model: str,
        policy_version: int,
        progress: Progress,
        num_at_once: int,
        finish: Callable[[list[Rollout]], bool] = lambda group: True,
        replace_for_s: float = 0.0,
    ) -> list[tuple[list[Rollout], bool]]:
        """Run `num_at_once` groups at once, and one more for each group that `finish` rejects
        within `replace_for_s` seconds, while examples are left. Returns all groups in the order of
        `indices`, each with the result of `finish`.

        Raises:
            RolloutError: all rollouts failed.
            ServerLostError: the server is lost.
        """

        async def one(number: int) -> tuple[int, list[Rollout]]:
            progress.num_requested += num_rollouts
            group = await self.env.run_group(
                split, indices[number], num_rollouts, model,
                self.sampling_args, policy_version, progress,
            )  # fmt: skip
            if any(rollout.error is not None for rollout in group):
                await asyncio.to_thread(self.check_server)
            return number, group

        deadline = asyncio.get_running_loop().time() + replace_for_s
        numbers = iter(range(len(indices)))
        running = {asyncio.create_task(one(n)) for n in itertools.islice(numbers, num_at_once)}
        finished: dict[int, tuple[list[Rollout], bool]] = {}
        try:
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for number, group in await asyncio.gather(*done):
                    finished[number] = (group, finish(group))
                    is_late = asyncio.get_running_loop().time() > deadline
                    if not finished[number][1] and not is_late:
                        running |= {
                            asyncio.create_task(one(n)) for n in itertools.islice(numbers, 1)
                        }
            await asyncio.to_thread(self.check_server)
        finally:
            for task in running:
                task.cancel()
        groups = [finished[number] for number in sorted(finished)]
        rollouts = [rollout for group, _ in groups for rollout in group]
        errors = [rollout.error for rollout in rollouts if rollout.error is not None]
        kinds = Counter(describe_error(error) for error in errors)
        if len(errors) == len(rollouts):
            raise RolloutError(
                f"all {len(rollouts)} rollouts failed; most often: {kinds.most_common(1)[0][0]}. "
                "The first one's traceback is above"
            ) from errors[0]
        for kind, count in kinds.most_common():
            logger.warning(
                "%d of %d rollouts failed and are left out: %s", count, len(rollouts), kind
            )
        return groups

    def _set_advantages(self, group: list[Rollout]) -> None:
        for survivors in group_by_role(group):
            for rollout in survivors:
                if rollout.is_truncated and self.zero_truncated_completions:
                    rollout.reward = 0.0
                if rollout.is_truncated and self.mask_truncated_completions:
                    rollout.leave_out_of_loss()
            if not all(rollout.has_own_advantages for rollout in survivors):
                advantages = self.advantage_fn(survivors)
                for rollout, advantage in zip(survivors, as_numbers(advantages, len(survivors)),
                                              strict=True):  # fmt: skip
                    if not rollout.has_own_advantages:
                        rollout.set_advantage(advantage)
            if wrong := [r.advantage for r in survivors if not math.isfinite(r.advantage)]:
                raise ValueError(f"an advantage is {wrong[0]}")
