"""A trainer's hold on a server: a request whose reply does not end while the trainer lives."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from fastapi.responses import StreamingResponse

from verifiers_rl.sync.shared_buffers import SharedBuffers


class Hold(StreamingResponse):
    """The reply to the trainer that has connected. It does not end until the trainer closes the
    connection, its process dies, a newer connection takes its place, or the server ends.

    Args:
        trainer: id of the trainer, the same when it connects anew.
        name: of its process and machine, for people.
        sizes: bytes of the buckets in each push's body; none with NCCL.
        is_ending: whether the server is to end. uvicorn ends only after all replies have ended, and
            has no event to announce its end.

    Attributes:
        connection: the name by which pushes refer to it.
        shared: memory shared with the workers; None while they may hold a part of a push.
        left: set when the reply has ended, or is to end.
        waking: wakes engines that sleep once the trainer has left; None before they first sleep.
    """

    def __init__(
        self, trainer: str, name: str, sizes: list[int], is_ending: Callable[[], bool]
    ) -> None:
        self.trainer, self.name, self.sizes = trainer, name, sizes
        self.connection = secrets.token_hex(8)
        self.shared: SharedBuffers | None = None
        self.since = time.strftime("%Y-%m-%d %H:%M:%S")
        self.left = asyncio.Event()
        self.waking: asyncio.Task[None] | None = None
        self._is_ending = is_ending
        super().__init__(self._until_it_ends())

    def __str__(self) -> str:
        return f"{self.name}, since {self.since}"

    async def _until_it_ends(self) -> AsyncIterator[str]:
        yield json.dumps({"connection": self.connection}) + "\n"
        while not self.left.is_set() and not self._is_ending():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.left.wait(), 0.5)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.left.set()
