"""Tests of my_loss.py, by hand: `python -m pytest`."""

import math

import pytest
import torch
from my_loss import my_loss

from verifiers_rl import LossInputs


def make_inputs(ratio: float, advantage: float) -> LossInputs:
    """One token of probability 0.5, which the server gave 0.5 / ratio."""
    logprob = math.log(0.5)
    return LossInputs(
        trainer_logprobs=torch.tensor([logprob], requires_grad=True),
        inference_logprobs=torch.tensor([logprob - math.log(ratio)]),
        advantages=torch.tensor([advantage]),
        weights=torch.ones(1),
        sequence_ids=torch.zeros(1, dtype=torch.int64),
        entropy=torch.ones(1),
    )


@pytest.mark.parametrize(("ratio", "used"), [(1.0, 1.0), (1.5, 1.5), (5.0, 2.0)])
def test_the_gradient_is_the_advantage_times_the_capped_ratio(ratio, used):
    inputs = make_inputs(ratio, advantage=3.0)
    outputs = my_loss(inputs, max_ratio=2.0)
    outputs.loss.backward()
    assert inputs.trainer_logprobs.grad.item() == pytest.approx(-used * 3.0)
    assert outputs.metrics["capped_share"].item() == float(ratio > 2.0)
