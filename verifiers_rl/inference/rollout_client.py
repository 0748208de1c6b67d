"""How requests for rollouts reach `vf-vllm`, and what comes back beside the replies: which policies
sampled their tokens.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from typing import Any

import aiohttp
import httpx
from openai import APIConnectionError, APITimeoutError, AsyncOpenAI, DefaultAsyncHttpxClient

from verifiers_rl.inference.client import generation_key

policy_versions: ContextVar[list[tuple[int, int]] | None] = ContextVar(
    "policy_versions", default=None
)


class ServerClient(AsyncOpenAI):
    """AsyncOpenAI with a short path for `post(..., cast_to=httpx.Response)`, by which all clients
    here send their requests. The path uses aiohttp and skips the layers of openai and httpx. With
    hundreds of small requests at once, these layers take longer than all the rest of a rollout
    (benchmarks/rollouts.py). The path raises openai's errors. After a lost connection or a status
    of 500 or more it tries once again.

    Args:
        base_url: of the API, with /v1.
        timeout_s: deadline of one request.
    """

    def __init__(self, base_url: str, timeout_s: float) -> None:
        key = generation_key(base_url)
        # No proxy: it is our own server.
        http = DefaultAsyncHttpxClient(trust_env=False, timeout=timeout_s)
        super().__init__(base_url=base_url, api_key=key, http_client=http, max_retries=1)
        self._session = aiohttp.ClientSession(
            # The server closes connections that are idle for 5 s. Ours close earlier, so that no
            # request is sent on one that the server is closing.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )

    async def post(self, path: str, *, cast_to: Any, **kwargs: Any) -> Any:
        if cast_to is not httpx.Response:
            return await super().post(path, cast_to=cast_to, **kwargs)
        url = path if "://" in path else str(self.base_url).rstrip("/") + path
        headers = (kwargs.get("options") or {}).get("headers")
        data = json.dumps(kwargs["body"]).encode()

        def request() -> httpx.Request:  # for errors only, because it is slow
            return httpx.Request("POST", url)

        for retries_left in (1, 0):
            try:
                async with self._session.post(url, data=data, headers=headers) as reply:
                    content = await reply.read()
                if reply.status < 500:
                    break
            except TimeoutError as error:  # aiohttp's are also ClientErrors
                raise APITimeoutError(request()) from error
            except aiohttp.ClientError as error:
                if not retries_left:
                    raise APIConnectionError(request=request()) from error
        _remember_policy_versions(reply.headers.get("X-Policy-Versions"))
        response = httpx.Response(reply.status, content=content)
        if response.is_error:
            response.request = request()
            raise self._make_status_error_from_response(response)
        return response

    async def close(self) -> None:
        await self._session.close()
        await super().close()


def _remember_policy_versions(header: str | None) -> None:
    """Set `policy_versions` from a reply's header: "0:3,17:4" becomes [(0, 3), (17, 4)]."""
    if header:
        spans = [span.split(":") for span in header.split(",")]
        policy_versions.set([(int(start), int(version)) for start, version in spans])
