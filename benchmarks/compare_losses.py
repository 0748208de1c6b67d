"""Which loss, and which masks? Held-out results of several settings, over seeds and three tasks.

    python benchmarks/compare_losses.py [--tasks small sort demo] [--settings cispo ppo ...]
        [--seeds 0 1 2 3 4] [--folder outputs/compare_losses]

small: the task of examples/reverse_text, from a warm start that stops early, so that the policy
is uncertain of everything and learns slowly; all weights, lr 3e-4, 60 steps of 64 rollouts, 8 of
each prompt.
sort: the letters of a string in alphabetical order; the reward is 1 or 0; the warm start is that of
`make demo`; otherwise as small.
demo: `make demo`, LoRA, lr 1e-3, 150 steps of 128 rollouts, 16 of each prompt; merged weights are
sent, as `lora_sync = "auto"` chooses. demo-adapter sends the adapter, demo-full trains all
weights at lr 3e-4.

Each task has one warm start; the seed determines the prompts' order. The settings of one seed take
turns. Each run prints a row: exact match on 256 held-out prompts (three samplings at
temperature 1), and the means over its steps of mismatch_kl, entropy and the masked or clipped share
of tokens. At the end there is a table of means over seeds, with their standard deviation. Rows are
kept in FOLDER/rows.jsonl, and a run that is there already is not repeated.
"""

import argparse
import contextlib
import io
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

ROOT = Path(__file__).parent.parent
REVERSE_TEXT = ROOT / "examples" / "reverse_text"
sys.path[:0] = [str(ROOT), str(REVERSE_TEXT)]
LETTERS = "abcdefghijklmnopqrstuvwxyz"

__all__ = ["SortTaskset"]  # verifiers.v1 loads this module as a plugin


def ppo_mask(eps_low: float, eps_high: float) -> dict[str, Any]:
    return {"gradient_masks": {"ppo": {"eps_low": eps_low, "eps_high": eps_high}}}


def divergence_mask(name: str, max_divergence: float) -> dict[str, Any]:
    return {"gradient_masks": {name: {"max_divergence": max_divergence}}}


# Options of `RLConfig`, by the name that --settings takes. What follows a "+" is a mask and its
# bounds.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "cispo": {"gradient_masks": {}},
    "ppo": {"loss": "ppo", "loss_args": {"eps_low": 0.2, "eps_high": 0.2}},
    "cispo+ppo-0.1": ppo_mask(0.1, 0.1),
    "cispo+ppo-0.2": ppo_mask(0.2, 0.2),
    "cispo+ppo-0.2-0.28": ppo_mask(0.2, 0.28),
    "cispo+ppo-low": ppo_mask(0.2, 100.0),
    "cispo+ppo-high": ppo_mask(0.999, 0.2),
    "cispo+dppo-0.02": divergence_mask("dppo", 0.02),
    "cispo+dppo-0.05": divergence_mask("dppo", 0.05),
    "cispo+dppo-0.1": divergence_mask("dppo", 0.1),
    "cispo+dppo-0.2": divergence_mask("dppo", 0.2),
    "cispo+ipo-0.1": divergence_mask("ipo", 0.1),
    "cispo+ipo-0.3": divergence_mask("ipo", 0.3),
    "cispo+ratio": {"gradient_masks": {"ratio": {"min_ratio": 0.5, "max_ratio": 2.0}}},
    "cispo+sequence_mean": {"gradient_masks": {"sequence_mean": {}}},
    "truncated_is": {"loss": "truncated_is", "gradient_masks": {}},
    "on policy": {"max_off_policy_steps": 0, "gradient_masks": {}},
}
DEMO: dict[str, Any] = {
    "learning_rate": 1e-3, "max_steps": 150, "batch_size": 128, "rollouts_per_example": 16,
    "warmup_steps": 10, "lr_scheduler_type": "constant_with_warmup",
}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "small": {"use_lora": False, "learning_rate": 3e-4, "max_steps": 60, "batch_size": 64,
              "rollouts_per_example": 8},
    "sort": {"use_lora": False, "learning_rate": 3e-4, "max_steps": 60, "batch_size": 64,
             "rollouts_per_example": 8},
    "demo": DEMO,
    "demo-adapter": {**DEMO, "lora_sync": "adapter"},
    "demo-full": {**DEMO, "use_lora": False, "learning_rate": 3e-4},
}  # fmt: skip
WARM_STARTED = ("small", "sort", "demo")  # the others begin as "demo"
# Arguments of examples/warm_start.py
WARM_START = {"small": ["--clean-steps", "120", "--noisy-steps", "0"]}


class SortConfig(vf.TasksetConfig):
    held_out: bool = False
    num_tasks: int = 4096


class SortData(vf.TaskData):
    answer: str


class SortTask(vf.Task[SortData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def exact_match(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class SortTaskset(vf.Taskset[SortTask, SortConfig]):
    def load(self) -> Iterator[SortTask]:
        rng, seen = random.Random(0), set[str]()
        while len(seen) < self.config.num_tasks:
            text = "".join(rng.choices(LETTERS, k=rng.randint(3, 6)))
            if text in seen or (sum(map(ord, text)) % 16 == 0) != self.config.held_out:
                continue
            data = SortData(idx=len(seen), prompt=text, answer="".join(sorted(text)))
            seen.add(text)
            yield SortTask(data, self.config.task)


def demonstrations(num: int, seed: int, noise: float) -> list[dict[str, Any]]:
    """Make demonstrations of "sort" for examples/warm_start.py; see those of reverse_text."""
    rng = random.Random(seed)
    conversations = []
    for _ in range(num):
        text = "".join(rng.choices(LETTERS, k=rng.randint(3, 6)))
        answer = "".join(rng.choice(LETTERS) if rng.random() < noise else c for c in sorted(text))
        roles = (("user", text), ("assistant", answer))
        conversations.append({"messages": [{"role": r, "content": c} for r, c in roles]})
    return conversations


def make_env(task: str) -> Any:
    from verifiers_rl.envs.v1_loading import load_v1_environment

    if task == "sort":
        taskset: dict[str, Any] = {"id": "compare_losses"}
    else:
        taskset = {"id": "reverse_text", "instruction": ""}
    held_out = {**taskset, "held_out": True, "num_tasks": 256}
    return load_v1_environment(
        {"taskset": taskset, "eval_taskset": held_out, "agent": {"harness": {"id": "null"}}}
    )


def train(
    task: str, setting: str, seed: int, model: Path, port: int, folder: Path
) -> dict[str, Any]:
    """Train once; return the row."""
    from verifiers_rl import RLConfig, RLTrainer

    options = {
        "max_seq_len": 64, "max_tokens": 16, "temperature": 1.0, "logging_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        "micro_batch_size": 128, "eval_rollouts_per_example": 3, "overwrite_output_dir": True,
        "output_dir": str(folder / "run"), "vllm_server_port": port, "seed": seed,
        "env_workers": 0,
    }  # fmt: skip
    args = RLConfig(**{**options, **TASKS[task], **SETTINGS[setting]})
    start = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = RLTrainer(str(model), make_env(task), args)
        trainer.train()
        evaluated = trainer.evaluate()
    steps = [row for row in trainer.state.log_history if "step_s" in row]

    def mean(*names: str) -> float:
        return statistics.mean(row[name] for row in steps for name in names if name in row)

    shares = {name for row in steps for name in row if name.startswith("masked_share/")}
    return {
        "task": task,
        "setting": setting,
        "seed": seed,
        "exact_match": evaluated["eval_exact_match"],
        "mismatch_kl": mean("mismatch_kl"),
        "entropy": mean("entropy"),
        "masked_share": mean(*shares) if shares else mean("clipped_share"),
        "step_s": statistics.median(row["step_s"] for row in steps),
        "sync_s": mean("sync_s"),
        "seconds": time.monotonic() - start,
    }


def exact_match_at_start(task: str, model: Path, port: int, folder: Path) -> dict[str, Any]:
    from verifiers_rl import RLConfig, RLTrainer

    args = RLConfig(
        output_dir=str(folder / "start"), overwrite_output_dir=True, use_cpu=True, use_lora=False,
        vllm_server_port=port, max_seq_len=64, max_tokens=16, temperature=1.0, disable_tqdm=True,
        eval_rollouts_per_example=3, env_workers=0,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        evaluated = RLTrainer(str(model), make_env(task), args).evaluate()
    return {
        "task": task,
        "setting": "start",
        "seed": 0,
        "exact_match": evaluated["eval_exact_match"],
    }


def print_means(rows: list[dict[str, Any]]) -> None:
    names = ("mismatch_kl", "entropy", "masked_share", "step_s", "sync_s")
    print("| task | setting | seeds | exact match | sd |", " | ".join(names), "|")
    print("|", " | ".join(["---"] * (len(names) + 5)), "|")
    settings = dict.fromkeys((row["task"], row["setting"]) for row in rows)
    for task, setting in settings:
        of_it = [row for row in rows if (row["task"], row["setting"]) == (task, setting)]
        values = [row["exact_match"] for row in of_it]
        spread = statistics.stdev(values) if len(values) > 1 else float("nan")
        means = " | ".join(
            f"{statistics.mean(row[name] for row in of_it):.3g}" if name in of_it[0] else ""
            for name in names
        )
        result = f"{len(of_it)} | {statistics.mean(values):.3f} | {spread:.3f}"
        print(f"| {task} | {setting} | {result} | {means} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(WARM_STARTED))
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=["cispo", "ppo"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "compare_losses")
    options = parser.parse_args()

    import torch

    from tests.conftest import running_server
    from verifiers_rl.inference.client import TOKEN_VARIABLE

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(16))
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "rows.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        with kept.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    for task in options.tasks:
        module = Path(__file__) if task == "sort" else REVERSE_TEXT / "reverse_text.py"
        model = folder / f"warm_start_{task.partition('-')[0]}"
        if not model.exists():
            command = [sys.executable, str(ROOT / "examples" / "warm_start.py"), str(module)]
            command += [str(model), *WARM_START.get(task, [])]
            subprocess.run(command, check=True, capture_output=True)
        done = {(row["task"], row["setting"], row["seed"]) for row in rows}
        todo = [(s, seed) for seed in options.seeds for s in options.settings]
        todo = [(s, seed) for s, seed in todo if (task, s, seed) not in done]
        if not todo:
            continue
        flags = ["--max-num-seqs", "256"]
        if TASKS[task].get("lora_sync") == "adapter":
            flags += ["--enable-lora", "--max-lora-rank", "16"]
        with running_server(model, folder / "server.log", *flags) as server:
            if task in WARM_STARTED and (task, "start", 0) not in done:
                keep(exact_match_at_start(task, model, server.port, folder))
            for setting, seed in todo:
                keep(train(task, setting, seed, model, server.port, folder))
    print_means([row for row in rows if row["task"] in options.tasks])


if __name__ == "__main__":
    main()
