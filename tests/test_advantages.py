import pytest
import torch

from verifiers_rl.advantages import ADVANTAGES, check_magnitude
from verifiers_rl.types import LARGEST_REWARD


def advantages(name, rewards):
    return ADVANTAGES[name](torch.tensor(rewards, dtype=torch.float64)).tolist()


@pytest.mark.parametrize(
    "name, rewards, expected",
    [
        ("mean", [1.0, 0.0, 0.5, 0.5], [0.5, -0.5, 0.0, 0.0]),
        # deviations 3, -1, -1, -1: variance 12 / 3, std 2
        ("std", [4.0, 0.0, 0.0, 0.0], [1.5, -0.5, -0.5, -0.5]),
        # the mean of the other three
        ("leave_one_out", [1.0, 0.0, 0.5, 0.5], [2 / 3, -2 / 3, 0.0, 0.0]),
        ("maxrl", [1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
    ],
)
def test_advantages_equal_those_worked_out_by_hand(name, rewards, expected):
    assert advantages(name, rewards) == pytest.approx(expected, rel=1e-5, abs=1e-12)
    # Exactly: those of equal rewards and of a single survivor are not computed.
    for equal in ([0.7] * 3, [0.1] * 15, [0.0] * 3, [1.0]):
        assert advantages(name, equal) == [0.0] * len(equal)


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ValueError, match=r"needs rewards >= 0, got -0.5.*advantage='mean'"):
        advantages("maxrl", [1.0, -0.5])


def test_rewards_that_pass_give_advantages_that_pass():
    largest = LARGEST_REWARD
    first, _ = advantages("leave_one_out", [largest, -largest])
    check_magnitude(first)
    with pytest.raises(ValueError, match=r"an advantage is 2e\+16; its size must be 1e\+16"):
        check_magnitude(20 * largest)
