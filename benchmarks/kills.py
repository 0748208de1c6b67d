"""Is a run that is killed again and again the run that it would have been?

    python benchmarks/kills.py                         # ten times SIGKILL, SIGTERM and Ctrl-C each
    python benchmarks/kills.py --kills 3 --steps 40

One run trains without a stop. For each kind of kill another run is killed at a random moment,
resumed, killed again, and so on, until it is at its end. Both must have trained on the same
examples, with the same losses to 1e-4 in each step, and metrics.jsonl must have each step once.
Training is synchronous (max_off_policy_steps = 0), with LoRA and dropout, and with an evaluation
every five steps. A stand-in for server and environment makes each batch from its step's number.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
KINDS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}


def train(folder: Path, options: argparse.Namespace) -> None:
    """Train, in this process, from the newest checkpoint if there is one."""
    from tests.helpers import StubSink, StubSource, load_example, make_tiny_model
    from verifiers_rl import RLConfig, RLTrainer
    from verifiers_rl.report.run_folder import newest_checkpoint, traces_of_a_run

    class SlowSource(StubSource):
        def get(self) -> Any:
            time.sleep(0.1)
            batch = super().get()
            for rollout in batch.rollouts:
                rollout.example_id = batch.step
            return batch

    newest = newest_checkpoint(folder)
    args = RLConfig(
        output_dir=str(folder), use_cpu=True, use_lora=True, lora_dropout=0.1, batch_size=32,
        rollouts_per_example=4, max_tokens_per_microbatch=64, max_seq_len=64, max_tokens=16,
        max_steps=options.steps, learning_rate=1e-3, save_steps=3, save_total_limit=2,
        max_off_policy_steps=0, eval_strategy="steps", eval_steps=5, eval_examples=8,
        disable_tqdm=True,
        # Nothing is saved before the first checkpoint: begin again.
        overwrite_output_dir=newest is None and bool(traces_of_a_run(folder)),
    )  # fmt: skip
    trainer = RLTrainer(
        make_tiny_model(), None, args, load_example("warm_start").make_tokenizer(),
        orchestrator=SlowSource(32), weight_sync=StubSink(),
    )  # fmt: skip
    print("ready", flush=True)
    trainer.train(resume_from_checkpoint=newest is not None)


def run_to_its_end(
    folder: Path, options: argparse.Namespace, kind: str | None, rng: random.Random
) -> list[str]:
    """Train to the end; with `kind`, kill the trainer at random moments. Returns how each ended."""
    words = ["--train", str(folder), "--steps", str(options.steps)]
    ended: list[str] = []
    while True:
        process = subprocess.Popen(
            [sys.executable, __file__, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == "ready\n":
                break
        if kind is not None and len(ended) < options.kills:
            time.sleep(rng.uniform(0.0, options.longest_s))
            process.send_signal(KINDS[kind])
        rest, _ = process.communicate(timeout=1800)
        ended.append(str(process.returncode))
        if process.returncode == 0:
            return ended
        if kind is None or len(ended) > options.kills:
            raise RuntimeError("".join(lines) + rest)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def compare(folder: Path, expected: Path) -> dict[str, Any]:
    """What is the same in both runs, and the largest difference of a loss."""
    import pyarrow.parquet as pq

    def examples(of: Path) -> list[Any]:
        keys = ["step", "split", "example", "reward", "num_tokens"]
        rows = pq.read_table(of / "rollouts", columns=keys).to_pylist()
        return sorted(tuple(row.values()) for row in rows)

    def steps(of: Path, name: str) -> list[int]:
        return [row["step"] for row in rows_of(of) if name in row]

    losses = [
        {row["step"]: row["loss"] for row in rows_of(of) if "loss" in row}
        for of in (folder, expected)
    ]
    train = [row for row in examples(folder) if row[1] == "train"]
    return {
        "steps once": steps(folder, "loss") == list(range(1, len(losses[1]) + 1)),
        "evaluations": f"{steps(folder, 'eval_reward')}",
        "same examples": train == [row for row in examples(expected) if row[1] == "train"],
        "largest loss difference": max(abs(losses[0][s] - losses[1][s]) for s in losses[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--longest-s", type=float, default=4.0, help="until a kill, since train()")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options)
        return
    # A shell starts commands in the background with Ctrl-C ignored, and a process passes that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_to_its_end(folder / "straight", options, None, rng)
        print("| kill | ended with | steps once | evaluations | same examples | loss difference |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        for kind in options.kinds:
            ended = run_to_its_end(folder / kind, options, kind, rng)
            found = compare(folder / kind, folder / "straight")
            cells = [kind, " ".join(ended), *(str(value) for value in found.values())]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
