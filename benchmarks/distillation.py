"""What does a teacher save? Rollouts and seconds until 0.8 held-out exact match.

    python benchmarks/distillation.py [--methods rl opd sft] [--seeds 0 1 2]
        [--folder outputs/distillation] [--plot FILE]

A student learns to reverse strings (examples/reverse_text), LoRA, lr 1e-3:

    rl        from rewards: `make demo`, batches of 128 rollouts, 16 of each prompt
    opd       from the teacher's logprobs of its own rollouts, 32 a batch, 4 of each prompt
    sft       from the teacher's answers, which `vf-rl generate` writes: 32 a batch, each once

The student is the warm start of `make demo`. The teacher is a warm start of another seed, of 300
clean steps. A run ends at the first evaluation (256 held-out prompts, one answer each at
temperature 1) that reaches --target, or after the steps of its method; with sft, its checkpoints
are evaluated afterwards. Its rollouts are those of the student, or with sft the teacher's answers.
Its seconds are those of the steps up to there (with sft also those of generating these answers)
without the wait for evaluations. The teacher's training counts in neither.

Prints a row for each run and a table of medians over seeds, and draws all curves. Rows are kept in
FOLDER/rows.jsonl, and a run that is there already is not repeated.
"""

import argparse
import contextlib
import io
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ledger import DEMO, REVERSE_TEXT, ROOT, make_env, score_at_start

WARM_STARTS = {  # arguments of examples/warm_start.py
    "teacher": ["--clean-steps", "300", "--noisy-steps", "0", "--seed", "1"],
    "student": [],
}
NUM_PROMPTS = 2048  # that the teacher answers for sft
SMALL = {**DEMO, "batch_size": 32, "rollouts_per_example": 4, "warmup_steps": 2}
METHODS: dict[str, dict[str, Any]] = {
    "rl": {"args": DEMO, "eval_steps": 5},
    "opd": {"args": SMALL, "eval_steps": 5},
    "sft": {"args": SMALL, "eval_steps": 5},
}
COLORS = dict(zip(METHODS, ("C0", "C1", "C2"), strict=True))


def stop_at(target: float) -> Any:
    """A callback that ends a run at the first evaluation that reaches the target."""
    from transformers import TrainerCallback

    class StopAt(TrainerCallback):
        def on_evaluate(
            self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
        ) -> Any:
            control.should_training_stop |= metrics["eval_exact_match"] >= target
            return control

    return StopAt()


def options_of(method: str, seed: int, folder: Path, port: int) -> dict[str, Any]:
    common = {
        "max_seq_len": 64, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
        "use_cpu": True, "micro_batch_size": 128, "overwrite_output_dir": True, "env_workers": 0,
        "output_dir": str(folder / "run"), "vllm_server_port": port, "seed": seed,
        "eval_strategy": "steps", "eval_on_start": True, "eval_examples": 256,
        "eval_steps": METHODS[method]["eval_steps"], "max_tokens": 16,
    }  # fmt: skip
    return {**common, **METHODS[method]["args"]}


def generate(seed: int, teacher: Any, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Let the teacher answer each training prompt, through `vf-rl generate`. Return the rows and
    its seconds.
    """
    from verifiers_rl.inference.client import TOKEN_VARIABLE

    data = folder / f"sft_{seed}.jsonl"
    data.unlink(missing_ok=True)
    command = [sys.executable, "-m", "verifiers_rl.cli.rl", "generate"]
    command += ["@", str(REVERSE_TEXT / "rl.toml"), "--model", teacher.model, "-o", str(data)]
    command += ["-n", "1", "--examples", str(NUM_PROMPTS)]
    command += ["--endpoint", f"{teacher.base_url}/v1", teacher.model]
    command += ["--api-key-var", TOKEN_VARIABLE]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    seconds = time.monotonic() - start
    if done.returncode:
        raise SystemExit(f"distillation.py: {' '.join(command)}\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    return rows, seconds


def train(
    method: str, seed: int, model: Path, port: int, teacher: Any, folder: Path, target: float
) -> dict[str, Any]:
    """Train once; return the row."""
    from verifiers_rl import RLConfig, RLTrainer, WeightedEnv
    from verifiers_rl.distill import Distillation
    from verifiers_rl.sft import SFTConfig, SFTTrainer

    options = options_of(method, seed, folder, port)
    env, callbacks = make_env("demo"), [stop_at(target)]
    trainer: Any
    rollouts_per_step, extra_s = float(options["batch_size"]), 0.0
    if method == "sft":
        rows, generation_s = generate(seed, teacher, folder)
        rollouts_per_step *= NUM_PROMPTS / len(rows)
        extra_s = generation_s / len(rows) * options["batch_size"]  # for a step
        own = (
            *("batch_size", "micro_batch_size", "max_seq_len", "learning_rate", "warmup_steps"),
            *("lr_scheduler_type", "logging_steps", "use_cpu", "disable_tqdm", "seed"),
            *("overwrite_output_dir", "output_dir"),
        )
        args = SFTConfig(
            **{name: options[name] for name in own},
            save_strategy="steps",
            save_steps=options["eval_steps"],
        )
        trainer = SFTTrainer(str(model), args, rows)
    else:
        if method == "opd":
            env = [WeightedEnv(env, "reverse_text", scorer=Distillation(teacher, "opd"))]
        args = RLConfig(**options, temperature=1.0)
        trainer = RLTrainer(str(model), env, args, callbacks=callbacks)
    start = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    row = {"method": method, "seed": seed, "run_s": time.monotonic() - start}
    history = list(trainer.state.log_history)
    if method == "sft":
        for checkpoint in sorted((folder / "run").glob("checkpoint-*")):
            options["output_dir"] = str(folder / "judged")
            judge = RLTrainer(str(checkpoint), env, RLConfig(**options, temperature=1.0))
            step = int(checkpoint.name.removeprefix("checkpoint-"))
            history.append({**judge.evaluate(), "step": step, "eval_wait_s": 0.0})
    steps = {entry["step"]: entry for entry in history if "step_s" in entry}
    evaluations = {e["step"]: e for e in history if "eval_exact_match" in e}
    curve = []
    for step in sorted(evaluations):
        seconds = sum(steps[s]["step_s"] + extra_s for s in steps if s <= step)
        seconds -= sum(evaluations[s]["eval_wait_s"] for s in evaluations if s < step)
        point = (step * rollouts_per_step, seconds, evaluations[step]["eval_exact_match"])
        curve.append([round(value, 4) for value in point])
    name = "reverse_text/teacher_kl"
    kls = [steps[s][name] for s in sorted(steps) if name in steps[s]]
    return {**row, "curve": curve, "teacher_kl": kls[:: max(len(kls) // 8, 1)]}


def reached(row: dict[str, Any], target: float) -> tuple[float, float] | None:
    """Rollouts and seconds until the first evaluation that reaches the target."""
    return next(((r, s) for r, s, exact in row["curve"] if exact >= target), None)


def print_table(rows: list[dict[str, Any]], target: float) -> None:
    names = f"rollouts to {target:g} | seconds to {target:g} | of each seed"
    print(f"| method | seeds | reached | {names} | of rl's rollouts | exact, best |")
    print("|", " | ".join(["---"] * 8), "|")
    base: float | None = None
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        found = [at for row in own if (at := reached(row, target))]
        if not own:
            continue
        best = statistics.median(max(exact for *_, exact in row["curve"]) for row in own)
        head = f"| {method} | {len(own)} | {len(found)} |"
        if not found:
            print(f"{head} never | never | | | {best:.3f} |")
            continue
        num_rollouts = statistics.median(r for r, _ in found)
        base = num_rollouts if method == "rl" else base
        share = f"{num_rollouts / base:.2f}" if base else ""
        each = ", ".join(f"{r:.0f}" for r, _ in found)
        seconds = statistics.median(s for _, s in found)
        print(f"{head} {num_rollouts:.0f} | {seconds:.0f} | {each} | {share} | {best:.3f} |")


def draw(rows: list[dict[str, Any]], target: float, path: Path) -> None:
    """Draw exact match over rollouts and over seconds, a line for each run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, column, name in zip(
        figure.subplots(1, 2), (0, 1), ("rollouts", "seconds"), strict=True
    ):
        labelled = set[str]()
        for row in rows:
            label = None if row["method"] in labelled else row["method"]
            labelled.add(row["method"])
            x = [point[column] for point in row["curve"]]
            y = [point[2] for point in row["curve"]]
            axes.plot(x, y, ".-", color=COLORS[row["method"]], label=label, alpha=0.8)
        axes.axhline(target, color="0.5", linestyle=":")
        axes.set_xscale("symlog", linthresh=100 if column == 0 else 10)
        axes.set_xlim(left=0)
        axes.set_xlabel(name)
        axes.set_ylabel("held-out exact match")
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "distillation")
    parser.add_argument("--plot", type=Path, help="default: FOLDER/curves.png")
    options = parser.parse_args()

    import torch

    from tests.conftest import running_server
    from verifiers_rl.distill import Teacher
    from verifiers_rl.inference.client import TOKEN_VARIABLE

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(16))
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "rows.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    for name in WARM_STARTS:
        if not (folder / name).exists():
            command = [sys.executable, str(ROOT / "examples" / "warm_start.py")]
            command += [str(REVERSE_TEXT / "reverse_text.py"), str(folder / name)]
            subprocess.run([*command, *WARM_STARTS[name]], check=True, capture_output=True)
    done = {(row["method"], row["seed"]) for row in rows}
    todo = [(m, seed) for seed in options.seeds for m in options.methods if (m, seed) not in done]
    if todo:
        model, own = folder / "teacher", folder / "student"
        with running_server(model, folder / "teacher.log", "--max-num-seqs", "256") as teaching:
            exact = score_at_start("demo", model, teaching.port, folder)
            print(f"the teacher's exact match: {exact:.3f}", flush=True)
            teacher = Teacher(str(model), teaching.url, TOKEN_VARIABLE)
            with running_server(own, folder / "student.log", "--max-num-seqs", "256") as server:
                for method, seed in todo:
                    row = train(method, seed, own, server.port, teacher, folder, options.target)
                    rows.append(row)
                    with kept.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    at = reached(row, options.target) or ("never", "never")
                    print(f"{method} seed {seed}: rollouts and seconds to {options.target:g}: "
                          f"{at[0]}, {at[1]}; {row['run_s']:.0f} s in all", flush=True)  # fmt: skip
    print_table(rows, options.target)
    draw(rows, options.target, options.plot or folder / "curves.png")


if __name__ == "__main__":
    main()
