"""Forward and backward of one batch: our step against the textbook's and against TRL's utilities.

    python benchmarks/train_step.py [--samples 16] [--rounds 2] [--vocab 151936] [--lora]
    python benchmarks/train_step.py --shape qwen3-4b --lora --samples 53   # 16k tokens; a GPU
    python benchmarks/train_step.py --shape qwen3-4b --lora --samples 53 --only ours
    python benchmarks/train_step.py --groups 1 --reply 64 --vocab 4096 [--prompt 512]
    python benchmarks/train_step.py --shape demo --groups 8 --group-size 8 --prompt 33 --reply 7

All have the same model, samples and token budget. Each runs in its own process, in turn:

    ours      RLTrainer.training_step
    unshared  with --groups: the same with share_prefixes=False
    compiled  with --compiled: the same with torch_compile=True, after a step that compiles
    textbook  (a) right-padded microbatches in the order given, full logits, log_softmax, entropy
    trl       (b) the same microbatches, logits of the completions only, TRL's
              selective_log_softmax and entropy_from_logits; left out where TRL is not installed

Samples are ragged: their lengths are lognormal from 16 to 1024 tokens, and the first quarter of
each is a prompt. With --groups they are replies to prompts that they share: lognormal around
--reply tokens (sigma 0.5), or exactly as many if these are less than 16. With a vocabulary of 4096
the head of the shape "small" has a third of the decoder's weights, as in Qwen3-0.6B. Prints tokens
a second (prompts included), peak memory above what the process had before the step, and the loss,
on which all must agree. If there is a GPU, the step runs on it in bfloat16, and the model FLOPs
utilisation of ours is printed. There ours chooses its token budget and its checkpoints from the
free memory, as a run does by default; the others checkpoint all layers.
"""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VARIANTS = ["ours", "unshared", "compiled", "textbook", "trl"]
MICRO_BATCH_SIZE = 4
LONGEST = 1024


SHAPES = {
    "demo": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {  # two layers of it
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b-whole": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}


def make_model(options: argparse.Namespace) -> Any:
    """Make a model with random weights, in the dtype that load_policy gives them."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=options.vocab, max_position_embeddings=4 * LONGEST, **SHAPES[options.shape]
    )
    on_gpu = torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):
        model = Qwen3ForCausalLM(config)
    return model.to(torch.bfloat16 if options.lora and on_gpu else torch.float32)


def make_samples(options: argparse.Namespace) -> list[Any]:
    rng = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(options.vocab) for _ in range(number)]

    samples = []
    if not options.groups:
        for _ in range(options.samples):
            length = min(max(int(rng.lognormvariate(5.5, 1)), 16), LONGEST)
            samples.append(make_sample(tokens(length), length // 4, rng, options.vocab))
    for _ in range(options.groups):
        prompt = tokens(options.prompt)
        for _ in range(options.group_size):
            length = options.reply
            if length >= 16:
                length = min(int(rng.lognormvariate(math.log(length), 0.5)) + 1, 4 * length)
            samples.append(
                make_sample([*prompt, *tokens(length)], options.prompt, rng, options.vocab)
            )
    return samples


def make_sample(token_ids: list[int], prompt: int, rng: random.Random, vocab: int) -> Any:
    from verifiers_rl.types import Sample

    mask = [t >= prompt for t in range(len(token_ids))]
    logprobs = [-math.log(vocab) + rng.uniform(-0.1, 0.1) if m else 0.0 for m in mask]
    sample = Sample(token_ids, mask, logprobs, [0 if m else -1 for m in mask])
    sample.set_advantage(rng.uniform(-1, 1))
    return sample


def step_of_ours(samples: list[Any], options: argparse.Namespace, folder: str) -> Any:
    import torch
    from transformers import PreTrainedTokenizerFast

    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.helpers import StubSink, StubSource
    from verifiers_rl import RLConfig, RLTrainer
    from verifiers_rl.types import Batch

    class OneBatch(StubSource):
        num_pending = 1  # type: ignore[assignment]

        def get(self) -> Batch:
            return Batch(0, 0, samples)

    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), pad_token="a"
    )
    args = RLConfig(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        use_lora=options.lora,
        max_seq_len=max(LONGEST, *(len(sample.token_ids) for sample in samples)),
        max_tokens_per_microbatch=(
            None if torch.cuda.is_available() else MICRO_BATCH_SIZE * LONGEST
        ),
        share_prefixes=options.variant != "unshared",
        torch_compile=options.variant == "compiled",
        temperature=1.0,
        max_steps=1,
        disable_tqdm=True,
    )
    trainer = RLTrainer(
        make_model(options),
        None,
        args,
        tokenizer,
        orchestrator=OneBatch(),
        weight_sync=StubSink(),
    )

    def step() -> tuple[float, dict[str, float]]:
        trainer.model.zero_grad()
        loss = trainer.training_step(trainer.model, {}).item()
        return loss, trainer._window.steps[-1]

    return step


def enable_checkpointing(model: Any) -> None:
    """Switch gradient checkpointing on, as train() does."""
    on = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.18 on
    (on or model.gradient_checkpointing_enable)()
    model.enable_input_require_grads()


def step_of_others(samples: list[Any], options: argparse.Namespace) -> Any:
    import torch

    utilities = options.variant
    model = make_model(options).train()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        enable_checkpointing(model)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=16, target_modules=targets))
    if utilities == "trl":
        from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    def padded(group: list[Any], name: str, dtype: Any) -> Any:
        rows = [torch.tensor(getattr(sample, name), dtype=dtype) for sample in group]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)

    def logprobs_and_entropy(ids: Any, attention: Any, num_kept: int) -> Any:
        inputs = {"input_ids": ids, "attention_mask": attention, "use_cache": False}
        if utilities == "trl":
            logits = model(**inputs, logits_to_keep=num_kept + 1).logits[:, :-1]
            targets = ids[:, -num_kept:]
            with torch.no_grad():
                entropy = entropy_from_logits(logits)
            return selective_log_softmax(logits, targets), entropy
        log_softmax = model(**inputs).logits[:, :-1].float().log_softmax(-1)
        entropy = -(log_softmax.detach().exp() * log_softmax.detach()).sum(-1)
        targets = ids[:, 1:]
        return log_softmax.gather(-1, targets[..., None])[..., 0], entropy

    def step() -> tuple[float, dict[str, float]]:
        model.zero_grad()
        total = 0.0
        num_loss_tokens = sum(sample.num_loss_tokens for sample in samples)
        for start in range(0, len(samples), MICRO_BATCH_SIZE):
            group = samples[start : start + MICRO_BATCH_SIZE]
            ids = padded(group, "token_ids", torch.int64)
            attention = padded([_Ones(s) for s in group], "ones", torch.int64)
            # Keep positions from the end of the shortest prompt on.
            kept = ids.shape[1] - min(int(s.loss_mask.argmax()) for s in group)
            kept = kept if utilities == "trl" else ids.shape[1] - 1
            with torch.autocast(model.device.type, torch.bfloat16, enabled=on_gpu):
                logprobs, _ = logprobs_and_entropy(ids, attention, kept)
            mask = padded(group, "loss_mask", torch.bool)[:, -kept:]
            sampled = padded(group, "inference_logprobs", torch.float32)[:, -kept:]
            advantages = padded(group, "advantages", torch.float32)[:, -kept:]
            ratio = (logprobs - sampled).exp().detach().clamp(max=5.0)
            loss = -(ratio * advantages * logprobs)[mask].sum() / num_loss_tokens
            loss.backward()
            total += loss.item()
        return total, {}

    return step


class _Ones:
    def __init__(self, sample: Any) -> None:
        self.ones = [1] * len(sample.token_ids)


def status_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


class PeakMemory:
    """Peak memory of what runs until `gb()` is called, above what was in use before."""

    def __init__(self) -> None:
        import torch

        self.on_gpu = torch.cuda.is_available()
        if self.on_gpu:
            self.before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        else:
            self.before = status_kb("VmRSS") * 1024
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak

    def gb(self, reported_gb: float = 0.0) -> float:
        """`reported_gb`: by our step, which reads the GPU's peak and resets it."""
        import torch

        peak = torch.cuda.max_memory_allocated() if self.on_gpu else status_kb("VmHWM") * 1024
        if self.on_gpu:
            peak = max(peak, int(reported_gb * 1e9))
        return (peak - self.before) / 1e9


def run_one(options: argparse.Namespace) -> None:
    samples = make_samples(options)
    with tempfile.TemporaryDirectory() as folder:
        if options.variant in ("ours", "unshared", "compiled"):
            step = step_of_ours(samples, options, folder)
        else:
            step = step_of_others(samples, options)
        shortest = min(range(len(samples)), key=lambda i: len(samples[i].token_ids))
        everything, samples[:] = samples[:], [samples[shortest]]
        step()  # a small one starts threads and fills caches
        samples[:] = everything
        memory = PeakMemory()
        if options.variant == "compiled" or memory.on_gpu:
            for _ in range(2):  # what is compiled only for other lengths is compiled here
                step()
            memory = PeakMemory()
        start = time.monotonic()
        loss, metrics = step()
        times = [time.monotonic() - start]
        peak = memory.gb(metrics.get("peak_memory_gb", 0.0))
        while sum(times) < 1:
            start = time.monotonic()
            _, metrics = step()
            times.append(time.monotonic() - start)
    tokens = sum(len(sample.token_ids) for sample in samples)
    result = {
        "tokens_per_s": tokens / statistics.median(times),
        "peak_gb": peak,
        "loss": loss,
        "mfu": metrics.get("mfu"),
    }
    print(json.dumps({**result, "rounding": 3e-2 if memory.on_gpu else 1e-4}))


def run_variants(
    script: str, variants: list[str], rounds: int
) -> tuple[dict[str, list[dict[str, Any]]], Callable[[str, str], float]]:
    """Start this script again for each variant in turns, in a process of its own. Return what the
    last line of each says, as JSON, and a function for the median of a variant's numbers.
    """
    results: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant in variants:
            command = [sys.executable, script, *sys.argv[1:], "--variant", variant]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            *lines, last = done.stdout.splitlines()
            for line in lines:
                if line.startswith("step: "):  # what fit_step has chosen for a GPU
                    print(line)
            results[variant].append(json.loads(last))

    def median(variant: str, name: str) -> float:
        return statistics.median(result[name] for result in results[variant])

    return results, median


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--groups", type=int, default=0)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--reply", type=int, default=64)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, help="rows beside ours")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.vocab = options.vocab or (261 if options.shape == "demo" else 151_936)
    if options.variant:
        return run_one(options)
    left_out = {"unshared"} if not options.groups else set()
    if not options.compiled:
        left_out.add("compiled")
    if find_spec("trl") is None:
        left_out.add("trl")
    left_out |= {*VARIANTS} - {"ours", *(options.only or VARIANTS)}
    variants = [variant for variant in VARIANTS if variant not in left_out]
    results, median = run_variants(__file__, variants, options.rounds)
    print("| step | tokens/s | ours / it | peak GB | ours / it | loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    for variant in variants:
        speed, peak = median(variant, "tokens_per_s"), median(variant, "peak_gb")
        faster, smaller = median("ours", "tokens_per_s") / speed, median("ours", "peak_gb") / peak
        print(
            f"| {variant} | {speed:.1f} | {faster:.2f} | {peak:.2f} | {smaller:.2f} "
            f"| {median(variant, 'loss'):.6f} |"
        )
    if any(result["mfu"] for result in results["ours"]):
        speed, peak = median("ours", "tokens_per_s"), median("ours", "peak_gb")
        print(
            f"model FLOPs utilisation of ours: {median('ours', 'mfu'):.3f}, {speed:.0f} tokens/s, "
            f"{peak:.1f} GB above weights"
        )
    losses = [median(variant, "loss") for variant in variants]
    if max(losses) - min(losses) > median("ours", "rounding") * max(abs(loss) for loss in losses):
        sys.exit("the losses differ")


if __name__ == "__main__":
    main()
