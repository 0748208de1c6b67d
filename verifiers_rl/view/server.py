"""The page over HTTP, for people on this machine. It only reads.

It listens on 127.0.0.1. Other users of the machine reach that too, so each answer needs the token
of the address that is printed; the page's first answer makes it a cookie. Names of hosts other than
this machine's are refused, so that no website can reach the page under a name of its own.

    /                  the page
    /static/NAME       its parts
    /api/runs          state of each run; 304 if nothing has changed
    /api/metrics       lines of metrics.jsonl, from one on
    /api/rollouts      a list: filter, start
    /api/rollout, /api/group, /api/tokens      of one rollout, by its number
    /api/rewards       how many rollouts had which reward at which step
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from verifiers_rl.json_text import as_json
from verifiers_rl.view.browse import (
    Filter,
    group_of,
    page_of,
    rewards_over_steps,
    rollout_of,
    tokens_of,
)
from verifiers_rl.view.files import Rollouts
from verifiers_rl.view.runs import Run, Runs

HOST = "127.0.0.1"
NAMES = [HOST, "localhost"]  # under which browsers reach it, also through a tunnel
STATIC = Path(__file__).parent / "static"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class NotFound(LookupError):
    """There is no such run, or no such rollout; the message says which."""


class TokenGuard:
    """Answers requests that know the token, and sets the headers that keep a page to itself.

    Args:
        app: what answers.
        token: of this server.
    """

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._token = app, token
        # Browsers send cookies to all ports of a host, so each server has a name of its own.
        self._cookie = "vf-rl-view-" + hashlib.sha256(token.encode()).hexdigest()[:12]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return

        request = Request(scope)
        is_given = self._is_token(request.query_params.get("token", ""))

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                headers += [(k.lower().encode(), v.encode()) for k, v in _HEADERS.items()]
                if is_given:
                    cookie = f"{self._cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/"
                    headers.append((b"set-cookie", cookie.encode()))
            await send(message)

        app = self._app
        if not is_given and not self._is_token(request.cookies.get(self._cookie, "")):
            text = "Open the address that `vf-rl view` has printed: it has this server's token.\n"
            app = PlainTextResponse(text, 403)
        await app(scope, receive, send_with_headers)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def make_app(runs: Runs, token: str) -> Starlette:
    """Return the application that answers.

    Args:
        runs: which are shown.
        token: without which nothing is answered.
    """
    files = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*.*")}

    def send_file(request: Request) -> Response:
        path = files.get(request.path_params.get("name", "index.html"))
        return FileResponse(path) if path else _json({"error": "no such file"}, 404)

    def all_runs(request: Request) -> Response:
        found = [run.state() for run in runs.find()]
        body = as_json({"runs": found, "problem": runs.problem})
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        return Response(body, media_type="application/json", headers={"ETag": tag})

    def metrics(request: Request) -> Response:
        run, query = _run_of(runs, request), request.query_params
        found = run.metrics(_number(query, "generation", -1), _number(query, "start", 0))
        # Its values are checked already, and there may be very many.
        return Response(json.dumps(found), media_type="application/json")

    def code(request: Request) -> Response:
        return _json(_run_of(runs, request).code())

    def rollouts(request: Request) -> Response:
        wanted = Filter.parse(request.query_params)
        start = _number(request.query_params, "start", 0)
        upto = _number(request.query_params, "upto", sys.maxsize)
        return answer(request, lambda found: page_of(found, wanted, start, upto=upto), {})

    def rewards(request: Request) -> Response:
        return answer(request, rewards_over_steps, {})

    def of_one(question: Callable[[Rollouts, int], Any]) -> Callable[[Request], Response]:
        def ask(request: Request) -> Response:
            number = _number(request.query_params, "number")
            return answer(request, lambda found: question(found, number))

        return ask

    def tokens(request: Request) -> Response:
        query = request.query_params
        number, start = _number(query, "number"), _number(query, "start", 0)
        return answer(request, lambda found: tokens_of(found, number, start))

    def answer(
        request: Request, question: Callable[[Rollouts], Any], otherwise: Any = None
    ) -> Response:
        found = _run_of(runs, request).ask(question)
        if found is None and otherwise is None:
            raise NotFound("there is no such rollout, or its tokens were not written")
        return _json(otherwise if found is None else found)

    return Starlette(
        routes=[
            Route("/", send_file),
            Route("/static/{name:path}", send_file),
            Route("/api/runs", all_runs),
            Route("/api/metrics", metrics),
            Route("/api/code", code),
            Route("/api/rollouts", rollouts),
            Route("/api/rollout", of_one(rollout_of)),
            Route("/api/group", of_one(group_of)),
            Route("/api/tokens", tokens),
            Route("/api/rewards", rewards),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=NAMES, www_redirect=False),
            Middleware(TokenGuard, token=token),
            Middleware(GZipMiddleware, minimum_size=2_000),
        ],
        exception_handlers={
            NotFound: lambda request, error: _json({"error": str(error)}, 404),
            ValueError: lambda request, error: _json({"error": str(error)}, 400),
            OSError: lambda request, error: _json({"error": str(error)}, 500),
        },
    )


def _json(value: Any, status: int = 200) -> Response:
    return Response(as_json(value), status, media_type="application/json")


def _run_of(runs: Runs, request: Request) -> Run:
    name = request.query_params.get("run", "")
    try:
        return runs[name]
    except KeyError:
        raise NotFound(f"there is no run {name!r}; reload the page") from None


def _number(query: Any, name: str, default: int | None = None) -> int:
    value = query.get(name, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} is no number") from None


def listen(port: int) -> socket.socket:
    """Return a socket on loopback. Port 0 is any free one.

    Raises:
        OSError: the port is in use.
        OverflowError: there is no such port.
    """
    if not 0 <= port < 2**16:
        raise OverflowError("it must be 0 to 65535")
    return socket.create_server((HOST, port))


def new_token() -> str:
    return secrets.token_urlsafe(24)


def make_server(app: Any) -> uvicorn.Server:
    """Return what serves an application: `run(sockets=[...])`, until a signal or `should_exit`."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,  # the address has the token, and is not to be logged
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,
        )
    )
