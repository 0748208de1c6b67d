"""`vf-rl --check @ config.toml`: two small steps of the run, with all that the run needs.

They are those of the run itself: its servers, its trainer, its environments, with a few groups a
step and a folder of their own, which is removed. So a check finds what a start finds, and also a
server that samples from other weights than the trainer has, before or after a push. No process and
no file is left behind, except the servers' logs if the check failed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from verifiers_rl.cli.config import RunConfig
from verifiers_rl.cli.plan import check_start, check_trainer_options
from verifiers_rl.cli.supervise import LOGS

NUM_GROUPS = 2  # in a step
NUM_STEPS = 2  # the second is sampled from weights that the first has pushed


def check(config: RunConfig, run: Callable[[RunConfig], int]) -> int:
    """Return the exit status: 0 if all is ok, else 1.

    Args:
        run: runs a configuration; see `rl.run_anywhere`.

    Raises:
        TomlError, RunFolderError: the run cannot begin.
    """
    args = check_trainer_options(config)
    check_start(config, args)
    target = Path(args.output_dir).absolute()
    beside = next(path for path in target.parents if path.exists())
    # Where the run's own folder will be, because there is room for a model.
    with tempfile.TemporaryDirectory(prefix=".vf-rl-check-", dir=beside) as folder:
        small = {
            "output_dir": folder,
            "max_steps": NUM_STEPS,
            "batch_size": min(args.groups_per_batch, NUM_GROUPS) * args.rollouts_per_example,
            "eval_examples": min(args.eval_examples, NUM_GROUPS),
            "max_off_policy_steps": 0,
            "logging_steps": 1,
            "report_to": "none",
            "push_to_hub": False,
            "resume_from_checkpoint": None,
            "overwrite_output_dir": False,
        }
        config.trainer.args |= small
        # For children that read the files, because these have secrets.
        config.layers.words += [f"--trainer.args.{name}={value}" for name, value in small.items()]
        status = run(config)
        problem = problem_of(Path(folder, "metrics.jsonl")) if status == 0 else f"status {status}"
        if problem:
            logs, kept = Path(folder, LOGS), tempfile.mkdtemp(prefix="vf-rl-check-")
            logs.mkdir(exist_ok=True)  # there are none where Ray brings them here
            shutil.copytree(logs, kept, dirs_exist_ok=True)
            print(f"vf-rl: to fix: {problem}; the servers' output is in {kept}", flush=True)
    return int(bool(problem))


def problem_of(metrics: Path) -> str | None:
    """Say what the steps of these metrics show. Return what must be fixed, or None."""
    from verifiers_rl.report.metrics import FIRST_MISMATCH_KL
    from verifiers_rl.report.run_folder import read_metrics

    rows = [row for row in read_metrics(metrics) if "mismatch_kl" in row]
    names = ("reward", "mismatch_kl", "sync_s", "step_s")
    for row in rows:
        shown = (f"{name} {row[name]:.3g}" for name in names if name in row)
        print(f"vf-rl: step {row['step']:g}: {', '.join(shown)}", flush=True)
    bound = FIRST_MISMATCH_KL
    if not all(row["mismatch_kl"] <= bound for row in rows):  # also true for NaN
        return f"mismatch_kl above {bound:g}: docs/mismatch.md says what brings both sides together"
    print("vf-rl: all is ok", flush=True)
    return None
