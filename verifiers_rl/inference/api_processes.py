"""Several API processes of one `vf-vllm` that act as one server: `--api-server-count N`.

All of them accept connections at the server's port, and each passes generation requests on to all
engines. Control requests are answered by process 0, whichever process they reach:

    trainer ── /weight_sync/... ──► any process ──► process 0 ── push ──► the engines' workers
                                                        │ step: close, count, swap, open
                                                        ▼
                                                  the other processes

The steps are those of a push. Each process knows the policy versions of its own requests' tokens,
so each must stop passing requests on, count its tokens and write down the new version while the
engines are paused. The processes speak HTTP over UNIX sockets in a folder of this user.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from verifiers_rl.inference.client import TOKEN_VARIABLE, token_file
from verifiers_rl.process.parent import die_with_parent

Step = Literal["connect", "close", "count", "swap", "fail", "open"]
STEP_PATH = "/weight_sync/step"
CONNECT_S = 10.0
CLOSE_S = 5  # at the end, connections to a process get so long to be closed
MAX_PATH = 100  # bytes in the path of a UNIX socket


def socket_folder(port: int) -> Path:
    """Where the API processes of the server at this port have their sockets."""
    return token_file(port).with_name(f"api-{port}")


def prepare_sockets(port: int) -> str | None:
    """Make the folder for the sockets, without those of an earlier server. Return an error's text
    if the folder cannot serve, else None.
    """
    folder = socket_folder(port)
    if len(os.fsencode(folder / "000.sock")) > MAX_PATH:
        return (
            f"--api-server-count: the path {folder} is too long for UNIX sockets; set "
            "XDG_CACHE_HOME to a shorter one"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    return None


class ApiProcesses:
    """The API processes of this server, as one of them sees them.

    Args:
        port: the server's.
        index: of this process.
        num: of all of them.
    """

    def __init__(self, port: int = 0, index: int = 0, num: int = 1) -> None:
        self.index, self.num = index, num
        self._folder = socket_folder(port)
        self._sessions: dict[int, Any] = {}  # by index of another process

    @classmethod
    def of(cls, state: Any) -> ApiProcesses:
        """Return those of the process with this state of vLLM's app."""
        index = getattr(state.engine_client.engine_core, "client_index", 0)
        return cls(state.args.port, index, getattr(state.args, "api_server_count", None) or 1)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @asynccontextmanager
    async def serving(self, app: Any) -> AsyncIterator[None]:
        """Inside, the other processes reach this one's app through its socket."""
        if self.num == 1:
            yield
            return
        import uvicorn

        die_with_parent(os.getppid())

        class LocalServer(uvicorn.Server):
            def capture_signals(self) -> Any:
                return nullcontext()  # signals end the server at the port, and this one with it

        config = uvicorn.Config(
            app,
            uds=str(self._socket(self.index)),
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=CLOSE_S,
        )
        server = LocalServer(config)
        serving = asyncio.ensure_future(server.serve())
        try:
            yield
        finally:
            for session in self._sessions.values():
                await session.close()
            server.should_exit = True
            await serving
            self._socket(self.index).unlink(missing_ok=True)

    def missing(self) -> list[int]:
        """Return which processes have not come up yet."""
        return [i for i in range(self.num) if self.num > 1 and not self._socket(i).exists()]

    async def tell_others(self, step: Step, timeout_s: float, **fields: Any) -> None:
        """Let all other processes do a step, at once.

        Raises:
            RuntimeError: one of them did not do it within `timeout_s`.
        """
        others = [index for index in range(self.num) if index != self.index]
        await asyncio.gather(*(self._tell(i, {"step": step, **fields}, timeout_s) for i in others))

    async def _tell(self, index: int, body: dict[str, Any], timeout_s: float) -> None:
        import aiohttp

        try:
            async with self._session(index).post(
                f"http://api{STEP_PATH}",
                json=body,
                headers={"Authorization": f"Bearer {os.environ[TOKEN_VARIABLE]}"},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as reply:
                status, text = reply.status, await reply.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            status, text = 0, f"{type(error).__name__}: {error}"
        if status != 200:
            raise RuntimeError(
                f"API process {index} of {self.num} did not do the step {body['step']!r} of a push "
                f"within {timeout_s:g} s: {text}"
            )

    async def forward(self, scope: Any, receive: Any, send: Any) -> None:
        """Let process 0 answer a request, and pass its reply on piece by piece."""
        import aiohttp
        from starlette.responses import JSONResponse

        has_begun = False
        try:
            async with self._session(0).request(
                scope["method"],
                f"http://api{scope['path']}",
                headers=_passed_on(scope["headers"]),
                data=_body(receive) if scope["method"] == "POST" else None,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            ) as reply:
                headers = _passed_on(
                    (name.lower().encode(), value.encode()) for name, value in reply.headers.items()
                )
                start = [(name.encode(), value.encode()) for name, value in headers]
                await send(
                    {"type": "http.response.start", "status": reply.status, "headers": start}
                )
                has_begun = True
                async for piece in _until_gone(reply.content, receive):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (aiohttp.ClientError, OSError) as error:
            if has_begun:
                raise  # breaks the client's connection, as the end of process 0 itself does
            problem = f"API process 0 of {self.num} does not answer: {error}"
            await JSONResponse({"error": problem}, 503)(scope, receive, send)

    def _socket(self, index: int) -> Path:
        return self._folder / f"{index}.sock"

    def _session(self, index: int) -> Any:
        import aiohttp

        if index not in self._sessions:
            self._sessions[index] = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path=str(self._socket(index)), limit=0),
                auto_decompress=False,
            )
        return self._sessions[index]


def _passed_on(headers: Any) -> list[tuple[str, str]]:
    """Return those of ASGI's headers that are about the message, not about one connection."""
    of_connection = (b"host", b"connection", b"keep-alive", b"transfer-encoding")
    return [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in headers
        if name not in of_connection
    ]


async def _body(receive: Any) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ConnectionError("the client left before all of its request was here")
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def disconnected(receive: Any) -> None:
    """Wait until the client of this ASGI `receive` has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _until_gone(content: Any, receive: Any) -> AsyncIterator[bytes]:
    """Yield the pieces of a reply until it ends, or the client has left."""
    leaving = asyncio.ensure_future(disconnected(receive))
    reading = None
    try:
        while not leaving.done():
            reading = asyncio.ensure_future(content.readany())
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                return
            if not (piece := reading.result()):
                return
            yield piece
    finally:
        for task in (leaving, reading):
            if task is not None:
                task.cancel()
