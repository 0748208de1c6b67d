"""What grows while a run goes on? The demo's run for half an hour, with many checkpoints.

    python benchmarks/soak.py [--minutes 30] [--save-steps 200] [--model FOLDER] [--samples FILE]

`vf-rl @ examples/reverse_text/rl.toml`: the real server, the trainer, rollouts in two workers, 64
rollouts a step, each step logged, two checkpoints kept. Every 30 s a sample is taken of each
process, with those that it has started, and of the run's folder. Printed is the slope of each over
the steps, by least squares over the last two thirds of the run, with its standard error, beside
what was predicted. Without --model the demo's model is made first, in some minutes.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
SAMPLE_S = 30.0
# What each step adds; all else is predicted to stay. Trainer keeps each step's metrics in memory
# and in trainer_state.json. A file of rollouts is written every 10 s.
PREDICTED = {
    "trainer RSS (KB)": 11.0, "trainer_state.json (KB)": 1.5, "rollouts (KB)": 8.0,
    "rollouts files": 0.05, "folder files": 0.05, "folder (KB)": 14.0,
}  # fmt: skip
PARTS = {"vf-rl": "cli.rl", "server": "inference.server", "trainer": "cli.train"}


def sample_processes(run: int) -> dict[str, float]:
    """RSS, open files and threads of each part of the run. What a part has started counts to it,
    but the rollout workers are a part of their own.
    """
    import psutil

    root, found, parts = psutil.Process(run), dict[str, float](), dict[int, str]()
    for process in [root, *root.children(recursive=True)]:  # a parent comes before its children
        with suppress(psutil.NoSuchProcess):  # it has just ended
            words, above = " ".join(process.cmdline()), parts.get(process.ppid(), "vf-rl")
            started = "workers" if above == "trainer" else above
            part = next((name for name, word in PARTS.items() if word in words), started)
            parts[process.pid] = part
            numbers = {"RSS (KB)": process.memory_info().rss / 1024}
            numbers |= {"open files": process.num_fds(), "threads": process.num_threads()}
            for name, number in numbers.items():
                found[f"{part} {name}"] = found.get(f"{part} {name}", 0.0) + number
    return found


def sample_folder(folder: Path) -> dict[str, float]:
    sizes = dict[Path, float]()
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # of a checkpoint that is removed now
            sizes[path] = path.stat().st_size / 1024 if path.is_file() else 0.0
    states = [size for path, size in sizes.items() if path.name == "trainer_state.json"]
    rollouts = [size for path, size in sizes.items() if path.parent.name == "rollouts"]
    found = {"folder files": len(sizes), "folder (KB)": sum(sizes.values())}
    found |= {"rollouts files": len(rollouts), "rollouts (KB)": sum(rollouts)}
    return found | {"trainer_state.json (KB)": max(states, default=0.0)}


def steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    steps = re.findall(r'"step": ?(\d+)', path.read_text("utf-8")) if path.is_file() else []
    return int(steps[-1]) if steps else 0


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--save-steps", type=int, default=200)
    parser.add_argument("--model", type=Path, help="the demo's, if it is made already")
    parser.add_argument("--samples", default=os.devnull, help="a file for all samples")
    options = parser.parse_args()

    import numpy as np

    from tests.conftest import Started, free_port, train_warm_start

    with tempfile.TemporaryDirectory() as name, open(options.samples, "w", buffering=1) as lines:
        folder, model, samples = Path(name, "run"), options.model or Path(name, "model"), []
        if options.model is None:
            train_warm_start(model)
        keys = {
            "run_name": "soak", "output_dir": str(folder), "vllm_server_port": free_port(),
            "max_steps": 10**6, "batch_size": 64, "rollouts_per_example": 8, "env_workers": 2,
            "learning_rate": 1e-5, "logging_steps": 1, "save_strategy": "steps",
            "save_steps": options.save_steps, "save_total_limit": 2, "eval_strategy": "no",
        }  # fmt: skip
        words = [sys.executable, "-c", "from verifiers_rl.cli.rl import main; main()"]
        words += ["@", str(ROOT / "examples/reverse_text/rl.toml"), "--model", str(model)]
        words += [w for key, value in keys.items() for w in (f"--trainer.args.{key}", str(value))]
        with Started(words, {**os.environ, "PYTHONPATH": str(ROOT)}, Path(name, "log")) as started:
            started.wait_until(lambda: steps_done(folder) >= 10)
            end = time.monotonic() + 60 * options.minutes
            while time.monotonic() < end and started.process.poll() is None:
                time.sleep(SAMPLE_S)
                numbers = {"steps": steps_done(folder)} | sample_folder(folder)
                samples.append(numbers | sample_processes(started.process.pid))
                lines.write(json.dumps(samples[-1]) + "\n")
            if started.process.poll() is not None:
                raise RuntimeError(started.said()[-6000:])
    steady = samples[len(samples) // 3 :]
    steps = [sample["steps"] for sample in steady]
    print(f"{samples[-1]['steps']} steps\n| what | first | last | a step | +- | predicted |")
    print("| --- | --- | --- | --- | --- | --- |")
    for what in (name for name in samples[-1] if name != "steps"):
        values = [sample[what] for sample in steady]
        (slope, _), covariance = np.polyfit(steps, values, 1, cov=True)
        found = f"{values[0]:.0f} | {values[-1]:.0f} | {slope:.3f} | {covariance[0, 0] ** 0.5:.3f}"
        print(f"| {what} | {found} | {PREDICTED.get(what, 0.0)} |")


if __name__ == "__main__":
    main()
