"""mismatch_kl of the first step: float32 and bfloat16 on both sides, with and without each remedy.

    python benchmarks/mismatch.py [--rollouts 128]
    python benchmarks/mismatch.py --fp8    # a server in bfloat16 and in fp8; on a GPU

Tiny models of the real classes with random weights, dense (Qwen3) and with 4 of 16 experts (Qwen3
MoE), whose heads are scaled so that likely tokens and unlikely ones are sampled. A real vf-vllm
serves them. Each row is one step of a real RLTrainer, of all weights, at a learning rate of 0: it
pushes its weights, asks for rollouts of 32 tokens and trains on them. mismatch_kl is what the step
logs; mean and largest are of |log pi_train - log pi_server| in nats, as a training step computes
them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
HEAD_SCALE = 6.0
MAX_TOKENS = 32
TOP_P = {"top_p": 0.9, "temperature": 0.7}
FLOAT32_HEAD = ("--hf-overrides", '{"head_dtype": "float32"}')
EXPERTS = ("--enable-return-routed-experts",)


@dataclass(frozen=True)
class Step:
    """One row: options of the trainer."""

    dtype: str
    remedy: str = "-"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """One server, and the steps that use it."""

    model: str
    dtype: str
    flags: tuple[str, ...]
    steps: tuple[Step, ...]
    note: str = ""  # in the server's column


def settings() -> list[Setting]:
    f32, bf16 = "float32", "bfloat16"
    sampling = (
        Step(f32, "top_p 0.9, T 0.7", TOP_P),
        Step(f32, "top_p 0.9, T 0.7, sampling_mask", {**TOP_P, "sampling_mask": True}),
    )
    sampling_in_half = tuple(Step(bf16, step.remedy, step.options) for step in sampling)
    head = Step(bf16, "head_dtype", {"head_dtype": "float32"})
    both = tuple(
        Step(dtype, remedy, options)
        for dtype in (f32, bf16)
        for remedy, options in (("-", {}), ("router_replay", {"router_replay": True}))
    )
    return [
        Setting("dense", f32, (), (Step(f32), *sampling, Step(bf16), head)),
        Setting("dense", bf16, (), (Step(f32), Step(bf16), head, *sampling_in_half)),
        Setting("dense", bf16, FLOAT32_HEAD, (Step(f32), Step(bf16), head), ", float32 head"),
        Setting("experts", f32, EXPERTS, both),
        Setting("experts", bf16, EXPERTS, both),
    ]


def settings_of_fp8() -> list[Setting]:
    fp8, flags = ("--quantization", "fp8"), ("--gpu-memory-utilization", "0.3")
    return [
        Setting("dense", "bfloat16", flags, (Step("bfloat16"),)),
        Setting("dense", "bfloat16", (*flags, *fp8), (Step("bfloat16"),), ", fp8"),
    ]


def write_model(kind: str, folder: Path) -> None:
    import torch
    import transformers

    from tests.families import TEXT, save, write_family

    folder.mkdir()
    write_family("qwen3", folder)  # its tokenizer and template; the model is replaced
    config = {**TEXT, "num_hidden_layers": 4, "tie_word_embeddings": False}
    name = "Qwen3"
    if kind == "experts":
        name = "Qwen3Moe"
        config |= {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
        config |= {"norm_topk_prob": True}
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**config)
    )
    model.lm_head.weight.data.mul_(HEAD_SCALE)
    save(model, folder)


def reward(completion: str) -> float:
    return len(completion) % 7 / 7


def first_step(model: Path, output: Path, port: int, step: Step, num_rollouts: int) -> list[float]:
    """Take one step. Return its mismatch_kl, and mean and largest difference of its tokens."""
    import numpy as np

    from verifiers_rl import RLConfig, RLTrainer, env_from
    from verifiers_rl.sync.agreement import logprobs_of_sample

    args = RLConfig(
        output_dir=str(output), overwrite_output_dir=True, use_cpu=True, use_lora=False,
        bf16=step.dtype == "bfloat16", learning_rate=0.0, max_steps=1, batch_size=num_rollouts,
        rollouts_per_example=8, micro_batch_size=num_rollouts, max_seq_len=96,
        max_tokens=MAX_TOKENS, max_off_policy_steps=0, vllm_server_port=port, save_strategy="no",
        disable_tqdm=True, log_rollouts=0, env_workers=0, seed=1,
        **step.options,
    )  # fmt: skip
    prompts = [{"prompt": f"Example number {n}."} for n in range(num_rollouts // 8)]
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = RLTrainer(str(model), env_from(prompts, reward), args)
        trainer.train()
    batch = trainer.batch
    assert batch is not None
    ours = [logprobs_of_sample(trainer.model, sample, args) for sample in batch.samples]
    theirs = [sample.inference_logprobs[sample.loss_mask] for sample in batch.samples]
    apart = np.abs(np.concatenate(ours) - np.concatenate(theirs))
    (logged,) = [row["mismatch_kl"] for row in trainer.state.log_history if "mismatch_kl" in row]
    return [logged, float(apart.mean()), float(apart.max())]


def run(chosen: list[Setting], folder: Path, num_rollouts: int) -> Iterator[list[str]]:
    from tests.conftest import running_server

    for setting in chosen:
        model = folder / setting.model
        if not model.exists():
            write_model(setting.model, model)
        log = folder / "server.log"
        module = "verifiers_rl.inference.server"
        if setting.flags == EXPERTS:
            module = "tests.experts_on_cpu"
        flags = ("--max-num-seqs", "256", *setting.flags)
        with running_server(model, log, *flags, dtype=setting.dtype, module=module) as server:
            for step in setting.steps:
                figures = first_step(model, folder / "run", server.port, step, num_rollouts)
                yield [
                    setting.model, setting.dtype + setting.note, step.dtype, step.remedy,
                    *(f"{figure:.1e}" for figure in figures),
                ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=128)
    parser.add_argument("--fp8", action="store_true")
    options = parser.parse_args()
    import torch

    from verifiers_rl.inference.client import TOKEN_VARIABLE

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(16))
    start = time.monotonic()
    print("| model | server | trainer | with | mismatch_kl | mean | largest |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        chosen = settings_of_fp8() if options.fp8 else settings()
        for row in run(chosen, Path(folder), options.rollouts):
            print(f"| {' | '.join(row)} |", flush=True)
            found.append(row[4])
    print(f"\n{time.monotonic() - start:.0f} s")
    if options.fp8:
        print(f"figure: mismatch_kl {found[0]} with a server in bfloat16, {found[1]} in fp8")


if __name__ == "__main__":
    main()
