"""How requests for rollouts reach `vf-vllm`, and what comes back beside the replies: which policies
sampled their tokens, and how long they waited in the server's queue.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import aiohttp
import httpx
import numpy as np
from openai import APIConnectionError, APITimeoutError, AsyncOpenAI, DefaultAsyncHttpxClient

from verifiers_rl.inference.client import generation_key
from verifiers_rl.inference.packed_tokens import (
    pack_ids,
    unpack_experts,
    unpack_mask,
    unpack_sampled,
)
from verifiers_rl.inference.session import RolloutSession, SessionLostError

BUSY = (429, 503)  # the server says that it has too much to do
LATE = 504  # the server has ended the reply at the rollout's deadline
LONGEST_PAUSE_S = 30.0  # between two attempts at a server that is busy
CONNECT_S = 60.0  # deadline of a connection


@dataclass(frozen=True)
class ChatReply:
    """A reply of `vf-vllm`, and what OpenAI's form has no place for.

    Attributes:
        completion: the reply in OpenAI's form; with tokens only if messages were sent.
        policy_versions: (first token, policy version) pairs; None if the server said nothing.
        sampled: token ids (T,) int32 and their logprobs (T,) float32; None if messages were sent.
        mask: see `packed_tokens.unpack_mask`.
        experts: see `packed_tokens.unpack_experts`; None if they were not requested.
    """

    completion: dict[str, Any]
    policy_versions: list[tuple[int, int]] | None
    sampled: tuple[np.ndarray, np.ndarray] | None
    mask: tuple[np.ndarray, np.ndarray] | None
    experts: np.ndarray | None


class ServerClient(AsyncOpenAI):
    """AsyncOpenAI with a short path for `post(..., cast_to=httpx.Response)`, by which all clients
    here send their requests. The path uses aiohttp and skips the layers of openai and httpx. With
    hundreds of small requests at once, these layers take longer than all the rest of a rollout
    (benchmarks/rollouts.py). The path raises openai's errors.

    The requests of a rollout are sent by `of_rollout(session)`: they have its seeds and its
    deadline, and go to its server. One of several servers that does not answer, or that has not the
    policy, is lost for that rollout.

    Args:
        base_url: of the API, with /v1. With several servers, that of any of them.
        timeout_s: deadline of a request whose rollout has none.
    """

    def __init__(self, base_url: str, timeout_s: float) -> None:
        self._key_of = cache(generation_key)
        self._rollout = RolloutSession(0)  # of requests that belong to none
        # No proxy: it is our own server.
        http = DefaultAsyncHttpxClient(trust_env=False, timeout=timeout_s)
        super().__init__(
            base_url=base_url, api_key=generation_key(base_url), http_client=http, max_retries=1
        )
        self._timeout_s = timeout_s
        self._session = aiohttp.ClientSession(
            # The server closes connections that are idle for 5 s. Ours close earlier, so that no
            # request is sent on one that the server is closing.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            headers={"Content-Type": "application/json"},
        )

    def of_rollout(self, session: RolloutSession) -> Self:
        """Return a client on the same connections, which sends the requests of this rollout."""
        client = copy.copy(self)
        client._rollout = session
        client.__dict__.pop("chat", None)  # it is bound to the client that made it
        return client

    async def reply_to(self, body: Mapping[str, Any], prompt_ids: Sequence[int] = ()) -> ChatReply:
        """Request a reply to messages, or to tokens.

        Args:
            body: of a chat request; with `routed_experts`, the reply has them.
            prompt_ids: the prompt, in place of the body's messages.
        """
        path, body = "/chat/completions", dict(body)
        if prompt_ids:
            path += "/tokens"
            body |= {"tokens": pack_ids(prompt_ids), "packed_tokens": True}
            # vLLM renders messages all the same, so it gets a short one.
            body["messages"] = [{"role": "user", "content": "."}]
        wants_experts = body.pop("routed_experts", False)  # the server's flag returns them
        # Not a subclass's, which may call this method.
        reply = await ServerClient.post(self, path, cast_to=httpx.Response, body=body)
        completion = reply.json()
        experts = completion["choices"][0].pop("routed_experts", None)
        packed = completion.pop("packed_tokens", {})
        return ChatReply(
            completion,
            reply.extensions["policy_versions"],
            unpack_sampled(packed) if packed else None,
            unpack_mask(packed),
            unpack_experts(experts) if wants_experts and experts is not None else None,
        )

    async def post(self, path: str, *, cast_to: Any, **kwargs: Any) -> Any:
        if cast_to is not httpx.Response:
            return await super().post(path, cast_to=cast_to, **kwargs)
        rollout = self._rollout
        base = str(self.base_url).rstrip("/") if rollout.url is None else f"{rollout.url}/v1"
        url, headers = base + path, {"Authorization": f"Bearer {self._key_of(base)}"}
        data = json.dumps(rollout.with_seed(kwargs["body"]))
        try:
            response = await self._ask(url, data, headers)
            spans = _versions_of(response)
            if not response.is_error:
                rollout.check_versions(spans)
        except TimeoutError as error:  # aiohttp's are also ClientErrors
            raise APITimeoutError(httpx.Request("POST", url)) from error
        except (aiohttp.ClientError, SessionLostError) as error:
            rollout.fail()
            reason = f"Connection error: {error or type(error).__name__}"
            raise APIConnectionError(message=reason, request=httpx.Request("POST", url)) from error
        status = response.status_code
        # 404: a server that started anew does not know the adapter.
        if status == 404 or (status >= 500 and status != LATE):
            rollout.fail()
        if response.is_error:
            raise self._make_status_error_from_response(response)
        response.extensions["policy_versions"] = spans
        return response

    async def _ask(self, url: str, data: str, headers: dict[str, str]) -> httpx.Response:
        """Send a request and return the reply. After a lost connection or a status of 500 or more,
        send it once again; while the server says that it is busy, again and again.
        """
        loop, rollout = asyncio.get_running_loop(), self._rollout
        start, queued_s, pause_s, has_failed = loop.time(), 0.0, 0.5, False
        rollout.begin_request()
        total_s: float | None = self._timeout_s
        if rollout.left_s < math.inf:
            headers["X-Reply-Timeout-S"] = f"{max(rollout.left_s, 0.001):.3f}"
            # The rollout and its batch have deadlines, so its request has none of its own.
            total_s = None
        timeout = aiohttp.ClientTimeout(total_s, sock_connect=CONNECT_S)
        try:
            while True:
                try:
                    response = await self._send(url, data, headers, timeout)
                except aiohttp.ClientError as error:
                    if has_failed or isinstance(error, TimeoutError):
                        raise
                    has_failed = True
                    continue
                status = response.status_code
                if status in BUSY and (total_s is None or loop.time() < start + total_s):
                    queued_s += pause_s
                    await asyncio.sleep(pause_s)  # there is nothing to await
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                elif has_failed or status < 500 or status == LATE:
                    break
                else:
                    has_failed = True
            queued_s += float(response.headers.get("X-Queued-S", 0.0))
        finally:
            rollout.end_request(loop.time() - start - queued_s)
        if status == LATE:
            rollout.num_lost_tokens = int(response.headers.get("X-Num-Tokens", 0))
        return response

    async def _send(
        self, url: str, data: str, headers: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> httpx.Response:
        """Send a request once. Returns the reply with those of its headers that speak of tokens."""
        async with (
            self._rollout.watching(),
            self._session.post(url, data=data, headers=headers, timeout=timeout) as reply,
        ):
            content = await reply.read()
        of_tokens = {n: v for n, v in reply.headers.items() if n.lower().startswith("x-")}
        request = httpx.Request("POST", url)
        return httpx.Response(reply.status, headers=of_tokens, content=content, request=request)

    async def close(self) -> None:
        await self._session.close()
        await super().close()


def _versions_of(response: httpx.Response) -> list[tuple[int, int]] | None:
    """Return the (first token, policy version) pairs of a reply's header: "0:3,17:4" becomes
    [(0, 3), (17, 4)].
    """
    header = response.headers.get("X-Policy-Versions")
    if not header:
        return None
    return [
        (int(start), int(version)) for start, version in (s.split(":") for s in header.split(","))
    ]
