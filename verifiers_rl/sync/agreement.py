"""Compare logprobs of both sides: does the server sample from the model that is trained?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from verifiers_rl.inference import InferenceClient, InferenceServerError
from verifiers_rl.logprobs import (
    chunk_size_for,
    chunked_logprobs_and_entropy,
    hidden_states_in_place_of_logits,
    token_logprobs_and_entropy,
)
from verifiers_rl.model_trials import reason_against_chunking
from verifiers_rl.packing import collate, copy_to
from verifiers_rl.router_replay import replay_experts
from verifiers_rl.types import Sample

logger = logging.getLogger(__name__)

NUM_TOKENS = 32
PROMPT = "Once upon a time"
# Limits in nats. With float32 on both sides, the largest difference of one token is limited;
# otherwise the mean is. Rounding to bfloat16 alone gives a mean of 0.01 to 0.03 for dense models,
# and somewhat more where it changes which experts are chosen.
FLOAT32_LARGEST = 0.01
HALF_MEAN, HALF_MEAN_WORTH_A_WARNING = 0.3, 0.1


@dataclass(frozen=True)
class Difference:
    """How far the two sides' logprobs of the same tokens are apart, in nats."""

    mean: float
    largest: float
    num_tokens: int
    dtypes: tuple[str, str]  # of the trainer, of the server

    def __str__(self) -> str:
        here, there = self.dtypes
        return (
            f"{self.mean:.2g} nats apart on average over {self.num_tokens} sampled tokens, at most "
            f"{self.largest:.2g}, {here} here and {there} there"
        )

    @property
    def is_exact(self) -> bool:
        """Whether both sides compute in float32."""
        return self.dtypes == ("float32", "float32")

    @property
    def is_of_another_model(self) -> bool:
        """Whether the difference is larger than rounding explains. NaN counts as larger."""
        if self.is_exact:
            return not self.largest <= FLOAT32_LARGEST
        return not self.mean <= HALF_MEAN


def prompt_of(tokenizer: Any) -> list[int]:
    """Tokenize `PROMPT`. If the tokenizer has no token for any of its letters, return the first
    few ids that are not special.
    """
    special = {*tokenizer.all_special_ids}
    ids = [i for i in tokenizer(PROMPT, add_special_tokens=False)["input_ids"] if i not in special]
    return ids or [i for i in range(len(tokenizer)) if i not in special][:4]


def sample(
    client: InferenceClient, model_name: str, prompt_ids: list[int], args: Any
) -> tuple[list[int], Tensor]:
    """Let the server continue this prompt by a few tokens. Return the tokens and the logprobs that
    the server gives for them, (tokens,) float32.

    Args:
        model_name: what requests put into `model=`.
        args: the `RLConfig`; `max_seq_len`, `temperature` and `vllm_server_timeout` are read.
    """
    reply = client.complete(
        {
            "model": model_name,
            "prompt": prompt_ids,
            "max_tokens": min(NUM_TOKENS, args.max_seq_len - len(prompt_ids)),
            "ignore_eos": True,
            "temperature": args.temperature,
            # Fixed whatever the run sets: these change the server's probabilities on purpose.
            **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
            "logprobs": 1,
            "return_token_ids": True,
        },
        args.vllm_server_timeout,
    )["choices"][0]
    return reply["token_ids"], torch.tensor(reply["logprobs"]["token_logprobs"])


@torch.no_grad()
def trainer_logprobs(model: Any, token_ids: list[int], num_last: int, args: Any) -> Tensor:
    """Compute logprobs of the last tokens under the trainer's model, (num_last,) float32."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    replay_experts(base, None)  # of the last microbatch
    device = next(model.parameters()).device
    ids = torch.tensor(token_ids, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, -num_last - 1 : -1]
    finally:
        model.train(was_training)
    return token_logprobs_and_entropy(logits, ids[-num_last:], args.temperature)[0].cpu()


@torch.no_grad()
def logprobs_of_samples(model: Any, samples: Sequence[Sample], args: Any) -> list[np.ndarray]:
    """Compute what a training step computes of each sample, which has a row of its own here: the
    logprobs of its loss tokens at the run's temperature, over the tokens of its sampling mask, with
    the experts that the server chose.

    Args:
        model: the causal LM, perhaps inside PEFT.
        args: the `RLConfig`; `bf16`, `head_dtype` and `temperature` are read.

    Returns:
        (N,) float32 each.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    device = next(model.parameters()).device
    head_dtype = getattr(torch, args.head_dtype, None)  # "model" is none
    chunk_size = chunk_size_for(base.config.get_text_config().vocab_size)
    was_training = model.training
    model.eval()
    found = []
    try:
        replay_experts(base, None)  # of the last microbatch
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            in_chunks = reason_against_chunking(model, base) is None
            for sample in samples:
                if not sample.num_loss_tokens:
                    found.append(np.zeros(0, np.float32))
                    continue
                row = copy_to(collate([sample], [[0]], [1.0], 0), device)
                replay_experts(base, row.routed_experts)
                at = row.targets.rows, row.targets.columns
                if in_chunks:
                    with hidden_states_in_place_of_logits(base, head_dtype) as to_logits:
                        hidden = model(input_ids=row.input_ids, use_cache=False).logits[at]
                    logprobs, _ = chunked_logprobs_and_entropy(
                        hidden, to_logits, row.targets.token_ids, args.temperature, chunk_size,
                        "none", allowed=row.targets.allowed,
                    )  # fmt: skip
                else:
                    logits = model(input_ids=row.input_ids, use_cache=False).logits[at]
                    logprobs, _ = token_logprobs_and_entropy(
                        logits, row.targets.token_ids, args.temperature, "none",
                        allowed=row.targets.allowed,
                    )  # fmt: skip
                found.append(logprobs.float().cpu().numpy())
    finally:
        replay_experts(base, None)
        model.train(was_training)
    return found


def difference(ours: Tensor, theirs: Tensor, dtypes: tuple[str, str]) -> Difference:
    """Compare two sides' logprobs of the same tokens, (tokens,) each."""
    apart = (ours - theirs).abs()
    return Difference(float(apart.mean()), float(apart.max()), len(apart), dtypes)


def dtypes_of(model: nn.Module, client: InferenceClient, args: Any) -> tuple[str, str]:
    """Return the dtypes that the trainer and the server compute in."""
    here = torch.bfloat16 if args.bf16 else next(model.parameters()).dtype
    return str(here).removeprefix("torch."), client.status()["dtype"]


def check_agreement(
    model: nn.Module, client: InferenceClient, model_name: str, tokenizer: Any, args: Any
) -> None:
    """Compare the logprobs of both sides; warn if they differ more than rounding to bfloat16
    usually explains. The server must have the model's weights already.

    Raises:
        InferenceServerError: the server samples from another model.
    """
    prompt_ids = prompt_of(tokenizer)[: args.max_seq_len // 2]
    token_ids, theirs = sample(client, model_name, prompt_ids, args)
    ours = trainer_logprobs(model, prompt_ids + token_ids, len(token_ids), args)
    found = difference(ours, theirs, dtypes_of(model, client, args))
    if found.is_of_another_model:
        raise InferenceServerError(
            f"the server at {client.base_url} samples from a different model than the one being "
            f"trained: {found}. "
            "Start it with the trainer's model and without quantization or model overrides; "
            "`vf-rl --check` tries both sides"
        )
    if not found.is_exact and found.mean > HALF_MEAN_WORTH_A_WARNING:
        logger.warning(
            "logprobs of server and trainer are %s: more than rounding to bfloat16 usually makes. "
            "Watch mismatch_kl; float32 on both sides tells rounding from another model",
            found,
        )
    logger.info("logprobs of server and trainer are %s", found)
