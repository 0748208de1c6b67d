"""The forward pass of a microbatch: what the model says of the tokens that carry loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from verifiers_rl.attention import attention_inputs
from verifiers_rl.config import RLConfig
from verifiers_rl.distributed import reduce_over_ranks
from verifiers_rl.logprobs import (
    Entropy,
    chunk_size_for,
    chunked_logprobs_and_entropy,
    hidden_states_in_place_of_logits,
    token_logprobs_and_entropy,
)
from verifiers_rl.packing import Microbatch, ModelSupport
from verifiers_rl.router_replay import replay_experts
from verifiers_rl.types import ALLOWED_TOKENS, ROUTED_EXPERTS


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
    attention = attention_inputs(microbatch, base.config, support)
    model_inputs = {"input_ids": microbatch.input_ids, "use_cache": False, **attention}
    vocab_size = base.config.get_text_config().vocab_size
    chunk_size = chunk_size_for(vocab_size)
    if support.needs_full_logits:
        logits = model(**model_inputs).logits  # (B, T, vocabulary)
        return token_logprobs_and_entropy(
            logits[targets.rows, targets.columns],
            targets.token_ids,
            temperature,
            entropy,
            overwrite=True,
            allowed=targets.extras.get(ALLOWED_TOKENS),
        )
    head_dtype = getattr(torch, args.head_dtype, None)  # "model" is none
    with hidden_states_in_place_of_logits(base, head_dtype) as to_logits:
        hidden = model(**model_inputs).logits[targets.rows, targets.columns]  # (N, hidden)
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
