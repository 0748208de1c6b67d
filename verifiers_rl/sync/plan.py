"""What every push carries, and how its tensors lie in buckets. Both sides read this."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Backend = Literal["nccl", "http"]


ADAPTER_NAME = "policy"


MAX_BUCKET_BYTES = 2**30


_ALIGNMENT = 16  # bytes; every dtype can be viewed at such an offset


class TensorSpec(NamedTuple):
    """Name, dtype as torch spells it without `torch.`, and shape of one tensor on the wire."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * torch_dtype(self.dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of this name; raise ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown tensor dtype {name!r}")
    return dtype


@dataclass(frozen=True)
class TransferPlan:
    """What every push will carry; both sides derive the same buckets from it.

    Attributes:
        kind: "full" weights under the checkpoint's names, or a LoRA "adapter" under PEFT's names.
        tensors: in the order in which they travel.
        bucket_bytes: upper bound of one message, except for a single larger tensor.
        adapter: rank, alpha and so on, as PEFT's config spells them; empty for full weights.
    """

    kind: Literal["full", "adapter"]
    tensors: Sequence[TensorSpec]
    bucket_bytes: int
    adapter: dict[str, Any]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TransferPlan:
        """Build a plan from parsed JSON; raise ValueError if it is not one."""
        try:
            tensors = [TensorSpec(str(n), str(d), tuple(shape)) for n, d, shape in data["tensors"]]
            plan = cls(data["kind"], tensors, data["bucket_bytes"], dict(data["adapter"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a transfer plan: {type(error).__name__}: {error}") from error
        if plan.kind not in ("full", "adapter"):
            raise ValueError(f"plan kind {plan.kind!r}: must be full or adapter")
        if not tensors:
            raise ValueError("a plan without tensors")
        if plan.kind == "adapter" and type(plan.adapter.get("r")) is not int:
            raise ValueError(f"adapter rank {plan.adapter.get('r')!r}: must be an integer")
        if type(plan.bucket_bytes) is not int or not 0 < plan.bucket_bytes <= MAX_BUCKET_BYTES:
            raise ValueError(f"bucket_bytes {plan.bucket_bytes!r}: 1 to {MAX_BUCKET_BYTES}")
        for name, _, shape in tensors:
            if not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"shape {list(shape)!r} of tensor {name!r}: not sizes")
        return plan

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)

    def buckets(self) -> Iterator[list[TensorSpec]]:
        bucket: list[TensorSpec] = []
        size = 0
        for spec in self.tensors:
            if bucket and size + spec.num_bytes > self.bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(spec)
            size += spec.num_bytes
        if bucket:
            yield bucket

    def packed_sizes(self) -> list[int]:
        """Return the bytes of each bucket on the wire."""
        return [bucket_num_bytes(bucket) for bucket in self.buckets()]


def _offsets(bucket: Sequence[TensorSpec]) -> list[int]:
    """Return the byte offset of each tensor in the bucket's buffer; last, the buffer's length."""
    offsets = [0]
    for spec in bucket:
        offsets.append(offsets[-1] + -(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def bucket_num_bytes(bucket: Sequence[TensorSpec]) -> int:
    return _offsets(bucket)[-1]


def bucket_views(bucket: Sequence[TensorSpec], buffer: Tensor) -> list[tuple[str, Tensor]]:
    """Return names and views into a uint8 buffer (total bytes,) in the plan's dtypes and shapes."""
    return [
        (
            spec.name,
            buffer[start : start + spec.num_bytes].view(torch_dtype(spec.dtype)).view(spec.shape),
        )
        for spec, (start, _) in zip(bucket, pairwise(_offsets(bucket)), strict=True)
    ]


def needs_lora_flag(rank: int) -> str:
    return (
        f"the trainer sends a LoRA adapter of rank {rank}; "
        f"start vf-vllm with --enable-lora --max-lora-rank {rank} (or more)"
    )
