"""HTTP servers on loopback for tests, also of a Python without torch."""

from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from verifiers_rl.process.loop_thread import LoopThread


@asynccontextmanager
async def serving(handler, path="/v1/chat/completions"):
    """The base URL of an HTTP server on loopback that answers this path with the handler."""
    app = web.Application()
    app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, shutdown_timeout=1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


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
