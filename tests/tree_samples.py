"""Samples that have beginnings in common, for tests of shared prefixes."""

import random

import numpy as np

from verifiers_rl.types import Sample


def make_sample(token_ids, prompt_length, advantage):
    length = len(token_ids)
    mask = np.arange(length) >= prompt_length
    sample = Sample(token_ids, mask, np.full(length, -5.3), np.where(mask, 0, -1))
    sample.set_advantage(advantage)
    return sample


def make_tree(seed=0):
    """A group, a trunk that branches twice, a prompt that is the beginning of another, two equal
    samples, and samples that share nothing, in any order.
    """
    rng = random.Random(seed)

    def tokens(number):
        return [rng.randrange(3, 250) for _ in range(number)]

    prompt, other, trunk = tokens(6), tokens(3), tokens(4)
    sequences = [(prompt + tokens(length), 6) for length in (1, 4, 7, 1)]
    branch = [*prompt, 251, *tokens(2)]  # its first token is another than that of the group's
    sequences += [(branch + tokens(3), 6), (branch + tokens(2), 6), ([*branch, 252, 253], 6)]
    longer = other + tokens(4)
    sequences += [([*other, 251, 3], 3), (longer + tokens(3), 7), (longer + tokens(5), 7)]
    sequences += [(trunk + tokens(2), 2)] * 2
    sequences += [(tokens(8), 3), (tokens(2), 1), (tokens(1), 1)]
    samples = [make_sample(ids, at, rng.uniform(0.1, 1) * (-1) ** i)
               for i, (ids, at) in enumerate(sequences)]  # fmt: skip
    rng.shuffle(samples)
    return samples
