"""`vf-rl @ config.toml`: server and trainer together, from one configuration: a TOML, or several,
under keys of the command line (cli/config.py). `vf-rl train.py` does it for a script.

The servers get the first GPUs and the trainer the next ones, or both get the only one. The server's
output goes into the folder `logs` of the run's folder, and the trainer's comes here, as does its
exit status. One supervisor starts them, restarts the server when it dies, and ends both.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from verifiers_rl.cli.children import POLL_S, ChildError, LocalChild
from verifiers_rl.cli.config import (
    PARSER,
    RunConfig,
    TomlError,
    TrainerTable,
    add_run_options,
    load_run_config,
    parse_command_line,
)
from verifiers_rl.cli.errors import fail
from verifiers_rl.cli.gpus import visible_gpus
from verifiers_rl.cli.layers import load_leaf
from verifiers_rl.cli.plan import (
    REQUEST_VARIABLE,
    check_start,
    check_trainer_options,
    is_on_several,
    plan_run,
    say,
    show_gpus,
    trainer_command,
)
from verifiers_rl.cli.resolved import dry_run, write_resolved
from verifiers_rl.cli.supervise import LOGS, ThisMachine, set_token, supervise
from verifiers_rl.option_rules import ConfigError
from verifiers_rl.process.ending import SAVE_GRACE_S, end_with_starter, interrupt_by_signals
from verifiers_rl.process.terminal import print_all_characters
from verifiers_rl.report.run_folder import RunFolderError, WritingError, read_metrics

# Their modules have `main`, which takes what follows the name.
COMMANDS = {
    "view": "cli.view",
    "report": "cli.report",
    "replay": "cli.replay",
    "generate": "sft.generate",
}
NUM_GROUPS = 2  # in a step of a check
NUM_STEPS = 2  # of a check; the second is sampled from weights that the first has pushed
USAGE = (
    "vf-rl @ config.toml [@ more.toml] [--KEY VALUE] [--resume | --overwrite]\n"
    "       vf-rl train.py [WORDS OF THE SCRIPT]\n"
    "       vf-rl --check @ config.toml\n"
    "       vf-rl --dry-run @ config.toml\n"
    "       vf-rl --eject [DIR]\n"
    "       vf-rl generate @ config.toml -n 4 --min-reward 1.0 -o data.jsonl\n"
    "       vf-rl view RUN... [-o page.html]\n"
    "       vf-rl report RUN [--expect expected.json]\n"
    "       vf-rl replay RUN --step 40 --loss my_loss:a --loss ppo\n"
    "A KEY is one of the TOML's, such as trainer.args.max_steps; it replaces the files' value."
)


def main() -> None:
    end_with_starter()
    interrupt_by_signals()
    print_all_characters()
    try:
        sys.exit(run())
    except (TomlError, ConfigError, RunFolderError, WritingError, ChildError) as error:
        fail(error)


def run() -> int:
    """Do what the command line asks for. Returns the exit status.

    Raises:
        TomlError, RunFolderError: the run cannot begin.
        ConfigError: nothing can be replayed.
    """
    if module := COMMANDS.get(name := " ".join(sys.argv[1:2])):
        return load_leaf(module, f"vf-rl {name}").main(sys.argv[2:])
    if name.endswith(".py"):
        return run_script(sys.argv[1:])
    parser = argparse.ArgumentParser(prog="vf-rl", usage=USAGE, description=__doc__, **PARSER)
    add_run_options(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="only try the run: two small steps in a folder that is removed",
    )
    parser.add_argument(
        "--eject",
        nargs="?",
        const=".",
        metavar="DIR",
        help="only copy trainer.py and orchestrator.py there, as the start of a fork",
    )
    if any(word.startswith("--eject") for word in sys.argv):
        from verifiers_rl.cli.setup import eject

        return eject(Path(parser.parse_args().eject))
    options, config = parse_command_line(parser, sys.argv[1:])
    if options.dry_run:
        dry_run(config)
        return show_gpus(config)
    if options.check:
        return check(config)
    return run_anywhere(config)


def run_anywhere(config: RunConfig) -> int:
    """Run on this machine, or on several. Returns the exit status.

    Raises:
        TomlError, RunFolderError: the run cannot begin.
    """
    if is_on_several(config):
        machines = load_leaf("cluster.machines", "a run on several machines")
        if (status := machines.run_on_machines(config)) is not None:
            return status
    # Everything that can be wrong is checked, then the run starts.
    args = check_trainer_options(config)
    check_start(config, args)
    plans = plan_run(config)
    logs = Path(args.output_dir, LOGS)
    here = ThisMachine(config, plans, logs)
    write_resolved(config, args.output_dir)
    return supervise(config, plans, here)


# --- A script -------------------------------------------------------------------------------------


def run_script(words: list[str]) -> int:
    """Run a script that makes an `RLTrainer`, and a server of its own. Returns the script's exit
    status.

        vf-rl                                the script, run by cli/train.py
        starts the script ─────────────────►   prepares its data and makes an RLTrainer, whose
        reads what server ◄── a TOML ───────   rank 0 asks for a server of its model,
        starts the server                      waits for it, and trains
        ends the server   ◄─────────────────   ends

    From the TOML on, all is as in a run of a TOML. With several GPUs, the server gets the first
    one, and the script has a rank on each of the others.

    Args:
        words: path of the script, and its own arguments.

    Raises:
        TomlError: there is no such script, or its server cannot be started.
    """
    path = Path(words[0])
    if not path.is_file():
        raise TomlError(f"{path}: there is no such script")
    gpus = visible_gpus()
    gpus = gpus[1:] or gpus
    set_token()
    ranks = RunConfig.model_construct(trainer=TrainerTable(gpus=len(gpus)))
    with tempfile.TemporaryDirectory(prefix="vf-rl-") as folder:
        request = Path(folder, f"{path.stem}.toml")
        env = {
            REQUEST_VARIABLE: str(request),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        }
        script = LocalChild(path.name, trainer_command(ranks, words), env)
        try:
            while not request.exists():
                if script.wait(POLL_S):
                    say(f"{path} {script.end} and made no RLTrainer that needs a server")
                    return script.poll() or 0
            config = load_run_config(request)
            plans, logs = plan_run(config), Path(config.option("output_dir"), LOGS)
            here = ThisMachine(config, plans, logs, script)
            return supervise(config, plans, here)
        finally:
            script.stop(SAVE_GRACE_S)


# --- A check --------------------------------------------------------------------------------------


def check(config: RunConfig) -> int:
    """Try the run in two small steps, with all that it needs. Return the exit status: 0 if all is
    ok, else 1.

    They are steps of the run itself: its servers, its trainer, its environments, with a few groups
    a step and a folder of their own, which is removed. So a check finds what a start finds, and
    also a server that samples from other weights than the trainer has, before or after a push. No
    process and no file is left behind, except the servers' logs if the check failed.

    Raises:
        TomlError, RunFolderError: the run cannot begin.
    """
    args = check_trainer_options(config)
    check_start(config, args)
    target = Path(args.output_dir)
    # Where the run's own folder is or will be, because there is room for a model.
    beside = next(path for path in (target, *target.parents) if path.exists())
    with tempfile.TemporaryDirectory(prefix=".vf-rl-check-", dir=beside) as folder:
        small = {
            "output_dir": folder,
            "max_steps": NUM_STEPS,
            "batch_size": min(args.groups_per_batch, NUM_GROUPS) * args.rollouts_per_example,
            "eval_examples": min(args.eval_examples, NUM_GROUPS),
            "max_off_policy_steps": 0,
            "logging_steps": 1,
            "report_to": "none",
            "resume_from_checkpoint": None,
            "overwrite_output_dir": False,
        }
        config.trainer.args |= small
        # For children that read the files, because these have secrets.
        config.layers.words += [f"--trainer.args.{name}={value}" for name, value in small.items()]
        status = run_anywhere(config)
        problem = f"status {status}" if status else None
        # Else the trainer was on another machine, which has said how it went.
        if Path(folder, "metrics.jsonl").is_file():
            problem = problem or problem_of(Path(folder))
        if problem:
            logs, kept = Path(folder, LOGS), tempfile.mkdtemp(prefix="vf-rl-check-")
            logs.mkdir(exist_ok=True)  # there are none where Ray brings them here
            shutil.copytree(logs, kept, dirs_exist_ok=True)
            print(f"vf-rl: to fix: {problem}; the servers' output is in {kept}")
    return int(bool(problem))


def problem_of(folder: Path) -> str | None:
    """Say what the steps of this run show. Return what must be fixed, or None."""
    from verifiers_rl.report.metrics import FIRST_MISMATCH_KL

    rows = [row for row in read_metrics(folder) if "mismatch_kl" in row]
    for row in rows:
        shown = (
            f"{name} {row[name]:.3g}"
            for name in ("reward", "mismatch_kl", "sync_s", "step_s")
            if row.get(name) is not None
        )
        print(f"vf-rl: step {row['step']:g}: {', '.join(shown)}")
    if not rows:
        return (
            "no step had a token to train on: all rewards of a group were equal, or all replies "
            "were masked; try easier or harder examples, or more rollouts_per_example"
        )
    bound = FIRST_MISMATCH_KL
    # None: it was not finite.
    if any(row["mismatch_kl"] is None or row["mismatch_kl"] > bound for row in rows):
        return f"mismatch_kl above {bound:g}: docs/mismatch.md says what brings both sides together"
    print("vf-rl: all is ok")
    return None


if __name__ == "__main__":
    main()
