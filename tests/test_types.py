import math

import numpy as np
import pytest

from verifiers_rl.types import Batch, Rollout, Sample, columns_of, join_column


def make_sample(versions=(-1, 0, 0)):
    return Sample([1, 2, 3], [False, True, True], [0.0, -1.0, -1.0], versions)


def test_arrays_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"one length.*'loss_mask': \(1,\)"):
        Sample([1, 2], [False], [0.0, 0.0], [0, 0])
    with pytest.raises(ValueError, match=r"one length.*'advantages': \(2,\)"):
        Sample([1], [False], [0.0], [0], [0.5, 0.5])
    with pytest.raises(ValueError, match="one length >= 1"):
        Sample([], [], [], [])
    with pytest.raises(ValueError, match="one length"):  # two samples in one
        Sample(*np.zeros((4, 2, 3)))


def test_loss_on_the_first_token_is_refused():
    with pytest.raises(ValueError, match="no token comes before"):
        Sample([1], [True], [0.0], [0])


def test_lists_become_arrays_and_arrays_are_kept():
    ids = np.array([1, 2, 3], np.int32)
    sample = Sample(ids, [0, 1, 1], [0, -1, -1], [-1, 0, 0])
    assert sample.token_ids is ids
    found = {name: getattr(sample, name).dtype for name in Sample.DTYPES}
    assert found == {
        "token_ids": np.int32,
        "loss_mask": np.bool_,
        "inference_logprobs": np.float32,
        "policy_versions": np.int32,
        "advantages": np.float32,
    }
    assert sum(getattr(sample, name).nbytes for name in Sample.DTYPES) == 17 * 3
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
    with pytest.raises(ValueError, match=r"5 advantages.* 6 tokens"):
        rollout.set_advantage([0.0] * 5)


def test_a_rollout_without_samples_takes_no_advantages():
    rollout = Rollout(0, "")
    rollout.set_advantage([])
    rollout.set_advantage(0.5)
    assert rollout.advantage == 0.5
    with pytest.raises(ValueError, match=r"1 advantages .* 0 tokens"):
        rollout.set_advantage([1.0])


def test_columns_of_one_name_have_the_type_that_holds_all_their_numbers():
    columns = [np.arange(3), np.array([0.0, 0.5, 1.0]), None]
    samples = [make_sample() for _ in columns]
    for sample, column in zip(samples, columns, strict=True):
        sample.extras = {} if column is None else {"own": column}
    for order in ([0, 1, 2], [1, 0, 2]):
        kept = [samples[i] for i in order]
        assert columns_of(kept)["own"] == np.float64
        joined = join_column([(3, sample.extras.get("own")) for sample in kept])
        expected = [columns[i].tolist() if columns[i] is not None else None for i in order]
        assert [joined[:3].tolist(), joined[3:6].tolist()] == expected[:2]
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
