"""What differs between vLLM 0.26 and 0.31, and what is changed inside vLLM.

The rest of `inference/` uses only what all these versions have.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verifiers_rl.inference.routed_experts import return_routed_experts

if TYPE_CHECKING:
    import torch


class ServerParts(NamedTuple):
    """The parts of vLLM's OpenAI server that `vf-vllm` puts together."""

    make_arg_parser: Any
    validate_parsed_serve_args: Any
    run_server: Any
    run_api_processes: Any


def server_parts() -> ServerParts:
    from vllm.entrypoints.cli.serve import run_multi_api_server

    try:
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    except ModuleNotFoundError:  # 0.26, 0.27
        from vllm.entrypoints.openai.api_server import run_server
        from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    return ServerParts(
        make_arg_parser, validate_parsed_serve_args, run_server, run_multi_api_server
    )


def online_quantizations() -> tuple[str, ...]:
    """Return the kinds of `--quantization` that this vLLM makes of plain weights. Its reload makes
    them again.
    """
    try:
        from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES
    except ImportError:  # 0.26, where fp8 itself is one
        return ("fp8",)
    return tuple(ONLINE_QUANT_SHORTHAND_NAMES)


def adapter_name_mapper(model: Any) -> Any:
    """Return what renames an adapter's tensors for this vLLM model; None if nothing does.

    It must only rename: vLLM's adapter manager stacks q, k and v itself.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    # vLLM 0.26 and 0.27 have it under the other name.
    rename = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper
    return rename()


def layers_without_adapter(manager: Any, tensor_names: list[str]) -> list[str]:
    """Return the layers of these tensors (PEFT's names) that vLLM's adapter manager would drop."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = adapter_name_mapper(manager.model)
    layers = {parse_fine_tuned_lora_name(name, mapper)[0] for name in tensor_names}
    packed = [part for parts in manager.packed_modules.values() for part in parts]
    return sorted(layers - set(manager.modules) - set(packed))


def repack_for_cpu(model: Any) -> None:
    """Pack the weights that vLLM's reload leaves unpacked. vLLM's CPU kernels use packed weights.

    The reload packs an LM head that has its own weights. It does not pack one that is tied to the
    embedding, which would keep giving the old logits. It packs experts at the first load only.

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


def lost_in_reload(model: Any, loaded: set[str]) -> list[str]:
    """Return those of the parameters that a vLLM model says it has loaded, and that its reload has
    not taken.

    During a reload, a parameter has no memory, and its `weight_loader` collects what is loaded.
    Some models copy into the parameter instead, which then has no effect.

    Args:
        model: between `initialize_layerwise_reload` and `finalize_layerwise_reload`.
        loaded: what its `load_weights` has returned.
    """
    import torch  # here, because the launcher, which needs none, reads this module
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    modules = dict(model.named_modules())
    lost = []
    for name in loaded:
        prefix, _, own = name.rpartition(".")
        if prefix not in modules:
            continue
        parameter = getattr(modules[prefix], own, None)
        if not isinstance(parameter, torch.Tensor) or parameter.device.type != "meta":
            continue  # it has memory: the layer is complete, or its parameter stayed in place
        if own not in {given for given, _ in get_layerwise_info(modules[prefix]).loaded_weights}:
            lost.append(name)
    return sorted(lost)


class GptOssReload:
    """Weights of gpt-oss in the form in which vLLM's reload takes them. Of those in the form of
    a checkpoint, the reload would lose the experts and the attention sinks.

    Args:
        model: vLLM's; if it is another one, all weights stay as they are.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_needed = type(model).__name__ == "GptOssForCausalLM"
        self._sinks: dict[str, torch.Tensor] = {}

    def prepare(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, each expert by itself, without the sinks, which are kept."""
        for name, tensor in tensors:
            prefix, experts, part = name.rpartition(".mlp.experts.")
            if not self._is_needed:
                yield name, tensor
            elif name.endswith(".sinks"):
                self._sinks[name.replace(".self_attn.", ".attn.")] = tensor.clone()
            elif experts:
                for number, one in enumerate(tensor):
                    yield f"{prefix}{experts}{number}.{part}", one
            else:
                yield name, tensor

    def finish(self) -> None:
        """Copy the sinks of this worker's heads into the model. Call it behind the reload."""
        from vllm.distributed import get_tensor_model_parallel_rank

        parameters = dict(self._model.named_parameters())
        for name, tensor in self._sinks.items():
            if name not in parameters:
                continue  # of another stage of the pipeline
            num_heads = parameters[name].numel()
            start = get_tensor_model_parallel_rank() * num_heads
            parameters[name].data.copy_(tensor[start : start + num_heads])


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


def keep_logprobs_as_numbers(state: Any, with_possible: bool = False) -> None:
    """Make vLLM keep the logprobs of a request's sampled tokens in plain lists, without the tokens'
    text. Otherwise it makes a dict and an object for each token, and decodes each once more.

    Args:
        state: what vLLM's output processor keeps about the request, before its first token.
        with_possible: also keep those of the likeliest tokens that could be sampled. The sampling
            options give probability 0 to the others.
    """
    from vllm.logprobs import FlatLogprobs

    class PossibleTokens(FlatLogprobs):
        def append_fast(
            self, token_ids: list[int], logprobs: list[float], *ranks_and_texts: Any
        ) -> None:
            self.start_indices.append(len(self.logprobs))
            # The sampled token comes first, then the likeliest ones in their order: as many as the
            # request of this step that asks for most wants.
            num = len(logprobs) if with_possible else 1
            if num > 1 and logprobs[-1] == -math.inf:
                num = logprobs.index(-math.inf, 1)
            self.token_ids += token_ids[:num]
            self.logprobs += logprobs[:num]
            self.end_indices.append(len(self.logprobs))

    state.logprobs_processor.logprobs = PossibleTokens()
    state.logprobs_processor.tokenizer = None


def possible_tokens(kept: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens could be sampled in place of each, as counts and ids of `SamplingMask`,
    from what vLLM has kept after `keep_logprobs_as_numbers`.
    """
    starts, ends = np.asarray(kept.start_indices, int), np.asarray(kept.end_indices, int)
    ids = np.asarray(kept.token_ids, np.int32)
    is_first = np.zeros(len(ids), bool)
    is_first[starts] = True
    # The sampled token is also among the likeliest, unless many more are as likely as it is.
    sampled = np.repeat(ids[starts], ends - starts)
    again = np.zeros(len(starts), int)
    np.add.at(again, np.repeat(np.arange(len(starts)), ends - starts), (ids == sampled) & ~is_first)
    is_first[starts] = again > 0
    counts = ends - starts - (again > 0)
    return counts, ids[~is_first]


def sampled_logprobs(kept: Any) -> np.ndarray:
    """Return the logprob of each sampled token, (tokens,) float32, from what vLLM has kept after
    `keep_logprobs_as_numbers`. At each position, the sampled token comes first.
    """
    return np.asarray(kept.logprobs, np.float32)[np.asarray(kept.start_indices, int)]


def sleep_instead_of_spinning() -> None:
    """Plugin of vLLM (`vllm.general_plugins` in pyproject.toml), run in each process of a server.

    vLLM's engine and worker wait for each other in a loop around `sched_yield` that takes a whole
    core. A GPU host can spare the core. On a laptop the API server and the trainer need it, and
    rollouts of a small model take three times as long (benchmarks/README.md). So on a CPU the loop
    sleeps instead, but only in processes of vf-vllm. There it also begins what routed_experts.py
    does.
    """
    if "VERIFIERS_RL_SERVER_PID" not in os.environ:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.distributed.device_communicators import shm_broadcast

        shm_broadcast.sched_yield = lambda: time.sleep(200e-6)
        return_routed_experts()


def deadly_request(fields: dict[str, Any], engine: Any) -> str | None:
    """Return why this generation request would end vLLM's engine, or None.

    On a CPU with --enable-lora, vLLM computes the LM head's LoRA for one row of each request. The
    logprobs of a prompt need one row of each token, and the engine dies in `add_lora_logits`.

    Args:
        fields: of the request's body, on any generation route.
        engine: vLLM's client of it.
    """
    sampling = fields.get("sampling_params")
    wanted = {**fields, **sampling} if isinstance(sampling, dict) else fields
    has_logprobs = wanted.get("logprobs") is not None or "messages" in wanted
    if wanted.get("prompt_logprobs") is not None:
        what = "prompt_logprobs"
    elif wanted.get("echo") and has_logprobs:
        what = "logprobs with echo"
    else:
        return None
    config = engine.vllm_config
    if config.lora_config is None or config.device_config.device_type != "cpu":
        return None
    return (
        f"{what}: vLLM on a CPU dies at a prompt's logprobs if it has --enable-lora; start vf-vllm "
        "without that flag (the trainer's lora_sync = 'merged'), or ask a server of its own "
        "(a [[teacher]])"
    )
