"""Make the demo's model: a tiny Qwen3 and its byte-level tokenizer, from scratch,
in under a minute on 2 cores.

Supervised training on clean demonstrations, then on noisy ones in which a letter is wrong one time
in four. The model imitates the noise too: asked for a whole string, it is right about one time in
five. That is what RL has to mend, from rewards alone.

    python examples/reverse_text/warm_start.py examples/reverse_text/outputs/warm_start
"""

import argparse
import random
import time
from pathlib import Path

import torch
from reverse_text import LETTERS, make_texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, five special tokens, a chat template of the usual form."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, tie_word_embeddings: bool = False
) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.9 M parameters in float32."""
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
    tokenizer: PreTrainedTokenizerFast, texts: list[str], noise: float, rng: random.Random
) -> dict[str, torch.Tensor]:
    """Prompt and reversed answer; labels -100 on prompt and padding. (B, T) each.

    A share `noise` of the answers' letters is replaced by random ones.
    """
    rows = []
    for text in texts:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        demonstration = "".join(
            rng.choice(LETTERS) if rng.random() < noise else c for c in text[::-1]
        )
        answer = [*tokenizer.encode(demonstration), tokenizer.eos_token_id]
        rows.append((prompt, answer))
    width = max(len(p) + len(a) for p, a in rows)
    pad = tokenizer.pad_token_id
    return {
        "input_ids": torch.tensor([p + a + [pad] * (width - len(p) - len(a)) for p, a in rows]),
        "labels": torch.tensor(
            [[-100] * len(p) + a + [-100] * (width - len(p) - len(a)) for p, a in rows]
        ),
        "attention_mask": torch.tensor(
            [[1] * (len(p) + len(a)) + [0] * (width - len(p) - len(a)) for p, a in rows]
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--clean-steps", type=int, default=300)
    parser.add_argument("--noisy-steps", type=int, default=50)
    parser.add_argument(
        "--noise", type=float, default=0.25, help="share of wrong letters in noisy demonstrations"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    set_seed(args.seed)
    start = time.monotonic()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rng = random.Random(args.seed)
    num_steps = args.clean_steps + args.noisy_steps
    for step in range(num_steps):
        texts = make_texts(64, 3, 8, seed=1_000_003 * (args.seed + 1) + step)
        noise = 0.0 if step < args.clean_steps else args.noise
        loss = model(**supervised_batch(tokenizer, texts, noise, rng)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(
                f"warm start: step {step + 1}/{num_steps}, loss {loss.item():.3f}, "
                f"{time.monotonic() - start:.0f} s"
            )
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"warm start: {model.num_parameters():,} parameters written to {args.output}")


if __name__ == "__main__":
    main()
