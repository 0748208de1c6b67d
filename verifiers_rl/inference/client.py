"""All HTTP from the trainer to the inference server's control routes.

Rollouts go through `rollout_client.py`.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from verifiers_rl.process.waiting import WaitingLine

TOKEN_VARIABLE = "VERIFIERS_RL_TOKEN"
PUSH_HEADER = "X-Weight-Sync"  # of a push over HTTP: JSON, because its body is the weights


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
        """GET /weight_sync/status: see `server.WeightSyncRoutes.status`."""
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

    def connect_weight_sync(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """POST /weight_sync/connect; the workers meet the trainer meanwhile."""
        # The deadline is later than the server's own ones, because the server's errors say more.
        return self._call("POST", "/weight_sync/connect", request, 2 * timeout_s + 60.0)

    def receive_weights(self, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """POST /weight_sync/receive; the trainer sends meanwhile."""
        return self._call("POST", "/weight_sync/receive", body, 3 * timeout_s + 60.0)

    def receive_adapter(
        self, body: dict[str, Any], num_bytes: int, pieces: Iterator[bytes], timeout_s: float
    ) -> dict[str, Any]:
        """POST /weight_sync/adapter: as `receive_weights`, and this request carries the push.

        Args:
            body: of `receive_weights`; it travels in a header.
            num_bytes, pieces: the push.
        """
        headers = {PUSH_HEADER: json.dumps(body), "Content-Length": str(num_bytes)}
        limits = httpx.Timeout(timeout_s, read=3 * timeout_s + 60.0)
        reply = self._request(
            "POST", "/weight_sync/adapter", None, limits, content=pieces, headers=headers
        )
        return reply.json()

    def complete(self, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """POST /v1/completions, a route of vLLM itself."""
        return self._call("POST", "/v1/completions", body, timeout_s)

    def layer_states(self, token_ids: list[int], timeout_s: float) -> list[list[float]]:
        """Return the hidden states of the last of these tokens behind each layer of the served
        model, (layers, hidden); [] for a layer that was not called.
        """
        self._call("POST", "/weight_sync/layers", {"num_tokens": len(token_ids)}, timeout_s)
        request = {"model": self.served_model_name, "prompt": token_ids, "max_tokens": 1}
        # With a salt of its own, no token of the prompt is in the prefix cache.
        self.complete({**request, "cache_salt": secrets.token_hex(8)}, timeout_s)
        return self._call("GET", "/weight_sync/layers", timeout_s=timeout_s)["layers"]

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
        timeout_s: float | httpx.Timeout = 30.0,
        stream: bool = False,
        content: Iterator[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """Send a request, with `body` as JSON or with `content` as it is; return its reply if the
        status is 200, with `stream` once it begins.
        """
        token = find_token(self.host, self.port)
        request = self._http.build_request(
            method,
            path,
            json=body,
            content=content,
            timeout=timeout_s,
            headers={**(headers or {}), **({"Authorization": f"Bearer {token}"} if token else {})},
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
        if reply.status_code == 404:
            raise InferenceServerError(
                f"the server at {self.base_url} has no {path}: it is not vf-vllm. "
                "Start the server with `vf-vllm`"
            )
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        if reply.status_code != 200:
            reason = reply.json().get("error", reply.text) if is_json else reply.text
            kind = ERROR_KINDS.get(reply.status_code, InferenceServerError)
            raise kind(f"{method} {self.base_url}{path}: {reply.status_code}: {reason}")
        return reply
