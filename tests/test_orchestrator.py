import asyncio
import gc
import json
import math
import re
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from tests.helpers import StubRunner, make_samples
from verifiers_rl.advantages import (
    ADVANTAGES,
    center_on_group_mean,
    of_rewards,
    scale_by_group_mean,
)
from verifiers_rl.data import example_index, order_examples
from verifiers_rl.inference.client import ServerLostError
from verifiers_rl.orchestrator import RolloutError
from verifiers_rl.process.loop_thread import ExitError
from verifiers_rl.report.means import batch_metrics, evaluation_metrics
from verifiers_rl.types import Batch, Rollout

IN_TURN = partial(order_examples, shuffle=False)


def test_a_batch_holds_groups_with_centered_advantages(make_orchestrator):
    orchestrator = make_orchestrator(StubRunner())
    orchestrator.submit(0, "policy", policy_version=7)
    batch = orchestrator.get()
    assert (batch.step, batch.policy_version, len(batch.rollouts), len(batch.samples)) == (
        0,
        7,
        8,
        8,
    )
    assert [r.advantage for r in batch.rollouts] == [-1.5, -0.5, 0.5, 1.5] * 2
    for rollout in batch.rollouts:
        for sample in rollout.samples:
            assert {a for a, m in zip(sample.advantages, sample.loss_mask, strict=True) if m} == {
                rollout.advantage
            }
    assert batch.metrics["reward"] == 1.5


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_advantages_are_those_asked_for(make_orchestrator, advantage):
    orchestrator = make_orchestrator(StubRunner(), advantage_fn=of_rewards(ADVANTAGES[advantage]))
    orchestrator.submit(0, "policy", policy_version=0)
    group = orchestrator.get().rollouts[:4]
    expected = ADVANTAGES[advantage](torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64))
    assert [rollout.advantage for rollout in group] == expected.tolist()
    loss_advantages = [rollout.samples[0].advantages[-1] for rollout in group]
    assert loss_advantages == pytest.approx(expected.tolist())


def test_an_advantage_function_sees_the_rollouts_and_may_give_one_number_a_token(make_orchestrator):
    seen = []

    def later_tokens_count_more(group):
        seen.append([rollout.reward for rollout in group])
        numbers = [
            [rollout.reward * t for sample in rollout.samples for t in range(len(sample.token_ids))]
            for rollout in group
        ]
        return [np.array(numbers[0]), torch.tensor(numbers[1]), np.float32(7.0)]

    outcomes = StubRunner(outcome=lambda index, i: ValueError("no") if i == 3 else float(i))
    orchestrator = make_orchestrator(
        outcomes, advantage_fn=later_tokens_count_more, batch_size=4, rollouts_per_example=4
    )
    orchestrator.submit(0, "policy", 0)
    rollouts = orchestrator.get().rollouts
    assert seen == [[0.0, 1.0, 2.0]]  # of the survivors
    (sample,) = rollouts[1].samples
    places = [t for t, has_loss in enumerate(sample.loss_mask) if has_loss]
    expected = [float(t) if t in places else 0.0 for t in range(len(sample.token_ids))]
    assert sample.advantages.tolist() == expected
    assert rollouts[1].advantage == pytest.approx(sum(places) / len(places))
    assert [rollout.advantage for rollout in (rollouts[0], rollouts[2])] == [0.0, 7.0]


def test_advantages_of_a_rollout_in_several_samples_follow_their_tokens():
    rollout = Rollout(0, "", samples=make_samples(2, seed=1))
    lengths = [len(sample.token_ids) for sample in rollout.samples]
    rollout.set_advantage(list(range(sum(lengths))))
    first, second = rollout.samples
    assert first.advantages[-1] == lengths[0] - 1 and second.advantages[-1] == sum(lengths) - 1
    assert first.advantages[0] == second.advantages[0] == 0.0  # no loss there
    with pytest.raises(ValueError, match=f"2 advantages for a rollout .* {sum(lengths)} tokens"):
        rollout.set_advantage([1.0, 2.0])


def test_advantages_that_an_environment_has_set_are_kept(make_orchestrator):
    class Graded(StubRunner):
        async def run_group(self, request):
            group = await super().run_group(request)
            group[0].set_advantage(0.25)
            group[0].has_own_advantages = True
            return group

    orchestrator = make_orchestrator(Graded(), batch_size=4)
    orchestrator.submit(0, "policy", 0)
    assert [rollout.advantage for rollout in orchestrator.get().rollouts] == [0.25, -0.5, 0.5, 1.5]

    class AllGraded(StubRunner):
        async def run_group(self, request):
            group = await super().run_group(request)
            for rollout in group:
                rollout.set_advantage(math.nan)
                rollout.has_own_advantages = True
            return group

    orchestrator = make_orchestrator(AllGraded(), batch_size=4)
    orchestrator.submit(0, "policy", 0)
    with pytest.raises(RolloutError, match="an advantage is nan"):
        orchestrator.get()


@pytest.mark.parametrize(
    ("advantage_fn", "problem"),
    [
        (lambda group: [1.0], "returned 1 advantages for 4 rollouts"),
        (lambda group: [float("nan")] * 4, "an advantage is nan"),
        (lambda group: [[1.0]] * 4, "1 advantages for a rollout whose samples have"),
        (lambda group: [1e300, -1e300, 0.0, 0.0], r"an advantage is 1e\+300; its size must be 1e"),
        (lambda group: [[3e38] * len(r.samples[0].token_ids) for r in group], "is 3e"),
        (lambda group: ["high"] * 4, r"returned \['high', .* for 4 rollouts; expected a list with"),
        (lambda group: 1.0, "returned 1.0 for 4 rollouts; expected a list with a number for each"),
        (lambda group: None, "returned None for 4 rollouts; expected a list"),
        (lambda group: np.float64(2), "returned .*2.0.* for 4 rollouts; expected a list"),
    ],
)
def test_an_advantage_function_that_breaks_its_contract_ends_training(
    make_orchestrator, advantage_fn, problem
):
    orchestrator = make_orchestrator(StubRunner(), advantage_fn=advantage_fn)
    orchestrator.submit(0, "policy", 0)
    with pytest.raises(RolloutError, match=problem):
        orchestrator.get()


def test_an_example_order_of_ones_own_decides_what_comes_next(make_orchestrator):
    runner = StubRunner(num_examples=7)
    orchestrator = make_orchestrator(
        runner, example_order=lambda positions, sizes: [sizes[0] - 1 - p for p in positions]
    )
    for step in range(2):
        orchestrator.submit(step, "policy", 0)
        orchestrator.get()
    assert [index for _, index, *_ in runner.seen] == [6, 5, 4, 3]
    for wrong, problem in (
        (lambda positions, sizes: [0], "returned 1 examples for the 2 positions 0 to 1"),
        (lambda positions, sizes: [0, 7], "returned example 7; there are 0 to 6"),
    ):
        orchestrator = make_orchestrator(runner, example_order=wrong)
        orchestrator.submit(0, "policy", 0)
        with pytest.raises(RolloutError, match=problem):
            orchestrator.get()


def test_samples_of_one_rollout_are_known_by_its_number():
    rollouts = [Rollout(0, "", samples=make_samples(n, seed=n)) for n in (1, 3)]
    batch = Batch(0, 0, [sample for rollout in rollouts for sample in rollout.samples], rollouts)
    assert batch.sizes.rollout_ids.tolist() == [0, 1, 1, 1]
    two = [Rollout(0, "", samples=make_samples(1, seed=n)) for n in range(4)]
    samples = [sample for rollout in two for sample in rollout.samples]
    batch = Batch(0, 0, samples, two, groups=[two[:2], two[2:]])  # of the same example
    assert batch.sizes.group_ids.tolist() == [0, 0, 1, 1]
    assert Batch(0, 0, samples, two).sizes.group_ids.tolist() == [0] * 4
    alone = Batch(0, 0, make_samples(3)).sizes.rollout_ids  # each a rollout of its own
    assert len(set(alone.tolist())) == 3


def test_rollouts_run_on_the_thread_while_the_trainer_goes_on(make_orchestrator):
    runner = StubRunner(delay_s=1.0)
    orchestrator = make_orchestrator(runner)
    start = time.monotonic()
    orchestrator.submit(0, "policy", 0)
    assert time.monotonic() - start < 0.8
    assert orchestrator.num_pending == 1
    orchestrator.get()
    assert runner.threads == {"orchestrator"}
    assert orchestrator.num_pending == 0


def test_several_batches_are_generated_at_once_and_taken_in_order(make_orchestrator):
    runner = StubRunner(num_examples=100, delay_s=0.3)
    orchestrator = make_orchestrator(runner)
    for step in range(4):
        orchestrator.submit(step, "policy", policy_version=step)
    assert orchestrator.num_pending == 4
    batches = [orchestrator.get() for _ in range(4)]
    assert runner.most_in_flight == 32
    assert [(batch.step, batch.policy_version) for batch in batches] == [(i, i) for i in range(4)]
    assert orchestrator.num_pending == 0


def test_earlier_batches_get_their_places_first(make_orchestrator):
    finished = []

    def outcome(index, i):
        finished.append(index)
        return float(i)

    runner = StubRunner(num_examples=100, outcome=outcome, delay_s=0.01)
    orchestrator = make_orchestrator(runner, max_concurrent=2, example_order=IN_TURN)
    for step in range(3):
        orchestrator.submit(step, "policy", policy_version=0)
    orchestrator.get()
    assert set(finished[:8]) == {0, 1}  # step 0's examples
    orchestrator.wait()
    assert orchestrator.num_pending == 2


def test_an_error_is_raised_when_its_batch_is_the_next(make_orchestrator):
    def outcome(index, i):
        return ValueError("broken tool") if index >= 2 else float(i)

    orchestrator = make_orchestrator(StubRunner(outcome=outcome), example_order=IN_TURN)
    for step in range(2):
        orchestrator.submit(step, "policy", policy_version=0)
    with pytest.raises(RolloutError, match="broken tool"):
        orchestrator.wait()
    orchestrator.raise_if_failed()
    assert orchestrator.get().step == 0
    with pytest.raises(RolloutError, match="broken tool"):
        orchestrator.raise_if_failed()


def test_each_epoch_has_each_example_once_in_its_own_order():
    epochs = [[example_index(e * 10 + i, 10, True, seed=3) for i in range(10)] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != [example_index(i, 10, True, seed=4) for i in range(10)]
    assert [example_index(i, 10, False, seed=3) for i in range(12)] == [*range(10), 0, 1]


def test_environments_get_their_shares_and_each_its_examples_once_an_epoch():
    order = partial(order_examples, sizes=[6, 4, 10], weights=[3, 1, 2], seed=3)
    drawn = order(range(600))
    parts = [[i for i in drawn if low <= i < high] for low, high in ((0, 6), (6, 10), (10, 20))]
    assert [len(part) for part in parts] == pytest.approx([300, 100, 200], abs=3)
    assert sorted(parts[1][:4]) == sorted(parts[1][4:8]) == [6, 7, 8, 9]
    # Every stretch has its share, and where it begins makes no difference.
    assert sum(i < 6 for i in drawn[100:120]) == pytest.approx(10, abs=2)
    assert [order(range(p, p + 1))[0] for p in range(50, 60)] == drawn[50:60]
    assert order(range(600), seed=4) != drawn
    alone = order_examples(range(20), [7], seed=3)
    assert alone == [example_index(p, 7, True, 3) for p in range(20)]


def test_resume_sees_the_same_examples(make_orchestrator):
    def examples(steps):
        runner = StubRunner()
        orchestrator = make_orchestrator(runner, example_order=partial(order_examples, seed=5))
        for step in steps:
            orchestrator.submit(step, "policy", step)
            orchestrator.get()
        return [index for _, index, *_ in runner.seen]

    assert examples(range(6))[8:] == examples(range(4, 6))


def test_max_concurrent_bounds_the_rollouts_in_flight(make_orchestrator):
    runner = StubRunner(delay_s=0.02)
    orchestrator = make_orchestrator(runner, max_concurrent=3)
    orchestrator.submit(0, "policy", 0)
    orchestrator.get()
    assert runner.most_in_flight == 3


def test_an_errored_rollout_leaves_batch_and_baseline(make_orchestrator, caplog):
    runner = StubRunner(outcome=lambda index, i: ValueError("broken tool") if i == 3 else float(i))
    orchestrator = make_orchestrator(runner)
    orchestrator.submit(0, "policy", 0)
    batch = orchestrator.get()
    assert [r.advantage for r in batch.rollouts] == [-1.0, 0.0, 1.0] * 2
    assert batch.metrics["error_share"] == 0.25
    assert "2 of 8 rollouts failed and are left out: ValueError: broken tool" in caplog.text


def test_when_all_rollouts_fail_the_first_error_is_chained(make_orchestrator):
    runner = StubRunner(outcome=lambda index, i: ValueError("broken tool"))
    orchestrator = make_orchestrator(runner)
    orchestrator.submit(0, "policy", 0)
    with pytest.raises(
        RolloutError, match="all 8 rollouts failed; most often: ValueError: broken tool"
    ) as caught:
        orchestrator.get()
    assert isinstance(caught.value.__cause__, ValueError)


def lost():
    raise ServerLostError("no answer from the inference server")


def test_a_dead_server_is_told_from_a_failing_environment(make_orchestrator):
    runner = StubRunner(outcome=lambda index, i: ConnectionError("refused") if index else 1.0)
    orchestrator = make_orchestrator(runner, check_server=lost)
    orchestrator.submit(0, "policy", 0)
    with pytest.raises(ServerLostError, match="no answer"):
        orchestrator.get()


def test_a_batch_of_a_server_that_lost_the_policy_meanwhile_is_not_taken(make_orchestrator):
    orchestrator = make_orchestrator(StubRunner(), check_server=lost)
    orchestrator.submit(0, "policy", 0)
    with pytest.raises(ServerLostError):
        orchestrator.get()
    # It may come back: the step under way is not interrupted, and the batch can be asked for again.
    orchestrator.raise_if_failed()
    orchestrator.discard()
    assert orchestrator.num_pending == 0
    orchestrator.check_server = lambda: None
    orchestrator.submit(0, "policy", 0)
    assert orchestrator.get().step == 0


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_a_server_that_hangs_is_noticed_while_its_rollouts_run(
    make_orchestrator, monkeypatch, is_evaluation
):
    monkeypatch.setattr("verifiers_rl.requests.CHECK_S", 0.05)
    runner, looks = StubRunner(delay_s=60), []

    def look():
        looks.append(None)
        if len(looks) == 3:
            lost()

    orchestrator = make_orchestrator(runner, check_server=look)
    start = time.monotonic()
    with pytest.raises(ServerLostError, match="no answer"):
        if is_evaluation:
            orchestrator.begin_evaluation(2, 1, "policy", 0)
            orchestrator.end_evaluation()
        else:
            orchestrator.submit(0, "policy", 0)
            orchestrator.get()
    assert time.monotonic() - start < 10 and len(looks) == 3


def test_a_batch_can_be_given_up_while_it_is_generated(make_orchestrator):
    runner = StubRunner(delay_s=60)
    orchestrator = make_orchestrator(runner)
    orchestrator.submit(0, "policy", 0)
    while runner.in_flight < 8:
        time.sleep(0.01)
    orchestrator.discard()
    deadline = time.monotonic() + 5
    while runner.in_flight:
        assert time.monotonic() < deadline, "the rollouts go on"
        time.sleep(0.01)


def test_rollout_error_reaches_trainer_within_a_second_with_its_traceback(make_orchestrator):
    def outcome(index, i):
        raise RuntimeError("a bug in the runner")

    orchestrator = make_orchestrator(StubRunner(outcome=outcome))
    start = time.monotonic()
    orchestrator.submit(0, "policy", 0)
    with pytest.raises(RuntimeError, match="a bug in the runner") as caught:
        while time.monotonic() - start < 1.0:
            orchestrator.raise_if_failed()
    assert "outcome" in [entry.name for entry in caught.traceback]


def test_stop_cancels_what_is_pending_and_joins_the_thread(make_orchestrator):
    runner = StubRunner(delay_s=60)
    orchestrator = make_orchestrator(runner)
    orchestrator.submit(0, "policy", 0)
    while runner.in_flight < 8:
        time.sleep(0.01)
    start = time.monotonic()
    orchestrator.stop()
    assert time.monotonic() - start < 5
    assert runner.cancelled == 8 and runner.closed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the task's end
def test_stop_leaves_a_task_that_does_not_end_and_closes_the_environment(
    make_orchestrator, monkeypatch, caplog
):
    monkeypatch.setattr("verifiers_rl.process.loop_thread.STOP_DEADLINE_S", 0.2)

    class Stubborn(StubRunner):
        async def run_group(self, request):
            try:
                return await super().run_group(request)
            except asyncio.CancelledError:
                await asyncio.sleep(60)

    runner = Stubborn(delay_s=60)
    orchestrator = make_orchestrator(runner)
    orchestrator.submit(0, "policy", 0)
    while runner.in_flight < 8:
        time.sleep(0.01)
    orchestrator.stop()
    assert runner.closed and "tasks of the environment do not end" in caplog.text
    gc.collect()  # python tells of them here, and not in another test


def test_stop_tells_of_an_environment_that_blocks_the_loop(make_orchestrator, monkeypatch):
    monkeypatch.setattr("verifiers_rl.process.loop_thread.STOP_DEADLINE_S", 0.1)
    is_blocked, is_free = threading.Event(), threading.Event()

    class Blocking(StubRunner):
        async def run_group(self, request):
            is_blocked.set()
            is_free.wait(30)
            return await super().run_group(request)

    orchestrator = make_orchestrator(Blocking())
    loop, thread = orchestrator._thread.loop, orchestrator._thread.thread
    orchestrator.submit(0, "policy", 0)
    assert is_blocked.wait(10)
    with pytest.raises(RuntimeError, match="thread is blocked by an environment"):
        orchestrator.stop()
    orchestrator.stop()  # nothing is left to stop
    is_free.set()
    thread.join(30)
    loop.call_later(0.5, loop.stop)
    loop.run_forever()  # to the end of what was cancelled
    loop.close()


def test_rollouts_of_which_none_ends_any_more_are_an_error(make_orchestrator, monkeypatch):
    monkeypatch.setattr("verifiers_rl.orchestrator.GRACE_S", 0.1)
    monkeypatch.setattr("verifiers_rl.process.waiting.POLL_S", 0.05)
    runner = StubRunner(delay_s=60)
    orchestrator = make_orchestrator(runner, generation_timeout=0.1)
    orchestrator.submit(0, "policy", 0)
    message = r"no rollout has ended within 0\.4 s, .*generation_timeout \(0\.1 s\).* 0 of 8 are"
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=message):
        orchestrator.get()
    assert 0.4 <= time.monotonic() - start < 10
    orchestrator.discard()
    # Two at a time, each slower than its deadline: the batch takes longer than 0.4 s, and it may.
    runner.delay_s = 0.2
    orchestrator = make_orchestrator(runner, generation_timeout=0.1, max_concurrent=2)
    orchestrator.submit(0, "policy", 0)
    assert len(orchestrator.get().rollouts) == 8


def test_the_deadline_counts_from_the_last_rollout_that_has_ended(make_orchestrator, monkeypatch):
    monkeypatch.setattr("verifiers_rl.orchestrator.GRACE_S", 0.1)
    monkeypatch.setattr("verifiers_rl.process.waiting.POLL_S", 0.05)

    class Uneven(StubRunner):
        """Its rollouts end after 0.3 s, and so does the first group, but the second one never."""

        async def run_group(self, request):
            is_first = not self.seen
            group = await super().run_group(request)
            await asyncio.sleep(0 if is_first else 60)
            return group

    orchestrator = make_orchestrator(Uneven(delay_s=0.3), generation_timeout=0.1)
    orchestrator.submit(0, "policy", 0)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="8 of 8 are done"):
        orchestrator.get()
    assert 0.7 <= time.monotonic() - start < 10


def test_zero_truncated_completions_changes_reward_and_baseline(make_orchestrator):
    def advantages(**options):
        runner = StubRunner(outcome=lambda index, i: "4.0" if i == 3 else 1.0)
        orchestrator = make_orchestrator(runner, **options)
        orchestrator.submit(0, "policy", 0)
        return [r.advantage for r in orchestrator.get().rollouts][:4]

    assert advantages() == [-0.75, -0.75, -0.75, 2.25]
    assert advantages(zero_truncated_completions=True) == [0.25, 0.25, 0.25, -0.75]


def test_mask_truncated_completions_leaves_them_in_the_baseline_only(make_orchestrator):
    def batch(**options):
        runner = StubRunner(outcome=lambda index, i: "4.0" if i == 3 else 1.0)
        orchestrator = make_orchestrator(runner, **options)
        orchestrator.submit(0, "policy", 0)
        return orchestrator.get()

    plain, masked = batch(), batch(mask_truncated_completions=True)
    assert [r.advantage for r in plain.rollouts] == [r.advantage for r in masked.rollouts]
    assert all(s.num_loss_tokens for s in plain.samples)
    assert [bool(s.num_loss_tokens) for s in masked.samples] == [True, True, True, False] * 2


def evaluate(orchestrator, *args):
    orchestrator.begin_evaluation(*args)
    return orchestrator.end_evaluation()


def test_evaluation_means_count_errors_as_zero(make_orchestrator):
    runner = StubRunner(outcome=lambda index, i: ValueError("x") if index == 0 else 1.0)
    orchestrator = make_orchestrator(runner)
    metrics = evaluate(orchestrator, 100, 1, "policy", 3)
    assert (
        metrics["reward"] == 0.75
        and metrics["error_share"] == 0.25
        and metrics["num_rollouts"] == 4
    )
    assert {call[0] for call in runner.seen} == {"eval"}


def test_an_evaluation_of_several_rollouts_has_the_share_of_examples_solved_at_all(
    make_orchestrator,
):
    rewards = {0: [0.0, 0.5, 0.9], 1: [0.0, 1.0, 0.0], 2: [ValueError("x"), 1.0, 1.0], 3: [0.0] * 3}
    runner = StubRunner(outcome=lambda index, i: rewards[index][i])
    metrics = evaluate(make_orchestrator(runner), 100, 3, "policy", 0)
    assert metrics["pass@3"] == 0.5 and metrics["num_rollouts"] == 12
    assert metrics["reward"] == pytest.approx(4.4 / 12)
    assert "pass@1" not in evaluate(make_orchestrator(StubRunner()), 100, 1, "policy", 0)


def test_rewards_that_the_advantage_cannot_take_end_training_with_the_reason(make_orchestrator):
    runner = StubRunner(outcome=lambda index, i: i - 1.0)
    orchestrator = make_orchestrator(runner, advantage_fn=of_rewards(scale_by_group_mean))
    orchestrator.submit(0, "policy", 0)
    with pytest.raises(RolloutError, match="needs rewards >= 0, got -1"):
        orchestrator.get()


def test_what_ends_a_process_in_code_of_a_user_is_an_error_of_the_batch(make_orchestrator):
    def leave(group):
        sys.exit(3)

    orchestrator = make_orchestrator(StubRunner(), advantage_fn=leave)
    for error in (leave, asyncio.CancelledError(), GeneratorExit(), KeyboardInterrupt()):
        if error is not leave:
            orchestrator.advantage_fn = of_rewards(center_on_group_mean)
            orchestrator.env.outcome = lambda index, i, error=error: error
        orchestrator.submit(0, "policy", 0)
        said = "SystemExit(3)" if error is leave else repr(error)
        with pytest.raises(ExitError, match=re.escape(f"code of the environment raised {said}")):
            orchestrator.get()
        orchestrator.discard()


def test_rollouts_of_which_none_has_a_token_are_no_batch(make_orchestrator):
    class Silent(StubRunner):
        async def run_group(self, request):
            group = await super().run_group(request)
            for rollout in group[self.num_speaking :]:
                rollout.samples, rollout.num_turns = [], 0
            return group

    runner = Silent()
    runner.num_speaking = 1
    batch = one_step(make_orchestrator(runner))
    assert len(batch.rollouts) == 8 and len(batch.samples) == 2
    assert [rollout.advantage for rollout in batch.rollouts] == [-1.5, -0.5, 0.5, 1.5] * 2
    runner.num_speaking = 0
    with pytest.raises(RolloutError, match="no agent took a turn in any rollout"):
        one_step(make_orchestrator(runner))


# --- Filters --------------------------------------------------------------------------------------


def solved(index, i):
    """Examples 0, 3, 6 ... are too hard, 1, 4, 7 ... too easy, of the others half is solved."""
    return [0.0, 1.0, float(i % 2)][index % 3]


def varied(max_oversampling):
    """Lets groups pass whose rewards differ."""
    return {"min_reward_variance": 1e-6, "max_oversampling": max_oversampling}


def one_step(orchestrator, step=0):
    orchestrator.submit(step, "policy", 0)
    return orchestrator.get()


@pytest.mark.parametrize(
    ("group_filter", "kept", "generated"),
    [
        ({}, [0, 1], 2),
        ({"min_reward_variance": 1e-6}, [2, 5], 6),
        ({"min_reward": 0.1}, [1, 2], 3),
        ({"max_reward": 0.9}, [0, 2], 3),
        ({"min_reward": 0.1, "max_reward": 0.9}, [2, 5], 6),
    ],
)
def test_groups_that_do_not_pass_are_replaced(make_orchestrator, group_filter, kept, generated):
    runner = StubRunner(num_examples=30, outcome=solved)
    group_filter |= {"max_oversampling": 4} if group_filter else {}
    orchestrator = make_orchestrator(runner, group_filter=group_filter, example_order=IN_TURN)
    batch = one_step(orchestrator)
    assert [rollout.example_id for rollout in batch.rollouts[::4]] == kept
    assert len(batch.samples) == batch.metrics["num_samples"] == 8
    assert sorted(call[1] for call in runner.seen) == list(range(generated))
    assert batch.metrics["filtered_share"] == pytest.approx(1 - 2 / generated)
    # The reward is that of all groups generated, whatever was kept.
    rewards = [solved(index, i) for index in range(generated) for i in range(4)]
    assert batch.metrics["reward"] == pytest.approx(sum(rewards) / len(rewards))


def test_oversampling_is_bounded_and_steps_do_not_share_examples(make_orchestrator, caplog):
    runner = StubRunner(num_examples=30, outcome=solved)
    orchestrator = make_orchestrator(runner, example_order=IN_TURN, group_filter=varied(2))
    first = one_step(orchestrator)
    assert sorted(call[1] for call in runner.seen) == [0, 1, 2, 3]
    assert [rollout.example_id for rollout in first.rollouts[::4]] == [2]  # 5 was not reached
    assert "1 of the 4 groups generated pass, 2 are wanted: loosen group_filter" in caplog.text
    assert "min_reward_variance=1e-06" in caplog.text
    runner.seen.clear()
    one_step(orchestrator, step=1)
    assert sorted(call[1] for call in runner.seen) == [4, 5, 6, 7]


@pytest.mark.parametrize("group_filter", [{"min_reward_variance": 100.0}, {"max_reward": 0.1}])
def test_where_nothing_passes_training_goes_on_without_signal(make_orchestrator, group_filter):
    runner = StubRunner(outcome=lambda index, i: float(i))
    group_filter = {**group_filter, "max_oversampling": 1.5}
    batch = one_step(make_orchestrator(runner, group_filter=group_filter))
    assert len(runner.seen) == 3
    assert len(batch.samples) == 8 and batch.metrics["filtered_share"] == 1.0
    assert not any(rollout.advantage for rollout in batch.rollouts)
    assert not any(any(sample.advantages) for sample in batch.samples)
    assert batch.num_loss_tokens == 0  # so that no step is taken with it


def test_waiting_says_how_many_rollouts_are_done(make_orchestrator, monkeypatch, capfd):
    # Lines at 0.2, 0.4 and 0.8 s; of the rollouts, half end after 0.6 s and half after 1.2 s.
    monkeypatch.setattr("verifiers_rl.process.waiting.QUIET_S", 0.2)
    monkeypatch.setattr("verifiers_rl.process.waiting.POLL_S", 0.05)
    runner = StubRunner(delay_s=0.6)
    orchestrator = make_orchestrator(runner, max_concurrent=4)
    one_step(orchestrator)
    assert "waiting for rollouts: 0 of 8 after 0 s" in capfd.readouterr().err
    evaluate(orchestrator, 2, 4, "policy", 0)
    assert "waiting for rollouts: 4 of 8 after 1 s" in capfd.readouterr().err
    monkeypatch.setattr("verifiers_rl.process.waiting.QUIET_S", 5.0)
    runner.delay_s = 0.0
    one_step(orchestrator, step=1)
    assert capfd.readouterr().err == ""


def test_a_group_that_failed_is_no_batch(make_orchestrator):
    """Example 0 fails, which is not replaced; the others do not pass."""
    runner = StubRunner(outcome=lambda index, i: ValueError("x") if index == 0 else 0.5)
    batch = one_step(make_orchestrator(runner, example_order=IN_TURN, group_filter=varied(2)))
    assert [call[1] for call in runner.seen] == [0, 1, 2, 3]
    assert len(batch.samples) == 8 and {r.example_id for r in batch.rollouts} == {1, 2}


def test_an_environment_that_always_fails_is_not_asked_for_more(make_orchestrator):
    runner = StubRunner(outcome=lambda index, i: ValueError("x"))
    with pytest.raises(RolloutError, match="all 8 rollouts failed"):
        one_step(make_orchestrator(runner, group_filter=varied(10)))


def test_no_replacement_begins_after_the_deadline_of_one_rollout(make_orchestrator):
    runner = StubRunner(outcome=lambda index, i: 0.5, delay_s=0.5)
    batch = one_step(make_orchestrator(runner, generation_timeout=0.9, group_filter=varied(20)))
    assert len(runner.seen) == 4  # two at 0 s, two at 0.5 s, none at 1 s
    assert len(batch.samples) == 8


def test_a_server_lost_while_groups_are_replaced_ends_the_batch(make_orchestrator):
    lost = []

    def outcome(index, i):
        return ConnectionError("gone") if len(runner.seen) > 3 else 0.5

    def check_server():
        if len(runner.seen) > 3:
            lost.append(True)
            raise ServerLostError("gone")

    runner = StubRunner(outcome=outcome)
    with pytest.raises(ServerLostError):
        one_step(make_orchestrator(runner, check_server, group_filter=varied(20)))
    assert lost


def test_a_batch_of_failures_truncations_and_survivors_adds_up(make_orchestrator):
    """200 rollouts, 10 % errors, 10 % truncated: the baselines are those of the survivors."""

    def outcome(index, i):
        number = (index * 4 + i) % 10
        if number == 3:
            return ValueError("broken")
        return "2.0" if number == 7 else float(i)

    orchestrator = make_orchestrator(
        StubRunner(num_examples=50, outcome=outcome), batch_size=200, example_order=IN_TURN
    )
    batch = one_step(orchestrator)
    assert len(batch.rollouts) == len(batch.samples) == 180
    assert batch.metrics["error_share"] == pytest.approx(0.1)
    assert batch.metrics["truncated_share"] == pytest.approx(20 / 180)
    for index in range(50):
        group = [rollout for rollout in batch.rollouts if rollout.example_id == index]
        mean = sum(rollout.reward for rollout in group) / len(group)
        assert [r.advantage for r in group] == pytest.approx([r.reward - mean for r in group])


def test_k_of_pass_at_k_counts_failed_rollouts_and_an_agent_once():
    def group(*rewards, role=""):
        errors = [ValueError("x") if reward is None else None for reward in rewards]
        return [
            Rollout(0, "", role=role, reward=reward or 0.0, error=error)
            for reward, error in zip(rewards, errors, strict=True)
        ]

    assert evaluation_metrics([group(None, 0.0, 1.0), group(0.0, 0.0, 0.0)])["pass@3"] == 0.5
    both = [*group(1.0, 0.0, role="writer"), *group(1.0, 0.0, role="critic")]
    assert evaluation_metrics([both])["pass@2"] == 1.0


def test_rewards_of_numpy_become_numbers_that_json_has():
    rollouts = [Rollout(0, "", reward=np.float32(0.5), metrics={"exact": np.float32(1.0)})]
    assert json.loads(json.dumps(evaluation_metrics([rollouts])))["reward"] == 0.5
    assert json.loads(json.dumps(batch_metrics([rollouts])))["reward"] == 0.5
