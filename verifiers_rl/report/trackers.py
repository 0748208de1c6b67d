"""Rollouts that people look at while a run goes on: a table in the terminal, and one in W&B.
Trainer itself sends the numbers of each line of logs to the trackers of `report_to`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from verifiers_rl.data import printable
from verifiers_rl.report.run_folder import short
from verifiers_rl.types import Rollout

TABLE_ROWS = 32
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
    if "wandb" in args.report_to and args.project != type(args).project:
        os.environ["WANDB_PROJECT"] = args.project


def from_low_to_high(rollouts: Sequence[Rollout], number: int) -> list[Rollout]:
    """Return so many rollouts, from the lowest reward to the highest, at equal distances."""
    ranked = sorted(rollouts, key=lambda rollout: rollout.reward)
    places = np.linspace(0, len(ranked) - 1, min(number, len(ranked))).round()
    return [ranked[int(place)] for place in places]


def print_rollouts(rollouts: Sequence[Rollout], step: int, num_rows: int = 2) -> None:
    """Print a table of a few rollouts of one batch, from the lowest to the highest reward."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError("broken pipe")  # where rich would end the process

    names = ("prompt", "completion", "reward", "advantage")
    table = Table(*names, title=f"step {step}", show_lines=True, expand=True)
    for rollout in from_low_to_high(rollouts, num_rows):
        # Text, not markup: what a model writes must not be read as formatting.
        shown = (printable(_shorten(text, 400)) for text in (rollout.prompt, rollout.completion))
        sign = "+" * (rollout.advantage >= 0)
        table.add_row(*map(Text, shown), short(rollout.reward), sign + short(rollout.advantage))
    Terminal().print(table)


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def send_table(rollouts: Sequence[Rollout], step: int) -> None:
    """Send a table of `TABLE_ROWS` rollouts of a step, from 1, to W&B, named `rollouts`."""
    import wandb

    rows = []
    for rollout in from_low_to_high(rollouts, TABLE_ROWS):
        values = [getattr(rollout, name) for name in ATTRIBUTES]
        rows.append([step, *(_shorten(v, 4000) if isinstance(v, str) else v for v in values)])
    if wandb.run is not None:
        table = wandb.Table(["step", *ATTRIBUTES], rows)
        wandb.log({"rollouts": table, "train/global_step": step})
