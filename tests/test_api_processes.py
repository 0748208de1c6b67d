"""Several API processes of one server: what one asks of another, over real UNIX sockets."""

import asyncio
import json
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from verifiers_rl.inference import api_processes
from verifiers_rl.inference.api_processes import ApiProcesses, prepare_sockets, socket_folder
from verifiers_rl.inference.client import TOKEN_VARIABLE

PORT = 34567


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    with tempfile.TemporaryDirectory() as short:  # pytest's own may be too long for a socket
        monkeypatch.setenv("XDG_CACHE_HOME", short)
        monkeypatch.setenv(TOKEN_VARIABLE, "secret")
        monkeypatch.setattr(api_processes, "die_with_parent", lambda parent: None)
        assert prepare_sockets(PORT) is None
        yield socket_folder(PORT)


def app_that(answers):
    """An ASGI app that calls `answers` with path, headers and body, and sends what it returns."""

    async def app(scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        status, reply = await answers(scope["path"], headers, body)
        start = {"type": "http.response.start", "status": status, "headers": [(b"x-from", b"0")]}
        await send(start)
        await send({"type": "http.response.body", "body": reply})

    return app


@asynccontextmanager
async def processes(num, answers):
    """All processes of a server; each answers with `answers`."""
    made = [ApiProcesses(PORT, index, num) for index in range(num)]
    async with AsyncExitStack() as stack:
        for one in made:
            await stack.enter_async_context(one.serving(app_that(answers)))
        async with asyncio.timeout(10):
            while made[0].missing():
                await asyncio.sleep(0.01)  # a socket that appears is no event
        yield made


def test_a_control_request_is_answered_by_the_first_process_wherever_it_comes_in():
    seen = []

    async def answers(path, headers, body):
        seen.append((path, headers.get("authorization"), body))
        return 418, b"from the first"

    async def run():
        async with processes(2, answers) as (first, second):
            assert first.is_first and not second.is_first
            transport = httpx.ASGITransport(second.forward)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                key = {"Authorization": "Bearer k"}
                big = b"w" * 3_000_000
                got = await client.post("/weight_sync/adapter", content=big, headers=key)
                assert (got.status_code, got.text) == (418, "from the first")
                assert got.headers["x-from"] == "0"
                assert (await client.get("/weight_sync/status")).status_code == 418
        assert seen == [
            ("/weight_sync/adapter", "Bearer k", big),
            ("/weight_sync/status", None, b""),
        ]

    asyncio.run(run())


def test_a_request_ends_at_the_first_process_when_its_client_leaves_another_one():
    """As the trainer's hold does: its reply lasts as long as the trainer."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def first_app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"held", "more_body": True})
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    async def run():
        first, second = (ApiProcesses(PORT, index, 2) for index in range(2))
        messages, sent = asyncio.Queue(), []

        async def send(message):
            sent.append(message)

        async with first.serving(first_app), second.serving(first_app):
            async with asyncio.timeout(10):
                while first.missing():
                    await asyncio.sleep(0.01)  # a socket that appears is no event
                messages.put_nowait({"type": "http.request", "body": b"{}", "more_body": False})
                scope = {"method": "POST", "path": "/weight_sync/hold", "headers": []}
                holding = asyncio.ensure_future(second.forward(scope, messages.get, send))
                await begun.wait()
                assert not holding.done()
                messages.put_nowait({"type": "http.disconnect"})
                await holding
                await ended.wait()
        assert [message.get("body") for message in sent] == [None, b"held", b""]

    asyncio.run(run())


def test_a_first_process_that_is_away_counts_as_a_server_that_is_lost():
    async def run():
        second = ApiProcesses(PORT, 1, 2)
        transport = httpx.ASGITransport(second.forward)
        async with (
            second.serving(None),
            httpx.AsyncClient(transport=transport, base_url="http://x") as client,
        ):
            got = await client.get("/weight_sync/status")
        assert got.status_code == 503
        assert got.json()["error"].startswith("API process 0 of 2 does not answer: ")

    asyncio.run(run())


def test_a_step_of_a_push_is_done_by_all_others_or_is_an_error_that_names_one():
    steps, broken = [], []

    async def answers(path, headers, body):
        steps.append((path, headers["authorization"], json.loads(body)))
        return (500, b"no") if broken else (200, b"{}")

    async def run():
        async with processes(3, answers) as (first, _, _):
            await first.tell_others("swap", 5.0, policy_version=4)
            asked = ("/weight_sync/step", "Bearer secret", {"step": "swap", "policy_version": 4})
            assert steps == [asked, asked]
            broken.append(True)
            with pytest.raises(RuntimeError, match=r"API process [12] of 3 .* 'count' .*: no"):
                await first.tell_others("count", 5.0)
        assert not (socket_folder(PORT) / "0.sock").exists()

    asyncio.run(run())


def test_a_single_process_has_no_socket_and_nobody_to_tell(folder):
    async def run():
        alone = ApiProcesses(PORT)
        async with alone.serving(None):
            await alone.tell_others("close", 1.0)
            assert alone.is_first and alone.missing() == []
        assert list(folder.iterdir()) == []

    asyncio.run(run())


def test_a_path_too_long_for_a_socket_is_refused_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 90)))
    assert "set XDG_CACHE_HOME to a shorter one" in prepare_sockets(PORT)
