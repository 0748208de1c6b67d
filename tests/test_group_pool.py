import asyncio
import random
from functools import partial
from itertools import chain

import numpy as np
import pytest

from tests.helpers import StubRunner, make_samples
from verifiers_rl.data import GroupFilter, examples_at, first_of_each, order_examples
from verifiers_rl.group_pool import GroupRequest, choose_ready
from verifiers_rl.inference.client import ServerLostError
from verifiers_rl.orchestrator import RolloutError
from verifiers_rl.positions import Positions
from verifiers_rl.types import Progress, Slots

IN_TURN = partial(order_examples, shuffle=False)


def evaluate(orchestrator, *args):
    orchestrator.begin_evaluation(*args)
    return orchestrator.end_evaluation()


class TimedRunner(StubRunner):
    """Groups take the seconds of their example, and their tokens have the version of their
    beginning.
    """

    def __init__(self, seconds, num_examples=1000, outcome=None):
        super().__init__(num_examples, outcome)
        self.seconds = seconds
        self.versions = {}
        self.sampling = []

    async def run_group(self, split, index, num_rollouts, model, sampling, version, slots):
        self.delay_s = 0.0
        self.versions.setdefault(index, version)
        self.sampling.append((split, sampling))
        group = await super().run_group(split, index, num_rollouts, model, sampling, version, slots)
        await asyncio.sleep(self.seconds(index) if split == "train" else 0.0)
        for rollout in group:
            rollout.samples = make_samples(1, seed=index, version=version)
        return group


def train(orchestrator, num_steps, ahead, first=0):
    """Ask for batches as the trainer does, and yield them."""
    for step in range(first, num_steps):
        if not orchestrator.num_pending:
            orchestrator.submit(step, "policy", step)
        batch = orchestrator.get()
        begin = step + 1 + orchestrator.num_pending
        for later in range(begin, min(step + ahead, num_steps - 1) + 1):
            orchestrator.submit(later, "policy", step)
        yield batch


def examples_of(batch):
    return sorted({rollout.example_id for rollout in batch.rollouts})


def flat(lists):
    return list(chain.from_iterable(lists))


READY = {"batch_order": "ready", "example_order": IN_TURN}


def requests(*groups):
    """Requests from (version, is complete) pairs; a version of None: not begun."""
    made = []
    for version, is_complete in groups:
        request = GroupRequest(0, "policy", iter(()), 0.0, Progress(Slots(1)))
        request.policy_version, request.is_complete = version, is_complete
        made.append(request)
    return made


@pytest.mark.parametrize(
    ("groups", "chosen"),
    [
        # Of one group a batch, at most 3 steps old, for step 2. One is missing: nothing is ready.
        ([(0, False), (0, False), (1, False)], None),
        # Both of version 0 must be trained by step 3, which has room for one: wait for one of them.
        ([(0, False), (0, False), (1, True)], None),
        ([(0, True), (0, False), (1, True)], [0]),
        # The one left behind of version 0 fits into step 3.
        ([(0, False), (1, True), (1, False)], [1]),
        ([(0, False), (1, True), (None, False)], [1]),
        # The oldest of those that are complete goes first.
        ([(1, True), (0, True), (2, False)], [1]),
    ],
)
def test_a_ready_batch_leaves_no_group_that_would_become_too_old(groups, chosen):
    made = requests(*groups)
    got = choose_ready(made, step=2, num_groups=1, max_off_policy_steps=3)
    assert got == (chosen if chosen is None else [made[place] for place in chosen])


def test_a_ready_batch_does_not_wait_for_a_slow_group_which_joins_a_later_one(make_orchestrator):
    runner = TimedRunner(lambda index: 0.4 if index == 2 else 0.0)
    orchestrator = make_orchestrator(runner, max_off_policy_steps=3, **READY)
    batches = train(orchestrator, 4, ahead=3)
    assert examples_of(next(batches)) == [0, 1]  # alone in the pool at step 0
    second = next(batches)
    assert examples_of(second) == [3, 4]
    rest = [examples_of(batch) for batch in batches]
    assert sorted(flat(rest)) == [2, 5, 6, 7]
    assert second.metrics["late_group_share"] == 0.0


def test_a_late_group_is_counted_and_keeps_the_version_of_its_tokens(make_orchestrator):
    runner = TimedRunner(lambda index: 0.3 if index == 2 else 0.0)
    orchestrator = make_orchestrator(runner, max_off_policy_steps=2, **READY)
    batches = list(train(orchestrator, 4, ahead=2))
    (late,) = [batch for batch in batches if 2 in examples_of(batch)]
    assert late.step == 2  # begun at version 0, so no later
    assert late.policy_version == 0 and late.metrics["late_group_share"] == 0.5
    assert late.staleness()["staleness_max"] == 2.0
    versions = {v for sample in late.samples for v in sample.policy_versions if v >= 0}
    assert versions == {0, runner.versions[examples_of(late)[1]]}


@pytest.mark.parametrize("ahead", [0, 1])
def test_with_at_most_one_batch_ahead_ready_batches_are_the_planned_ones(make_orchestrator, ahead):
    def batches(order):
        runner = TimedRunner(lambda index: 0.05 if index % 3 == 0 else 0.0)
        options = {"batch_order": order, "max_off_policy_steps": ahead, "example_order": IN_TURN}
        return [examples_of(b) for b in train(make_orchestrator(runner, **options), 5, ahead)]

    assert batches("ready") == batches("planned") == [[2 * k, 2 * k + 1] for k in range(5)]


def test_lengths_of_trained_rollouts_are_not_biased(make_orchestrator):
    """A group takes as long as its answers are. If late groups were dropped, or trained later and
    later, long answers would be rarer among those trained than among those begun.
    """
    num_steps, ahead, num_groups = 60, 3, 4
    rng = random.Random(0)
    lengths = [rng.choice([1, 1, 2, 2, 3, 5, 8, 20]) for _ in range(num_steps * num_groups)]
    runner = TimedRunner(lambda index: 0.002 * lengths[index])
    orchestrator = make_orchestrator(
        runner, batch_size=16, max_off_policy_steps=ahead, max_concurrent=24, **READY
    )
    trained = []
    for batch in train(orchestrator, num_steps, ahead):
        trained.append(examples_of(batch))
        assert len(trained[-1]) == num_groups
        assert batch.staleness()["staleness_max"] <= ahead
        begun = {call[1] for call in runner.seen}
        assert set(flat(trained)) <= begun
    everything = flat(trained)
    assert sorted(everything) == list(range(num_steps * num_groups))  # each exactly once
    # Without the beginning and the end, where the pool fills and empties.
    middle = [lengths[index] for indices in trained[5:-5] for index in indices]
    error = np.std(lengths) / len(middle) ** 0.5
    assert abs(np.mean(middle) - np.mean(lengths)) < 3 * error
    # It was not the planned order, so something was to be tested.
    assert any(indices != list(range(4 * k, 4 * k + 4)) for k, indices in enumerate(trained))


def test_a_ready_group_begins_only_while_a_place_is_free(make_orchestrator):
    """Two of 4 rollouts fit at once; with "planned" all six groups begin, and wait for places."""

    def begun(order):
        runner = StubRunner(num_examples=100, delay_s=60)
        options = {"batch_order": order, "max_off_policy_steps": 3, "max_concurrent": 8}
        orchestrator = make_orchestrator(runner, **options)
        for step in range(3):
            orchestrator.submit(step, "policy", 0)
        deadline = asyncio.run_coroutine_threadsafe(asyncio.sleep(0.2), orchestrator._thread.loop)
        deadline.result(timeout=30)
        return len(runner.seen)

    assert begun("planned") == 6
    assert begun("ready") == 2


def test_a_resumed_ready_run_trains_every_example_once(make_orchestrator):
    """Saved after 6 steps: the next batch may be taken already, and is not trained yet."""

    def seconds(index):
        return 0.05 if index % 5 == 2 else 0.0

    for num_taken in (6, 7):
        first = make_orchestrator(TimedRunner(seconds), max_off_policy_steps=3, **READY)
        batches = train(first, 12, ahead=3)
        before = flat(examples_of(next(batches)) for _ in range(num_taken))[:12]
        state = first.state_dict(6)
        assert not set(state["untrained"]) & set(before)
        second = make_orchestrator(TimedRunner(seconds), max_off_policy_steps=3, **READY)
        second.load_state_dict(state)
        after = flat(examples_of(batch) for batch in train(second, 12, 3, first=6))
        assert sorted(before + after) == list(range(24))
    fresh = make_orchestrator(TimedRunner(seconds), max_off_policy_steps=3, **READY)
    fresh.load_state_dict({})  # of a "planned" run
    assert examples_of(next(train(fresh, 12, 3, first=6))) == [12, 13]


def test_a_planned_run_of_other_batches_goes_on_behind_the_examples_of_its_checkpoint(caplog):
    before = Positions("planned", IN_TURN, 4)
    state = before.state_dict(10)  # 40 examples
    same, smaller, ready = (Positions("planned", IN_TURN, 4), Positions("planned", IN_TURN, 2),
                            Positions("ready", IN_TURN, 2))  # fmt: skip
    same.load_state_dict(state)
    assert not caplog.records
    smaller.load_state_dict(state)
    assert "goes on with the example behind them, number 40" in caplog.text
    ready.load_state_dict(state)
    for positions, drawn in ((same, [40, 41, 42, 43]), (smaller, [40, 41]), (ready, [40, 41])):
        assert [position for position, _ in positions.examples_of(10, [100])] == drawn
    assert [position for position, _ in smaller.examples_of(12, [100])] == [44, 45]
    again = Positions("planned", IN_TURN, 8)
    again.load_state_dict(smaller.state_dict(13))
    assert next(again.examples_of(13, [100]))[0] == 46


def test_after_a_lost_server_ready_groups_begin_again(make_orchestrator):
    lost = []

    def check_server():
        if lost:
            raise ServerLostError("gone")

    runner = TimedRunner(lambda index: 0.02 if index % 3 == 0 else 0.0)
    orchestrator = make_orchestrator(runner, check_server, max_off_policy_steps=3, **READY)
    batches = train(orchestrator, 6, ahead=3)
    trained = examples_of(next(batches)) + examples_of(next(batches))
    lost.append(True)
    with pytest.raises(ServerLostError):
        for batch in batches:
            trained += examples_of(batch)
    lost.clear()
    step = len(trained) // 2
    orchestrator.discard()
    for batch in train(orchestrator, 6, 3, first=step):
        trained += examples_of(batch)
    assert sorted(trained) == list(range(12))


def test_rejected_groups_are_replaced_in_ready_batches_and_bounded(make_orchestrator):
    # A third can be learned from. At random: submissions take positions in turn, so a fixed period
    # could give all the good ones to the others.
    def is_good(index):
        return random.Random(index).random() < 1 / 3

    def outcome(index, i):
        return float(i % 2) if is_good(index) else 1.0

    options = {"group_filter": GroupFilter(min_reward_variance=1e-6), "max_off_policy_steps": 2}
    runner = TimedRunner(lambda index: 0.0, outcome=outcome)
    orchestrator = make_orchestrator(runner, max_groups=50, **options, **READY)
    batches = list(train(orchestrator, 5, ahead=2))
    trained = flat(examples_of(batch) for batch in batches)
    assert len(trained) == 10 and all(map(is_good, trained))
    assert len(set(trained)) == 10
    assert any(batch.metrics["filtered_share"] > 0 for batch in batches)
    seen = [call[1] for call in runner.seen]
    assert sorted(seen) == list(range(len(seen)))  # no position is left out or used twice
    # A submission has 4 groups at most, so two of its rejected ones are replaced.
    runner = TimedRunner(lambda index: 0.0, outcome=lambda index, i: 1.0)
    orchestrator = make_orchestrator(runner, max_groups=4, **options, **READY)
    batches = list(train(orchestrator, 3, ahead=2))
    assert len(runner.seen) == 12 and not any(batch.num_loss_tokens for batch in batches)


@pytest.mark.parametrize("order", ["planned", "ready"])
def test_an_error_of_any_group_is_raised_while_others_still_run(make_orchestrator, order):
    def outcome(index, i):
        if index == 1:
            raise RuntimeError("a bug in the runner")
        return float(i)

    runner = TimedRunner(lambda index: 60.0, outcome=outcome)
    orchestrator = make_orchestrator(
        runner, batch_order=order, max_off_policy_steps=2, example_order=IN_TURN
    )
    orchestrator.submit(0, "policy", 0)
    orchestrator.submit(1, "policy", 0)
    with pytest.raises(RuntimeError, match="a bug in the runner"):
        orchestrator.get()


def test_an_order_that_breaks_its_contract_ends_a_ready_run_too(make_orchestrator):
    options = {"batch_order": "ready", "max_off_policy_steps": 2}
    orchestrator = make_orchestrator(
        StubRunner(7), example_order=lambda positions, sizes: [7], **options
    )
    orchestrator.submit(0, "policy", 0)
    with pytest.raises(RolloutError, match="returned example 7; there are 0 to 6"):
        orchestrator.get()


def test_positions_are_those_of_planned_steps_until_something_is_late():
    order = partial(examples_at, IN_TURN)
    planned, ready = (Positions(name, IN_TURN, 2) for name in ("planned", "ready"))
    for step in (3, 4):
        expected = list(zip(range(2 * step, 2 * step + 2), order(range(2 * step, 2 * step + 2),
                                                                 [100]), strict=True))  # fmt: skip
        assert list(planned.examples_of(step, [100])) == expected
        assert list(ready.examples_of(step, [100])) == expected


# --- Evaluations ----------------------------------------------------------------------------------


def test_an_evaluation_runs_beside_pending_batches(make_orchestrator):
    runner = TimedRunner(lambda index: 1.0)
    orchestrator = make_orchestrator(runner, eval_sampling_args={"temperature": 0.0})
    orchestrator.submit(0, "policy", 0)
    metrics = evaluate(orchestrator, 4, 2, "policy", 3)
    assert not orchestrator._pending[0][0].done()  # it did not wait for the batch
    assert metrics["num_rollouts"] == 8 and 0 <= metrics["runtime"] < 1.0
    assert orchestrator.get().step == 0
    assert {args.get("temperature") for split, args in runner.sampling if split == "eval"} == {0.0}
    assert {len(args) for split, args in runner.sampling if split == "train"} == {0}


def test_eval_concurrent_bounds_the_rollouts_of_an_evaluation(make_orchestrator):
    def most(num, **options):
        runner = StubRunner(delay_s=0.02)
        evaluate(make_orchestrator(runner, **options), 4, num, "policy", 0)
        return runner.most_in_flight

    assert most(4) == 16
    assert most(4, eval_concurrent=3) == 3
    assert most(4, eval_concurrent=3, max_concurrent=2) == 2


def test_places_of_a_share_are_given_back_whatever_happens():
    async def use():
        slots, share = Slots(4), Slots(2)
        progress = Progress(slots, share=share)
        async with progress.several(2):
            assert share.locked() and not slots.locked()
            waiting = asyncio.create_task(progress.__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        async with progress, progress:
            assert share.locked()
        await slots.acquire()  # full but for the share's
        for _ in range(3):
            await slots.acquire()
        waiting = asyncio.create_task(progress.__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert share._value == 2 and progress.num_done == 4

    asyncio.run(use())


def test_a_discarded_evaluation_ends_and_another_can_begin(make_orchestrator):
    runner = StubRunner(delay_s=60)
    orchestrator = make_orchestrator(runner)
    orchestrator.begin_evaluation(4, 1, "policy", 0)
    orchestrator.discard()
    runner.delay_s = 0.0
    assert evaluate(orchestrator, 4, 1, "policy", 1)["num_rollouts"] == 4


def test_an_evaluation_that_fails_is_known_before_it_is_awaited(make_orchestrator):
    runner = StubRunner(outcome=lambda index, i: ValueError("broken tool"))
    orchestrator = make_orchestrator(runner)
    orchestrator.begin_evaluation(4, 1, "policy", 0)
    with pytest.raises(RolloutError, match="all 4 rollouts failed"):
        orchestrator.end_evaluation()
    orchestrator.begin_evaluation(4, 1, "policy", 0)
    future, _ = orchestrator._evaluation
    future.exception(timeout=30)
    with pytest.raises(RolloutError, match="all 4 rollouts failed"):
        orchestrator.raise_if_failed()


def test_an_evaluation_takes_the_first_examples_of_each_environment():
    assert first_of_each([4, 2, 10], 3) == [0, 1, 2, 4, 5, 6, 7, 8]
    assert first_of_each([0, 2], 5) == [0, 1]
