"""Seconds of a training step on short rollouts, where all that is not the model counts most.

    python benchmarks/short_steps.py [--steps 40] [--rounds 3] [--env-workers 0 1]
        [--envs v1 env_from] [--unshared]

A step trains all weights of a model of 0.9 M parameters on 64 rollouts: 8 prompts of 33 tokens, 8
replies of 6 tokens to each. The real vf-vllm serves the model and has the first core, the real
RLTrainer and its rollout workers have the rest. One thread each. Runs of all settings take turns;
each figure is the median over the steps of all rounds, without the first 5 of each run. With
--unshared, each rollout's prompt is computed for itself (`share_prefixes=False`).
"""

import argparse
import contextlib
import io
import itertools
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf1

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
BATCH_SIZE, GROUP, PROMPT_TOKENS, REPLY_TOKENS, NUM_WARMUP = 64, 8, 33, 6, 5

__all__ = ["ShortTaskset"]  # verifiers.v1 loads this module as a plugin


def prompt_of(number: int, length: int) -> str:
    return f"{number:04d}".ljust(length, "?")


def score(text: str) -> float:
    """Return the share of characters that are lower-case letters."""
    return sum(c.islower() for c in text) / max(len(text), 1)


class ShortConfig(vf1.TasksetConfig):
    prompt_length: int = 4


class ShortTask(vf1.Task[vf1.TaskData, vf1.State, vf1.TaskConfig]):
    @vf1.reward
    async def lower_case(self, trace: vf1.Trace) -> float:
        return score(trace.last_reply)


class ShortTaskset(vf1.Taskset[ShortTask, ShortConfig]):
    def load(self) -> Iterator[ShortTask]:
        for i in range(1024):
            prompt = prompt_of(i, self.config.prompt_length)
            yield ShortTask(vf1.TaskData(idx=i, prompt=prompt), self.config.task)


def lower_case(completion: str) -> float:
    return score(completion)


def make_env(kind: str, prompt_length: int) -> Any:
    from verifiers_rl import env_from
    from verifiers_rl.envs.v1_loading import load_v1_environment

    if kind == "env_from":
        rows = [{"prompt": prompt_of(number, prompt_length)} for number in range(1024)]
        return env_from(rows, lower_case)
    taskset = {"id": "short_steps", "prompt_length": prompt_length}
    return load_v1_environment({"taskset": taskset, "agent": {"harness": {"id": "null"}}})


def time_steps(
    model: str, env: Any, port: int, folder: str, env_workers: int, options: argparse.Namespace
) -> Any:
    """Train; return the seconds of each step but the first ones."""
    from transformers import TrainerCallback

    from verifiers_rl import RLConfig, RLTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    args = RLConfig(
        output_dir=f"{folder}/run", overwrite_output_dir=True, use_cpu=True, use_lora=False,
        vllm_server_port=port, max_steps=options.steps, batch_size=BATCH_SIZE,
        rollouts_per_example=GROUP, max_seq_len=64, max_tokens=REPLY_TOKENS, temperature=1.0,
        learning_rate=1e-5, save_strategy="no", logging_steps=10,
        micro_batch_size=BATCH_SIZE, env_workers=env_workers, disable_tqdm=True,
        share_prefixes=not options.unshared,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = RLTrainer(model, env, args)
        trainer.add_callback(Clock())
        trainer.train()
    assert trainer.batch is not None
    lengths = {len(sample.token_ids) for sample in trainer.batch.samples}
    assert max(lengths) == PROMPT_TOKENS + REPLY_TOKENS, lengths
    return [after - before for before, after in itertools.pairwise(ends[NUM_WARMUP:])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--env-workers", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--envs", nargs="+", choices=["v1", "env_from"], default=["v1", "env_from"])
    parser.add_argument("--unshared", action="store_true")
    options = parser.parse_args()

    import torch
    from warm_start import make_model, make_tokenizer

    from tests.conftest import running_server
    from verifiers_rl.inference.client import TOKEN_VARIABLE

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(16))
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        tokenizer = make_tokenizer()
        make_model(tokenizer).save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
        empty = tokenizer.apply_chat_template(
            [{"role": "user", "content": ""}], add_generation_prompt=True, return_dict=False
        )
        prompt_length = PROMPT_TOKENS - len(empty)
        settings = [*itertools.product(options.envs, options.env_workers)]
        seconds: dict[tuple[str, int], list[float]] = {setting: [] for setting in settings}
        flags = ("--max-num-seqs", "256")
        with running_server(Path(folder, "model"), Path(folder, "log"), *flags) as server:
            for _ in range(options.rounds):
                for kind, workers in settings:
                    env = make_env(kind, prompt_length)
                    seconds[kind, workers] += time_steps(
                        f"{folder}/model", env, server.port, folder, workers, options
                    )
    print("| environment | env_workers | step s | over the first row |")
    print("| --- | --- | --- | --- |")
    first = statistics.median(seconds[settings[0]])
    for (kind, workers), times in seconds.items():
        median = statistics.median(times)
        print(f"| {kind} | {workers} | {median:.3f} | {median / first:.2f} |")


if __name__ == "__main__":
    main()
