"""What every push carries, and how its tensors lie in buckets. Both sides read this."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import zip_longest
from typing import Annotated, Any, Literal, NamedTuple

import torch
import xxhash
from pydantic import BaseModel, Field, NonNegativeInt, StrictInt
from torch import Tensor

ADAPTER_NAME = "policy"
MAX_BUCKET_BYTES = 2**30
DIGEST_BYTES = 8
SUM_BYTES = 8


def digest_of(bucket: Any) -> bytes:
    """Return the checksum that follows a bucket in the body of a push: XXH3 in 64 bits, which reads
    memory about as fast as the memory can be copied.

    Args:
        bucket: its bytes, as an object with the buffer protocol.
    """
    return xxhash.xxh3_64_digest(bucket)


def sum_of(buffer: Tensor) -> Tensor:
    """Return the checksum of a bucket that goes from GPU to GPU, which a GPU makes as fast as it
    reads memory: the sum of the bucket's words of 16 bits, (SUM_BYTES,) uint8, with all its bits
    inverted, because memory that nobody has written is often zero.

    Args:
        buffer: (bytes + SUM_BYTES,) uint8: the bucket, and the place of its checksum.
    """
    words = buffer[:-SUM_BYTES].view(torch.int16)
    return ~words.sum(0, keepdim=True, dtype=torch.int64).view(torch.uint8)


class Bucket(NamedTuple):
    """Tensors of one message, one behind the other.

    Attributes:
        dtype: of all of them.
        shapes: by name, in their order.
    """

    dtype: torch.dtype
    shapes: dict[str, tuple[int, ...]]

    @property
    def num_bytes(self) -> int:
        return sum(map(math.prod, self.shapes.values())) * self.dtype.itemsize

    def views(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """Return names and views into a uint8 buffer (num_bytes or more,)."""
        parts = (
            buffer[: self.num_bytes].view(self.dtype).split([*map(math.prod, self.shapes.values())])
        )
        named = zip(self.shapes.items(), parts, strict=True)
        return [(name, part.view(shape)) for (name, shape), part in named]


class AdapterConfig(BaseModel):
    """What PEFT's config says of a LoRA adapter."""

    r: StrictInt
    lora_alpha: int | float
    use_rslora: bool
    bias: str
    target_modules: list[str]


class TransferPlan(BaseModel, frozen=True):
    """What every push will carry; both sides derive the same buckets from it.

    Attributes:
        tensors: their shapes by name, in the order in which they travel. The names are those of a
            checkpoint, or PEFT's for an adapter.
        dtype: of all tensors on the wire, as torch spells it without `torch.`.
        bucket_bytes: upper bound of one message, except for a single larger tensor.
        adapter: of a LoRA adapter; None for full weights.
    """

    tensors: Annotated[dict[str, tuple[NonNegativeInt, ...]], Field(min_length=1)]
    dtype: Literal["float32", "bfloat16", "float16"]
    bucket_bytes: Annotated[int, Field(gt=0, le=MAX_BUCKET_BYTES)]
    adapter: AdapterConfig | None = None

    @cached_property
    def buckets(self) -> list[Bucket]:
        dtype: torch.dtype = getattr(torch, self.dtype)
        buckets, room = list[Bucket](), 0
        for name, shape in self.tensors.items():
            num_bytes = math.prod(shape) * dtype.itemsize
            if not buckets or num_bytes > room:
                buckets.append(Bucket(dtype, {}))
                room = self.bucket_bytes
            buckets[-1].shapes[name] = shape
            room -= num_bytes
        return buckets

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def body_bytes(self) -> int:
        """Of a push over HTTP: all buckets, and behind each its checksum."""
        return self.num_bytes + DIGEST_BYTES * len(self.buckets)


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
    buckets = plan.buckets
    coming = receive(buckets[0].num_bytes)
    for bucket, following in zip_longest(buckets, buckets[1:]):
        buffer = coming()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"a push of weights took longer than {timeout_s:g} s (vllm_server_timeout)"
            )
        if following is not None:
            coming = receive(following.num_bytes)
        yield bucket.views(buffer)
