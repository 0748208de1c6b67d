import numpy as np
import pytest

from verifiers_rl.types import Rollout, Sample


@pytest.mark.parametrize(
    "columns, problem",
    [
        (([1, 2], [False], [0.0, 0.0], [0, 0]), r"one length.*'loss_mask': \(1,\)"),
        (([1], [False], [0.0], [0], [0.5, 0.5]), r"one length.*'advantages': \(2,\)"),
        (([], [], [], []), "one length >= 1"),
        (([1], [True], [0.0], [0]), "no token comes before"),
    ],
)
def test_columns_that_cannot_be_a_sample_are_refused(columns, problem):
    with pytest.raises(ValueError, match=problem):
        Sample(*columns)


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
