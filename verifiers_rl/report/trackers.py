"""The trackers of `report_to`: wandb, trackio, tensorboard and so on. Trainer sends the numbers of
each line of logs to them; this module adds tables of rollouts, for those that can show one.
"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from typing import Any

from verifiers_rl.types import Rollout

TABLE_ROWS = 32
_LONGEST = 4000  # characters of a text in a table
COLUMNS = (
    *("step", "env", "example", "reward", "advantage", "num_turns", "num_sampled_tokens"),
    *("is_truncated", "prompt", "completion"),
)


def tracker_error(report_to: Any) -> str | None:
    """Return why one of these trackers cannot be used, or None."""
    from transformers.integrations import integration_utils

    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    known = integration_utils.INTEGRATION_TO_CALLBACK
    for name in names:
        if name in ("none", "all"):
            continue
        if name not in known:
            return f"report_to={name!r}: no such tracker; known: {', '.join(sorted(known))}"
        # is_wandb_available, is_comet_available for comet_ml, is_azureml_available, ...
        stems = (name, name.removesuffix("_ml"), name.replace("_", ""), f"{name}kit")
        found = [getattr(integration_utils, f"is_{stem}_available", None) for stem in stems]
        is_available = next(filter(None, found), None)
        if is_available is not None and not is_available():
            return f"report_to={name!r}: it is not installed; uv pip install {name}"
    return None


def name_wandb_project(args: Any) -> None:
    """Let W&B log into the project of these options. It takes the project from a variable of the
    environment, which stays where the option is not set.

    Args:
        args: the `RLConfig`.
    """
    if "wandb" not in args.report_to:
        return
    if args.project != type(args).project:
        os.environ["WANDB_PROJECT"] = args.project


def from_low_to_high(rollouts: Sequence[Rollout], number: int) -> list[Rollout]:
    """Return so many rollouts, from the lowest reward to the highest, at equal distances."""
    ranked = sorted(rollouts, key=lambda rollout: rollout.reward)
    number = min(number, len(ranked))
    gaps = max(number - 1, 1)
    return [ranked[round(i * (len(ranked) - 1) / gaps)] for i in range(number)]


def send_table(callbacks: Sequence[Any], rollouts: Sequence[Rollout], step: int) -> None:
    """Send a table of `TABLE_ROWS` rollouts of a step, under the name `rollouts`.

    Args:
        callbacks: those of Trainer, among them its trackers.
        rollouts: of the batch.
        step: the step, from 1.
    """
    names = {type(callback).__name__: callback for callback in callbacks}
    trackers = {"WandbCallback", "TrackioCallback", "TensorBoardCallback"} & names.keys()
    if not trackers or not rollouts:
        return
    rows = [_row(rollout, step) for rollout in from_low_to_high(rollouts, TABLE_ROWS)]
    if "WandbCallback" in trackers:
        import wandb

        if wandb.run is not None:
            table = wandb.Table(list(COLUMNS), rows)
            wandb.log({"rollouts": table, "train/global_step": step})
    if "TrackioCallback" in trackers:
        import trackio

        trackio.log({"rollouts": trackio.Table(list(COLUMNS), rows)}, step=step)
    if "TensorBoardCallback" in trackers and names["TensorBoardCallback"].tb_writer is not None:
        names["TensorBoardCallback"].tb_writer.add_text("rollouts", _markdown(rows), step)


def _row(rollout: Rollout, step: int) -> list[Any]:
    return [
        step,
        rollout.env,
        rollout.example_id,
        rollout.reward,
        rollout.advantage,
        rollout.num_turns,
        rollout.num_sampled_tokens,
        rollout.is_truncated,
        rollout.prompt[:_LONGEST],
        rollout.completion[:_LONGEST],
    ]


def _markdown(rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as TensorBoard shows it. What a model wrote is not read as formatting."""

    def cell(value: Any) -> str:
        text = html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))
        for mark in "\\`*_[]|":
            text = text.replace(mark, f"&#{ord(mark)};")
        return text.replace("\n", "<br>")

    lines = [COLUMNS, ["---"] * len(COLUMNS), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
