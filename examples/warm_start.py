"""Make an example's model: a tiny Qwen3 and its byte-level tokenizer, from scratch,
in a minute or two on 2 cores.

Supervised training uses clean demonstrations first, then noisy ones with mistakes in them. The
model imitates the mistakes too. RL has to correct them, from rewards alone.

    python examples/warm_start.py examples/reverse_text/reverse_text.py OUTPUT

The environment's module defines the demonstrations:

    def demonstrations(num: int, seed: int, noise: float) -> list[dict]:
        # num conversations: {"messages": [...]};
        # noise: the share of mistakes in what the assistant says
    EXTRA_TOKENS = [...]    # optional: strings that are one token each, beside SPECIAL_TOKENS
"""

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import verifiers_rl  # noqa: F401 (before transformers: see its torchvision_operators.py)

# isort: split
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
# {% generation %} marks what the assistant says; supervised training trains only that.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}"
    "{{- message['content'] or '' -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '<tool_call>{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": ' -}}"
    "{{- call['function']['arguments'] | tojson + '}</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endgeneration -%}"
    "{%- else -%}"
    "{{- message['content'] + '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def make_tokenizer(extra_tokens: list[str] | None = None) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer with special and extra tokens and a usual chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.add_tokens(extra_tokens or [])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, tie_word_embeddings: bool = False
) -> Qwen3ForCausalLM:
    """Make a Qwen3 of 0.9 M parameters in float32."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tie_word_embeddings,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).float()


def supervised_batch(
    tokenizer: PreTrainedTokenizerFast, conversations: list[dict[str, Any]]
) -> dict[str, torch.Tensor]:
    """Tokenise conversations. Labels are -100 on padding and on what the assistant did not say. All
    tensors are (B, T).
    """
    batch: Any = tokenizer.apply_chat_template(
        [conversation["messages"] for conversation in conversations],
        padding=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
    )
    tokenizer.backend_tokenizer.no_padding()  # else it is saved as one that pads
    is_said = batch.pop("assistant_masks") == 1
    return {**batch, "labels": batch["input_ids"].where(is_said, -100)}


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"warm_start.py: {path} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", type=Path, help="the module with the demonstrations")
    parser.add_argument("output", type=Path, help="folder for model and tokenizer")
    parser.add_argument("--clean-steps", type=int, default=300)
    parser.add_argument("--noisy-steps", type=int, default=50)
    parser.add_argument(
        "--noise", type=float, default=0.25, help="share of mistakes in noisy demonstrations"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    environment = load_module(args.environment)
    if "OMP_NUM_THREADS" not in os.environ:
        # Beside other work, threads that have no core of their own hold up each small operation:
        # at a load of 5 on 2 cores, 50 steps took 26 s with one thread, and 213 s with two.
        num_free = (os.cpu_count() or 1) - round(os.getloadavg()[0])
        torch.set_num_threads(max(num_free, 1))
    set_seed(args.seed)
    start = time.monotonic()
    tokenizer = make_tokenizer(getattr(environment, "EXTRA_TOKENS", None))
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    num_steps = args.clean_steps + args.noisy_steps
    print(f"warm start: {num_steps} steps, a line for every 50", flush=True)
    for step in range(num_steps):
        noise = 0.0 if step < args.clean_steps else args.noise
        seed = 1_000_003 * (args.seed + 1) + step
        batch = supervised_batch(tokenizer, environment.demonstrations(64, seed, noise))
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(
                f"warm start: step {step + 1}/{num_steps}, loss {loss.item():.3f}, "
                f"{time.monotonic() - start:.0f} s",
                flush=True,
            )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".warm-start-", dir=args.output.parent) as unfinished:
        # A new folder is complete or absent, also where this process is killed.
        folder = args.output if args.output.exists() else Path(unfinished, "model")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if folder != args.output and not args.output.exists():  # another process may be first
            folder.rename(args.output)
    print(f"warm start: {model.num_parameters():,} parameters written to {args.output}")


if __name__ == "__main__":
    main()
