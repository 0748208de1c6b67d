import math
import random

import numpy as np
import pytest
import torch

from tests import tree_samples
from tests.helpers import sent
from verifiers_rl.packing import collate, plan_microbatches
from verifiers_rl.types import ROUTED_EXPERTS


def make_sample(length, advantage=0.5):
    return tree_samples.make_sample(list(range(length)), 1, advantage)


def random_lengths(low, high, count):
    rng = random.Random(0)
    return [round(math.exp(rng.uniform(math.log(low), math.log(high)))) for _ in range(count)]


@pytest.mark.parametrize(
    "layout, num_ranks, budget, lengths",
    [
        ("packed", 2, 2048, (16, 1024, 150)),
        ("packed", 8, 16384, (100, 2048, 512)),
        ("flat", 8, 16384, (16, 1024, 512)),
        ("flat", 3, 16384, (95, 105, 512)),
        ("padded", 3, 16384, (100, 2048, 512)),
    ],
)
def test_every_sample_is_in_one_microbatch_within_the_budget_and_ranks_share_the_work(
    layout, num_ranks, budget, lengths
):
    lengths = random_lengths(*lengths)
    plan = plan_microbatches(lengths, budget, num_ranks, layout)
    found = [i for rank in plan for rows in rank for row in rows for i in row]
    assert sorted(found) == list(range(len(lengths)))
    for rows in (rows for rank in plan for rows in rank):
        widths = [sum(lengths[i] for i in row) for row in rows]
        assert len(rows) * max(widths, default=0) <= budget
        assert layout != "flat" or len(rows) <= 1
        assert layout != "padded" or all(len(row) == 1 for row in rows)
    (alone,) = plan_microbatches(lengths, budget, 1, layout)
    assert {len(rank) for rank in plan} == {math.ceil(len(alone) / num_ranks)}
    sizes = [len(rows) * max(sum(lengths[i] for i in row) for row in rows) for rows in alone]
    assert sum(sizes) <= {"flat": 1, "packed": 1.1, "padded": 1.2}[layout] * sum(lengths)
    loads = [sum(lengths[i] for rows in rank for row in rows for i in row) for rank in plan]
    assert max(loads) < 1.4 * sum(loads) / num_ranks


def test_rows_too_wide_for_a_mask_are_not_shared():
    (plan,) = plan_microbatches([5000, 3000, 1000, 1000], 10_000)
    assert all(len(row) == 1 for rows in plan for row in rows)
    (plan,) = plan_microbatches([4000, 2100, 1000, 900], 8_000)
    assert plan == [[[0], [1, 2, 3]]]


def test_a_sample_beyond_the_budget_gets_a_microbatch_of_its_own():
    for layout in ("packed", "flat", "padded"):
        (plan,) = plan_microbatches([3, 50, 4], 10, layout=layout)
        assert [[1]] in plan


def test_little_work_is_split_and_what_cannot_be_leaves_empty_microbatches():
    assert plan_microbatches([4] * 4, 1000, num_ranks=2) == [[[[0], [1]]], [[[2], [3]]]]
    assert sorted(plan_microbatches([4], 1000, num_ranks=2)) == [[[]], [[[0]]]]
    assert plan_microbatches([], 1000, num_ranks=2) == [[[]], [[]]]


def test_collate_lays_samples_out_in_rows():
    samples = sent([make_sample(2), make_sample(4, 0.25), make_sample(1)])
    microbatch = collate(samples, [[1], [0, 2]], weights=[1.0, 2.0, 3.0], pad_token_id=9)
    expected = {
        "input_ids": [[0, 1, 2, 3], [0, 1, 0, 9]],
        "position_ids": [[0, 1, 2, 3], [0, 1, 0, 1]],
        "visible_until": [[4, 4, 4, 4], [2, 2, 3, 4]],
        "rows": [0, 0, 0, 1],
        "offsets": [0, 1, 2, 0],
        "token_ids": [1, 2, 3, 1],
        "sequence_ids": [0, 0, 0, 1],
        "advantages": [0.25, 0.25, 0.25, 0.5],
        "weights": [2, 2, 2, 1],
        "inference_logprobs": pytest.approx([-5.3] * 4),
    }
    for name, values in expected.items():
        part = microbatch if hasattr(microbatch, name) else microbatch.targets
        assert getattr(part, name).tolist() == values, name
    assert microbatch.num_tokens == 7 and microbatch.has_loss and microbatch.shares_rows
    microbatch.input_ids[1, 0] = 5  # the microbatch is a copy
    assert samples[0].token_ids.tolist() == [0, 1]


def test_rows_of_one_sample_read_as_one_sequence_that_can_predict():
    def collated(*lengths):
        return collate([make_sample(length) for length in lengths], [[0], [1]], [1.0] * 2, 9)

    assert collated(2, 4).position_ids.tolist() == [[0, 1, 2, 3]] * 2  # so that it needs no mask
    assert collated(1, 1).input_ids.tolist() == [[0, 9]] * 2


def test_an_empty_microbatch_is_one_row_without_loss():
    # A loss finds the columns of the batch in it, without a value.
    sample = make_sample(3, 0.1)
    sample.extras |= {"mark": np.ones((3, 2), np.int8), "score": np.ones(3, np.float32)}
    sample.extras[ROUTED_EXPERTS] = np.ones((3, 1, 1), np.int16)
    microbatch = collate([sample], [], [1.0], 9)
    targets = microbatch.targets
    assert microbatch.input_ids.tolist() == [[9, 9]]
    assert not microbatch.has_loss and microbatch.num_tokens == 0
    assert (targets.token_ids.tolist(), targets.weights.tolist()) == ([9], [0])
    assert {*targets.extras} == {"mark", "score"} and targets.extras["mark"].tolist() == [[-1, -1]]
    assert targets.extras["mark"].dtype == torch.int8 and targets.extras["score"].isnan()


@pytest.mark.parametrize("dtype", [bool, np.uint8])
def test_a_column_without_a_number_for_none_is_refused(dtype):
    """A sample without the column would have True, or 255, there."""
    sample = make_sample(3)
    sample.extras["is_hard"] = np.ones(sample.num_tokens, dtype)
    with pytest.raises(ValueError, match=r"extras\['is_hard'\] has the dtype .*, such as .astype"):
        collate([sample], [[0]], [1.0], 9)


def test_columns_of_samples_are_as_wide_as_the_widest_and_hold_all_numbers():
    samples, wide = [make_sample(2), make_sample(2), make_sample(1)], [[3, 4], [5, 6]]
    samples[0].extras = {"ids": np.array([[1], [2]], np.int16), "own": np.array([1, 2])}
    samples[1].extras = {"ids": np.array(wide, np.int16), "own": np.array([0.5, 0.25])}
    ids, own = ([copy.extras[name] for copy in sent(samples)] for name in ("ids", "own"))
    assert [column.tolist() for column in ids] == [[[1, -1], [2, -1]], wide, [[-1, -1]]]
    assert own[0].tolist() == [1, 2] and own[1].tolist() == [0.5, 0.25] and np.isnan(own[2]).all()
    assert (ids[0].dtype, own[0].dtype) == (np.int16, np.float64)
