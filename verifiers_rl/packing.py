"""Packs samples into microbatches of bounded size, the same number on every rank. Pure functions.

A microbatch is a grid of rows. Three layouts:

    flat     one row with sample after sample and no padding; for attention kernels that take the
             sequences' lengths (flash attention)
    packed   rows as wide as the microbatch's longest sample. Shorter samples share a row if it is
             at most MAX_SHARED_WIDTH wide; for attention with a mask (SDPA, eager, flex)
    padded   one sample per row; for models that cannot keep the sequences of a row apart

If several samples share a row, `position_ids` start at 0 in each of them. transformers tells the
samples apart by this.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch

from verifiers_rl.types import Microbatch, Sample

Layout = Literal["flat", "packed", "padded"]
Rows = list[list[int]]  # for each row, the indices of its samples
# A shared row needs a mask of width^2 entries, a row of one sample needs none. Beyond this width,
# the mask costs more than the padding that it saves.
MAX_SHARED_WIDTH = 4096


def plan_microbatches(
    lengths: Sequence[int],
    max_tokens: int,
    num_ranks: int = 1,
    layout: Layout = "packed",
    hidden_size: int = 1024,
) -> list[list[Rows]]:
    """Split samples into microbatches and deal them to the ranks.

    First-fit-decreasing: from the longest on, each sample goes into the first place with room. Each
    rank gets the same number of microbatches, because a rank that skips a backward would leave the
    others waiting in the gradient all-reduce. A rank with too few gets empty ones.

    Args:
        lengths: number of tokens of each sample.
        max_tokens: tokens of a microbatch, with padding; a longer sample gets one of its own.
        num_ranks: trainer processes, >= 1.
        layout: see above.
        hidden_size: of the model. The longer a row is relative to it, the more attention costs.

    Returns:
        For each rank, for each microbatch, its rows of indices into `lengths`.
    """
    microbatches = _fill(lengths, max_tokens, layout)
    if num_ranks > 1 and lengths:
        # Lower the bound, so that no rank idles while another has a full microbatch: take the
        # smallest bound that needs no more rounds.
        rounds = math.ceil(len(microbatches) / num_ranks)
        bound = max(math.ceil(sum(lengths) / (rounds * num_ranks)), max(lengths))
        while bound < max_tokens:
            candidate = _fill(lengths, bound, layout)
            if len(candidate) <= rounds * num_ranks:
                microbatches = candidate
                break
            bound = math.ceil(bound * 1.05)

    def cost(rows: Rows) -> float:
        # Operations per layer, divided by 4 h: 24 h^2 per token in its matrices, 4 h per pair of
        # tokens in attention.
        widths = [sum(lengths[i] for i in row) for row in rows]
        if layout != "flat":
            return len(rows) * max(widths) * (6 * hidden_size + max(widths))
        return sum(lengths[i] * (6 * hidden_size + lengths[i]) for i in rows[0])

    # From the costliest on, each goes to the rank with the least cost so far that has a place left.
    per_rank = max(math.ceil(len(microbatches) / num_ranks), 1)
    dealt: list[list[Rows]] = [[] for _ in range(num_ranks)]
    spent = [0.0] * num_ranks
    for rows in sorted(microbatches, key=cost, reverse=True):
        rank = min(
            (r for r in range(num_ranks) if len(dealt[r]) < per_rank), key=lambda r: spent[r]
        )
        dealt[rank].append(rows)
        spent[rank] += cost(rows)
    for share_of_rank in dealt:
        share_of_rank += [[] for _ in range(per_rank - len(share_of_rank))]
    return dealt


def _fill(lengths: Sequence[int], max_tokens: int, layout: Layout) -> list[Rows]:
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    microbatches = []
    while order:
        rows, order = _first_fit(order, lengths, max_tokens, layout)
        microbatches.append(rows)
    return microbatches


def _first_fit(
    order: list[int], lengths: Sequence[int], max_tokens: int, layout: Layout
) -> tuple[Rows, list[int]]:
    """Return one microbatch, and the samples that found no place in it."""
    longest = lengths[order[0]]
    width = max(max_tokens, longest) if layout == "flat" else longest
    max_rows = max(max_tokens // width, 1)
    is_shared = layout == "flat" or (layout == "packed" and width <= MAX_SHARED_WIDTH)
    rows: Rows = []
    room: list[int] = []  # of each row, for more samples
    left: list[int] = []
    at = 0
    while at < len(order):
        i = order[at]
        place = next((r for r in range(len(rows)) if room[r] >= lengths[i]), None)
        # A short sample opens no row, because the rows of the next microbatch are narrower.
        if place is None and len(rows) < max_rows and (2 * lengths[i] > width or not rows):
            place = len(rows)
            rows.append([])
            room.append(width if is_shared else lengths[i])
        if place is not None:
            rows[place].append(i)
            room[place] -= lengths[i]
            at += 1
            continue
        # From here on no sample opens a row, because they get shorter. Go on at the first that
        # fits, without a look at those before: with thousands of samples, that would take seconds.
        fits = bisect_left(order, -max(room), at, key=lambda i: -lengths[i])
        left += order[at:fits]
        at = fits
    return rows, left


def collate(
    samples: Mapping[int, Sample] | Sequence[Sample],
    rows: Rows,
    weights: Sequence[float],
    pad_token_id: int,
) -> Microbatch:
    """Lay out samples as rows of equal width. Without rows, return one padding row without loss.

    Args:
        samples: by their index in the batch; those in `rows` are enough.
        rows: indices of samples, from `plan_microbatches`.
        weights: weight of each sample's loss tokens in the batch's loss.
        pad_token_id: fills the rest of each row.
    """
    # At least 2, because a row of one token predicts nothing.
    width = max([2, *(sum(len(samples[i].token_ids) for i in row) for row in rows)])
    shape = (max(len(rows), 1), width)
    positions = np.arange(width)
    position_ids = np.tile(positions, (shape[0], 1))
    sequence_ids = np.full(shape, -1)
    input_ids = np.full(shape, pad_token_id)
    loss_mask = np.zeros(shape, bool)
    inference_logprobs, advantages, loss_weights = np.zeros((3, *shape), np.float32)
    number = 0
    for r, row in enumerate(rows):
        start = stop = 0
        for i in row:
            sample = samples[i]
            start, stop = stop, stop + len(sample.token_ids)
            here = (r, slice(start, stop))
            position_ids[here] = positions[: stop - start]
            input_ids[here] = sample.token_ids
            sequence_ids[here] = number
            loss_mask[here] = sample.loss_mask
            inference_logprobs[here] = sample.inference_logprobs
            advantages[here] = sample.advantages
            loss_weights[here] = weights[i]
            number += 1
        # The positions of the last sample continue in the padding, so that a row of one sample
        # looks like one sequence.
        position_ids[r, start:] = positions[: width - start]
    return Microbatch(
        *map(
            torch.from_numpy,
            (
                input_ids,
                position_ids,
                sequence_ids,
                loss_mask,
                inference_logprobs,
                advantages,
                loss_weights,
            ),
        )
    )
