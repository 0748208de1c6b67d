import pytest

from verifiers_rl.types import Batch, Sample


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"one length.*'loss_mask': 1"):
        Sample([1, 2], [False], [0.0, 0.0], [0, 0])


def test_loss_on_the_first_token_is_refused():
    with pytest.raises(ValueError, match="no token comes before"):
        Sample([1], [True], [0.0], [0])


def test_an_advantage_is_given_to_loss_tokens_only():
    sample = Sample([1, 2, 3], [False, True, True], [0.0, -1.0, -1.0], [-1, 0, 0])
    sample.set_advantage(0.25)
    assert sample.advantages == [0.0, 0.25, 0.25]
    assert Batch(0, 0, [sample, sample]).num_loss_tokens == 4
