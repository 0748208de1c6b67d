"""What is tried on the model before the first step: which rows and which logits it supports."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verifiers_rl.attention import (
    inputs_of_shared_rows,
    inputs_of_whole_rows,
    wrap_attention,
)
from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.logprobs import hidden_states_in_place_of_logits
from verifiers_rl.packing import ModelSupport, collate, copy_to
from verifiers_rl.types import Sample

logger = logging.getLogger(__name__)


def try_model(model: nn.Module, base: Any, args: RLConfig) -> ModelSupport:
    """Return what this model supports. Warn of what it does not.

    Args:
        model: the module to call: the causal LM, or what PEFT, DDP or DeepSpeed put around it.
        base: the causal LM itself.
        args: `share_prefixes`, `max_seq_len` and `head_dtype`.

    Raises:
        ConfigError: `share_prefixes` is True or `head_dtype` is set, and this model cannot.
    """
    if why_full_logits := reason_against_chunking(model, base):
        if args.head_dtype != "model":
            raise ConfigError(
                f"head_dtype={args.head_dtype!r}: this model's head cannot be called alone: "
                f"{why_full_logits}; leave head_dtype out"
            )
        logger.warning("full logits are held in memory: %s", why_full_logits)
    if why_padded := reason_against_sharing_rows(model, base):
        logger.warning("samples are padded, one a row: %s", why_padded)
    why_unshared: str | None = "share_prefixes=False"
    if args.share_prefixes:
        why_unshared = why_padded or reason_against_sharing_prefixes(model, base, args.max_seq_len)
        if why_unshared and args.share_prefixes is True:
            raise ConfigError(f"share_prefixes=True: {why_unshared}; set it to 'auto'")
        if why_unshared:
            logger.warning("what samples begin with is computed for each: %s", why_unshared)
    is_flash = "flash" in str(getattr(base.config, "_attn_implementation", ""))
    return ModelSupport(
        layout="padded" if why_padded else "flat" if is_flash else "packed",
        shares_prefixes=why_unshared is None,
        needs_full_logits=why_full_logits is not None,
        hidden_size=getattr(base.config.get_text_config(), "hidden_size", 1024),
        attention=str(base.config.get_text_config()._attn_implementation),
    )


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
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, nothing of the model is random, and no gradient is kept."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def reason_against_chunking(model: nn.Module, base: nn.Module | None = None) -> str | None:
    """Return why the model's logits cannot be taken chunk by chunk from its head; None if they can.

    The test uses 16 tokens: both ways must give the same logits.

    Args:
        model: the module to call: the causal LM, or what PEFT, DDP or DeepSpeed put around it.
        base: the causal LM itself, if `model` is not.
    """
    base = base or model
    if getattr(base, "get_output_embeddings", lambda: None)() is None:
        return "it has no output embeddings"
    ids, tolerance = _probe(base)
    with _evaluating(model):
        expected = model(input_ids=ids, use_cache=False).logits[0]
        with hidden_states_in_place_of_logits(base) as to_logits:
            given = to_logits(model(input_ids=ids, use_cache=False).logits[0])
    if given.shape != expected.shape or not _difference(given, expected) < tolerance:
        return "its logits are not those of its head on its last hidden states"
    return None


def reason_against_sharing_rows(model: nn.Module, base: nn.Module | None = None) -> str | None:
    """Return why samples in one row would see each other in this model; None if they do not.

    The test uses a row of two sequences of 8 tokens. The second must get the same logits as alone.
    The arguments are those of `reason_against_chunking`.
    """
    base = base or model
    if "position_ids" not in inspect.signature(base.forward).parameters:
        return "it takes no position_ids"
    ids, tolerance = _probe(base)
    positions = torch.arange(8, device=ids.device).repeat(1, 2)
    with _evaluating(model):
        together = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, 8:]
        alone = model(input_ids=ids[:, 8:], use_cache=False).logits[0]
    if not _difference(together, alone) < tolerance:
        implementation = getattr(base.config, "_attn_implementation", None)
        return f"a sequence sees the one before it (attention {implementation!r})"
    return None


def reason_against_sharing_prefixes(model: nn.Module, base: Any, max_seq_len: int) -> str | None:
    """Return why samples with tokens in common would be computed otherwise than alone in this
    model; None if they would not.

    The test uses three samples of 12, 12 and 10 tokens, which take 16 in one row; the second
    branches from the first, the third from both. Their last two tokens must get the same logits as
    alone.

    Args:
        model: the module to call: the causal LM, or what PEFT, DDP or DeepSpeed put around it.
        base: the causal LM itself.
        max_seq_len: of the samples to come.
    """
    config = base.config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size"):
        if (window := getattr(config, name, None)) is not None and window < max_seq_len:
            return f"its {name} of {window} tokens is shorter than max_seq_len={max_seq_len}"
    implementation = str(getattr(base.config, "_attn_implementation", ""))
    known = implementation in ("eager", "sdpa", "flex_attention")
    if not (known or "flash" in implementation):
        return f"masks for attention {implementation!r} are not known here"
    if implementation in ALL_ATTENTION_FUNCTIONS and implementation != "flex_attention":
        wrap_attention(implementation)
    ids, tolerance = _probe(base)
    tokens = ids[0].cpu().numpy()
    sequences = [tokens[:12], tokens[[*range(10), 12, 13]], tokens[[*range(8), 14, 15]]]
    zeros = np.zeros(16)
    samples = [Sample(s, *[zeros[: len(s)]] * 3) for s in sequences]
    shared = copy_to(collate(samples, [[0, 1, 2]], [1.0] * 3, 0, [0, 10, 8]), ids.device)
    inputs_of_row = inputs_of_whole_rows(implementation, ids.device)

    def logits_of(input_ids: Tensor, **inputs: Any) -> Tensor:
        return model(input_ids=input_ids, use_cache=False, **inputs).logits[0]

    with _evaluating(model):
        for in_calls in (False, True) if implementation == "sdpa" else (None,):
            inputs = inputs_of_shared_rows(shared, implementation, in_calls)
            try:
                logits = logits_of(shared.input_ids, **inputs)
            except (TypeError, ValueError, NotImplementedError) as error:
                return f"it takes no such rows: {error}"
            for segment, sequence in zip(shared.segments, sequences, strict=True):
                alone = torch.from_numpy(sequence).to(ids.device)[None]
                expected = logits_of(alone)[-2:]
                whole = logits_of(alone, **inputs_of_row)[-2:]
                given = logits[segment.stop - 2 : segment.stop]
                if not max(_difference(given, expected), _difference(whole, expected)) < tolerance:
                    return f"a sample sees others (attention {implementation!r})"
    return None
