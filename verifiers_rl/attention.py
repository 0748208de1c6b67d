"""How a model is told which tokens see each other: each token sees those before it in its own
sample, and no others. `packing.py` lays out the rows.

A row of one sample needs no mask. For others it depends on the attention implementation:

    eager, sdpa      a mask of width^2 entries
    sdpa             in wide rows, a call for each sample: its own tokens are the queries, all of
                     its tokens are the keys. Each pair of tokens is computed once
    flex_attention   a BlockMask
    flash attention  the same queries and keys as above, in one call, as sequences of these lengths

A model for which this does not work tells the samples of a row apart as transformers does: by
positions that restart at 0. Its samples have no tokens in common.

The calls for each sample need no change of the model: transformers passes keyword arguments of a
forward on to the function that computes attention, and this module wraps that function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verifiers_rl.packing import Microbatch, ModelSupport

KEYWORD = "sample_segments"  # the parameter of `attention` below that takes `SampleSegments`
# What a call of SDPA costs beside its work, in pairs of a query and a key, forward and backward.
# Estimates: 0.1 ms on a CPU at 1 TFLOP/s and less, 0.05 ms on a GPU at 100.
CALL_COST = {"cpu": 2**13, "cuda": 2**18}


class SampleSegments:
    """What the attention of each layer needs of a microbatch, on its device.

    Attributes:
        rows: for each row, the number of queries and of keys of each segment, and the columns of
            all keys, segment by segment.
        masks: by numbers of queries and keys, (1, 1, queries, keys) bool; the last query sees all
            keys.
        sequences: of the first row, as flash attention takes their lengths.
    """

    def __init__(self, microbatch: Microbatch, device: torch.device) -> None:
        self.rows: list[tuple[list[int], list[int], Tensor]] = []
        self.masks: dict[tuple[int, int], Tensor] = {}
        for row in range(len(microbatch.input_ids)):
            segments = [segment for segment in microbatch.segments if segment.row == row]
            queries = [segment.stop - segment.start for segment in segments]
            paths = [segment.path for segment in segments]
            keys = [len(path) for path in paths]
            columns = torch.from_numpy(np.concatenate(paths)).to(device, non_blocking=True)
            self.rows.append((queries, keys, columns))
            for n, m in zip(queries, keys, strict=True):
                if n < m and (n, m) not in self.masks:
                    ones = torch.ones(n, m, dtype=torch.bool, device=device)
                    self.masks[n, m] = ones.tril_(m - n)[None, None]

        def borders(lengths: list[int]) -> Tensor:
            ends = np.cumsum([0, *lengths], dtype=np.int32)
            return torch.from_numpy(ends).to(device, non_blocking=True)

        queries, keys, _ = self.rows[0]
        self.sequences = {
            "cu_seq_lens_q": borders(queries),
            "cu_seq_lens_k": borders(keys),
            "max_length_q": max(queries),
            "max_length_k": max(keys),
        }


def _is_cheaper_in_calls(microbatch: Microbatch, device: torch.device) -> bool:
    """Return whether a call for each sample takes less time than one with a mask."""
    num_rows, width = microbatch.input_ids.shape
    segments = microbatch.segments
    num_pairs = sum((segment.stop - segment.start) * len(segment.path) for segment in segments)
    call_cost = CALL_COST.get(device.type, CALL_COST["cuda"])
    # A mask makes each pair dearer, too: at 1,660 tokens, 2.6 x the pairs took 1.2 x the time.
    return num_rows * width**2 > 2 * (num_pairs + call_cost * len(segments))


Attention = Callable[..., tuple[Tensor, Tensor | None]]


def _with_segments(
    attend: Attention, attend_to_segments: Callable[..., tuple[Tensor, Tensor | None]]
) -> Attention:
    """Wrap an attention function: given `SampleSegments`, another one takes its place. Given
    "whole rows", it gets no mask, so each row is one sequence.
    """

    @functools.wraps(attend)
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        *args: Any,
        sample_segments: SampleSegments | Literal["whole rows"] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(sample_segments, SampleSegments):
            return attend_to_segments(
                attend, sample_segments, module, query, key, value, *args, **kwargs
            )
        mask = None if sample_segments == "whole rows" else mask
        return attend(module, query, key, value, mask, *args, **kwargs)

    return attention


def _in_calls(
    attend: Attention,
    segments: SampleSegments,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Call SDPA for each segment."""
    rows = []
    for row, (queries, keys, columns) in enumerate(segments.rows):
        parts = zip(
            query[row].split(queries, 1),
            key[row].index_select(1, columns).split(keys, 1),
            value[row].index_select(1, columns).split(keys, 1),
            strict=True,
        )
        outputs = [
            attend(
                module,
                q[None],
                k[None],
                v[None],
                segments.masks.get((q.shape[1], k.shape[1])),
                *args,
                **kwargs,
            )[0]
            for q, k, v in parts
        ]
        rows.append(torch.cat(outputs, 1))  # (1, T, heads, size of a head)
    return torch.cat(rows), None


def _in_sequences(
    attend: Attention,
    segments: SampleSegments,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Give flash attention sequences, in the only row of the layout "flat". Its causal mask lets
    the last query of a sequence see the last key.
    """
    columns = segments.rows[0][2]
    key, value = key.index_select(2, columns), value.index_select(2, columns)
    return attend(module, query, key, value, None, *args, **segments.sequences, **kwargs)


def wrap_attention(implementation: str) -> None:
    """Make this implementation of transformers understand `SampleSegments`, once per process.
    Without them it does as before.
    """
    attend: Any = ALL_ATTENTION_FUNCTIONS[implementation]
    if not hasattr(attend, "takes_segments"):
        by_segment = _in_sequences if "flash" in implementation else _in_calls
        # Compiled for its lists of lengths, it would be compiled anew for each microbatch.
        wrapped: Any = _with_segments(attend, torch.compiler.disable(by_segment))
        wrapped.takes_segments = True
        AttentionInterface.register(implementation, wrapped)


def attention_inputs(microbatch: Microbatch, config: Any, support: ModelSupport) -> dict[str, Any]:
    """Return what a forward needs, beside `input_ids`, to keep the samples of a microbatch apart.

    Args:
        microbatch: on the device of the model.
        config: of the model.
        support: of the model. If it shares no prefixes, transformers tells the samples of a row
            apart by positions that restart at 0.
    """
    if support.layout == "padded":
        columns = torch.arange(microbatch.input_ids.shape[1], device=microbatch.input_ids.device)
        return {"attention_mask": (columns < microbatch.visible_until[:, :1]).long()}
    if not support.shares_prefixes:
        return {"position_ids": microbatch.position_ids}
    implementation = str(config._attn_implementation)
    num_samples = sum(not segment.is_padding for segment in microbatch.segments)
    if num_samples <= len(microbatch.input_ids) and not microbatch.shares_prefixes:
        return inputs_of_whole_rows(implementation, microbatch.input_ids.device)
    return inputs_of_shared_rows(microbatch, implementation)


def inputs_of_whole_rows(implementation: str, device: torch.device) -> dict[str, Any]:
    """Do as `attention_inputs`, for rows of one sample. Without this, transformers would wait for
    the device to know that.
    """
    if implementation != "sdpa" and "flash" not in implementation:
        return {}
    return {KEYWORD: "whole rows", "attention_mask": _any_mask(device)}


def _any_mask(device: torch.device) -> Tensor:
    """Return a mask of four dimensions, beside which transformers makes none of its own."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def inputs_of_shared_rows(
    microbatch: Microbatch, implementation: str, in_calls: bool | None = None
) -> dict[str, Any]:
    """Do as `attention_inputs`, for rows of several samples, which may have tokens in common.

    Args:
        microbatch: on the device of the model.
        implementation: the model's attention implementation.
        in_calls: whether SDPA is called for each sample; default: what takes less time.
    """
    inputs: dict[str, Any] = {"position_ids": microbatch.position_ids}
    visible_until = microbatch.visible_until  # (B, T)
    device = visible_until.device
    num_rows, width = visible_until.shape
    if implementation == "sdpa" and in_calls is None:
        in_calls = _is_cheaper_in_calls(microbatch, device)
    if implementation == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < visible_until[row, key])

        inputs["attention_mask"] = create_block_mask(
            is_seen, num_rows, None, width, width, device=str(device)
        )
    elif "flash" in implementation or (implementation == "sdpa" and in_calls):
        inputs[KEYWORD] = SampleSegments(microbatch, device)
        inputs["attention_mask"] = _any_mask(device)
    else:
        columns = torch.arange(width, device=device)
        query, key = columns[:, None], columns
        mask = (key <= query) & (query < visible_until[:, None, :])  # (B, T, T)
        if implementation == "eager":  # which adds it to the scores
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        inputs["attention_mask"] = mask[:, None]
    return inputs
