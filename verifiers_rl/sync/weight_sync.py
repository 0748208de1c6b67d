"""Weights from the trainer to the inference server's memory, without files.

    trainer rank 0                                           vf-vllm's process     its workers
    connect()  ── what will come, NCCL's unique id ────────►  checks it  ───────►  remember it
    push()     ── version n, and all weights (HTTP) ───────►  shared memory ────►  load
               ══════════ or weights from GPU to GPU (NCCL) ════════════════════►  load
               ◄── version n is loaded, cached prefixes are gone ──

All requests go to the server's one port, and need the run's token. Tensors travel packed in buckets
of a bounded size, and each tensor is gathered, merged and cast when its bucket is packed. So the
number of messages follows from the bytes, not from the number of tensors, and the extra memory does
not grow with the model. With LoRA the adapter alone travels, or the merged weights.
"""

from __future__ import annotations

import base64
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from verifiers_rl.inference import InferenceServerError, ServerLostError
from verifiers_rl.sync.fan_out import push_to_all
from verifiers_rl.sync.nccl import NcclError, NcclTransport, gpu_uuid
from verifiers_rl.sync.plan import (
    ADAPTER_NAME,
    Backend,
    TensorSpec,
    TransferPlan,
    needs_lora_flag,
)
from verifiers_rl.sync.sources import Source, what_to_send

if TYPE_CHECKING:
    from verifiers_rl.inference import Hold, InferenceClient, WeightRequest

logger = logging.getLogger(__name__)

LAST_WORD_S = 60.0  # for the server's answer, when NCCL has failed on our side


def choose_backend(
    wanted: Literal["auto", "nccl", "http"], own: str | None, workers: Sequence[str | None]
) -> Backend:
    """Choose the way between this GPU and the workers' GPUs (uuids; None for a CPU).

    Raises:
        InferenceServerError: NCCL is wanted, and cannot work between them.
    """
    on_gpus = own is not None and all(worker is not None for worker in workers)
    distinct = on_gpus and len({own, *workers}) == 1 + len(workers)
    if wanted == "nccl" and not distinct:
        raise InferenceServerError(
            "weight_sync_backend='nccl' needs a GPU of its own for the trainer and for each of the "
            "server's workers, but that is not the case here; use 'auto'"
        )
    return "nccl" if distinct and wanted != "http" else "http"


class WeightSync:
    """The trainer's end. Used from rank 0 only.

    Args:
        client: HTTP to the server.
        backend: "nccl", "http", or "auto" for what the GPUs on both sides allow.
        lora_sync: for a PEFT model, send the "adapter" or the "merged" weights.
        timeout_s: deadline of connecting and of one push.
        bucket_bytes: upper bound of one bucket; larger ones are slower on a CPU, which has to find
            fresh memory for each (benchmarks/README.md).
        trainer: this process's id for the server, which belongs to one trainer at a time.
    """

    def __init__(
        self,
        client: InferenceClient,
        backend: Literal["auto", "nccl", "http"] = "auto",
        lora_sync: Literal["adapter", "merged"] = "adapter",
        timeout_s: float = 300.0,
        bucket_bytes: int = 16 * 2**20,
        trainer: str | None = None,
    ) -> None:
        self.client = client
        self.backend = backend
        self.lora_sync = lora_sync
        self.timeout_s = timeout_s
        self.bucket_bytes = bucket_bytes
        self.policy_version: int | None = None
        self.plan: TransferPlan | None = None  # what each push carries, from `connect` on
        self._trainer = trainer or secrets.token_hex(8)
        self._hold: Hold | None = None
        self._connection: str | None = None  # the server's name for this trainer's last connect()
        self._nccl: NcclTransport | None = None
        self._request: WeightRequest | None = None  # the one under way, if any

    @property
    def model_name(self) -> str:
        """What rollout requests put into `model=` to reach the synced policy."""
        if self.plan is not None and self.plan.kind == "adapter":
            return ADAPTER_NAME
        return self.client.served_model_name

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def connect(
        self, model: nn.Module, sending: tuple[dict[str, Source], dict[str, Any]] | None = None
    ) -> None:
        """Take the server, and tell its workers what will come.

        Args:
            sending: what `what_to_send` returned for this model, if the caller knows it already.

        Raises:
            InferenceServerError: another trainer has the server, or it cannot take these weights.
                The message says why and what to change.
        """
        self.forget_server()
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
        self.plan = TransferPlan(
            "adapter" if adapter else "full", specs, self.bucket_bytes, adapter
        )
        device = next(model.parameters()).device
        backend = choose_backend(self.backend, gpu_uuid(device), status["gpus"])
        fields = {
            "backend": backend,
            "timeout_s": self.timeout_s,
            "trainer": self._trainer,
            "plan": asdict(self.plan),
        }
        nccl = None
        try:
            if backend == "nccl":
                nccl = NcclTransport(0, 1 + status["world_size"], device, self.timeout_s)
                self._nccl = nccl
                fields["nccl_id"] = base64.b64encode(nccl.unique_id()).decode()
            self._request = self.client.connect_weight_sync(fields, self.timeout_s)
            reply = self._answer(nccl.wait_until_connected if nccl is not None else None)
        except BaseException:
            self.forget_server()
            raise
        self._connection = reply["connection"]
        logger.info(
            "weight sync: %s of %d tensors, %.1f MB a push, over %s to %d worker(s)",
            self.plan.kind,
            len(specs),
            self.plan.num_bytes / 1e6,
            backend,
            status["world_size"],
        )

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
        (error,) = push_to_all([self], model, policy_version, in_flight)
        if error is not None:
            raise error
        assert self.plan is not None
        return {"sync_s": time.monotonic() - start, "sync_bytes": float(self.plan.num_bytes)}

    def send(
        self,
        buckets: Iterable[Tensor],
        policy_version: int,
        in_flight: Literal["recompute", "keep"],
    ) -> None:
        """Let the connected server take one push; return once it has the weights.

        Args:
            buckets: of the plan, packed: (bytes,) uint8 each.
            policy_version, in_flight: those of `push`.

        Raises:
            ServerLostError, InferenceServerError: see `push`.
        """
        nccl, plan = self._nccl, self.plan
        if self._connection is None or plan is None:
            raise ServerLostError(f"the connection to {self.client.base_url} was given up")
        fields = {
            "connection": self._connection,
            "policy_version": policy_version,
            "in_flight": in_flight,
            "timeout_s": self.timeout_s,
        }
        sizes = plan.packed_sizes() if nccl is None else []
        body = _bytes_of(buckets) if nccl is None else ()

        def send_all() -> None:
            assert nccl is not None
            for bucket in buckets:
                nccl.send(bucket)

        try:
            self._request = self.client.receive_weights(fields, sum(sizes), body, self.timeout_s)
            self._answer(send_all if nccl is not None else None)
        except BaseException:
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
        """Give up the connection, without waiting for a push that may be unfinished: the server
        hears of it. The next push connects again.
        """
        nccl, request = self._nccl, self._request
        self._nccl = self._request = self._connection = self.policy_version = None
        if request is not None:
            request.give_up()
        if nccl is not None:
            nccl.abandon()

    def close(self) -> None:
        """Give up the connection and release the server; the next push connects again."""
        self.forget_server()
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def _answer(self, of_nccl: Callable[[], None] | None) -> dict[str, Any]:
        """Send the request; return the server's reply. With NCCL, our part of the collective runs
        meanwhile in a daemon thread, which may be left behind and ends at its own deadline.

        If the server refuses, its workers never join the collective; so the reply comes first. If
        our part fails, the server's reply may say why: it has `LAST_WORD_S` for that.
        """
        request = self._request
        assert request is not None
        if of_nccl is None:
            reply = request.answer()
            self._request = None
            return reply
        errors: list[Exception] = []
        has_answered = threading.Event()

        def run() -> None:
            try:
                of_nccl()
            except Exception as error:
                errors.append(error)  # raised below, in the caller's thread
                if not isinstance(error, NcclError) or not has_answered.wait(LAST_WORD_S):
                    request.give_up()

        thread = threading.Thread(target=run, name="weight-sync", daemon=True)
        thread.start()
        try:
            reply = request.answer()
        except Exception as error:
            if errors and not isinstance(errors[0], NcclError):
                raise errors[0] from error
            raise
        finally:
            has_answered.set()
        self._request = None
        thread.join(self.timeout_s)
        if errors or thread.is_alive():
            raise ServerLostError(
                f"weights over NCCL to {self.client.base_url}: "
                f"{errors[0] if errors else 'sending did not end'}"
            )
        return reply


_PIECE_BYTES = 2**20


def _bytes_of(buckets: Iterable[Tensor]) -> Iterator[memoryview]:
    """View buckets as pieces of the body of a request."""
    for bucket in buckets:
        array: Any = bucket.cpu().numpy()  # numpy's types lack the buffer protocol
        view = memoryview(array)
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]
