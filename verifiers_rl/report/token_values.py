"""The trainer's numbers of single tokens, for a share of the groups of each batch.

They are taken from the forward passes of the step, on each rank, and end on rank 0 in the order of
each sample's own tokens, however microbatches had laid them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiers_rl.losses import LossInputs
from verifiers_rl.types import Sample, SampleSizes


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
        self._lengths = sizes.num_loss_tokens.tolist()
        # What each loss token has: trainer_logprobs, entropy, is_masked, and 1 where computed.
        self._values = {
            i: torch.zeros((4, self._lengths[i]), device=device)
            for i in np.flatnonzero(is_chosen).tolist()
        }

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
        if self._values.keys().isdisjoint(sample_ids):
            return
        logprobs = inputs.trainer_logprobs.detach().float()
        of_masks = [v.float() for name, v in metrics.items() if name.startswith("masked_share")]
        masked = torch.stack([torch.zeros_like(logprobs), *of_masks]).amax(0)
        rows = [logprobs, inputs.entropy.float(), masked, torch.ones_like(logprobs)]
        parts = torch.stack(rows).detach().split([self._lengths[i] for i in sample_ids], dim=1)
        for i, part in zip(sample_ids, parts, strict=True):
            if i in self._values:
                self._values[i] = part

    def collect(self, world_size: int) -> None:
        """Bring the values of all ranks to rank 0, and wait for them. Every rank must call this."""
        found = torch.cat([*self._values.values()], dim=1)
        if world_size > 1:  # each sample is computed by at most one rank; the others have zeros
            torch.distributed.reduce(found, 0)
        values = found.cpu().numpy()
        values[:3, values[3] == 0] = np.nan
        stops = np.cumsum([self._lengths[i] for i in self._values])
        parts = np.split(values[:3], stops[:-1], axis=1)
        self.of_samples = dict(zip(self._values, parts, strict=True))


class TokenTexts:
    """The text of single tokens.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._one = lru_cache(maxsize=None)(self._text)

    def of(self, token_ids: np.ndarray) -> list[str]:
        """Return the text of each token; "" for one that the tokenizer does not know. A character
        that several tokens make is the text of the last one; that of the others is "".
        """
        ids, texts, start = token_ids.tolist(), list[str](), 0
        for stop, token in enumerate(ids, 1):
            text = (
                self._one(token) if start == stop - 1 else self._tokenizer.decode(ids[start:stop])
            )
            # A character has at most four bytes, each of which may be a token.
            is_part = text.endswith("\ufffd") and start > stop - 4 and stop < len(ids)
            texts.append("" if is_part else text)
            start = start if is_part else stop
        return texts

    def _text(self, token: int) -> str:
        text = self._tokenizer.decode([token])
        # Sentencepiece drops the space in front of a text, and this is the middle of one.
        starts = str(self._tokenizer.convert_ids_to_tokens(token)).startswith("\u2581")
        return f" {text}" if starts and not text.startswith(" ") else text


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
    found = [
        values.of_samples.get(number, np.full((3, sample.num_loss_tokens), np.nan))
        for number, sample in samples
    ]
    of_loss[:, columns["loss_mask"]] = np.concatenate(found, axis=1)
    return columns | {
        "sample": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        "token_texts": texts.of(columns["token_ids"]),
        "trainer_logprobs": of_loss[0],
        "entropy": of_loss[1],
        "is_masked": of_loss[2] > 0,
    }
