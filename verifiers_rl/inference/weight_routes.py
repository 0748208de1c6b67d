"""The routes by which a trainer takes a server and sends it weights. All need the run's token.

POST /weight_sync/connect   what each push will carry, and NCCL's unique id, or CUDA IPC's handle;
                            the server belongs to this trainer until this request ends
POST /weight_sync/receive   take one push: the body of this request, or what comes over NCCL or IPC;
                            then drop cached prefixes and set the policy version
POST /weight_sync/sleep     leave the GPU's memory to the trainer, until its next push or its end
POST /weight_sync/join      another server wants to take part in the trainer's run
GET  /weight_sync/status    policy version, world size, dtype, model, servers that joined
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import nullcontext, suppress
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Base64Bytes, BaseModel, Field, PositiveFloat
from starlette.requests import ClientDisconnect

from verifiers_rl.inference.engine_calls import (
    answer_of,
    call_engines,
    call_workers,
    run_in_workers,
    updating,
)
from verifiers_rl.inference.expected import fit_to_server
from verifiers_rl.sync.nccl import ID_BYTES
from verifiers_rl.sync.plan import ADAPTER_ID, ADAPTER_NAME, TransferPlan
from verifiers_rl.sync.shared_buffers import SharedBuffers, shared_with_workers

CALL_DEADLINE_S = 60.0
# How long a new trainer waits for the previous one to leave. When a process dies, its connection
# ends at once, but this server may hear of the new trainer first.
HOLDER_GRACE_S = 2.0
WAKE_PAUSE_S = 2.0  # between two attempts to wake behind a trainer

logger = logging.getLogger(__name__)


class Connection(BaseModel):
    """What a trainer will send, with each push.

    Attributes:
        trainer: its id, the same when it connects anew.
        name: of its process and machine, for people.
        timeout_s: deadline of connecting.
        unique_id: NCCL's, of the communicator that carries the weights, or a longer one, JSON, of a
            bucket on the GPU of both sides that does. Without it, bodies of requests do.
    """

    trainer: str
    name: str
    timeout_s: PositiveFloat
    plan: TransferPlan
    unique_id: Annotated[Base64Bytes, Field(min_length=ID_BYTES)] | None = None


class Hold(StreamingResponse):
    """The reply to the trainer that has connected. It does not end until the trainer closes the
    connection, its process dies, a newer connection takes its place, or the server ends.

    Args:
        of: what the trainer has said.
        sizes: bytes of the buckets in each push's body; none with NCCL.
        server: uvicorn's. It ends only after all replies have ended, and has no event to announce
            its end.

    Attributes:
        connection: the name by which pushes refer to it.
        shared: memory shared with the workers; None while they may hold a part of a push.
        left: set when the reply has ended, or is to end.
        waking: wakes engines that sleep once the trainer has left; None before they first sleep.
    """

    def __init__(self, of: Connection, sizes: list[int], server: Any) -> None:
        self.of, self.sizes = of, sizes
        self.connection = secrets.token_hex(8)
        self.shared: SharedBuffers | None = None
        self.since = time.strftime("%Y-%m-%d %H:%M:%S")
        self.left = asyncio.Event()
        self.waking: asyncio.Task[None] | None = None
        self._server = server
        super().__init__(self._until_it_ends())

    async def _until_it_ends(self) -> AsyncIterator[str]:
        yield json.dumps({"connection": self.connection}) + "\n"
        while not self.left.is_set() and not self._server.should_exit:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.left.wait(), 0.5)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.left.set()


class WeightRoutes:
    """The trainer's connection with this server, and the routes that change it.

    Args:
        vllm: what vLLM keeps for its own routes, `app.state`.

    Attributes:
        app: ASGI application of the routes.
        policy_version: of the weights; None before the first push and while two are mixed.
        hold: of the trainer that has connected last; None before, and if that failed.
    """

    def __init__(self, vllm: Any) -> None:
        self.vllm = vllm
        self.policy_version: int | None = None
        self.hold: Hold | None = None
        self._gpus: list[str | None] | None = None
        self._joined: list[tuple[str, int]] = []
        self._is_asleep = False
        self._lock = asyncio.Lock()  # one update at a time
        self.app = app = FastAPI(openapi_url=None, strict_content_type=False)
        app.get("/weight_sync/status", response_model=None)(self.status)
        for route in (self.connect, self.receive, self.sleep, self.join):
            app.post(f"/weight_sync/{route.__name__}", response_model=None)(route)
        app.exception_handler(Exception)(self._fail)

    async def _fail(self, _: Request, error: Exception) -> JSONResponse:
        """The trainer must see what went wrong in here, whatever it was; the log has the trace."""
        return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, 500)

    async def status(self) -> dict[str, Any]:
        engine = self.vllm.engine_client
        if engine.errored:
            raise HTTPException(503, "vLLM's engine is dead; see the server's log")
        config, model = engine.vllm_config, engine.vllm_config.model_config
        lora, device = config.lora_config, config.device_config.device_type
        if self._gpus is None:
            self._gpus = await call_workers(engine, CALL_DEADLINE_S, "weight_sync_gpu")
        return {
            "policy_version": self.policy_version,
            "connection": self.hold.connection if self.hold is not None else None,
            "world_size": config.parallel_config.world_size_across_dp,
            "device": device,
            "gpus": self._gpus,
            "dtype": str(model.dtype).removeprefix("torch."),
            "lora_dtype": str(lora.lora_dtype).removeprefix("torch.") if lora else None,
            "quantization": model.quantization,
            "served_model_name": self.vllm.openai_serving_models.model_name(),
            "max_model_len": model.max_model_len,
            "joined": self._joined,
            "returns_experts": self.vllm.args.enable_return_routed_experts,
            "sleeps": model.enable_sleep_mode,
            "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"),
            # On a CPU, vLLM's engine dies when it sets back the generator of a request whose prompt
            # is prefilled in parts.
            "takes_seeds": device != "cpu" or not config.scheduler_config.enable_chunked_prefill,
        }

    async def join(self, host: str, port: int) -> None:
        """Remember another server. The trainer of this one finds it in the status."""
        self._joined.append((host, port))

    async def connect(self, new: Connection, request: Request) -> Hold:
        """Give the server to this trainer, unless another one has it. Let the workers know what
        each push will carry, and connect over NCCL.
        """
        engine = self.vllm.engine_client
        config = engine.vllm_config
        async with self._lock:
            await self._refuse_if_held(new.trainer)
            try:
                plan = await asyncio.to_thread(fit_to_server, new.plan, config)
            except ValueError as error:
                raise HTTPException(400, str(error)) from error
            before, self.hold = self.hold, None
            if before is not None:
                before.left.set()
            await self._wake()
            await self._set_version(None)
            sizes = [bucket.num_bytes for bucket in plan.buckets] if new.unique_id is None else []
            # Of an adapter all buckets are here before generation pauses, of full weights two.
            num_buffers = len(sizes) if plan.adapter is not None else min(len(sizes), 2)
            num_workers = config.parallel_config.world_size_across_dp
            hold = Hold(new, sizes, self.vllm.server)
            largest = max(sizes, default=0)
            with shared_with_workers(num_workers, num_buffers, largest) as (shared, address):
                async with updating(engine, new.timeout_s):  # some engines step together
                    await self._let_work(
                        left(request),
                        shared,
                        new.timeout_s,
                        "weight_sync_connect",
                        plan.model_dump_json(),
                        address,
                        new.unique_id,
                        new.timeout_s,
                    )
            hold.shared, self.hold = shared, hold
            if plan.adapter is not None:
                from vllm.lora.request import LoRARequest

                # Requests reach the adapter by its name. The path is never read.
                self.vllm.openai_serving_models.lora_requests[ADAPTER_NAME] = LoRARequest(
                    lora_name=ADAPTER_NAME, lora_int_id=ADAPTER_ID, lora_path="in-memory"
                )
            return hold

    async def _refuse_if_held(self, trainer: str) -> None:
        hold = self.hold
        if hold is None or hold.of.trainer == trainer:
            return
        with suppress(TimeoutError):  # refused below
            await asyncio.wait_for(hold.left.wait(), HOLDER_GRACE_S)
        if not hold.left.is_set():
            raise HTTPException(
                423,
                f"another trainer has this server: {hold.of.name}, since {hold.since}. Give this "
                "run a server of its own (vllm_server_port), or end the other trainer",
            )

    async def receive(
        self, request: Request, connection: str, policy_version: int, timeout_s: PositiveFloat
    ) -> dict[str, int]:
        """Let the workers take one push. What it says of itself is in its URL, because its body is
        the weights.

        Args:
            connection: its name, which `connect` has returned.
            policy_version: of the weights that come.
            timeout_s: deadline of the push.
        """
        engine = self.vllm.engine_client
        async with self._lock:
            hold, shared = self._hold_of(connection)
            length = request.headers.get("content-length")
            if length != str(expected := sum(hold.sizes)):
                raise HTTPException(
                    400, f"a body of {length} bytes: this connection's plan has {expected}"
                )
            hold.shared = None  # if it fails, they hold a part of this push
            await self._wake(["weights"])
            deadline = asyncio.get_running_loop().time() + timeout_s
            filling = shared.fill(request.stream(), hold.sizes)
            for _ in range(shared.num_buffers):
                await all_before(anext(filling), deadline, timeout_s)
            # From here on, requests wait; behind it, they continue on the new weights.
            async with nullcontext() if self._is_asleep else updating(engine, timeout_s):
                await self._set_version(None)  # weights are mixed until all are here
                coming = all_of(filling) if hold.sizes else left(request)
                await self._let_work(
                    all_before(coming, deadline, timeout_s),
                    shared,
                    timeout_s,
                    "weight_sync_receive",
                )
                await self._set_version(policy_version)
            await self._wake()  # only now, so that no request goes on with the old weights
            hold.shared = shared
            return {"policy_version": policy_version}

    def _hold_of(self, connection: str) -> tuple[Hold, SharedBuffers]:
        """Return the connection of this name, and its memory.

        Raises:
            HTTPException: it is not the last one, or a push over it has broken.
        """
        hold = self.hold
        if hold is None or hold.shared is None or hold.connection != connection:
            raise HTTPException(409, "not connected: POST /weight_sync/connect first")
        return hold, hold.shared

    async def sleep(self, connection: str, timeout_s: PositiveFloat) -> None:
        """Free the memory of the GPU for the trainer, which shares it: weights go into the host's
        memory, keys and values are dropped. Until the trainer's next push, or until it leaves,
        requests wait; those that run are computed anew then.
        """
        engine = self.vllm.engine_client
        async with self._lock:
            hold, _ = self._hold_of(connection)
            hold.waking = hold.waking or asyncio.create_task(self._wake_behind(hold))
            engine.admits.clear()
            self._is_asleep = True  # also if it fails half way
            await answer_of(engine, engine.sleep(1, "keep"), timeout_s, "sleep")

    async def _wake_behind(self, hold: Hold) -> None:
        """Wake the engines once this trainer has left. Its process may still hold the GPU's memory
        then, so try until they are awake, or until another trainer has the server.
        """
        await hold.left.wait()
        engine, error = self.vllm.engine_client, None
        while True:
            async with self._lock:
                if not self._is_asleep or self.hold not in (None, hold) or engine.errored:
                    return
                try:
                    return await self._wake()
                except Exception as new:
                    if str(new) != str(error):
                        logger.warning(f"cannot wake, and will try again: {new}")
                    error = new
            await asyncio.sleep(WAKE_PAUSE_S)

    async def _wake(self, tags: list[str] | None = None) -> None:
        """Let the engines have their memory again, if they sleep, or what has these tags of vLLM.
        They go on once they have all of it.
        """
        if self._is_asleep:
            engine = self.vllm.engine_client
            await answer_of(engine, engine.wake_up(tags), CALL_DEADLINE_S, "wake_up")
            if tags is None:
                self._is_asleep = False
                engine.admits.set()

    async def _let_work(
        self, coming: Awaitable[None], shared: SharedBuffers, timeout_s: float, *call: Any
    ) -> None:
        """Let the workers run a method. If it fails in one of them, or `coming` fails meanwhile,
        all hear that the push is given up.

        Raises:
            The error of `coming`, or what `run_in_workers` raises.
        """
        waiting = asyncio.ensure_future(coming)
        working = asyncio.ensure_future(run_in_workers(self.vllm.engine_client, timeout_s, *call))
        try:
            await asyncio.wait([waiting, working], return_when=asyncio.FIRST_COMPLETED)
            error = waiting.exception() if waiting.done() else None
            if error is not None:
                shared.give_up()
            try:
                await working
            except HTTPException as of_worker:
                raise error or of_worker from None  # of `coming`: the workers only heard of it
        except BaseException:
            shared.give_up()  # now, because an engine that waits for a worker cannot resume
            raise
        finally:
            waiting.cancel()
            working.cancel()

    async def _set_version(self, policy_version: int | None) -> None:
        """Let the engines label what they sample from here on; None: no policy's, or of several."""
        engine, self.policy_version = self.vllm.engine_client, None
        label = "none" if policy_version is None else str(policy_version)
        await call_engines(engine, CALL_DEADLINE_S, "set_weight_version", label)
        self.policy_version = policy_version
        engine.cache_salt = secrets.token_hex(8)  # cached keys and values are of other weights


async def left(request: Request) -> None:
    """Wait until the client of this request has left; then raise HTTPException."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise HTTPException(400, "the trainer left")


async def all_of(items: AsyncIterator[None]) -> None:
    async for _ in items:
        pass


async def all_before(coming: Awaitable[None], deadline: float, timeout_s: float) -> None:
    """Wait for weights to come.

    Raises:
        HTTPException: the trainer left, which hears nothing of it, or the loop's time is past the
            deadline. Its status, 409, lets a trainer connect and push again.
    """
    try:
        async with asyncio.timeout_at(deadline):
            await coming
    except (ClientDisconnect, ValueError, TimeoutError) as error:
        late = f"a push of weights took longer than {timeout_s:g} s (vllm_server_timeout)"
        raise HTTPException(409, str(error) or late) from error
