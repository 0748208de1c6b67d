"""`vf-rl @ config.toml [-s SESSION]`: server and trainer together, from one configuration: a TOML,
or several, under keys of the command line (cli/config.py).

The server gets the first GPUs and the trainer the next ones, or both get the only one. The server's
output goes into the folder `logs` of the run's folder, and the trainer's comes here. In a terminal
with tmux both are shown in a session of two panes, which continues when the terminal is closed;
elsewhere the exit status is the trainer's. In both cases one supervisor starts them, restarts the
server when it dies, and ends both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

from verifiers_rl.cli.config import (
    PARSER,
    RunConfig,
    TomlError,
    add_run_options,
    parse_command_line,
    words_of,
)
from verifiers_rl.cli.ending import end_with
from verifiers_rl.cli.errors import fail
from verifiers_rl.cli.leaves import load_leaf
from verifiers_rl.cli.plan import (
    check_start,
    check_trainer_options,
    is_on_several,
    plan_servers,
    share_gpu,
    show_gpus,
    split_gpus,
    trainer_command,
)
from verifiers_rl.cli.resolved import dry_run, write_resolved
from verifiers_rl.cli.session import run_in_tmux
from verifiers_rl.cli.supervise import LOGS, ThisMachine, supervise
from verifiers_rl.cli.view import look_at_runs
from verifiers_rl.process.terminal import print_all_characters
from verifiers_rl.report.run_folder import RunFolderError

USAGE = (
    "vf-rl @ config.toml [@ more.toml] [--KEY VALUE] [-s SESSION] [--no-tmux]\n"
    "                         [--resume | --overwrite]\n"
    "       vf-rl --check @ config.toml\n"
    "       vf-rl --dry-run @ config.toml\n"
    "       vf-rl --eject [DIR]\n"
    "       vf-rl generate @ config.toml -n 4 --min-reward 1.0 -o data.jsonl\n"
    "       vf-rl view RUN... [-o page.html]\n"
    "       vf-rl replay RUN --step 40 --loss my_loss:a --loss ppo\n"
    "A KEY is one of the TOML's, such as trainer.args.max_steps; it replaces the files' value."
)


def main() -> None:
    if parent := os.environ.pop("VERIFIERS_RL_DIE_WITH_PARENT", None):
        end_with({int(parent)})
    print_all_characters()
    try:
        sys.exit(run())
    except (TomlError, RunFolderError) as error:
        fail(error)
    except KeyboardInterrupt:
        print("\nvf-rl: interrupted before the run started", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def run() -> int:
    """Do what the command line asks for. Returns the exit status.

    Raises:
        TomlError, RunFolderError: the run cannot begin.
    """
    if sys.argv[1:2] == ["view"]:
        return look_at_runs(sys.argv[2:])
    if sys.argv[1:2] == ["replay"]:
        return load_leaf("replay", "vf-rl replay").main(sys.argv[2:])
    if sys.argv[1:2] == ["generate"]:
        return load_leaf("sft.generate", "vf-rl generate").generate(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="vf-rl", usage=USAGE, description=__doc__, **PARSER)
    parser.add_argument("-s", "--session", default="vf-rl", help="name of the tmux session")
    parser.add_argument(
        "--no-tmux", action="store_true", help="child processes, even in a terminal"
    )
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
        from verifiers_rl.cli.check import check

        return check(config, run_anywhere)
    has_tmux = sys.stdout.isatty() and shutil.which("tmux") and not options.no_tmux
    return run_anywhere(config, options.session if has_tmux else None)


def run_anywhere(config: RunConfig, session: str | None = None) -> int:
    """Run on this machine, or on several. Returns the exit status.

    Args:
        session: name of a session of tmux for the run; without one, it runs here.

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
    split_gpus(config)
    plans = plan_servers(config)
    share_gpu(config, plans)
    folder = Path(args.output_dir).absolute()
    trainer = lambda: trainer_command(config, words_of(config))  # noqa: E731
    here = ThisMachine(config, plans, folder / LOGS, trainer)
    if session is not None:
        here.close()  # the vf-rl in the session has its own
        return run_in_tmux(config, session, folder, plans)
    write_resolved(config, args.output_dir)
    return supervise(config, plans, here)


if __name__ == "__main__":
    main()
