import asyncio
from functools import partial

import pytest

from tests.helpers import StubRunner
from verifiers_rl.data import first_of_each, order_examples
from verifiers_rl.orchestrator import RolloutError

IN_TURN = partial(order_examples, shuffle=False)


def evaluate(orchestrator, *args):
    orchestrator.begin_evaluation(*args)
    return orchestrator.end_evaluation()


class SlowTraining(StubRunner):
    """A group for training takes the seconds of its example, and one of an evaluation none."""

    def __init__(self, seconds, outcome=None):
        super().__init__(outcome=outcome)
        self.seconds = seconds
        self.sampling = []

    async def run_group(self, request):
        self.sampling.append((request.split, request.sampling_args))
        group = await super().run_group(request)
        await asyncio.sleep(self.seconds(request.index) if request.split == "train" else 0.0)
        return group


def test_an_error_of_any_group_is_raised_while_others_still_run(make_orchestrator):
    def outcome(index, i):
        if index == 1:
            raise RuntimeError("a bug in the runner")
        return float(i)

    runner = SlowTraining(lambda index: 60.0, outcome)
    orchestrator = make_orchestrator(runner, example_order=IN_TURN)
    orchestrator.submit(0, "policy", 0)
    orchestrator.submit(1, "policy", 0)
    with pytest.raises(RuntimeError, match="a bug in the runner"):
        orchestrator.get()


def test_a_run_of_other_batches_goes_on_behind_the_examples_of_its_checkpoint(
    make_orchestrator, caplog
):
    def of_size(batch_size):
        runner = StubRunner(num_examples=100)
        return make_orchestrator(runner, batch_size=batch_size, example_order=IN_TURN)

    def examples_of(orchestrator, step):
        orchestrator.submit(step, "policy", 0)
        return [rollout.example_id for rollout in orchestrator.get().rollouts[::4]]

    state = of_size(16).state_dict(10)  # 40 examples
    same, smaller, again = (of_size(size) for size in (16, 8, 32))
    same.load_state_dict(state)
    assert not caplog.records
    smaller.load_state_dict(state)
    assert "goes on with the example behind them, number 40" in caplog.text
    assert examples_of(same, 10) == [40, 41, 42, 43]
    assert [examples_of(smaller, step) for step in (10, 12)] == [[40, 41], [44, 45]]
    again.load_state_dict(smaller.state_dict(13))
    assert examples_of(again, 13)[0] == 46


# --- Evaluations ----------------------------------------------------------------------------------


def test_an_evaluation_runs_beside_pending_batches(make_orchestrator):
    runner = SlowTraining(lambda index: 1.0)
    orchestrator = make_orchestrator(runner, temperature=0.9, eval_sampling={"temperature": 0})
    orchestrator.submit(0, "policy", 0)
    metrics = evaluate(orchestrator, 4, 2, "policy", 3)
    assert not orchestrator._pending[0].result.done()  # it did not wait for the batch
    assert metrics["num_rollouts"] == 8 and 0 <= metrics["runtime"] < 1.0
    assert orchestrator.get().step == 0
    assert {(split, args["temperature"]) for split, args in runner.sampling} == {
        ("eval", 0),
        ("train", 0.9),
    }


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
    orchestrator._evaluation[0].result.exception(timeout=30)
    with pytest.raises(RolloutError, match="all 4 rollouts failed"):
        orchestrator.raise_if_failed()


def test_an_evaluation_takes_the_first_examples_of_each_environment():
    assert first_of_each([4, 2, 10], 3) == [0, 1, 2, 4, 5, 6, 7, 8]
    assert first_of_each([0, 2], 5) == [0, 1]
