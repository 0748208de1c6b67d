"""Several ranks: what rank 0 sends the others, and how long they wait for it; losses and gradients
that are checked on all ranks; what FSDP2 and DeepSpeed need.

Rank 0 waits for rollouts, servers and files, which may take hours. The others wait for rank 0 in a
`HostGroup`, beside the group that trains. So `ddp_timeout` is the deadline of the training's own
collectives alone, and ends a run soon if one of them hangs.
"""

from __future__ import annotations

import atexit
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, StateDictType

from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.process.interrupts import Interrupted
from verifiers_rl.types import Batch, pack_samples, unpack_samples

# The other ranks wait so long for rank 0. Its own waits, for rollouts and servers, have deadlines,
# of which it tells them; and if its process ends, they notice at once.
LONGEST_WAIT_S = 7 * 86_400.0


def broadcast_batch(batch: Batch | None) -> Batch:
    """Return rank 0's batch on every rank, on the others with its samples alone. They go from CPU
    to CPU; with one rank nothing is sent.
    """
    if _hosts is None:
        assert batch is not None
        return batch
    message, content = pack_samples(batch.samples if batch is not None else [])
    numbers = (batch.step, batch.policy_version) if batch is not None else None
    message, (step, policy_version) = _hosts.broadcast([message, numbers])
    content = _hosts.broadcast_bytes(content)
    return batch or Batch(step, policy_version, unpack_samples(message, content))


def broadcast_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return rank 0's numbers and texts on every rank."""
    return values if _hosts is None else _hosts.broadcast(values)


@contextmanager
def failing_together() -> Iterator[None]:
    """Enter this on every rank around what rank 0 does. The other ranks wait for it at the end.

    Raises:
        Interrupted: on the other ranks, when rank 0 was interrupted inside.
        RuntimeError: on the other ranks, when rank 0 failed inside.
    """
    failure: dict[str, Any] = {}
    try:
        yield
    except BaseException as error:
        failure = {"signal": error.number if isinstance(error, Interrupted) else None}
        raise
    finally:
        failure = broadcast_values(failure)
        if failure and _hosts is not None and distributed.get_rank() > 0:
            if failure["signal"] is not None:
                raise Interrupted(failure["signal"])
            raise RuntimeError("rank 0 has failed; its error is in its own output")


class HostGroup:
    """All ranks, connected from CPU to CPU beside the group that trains. What they agree on here
    waits for no device, and mixes with no collective of the training.

    Args:
        timeout_s: a rank waits so long for ranks that do the same as it does.
        rank_0_s: a rank waits so long for rank 0, which may wait for rollouts.

    Raises:
        ConfigError: the ranks cannot reach each other.
        RuntimeError (of each method): a rank has ended, or did not come in time.
    """

    def __init__(self, timeout_s: float, rank_0_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        try:
            self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=rank_0_s))
        except RuntimeError as error:
            raise ConfigError(
                f"the trainer's processes cannot connect to each other over gloo: {error}; set "
                "GLOO_SOCKET_IFNAME to the network interface that joins their machines, such as "
                "eth0"
            ) from error

    def broadcast_number(self, number: int) -> int:
        """Return rank 0's number on every rank."""
        tensor = torch.tensor(number)
        try:
            distributed.broadcast(tensor, 0, self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"waiting for rank 0, whose own output says what it waits for or why it ended: "
                f"{error}"
            ) from error
        return int(tensor)

    def broadcast_bytes(self, content: np.ndarray) -> np.ndarray:
        """Return rank 0's bytes, (B,) uint8, on every rank."""
        size = self.broadcast_number(len(content))
        if distributed.get_rank() > 0:
            content = np.empty(size, np.uint8)
        distributed.broadcast(torch.from_numpy(content), 0, self._group)
        return content

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank, as JSON has it."""
        text = np.frombuffer(bytearray(json.dumps(value).encode()), np.uint8)
        return json.loads(self.broadcast_bytes(text).tobytes())

    def begin_max(self, number: int) -> Callable[[], int]:
        """Begin to take the largest of the ranks' numbers. The function returned waits for it."""
        largest = torch.tensor(number)
        work = distributed.all_reduce(
            largest, distributed.ReduceOp.MAX, group=self._group, async_op=True
        )

        def result() -> int:
            work.wait(self._timeout)
            return int(largest)

        return result

    def barrier(self, what: str, deadline_s: float) -> None:
        """Wait until every rank is here.

        Args:
            what: is awaited, for the error.
            deadline_s: rank 0 waits so long for the others.
        """
        try:
            distributed.monitored_barrier(self._group, timedelta(seconds=deadline_s), True)
        except RuntimeError as error:
            raise RuntimeError(f"waiting for {what}: {error}") from error


_hosts: HostGroup | None = None  # of this process; None with one rank


def connect_hosts(args: RLConfig) -> None:
    """Connect all ranks beside their devices, once in this process. Every rank calls this before
    rank 0 waits for anything that the others do not wait for.
    """
    global _hosts
    if args.world_size > 1 and _hosts is None:
        _hosts = HostGroup(args.ddp_timeout, LONGEST_WAIT_S)
        atexit.register(let_gloo_threads_finish)


def host_group() -> HostGroup | None:
    """Return what `connect_hosts` has connected; None with one rank."""
    return _hosts


def reduce_over_ranks(numbers: torch.Tensor, op: Any = distributed.ReduceOp.SUM) -> torch.Tensor:
    """Return the sum of the ranks' numbers, or another reduction, on every rank."""
    reduced = numbers.detach().clone()
    if distributed.is_initialized():
        distributed.all_reduce(reduced, op)
    return reduced


class NotFiniteError(FloatingPointError):
    """The loss or the gradient of a batch is infinite or NaN. Every rank raises this."""


def raise_if_not_finite(loss: torch.Tensor) -> None:
    """Raise NotFiniteError on every rank if any rank's loss is infinite or NaN. The optimizer
    would carry it into all weights.
    """
    total = reduce_over_ranks(loss)
    if not torch.isfinite(total):
        raise NotFiniteError(
            f"the loss of this batch is {total.item()}; no step is taken with it. Look at what "
            "loss_fn makes of extreme ratios, and at the rewards"
        )


def raise_if_gradient_not_finite(model: torch.nn.Module) -> None:
    """Raise NotFiniteError on every rank if any rank's gradient is infinite or NaN, even though
    its loss is finite. Clipping would turn all gradients into NaN, and the optimizer all weights.
    """
    norm_of_deepspeed: Any = getattr(model, "get_global_grad_norm", None)
    if norm_of_deepspeed is not None:  # its engine has taken the step already, or skipped it
        largest = torch.as_tensor(norm_of_deepspeed() or 0.0)
    else:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        # Under FSDP2, this rank's part.
        own = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
        largest = torch.nn.utils.get_total_norm([g for g in own if g.numel()], norm_type=math.inf)
    # Moved to the model's device: without any gradient, the norm is on the CPU.
    is_bad = (~torch.isfinite(largest)).float().to(next(model.parameters()).device)
    if reduce_over_ranks(is_bad):
        raise NotFiniteError(
            "the gradient of this batch is infinite or NaN, and its loss is not; no step is taken "
            "with it. Look at what the derivative of loss_fn is where the importance ratio is 1: "
            "that of a square root or a norm is infinite at 0"
        )


def prepare_ranks(accelerator: Any, args: RLConfig, needs_copy: bool) -> None:
    """Check and set what FSDP2, DeepSpeed and gloo need before the model is prepared.

    Args:
        accelerator: the Trainer's accelerator.
        args: the Trainer's options.
        needs_copy: whether each rank keeps a copy of the model, as the KL penalty's reference.

    Raises:
        ConfigError: the model would be split in a way that does not work here.
    """
    if args.n_gpu > 1:  # Trainer would copy the model to each GPU in every forward
        raise ConfigError(
            f"{args.n_gpu} GPUs are visible to one process, which uses one: choose it with "
            "CUDA_VISIBLE_DEVICES (not the server's), or start a process for each: accelerate "
            "launch --num_processes N"
        )
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name) and getattr(accelerator.state, f"{name}_plugin", None) is None:
            raise ConfigError(
                f"{name}={getattr(args, name)!r} has no effect on a CPU, where accelerate does not "
                "offer it; remove it"
            )
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None:
        check_fsdp(fsdp)
        if accelerator.mixed_precision == "bf16":
            # The policy of accelerate also sums gradients in bfloat16.
            fsdp.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if fsdp is None and getattr(accelerator.state, "deepspeed_plugin", None) is None:
        return
    if args.torch_compile:
        raise ConfigError(
            "torch_compile=True: it has not been tried with FSDP and DeepSpeed; leave it out"
        )
    if needs_copy:
        raise ConfigError(
            "kl_beta without LoRA, as any loss that needs reference_logprobs, keeps a copy of the "
            "whole model on each rank, which FSDP and DeepSpeed would not split; set use_lora = "
            "true, or kl_beta = 0"
        )


def check_fsdp(plugin: Any) -> None:
    """Raise ConfigError for options of FSDP that do not work here."""
    if plugin.fsdp_version != 2:
        raise ConfigError(f"fsdp_version={plugin.fsdp_version}: not supported; set fsdp_version: 2")
    if plugin.state_dict_type != StateDictType.FULL_STATE_DICT:
        raise ConfigError(
            f"fsdp_state_dict_type: {plugin.state_dict_type.name}: Trainer would save no model at "
            "the end; set fsdp_state_dict_type: FULL_STATE_DICT"
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ConfigError("FSDP's cpu_offload: not supported; remove it, or use ZeRO-2's")
    if plugin.activation_checkpointing:
        raise ConfigError(
            "FSDP's activation_checkpointing: it renames the weights, and the server would refuse "
            "them; set gradient_checkpointing = true in its place"
        )


@contextmanager
def accumulating(
    accelerator: Any, args: RLConfig, model: torch.nn.Module, is_last: bool
) -> Iterator[None]:
    """Enter this around each forward and backward of a batch. Gradients are reduced over the ranks
    in the last one only, which is less traffic. Until then FSDP2 keeps them unreduced and whole on
    each rank, 4 bytes a trained weight; so with all weights, the default there is to reduce in
    each. `sync_each_batch` in the `gradient_accumulation_kwargs` of `accelerator_config` chooses.
    DeepSpeed decides by its stage.
    """
    config: Any = args.accelerator_config
    reduces_each = (config.gradient_accumulation_kwargs or {}).get("sync_each_batch")
    if reduces_each is None:
        has_adapter = hasattr(accelerator.unwrap_model(model), "peft_config")
        reduces_each = accelerator.is_fsdp2 and not has_adapter
    accelerator.gradient_state._set_sync_gradients(is_last)
    with nullcontext() if is_last or reduces_each else accelerator.no_sync(model):
        yield


def let_gloo_threads_finish() -> None:
    """Wait for gloo's threads; call this before the interpreter ends. A gloo thread releases the
    tensors of its last collective some time after the collective is done, and takes the GIL for
    this. Before Python 3.14 the process aborts if that happens while the interpreter ends
    (python/cpython#87135, pytorch/pytorch#179291). Nothing tells when the thread is done.
    Destroying the group joins its threads only if nothing else holds the group, but
    DistributedDataParallel does.
    """
    time.sleep(0.5)
