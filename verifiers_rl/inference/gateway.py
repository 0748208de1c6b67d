"""What stands before vLLM's HTTP server: who may use it, and which routes there are.

POST /v1/chat/completions/tokens  like /v1/chat/completions, but the prompt is the token ids in
                                  "tokens", not the tokenised messages, and the reply has a line
                                  for each of "seeds", with the sampled tokens, the policies
                                  that sampled them and, if "sampling_mask" asks for them, those
                                  that could be sampled (packed_tokens.py)
"""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.websockets import WebSocketClose

from verifiers_rl.inference.client import LOOPBACK, TOKEN_VARIABLE
from verifiers_rl.inference.generation import TokenRequest, current_request, reply_in_lines
from verifiers_rl.inference.weight_routes import WeightRoutes

CHAT_PATH = "/v1/chat/completions"
TOKENS_PATH = "/v1/chat/completions/tokens"
PUSH_PATH = "/weight_sync/receive"  # reads its body in pieces, and knows how long it must be
PUBLIC_PATHS = ("/health", "/version", "/metrics")
# vLLM's other routes are not served: some of them control vLLM without a token, and others generate
# tokens in ways of their own.
VLLM_PATHS = (
    CHAT_PATH,
    "/v1/completions",
    "/inference/v1/generate",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    *PUBLIC_PATHS,
)
# Of a request that is read into memory: more than the text of a million tokens takes as JSON.
MAX_BODY_BYTES = 2**25


@dataclass
class Gateway:
    """ASGI middleware, which vLLM's HTTP server lets one add."""

    app: Any
    weights: WeightRoutes | None = None
    chat: Any = None  # vLLM's handler, once it can reply in lines

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != PUSH_PATH:
            receive = bounded(receive)
        current_request.set(None)  # of a request before it on this connection
        await self.app_for(scope)(scope, receive, send)

    def app_for(self, scope: Any) -> Any:
        """Return what answers this request."""
        if scope["type"] == "websocket":
            return WebSocketClose()
        if scope["type"] != "http":
            return self.app
        vllm, path = scope["app"].state, scope["path"].rstrip("/")
        if refusal := refusal_of(scope, vllm.args, path):
            return refusal
        if path in VLLM_PATHS or scope["method"] == "OPTIONS":
            return self.app
        if path == TOKENS_PATH:
            return self.reply_to_tokens
        if path.startswith("/weight_sync/"):
            self.weights = self.weights or WeightRoutes(vllm)
            return self.weights.app
        return error(404, f"vf-vllm does not serve {path}; see docs/weight_sync.md")

    async def reply_to_tokens(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request of the token route on to vLLM, as one to its chat route."""
        try:
            body = await Request(scope, receive).body()
            fields, config = json.loads(body), scope["app"].state.engine_client.model_config
            asked = TokenRequest(fields, config.get_vocab_size(), config.max_model_len)
        except ValueError as problem:
            return await error(400, str(problem))(scope, receive, send)
        except HTTPException as problem:
            return await error(problem.status_code, problem.detail)(scope, receive, send)
        except ClientDisconnect:
            return None
        if self.chat is None:
            self.chat = scope["app"].state.openai_serving_chat
            reply_in_lines(self.chat)
        current_request.set(asked)
        return await self.app(*with_body(scope, json.dumps(fields).encode(), receive), send)


def error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"detail": message}, status)  # as FastAPI's own


def bounded(receive: Any) -> Any:
    """Return an ASGI `receive` that raises HTTPException once a body is too long."""
    num_bytes = 0

    async def receive_some() -> Any:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        return message

    return receive_some


def refusal_of(scope: Any, args: Any, path: str) -> JSONResponse | None:
    """Return the reply to a request that may not be served, else None. Refused are requests
    without a key, and requests of a web page that is not allowed: a browser names the page, and it
    reaches 127.0.0.1 too. If a page's own name leads here, the browser takes this server for the
    page's and names no page; so where only this machine is served, it must be asked by its name.
    """
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    if args.host in LOOPBACK and re.sub(r":\d+$", "", host).strip("[]").lower() not in LOOPBACK:
        return error(
            400, f"Host {host!r}: this server is {', '.join(LOOPBACK)}; --host opens it to others"
        )
    if origin and not {"*", origin} & set(args.allowed_origins):
        return error(403, f"web pages of {origin} may not use this server (--allowed-origins)")
    keys = args.generation_keys
    if path.startswith("/weight_sync/"):
        keys = [os.environ[TOKEN_VARIABLE]]
    elif not keys or path in PUBLIC_PATHS or scope["method"] == "OPTIONS":  # which has no key
        return None
    given = headers.get("authorization", "").encode()
    if any(secrets.compare_digest(given, f"Bearer {one}".encode()) for one in keys):
        return None
    return error(
        401,
        f"wrong or missing token: set {TOKEN_VARIABLE} to this server's, or to generate only, "
        "VLLM_API_KEY to an --api-key of this server",
    )


def with_body(scope: Any, body: bytes, receive: Any) -> tuple[Any, Any]:
    """Return the ASGI `scope` and `receive` of a chat request with this body, which has not been
    read.
    """
    bodies = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Any:
        return bodies.pop() if bodies else await receive()

    return scope | {"path": CHAT_PATH, "raw_path": CHAT_PATH.encode()}, receive_again
