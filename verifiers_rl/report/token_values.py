"""The trainer's numbers of single tokens, for a share of the groups of each batch.

They are taken from the forward passes of the step, on each rank, and end on rank 0 in the order of
each sample's own tokens, however microbatches had laid them out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiers_rl.losses import LossInputs
from verifiers_rl.report.rollouts import TOKEN_DTYPES
from verifiers_rl.types import Batch, Rollout, SampleSizes

# What a batch's loss tokens have: trainer_logprobs, entropy, is_masked, and 1 where computed.
_NUM_VALUES = 4


def choose_samples(sizes: SampleSizes, step: int, groups_per_batch: int, share: float) -> Any:
    """Return which samples have their tokens written, (S,) bool: those of every (1 / share)-th
    group of the run. Each rank finds the same.

    Args:
        sizes: of the batch.
        step: of the batch, from 0.
        groups_per_batch: groups that a batch is meant to have.
        share: 0 to 1.
    """
    number = step * groups_per_batch + sizes.group_ids
    return np.floor(number * share) > np.floor((number - 1) * share)


class TokenValues:
    """Collects values of the loss tokens of some samples, from microbatches on all ranks.

    Args:
        sizes: of all samples of the batch.
        is_chosen: (S,) bool, the samples.
        device: of this rank.

    Attributes:
        of_samples: after `collect`, on rank 0: for each chosen sample, by its index, the values of
            its loss tokens: (3, N) float32, `trainer_logprobs`, `entropy` and 1 where a mask took
            the token out. NaN in a sample that was not computed.
    """

    def __init__(self, sizes: SampleSizes, is_chosen: np.ndarray, device: torch.device) -> None:
        self.of_samples: dict[int, np.ndarray] = {}
        self._num_tokens = sizes.num_loss_tokens
        self._chosen = np.flatnonzero(is_chosen).tolist()
        stops = np.cumsum(np.where(is_chosen, sizes.num_loss_tokens, 0)).tolist()
        self._places = {i: slice(stops[i] - int(self._num_tokens[i]), stops[i])
                        for i in self._chosen}  # fmt: skip
        self._total = stops[-1] if stops else 0
        self._values = torch.zeros((_NUM_VALUES, self._total), device=device)

    def add(
        self, sample_ids: Sequence[int], inputs: LossInputs, metrics: Mapping[str, Tensor]
    ) -> None:
        """Add a microbatch. The host does not wait for the device.

        Args:
            sample_ids: the samples whose loss tokens `inputs` has, one sample after the other.
            inputs: what the loss got.
            metrics: what the loss returned; those named `masked_share` say which tokens a mask
                took out.
        """
        if not any(i in self._places for i in sample_ids):
            return
        of_masks = [values for name, values in metrics.items() if name.startswith("masked_share")]
        logprobs = inputs.trainer_logprobs.detach().float()
        masked = torch.zeros_like(logprobs)
        for values in of_masks:
            masked = torch.maximum(masked, values.detach().float())
        rows = [logprobs, inputs.entropy.detach().float(), masked, torch.ones_like(logprobs)]
        stacked = torch.stack(rows)
        start = 0
        for i in sample_ids:
            stop = start + int(self._num_tokens[i])
            if i in self._places:
                self._values[:, self._places[i]] = stacked[:, start:stop]
            start = stop

    def collect(self, world_size: int) -> None:
        """Bring the values of all ranks to rank 0, and wait for them. Every rank must call this."""
        if world_size > 1:  # each sample is computed by at most one rank; the others have zeros
            torch.distributed.reduce(self._values, 0)
        values = self._values.cpu().numpy()
        values[:3, values[3] == 0] = np.nan
        self.of_samples = {i: values[:3, place] for i, place in self._places.items()}


class TokenTexts:
    """The text of single tokens, as bytes: a character may be in several tokens.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _table(self) -> dict[int, bytes]:
        vocabulary = self._tokenizer.get_vocab()
        added = set(getattr(self._tokenizer, "added_tokens_decoder", {}))
        byte_of = _bytes_of_characters() if "Ġ" in vocabulary else {}

        def text(token: str, number: int) -> bytes:
            if number in added:  # as it is written
                return token.encode()
            if byte_of and all(c in byte_of for c in token):
                return bytes(byte_of[c] for c in token)
            if match := re.fullmatch("<0x([0-9A-F]{2})>", token):  # of sentencepiece
                return bytes.fromhex(match[1])
            return token.replace("▁", " ").encode()

        return {number: text(token, number) for token, number in vocabulary.items()}

    def prepare(self) -> None:
        """Read the vocabulary, on the thread that uses the tokenizer."""
        _ = self._table

    def of(self, token_ids: np.ndarray) -> list[bytes]:
        """Return the text of each token; b"" for one that the tokenizer does not know."""
        return [self._table.get(number, b"") for number in token_ids.tolist()]


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte for which a character stands in the tokens of a byte-level tokenizer. GPT-2
    chose these characters: printable ones for themselves, those from 256 on for the others, in
    order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def token_arrays(
    rollouts: Sequence[tuple[int, Rollout]], batch: Batch, values: TokenValues, texts: TokenTexts
) -> dict[str, np.ndarray]:
    """Return what rollout_tokens has of these rollouts.

    Args:
        rollouts: each with its row.
        batch: whose samples they have.
        values: collected.
        texts: of the tokenizer.
    """
    parts: dict[str, list[np.ndarray]] = {name: [] for name in TOKEN_DTYPES}
    number_of = {id(sample): i for i, sample in enumerate(batch.samples)}
    starts, pieces = [0], []
    for _, rollout in rollouts:
        for number, sample in enumerate(rollout.samples):
            of_loss = np.full((3, len(sample.token_ids)), np.nan, np.float32)
            if (found := values.of_samples.get(number_of[id(sample)])) is not None:
                of_loss[:, sample.loss_mask] = found
            parts["sample"].append(np.full(len(sample.token_ids), number))
            parts["trainer_logprobs"].append(of_loss[0])
            parts["entropy"].append(of_loss[1])
            parts["is_masked"].append(of_loss[2] > 0)
            for name in sample.DTYPES:
                parts[name].append(getattr(sample, name))
            pieces += texts.of(sample.token_ids)
        starts.append(len(pieces))
    flat = {
        name: np.concatenate(arrays or [np.zeros(0)]).astype(TOKEN_DTYPES[name])
        for name, arrays in parts.items()
    }
    return {
        "rows": np.array([row for row, _ in rollouts], np.int64),
        "starts": np.array(starts, np.int64),
        **flat,
        "text": np.frombuffer(b"".join(pieces), np.uint8),
        "text_ends": np.cumsum([len(piece) for piece in pieces], dtype=np.int64),
    }
