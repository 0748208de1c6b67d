"""Weights from the trainer to one inference server's memory, without files.

    trainer rank 0                                           vf-vllm's process     its workers
    connect()      ── what will come, NCCL's unique id ────►  checks it  ───────►  remember it
    begin_push()   ── version n ───────────────────────────►
    send(bucket)   ── in the body of this request (HTTP) ──►  shared memory ────►  load
                   ══════════ or from GPU to GPU (NCCL) ════════════════════════►  load
    finish_push()  ◄── version n is loaded, cached prefixes are gone ──

All requests go to the server's one port, and need the run's token. Tensors travel packed in buckets
of a bounded size, and each tensor is gathered, merged and cast when its bucket is packed. So the
number of messages follows from the bytes, not from the number of tensors, and the extra memory does
not grow with the model. With LoRA the adapter alone travels, or the merged weights.
"""

from __future__ import annotations

import base64
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from verifiers_rl.inference import InferenceServerError, ServerLostError
from verifiers_rl.sync.fan_out import push_to_all
from verifiers_rl.sync.nccl import NcclError, NcclTransport, gpu_uuid
from verifiers_rl.sync.plan import ADAPTER_NAME, TensorSpec, TransferPlan, needs_lora_flag
from verifiers_rl.sync.shared_buffers import GivenUpError
from verifiers_rl.sync.sources import Source

if TYPE_CHECKING:
    from verifiers_rl.inference import ControlRequest, InferenceClient

logger = logging.getLogger(__name__)

LAST_WORD_S = 60.0  # for the server's answer, when NCCL has failed on our side


def choose_backend(
    wanted: Literal["auto", "nccl", "http"], own: str | None, workers: Sequence[str | None]
) -> Literal["nccl", "http"]:
    """Choose the way between this GPU and the workers' GPUs (uuids; None for a CPU).

    Raises:
        InferenceServerError: NCCL is wanted, and cannot work between them.
    """
    gpus = {own, *workers}
    is_possible = None not in gpus and len(gpus) == 1 + len(workers)
    if wanted == "nccl" and not is_possible:
        raise InferenceServerError(
            "weight_sync_backend='nccl' needs a GPU of its own for the trainer and for each of the "
            "server's workers, but that is not the case here; use 'auto'"
        )
    return "nccl" if is_possible and wanted != "http" else "http"


class WeightSync:
    """The trainer's end, on rank 0.

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
        self.plan: TransferPlan | None = None
        self._trainer = trainer or secrets.token_hex(8)
        self._hold: ControlRequest | None = None
        self._connection: str | None = None  # the server's name for this trainer's last connect()
        self._nccl: NcclTransport | None = None
        self._request: ControlRequest | None = None  # the one under way, if any

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
        self, model: nn.Module, sources: dict[str, Source], adapter: dict[str, Any]
    ) -> None:
        """Take the server, and tell its workers what will come, unless they know it already.

        Args:
            sources, adapter: what `what_to_send` has returned for this model.

        Raises:
            InferenceServerError: another trainer has the server, or it cannot take these weights.
                The message says why and what to change.
        """
        if self.is_connected:
            return
        status = self.client.status()
        before, self._hold = self._hold, self.client.hold(self._trainer)
        if before is not None:
            before.close()
        if adapter and status["lora_dtype"] is None:
            raise InferenceServerError(needs_lora_flag(adapter["r"]))
        dtype = status["lora_dtype"] if adapter else status["dtype"]
        specs = [
            TensorSpec(name, dtype if s.dtype.is_floating_point else str(s.dtype)[6:], s.shape)
            for name, s in sources.items()
        ]
        kind: Literal["adapter", "full"] = "adapter" if adapter else "full"
        self.plan = TransferPlan(kind, specs, self.bucket_bytes, adapter)
        device = next(model.parameters()).device
        backend = choose_backend(self.backend, gpu_uuid(device), status["gpus"])
        fields = {
            "timeout_s": self.timeout_s,
            "trainer": self._trainer,
            "plan": asdict(self.plan),
        }
        if backend == "nccl":
            world_size, has_reply = 1 + status["world_size"], lambda: self._has_reply()
            self._nccl = NcclTransport(0, world_size, device, self.timeout_s, None, has_reply)
            fields["nccl_id"] = base64.b64encode(self._nccl.unique_id()).decode()
        self._request = self.client.connect_weight_sync(fields, self.timeout_s)
        self._request.begin()
        if self._nccl is not None:
            self._by_nccl(self._nccl.wait_until_connected)
        reply = self._answer()
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
        Connects first if that is necessary.

        Args:
            in_flight: requests that are being answered are frozen during the swap and continue
                under the new weights. Their keys and values so far are computed again
                ("recompute"), or kept as they are ("keep").

        Returns:
            `sync_s` seconds and `sync_bytes` bytes of tensors sent.

        Raises:
            ServerLostError: the server did not answer.
            InferenceServerError: the server refused the weights or could not load them.
        """
        start = time.monotonic()
        (error,) = push_to_all([self], model, policy_version, in_flight)
        if error is not None:
            raise error
        assert self.plan is not None
        return {"sync_s": time.monotonic() - start, "sync_bytes": float(self.plan.num_bytes)}

    def begin_push(self, policy_version: int, in_flight: Literal["recompute", "keep"]) -> None:
        """Let the connected server take one push. See `push`."""
        if self._connection is None or self.plan is None:
            raise ServerLostError(f"the connection to {self.client.base_url} was given up")
        fields = {
            "connection": self._connection,
            "policy_version": policy_version,
            "in_flight": in_flight,
            "timeout_s": self.timeout_s,
        }
        num_bytes = sum(self.plan.packed_sizes()) if self._nccl is None else 0
        self._request = self.client.receive_weights(fields, num_bytes, self.timeout_s)
        self._request.begin()

    def send(self, bucket: Tensor) -> None:
        """Send the next bucket of the plan, packed: (bytes,) uint8."""
        if self._nccl is not None:
            self._by_nccl(partial(self._nccl.send, bucket))
        elif self._request is not None:
            array: Any = bucket.cpu().numpy()  # numpy's types lack the buffer protocol
            self._request.write(memoryview(array))

    def finish_push(self) -> None:
        """Return once the server has loaded the weights."""
        self._answer()

    def _answer(self) -> dict[str, Any]:
        request = self._request
        if request is None:
            raise ServerLostError(f"the connection to {self.client.base_url} was given up")
        # Behind the server's own deadlines, because the server's errors say more.
        reply = request.answer(3 * self.timeout_s + 60.0)
        self._request = None
        return reply

    def _has_reply(self) -> bool:
        """Whether the server has replied. If it refuses, its workers join no collective."""
        return self._request is not None and self._request.has_reply()

    def _by_nccl(self, work: Callable[[], None]) -> None:
        """Do our part of a collective. If that fails, the server's reply may say why."""
        request = self._request
        try:
            work()
        except (NcclError, GivenUpError) as error:
            if request is not None:
                with suppress(ServerLostError):
                    request.answer(LAST_WORD_S)
            where = f"weights over NCCL to {self.client.base_url}"
            raise ServerLostError(f"{where}: {error}") from error

    def check_server(self) -> dict[str, Any]:
        """Return the status of the server if it still has the weights of the last push.

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
        return status

    def forget_server(self) -> None:
        """Give up the connection, without waiting for a push that may be unfinished: the server
        hears of it. The next push connects again.
        """
        nccl, request = self._nccl, self._request
        self._nccl = self._request = self._connection = None
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
