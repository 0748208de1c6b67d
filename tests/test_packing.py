import math

import torch

from verifiers_rl.packing import assign_microbatches, collate, flatten_samples, unflatten_samples
from verifiers_rl.types import Sample


def make_sample(length, advantage=0.5):
    mask = [False] + [True] * (length - 1)
    sample = Sample(list(range(length)), mask, [-0.25] * length, [3] * length)
    sample.set_advantage(advantage)
    return sample


def test_every_sample_is_in_exactly_one_microbatch():
    for num_ranks in (1, 2, 3):
        ranks = assign_microbatches([5, 9, 2, 7, 7, 1, 3], micro_batch_size=2, num_ranks=num_ranks)
        assert sorted(i for rank in ranks for microbatch in rank for i in microbatch) == list(
            range(7)
        )
        assert all(len(microbatch) <= 2 for rank in ranks for microbatch in rank)


def test_ranks_get_the_same_number_of_microbatches_even_when_there_is_too_little_work():
    ranks = assign_microbatches([4, 4, 4], micro_batch_size=8, num_ranks=2)
    assert [len(rank) for rank in ranks] == [1, 1]
    assert sorted(len(rank[0]) for rank in ranks) == [0, 3]


def test_microbatches_hold_samples_of_similar_length():
    (rank,) = assign_microbatches([1, 100, 2, 101], micro_batch_size=2, num_ranks=1)
    assert [sorted(microbatch) for microbatch in rank] == [[1, 3], [0, 2]]


def test_collate_pads_on_the_right_without_loss():
    microbatch = collate([make_sample(2), make_sample(4)], pad_token_id=9)
    assert microbatch.input_ids.tolist() == [[0, 1, 9, 9], [0, 1, 2, 3]]
    assert microbatch.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert microbatch.loss_mask.tolist() == [[False, True, False, False], [False, True, True, True]]
    assert microbatch.advantages.tolist()[0] == [0.0, 0.5, 0.0, 0.0]


def test_an_empty_microbatch_is_one_row_without_loss():
    microbatch = collate([], pad_token_id=9)
    assert microbatch.input_ids.shape == (1, 2)
    assert microbatch.attention_mask.all() and not microbatch.loss_mask.any()


def test_samples_survive_the_way_to_another_rank():
    samples = [make_sample(3, 0.1), make_sample(5, -1 / 3)]
    samples[0].inference_logprobs[1] = -1.2345678901234567
    samples[1].inference_logprobs[2] = math.nan
    copies = unflatten_samples(*flatten_samples(samples))
    assert copies[0] == samples[0]
    assert math.isnan(copies[1].inference_logprobs[2])
    assert copies[1].advantages == samples[1].advantages
    assert all(isinstance(i, int) for copy in copies for i in copy.token_ids + copy.policy_versions)


def test_large_token_ids_are_exact_in_float64():
    sample = Sample([2**31, 2**31 - 1], [False, True], [0.0, -1.0], [-1, 123456789])
    assert unflatten_samples(*flatten_samples([sample])) == [sample]
    assert flatten_samples([sample])[1].dtype == torch.float64
