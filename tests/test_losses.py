import json
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
    dppo,
    entropy_bonus,
    gspo,
    icepop,
    needs,
    needs_of,
    ppo,
    reference_kl,
    reinforce,
    sequence_mean_mask,
    sequence_product_mask,
    weigh_samples,
    with_masks,
)
from verifiers_rl.types import Rollout


def make_inputs(trainer, inference, advantages, sequence_ids=None, weights=None, **more):
    trainer = torch.tensor(trainer, dtype=torch.float64, requires_grad=True)
    n = len(trainer)
    return LossInputs(
        trainer_logprobs=trainer,
        inference_logprobs=torch.tensor(inference, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor(weights or [1.0] * n, dtype=torch.float64),
        sequence_ids=torch.tensor(sequence_ids or [0] * n),
        entropy=torch.zeros(n, dtype=torch.float64),
        **more,
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


def test_truncated_is_is_cispo_with_a_cap_of_two():
    # ratios 1.5 and 5
    arguments = [0.6, 0.5], [0.4, 0.1], [1.0, -1.0]
    loss, gradient, metrics = loss_and_gradient(LOSSES["truncated_is"], *arguments)
    assert loss == pytest.approx(-(1.5 * math.log(0.6) - 2 * math.log(0.5)))
    assert gradient == pytest.approx([-1.5, 2.0])
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


# Ratios 2, 2, 12, 0.25, 0.98; moved by 0.4, 0.4, 0.11, 0.3, 0.01.
PROBABILITIES = [0.8, 0.8, 0.12, 0.1, 0.49], [0.4, 0.4, 0.01, 0.4, 0.5]


@pytest.mark.parametrize(
    ("name", "options", "marked"),
    [
        ("ratio", {"min_ratio": 0.5, "max_ratio": 5.0}, [0, 0, 1, 1, 0]),
        ("ratio", {"min_ratio": 0.99, "max_ratio": 1.5}, [1, 1, 1, 1, 1]),
        ("ppo", {"eps_low": 0.2, "eps_high": 0.28}, [1, 0, 1, 1, 0]),
        ("ppo", {"eps_low": 0.8, "eps_high": 1.5}, [0, 0, 1, 0, 0]),
        ("ipo", {"max_divergence": 0.2}, [1, 1, 0, 1, 0]),
        ("dppo", {"max_divergence": 0.2}, [1, 0, 0, 1, 0]),
        ("dppo", {"max_divergence": 0.06}, [1, 0, 1, 1, 0]),
    ],
)
def test_masks_mark_the_tokens_worked_out_by_hand(name, options, marked):
    logs = [[math.log(p) for p in values] for values in PROBABILITIES]
    inputs = make_inputs(*logs, [1.0, -1.0, 1.0, -1.0, 1.0])
    mask = bind_options(MASKS[name], name, options)(inputs)
    assert mask.tolist() == [bool(value) for value in marked]


def test_sequence_masks_mark_whole_samples():
    # Ratios 2 and 0.5 (mean 1, product 1); 1.2 three times (mean 1.2, product 1.73).
    logs = [[math.log(r) - 5 for r in (2.0, 0.5, 1.2, 1.2, 1.2)], [-5.0] * 5]
    inputs = make_inputs(*logs, [1.0] * 5, sequence_ids=[0, 0, 1, 1, 1])
    for low, high, of_mean, of_product in (
        (0.9, 1.1, 1, 1),
        (0.9, 1.3, 0, 1),
        (0.9, 1.8, 0, 0),
        (1.1, 1.8, 2, 2),
    ):
        bounds = {"min_ratio": low, "max_ratio": high}
        for mask, of_which in ((sequence_mean_mask, of_mean), (sequence_product_mask, of_product)):
            expected = {0: [], 1: [2, 3, 4], 2: [0, 1]}[of_which]
            assert mask(inputs, **bounds).nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("name", MASKS)
def test_a_masked_token_has_no_gradient_under_any_loss(name):
    mask = MASKS[name]
    logs = [[math.log(p) for p in values] for values in PROBABILITIES]
    advantages, ids = [1.0, -1.0, 1.0, -1.0, 1.0], [0, 0, 1, 2, 3]
    for loss_name, loss in LOSSES.items():
        inputs, plain = (make_inputs(*logs, advantages, sequence_ids=ids) for _ in range(2))
        outputs = with_masks(loss, {name: mask})(inputs)
        outputs.loss.backward()
        marked = mask(plain)
        assert torch.equal(outputs.metrics[f"masked_share/{name}"], marked.float())
        assert 0 < marked.sum() < 5, "or the test shows nothing"
        if loss_name == "gspo":  # the terms of a sample's tokens have one ratio
            continue
        loss(plain).loss.backward()
        expected = plain.trainer_logprobs.grad.masked_fill(marked, 0.0)
        assert torch.equal(inputs.trainer_logprobs.grad, expected), loss_name


def test_cispo_under_the_mask_of_ppo_has_the_gradient_of_ppo():
    logs = [[math.log(p) for p in values] for values in PROBABILITIES]
    ours, theirs = (make_inputs(*logs, [1.0, -1.0, 1.0, -1.0, 1.0]) for _ in range(2))
    masked = with_masks(cispo, {"ppo": partial(MASKS["ppo"], eps_low=0.3, eps_high=0.3)})
    masked(ours).loss.backward()
    ppo(theirs, eps_low=0.3, eps_high=0.3).loss.backward()
    assert torch.allclose(ours.trainer_logprobs.grad, theirs.trainer_logprobs.grad)


def test_what_a_mask_needs_the_loss_under_it_needs():
    @needs("reference_logprobs")
    def mask(inputs):
        return inputs.logprobs < inputs.reference_logprobs

    assert needs_of(with_masks(cispo, {"mine": mask})) == needs_of(cispo) | {"reference_logprobs"}


def test_several_masks_add_up_and_terms_are_not_masked(tmp_path):
    masks = {"ratio": {"max_ratio": 5.0}, "dppo": {"max_divergence": 0.2}}
    args = RLConfig(
        output_dir=str(tmp_path), use_cpu=True, gradient_masks=json.dumps(masks), kl_beta=0.1
    )
    logs = [[math.log(p) for p in values] for values in PROBABILITIES]
    reference = torch.full((5,), math.log(0.3), dtype=torch.float64)
    inputs = make_inputs(*logs, [1.0, -1.0, 1.0, -1.0, 1.0], reference_logprobs=reference)
    loss_fn = args.complete_loss(None)
    assert needs_of(loss_fn) == {"reference_logprobs"}
    loss_fn(inputs).loss.backward()
    # Tokens 0, 2 and 3 are masked; cispo's gradient is - r A. That of the KL is beta (1 - d).
    of_cispo = [0.0, 2.0, 0.0, 0.0, -0.98]
    of_kl = [0.1 * (1 - 0.3 / p) for p in PROBABILITIES[0]]
    expected = [a + b for a, b in zip(of_cispo, of_kl, strict=True)]
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx(expected)
    assert "advantages" not in needs_of(loss_fn)
    args = RLConfig(output_dir=str(tmp_path), use_cpu=True, gradient_masks=masks)
    assert "advantages" in needs_of(args.complete_loss(None))


def masked_by(tmp_path, loss_fn=None, **options):
    """Which of five tokens get no gradient under these options of RLConfig."""
    args = RLConfig(output_dir=str(tmp_path), use_cpu=True, **options)
    logs = [[math.log(p) for p in values] for values in PROBABILITIES]
    inputs = make_inputs(*logs, [1.0, -1.0, 1.0, -1.0, 1.0])
    args.complete_loss(loss_fn)(inputs).loss.backward()
    return [grad == 0 for grad in inputs.trainer_logprobs.grad.tolist()]


def test_cispo_has_a_mask_by_default_and_other_losses_have_none(tmp_path):
    by_default = [True, False, True, True, False]
    assert masked_by(tmp_path) == by_default
    assert masked_by(tmp_path, gradient_masks={"dppo": {"max_divergence": 0.05}}) == by_default
    assert not any(masked_by(tmp_path, gradient_masks={}))
    assert not any(masked_by(tmp_path, loss="truncated_is"))
    # A function of one's own gets masks that are set, and no others.
    assert not any(masked_by(tmp_path, cispo))
    of_ipo = [True, True, False, True, False]
    assert masked_by(tmp_path, cispo, gradient_masks={"ipo": {"max_divergence": 0.2}}) == of_ipo


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
        with_masks(cispo, {"own": mask})(make_inputs([0.0], [0.0], [1.0]))


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"tv": {}}, "gradient_masks=.*: must be one of ratio, ppo, ipo, .* or module:function"),
        ({"ipo": {"eps": 1}}, "gradient_masks='ipo': there is no 'eps'; there is max_divergence"),
        ({"ipo": {"max_divergence": -1}}, "max_divergence=-1 must be a number >= 0"),
        ({"ratio": {"min_ratio": 5}}, r"\{'min_ratio': 5\}: .*min_ratio below max_ratio"),
        ({"ppo": {"eps_low": 1}}, r"\{'eps_low': 1\}: eps_low must be below 1"),
        ({"ipo": 0.1}, r"gradient_masks=.*: must be a table"),
        (["ipo"], "gradient_masks"),
    ],
)
def test_a_mask_that_cannot_be_is_one_clear_error(masks, message):
    with pytest.raises(ValueError, match=message):
        RLConfig(gradient_masks=masks, use_cpu=True)


def test_reference_kl_is_zero_at_the_reference_and_pulls_towards_it():
    reference = torch.tensor([math.log(0.5), math.log(0.25)], dtype=torch.float64)
    logprobs = [math.log(0.5)] * 2
    inputs = make_inputs(
        logprobs, logprobs, [5.0, 5.0], weights=[1.0, 2.0], reference_logprobs=reference
    )
    outputs = reference_kl(inputs, beta=0.1)
    kl = [0.0, 0.5 - 1 + math.log(2)]
    assert outputs.metrics["reference_kl"].tolist() == pytest.approx(kl)
    assert outputs.loss.item() == pytest.approx(0.1 * 2 * kl[1])
    outputs.loss.backward()
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx([0.0, 0.1 * 2 * (1 - 0.5)])


def test_the_weight_of_the_kl_follows_the_target_by_hand():
    term = AdaptiveKL(beta=0.1, target=0.5)
    term.update({"reference_kl": 0.55})  # 10 % above: 0.1 * (1 + 0.1 * 0.1)
    assert term.beta == pytest.approx(0.101)
    term.update({"reference_kl": 5.0})  # far above: the error is cut at 0.2
    assert term.beta == pytest.approx(0.101 * 1.02)
    term.update({"reference_kl": 0.45})
    assert term.beta == pytest.approx(0.101 * 1.02 * 0.99)
    term.update({"reference_kl": 0.0})  # far below
    assert term.beta == pytest.approx(0.101 * 1.02 * 0.99 * 0.98)
    beta = term.beta
    term.update({})  # no loss token
    assert term.beta == beta
    inputs = make_inputs([-1.0], [-1.0], [0.0], reference_logprobs=torch.tensor([-2.0]).double())
    outputs, fixed = term(inputs), reference_kl(inputs, beta)
    assert outputs.loss.item() == fixed.loss.item() == pytest.approx(beta * math.exp(-1))
    assert outputs.metrics["kl_beta"].tolist() == [beta]
    assert needs_of(term) == {"reference_logprobs"}


def test_the_entropy_bonus_lowers_the_loss_of_an_undecided_policy():
    inputs = make_inputs([-1.0, -1.0], [-1.0, -1.0], [0.0, 0.0], weights=[1.0, 3.0])
    inputs.entropy = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    loss = entropy_bonus(inputs, beta=0.01).loss
    assert loss.item() == pytest.approx(-0.01 * (0.5 + 3 * 2.0))
    loss.backward()
    assert inputs.entropy.grad.tolist() == pytest.approx([-0.01, -0.03])


def test_terms_are_added_and_say_together_what_they_need():
    plain = add_terms(reinforce)
    assert needs_of(plain) == needs_of(reinforce) == {"advantages"}
    total = add_terms(
        partial(cispo, eps_high=1.0),
        partial(reference_kl, beta=1.0),
        partial(entropy_bonus, beta=0),
    )
    assert needs_of(total) == {"reference_logprobs", "entropy_gradient"}
    inputs = make_inputs([-1.0], [-1.0], [2.0], reference_logprobs=torch.tensor([-2.0]))
    inputs.entropy.requires_grad_()
    outputs = total(inputs)
    assert outputs.loss.item() == pytest.approx(2.0 + math.exp(-1) - 1 + 1)
    assert set(outputs.metrics) == {"clipped_share", "reference_kl"}


def test_needs_add_up_and_a_misspelt_one_is_refused():
    @needs("entropy_gradient")
    @needs("reference_logprobs")
    def both(inputs, scale=1.0): ...

    assert needs_of(partial(both, scale=2.0)) == {"entropy_gradient", "reference_logprobs"}
    marked = needs("entropy_gradient")(partial(reinforce))
    assert needs_of(marked) == {"entropy_gradient", "advantages"}
    assert needs_of(reinforce) == {"advantages"}
    with pytest.raises(ValueError, match=r"needs\('entropy'\): must be of entropy_gradient, ref"):
        needs("entropy")


def test_an_argument_that_a_loss_needs_is_missed_before_it_is_called():
    def own(inputs, beta): ...

    with pytest.raises(
        ValueError, match=r"loss_args of m:own: missing a required argument: 'beta'"
    ):
        bind_options(own, "loss_args of m:own", {})
    bind_options(own, "loss_args of m:own", {"beta": 1})


@pytest.mark.parametrize("name", LOSSES)
def test_weights_multiply_each_token_of_every_loss(name):
    logs = [math.log(0.5), math.log(0.6)], [math.log(0.55), math.log(0.5)], [1.0, -0.5]
    # Two sequences, or GSPO's ratio would tie them together.
    alone = [make_inputs(*([v[i]] for v in logs)) for i in range(2)]
    together = make_inputs(*logs, sequence_ids=[0, 1], weights=[0.5, 3.0])
    expected = 0.5 * LOSSES[name](alone[0]).loss + 3.0 * LOSSES[name](alone[1]).loss
    assert LOSSES[name](together).loss.item() == pytest.approx(expected.item())


def test_weights_of_samples():
    assert weigh_samples([2, 3], [0, 1], "token", 64) == ([1.0, 1.0], 5)
    assert weigh_samples([2, 4, 0], [0, 1, 2], "sequence", 64) == ([0.5, 0.25, 1.0], 2)
    # A rollout in two samples counts once.
    assert weigh_samples([2, 4, 6], [0, 1, 1], "sequence", 64) == ([0.5, 0.1, 0.1], 2)
    assert weigh_samples([2, 3], [0, 1], "constant", 64) == ([1.0, 1.0], 64)
    for how in ("token", "sequence"):
        assert weigh_samples([0], [0], how, 64) == ([1.0], 1)  # no division by zero


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {}, "loss='grpo': must be one of cispo, ppo,.* or module:function"),
        ("cispo", {"eps": 1}, "loss_args of loss='cispo': there is no 'eps'; there is eps_high"),
        ("reinforce", {"eps_high": 1}, "no 'eps_high'; there is none"),
        ("ppo", {"eps_low": -0.1}, "eps_low=-0.1 must be a number >= 0"),
        ("ppo", {"eps_low": "0.1"}, "eps_low='0.1' must be a number"),
        ("ppo", {"eps_low": 1.5}, r"\{'eps_low': 1.5\}: eps_low must be below 1"),
        ("icepop", {"min_ratio": 6.0}, "and min_ratio below max_ratio"),
        ("cispo", 0.2, "loss_args=0.2: must be a table"),
    ],
)
def test_a_loss_that_does_not_exist_is_one_clear_error(name, options, message):
    with pytest.raises(ValueError, match=message):
        RLConfig(loss=name, loss_args=options, use_cpu=True)


@pytest.mark.parametrize("name", LOSSES)
def test_the_default_arguments_of_every_loss_stand_in_its_signature(name):
    inputs = [math.log(0.8)], [math.log(0.4)], [1.0]
    assert torch.isfinite(bind_options(LOSSES[name], name, {})(make_inputs(*inputs)).loss)


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_stay_finite(name):
    inputs = make_inputs([0.0, -700.0, -1.0], [-700.0, 0.0, -math.inf], [1.0, 1.0, -1.0])
    loss = LOSSES[name](inputs).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(inputs.trainer_logprobs.grad).all()


def python_of(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_losses_and_advantages_in_the_docs_keep_their_contracts():
    (in_readme,) = (text for text in python_of("README.md") if "def reinforce" in text)
    names = {"LossInputs": LossInputs, "LossOutputs": LossOutputs}
    exec(in_readme.partition("trainer = ")[0], names)
    for text in python_of("docs/losses.md"):
        exec(text, names)
    logprobs = [math.log(0.5), math.log(0.25)]
    inputs = make_inputs(
        logprobs, logprobs, [1.0, -2.0], weights=[0.5, 1.0],
        reference_logprobs=torch.tensor([0.0, 0.0]),
    )  # fmt: skip
    expected = -(0.5 * logprobs[0] - 2 * logprobs[1])
    outputs = add_terms(names["reinforce"])(inputs)
    assert outputs.loss.item() == pytest.approx(expected)
    outputs = add_terms(partial(names["my_loss"], pull=0.2))(inputs)
    away = 0.5 * logprobs[0] ** 2 + logprobs[1] ** 2
    assert outputs.loss.item() == pytest.approx(expected + 0.2 * away)
    assert needs_of(names["my_loss"]) == {"reference_logprobs"}
    group = [Rollout(0, "", reward=reward, num_turns=2) for reward in (1.0, 3.0)]
    assert names["my_advantage"](group) == pytest.approx([-1.02, 0.98])
