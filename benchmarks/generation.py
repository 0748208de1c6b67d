"""Sampled tokens a second through the token route of a real vf-vllm, many replies at a time.

    python benchmarks/generation.py [--replies 256] [--tokens 100] [--rounds 4]

The model is the tiny one of the examples with random weights, on a GPU in bfloat16 if there is one.
All replies are requested at once by one `ServerClient`, each by itself, and have the same number of
tokens. With such a model most of the time is vLLM's for each token: scheduling, and what its engine
tells the server's process. The first round warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]


async def measure(url: str, model: str, options: argparse.Namespace) -> list[float]:
    """Return the seconds of each round."""
    from verifiers_rl.inference import ServerClient

    num, tokens = options.replies, options.tokens
    body = {"model": model, "temperature": 1.0, "top_k": -1, "ignore_eos": True}
    body |= {"max_tokens": tokens, "min_tokens": tokens}
    client, seconds = ServerClient(f"{url}/v1", 600.0), []
    for _ in range(options.rounds):
        start = time.perf_counter()
        prompts = ([70 + i % 50, 71, 72 + i // 50] for i in range(num))
        replies = await asyncio.gather(*(client.reply_to(body, prompt) for prompt in prompts))
        seconds.append(time.perf_counter() - start)
        if any(len(values) != tokens for reply in replies for values in reply.sampled):
            raise RuntimeError("a reply has not as many tokens or logprobs")
    await client.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("replies", 256), ("tokens", 100), ("rounds", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()

    import verifiers_rl  # noqa: F401 (before transformers: see its torchvision_operators.py)

    # isort: split
    import torch
    from transformers import set_seed
    from warm_start import make_model, make_tokenizer

    from tests.conftest import running_server
    from verifiers_rl.inference.client import TOKEN_VARIABLE

    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(16))
    flags = ("--max-model-len", "512", "--max-num-seqs", "1024", "--no-enable-prefix-caching")
    dtype = "float32"
    if torch.cuda.is_available():
        flags, dtype = (*flags, "--gpu-memory-utilization", "0.3"), "bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        set_seed(0)
        model, log = Path(folder, "model"), Path(folder, "server.log")
        make_model(tokenizer := make_tokenizer()).save_pretrained(model)
        tokenizer.save_pretrained(model)
        with running_server(model, log, *flags, dtype=dtype) as server:
            seconds = asyncio.run(measure(server.url, str(model), options))
    num_tokens = options.replies * options.tokens
    print("| replies | tokens of each | tokens/s, median | s of each round |")
    print("| --- | --- | --- | --- |")
    print(
        f"| {options.replies} | {options.tokens} "
        f"| {num_tokens / statistics.median(seconds[1:]):,.0f} "
        f"| {', '.join(f'{one:.2f}' for one in seconds)} |"
    )


if __name__ == "__main__":
    main()
