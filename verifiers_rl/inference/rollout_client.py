"""How requests for rollouts reach `vf-vllm`, and what comes back beside the replies: which policies
sampled their tokens.

The first requests of the rollouts of a group are alike but for their seeds. Those that come at the
same time are sent as one, and each rollout goes on as soon as its own reply is there.
"""

from __future__ import annotations

import asyncio
import copy
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import httpx
import numpy as np
from openai import APIConnectionError, APIStatusError, APITimeoutError, BadRequestError

from verifiers_rl.inference.client import generation_key, keep_alive
from verifiers_rl.inference.packed_tokens import (
    SEEDS,
    VERSIONS_HEADER,
    pack_ids,
    unpack_experts,
    unpack_mask,
    unpack_sampled,
)
from verifiers_rl.inference.session import RolloutSession, SessionLostError

BUSY = (408, 425, 429)  # and those above 500: the server, or a proxy before it, cannot answer now
LONGEST_PAUSE_S = 30.0  # between two attempts then
FAULT_S = 8.0  # so long a lost connection or a status of 500 is taken for a passing fault
CONNECT_S = 60.0  # deadline of a connection
# A request ends so long after the deadline of its rollout, which comes first. It may be in another
# task: verifiers' endpoint sends it for a program.
BEHIND_S = 1.0
GATHER_S = 0.002  # the first request of a group waits so long for others like it
LONGEST_LINE = 2**28  # bytes of a reply in a group; beyond them, each request is sent by itself


@dataclass(frozen=True)
class ChatReply:
    """A reply of `vf-vllm`, and what OpenAI's form has no place for.

    Attributes:
        completion: the reply in OpenAI's form, without tokens.
        policy_versions: (first token, policy version) pairs; None if the server said nothing.
        sampled: token ids (T,) int32 and their logprobs (T,) float32.
        mask: see `packed_tokens.unpack_mask`.
        experts: see `packed_tokens.unpack_experts`; None if they were not requested.
    """

    completion: dict[str, Any]
    policy_versions: list[tuple[int, int]] | None
    sampled: tuple[np.ndarray, np.ndarray]
    mask: tuple[np.ndarray, np.ndarray] | None
    experts: np.ndarray | None


@dataclass(eq=False)
class _Gathered:
    """Requests that are sent as one.

    Attributes:
        seeds: of the replies.
        replies: each is None where the server has sent none.
        asking: sends it.
    """

    asking: asyncio.Task[None]
    seeds: list[int | None] = field(default_factory=list)
    replies: list[asyncio.Future[httpx.Response | None]] = field(default_factory=list)


class ServerClient:
    """Asks a `vf-vllm` for the replies of rollouts. With hundreds of small requests at once, the
    layers of openai's client take longer than all the rest of a rollout (benchmarks/rollouts.py).
    So this is aiohttp, which raises openai's errors: environments know them.

    The requests of a rollout are sent by `of_rollout(session)`: they have its seeds and its
    deadline, and go to its server. One of several servers that does not answer, or that has not the
    policy, is lost for that rollout.

    Args:
        base_url: of the API, with /v1. With several servers, that of any of them.
        timeout_s: deadline of a request whose rollout has none.
    """

    def __init__(self, base_url: str, timeout_s: float) -> None:
        self.base_url, self._timeout_s = base_url, timeout_s
        self._rollout = RolloutSession(0)  # of requests that belong to none
        self._gathered: dict[tuple[str, str], _Gathered] = {}  # by address and body
        self._session = aiohttp.ClientSession(
            # The server closes connections that are idle for 5 s. Ours close earlier, so that no
            # request is sent on one that the server is closing.
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=3, socket_factory=_kept_alive
            ),
            headers={"Content-Type": "application/json"},
            read_bufsize=LONGEST_LINE,
        )

    def of_rollout(self, session: RolloutSession) -> Self:
        """Return a client on the same connections, which sends the requests of this rollout."""
        client = copy.copy(self)
        client._rollout = session
        return client

    async def reply_to(
        self, body: Mapping[str, Any], prompt_ids: Sequence[int], is_first: bool = False
    ) -> ChatReply:
        """Request a reply to tokens.

        Args:
            body: of a chat request; with `routed_experts`, the reply has them.
            prompt_ids: the prompt, in place of the body's messages.
            is_first: others of its group may ask the same.
        """
        # vLLM renders messages all the same, so it gets a short one.
        tokens = {"tokens": pack_ids(prompt_ids), "messages": [{"role": "user", "content": "."}]}
        body = {**body, **tokens}
        wants_experts = body.pop("routed_experts", False)  # the server's flag returns them
        reply = await self.post("/chat/completions/tokens", body=body, is_first=is_first)
        completion = reply.json()
        experts = completion["choices"][0].pop("routed_experts", None)
        packed = completion.pop("packed_tokens")
        return ChatReply(
            completion,
            reply.extensions["policy_versions"],
            unpack_sampled(packed),
            unpack_mask(packed),
            unpack_experts(experts) if wants_experts and experts is not None else None,
        )

    async def post(
        self, path: str, *, body: dict[str, Any], is_first: bool = False
    ) -> httpx.Response:
        """Send a request of the rollout, and return the server's reply. Raises openai's errors."""
        rollout = self._rollout
        base = self.base_url if rollout.url is None else f"{rollout.url}/v1"
        # A server that starts anew may have another key.
        url, headers = base + path, {"Authorization": f"Bearer {generation_key(base)}"}
        body = rollout.with_seed(body)
        try:
            response = await self._ask_with_others(url, body, headers) if is_first else None
            if response is None:
                response = await self._ask(url, json.dumps(body), headers)
            if not response.is_error:
                rollout.check_versions(response.extensions["policy_versions"])
        except TimeoutError as error:  # aiohttp's are also ClientErrors
            raise APITimeoutError(httpx.Request("POST", url)) from error
        except (aiohttp.ClientError, SessionLostError) as error:
            rollout.fail()
            reason = f"Connection error: {error or type(error).__name__}"
            raise APIConnectionError(message=reason, request=httpx.Request("POST", url)) from error
        if response.is_error:
            # 404: a server that started anew does not know the adapter.
            if response.status_code == 404 or response.is_server_error:
                rollout.fail()
            kind = BadRequestError if response.status_code == 400 else APIStatusError
            message = f"Error code: {response.status_code} - {response.text}"
            raise kind(message, response=response, body=None)
        return response

    @property
    def _deadline(self) -> float:
        """The deadline of a request that is sent now, by the event loop's clock."""
        if self._rollout.deadline is not None:
            return self._rollout.deadline + BEHIND_S
        return asyncio.get_running_loop().time() + self._timeout_s

    async def _ask_with_others(
        self, url: str, body: dict[str, Any], headers: dict[str, str]
    ) -> httpx.Response | None:
        """Send a request together with those that come at the same time and differ from it by their
        seeds only. Return None if it is to be sent by itself: no other one came, or their common
        request failed, and each of them will meet the reason.
        """
        alike = {name: value for name, value in body.items() if name != "seed"}
        key = url, json.dumps(alike)
        async with self._rollout.watching(), asyncio.timeout_at(self._deadline):
            if (group := self._gathered.get(key)) is None:
                group = self._gathered[key] = _Gathered(
                    asyncio.create_task(self._ask_together(key, alike, headers))
                )
            group.seeds.append(body.get("seed"))
            group.replies.append(reply := asyncio.get_running_loop().create_future())
            try:
                return await reply
            finally:
                replies = group.replies
                if all(one.done() for one in replies) and any(one.cancelled() for one in replies):
                    group.asking.cancel()  # so that the server gives up those nobody waits for

    async def _ask_together(
        self, key: tuple[str, str], alike: dict[str, Any], headers: dict[str, str]
    ) -> None:
        """Send the requests of a group as one, and give each its reply when that comes."""
        group = self._gathered[key]
        try:
            try:
                await asyncio.sleep(GATHER_S)
            finally:
                del self._gathered[key]
            if len(group.seeds) == 1:
                return
            async with self._session.post(
                key[0],
                data=json.dumps(alike | {SEEDS: group.seeds}),
                headers=headers,
                timeout=aiohttp.ClientTimeout(None, sock_connect=CONNECT_S),  # each has a deadline
                raise_for_status=True,
            ) as sent:
                async for line in sent.content:
                    if not line[:1].isdigit():
                        continue  # a comment, by vLLM's --sse-keep-alive-interval
                    number, versions, content = line.split(b" ", 2)
                    if not (reply := group.replies[int(number)]).done():
                        reply.set_result(_response(key[0], 200, content, versions.decode()))
        except (aiohttp.ClientError, TimeoutError):
            pass  # each of them will meet it
        finally:
            for reply in group.replies:
                if not reply.done():
                    reply.set_result(None)

    async def _ask(self, url: str, data: str, headers: dict[str, str]) -> httpx.Response:
        """Send a request and return the reply. While the server or a proxy says that it is busy,
        send it again and again; for `FAULT_S` also after a lost connection or a status of 500.
        """
        now = asyncio.get_running_loop().time
        deadline = self._deadline
        fault_deadline = min(deadline, now() + FAULT_S)
        pause_s = 0.5
        while True:
            try:
                response = await self._send(url, data, headers, max(deadline - now(), 1e-3))
                passes = response.status_code < 500 and response.status_code not in BUSY
                ends = fault_deadline if response.status_code == 500 else deadline
                if passes or now() + pause_s >= ends:
                    return response
            except aiohttp.ClientError as error:
                if isinstance(error, TimeoutError) or now() + pause_s >= fault_deadline:
                    raise
            await asyncio.sleep(pause_s)  # there is nothing to await
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _send(
        self, url: str, data: str, headers: dict[str, str], timeout_s: float
    ) -> httpx.Response:
        """Send a request once. Return the reply, which has the versions of its tokens beside it."""
        timeout = aiohttp.ClientTimeout(timeout_s, sock_connect=CONNECT_S)
        async with (
            self._rollout.watching(),
            self._session.post(url, data=data, headers=headers, timeout=timeout) as reply,
        ):
            content = await reply.read()
        return _response(url, reply.status, content, reply.headers.get(VERSIONS_HEADER))

    async def close(self) -> None:
        await self._session.close()


def _kept_alive(address: tuple[Any, ...]) -> socket.socket:
    """Make a connection's socket, for aiohttp, which hands over (family, type, protocol, ...)."""
    sock = socket.socket(*address[:3])
    sock.setblocking(False)
    keep_alive(sock)
    return sock


def _response(url: str, status: int, content: bytes, versions: str | None) -> httpx.Response:
    """Return a reply, with the (first token, policy version) pairs of its header beside it:
    "0:3,17:4" becomes [(0, 3), (17, 4)].
    """
    spans = (span.split(":") for span in versions.split(",")) if versions else ()
    return httpx.Response(
        status,
        content=content,
        request=httpx.Request("POST", url),
        extensions={
            "policy_versions": [(int(start), int(version)) for start, version in spans] or None
        },
    )
