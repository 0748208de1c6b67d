"""verifiers' interception endpoint in memory: as over HTTP, but without a socket."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from verifiers_rl.envs.chat_harness import CHAT, RefusedError, post_in_memory


@asynccontextmanager
async def started(handler):
    """The runner of an application that answers model calls with the handler."""
    app = web.Application(client_max_size=2**30)
    app.router.add_post(CHAT, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    yield runner
    await runner.cleanup()


async def outcome(post, body):
    try:
        return await post(CHAT, body)
    except RefusedError as refused:
        return str(refused)


def test_replies_are_those_of_the_socket():
    async def answer(request):
        if request.headers["Authorization"] != "Bearer secret":
            return web.json_response({"error": "unauthorized"}, status=401)
        body = await request.json()
        return web.json_response({"n": len(body["text"]), "type": request.content_type})

    async def ask():
        async with started(answer) as runner, aiohttp.ClientSession() as session:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            for secret in ("secret", "wrong"):
                here = post_in_memory(runner, secret)
                headers = {"Authorization": f"Bearer {secret}"}
                for path, size in ((CHAT, 3), (CHAT, 150_000), ("/nowhere", 3)):
                    body = {"text": "ä" * size}
                    found = await outcome(here, path, body)
                    async with session.post(url + path, json=body, headers=headers) as reply:
                        text = await reply.text()
                    is_ok = reply.status == 200
                    assert found == (json.loads(text) if is_ok else f"{reply.status}: {text}")
                    assert isinstance(found, str) == (secret == "wrong" or path != CHAT)

    asyncio.run(ask())


@pytest.mark.parametrize("is_callers", [True, False])
def test_a_request_runs_in_a_task_of_its_own_and_ends_with_its_caller(is_callers):
    tasks = []

    async def answer(request):
        tasks.append(asyncio.current_task())
        await asyncio.sleep(10)

    async def ask():
        async with started(answer) as runner:
            caller = asyncio.create_task(post_in_memory(runner, "secret")(CHAT, {}))
            await asyncio.sleep(0.01)
            (handler,) = tasks
            if is_callers:
                caller.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await caller
                assert handler is not caller and handler.cancelled()
            else:  # verifiers cancels the handler if the rollout ends; the caller goes on.
                handler.cancel()
                with pytest.raises(RefusedError, match="409: the rollout has ended"):
                    await caller

    asyncio.run(ask())
