"""What a person sees: means over a batch, the table of rollouts, metrics.jsonl, the curves,
the progress bar.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from verifiers_rl.losses import MAX_LOG_RATIO, LossInputs, log_importance_ratio
from verifiers_rl.types import Rollout

# Logged as the largest over the steps since the last line, not as their mean.
MAXIMA = ("importance_ratio_max", "staleness_max")


class TokenMeans:
    """Means over the loss tokens of a batch,
    gathered microbatch by microbatch and then over the ranks.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._max: dict[str, Tensor] = {}

    def add(self, inputs: LossInputs, metrics: dict[str, Tensor]) -> None:
        """Add one microbatch:
        (N,) tensors over its predicted tokens, masked by `inputs.loss_mask`.
        """
        mask = inputs.loss_mask
        log_ratio = log_importance_ratio(inputs).detach()
        ratio = log_ratio.exp()
        tokens = {
            "importance_ratio": ratio,
            # KL(inference || trainer) from tokens of the former:
            # k3 of http://joschu.net/blog/kl-approx.html
            "mismatch_kl": ratio - 1 - log_ratio,
            "clamped_share": (log_ratio.abs() >= MAX_LOG_RATIO).float(),
            **metrics,
        }
        for name, values in tokens.items():
            total = torch.where(mask, values.detach().float(), 0.0).sum().double()
            self._sums[name] = self._sums.get(name, torch.zeros_like(total)) + total
        largest = torch.where(mask, ratio, 0.0).max()
        self._max["importance_ratio_max"] = torch.maximum(
            largest, self._max.get("importance_ratio_max", largest)
        )

    def reduce(self, num_loss_tokens: int, world_size: int) -> dict[str, float]:
        """Means over all ranks; every rank must call this with the same metrics."""
        names, maxima = sorted(self._sums), sorted(self._max)
        sums = torch.stack([self._sums[name] for name in names])
        largest = torch.stack([self._max[name].double() for name in maxima])
        if world_size > 1:
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        means = sums / max(num_loss_tokens, 1)
        return dict(zip(names + maxima, [*means.tolist(), *largest.tolist()], strict=True))


# Dense bfloat16 operations a second, from the vendors' data sheets.
PEAK_FLOPS = {
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


def peak_flops(device_name: str) -> float | None:
    """Of a GPU by the name that torch gives it; None where it is not known."""
    matches = (
        flops for name, flops in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device_name)
    )
    return next(matches, None)


def model_flops(model: nn.Module, num_tokens: int, num_loss_tokens: int) -> int:
    """Operations of forward and backward, as the model needs them however they are done: nothing
    for what is computed again, nor for padding.

    Two a weight and token forward, two for the gradient of its input, and two for its own where it
    is trained. Embeddings are lookups, and of the head's tokens only those with loss count. Of
    experts each token uses `num_experts_per_tok`. Attention's scores are not counted.

    Args:
        model: the causal LM, without what is around it.
        num_tokens: of the batch.
        num_loss_tokens: those of them that carry loss.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    head = getattr(model, "get_output_embeddings", lambda: None)() or nn.Identity()
    of_head = {id(p) for n, p in head.named_parameters() if "original_module." not in n}
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    looked_up = {id(p) for module in embeddings for p in module.parameters()} - of_head
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    counts = (getattr(config, name, None) for name in names)
    num_experts = next((n for n in counts if isinstance(n, int) and n > 0), 1)
    num_used = getattr(config, "num_experts_per_tok", None)
    num_used = num_used if isinstance(num_used, int) else num_experts
    flops = 0
    for name, parameter in model.named_parameters():
        if id(parameter) in looked_up or ".original_module." in name:  # of modules_to_save
            continue
        size = getattr(parameter, "ds_numel", parameter.numel())  # under ZeRO-3
        if ".experts." in name:
            size = size * num_used // num_experts
        tokens = num_loss_tokens if id(parameter) in of_head else num_tokens
        flops += size * (6 if parameter.requires_grad else 4) * tokens
    return flops


def device_metrics(device: torch.device, num_flops: int, seconds: float) -> dict[str, float]:
    """Peak memory since the last call (GB), and model FLOPs utilisation where the peak is known.

    Args:
        device: of this rank. On a CPU the peak is that of the process since it started.
        num_flops: forward and backward of this rank's share of a batch.
        seconds: that it took.
    """
    if device.type != "cuda":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"peak_memory_gb": peak_rss / 1e9}
    metrics = {"peak_memory_gb": torch.cuda.max_memory_allocated(device) / 1e9}
    torch.cuda.reset_peak_memory_stats(device)
    peak = peak_flops(torch.cuda.get_device_name(device))
    return metrics if peak is None else {**metrics, "mfu": num_flops / seconds / peak}


def print_rollouts(rollouts: Sequence[Rollout], step: int, num_rows: int) -> None:
    """A table of a few rollouts of one batch, from the lowest to the highest reward."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rollouts or num_rows == 0:
        return
    ranked = sorted(rollouts, key=lambda rollout: rollout.reward)
    places = [
        round(i * (len(ranked) - 1) / max(num_rows - 1, 1))
        for i in range(min(num_rows, len(ranked)))
    ]
    table = Table(title=f"step {step}", show_lines=True, expand=True)
    for column in ("prompt", "completion"):
        table.add_column(column, ratio=1, overflow="fold")
    for column in ("reward", "advantage"):
        table.add_column(column, justify="right", no_wrap=True)
    for rollout in (ranked[place] for place in places):
        # Text, not markup: what a model writes must not be read as formatting.
        texts = [Text(_shorten(rollout.prompt)), Text(_shorten(rollout.completion))]
        table.add_row(*texts, f"{rollout.reward:.3f}", f"{rollout.advantage:+.3f}")
    Console().print(table)


def _shorten(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


class RewardProgressCallback(ProgressCallback):
    """Trainer's progress bar, with the reward on it
    and one short line of metrics at each logging step.
    """

    _LINE = ("reward", "loss", "grad_norm", "entropy", "mismatch_kl", "step_s", "eval_reward")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or self.training_bar is None or not logs:
            return
        if "reward" in logs:
            self.training_bar.set_postfix(reward=f"{logs['reward']:.3f}")
        shown = {
            name: logs[name] for name in logs if name in self._LINE or name.startswith("eval_")
        }
        line = "  ".join(
            f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, int | float)
        )
        self.training_bar.write(f"step {state.global_step}  {line}")


class RunFilesCallback(TrainerCallback):
    """Writes metrics.jsonl as training goes, and curves.png at its end, into the run's folder."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step == 0:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            # A new run in the same folder starts a new file.
            metrics_file(args.output_dir).write_text("")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            values = {
                k: v if not isinstance(v, float) or math.isfinite(v) else str(v)
                for k, v in logs.items()
            }
            with metrics_file(args.output_dir).open("a") as file:
                file.write(json.dumps({"step": state.global_step, **values}) + "\n")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            curves = Path(args.output_dir) / "curves.png"
            plot_curves(metrics_file(args.output_dir), curves)
            print(f"{summary(metrics_file(args.output_dir))}\ncurves: {curves}", flush=True)


def metrics_file(output_dir: str) -> Path:
    return Path(output_dir) / "metrics.jsonl"


def summary(source: Path) -> str:
    """The first and last value of the rewards and of what evaluation measured,
    from a metrics.jsonl.
    """
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    counts = ("eval_runtime", "eval_num_rollouts", "eval_num_turns")
    names = dict.fromkeys(
        n
        for row in rows
        for n in row
        if n == "reward" or (n.startswith("eval_") and n not in counts)
    )
    lines = []
    for name in names:
        values = [
            (row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)
        ]
        (first_step, first), (last_step, last) = values[0], values[-1]
        lines.append(f"{name}: {first:.3f} (step {first_step}) -> {last:.3f} (step {last_step})")
    return "\n".join(lines)


CURVES = ("reward", "eval_reward", "entropy", "mismatch_kl", "step_s")


def plot_curves(source: Path, target: Path) -> None:
    """Draw reward (training and held-out), entropy, mismatch_kl and step time
    from a metrics.jsonl.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in source.read_text().splitlines()]
    panels = [("reward", ("reward", "eval_reward")), *((name, (name,)) for name in CURVES[2:])]
    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for name in names:
            points = [
                (row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)
            ]
            if points:
                marker = "o-" if name == "eval_reward" else "-"
                axes.plot(*zip(*points, strict=True), marker, label=name)
        axes.set_title({"step_s": "step time (s)"}.get(title, title))
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(names) > 1 and axes.lines:
            axes.legend()
    figure.savefig(target, dpi=110)
