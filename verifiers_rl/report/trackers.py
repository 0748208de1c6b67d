"""Rollouts that people look at while a run goes on: a table in the terminal, and one in those
trackers of `report_to` that can show it. Trainer itself sends the numbers of each line of logs to
the trackers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from verifiers_rl.types import Rollout

TABLE_ROWS = 32
_LONGEST = 4000  # characters of a text in a tracker's table
ATTRIBUTES = (
    *("env", "example_id", "reward", "advantage", "num_turns", "num_sampled_tokens"),
    *("is_truncated", "prompt", "completion"),
)


def tracker_error(report_to: Any) -> str | None:
    """Return why one of these trackers cannot be used, or None."""
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        for tracker in get_reporting_integration_callbacks(report_to):
            tracker()
    except (ValueError, RuntimeError, ImportError) as error:
        return f"report_to={report_to!r}: {error}"
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


def print_rollouts(rollouts: Sequence[Rollout], step: int, num_rows: int = 2) -> None:
    """Print a table of a few rollouts of one batch, from the lowest to the highest reward."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"step {step}", show_lines=True, expand=True)
    for column in ("prompt", "completion"):
        table.add_column(column, ratio=1, overflow="fold")
    for column in ("reward", "advantage"):
        table.add_column(column, justify="right", no_wrap=True)
    for rollout in from_low_to_high(rollouts, num_rows):
        # Text, not markup: what a model writes must not be read as formatting.
        texts = [Text(_shorten(text)) for text in (rollout.prompt, rollout.completion)]
        table.add_row(*texts, f"{rollout.reward:.3f}", f"{rollout.advantage:+.3f}")
    Console().print(table)


def _shorten(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def send_table(report_to: Sequence[str], rollouts: Sequence[Rollout], step: int) -> None:
    """Send a table of `TABLE_ROWS` rollouts of a step to W&B and Trackio, under the name
    `rollouts`.

    Args:
        report_to: the trackers of the run.
        rollouts: of the batch.
        step: the step, from 1.
    """
    columns: list[Any] = ["step", *ATTRIBUTES]
    rows = []
    for rollout in from_low_to_high(rollouts, TABLE_ROWS):
        values = [getattr(rollout, name) for name in ATTRIBUTES]
        rows.append([step, *(v[:_LONGEST] if isinstance(v, str) else v for v in values)])
    if "wandb" in report_to:
        import wandb

        if wandb.run is not None:
            table = wandb.Table(columns, rows)
            wandb.log({"rollouts": table, "train/global_step": step})
    if "trackio" in report_to:
        import trackio

        trackio.log({"rollouts": trackio.Table(columns, rows)}, step=step)
