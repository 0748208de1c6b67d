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
import shlex
import shutil
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

from verifiers_rl.cli.children import STOP_GRACE_S, Child, ended_within, status_of
from verifiers_rl.cli.config import (
    RunConfig,
    TomlError,
    add_folder_options,
    parse_command_line,
)
from verifiers_rl.cli.ending import SAVE_GRACE_S, end_with
from verifiers_rl.cli.errors import fail
from verifiers_rl.cli.node_meeting import GuestMeeting, HostMeeting, NodeError, hello_of
from verifiers_rl.cli.nodes import COMMAND_VARIABLE, Node, fit_to_node, node_of, take_variables
from verifiers_rl.cli.plan import (
    LoadedEnvironments,
    assign_gpus,
    check_folder,
    check_trainer_options,
    server_command,
    server_env,
    servers_to_start,
    split_gpus,
    teachers_to_start,
    trainer_command,
    trainer_env,
    workers_command,
)
from verifiers_rl.cli.resolved import dry_run
from verifiers_rl.cli.servers import (
    SERVERS_VARIABLE,
    SupervisedServer,
    SupervisedWorkers,
    log_of,
)
from verifiers_rl.cli.session import run_in_tmux
from verifiers_rl.cli.teacher_servers import TeacherServers, log_of_teacher
from verifiers_rl.cli.view import look_at_runs
from verifiers_rl.inference.client import TOKEN_VARIABLE, InferenceClient, InferenceServerError
from verifiers_rl.inference.port import PortError, port_error, reserve_port
from verifiers_rl.process.interrupts import handle_signals
from verifiers_rl.report.run_folder import RunFolderError, closing_lines
from verifiers_rl.report.trackers import tracker_error

USAGE = (
    "vf-rl @ config.toml [@ more.toml] [--KEY VALUE] [-s SESSION] [--no-tmux] [--server-log FILE]\n"
    "                         [--resume [CHECKPOINT] | --overwrite]\n"
    "       vf-rl --check | --check-layers @ config.toml\n"
    "       vf-rl --dry-run @ config.toml\n"
    "       vf-rl --eject [DIR]\n"
    "       vf-rl generate @ config.toml -n 4 --min-reward 1.0 -o data.jsonl\n"
    "       vf-rl view RUN... | vf-rl report RUN... -o page.html\n"
    "A KEY is one of the TOML's, such as trainer.args.max_steps; it replaces the files' value."
)

POLL_S = 0.5  # between two looks at the server


class Stopped(Exception):
    """A signal asked us to stop."""


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
        "--check-layers",
        action="store_true",
        help="as --check, and compare the hidden states behind each layer of server and trainer",
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
        node = node_of(config, take_variables())
        if options.check or options.check_layers:
            from verifiers_rl.cli.check import check

            return check(config, options.resume, options.check_layers)
        if config.cluster.engine:
            from verifiers_rl.cli.ray_engine import run_on_ray

            return run_on_ray(config, options)
        loads = not options.in_session and (node is None or node.trains)
        with LoadedEnvironments(config) if loads else nullcontext() as loading:
            if node is not None:
                config.cluster.trainer_nodes = node.num_trainers
            args = check_trainer_options(config)
            if node is not None:
                fit_to_node(config, node)
            split_gpus(config)
            gpus = assign_gpus(config)
            if node is None or node.rank == 0:  # the others may look when its run has begun
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
    if node is None and sys.stdout.isatty() and shutil.which("tmux") and not options.no_tmux:
        return run_in_tmux(config, options, Path(args.output_dir).absolute())
    status = supervise(config, gpus, options, node)
    if (
        status == 0
        and (node is None or not node.rank)
        and Child.last_printed.startswith(("inference", "teacher"))
    ):
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


def supervise(
    config: RunConfig,
    gpus: tuple[str, ...],
    options: argparse.Namespace,
    node: Node | None = None,
) -> int:
    """Start servers and trainer, restart a server when it dies, and end all when the trainer ends.
    The trainer waits while the servers load. Returns the trainer's exit status.

    Args:
        gpus: see `assign_gpus`.
        node: this machine's place in a run of several. Its part of the run ends with the run.
    """
    addresses = servers_to_start(config)
    timeout_s = config.option("vllm_server_timeout")
    try:
        reservations = [reserve_port(host, port) for host, port in addresses]
        teachers = TeacherServers(config, gpus[2:], options.server_log)
    except PortError as error:
        fail(str(error).replace("--port", "vllm_server_port in [trainer.args]"))
    if addresses and node is None:  # for this run; all children inherit it
        os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    handle_signals(on_signal)
    clients = [InferenceClient(host, port, timeout_s) for host, port in addresses]
    named = [client.base_url.removeprefix("http://") for client in clients]
    servers: list[SupervisedServer] = []
    trainer = meeting = workers = None
    status, grace_s = 1, SAVE_GRACE_S

    def start_server(number: int) -> SupervisedServer:
        client, name, what = clients[number], "inference", "the server"
        if len(clients) > 1:
            name, what = f"inference-{number}", f"the server on port {client.port}"
        log = options.server_log and log_of(options.server_log, number, len(clients))
        command = server_command(config, client.host, client.port)
        if meeting is not None and meeting.join:
            command += ["--join", meeting.join]
        env = server_env(config, gpus[0], number)
        return SupervisedServer(name, what, command, env, client, log)

    try:
        if node is not None:
            meeting = make_meeting(config, options, node, named)
            meeting.begin(timeout_s)
            named = meeting.servers
        for client in clients:
            where = f"{client.host}:{client.port}"
            print(f"vf-rl: starting the server on {where}, up to {timeout_s:g} s", flush=True)
            servers.append(start_server(len(servers)))
        teachers.start(timeout_s)
        if node is not None and node.does_roll_out(node.rank):
            env = {"CUDA_VISIBLE_DEVICES": "", SERVERS_VARIABLE: " ".join(named)}
            workers = SupervisedWorkers(workers_command(config, node), env)
        if node is None or node.trains:
            command = trainer_command(config, options, *([node] if node else []))
            inherit = options.server_log is not None
            env = trainer_env(config, gpus[1], node, named) | teachers.trainer_env()
            trainer = Child("trainer", command, env, None, inherit)
        while trainer is None or not ended_within(trainer, POLL_S):
            for server in servers:
                server.look(config)
            teachers.look()
            if workers is not None:
                workers.look()
            if meeting is not None and (end := meeting.look(0.0 if trainer else POLL_S)):
                status, grace_s = end.status, end.grace_s
                if trainer is not None and status == 0:
                    ended_within(trainer, grace_s)
                return status
            if servers and all(server.is_given_up for server in servers):
                if trainer is None:
                    raise NodeError("all servers of this node have died too often; see their logs")
                if meeting is not None:
                    continue  # other nodes may have servers
                if not ended_within(trainer, timeout_s + 60.0):
                    raise InferenceServerError("the trainer did not end after its server")
                return status_of(trainer) or 1
        status = status_of(trainer)
        if isinstance(meeting, HostMeeting):
            meeting.look()
            status = meeting.status(status)
        elif meeting is not None:  # the run goes on until node 0 says how it has ended
            meeting.tell({"ended": status})
            while (end := meeting.look(POLL_S)) is None:
                for server in servers:
                    server.look(config)
            status = status or end.status
        return status
    except (InferenceServerError, NodeError) as error:
        print(f"vf-rl: error: {error}", file=sys.stderr)
        status = 1
        if isinstance(error, NodeError) and error.is_lost:
            grace_s = STOP_GRACE_S  # without its ranks, the trainer cannot save
        # Then it would not elsewhere either.
        did_not_start = isinstance(error, InferenceServerError) or error.does_not_start
        if did_not_start and isinstance(meeting, GuestMeeting) and not meeting.is_late:
            meeting.tell({"error": str(error)})
        return status
    except Stopped as stopped:
        print(
            f"\nvf-rl: {stopped}: ending the trainer, which saves a checkpoint (up to "
            f"{SAVE_GRACE_S:g} s), and the server; Ctrl-C ends both at once",
            flush=True,
        )
        status = 128 + signal.Signals[str(stopped)].value
        return status
    finally:
        children = [server.child for server in (*servers, *teachers.servers)]
        if workers is not None:
            children.append(workers.child)
        if trainer is not None:
            children.insert(0, trainer)

        def end_at_once(number: int, frame: FrameType | None) -> None:
            for child in children:
                child.kill()

        # From here on no signal raises, so that the clean-up is completed.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closing terminal may send several
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end_at_once)
        for client in clients:
            client.close()
        for server in (*servers, *teachers.servers):
            server.child.mute()  # its last output is of no interest; a log file still gets it
        if trainer is not None:
            trainer.stop(grace_s)
        if workers is not None:
            workers.child.stop()
        if isinstance(meeting, HostMeeting):
            meeting.end(status, grace_s)  # not before: the trainer may need the others' servers
        for server in servers:
            server.child.stop()
        teachers.close()
        if isinstance(meeting, GuestMeeting) and trainer is not None:
            meeting.tell({"ended": status_of(trainer)})  # in good order, not by losing this node
        for reservation in reservations:
            reservation.close()


def make_meeting(
    config: RunConfig, options: argparse.Namespace, node: Node, servers: list[str]
) -> HostMeeting | GuestMeeting:
    """Return this node's side of the meeting of all nodes.

    Raises:
        NodeError: this is node 0, and cannot listen.
    """
    own, token = hello_of(config, node, servers), os.environ[TOKEN_VARIABLE]
    where = f"{node.host}:{node.port}"
    print(f"vf-rl: node {node.rank} of {node.num_nodes}, which meet at {where}", flush=True)
    if node.rank:
        return GuestMeeting(node, own, token)
    command = os.environ.get(COMMAND_VARIABLE) or shlex.join(["vf-rl", *config.words])
    return HostMeeting(node, own, token, f"{command} --resume", SAVE_GRACE_S)


if __name__ == "__main__":
    main()
