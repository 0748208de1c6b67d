"""The HTTP client of rollouts, against a real HTTP server on loopback."""

import asyncio
import json
import socket

import numpy as np
import openai
import pytest
from aiohttp import web

from tests.serving import chat_reply, serving
from verifiers_rl.inference import RolloutSession, ServerClient, derive_seed, rollout_client
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.inference.packed_tokens import pack_sampled, unpack_numbers

TOKENS_PATH = "/v1/chat/completions/tokens"
REPLY = {**chat_reply("yes"), "packed_tokens": pack_sampled([5], np.zeros(1))}


async def with_client(handler, use, timeout_s=10.0, path=TOKENS_PATH, **options):
    """Use a client of an HTTP server with this handler."""
    async with serving(handler, path, **options) as url:
        client = ServerClient(f"{url}/v1", timeout_s)
        try:
            return await asyncio.wait_for(use(client), 10)
        finally:
            await client.close()


def ask(client):
    return client.reply_to({"model": "m"}, [5])


class Outcomes:
    """Answers with one outcome after the other, the last one for ever: a status, or what happens
    to the connection.
    """

    def __init__(self, *outcomes):
        self.outcomes, self.requests = outcomes, []

    async def answer(self, request):
        outcome = self.outcomes[min(len(self.requests), len(self.outcomes) - 1)]
        self.requests.append((request.headers, await request.json()))
        if outcome == "lost":
            request.transport.close()
        elif outcome == "silent":
            await asyncio.Event().wait()
        elif outcome != 200:
            return web.json_response({"error": {"message": "because"}}, status=outcome)
        return web.json_response(REPLY, headers={"versions": "0:9,3:8"})

    def serve(self, use, timeout_s=10.0):
        return asyncio.run(with_client(self.answer, use, timeout_s))


def test_a_server_that_starts_anew_with_another_key_is_asked_with_that_key(monkeypatch):
    async def use(client):
        for key in ("first", "second"):
            monkeypatch.setenv(TOKEN_VARIABLE, key)
            await ask(client)

    outcomes = Outcomes(200)
    outcomes.serve(use)
    keys = [headers["Authorization"] for headers, _ in outcomes.requests]
    assert keys == ["Bearer first", "Bearer second"]


def test_a_connection_for_rollouts_is_kept_alive_and_found_dead_by_tcp():
    async def use(client):
        make = client._session.connector._socket_factory
        with make((socket.AF_INET, socket.SOCK_STREAM, 0)) as sock:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.SOL_TCP, socket.TCP_KEEPIDLE) == 30

    Outcomes(200).serve(use)


@pytest.mark.parametrize("outcomes", [("lost", 500, 200), (429, 502, 200), (408, 520, 200)])
def test_a_lost_connection_an_error_or_a_busy_server_is_tried_again(monkeypatch, outcomes):
    monkeypatch.delenv(TOKEN_VARIABLE)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    handler = Outcomes(*outcomes)
    reply = handler.serve(ask)
    assert reply.policy_versions == [(0, 9), (3, 8)] and reply.sampled[0].tolist() == [5]
    assert len(handler.requests) == len(outcomes)
    for headers, body in handler.requests:
        assert headers["Authorization"] == "Bearer secret"
        assert body["model"] == "m" and unpack_numbers(body["tokens"]).tolist() == [5]


@pytest.mark.parametrize(
    "outcome, timeout_s, error, num_tries",
    [
        ("lost", 10, openai.APIConnectionError, 2),
        (400, 10, openai.BadRequestError, 1),
        (404, 10, openai.APIStatusError, 1),
        (500, 10, openai.APIStatusError, 2),
        (503, 0.6, openai.APIStatusError, None),
    ],
)
def test_what_does_not_pass_is_an_error_of_openai_with_the_servers_reason(
    monkeypatch, outcome, timeout_s, error, num_tries
):
    monkeypatch.setattr("verifiers_rl.inference.rollout_client.FAULT_S", 1.0)
    handler = Outcomes(outcome)
    with pytest.raises(error) as caught:
        handler.serve(ask, timeout_s)
    if outcome != "lost":
        assert caught.value.status_code == outcome and "because" in str(caught.value)
    assert num_tries in (len(handler.requests), None)


def test_a_request_has_the_next_seed_of_its_rollout_or_its_own():
    handler, session = Outcomes(200), RolloutSession(0, None, 7, 3)

    async def use(client):
        for own in ({}, {"seed": 9}, {}):
            await client.of_rollout(session).reply_to({"model": "m"} | own, [5])

    asyncio.run(with_client(handler.answer, use))
    seeds = [body["seed"] for _, body in handler.requests]
    assert seeds == [derive_seed(7, 3, 1), 9, derive_seed(7, 3, 3)]


def test_a_page_of_a_proxy_is_a_passing_fault_and_a_lost_server_when_it_stays(monkeypatch):
    monkeypatch.setattr(rollout_client, "FAULT_S", 0.7)
    replies = [web.Response(text="<html>") for _ in range(2)]
    replies.insert(1, web.Response(text=f"0  {json.dumps(REPLY)}\n"))

    async def answer(request):
        return replies.pop() if replies else web.Response(text="<html>")

    async def use(client):
        assert (await ask(client)).completion["choices"]
        with pytest.raises(openai.APIConnectionError, match="the server's reply has no tokens"):
            await ask(client)

    asyncio.run(with_client(answer, use, has_lines=True))


@pytest.mark.parametrize("outcome", ["lost", "silent", 404, 500, 200])
def test_one_of_several_servers_that_gives_no_reply_of_the_policy_is_lost(monkeypatch, outcome):
    """With status 200, some of its tokens are of version 8."""
    monkeypatch.setattr("verifiers_rl.inference.rollout_client.FAULT_S", 0.1)

    async def use(client):
        older, session = (
            RolloutSession(version, client.base_url.removesuffix("/v1")) for version in (8, 9)
        )
        if outcome == "silent":  # the pool finds it lost
            asyncio.get_running_loop().call_later(0.1, session.fail)
        with pytest.raises(openai.APIError):
            await ask(client.of_rollout(session))
        assert session.is_lost
        if outcome == 200:
            assert await ask(client.of_rollout(older)) and not older.is_lost

    Outcomes(outcome).serve(use)


@pytest.mark.parametrize("by_another_task", [False, True])
def test_a_request_ends_at_the_deadline_of_its_rollout(by_another_task):
    """Also one that verifiers' endpoint sends for a program."""
    session = RolloutSession(0)

    async def use(client):
        asking = asyncio.ensure_future(ask(client.of_rollout(session)))
        with pytest.raises(TimeoutError):
            async with session.limited(0.2):
                await (asyncio.Event().wait() if by_another_task else asking)
        if by_another_task:
            with pytest.raises(openai.APITimeoutError):
                await asking
        assert session.has_passed and session.deadline is None

    Outcomes("silent").serve(use, 60.0)


# --- Groups ---------------------------------------------------------------------------------------


class GroupServer:
    """Answers requests for a group with the lines of these places, then what `last` is: "end", a
    line that is "cut", a connection that it closes, or nothing until the client is gone. Requests
    for one get it.
    """

    def __init__(self, places=(), last="end"):
        self.places, self.last, self.bodies = places, last, []
        self.was_left = asyncio.Event()
        self.next = asyncio.Semaphore(100)  # of lines that may be sent

    async def answer(self, request):
        self.bodies.append(body := await request.json())
        if len(seeds := body["seeds"]) == 1:
            return web.Response(text=f"0  {json.dumps({**REPLY, 'seed': seeds[0]})}\n")
        if self.last == "refused":
            return web.json_response({"error": "because"}, status=400)
        reply = web.StreamResponse()
        await reply.prepare(request)
        try:
            for place in self.places:
                await self.next.acquire()
                line = json.dumps({**REPLY, "seed": seeds[place]})
                await reply.write(b": keep-alive\n\n")  # vLLM's --sse-keep-alive-interval
                # In two parts, as the network cuts them.
                await reply.write(f"{place} 0:{place} {line[:9]}".encode())
                await reply.write(f"{line[9:]}\n".encode())
            if self.last == "silent":
                await asyncio.Event().wait()
            if self.last == "cut":  # behind a proxy that does not say how long it is
                await reply.write(b'0 0:0 {"pack')
            if self.last == "lost":
                request.transport.abort()
        except asyncio.CancelledError:
            self.was_left.set()
            raise
        return reply


def ask_first(client, number, prompt=(1, 2), timeout_s=5.0):
    """The first request of a rollout in a group; returns what the server says of it."""

    async def ask():
        session = RolloutSession(0, None, 7, number)
        async with session.limited(timeout_s):
            reply = await client.of_rollout(session).reply_to({"model": "m"}, prompt, is_first=True)
        return reply.completion["seed"], reply.policy_versions

    return asyncio.ensure_future(ask())


def play_group(server, use):
    return asyncio.run(with_client(server.answer, use, has_lines=True))


def seed_of(number):
    return derive_seed(7, number, 1)


def test_the_first_requests_of_a_group_are_sent_as_one_and_each_gets_its_own_reply():
    server = GroupServer([2, 0, 1])
    server.next = asyncio.Semaphore(2)

    async def use(client):
        asked = [ask_first(client, number) for number in range(3)]
        other = await ask_first(client, 0, prompt=(3,))  # of another group
        replies = [await asked[2], await asked[0]]
        assert not asked[1].done()  # the others go on meanwhile
        server.next.release()
        return [*replies, await asked[1]], other

    replies, other = play_group(server, use)
    assert replies == [(seed_of(number), [(0, number)]) for number in (2, 0, 1)]
    assert other == (seed_of(0), [])
    seeds = sorted((body["seeds"] for body in server.bodies), key=len)
    assert seeds == [[seed_of(0)], [seed_of(number) for number in range(3)]]


@pytest.mark.parametrize("last", ["end", "cut", "lost", "refused"])
def test_a_rollout_of_a_group_without_a_reply_asks_by_itself_with_its_seed(last):
    server = GroupServer([1], last)

    async def use(client):
        return await asyncio.gather(*(ask_first(client, number) for number in range(3)))

    replies = play_group(server, use)
    assert [seed for seed, _ in replies] == [seed_of(number) for number in range(3)]
    own = {body["seeds"][0] for body in server.bodies if len(body["seeds"]) == 1}
    assert own == {seed_of(n) for n in range(3) if n != 1 or last == "refused"}


def test_a_late_rollout_of_a_group_ends_alone_and_a_request_ends_with_its_last_one():
    server = GroupServer([1], "silent")

    async def use(client):
        late, quick, other = (ask_first(client, n, timeout_s=1.0 + n) for n in range(3))
        assert await quick == (seed_of(1), [(0, 1)])
        with pytest.raises(TimeoutError):
            await late
        assert not other.done() and not server.was_left.is_set()
        other.cancel()
        await asyncio.wait_for(server.was_left.wait(), 5)

    play_group(server, use)


def test_a_request_is_sent_though_the_one_that_it_joins_has_just_been_cancelled():
    server = GroupServer()

    async def use(client):
        first = ask_first(client, 0)
        await asyncio.sleep(0)  # it waits for others
        first.cancel()
        assert await ask_first(client, 1) == (seed_of(1), [])
        with pytest.raises(asyncio.CancelledError):
            await first

    play_group(server, use)
    assert [body["seeds"] for body in server.bodies] == [[seed_of(1)]]
