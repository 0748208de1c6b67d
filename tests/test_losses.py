import math

import pytest
import torch

from verifiers_rl.losses import (
    LOSSES,
    LossInputs,
    cispo,
    dppo,
    gspo,
    icepop,
    make_loss,
    ppo,
    reference_kl,
    reinforce,
    truncated_is,
    weigh_samples,
)


def make_inputs(trainer, inference, advantages, mask=None, sequence_ids=None):
    trainer = torch.tensor(trainer, dtype=torch.float64, requires_grad=True)
    n = len(trainer)
    return LossInputs(
        trainer_logprobs=trainer,
        inference_logprobs=torch.tensor(inference, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor(mask if mask is not None else [True] * n),
        sequence_ids=torch.tensor(sequence_ids or [0] * n),
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


def loss_and_gradient(function, trainer, inference, advantages, sequence_ids=None, **options):
    """Of probabilities, which are easier to read than their logarithms."""
    logs = [[math.log(p) for p in values] for values in (trainer, inference)]
    inputs = make_inputs(*logs, advantages, sequence_ids=sequence_ids)
    outputs = function(inputs, **options)
    outputs.loss.backward()
    return outputs.loss.item(), inputs.trainer_logprobs.grad.tolist(), outputs.metrics


def test_ppo_equals_the_sum_worked_out_by_hand():
    # ratios 2, 2, 0.5, 0.5, 1.1; bounds 0.8 and 1.3
    loss, gradient, metrics = loss_and_gradient(
        ppo,
        [0.8, 0.8, 0.2, 0.2, 0.55],
        [0.4, 0.4, 0.4, 0.4, 0.5],
        [1.0, -1.0, 1.0, -1.0, 2.0],
        eps_low=0.2,
        eps_high=0.3,
    )
    assert loss == pytest.approx(-(1.3 - 2.0 + 0.5 - 0.8 + 2.2))
    # d(r A) / d logprob = r A where the clip is not active.
    assert gradient == pytest.approx([0.0, 2.0, -0.5, 0.0, -2.2])
    assert metrics["clipped_share"].tolist() == [1, 0, 0, 1, 0]


def test_reinforce_takes_no_ratio():
    loss, gradient, _ = loss_and_gradient(reinforce, [0.8, 0.5], [0.4, 0.1], [1.0, -3.0])
    assert loss == pytest.approx(-(math.log(0.8) - 3 * math.log(0.5)))
    assert gradient == pytest.approx([-1.0, 3.0])


def test_truncated_is_caps_the_ratio():
    # ratios 2 and 5, cap 3
    loss, gradient, metrics = loss_and_gradient(
        truncated_is, [0.8, 0.5], [0.4, 0.1], [1.0, -1.0], max_ratio=3.0
    )
    assert loss == pytest.approx(-(2 * math.log(0.8) - 3 * math.log(0.5)))
    assert gradient == pytest.approx([-2.0, 3.0])
    assert metrics["clipped_share"].tolist() == [0, 1]


def test_icepop_drops_tokens_on_both_sides():
    # ratios 2, 5, 0.25, 0.5
    loss, gradient, metrics = loss_and_gradient(
        icepop,
        [0.8, 0.5, 0.1, 0.2],
        [0.4, 0.1, 0.4, 0.4],
        [1.0, 1.0, 1.0, -1.0],
        min_ratio=0.4,
        max_ratio=4.0,
    )
    assert loss == pytest.approx(-(2 * math.log(0.8) - 0.5 * math.log(0.2)))
    assert gradient == pytest.approx([-2.0, 0.0, 0.0, 0.5])
    assert metrics["masked_share"].tolist() == [0, 1, 1, 0]


def test_dppo_masks_what_has_moved_far_and_moves_further():
    # Moved by 0.4, 0.4, 0.09 (though the ratio is 10), 0.3, 0.3 of probability.
    loss, gradient, metrics = loss_and_gradient(
        dppo,
        [0.8, 0.8, 0.1, 0.1, 0.1],
        [0.4, 0.4, 0.01, 0.4, 0.4],
        [1.0, -1.0, 1.0, -1.0, 1.0],
        max_divergence=0.2,
    )
    # ratios 2, 2, 10, 0.25, 0.25: the first and the fourth are masked.
    assert loss == pytest.approx(-(-2.0 + 10.0 + 0.25))
    assert gradient == pytest.approx([0.0, 2.0, -10.0, 0.0, -0.25])
    assert metrics["masked_share"].tolist() == [1, 0, 0, 1, 0]


def test_gspo_clips_whole_sequences():
    # Sequence 0: ratios 4 and 1, geometric mean 2. Sequence 1: 1.1 alone.
    loss, gradient, metrics = loss_and_gradient(
        gspo,
        [0.8, 0.5, 0.55],
        [0.2, 0.5, 0.5],
        [-1.0, -1.0, 1.0],
        sequence_ids=[0, 0, 1],
        eps_low=0.2,
        eps_high=0.05,
    )
    # A < 0 takes the larger of 2 and 1.05; A > 0 the smaller of 1.1 and 1.05.
    assert loss == pytest.approx(2 * 2.0 - 1.05)
    # Each token of sequence 0 moves s by s / 2, and s stands in two terms.
    assert gradient == pytest.approx([2.0, 2.0, 0.0])
    assert metrics["clipped_share"].tolist() == [0, 0, 1]


def test_reference_kl_is_zero_at_the_reference_and_pulls_towards_it():
    trainer = torch.tensor([math.log(0.5), math.log(0.5)], requires_grad=True)
    kl = reference_kl(trainer, torch.tensor([math.log(0.5), math.log(0.25)]))
    assert kl.tolist() == pytest.approx([0.0, 0.5 - 1 + math.log(2)])
    kl.sum().backward()
    assert trainer.grad.tolist() == pytest.approx([0.0, 1 - 0.5])


def test_weights_of_samples():
    assert weigh_samples([2, 3], "token", 64) == ([1.0, 1.0], 5)
    assert weigh_samples([2, 4, 0], "sequence", 64) == ([0.5, 0.25, 1.0], 2)
    assert weigh_samples([2, 3], "constant", 64) == ([1.0, 1.0], 64)
    for how in ("token", "sequence"):
        assert weigh_samples([0], how, 64) == ([1.0], 1)  # no division by zero


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {}, "loss='grpo': must be one of cispo, ppo,"),
        ("cispo", {"eps": 1}, "'eps', which loss='cispo' does not take; it takes eps_high"),
        ("reinforce", {"eps_high": 1}, "it takes none"),
        ("ppo", {"eps_low": -0.1}, "eps_low=-0.1 must be a number >= 0"),
        ("ppo", {"eps_low": "0.1"}, "eps_low='0.1' must be a number"),
        ("ppo", {"eps_low": 1.5}, "eps_low=1.5 must be below 1"),
        ("icepop", {"min_ratio": 6.0}, "min_ratio=6.0 must be below max_ratio=5.0"),
        ("cispo", 0.2, "loss_args=0.2: must be a table"),
    ],
)
def test_a_loss_that_does_not_exist_is_one_clear_error(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_loss(name, options)


@pytest.mark.parametrize("name", LOSSES)
def test_the_default_arguments_of_every_loss_stand_in_its_signature(name):
    inputs = [math.log(0.8)], [math.log(0.4)], [1.0]
    assert torch.isfinite(make_loss(name, {})(make_inputs(*inputs)).loss)


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_add_nothing_even_when_infinite(name):
    inputs = make_inputs([-1.0, -math.inf], [-1.0, 0.0], [1.0, 1.0], mask=[True, False])
    loss = LOSSES[name](inputs).loss
    loss.backward()
    assert loss.item() == (1.0 if name in ("cispo", "truncated_is", "icepop", "reinforce") else -1)
    assert inputs.trainer_logprobs.grad.tolist() == [-1.0, 0.0]


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_stay_finite(name):
    inputs = make_inputs([0.0, -700.0, -1.0], [-700.0, 0.0, -math.inf], [1.0, 1.0, -1.0])
    loss = LOSSES[name](inputs).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(inputs.trainer_logprobs.grad).all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_microbatch_that_is_all_masked_has_no_loss(name):
    inputs = make_inputs([-1.0, -2.0], [-1.5, -1.0], [1.0, -1.0], mask=[False, False])
    loss = LOSSES[name](inputs).loss
    loss.backward()
    assert loss.item() == 0.0 and inputs.trainer_logprobs.grad.tolist() == [0.0, 0.0]
