"""All HTTP from the trainer to the inference server's control routes.

Rollouts go through `rollout_client.py`.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TOKEN_VARIABLE = "VERIFIERS_RL_TOKEN"


class InferenceServerError(RuntimeError):
    """The server is away, is another one than expected, or refused; the message says what to do."""


class ServerLostError(InferenceServerError):
    """The server does not answer, or is a new process that lost the weights; it may come back."""


# 409: the server does not know this trainer's connection, or a push over it has broken; 429: a
# proxy is busy. With a status from 500 on, a proxy, the server or its engine has failed.
LOST = (409, 429)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# A machine that is lost does not close its connections, and a router forgets idle ones. So after
# 30 s of silence, TCP probes the other end 3 times, 10 s apart.
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


def keep_alive(sock: socket.socket) -> None:
    """Let the system find out when the machine at the other end of a connection is lost. Linux
    gives each connection the options of the socket that listens.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def token_file(port: int) -> Path:
    """Where `vf-vllm` leaves its token for trainers of the same user on the same machine."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "verifiers_rl" / f"token-{port}"


def find_token(host: str, port: int) -> str:
    """Return the token from the environment. Without one, and for a server on this machine, return
    the token from the file that `vf-vllm` left. Without either, return "".
    """
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    if host not in LOOPBACK:  # another machine must not learn the token of a server here
        return ""
    try:
        return token_file(port).read_text("utf-8")
    except (OSError, RuntimeError):  # nothing was left here, or no home, or that of another user
        return ""


def generation_key(base_url: str) -> str:
    """Return the key that requests authenticate with: the run's token, which control routes need,
    or else VLLM_API_KEY. Without either it is "none", because a server with --open needs no key.
    """
    url = urlsplit(base_url)
    return (
        find_token(url.hostname or "", url.port or 80) or os.environ.get("VLLM_API_KEY") or "none"
    )


class InferenceClient:
    """Control of one `vf-vllm` server. Methods may be called from any thread.

    Args:
        host, port: of the server.

    Attributes:
        post: makes a POST request, which `begin` sends: to a control route, as weight_routes.py
            describes them, or to one of vLLM's own. Its arguments are those of `ControlRequest`
            behind the client.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        bracketed = f"[{host}]" if ":" in host else host
        self.base_url = f"http://{bracketed}:{port}"
        self.post = partial(ControlRequest, self)
        self._has_answered = False

    def status(self) -> dict[str, Any]:
        """GET /weight_sync/status: see `weight_routes.WeightRoutes.status`."""
        status = self.post("/weight_sync/status", method="GET").begin().answer()
        if not isinstance(status, dict) or "policy_version" not in status:
            raise self.not_ours("/weight_sync/status")
        self._has_answered = True
        return status

    def not_ours(self, path: str, is_final: bool = False) -> InferenceServerError:
        """Return the error of a reply that is none of `vf-vllm`. If `vf-vllm` has answered before,
        a proxy may have replied in its place, and it may come back, unless this `is_final`.
        """
        kind = InferenceServerError if is_final or not self._has_answered else ServerLostError
        return kind(
            f"the server at {self.base_url} has no {path}: it is not vf-vllm. Start the server "
            "with `vf-vllm`"
        )


class ControlRequest:
    """A request to a control route, which another thread may give up.

    It does not go through httpx, which copies a body several times and cannot be interrupted. It
    uses no proxy and keeps no connection: it goes to our own server, seconds after the last one.

    Args:
        client: to the server.
        fields: the body as JSON, if it has one.
        timeout_s: deadline of connecting, of each write, and of the reply.
        num_bytes: that `write` will send in place of `fields`.
    """

    def __init__(
        self,
        client: InferenceClient,
        path: str,
        fields: Any = None,
        timeout_s: float = 30.0,
        num_bytes: int = 0,
        method: str = "POST",
    ) -> None:
        self._url, self._method, self._path = client.base_url, method, path
        self._not_ours = client.not_ours
        self._body = b"" if fields is None else json.dumps(fields).encode()
        self._headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(self._body) + num_bytes),
            "Authorization": f"Bearer {generation_key(client.base_url)}",
        }
        self._http = http.client.HTTPConnection(client.host, client.port, timeout_s)
        self._reply: http.client.HTTPResponse | None = None
        self._is_given_up = False

    def begin(self) -> ControlRequest:
        """Send all but what `write` will send. Raises ServerLostError if the server is away."""
        with self._lost_at_errors():
            self._http.connect()
            keep_alive(self._http.sock)
            if self._is_given_up:
                raise ConnectionError("given up")
            self._http.request(self._method, self._path, self._body, self._headers)
        return self

    def write(self, data: memoryview) -> None:
        """Send more of the body. If the server has replied already, raise its error."""
        with self._lost_at_errors():
            try:
                self._http.send(data)
            except (BrokenPipeError, ConnectionResetError):
                self.answer()

    def has_reply(self) -> bool:
        """Whether `answer` would return, or raise, at once."""
        if (sock := self._http.sock) is None:
            return True  # it was closed
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))

    def answer(self, timeout_s: float | None = None, stays_open: bool = False) -> dict[str, Any]:
        """Return the reply.

        Args:
            timeout_s: another deadline than that of the request.
            stays_open: return the reply's first line; the reply ends with `close`.

        Raises:
            ServerLostError: there was none, or `give_up` was called.
            InferenceServerError: the server's error.
        """
        with self._lost_at_errors():
            if self._http.sock is None:
                raise ConnectionError("given up")  # `close` was called on another thread
            if timeout_s is not None:
                self._http.sock.settimeout(timeout_s)
            self._reply = reply = self._http.getresponse()
            if stays_open and reply.status == 200:
                _held.add(self)
                return json.loads(reply.readline())
            text = reply.read().decode(errors="replace")
        self.close()
        found = None
        with suppress(ValueError):  # else another web server, or a proxy, has answered
            found = json.loads(text)
            if reply.status == 200:
                return found
        if reply.status in (200, 404):
            raise self._not_ours(self._path, isinstance(found, dict))
        reason = found["detail"] if isinstance(found, dict) and "detail" in found else text
        is_lost = reply.status in LOST or reply.status >= 500
        kind = ServerLostError if is_lost else InferenceServerError
        raise kind(f"{self._method} {self._url}{self._path}: {reply.status}: {reason}")

    def give_up(self) -> None:
        """End the request, which the server notices at once. Its thread raises ServerLostError."""
        self._is_given_up = True
        if (sock := self._http.sock) is not None:
            with suppress(OSError):  # it has ended
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        _held.discard(self)
        self._http.close()
        if self._reply is not None:
            self._reply.close()  # it keeps the socket open by itself

    @contextmanager
    def _lost_at_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ServerLostError(
                f"no answer from the inference server: {self._method} {self._url}{self._path}: "
                f"{error or type(error).__name__}"
            ) from error


_held: set[ControlRequest] = set()


def _let_go_in_child() -> None:
    """Close what a forked process must not hold, because it may outlive the trainer."""
    for request in [*_held]:
        request.close()


os.register_at_fork(after_in_child=_let_go_in_child)
