"""Rollout workers: environments in processes of their own, so that their Python code and the
orchestrator's work for each token take no time from the trainer.

    trainer process                                      worker processes
    WorkerEnvironment ── an example, as JSON ──────►  ExampleRunner: rollouts, scores
                      ◄── Rollouts, as arrays ──────

A worker makes each environment again from its recipe. If parts of it are defined in the script that
runs, the worker imports the script, as multiprocessing's "spawn" does. Recipes go through a file
without a name, which no other process can reach; all other messages are JSON and arrays
(messages.py). Workers may run in another Python than the trainer's, see foreign.py.

We do not use the environment server of `verifiers`: its workers talk to the model through stock
clients, which lose policy versions and empty replies, and a worker that dies is not started again.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import itertools
import json
import logging
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import verifiers_rl
from verifiers_rl.data import describe_error
from verifiers_rl.envs.base import InvalidEnvironmentError, NotPortableError, PortableEnvironment
from verifiers_rl.envs.messages import EnvWorkerError, frame, receive, unpack_group
from verifiers_rl.envs.routed import GroupLeases
from verifiers_rl.inference import current_group_seed
from verifiers_rl.types import LOAD_S, Progress, Rollout, Slots, Split

logger = logging.getLogger(__name__)

EXIT_S = 30.0  # deadline for a worker to end by itself
ALIVE_S = 2.0  # a worker says so often that its event loop runs
BLOCKED_S = 30.0  # a worker that has said nothing for so long is reported
MAX_ATTEMPTS = 3  # of a group whose worker dies
MAX_DEATHS = 5  # of a worker that has returned no group in between
MAX_AUTO_WORKERS = 8


class WorkerLostError(EnvWorkerError):
    """The worker process has ended, or was ended because it did not answer."""


def count_workers(env_workers: int | str) -> int:
    """Return how many processes `env_workers` asks for. "auto" asks for one for each four cores
    that this process may use: at least 1, at most `MAX_AUTO_WORKERS`.
    """
    if isinstance(env_workers, int):
        return env_workers
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(max(num_cores // 4, 1), MAX_AUTO_WORKERS)


class WorkerPool:
    """Worker processes that the environments of a run share which use one Python.

    Args:
        num_workers: >= 1.
        max_concurrent: limit of rollouts in flight in one worker.
        timeout_s: seconds that a rollout may take. A worker that says nothing for so long (and not
            for less than `BLOCKED_S`) is ended.
        python: the interpreter; "": the one of this process.
    """

    def __init__(
        self, num_workers: int, max_concurrent: int, timeout_s: float, python: str = ""
    ) -> None:
        self.workers: list[_Worker] = []
        self._num_workers = num_workers
        self._max_concurrent = max_concurrent
        self._timeout_s = timeout_s
        self._python = python
        self._recipes: list[dict[str, Any]] = []
        self._needs_script = False
        self._num_open = 0  # environments that are open
        self._opening: asyncio.Task[None] | None = None

    def add(self, env: PortableEnvironment) -> int:
        """Take up an environment; return its number.

        Raises:
            NotPortableError: a worker could not make it again.
        """
        recipe = env.recipe()
        if not isinstance(recipe, dict):
            try:
                data = pickle.dumps(recipe)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise NotPortableError(
                    f"its parts cannot be sent to another process: {error}"
                ) from error
            if b"__main__" in data:
                if problem := problem_of_importing_script():
                    raise NotPortableError(problem)
                self._needs_script = True
            recipe = {"pickled": base64.b64encode(data).decode()}
        self._recipes.append({"name": env.name, **recipe})
        return len(self._recipes) - 1

    async def open(self) -> None:
        """Start the workers, and wait until all have made all environments.

        Raises:
            InvalidEnvironmentError: a worker could not make an environment.
        """
        self._num_open += 1
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        names = ", ".join(recipe["name"] for recipe in self._recipes)
        load_s, silent_s = max(self._timeout_s, LOAD_S), max(self._timeout_s, BLOCKED_S)
        self.workers = [
            _Worker(names, self._python, self._setup(), load_s, silent_s)
            for _ in range(self._num_workers)
        ]
        problems = await asyncio.gather(
            *(worker.open() for worker in self.workers), return_exceptions=True
        )
        for problem in problems:
            if problem is not None:
                await self._close()
                raise problem

    def _setup(self) -> dict[str, Any]:
        """Return what a worker reads first."""
        process = {}
        if not self._python:
            names = ["sys_path", "sys_argv", "orig_dir", "dir"]
            if self._needs_script:
                names += ["init_main_from_path", "init_main_from_name"]
            given = multiprocessing.spawn.get_preparation_data("rollout worker")
            process = {name: given[name] for name in names if name in given}
        return {
            "process": process,
            "max_concurrent": self._max_concurrent,
            "alive_s": ALIVE_S,
            "blocked_s": BLOCKED_S,
            "recipes": self._recipes,
        }

    async def close(self) -> None:
        """End the workers when the last environment is closed."""
        self._num_open -= 1
        if self._num_open == 0:
            await self._close()

    async def _close(self) -> None:
        self._opening = None
        await asyncio.gather(*(worker.close() for worker in self.workers))

    async def run_group(
        self, request: dict[str, Any], on_rollout_end: Callable[..., None]
    ) -> tuple[list[Rollout], int]:
        """Run one group in the worker with the least to do. If the worker dies, begin again.

        Returns:
            The rollouts, and how often the group began again.

        Raises:
            EnvWorkerError: the worker could not run the group, or workers died with it
                `MAX_ATTEMPTS` times.
        """
        for num_restarts in itertools.count():
            worker = min(self.workers, key=lambda one: (not one.answers, one.num_groups))
            try:
                return await worker.run_group(request, on_rollout_end), num_restarts
            except WorkerLostError:
                if num_restarts + 1 == MAX_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")


class WorkerEnvironment:
    """The `EnvRunner` of an environment whose groups run in worker processes. This process chooses
    the examples and sends them.

    Args:
        env: the environment in this process. Later changes of it do not reach the workers.
        pool: workers for all environments of the run.

    Raises:
        NotPortableError: a worker could not make it again.
    """

    files_per_rollout = 0  # the worker holds them

    def __init__(self, env: PortableEnvironment, pool: WorkerPool) -> None:
        self.env = env
        self.pool = pool
        self._number = pool.add(env)
        self.name = env.name
        self.description = env.description.replace("in this process", "in rollout workers")
        self.weights = env.weights
        self.num_overlong_prompts = env.num_overlong_prompts
        self.bounds_replies = env.bounds_replies
        self.first_prompt = env.first_prompt

    def sizes(self, split: Split) -> list[int]:
        return self.env.sizes(split)

    async def open(self) -> None:
        await self.pool.open()

    async def close(self) -> None:
        await self.pool.close()

    async def run_group(
        self,
        split: Split,
        index: int,
        num_rollouts: int,
        model: str,
        sampling_args: dict[str, Any],
        policy_version: int,
        slots: Slots | Progress,
    ) -> list[Rollout]:
        """Do as `EnvRunner.run_group`, in a worker."""
        example = await self.env.example(split, index)
        try:
            text = json.dumps(example)
        except (TypeError, ValueError) as error:
            raise InvalidEnvironmentError(
                f"environment {self.name!r}: example {index} cannot be sent to a worker as JSON: "
                f"{error}; set env_workers=0"
            ) from error
        request = {
            "env": self._number,
            "example": text,
            "num_rollouts": num_rollouts,
            "model": model,
            "sampling_args": self.env.options.sampling_of(split, sampling_args),
            "policy_version": policy_version,
            "group_seed": current_group_seed.get(),
        }
        async with slots.several(num_rollouts) as give_one_back:
            try:
                group, num_restarts = await self.pool.run_group(request, give_one_back)
            except EnvWorkerError as error:
                prompt = self.env.prompt_of(example)
                group = [Rollout(index, prompt, env=self.name) for _ in range(num_rollouts)]
                num_restarts = MAX_ATTEMPTS - 1 if isinstance(error, WorkerLostError) else 0
                for rollout in group:
                    rollout.error = error
        for rollout in group:
            rollout.example_id = index
            rollout.num_restarts = num_restarts
        return group


def problem_of_importing_script() -> str | None:
    """Return why the script that runs cannot be imported in another process, or None if it can."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:
        return None  # python -m package.module
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).is_file():
        return "parts of it are defined in an interactive session, which a worker cannot import"
    if not is_guarded(Path(path).read_text()):
        return (
            f"parts of it are defined in {Path(path).name}, which a worker would import, and which "
            'lacks `if __name__ == "__main__":` around what starts the training'
        )
    return None


def is_guarded(source: str) -> bool:
    """Return whether a script has `if __name__ == "__main__":` at its top level."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Compare):
            sides = [node.test.left, *node.test.comparators]
            names = {side.id for side in sides if isinstance(side, ast.Name)}
            values = {side.value for side in sides if isinstance(side, ast.Constant)}
            if "__name__" in names and "__main__" in values:
                return True
    return False


class _Worker:
    """A worker process, and this side of its connection. A process that ends is started again.

    Args:
        names: of its environments, for messages.
        python: see `WorkerPool`.
        setup: what the process reads first.
        load_s: deadline of its start, seconds.
        silent_s: a process that has said nothing for so long is ended.

    Attributes:
        num_groups: groups that it was given and has not returned.
    """

    def __init__(
        self, names: str, python: str, setup: dict[str, Any], load_s: float, silent_s: float
    ) -> None:
        self.num_groups = 0
        self._names, self._python, self._setup = names, python, setup
        self._load_s, self._silent_s = load_s, silent_s
        self._num_deaths = 0  # since it returned a group
        self._is_silent = False  # it was reported as blocked, and has said nothing since
        self._process: subprocess.Popen[bytes] | None = None
        self._stack: BinaryIO | None = None  # what the process writes when its loop is blocked
        self._starting: asyncio.Task[None] | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []  # one reads, one watches
        self._heard = asyncio.Event()
        self._replies: dict[int, tuple[asyncio.Future[list[Rollout]], Callable[..., None]]] = {}
        self._numbers = itertools.count()

    @property
    def answers(self) -> bool:
        """Whether it is started, and not reported as blocked."""
        return self._starting is not None and self._starting.done() and not self._is_silent

    async def open(self) -> None:
        self._starting = asyncio.create_task(self._start())
        await self._starting

    async def _start(self) -> None:
        """Start the process, and wait until it has made the environments.

        Raises:
            InvalidEnvironmentError: it could not make one, or not within the deadline.
        """
        ours, theirs = socket.socketpair()
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _end
        with theirs:
            self._process = process = start_worker(
                self._python, theirs.fileno(), self._stack.fileno(), self._setup
            )
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            _feed_eof_when_ended(process, self._reader)
            said, _ = await asyncio.wait_for(receive(self._reader), self._load_s)
            problem = said["problem"]
        except TimeoutError:
            process.kill()
            problem = f"not loaded within {self._load_s:g} s; raise generation_timeout"
        except (EOFError, OSError):
            problem = await self._how_it_ended()
        except BaseException:
            await self._end()
            raise
        if problem is not None:
            await self._end()
            raise InvalidEnvironmentError(f"environment {self._names!r}, in a worker: {problem}")
        self._is_silent = False
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    async def run_group(
        self, request: dict[str, Any], on_rollout_end: Callable[..., None]
    ) -> list[Rollout]:
        """Run one group.

        Raises:
            WorkerLostError: the worker has ended.
            EnvWorkerError: the worker could not run the group.
            InvalidEnvironmentError: a new process could not make the environments.
        """
        assert self._starting is not None, "the pool is not open"
        self.num_groups += 1
        number = next(self._numbers)
        try:
            await asyncio.shield(self._starting)
            reply = asyncio.get_running_loop().create_future()
            self._replies[number] = reply, on_rollout_end
            if isinstance(on_rollout_end, GroupLeases):
                servers = on_rollout_end.begin(
                    lambda url: self._send({"group": number, "lost": url})
                )
                request = {**request, "servers": servers}
            self._send({"group": number, **request})
            group = await reply
            self._num_deaths = 0
            return group
        except asyncio.CancelledError:
            self._send({"group": number, "cancel": True})
            raise
        finally:
            self.num_groups -= 1
            self._replies.pop(number, None)

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.writelines(frame(message))

    async def _read(self) -> None:
        try:
            while True:
                message, arrays = await receive(self._reader)
                self._heard.set()
                self._is_silent = False
                waiting = self._replies.get(message.get("group", -1))
                if waiting is None or waiting[0].done():
                    continue  # it is alive, or its group was cancelled
                reply, on_rollout_end = waiting
                if "rollouts" in message:
                    reply.set_result(unpack_group(message["rollouts"], arrays))
                elif "problem" in message:
                    reply.set_exception(EnvWorkerError(message["problem"]))
                elif "lost" in message:  # a rollout needs another server
                    other = cast(GroupLeases, on_rollout_end).move(message["lost"])
                    self._send({"group": message["group"], "moved": other})
                elif "server" in message:
                    on_rollout_end(message["server"])
                else:
                    on_rollout_end()
        except (EOFError, OSError):
            problem = await self._how_it_ended()
        except (ValueError, KeyError, TypeError) as error:
            problem = f"unreadable reply: {describe_error(error)}"
        lost, self._replies = self._replies, {}
        self._num_deaths += 1
        logger.warning(
            "environment %r: %s; another one is started, and its %d groups begin again",
            self._names,
            problem,
            len(lost),
        )
        # From here on, new groups wait for the new process. Whoever runs the next gets its error.
        self._starting = asyncio.create_task(self._start_again(problem))
        self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        for reply, _ in lost.values():
            if not reply.done():
                reply.set_exception(WorkerLostError(problem))

    async def _start_again(self, problem: str) -> None:
        await self._end()
        if self._num_deaths == MAX_DEATHS:
            raise InvalidEnvironmentError(
                f"environment {self._names!r}: a worker died {MAX_DEATHS} times and returned no "
                f"group in between; at last {problem}"
            )
        await self._start()

    async def _watch(self) -> None:
        """Report the process if it says nothing for `BLOCKED_S`, and end it after `silent_s`."""
        assert self._process is not None
        num_timeouts = 0
        while num_timeouts * BLOCKED_S < self._silent_s:
            self._heard.clear()
            try:
                await asyncio.wait_for(self._heard.wait(), BLOCKED_S)
                num_timeouts = 0
                continue
            except TimeoutError:
                # If this process did not run either, what the worker said is only read now.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._heard.wait(), ALIVE_S / 2)
                    continue
            num_timeouts += 1
            if not self._is_silent:
                self._is_silent = True
                logger.warning(
                    "environment %r: worker %d has not answered for %g s; other workers get its "
                    "new groups. %s",
                    self._names,
                    self._process.pid,
                    BLOCKED_S,
                    self._where_it_is(),
                )
        logger.warning("environment %r: worker %d is ended", self._names, self._process.pid)
        self._process.kill()

    def _where_it_is(self) -> str:
        """Return where the environment's code has blocked the event loop, as far as is known."""
        assert self._stack is not None
        size = os.fstat(self._stack.fileno()).st_size
        text = os.pread(self._stack.fileno(), size, 0).decode(errors="replace")
        last = text.rpartition("Timeout")[2].partition("\n")[2]
        if not last:
            return "It says nothing of where it is: is it stopped?"
        return f"Its event loop is blocked here:\n{last}"

    async def _how_it_ended(self) -> str:
        assert self._process is not None
        status = await asyncio.to_thread(end_worker, self._process)
        return f"the worker process {self._process.pid} ended with status {status}"

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        await self._end()

    async def _end(self) -> None:
        """End the process, and what it has left behind."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        process, self._process = self._process, None
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()  # makes the process end
        if process is not None:
            if self._is_silent:
                process.kill()  # it would not notice that the connection is closed
            await asyncio.to_thread(end_worker, process)
        if self._stack is not None:
            self._stack.close()


def start_worker(
    python: str, descriptor: int, stack: int, setup: dict[str, Any]
) -> subprocess.Popen[bytes]:
    """Start a worker process.

    Args:
        python: see `WorkerPool`.
        descriptor: of its end of the connection to the trainer.
        stack: descriptor of a file for the stack of a blocked event loop.
        setup: what it reads first. This has pickles, so it does not come over the connection.
    """
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(setup).encode())
        file.seek(0)
        words = [str(descriptor), str(stack), str(os.getpid()), str(verifiers_rl.__file__)]
        return subprocess.Popen(
            [python or sys.executable, "-P", "-c", MAIN, *words],
            pass_fds=[descriptor, stack],
            stdin=file,
            env=clean_environment() if python else None,
            process_group=0,  # so that processes that it leaves behind can be ended
        )


def clean_environment() -> dict[str, str]:
    """Return our variables without those by which our packages would hide another Python's."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in ours}


def _feed_eof_when_ended(process: subprocess.Popen[bytes], reader: asyncio.StreamReader) -> None:
    """Feed EOF to the reader when the process ends. The process may have started others, which hold
    its end of the connection open and outlive it.
    """
    loop = asyncio.get_running_loop()

    def wait() -> None:
        process.wait()
        try:
            # One second later, so that the last data from the process still arrive.
            loop.call_soon_threadsafe(loop.call_later, 1.0, reader.feed_eof)
        except RuntimeError:
            pass  # the loop is closed, so nobody waits for the reader

    threading.Thread(target=wait, name="rollout worker's end", daemon=True).start()


def end_worker(process: subprocess.Popen[bytes]) -> int:
    """Wait for its end, and kill it if it does not end by itself; also end what it has left behind.
    Return its exit status.
    """
    try:
        return process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(EXIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# The worker's Python may have packages of its own, and this one not. So it gets the folder of this
# package alone, not the folder in which the package lies, where all others are.
MAIN = """
import importlib.util, sys
descriptor, stack, parent, package = sys.argv[1:]
spec = importlib.util.spec_from_file_location("verifiers_rl", package)
sys.modules["verifiers_rl"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from verifiers_rl.envs.worker_main import main
main(int(descriptor), int(stack), int(parent))
"""
