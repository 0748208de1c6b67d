"""verifiers' interception endpoint, as our chat reaches it: in memory, or at its address.

All model calls of a harness go through this endpoint, an aiohttp application in this process.
Behind a socket, a call is parsed and written by an HTTP client and by an HTTP server, which takes
longer than the endpoint's own work (benchmarks/README.md).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp import web
from aiohttp.http import HttpVersion11, RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

CHAT, GATE = "/v1/chat/completions", "/tool"  # model calls; questions whether a tool may be called


class Endpoint(Protocol):
    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Return status and body of the reply to a request with this JSON body."""


# Requests must have a protocol. One for each server does, because it is never connected.
_protocols: WeakKeyDictionary[web.Server, web.RequestHandler] = WeakKeyDictionary()


class LocalEndpoint:
    """Calls the application without a socket. Each request runs in a task of its own, as it would
    behind a socket: verifiers cancels the tasks of a rollout's requests when the rollout ends.

    Args:
        runner: of the endpoint's application.
        secret: the rollout's.
    """

    def __init__(self, runner: web.AppRunner, secret: str) -> None:
        assert runner.server is not None  # verifiers has set it up
        self._server = runner.server
        if self._server not in _protocols:
            _protocols[self._server] = self._server()
        self._protocol = _protocols[self._server]
        headers = CIMultiDict({"Authorization": f"Bearer {secret}"})
        headers["Content-Type"] = "application/json"
        self._headers = CIMultiDictProxy(headers)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Raises whatever the application raises; an HTTP server would reply 500."""
        task = asyncio.create_task(self._call(path, json.dumps(body).encode()))
        try:
            response = await task
        except asyncio.CancelledError:
            if task.cancelled() and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                return 409, b"the rollout has ended"
            raise
        return response.status, response.body

    async def _call(self, path: str, data: bytes) -> Any:
        loop = asyncio.get_running_loop()
        payload = aiohttp.StreamReader(self._protocol, limit=len(data) + 1, loop=loop)
        payload.feed_data(data)
        payload.feed_eof()
        message = RawRequestMessage(
            "POST", path, HttpVersion11, self._headers, (), False, None, False, False, URL(path)
        )
        task: Any = asyncio.current_task()
        writer: Any = None  # for replies that are streamed, and we ask for none
        request = self._server.request_factory(message, payload, self._protocol, writer, task)
        return await self._server.request_handler(request)


class RemoteEndpoint:
    """Posts to the endpoint's address.

    Args:
        root: address without /v1.
        secret: the rollout's.
    """

    def __init__(self, session: aiohttp.ClientSession, root: str, secret: str) -> None:
        self._session = session
        self._root = root
        # Requests need no deadline, because the rollout has one.
        self._options: Any = {
            "headers": {"Authorization": f"Bearer {secret}"},
            "timeout": aiohttp.ClientTimeout(total=None),
        }

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        async with self._session.post(self._root + path, json=body, **self._options) as reply:
            return reply.status, await reply.read()
