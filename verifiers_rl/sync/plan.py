"""What every push carries, and how its tensors lie in buckets. Both sides read this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import zip_longest
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import BaseModel, Field, NonNegativeInt, StrictInt
from torch import Tensor

ADAPTER_NAME, ADAPTER_ID = "policy", 1  # in vLLM
MAX_BUCKET_BYTES = 2**30
WORD_BYTES = 8


def checksum_of(message: Tensor) -> Tensor:
    """Return the checksum of a message, which CPUs and GPUs make as fast as they read memory: the
    sum of its words of 64 bits but the last, () int64, with all its bits inverted, because memory
    that nobody has written is often zero.

    Args:
        message: (num_bytes,) uint8: a bucket, whose last word is the place of its checksum.
    """
    return ~message.view(torch.int64)[:-1].sum()


class Bucket(NamedTuple):
    """Tensors of one message, one behind the other, filled up to whole words, and a checksum.

    Attributes:
        dtype: of all of them.
        shapes: by name, in their order.
    """

    dtype: torch.dtype
    shapes: dict[str, tuple[int, ...]]

    @property
    def sizes(self) -> list[int]:
        return [*map(math.prod, self.shapes.values())]

    @property
    def num_bytes(self) -> int:
        num_words = math.ceil(sum(self.sizes) * self.dtype.itemsize / WORD_BYTES)
        return (num_words + 1) * WORD_BYTES

    def views(self, message: Tensor) -> list[tuple[str, Tensor]]:
        """Return names and views into a message: (num_bytes,) uint8."""
        num_bytes = sum(self.sizes) * self.dtype.itemsize
        parts = message[:num_bytes].view(self.dtype).split(self.sizes)
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
        bucket_bytes: upper bound of the tensors of one message, except for a single larger one.
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


def receive_buckets(
    plan: TransferPlan, receive: Callable[[int], Callable[[], Tensor]]
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the named tensors of each bucket in turn, in a worker of the server. While the caller
    loads them, the next bucket is packed and sent.

    Args:
        receive: begins to receive a message of so many bytes; what it returns waits for it.

    Raises:
        RuntimeError: the push was given up, or a message has other bytes than were sent.
    """
    buckets = plan.buckets
    coming = receive(buckets[0].num_bytes)
    for bucket, following in zip_longest(buckets, buckets[1:]):
        message = coming()
        if message.view(torch.int64)[-1] != checksum_of(message):
            raise RuntimeError("a bucket of weights has other bytes than were sent (checksum)")
        if following is not None:
            coming = receive(following.num_bytes)
        yield bucket.views(message)
