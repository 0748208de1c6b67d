"""Weights from the trainer to the memory of inference servers, without files.

    trainer rank 0                                           vf-vllm's process     its workers
    connect()      ── what will come, NCCL's unique id ────►  checks it  ───────►  remember it
    begin_push()   ── version n ───────────────────────────►
    send(bucket)   ── in the body of this request (HTTP) ──►  shared memory ────►  load
                   ══════════ or from GPU to GPU (NCCL), or on one (CUDA IPC) ══►  load
    finish_push()  ◄── version n is loaded, cached prefixes are gone ──
    sleep()        ── on a GPU that both share ────────────►  frees the memory until the next push

All requests go to the server's one port, and need the run's token. Tensors travel packed in buckets
of a bounded size, and each tensor is gathered, merged and cast when its bucket is packed. So the
number of messages follows from the bytes, not from the number of tensors, and the extra memory does
not grow with the model. With LoRA the adapter alone travels, or the merged weights.

A push to several servers is gathered and packed once, and sent to all at the same time:

    this thread:              makes bucket 1 ──► makes bucket 2 ───► makes bucket 3
    a thread of each server:                     sends bucket 1      sends bucket 2

The next bucket is sent when all have taken the one before. So memory stays bounded, and this thread
waits for the slowest server.
"""

from __future__ import annotations

import base64
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any, Literal
from urllib.parse import urlencode

from torch import Tensor, nn

from verifiers_rl.inference import (
    ControlRequest,
    InferenceClient,
    InferenceServerError,
    ServerLostError,
)
from verifiers_rl.process.waiting import WaitingLine
from verifiers_rl.sync.nccl import ProcessGroupTransport, SharedBucket, TransportError, gpu_uuid
from verifiers_rl.sync.plan import ADAPTER_NAME, AdapterConfig, TransferPlan
from verifiers_rl.sync.shared_buffers import GivenUpError
from verifiers_rl.sync.sources import Source, buckets_of, what_to_send

logger = logging.getLogger(__name__)

LAST_WORD_S = 60.0  # for the server's answer, when NCCL has failed on our side
# Seconds that a push waits for a server that makes no progress while the others do.
STALL_S = 60.0
POLL_S = 0.5


def choose_backend(
    wanted: Literal["auto", "nccl", "http"],
    own: str | None,
    workers: Sequence[str | None],
    is_adapter: bool,
) -> Literal["nccl", "ipc", "http"]:
    """Choose the way between this GPU and the workers' GPUs (uuids; None for a CPU).

    Raises:
        InferenceServerError: NCCL is wanted, and cannot work between them.
    """
    gpus = {own, *workers}
    if None not in gpus and len(gpus) == 1 + len(workers) and wanted != "http":
        return "nccl"
    if wanted == "nccl":
        raise InferenceServerError(
            "weight_sync_backend='nccl' needs a GPU of its own for the trainer and for each of the "
            "server's workers, but that is not the case here; use 'auto'"
        )
    shares_gpu = own is not None and [own] == workers and wanted == "auto"
    return "ipc" if shares_gpu and not is_adapter else "http"  # as good for an adapter


def make_plan(
    sources: dict[str, Source],
    adapter: AdapterConfig | None,
    status: dict[str, Any],
    bucket_bytes: int,
) -> TransferPlan:
    """Return what each push of these sources to a server of this status carries.

    Raises:
        InferenceServerError: a tensor holds no numbers that could be cast.
    """
    for name, source in sources.items():
        if not source.dtype.is_floating_point:
            raise InferenceServerError(
                f"tensor {name!r} has dtype {source.dtype}: quantised weights cannot be sent"
            )
    dtype = (status["lora_dtype"] if adapter is not None else None) or status["dtype"]
    shapes = {name: source.shape for name, source in sources.items()}
    return TransferPlan(tensors=shapes, dtype=dtype, bucket_bytes=bucket_bytes, adapter=adapter)


@dataclass(eq=False)
class WeightSync:
    """The trainer's end of the sync with one server, on rank 0.

    Args:
        client: HTTP to the server.
        backend: "nccl", "http", or "auto" for what the GPUs on both sides allow.
        lora_sync: for a PEFT model, send the "adapter" or the "merged" weights.
        timeout_s: deadline of connecting and of one push.
        bucket_bytes: upper bound of one bucket; larger ones are slower on a CPU, which has to find
            fresh memory for each (benchmarks/README.md).
        trainer: this process's id for the server, which belongs to one trainer at a time.

    Attributes:
        plan: what each push carries, from `connect` on.
        connection: the server's name for what `connect` has made; None before, and after `close`.
        num_pushes: that the server has loaded since `connect`.
    """

    client: InferenceClient
    backend: Literal["auto", "nccl", "http"] = "auto"
    lora_sync: Literal["adapter", "merged"] = "adapter"
    timeout_s: float = 300.0
    bucket_bytes: int = 16 * 2**20
    trainer: str = field(default_factory=partial(secrets.token_hex, 8))

    def __post_init__(self) -> None:
        self.plan: TransferPlan
        self._hold: ControlRequest | None = None  # is open while the server is this trainer's
        self.connection: str | None = None
        self.num_pushes = 0
        self._connecting = threading.Lock()  # else a look at the server takes it for another's
        self._transport: ProcessGroupTransport | None = None
        self._request: ControlRequest | None = None  # the last one

    @property
    def model_name(self) -> str:
        """What rollout requests put into `model=` to reach the synced policy; from `connect` on."""
        return ADAPTER_NAME if self.plan.adapter else self._served_name

    def connect(
        self, model: nn.Module, sources: dict[str, Source], adapter: AdapterConfig | None
    ) -> None:
        """Take the server, and tell its workers what will come, unless they know it already.

        Args:
            sources, adapter: what `what_to_send` has returned for this model.

        Raises:
            InferenceServerError: another trainer has the server, or it cannot take these weights.
                The message says why and what to change.
        """
        if self.connection and self._hold and not self._hold.has_reply():
            return
        with self._connecting:
            self.close()  # something between us and the server may have cut what held it
            try:
                self._connect(model, sources, adapter)
            except ServerLostError as error:
                if self._transport is None:  # HTTP, or another thread has given all of this up
                    raise
                self.client.status()  # raises its error, if it is the server that is lost
                if self.backend == "nccl":
                    raise
                # A part of a GPU shares no memory, and a firewall lets no NCCL through.
                logger.warning(f"{error}; HTTP is tried next (weight_sync_backend)")
                self.close()
                self.backend = "http"
                self._connect(model, sources, adapter)

    def _connect(
        self, model: nn.Module, sources: dict[str, Source], adapter: AdapterConfig | None
    ) -> None:
        status = self.client.status()
        self.plan = make_plan(sources, adapter, status, self.bucket_bytes)
        self._served_name: str = status["served_model_name"]
        device = next(model.parameters()).device
        backend = choose_backend(
            self.backend, gpu_uuid(device), status["gpus"], adapter is not None
        )
        fields = {
            "timeout_s": self.timeout_s,
            "trainer": self.trainer,
            "name": f"process {os.getpid()} on {socket.gethostname()}",
            "plan": self.plan.model_dump(),
        }
        self._request = None  # of the connection before
        if backend != "http":
            largest = max(bucket.num_bytes for bucket in self.plan.buckets)
            self._transport = ProcessGroupTransport(
                0,
                1 + status["world_size"],
                device,
                self.timeout_s,
                # If the server refuses, its workers join no collective.
                is_given_up=lambda: self._request is not None and self._request.has_reply(),
                make_group=partial(SharedBucket, device, largest) if backend == "ipc" else None,
            )
            unique_id = self._by_transport(self._transport.unique_id)
            fields["unique_id"] = base64.b64encode(unique_id).decode()
        # The server refuses other trainers until this request is closed, or this process ends, in
        # whatever way. So its reply stays open.
        self._request = self._hold = self.client.post(
            "/weight_sync/connect", fields, self.timeout_s
        )
        self._hold.begin()
        if self._transport is not None:
            self._by_transport(self._transport.wait_until_connected)
        self.connection = self._hold.answer(self._answer_s, stays_open=True)["connection"]
        self.num_pushes = 0

    def begin_push(self, policy_version: int) -> None:
        """Let the connected server take one push. See `push_to_all`."""
        fields = {
            "connection": self.connection,
            "policy_version": policy_version,
            "timeout_s": self.timeout_s,
        }
        num_bytes = self.plan.num_bytes if self._transport is None else 0
        path = f"/weight_sync/receive?{urlencode(fields)}"
        self._request = self.client.post(path, None, self.timeout_s, num_bytes)
        self._request.begin()

    def send(self, bucket: Tensor) -> None:
        """Send the next bucket of the plan, packed: (num_bytes,) uint8."""
        transport, request = self._transport, self._request
        if transport is not None:
            self._by_transport(lambda: transport.send(bucket))
        elif request is not None:
            array: Any = bucket.cpu().numpy()  # numpy's types lack the buffer protocol
            request.write(memoryview(array))

    def finish_push(self) -> None:
        """Return once the server has loaded the weights."""
        assert self._request is not None
        self._request.answer(self._answer_s)
        self.num_pushes += 1

    @property
    def _answer_s(self) -> float:
        """Deadline of a reply, behind the server's own deadlines, whose errors say more."""
        return 3 * self.timeout_s + 60.0

    def _by_transport(self, work: Callable[[], Any]) -> Any:
        """Do our part of a collective. If that fails, the server's reply may say why."""
        try:
            return work()
        except (TransportError, GivenUpError) as error:
            reason = f"weights to {self.client.base_url}: {error}"
            if self._request is not None:
                try:
                    self._request.answer(LAST_WORD_S)
                except ServerLostError as of_server:
                    reason += f"; {of_server}"
            raise ServerLostError(reason) from error

    def sleep(self) -> None:
        """Let the server leave its GPU's memory to this process until the next push."""
        fields = {"connection": self.connection, "timeout_s": self.timeout_s}
        path = f"/weight_sync/sleep?{urlencode(fields)}"
        self.client.post(path, None, self._answer_s).begin().answer()

    def check_server(self) -> dict[str, Any]:
        """Return the status of the server if it still has the weights of the last push.

        Raises:
            ServerLostError: the server is gone, has restarted and lost the weights, or our
                connection was given up. A new connection shows whether another trainer has it.
        """
        with self._connecting:
            try:
                status = self.client.status()
            except ServerLostError:  # perhaps a passing fault, and a lost server costs the batch
                time.sleep(POLL_S)
                status = self.client.status()
            connection = self.connection
        if connection is None or status["connection"] != connection:
            raise ServerLostError(
                f"the inference server at {self.client.base_url} started anew, or the connection "
                "to it was given up"
            )
        return status

    def close(self) -> None:
        """Give up the connection and release the server, without waiting for a push that may be
        unfinished: the server hears of it. The next push connects again.
        """
        transport, self._transport, self.connection = self._transport, None, None
        if self._request:
            self._request.give_up()
        if self._hold:
            self._hold.close()
        if transport:
            transport.abandon()


def push_to_all(
    syncs: Sequence[WeightSync],
    model: nn.Module,
    policy_version: int,
) -> list[BaseException | None]:
    """Replace the policy of these servers by this model's weights.

    Requests that are being answered are frozen meanwhile. They continue under the new weights, with
    their keys and values so far.

    Each server has a deadline of its own. One that fails, or that makes no progress for `STALL_S`
    while the others do, does not hold up the others.

    Args:
        syncs: one for each server, all of one dtype; those that are not connected are connected
            first.

    Returns:
        For each server, the error by which it has failed, or None.

    Raises:
        Whatever a source raises: then no server has the weights.
        Interrupted: a signal asks the run to end.
    """
    sources, adapter = what_to_send(model, syncs[0].lora_sync)
    servers = ServerThreads(syncs)
    try:
        servers.begin(lambda sync: sync.connect(model, sources, adapter))
        servers.begin(lambda sync: sync.begin_push(policy_version))
        servers.wait()
        for sync in servers.living[:1]:  # all have the same plan
            for bucket in buckets_of(sync.plan, sources, model):
                servers.begin(methodcaller("send", bucket))
                if not servers.living:
                    break
        servers.begin(methodcaller("finish_push"))
        servers.wait()
    except BaseException:
        for sync in servers.living:
            sync.close()  # which ends what its thread does
        raise
    finally:
        servers.threads.shutdown(wait=False)
    return [servers.errors.get(sync) for sync in syncs]


class ServerThreads:
    """Work with several servers at once, each on a thread of its own.

    Attributes:
        living: those that have not failed.
        errors: of the others.
    """

    def __init__(self, syncs: Sequence[WeightSync]) -> None:
        self.living = [*syncs]
        self.errors: dict[WeightSync, BaseException] = {}
        self.threads = ThreadPoolExecutor(len(syncs), "weight-sync")
        self._running: dict[Future[Any], WeightSync] = {}

    def begin(self, work: Callable[[WeightSync], Any]) -> None:
        """Begin work with each living server, once the work before has ended."""
        self.wait()
        self._running = {self.threads.submit(work, sync): sync for sync in self.living}

    def wait(self) -> None:
        """Wait until the work has ended. When the first server has succeeded, the others have as
        long again, and `STALL_S` more; until then, only the deadlines of their requests.
        """
        start, deadline, todo = time.monotonic(), math.inf, {*self._running}
        line = WaitingLine(lambda: f"{len(todo)} of {len(self._running)} servers to take weights")
        while todo:
            done, todo = wait(todo, POLL_S, FIRST_COMPLETED)
            now = time.monotonic()
            for future in done:
                if (error := future.exception()) is not None:
                    self._lose(self._running[future], error)
                else:
                    deadline = min(deadline, now + (now - start) + STALL_S)
            if now > deadline:
                break
            line.show()
        for future in todo:
            late = "did not end in time, or made no progress while the others did"
            sync = self._running[future]
            where = f"the weight sync with {sync.client.base_url}"
            self._lose(sync, ServerLostError(f"{where} {late} (vllm_server_timeout)"))
        self._running = {}

    def _lose(self, sync: WeightSync, error: BaseException) -> None:
        self.living.remove(sync)
        self.errors[sync] = error
        sync.close()  # a thread that hangs ends by this
