"""The trainer's numbers of single tokens, for a share of the groups of each batch.

They are taken from the forward passes of the step, on each rank, and end on rank 0 in the order of
each sample's own tokens, however microbatches had laid them out.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from verifiers_rl.losses import LossInputs
from verifiers_rl.types import Sample, SampleSizes

# What a batch's loss tokens have: trainer_logprobs, entropy, is_masked, and 1 where computed.
_NUM_VALUES = 4


def choose_samples(sizes: SampleSizes, step: int, groups_per_batch: int, share: float) -> Any:
    """Return which samples have their tokens written, (S,) bool: those of every (1 / share)-th
    group of the run. Each rank finds the same. What is no rollout is not written.

    Args:
        sizes: of the batch.
        step: of the batch, from 0.
        groups_per_batch: groups that a batch is meant to have.
        share: 0 to 1.
    """
    number = step * groups_per_batch + sizes.group_ids
    is_chosen = np.floor(number * share) > np.floor((number - 1) * share)
    return is_chosen & (sizes.rollout_ids >= 0)


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
        self._places = {
            i: slice(stops[i] - int(self._num_tokens[i]), stops[i]) for i in self._chosen
        }
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
    """The text of single tokens.

    Args:
        tokenizer: of the model. Its vocabulary is read here, on the thread that uses it.
    """

    def __init__(self, tokenizer: Any) -> None:
        vocabulary = tokenizer.get_vocab()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        # In byte-level tokens, characters stand for bytes, as GPT-2 chose them.
        bytes_of = {c: byte for byte, c in bytes_to_unicode().items()} if "Ġ" in vocabulary else {}

        def text(token: str, number: int) -> bytes:
            if number in added:  # as it is written
                return token.encode()
            if bytes_of and all(c in bytes_of for c in token):
                return bytes(bytes_of[c] for c in token)
            if match := re.fullmatch("<0x([0-9A-F]{2})>", token):  # of sentencepiece
                return bytes.fromhex(match[1])
            return token.replace("▁", " ").encode()

        self._table = {number: text(token, number) for token, number in vocabulary.items()}

    def of(self, token_ids: np.ndarray) -> list[str]:
        """Return the text of each token; "" for one that the tokenizer does not know. A character
        that several tokens make is the text of the last one; that of the others is "".
        """
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        texts = [decode(self._table.get(number, b"")) for number in token_ids.tolist()]
        return [*texts[:-1], texts[-1] + decode(b"", True)] if texts else []


def token_columns(
    samples: Sequence[tuple[int, Sample]], values: TokenValues, texts: TokenTexts
) -> dict[str, Any]:
    """Return what the file of rollouts has of the tokens of one rollout, one sample after the
    other: arrays of T tokens, by the name of their column.

    Args:
        samples: of the rollout, each with its number in the batch.
        values: collected.
        texts: of the tokenizer.
    """
    columns = {
        name: np.concatenate([getattr(sample, name) for _, sample in samples])
        for name in Sample.DTYPES
    }
    lengths = [len(sample.token_ids) for _, sample in samples]
    of_loss = np.full((3, sum(lengths)), np.nan, np.float32)
    nothing = [np.full((3, sample.num_loss_tokens), np.nan) for _, sample in samples]
    found = [values.of_samples.get(n, nan) for (n, _), nan in zip(samples, nothing, strict=True)]
    of_loss[:, columns["loss_mask"]] = np.concatenate(found, axis=1)
    return columns | {
        "sample": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        "token_texts": texts.of(columns["token_ids"]),
        "trainer_logprobs": of_loss[0],
        "entropy": of_loss[1],
        "is_masked": of_loss[2] > 0,
    }
