"""Reinforcement learning of a language model in one file, to be read from top to bottom.

    for each step:
        send the weights to the server            pool.push
        roll out: the server answers prompts      sample_group, in threads
        rewards to advantages                     center_on_group_mean
        loss of every sampled token, backward     cispo
        optimizer step

This loop is synchronous: server and trainer wait for each other, and every token is sampled from
the newest weights. `RLTrainer` generates the next batch while it trains. It also has environments,
checkpoints, several GPUs and everything else that this file leaves out.

These commands, in two terminals, train a small model to reverse strings on a CPU in a few minutes:

    python examples/warm_start.py examples/reverse_text/reverse_text.py /tmp/model
    vf-vllm --model /tmp/model --dtype float32 --enforce-eager --max-model-len 64 --enable-lora
    python examples/one_file.py --model /tmp/model
"""

import argparse
import difflib
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import verifiers_rl  # noqa: F401 (before transformers: see its torchvision_operators.py)
import httpx
import openai
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from verifiers_rl.advantages import center_on_group_mean
from verifiers_rl.inference import InferenceClient, generation_key
from verifiers_rl.logprobs import token_logprobs_and_entropy
from verifiers_rl.losses import LossInputs, cispo
from verifiers_rl.sync import ServerPool
from verifiers_rl.types import Rollout, Sample

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_GROUPS, GROUP = 8, 16  # a batch is 8 prompts with 16 rollouts each
MAX_TOKENS, TEMPERATURE = 16, 1.0
MICRO_BATCH_SIZE = 64  # samples of one forward pass


# --- The task: a prompt and a reward --------------------------------------------------------------


def make_prompt(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(3, 8)))


def score(prompt: str, completion: str) -> float:
    """Similarity of the completion to the reversed prompt, 0 to 1."""
    return difflib.SequenceMatcher(None, completion, prompt[::-1]).ratio()


# --- Rollouts: the server samples, and returns each token with its logprob ------------------------


def sample_group(client: openai.OpenAI, model: str, version: int, prompt: str) -> list[Rollout]:
    """Roll out one prompt GROUP times, and score the completions.

    Token ids and logprobs come from the server, so the trained tokens are the sampled ones.
    """
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        n=GROUP,
        max_tokens=MAX_TOKENS,
        temperature=TEMPERATURE,
        top_p=1.0,  # neutral, as in extra_body: a model may bring other defaults
        logprobs=True,
        extra_body={"return_token_ids": True, "top_k": -1, "min_p": 0, "repetition_penalty": 1},
    )
    prompt_ids: list[int] = reply.prompt_token_ids  # type: ignore[attr-defined]
    rollouts = []
    for choice in reply.choices:
        token_ids: list[int] = choice.token_ids  # type: ignore[attr-defined]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        logprobs = [token.logprob for token in choice.logprobs.content]
        n, m = len(prompt_ids), len(token_ids)
        sample = Sample(
            token_ids=prompt_ids + token_ids,
            loss_mask=[False] * n + [True] * m,
            inference_logprobs=[0.0] * n + logprobs,
            policy_versions=[-1] * n + [version] * m,
        )
        text = choice.message.content or ""
        rollouts.append(Rollout(0, prompt, text, reward=score(prompt, text), samples=[sample]))
    return rollouts


def set_advantages(group: list[Rollout]) -> None:
    """Set A_i = r_i - mean(r) for each rollout of one prompt, and for all its sampled tokens."""
    rewards = torch.tensor([rollout.reward for rollout in group])
    for rollout, advantage in zip(group, center_on_group_mean(rewards).tolist(), strict=True):
        rollout.set_advantage(advantage)


# --- The step: one forward and backward for each microbatch, one update ---------------------------


def pad(samples: list[Sample], name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return one field of all samples as a tensor (B, T), padded with zeros on the right."""
    fields = [torch.tensor(getattr(sample, name), dtype=dtype) for sample in samples]
    return torch.nn.utils.rnn.pad_sequence(fields, batch_first=True)


def microbatch_loss(model: Any, samples: list[Sample]) -> torch.Tensor:
    """Return the sum of the loss over the loss tokens of these samples. Scalar."""
    device = model.device  # a Hugging Face model has this, also under a PEFT adapter
    input_ids = pad(samples, "token_ids", torch.int64)  # (B, T)
    lengths = torch.tensor([len(sample.token_ids) for sample in samples])
    attention_mask = torch.arange(input_ids.shape[1]) < lengths[:, None]  # (B, T)
    logits = model(input_ids.to(device), attention_mask.to(device)).logits  # (B, T, vocabulary)
    # Position t predicts token t + 1. N is the number of loss tokens.
    rows, columns = pad(samples, "loss_mask", torch.bool)[:, 1:].nonzero(as_tuple=True)  # (N,)

    def of_targets(values: torch.Tensor) -> torch.Tensor:
        return values[rows, columns + 1].to(device)  # (N,)

    logprobs, entropy = token_logprobs_and_entropy(
        logits[rows, columns], of_targets(input_ids), TEMPERATURE
    )
    inputs = LossInputs(
        trainer_logprobs=logprobs,
        inference_logprobs=of_targets(pad(samples, "inference_logprobs", torch.float32)),
        advantages=of_targets(pad(samples, "advantages", torch.float32)),
        weights=torch.ones_like(logprobs),  # every token counts the same
        sequence_ids=rows.to(device),
        entropy=entropy,
    )
    return cispo(inputs).loss


def train_on(model: Any, optimizer: torch.optim.Optimizer, samples: list[Sample]) -> float:
    """Take one optimizer step. Each sum is divided by the loss tokens of the whole batch, so the
    gradient does not depend on how the batch is split into microbatches.
    """
    num_loss_tokens = sum(sample.num_loss_tokens for sample in samples)
    total = 0.0
    for start in range(0, len(samples), MICRO_BATCH_SIZE):
        loss = microbatch_loss(model, samples[start : start + MICRO_BATCH_SIZE]) / num_loss_tokens
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


# --- The loop -------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model to reverse strings.")
    parser.add_argument("--model", required=True, help="the folder or name that vf-vllm serves")
    parser.add_argument("--port", type=int, default=8000, help="of vf-vllm on this machine")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--lora-rank", type=int, default=16, help="0 trains all weights")
    parser.add_argument("--output", help="a folder for the trained model")
    options = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    if options.lora_rank:
        lora = LoraConfig(r=options.lora_rank, lora_alpha=16, target_modules="all-linear")
        model = get_peft_model(model, lora)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, weight_decay=0.0)
    server = InferenceClient("127.0.0.1", options.port)
    pool = ServerPool([server])  # of one server
    pool.wait_until_ready()
    direct = httpx.Client(trust_env=False, timeout=600)  # no proxy: the server is beside us
    url, key = f"{server.base_url}/v1", generation_key(server.base_url)
    client = openai.OpenAI(base_url=url, api_key=key, http_client=direct)
    rng = random.Random(0)
    with ThreadPoolExecutor(NUM_GROUPS) as threads:
        for step in range(options.steps):
            pool.push(model, policy_version=step)
            roll_out = partial(sample_group, client, pool.model_name, step)
            groups = list(threads.map(roll_out, [make_prompt(rng) for _ in range(NUM_GROUPS)]))
            for group in groups:
                set_advantages(group)
            rollouts = [rollout for group in groups for rollout in group]
            samples = [sample for rollout in rollouts for sample in rollout.samples]
            loss = train_on(model, optimizer, samples)
            reward = sum(rollout.reward for rollout in rollouts) / len(rollouts)
            print(f"step {step}  reward {reward:.3f}  loss {loss:+.4f}", flush=True)
    pool.close()
    if options.output:
        model.save_pretrained(options.output)
        AutoTokenizer.from_pretrained(options.model).save_pretrained(options.output)


if __name__ == "__main__":
    main()
