"""`vf-rl replay RUN --step 40 --loss my_loss:a --loss ppo`: prints what replay.py finds, as the
table of docs/losses.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import cosine_similarity

from verifiers_rl.cli.layers import load_leaf


def main(argv: list[str]) -> int:
    """Print the table for these words behind `replay`. Returns the exit status.

    Raises:
        ConfigError: see `replay.replay`.
    """
    parser = argparse.ArgumentParser(
        prog="vf-rl replay",
        description="What losses make of one step of a run. Nothing is sampled.",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--step", type=int, required=True, help="from 1, as in metrics.jsonl")
    each: dict[str, Any] = {"action": "append", "default": [], "metavar": "NAME"}
    parser.add_argument("--loss", dest="losses", help="default: that of the run", **each)
    parser.add_argument("--advantage", dest="advantages", help="default: as recorded", **each)
    options = vars(parser.parse_args(argv))
    leaf = load_leaf("replay", "vf-rl replay")
    print(table_of(leaf.replay(**options)))
    return 0


def table_of(outcomes: Mapping[str, Any]) -> str:
    """Return what `replay.replay` has returned as a table in Markdown."""
    columns = []
    for name, one in outcomes.items():
        column = {"": name, "---": "---", "norm of the gradient": f"{one.gradient.norm():.3g}"}
        for other in outcomes:
            cosine = cosine_similarity(one.gradient, outcomes[other].gradient, 0)
            column[f"cosine with {other}"] = f"{cosine:.3f}"
        for key, value in one.metrics[0].items():
            column[key] = f"{value:.3g} -> {one.metrics[1][key]:.3g}"
        for kind, (share, of_tokens) in shares_of(one.tokens).items():
            column[kind] = f"{share:.2f} of {of_tokens:.2f}"
        columns.append(column)
    names = dict.fromkeys(name for column in columns for name in column)
    rows = ([name, *(column.get(name, "") for column in columns)] for name in names)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def shares_of(tokens: Tensor) -> dict[str, tuple[float, float]]:
    """Return, by kinds of tokens, their shares of the sum of |dL / dlogprob_t|, and of the tokens.

    Args:
        tokens: see `replay.Outcome`.
    """
    _, _, _, places, weights, logprobs, advantages = tokens
    weights, shares = weights.abs() / weights.abs().sum(), {}
    for name, values, edges in (
        ("place <=", places, (0, 0.25, 0.5, 0.75, 1)),
        ("probability <=", logprobs.exp(), (-1, 0.1, 0.5, 0.9, 1)),
        ("sign of A =", advantages.sign(), (-2, -1, 0, 1)),
    ):
        for low, high in pairwise(edges):
            is_kind = (low < values) & (values <= high)
            of_kind = weights[is_kind].sum().item()
            shares[f"{name} {high:g}"] = of_kind, is_kind.float().mean().item()
    return shares
