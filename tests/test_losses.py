import tomllib

import pytest
import torch

from tests.helpers import ROOT
from verifiers_rl import RLConfig
from verifiers_rl.losses import (
    LOSSES,
    MASKS,
    LossInputs,
    bind_options,
    cispo,
    needs,
    needs_of,
    with_masks,
)


def make_inputs(trainer, inference, advantages, sequence_ids=None, weights=None, **more):
    """Inputs of these probabilities, which are easier to read than their logarithms."""

    def numbers(values):
        return torch.tensor(values, dtype=torch.float64)

    n = len(trainer)
    more = {name: numbers(values).log() for name, values in more.items()}
    return LossInputs(
        trainer_logprobs=numbers(trainer).log().requires_grad_(),
        inference_logprobs=numbers(inference).log(),
        advantages=numbers(advantages),
        weights=numbers(weights or [1.0] * n),
        sequence_ids=torch.tensor(sequence_ids or [0] * n),
        entropy=torch.zeros(n, dtype=torch.float64),
        **more,
    )


# --- Losses ---------------------------------------------------------------------------------------


BY_HAND = tomllib.loads((ROOT / "tests/losses_by_hand.txt").read_text())


def test_each_loss_and_each_mask_is_worked_out_by_hand():
    for kind, names in (("loss", LOSSES), ("mask", MASKS)):
        assert {case["name"] for case in BY_HAND[kind]} == names.keys()


@pytest.mark.parametrize("case", BY_HAND["loss"], ids=lambda case: case["name"])
def test_losses_equal_those_worked_out_by_hand(case):
    names = ("trainer", "inference", "advantages", "sequence_ids")
    inputs = make_inputs(*(case[name] for name in names if name in case))
    outputs = LOSSES[case["name"]](inputs, **case["options"])
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(case["loss"], rel=1e-12)
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx(case["gradient"], rel=1e-12)
    marked = [case["marked"]] if case["marked"] else []
    assert [share.tolist() for share in outputs.metrics.values()] == marked


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_defaults_weights_and_no_gradient_at_an_advantage_of_zero(name):
    loss_fn = bind_options(LOSSES[name], name, {})

    def of(weights, advantages=(1.0, -0.5)):
        inputs = make_inputs([0.5, 0.6], [0.55, 0.5], advantages, [0, 1], weights)
        loss = loss_fn(inputs).loss
        loss.backward()
        return loss.item(), inputs.trainer_logprobs.grad

    (first, _), (second, _), (both, _) = of([1.0, 0.0]), of([0.0, 1.0]), of([0.5, 3.0])
    assert both == pytest.approx(0.5 * first + 3.0 * second) and first and second
    assert not of([1.0, 1.0], (0.0, 0.0))[1].any()
    assert "nonzero_advantages" in needs_of(loss_fn)
    # One side rules a token out, or both do; -1e30 is what the trainer makes of -inf.
    inputs = make_inputs([1.0] * 3, [0.9, 0.0, 0.0], [100.0, 100.0, -100.0], [0, 0, 1])
    inputs.trainer_logprobs = logprobs = torch.tensor([-1e30, -1e30, -1.0], requires_grad=True)
    loss = loss_fn(inputs).loss
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()


# --- Masks ----------------------------------------------------------------------------------------

# Ratios 2, 2, 12, 0.25, 0.98; moved by 0.4, 0.4, 0.11, 0.3, 0.01.
TOKENS = [0.8, 0.8, 0.12, 0.1, 0.49], [0.4, 0.4, 0.01, 0.4, 0.5], [1.0, -1.0, 1.0, -1.0, 1.0]
# Ratios 2 and 0.5 (mean 1, product 1); 1.2 three times (mean 1.2, product 1.73).
SEQUENCES = [0.2, 0.05, 0.12, 0.12, 0.12], [0.1] * 5, [1.0] * 5, [0, 0, 1, 1, 1]


INPUTS = {"tokens": TOKENS, "sequences": SEQUENCES}


@pytest.mark.parametrize("case", BY_HAND["mask"], ids=lambda case: case["name"])
def test_masks_mark_the_tokens_worked_out_by_hand(case):
    mask = bind_options(MASKS[case["name"]], case["name"], case["options"])
    marked = mask(make_inputs(*INPUTS[case["inputs"]])).nonzero()
    assert marked.flatten().tolist() == case["marked"]


def test_several_masks_add_up_and_terms_are_not_masked():
    masks = {"ratio": {"max_ratio": 5.0}, "dppo": {"max_divergence": 0.2}}
    loss_fn = RLConfig(use_cpu=True, gradient_masks=masks, kl_beta=0.1).complete_loss(None)
    inputs = make_inputs(*TOKENS, reference_logprobs=[0.3] * 5)
    loss_fn(inputs).loss.backward()
    # Tokens 0, 2 and 3 are masked; cispo's gradient is - r A. That of the KL is beta (1 - d).
    of_cispo = [0.0, 2.0, 0.0, 0.0, -0.98]
    expected = [a + 0.1 * (1 - 0.3 / p) for a, p in zip(of_cispo, TOKENS[0], strict=True)]
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx(expected)
    assert needs_of(loss_fn) == {"reference_logprobs"}
    loss_fn = RLConfig(use_cpu=True, gradient_masks=masks).complete_loss(None)
    assert "nonzero_advantages" in needs_of(loss_fn)


@pytest.mark.parametrize(
    "loss_fn, options, masked",
    [
        (None, {}, [0, 2, 3]),
        (None, {"gradient_masks": {}}, []),
        (None, {"loss": "truncated_is"}, []),
        # A function of one's own gets masks that are set, and no others.
        (cispo, {}, []),
        (cispo, {"gradient_masks": {"ipo": {"max_divergence": 0.2}}}, [0, 1, 3]),
    ],
)
def test_cispo_has_a_mask_by_default_and_other_losses_have_none(loss_fn, options, masked):
    inputs = make_inputs(*TOKENS)
    RLConfig(use_cpu=True, **options).complete_loss(loss_fn)(inputs).loss.backward()
    assert (inputs.trainer_logprobs.grad == 0).nonzero().flatten().tolist() == masked


@pytest.mark.parametrize(
    "returned, message",
    [
        ([True], "the mask 'own' returned list; expected a tensor of bool"),
        (torch.tensor(True), r"'own' returned shape \(\); expected a tensor of bool, shape \(1,\)"),
    ],
)
def test_a_mask_of_another_shape_or_type_is_refused(returned, message):
    with pytest.raises(TypeError, match=message):
        with_masks(cispo, {"own": lambda inputs: returned})(make_inputs([0.5], [0.5], [1.0]))


# --- Terms ----------------------------------------------------------------------------------------


def test_needs_add_up_and_a_misspelt_one_is_refused():
    @needs("entropy_gradient")
    @needs("reference_logprobs")
    def both(inputs): ...

    wanted = {"entropy_gradient", "reference_logprobs"}
    assert needs_of(with_masks(cispo, {"mine": both})) == {
        "nonzero_advantages", *wanted
    }  # fmt: skip
    assert not needs_of(lambda inputs: cispo(inputs))
    with pytest.raises(ValueError, match=r"needs\('entropy'\): must be of entropy_gradient"):
        needs("entropy")


def test_an_argument_that_a_loss_needs_is_missed_before_it_is_called():
    def own(inputs, beta): ...

    with pytest.raises(
        ValueError, match=r"loss_args of m:own: missing a required argument: 'beta'"
    ):
        bind_options(own, "loss_args of m:own", {})
