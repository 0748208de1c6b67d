"""How requests for rollouts reach `vf-vllm`, and what comes back beside the replies: which policies
sampled their tokens, and how long they waited in the server's queue.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Self

import aiohttp
import httpx
from openai import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    DefaultAsyncHttpxClient,
)

from verifiers_rl.inference.client import generation_key
from verifiers_rl.inference.session import RolloutSession, SessionLostError

BUSY = (429, 503)  # the server says that it has too much to do
LONGEST_PAUSE_S = 30.0  # between two attempts at a server that is busy
CONNECT_S = 60.0  # deadline of a connection


class RolloutDeadline:
    """A deadline for the code inside it, which stands still while a request of this code waits in
    the server's queue. Without that, long replies of a busy server would time out first, and the
    policy would be trained on short ones.

    From the first token of a reply on, the server keeps the deadline (`X-Reply-Timeout-S`). The
    requests are those of the task that enters it, and of tasks that this one starts.

    Args:
        timeout_s: seconds, without those in the queue.

    Attributes:
        left_s: seconds that are left, when the time began to run or stood still.
        num_lost_tokens: tokens of the reply that the server ended at the deadline; None if it ended
            none.
    """

    def __init__(self, timeout_s: float) -> None:
        self.left_s = timeout_s
        self.num_lost_tokens: int | None = None
        self._timeout = asyncio.timeout(timeout_s)
        self._since = 0.0  # when the time began to run, or stood still
        self._num_requests = 0
        self._longest_s = 0.0  # without the queue, of the requests since the time stood still

    async def __aenter__(self) -> RolloutDeadline:
        self._since = asyncio.get_running_loop().time()
        await self._timeout.__aenter__()
        self._context = _deadline.set(self)
        return self

    async def __aexit__(self, *error: Any) -> None:
        _deadline.reset(self._context)
        await self._timeout.__aexit__(*error)  # raises TimeoutError if it has passed

    def expired(self) -> bool:
        return self._timeout.expired()

    def is_cause_of(self, error: BaseException) -> bool:
        """Return whether the error is there because the deadline has passed."""
        is_ours = self.expired() and isinstance(error, TimeoutError)
        return is_ours or self.num_lost_tokens is not None

    def begin_request(self) -> float:
        """Let the time stand still. Return the seconds that are left."""
        now = asyncio.get_running_loop().time()
        if self._num_requests == 0:
            self.left_s -= now - self._since
            self._longest_s = 0.0
            if self._timeout.when() is not None and not self.expired():
                self._timeout.reschedule(None)
        self._num_requests += 1
        return max(self.left_s, 0.001)

    def end_request(self, seconds: float) -> None:
        """Let the time go on, if no other request is running.

        Args:
            seconds: that the request took, without those in the queue.
        """
        self._num_requests -= 1
        self._longest_s = max(self._longest_s, seconds)
        if self._num_requests == 0:
            self._since = asyncio.get_running_loop().time()
            self.left_s -= self._longest_s
            if not self.expired():
                self._timeout.reschedule(self._since + self.left_s)


_deadline: ContextVar[RolloutDeadline | None] = ContextVar("deadline", default=None)


@asynccontextmanager
async def _time_of_request() -> AsyncIterator[dict[str, float]]:
    """Stop the rollout's deadline, if there is one. The yielded dict takes the seconds in the
    queue, and has those left for the reply.
    """
    loop, deadline = asyncio.get_running_loop(), _deadline.get()
    start, times = loop.time(), {"queued_s": 0.0}
    if deadline is not None:
        times["limit_s"] = deadline.begin_request()
    try:
        yield times
    finally:
        if deadline is not None:
            deadline.end_request(loop.time() - start - times["queued_s"])


class ServerClient(AsyncOpenAI):
    """AsyncOpenAI with a short path for `post(..., cast_to=httpx.Response)`, by which all clients
    here send their requests. The path uses aiohttp and skips the layers of openai and httpx. With
    hundreds of small requests at once, these layers take longer than all the rest of a rollout
    (benchmarks/rollouts.py). The path raises openai's errors.

    The requests of a rollout are sent by `of_rollout(session)`: they have its seeds, and go to its
    server. One of several servers that does not answer, or that has not the policy, is lost for
    that rollout.

    Args:
        base_url: of the API, with /v1. With several servers, that of any of them.
        timeout_s: deadline of a request that is not inside a `RolloutDeadline`.
    """

    def __init__(self, base_url: str, timeout_s: float) -> None:
        self._key_of = cache(generation_key)
        key = self._key_of(base_url)
        self._rollout = RolloutSession(0)  # of requests that belong to none
        # No proxy: it is our own server.
        http = DefaultAsyncHttpxClient(trust_env=False, timeout=timeout_s)
        super().__init__(base_url=base_url, api_key=key, http_client=http, max_retries=1)
        self._timeout_s = timeout_s
        self._session = aiohttp.ClientSession(
            # The server closes connections that are idle for 5 s. Ours close earlier, so that no
            # request is sent on one that the server is closing.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )

    def of_rollout(self, session: RolloutSession) -> Self:
        """Return a client on the same connections, which sends the requests of this rollout."""
        client = copy.copy(self)
        client._rollout = session
        client.__dict__.pop("chat", None)  # it is bound to the client that made it
        return client

    async def post(self, path: str, *, cast_to: Any, **kwargs: Any) -> Any:
        if cast_to is not httpx.Response:
            return await super().post(path, cast_to=cast_to, **kwargs)
        rollout = self._rollout
        body = rollout.with_seed(kwargs["body"])
        url = path if "://" in path else str(self.base_url).rstrip("/") + path
        headers = {**((kwargs.get("options") or {}).get("headers") or {})}
        if rollout.url is not None:
            url = rollout.url + httpx.URL(url).raw_path.decode()
            headers["Authorization"] = f"Bearer {self._key_of(rollout.url)}"
        try:
            async with _time_of_request() as times:
                response, said = await self._reply_to(url, json.dumps(body), headers, times)
            spans = _versions_of(said.get("X-Policy-Versions"))
            response.extensions["policy_versions"] = spans
            if response.is_error:
                response.request = httpx.Request("POST", url)
                raise self._make_status_error_from_response(response)
            rollout.check_versions(spans)
        except TimeoutError as error:  # aiohttp's are also ClientErrors
            raise APITimeoutError(httpx.Request("POST", url)) from error
        except (aiohttp.ClientError, SessionLostError) as error:
            rollout.fail()
            reason = f"Connection error: {error or type(error).__name__}"
            raise APIConnectionError(message=reason, request=httpx.Request("POST", url)) from error
        except APIStatusError as error:
            # 404: a server that started anew does not know the adapter. 504: see RolloutDeadline.
            is_lost = error.status_code == 404 or error.status_code >= 500
            if is_lost and error.status_code != 504:
                rollout.fail()
            raise
        return response

    async def _reply_to(
        self, url: str, data: str, headers: dict[str, str], times: dict[str, float]
    ) -> tuple[httpx.Response, Mapping[str, str]]:
        """Send a request; return the reply's body and headers. After a lost connection or a status
        of 500 or more, send it once again; while the server says that it is busy, again and again.
        """
        total_s: float | None = self._timeout_s
        if "limit_s" in times:
            headers["X-Reply-Timeout-S"] = f"{times['limit_s']:.3f}"
            # The rollout and its batch have deadlines, so a request inside has none of its own.
            total_s = None
        loop, pause_s, has_failed = asyncio.get_running_loop(), 0.5, False
        end = loop.time() + (total_s or math.inf)
        timeout = aiohttp.ClientTimeout(total_s, sock_connect=CONNECT_S)
        while True:
            try:
                async with (
                    self._rollout.watching(),
                    self._session.post(url, data=data, headers=headers, timeout=timeout) as reply,
                ):
                    content = await reply.read()
            except aiohttp.ClientError as error:
                if has_failed or isinstance(error, TimeoutError):
                    raise
                has_failed = True
                continue
            if reply.status in BUSY and loop.time() < end:
                times["queued_s"] += pause_s
                await asyncio.sleep(pause_s)  # there is nothing to await
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            if has_failed or reply.status < 500 or reply.status == 504:
                break
            has_failed = True
        times["queued_s"] += float(reply.headers.get("X-Queued-S", 0.0))
        if reply.status == 504 and (deadline := _deadline.get()) is not None:
            deadline.num_lost_tokens = int(reply.headers.get("X-Num-Tokens", 0))
        return httpx.Response(reply.status, content=content), reply.headers

    async def close(self) -> None:
        await self._session.close()
        await super().close()


def _versions_of(header: str | None) -> list[tuple[int, int]] | None:
    """Return the (first token, policy version) pairs of a reply's header: "0:3,17:4" becomes
    [(0, 3), (17, 4)].
    """
    if not header:
        return None
    return [
        (int(start), int(version)) for start, version in (s.split(":") for s in header.split(","))
    ]
