"""The HTTP client of rollouts, against a real HTTP server on loopback."""

import asyncio
import socket
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from aiohttp import web

from tests.serving import chat_reply, serving
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.inference.rollout_client import ServerClient
from verifiers_rl.inference.session import RolloutSession

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
    ("outcome", "timeout_s", "error", "num_tries"),
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


def test_a_reply_keeps_the_policy_versions_of_its_own_request():
    async def handler(request):
        version = (await request.json())["messages"][0]["content"]
        await asyncio.sleep(2.5 if version == "3" else 0.0)  # the first to be asked answers last
        headers = {"X-Policy-Versions": f"0:{version}"} if version != "none" else {}
        return web.json_response(REPLY, headers=headers)

    async def run():
        async with connected(handler) as client:
            replies = await asyncio.gather(*(ask(client, text) for text in ("3", "4", "none")))
            return [reply.extensions["policy_versions"] for reply in replies]

    assert asyncio.run(run()) == [[(0, 3)], [(0, 4)], None]


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
