"""What every push carries, and how its tensors lie in buckets. Both sides read this."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor

ADAPTER_NAME = "policy"
MAX_BUCKET_BYTES = 2**30

_ALIGNMENT = 16  # bytes; every dtype can be viewed at such an offset


class TensorSpec(NamedTuple):
    """Name, dtype as torch spells it without `torch.`, and shape of one tensor on the wire."""

    name: str
    dtype: str
    shape: tuple[NonNegativeInt, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    @property
    def padded_bytes(self) -> int:
        """Its bytes in a bucket."""
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT


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
    tensors: list[TensorSpec]
    bucket_bytes: Annotated[int, Field(gt=0, le=MAX_BUCKET_BYTES)]
    adapter: dict[str, Any]

    @classmethod
    def from_json(cls, data: Any) -> TransferPlan:
        """Build a plan from parsed JSON; raise ValueError if it is not one."""
        try:
            plan = TypeAdapter(cls).validate_python(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"not a transfer plan: {where}: {first['msg']}") from error
        if not plan.tensors:
            raise ValueError("a plan without tensors")
        names = set[str]()
        for name, dtype, _ in plan.tensors:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(f"unknown tensor dtype {dtype!r}")
            if name in names:
                raise ValueError(f"tensor {name!r} comes twice")
            names.add(name)
        if plan.kind == "adapter" and type(plan.adapter.get("r")) is not int:
            raise ValueError(f"adapter rank {plan.adapter.get('r')!r}: must be an integer")
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
        yield bucket

    def packed_sizes(self) -> list[int]:
        """Return the bytes of each bucket on the wire."""
        return [packed_size(bucket) for bucket in self.buckets()]


def packed_size(bucket: Sequence[TensorSpec]) -> int:
    """Return the bytes of a bucket on the wire."""
    return sum(spec.padded_bytes for spec in bucket)


def bucket_views(bucket: Sequence[TensorSpec], buffer: Tensor) -> list[tuple[str, Tensor]]:
    """Return names and views into a uint8 buffer (total bytes,) in the plan's dtypes and shapes."""
    parts = buffer.split([spec.padded_bytes for spec in bucket])
    return [
        (spec.name, part[: spec.num_bytes].view(getattr(torch, spec.dtype)).view(spec.shape))
        for spec, part in zip(bucket, parts, strict=True)
    ]


def receive_buckets(
    plan: TransferPlan, receive: Callable[[int], Callable[[], Tensor]], timeout_s: float
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the named tensors of each bucket in turn, in a worker of the server. While the caller
    loads them, the next bucket is packed and sent.

    Args:
        receive: begins to receive a buffer of so many bytes; what it returns waits for the buffer.

    Raises:
        RuntimeError: the trainer went away.
        TimeoutError: all buckets together took longer than `timeout_s`, loading included.
    """
    deadline = time.monotonic() + timeout_s
    buckets = list(plan.buckets())
    coming = receive(packed_size(buckets[0]))
    for bucket, following in zip_longest(buckets, buckets[1:]):
        buffer = coming()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"a push of weights took longer than {timeout_s:g} s (vllm_server_timeout)"
            )
        if following is not None:
            coming = receive(packed_size(following))
        yield bucket_views(bucket, buffer)


def needs_lora_flag(rank: int) -> str:
    return (
        f"the trainer sends a LoRA adapter of rank {rank}; "
        f"start vf-vllm with --enable-lora --max-lora-rank {rank} (or more)"
    )
