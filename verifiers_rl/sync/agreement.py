"""Compare logprobs of both sides: does the server sample from the model that is trained?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from verifiers_rl.forward import check_head, evaluating, predict_targets
from verifiers_rl.inference import InferenceClient, InferenceServerError
from verifiers_rl.packing import ModelSupport, collate, copy_to
from verifiers_rl.router_replay import replay_experts
from verifiers_rl.sync.sources import base_of
from verifiers_rl.types import Sample

NUM_TOKENS = 32
PROMPT = "Once upon a time"
# Limits in nats. With float32 on both sides, the largest difference of one token is limited;
# otherwise the mean is. Rounding to bfloat16 alone gives a mean of 0.01 to 0.03 for dense models,
# and somewhat more where it changes which experts are chosen. Of a random model with a sharp head,
# bfloat16 gives 0.03 and fp8 0.6 (benchmarks/mismatch.py --fp8, on an H100).
FLOAT32_LARGEST, HALF_MEAN, QUANTIZED_MEAN = 0.01, 0.3, 1.0


def check_agreement(
    model: nn.Module, client: InferenceClient, model_name: str, tokenizer: Any, args: Any
) -> None:
    """Compare the logprobs of both sides. The server must have the model's weights already.

    Raises:
        InferenceServerError: the server samples from another model.
    """
    prompt_ids = prompt_of(tokenizer)[: args.max_seq_len // 2]
    sampled = sample(client, model_name, prompt_ids, args)
    ours = logprobs_of_sample(model, sampled, args)
    apart = np.abs(ours - sampled.inference_logprobs[sampled.loss_mask])  # nats
    here = torch.bfloat16 if args.bf16 else next(model.parameters()).dtype
    status = client.status()
    quantization = status["quantization"]
    dtypes = str(here).removeprefix("torch."), quantization or status["dtype"]
    if dtypes == ("float32", "float32"):
        is_alike = apart.max() <= FLOAT32_LARGEST  # of NaN neither is true
    else:
        is_alike = apart.mean() <= (QUANTIZED_MEAN if quantization else HALF_MEAN)
    if not is_alike:
        raise InferenceServerError(
            f"the server at {client.base_url} samples from a different model than the one being "
            f"trained: {apart.mean():.2g} nats apart on average over {len(apart)} sampled tokens, "
            f"at most {apart.max():.2g}, {dtypes[0]} here and {dtypes[1]} there. Start it with the "
            "trainer's model and without quantization or model overrides; `vf-rl --check` tries "
            "both sides"
        )


def prompt_of(tokenizer: Any) -> list[int]:
    """Tokenize `PROMPT`. If the tokenizer has no token for any of its letters, return the first
    few ids that are not special.
    """
    special = {*tokenizer.all_special_ids}
    ids = [i for i in tokenizer(PROMPT, add_special_tokens=False)["input_ids"] if i not in special]
    return ids or [i for i in range(len(tokenizer)) if i not in special][:4]


def sample(client: InferenceClient, model_name: str, prompt_ids: list[int], args: Any) -> Sample:
    """Let the server continue this prompt by a few tokens, which are those in the loss.

    Args:
        model_name: what requests put into `model=`.
        args: the `RLConfig`; `max_seq_len`, `temperature` and `vllm_server_timeout` are read.
    """
    body = {
        "model": model_name,
        "prompt": prompt_ids,
        "max_tokens": min(NUM_TOKENS, args.max_seq_len - len(prompt_ids)),
        "ignore_eos": True,
        "temperature": args.temperature,
        # Fixed whatever the run sets: these change the server's probabilities on purpose.
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 1,
        "return_token_ids": True,
    }
    (reply,) = (
        client.post("/v1/completions", body, args.vllm_server_timeout).begin().answer()["choices"]
    )
    num_prompt, num_sampled = len(prompt_ids), len(reply["token_ids"])
    logprobs = np.array([*[0.0] * num_prompt, *reply["logprobs"]["token_logprobs"]], np.float32)
    return Sample(
        np.array([*prompt_ids, *reply["token_ids"]]),
        np.repeat([False, True], [num_prompt, num_sampled]),
        np.nan_to_num(logprobs, nan=-np.inf),  # NaN would mean that no policy sampled the token
        np.repeat([-1, 0], [num_prompt, num_sampled]),
    )


def logprobs_of_sample(model: Any, sample: Sample, args: Any) -> np.ndarray:
    """Compute what a training step computes of a sample: the logprobs of its loss tokens at the
    run's temperature, over the tokens of its sampling mask, with the experts that the server chose.

    Args:
        model: the causal LM, perhaps inside PEFT.
        sample: has loss tokens.
        args: the `RLConfig`; `bf16`, `head_dtype` and `temperature` are read.

    Returns:
        (N,) float32.

    Raises:
        ConfigError: see `check_head`.
    """
    base = base_of(model)
    device = next(model.parameters()).device
    replay_experts(base, None)  # of the last microbatch
    row = copy_to(collate([sample], [[0]], [1.0], 0), device)
    try:
        with evaluating(model), torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            check_head(model, base)
            logprobs, _ = predict_targets(model, base, row, args, ModelSupport("padded"), "none")
    finally:
        replay_experts(base, None)
    return logprobs.float().cpu().numpy()
