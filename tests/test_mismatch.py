"""Where both sides disagree, on hand-made tokens whose cause is known."""

import math

import numpy as np
import pytest
import torch

from tests.helpers import make_tiny_model, make_tiny_moe
from verifiers_rl import RLConfig
from verifiers_rl.inference.layer_states import LayerStates, decoder_layers
from verifiers_rl.report.mismatch import (
    SampledTokens,
    Setup,
    advise,
    as_lines,
    layer_lines,
    mismatch_table,
    scale_of_change,
)
from verifiers_rl.router_replay import replay_experts
from verifiers_rl.sync.agreement import logprobs_of_samples, trainer_logprobs
from verifiers_rl.types import Sample, SamplingMask

EXACT = Setup("float32", "float32", trainer_head="float32", server_head="float32")
HALF = Setup("bfloat16", "bfloat16", trainer_head="float32", server_head="float32")


def tokens_of(differences, logprobs=None, lengths=None):
    """Tokens of one reply with these differences of the trainer's logprobs from the server's."""
    num = len(differences)
    theirs = np.full(num, -1.0) if logprobs is None else np.array(logprobs)
    lengths = np.full(num, num) if lengths is None else np.array(lengths)
    return SampledTokens(theirs + differences, theirs, np.arange(1, num + 1), lengths)


def test_loss_tokens_of_samples_are_collected_with_their_place_in_the_reply():
    first = Sample([5, 6, 7, 8], [0, 1, 0, 1], [0, -1.0, 0, -2.0], [-1, 0, -1, 0])
    nobody = [0, -1.0, math.nan, -3.0, -0.5]  # the third token is the environment's
    second = Sample([5, 6, 7, 8, 9], [0, 1, 1, 1, 1], nobody, [-1, 0, -1, 0, 0])
    ours = [np.array([-1.5, -2.0]), np.array([-1.0, -9.0, -3.0, -0.25])]
    tokens = SampledTokens.of([first, second], ours)
    assert tokens.positions.tolist() == [1, 2, 1, 2, 3]
    assert tokens.lengths.tolist() == [2, 2, 3, 3, 3]
    assert tokens.log_ratios.tolist() == [-0.5, 0, 0, 0, 0.25]


def test_the_table_has_each_group_with_its_own_figures():
    # Five tokens; the second and the fifth differ, by log 2 and by -log 4.
    differences = [0, math.log(2), 0, 0, -math.log(4)]
    logprobs = np.log([0.95, 0.6, 0.6, 0.05, 0.0001])
    rows = mismatch_table(tokens_of(differences, logprobs, [1, 5, 5, 5, 5]))
    found = {(row.cause, row.group): row for row in rows}
    assert [(row.cause, row.group, row.num_tokens) for row in rows] == [
        ("all", "", 5),
        ("position", "1", 1),
        ("position", "2 to 4", 3),
        ("position", "5 to 16", 1),
        ("length", "1", 1),
        ("length", "5 to 16", 4),
        ("probability", "0.9 and more", 1),
        ("probability", "0.5 and more", 2),
        ("probability", "0.01 and more", 1),
        ("probability", "below 0.001", 1),
    ]
    # r - 1 - log r is 1 - log 2 for r = 2, and log 4 - 3/4 for r = 1/4.
    doubled, quartered = 1 - math.log(2), math.log(4) - 0.75
    assert found["all", ""].mean == pytest.approx(3 * math.log(2) / 5)
    assert found["all", ""].largest == pytest.approx(math.log(4))
    assert found["all", ""].mismatch_kl == pytest.approx((doubled + quartered) / 5)
    assert found["position", "2 to 4"].mismatch_kl == pytest.approx(doubled / 3)
    assert found["probability", "0.5 and more"].mean == pytest.approx(math.log(2) / 2)
    assert found["probability", "below 0.001"].mismatch_kl == pytest.approx(quartered)
    assert found["length", "1"].largest == 0
    lines = as_lines(rows)
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["all", "5", "4.2e-01", "1.4e+00", "1.9e-01"]


def test_without_tokens_there_is_no_table():
    with pytest.raises(ValueError, match="there is no sampled token to compare"):
        mismatch_table(SampledTokens.of([Sample([1, 2], [0, 0], [0, 0], [-1, -1])], [np.zeros(0)]))


def test_sides_that_agree_need_no_option():
    setup = Setup("float32", "bfloat16", ["top_p"], "fp8", has_experts=True)
    assert advise(tokens_of(np.full(40, 5e-5)), setup) == []
    assert advise(tokens_of(np.full(40, 5e-4)), setup)


@pytest.mark.parametrize(
    ("setup", "option"),
    [
        (Setup("float32", "float32", ["top_p", "min_p"]), "sampling_mask = true: top_p and min_p"),
        (Setup("float32", "float32", ["repetition_penalty"]), "leave out repetition_penalty: "),
        (Setup("float32", "float32", quantization="fp8"), "leave quantization out of [inference"),
        (
            Setup("float32", "float16"),
            'dtype = "float32" in [inference.args]: the trainer computes in float32, the server in '
            "float16",
        ),
        (Setup("float32", "float32", has_experts=True), "router_replay = true: "),
        (
            Setup("bfloat16", "bfloat16", server_head="float32"),
            'head_dtype = "float32" in [trainer.args]: logits are rounded',
        ),
        (
            Setup("bfloat16", "bfloat16", trainer_head="float32"),
            'hf_overrides = { head_dtype = "float32" } in [inference.args]: logits are rounded',
        ),
    ],
)
def test_what_differs_between_the_sides_names_its_option_alone(setup, option):
    (line,) = advise(tokens_of(np.full(40, -0.1)), setup)
    assert line.startswith(option)
    if "sampling_mask" in option:
        assert line.endswith("the server gives its tokens 0.1 nats more on average")


def test_a_trainer_in_float32_is_not_told_to_set_its_head():
    setup = Setup("float32", "bfloat16", trainer_head="float32")
    words = [line.split(":")[0] for line in advise(tokens_of(np.full(40, 0.1)), setup)]
    assert words == [
        'dtype = "float32" in [inference.args]',
        'hf_overrides = { head_dtype = "float32" } in [inference.args]',
    ]


def test_the_largest_cause_comes_first():
    setup = Setup("bfloat16", "float32", ["top_p"], "fp8", has_experts=True)
    words = [line.split()[0] for line in advise(tokens_of(np.full(40, 0.1)), setup)]
    assert words == ["sampling_mask", "leave", "dtype", "router_replay", "head_dtype"]


def test_a_replayed_router_and_a_float32_head_are_not_named_again():
    setup = Setup(
        "bfloat16", "bfloat16", trainer_head="float32", server_head="float32",
        has_experts=True, router_replay=True,
    )  # fmt: skip
    (line,) = advise(tokens_of(np.full(40, 0.1)), setup)
    assert line.startswith("what is left is rounding to bfloat16")


def test_other_experts_show_as_few_tokens_far_apart():
    differences = np.full(40, 0.01)
    differences[7] = 1.0
    (line,) = advise(tokens_of(differences), Setup("float32", "float32", has_experts=True))
    assert line.endswith("the largest difference is 100 x the median")


def test_a_rounded_head_shows_in_unlikely_tokens():
    differences = [0.001] * 20 + [0.03] * 20
    logprobs = np.log([0.9] * 20 + [0.01] * 20)
    (line,) = advise(tokens_of(differences, logprobs), Setup("bfloat16", "bfloat16"))
    assert "below 0.1 are 3.0e-02 apart, those of 0.5 and more 1.0e-03" in line


def test_a_difference_that_grows_along_the_reply_is_told_from_one_that_does_not():
    steady = np.full(128, 0.02)
    assert not any("grows" in line for line in advise(tokens_of(steady), HALF))
    growing = np.linspace(0, 0.1, 128)
    (line,) = advise(tokens_of(growing), HALF)
    assert line.startswith("no option: the difference grows along the reply, from 1.2e-02 to 8.8e")
    # Likely tokens at the beginning differ by less, whatever their place.
    logprobs = np.log([0.99] * 64 + [0.3] * 64)
    early_are_likely = np.array([0.001] * 64 + [0.1] * 64)
    assert not any("grows" in line for line in advise(tokens_of(early_are_likely, logprobs), HALF))


def test_float32_sides_that_differ_without_a_reason_are_said_to_be_unexplained():
    (line,) = advise(tokens_of(np.full(40, 0.1)), EXACT)
    assert line.startswith("no option is known: float32 on both sides, and 0.1 nats apart")


def test_the_effect_of_a_push_on_the_server_tells_a_scaled_adapter():
    before = np.array([-1.0, -2.0, -3.0])
    ours = before + np.array([0.1, -0.2, 0.3])
    assert scale_of_change(ours, ours, before) == pytest.approx(1)
    assert scale_of_change(ours, before, before) == 0
    assert scale_of_change(ours, before + 2 * (ours - before), before) == pytest.approx(2)


# --- What a training step computes of a sample ----------------------------------------------------

IDS = [3, 14, 15, 92, 65, 35]
LOSS = [0, 0, 1, 1, 0, 1]


def sample_of(**optional):
    num = len(IDS)
    return Sample(IDS, LOSS, np.zeros(num), np.where(LOSS, 0, -1), **optional)


def log_softmax64(row):
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def make_args(tmp_path, **options):
    return RLConfig(output_dir=str(tmp_path), use_cpu=True, **options)


def test_logprobs_of_samples_are_taken_at_the_temperature_over_the_mask(tmp_path):
    model = make_tiny_model()
    logits = model(input_ids=torch.tensor([IDS])).logits[0].detach().numpy() / 0.7
    expected = [log_softmax64(logits[at - 1])[IDS[at]] for at in (2, 3, 5)]
    args = make_args(tmp_path, temperature=0.7)
    (found,) = logprobs_of_samples(model, [sample_of()], args)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    mask = SamplingMask([0, 0, 2, 0, 0, 3], [IDS[2], 8, 1, IDS[5], 2])
    expected[0] = log_softmax64(logits[1, [IDS[2], 8]])[0]
    expected[2] = log_softmax64(logits[4, [1, IDS[5], 2]])[1]
    silent = Sample([1, 2], [0, 0], [0, 0], [-1, -1])
    found, of_silent = logprobs_of_samples(model, [sample_of(sampling_mask=mask), silent], args)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert len(of_silent) == 0 and model.training


def test_logprobs_of_samples_use_the_experts_of_the_server(tmp_path):
    model = make_tiny_moe()
    args = make_args(tmp_path, router_replay=True)
    (own,) = logprobs_of_samples(model, [sample_of()], args)
    chosen = np.tile(np.array([0, 1], np.int16), (len(IDS), 2, 1))
    (replayed,) = logprobs_of_samples(model, [sample_of(routed_experts=chosen)], args)
    assert np.abs(own - replayed).max() > 1e-3
    (again,) = logprobs_of_samples(model, [sample_of()], args)
    np.testing.assert_array_equal(own, again)


def test_experts_of_the_last_microbatch_are_not_those_of_other_tokens(tmp_path):
    args = make_args(tmp_path, router_replay=True)
    model = make_tiny_moe()
    expected = trainer_logprobs(model, IDS, 3, args)
    (of_sample,) = logprobs_of_samples(model, [sample_of()], args)
    for num_tokens in (40, len(IDS)):
        replay_experts(model, torch.tensor([0, 1]).expand(1, num_tokens, 2, 2))
        assert torch.equal(trainer_logprobs(model, IDS, 3, args), expected)
        replay_experts(model, torch.tensor([0, 1]).expand(1, num_tokens, 2, 2))
        (again,) = logprobs_of_samples(model, [sample_of()], args)
        np.testing.assert_array_equal(again, of_sample)


def test_logprobs_of_samples_round_as_the_trainer_does(tmp_path):
    model = make_tiny_model()
    (exact,) = logprobs_of_samples(model, [sample_of()], make_args(tmp_path))
    half = make_args(tmp_path, bf16=True)
    (rounded,) = logprobs_of_samples(model, [sample_of()], half)
    half.head_dtype = "float32"
    (with_head,) = logprobs_of_samples(model, [sample_of()], half)
    assert np.abs(exact - rounded).max() > 1e-4
    assert 0 < np.abs(rounded - with_head).max() < 0.1


# --- Hidden states behind layers ------------------------------------------------------------------


def test_the_layer_that_differs_is_named():
    ours = [[3.0, 4.0]] * 4
    equal, first, third = [[3.0, 4.0]] * 4, [[3.0, 4.5]] * 4, [[3.0, 4.0]] * 2 + [[3.0, 4.5]] * 2
    assert layer_lines(ours, equal, True)[1] == "no layer stands out; 0.0e+00 behind the last one"
    lines, where = layer_lines(ours, third, False)
    assert where == "it begins in layer 2; 1.0e-01 behind the last one"
    assert [line.split()[-1] for line in lines] == ["0.0e+00", "0.0e+00", "1.0e-01", "1.0e-01"]
    assert layer_lines(ours, first, False)[1].startswith("it begins in layer 0; ")
    slow = [[3.0, 4.0 + 0.01 * 2**n] for n in range(4)]  # as rounding grows
    assert layer_lines(ours, slow, False)[1].startswith("no layer stands out; 1.6e-02 ")
    assert layer_lines(ours, slow, True)[1].startswith("it begins in layer 0; ")
    nan = [[3.0, 4.0]] * 2 + [[3.0, math.nan]] * 2
    assert layer_lines(ours, nan, False)[1].startswith("it begins in layer 2; nan ")
    assert layer_lines(nan, ours, True)[1].startswith("it begins in layer 2; nan ")
    other_worker = [[], *ours[1:]]
    with pytest.raises(ValueError, match="of 4 layers here and 3 there"):
        layer_lines(ours, other_worker, True)


class Part(torch.nn.Module):
    """A layer as in vLLM: its own part and the sum before it, for tokens in one dimension."""

    def forward(self, hidden, before):
        return 2 * hidden, before + hidden


def test_states_are_the_sum_behind_each_layer_on_both_sides():
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Part(), Part()])
    states = LayerStates(model, 3)

    def run(rows):
        hidden, before = torch.tensor(rows), torch.zeros(len(rows), 1)
        for layer in model.layers:
            hidden, before = layer(hidden, before)

    run([[9.0]])  # another request
    run([[1.0], [2.0], [3.0], [100.0]])  # the last row is padding
    run([[7.0], [7.0], [7.0]])
    assert states.take() == [[9.0], [21.0]]  # 2 * 3 + 3, and 12 + 9
    run([[1.0], [2.0], [3.0]])
    assert states.take() == [[9.0], [21.0]]

    policy = make_tiny_model()
    states = LayerStates(policy, len(IDS))
    with torch.no_grad():
        found = policy(input_ids=torch.tensor([IDS]), output_hidden_states=True).hidden_states
    assert states.take()[0] == found[1][0, -1].tolist()  # the last of them is behind the norm
    assert len(decoder_layers(policy)) == 2
    with pytest.raises(ValueError, match="Linear has no list of layers"):
        decoder_layers(torch.nn.Linear(1, 1))
