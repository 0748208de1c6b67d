"""All HTTP from the trainer to the inference server's control routes.

Rollouts go through `rollout_client.py`.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

from verifiers_rl.process.waiting import WaitingLine

TOKEN_VARIABLE = "VERIFIERS_RL_TOKEN"
PUSH_HEADER = "X-Weight-Sync"  # of a push: its fields as JSON, because its body is the weights


class InferenceServerError(RuntimeError):
    """The server is away, is another one than expected, or refused; the message says what to do."""


class RequestRefusedError(InferenceServerError):
    """The server found the request itself wrong (400) and began nothing."""


class ServerLostError(InferenceServerError):
    """The server does not answer, or is a new process that lost the weights; it may come back."""


# 409: the server does not know this trainer's hold or connection; 503: its engine is dead.
ERROR_KINDS = {400: RequestRefusedError, 409: ServerLostError, 503: ServerLostError}


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def token_file(port: int) -> Path:
    """Where `vf-vllm` leaves its token for trainers of the same user on the same machine."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "verifiers_rl" / f"token-{port}"


def save_token(port: int, token: str) -> Path:
    """Write the token readable by this user only."""
    path = token_file(port)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return path


def find_token(host: str, port: int) -> str:
    """Return the token from the environment. Without one, and for a server on this machine, return
    the token from the file that `vf-vllm` left. Without either, return "".
    """
    if TOKEN_VARIABLE in os.environ:
        return os.environ[TOKEN_VARIABLE]
    if host not in LOOPBACK:  # another machine must not learn the token of a server here
        return ""
    path = token_file(port)
    return path.read_text() if path.is_file() else ""


def generation_key(base_url: str) -> str:
    """Return the key that requests for rollouts authenticate with: the run's token, which control
    routes need too, or else VLLM_API_KEY. Without either it is "none", because a server on this
    machine may need no key.
    """
    url = httpx.URL(base_url)
    return find_token(url.host, url.port or 80) or os.environ.get("VLLM_API_KEY") or "none"


class Hold:
    """A request whose reply does not end. While it is open, the server belongs to one trainer. The
    request ends with this process, however the process ends.
    """

    def __init__(self, reply: httpx.Response) -> None:
        self._reply = reply
        _sockets_held.add(reply.extensions["network_stream"].get_extra_info("socket"))

    def close(self) -> None:
        self._reply.close()


_sockets_held: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close the hold in a forked process, which may outlive the trainer and must not hold then."""
    for held in _sockets_held:
        held.close()


os.register_at_fork(after_in_child=_let_go_in_child)


class InferenceClient:
    """Control of one `vf-vllm` server. Methods may be called from any thread.

    Args:
        host, port: of the server.
        timeout_s: how long `wait_until_ready` waits for the server.
    """

    def __init__(self, host: str, port: int, timeout_s: float = 300.0) -> None:
        self.host = host
        self.port = port
        self.timeout_s = timeout_s
        bracketed = f"[{host}]" if ":" in host else host
        self.base_url = f"http://{bracketed}:{port}"
        self._served_model_name: str | None = None
        # trust_env=False: a proxy set for the internet must not swallow requests to our own server.
        # No connection is kept alive: calls are seconds apart, and none stays open at the end.
        self._http = httpx.Client(
            base_url=self.base_url,
            trust_env=False,
            timeout=30.0,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    @property
    def served_model_name(self) -> str:
        if self._served_model_name is None:
            self._served_model_name = self.status()["served_model_name"]
        return self._served_model_name

    def wait_until_ready(self) -> dict[str, Any]:
        """Wait until the server answers; return its status.

        Raises:
            InferenceServerError: the server did not answer within `timeout_s` seconds, or it is not
                `vf-vllm`, or the token is wrong.
            Interrupted: a signal asks the run to end.
        """
        deadline = time.monotonic() + self.timeout_s
        with WaitingLine(
            lambda: f"the server at {self.base_url}, {self.timeout_s:g} s at most,"
        ) as line:
            return self._wait(deadline, line)

    def _wait(self, deadline: float, line: WaitingLine) -> dict[str, Any]:
        while True:
            try:
                return self.status()
            except ServerLostError as error:
                line.show()
                if time.monotonic() >= deadline:
                    raise InferenceServerError(
                        f"no server at {self.base_url} after {self.timeout_s:g} s "
                        "(vllm_server_timeout). Start one with "
                        f"`vf-vllm --model ... --port {self.port}`, "
                        "or set vllm_server_host and vllm_server_port"
                    ) from error
            # Nothing to await: the server is another process that may not exist yet.
            time.sleep(0.25)

    def status(self) -> dict[str, Any]:
        """GET /weight_sync/status: see `weight_routes.WeightRoutes.status`."""
        return self._call("GET", "/weight_sync/status")

    def check_model(self, config: Any) -> None:
        """Raise InferenceServerError unless the server's model has the sizes
        of this Hugging Face config.
        """
        status, text = self.status(), config.get_text_config()
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers")
        different = [
            f"{name} {getattr(text, name)} here, {status[name]} there"
            for name in sizes
            if getattr(text, name) != status[name]
        ]
        if different:
            raise InferenceServerError(
                f"the server at {self.base_url} serves another model, {status['model']!r}: "
                f"{'; '.join(different)}. Start it with the trainer's model"
            )

    def join(self, host: str, port: int) -> None:
        """POST /weight_sync/join: tell this server's trainer of another server."""
        self._call("POST", "/weight_sync/join", {"host": host, "port": port})

    def hold(self, trainer: str) -> Hold:
        """POST /weight_sync/hold: from now on the server refuses other trainers.

        Args:
            trainer: an id. The trainer that holds the server may hold it again under the same id.

        Raises:
            InferenceServerError: another trainer has the server; the message names that trainer.
        """
        name = f"process {os.getpid()} on {socket.gethostname()}"
        body = {"trainer": trainer, "name": name}
        return Hold(self._request("POST", "/weight_sync/hold", body, stream=True))

    def connect_weight_sync(self, fields: dict[str, Any], timeout_s: float) -> WeightRequest:
        """POST /weight_sync/connect: what will come. NCCL connects meanwhile."""
        body = json.dumps(fields).encode()
        return WeightRequest(self, "/weight_sync/connect", {}, len(body), [body], timeout_s)

    def receive_weights(
        self, fields: dict[str, Any], num_bytes: int, body: Iterable[memoryview], timeout_s: float
    ) -> WeightRequest:
        """POST /weight_sync/receive: one push.

        Args:
            num_bytes, body: the weights; none if NCCL carries them meanwhile.
        """
        headers = {PUSH_HEADER: json.dumps(fields)}
        return WeightRequest(self, "/weight_sync/receive", headers, num_bytes, body, timeout_s)

    def complete(self, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """POST /v1/completions, a route of vLLM itself."""
        return self._call("POST", "/v1/completions", body, timeout_s)

    def close(self) -> None:
        self._http.close()

    def _call(
        self, method: str, path: str, body: Any = None, timeout_s: float = 30.0
    ) -> dict[str, Any]:
        return self._request(method, path, body, timeout_s).json()

    def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout_s: float = 30.0,
        stream: bool = False,
    ) -> httpx.Response:
        """Send a request with `body` as JSON; return its reply if the status is 200, with `stream`
        once it begins.
        """
        request = self._http.build_request(
            method, path, json=body, timeout=timeout_s, headers=self.authorization()
        )
        try:
            reply = self._http.send(request, stream=stream)
            if reply.status_code != 200:
                reply.read()
        except httpx.TransportError as error:
            raise ServerLostError(
                f"no answer from the inference server: {method} {self.base_url}{path}: "
                f"{error or type(error).__name__}"
            ) from error
        if reply.status_code != 200:
            raise self.error_of(method, path, reply.status_code, reply.text)
        return reply

    def authorization(self) -> dict[str, str]:
        token = find_token(self.host, self.port)
        return {"Authorization": f"Bearer {token}"} if token else {}

    def error_of(self, method: str, path: str, status: int, text: str) -> InferenceServerError:
        """Return the error that a reply of another status than 200 stands for."""
        if status == 404:
            return InferenceServerError(
                f"the server at {self.base_url} has no {path}: it is not vf-vllm. "
                "Start the server with `vf-vllm`"
            )
        try:
            reason = json.loads(text)["error"]
        except (ValueError, KeyError, TypeError):
            reason = text
        kind = ERROR_KINDS.get(status, InferenceServerError)
        return kind(f"{method} {self.base_url}{path}: {status}: {reason}")


class WeightRequest:
    """A request with a long body, or a long wait for its reply, that another thread may give up.

    It does not go through httpx, which copies a body several times and cannot be interrupted.

    Args:
        client: to the server.
        path, headers: of the request, a POST.
        num_bytes, body: how many bytes the pieces of the body have together.
        timeout_s: deadline of each write. The reply's is later than the server's own deadlines,
            because the server's errors say more.
    """

    def __init__(
        self,
        client: InferenceClient,
        path: str,
        headers: dict[str, str],
        num_bytes: int,
        body: Iterable[bytes | memoryview],
        timeout_s: float,
    ) -> None:
        self._client, self._path, self._body = client, path, body
        self._headers = {**headers, **client.authorization(), "Content-Length": str(num_bytes)}
        self._reply_s = 3 * timeout_s + 60.0
        self._http = http.client.HTTPConnection(client.host, client.port, timeout_s)
        self._is_given_up = False

    def answer(self) -> dict[str, Any]:
        """Send the request; return its reply.

        Raises:
            ServerLostError: there was none, or `give_up` was called.
            InferenceServerError: the server's error. An error of `body` is raised unchanged.
        """
        try:
            self._http.connect()
            if self._is_given_up:
                raise ConnectionError("given up")
            try:
                self._http.request("POST", self._path, self._body, self._headers)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the server may have replied before it had read the whole body
            self._http.sock.settimeout(self._reply_s)
            with self._http.getresponse() as reply:
                status, text = reply.status, reply.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ServerLostError(
                f"no answer from the inference server: POST {self._client.base_url}{self._path}: "
                f"{error or type(error).__name__}"
            ) from error
        finally:
            self._http.close()
        if status != 200:
            raise self._client.error_of("POST", self._path, status, text)
        return json.loads(text)

    def give_up(self) -> None:
        """End the request, which the server notices at once. Its thread raises ServerLostError."""
        self._is_given_up = True
        if (sock := self._http.sock) is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended
