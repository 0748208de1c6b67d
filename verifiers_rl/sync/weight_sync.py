"""Weights from the trainer to the inference server's memory, without files.

    trainer rank 0                                  vLLM worker 1..W
    connect()  ── HTTP: where to meet, what will come ──►  weight_sync_connect
               ◄═══════ one meeting, W + 1 ranks   ═══════►
    push()     ── HTTP: receive version n ──────────────►  weight_sync_receive
               ═══════ buckets of packed tensors ════════►  load into the running model
               ◄─ HTTP: version n loaded, cache reset ────

The transport is NCCL between GPUs, CUDA IPC where both sides share one, TCP elsewhere. Tensors
travel packed in buckets of a bounded size, and each is gathered, merged and cast when its bucket is
packed: neither the number of messages nor the extra memory grows with the model. With LoRA only the
adapter travels, or the merged weights.
"""

from __future__ import annotations

import base64
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise, zip_longest
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from verifiers_rl.inference.client import (
    InferenceServerError,
    RequestRefusedError,
    ServerLostError,
)
from verifiers_rl.sync.adapters import not_plain, reason_against_serving
from verifiers_rl.sync.meeting import (
    GuestStore,
    HostStore,
    close_all,
    host_meeting,
    join_meeting,
    new_secret,
    receive_into,
)

if TYPE_CHECKING:
    from verifiers_rl.inference.client import Hold, InferenceClient

logger = logging.getLogger(__name__)

Backend = Literal["nccl", "ipc", "tcp"]
ADAPTER_NAME = "policy"
MAX_BUCKET_BYTES = 2**30
_ALIGNMENT = 16  # bytes; every dtype can be viewed at such an offset


class TensorSpec(NamedTuple):
    """Name, dtype as torch spells it without `torch.`, and shape of one tensor on the wire."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * torch_dtype(self.dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name; ValueError for anything that is not one."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown tensor dtype {name!r}")
    return dtype


@dataclass(frozen=True)
class TransferPlan:
    """What every push will carry; both sides derive the same buckets from it.

    Attributes:
        kind: "full" weights under the checkpoint's names, or a LoRA "adapter" under PEFT's names.
        tensors: in the order in which they travel.
        bucket_bytes: upper bound of one message, except for a single larger tensor.
        adapter: rank, alpha and so on, as PEFT's config spells them; empty for full weights.
    """

    kind: Literal["full", "adapter"]
    tensors: Sequence[TensorSpec]
    bucket_bytes: int
    adapter: dict[str, Any]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TransferPlan:
        """Raises ValueError for anything that is not a plan."""
        try:
            tensors = [TensorSpec(str(n), str(d), tuple(shape)) for n, d, shape in data["tensors"]]
            plan = cls(data["kind"], tensors, data["bucket_bytes"], dict(data["adapter"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a transfer plan: {type(error).__name__}: {error}") from error
        if plan.kind not in ("full", "adapter"):
            raise ValueError(f"plan kind {plan.kind!r}: must be full or adapter")
        if not tensors:
            raise ValueError("a plan without tensors")
        if plan.kind == "adapter" and type(plan.adapter.get("r")) is not int:
            raise ValueError(f"adapter rank {plan.adapter.get('r')!r}: must be an integer")
        if type(plan.bucket_bytes) is not int or not 0 < plan.bucket_bytes <= MAX_BUCKET_BYTES:
            raise ValueError(f"bucket_bytes {plan.bucket_bytes!r}: 1 to {MAX_BUCKET_BYTES}")
        for name, _, shape in tensors:
            if not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"shape {list(shape)!r} of tensor {name!r}: not sizes")
        return plan

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)

    def buckets(self) -> Iterator[list[TensorSpec]]:
        bucket: list[TensorSpec] = []
        size = 0
        for spec in self.tensors:
            if bucket and size + spec.num_bytes > self.bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(spec)
            size += spec.num_bytes
        if bucket:
            yield bucket


def _offsets(bucket: Sequence[TensorSpec]) -> list[int]:
    """Byte offset of each tensor in the bucket's buffer, and its total length last."""
    offsets = [0]
    for spec in bucket:
        offsets.append(offsets[-1] + -(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def bucket_num_bytes(bucket: Sequence[TensorSpec]) -> int:
    return _offsets(bucket)[-1]


def bucket_views(bucket: Sequence[TensorSpec], buffer: Tensor) -> list[tuple[str, Tensor]]:
    """Names and views into a uint8 buffer (total bytes,), in the dtypes and shapes of the plan."""
    return [
        (
            spec.name,
            buffer[start : start + spec.num_bytes].view(torch_dtype(spec.dtype)).view(spec.shape),
        )
        for spec, (start, _) in zip(bucket, pairwise(_offsets(bucket)), strict=True)
    ]


class Transport(Protocol):
    """Moves rank 0's buffers to all workers."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Rank 0: a uint8 buffer (num_bytes,) to fill."""
        ...

    def send(self, buffer: Tensor) -> None:
        """Rank 0: returns when the buffer may be filled again."""
        ...

    def receive(self, num_bytes: int) -> Callable[[], Tensor]:
        """Worker: begin to receive. The call that is returned waits for the buffer, which is the
        worker's own.
        """
        ...

    def abandon(self) -> None:
        """Rank 0, in another thread than the one that sends: the others are lost. Returns at once;
        what is under way ends, or goes on to its deadline without holding up the GPU.
        """
        ...

    def close(self) -> None: ...


class Meeting(NamedTuple):
    """Where the trainer and the workers meet, and who this process is there (0: the trainer)."""

    host: str
    port: int
    secret: str
    rank: int
    world_size: int
    timeout_s: float


def make_transport(
    backend: Backend,
    meeting: Meeting,
    device: torch.device,
    bucket_bytes: int,
    listener: socket.socket | None = None,
) -> Transport:
    """Meet the others: rank 0 is the trainer and waits for them on `listener`.

    Args:
        device: of this process's model.
        bucket_bytes: of the largest buffer.

    Raises:
        RuntimeError: the others did not come, or went away.
    """
    timeout_s, world_size = meeting.timeout_s, meeting.world_size
    if listener is not None:
        connections = host_meeting(listener, world_size - 1, meeting.secret, timeout_s)
    else:
        connections = [
            join_meeting(meeting.host, meeting.port, meeting.rank, meeting.secret, timeout_s)
        ]
    if backend == "tcp":
        return Sockets(connections, meeting.rank)
    store: HostStore | GuestStore = (
        HostStore(connections, timeout_s) if listener else GuestStore(connections[0], timeout_s)
    )
    if backend == "ipc":
        return SharedBuffer(store, meeting.rank, world_size, device, bucket_bytes)
    return Communicator(store, meeting.rank, world_size, device, timeout_s)


class Sockets:
    """TCP: the trainer sends each buffer to each worker over its connection of the meeting.

    Args:
        connections: rank 0: to all workers; a worker: to rank 0.
    """

    def __init__(self, connections: Sequence[socket.socket], rank: int) -> None:
        self._connections = connections
        # Rank 0 sends to all at once; a worker receives the next buffer while it loads one.
        self._threads = ThreadPoolExecutor(len(connections), "weight-sync")

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, buffer: Tensor) -> None:
        view = _bytes_of(buffer)
        sending = [self._start(connection.sendall, view) for connection in self._connections]
        wait(sending)
        for one in sending:
            self._result(one)

    def receive(self, num_bytes: int) -> Callable[[], Tensor]:
        buffer = self.buffer(num_bytes)
        coming = self._start(receive_into, self._connections[0], _bytes_of(buffer))

        def wait_for_it() -> Tensor:
            self._result(coming)
            return buffer

        return wait_for_it

    def _start(self, work: Callable[..., None], *args: Any) -> Future[None]:
        try:
            return self._threads.submit(work, *args)
        except RuntimeError as error:
            raise RuntimeError("the connection for weights was closed") from error

    def _result(self, future: Future[None]) -> None:
        try:
            future.result()
        except OSError as error:
            raise RuntimeError(f"the connection for weights broke: {error}") from error

    def abandon(self) -> None:
        self.close()

    def close(self) -> None:
        """A buffer that is under way is cut off."""
        close_all(self._connections)
        self._threads.shutdown(wait=False)


def _bytes_of(buffer: Tensor) -> memoryview:
    """The memory of a uint8 tensor on the CPU, for sockets."""
    array: Any = buffer.numpy()  # numpy's types lack the buffer protocol
    return memoryview(array)


class Communicator:
    """NCCL: a process group between the trainer (rank 0) and the server's workers, apart from the
    default one; each rank has its own GPU.

    Args:
        store: of the meeting.
        rank, world_size: this process (0: the trainer), and all of them.
        device: this process's GPU.
        timeout_s: deadline of every message.
    """

    def __init__(
        self,
        store: HostStore | GuestStore,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        import torch.distributed as dist

        self.device = device
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._group: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)
        self._store: HostStore | GuestStore | None = store
        self._lock = threading.Lock()  # two threads may leave at once
        # Meet now, not at the first push.
        self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))()

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def send(self, buffer: Tensor) -> None:
        self._broadcast(buffer)()

    def receive(self, num_bytes: int) -> Callable[[], Tensor]:
        return self._broadcast(self.buffer(num_bytes))

    def _broadcast(self, buffer: Tensor) -> Callable[[], Tensor]:
        """Begun when this returns; the call that is returned waits for its end."""
        import torch.distributed as dist

        group = self._group
        if group is None:
            raise RuntimeError("the connection for weights was closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work = group.broadcast([buffer], options)

        def wait_for_it() -> Tensor:
            work.wait()
            torch.cuda.current_stream(buffer.device).synchronize()
            return buffer

        return wait_for_it

    def abandon(self) -> None:
        self.close()  # or it would keep the trainer's stream until the deadline

    def close(self) -> None:
        with self._lock:
            (group, self._group), (store, self._store) = (self._group, None), (self._store, None)
        if group is not None:
            group.abort()
        if store is not None:
            store.close()


class SharedBuffer:
    """CUDA IPC: one buffer in the memory of the GPU that trainer and workers share.

    NCCL refuses two ranks on one GPU. Here rank 0 allocates one buffer of the largest bucket, the
    workers map it into their own address space, and a store says when it is filled and when all
    have read it. The handle travels as base64 in the store, unpickled by nobody.

    Args:
        store: of the meeting, with the deadline of every wait.
        rank, world_size: this process (0: the trainer), and all of them.
        device: this process's name for the GPU.
        num_bytes: of the largest bucket.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, device: torch.device, num_bytes: int
    ) -> None:
        self._num_workers = world_size - 1
        self._store = store
        self._device = device
        self._round = 0
        if rank == 0:
            self._memory: Any = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            store.set("handle", export_cuda_buffer(self._memory))
            self._await_workers("open")
        else:
            self._memory = open_cuda_buffer(store.get("handle"), device)
            self._report("open")

    def buffer(self, num_bytes: int) -> Tensor:
        return self._memory[:num_bytes]

    def send(self, buffer: Tensor) -> None:
        self._round += 1
        self._synchronize()
        self._store.set(f"filled/{self._round}", "")
        self._await_workers(f"read/{self._round}")
        self._store.delete_key(f"filled/{self._round}")

    def receive(self, num_bytes: int) -> Callable[[], Tensor]:
        """Copied only when waited for; rank 0 fills the buffer again while that copy is loaded."""
        self._round += 1
        return partial(self._read, self._round, num_bytes)

    def _read(self, round_: int, num_bytes: int) -> Tensor:
        self._store.wait([f"filled/{round_}"])
        own = self._memory[:num_bytes].clone()  # loading may keep views beyond the next bucket
        self._synchronize()
        self._report(f"read/{round_}")
        return own

    def abandon(self) -> None:
        """Nothing to do: only the sending thread waits, and for the store."""

    def close(self) -> None:
        """The GPU's memory is freed when both sides have left."""
        store, self._memory, self._store = self._store, None, None
        if store is not None:
            store.close()

    def _report(self, event: str) -> None:
        if self._store.add(f"{event}/count", 1) == self._num_workers:
            self._store.set(f"{event}/all", "")

    def _await_workers(self, event: str) -> None:
        self._store.wait([f"{event}/all"])
        self._store.delete_key(f"{event}/all")
        self._store.delete_key(f"{event}/count")

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def export_cuda_buffer(buffer: Tensor) -> str:
    """A handle by which another process maps this GPU buffer (cudaIpcMemHandle); plain text."""
    _, *fields = buffer.untyped_storage()._share_cuda_()
    return ",".join(
        base64.b64encode(f).decode() if isinstance(f, bytes) else str(int(f)) for f in fields
    )


def open_cuda_buffer(handle: bytes, device: torch.device) -> Tensor:
    """The uint8 buffer behind a handle of `export_cuda_buffer`, mapped into this process."""
    memory, size, offset, counter, counter_offset, event, must_wait = handle.decode().split(",")
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0,
        base64.b64decode(memory),
        int(size),
        int(offset),
        base64.b64decode(counter),
        int(counter_offset),
        base64.b64decode(event),
        bool(int(must_wait)),
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _own_address(peer: str) -> str:
    """The address of this machine that `peer` can reach, without sending anything."""
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def gpu_uuid(device: torch.device) -> str | None:
    """Which physical GPU this is, however this process numbers it; None for a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def choose_backend(
    wanted: Literal["auto", "nccl", "ipc", "tcp"], own: str | None, workers: Sequence[str | None]
) -> Backend:
    """The transport between this GPU and the workers' (uuids, None for a CPU).

    Raises:
        InferenceServerError: the wanted one cannot work between them.
    """
    on_gpus = own is not None and all(worker is not None for worker in workers)
    shared = on_gpus and all(worker == own for worker in workers)
    distinct = on_gpus and len({own, *workers}) == 1 + len(workers)
    if wanted == "auto":
        return "ipc" if shared else "nccl" if distinct else "tcp"
    if wanted == "nccl" and not distinct:
        raise InferenceServerError(
            "weight_sync_backend='nccl' needs a GPU of its own for the trainer and for each of the "
            "server's workers, which is not so here; use 'auto'"
        )
    if wanted == "ipc" and not shared:
        raise InferenceServerError(
            "weight_sync_backend='ipc' needs trainer and server on the same single GPU, which is "
            "not so here; use 'auto'"
        )
    return wanted


def needs_lora_flag(rank: int) -> str:
    return (
        f"the trainer sends a LoRA adapter of rank {rank}; "
        f"start vf-vllm with --enable-lora --max-lora-rank {rank} (or more)"
    )


class Source(NamedTuple):
    """A tensor to send: shape and dtype, and what makes it when its bucket is packed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that FSDP2 or DeepSpeed ZeRO-3 has split over ranks; others as they are.

    A collective for a split tensor: every rank calls it, in the same order.
    """
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor


def source_of(tensor: Any) -> Source:
    # ZeRO-3 leaves an empty tensor behind and keeps the shape beside it.
    return Source(
        tuple(getattr(tensor, "ds_shape", tensor.shape)), tensor.dtype, partial(whole, tensor)
    )


def check_adapter(config: Any, lora_sync: str) -> None:
    """Raise ValueError for a PEFT config that the server could not reproduce."""
    from peft import LoraConfig

    as_dict = config.to_dict()
    if not isinstance(config, LoraConfig) or not_plain(as_dict):
        raise ValueError(
            f"peft_config={' with '.join([type(config).__name__, *not_plain(as_dict)])}: only "
            "plain LoRA can be sent to vLLM (no DoRA, no lora_bias)"
        )
    if lora_sync == "adapter" and (reason := reason_against_serving(as_dict)):
        raise ValueError(f"peft_config.{reason}; set lora_sync='merged'")
    if experts := getattr(config, "target_parameters", None):
        raise ValueError(
            f"peft_config.target_parameters={sorted(experts)}: the adapter reaches into "
            "a mixture of experts, which cannot be sent; leave their layers out of "
            "lora_target_modules, as its default does"
        )


def adapter_sources(model: Any) -> tuple[dict[str, Source], dict[str, Any]]:
    """Tensors of a PEFT model's LoRA adapter by PEFT's names, and its config as plain values."""
    from peft import get_peft_model_state_dict

    config = model.peft_config["default"].to_dict()
    plain = {key: config[key] for key in ("r", "lora_alpha", "use_rslora", "bias")}
    targets = config["target_modules"]
    plain["target_modules"] = [targets] if isinstance(targets, str) else sorted(targets)
    # Not of model.state_dict(): ZeRO-3 knows its parameters only.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = get_peft_model_state_dict(model, state_dict=parameters)
    return {name: source_of(tensor) for name, tensor in tensors.items()}, plain


def merged_sources(model: Any) -> dict[str, Source]:
    """Weights of a PEFT model with its adapter merged in, under the base model's names and in the
    order of its parameters: vLLM holds back the parts of a layer until it has all of them.

    Computed beside the trainer's own tensors, which are not touched, so nothing drifts: W + scale *
    B A in float32 for wrapped layers, the trained copy for `modules_to_save`.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    base = model.get_base_model()
    changed: dict[str, Source] = {}
    for prefix, module in base.named_modules():
        if isinstance(module, LoraLayer):
            weight = source_of(cast(Any, module.get_base_layer()).weight)
            changed[f"{prefix}.weight"] = weight._replace(make=partial(_merged_weight, module))
        elif isinstance(module, ModulesToSaveWrapper):
            trained = module.modules_to_save["default"]
            changed |= {f"{prefix}.{n}": source_of(p) for n, p in trained.named_parameters()}
    merged: dict[str, Source] = {}
    for name, parameter in base.named_parameters():
        if ".lora_" in name:
            continue
        for inside in (".base_layer.", ".original_module.", ".modules_to_save.default."):
            name = name.replace(inside, ".")
        merged.setdefault(name, changed.get(name) or source_of(parameter))
    return merged


@torch.no_grad()
def _merged_weight(module: Any) -> Tensor:
    weight = whole(module.get_base_layer().weight).float()
    scale = module.scaling["default"]
    if "default" in module.lora_embedding_A:
        a = whole(module.lora_embedding_A["default"]).float()  # (r, vocabulary)
        b = whole(module.lora_embedding_B["default"]).float()  # (embedding, r)
        return weight + scale * (b @ a).T
    a = whole(module.lora_A["default"].weight).float()  # (r, in)
    b = whole(module.lora_B["default"].weight).float()  # (out, r)
    return torch.addmm(weight, b, a, alpha=scale)


def full_sources(model: nn.Module) -> dict[str, Source]:
    """All parameters; a tied LM head once, as the input embedding."""
    return {name: source_of(parameter) for name, parameter in model.named_parameters()}


def in_checkpoint_form(model: Any, sources: dict[str, Source]) -> dict[str, Source]:
    """Parameters under the names and in the parts that a checkpoint has, which is what vLLM loads:
    transformers keeps the experts of a layer in one tensor, for example.
    """
    if not isinstance(model, PreTrainedModel):
        return sources
    if isinstance(model, FSDPModule):
        # Its class, by which transformers looks conversions up, is FSDP's: first come that and
        # FSDPModule, then the model's own. An empty model of that one stands for it.
        with torch.device("meta"):
            model = type(model).__mro__[2](deepcopy(model.config))
    # Not those that a checkpoint of other names left in it: the server's model has the same then.
    conversions = [
        conversion
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if type(conversion).__name__ != "PrefixChange"  # as transformers saves a new model
    ]
    if not conversions:
        return sources
    plain: Any = SimpleNamespace(
        config=model.config, get_parameter=model.get_parameter, _weight_conversions=conversions
    )

    def converted(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return revert_weight_conversion(plain, {name: tensor})

    result: dict[str, Source] = {}
    for name, source in sources.items():
        meta = torch.empty(source.shape, dtype=source.dtype, device="meta")
        parts = _Parts(partial(converted, name), source)
        for number, (part, tensor) in enumerate(converted(name, meta).items()):
            if part in result:
                raise ValueError(f"tensor {part!r} has parts in several parameters; not supported")
            make = partial(parts.make, part, is_first=number == 0)
            result[part] = Source(tuple(tensor.shape), source.dtype, make)
    return result


class _Parts:
    """What one parameter becomes in a checkpoint. Its parts are made in order, and the parameter is
    gathered for the first, so that ranks which take part after a failed push stay in step.
    """

    def __init__(self, convert: Callable[[Tensor], dict[str, Tensor]], source: Source) -> None:
        self._convert, self._source = convert, source
        self._made: dict[str, Tensor] = {}

    def make(self, part: str, is_first: bool) -> Tensor:
        if is_first:
            self._made = self._convert(self._source.make())
        return self._made.pop(part)


def what_to_send(
    model: Any, lora_sync: Literal["adapter", "merged"]
) -> tuple[dict[str, Source], dict[str, Any]]:
    """The tensors that travel, and the adapter's config where they are an adapter's."""
    if not hasattr(model, "peft_config"):
        return in_checkpoint_form(model, full_sources(model)), {}
    config = model.peft_config["default"]
    check_adapter(config, lora_sync)
    if lora_sync == "merged" or config.modules_to_save:
        # vLLM takes no fully trained modules inside an adapter.
        return in_checkpoint_form(model.get_base_model(), merged_sources(model)), {}
    return adapter_sources(model)


class WorkersLeftError(RuntimeError):
    """The workers no longer receive; they or the server know why."""


def send_buckets(plan: TransferPlan, sources: dict[str, Source], transport: Transport) -> None:
    """Rank 0's end: make, cast and send one bucket after the other.

    Raises:
        WorkersLeftError: a bucket could not be sent. What a source raises comes as it is.
    """
    with torch.no_grad():
        for bucket in plan.buckets():
            buffer = transport.buffer(bucket_num_bytes(bucket))
            for name, view in bucket_views(bucket, buffer):
                view.copy_(sources[name].make())
            try:
                transport.send(buffer)
            except RuntimeError as error:
                raise WorkersLeftError(f"weights could not be sent: {error}") from error


def is_split(model: nn.Module) -> bool:
    """Whether FSDP2 or ZeRO-3 keeps a part of each parameter on each rank."""
    return any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters())


_END = -1


@contextmanager
def gathering(model: nn.Module, lora_sync: Literal["adapter", "merged"]) -> Iterator[None]:
    """Inside, rank 0 may push as often as it has to, and fail; if the model is split over ranks,
    the others wait here meanwhile and take part in gathering each tensor. Entered on every rank.
    """
    if not is_split(model):
        yield
    elif torch.distributed.get_rank() == 0:
        try:
            yield
        finally:
            _announce(_END, model)
    else:
        sources: list[Source] = []
        with torch.no_grad():
            while (index := _announce(_END, model)) != _END:
                # Not before rank 0 has, which then says what is wrong with an adapter.
                sources = sources or list(what_to_send(model, lora_sync)[0].values())
                sources[index].make()
        yield


def _announce(index: int, model: nn.Module) -> int:
    """Rank 0's number on every rank."""
    number = torch.tensor(index, device=next(model.parameters()).device)
    torch.distributed.broadcast(number, 0)
    return int(number)


@contextmanager
def announced(sources: dict[str, Source], model: nn.Module) -> Iterator[dict[str, Source]]:
    """Rank 0's sources inside `gathering`: the other ranks hear which one is made.

    Sources are made in a thread that may be left behind. It must not get between later collectives:
    after this context nothing more is gathered.
    """
    if not is_split(model):
        yield sources
        return
    lock, is_open = threading.Lock(), True

    def make(index: int, source: Source) -> Tensor:
        with lock:
            if not is_open:
                raise RuntimeError("this push of weights was given up")
            _announce(index, model)
            return source.make()

    try:
        yield {
            name: source._replace(make=partial(make, index, source))
            for index, (name, source) in enumerate(sources.items())
        }
    finally:
        with lock:
            is_open = False


def receive_buckets(
    plan: TransferPlan, transport: Transport, timeout_s: float
) -> Iterator[list[tuple[str, Tensor]]]:
    """The workers' end: the named tensors of each bucket in turn. While the caller loads them, the
    next bucket is packed and sent.

    Raises:
        RuntimeError: the trainer went away.
        TimeoutError: all of them took longer than `timeout_s`, loading included.
    """
    deadline = time.monotonic() + timeout_s
    buckets = list(plan.buckets())
    coming = transport.receive(bucket_num_bytes(buckets[0]))
    for bucket, following in zip_longest(buckets, buckets[1:]):
        buffer = coming()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"a push of weights took longer than {timeout_s:g} s (vllm_server_timeout)"
            )
        if following is not None:
            coming = transport.receive(bucket_num_bytes(following))
        yield bucket_views(bucket, buffer)


class WeightSync:
    """The trainer's end. Used from rank 0 only.

    Args:
        client: HTTP to the server.
        backend: "nccl", "ipc", "tcp", or "auto" for what the GPUs on both sides allow.
        lora_sync: of a PEFT model, send the "adapter" or the "merged" weights.
        timeout_s: deadline of the meeting and of one push.
        bucket_bytes: upper bound of one message; larger ones are slower on a CPU, which has to find
            fresh memory for each (benchmarks/README.md).
    """

    def __init__(
        self,
        client: InferenceClient,
        backend: Literal["auto", "nccl", "ipc", "tcp"] = "auto",
        lora_sync: Literal["adapter", "merged"] = "adapter",
        timeout_s: float = 300.0,
        bucket_bytes: int = 16 * 2**20,
    ) -> None:
        self.client = client
        self.backend = backend
        self.lora_sync = lora_sync
        self.timeout_s = timeout_s
        self.bucket_bytes = bucket_bytes
        self.policy_version: int | None = None
        self._plan: TransferPlan | None = None
        self._transport: Transport | None = None
        self._trainer = secrets.token_hex(8)  # our name for the server
        self._hold: Hold | None = None
        self._connection: str | None = None  # the server's name for this trainer's last connect()

    @property
    def model_name(self) -> str:
        """What rollout requests put into `model=` to reach the synced policy."""
        if self._plan is not None and self._plan.kind == "adapter":
            return ADAPTER_NAME
        return self.client.served_model_name

    def connect(self, model: nn.Module) -> None:
        """Take the server, meet its workers and tell them what will come.

        Raises:
            InferenceServerError: another trainer has the server, or it cannot take these weights;
                says why and what to change.
        """
        status = self.client.status()
        before, self._hold = self._hold, self.client.hold(self._trainer)
        if before is not None:
            before.close()
        sources, adapter = what_to_send(model, self.lora_sync)
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
        address = _own_address(self.client.host)
        # Bound to one address and a free port: two runs never collide, and loopback stays loopback.
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=128)
        port = listener.getsockname()[1]
        world_size = 1 + status["world_size"]
        meeting = Meeting(address, port, new_secret(), 0, world_size, self.timeout_s)
        request = {
            "host": address,
            "port": port,
            "secret": meeting.secret,
            "world_size": world_size,
            "backend": backend,
            "timeout_s": self.timeout_s,
            "trainer": self._trainer,
            "plan": asdict(self._plan),
        }
        largest = max(bucket_num_bytes(bucket) for bucket in self._plan.buckets())

        def meet() -> Transport:
            try:
                return make_transport(backend, meeting, device, largest, listener)
            except RuntimeError as error:
                raise WorkersLeftError(f"the server's workers did not come: {error}") from error

        reply, self._transport = self._together(
            lambda: self.client.connect_weight_sync(request, self.timeout_s), meet
        )
        self._connection = reply["connection"]
        logger.info(
            "weight sync: %s of %d tensors, %.1f MB a push, over %s to %d worker(s)",
            self._plan.kind,
            len(specs),
            self._plan.num_bytes / 1e6,
            backend,
            status["world_size"],
        )

    def push(
        self,
        model: nn.Module,
        policy_version: int,
        in_flight: Literal["recompute", "keep"] = "recompute",
    ) -> dict[str, float]:
        """Replace the server's policy by this model's weights; returns once the server has them.

        Args:
            in_flight: requests that are being answered are frozen over the swap and go on under the
                new weights; their keys and values so far are computed again, or kept as they are.

        Returns:
            `sync_s` seconds and `sync_bytes` bytes of tensors sent.

        Raises:
            ServerLostError: no answer; the next push connects anew.
            InferenceServerError: the server refused or could not load them.
        """
        start = time.monotonic()
        if self._transport is None:
            self.connect(model)
        assert self._transport is not None and self._plan is not None
        transport, plan = self._transport, self._plan
        body = {
            "connection": self._connection,
            "policy_version": policy_version,
            "in_flight": in_flight,
            "timeout_s": self.timeout_s,
        }

        try:
            with announced(what_to_send(model, self.lora_sync)[0], model) as sources:
                self._together(
                    lambda: self.client.receive_weights(body, self.timeout_s),
                    lambda: send_buckets(plan, sources, transport),
                    give_up=transport.close,
                )
        except BaseException:  # Ctrl-C too: close() must not wait for what is half under way
            self.forget_server()
            raise
        self.policy_version = policy_version
        return {"sync_s": time.monotonic() - start, "sync_bytes": float(plan.num_bytes)}

    def check_server(self) -> None:
        """Return if the server still has the weights of the last push.

        Raises:
            ServerLostError: it is gone, or has started anew and lost them.
            InferenceServerError: another trainer has taken it over.
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
        """Wait for a lost server to come back; the next push connects anew.

        Raises:
            InferenceServerError: it did not within the client's timeout.
        """
        self.forget_server()
        self.client.wait_until_ready()

    def forget_server(self) -> None:
        """Let go of the transport without waiting for a push that may be half under way; its thread
        holds the last reference, up to its deadline. The next push connects anew.
        """
        if self._transport is not None:
            self._transport.abandon()
        self._transport = self.policy_version = None

    def close(self) -> None:
        """Leave the transport and give the server free; the next push connects again."""
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
        """The server's part of a collective, by HTTP, and ours, in a thread.

        When the server refuses, nobody will meet us in the collective. So its answer is waited for
        here, and our part is left behind in a daemon thread that ends at its own deadline. When our
        part fails, `give_up` frees the server's from waiting for the rest.

        Returns:
            The server's reply, and what our part returned.
        """
        result: list[Any] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                result.append(work())
            except Exception as error:
                errors.append(error)  # raised below, in the caller's thread
                give_up()

        thread = threading.Thread(target=run, name="weight-sync", daemon=True)
        thread.start()
        try:
            reply = call()
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
