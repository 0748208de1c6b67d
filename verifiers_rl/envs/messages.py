"""What the orchestrator's process and a rollout worker send each other: JSON, and bytes behind it.

frame    length of its JSON and of its bytes (8 bytes each, little-endian), the JSON, the bytes
"""

from __future__ import annotations

import asyncio
import io
import json
import traceback
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from verifiers_rl.data import describe_error
from verifiers_rl.types import Rollout, columns_of, join_samples, split_samples

_JSON = [f.name for f in fields(Rollout) if f.name not in ("samples", "error", "record")]


class WorkerError(RuntimeError):
    """A rollout failed in a worker; the traceback from there is a note of this error."""


class WorkerLostError(WorkerError):
    """The worker process has ended, or was ended because it did not answer."""


def frame(message: dict[str, Any], content: bytes = b"") -> list[bytes]:
    """Return the parts of a frame, to be written one after the other.

    Raises:
        TypeError: the message has a value that JSON has no form for.
    """
    text = json.dumps(message).encode()
    return [len(text).to_bytes(8, "little"), len(content).to_bytes(8, "little"), text, content]


class Outbox:
    """Sends frames. All of one turn of the event loop are written at once: each write gives the
    interpreter's lock away, and a trainer that computes takes milliseconds to give it back.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._frames = writer, list[bytes]()

    def send(self, message: dict[str, Any], content: bytes = b"") -> None:
        """Send a frame. Raises as `frame` does."""
        parts = frame(message, content)
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._flush)
        self._frames += parts

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        self._writer.write(b"".join(frames))


async def receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """Read one frame.

    Raises:
        asyncio.IncompleteReadError: the other side has closed the connection.
    """
    head = await reader.readexactly(16)
    text = await reader.readexactly(int.from_bytes(head[:8], "little"))
    return json.loads(text), await reader.readexactly(int.from_bytes(head[8:], "little"))


def pack_group(group: Sequence[Rollout]) -> tuple[list[dict[str, Any]], bytes]:
    """Return rollouts in a form for `frame`: their samples are the bytes, in numpy's file format.
    An error becomes its description and its traceback, because its class may be known to this
    process only.
    """
    samples = [sample for rollout in group for sample in rollout.samples]
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    columns: dict[str, Any] = {
        name: np.empty(num_tokens, dtype) for name, dtype in columns_of(samples).items()
    }
    join_samples(samples, columns)
    np.savez(content := io.BytesIO(), **columns)
    rollouts = []
    for rollout in group:
        packed = {name: getattr(rollout, name) for name in _JSON}
        packed["lengths"] = [len(sample.token_ids) for sample in rollout.samples]
        packed["record"] = rollout.record.decode()
        if rollout.error is not None:
            trace = "".join(traceback.format_exception(rollout.error))
            packed["error"] = describe_error(rollout.error), trace
        rollouts.append(packed)
    return rollouts, content.getvalue()


def unpack_group(rollouts: list[dict[str, Any]], content: bytes) -> list[Rollout]:
    """Return the rollouts that `pack_group` packed."""
    lengths = [packed.pop("lengths") for packed in rollouts]
    columns = dict(np.load(io.BytesIO(content), allow_pickle=False))
    samples = iter(split_samples(columns, [n for own in lengths for n in own]))
    group = []
    for packed, own in zip(rollouts, lengths, strict=True):
        failure, record = packed.pop("error", None), packed.pop("record").encode()
        rollout = Rollout(**packed, samples=[next(samples) for _ in own], record=record)
        if failure is not None:
            rollout.error = WorkerError(failure[0])
            rollout.error.add_note(failure[1])
        group.append(rollout)
    return group
