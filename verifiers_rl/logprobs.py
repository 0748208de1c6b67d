"""Log-probabilities and entropy of given tokens, from hidden states and the LM head.
Pure functions.

The full logits (tokens x vocabulary) are the largest tensor of a training step: 8 sequences of 2048
tokens over Qwen3's 151,936 entries take 10 GB in float32, several times that with gradients. Here
they exist for one chunk of tokens at a time and are computed again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def token_logprobs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution,
    softmax(logits / temperature).

    Args:
        logits: (N, vocabulary), any float dtype; computed in float32.
        targets: (N,) int64.
        temperature: the sampling temperature, > 0.

    Returns:
        logprobs (N,) float32 in nats, with gradient; entropy (N,) float32 in nats, detached.
    """
    log_softmax = torch.log_softmax(logits.float() / temperature, dim=-1)
    logprobs = log_softmax.gather(-1, targets[:, None])[:, 0]
    with torch.no_grad():
        # 0 * -inf is NaN where the model rules a token out;
        # such a token adds nothing to the entropy.
        finite = log_softmax.clamp(min=torch.finfo(torch.float32).min)
        entropy = -(log_softmax.exp() * finite).sum(-1)
    return logprobs, entropy


def chunked_logprobs_and_entropy(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: float,
    chunk_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """The same from hidden states, `chunk_size` tokens at a time, logits recomputed in backward.

    Args:
        hidden: (N, hidden_size).
        head: the LM head, (n, hidden_size) -> (n, vocabulary).
        targets: (N,) int64.
        temperature: the sampling temperature, > 0.
        chunk_size: tokens projected at once; the result does not depend on it.

    Returns:
        logprobs (N,) and entropy (N,), as `token_logprobs_and_entropy`.
    """

    def one_chunk(hidden_chunk: Tensor, target_chunk: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs_and_entropy(head(hidden_chunk), target_chunk, temperature)

    chunks = [
        checkpoint(one_chunk, h, t, use_reentrant=False)
        for h, t in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
    ]
    return torch.cat([c[0] for c in chunks]), torch.cat([c[1] for c in chunks])


# Config fields of architectures that change the logits after the head
# (Gemma's soft cap, Granite's and Cohere's scale).
_LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


def reason_against_chunking(model: nn.Module) -> str | None:
    """Why this model's logits cannot be taken chunk by chunk from its head; None when they can."""
    config = model.config
    for name in _LOGIT_CHANGES:
        if getattr(config, name, None) not in (None, 1, 1.0):
            return f"its config sets {name}, applied after the LM head"
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        return "it has no output embeddings"
    return None


@contextmanager
def hidden_states_in_place_of_logits(head: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
    """While open, `head` passes hidden states through,
    so that a causal LM returns them as its `logits`.

    Yields:
        The head's real forward.
    """
    real_forward = head.forward
    head.forward = lambda hidden: hidden
    try:
        yield real_forward
    finally:
        del head.forward  # the class's own forward shows again
