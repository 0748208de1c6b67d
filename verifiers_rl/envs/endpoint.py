"""verifiers' interception endpoint in memory, as our chat reaches it.

All model calls of a harness go through this endpoint, an aiohttp application in this process.
Behind a socket, a call is parsed and written by an HTTP client and by an HTTP server, which takes
longer than the endpoint's own work (benchmarks/README.md).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp import web
from aiohttp.http import HttpVersion11, RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

# Takes a path and the JSON body of a request; returns the reply, JSON too, or raises RefusedError.
Post = Callable[[str, dict[str, Any]], Awaitable[Any]]
# Requests must have a protocol. One for each server does, because it is never connected.
_protocols: WeakKeyDictionary[web.Server, web.RequestHandler] = WeakKeyDictionary()


class RefusedError(Exception):
    """The endpoint refuses the next request of the rollout; its status and reason."""


def reply_of(status: int, body: bytes) -> Any:
    """Return the JSON of a reply.

    Raises:
        RefusedError: it is an error.
    """
    if status != 200:
        raise RefusedError(f"{status}: {body.decode(errors='replace')}")
    return json.loads(body)


def post_in_memory(runner: web.AppRunner, secret: str) -> Post:
    """Return what calls the application without a socket. It raises whatever the application
    raises; an HTTP server would reply 500.

    Each request runs in a task of its own, as it would behind a socket: verifiers cancels the tasks
    of a rollout's requests when the rollout ends.

    Args:
        runner: of the endpoint's application.
        secret: the rollout's.
    """
    server: Any = runner.server
    if server not in _protocols:
        _protocols[server] = server()
    protocol = _protocols[server]
    headers = CIMultiDict({"Authorization": f"Bearer {secret}", "Content-Type": "application/json"})
    fixed = CIMultiDictProxy(headers), (), False, None, False, False

    async def call(path: str, data: bytes) -> Any:
        loop = asyncio.get_running_loop()
        payload = aiohttp.StreamReader(protocol, limit=len(data) + 1, loop=loop)
        payload.feed_data(data)
        payload.feed_eof()
        message = RawRequestMessage("POST", path, HttpVersion11, *fixed, URL(path))
        task: Any = asyncio.current_task()
        writer: Any = None  # for replies that are streamed, and we ask for none
        request = server.request_factory(message, payload, protocol, writer, task)
        return await server.request_handler(request)

    async def post(path: str, body: dict[str, Any]) -> Any:
        caller: Any = asyncio.current_task()
        task = asyncio.create_task(call(path, json.dumps(body).encode()))
        try:
            response = await task
        except asyncio.CancelledError:
            if task.cancelled() and not caller.cancelling():
                raise RefusedError("409: the rollout has ended") from None
            raise
        return reply_of(response.status, response.body)

    return post
