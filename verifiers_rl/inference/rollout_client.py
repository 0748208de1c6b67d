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
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import httpx
import numpy as np
from openai import APIConnectionError, APIStatusError, APITimeoutError, BadRequestError

from verifiers_rl.inference.client import generation_key, keep_alive
from verifiers_rl.inference.packed_tokens import (
    FIELD,
    SEEDS,
    pack_numbers,
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
LONGEST_LINE = 2**28  # bytes of a reply


@dataclass(frozen=True)
class ChatReply:
    """A reply of `vf-vllm`, and what OpenAI's form has no place for.

    Attributes:
        completion: the reply in OpenAI's form, without tokens.
        policy_versions: (first token, policy version) pairs; none if the server said nothing.
        sampled: token ids (T,) int32 and their logprobs (T,) float32.
        mask: see `packed_tokens.unpack_mask`.
        experts: see `packed_tokens.unpack_experts`; None if they were not requested.
    """

    completion: dict[str, Any]
    policy_versions: list[tuple[int, int]]
    sampled: tuple[np.ndarray, np.ndarray]
    mask: tuple[np.ndarray, np.ndarray] | None
    experts: np.ndarray | None


@dataclass(eq=False)
class _Gathered:
    """Requests that are sent as one.

    Attributes:
        seeds: of the replies.
        replies: the lines; each is None where the server has sent none.
        asking: sends it.
    """

    asking: asyncio.Task[None]
    seeds: list[int | None] = field(default_factory=list)
    replies: list[asyncio.Future[bytes | None]] = field(default_factory=list)


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
        rollout = self._rollout
        # vLLM renders messages all the same, so it gets a short one.
        tokens = {
            "tokens": pack_numbers(prompt_ids),
            "messages": [{"role": "user", "content": "."}],
        }
        body = {**body, **tokens}
        wants_experts = body.pop("routed_experts", False)  # the server's flag returns them
        seed = body.pop("seed", rollout.next_seed())
        base = self.base_url if rollout.url is None else f"{rollout.url}/v1"
        url = f"{base}/chat/completions/tokens"
        # A server that starts anew may have another key.
        headers = {"Authorization": f"Bearer {generation_key(base)}"}
        try:
            line = await self._ask_with_others(url, body, seed, headers) if is_first else None
            if line is None:
                line = await self._ask(url, json.dumps(body | {SEEDS: [seed]}), headers)
            _, spans, reply = line.split(b" ", 2)
            pairs = (span.split(b":") for span in spans.split(b",") if span)
            versions = [(int(start), int(version)) for start, version in pairs]
            rollout.check_versions(versions)
        except TimeoutError as error:  # aiohttp's are also ClientErrors
            raise APITimeoutError(httpx.Request("POST", url)) from error
        except (aiohttp.ClientError, SessionLostError) as error:
            rollout.fail()
            reason = f"Connection error: {error or type(error).__name__}"
            raise APIConnectionError(message=reason, request=httpx.Request("POST", url)) from error
        except APIStatusError as error:
            # 404: a server that started anew does not know the adapter.
            if error.status_code == 404 or error.status_code >= 500:
                rollout.fail()
            raise
        completion = json.loads(reply)
        experts = completion["choices"][0].pop("routed_experts", None)
        packed = completion.pop(FIELD)
        return ChatReply(
            completion,
            versions,
            unpack_sampled(packed),
            unpack_mask(packed),
            unpack_experts(experts) if wants_experts and experts is not None else None,
        )

    @property
    def _deadline(self) -> float:
        """The deadline of a request that is sent now, by the event loop's clock."""
        if self._rollout.deadline is not None:
            return self._rollout.deadline + BEHIND_S
        return asyncio.get_running_loop().time() + self._timeout_s

    async def _ask_with_others(
        self, url: str, body: dict[str, Any], seed: int | None, headers: dict[str, str]
    ) -> bytes | None:
        """Send a request together with those that come at the same time and differ from it by their
        seeds only. Return None if it is to be sent by itself: no other one came, or their common
        request failed, and each of them will meet the reason.
        """
        key = url, json.dumps(body)
        async with self._rollout.watching(), asyncio.timeout_at(self._deadline):
            if (group := self._gathered.get(key)) is None:
                group = self._gathered[key] = _Gathered(
                    asyncio.create_task(self._ask_together(key, body, headers))
                )
            group.seeds.append(seed)
            group.replies.append(reply := asyncio.get_running_loop().create_future())
            try:
                return await reply
            finally:
                replies = group.replies
                if all(one.done() for one in replies) and any(one.cancelled() for one in replies):
                    group.asking.cancel()  # so that the server gives up those nobody waits for

    async def _ask_together(
        self, key: tuple[str, str], body: dict[str, Any], headers: dict[str, str]
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
            data = json.dumps(body | {SEEDS: group.seeds})
            async for line in self._lines(key[0], data, headers, None):  # each has a deadline
                if not (reply := group.replies[int(line.split(b" ")[0])]).done():
                    reply.set_result(line)
        except (aiohttp.ClientError, TimeoutError, APIStatusError):
            pass  # each of them will meet it
        finally:
            for reply in group.replies:
                if not reply.done():
                    reply.set_result(None)

    async def _ask(self, url: str, data: str, headers: dict[str, str]) -> bytes:
        """Send a request for one reply and return its line. While the server or a proxy says that
        it is busy, send it again and again; for `FAULT_S` also after a lost connection or a status
        of 500.
        """
        now = asyncio.get_running_loop().time
        deadline = self._deadline
        fault_deadline = min(deadline, now() + FAULT_S)
        pause_s = 0.5
        while True:
            try:
                async with self._rollout.watching():
                    left_s = max(deadline - now(), 1e-3)
                    lines = [line async for line in self._lines(url, data, headers, left_s)]
                if lines:
                    return lines[0]
                raise aiohttp.ClientPayloadError("the server's reply has no tokens")
            except (aiohttp.ClientError, APIStatusError) as error:
                status = getattr(error, "status_code", 500)
                can_pass = status >= 500 or status in BUSY
                ends = fault_deadline if status == 500 else deadline
                if isinstance(error, TimeoutError) or not can_pass or now() + pause_s >= ends:
                    raise
            await asyncio.sleep(pause_s)  # there is nothing to await
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _lines(
        self, url: str, data: str, headers: dict[str, str], timeout_s: float | None
    ) -> AsyncIterator[bytes]:
        """Send a request once, and yield the lines of its reply as they come. Raises aiohttp's
        errors, and APIStatusError for another status than 200.
        """
        timeout = aiohttp.ClientTimeout(timeout_s, sock_connect=CONNECT_S)
        async with self._session.post(url, data=data, headers=headers, timeout=timeout) as reply:
            if reply.status != 200:
                text = await reply.text(errors="replace")
                request = httpx.Request("POST", url)
                kind = BadRequestError if reply.status == 400 else APIStatusError
                raise kind(
                    f"Error code: {reply.status} - {text}",
                    response=httpx.Response(reply.status, text=text, request=request),
                    body=None,
                )
            async for line in reply.content:
                # Else it is a comment, by vLLM's --sse-keep-alive-interval, or was cut.
                if line[:1].isdigit() and line.endswith(b"\n"):
                    yield line

    async def close(self) -> None:
        await self._session.close()


def _kept_alive(address: tuple[Any, ...]) -> socket.socket:
    """Make a connection's socket, for aiohttp, which hands over (family, type, protocol, ...)."""
    sock = socket.socket(*address[:3])
    sock.setblocking(False)
    keep_alive(sock)
    return sock
