"""verifiers' interception endpoint in memory: as over HTTP, but without a socket."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
import pytest
from aiohttp import web

from tests import test_environments_v1 as v1
from verifiers_rl.envs import chat_harness
from verifiers_rl.envs.chat_harness import CHAT, RefusedError, post_in_memory
from verifiers_rl.process.loop_thread import ExitError

tokenizer, on_the_path, play = v1.tokenizer, v1.on_the_path, v1.play  # fixtures


@asynccontextmanager
async def started(handler):
    """The runner of an application that answers model calls with the handler."""
    app = web.Application(client_max_size=2**30)
    app.router.add_post(CHAT, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    yield runner
    await runner.cleanup()


async def outcome(post, path, body):
    try:
        return await post(path, body)
    except web.HTTPNotFound:  # an HTTP server makes a reply of it
        return "404: 404: Not Found"
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
                there = partial(chat_harness.post_over_http, session, url, secret)
                for path, size in ((CHAT, 3), (CHAT, 150_000), ("/nowhere", 3)):
                    body = {"text": "ä" * size}
                    found = await outcome(here, path, body)
                    assert found == await outcome(there, path, body)
                    assert isinstance(found, str) == (secret == "wrong" or path != CHAT)

    asyncio.run(ask())


@pytest.mark.parametrize("is_callers", [True, False])
def test_a_request_runs_in_a_task_of_its_own_and_ends_with_its_caller(is_callers):
    tasks, has_begun = [], asyncio.Event()

    async def answer(request):
        tasks.append(asyncio.current_task())
        has_begun.set()
        await asyncio.sleep(600)

    async def ask():
        async with started(answer) as runner:
            caller = asyncio.create_task(post_in_memory(runner, "secret")(CHAT, {}))
            await has_begun.wait()
            (handler,) = tasks
            if is_callers:
                caller.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await caller
                assert handler is not caller and handler.cancelled()
            else:  # verifiers cancels the handler if the rollout ends; the caller goes on.
                handler.cancel()
                with pytest.raises(ExitError, match="CancelledError"):
                    await caller

    asyncio.run(ask())


@pytest.mark.parametrize("is_ours", [True, False])
def test_model_calls_of_the_chat_need_no_socket_in_a_run(play, monkeypatch, is_ours):
    """verifiers' own commands have an interception server that is not one of our environment's."""
    used = []
    for way in (chat_harness.post_in_memory, chat_harness.post_over_http):

        def spy(*arguments, way=way):
            used.append(way.__name__)
            return way(*arguments)

        monkeypatch.setattr(chat_harness, way.__name__, spy)
    if not is_ours:
        monkeypatch.setattr(
            "verifiers_rl.envs.chat_harness.ChatHarness._endpoint_of", lambda *arguments: None
        )
    play(num_rollouts=3)
    assert used == ["post_in_memory" if is_ours else "post_over_http"] * 3
