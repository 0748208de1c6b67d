"""Supervised finetuning: `SFTTrainer` of this project, TRL's, and transformers' Trainer.

    python benchmarks/sft.py [--steps 6] [--rounds 2] [--vocab 151936] [--lora] [--shape small]
    python benchmarks/sft.py --shape qwen3-4b --lora --batch-size 32          # a GPU

All have the same model, rows, order, tokens, loss mask, optimizer and number of rows in a forward
pass, and run in their own processes, in turn:

    ours          packed rows, chunked logprobs
    trl           right-padded rows, TRL's own chunked head; left out where TRL is not installed
    transformers  right-padded rows, full logits, the model's own loss

A row is a prompt and a completion of random words; a word is a token. Lengths are lognormal from 16
to --longest tokens, and the first quarter is the prompt. Prints tokens a second without the first
step, the peak memory above what the process had before the run, and the loss of the first and the
last step. The losses of all steps must agree to 1e-4.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from train_step import SHAPES, PeakMemory, run_variants

sys.path.insert(0, str(Path(__file__).parent.parent))

VARIANTS = ["ours", "trl", "transformers"]
RATE = 1e-4


def make_model(options: argparse.Namespace) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = SHAPES[options.shape]
    config = Qwen3Config(
        vocab_size=options.vocab, max_position_embeddings=4096, pad_token_id=0, eos_token_id=1,
        **shape,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float()


def make_tokenizer(options: argparse.Namespace) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, options.vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<pad>"
    )


def make_rows(options: argparse.Namespace) -> list[dict[str, str]]:
    rng = random.Random(0)
    rows = []
    for _ in range(options.steps * options.batch_size):
        length = min(max(int(rng.lognormvariate(4.8, 0.8)), 16), options.longest - 1)
        words = [f"w{rng.randrange(2, options.vocab)}" for _ in range(length)]
        cut = length // 4
        rows.append({"prompt": " ".join(words[:cut]), "completion": " " + " ".join(words[cut:])})
    return rows


def num_tokens(row: dict[str, str]) -> int:
    return len(row["prompt"].split()) + len(row["completion"].split()) + 1  # the end of a text


def make_timer(options: argparse.Namespace) -> Any:
    """A callback that keeps the seconds of each step and its loss."""
    from transformers import TrainerCallback

    class Timer(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.losses: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.monotonic()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds.append(time.monotonic() - self.began)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kw: Any) -> None:
            if "loss" in logs:
                self.losses.append(logs["loss"])

    return Timer()


def common_options(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        **{"output_dir": folder, "use_cpu": not on_gpu, "bf16": on_gpu, "learning_rate": RATE},
        **{"save_strategy": "no", "logging_steps": 1, "report_to": "none", "disable_tqdm": True},
        **{"gradient_checkpointing": on_gpu, "max_grad_norm": 1.0, "seed": 0},
    }


def make_ours(options: argparse.Namespace, folder: str, timer: Any) -> Any:
    from verifiers_rl.sft import SFTConfig, SFTTrainer

    args = SFTConfig(
        **common_options(options, folder), use_lora=options.lora, shuffle=False,
        batch_size=options.batch_size, micro_batch_size=options.micro_batch_size,
        max_seq_len=options.longest, log_rollouts=0,
    )  # fmt: skip
    return SFTTrainer(
        make_model(options), args, make_rows(options), processing_class=make_tokenizer(options),
        callbacks=[timer],
    )  # fmt: skip


def make_peft_config(options: argparse.Namespace) -> Any:
    from peft import LoraConfig

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=16, target_modules=targets)


def of_others(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": options.micro_batch_size,
        "gradient_accumulation_steps": options.batch_size // options.micro_batch_size,
        "num_train_epochs": 1,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
    }


def make_trl(options: argparse.Namespace, folder: str, timer: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        **common_options(options, folder), **of_others(options), max_length=options.longest
    )
    return SFTTrainer(
        make_model(options), args, train_dataset=Dataset.from_list(make_rows(options)),
        processing_class=make_tokenizer(options), callbacks=[timer],
        peft_config=make_peft_config(options) if options.lora else None,
    )  # fmt: skip


def make_transformers(options: argparse.Namespace, folder: str, timer: Any) -> Any:
    from peft import get_peft_model
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments, set_seed

    from verifiers_rl.sft.conversations import Tokenization

    tokenizer = make_tokenizer(options)
    tokenization = Tokenization(tokenizer, max_seq_len=options.longest)
    rows = []
    for row in make_rows(options):
        ((ids, mask),) = tokenization.of_row(row)
        labels = [int(i) if m else -100 for i, m in zip(ids, mask, strict=True)]
        rows.append({"input_ids": ids.tolist(), "labels": labels})
    set_seed(0)
    model: Any = make_model(options)
    if options.lora:
        model = get_peft_model(model, make_peft_config(options))
    args = TrainingArguments(**common_options(options, folder), **of_others(options))
    return Trainer(
        model, args, train_dataset=rows, data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=[timer],
    )  # fmt: skip


def run_one(options: argparse.Namespace) -> None:
    make = {"ours": make_ours, "trl": make_trl, "transformers": make_transformers}
    timer = make_timer(options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make[options.variant](options, folder, timer)
        memory = PeakMemory()
        trainer.train()
        peak = memory.gb()
    rows = make_rows(options)[options.batch_size :]  # without the first step
    speed = sum(map(num_tokens, rows)) / sum(timer.seconds[1:])
    result = {"tokens_per_s": speed, "peak_gb": peak, "losses": timer.losses}
    print(json.dumps({**result, "rounding": 3e-2 if memory.on_gpu else 1e-4}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        return run_one(options)
    variants = [v for v in VARIANTS if v != "trl" or find_spec("trl") is not None]
    results, median = run_variants(__file__, variants, options.rounds)
    print("| trainer | tokens/s | ours / it | peak GB | ours / it | first loss | last loss |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for variant in variants:
        speed, peak = median(variant, "tokens_per_s"), median(variant, "peak_gb")
        faster, smaller = median("ours", "tokens_per_s") / speed, median("ours", "peak_gb") / peak
        losses = results[variant][0]["losses"]
        print(
            f"| {variant} | {speed:.0f} | {faster:.2f} | {peak:.2f} | {smaller:.2f} "
            f"| {losses[0]:.6f} | {losses[-1]:.6f} |"
        )
    ours, rounding = results["ours"][0]["losses"], results["ours"][0]["rounding"]
    for variant in variants:
        pairs = zip(ours, results[variant][0]["losses"], strict=True)
        largest = max(abs(a - b) / abs(a) for a, b in pairs)
        print(f"largest relative difference of a loss, ours and {variant}: {largest:.1e}")
        if largest > rounding:
            sys.exit("the losses differ")


if __name__ == "__main__":
    main()
