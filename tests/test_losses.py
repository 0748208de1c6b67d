import math
import re
from functools import partial

import pytest
import torch

from tests.helpers import ROOT
from verifiers_rl.config import RLConfig
from verifiers_rl.losses import (
    LOSSES,
    MASKS,
    AdaptiveKL,
    LossInputs,
    LossOutputs,
    add_terms,
    bind_options,
    cispo,
    entropy_bonus,
    needs,
    needs_of,
    reference_kl,
    reinforce,
    weigh_samples,
    with_masks,
)
from verifiers_rl.types import Rollout


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


def log(*values):
    return [math.log(value) for value in values]


# --- Losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "inputs", "loss", "gradient", "marked"),
    [
        # Ratios 2 and 8, the second capped at 5. It keeps its gradient: the ratio is detached.
        (
            "cispo",
            {"eps_high": 4.0},
            ([0.5, 0.8], [0.25, 0.1], [1.0, -0.5]),
            -(2 * math.log(0.5) - 2.5 * math.log(0.8)),
            [-2.0, 2.5],
            [0, 1],
        ),
        # CISPO with a cap of two. Ratios 1.5 and 5.
        (
            "truncated_is",
            {},
            ([0.6, 0.5], [0.4, 0.1], [1.0, -1.0]),
            -(1.5 * math.log(0.6) - 2 * math.log(0.5)),
            [-1.5, 2.0],
            [0, 1],
        ),
        # Ratios 2, 2, 0.5, 0.5, 1.1. Where the clip is not active, the gradient is - r A.
        (
            "ppo",
            {"eps_low": 0.2, "eps_high": 0.3},
            ([0.8, 0.8, 0.2, 0.2, 0.55], [0.4, 0.4, 0.4, 0.4, 0.5], [1.0, -1.0, 1.0, -1.0, 2.0]),
            -(1.3 - 2.0 + 0.5 - 0.8 + 2.2),
            [0.0, 2.0, -0.5, 0.0, -2.2],
            [1, 0, 0, 1, 0],
        ),
        (
            "reinforce",
            {},
            ([0.8, 0.5], [0.4, 0.1], [1.0, -3.0]),
            -(math.log(0.8) - 3 * math.log(0.5)),
            [-1.0, 3.0],
            None,
        ),
        # Ratios 2, 5, 0.25, 0.5.
        (
            "icepop",
            {"min_ratio": 0.4, "max_ratio": 4.0},
            ([0.8, 0.5, 0.1, 0.2], [0.4, 0.1, 0.4, 0.4], [1.0, 1.0, 1.0, -1.0]),
            -(2 * math.log(0.8) - 0.5 * math.log(0.2)),
            [-2.0, 0.0, 0.0, 0.5],
            [0, 1, 1, 0],
        ),
        # Moved by 0.4, 0.4, 0.09 (though the ratio is 10), 0.3, 0.3; ratios 2, 2, 10, 0.25, 0.25.
        (
            "dppo",
            {"max_divergence": 0.2},
            ([0.8, 0.8, 0.1, 0.1, 0.1], [0.4, 0.4, 0.01, 0.4, 0.4], [1.0, -1.0, 1.0, -1.0, 1.0]),
            -(-2.0 + 10.0 + 0.25),
            [0.0, 2.0, -10.0, 0.0, -0.25],
            [1, 0, 0, 1, 0],
        ),
        # Sequence 0: ratios 4 and 1, geometric mean 2. Sequence 1: 1.1 alone. A < 0 takes the
        # larger of 2 and 1.05; A > 0 the smaller of 1.1 and 1.05. Each token of sequence 0 moves s
        # by s / 2, and s stands in two terms.
        (
            "gspo",
            {"eps_low": 0.2, "eps_high": 0.05},
            ([0.8, 0.5, 0.55], [0.2, 0.5, 0.5], [-1.0, -1.0, 1.0], [0, 0, 1]),
            2 * 2.0 - 1.05,
            [2.0, 2.0, 0.0],
            [0, 0, 1],
        ),
    ],
)
def test_losses_equal_those_worked_out_by_hand(name, options, inputs, loss, gradient, marked):
    inputs = make_inputs(*inputs)
    outputs = LOSSES[name](inputs, **options)
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(loss, rel=1e-12)
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-12)
    assert [share.tolist() for share in outputs.metrics.values()] == ([marked] if marked else [])


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_defaults_weights_and_no_gradient_at_an_advantage_of_zero(name):
    def of(weights, advantages=(1.0, -0.5)):
        inputs = make_inputs([0.5, 0.6], [0.55, 0.5], advantages, [0, 1], weights)
        loss = bind_options(LOSSES[name], name, {})(inputs).loss
        loss.backward()
        return loss.item(), inputs.trainer_logprobs.grad

    (first, _), (second, _), (both, _) = of([1.0, 0.0]), of([0.0, 1.0]), of([0.5, 3.0])
    assert both == pytest.approx(0.5 * first + 3.0 * second) and first and second
    assert not of([1.0, 1.0], (0.0, 0.0))[1].any()
    assert "nonzero_advantages" in needs_of(LOSSES[name])


def test_weights_of_samples():
    assert weigh_samples([2, 3], [0, 1], "token", 64) == ([1.0, 1.0], 5)
    assert weigh_samples([2, 4, 0], [0, 1, 2], "sequence", 64) == ([0.5, 0.25, 1.0], 2)
    # A rollout in two samples counts once.
    assert weigh_samples([2, 4, 6], [0, 1, 1], "sequence", 64) == ([0.5, 0.1, 0.1], 2)
    assert weigh_samples([2, 3], [0, 1], "constant", 64) == ([1.0, 1.0], 64)
    for how in ("token", "sequence"):
        assert weigh_samples([0], [0], how, 64) == ([1.0], 1)  # no division by zero


# --- Masks ----------------------------------------------------------------------------------------

# Ratios 2, 2, 12, 0.25, 0.98; moved by 0.4, 0.4, 0.11, 0.3, 0.01.
TOKENS = [0.8, 0.8, 0.12, 0.1, 0.49], [0.4, 0.4, 0.01, 0.4, 0.5], [1.0, -1.0, 1.0, -1.0, 1.0]
# Ratios 2 and 0.5 (mean 1, product 1); 1.2 three times (mean 1.2, product 1.73).
SEQUENCES = [0.2, 0.05, 0.12, 0.12, 0.12], [0.1] * 5, [1.0] * 5, [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "bounds", "inputs", "marked"),
    [
        ("ratio", (0.5, 5.0), TOKENS, [2, 3]),
        ("ppo", (0.2, 0.28), TOKENS, [0, 2, 3]),
        ("ipo", (0.2,), TOKENS, [0, 1, 3]),
        ("dppo", (0.2,), TOKENS, [0, 3]),
        ("dppo", (0.06,), TOKENS, [0, 2, 3]),
        ("sequence_mean", (0.9, 1.1), SEQUENCES, [2, 3, 4]),
        ("sequence_mean", (1.1, 1.8), SEQUENCES, [0, 1]),
        ("sequence_product", (0.9, 1.3), SEQUENCES, [2, 3, 4]),
        ("sequence_product", (1.1, 1.8), SEQUENCES, [0, 1]),
    ],
)
def test_masks_mark_the_tokens_worked_out_by_hand(name, bounds, inputs, marked):
    names = {
        "ppo": ("eps_low", "eps_high"),
        "ipo": ("max_divergence",),
        "dppo": ("max_divergence",),
    }
    options = zip(names.get(name, ("min_ratio", "max_ratio")), bounds, strict=True)
    mask = bind_options(MASKS[name], name, dict(options))(make_inputs(*inputs))
    assert mask.nonzero().flatten().tolist() == marked


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


BY_DEFAULT, OF_IPO = [0, 2, 3], [0, 1, 3]


@pytest.mark.parametrize(
    ("loss_fn", "options", "masked"),
    [
        (None, {}, BY_DEFAULT),
        (None, {"gradient_masks": {"dppo": {"max_divergence": 0.05}}}, BY_DEFAULT),
        (None, {"gradient_masks": {}}, []),
        (None, {"loss": "truncated_is"}, []),
        # A function of one's own gets masks that are set, and no others.
        (cispo, {}, []),
        (cispo, {"gradient_masks": {"ipo": {"max_divergence": 0.2}}}, OF_IPO),
    ],
)
def test_cispo_has_a_mask_by_default_and_other_losses_have_none(loss_fn, options, masked):
    inputs = make_inputs(*TOKENS)
    RLConfig(use_cpu=True, **options).complete_loss(loss_fn)(inputs).loss.backward()
    assert (inputs.trainer_logprobs.grad == 0).nonzero().flatten().tolist() == masked


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda inputs: inputs.weights, "the mask 'own' returned torch.float64; expected a tensor"),
        (lambda inputs: [True], "the mask 'own' returned list; expected a tensor of bool"),
        (lambda inputs: torch.tensor(True), r"'own' returned shape \(\); .* a token, \(1,\)"),
    ],
)
def test_a_mask_of_another_shape_or_type_is_refused(mask, message):
    with pytest.raises((TypeError, ValueError), match=message):
        with_masks(cispo, {"own": mask})(make_inputs([0.5], [0.5], [1.0]))


# --- Terms ----------------------------------------------------------------------------------------


def test_reference_kl_is_zero_at_the_reference_and_pulls_towards_it():
    options = {"weights": [1.0, 2.0], "reference_logprobs": [0.5, 0.25]}
    inputs = make_inputs([0.5] * 2, [0.5] * 2, [5.0, 5.0], **options)
    outputs = reference_kl(inputs, beta=0.1)
    kl = [0.0, 0.5 - 1 + math.log(2)]
    assert outputs.metrics["reference_kl"].tolist() == pytest.approx(kl)
    assert outputs.loss.item() == pytest.approx(0.1 * 2 * kl[1])
    outputs.loss.backward()
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx([0.0, 0.1 * 2 * (1 - 0.5)])


def test_the_weight_of_the_kl_follows_the_target_by_hand():
    term, expected = AdaptiveKL(beta=0.1, target=0.5), 0.1
    # 10 % above: 1 + 0.1 * 0.1; an error beyond 0.2 is cut; without a loss token nothing moves.
    for means, factor in (
        ({"reference_kl": 0.55}, 1.01),
        ({"reference_kl": 5.0}, 1.02),
        ({"reference_kl": 0.45}, 0.99),
        ({"reference_kl": 0.0}, 0.98),
        ({}, 1.0),
    ):
        term.update(means)
        expected *= factor
        assert term.beta == pytest.approx(expected)
    outputs = term(make_inputs([0.4], [0.4], [0.0], reference_logprobs=[0.2]))
    assert outputs.loss.item() == pytest.approx(expected * (0.5 - 1 + math.log(2)))
    assert outputs.metrics["kl_beta"].tolist() == [term.beta]
    assert needs_of(term) == {"reference_logprobs"}


def test_the_entropy_bonus_lowers_the_loss_of_an_undecided_policy():
    inputs = make_inputs([0.4, 0.4], [0.4, 0.4], [0.0, 0.0], weights=[1.0, 3.0])
    inputs.entropy = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    loss = entropy_bonus(inputs, beta=0.01).loss
    assert loss.item() == pytest.approx(-0.01 * (0.5 + 3 * 2.0))
    loss.backward()
    assert inputs.entropy.grad.tolist() == pytest.approx([-0.01, -0.03])


def test_terms_are_added_and_say_together_what_they_need():
    terms = partial(reference_kl, beta=1.0), partial(entropy_bonus, beta=0)
    total = add_terms(partial(cispo, eps_high=1.0), *terms)
    assert needs_of(total) == {"reference_logprobs", "entropy_gradient"}
    inputs = make_inputs([0.4], [0.4], [2.0], reference_logprobs=[0.2])
    inputs.entropy.requires_grad_()
    outputs = total(inputs)
    expected = -2.0 * math.log(0.4) + 0.5 - 1 + math.log(2)
    assert outputs.loss.item() == pytest.approx(expected)
    assert set(outputs.metrics) == {"clipped_share", "reference_kl"}


def test_needs_add_up_and_a_misspelt_one_is_refused():
    @needs("entropy_gradient")
    @needs("reference_logprobs")
    def both(inputs, scale=1.0): ...

    wanted = {"entropy_gradient", "reference_logprobs"}
    assert needs_of(partial(both, scale=2.0)) == wanted
    assert needs_of(with_masks(cispo, {"mine": both})) == needs_of(cispo) | wanted
    assert needs_of(add_terms(reinforce)) == needs_of(reinforce) == {"nonzero_advantages"}
    assert not needs_of(lambda inputs: cispo(inputs))
    with pytest.raises(ValueError, match=r"needs\('entropy'\): must be of entropy_gradient, ref"):
        needs("entropy")


def test_an_argument_that_a_loss_needs_is_missed_before_it_is_called():
    def own(inputs, beta): ...

    with pytest.raises(
        ValueError, match=r"loss_args of m:own: missing a required argument: 'beta'"
    ):
        bind_options(own, "loss_args of m:own", {})


def python_of(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_losses_and_advantages_in_the_docs_keep_their_contracts():
    (in_readme,) = (text for text in python_of("README.md") if "def reinforce" in text)
    names = {"LossInputs": LossInputs, "LossOutputs": LossOutputs}
    for text in (in_readme.partition("trainer = ")[0], *python_of("docs/losses.md")):
        exec(text, names)
    logprobs, options = log(0.5, 0.25), {"weights": [0.5, 1.0], "reference_logprobs": [1.0, 1.0]}
    inputs = make_inputs([0.5, 0.25], [0.5, 0.25], [1.0, -2.0], **options)
    expected = -(0.5 * logprobs[0] - 2 * logprobs[1])
    away = 0.5 * logprobs[0] ** 2 + logprobs[1] ** 2
    assert names["reinforce"](inputs).loss.item() == pytest.approx(expected)
    loss = names["my_loss"](inputs, pull=0.2).loss
    assert loss.item() == pytest.approx(expected + 0.2 * away)
    assert needs_of(names["my_loss"]) == {"reference_logprobs"}
    group = [Rollout(0, "", reward=reward, num_turns=2) for reward in (1.0, 3.0)]
    assert names["my_advantage"](group) == pytest.approx([-1.02, 0.98])
