"""What a step takes on a GPU: peak memory, kernels, bytes. Counted without one, on tensors that
have shapes and no data.

    python benchmarks/step_memory.py [--only 4B] [--samples 512]

LoRA 16 on all linear layers of Qwen3's 0.6B, 4B and 8B, weights in bfloat16, on samples of prompts
that 16 replies share. Prompts are lognormal around 256 tokens, replies around 512. First comes, for
a GPU of 24 and one of 80 GB, and for the 0.6 of these that a server leaves to the trainer, what the
defaults choose there and the peak of the first microbatch, the largest, with all layers. Then come
kernels, bytes and operations of all microbatches, with the tokens of a pass that 80 GB allow, and
the seconds that an H100 needs at least: for each kernel its bytes at 3 TB/s, or its operations at
790 TFLOP/s. These are counted for 4B, or the model of --only, with one layer and with two: each
further layer adds as much as the second.

    before  8 samples of 2048 tokens a pass, no checkpoints; a call of attention for each sample,
            or a mask; PEFT's casts; the head in chunks of 2^26 logits, in torch's own kernels
    after   what `fit_step` chooses; one call of varlen attention a layer; no such casts; the head
            in chunks of 2^28 logits, compiled

A kernel is an operator that makes more than a view. What autograd keeps, and what is alive at a
time, is the real thing: the model of transformers, PEFT, and this package's own plan and forward.
The loss and the optimizer's step are not counted: they touch a number for each token, and 28 bytes
for each trained weight.
"""

import argparse
import math
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent.parent))
from verifiers_rl import RLConfig, forward, logprobs

# isort: split
from peft.helpers import disable_input_dtype_casting
from transformers import AutoModelForCausalLM, Qwen3Config, masking_utils

from verifiers_rl.models import decoder_blocks, load_policy
from verifiers_rl.packing import Layout, ModelSupport, collate, plan_batch
from verifiers_rl.types import Sample, SampleSizes

SHAPES = {  # layers, width, width of the MLP, heads; whether embedding and head are one
    "0.6B": (28, 1024, 3072, 16, True),
    "4B": (36, 2560, 9728, 32, True),
    "8B": (36, 4096, 12288, 32, False),
}
VOCABULARY, LONGEST, BYTES_PER_S, FLOPS_PER_S = 151_936, 2048, 3e12, 790e12
GPUS = (0.6 * 24, 24, 0.6 * 80, 80)  # GB
CONTEXT = 1e9  # bytes of CUDA itself
FREE = ("empty", "empty_like", "empty_strided", "detach", "new_empty", "lift_fresh")


class Counter(TorchDispatchMode):
    """Counts kernels, the bytes that they read and write, their operations, and the most bytes
    alive at a time.

    Attributes:
        pairs: of a query and a key that it sees, in varlen attention.
        work: kernels, bytes, operations, and the seconds of a kernel's longer one, summed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work, self.pairs, self.live, self.peak = np.zeros(4), 0.0, 0, 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = tensors((args, kwargs)), tensors(result)
        storages = {tensor.untyped_storage()._cdata for tensor in given}
        for tensor in made:
            if tensor.untyped_storage()._cdata not in storages:  # else a view, such as of a weight
                self._track(tensor.untyped_storage())
        is_view = all(tensor.untyped_storage()._cdata in storages for tensor in made)
        name = func.overloadpacket._qualified_op_name.partition("::")[2]
        if name in FREE or (is_view and not func._schema.is_mutable):
            return result
        flops = 0.0
        if name in ("mm", "addmm", "bmm"):
            a, b = given[-2:]
            flops = 2 * a.numel() * b.shape[-1]
        elif "varlen_attn" in name:  # forward has two products, backward five
            _, heads, size = given[0].shape
            flops = (10 if "backward" in name else 4) * heads * size * self.pairs
        self.add([*given, *made], flops)
        return result

    def add(self, touched: list[Tensor], flops: float = 0.0) -> None:
        moved = sum(
            min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in touched
        )
        self.work += 1, moved, flops, max(moved / BYTES_PER_S, flops / FLOPS_PER_S)

    def _track(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self.live += size
            self.peak = max(self.peak, self.live)
            self._alive[key] = weakref.ref(storage, lambda _: self._forget(key, size))

    def _forget(self, key: int, size: int) -> None:
        del self._alive[key]
        self.live -= size


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Attention(torch.autograd.Function):
    """Stands for a fused kernel of SDPA: keeps queries, keys, values, bias and output. With a bias
    it computes all pairs, without one half of them.
    """

    counter: Counter

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        output, sums = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float)
        bias = [] if mask is None else [mask.to(query.dtype)]
        ctx.flops = 4 * query.numel() * key.shape[-2] / (1 if bias else 2)
        Attention.counter.add([query, key, value, *bias, output, sums], ctx.flops)
        ctx.save_for_backward(query, key, value, output, sums, *bias)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = ctx.saved_tensors  # a checkpoint gives them once
        made = [torch.empty_like(tensor) for tensor in saved[:3]]
        Attention.counter.add([*grads, *saved, *made], 2.5 * ctx.flops)
        return *made, None


def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **_: Any) -> Tensor:
    return Attention.apply(*(x.bfloat16() for x in (query, key, value)), attn_mask)


class Head(torch.autograd.Function):
    """Stands for the compiled head: forward reads the logits twice, backward reads them and writes
    their gradient.
    """

    counter: Counter

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        made = [logits.new_empty(len(logits), dtype=torch.float) for _ in range(2)]
        Head.counter.add([logits, logits, *made])
        ctx.save_for_backward(logits)
        ctx.mark_non_differentiable(made[1])
        return made[0], made[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        made = torch.empty_like(logits)
        Head.counter.add([logits, made])
        return made


def make_policy(shape: str, args: RLConfig, num_layers: int | None = None) -> Any:
    layers, width, of_mlp, heads, is_tied = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=of_mlp, head_dim=128,
        num_hidden_layers=num_layers or layers, num_attention_heads=heads, num_key_value_heads=8,
        tie_word_embeddings=is_tied, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        policy = load_policy(model, args)
    # PEFT cannot move the tensors of a fake mode, and autocast does not know those on "meta".
    made: dict[int, Tensor] = {}
    kept = []  # so that no id comes twice
    for module in policy.modules():
        for tensors_of in (module._parameters, module._buffers):
            for name, tensor in tensors_of.items():
                if tensor is not None and id(tensor) not in made:
                    data = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_weight = isinstance(tensor, torch.nn.Parameter)
                    needs_grad = tensor.requires_grad
                    made[id(tensor)] = torch.nn.Parameter(data, needs_grad) if is_weight else data
                    kept.append(tensor)
                if tensor is not None:
                    tensors_of[name] = made[id(tensor)]
    return policy


def make_samples(number: int) -> list[Sample]:
    rng, samples = random.Random(0), []
    for group in range(number // 16):
        prompt = min(int(rng.lognormvariate(math.log(256), 0.5)) + 1, 1024)
        for member in range(16):
            reply = min(int(rng.lognormvariate(math.log(512), 0.5)) + 1, LONGEST - prompt)
            ids = np.concatenate([np.full(prompt, group), np.full(reply, 1000 + member)])
            mask = np.arange(len(ids)) >= prompt
            sample = Sample(ids, mask, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32))
            sample.set_advantage(1.0)
            samples.append(sample)
    return samples


@contextmanager
def as_on_a_gpu(is_after: bool, counter: Counter) -> Iterator[None]:
    """Let this package compute as it does on a GPU, or as it did."""
    Attention.counter = Head.counter = counter
    elements = 2**28 if is_after else 2**26
    changes: list[tuple[Any, str, Any]] = [
        (torch.nn.functional, "scaled_dot_product_attention", attention),
        (forward, "CALL_COST", {"cuda": 2**18}),
        (forward, "reduce_over_ranks", lambda number, *_: number),
        (masking_utils, "find_packed_sequence_indices", lambda _: None),  # looks at values
        (forward, "chunk_size_for", lambda vocab_size, _: elements // vocab_size),
        (logprobs, "COMPILED_ON", ("cpu",) if is_after else ()),
        (logprobs, "compiled", lambda: lambda logits, *_: Head.apply(logits)),
    ]
    with ExitStack() as stack:
        for module, attribute, value in changes:
            stack.enter_context(patch.object(module, attribute, value))
        yield


def count(
    policy: Any,
    args: RLConfig,
    samples: list[Sample],
    max_tokens: int,
    is_after: bool,
    num: int | None = None,
) -> tuple[Counter, int]:
    """Count forward and backward of the first `num` microbatches, or of all. Return also how many
    there are.
    """
    base, sizes = policy.get_base_model(), SampleSizes.of(samples)
    casts: Callable[..., Any] = disable_input_dtype_casting if is_after else nullcontext
    layout: Layout = "flat" if is_after else "packed"
    attention = "varlen" if is_after else "sdpa"
    support = ModelSupport(layout, True, base.config.hidden_size, attention)
    of_ranks, num_shared = plan_batch(sizes, np.ones(len(samples), bool), max_tokens, 1, support)
    policy.train()
    policy.zero_grad()
    counter = Counter()
    for rows in of_ranks[0][:num]:
        with unset_fake_temporarily():  # lengths are data
            microbatch = collate(samples, rows, [1.0] * len(samples), 0, num_shared)
        lengths = [(part.stop - part.start, len(part.path)) for part in microbatch.segments]
        counter.pairs = sum(own * (whole - own / 2) for own, whole in lengths)
        with as_on_a_gpu(is_after, counter), counter, casts(policy):
            with torch.autocast("cpu", torch.bfloat16):
                given, _ = forward.predict_targets(policy, base, microbatch, args, support, "value")
                loss = given.sum()
            loss.backward()
    return counter, len(of_ranks[0])


def work_of_batch(
    shape: str, args: RLConfig, samples: list[Sample], max_tokens: int, is_after: bool
) -> tuple[int, np.ndarray]:
    """Return the number of microbatches, and `Counter.work` of all of them."""
    works = []
    for num_layers in (1, 2):
        policy = make_policy(shape, args, num_layers)
        found, num = count(policy, args, samples, max_tokens, is_after)
        works.append(found.work)
    return num, works[0] + (SHAPES[shape][0] - 1) * (works[1] - works[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SHAPES)
    parser.add_argument("--samples", type=int, default=512)
    options = parser.parse_args()
    samples = make_samples(options.samples)
    args = RLConfig(use_cpu=True, bf16=True, max_seq_len=LONGEST)
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    print(f"{len(samples)} samples, {num_tokens:,} tokens, shared ones counted in each")
    forward.wrap_attention("sdpa")
    peaks, works = [], []
    for name in [options.only] if options.only else SHAPES:
        with FakeTensorMode(allow_non_fake_inputs=True):
            policy = make_policy(name, args)
            weights = sum(p.numel() * p.element_size() for p in policy.parameters())
            of_adamw = 8 * sum(p.numel() for p in policy.parameters() if p.requires_grad)
            found, _ = count(policy, args, samples, args.token_budget, False, 1)
            held = weights + of_adamw
            peaks.append((name, "before", "any", args.token_budget, 0, held, found.peak))
            for gpu in (size for size in GPUS if size * 1e9 > held + CONTEXT):
                policy = make_policy(name, args)
                blocks = decoder_blocks(policy.get_base_model())
                free = int(gpu * 1e9 - weights - CONTEXT)
                with (
                    patch.object(forward, "free_bytes", lambda _, free=free: free),
                    as_on_a_gpu(True, Counter()),
                    disable_input_dtype_casting(policy),
                    torch.autocast("cpu", torch.bfloat16),
                ):
                    tokens = forward.fit_step(policy, policy.get_base_model(), args, None)
                num_layers = sum("forward" in vars(block) for block in blocks)
                found, _ = count(policy, args, samples, tokens, True, 1)
                peaks.append((name, "after", f"{gpu:g}", tokens, num_layers, held, found.peak))
            if name == (options.only or "4B"):
                for when, most in (("before", args.token_budget), ("after", tokens)):
                    work = work_of_batch(name, args, samples, most, when == "after")
                    works.append((name, when, *work))
    print(
        "\n| model | | GB of the GPU | tokens a pass | layers again | weights and AdamW GB "
        "| peak GB | fits |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, when, gpu, tokens, num_layers, held, peak in peaks:
        whole = (held + peak + CONTEXT) / 1e9
        fits = ", ".join(f"{size:g}" for size in GPUS if whole <= size) or "none"
        print(
            f"| {name} | {when} | {gpu} | {tokens:,} | {num_layers} | {held / 1e9:.1f} "
            f"| {whole:.1f} | {fits} |"
        )
    print(
        "\n| model | | passes | kernels | TB read and written | s at 3 TB/s | PFLOP "
        "| s at 790 TFLOP/s | s, each kernel's longer |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, when, num, (kernels, moved, flops, seconds) in works:
        print(
            f"| {name} | {when} | {num} | {kernels:,.0f} | {moved / 1e12:.2f} "
            f"| {moved / BYTES_PER_S:.2f} | {flops / 1e15:.2f} | {flops / FLOPS_PER_S:.2f} "
            f"| {seconds:.2f} |"
        )


if __name__ == "__main__":
    main()
