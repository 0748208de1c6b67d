"""Which examples a step gets, and the agents of a group. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from verifiers_rl.types import Rollout

# Size of a stream, which has no end. No run reaches this number, so examples can be numbered
# consecutively over several environments even if some are streams.
ENDLESS = 2**60


def example_index(position: int, num_examples: int, shuffle: bool, seed: int) -> int:
    """Return the example at this position of an endless run. Every epoch has each example once, in
    another order. A stream has its own order and a single epoch.
    """
    if num_examples >= ENDLESS:
        return position
    epoch, offset = divmod(position, num_examples)
    if not shuffle:
        return offset
    return int(_epoch_order(num_examples, seed, epoch)[offset])


@lru_cache(maxsize=32)  # a step uses many positions of one or two epochs of each environment
def _epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_examples)


# Takes positions of an endless run and the number of examples of each environment. Returns the
# examples at these positions, numbered consecutively over all environments. An example must depend
# on its position alone: a resumed run continues at the next position, and nothing else is saved.
ExampleOrder = Callable[[range, Sequence[int]], Sequence[int]]


def order_examples(
    positions: range,
    sizes: Sequence[int],
    weights: Sequence[float] | None = None,
    shuffle: bool = True,
    seed: int = 42,
) -> list[int]:
    """Choose examples for positions: the `ExampleOrder` of a run that sets no other.

    Positions are dealt to the environments in proportion to their weights by a low-discrepancy
    sequence (multiples of the golden ratio modulo 1), so that every part of the run has about the
    right share of each. Within an environment, `example_index` chooses the next example.

    Args:
        positions: positions of an endless run, from 0.
        sizes: number of examples of each environment; `ENDLESS` for a stream.
        weights: share of each environment, up to a common factor; equal by default.
        shuffle, seed: see `example_index`.
    """
    if len(sizes) == 1:
        return [example_index(p, sizes[0], shuffle, seed) for p in positions]
    shares = np.array(weights or [1.0] * len(sizes), float)
    borders = np.cumsum(shares / shares.sum())[:-1]
    golden = (5**0.5 - 1) / 2
    dealt = np.searchsorted(borders, np.arange(positions.stop) * golden % 1, "right")
    counts = np.bincount(dealt[: positions.start], minlength=len(sizes))
    examples = []
    for env in dealt[positions.start :].tolist():
        own = example_index(int(counts[env]), sizes[env], shuffle, seed)
        examples.append(sum(sizes[:env]) + own)
        counts[env] += 1
    return examples


def examples_at(order: ExampleOrder, positions: range, sizes: Sequence[int]) -> list[int]:
    """Return the examples that this order has at these positions.

    Raises:
        ValueError: the order returns too few or too many examples, or one that does not exist.
    """
    indices = [*map(int, order(positions, sizes))]
    if len(indices) != len(positions):
        raise ValueError(
            f"example_order returned {len(indices)} examples for the {len(positions)} positions "
            f"{positions.start} to {positions.stop - 1}"
        )
    if wrong := [index for index in indices if not 0 <= index < sum(sizes)]:
        raise ValueError(
            f"example_order returned example {wrong[0]}; there are 0 to {sum(sizes) - 1}"
        )
    return indices


def first_of_each(sizes: Sequence[int], num_examples: int) -> list[int]:
    """Return the first `num_examples` examples of each environment, or all if there are fewer."""
    return [
        sum(sizes[:env]) + own
        for env, size in enumerate(sizes)
        for own in range(min(num_examples, size))
    ]


def group_by_role(group: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the surviving rollouts of each agent."""
    roles: dict[str, list[Rollout]] = {}
    for rollout in group:
        if rollout.error is None:
            roles.setdefault(rollout.role, []).append(rollout)
    return list(roles.values())
