import math

import torch

from verifiers_rl.losses import LossInputs, cispo


def make_inputs(trainer, inference, advantages, mask=None):
    trainer = torch.tensor(trainer, dtype=torch.float64, requires_grad=True)
    n = len(trainer)
    return LossInputs(
        trainer_logprobs=trainer,
        inference_logprobs=torch.tensor(inference, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor(mask if mask is not None else [True] * n),
        sequence_ids=torch.zeros(n, dtype=torch.int64),
    )


def test_cispo_equals_the_sum_worked_out_by_hand():
    # ratios 2 and 8; the second is capped at 1 + 4 = 5.
    inputs = make_inputs(
        [math.log(0.5), math.log(0.8)], [math.log(0.25), math.log(0.1)], [1.0, -0.5]
    )
    outputs = cispo(inputs, eps_high=4.0)
    expected = -(2 * 1.0 * math.log(0.5) + 5 * -0.5 * math.log(0.8))
    assert math.isclose(outputs.loss.item(), expected, rel_tol=1e-12)
    assert outputs.metrics["clipped_share"].tolist() == [0.0, 1.0]


def test_cispo_gradient_is_the_capped_ratio_times_the_advantage():
    inputs = make_inputs(
        [math.log(0.5), math.log(0.8)], [math.log(0.25), math.log(0.1)], [1.0, -0.5]
    )
    cispo(inputs, eps_high=4.0).loss.backward()
    # The ratio is detached: a capped token keeps its gradient.
    assert torch.allclose(
        inputs.trainer_logprobs.grad, torch.tensor([-2.0, 2.5], dtype=torch.float64)
    )


def test_eps_high_moves_the_cap():
    inputs = make_inputs([0.0], [-3.0], [1.0])
    inputs.trainer_logprobs.data.fill_(-0.1)
    low, high = cispo(inputs, eps_high=0.5).loss, cispo(inputs, eps_high=2.0).loss
    assert math.isclose(low.item(), 1.5 * 0.1, rel_tol=1e-12)
    assert math.isclose(high.item(), 3.0 * 0.1, rel_tol=1e-12)


def test_masked_tokens_add_nothing_even_when_infinite():
    inputs = make_inputs([-1.0, -math.inf], [-1.0, 0.0], [1.0, 1.0], mask=[True, False])
    loss = cispo(inputs).loss
    loss.backward()
    assert loss.item() == 1.0
    assert inputs.trainer_logprobs.grad.tolist() == [-1.0, 0.0]


def test_extreme_ratios_stay_finite():
    inputs = make_inputs([0.0, -700.0, -1.0], [-700.0, 0.0, -math.inf], [1.0, 1.0, -1.0])
    loss = cispo(inputs).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(inputs.trainer_logprobs.grad).all()
