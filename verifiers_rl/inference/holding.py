"""A trainer's hold on a server: a request whose reply does not end while the trainer lives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from fastapi.responses import StreamingResponse
from pydantic import BaseModel


class Trainer(BaseModel):
    """Who wants to have the server.

    Attributes:
        trainer: its id, the same when it connects anew.
        name: of its process and machine, for people.
    """

    trainer: str
    name: str


class Hold(StreamingResponse):
    """The reply to the trainer that holds the server. It does not end until the trainer closes the
    connection, its process dies, a newer connection takes its place, or the server ends.

    Args:
        is_ending: whether the server is to end. uvicorn ends only after all replies have ended, and
            has no event to announce its end.

    Attributes:
        left: set when the reply has ended, or is to end.
    """

    def __init__(self, trainer: Trainer, is_ending: Callable[[], bool]) -> None:
        self.trainer, self.name = trainer.trainer, trainer.name
        self.since = time.strftime("%Y-%m-%d %H:%M:%S")
        self.left = asyncio.Event()
        self._is_ending = is_ending
        super().__init__(self._until_it_ends())

    def __str__(self) -> str:
        return f"{self.name}, since {self.since}"

    async def _until_it_ends(self) -> AsyncIterator[bytes]:
        while not self.left.is_set() and not self._is_ending():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.left.wait(), 0.5)
        yield b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.left.set()
