"""HTTP servers on loopback for tests, also of a Python without torch."""

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from verifiers_rl.process.loop_thread import LoopThread


class OfGroup:
    """One request of a group, as if it had been sent by itself."""

    def __init__(self, request, body):
        self.request, self.body = request, body

    def __getattr__(self, name):
        return getattr(self.request, name)

    async def json(self):
        return self.body


def replying_in_lines(handler):
    """A handler of the token route that replies as `vf-vllm` does, by a line for each of the seeds,
    as soon as this handler has answered it; "versions" are in a header. One that is an error has
    none, but if it is the only one, the error is the reply.
    """

    async def answer(request):
        body = await request.json() if request.path.endswith("/tokens") else {}
        if "seeds" not in body:
            return await handler(request)
        lines = web.StreamResponse()

        async def answer_one(place, seed):
            own = {name: value for name, value in body.items() if name != "seeds"}
            own |= {} if seed is None else {"seed": seed}
            try:
                reply = await handler(OfGroup(request, own))
            except web.HTTPException as error:
                reply = web.Response(status=error.status, text=error.text)
            if reply.status != 200 and len(body["seeds"]) == 1:
                return reply
            await lines.prepare(request)
            if reply.status == 200 and not request.transport.is_closing():
                versions = reply.headers.get("versions", "")
                await lines.write(f"{place} {versions} ".encode() + reply.body + b"\n")
            return lines

        async with asyncio.TaskGroup() as tasks:
            replies = [
                tasks.create_task(answer_one(place, seed))
                for place, seed in enumerate(body["seeds"])
            ]
        return replies[-1].result()

    return answer


@asynccontextmanager
async def serving(handler, path="/v1/chat/completions", has_lines=False):
    """The base URL of an HTTP server on loopback that answers this path with the handler."""
    app = web.Application()
    app.router.add_route("*", path, handler if has_lines else replying_in_lines(handler))
    runner = web.AppRunner(app, shutdown_timeout=1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextmanager
def uvicorn_in_thread(server, *listeners, ends_within_s=20.0):
    """Let this server of uvicorn answer on a thread, until the block ends."""
    thread = threading.Thread(target=server.run, args=[[*listeners] or None])
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(ends_within_s)
        assert not thread.is_alive(), "what holds the server keeps it from ending"


@contextmanager
def in_thread(context):
    """Enter an asynchronous context on a thread of its own."""
    thread = LoopThread("server")
    try:
        yield thread.run(context.__aenter__()).result(30)
    finally:
        thread.stop(lambda: context.__aexit__(None, None, None))


def chat_reply(content, finish_reason="stop", of_message=None, **fields):
    """A reply of OpenAI's chat API, with more fields of its choice."""
    message = {"role": "assistant", "content": content} | (of_message or {})
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, **fields}
    reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
    return reply | {"choices": [choice]}
