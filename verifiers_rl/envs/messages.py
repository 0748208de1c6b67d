"""What the orchestrator's process and a rollout worker send each other: JSON and arrays.

    frame    its length (8 bytes), the length of its JSON (4 bytes), the JSON, the arrays one after
             the other; all numbers are little-endian

Nothing is unpickled, so the same frames can come from another machine.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from verifiers_rl.data import describe_error
from verifiers_rl.sample_bytes import flatten_samples, unflatten_samples
from verifiers_rl.types import Rollout

_NOT_JSON = ("samples", "error", "record")


class EnvWorkerError(RuntimeError):
    """A rollout failed in a worker; the traceback from there is a note of this error."""


def frame(message: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> list[bytes | memoryview]:
    """Return the parts of a frame, to be written one after the other.

    Raises:
        TypeError: the message has a value that JSON has no form for.
    """
    layout = [[array.dtype.str, len(array)] for array in arrays]
    text = json.dumps({**message, "arrays": layout}).encode()
    size = 4 + len(text) + sum(array.nbytes for array in arrays)
    head = size.to_bytes(8, "little") + len(text).to_bytes(4, "little")
    return [head, text, *(np.ascontiguousarray(array).data.cast("B") for array in arrays)]


async def receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Read one frame.

    Raises:
        asyncio.IncompleteReadError: the other side has closed the connection.
    """
    size = int.from_bytes(await reader.readexactly(8), "little")
    return parse(await reader.readexactly(size))


def parse(content: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return what is in a frame, given without its length. The arrays share its memory and cannot
    be written to.
    """
    start = 4 + int.from_bytes(content[:4], "little")
    message = json.loads(content[4:start])
    arrays = []
    for dtype, length in message.pop("arrays"):
        arrays.append(np.frombuffer(content, dtype, length, start))
        start += arrays[-1].nbytes
    return message, arrays


def pack_group(group: Sequence[Rollout]) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """Return rollouts in a form for `frame`. An error becomes its description and its traceback,
    because its class may be known to this process only.
    """
    samples = [sample for rollout in group for sample in rollout.samples]
    names = [field.name for field in fields(Rollout) if field.name not in _NOT_JSON]
    rollouts = []
    for rollout in group:
        packed = {name: getattr(rollout, name) for name in names}
        packed["lengths"] = [len(sample.token_ids) for sample in rollout.samples]
        packed["optional_bytes"] = [sample.num_optional_bytes for sample in rollout.samples]
        packed["record_bytes"] = len(rollout.record)
        if rollout.error is not None:
            packed["error"] = describe_error(rollout.error)
            packed["traceback"] = "".join(traceback.format_exception(rollout.error))
        rollouts.append(packed)
    # A record is JSON already. As an array, it is not parsed before somebody reads it.
    records = np.frombuffer(b"".join(rollout.record for rollout in group), np.uint8)
    return rollouts, [flatten_samples(samples), records]


def unpack_group(rollouts: list[dict[str, Any]], arrays: Sequence[np.ndarray]) -> list[Rollout]:
    """Return the rollouts that `pack_group` packed."""
    lengths = [packed.pop("lengths") for packed in rollouts]
    optional = [n for packed in rollouts for n in packed.pop("optional_bytes")]
    samples = iter(unflatten_samples(arrays[0], [n for own in lengths for n in own], optional))
    records = arrays[1].data
    group = []
    for packed, own in zip(rollouts, lengths, strict=True):
        error = packed.pop("error", None)
        note = packed.pop("traceback", "")
        size = packed.pop("record_bytes")
        record, records = bytes(records[:size]), records[size:]
        rollout = Rollout(**packed, samples=[next(samples) for _ in own], record=record)
        if error is not None:
            rollout.error = EnvWorkerError(error)
            rollout.error.add_note(note)
        group.append(rollout)
    return group
