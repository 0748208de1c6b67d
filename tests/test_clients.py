"""The HTTP client of rollouts, against a real HTTP server on loopback."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from aiohttp import web

from tests.serving import chat_reply, serving
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.inference.rollout_client import ServerClient
from verifiers_rl.inference.session import RolloutSession, derive_seed

REPLY = chat_reply("yes")


@asynccontextmanager
async def connected(handler, timeout_s=10.0):
    async with serving(handler) as url:
        client = ServerClient(f"{url}/v1", timeout_s)
        try:
            yield client
        finally:
            await client.close()


def ask(client, text="hello"):
    body = {"messages": [{"role": "user", "content": text}]}
    return client.post("/chat/completions", cast_to=httpx.Response, body=body)


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
        return web.json_response(REPLY)

    def post(self, timeout_s=10.0):
        async def run():
            async with connected(self.answer, timeout_s) as client:
                return await ask(client)

        return asyncio.run(run())


@pytest.fixture(autouse=True)
def short_sleeps(monkeypatch):
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(seconds / 50))


def test_a_request_carries_the_token_and_messages_as_json(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    handler = Outcomes(200)
    assert handler.post().json() == REPLY
    [(headers, body)] = handler.requests
    assert headers["Authorization"] == "Bearer secret"
    assert body == {"messages": [{"role": "user", "content": "hello"}]}


def test_a_connection_for_rollouts_is_kept_alive_and_found_dead_by_tcp():
    made = []

    async def run():
        async with connected(Outcomes(200).answer) as client:
            connector = client._session.connector
            make = connector._socket_factory
            connector._socket_factory = lambda at: made.append(make(at)) or made[-1]
            await ask(client)
            assert made[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert made[0].getsockopt(socket.SOL_TCP, socket.TCP_KEEPIDLE) == 30

    asyncio.run(run())


@pytest.mark.parametrize(
    "outcomes",
    [("lost", 200), (500, 200), *((busy, busy, busy, 200) for busy in (429, 502, 503))],
)
def test_a_lost_connection_an_error_or_a_busy_server_is_tried_again(outcomes):
    handler = Outcomes(*outcomes)
    assert handler.post().json() == REPLY
    assert len(handler.requests) == len(outcomes)


@pytest.mark.parametrize(
    "outcome, timeout_s, error, num_tries",
    [
        ("lost", 10, openai.APIConnectionError, 2),
        ("silent", 0.2, openai.APITimeoutError, 1),
        (404, 10, openai.NotFoundError, 1),
        (500, 10, openai.InternalServerError, 2),
        *((busy, 0.6, openai.APIStatusError, None) for busy in (429, 502, 503)),
    ],
)
def test_what_does_not_pass_is_an_error_of_openai_with_the_servers_reason(
    outcome, timeout_s, error, num_tries
):
    handler = Outcomes(outcome)
    with pytest.raises(error) as caught:
        handler.post(timeout_s)
    assert isinstance(outcome, str) or "because" in str(caught.value)
    assert num_tries in (len(handler.requests), None)


@pytest.mark.parametrize("by_another_task", [False, True])
def test_a_request_ends_at_the_deadline_of_its_rollout(by_another_task):
    """Also one that verifiers' endpoint sends for a program."""

    async def run():
        session = RolloutSession(0)
        async with connected(Outcomes("silent").answer, 60.0) as client:
            asking = ask(client.of_rollout(session))
            if by_another_task:
                asking = asyncio.ensure_future(asking)
            with pytest.raises(TimeoutError):
                async with session.limited(0.2):
                    await (asyncio.Event().wait() if by_another_task else asking)
            if by_another_task:
                with pytest.raises(openai.APITimeoutError):
                    await asyncio.wait_for(asking, 5)
        assert session.has_passed and session.left_s is None

    asyncio.run(run())


# --- Groups ---------------------------------------------------------------------------------------

TOKENS_PATH = "/v1/chat/completions/tokens"


class GroupServer:
    """Answers requests for a group with the lines of these places, then what `last` is: "end", a
    connection that it closes, or nothing until the client is gone. Other requests get a reply.
    """

    def __init__(self, places=(), last="end"):
        self.places, self.last, self.bodies = places, last, []
        self.was_left = asyncio.Event()
        self.next = asyncio.Semaphore(100)  # of lines that may be sent

    async def answer(self, request):
        self.bodies.append(body := await request.json())
        if "seeds" not in body:
            return web.json_response({**REPLY, "seed": body.get("seed")})
        if self.last == "refused":
            return web.json_response({"error": "because"}, status=400)
        reply = web.StreamResponse()
        await reply.prepare(request)
        try:
            for place in self.places:
                await self.next.acquire()
                line = json.dumps({**REPLY, "seed": body["seeds"][place]})
                await reply.write(b": keep-alive\n\n")  # vLLM's --sse-keep-alive-interval
                # In two parts, as the network cuts them.
                await reply.write(f"{place} 0:{place} {line[:9]}".encode())
                await reply.write(f"{line[9:]}\n".encode())
            if self.last == "silent":
                await asyncio.Event().wait()
            if self.last == "lost":
                request.transport.abort()
        except asyncio.CancelledError:
            self.was_left.set()
            raise
        return reply


def ask_first(client, number, prompt=(1, 2), timeout_s=5.0, group_seed=7):
    """The first request of a rollout in a group; returns what the server says of it."""

    async def ask():
        session = RolloutSession(0, None, group_seed, number)
        async with session.limited(timeout_s):
            reply = await client.of_rollout(session).reply_to({"model": "m"}, prompt, is_first=True)
        return reply.completion["seed"], reply.policy_versions

    return asyncio.ensure_future(ask())


def play_group(server, run):
    async def play():
        async with serving(server.answer, TOKENS_PATH, knows_groups=True) as url:
            client = ServerClient(f"{url}/v1", 5.0)
            try:
                return await asyncio.wait_for(run(client), 10)
            finally:
                await client.close()

    return asyncio.run(play())


def seed_of(number):
    return derive_seed(7, number, 1)


def test_the_first_requests_of_a_group_are_sent_as_one_and_each_gets_its_own_reply():
    server = GroupServer([2, 0, 1])

    async def run(client):
        asked = [ask_first(client, number) for number in range(3)]
        other = ask_first(client, 0, prompt=(3,))  # of another group
        return await asyncio.gather(*asked, other)

    *replies, other = play_group(server, run)
    assert replies == [(seed_of(number), [(0, number)]) for number in range(3)]
    assert other == (seed_of(0), None)
    together, alone = sorted(server.bodies, key=lambda body: "seeds" not in body)
    assert together["seeds"] == [seed_of(number) for number in range(3)] and "seed" not in together
    assert alone["seed"] == seed_of(0) and len(server.bodies) == 2


def test_a_rollout_goes_on_while_others_of_its_group_are_generated():
    server = GroupServer([1, 0])
    server.next = asyncio.Semaphore(1)

    async def run(client):
        first, second = ask_first(client, 0), ask_first(client, 1)
        assert await second == (seed_of(1), [(0, 1)]) and not first.done()
        server.next.release()
        assert await first == (seed_of(0), [(0, 0)])

    play_group(server, run)


@pytest.mark.parametrize("last", ["end", "lost", "refused"])
def test_a_rollout_of_a_group_without_a_reply_asks_by_itself_with_its_seed(last):
    server = GroupServer([1], last)

    async def run(client):
        return await asyncio.gather(*(ask_first(client, number) for number in range(3)))

    replies = play_group(server, run)
    assert [seed for seed, _ in replies] == [seed_of(number) for number in range(3)]
    own = {body["seed"] for body in server.bodies if "seed" in body}
    assert own == {seed_of(n) for n in range(3) if n != 1 or last == "refused"}


def test_a_late_rollout_of_a_group_ends_alone_and_a_request_ends_with_its_last_one():
    server = GroupServer([1], "silent")

    async def run(client):
        late, quick, other = (ask_first(client, n, timeout_s=1.0 + n) for n in range(3))
        assert await quick == (seed_of(1), [(0, 1)])
        with pytest.raises(TimeoutError):
            await late
        assert not other.done() and not server.was_left.is_set()
        other.cancel()
        await asyncio.wait_for(server.was_left.wait(), 5)

    play_group(server, run)


def test_a_request_is_sent_though_the_one_that_it_joins_has_just_been_cancelled():
    server = GroupServer()

    async def run(client):
        first = ask_first(client, 0)
        await asyncio.sleep(0)  # it waits for others
        first.cancel()
        assert await ask_first(client, 1) == (seed_of(1), None)
        with pytest.raises(asyncio.CancelledError):
            await first

    play_group(server, run)
    assert [body["seed"] for body in server.bodies] == [seed_of(1)]
