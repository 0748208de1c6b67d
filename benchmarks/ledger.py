"""A ledger of runs: what a loss, an advantage or a trainer is worth, on four small tasks.

    python benchmarks/ledger.py                                       the answer of all rows so far
    python benchmarks/ledger.py --name mine --loss my_loss:fn         your idea beside the default
    python benchmarks/ledger.py --settings default ppo --seeds 0 1    settings of this library

docs/ledger.md says how an idea is entered, and what the columns are. No GPU is used. All tasks
train all weights or an adapter of a model of 0.9 M parameters, from a warm start that is made once:

    small       reverse a string (examples/reverse_text); the warm start stops early, so the policy
                is uncertain of everything and learns slowly. 64 rollouts a step, 8 of each prompt
    sort        the letters of a string in alphabetical order; the reward is 1 or 0. As small
    demo        `make demo`, LoRA, 128 rollouts a step, 16 of each prompt. The weights are merged
                where they are sent. demo-adapter sends the adapter, demo-full trains all weights
    calculator  examples/calculator: two replies of up to 80 tokens, and a tool between them

A run leaves one row, in FOLDER/rows.csv, and a row that is there is not run again. The seed
determines the order of the prompts; the server samples with its own. The runs of one seed take
turns, so that a machine that slows down does so for all. One server serves all runs of a task.
"""

import argparse
import contextlib
import csv
import hashlib
import importlib.util
import io
import json
import os
import platform
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
CALCULATOR = ROOT / "examples" / "calculator"
LEDGER, PLOT = ROOT / "benchmarks" / "ledger.csv", ROOT / "docs" / "images" / "ledger.png"
sys.path[:0] = [str(ROOT), str(REVERSE_TEXT), str(CALCULATOR)]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_POINTS = 10  # of a run's curve
# Columns of a row. The last three are lists of numbers, one for each point of the curve.
FIELDS = (
    "task", "name", "seed", "steps", "idea", "rollouts", "start", "held_out", "step_s",
    "mismatch_kl", "entropy", "masked_share", "machine", "commit", "date",
    "wall_s", "reward", "score",
)  # fmt: skip
KEY = ("task", "name", "seed", "steps", "machine")
Row = dict[str, Any]

__all__ = ["SortTaskset"]  # verifiers.v1 loads this module as a plugin


# --- What is compared -----------------------------------------------------------------------------


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
SMALL: dict[str, Any] = {
    "use_lora": False, "learning_rate": 3e-4, "max_steps": 60, "batch_size": 64,
    "rollouts_per_example": 8,
}  # fmt: skip
DEMO: dict[str, Any] = {
    "learning_rate": 1e-3, "max_steps": 150, "batch_size": 128, "rollouts_per_example": 16,
    "warmup_steps": 10, "lr_scheduler_type": "constant_with_warmup",
}  # fmt: skip
SHORT_DEMO = {**DEMO, "max_steps": 50}
# Options of `RLConfig`, by task.
TASKS: dict[str, dict[str, Any]] = {
    "small": SMALL,
    "sort": SMALL,
    "demo": SHORT_DEMO,
    "calculator": {
        **DEMO, "use_lora": False, "learning_rate": 3e-4, "max_steps": 24, "batch_size": 64,
        "max_seq_len": 192, "max_tokens": 80, "warmup_steps": 5, "eval_rollouts_per_example": 1,
    },
    "demo-adapter": {**SHORT_DEMO, "lora_sync": "adapter"},
    "demo-full": {**SHORT_DEMO, "use_lora": False, "learning_rate": 3e-4},
}  # fmt: skip
OF_LEDGER = ("small", "sort", "demo", "calculator")
# By task: what is scored, and the score that the answer gives the time to.
SCORES = {"calculator": "right_answer"}  # the others: exact_match
TARGETS = {"small": 0.22, "sort": 0.4, "calculator": 0.7}  # the others: 0.6
# Arguments of examples/warm_start.py
WARM_STARTS = {
    "small": ["--clean-steps", "120", "--noisy-steps", "0"],
    "calculator": ["--clean-steps", "400", "--noise", "0.06"],
}
SERVER_FLAGS = {
    "demo-adapter": ["--enable-lora", "--max-lora-rank", "16"],
    "calculator": [
        "--max-model-len", "192", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"
    ],
}  # fmt: skip


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

    taskset: dict[str, Any] = {"id": "reverse_text", "instruction": ""}
    agent: dict[str, Any] = {"harness": {"id": "null"}}
    if task == "sort":
        taskset = {"id": "ledger"}
    elif task == "calculator":
        taskset, agent = {"id": "calculator"}, {"max_turns": 3}
    held_out = {**taskset, "held_out": True, "num_tasks": 256}
    return load_v1_environment({"taskset": taskset, "eval_taskset": held_out, "agent": agent})


def make_warm_start(task: str, folder: Path) -> Path:
    """Return the model that a task begins with. It is made once; the seed of its weights and of its
    demonstrations is 0.
    """
    base = task.partition("-")[0]
    model = folder / f"warm_start_{base}"
    if not model.is_dir():
        modules = {"sort": Path(__file__), "calculator": CALCULATOR / "calculator.py"}
        command = [sys.executable, str(ROOT / "examples" / "warm_start.py")]
        command += [str(modules.get(base, REVERSE_TEXT / "reverse_text.py")), str(model)]
        say(f"making {model}")
        # Its folder is complete or absent. Its output is not our answer, which --json makes data.
        subprocess.run([*command, *WARM_STARTS.get(base, [])], check=True, stdout=sys.stderr)
    return model


# --- A run ----------------------------------------------------------------------------------------


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def make_trainer(
    kind: Any, task: str, options: dict[str, Any], model: Path, port: int, folder: Path
) -> Any:
    common = {
        "max_seq_len": 64, "max_tokens": 16, "temperature": 1.0, "logging_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "log_rollouts": 0,
        "micro_batch_size": 128, "eval_rollouts_per_example": 3, "overwrite_output_dir": True,
        "output_dir": str(folder / "run"), "vllm_server_port": port, "env_workers": 0,
    }  # fmt: skip
    args = kind.config_class(**{**common, **TASKS[task], **options})
    return kind(str(model), make_env(task), args)


def score_of(task: str) -> str:
    return SCORES.get(task, "exact_match")


def held_out_score(trainer: Any, task: str) -> float:
    return trainer.evaluate()[f"eval_{score_of(task)}"]


def score_at_start(task: str, model: Path, port: int, folder: Path) -> float:
    """Return the held-out score of a warm start. It is measured once, and kept beside the model."""
    from verifiers_rl import RLTrainer

    kept = folder / f"{model.name}.start"
    if not kept.is_file():
        with contextlib.redirect_stdout(io.StringIO()):
            # As in the runs: a server that was started for adapters takes nothing else.
            trainer = make_trainer(RLTrainer, task, {}, model, port, folder)
            kept.write_text(str(held_out_score(trainer, task)))
    return float(kept.read_text())


def train(
    kind: Any, task: str, options: dict[str, Any], model: Path, port: int, folder: Path
) -> Row:
    """Train once. Return what was measured."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = make_trainer(kind, task, options, model, port, folder)
        trainer.train()
        held_out = held_out_score(trainer, task)
    steps = [row for row in trainer.state.log_history if "step_s" in row]

    def mean(*names: str) -> float:
        return statistics.fmean(row[name] for row in steps for name in names if name in row)

    shares = [name for name in steps[0] if name.startswith("masked_share/")]
    shares += [name for name in ("clipped_share", "masked_share") if name in steps[0]]
    size = trainer.args.batch_size
    return {
        "rollouts": size * len(steps),
        "held_out": held_out,
        "step_s": statistics.median(row["step_s"] for row in steps),
        "mismatch_kl": mean("mismatch_kl"),
        "entropy": mean("entropy"),
        "masked_share": max(map(mean, shares), default=0.0),  # of the mask that masks most
        **curve_of(steps, f"env/{score_of(task)}"),
    }


def curve_of(steps: list[dict[str, float]], score: str) -> dict[str, list[float]]:
    """Return the curve of a run: its steps in `NUM_POINTS` parts of one size, of each part the
    seconds from the first step's begin to its end, and the means of reward and score.
    """
    num = min(NUM_POINTS, len(steps))
    ends = [len(steps) * (i + 1) // num for i in range(num)]
    parts = [steps[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return {
        "wall_s": [sum(row["step_s"] for row in steps[:end]) for end in ends],
        "reward": [statistics.fmean(row["reward"] for row in part) for part in parts],
        "score": [statistics.fmean(row[score] for row in part) for part in parts],
    }


def run_all(
    ideas: dict[str, dict[str, Any]], kind: Any, options: argparse.Namespace, kept: Path
) -> None:
    """Make the rows that are not there, and append each to `kept` when its run has ended.

    Args:
        ideas: options of `RLConfig` by name.
        kind: the class of the trainer of the idea `options.name`.
    """
    import torch

    from tests.conftest import running_server
    from verifiers_rl import RLTrainer
    from verifiers_rl.inference.client import TOKEN_VARIABLE

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(16))
    folder, here = kept.parent, {"machine": machine(), "commit": commit()}
    for task in options.tasks:
        known = {key_of(row) for row in [*read_rows(LEDGER), *read_rows(kept)]}
        todo: list[Row] = []
        for seed in options.seeds:
            for name in ideas:
                steps = options.steps or TASKS[task]["max_steps"]
                row = {"task": task, "name": name, "seed": seed, "steps": steps, **here}
                row["idea"] = describe(ideas[name], options.trainer * (name == options.name))
                todo += [row] if key_of(row) not in known else []
        if not todo:
            continue
        model = make_warm_start(task, folder)
        flags = ["--max-num-seqs", "256", *SERVER_FLAGS.get(task, [])]
        with running_server(model, folder / "server.log", *flags) as server:
            start = score_at_start(task, model, server.port, folder)
            for row in todo:
                own = {**ideas[row["name"]], "seed": row["seed"], "max_steps": row["steps"]}
                of_row = kind if row["name"] == options.name else RLTrainer
                begun = time.monotonic()
                row |= train(of_row, task, own, model, server.port, folder)
                row |= {"start": start, "date": time.strftime("%Y-%m-%d")}
                write_rows(kept, [*read_rows(kept), row])
                say(
                    f"{task}, {row['name']}, seed {row['seed']}: held out {start:.3f} -> "
                    f"{row['held_out']:.3f}, {time.monotonic() - begun:.0f} s"
                )


# --- Rows -----------------------------------------------------------------------------------------


def machine() -> str:
    """Return the number of cores and their kind. Several kinds have the name "AMD EPYC", so family
    and model are part of it.
    """
    kind = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        facts: dict[str, str] = {}
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), " ".join(value.split()))
        if "model name" in facts:
            numbers = f"{facts.get('cpu family', '?')}.{facts.get('model', '?')}"
            kind = f"{facts['model name']} {numbers}"
    return f"{os.cpu_count()} x {kind}"


def commit() -> str:
    """Return the commit of this repository, with a "+" if the library has changes beside it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changes = git("status", "--porcelain", "--", "verifiers_rl")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changes else "")


def describe(options: dict[str, Any], trainer: str) -> str:
    """Return an idea as one line: its options, and a hash of each module of one's own, so that a
    changed loss is another idea.
    """
    chosen = {**options, **({"class": trainer} if trainer else {})}
    words = [f"{name}={json.dumps(value)}" for name, value in chosen.items()]
    for value in chosen.values():
        if isinstance(value, str) and ":" in value:
            words.append(f"{value.partition(':')[0]}={code_of(value)}")
    return " ".join(words)


def code_of(name: str) -> str:
    """Return a hash of the module of `module:name`."""
    module = name.partition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of the package that it is in
        spec = None
    if spec is None or spec.origin is None or not spec.has_location:
        raise SystemExit(
            f"ledger.py: {name}: there is no file of a module {module!r} where this command runs"
        )
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:8]


def key_of(row: Row) -> tuple[Any, ...]:
    return *(row[name] for name in KEY), row["idea"]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a CSV; none if there is no file."""
    if not path.is_file():
        return []
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name in FIELDS[5:12]:
                row[name] = float(row[name])
            for name in ("seed", "steps", "rollouts"):
                row[name] = int(float(row[name]))
            for name in FIELDS[-3:]:
                row[name] = [float(word) for word in row[name].split()]
            rows.append(row)
    return rows


def newest_of(rows: list[Row]) -> list[Row]:
    """Return one row of each key, the last one, without rows of ideas whose name has another idea
    by now, such as a later text of the loss.
    """
    ideas = {(row["name"], row["machine"]): row["idea"] for row in rows}
    known = {key_of(row): row for row in rows}
    return [row for row in known.values() if row["idea"] == ideas[row["name"], row["machine"]]]


def write_rows(path: Path, rows: list[Row]) -> None:
    """Replace a CSV at once."""
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for row in sorted(newest_of(rows), key=lambda row: [str(row[name]) for name in KEY]):
            writer.writerow({name: as_text(row[name]) for name in FIELDS})
    unfinished.replace(path)


def as_text(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(map(as_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- The answer -----------------------------------------------------------------------------------


def reached(row: Row, target: float) -> tuple[float, float] | None:
    """Return the seconds and the rollouts to the first point of a curve at this score or above,
    on the straight line from the point before; None if there is no such point.
    """
    num = len(row["score"])
    rollouts = [row["rollouts"] * (i + 1) / num for i in range(num)]
    before = (0.0, 0.0, row["start"])
    for now in zip(row["wall_s"], rollouts, row["score"], strict=True):
        if now[2] >= target:
            gained = now[2] - before[2]
            share = min(max((target - before[2]) / gained, 0.0), 1.0) if gained > 0 else 0.0
            return tuple(b + share * (n - b) for b, n in zip(before[:2], now[:2], strict=True))
        before = now
    return None


def mean_and_sd(values: list[float]) -> list[float]:
    """Return mean and standard deviation; of one value only the mean, of none nothing."""
    spread = [statistics.stdev(values)] if len(values) > 1 else []
    return [statistics.fmean(values), *spread] if values else []


def answers_of(rows: list[Row]) -> list[dict[str, Any]]:
    """Return what the rows say of each idea on each task, seeds together: a list is a mean and
    its standard deviation.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    order = {name: place for place, name in enumerate((*TASKS, *SETTINGS))}
    for row in rows:
        key = tuple(row[name] for name in ("machine", "task", "steps", "name"))
        groups.setdefault(key, []).append(row)
    answers = []
    for key in sorted(groups, key=lambda k: (k[0], order.get(k[1], 99), k[2], order.get(k[3], 99))):
        own, (of_machine, task, steps, name) = groups[key], key
        target = TARGETS.get(task, 0.6)
        times = [found for row in own if (found := reached(row, target)) is not None]
        answers.append(
            {
                "task": task, "name": name, "idea": own[-1]["idea"], "machine": of_machine,
                "commits": sorted({row["commit"] for row in own}), "steps": steps,
                "seeds": sorted(row["seed"] for row in own), "score": score_of(task),
                "target": target, "num_reached": len(times),
                "seconds_to_target": mean_and_sd([seconds for seconds, _ in times]),
                "rollouts_to_target": mean_and_sd([rollouts for _, rollouts in times]),
                "start": statistics.fmean(row["start"] for row in own),
                "held_out": mean_and_sd([row["held_out"] for row in own]),
                **{
                    name: statistics.fmean(row[name] for row in own)
                    for name in ("step_s", "mismatch_kl", "entropy", "masked_share")
                },
            }
        )  # fmt: skip
    return answers


def with_sd(numbers: list[float], form: str) -> str:
    return " +- ".join(format(number, form) for number in numbers)


def table_of(answers: list[dict[str, Any]]) -> str:
    """Return a sentence for each task and a Markdown table, for each machine."""
    lines = []
    for of_machine in dict.fromkeys(answer["machine"] for answer in answers):
        here = [answer for answer in answers if answer["machine"] == of_machine]
        commits = sorted({commit for answer in here for commit in answer["commits"]})
        lines += [f"Machine: {of_machine}. Commits: {', '.join(commits)}.", ""]
        for task, steps in dict.fromkeys((answer["task"], answer["steps"]) for answer in here):
            said = []
            for answer in here:
                if (answer["task"], answer["steps"]) == (task, steps):
                    time_ = with_sd(answer["seconds_to_target"], ".3g") or "not reached"
                    num, of = answer["num_reached"], len(answer["seeds"])
                    share = f" ({num} of {of} seeds)" if 0 < num < of else ""
                    said.append(f"{answer['name']} {time_}{' s' if num else ''}{share}")
            what = f"{answer_of(here, task)['target']:g} {score_of(task)}"
            lines.append(f"{task}, {steps} steps, seconds to {what}: {'; '.join(said)}.")
        lines += [
            "",
            "| task | idea | steps | seeds | s to target | rollouts to target | held out | "
            "at start | step s | mismatch_kl | entropy | masked share |",
            f"| {' | '.join(['---'] * 12)} |",
        ]
        for answer in here:
            cells = [answer["task"], answer["name"], answer["steps"], len(answer["seeds"])]
            cells += [
                with_sd(answer["seconds_to_target"], ".3g"),
                with_sd(answer["rollouts_to_target"], ".0f"),
                with_sd(answer["held_out"], ".3f"),
                f"{answer['start']:.3f}",
                *(f"{answer[n]:.3g}" for n in ("step_s", "mismatch_kl", "entropy", "masked_share")),
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        lines.append("")
    return "\n".join(lines)


def answer_of(answers: list[dict[str, Any]], task: str) -> dict[str, Any]:
    return next(answer for answer in answers if answer["task"] == task)


def draw(rows: list[Row], path: Path) -> None:
    """Draw the score of each task over seconds and over rollouts: for each idea the mean over
    seeds, and the band between its lowest and its highest seed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    names = list(dict.fromkeys(row["name"] for row in rows))
    figure = Figure(figsize=(3.1 * len(tasks) + 0.6, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(tasks), squeeze=False, sharey="col")
    for column, task in enumerate(tasks):
        for name in names:
            own = [row for row in rows if (row["task"], row["name"]) == (task, name)]
            if not own:
                continue
            num = min(len(row["score"]) for row in own)
            scores = list(zip(*([row["start"], *row["score"][:num]] for row in own), strict=True))
            mean = [statistics.fmean(point) for point in scores]
            walls = zip(*(row["wall_s"][:num] for row in own), strict=True)
            seconds = [statistics.fmean(point) for point in walls]
            rollouts = [own[0]["rollouts"] * (i + 1) / num for i in range(num)]
            color = f"C{names.index(name)}"
            for axes, x in zip(panels[:, column], (seconds, rollouts), strict=True):
                axes.plot([0, *x], mean, color=color, label=name)
                axes.fill_between(
                    [0, *x], [min(p) for p in scores], [max(p) for p in scores],
                    color=color, alpha=0.2, linewidth=0,
                )  # fmt: skip
        for axes, label in zip(panels[:, column], ("seconds of training", "rollouts"), strict=True):
            axes.axhline(TARGETS.get(task, 0.6), color="0.5", linestyle=":")
            axes.set_xlabel(label)
            axes.set_xlim(left=0)
            axes.grid(alpha=0.3)
        panels[0, column].set_title(f"{task}: {score_of(task)}", fontsize=10)
    panels[0, 0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=70)


# --- The command ----------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(OF_LEDGER))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--settings", nargs="+", choices=list(SETTINGS), help="default: default, beside an idea"
    )
    parser.add_argument("--name", default="", help="of your idea, in the table")
    parser.add_argument("--loss", help="my_module:my_loss, or a name of docs/losses.md")
    parser.add_argument("--advantage", help="my_module:my_advantage, or a name")
    parser.add_argument("--class", dest="trainer", default="", help="my_module:MyTrainer")
    parser.add_argument(
        "--options", type=json.loads, default={}, help='others of RLConfig, {"kl_beta": 0.01}'
    )
    parser.add_argument("--steps", type=int, help="of each run, for a trial; default: the task's")
    parser.add_argument("--write", action="store_true", help=f"rows into {LEDGER.name}, and plot")
    parser.add_argument("--json", action="store_true", help="the answer, one JSON object a line")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "ledger")
    options = parser.parse_args()
    if not isinstance(options.options, dict):
        parser.error(f"--options {options.options!r}: must be a JSON object, by names of options")
    options.idea = {
        **{n: value for n in ("loss", "advantage") if (value := getattr(options, n)) is not None},
        **options.options,
    }
    is_idea = bool(options.idea or options.trainer)
    if is_idea != bool(options.name) or options.name in SETTINGS:
        parser.error(
            f"--name {options.name!r}: an idea (--loss, --advantage, --class or --options) needs a "
            f"name, which none of --settings has"
        )
    if options.write and options.steps:
        parser.error("--write takes whole runs into the ledger: leave out --steps")
    if options.settings is None:
        options.settings = ["default"] if is_idea else []
    return options


def main() -> None:
    options = parse()
    sys.path.insert(0, os.getcwd())
    kept = options.folder.absolute() / "rows.csv"
    kept.parent.mkdir(parents=True, exist_ok=True)
    ideas = {name: SETTINGS[name] for name in options.settings}
    if options.name:
        from verifiers_rl import RLTrainer
        from verifiers_rl.config import ConfigError
        from verifiers_rl.option_rules import load_user_code

        ideas[options.name], kind = options.idea, RLTrainer
        describe(options.idea, options.trainer)
        try:  # now, and not behind the warm starts
            if options.trainer:
                kind = load_user_code(options.trainer, "class")
                if not hasattr(kind, "config_class"):
                    raise ConfigError(
                        f"class={options.trainer!r}: must have a config_class, as RLTrainer has"
                    )
            args = kind.config_class(use_cpu=True, **options.idea)
            args.complete_loss(None)
            args.make_advantage()
        except ConfigError as error:
            raise SystemExit(f"ledger.py: {error}") from None
    else:
        kind = None
    if ideas:
        run_all(ideas, kind, options, kept)
    rows = newest_of([*read_rows(LEDGER), *read_rows(kept)])
    if ideas:  # only what was asked for
        asked = {(task, name) for task in options.tasks for name in ideas}
        rows = [row for row in rows if (row["task"], row["name"]) in asked]
        rows = [row for row in rows if row["machine"] == machine()]
        rows = [r for r in rows if r["steps"] == (options.steps or TASKS[r["task"]]["max_steps"])]
        if options.write:
            write_rows(LEDGER, [*read_rows(LEDGER), *rows])
    if not rows:
        raise SystemExit("ledger.py: there are no rows yet; --settings default makes some")
    answers = answers_of(rows)
    print("\n".join(map(json.dumps, answers)) if options.json else table_of(answers))
    here = [row for row in read_rows(LEDGER) if row["machine"] == machine()]
    plot, drawn = (PLOT, here) if options.write else (kept.with_name("ledger.png"), rows)
    if ideas and not importlib.util.find_spec("matplotlib"):
        say("no plot: matplotlib is not installed")
    elif ideas:
        draw([row for row in drawn if row["task"] in OF_LEDGER or not options.write], plot)
        say(f"plot: {plot}")


if __name__ == "__main__":
    main()
