"""The HTTP client of rollouts, against a real HTTP server on loopback."""

import asyncio
import socket
from functools import partial

import httpx
import openai
import pytest
from aiohttp import web

from tests.helpers import serving
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.inference.rollout_client import ServerClient
from verifiers_rl.inference.session import RolloutSession

REPLY = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "yes"},
        }
    ],
}


def post(handler, timeout_s=10.0):
    """One request to a server with this handler."""

    async def run():
        async with serving(handler) as url:
            client = ServerClient(f"{url}/v1", timeout_s)
            try:
                return await client.post(
                    "/chat/completions",
                    cast_to=httpx.Response,
                    body={"messages": [{"role": "user", "content": "hello"}]},
                )
            finally:
                await client.close()

    return asyncio.run(run())


def test_a_request_carries_the_token_and_messages_as_json(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    seen = []

    async def handler(request):
        seen.append((request.headers, await request.json()))
        return web.json_response(REPLY)

    assert post(handler).json() == REPLY
    [(headers, body)] = seen
    assert headers["Authorization"] == "Bearer secret"
    assert body == {"messages": [{"role": "user", "content": "hello"}]}


def test_a_connection_for_rollouts_is_kept_alive_and_found_dead_by_tcp():
    made = []

    async def handler(request):
        return web.json_response(REPLY)

    async def run():
        async with serving(handler) as url:
            client = ServerClient(f"{url}/v1", 10.0)
            make = client._session.connector._socket_factory
            client._session.connector._socket_factory = lambda at: made.append(make(at)) or made[-1]
            body = {"messages": []}
            await client.post("/chat/completions", cast_to=httpx.Response, body=body)
            options = (
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                (socket.SOL_TCP, socket.TCP_KEEPIDLE),
            )
            found = [made[0].getsockopt(*option) for option in options]
            await client.close()
            return found

    assert asyncio.run(run()) == [1, 30]


def test_a_refusal_is_an_error_of_openai_with_the_servers_reason():
    async def handler(request):
        return web.json_response({"error": {"message": "no such model"}}, status=404)

    with pytest.raises(openai.NotFoundError, match="no such model"):
        post(handler)


def test_a_lost_connection_is_tried_once_more():
    tries = []

    async def handler(request):
        tries.append(request)
        if len(tries) == 1:
            request.transport.close()
        return web.json_response(REPLY)

    assert post(handler).json() == REPLY
    assert len(tries) == 2


def test_an_error_of_the_server_is_tried_once_more():
    tries = []

    async def handler(request):
        tries.append(request)
        return web.json_response(REPLY, status=500 if len(tries) == 1 else 200)

    assert post(handler).json() == REPLY
    assert len(tries) == 2

    async def failing(request):
        return web.json_response({"error": {"message": "no memory"}}, status=500)

    with pytest.raises(openai.InternalServerError, match="no memory"):
        post(failing)


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_busy_server_is_asked_again_until_the_deadline(status, monkeypatch):
    monkeypatch.setattr(asyncio, "sleep", partial(short_sleep, asyncio.sleep))
    statuses = [status, status, status, 200]

    async def handler(request):
        return web.json_response(REPLY, status=statuses.pop(0))

    assert post(handler).json() == REPLY and not statuses

    async def busy(request):
        return web.json_response({"error": {"message": "busy"}}, status=status)

    with pytest.raises(openai.APIStatusError, match="busy"):
        post(busy, timeout_s=0.6)


async def short_sleep(sleep, seconds):
    await sleep(seconds / 50)


def test_a_connection_that_is_lost_again_is_an_error():
    tries = []

    async def handler(request):
        tries.append(request)
        request.transport.close()
        return web.json_response(REPLY)

    with pytest.raises(openai.APIConnectionError):
        post(handler)
    assert len(tries) == 2


def test_a_server_that_does_not_answer_in_time_is_a_timeout():
    async def handler(request):
        await asyncio.Event().wait()

    with pytest.raises(openai.APITimeoutError):
        post(handler, timeout_s=0.2)


def test_a_reply_keeps_the_policy_versions_of_its_own_request():
    async def handler(request):
        version = (await request.json())["messages"][0]["content"]
        await asyncio.sleep(0.05 if version == "3" else 0.0)  # the first to be asked answers last
        headers = {"X-Policy-Versions": f"0:{version}"} if version != "none" else {}
        return web.json_response(REPLY, headers=headers)

    async def ask(client, text):
        body = {"messages": [{"role": "user", "content": text}]}
        reply = await client.post("/chat/completions", cast_to=httpx.Response, body=body)
        return reply.extensions["policy_versions"]

    async def run():
        async with serving(handler) as url:
            client = ServerClient(f"{url}/v1", 10.0)
            try:
                return await asyncio.gather(*(ask(client, text) for text in ("3", "4", "none")))
            finally:
                await client.close()

    assert asyncio.run(run()) == [[(0, 3)], [(0, 4)], None]


@pytest.mark.parametrize("by_another_task", [False, True])
def test_a_request_ends_at_the_deadline_of_its_rollout(by_another_task):
    """Also one that verifiers' endpoint sends for a program."""

    async def handler(request):
        await asyncio.Event().wait()

    async def run():
        async with serving(handler) as url:
            client, session = ServerClient(f"{url}/v1", 60.0), RolloutSession(0)
            ask = client.of_rollout(session).post(
                "/chat/completions", cast_to=httpx.Response, body={"messages": []}
            )
            try:
                asking = asyncio.ensure_future(ask) if by_another_task else ask
                with pytest.raises(TimeoutError):
                    async with session.limited(0.2):
                        await (asyncio.sleep(60) if by_another_task else asking)
                if by_another_task:
                    with pytest.raises(openai.APITimeoutError):
                        await asyncio.wait_for(asking, 5)
            finally:
                await client.close()
            assert session.has_passed and session.left_s is None

    asyncio.run(run())
