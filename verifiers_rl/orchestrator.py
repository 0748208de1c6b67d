"""The thread that generates the next batch while the trainer works on this one.

    trainer (main thread)                 orchestrator (daemon thread, its own event loop)
    submit(step, version)  ──────────────►  run its groups against the server, all at once
    ... optimizer step on the batch before ...
    get()  ◄──────────────────────────────  Batch: advantages set, failed rollouts left out

If several batches are pending, as while the trainer waits for one, the later ones use the server
while the earlier ones wait for their slowest rollouts. Weights then change during generation, and
every token carries its version. An evaluation runs beside the pending batches.

Each step has `max_groups_per_batch` positions in the order of examples to itself, used or not. So
its examples follow from its number and the seed, and a resumed run continues with the next ones.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verifiers_rl.advantages import AdvantageFn, set_advantages
from verifiers_rl.config import RLConfig
from verifiers_rl.data import ExampleOrder, examples_at, first_of_each, order_examples
from verifiers_rl.inference import derive_seed
from verifiers_rl.process import waiting
from verifiers_rl.process.loop_thread import LoopThread, gather_or_cancel
from verifiers_rl.report.means import batch_metrics, evaluation_metrics
from verifiers_rl.requests import (
    EnvRunner,
    GroupRequest,
    Places,
    Progress,
    RolloutError,
    run_groups,
    warn_of_failures,
    while_served,
)
from verifiers_rl.types import LOAD_S, Batch, Evaluated, Rollout, Split

logger = logging.getLogger(__name__)

GRACE_S = 60.0  # beyond the deadlines of rollouts, for work that these could not end


@dataclass
class Job:
    """A batch or an evaluation that is generated.

    Attributes:
        split, num_rollouts, model, policy_version: of its groups, see `GroupRequest`.
        progress: of its rollouts.
        result: a `Batch`, or what was `Evaluated`.
    """

    split: Split
    num_rollouts: int
    model: str
    policy_version: int
    progress: Progress = field(default_factory=Progress)
    result: Future[Any] = field(init=False)


class Orchestrator:
    """Generates batches in the background.

    Args:
        env: runs groups of rollouts.
        args: batches, sampling, deadlines, filter and advantages of the run.
        check_server: raises ServerLostError if the server is gone or has lost the policy. Called
            when rollouts fail, to tell a dead server from a failing environment; while they run;
            and at the end of each batch.
        router: chooses the server of each rollout, a `sync.ServerPool`; default: there is one.
        advantage_fn: computes advantages from a group's surviving rollouts; default: what
            `args.advantage` names. Advantages that an environment has set itself are kept.
        example_order: chooses the training examples; default: `order_examples`.

    Attributes:
        sampling: the sampling options of rollout requests, for training and for evaluations.
    """

    def __init__(
        self,
        env: EnvRunner,
        args: RLConfig,
        check_server: Callable[[], None],
        *,
        router: Any = None,
        advantage_fn: AdvantageFn | None = None,
        example_order: ExampleOrder | None = None,
    ) -> None:
        self.env, self.args, self.check_server, self.router = env, args, check_server, router
        self.advantage_fn = advantage_fn or args.make_advantage()
        self.example_order = example_order or partial(
            order_examples, weights=env.weights, shuffle=args.shuffle, seed=args.seed
        )
        self.group_filter = args.make_filter()
        self.sampling: dict[Split, dict[str, Any]] = {
            "train": args.sampling_args(),
            "eval": args.eval_sampling_args(),
        }
        # What scores a group beside its rewards, such as a teacher, comes behind its rollouts.
        self._group_s = args.generation_timeout + getattr(env, "scoring_timeout_s", 0.0)
        # Positions in the order of examples that the steps before a checkpoint had more than these.
        self._num_skipped = 0
        self._num_begun: Counter[tuple[Split, int, int]] = Counter()  # groups, by `_group_seed`
        self._pending: list[Job] = []  # batches
        self._evaluation: list[Job] = []  # one at most
        self._thread: LoopThread | None = None
        self._places: Places
        if router is not None:
            router.on_lost = self._on_lost

    # --- Batches, for the trainer -----------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def submit(self, step: int, model: str, policy_version: int) -> None:
        """Begin to generate the batch of this step. Rollout requests carry `model` as model name.
        `get` takes the batches in the order of their submission.
        """
        job = Job("train", self.args.rollouts_per_example, model, policy_version)
        num_batches = len(self._pending) + 1  # that share the server, with this one
        job.result = self._begin(self._generate(step, job, num_batches))
        self._pending.append(job)

    def get(self) -> Batch:
        """Wait for the first pending batch and take it.

        Raises:
            RolloutError: every rollout failed, or advantages cannot be computed from their rewards;
                the cause is chained.
            ServerLostError: the server is gone, or has lost the policy.
            TimeoutError: its rollouts do not end.
        """
        assert self._pending, "no batch was submitted"
        batch = self._result_of(self._pending[0])
        self._pending.pop(0)
        return batch

    def wait(self) -> None:
        """Wait until all pending batches are generated, without taking them."""
        for batch in self._pending:
            self._result_of(batch)

    def discard(self) -> None:
        """Give up all pending batches and the evaluation."""
        for job in self._pending + self._evaluation:
            job.result.cancel()
        self._pending, self._evaluation = [], []

    # --- Evaluations, for the trainer -------------------------------------------------------------

    def begin_evaluation(self, model: str, policy_version: int) -> None:
        """Begin to evaluate the first `eval_examples` of each environment's eval split. The weights
        must not change before `end_evaluation`.
        """
        assert not self._evaluation
        examples = first_of_each(self.env.sizes("eval"), self.args.eval_examples)
        if not examples:
            raise RolloutError("no environment has an example for evaluations that fits")
        job = Job("eval", self.args.eval_rollouts_per_example, model, policy_version)
        job.result = self._begin(self._evaluate(job, examples))
        self._evaluation = [job]

    def end_evaluation(self) -> Evaluated:
        """Wait for the evaluation. Its metrics are means, in which a failed rollout counts as
        reward 0, and `runtime`, the seconds that it took. docs/metrics.md defines each.
        """
        assert self._evaluation, "no evaluation was begun"
        try:
            return self._result_of(self._evaluation[0])
        finally:
            self._evaluation = []

    # --- What is generated, on the thread ---------------------------------------------------------

    async def _generate(self, step: int, job: Job, num_batches: int) -> Batch:
        """Run the groups of a batch, and make a `Batch` of those that pass the filter."""
        start = time.monotonic()
        num_groups, first = self.args.groups_per_batch, self._first_position(step)
        positions = range(first, first + self.args.max_groups_per_batch)
        try:
            examples = examples_at(self.example_order, positions, self.env.sizes("train"))
        except ValueError as error:
            raise RolloutError(str(error)) from error
        replace_until = start + num_batches * self._group_s
        run = partial(self._run_group, job)
        running = run_groups(run, self.group_filter.passes, examples, num_groups, replace_until)
        complete = await while_served(running, self.check_server)
        groups = [group for group, _ in complete]
        passing = [group for group, passes in complete if passes]
        warn_of_failures(groups)
        if len(passing) < num_groups:
            logger.warning(
                f"{len(passing)} of the {len(groups)} groups generated pass, {num_groups} are "
                "wanted: loosen group_filter or raise its max_oversampling"
            )
        rollouts = [rollout for group in passing for rollout in group if rollout.error is None]
        samples = [sample for rollout in rollouts for sample in rollout.samples]
        if not any(r.samples for group in groups for r in group if r.error is None):
            raise RolloutError(
                "no agent took a turn in any rollout that did not fail, so there is no token to "
                "train on: does the environment end its episodes before the first turn?"
            )
        metrics = batch_metrics(groups, job.num_rollouts) | {"num_samples": float(len(samples))}
        metrics["filtered_share"] = 1 - len(passing) / len(groups)
        metrics["generation_s"] = time.monotonic() - start
        return Batch(step, job.policy_version, samples, rollouts, metrics, groups=groups)

    async def _evaluate(self, job: Job, examples: Sequence[int]) -> Evaluated:
        """Run the groups of these examples."""
        start = time.monotonic()
        running = gather_or_cancel(self._run_group(job, index) for index in examples)
        groups: list[list[Rollout]] = await while_served(running, self.check_server)
        # What it costs to end a run that has trained is more than what an evaluation says.
        warn_of_failures(groups, "eval", may_all_fail=job.policy_version > 0)
        metrics = evaluation_metrics(groups, job.num_rollouts)
        return metrics | {"runtime": time.monotonic() - start}, groups

    async def _run_group(self, job: Job, index: int) -> list[Rollout]:
        """Run the group of this example, and set the advantages of one to train on. Raises
        ServerLostError if rollouts fail because the server is lost.
        """
        job.progress.num_requested += job.num_rollouts
        request = GroupRequest(
            split=job.split,
            index=index,
            num_rollouts=job.num_rollouts,
            model=job.model,
            policy_version=job.policy_version,
            sampling_args=self.sampling[job.split],
            places=self._places,
            timeout_s=self.args.generation_timeout,
            seed=self._group_seed(job.split, job.policy_version, index),
            progress=job.progress,
        )
        group = await self.env.run_group(request)
        job.progress.num_groups += 1
        if any(rollout.error is not None for rollout in group):
            await asyncio.to_thread(self.check_server)
        if job.split == "train":
            try:
                set_advantages(
                    group,
                    self.advantage_fn,
                    mask_truncated=self.args.mask_truncated_completions,
                    zero_truncated=self.args.zero_truncated_completions,
                )
            except ValueError as error:
                raise RolloutError(str(error)) from error
        return group

    # --- Examples and seeds -----------------------------------------------------------------------

    def _first_position(self, step: int) -> int:
        return step * self.args.max_groups_per_batch + self._num_skipped

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return what a run that continues at this step needs, if its steps have more groups, or
        fewer.
        """
        return {"step": step, "first_position": self._first_position(step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the examples behind those of the steps before."""
        per_step = self.args.max_groups_per_batch
        self._num_skipped = state["first_position"] - state["step"] * per_step
        if self._num_skipped:
            logger.warning(
                "the steps of the checkpoint had more or fewer groups (batch_size, "
                "rollouts_per_example, group_filter): this run goes on with the example behind "
                f"them, number {state['first_position']} in the order of examples"
            )

    def _group_seed(self, split: Split, policy_version: int, index: int) -> int | None:
        """Return the seed of a group, or None.

        It follows from the run's seed, the policy version with which the group begins, its example,
        and how often the example has begun before with both. So it depends neither on the other
        groups nor on the order in which they end. With `max_off_policy_steps = 0` a resumed run has
        the seeds that it had. With 1, its first batch is sampled from newer weights. A batch that
        is begun again after a lost server gets other seeds.
        """
        if not self.args.deterministic:
            return None
        place = split, policy_version, index
        self._num_begun[place] += 1
        return derive_seed(self.args.seed, *place, self._num_begun[place])

    # --- The thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and open the environment's client."""
        self._thread = LoopThread("orchestrator")
        self._num_skipped = 0
        self._num_begun.clear()
        self._places = Places(self.args.max_concurrent, self.router)
        deadline_s = max(self.args.generation_timeout, LOAD_S) + GRACE_S
        opening = self._thread.run(self.env.open())
        if not waiting.wait_until(opening.done, "the environment to load", deadline_s):
            raise TimeoutError(f"the environment was not ready within {deadline_s:g} s")
        opening.result()
        gc.collect()
        # Rollouts make thousands of small objects a second, so Python often collects garbage. Each
        # time it would walk all of torch and transformers and stop all threads for half a second.
        gc.freeze()

    def stop(self) -> None:
        """Cancel pending batches, close the environment's client and join the thread."""
        if self._thread is None:
            return
        gc.unfreeze()
        thread, self._thread = self._thread, None
        self._pending, self._evaluation = [], []
        thread.stop(self.env.close)

    def _begin(self, generation: Any) -> Future[Any]:
        assert self._thread is not None, "call start() first"
        return self._thread.run(generation)

    def _result_of(self, job: Job) -> Any:
        """Wait for a job, and say how far it is.

        Raises:
            TimeoutError: neither a rollout nor a group of any job has ended for three times as long
                as one may take, and `GRACE_S`. A rollout may have to wait so long for its place.
        """
        longest_s = 3 * self._group_s + GRACE_S
        num_ended, since = -1, time.monotonic()
        line = waiting.WaitingLine(lambda: f"rollouts: {job.progress}")
        while not wait([job.result], timeout=waiting.POLL_S).done:
            line.show()
            every = [one.progress for one in self._pending + self._evaluation]
            now = sum(progress.num_done + progress.num_groups for progress in every)
            if now != num_ended:
                num_ended, since = now, time.monotonic()
            elif time.monotonic() - since > longest_s:
                raise TimeoutError(
                    f"no rollout has ended within {longest_s:g} s, three times "
                    f"generation_timeout ({self.args.generation_timeout:g} s) or more, "
                    f"{job.progress} are done: does the environment block its event loop?"
                )
        return job.result.result()

    def _on_lost(self, url: str) -> None:
        """On any thread: end the requests that wait for this server."""
        if (thread := self._thread) is not None:
            thread.loop.call_soon_threadsafe(self._places.lose, url)
