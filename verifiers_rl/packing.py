"""Samples to microbatches, the same number on every rank. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verifiers_rl.types import Microbatch, Sample


def assign_microbatches(
    lengths: Sequence[int], micro_batch_size: int, num_ranks: int
) -> list[list[list[int]]]:
    """Split samples into microbatches of similar length and deal them to the ranks.

    Sorted by length, so that a microbatch pads little; dealt in turn, so that ranks get similar
    work. Each rank gets the same number of microbatches, because a rank that skips a backward would
    leave the others waiting in the gradient all-reduce: where there are too few, a rank gets empty
    ones.

    Args:
        lengths: tokens of each sample.
        micro_batch_size: samples of a microbatch at most, >= 1.
        num_ranks: trainer processes, >= 1.

    Returns:
        For each rank, for each microbatch, positions in `lengths`.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    microbatches = [
        order[i : i + micro_batch_size] for i in range(0, len(order), micro_batch_size)
    ] or [[]]
    microbatches += [[] for _ in range(-len(microbatches) % num_ranks)]
    return [microbatches[rank::num_ranks] for rank in range(num_ranks)]


def collate(samples: Sequence[Sample], pad_token_id: int) -> Microbatch:
    """Pad samples on the right into (B, T) tensors. No samples give one row without loss tokens."""
    width = max((len(s.token_ids) for s in samples), default=2)

    def padded(rows: list[list], fill: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(
            [row + [fill] * (width - len(row)) for row in rows] or [[fill] * width], dtype=dtype
        )

    return Microbatch(
        input_ids=padded([s.token_ids for s in samples], pad_token_id, torch.int64),
        attention_mask=padded(
            [[1] * len(s.token_ids) for s in samples] or [[1] * width], 0, torch.int64
        ),
        loss_mask=padded([s.loss_mask for s in samples], False, torch.bool),
        inference_logprobs=padded([s.inference_logprobs for s in samples], 0.0, torch.float32),
        advantages=padded([s.advantages for s in samples], 0.0, torch.float32),
    )


# One column per token of a batch on its way from rank 0:
# float64 holds token ids exactly (below 2**53).
_FIELDS = ("token_ids", "loss_mask", "inference_logprobs", "policy_versions", "advantages")


def flatten_samples(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples as two plain tensors that can be broadcast:
    lengths (S,) int64 and fields (5, tokens) float64.
    """
    lengths = torch.tensor([len(s.token_ids) for s in samples], dtype=torch.int64)
    rows = [[float(v) for s in samples for v in getattr(s, name)] for name in _FIELDS]
    return lengths, torch.tensor(rows, dtype=torch.float64)


def unflatten_samples(lengths: torch.Tensor, fields: torch.Tensor) -> list[Sample]:
    """Inverse of `flatten_samples`."""
    samples = []
    for columns in fields.split(lengths.tolist(), dim=1):
        ids, mask, logprobs, versions, advantages = columns.tolist()
        samples.append(
            Sample(
                [int(i) for i in ids],
                [bool(m) for m in mask],
                logprobs,
                [int(v) for v in versions],
                advantages,
            )
        )
    return samples
