"""Packs samples into microbatches of bounded size, the same number on every rank. Pure functions.

A microbatch is a grid of rows. Three layouts:

    flat     one row with sample after sample and no padding; for attention kernels that take the
             sequences' lengths (flash attention)
    packed   rows as wide as the microbatch's longest sample. Shorter samples share a row if it is
             at most MAX_SHARED_WIDTH wide; for attention with a mask (SDPA, eager, flex)
    padded   one sample per row; for models that cannot keep the sequences of a row apart

If several samples share a row, `position_ids` start at 0 in each of them. transformers tells the
samples apart by this.

Samples with a common beginning (a group's prompt, the trunk of a trajectory that branches) can have
its tokens in common, so that these are computed once. The samples of such a bundle are neighbours
in one row, in the order of a walk through their tree, depth first:

    samples         a b c d    a b c e f    a b g
    row             a b c d  e f  g
    position_ids    0 1 2 3  3 4  2
    visible_until   7 7 6 4  6 6  7
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map_only

from verifiers_rl.types import ROUTED_EXPERTS, Sample, SampleSizes, join_column

Layout = Literal["flat", "packed", "padded"]
Rows = list[list[int]]  # for each row, the indices of its samples
# A shared row needs a mask of width^2 entries, a row of one sample needs none. Beyond this width,
# the mask costs more than the padding that it saves.
MAX_SHARED_WIDTH = 4096
# Up to this width, samples with tokens in common share a row if a mask costs less than it saves. In
# a wider row, attention is computed for each sample, see `forward.py`.
MAX_MASKED_WIDTH = 1024
MIN_COMMON = 32  # tokens in common that are worth a call of attention in each layer
# The extras that the model needs where it computes a token. All others go with the prediction of
# the token, if it carries loss.
OF_INPUTS = (ROUTED_EXPERTS,)


@dataclass(frozen=True, slots=True)
class Targets:
    """The N tokens of a microbatch that carry loss, and where the model predicts each of them.

    Attributes:
        rows, offsets: (N,) int64, the row and the place in it of the logits that predict the token.
        token_ids: (N,) int64, the token itself.
        sequence_ids: (N,) int64, number of its sample, from 0 over the samples that carry loss.
        inference_logprobs, advantages: (N,) float32, see `Sample`.
        weights: (N,) float32, weight of the token in the batch's loss.
        extras: the samples' other columns, (N, ...) each.
    """

    rows: Tensor
    offsets: Tensor
    token_ids: Tensor
    sequence_ids: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of a sample that the samples before it in its row do not have.

    Attributes:
        row: of the microbatch.
        start, stop: its offsets in the row.
        path: (tokens of the sample,) int64, the offsets of all tokens of the sample. The tokens of
            padding see each other.
    """

    row: int
    start: int
    stop: int
    path: np.ndarray


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward pass: samples laid out as B rows of T tokens, see `packing.py`.

    A token sees the tokens before it in its sample, and itself. Samples that begin with the same
    tokens may have these tokens in common; the rest of each follows, one sample after the other.

    Attributes:
        input_ids: (B, T) int64.
        position_ids: (B, T) int64, position of the token in its sample, from 0.
        visible_until: (B, T) int64. The token at offset k is seen from the offsets
            k <= q < visible_until[k].
        targets: the tokens that carry loss. Without one, a token that the loss must not count, so
            that forward and backward have something to compute.
        sample_ids: the samples whose tokens `targets` has, one after the other, by their index in
            the batch; empty without loss.
        extras: those `OF_INPUTS` that a sample has, (B, T, ...) each; -1 where there is none.
        segments: of each sample that has tokens of its own, and of the padding, from left to right
            in each row.
        shares_rows: whether a row has several samples.
        num_tokens: tokens without padding.
    """

    input_ids: Tensor
    position_ids: Tensor
    visible_until: Tensor
    targets: Targets
    segments: list[Segment]
    shares_rows: bool
    num_tokens: int
    sample_ids: list[int] = field(default_factory=list)
    extras: dict[str, Tensor] = field(default_factory=dict)

    @property
    def has_loss(self) -> bool:
        """Whether `targets` carry loss."""
        return bool(self.sample_ids)


@dataclass(frozen=True, slots=True)
class ModelSupport:
    """What a model can compute at once. `forward.try_model` finds it.

    Attributes:
        layout: of its rows.
        shares_prefixes: tokens that samples have in common are computed once.
        hidden_size: the longer a row is relative to it, the more attention costs.
        attention: its implementation, or "varlen" in place of "sdpa", or, to try these, "mask" or
            "calls". "eager" computes whole rows, so those stay narrow.
        token_budget: of one forward pass on a rank; None for that of the options.
    """

    layout: Layout = "packed"
    shares_prefixes: bool = False
    hidden_size: int = 1024
    attention: str = "sdpa"
    token_budget: int | None = None


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
        if layout == "flat":
            return sum(_cost(lengths[i], hidden_size) for i in rows[0])
        width = max(sum(lengths[i] for i in row) for row in rows)
        return len(rows) * _cost(width, hidden_size)

    # From the costliest on, each goes to the rank with the least cost so far that has a place left.
    per_rank = max(math.ceil(len(microbatches) / num_ranks), 1)
    dealt: list[list[Rows]] = [[] for _ in range(num_ranks)]
    ranks = [(0.0, rank) for rank in range(num_ranks)]
    for rows in sorted(microbatches, key=cost, reverse=True):
        spent, rank = heappop(ranks)
        dealt[rank].append(rows)
        if len(dealt[rank]) < per_rank:
            heappush(ranks, (spent + cost(rows), rank))
    for share_of_rank in dealt:
        share_of_rank += [[] for _ in range(per_rank - len(share_of_rank))]
    return dealt


def _cost(width: int, hidden_size: int) -> int:
    """Return the operations per layer for a sequence of this width, divided by 4 h: 24 h^2 per
    token in its matrices, 4 h per pair of tokens in attention.
    """
    return width * (6 * hidden_size + width)


def _fill(lengths: Sequence[int], max_tokens: int, layout: Layout) -> list[Rows]:
    """Return microbatches. Each has what of the samples that are left finds a place in it."""
    left = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    microbatches: list[Rows] = []
    while left:
        order, left = left, []
        longest = lengths[order[0]]
        width = max(max_tokens, longest) if layout == "flat" else longest
        max_rows = max(max_tokens // width, 1)
        is_shared = layout == "flat" or (layout == "packed" and width <= MAX_SHARED_WIDTH)
        rows: Rows = []
        room: list[int] = []  # of each row, for more samples
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
            # fits, without a look at those before: with thousands, that would take seconds.
            fits = bisect_left(order, -max(room), at, key=lambda i: -lengths[i])
            left += order[at:fits]
            at = fits
        microbatches.append(rows)
    return microbatches


def plan_batch(
    sizes: SampleSizes,
    is_computed: np.ndarray,
    max_tokens: int,
    num_ranks: int,
    support: ModelSupport,
) -> tuple[list[list[Rows]], np.ndarray]:
    """Do as `plan_microbatches`, for the samples of a batch and their common beginnings. Samples
    with a common beginning go into one row, where that saves time.

    Args:
        sizes: of the samples.
        is_computed: (S,) bool, the samples to plan.
        max_tokens, num_ranks: see `plan_microbatches`.
        support: of the model.

    Returns:
        For each rank, for each of its microbatches, the rows; and (S,) int64, how many tokens at
        its beginning each sample has in common with the sample before it in its row.
    """
    widest = max_tokens if support.shares_prefixes else 0  # no row has room for a second sample
    if support.attention == "eager":
        widest = min(widest, MAX_MASKED_WIDTH)
    hidden_size = support.hidden_size
    bundles: list[list[int]] = []  # of neighbours in `sizes.order` that share a row
    widths: list[int] = []  # the tokens of each
    num_shared = np.zeros_like(sizes.lengths)
    common = 0  # with the last sample that is computed
    for i, shared in zip(sizes.order.tolist(), sizes.num_shared.tolist(), strict=True):
        common = min(common, shared)
        if not is_computed[i]:
            continue
        length = int(sizes.lengths[i])
        own = length - common
        if bundles and _saves_time(widths[-1], own, common, widest, hidden_size):
            bundles[-1].append(i)
            widths[-1] += own
            num_shared[i] = common
        else:
            bundles.append([i])
            widths.append(length)
        common = length
    plans = plan_microbatches(widths, max_tokens, num_ranks, support.layout, hidden_size)
    of_ranks = [
        [[[i for bundle in row for i in bundles[bundle]] for row in rows] for rows in plan]
        for plan in plans
    ]
    return of_ranks, num_shared


def _saves_time(width: int, own: int, common: int, max_tokens: int, hidden_size: int) -> bool:
    """Return whether a sample of `common` + `own` tokens costs less in a row of `width` tokens that
    has the common ones already than in a row of its own.
    """
    if common == 0 or width + own > max_tokens:
        return False
    if width + own > MAX_MASKED_WIDTH:  # then attention costs the same, see forward.py
        return common >= MIN_COMMON
    apart = _cost(width, hidden_size) + _cost(common + own, hidden_size)
    return _cost(width + own, hidden_size) < apart


class _LossTokens(NamedTuple):
    """The n loss tokens of a sample in a microbatch.

    Attributes:
        positions: (n,), in the sample.
        row, offsets: of the logits that predict them; (n,).
        weight: of each in the batch's loss.
    """

    sample: Sample
    positions: np.ndarray
    row: int
    offsets: np.ndarray
    weight: float


def collate(
    samples: Sequence[Sample],
    rows: Rows,
    weights: Sequence[float] | np.ndarray,
    pad_token_id: int,
    num_shared: Sequence[int] | np.ndarray | None = None,
) -> Microbatch:
    """Lay out samples as rows of equal width. Without rows, return one padding row without loss.

    Args:
        samples: of the batch, whose columns a row without samples has, too.
        rows: indices of samples, from `plan_batch`.
        weights: weight of each sample's loss tokens in the batch's loss.
        pad_token_id: fills the rest of each row.
        num_shared: from `plan_batch`; by default, no sample shares tokens.
    """
    shares = np.zeros(len(samples), int) if num_shared is None else num_shared
    # At least 2, because a row of one token predicts nothing.
    width = max([2, *(sum(samples[i].num_tokens - int(shares[i]) for i in r) for r in rows)])
    shape = (max(len(rows), 1), width)
    input_ids = np.full(shape, pad_token_id)
    positions = np.arange(width)
    position_ids = np.tile(positions, (shape[0], 1))
    visible_until = np.full(shape, width)
    chosen, extras = [samples[i] for row in rows for i in row], {}
    for name in OF_INPUTS:
        if known := [s.extras[name][:0] for s in chosen or samples if name in s.extras]:
            like = np.concatenate(known)
            extras[name] = np.full((*shape, *like.shape[1:]), -1, like.dtype)
    segments: list[Segment] = []
    sample_ids: list[int] = []  # of samples with loss tokens
    parts: list[_LossTokens] = []  # of each of them
    num_tokens = 0
    for r, row in enumerate(rows):
        stop = start_of_last = 0
        path = positions[:0]
        for i in row:
            sample, common = samples[i], int(shares[i])
            start, stop = stop, stop + sample.num_tokens - common
            path = np.concatenate([path[:common], positions[start:stop]])
            input_ids[r, start:stop] = sample.token_ids[common:]
            position_ids[r, start:stop] = np.arange(common, len(path))
            for name, grid in extras.items():
                if name in sample.extras:
                    # The end of an earlier sample has none, where a later one goes on.
                    known = grid[r, path]
                    grid[r, path] = np.where(known < 0, sample.extras[name], known)
            visible_until[r, path] = stop
            if stop > start:
                segments.append(Segment(r, start, stop, path))
                start_of_last = start
            (at,) = sample.loss_mask.nonzero()  # its first token is not in the loss
            if len(at):
                parts.append(_LossTokens(sample, at, r, path[at - 1], weights[i]))
                sample_ids.append(i)
        num_tokens += stop
        if stop < width:
            segments.append(Segment(r, stop, width, positions[stop:]))
        # The positions of the last sample continue in the padding, so that a row of one sample
        # looks like one sequence.
        first = position_ids[r, start_of_last]
        position_ids[r, start_of_last:] = first + positions[: width - start_of_last]
    if not parts:
        # The head must take part in every backward, or DDP waits for its gradient. So one token is
        # predicted, and its loss is not used.
        nothing = Sample(input_ids[0, :2], positions[:2] == 1, np.zeros(2), np.zeros(2))
        parts.append(_LossTokens(nothing, positions[1:2], 0, positions[:1], 0.0))
        no = positions[:0]  # the samples are there for the names of their columns
        parts += [_LossTokens(sample, no, 0, no, 0.0) for sample in samples]
    return Microbatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        visible_until=torch.from_numpy(visible_until),
        targets=_targets_of(parts),
        segments=segments,
        shares_rows=any(len(row) > 1 for row in rows),
        num_tokens=num_tokens,
        sample_ids=sample_ids,
        extras={name: torch.from_numpy(grid) for name, grid in extras.items()},
    )


def _targets_of(parts: Sequence[_LossTokens]) -> Targets:
    """Return the targets of a microbatch, one sample after the other."""
    samples, positions, rows, offsets, weights = zip(*parts, strict=True)
    counts = torch.tensor([*map(len, positions)])
    part = torch.arange(len(samples)).repeat_interleave(counts)  # of each token

    def column(name: str) -> Tensor:
        own = []
        for sample, at in zip(samples, positions, strict=True):
            whole = sample.column(name)
            own.append((len(at), None if whole is None else whole[at]))
        return torch.from_numpy(join_column(name, own))

    extras = dict.fromkeys(name for sample in samples for name in sample.extras)
    return Targets(
        rows=torch.tensor(rows)[part],
        offsets=torch.from_numpy(np.concatenate(offsets)),
        token_ids=column("token_ids").long(),
        sequence_ids=part,
        inference_logprobs=column("inference_logprobs"),
        advantages=column("advantages"),
        weights=torch.tensor(weights, dtype=torch.float32)[part],
        extras={name: column(name) for name in extras if name not in OF_INPUTS},
    )


register_dataclass(Targets)
register_dataclass(Microbatch)


def copy_to(part: Any, device: torch.device) -> Any:
    """Copy a tensor, or all tensors of a microbatch. From pinned memory, so the host does not wait
    for it.
    """

    def copy(tensor: Tensor) -> Tensor:
        pinned = tensor.pin_memory() if device.type == "cuda" else tensor
        return pinned.to(device, non_blocking=True)

    return tree_map_only(Tensor, copy, part)
