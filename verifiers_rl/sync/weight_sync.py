"""Weights from the trainer to the inference server's memory, without files.

    trainer rank 0                                  vLLM worker 1..W
    connect()  ── HTTP: where to meet, what will come ──►  weight_sync_connect
               ◄═══════ one meeting, W + 1 ranks   ═══════►
    push()     ── HTTP: receive version n ──────────────►  weight_sync_receive
               ═══════ buckets of packed tensors ════════►  load into the running model
               ◄─ HTTP: version n loaded, cache reset ────

The transport is NCCL between GPUs, TCP elsewhere. Tensors travel packed in buckets of a bounded
size, and each tensor is gathered, merged and cast when its bucket is packed. So the number of
messages follows from the bytes, not from the number of tensors, and the extra memory does not grow
with the model. With LoRA the adapter alone travels, or the merged weights. Where workers cannot
reach the trainer there is no meeting: the request that announces an adapter carries it (HTTP).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from verifiers_rl.inference import InferenceServerError, RequestRefusedError, ServerLostError
from verifiers_rl.process.connections import close_all
from verifiers_rl.process.waiting import result_of
from verifiers_rl.sync.transports.meeting import new_secret

if TYPE_CHECKING:
    from verifiers_rl.inference import Hold, InferenceClient
from verifiers_rl.sync.buckets import WorkersLeftError, send_buckets
from verifiers_rl.sync.gather import announced
from verifiers_rl.sync.plan import (
    ADAPTER_NAME,
    Backend,
    TensorSpec,
    TransferPlan,
    needs_lora_flag,
)
from verifiers_rl.sync.sources import Source, what_to_send
from verifiers_rl.sync.transports import Meeting, Transport, gpu_uuid, make_transport
from verifiers_rl.sync.transports.http import BodyTransport

logger = logging.getLogger(__name__)

LAST_WORD_S = 60.0  # for the server's answer, when our part of a push has failed


def _own_address(peer: str) -> str:
    """Return the address of this machine that `peer` can reach. Nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def choose_backend(
    wanted: Literal["auto", "nccl", "tcp", "http"], own: str | None, workers: Sequence[str | None]
) -> Backend:
    """Choose the transport between this GPU and the workers' GPUs (uuids; None for a CPU).

    Raises:
        InferenceServerError: the wanted transport cannot work between them.
    """
    on_gpus = own is not None and all(worker is not None for worker in workers)
    distinct = on_gpus and len({own, *workers}) == 1 + len(workers)
    if wanted == "auto":
        return "nccl" if distinct else "tcp"
    if wanted == "nccl" and not distinct:
        raise InferenceServerError(
            "weight_sync_backend='nccl' needs a GPU of its own for the trainer and for each of the "
            "server's workers, but that is not the case here; use 'auto'"
        )
    return wanted


class WeightSync:
    """The trainer's end. Used from rank 0 only.

    Args:
        client: HTTP to the server.
        backend: "nccl", "tcp", or "auto" for what the GPUs on both sides allow; "http" sends an
            adapter in the requests to the server.
        lora_sync: for a PEFT model, send the "adapter" or the "merged" weights.
        timeout_s: deadline of the meeting and of one push.
        bucket_bytes: upper bound of one message; larger ones are slower on a CPU, which has to find
            fresh memory for each (benchmarks/README.md).
        port: of this machine, where the server's workers meet this process; 0: any free one.
        trainer: this process's id for the server, which belongs to one trainer at a time.
    """

    def __init__(
        self,
        client: InferenceClient,
        backend: Literal["auto", "nccl", "tcp", "http"] = "auto",
        lora_sync: Literal["adapter", "merged"] = "adapter",
        timeout_s: float = 300.0,
        bucket_bytes: int = 16 * 2**20,
        port: int = 0,
        trainer: str | None = None,
    ) -> None:
        self.client = client
        self.backend = backend
        self.lora_sync = lora_sync
        self.timeout_s = timeout_s
        self.bucket_bytes = bucket_bytes
        self.port = port
        self.policy_version: int | None = None
        self._plan: TransferPlan | None = None
        self._transport: Transport | None = None
        self._trainer = trainer or secrets.token_hex(8)
        self._hold: Hold | None = None
        self._connection: str | None = None  # the server's name for this trainer's last connect()

    @property
    def model_name(self) -> str:
        """What rollout requests put into `model=` to reach the synced policy."""
        if self._plan is not None and self._plan.kind == "adapter":
            return ADAPTER_NAME
        return self.client.served_model_name

    @property
    def plan(self) -> TransferPlan | None:
        """What each push carries; None before the first `connect`."""
        return self._plan

    @property
    def is_connected(self) -> bool:
        return self._transport is not None

    def connect(
        self, model: nn.Module, sending: tuple[dict[str, Source], dict[str, Any]] | None = None
    ) -> None:
        """Take the server, meet its workers and tell them what will come.

        Args:
            sending: what `what_to_send` returned for this model, if the caller knows it already.

        Raises:
            InferenceServerError: another trainer has the server, or it cannot take these weights.
                The message says why and what to change.
        """
        status = self.client.status()
        before, self._hold = self._hold, self.client.hold(self._trainer)
        if before is not None:
            before.close()
        sources, adapter = sending or what_to_send(model, self.lora_sync)
        if adapter and status["lora_dtype"] is None:
            raise InferenceServerError(needs_lora_flag(adapter["r"]))
        dtype = status["lora_dtype"] if adapter else status["dtype"]
        specs = [
            TensorSpec(name, dtype if s.dtype.is_floating_point else str(s.dtype)[6:], s.shape)
            for name, s in sources.items()
        ]
        self._plan = TransferPlan(
            "adapter" if adapter else "full", specs, self.bucket_bytes, adapter
        )
        device = next(model.parameters()).device
        backend = choose_backend(self.backend, gpu_uuid(device), status["gpus"])
        request = {
            "backend": backend,
            "timeout_s": self.timeout_s,
            "trainer": self._trainer,
            "plan": asdict(self._plan),
        }
        meeting = listener = None
        if backend != "http":
            listener = self._listen()
            host, port = listener.getsockname()[:2]
            world_size = 1 + status["world_size"]
            meeting = Meeting(host, port, new_secret(), 0, world_size, self.timeout_s)
            request |= {"host": host, "port": port}
            request |= {"secret": meeting.secret, "world_size": world_size}
        elif not adapter:
            raise InferenceServerError(
                "weight_sync_backend='http': carries a LoRA adapter only, but all weights of this "
                "model travel; train a plain adapter with lora_sync='adapter', or set "
                "weight_sync_backend='tcp'"
            )

        def meet() -> Transport:
            try:
                return make_transport(backend, meeting, device, listener)
            except RuntimeError as error:
                raise WorkersLeftError(f"the server's workers did not come: {error}") from error

        try:
            reply, self._transport = self._together(
                lambda: self.client.connect_weight_sync(request, self.timeout_s), meet
            )
        except BaseException:
            if listener is not None:  # nobody comes any more, and the next one needs the port
                close_all([listener])
            raise
        self._connection = reply["connection"]
        logger.info(
            "weight sync: %s of %d tensors, %.1f MB a push, over %s to %d worker(s)",
            self._plan.kind,
            len(specs),
            self._plan.num_bytes / 1e6,
            backend,
            status["world_size"],
        )

    def _listen(self) -> socket.socket:
        """Listen for the server's workers."""
        address = _own_address(self.client.host)
        # Bound to one address and a free port: two runs never collide, and loopback stays loopback.
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, self.port), family=family, backlog=128)
        except OSError as error:
            raise InferenceServerError(
                f"cannot listen on {address}:{self.port} for the server's workers: "
                f"{error.strerror}; set weight_sync_port to another port, or to 0"
            ) from error

    def push(
        self,
        model: nn.Module,
        policy_version: int,
        in_flight: Literal["recompute", "keep"] = "recompute",
    ) -> dict[str, float]:
        """Replace the server's policy by this model's weights; return once the server has them.

        Args:
            in_flight: requests that are being answered are frozen during the swap and continue
                under the new weights. Their keys and values so far are computed again
                ("recompute"), or kept as they are ("keep").

        Returns:
            `sync_s` seconds and `sync_bytes` bytes of tensors sent.

        Raises:
            ServerLostError: the server did not answer; the next push connects again.
            InferenceServerError: the server refused the weights or could not load them.
        """
        start = time.monotonic()
        if self._transport is None:
            self.connect(model)
        assert self._plan is not None
        try:
            with announced(what_to_send(model, self.lora_sync)[0], model) as sources:
                self.send(partial(send_buckets, self._plan, sources), policy_version, in_flight)
        except BaseException:
            self.forget_server()
            raise
        return {"sync_s": time.monotonic() - start, "sync_bytes": float(self._plan.num_bytes)}

    def send(
        self,
        send_all: Callable[[Transport], None],
        policy_version: int,
        in_flight: Literal["recompute", "keep"],
    ) -> None:
        """Let the connected server take one push; return once it has the weights.

        Args:
            send_all: sends all buckets of the plan over this transport.
            policy_version, in_flight: those of `push`.

        Raises:
            ServerLostError, InferenceServerError: see `push`.
        """
        transport = self._transport
        if transport is None:
            raise ServerLostError(f"the connection to {self.client.base_url} was given up")
        body = {
            "connection": self._connection,
            "policy_version": policy_version,
            "in_flight": in_flight,
            "timeout_s": self.timeout_s,
        }

        def announce() -> dict[str, Any]:
            return self.client.receive_weights(body, self.timeout_s)

        def announce_and_carry(transport: BodyTransport) -> dict[str, Any]:
            send_all(transport)  # keeps all buckets for the request
            return self.client.receive_adapter(body, *transport.take_body(), self.timeout_s)

        try:
            if isinstance(transport, BodyTransport):
                self._together(partial(announce_and_carry, transport), lambda: None)
            else:
                self._together(announce, partial(send_all, transport), transport.close)
        except BaseException:  # Ctrl-C too: close() must not wait for an unfinished push
            self.forget_server()
            raise
        self.policy_version = policy_version

    def check_server(self) -> None:
        """Return if the server still has the weights of the last push.

        Raises:
            ServerLostError: the server is gone, or has restarted and lost the weights.
            InferenceServerError: another trainer has taken over the server.
        """
        status = self.client.status()
        if status["connection"] is None:
            raise ServerLostError(f"the inference server at {self.client.base_url} started anew")
        if status["connection"] != self._connection:
            raise InferenceServerError(
                f"another trainer has connected to the server at {self.client.base_url}; "
                "give each run a server of its own (vllm_server_port)"
            )

    def wait_for_server(self) -> None:
        """Wait for a lost server to come back; the next push connects again.

        Raises:
            InferenceServerError: the server did not come back within the client's timeout.
        """
        self.forget_server()
        self.client.wait_until_ready()

    def forget_server(self) -> None:
        """Drop the transport without waiting for a push that may be unfinished. The push's thread
        keeps the last reference, until its deadline. The next push connects again.
        """
        if self._transport is not None:
            self._transport.abandon()
        self._transport = self.policy_version = None

    def close(self) -> None:
        """Close the transport and release the server; the next push connects again."""
        transport, hold = self._transport, self._hold
        self._transport = self.policy_version = self._hold = None
        try:
            if transport is not None:
                transport.close()
        finally:
            if hold is not None:
                hold.close()

    def _together(
        self,
        call: Callable[[], Any],
        work: Callable[[], Any],
        give_up: Callable[[], None] = lambda: None,
    ) -> tuple[Any, Any]:
        """Run both parts of a collective, each in a thread: the server's by HTTP, and ours.

        If the server refuses, its workers never join the collective. So this thread waits for the
        server's answer, and our part runs in a daemon thread, which may be left behind and ends at
        its own deadline. If our part fails, `give_up` stops the workers from waiting for the rest.

        Returns:
            The server's reply, and what our part returned.

        Raises:
            Interrupted: a signal asks the run to end; both threads are left behind.
        """
        answer: Future[Any] = Future()

        def conclude(reply: Any, error: Exception | None) -> None:
            with contextlib.suppress(InvalidStateError):  # the other thread was first
                # An error is raised below, in the caller's thread.
                answer.set_exception(error) if error is not None else answer.set_result(reply)

        def ask() -> None:
            try:
                conclude(call(), None)
            except Exception as error:
                conclude(None, error)

        result: list[Any] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                result.append(work())
            except Exception as error:
                errors.append(error)  # raised below, in the caller's thread
                give_up()
                # The server knows why, unless its machine is lost.
                if not wait([answer], LAST_WORD_S).done:
                    what = f"{self.client.base_url} does not answer after {error}"
                    conclude(None, ServerLostError(what))

        thread = threading.Thread(target=run, name="weight-sync", daemon=True)
        thread.start()
        threading.Thread(target=ask, name="weight-sync-request", daemon=True).start()
        try:
            # The request has a deadline of its own, and this one is later.
            reply = result_of(answer, 4 * self.timeout_s + 120.0, lambda: "the server")
        except Exception as error:
            follows_from_ours = not isinstance(error, (ServerLostError, RequestRefusedError))
            if errors and follows_from_ours and not isinstance(errors[0], WorkersLeftError):
                raise errors[0] from error
            raise
        thread.join(self.timeout_s)
        if errors:
            raise errors[0]
        if not result:
            raise TimeoutError(
                f"the weight sync did not end within {self.timeout_s:g} s (vllm_server_timeout)"
            )
        return reply, result[0]
