"""The forward pass of a microbatch: what the model says of the tokens that carry loss, and how the
model is told which tokens see each other. Each token sees those before it in its own sample, and no
others. `packing.py` lays out the rows.

A row of one sample needs no mask. For others it depends on the attention implementation:

    eager, sdpa      a mask of width^2 entries
    sdpa             in wide rows, a call for each sample: its own tokens are the queries, all of
                     its tokens are the keys. Each pair of tokens is computed once
    sdpa on a GPU    the same queries and keys as above, in one call of torch's `varlen_attn`, as
                     sequences of these lengths. A row has all samples of a microbatch (layout
                     "flat"), and the keys of a common beginning are copied for each sample
    flash attention  the same in transformers' own call

A model for which this does not work tells the samples of a row apart as transformers does: by
positions that restart at 0. Its samples have no tokens in common. Before the first step,
`try_model` finds out what works with the model.

None of these needs a change of the model: transformers passes keyword arguments of a forward on to
the function that computes attention, and this module wraps that function.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn.attention.varlen import varlen_attn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.distributed import reduce_over_ranks
from verifiers_rl.logprobs import (
    Entropy,
    chunk_size_for,
    chunked_logprobs_and_entropy,
    hidden_states_in_place_of_logits,
)
from verifiers_rl.models import decoder_blocks
from verifiers_rl.packing import Microbatch, ModelSupport, collate, copy_to
from verifiers_rl.process.terminal import show
from verifiers_rl.router_replay import replay_experts
from verifiers_rl.sync.sources import is_split
from verifiers_rl.types import ALLOWED_TOKENS, ROUTED_EXPERTS, Sample

logger = logging.getLogger(__name__)

KEYWORD = "sample_segments"  # the parameter of `attention` below that takes a function
# What a call of SDPA costs beside its work, in pairs of a query and a key, forward and backward.
# Estimates: 0.1 ms on a CPU at 1 TFLOP/s and less, 0.05 ms on a GPU at 100.
CALL_COST = {"cpu": 2**13, "cuda": 2**18}
HAS_VARLEN = ("cuda",)  # kinds of devices


def predict_targets(
    model: nn.Module,
    base: Any,
    microbatch: Microbatch,
    args: RLConfig,
    support: ModelSupport,
    entropy: Entropy = "value",
) -> tuple[Tensor, Tensor]:
    """Compute the logprob of each target, and the entropy of its prediction, (N,) each.

    Args:
        model: as it was prepared for training.
        base: the Hugging Face model inside it.
        microbatch: on the device of the model.
        args: temperature and `head_dtype`.
        support: of the model.
        entropy: see `Entropy`.
    """
    temperature, targets = args.temperature, microbatch.targets
    replay_experts(base, microbatch.extras.get(ROUTED_EXPERTS))
    attention = attention_inputs(microbatch, support)
    model_inputs = {"input_ids": microbatch.input_ids, "use_cache": False, **attention}
    vocab_size = base.config.get_text_config().vocab_size
    chunk_size = chunk_size_for(vocab_size, microbatch.input_ids.device.type)
    head_dtype = getattr(torch, args.head_dtype, None)  # "model" is none
    with hidden_states_in_place_of_logits(base, head_dtype) as to_logits:
        hidden = model(**model_inputs).logits[targets.rows, targets.offsets]  # (N, hidden)
    head = list(base.get_output_embeddings().parameters())
    min_chunks = 1
    if any(hasattr(p, "ds_id") for p in head):  # ZeRO-3: each chunk needs all ranks
        num_chunks = -(-len(targets.token_ids) // chunk_size)
        own = torch.tensor(num_chunks, device=args.device)
        min_chunks = int(reduce_over_ranks(own, ReduceOp.MAX))
    return chunked_logprobs_and_entropy(
        hidden,
        to_logits,
        targets.token_ids,
        temperature,
        chunk_size,
        entropy,
        head_is_trained=any(p.requires_grad for p in head),
        min_chunks=min_chunks,
        allowed=targets.extras.get(ALLOWED_TOKENS),
    )


# --- Which tokens see each other ------------------------------------------------------------------


def _is_cheaper_in_calls(microbatch: Microbatch, device: torch.device) -> bool:
    """Return whether a call for each sample takes less time than one with a mask."""
    num_rows, width = microbatch.input_ids.shape
    segments = microbatch.segments
    num_pairs = sum((segment.stop - segment.start) * len(segment.path) for segment in segments)
    call_cost = CALL_COST.get(device.type, CALL_COST["cuda"])
    # A mask makes each pair dearer, too: at 1,660 tokens, 2.6 x the pairs took 1.2 x the time.
    return num_rows * width**2 > 2 * (num_pairs + call_cost * len(segments))


Attention = Callable[..., tuple[Tensor, Tensor | None]]


class _BySegments:
    """Calls attention for the segments of a microbatch.

    Args:
        microbatch: on `device`.
        device: of the model.
        way: "calls" of SDPA; or "varlen" or flash attention, which take one row, as sequences.
    """

    def __init__(self, microbatch: Microbatch, device: torch.device, way: str) -> None:
        self._way = way
        # For each row, the number of queries and of keys of each segment, and the columns of all
        # keys, segment by segment.
        self._rows: list[tuple[list[int], list[int], Tensor]] = []
        for row in range(len(microbatch.input_ids)):
            segments = [segment for segment in microbatch.segments if segment.row == row]
            queries = [segment.stop - segment.start for segment in segments]
            paths = [segment.path for segment in segments]
            keys = [len(path) for path in paths]
            columns = copy_to(torch.from_numpy(np.concatenate(paths)), device)
            self._rows.append((queries, keys, columns))

        @functools.cache  # layers share it
        def mask_of(queries: int, keys: int) -> Tensor | None:
            """For calls, (1, 1, queries, keys) bool; the last query sees all keys."""
            ones = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
            return ones.tril_(keys - queries) if queries < keys else None

        def borders(lengths: list[int]) -> Tensor:
            ends = np.cumsum([0, *lengths], dtype=np.int32)
            return copy_to(torch.from_numpy(ends), device)

        self._mask_of = mask_of
        queries, keys, _ = self._rows[0]
        self._sequences = {
            "cu_seq_lens_q": borders(queries),
            "cu_seq_lens_k": borders(keys),
            "max_length_q": max(queries),
            "max_length_k": max(keys),
        }

    # Compiled for its lists of lengths, it would be compiled anew for each microbatch.
    @torch.compiler.disable
    def __call__(
        self,
        attend: Attention,
        module: nn.Module,
        *tensors: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        attend = partial(_varlen if self._way == "varlen" else attend, module, **kwargs)
        by_segments = self._in_calls if self._way == "calls" else self._in_sequences
        return by_segments(attend, *tensors), None

    def _in_calls(self, attend: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Call SDPA for each segment."""
        rows = []
        for row, (queries, keys, columns) in enumerate(self._rows):
            parts = zip(
                query[row].split(queries, 1),
                key[row].index_select(1, columns).split(keys, 1),
                value[row].index_select(1, columns).split(keys, 1),
                map(self._mask_of, queries, keys),
                strict=True,
            )
            outputs = [attend(q[None], k[None], v[None], mask)[0] for q, k, v, mask in parts]
            rows.append(torch.cat(outputs, 1))  # (1, T, heads, size of a head)
        return torch.cat(rows)

    def _in_sequences(self, attend: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Give flash attention sequences. Its causal mask lets the last query of a sequence see the
        last key.
        """
        columns = self._rows[0][2]

        def attend_to(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key, value = key.index_select(2, columns), value.index_select(2, columns)
            return attend(query, key, value, None, **self._sequences)[0]

        if len(columns) == query.shape[2]:
            return attend_to(query, key, value)
        # The keys of samples with tokens in common are many more than the row has. Backward does
        # not keep them, and computes this again.
        return checkpoint(attend_to, query, key, value, use_reentrant=False)


def _varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    scaling: float | None = None,
    **lengths: Any,
) -> tuple[Tensor, None]:
    """Torch's flash attention, with the parameters that transformers has for its own."""
    # Autocast does not know the operator, and a norm with float32 weights gives float32.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    output: Any = varlen_attn(
        q,
        k,
        v,
        lengths["cu_seq_lens_q"],
        lengths["cu_seq_lens_k"],
        lengths["max_length_q"],
        lengths["max_length_k"],
        scale=scaling,
        window_size=(-1, 0),  # causal, see `_BySegments`
        enable_gqa=True,
    )
    return output[None], None


def _in_whole_rows(
    attend: Attention, *tensors: Any, position_ids: Any = None, **kwargs: Any
) -> Any:
    """Call attention for rows that are one sequence each: without a mask, and without positions,
    because flash attention would wait for the device in each layer to see whether they restart.
    """
    return attend(*tensors, None, **kwargs)


def wrap_attention(implementation: str) -> None:
    """Let this implementation of transformers take a `KEYWORD`, which then calls it. Once per
    process; without the keyword it does as before.
    """
    attend: Any = ALL_ATTENTION_FUNCTIONS[implementation]
    if hasattr(attend, "takes_segments"):
        return

    @functools.wraps(attend)
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        sample_segments: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if sample_segments is None:
            return attend(module, query, key, value, attention_mask, **kwargs)
        return sample_segments(attend, module, query, key, value, **kwargs)

    wrapped: Any = attention
    wrapped.takes_segments = True
    AttentionInterface.register(implementation, wrapped)


def attention_inputs(microbatch: Microbatch, support: ModelSupport) -> dict[str, Any]:
    """Return what a forward needs, beside `input_ids`, to keep the samples of a microbatch apart.

    Args:
        microbatch: on the device of the model.
        support: of the model. If it shares no prefixes, transformers tells the samples of a row
            apart by positions that restart at 0.
    """
    if support.layout == "padded":
        return {}  # the padding is behind the sample, where no token of it sees it
    inputs = {"position_ids": microbatch.position_ids}
    if not support.shares_prefixes:
        return inputs
    attention, visible_until = support.attention, microbatch.visible_until  # (B, T)
    device = visible_until.device
    # Beside a mask of four dimensions transformers makes none of its own.
    any_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    if not microbatch.shares_rows:
        if attention == "eager":
            return {}
        # Else transformers would wait for the device to see that each row is one sequence.
        return {KEYWORD: _in_whole_rows, "attention_mask": any_mask}
    if attention == "sdpa":
        attention = "calls" if _is_cheaper_in_calls(microbatch, device) else "mask"
    if attention not in ("mask", "eager"):
        by_segments = _BySegments(microbatch, device, attention)
        return {**inputs, KEYWORD: by_segments, "attention_mask": any_mask}
    columns = torch.arange(visible_until.shape[1], device=device)
    query, key = columns[:, None], columns
    mask = (key <= query) & (query < visible_until[:, None, :])  # (B, T, T)
    if attention == "eager":  # which adds it to the scores
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    return {**inputs, "attention_mask": mask[:, None]}


# --- What is tried on the model before the first step ---------------------------------------------


def try_model(model: nn.Module, base: Any, args: RLConfig, optimizer: Any) -> ModelSupport:
    """Return what this model supports. Warn of what it does not.

    Args:
        model: the module to call: the causal LM, or what PEFT, DDP or DeepSpeed put around it.
        base: the causal LM itself.
        args: `share_prefixes` and `max_seq_len`; see `fit_step`.
        optimizer: None where there is none yet.

    Raises:
        ConfigError: see `check_head`.
    """
    check_head(model, base)
    config = base.config.get_text_config()
    attention = str(config._attn_implementation)
    support = ModelSupport(
        layout="flat" if "flash" in attention else "packed",
        hidden_size=getattr(config, "hidden_size", 1024),
        attention=attention,
    )
    if why_not := reason_against_rows(model, base, support):
        logger.warning(f"samples are padded, one a row: {why_not}")
        support = replace(support, layout="padded")
    elif args.share_prefixes:
        if why_not := reason_against_sharing_prefixes(model, base, args.max_seq_len):
            logger.warning(f"what samples begin with is computed for each: {why_not}")
        else:
            support = replace(support, shares_prefixes=True)
    if support.shares_prefixes and attention == "sdpa" and base.device.type in HAS_VARLEN:
        # It takes half precision, and heads of some sizes, on GPUs from compute capability 8.0 on.
        flat = replace(support, layout="flat", attention="varlen")
        if why_not := reason_against_rows(model, base, flat):
            logger.warning(f"attention has a call for each sample: {why_not}")
        else:
            support = flat
    return replace(support, token_budget=fit_step(model, base, args, optimizer))


def _difference(given: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the difference, relative to that of `expected`."""
    return ((given - expected).float().norm() / expected.float().norm().clamp(min=1e-12)).item()


def _probe(model: nn.Module) -> tuple[Tensor, float]:
    """Return token ids (1, 16), and the relative error that rounding explains in this dtype."""
    weight = next(model.parameters())
    vocabulary = model.config.get_text_config().vocab_size  # type: ignore[operator, union-attr]
    ids = (torch.arange(16, device=weight.device) * 7919 + 11) % vocabulary
    is_exact = weight.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(
        weight.device.type
    )
    return ids[None], 1e-3 if is_exact else 5e-2


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, nothing of the model is random, and no gradient is kept."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def check_head(model: nn.Module, base: nn.Module) -> None:
    """Raise ConfigError if the model's logits are not those of its head on its last hidden states,
    so that they cannot be taken from these chunk by chunk. The test uses 16 tokens.

    Args:
        model, base: see `try_model`.
    """
    if getattr(base, "get_output_embeddings", lambda: None)() is None:
        raise ConfigError(f"model: {type(base).__name__} has no output embeddings; take another")
    ids, tolerance = _probe(base)
    with evaluating(model):
        expected = model(input_ids=ids, use_cache=False).logits[0]
        with hidden_states_in_place_of_logits(base) as to_logits:
            given = to_logits(model(input_ids=ids, use_cache=False).logits[0])
    # Weights that are NaN say nothing of the head; the comparison with the server finds them.
    is_nan = bool(expected.isnan().any())
    is_alike = given.shape == expected.shape and _difference(given, expected) < tolerance
    if not (is_alike or is_nan):
        raise ConfigError(
            f"model: the logits of {type(base).__name__} are not those of its head on its last "
            "hidden states, and only such models can be trained here; take another, or add what "
            "it does behind its head to logprobs.hidden_states_in_place_of_logits"
        )


def reason_against_rows(model: nn.Module, base: Any, support: ModelSupport) -> str | None:
    """Return why samples in one row would be computed otherwise than alone in this model; None if
    they would not.

    The test uses three samples of 12, 12 and 10 tokens. With prefixes that are shared they take 16
    in one row: the second branches from the first, the third from both. The tokens that a sample
    has for itself must get the same logits as alone.

    Args:
        model, base: see `try_model`.
        support: of the model, if it computes them alike.
    """
    ids, tolerance = _probe(base)
    tokens = ids[0].cpu().numpy()
    sequences = [tokens[:12], tokens[[*range(10), 12, 13]], tokens[[*range(8), 14, 15]]]
    zeros = np.zeros(16)
    samples = [Sample(s, *[zeros[: len(s)]] * 3) for s in sequences]
    num_shared = [0, 10, 8] if support.shares_prefixes else None
    row = copy_to(collate(samples, [[0, 1, 2]], [1.0] * 3, 0, num_shared), ids.device)

    def logits_of(microbatch: Microbatch, **inputs: Any) -> Tensor:
        return model(input_ids=microbatch.input_ids, use_cache=False, **inputs).logits[0]

    with evaluating(model):
        try:
            logits = logits_of(row, **attention_inputs(row, support))
        except (TypeError, ValueError, RuntimeError) as error:
            return f"it takes no such rows: {error}"
        for segment, sample in zip(row.segments, samples, strict=True):
            alone = copy_to(collate([sample], [[0]], [1.0], 0), ids.device)
            own = slice(segment.start - segment.stop, None)
            expected = logits_of(alone)[own]
            whole = logits_of(alone, **attention_inputs(alone, support))[own]
            given = logits[segment.start : segment.stop]
            if not max(_difference(given, expected), _difference(whole, expected)) < tolerance:
                return f"a sample sees others (attention {support.attention!r})"
    return None


def reason_against_sharing_prefixes(model: nn.Module, base: Any, max_seq_len: int) -> str | None:
    """Return why samples with tokens in common cannot have these once in this model; None if they
    can.

    Args:
        model, base: see `try_model`.
        max_seq_len: of the samples to come.
    """
    config = base.config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size"):
        if (window := getattr(config, name, None)) is not None and window < max_seq_len:
            return f"its {name} of {window} tokens is shorter than max_seq_len={max_seq_len}"
    attention = str(config._attn_implementation)
    if attention not in ("eager", "sdpa") and "flash" not in attention:
        return f"masks for attention {attention!r} are not known here"
    if attention in ALL_ATTENTION_FUNCTIONS:
        wrap_attention(attention)
    reasons = (
        reason_against_rows(model, base, ModelSupport(shares_prefixes=True, attention=way))
        for way in (("mask", "calls") if attention == "sdpa" else (attention,))
    )
    return next(filter(None, reasons), None)


# --- What fits into the memory of a GPU -----------------------------------------------------------

# Tokens of a forward pass below which a GPU waits for its host. Before a pass gets smaller, layers
# are computed again in backward.
FEW_TOKENS = 4096
# Tokens above which a pass of a small model gains little. Of 0.6B, 8,192 tokens took an H100 0.3 s,
# ten times as long as it multiplies: the rest is for one kernel after the other.
MANY_TOKENS = 2**15
USED_SHARE = 0.9  # of the free memory; the rest is for fragments, and for keys of a layer
STATE_BYTES = 14  # for each trained number: gradient, Adam's two moments, a copy in bfloat16
HEAD_BYTES = 14 * 2**28  # a chunk's logits, and in float32 three times


def free_bytes(device: torch.device) -> int | None:
    """Return what this process may still allocate on its GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def saved_bytes(base: Any, num_tokens: int) -> int:
    """Return how many bytes a forward of the Hugging Face model on so many tokens keeps for
    backward, with weights and without the head.
    """
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    vocab_size = base.config.get_text_config().vocab_size
    with (
        evaluating(base),  # layers that have checkpoints in training keep all
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        hidden_states_in_place_of_logits(base),
    ):
        ids = torch.arange(num_tokens, device=base.device)[None] % vocab_size
        output = base(input_ids=ids, use_cache=False)
    del output  # until here the graph kept all storages, so that no address came twice
    return sum(kept.values())


def fit_step(model: nn.Module, base: Any, args: RLConfig, optimizer: Any) -> int | None:
    """Return the tokens of one forward pass on a rank. Let layers be computed again in backward.
    None, and no such layers, on a CPU, for a model of FSDP2 or DeepSpeed, and for one whose layers
    are not known.

    On a GPU, what the options leave open follows from its free memory and from what a forward keeps
    of each token, which is measured: no checkpoints, and `MANY_TOKENS`, or those of 8 samples if
    these are more, or as many as fit, if these are `FEW_TOKENS` and a whole sample; else
    checkpoints of as few layers as possible; else fewer tokens. The first layers get the
    checkpoints: when backward comes to them, the memory of the others is free again. Rank 0 says in
    one line what was chosen.

    Args:
        model, base, optimizer: see `try_model`.
        args: `token_budget` and `gradient_checkpointing`.
    """
    budget, free = args.token_budget, free_bytes(args.device)
    blocks = decoder_blocks(base)
    if free is None or hasattr(model, "zero_optimization") or is_split(base) or not blocks:
        return None
    # In a resumed run the optimizer has its memory already, which `STATE_BYTES` counts.
    held = tree_leaves(getattr(optimizer, "state", ()))
    free += sum(part.nbytes for part in held if torch.is_tensor(part))
    # Where only the head is trained, or what PEFT has around the model, a forward keeps nothing.
    of_token = max((saved_bytes(base, 128) - saved_bytes(base, 64)) / 64, 1.0)
    num_trained = sum(p.numel() for p in base.parameters() if p.requires_grad)
    fixed = HEAD_BYTES + STATE_BYTES * num_trained
    free = int(reduce_over_ranks(torch.tensor(free, device=args.device), ReduceOp.MIN))
    room = USED_SHARE * free - fixed
    # Of compiled layers, backward keeps what the compiler chose.
    is_open = args.gradient_checkpointing is None and not args.torch_compile
    some = range(len(blocks) + 1) if is_open else [len(blocks) * bool(args.gradient_checkpointing)]
    # Bytes of a token by number of checkpoints. A checkpoint keeps a layer's input, a thirtieth of
    # the layer, and the layer that backward is in takes two.
    costs = {num: of_token * (1 + (2 - 0.95 * num) / len(blocks)) for num in some}
    is_given = args.max_tokens_per_microbatch or args.micro_batch_size
    budget = budget if is_given else max(budget, MANY_TOKENS)
    least = budget if is_given else min(budget, max(FEW_TOKENS, args.max_seq_len))
    num = next((num for num, cost in costs.items() if room >= cost * least), max(costs))
    if not is_given:
        budget = max(min(budget, int(room / costs[num])), args.max_seq_len)
    for block in blocks[: num * is_open]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    needed = budget * costs[num]
    if args.process_index == 0:
        show(
            print,
            f"step: at most {budget:,} tokens in a forward pass, {num} of {len(blocks)} layers "
            f"computed again in backward: {(fixed + needed) / 1e9:.1f} GB of {free / 1e9:.1f} GB"
            + (", which may not suffice: lower max_seq_len" if needed > room else ""),
        )
    return budget
