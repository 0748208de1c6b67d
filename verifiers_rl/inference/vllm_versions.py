"""What differs between vLLM 0.26 and 0.31, and what is changed inside it.

The rest of `inference/` uses what all of them have.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, NamedTuple


class ServerParts(NamedTuple):
    """The parts of vLLM's OpenAI server that `vf-vllm` puts together."""

    make_arg_parser: Any
    validate_parsed_serve_args: Any
    run_server: Any


def server_parts() -> ServerParts:
    try:
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    except ModuleNotFoundError:  # 0.26, 0.27
        from vllm.entrypoints.openai.api_server import run_server
        from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    return ServerParts(make_arg_parser, validate_parsed_serve_args, run_server)


def adapter_name_mapper(model: Any) -> Any:
    """Of a vLLM model, what renames an adapter's tensors; None if nothing does.

    Renames only: vLLM stacks q, k and v inside its adapter manager.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    # 0.26 and 0.27 know it by the other name.
    rename = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper
    return rename()


def layers_without_adapter(manager: Any, tensor_names: list[str]) -> list[str]:
    """Layers of an adapter's tensors (PEFT's names) that this vLLM adapter manager would drop."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = adapter_name_mapper(manager.model)
    layers = {parse_fine_tuned_lora_name(name, mapper)[0] for name in tensor_names}
    packed = [part for parts in manager.packed_modules.values() for part in parts]
    return sorted(layers - set(manager.modules) - set(packed))


def repack_for_cpu(model: Any) -> None:
    """What vLLM's reload leaves out of a model's weights on a CPU, whose kernels take them packed.

    An LM head of its own is packed anew, but not one tied to the embedding, which would go on with
    the old logits. Experts are packed when they are loaded first only.

    Raises:
        RuntimeError: this vLLM packs experts in another way.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    has_packed = False
    for name, module in model.named_modules(remove_duplicate=False):
        quant_method = getattr(module, "quant_method", None)
        is_head = name.rpartition(".")[2] == "lm_head"
        if is_head and isinstance(quant_method, UnquantizedEmbeddingMethod):
            quant_method.process_weights_after_loading(module)
        if (kernel := getattr(quant_method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(module)
            has_packed = True
    if not has_packed and any("w13_weight" in name for name, _ in model.named_parameters()):
        raise RuntimeError(
            "on a CPU this vLLM cannot take new weights of a mixture of experts; install 0.29 or "
            "later"
        )


async def call_engines(engine: Any, timeout_s: float, method: str, *args: Any) -> list[Any]:
    """Call a method of each engine core behind this `AsyncLLM`; their results.

    There are several with data parallelism. vLLM's own calls return what the first one answered.

    Raises:
        RuntimeError: an engine died; vLLM leaves those who wait for its answer waiting.
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


def sleep_instead_of_spinning() -> None:
    """Plugin of vLLM (`vllm.general_plugins` in pyproject.toml), run in each process of a server.

    vLLM's engine and worker wait for each other in a loop around `sched_yield` that takes all of a
    core. On a GPU host nobody misses it; on a laptop the API server and the trainer do, and
    rollouts of a small model take three times as long (benchmarks/README.md). So on a CPU they
    sleep instead, in a vf-vllm only.
    """
    if "VERIFIERS_RL_SERVER_PID" not in os.environ:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.distributed.device_communicators import shm_broadcast

        shm_broadcast.sched_yield = lambda: time.sleep(200e-6)
