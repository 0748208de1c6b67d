"""What people look at while a run goes on: a table of rollouts in the terminal, and trackers.
Trainer itself sends the numbers of each line of logs to the trackers of `report_to`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from verifiers_rl.process.terminal import printable
from verifiers_rl.report.run_folder import short
from verifiers_rl.types import Rollout


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


def print_rollouts(rollouts: Sequence[Rollout], step: int) -> None:
    """Print a table of the rollouts of a batch with the lowest and the highest reward."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError("broken pipe")  # where rich would end the process

    names = ("prompt", "completion", "reward", "advantage")
    table = Table(*names, title=f"step {step}", show_lines=True, expand=True)
    ranked = sorted(rollouts, key=lambda rollout: rollout.reward)
    for rollout in (*ranked[:1], *ranked[1:][-1:]):
        # Text, not markup: what a model writes must not be read as formatting.
        shown = (
            printable(text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}")
            for text in (rollout.prompt, rollout.completion)
        )
        sign = "+" * (rollout.advantage >= 0)
        table.add_row(*map(Text, shown), short(rollout.reward), sign + short(rollout.advantage))
    Terminal().print(table)
