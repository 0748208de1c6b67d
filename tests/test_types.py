import math

import numpy as np
import pytest

from verifiers_rl.types import Batch, Rollout, Sample, columns_of, join_column


def make_sample(versions=(-1, 0, 0)):
    return Sample([1, 2, 3], [False, True, True], [0.0, -1.0, -1.0], versions)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (([1, 2], [False], [0.0, 0.0], [0, 0]), r"one length.*'loss_mask': \(1,\)"),
        (([1], [False], [0.0], [0], [0.5, 0.5]), r"one length.*'advantages': \(2,\)"),
        (([], [], [], []), "one length >= 1"),
        (np.zeros((4, 2, 3)), "one length"),  # two samples in one
        (([1], [True], [0.0], [0]), "no token comes before"),
    ],
)
def test_columns_that_cannot_be_a_sample_are_refused(columns, problem):
    with pytest.raises(ValueError, match=problem):
        Sample(*columns)


def test_lists_become_arrays_and_arrays_are_kept():
    ids = np.array([1, 2, 3], np.int32)
    sample = Sample(ids, [0, 1, 1], [0, -1, -1], [-1, 0, 0])
    assert sample.token_ids is ids
    columns = [getattr(sample, name) for name in Sample.DTYPES]
    assert [column.dtype for column in columns] == [*Sample.DTYPES.values()]
    assert sum(column.nbytes for column in columns) == 17 * 3
    with pytest.raises(OverflowError):
        Sample([2**31], [False], [0.0], [0])


def test_an_advantage_is_given_to_loss_tokens_only():
    sample = make_sample()
    assert sample.advantages.tolist() == [0.0, 0.0, 0.0]
    sample.set_advantage(0.25)
    assert sample.advantages.tolist() == [0.0, 0.25, 0.25]
    sample.set_advantage([math.nan, 1.0, 2.0])
    assert sample.advantages.tolist() == [0.0, 1.0, 2.0]
    assert sample.advantages.dtype == np.float32
    assert Batch(0, 0, [sample, sample]).num_loss_tokens == 4
    with pytest.raises(ValueError, match="a sample of 3 tokens"):
        sample.set_advantage([1.0])


def test_a_rollouts_advantage_is_the_mean_over_its_loss_tokens():
    rollout = Rollout(0, "", samples=[make_sample(), make_sample()])
    rollout.set_advantage([9.0, 1.0, 2.0, 9.0, 3.0, 6.0])  # the first of each has no loss
    assert rollout.advantage == 3.0
    assert [s.advantages.tolist() for s in rollout.samples] == [[0, 1, 2], [0, 3, 6]]
    empty = Rollout(0, "")
    empty.set_advantage([])
    empty.set_advantage(0.5)
    assert empty.advantage == 0.5
    for wrong, problem in ((rollout, r"1 advantages.* 6 tokens"), (empty, r"1 adv.* 0 tokens")):
        with pytest.raises(ValueError, match=problem):
            wrong.set_advantage([1.0])


def test_columns_of_one_name_have_the_type_that_holds_all_their_numbers():
    columns = [np.arange(3), np.array([0.0, 0.5, 1.0])]
    for order in (columns, columns[::-1]):
        samples = [make_sample() for _ in range(3)]
        for sample, column in zip(samples, order, strict=False):
            sample.extras = {"own": column}
        assert columns_of(samples)["own"] == np.float64
        joined = join_column([(3, sample.extras.get("own")) for sample in samples])
        assert joined[:6].tolist() == np.concatenate(order).tolist()
        assert np.isnan(joined[6:]).all()


def test_a_rollout_left_out_of_the_loss_keeps_its_tokens():
    shared = np.array([False, True, True])
    rollout, other = (
        Rollout(0, "", samples=[Sample([1, 2, 3], shared, [0, -1, -1], [-1, 0, 0])])
        for _ in range(2)
    )
    rollout.set_advantage(1.0)
    rollout.leave_out_of_loss()
    assert rollout.samples[0].num_loss_tokens == 0 and rollout.advantage == 0.0
    assert not rollout.samples[0].advantages.any() and rollout.num_sampled_tokens == 2
    assert other.samples[0].num_loss_tokens == 2  # which had the same array as its mask


def test_staleness_is_measured_over_sampled_tokens():
    batch = Batch(5, 4, [make_sample((-1, 3, 4)), make_sample((-1, 4, 4))])
    assert batch.staleness() == {"staleness": 1.25, "staleness_max": 2.0}
    assert Batch(5, 4, [make_sample((-1, -1, -1))]).staleness() == {}
    assert Batch(5, 4, []).staleness() == {}
