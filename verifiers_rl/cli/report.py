"""`vf-rl report RUN [--expect FILE]`: the first and the last value of a run's main metrics, and a
table that compares the run with what its recipe expects.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from verifiers_rl.option_rules import STRICT, problem_of
from verifiers_rl.report.run_folder import RunFolderError, read_metrics, summary


class Expected(BaseModel):
    """A value that a run should have; an expected.json is a list of them.

    Attributes:
        metric: its name in metrics.jsonl.
        step: "last" is the last step with this metric.
        low: the smallest value that is as expected.
        high: the largest one.
        note: the model and the hardware; of a target, its address.
        is_target: it is another project's figure. A run that misses it does not fail.
    """

    model_config = STRICT

    metric: str
    step: int | Literal["last"]
    low: float
    high: float
    note: str
    is_target: bool = False


def main(argv: list[str]) -> int:
    """Print what these words behind `report` ask for. Returns the exit status: 1 if a value is not
    as expected, or missing, which its line says.

    Raises:
        RunFolderError: a file cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="vf-rl report", description="What a run began and ended with."
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--expect", type=Path, metavar="FILE", help="the expected.json of a recipe")
    options = parser.parse_args(argv)
    expected, num_missed = [], 0
    try:
        rows = read_metrics(options.folder)
        if not rows:
            raise RunFolderError(f"{options.folder}/metrics.jsonl: no file with rows; name another")
        print(summary(options.folder))
        if options.expect:
            expected = TypeAdapter(list[Expected]).validate_json(options.expect.read_bytes())
            print(f"\n| metric | step | value | expected | |\n{'| --- ' * 5}|")
    except OSError as error:
        raise RunFolderError(f"{error.filename}: {error.strerror}; name another") from error
    except ValidationError as error:
        place = error.errors()[0]["loc"][:2]
        raise RunFolderError(f"{options.expect}: {place}: {problem_of(error)}") from error
    for one in expected:
        step, value = one.step, math.nan
        for row in rows:
            if one.step in ("last", row["step"]) and one.metric in row:
                step, value = row["step"], row[one.metric]
        # None: it was not finite.
        value = value if isinstance(value, int | float) else math.nan
        is_missed = not (one.is_target or one.low <= value <= one.high)
        num_missed += is_missed
        print(
            f"| {one.metric} | {step} | {value:.3f} | {one.low:.3f} to {one.high:.3f} "
            f"| {'target: ' * one.is_target}{'not as expected: ' * is_missed}{one.note} |"
        )
    return num_missed > 0
