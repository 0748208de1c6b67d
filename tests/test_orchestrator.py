import asyncio
import math
import re
from functools import partial

import numpy as np
import pytest
import torch

from tests.conftest import wait_until
from tests.helpers import StubRunner, make_samples
from verifiers_rl.data import first_of_each, order_examples
from verifiers_rl.inference import ServerLostError
from verifiers_rl.orchestrator import RolloutError
from verifiers_rl.process.loop_thread import ExitError
from verifiers_rl.report.means import evaluation_metrics
from verifiers_rl.types import Batch, Rollout

IN_TURN = partial(order_examples, shuffle=False)


def one_step(orchestrator, step=0, version=0):
    orchestrator.submit(step, "policy", version)
    return orchestrator.get()


def evaluate(orchestrator, num_examples, num_rollouts):
    orchestrator.args.eval_examples = num_examples
    orchestrator.args.eval_rollouts_per_example = num_rollouts
    orchestrator.begin_evaluation("policy", 0)
    return orchestrator.end_evaluation()[0]


def advantages(batch):
    return [rollout.advantage for rollout in batch.rollouts]


def examples(batch):
    return [rollout.example_id for rollout in batch.rollouts[::4]]


def failing_at(*places, error=ValueError("broken tool")):  # noqa: B008 - it has no state
    """Rollouts of these numbers in their group fail; the reward of the others is their number."""
    return StubRunner(outcome=lambda index, i: error if i in places else float(i))


def wait_for_rollouts(runner, number):
    wait_until(lambda: runner.in_flight == number, 10)


# --- Advantages -----------------------------------------------------------------------------------


def test_a_batch_holds_groups_with_centered_advantages(make_orchestrator):
    batch = one_step(make_orchestrator(StubRunner()), version=7)
    assert (batch.step, batch.policy_version, len(batch.samples)) == (0, 7, 8)
    assert advantages(batch) == [-1.5, -0.5, 0.5, 1.5] * 2
    for rollout in batch.rollouts:
        for sample in rollout.samples:
            assert set(sample.advantages[sample.loss_mask]) == {rollout.advantage}
    assert batch.metrics["reward"] == 1.5


def test_an_advantage_function_sees_the_rollouts_and_may_give_one_number_a_token(make_orchestrator):
    def later_tokens_count_more(group):
        assert [rollout.reward for rollout in group] == [0.0, 1.0, 2.0]  # of the survivors
        mask = group[1].samples[0].loss_mask
        of_tokens = np.where(mask, np.arange(len(mask)), np.nan)  # NaN without loss: ignored
        return [np.float32(-3.0), torch.from_numpy(of_tokens), 7.0]

    runner, advantage_fn = failing_at(3), later_tokens_count_more
    batch = one_step(make_orchestrator(runner, advantage_fn=advantage_fn, batch_size=4))
    (sample,) = batch.rollouts[1].samples
    expected = np.arange(len(sample.token_ids)) * sample.loss_mask
    assert sample.advantages.tolist() == expected.tolist()
    assert advantages(batch) == pytest.approx([-3.0, expected[sample.loss_mask].mean(), 7.0])


def test_advantages_that_an_environment_has_set_are_kept(make_orchestrator):
    def grade(group):
        group[0].set_advantage(0.25)
        group[0].has_own_advantages = True

    runner = StubRunner(change=grade)
    batch = one_step(make_orchestrator(runner, batch_size=4))
    assert advantages(batch) == [0.25, -0.5, 0.5, 1.5]
    # Which teach something whatever the rewards are.
    never = make_orchestrator(runner, group_filter={"min_reward": 100.0}, batch_size=4)
    assert one_step(never).metrics["filtered_share"] == 0


def last_token_without_number(group):
    (samples,) = zip(*(rollout.samples for rollout in group), strict=True)
    return [np.append(np.zeros(sample.num_tokens - 1), np.nan) for sample in samples]


@pytest.mark.parametrize(
    "advantage_fn, problem",
    [
        (lambda group: [1.0], "returned 1 advantages for 4 rollouts"),
        (lambda group: [math.nan] * 4, "an advantage is nan"),
        (last_token_without_number, "an advantage is nan"),
        (lambda group: [[1.0]] * 4, "1 advantages for a rollout whose samples have"),
        (lambda group: [1e300, -1e300, 0.0, 0.0], r"an advantage is 1e\+300"),
        (lambda group: 2.0, "returned 2.0 for 4 rollouts; expected a list"),
    ],
)
def test_an_advantage_function_that_breaks_its_contract_ends_training(
    make_orchestrator, advantage_fn, problem
):
    with pytest.raises(RolloutError, match=problem):
        one_step(make_orchestrator(StubRunner(), advantage_fn=advantage_fn))


@pytest.mark.parametrize(
    "option, truncated, has_loss",
    [
        (None, [-0.75, -0.75, -0.75, 2.25], True),
        ("zero_truncated_completions", [0.25, 0.25, 0.25, -0.75], True),
        ("mask_truncated_completions", [-0.75, -0.75, -0.75, 2.25], False),
    ],
)
def test_truncated_completions_get_no_reward_or_no_loss(
    make_orchestrator, option, truncated, has_loss
):
    runner = StubRunner(outcome=lambda index, i: "4.0" if i == 3 else 1.0)
    options = {option: True} if option else {}
    batch = one_step(make_orchestrator(runner, batch_size=4, **options))
    assert advantages(batch) == truncated and batch.metrics["truncated_share"] == 0.25
    assert [s.num_loss_tokens > 0 for s in batch.samples] == [True, True, True, has_loss]


# --- Examples -------------------------------------------------------------------------------------


def test_an_example_order_of_ones_own_decides_what_comes_next(make_orchestrator):
    def backwards(positions, sizes):
        return [sizes[0] - 1 - position for position in positions]

    orchestrator = make_orchestrator(StubRunner(num_examples=4), example_order=backwards)
    assert [examples(one_step(orchestrator, step)) for step in range(2)] == [[3, 2], [1, 0]]
    with pytest.raises(RolloutError, match="returned example -1; there are 0 to 3"):
        one_step(orchestrator, 2)


def test_environments_get_their_shares_and_each_its_examples_once_an_epoch():
    order = partial(order_examples, sizes=[6, 4, 10], weights=[3, 1, 2])
    drawn = order(range(600), seed=3)
    parts = [[i for i in drawn if low <= i < high] for low, high in ((0, 6), (6, 10), (10, 20))]
    assert [len(part) for part in parts] == pytest.approx([300, 100, 200], abs=3)
    epochs = parts[1][:4], parts[1][4:8], parts[1][8:12]
    assert all(sorted(epoch) == [6, 7, 8, 9] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]  # each has its own order
    # Where a stretch begins makes no difference.
    assert order(range(50, 60), seed=3) == drawn[50:60]
    assert order(range(600), seed=4) != drawn
    assert IN_TURN(range(12), [10]) == [*range(10), 0, 1]


def test_a_resumed_run_goes_on_with_the_next_examples_also_of_other_batches(
    make_orchestrator, caplog
):
    def resumed(batch_size, state):
        runner = StubRunner(num_examples=100)
        orchestrator = make_orchestrator(runner, batch_size=batch_size, example_order=IN_TURN)
        orchestrator.load_state_dict(state)
        return orchestrator

    state = {"step": 10, "first_position": 40}
    same = resumed(16, state)
    assert not caplog.records and same.state_dict(10) == state
    assert examples(one_step(same, 10)) == [40, 41, 42, 43]
    smaller = resumed(8, state)
    assert "goes on with the example behind them, number 40" in caplog.text
    assert [examples(one_step(smaller, step)) for step in (10, 12)] == [[40, 41], [44, 45]]


# --- The thread -----------------------------------------------------------------------------------


def test_several_batches_are_generated_at_once_on_the_thread_and_taken_in_order(make_orchestrator):
    runner = StubRunner(num_examples=100, delay_s=1.0)
    orchestrator = make_orchestrator(runner)
    for step in range(4):
        orchestrator.submit(step, "policy", policy_version=step)
    batches = [orchestrator.get() for _ in range(4)]
    assert runner.most_in_flight == 32 and runner.threads == {"orchestrator"}
    assert [(batch.step, batch.policy_version) for batch in batches] == [(i, i) for i in range(4)]


def test_earlier_batches_get_the_places_of_max_concurrent_first(make_orchestrator):
    runner, finished = StubRunner(delay_s=0.01), []
    runner.outcome = lambda index, i: finished.append(index) or 1.0
    orchestrator = make_orchestrator(runner, max_concurrent=2, example_order=IN_TURN)
    for step in range(3):
        orchestrator.submit(step, "policy", policy_version=0)
    orchestrator.get()
    assert set(finished[:8]) == {0, 1} and runner.most_in_flight == 2  # step 0's examples
    orchestrator.wait()
    assert orchestrator.num_pending == 2


def test_an_error_is_raised_when_its_batch_is_the_next(make_orchestrator):
    runner = StubRunner(outcome=lambda index, i: ValueError("no tool") if index >= 2 else float(i))
    orchestrator = make_orchestrator(runner, example_order=IN_TURN)
    for step in range(2):
        orchestrator.submit(step, "policy", policy_version=0)
    with pytest.raises(RolloutError, match="no tool"):
        orchestrator.wait()
    assert orchestrator.get().step == 0
    with pytest.raises(RolloutError, match="no tool"):
        orchestrator.get()


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_an_error_of_any_group_is_raised_at_once_with_its_traceback(
    make_orchestrator, is_evaluation
):
    class Broken(StubRunner):
        async def run_group(self, request):
            if request.index == 1:
                raise RuntimeError("a bug in the runner")
            await asyncio.sleep(60)

    orchestrator = make_orchestrator(Broken(), example_order=IN_TURN)
    with pytest.raises(RuntimeError, match="a bug in the runner") as caught:
        evaluate(orchestrator, 4, 1) if is_evaluation else one_step(orchestrator)
    assert "run_group" in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit(), KeyboardInterrupt()]
)
def test_what_ends_a_process_in_code_of_a_user_is_an_error_of_the_batch(make_orchestrator, error):
    def leave(*_):
        raise error

    for runner, own in ((StubRunner(outcome=leave), None), (StubRunner(), leave)):
        with pytest.raises(ExitError, match=re.escape(f"the environment raised {error!r}")):
            one_step(make_orchestrator(runner, advantage_fn=own))


def test_stop_and_giving_up_cancel_what_is_pending(make_orchestrator):
    runner = StubRunner(delay_s=60)
    orchestrator = make_orchestrator(runner, eval_examples=4)
    for end in (orchestrator.discard, orchestrator.stop):
        orchestrator.submit(0, "policy", 0)
        orchestrator.begin_evaluation("policy", 0)
        wait_for_rollouts(runner, 12)
        end()
        wait_for_rollouts(runner, 0)
    assert runner.cancelled == 24 and runner.closed


# --- Deadlines, failures, a lost server -----------------------------------------------------------


def test_rollouts_of_which_none_ends_any_more_are_an_error(make_orchestrator, monkeypatch):
    monkeypatch.setattr("verifiers_rl.orchestrator.GRACE_S", 0.1)
    monkeypatch.setattr("verifiers_rl.process.waiting.POLL_S", 0.05)
    runner = StubRunner(delay_s=60)
    orchestrator = make_orchestrator(runner, generation_timeout=0.1)
    message = r"no rollout has ended within 0\.4 s, .*generation_timeout \(0\.1 s\).* 0 of 8 are"
    with pytest.raises(TimeoutError, match=message):
        one_step(orchestrator)
    orchestrator.discard()
    # Two at a time, each slower than its deadline: the batch takes longer than 0.4 s, and it may.
    runner.delay_s = 0.2
    orchestrator = make_orchestrator(runner, generation_timeout=0.1, max_concurrent=2)
    assert len(one_step(orchestrator).rollouts) == 8


def test_an_errored_rollout_leaves_batch_and_baseline(make_orchestrator, caplog):
    batch = one_step(make_orchestrator(failing_at(3)))
    assert advantages(batch) == [-1.0, 0.0, 1.0] * 2
    assert batch.metrics["error_share"] == 0.25
    assert "2 of 8 rollouts failed and are left out: ValueError: broken tool" in caplog.text


def test_when_all_rollouts_fail_the_first_error_is_chained(make_orchestrator):
    message = "all 8 rollouts failed; most often: ValueError: broken tool"
    with pytest.raises(RolloutError, match=message) as caught:
        one_step(make_orchestrator(failing_at(*range(4))))
    assert isinstance(caught.value.__cause__, ValueError)


def lost():
    raise ServerLostError("no answer from the inference server")


@pytest.mark.parametrize("failed", [(), (1, 2, 3)])
def test_a_batch_of_a_server_that_was_lost_meanwhile_is_not_taken(make_orchestrator, failed):
    runner = failing_at(*failed, error=ConnectionError("refused"))
    orchestrator = make_orchestrator(runner, check_server=lost)
    with pytest.raises(ServerLostError, match="no answer"):
        one_step(orchestrator)
    orchestrator.discard()  # it may come back, and the batch can be asked for again
    orchestrator.check_server = lambda: None
    assert one_step(orchestrator).step == 0


def test_a_server_that_hangs_is_noticed_while_its_rollouts_run(make_orchestrator, monkeypatch):
    monkeypatch.setattr("verifiers_rl.requests.CHECK_S", 0.05)
    looks = iter([False, False, True])
    runner = StubRunner(delay_s=60)
    with pytest.raises(ServerLostError, match="no answer"):
        one_step(make_orchestrator(runner, check_server=lambda: next(looks) and lost()))


def test_rollouts_of_which_none_has_a_token_are_no_batch(make_orchestrator):
    def silence(group):
        for rollout in group[num_speaking:]:
            rollout.samples, rollout.num_turns = [], 0

    runner, num_speaking = StubRunner(change=silence), 1
    batch = one_step(make_orchestrator(runner))
    assert len(batch.samples) == 2 and advantages(batch) == [-1.5, -0.5, 0.5, 1.5] * 2
    num_speaking = 0
    with pytest.raises(RolloutError, match="no agent took a turn in any rollout"):
        one_step(make_orchestrator(runner))


# --- Filters --------------------------------------------------------------------------------------


def solved(index, i):
    """Examples 0, 3, 6 ... are too hard, 1, 4, 7 ... too easy, of the others half is solved."""
    return [0.0, 1.0, float(i % 2)][index % 3]


VARIED = {"min_reward_variance": 1e-6, "max_oversampling": 2}  # groups whose rewards differ pass


@pytest.mark.parametrize(
    "group_filter, kept, generated",
    [
        ({}, [0, 1], 2),
        ({"min_reward_variance": 1e-6}, [2, 5], 6),
        ({"min_reward": 0.1}, [1, 2], 3),
        ({"max_reward": 0.9}, [0, 2], 3),
    ],
)
def test_groups_that_do_not_pass_are_replaced(make_orchestrator, group_filter, kept, generated):
    runner = StubRunner(num_examples=30, outcome=solved)
    group_filter |= {"max_oversampling": 4} if group_filter else {}
    batch = one_step(make_orchestrator(runner, group_filter=group_filter, example_order=IN_TURN))
    assert examples(batch) == kept and batch.metrics["num_samples"] == 8
    assert batch.metrics["filtered_share"] == pytest.approx(1 - 2 / generated)
    # The reward is that of all groups generated, whatever was kept.
    rewards = [solved(index, i) for index in range(generated) for i in range(4)]
    assert batch.metrics["reward"] == pytest.approx(np.mean(rewards))


def test_oversampling_is_bounded_and_steps_do_not_share_examples(make_orchestrator, caplog):
    runner = StubRunner(num_examples=30, outcome=solved)
    orchestrator = make_orchestrator(runner, example_order=IN_TURN, group_filter=VARIED)
    assert examples(one_step(orchestrator)) == [2]  # 5 was not reached
    assert "1 of the 4 groups generated pass, 2 are wanted: loosen group_filter" in caplog.text
    one_step(orchestrator, step=1)
    assert sorted(request.index for request in runner.seen) == [*range(8)]


def test_where_nothing_passes_training_goes_on_without_signal(make_orchestrator):
    """Example 0 fails, which is not replaced; the others do not pass."""
    runner = StubRunner(outcome=lambda index, i: ValueError("x") if index == 0 else 0.5)
    batch = one_step(make_orchestrator(runner, example_order=IN_TURN, group_filter=VARIED))
    assert [request.index for request in runner.seen] == [0, 1, 2, 3]
    assert not batch.samples and batch.metrics["filtered_share"] == 0.75
    assert batch.num_loss_tokens == 0  # so that no step is taken with it


# --- Evaluations ----------------------------------------------------------------------------------


def test_an_evaluation_runs_beside_pending_batches(make_orchestrator):
    class SlowTraining(StubRunner):
        async def run_group(self, request):
            sampling.append((request.split, request.sampling_args["temperature"]))
            if request.split == "train":
                await is_evaluated.wait()
            return await super().run_group(request)

    sampling, is_evaluated = [], asyncio.Event()
    orchestrator = make_orchestrator(
        SlowTraining(), temperature=0.9, eval_sampling={"temperature": 0}
    )
    orchestrator.submit(0, "policy", 0)
    assert evaluate(orchestrator, 4, 2)["num_rollouts"] == 8  # which does not wait for the batch
    orchestrator._thread.loop.call_soon_threadsafe(is_evaluated.set)
    assert orchestrator.get().step == 0
    assert {*sampling} == {("eval", 0), ("train", 0.9)}


def test_means_of_an_evaluation_count_errors_as_zero_and_examples_solved_at_all(make_orchestrator):
    rewards = {0: [0.0, 0.5, 0.9], 1: [0.0, 1.0, 0.0], 2: [ValueError("x"), 1.0, 1.0], 3: [0.0] * 3}
    runner = StubRunner(outcome=lambda index, i: rewards[index][i])
    metrics = evaluate(make_orchestrator(runner), 100, 3)
    means = {"pass@3": 0.5, "num_rollouts": 12, "reward": 4.4 / 12, "error_share": 1 / 12}
    assert {name: metrics[name] for name in means} == pytest.approx(means)
    # An agent of several counts once.
    agents = [Rollout(0, "", role=r, reward=x) for r in ("writer", "critic") for x in (1.0, 0.0)]
    of_agents = {"pass@2": 1.0, "writer/reward": 0.5, "critic/reward": 0.5}
    assert evaluation_metrics([agents], 2).items() >= of_agents.items()


def test_an_evaluation_whose_rollouts_all_fail_ends_only_a_run_that_has_not_trained(
    make_orchestrator,
):
    failing = StubRunner(outcome=lambda *_: ValueError("no judge"))
    orchestrator = make_orchestrator(failing)
    with pytest.raises(RolloutError, match=r"all 4 rollouts of the evaluation failed; .*no judge"):
        evaluate(orchestrator, 4, 1)
    orchestrator.begin_evaluation("policy", policy_version=7)
    metrics, groups = orchestrator.end_evaluation()
    assert [len(group) for group in groups] == [1] * 4
    assert (metrics["reward"], metrics["error_share"]) == (0, 1)


def test_an_evaluation_takes_the_first_examples_of_each_environment():
    assert first_of_each([4, 2, 10], 3) == [0, 1, 2, 4, 5, 6, 7, 8]
    assert first_of_each([0, 2], 5) == [0, 1]


# --- What a batch says of itself ------------------------------------------------------------------


def test_samples_of_one_rollout_are_known_by_its_number():
    rollouts = [Rollout(0, "", samples=make_samples(n, seed=n)) for n in (1, 3, 1, 1)]
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    groups = [rollouts[:2], rollouts[2:]]  # of the same example
    sizes = Batch(0, 0, samples, rollouts, groups=groups).sizes
    assert sizes.rollout_ids.tolist() == [0, 1, 1, 1, 2, 3]
    assert sizes.group_ids.tolist() == [0, 0, 0, 0, 1, 1]
