"""The thread that generates the next batch while the trainer works on this one.

    trainer (main thread)                 orchestrator (daemon thread, its own event loop)
    submit(step, version)  ──────────────►  run its groups against the server, all at once
    ... optimizer step on the batch before ...
    get()  ◄──────────────────────────────  Batch: advantages set, failed rollouts left out

By default at most one batch is pending, and weights change only between `get` and the next
`submit`, so all tokens of a batch have one policy version. If several batches are pending, the
later ones use the server while the earlier ones wait for their slowest rollouts. Weights then
change during generation, and every token carries its version. An evaluation runs beside the pending
batches.

Each step has `max_groups` positions in the order of examples to itself, used or not. So its
examples follow from its number and the seed, and a resumed run continues with the next examples.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any

from verifiers_rl.advantages import AdvantageFn, center_on_group_mean, of_rewards, set_advantages
from verifiers_rl.data import (
    ExampleOrder,
    GroupFilter,
    examples_at,
    first_of_each,
    order_examples,
)
from verifiers_rl.groups import (
    RolloutError,
    evaluate,
    result_of_rollouts,
    run_groups,
    tell_of_failures,
    while_served,
)
from verifiers_rl.inference import derive_seed
from verifiers_rl.inference.client import ServerLostError
from verifiers_rl.process.loop_thread import LoopThread
from verifiers_rl.process.waiting import result_of
from verifiers_rl.report.means import batch_metrics
from verifiers_rl.requests import EnvRunner, GroupRequest, Places, Progress, Router
from verifiers_rl.types import LOAD_S, Batch, Rollout, Split

logger = logging.getLogger(__name__)


class Orchestrator:
    """Generates batches in the background.

    Args:
        env: runs groups of rollouts.
        check_server: raises ServerLostError if the server is gone or has lost the policy. Called
            when rollouts fail, to tell a dead server from a failing environment; while they run,
            because one that hangs fails none; and at the end of each batch, because a restarted
            server samples from the wrong weights.
        batch_size: rollouts of a batch.
        rollouts_per_example: rollouts of a group.
        sampling_args: the sampling options in each rollout request.
        max_concurrent: rollouts in flight at a time.
        eval_sampling_args: the sampling options of evaluations; default: `sampling_args`.
        rollout_timeout_s: deadline of one rollout. A batch runs in waves of `max_concurrent`
            rollouts, and each wave may take this long.
        scoring_timeout_s: deadline of what scores a group beside its rewards, such as a teacher.
        example_order: chooses the training examples; default: shuffled, environments in equal
            shares.
        group_filter: a finished group that does not pass is replaced by a new one. Replacements
            start only in the first `rollout_timeout_s` of a batch, times the pending batches.
        max_groups: the most groups that are generated for a batch. Default: the groups of a batch.
        advantage_fn: computes advantages from a group's surviving rollouts; default: rewards minus
            their mean. Advantages that an environment has set itself are kept.
        mask_truncated_completions, zero_truncated_completions: see `RLConfig`.
        router: chooses the server of each rollout; default: there is one server.
        seed: requests get seeds that follow from it, see `_group_seed`; None: they get none.
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
        eval_sampling_args: dict[str, Any] | None = None,
        rollout_timeout_s: float = 600.0,
        scoring_timeout_s: float = 0.0,
        example_order: ExampleOrder = order_examples,
        group_filter: GroupFilter | None = None,
        max_groups: int | None = None,
        advantage_fn: AdvantageFn | None = None,
        mask_truncated_completions: bool = False,
        zero_truncated_completions: bool = False,
        router: Router | None = None,
        seed: int | None = None,
    ) -> None:
        self.env = env
        self.check_server = check_server
        self.batch_size = batch_size
        self.rollouts_per_example = rollouts_per_example
        self.sampling_args = sampling_args
        self.max_concurrent = max_concurrent
        self.eval_sampling_args = eval_sampling_args or sampling_args
        self.rollout_timeout_s = rollout_timeout_s
        self._wave_timeout_s = rollout_timeout_s + scoring_timeout_s
        self.group_filter = group_filter or GroupFilter()
        self.num_groups = batch_size // rollouts_per_example
        self.max_groups = max_groups or self.num_groups
        self._set_advantages = partial(
            set_advantages,
            advantage_fn=advantage_fn or of_rewards(center_on_group_mean),
            mask_truncated=mask_truncated_completions,
            zero_truncated=zero_truncated_completions,
        )
        self._thread: LoopThread | None = None
        self._places: Places
        self.router, self.seed = router, seed
        self._num_begun: Counter[tuple[Split, int, int]] = Counter()  # groups, by `_group_seed`
        if router is not None:
            router.call_when_lost(self._on_lost)
        self.example_order = example_order
        # Positions in the order of examples that the steps before a checkpoint had more than these.
        self._num_skipped = 0
        # Each batch, its progress and how many were pending after its submission.
        self._pending: deque[tuple[Future[Batch], Progress, int]] = deque()
        self._evaluation: tuple[Future[dict[str, float]], Progress] | None = None
        # The groups of the last evaluations and the policy version of each, to be written.
        self.evaluated: deque[tuple[int, list[list[Rollout]]]] = deque(maxlen=4)

    # --- Called by the trainer --------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and open the environment's client."""
        self._thread = LoopThread("orchestrator")
        self._places = Places(self.max_concurrent, self.router)
        deadline_s = max(self.rollout_timeout_s, LOAD_S) + 60.0  # a minute more than its own
        try:
            opening = self._thread.run(self.env.open())
            result_of(opening, deadline_s, lambda: "the environment to load")
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
        assert self._thread is not None, "call start() first"
        progress = Progress()
        batch = self._generate(step, model, policy_version, num_batches, progress)
        self._pending.append((self._thread.run(batch), progress, num_batches))

    def raise_if_failed(self) -> None:
        """Raise the error of the first pending batch or of the evaluation, if that has failed.
        Returns at once. A lost server may come back, so only waiting raises that error.
        """
        futures: list[Future[Any]] = [self._pending[0][0]] if self._pending else []
        if self._evaluation is not None:
            futures.append(self._evaluation[0])
        for future in futures:
            error = future.exception() if future.done() else None
            if error is not None and not isinstance(error, ServerLostError):
                raise error

    def discard(self) -> None:
        """Give up all pending batches and the evaluation."""
        assert self._thread is not None
        while self._pending:
            self._pending.popleft()[0].cancel()
        if self._evaluation is not None:
            self._evaluation[0].cancel()
            self._evaluation = None

    def wait(self) -> None:
        """Wait until all pending batches are generated, without taking them."""
        for pending in self._pending:
            self._wait_for(*pending)

    def _wait_for(self, batch: Future[Batch], progress: Progress, num_batches: int) -> Batch:
        num_batches = max(num_batches, len(self._pending))
        num_rollouts = self.max_groups * self.rollouts_per_example * num_batches
        waves = -(-num_rollouts // self.max_concurrent)
        timeout_s = self._wave_timeout_s
        return result_of_rollouts(batch, progress, num_rollouts, waves, num_batches, timeout_s)

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

    def begin_evaluation(
        self, num_examples: int, num_rollouts: int, model: str, policy_version: int
    ) -> None:
        """Begin to evaluate the first `num_examples` of each environment's eval split,
        `num_rollouts` times each. The weights must not change before `end_evaluation`.
        """
        assert self._thread is not None and self._evaluation is None
        examples = first_of_each(self.env.sizes("eval"), num_examples)
        if not examples:
            raise RolloutError("the environment's eval split is empty; set eval_strategy='no'")
        progress = Progress()
        progress.num_requested = len(examples) * num_rollouts

        def run(example: int) -> Coroutine[Any, Any, list[Rollout]]:
            return self._run_group("eval", example, num_rollouts, model, policy_version, progress)

        keep = partial(lambda *evaluated: self.evaluated.append(evaluated), policy_version)
        running = self._thread.run(evaluate(run, examples, self.check_server, keep))
        self._evaluation = (running, progress)

    def end_evaluation(self) -> dict[str, float]:
        """Wait for the evaluation. Returns means, in which a failed rollout counts as reward 0, and
        `runtime`, the seconds that it took. docs/metrics.md defines each.
        """
        assert self._evaluation is not None, "no evaluation was begun"
        future, progress = self._evaluation
        num_pending = len(self._pending)  # they share the server with it
        num_of_batches = self.max_groups * self.rollouts_per_example * num_pending
        waves = -(-progress.num_requested // self.max_concurrent)
        waves += -(-num_of_batches // self.max_concurrent)
        try:
            num_rollouts, timeout_s = progress.num_requested, self._wave_timeout_s
            return result_of_rollouts(
                future, progress, num_rollouts, waves, num_pending + 1, timeout_s
            )
        finally:
            self._evaluation = None

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return what a run that continues at this step needs, if its steps have more groups, or
        fewer.
        """
        return {"step": step, "first_position": self._first_position(step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the examples behind those of the steps before."""
        self._num_skipped = state["first_position"] - state["step"] * self.max_groups
        if self._num_skipped:
            logger.warning(
                "the steps of the checkpoint had more or fewer groups (batch_size, "
                "rollouts_per_example, group_filter): this run goes on with the example behind "
                "them, number %d in the order of examples",
                state["first_position"],
            )

    def _first_position(self, step: int) -> int:
        return step * self.max_groups + self._num_skipped

    def stop(self) -> None:
        """Cancel pending batches, close the environment's client and join the thread."""
        if self._thread is None:
            return
        gc.unfreeze()
        thread, self._thread, self._evaluation = self._thread, None, None
        self._pending.clear()
        thread.stop(self.env.close)

    # --- On the thread ----------------------------------------------------------------------------

    async def _generate(
        self, step: int, model: str, policy_version: int, num_batches: int, progress: Progress
    ) -> Batch:
        start = asyncio.get_running_loop().time()
        first = self._first_position(step)
        positions = range(first, first + self.max_groups)
        try:
            examples = examples_at(self.example_order, positions, self.env.sizes("train"))
        except ValueError as error:
            raise RolloutError(str(error)) from error

        def run(example: int) -> Coroutine[Any, Any, list[Rollout]]:
            number = self.rollouts_per_example
            progress.num_requested += number
            return self._run_group("train", example, number, model, policy_version, progress)

        replace_until = start + num_batches * self._wave_timeout_s
        running = run_groups(run, self._finish, examples, self.num_groups, replace_until)
        complete = await while_served(running, self.check_server)
        await asyncio.to_thread(self.check_server)
        groups = [group for group, _ in complete]
        kept = [group for group, passes in complete if passes]
        tell_of_failures(groups)
        if len(kept) < self.num_groups:
            logger.warning(
                "%d of the %d groups generated pass, %d are wanted: loosen group_filter or raise "
                "its max_oversampling: %s",
                *(len(kept), len(groups), self.num_groups, self.group_filter),
            )
        rollouts = [rollout for group in kept for rollout in group if rollout.error is None]
        if not rollouts:  # show people those that did not pass; no step is taken
            rollouts = [r for group in groups for r in group if r.error is None]
            rollouts = rollouts[: self.batch_size]
            for rollout in rollouts:
                rollout.leave_out_of_loss()
        samples = [sample for rollout in rollouts for sample in rollout.samples]
        metrics = batch_metrics(groups) | {"num_samples": float(len(samples))}
        metrics["filtered_share"] = 1 - len(kept) / len(groups)
        metrics["generation_s"] = asyncio.get_running_loop().time() - start
        return Batch(step, policy_version, samples, rollouts, metrics, groups=groups)

    async def _run_group(
        self,
        split: Split,
        index: int,
        num_rollouts: int,
        model: str,
        policy_version: int,
        progress: Progress,
    ) -> list[Rollout]:
        """Run one group. Raises ServerLostError if rollouts fail because the server is lost."""
        sampling = self.sampling_args if split == "train" else self.eval_sampling_args
        request = GroupRequest(
            split, index, num_rollouts, model, policy_version, sampling, self._places,
            timeout_s=self.rollout_timeout_s, seed=self._group_seed(split, policy_version, index),
            progress=progress,
        )  # fmt: skip
        group = await self.env.run_group(request)
        if any(rollout.error is not None for rollout in group):
            await asyncio.to_thread(self.check_server)
        return group

    def _group_seed(self, split: Split, policy_version: int, index: int) -> int | None:
        """Return the seed of a group, or None.

        It follows from the run's seed, the policy version with which the group begins, its example,
        and how often the example has begun before with both. So it depends neither on the other
        groups nor on the order in which they end. With `max_off_policy_steps = 0` a resumed run has
        the seeds that it had. With 1, its first batch is sampled from newer weights. A batch that
        is begun again after a lost server gets other seeds.
        """
        if self.seed is None:
            return None
        place = split, policy_version, index
        self._num_begun[place] += 1
        return derive_seed(self.seed, *place, self._num_begun[place])

    def _on_lost(self, url: str) -> None:
        """On any thread: end the requests that wait for this server."""
        if (thread := self._thread) is not None:
            thread.loop.call_soon_threadsafe(self._places.lose, url)

    def _finish(self, group: list[Rollout]) -> bool:
        """Set the group's advantages. Return whether it passes the filter."""
        try:
            self._set_advantages(group)
        except ValueError as error:
            raise RolloutError(str(error)) from error
        return self.group_filter.passes(group)
