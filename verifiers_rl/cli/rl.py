"""`vf-rl @ config.toml [-s SESSION]`: server and trainer together, from one configuration: a TOML,
or several, under keys of the command line (cli/config.py).

The server gets the first GPUs and the trainer the next ones. In a terminal with tmux both run in a
session of two panes, which continues when the terminal is closed; elsewhere they are child
processes with prefixed output. In both cases one supervisor starts them, restarts the server when
it dies, and ends both. The exit status is the trainer's.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

from verifiers_rl.cli.children import (
    STOP_GRACE_S,
    Child,
    answers,
    ended_early,
    ended_within,
    status_of,
)
from verifiers_rl.cli.config import (
    RunConfig,
    TomlError,
    add_folder_options,
    parse_command_line,
)
from verifiers_rl.cli.ending import SAVE_GRACE_S
from verifiers_rl.cli.errors import fail
from verifiers_rl.cli.plan import (
    LoadedEnvironments,
    assign_gpus,
    check_folder,
    check_trainer_options,
    server_command,
    trainer_command,
)
from verifiers_rl.cli.resolved import dry_run
from verifiers_rl.cli.session import run_in_tmux
from verifiers_rl.cli.view import look_at_runs
from verifiers_rl.inference.client import TOKEN_VARIABLE, InferenceClient, InferenceServerError
from verifiers_rl.inference.port import RESERVED_VARIABLE, PortError, port_error, reserve_port
from verifiers_rl.report.run_folder import RunFolderError, closing_lines
from verifiers_rl.report.trackers import tracker_error

USAGE = (
    "vf-rl @ config.toml [@ more.toml] [--KEY VALUE] [-s SESSION] [--no-tmux] [--server-log FILE]\n"
    "                         [--resume [CHECKPOINT] | --overwrite]\n"
    "       vf-rl --check @ config.toml\n"
    "       vf-rl --dry-run @ config.toml\n"
    "       vf-rl --eject [DIR]\n"
    "       vf-rl view RUN... | vf-rl report RUN... -o page.html\n"
    "A KEY is one of the TOML's, such as trainer.args.max_steps; it replaces the files' value."
)

MAX_RESTARTS = 5  # in a row, without an answer of the server in between
BACKOFF_S = 1.0  # before the first restart, doubled before each further one
POLL_S = 0.5  # between two looks at the server


class Stopped(Exception):
    """A signal asked us to stop."""


def main() -> None:
    if sys.argv[1:2] in (["view"], ["report"]):
        sys.exit(look_at_runs(sys.argv[1:]))
    try:
        sys.exit(run())
    except KeyboardInterrupt:
        print("\nvf-rl: interrupted before the run started", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def run() -> int:
    """Check everything that can be wrong, then start the run. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="vf-rl", usage=USAGE, description=__doc__, allow_abbrev=False
    )
    parser.add_argument("-s", "--session", default="vf-rl", help="name of the tmux session")
    parser.add_argument(
        "--no-tmux", action="store_true", help="child processes, even in a terminal"
    )
    add_folder_options(parser)
    parser.add_argument(
        "--server-log", type=Path, help="the server's output goes to this file, the trainer's here"
    )
    parser.add_argument(
        "--check", action="store_true", help="only try everything a run needs, a line each"
    )
    parser.add_argument(
        "--eject",
        nargs="?",
        const=".",
        metavar="DIR",
        help="only copy trainer.py and orchestrator.py there, as the start of a fork",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only print the resolved configuration, and write it into the run's folder",
    )
    # Passed inside a tmux session: the vf-rl that started it has loaded the environments.
    parser.add_argument("--in-session", action="store_true", help=argparse.SUPPRESS)
    if {"-h", "--help"} & set(sys.argv):
        parser.parse_args(["--help"])
    if any(word.startswith("--eject") for word in sys.argv):
        from verifiers_rl.cli.eject import eject

        return eject(Path(parser.parse_args().eject))
    try:
        options, config = parse_command_line(parser, sys.argv[1:])
        if options.dry_run:
            return dry_run(config, options.resume)
        if options.check:
            from verifiers_rl.cli.check import check

            return check(config, options.resume)
        with nullcontext() if options.in_session else LoadedEnvironments(config) as loading:
            args = check_trainer_options(config)
            gpus = assign_gpus(config)
            check_folder(args, options.resume)
            if problem := port_error(args.vllm_server_host, args.vllm_server_port):
                raise TomlError(problem.replace("--port", "vllm_server_port in [trainer.args]"))
            if problem := tracker_error(args.report_to):
                raise config.of_option(problem)
            if loading is not None:
                loading.check()
        if options.server_log is not None:
            begin_log(options.server_log)
    except (TomlError, RunFolderError) as error:
        fail(error)
    if sys.stdout.isatty() and shutil.which("tmux") and not options.no_tmux:
        return run_in_tmux(config, options, Path(args.output_dir).absolute())
    status = supervise(config, gpus, options)
    if status == 0 and Child.last_printed == "inference":
        # The server printed after the trainer's closing lines: print these again as the last.
        print("\n".join(closing_lines(args.output_dir)), flush=True)
    return status


def begin_log(path: Path) -> None:
    """Create an empty log file, whatever an earlier run left there.

    Raises:
        TomlError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    except OSError as error:
        raise TomlError(f"--server-log {path}: {error.strerror}; choose another") from error


def supervise(config: RunConfig, gpus: tuple[str, str], options: argparse.Namespace) -> int:
    """Start server and trainer, restart the server when it dies, and end both when the trainer
    ends. The trainer waits while the server loads. Returns the trainer's exit status.
    """
    host, port = config.option("vllm_server_host"), config.option("vllm_server_port")
    timeout_s = config.option("vllm_server_timeout")
    try:
        reservation = reserve_port(host, port)
    except PortError as error:
        fail(str(error).replace("--port", "vllm_server_port in [trainer.args]"))
    os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)  # for this run; both children inherit it

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    server_env, trainer_env = ({"CUDA_VISIBLE_DEVICES": ids} for ids in gpus)
    # A launcher of several ranks kills them after this time, by default 30 s.
    trainer_env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(round(SAVE_GRACE_S))
    server_env[RESERVED_VARIABLE] = str(port)  # we reserved it, also for restarts
    client = InferenceClient(host, port, timeout_s)
    server = trainer = None

    def start_server() -> Child:
        command = server_command(config, host, port)
        return Child("inference", command, server_env, options.server_log, inherit=False)

    try:
        print(f"vf-rl: starting the server on {host}:{port}, up to {timeout_s:g} s", flush=True)
        server = start_server()
        command = trainer_command(config, options)
        inherit = options.server_log is not None
        trainer = Child("trainer", command, trainer_env, None, inherit)
        was_ready, num_deaths = False, 0
        while not ended_within(trainer, POLL_S):
            if server.process.poll() is None:
                if (num_deaths or not was_ready) and answers(client):
                    was_ready, num_deaths = True, 0
                continue
            if not was_ready:
                raise ended_early(server, options.server_log, config)
            server.stop()  # ends vLLM's own children too, if they outlive it
            num_deaths += 1
            ended = f"the server ended with status {server.process.returncode}"
            if num_deaths > MAX_RESTARTS:
                print(f"vf-rl: {ended} and is not restarted; see its log", file=sys.stderr)
                if not ended_within(trainer, timeout_s + 60.0):
                    raise InferenceServerError("the trainer did not end after its server")
                return status_of(trainer) or 1
            delay_s = BACKOFF_S * 2.0 ** (num_deaths - 1)
            # A new line: the trainer's progress bar may be in the middle of one.
            print(f"\nvf-rl: {ended}; starting it again in {delay_s:g} s", flush=True)
            if not ended_within(trainer, delay_s):
                server = start_server()
        return status_of(trainer)
    except InferenceServerError as error:
        print(f"vf-rl: error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(
            f"\nvf-rl: {stopped}: ending the trainer, which saves a checkpoint (up to "
            f"{SAVE_GRACE_S:g} s), and the server; Ctrl-C ends both at once",
            flush=True,
        )
        return 128 + signal.Signals[str(stopped)].value
    finally:
        children = [child for child in (trainer, server) if child is not None]

        def end_at_once(number: int, frame: FrameType | None) -> None:
            for child in children:
                child.kill()

        # From here on no signal raises, so that the clean-up is completed.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closing terminal may send several
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end_at_once)
        client.close()
        if server is not None:
            server.mute()  # its last output is of no interest; a log file still gets it
        for child in children:
            child.stop(SAVE_GRACE_S if child is trainer else STOP_GRACE_S)
        reservation.close()


if __name__ == "__main__":
    main()
