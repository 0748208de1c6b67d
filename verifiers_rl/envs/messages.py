"""What the orchestrator's process and a rollout worker send each other: JSON and arrays.

frame    its length (8 bytes), the length of its JSON (4 bytes), the JSON, the arrays one after
         the other; all numbers are little-endian
"""

from __future__ import annotations

import asyncio
import json
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import numpy as np

from verifiers_rl.data import describe_error
from verifiers_rl.types import Rollout, columns_of, join_samples, split_samples

_JSON = [f.name for f in fields(Rollout) if f.name not in ("samples", "error", "record")]


class WorkerError(RuntimeError):
    """A rollout failed in a worker; the traceback from there is a note of this error.

    Attributes:
        is_lost: the worker process has ended, or was ended because it did not answer.
    """

    def __init__(self, message: str, is_lost: bool = False) -> None:
        super().__init__(message)
        self.is_lost = is_lost


def frame(
    message: dict[str, Any], arrays: Mapping[str, np.ndarray] = MappingProxyType({})
) -> list[bytes | memoryview]:
    """Return the parts of a frame, to be written one after the other.

    Raises:
        TypeError: the message has a value that JSON has no form for.
    """
    layout = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    text = json.dumps({**message, "arrays": layout}).encode()
    size = 4 + len(text) + sum(array.nbytes for array in arrays.values())
    head = size.to_bytes(8, "little") + len(text).to_bytes(4, "little")
    contents = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays.values()]
    return [head, text, *(content.data for content in contents)]


async def receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read one frame. Its arrays share memory and cannot be written to.

    Raises:
        asyncio.IncompleteReadError: the other side has closed the connection.
    """
    content = await reader.readexactly(int.from_bytes(await reader.readexactly(8), "little"))
    start = 4 + int.from_bytes(content[:4], "little")
    message = json.loads(content[4:start])
    arrays = {}
    for name, (dtype, shape) in message.pop("arrays").items():
        flat = np.frombuffer(content, dtype, math.prod(shape), start)
        arrays[name] = flat.reshape(shape)
        start += flat.nbytes
    return message, arrays


def pack_group(group: Sequence[Rollout]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return rollouts in a form for `frame`. An error becomes its description and its traceback,
    because its class may be known to this process only.
    """
    samples = [sample for rollout in group for sample in rollout.samples]
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    arrays = {name: np.empty(num_tokens, dtype) for name, dtype in columns_of(samples).items()}
    join_samples(samples, arrays)
    rollouts = []
    for number, rollout in enumerate(group):
        packed = {name: getattr(rollout, name) for name in _JSON}
        packed["lengths"] = [len(sample.token_ids) for sample in rollout.samples]
        if rollout.error is not None:
            trace = "".join(traceback.format_exception(rollout.error))
            packed["error"] = describe_error(rollout.error), trace
        # A record is JSON already. As an array, it is not parsed before somebody reads it.
        arrays[f"record {number}"] = np.frombuffer(rollout.record, np.uint8)
        rollouts.append(packed)
    return rollouts, arrays


def unpack_group(rollouts: list[dict[str, Any]], arrays: dict[str, np.ndarray]) -> list[Rollout]:
    """Return the rollouts that `pack_group` packed."""
    records = [bytes(arrays.pop(f"record {number}").data) for number in range(len(rollouts))]
    lengths = [packed.pop("lengths") for packed in rollouts]
    samples = iter(split_samples(arrays, [n for own in lengths for n in own]))
    group = []
    for packed, own, record in zip(rollouts, lengths, records, strict=True):
        failure = packed.pop("error", None)
        rollout = Rollout(**packed, samples=[next(samples) for _ in own], record=record)
        if failure is not None:
            rollout.error = WorkerError(failure[0])
            rollout.error.add_note(failure[1])
        group.append(rollout)
    return group
