"""`vf-rl @ config.toml [-s SESSION]`: server and trainer together, from one configuration: a TOML,
or several, under keys of the command line (cli/config.py).

The server gets the first GPUs and the trainer the next ones. In a terminal with tmux both run in a
session of two panes, which continues when the terminal is closed; elsewhere they are child
processes with prefixed output. In both cases one supervisor starts them, restarts the server when
it dies, and ends both. The exit status is the trainer's.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

from verifiers_rl.cli.children import Child, LocalChild, Supervised
from verifiers_rl.cli.config import (
    RunConfig,
    TomlError,
    add_folder_options,
    parse_command_line,
)
from verifiers_rl.cli.ending import end_with
from verifiers_rl.cli.errors import fail
from verifiers_rl.cli.plan import (
    LoadedEnvironments,
    assign_gpus,
    check_folder,
    check_trainer_options,
    host_and_port,
    log_of,
    log_of_teacher,
    servers_to_start,
    split_gpus,
    start_server,
    start_teacher,
    teachers_to_start,
    trainer_command,
    trainer_env,
)
from verifiers_rl.cli.resolved import dry_run
from verifiers_rl.cli.session import run_in_tmux
from verifiers_rl.cli.supervise import supervise
from verifiers_rl.cli.teachers import TEACHERS_VARIABLE
from verifiers_rl.cli.view import look_at_runs
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.inference.port import (
    PortError,
    port_error,
    reserve_free_port,
    reserve_port,
)
from verifiers_rl.report.run_folder import RunFolderError, closing_lines
from verifiers_rl.report.trackers import tracker_error

LOCAL_HOST = "127.0.0.1"  # where teachers are: the trainer's rank 0, which asks them, is here
USAGE = (
    "vf-rl @ config.toml [@ more.toml] [--KEY VALUE] [-s SESSION] [--no-tmux] [--server-log FILE]\n"
    "                         [--resume [CHECKPOINT] | --overwrite]\n"
    "       vf-rl --check @ config.toml\n"
    "       vf-rl --dry-run @ config.toml\n"
    "       vf-rl --eject [DIR]\n"
    "       vf-rl generate @ config.toml -n 4 --min-reward 1.0 -o data.jsonl\n"
    "       vf-rl view RUN... | vf-rl report RUN... -o page.html\n"
    "A KEY is one of the TOML's, such as trainer.args.max_steps; it replaces the files' value."
)


def main() -> None:
    if sys.argv[1:2] in (["view"], ["report"]):
        sys.exit(look_at_runs(sys.argv[1:]))
    if sys.argv[1:2] == ["generate"]:
        from verifiers_rl.sft.generate import generate

        sys.exit(generate(sys.argv[2:]))
    if parent := os.environ.pop("VERIFIERS_RL_DIE_WITH_PARENT", None):
        end_with({int(parent)})
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
        from verifiers_rl.cli.machines import machine_of, run_on_machines

        if machine := machine_of(config):
            return run_on_machines(config, options, machine)
        if config.cluster.engine:
            from verifiers_rl.cli.ray_engine import run_on_ray

            return run_on_ray(config, options)
        with nullcontext() if options.in_session else LoadedEnvironments(config) as loading:
            args = check_trainer_options(config)
            split_gpus(config)
            gpus = assign_gpus(config)
            check_folder(args, options.resume)
            for host, port in servers_to_start(config):
                if problem := port_error(host, port):
                    raise TomlError(problem.replace("--port", "vllm_server_port in [trainer.args]"))
            if problem := tracker_error(args.report_to):
                raise config.of_option(problem)
            if loading is not None:
                loading.check()
        if options.server_log is not None:
            for number in range(config.inference_replicas):
                begin_log(log_of(options.server_log, number, config.inference_replicas))
            for table in teachers_to_start(config):
                begin_log(log_of_teacher(options.server_log, table.name))
    except (TomlError, RunFolderError) as error:
        fail(error)
    if sys.stdout.isatty() and shutil.which("tmux") and not options.no_tmux:
        return run_in_tmux(config, options, Path(args.output_dir).absolute())
    try:
        here = ThisMachine(config, options, gpus)
    except PortError as error:
        fail(str(error).replace("--port", "vllm_server_port in [trainer.args]"))
    status = supervise(config, here)
    if status == 0 and Child.last_printed.startswith(("inference", "teacher")):
        # A server printed after the trainer's closing lines: print these again as the last.
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


class ThisMachine:
    """See `supervise.Machines`. When it is made, it reserves the ports of the servers, and draws
    their token.

    Args:
        gpus: see `assign_gpus`.

    Raises:
        PortError: a port cannot be reserved.
    """

    def __init__(
        self, config: RunConfig, options: argparse.Namespace, gpus: tuple[str, ...]
    ) -> None:
        self._config, self._options, self._gpus = config, options, gpus
        self.servers: list[Supervised] = []
        self.others: list[Supervised] = []
        self.trainers: list[Child] = []
        self._addresses = servers_to_start(config)
        self._reservations = [reserve_port(host, port) for host, port in self._addresses]
        self._teachers = [
            (table, *reserve_free_port(LOCAL_HOST)) for table in teachers_to_start(config)
        ]
        if self._addresses:  # for this run; all children inherit it
            os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)

    def start(self, timeout_s: float) -> None:
        config, options = self._config, self._options
        for number, address in enumerate(self._addresses):
            server = start_server(config, self._gpus[0], address, options.server_log, number)
            self.servers.append(server)
        for (table, port, _), gpus in zip(self._teachers, self._gpus[2:], strict=True):
            where = LOCAL_HOST, port
            self.others.append(start_teacher(config, table, gpus, where, options.server_log))
        named = [host_and_port(*address) for address in self._addresses]
        env = trainer_env(self._gpus[1], named)
        urls = {table.name: f"http://{LOCAL_HOST}:{port}" for table, port, _ in self._teachers}
        env[TEACHERS_VARIABLE] = json.dumps(urls)
        words = trainer_command(config, options)
        inherit = options.server_log is not None
        self.trainers.append(LocalChild("trainer", words, env, inherit=inherit))

    def close(self) -> None:
        for reservation in (*self._reservations, *(socket for *_, socket in self._teachers)):
            reservation.close()


if __name__ == "__main__":
    main()
