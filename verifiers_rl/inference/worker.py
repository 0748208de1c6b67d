"""What runs inside vLLM's worker processes: receive weights and put them into the running model.

vLLM mixes `WeightSyncWorker` into its own worker class (`--worker-extension-cls`). The engine's
collective RPC calls its methods, and only `weight_routes.WeightRoutes` uses this RPC for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from verifiers_rl.inference.reloading import (
    NamedTensor,
    adapter_name_mapper,
    in_reloadable_form,
    layers_without_adapter,
    lost_in_reload,
    repack_for_cpu,
    take_sinks,
)
from verifiers_rl.sync.nccl import ID_BYTES, ProcessGroupTransport, SharedBucket, gpu_uuid
from verifiers_rl.sync.plan import ADAPTER_ID, AdapterConfig, TransferPlan, receive_buckets
from verifiers_rl.sync.shared_buffers import SharedBuffers

logger = logging.getLogger(__name__)

Bucket = list[NamedTensor]


# vLLM warns at each reload that the rotary embedding got no weights. It has none, only a table.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: not record.getMessage().startswith("RotaryEmbedding: Failed to load weights")
)


def returning_error(work: Callable[..., None]) -> Callable[..., str | None]:
    """Let a method return its error as text, or None. It is not raised: vLLM would take the first
    worker's exception for the answer of all workers, and the exceptions of the others for their
    answers to its next call.
    """

    @wraps(work)
    def run(self: WeightSyncWorker, *args: Any) -> str | None:
        try:
            work(self, *args)
        except Exception as error:
            logger.exception("weight sync failed")
            self._leave()  # else the other workers wait for this one
            return f"{type(error).__name__}: {error}"
        return None

    return run


class WeightSyncWorker:
    """Mixed into vLLM's worker;
    `self` has its `model_runner`, `vllm_config`, `device` and `rank`.
    """

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int

    def weight_sync_gpu(self) -> str | None:
        """Return the uuid of this worker's GPU, None on a CPU."""
        return gpu_uuid(self.device)

    _shared: SharedBuffers | None = None  # with the server's process; None: not connected
    _transport: ProcessGroupTransport | None = None

    def _leave(self) -> None:
        shared, transport = self._shared, self._transport
        self._shared = self._transport = None
        if shared is not None:
            shared.give_up()
        if transport is not None:
            transport.close()

    @property
    def _number(self) -> int:
        """This worker's number among those of all engines, from 0 on."""
        parallel = self.vllm_config.parallel_config
        # data_parallel_rank is 0 in all engines of a model without experts.
        return parallel.data_parallel_index * parallel.world_size + self.rank

    @returning_error
    def weight_sync_connect(
        self,
        plan: str,
        shared: tuple[str, int, int, int],
        unique_id: bytes | None,
        timeout_s: float,
    ) -> None:
        """Remember what the trainer will send.

        Args:
            plan: the `TransferPlan` as JSON.
            shared: for `SharedBuffers`: the memory shared with the server's process.
            unique_id: NCCL's, of the communicator to join, or a longer one of CUDA IPC; None if
                weights come in that memory.
        """
        self._leave()  # the connection of a previous trainer
        self._weight_sync_plan = TransferPlan.model_validate_json(plan)
        self._shared = SharedBuffers(*shared)
        parallel = self.vllm_config.parallel_config
        if self._weight_sync_plan.adapter is not None and parallel.pipeline_parallel_size == 1:
            # Checked before anything is sent: vLLM silently drops tensors that it has no layer for.
            manager = self.model_runner.lora_manager._adapter_manager
            if lost := layers_without_adapter(manager, [*self._weight_sync_plan.tensors]):
                raise ValueError(
                    f"vLLM serves no adapter of {lost[:5]}; set lora_sync='merged', or leave them "
                    "out of lora_target_modules"
                )
        if unique_id is not None:
            is_ipc = len(unique_id) > ID_BYTES
            self._transport = ProcessGroupTransport(
                1 + self._number,
                1 + parallel.world_size_across_dp,
                self.device,
                timeout_s,
                unique_id,
                self._shared.is_given_up,
                partial(SharedBucket, self.device, 0) if is_ipc else None,
            )
            self._transport.wait_until_connected()

    @returning_error
    def weight_sync_receive(self) -> None:
        """Receive one push and load it."""
        shared, plan = self._shared, self._weight_sync_plan
        assert shared is not None  # after a push that failed, the trainer must connect again

        def from_shared(num_bytes: int) -> Callable[[], torch.Tensor]:
            return lambda: shared.receive(self._number, num_bytes)

        receive = from_shared if self._transport is None else self._transport.receive
        buckets = receive_buckets(plan, receive)
        with torch.device(self.device), set_current_vllm_config(self.vllm_config), torch.no_grad():
            if plan.adapter is not None:
                self._load_adapter(plan.adapter, buckets)
            else:
                self._load_full(buckets)

    def _load_full(self, buckets: Iterable[Bucket]) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        lost, sinks = list[str](), Bucket()
        initialize_layerwise_reload(model)
        try:
            for tensors in buckets:
                on_device = ((name, tensor.to(self.device)) for name, tensor in tensors)
                loaded = model.load_weights(in_reloadable_form(model, on_device, sinks))
                lost += lost_in_reload(model, loaded or set())
        finally:
            # Also after an unfinished push: else vLLM takes its tensors for part of the next push.
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        if sinks:
            model.load_weights(sinks)  # which have memory again
            take_sinks(model, self.vllm_config.model_config.dtype)
        if lost:
            raise RuntimeError(
                f"vLLM's {type(model).__name__} cannot take new weights while it runs: {lost[:3]} "
                "would stay as they were; train an adapter with lora_sync='adapter'"
            )
        if self.device.type == "cpu":
            repack_for_cpu(model)

    def _load_adapter(self, adapter: AdapterConfig, buckets: Iterable[Bucket]) -> None:
        from vllm.lora.peft_helper import PEFTHelper

        worker_manager = self.model_runner.lora_manager
        manager = worker_manager._adapter_manager
        config = PEFTHelper.from_dict(adapter.model_dump())
        config.validate_legal(worker_manager.lora_config)
        tensors = {name: tensor for bucket in buckets for name, tensor in bucket}
        loaded = worker_manager._lora_model_cls.from_lora_tensors(
            ADAPTER_ID,
            tensors,
            config,
            device="cpu",
            dtype=worker_manager.lora_config.lora_dtype,
            model_vocab_size=worker_manager.vocab_size,
            weights_mapper=adapter_name_mapper(manager.model),
            skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
        )
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(loaded)
        manager.activate_adapter(ADAPTER_ID)
