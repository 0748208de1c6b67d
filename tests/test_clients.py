"""The HTTP client of rollouts, against a real HTTP server on loopback."""

import asyncio

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
        return web.json_response(REPLY, status=503 if len(tries) == 1 else 200)

    assert post(handler).json() == REPLY
    assert len(tries) == 2

    async def failing(request):
        return web.json_response({"error": {"message": "no memory"}}, status=500)

    with pytest.raises(openai.InternalServerError, match="no memory"):
        post(failing)


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


def timed(handler, timeout_s=0.5, pause_s=0.0, num_posts=1):
    """Requests one after the other inside a deadline; the replies, and the session."""

    async def run():
        async with serving(handler) as url:
            client = ServerClient(f"{url}/v1", 10.0)
            session, replies = RolloutSession(0), []
            try:
                async with session.limited(timeout_s) as deadline:
                    for _ in range(num_posts):
                        reply = await client.of_rollout(session).post(
                            "/chat/completions", cast_to=httpx.Response, body={"messages": []}
                        )
                        replies.append(reply)
                    await asyncio.sleep(pause_s)
                    session.left_at_end_s = session.left_s
            except (TimeoutError, openai.APIStatusError) as error:
                replies.append(error)
            finally:
                await client.close()
            return replies, deadline

    return asyncio.run(run())


def queued_for(seconds, queued_s):
    async def handler(request):
        await asyncio.sleep(seconds)
        return web.json_response(REPLY, headers={"X-Queued-S": str(queued_s)})

    return handler


def test_time_in_the_servers_queue_does_not_count_against_a_rollouts_deadline():
    replies, deadline = timed(queued_for(0.8, queued_s=0.75))
    assert [reply.status_code for reply in replies] == [200]
    assert not deadline.has_passed
    # What the request took without the queue counts, and so does time between requests.
    replies, deadline = timed(queued_for(0.8, queued_s=0.1), num_posts=2)
    assert isinstance(replies[-1], TimeoutError) and deadline.is_cause_of(replies[-1])
    replies, deadline = timed(queued_for(0.4, queued_s=0.4), pause_s=0.7)
    assert [type(reply).__name__ for reply in replies] == ["Response", "TimeoutError"]


def test_a_request_carries_what_is_left_of_the_deadline():
    limits = []

    async def handler(request):
        limits.append(float(request.headers["X-Reply-Timeout-S"]))
        await asyncio.sleep(0.2)
        return web.json_response(REPLY)

    timed(handler, timeout_s=5.0, num_posts=2)
    assert 4.8 < limits[0] <= 5.0 and 4.5 < limits[1] <= limits[0] - 0.2


def test_a_reply_that_the_server_ended_at_the_deadline_is_a_timeout_with_its_length():
    num_requests = 0

    async def handler(request):
        nonlocal num_requests
        num_requests += 1
        headers = {"X-Queued-S": "0.1", "X-Num-Tokens": "1234"}
        return web.json_response({"error": "it took longer"}, status=504, headers=headers)

    (error,), deadline = timed(handler)
    assert error.status_code == 504 and num_requests == 1  # not tried again
    assert deadline.is_cause_of(error) and deadline.num_lost_tokens == 1234


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_waited_for(status):
    statuses = [status, status, 200]

    async def handler(request):
        return web.json_response(REPLY, status=statuses.pop(0))

    replies, deadline = timed(handler, timeout_s=0.7)  # and the waiting does not count
    assert [reply.status_code for reply in replies] == [200] and not statuses
    assert deadline.left_at_end_s > 0.5


def test_without_a_deadline_a_busy_server_is_waited_for_until_the_requests_own(monkeypatch):
    async def handler(request):
        return web.json_response({"error": "busy"}, status=503)

    with pytest.raises(openai.InternalServerError, match="busy"):
        post(handler, timeout_s=0.6)
