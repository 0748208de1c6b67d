import torch

from verifiers_rl.advantages import center_on_group_mean


def test_advantages_are_rewards_minus_the_group_mean():
    advantages = center_on_group_mean(torch.tensor([1.0, 0.0, 0.5, 0.5], dtype=torch.float64))
    assert advantages.tolist() == [0.5, -0.5, 0.0, 0.0]


def test_equal_rewards_give_no_advantage():
    assert center_on_group_mean(torch.full((3,), 0.7)).tolist() == [0.0, 0.0, 0.0]
