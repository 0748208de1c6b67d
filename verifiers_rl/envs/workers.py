"""Rollout workers: environments in processes of their own, so that their Python code takes no time
from the trainer.

    trainer process                                     worker process (worker_main.py)
    WorkerEnvironment ── group: example, request ──►    the environment's rollouts
                      ◄── rollout: needs a place ──     each asks before it begins
                      ── its server ──────────────►     (and again if its server is lost)
                      ◄── rollout: has ended ──────
                      ◄── Rollouts, as arrays ─────

So places, servers and what is done of a batch are counted in the trainer's process alone. A worker
makes each environment again from its recipe. If parts of it are defined in the script that runs,
the worker imports the script, as multiprocessing's "spawn" does. Messages are JSON and bytes
(messages.py), on a pair of sockets that no other process can reach; recipes and tasks in them are
pickles. Workers may run in another Python than the trainer's, see foreign.py: then nothing is
pickled.

We do not use the environment server of `verifiers`: a worker of it that dies is not started again,
and its messages have no place for policy versions.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import logging
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

import verifiers_rl
from verifiers_rl.data import describe_error
from verifiers_rl.envs.base import (
    InvalidEnvironmentError,
    PortableEnvironment,
    needs_script,
    pickle_for_worker,
)
from verifiers_rl.envs.messages import (
    Outbox,
    WorkerError,
    WorkerLostError,
    receive,
    unpack_group,
)
from verifiers_rl.inference import ServerLostError, SessionLostError
from verifiers_rl.requests import GroupRequest
from verifiers_rl.types import LOAD_S, Rollout

logger = logging.getLogger(__name__)

EXIT_S = 30.0  # deadline for a worker to end by itself
ALIVE_S = 2.0  # a worker says so often that its event loop runs
BLOCKED_S = 30.0  # a worker that has said nothing for so long is reported
MAX_ATTEMPTS = 3  # of a group whose worker dies
MAX_DEATHS = 5  # of a worker that has returned no group in between
MAX_AUTO_WORKERS = 8
# Fields of a request that are sent; its places and its progress stay here.
SENT = [f.name for f in fields(GroupRequest) if f.name not in ("places", "progress")]
# The worker's Python may have packages of its own, and this one not. So it gets the folder of this
# package alone, not the folder in which the package lies, where all others are.
MAIN = """
import importlib.util, sys
descriptor, parent, package = sys.argv[1:]
sys.path[:] = [folder for folder in sys.path if folder]
spec = importlib.util.spec_from_file_location("verifiers_rl", package)
sys.modules["verifiers_rl"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from verifiers_rl.envs.worker_main import main
main(int(descriptor), int(parent))
"""


def count_workers(env_workers: int | str) -> int:
    """Return how many processes `env_workers` asks for. "auto" asks for one for each four cores
    that this process may use: at least 1, at most `MAX_AUTO_WORKERS`.
    """
    if isinstance(env_workers, int):
        return env_workers
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(max(num_cores // 4, 1), MAX_AUTO_WORKERS)


class WorkerEnvironment:
    """The `EnvRunner` of an environment whose groups run in worker processes.

    Args:
        env: the environment in this process. Later changes of it do not reach the workers.
        pool: workers for all environments of the run that use one Python.

    Raises:
        NotPortableError: a worker could not make it again.
    """

    def __init__(self, env: PortableEnvironment, pool: WorkerPool) -> None:
        self.env, self.pool = env, pool
        self.weights, self.sizes = env.weights, env.sizes
        self.description = env.description.replace("in this process", "in rollout workers")
        self.open, self.close = pool.open, pool.close
        self._number = pool.add(env)

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Do as `EnvRunner.run_group`, in a worker. If the worker dies, the group begins again.

        Raises:
            NotPortableError: the example cannot be sent.
        """
        index = request.index
        task = await self.env.task(request.split, index)
        pickled = b"" if task is None else pickle_for_worker(task)
        given = {name: getattr(request, name) for name in SENT}
        message = {"env": self._number, "request": given}
        for num_restarts in range(MAX_ATTEMPTS):  # noqa: B007 - counted below
            # The worker with the least to do.
            worker = min(self.pool.workers, key=lambda one: (one.is_blocked, len(one.groups)))
            try:
                group = await worker.run_group(request, message, pickled)
                break
            except WorkerError as error:
                group = [
                    Rollout(index, f"example {index}", error=error)
                    for _ in range(request.num_rollouts)
                ]
                if not isinstance(error, WorkerLostError):
                    break
        for rollout in group:
            rollout.num_restarts = num_restarts
        return group


class WorkerPool:
    """Worker processes that the environments of a run share which use one Python.

    Args:
        num_workers: >= 1.
        timeout_s: seconds that a rollout may take. A worker that says nothing for so long (and not
            for less than `BLOCKED_S`) is ended.
        python: the interpreter; "": the one of this process.
    """

    def __init__(self, num_workers: int, timeout_s: float, python: str = "") -> None:
        self.workers = [Worker(timeout_s, python) for _ in range(num_workers)]
        self._recipes: list[dict[str, Any]] = []

    def add(self, env: PortableEnvironment) -> int:
        """Take up an environment; return its number.

        Raises:
            NotPortableError: a worker could not make it again.
        """
        recipe = env.recipe()
        if not isinstance(recipe, dict):
            pickled = pickle_for_worker(recipe)
            recipe = {
                "pickled": base64.b64encode(pickled).decode(),
                "script": needs_script(pickled),
            }
        # What it logs as it is made was said when it was made the first time.
        self._recipes.append({"name": env.name, "is_quiet": True, **recipe})
        return len(self._recipes) - 1

    async def open(self) -> None:
        """Start the workers, and wait until all have made all environments.

        Raises:
            InvalidEnvironmentError: a worker could not make an environment.
        """
        try:
            await asyncio.gather(*(worker.open(self._recipes) for worker in self.workers))
        except Exception:
            await self.close()
            raise

    async def close(self) -> None:
        """End the workers."""
        await asyncio.gather(*(worker.close() for worker in self.workers))


@dataclass
class _Group:
    """A group that a worker was given and has not returned.

    Attributes:
        request: for it.
        result: its rollouts.
        ended: by number of a rollout that has asked for a place: that it has ended there, with
            whether its server was lost.
        tasks: those that hold the places of its rollouts.
    """

    request: GroupRequest
    result: asyncio.Future[list[Rollout]]
    ended: dict[int, asyncio.Queue[bool]] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class Worker:
    """A worker process, and this side of its connection. A process that ends is started again.

    Args:
        timeout_s, python: see `WorkerPool`.

    Attributes:
        groups: those that it was given and has not returned, by their number.
    """

    def __init__(self, timeout_s: float, python: str) -> None:
        self.groups: dict[int, _Group] = {}
        self._python = python
        self._load_s, self._silent_s = max(timeout_s, LOAD_S), max(timeout_s, BLOCKED_S)
        self._num_deaths = 0  # since it returned a group
        self._num_silent = 0  # times `ALIVE_S` in which it has said nothing
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: Outbox | None = None
        self._running: asyncio.Task[None] | None = None
        # What the process says when it has made its environments; of the next one if it has ended.
        self._ready: asyncio.Future[list[dict[str, Any]]]
        self._numbers = itertools.count()

    @property
    def is_blocked(self) -> bool:
        """Whether it has said nothing for `BLOCKED_S`. The time is counted and not measured,
        because this process may have been blocked itself.
        """
        return self._num_silent * ALIVE_S >= BLOCKED_S

    async def open(self, recipes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Start the process, and wait until it has opened these environments.

        Returns:
            What it knows of those that have their examples there, see `worker_main.facts_of`.

        Raises:
            InvalidEnvironmentError: it could not make one, or not within the deadline.
        """
        self._recipes, self._names = recipes, ", ".join(recipe["name"] for recipe in recipes)
        self._ready = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run())
        return await asyncio.shield(self._ready)

    async def _run(self) -> None:
        """Run a process, and another one whenever it has ended."""
        try:
            while True:
                problem = await self._run_process()
                # From here on, new groups wait for the new process.
                self._ready = asyncio.get_running_loop().create_future()
                self._num_deaths += 1
                logger.warning(
                    "environment %r: %s; another one is started, and its %d groups begin again",
                    *(self._names, problem, len(self.groups)),
                )
                for group in self.groups.values():
                    if not group.result.done():
                        group.result.set_exception(WorkerLostError(problem))
                if self._num_deaths == MAX_DEATHS:
                    raise InvalidEnvironmentError(
                        f"environment {self._names!r}: a worker died {MAX_DEATHS} times and "
                        f"returned no group in between; at last {problem}"
                    )
        except Exception as error:  # whatever keeps a process from starting
            self._ready.set_exception(error)
            self._ready.exception()  # nobody may need the worker any more

    async def _run_process(self) -> str:
        """Start the process and take its messages until it has ended. Return why it has.

        Raises:
            InvalidEnvironmentError: it could not make its environments.
        """
        process, ours = start_process(self._python, self._recipes)
        self._process, self._num_silent = process, 0
        reader, writer = await asyncio.open_connection(sock=ours)
        watching = asyncio.create_task(self._watch(process, reader))
        problem = ""
        try:
            said, _ = await asyncio.wait_for(receive(reader), self._load_s)
            problem = said["problem"]
            if not problem:
                self._outbox = Outbox(writer)
                self._ready.set_result(said["facts"])
            while not problem:
                message, content = await receive(reader)
                self._num_silent = 0
                self._take_message(message, content)
        except TimeoutError:
            process.kill()
            problem = f"not loaded within {self._load_s:g} s; raise generation_timeout"
        except (EOFError, OSError):
            pass  # it has ended
        except (ValueError, KeyError, TypeError) as error:
            problem = f"unreadable message: {describe_error(error)}"
        except asyncio.CancelledError:
            if not self._ready.done():
                process.kill()  # it would make its environments first
            raise
        finally:
            watching.cancel()
            self._outbox = None
            writer.close()  # makes the process end
            if self.is_blocked:
                process.kill()  # it would not notice that the connection is closed
            status = await asyncio.to_thread(wait_for_end, process)
        end = f"the worker process {process.pid} ended with status {status}"
        if not self._ready.done():
            where = f"python={self._python!r}" if self._python else "a worker"
            raise InvalidEnvironmentError(
                f"environment {self._names!r}, in {where}: "
                f"{problem or f'{end}; see its output above'}"
            )
        return problem or end

    async def run_group(
        self, request: GroupRequest, message: dict[str, Any], task: bytes
    ) -> list[Rollout]:
        """Run one group.

        Args:
            message: the environment's number and the request's fields.
            task: pickled; b"" if the worker has the examples.

        Raises:
            WorkerError: the worker has ended, or could not run the group.
            ServerLostError: no server is there for one of its rollouts.
            InvalidEnvironmentError: a new process could not make the environments.
        """
        number = next(self._numbers)
        group = _Group(request, asyncio.get_running_loop().create_future())
        self.groups[number] = group
        try:
            await asyncio.shield(self._ready)
            self._send({"group": number, **message}, task)
            rollouts = await group.result
            self._num_deaths = 0
            return rollouts
        except (asyncio.CancelledError, ServerLostError):
            self._send({"group": number, "cancel": True})
            raise
        finally:
            del self.groups[number]
            for holding in group.tasks:
                holding.cancel()  # without effect on those of rollouts that have ended

    async def _hold_place(self, number: int, rollout: int) -> None:
        """Hold the place of a rollout that runs in the worker, until it has ended there."""
        group = self.groups[number]

        def tell(**what: Any) -> None:
            self._send({"group": number, "rollout": rollout, **what})

        try:
            async with group.request.begin(rollout) as session:
                tell(server=session.url)
                async with session.watching():
                    session.is_lost = await group.ended[rollout].get()
        except SessionLostError:
            tell(is_lost=True)
        except Exception as error:  # the group cannot go on, whatever it is
            if not group.result.done():
                group.result.set_exception(error)

    def _send(self, *parts: Any) -> None:
        if self._outbox is not None:
            self._outbox.send(*parts)

    def _take_message(self, message: dict[str, Any], content: bytes) -> None:
        group = self.groups.get(message.get("group", -1))
        if group is None or group.result.done():
            return  # it says that it is alive, or its group was cancelled
        if "rollouts" in message:
            group.result.set_result(unpack_group(message["rollouts"], content))
        elif "problem" in message:
            group.result.set_exception(WorkerError(message["problem"]))
        elif message["begins"]:
            group.ended[message["rollout"]] = asyncio.Queue()
            holding = self._hold_place(message["group"], message["rollout"])
            group.tasks.append(asyncio.create_task(holding))
        else:
            group.ended[message["rollout"]].put_nowait(message["is_lost"])

    async def _watch(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader) -> None:
        """Report a process that is blocked, and end it after `_silent_s`."""
        await asyncio.shield(self._ready)
        was_blocked = False
        while self._num_silent * ALIVE_S < self._silent_s:
            await asyncio.sleep(ALIVE_S)
            self._num_silent += 1
            if process.poll() is not None:
                # It may have started others, which hold its end of the connection open.
                reader.feed_eof()
                return
            if self.is_blocked and not was_blocked:
                logger.warning(
                    "environment %r: worker %d has not answered for %g s; other workers get its "
                    "new groups. Its output says where its event loop is blocked",
                    *(self._names, process.pid, BLOCKED_S),
                )
            was_blocked = self.is_blocked
        logger.warning("environment %r: worker %d is ended", self._names, process.pid)
        process.kill()

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])


def start_process(
    python: str, recipes: Sequence[dict[str, Any]]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a worker process for environments of these recipes; see `Worker`. Return it with our
    end of its connection.
    """
    names = ["sys_path", "sys_argv", "orig_dir", "dir"]  # what "spawn" prepares
    if any(recipe.get("script") for recipe in recipes):
        names += ["init_main_from_path", "init_main_from_name"]
    ours = {} if python else multiprocessing.spawn.get_preparation_data("rollout worker")
    setup = {
        "recipes": recipes,
        "process": {name: ours[name] for name in names if name in ours},
        "alive_s": ALIVE_S,
        "blocked_s": BLOCKED_S,
    }
    text = json.dumps(setup).encode()
    connection, theirs = socket.socketpair()
    with theirs, tempfile.TemporaryFile() as file:
        file.write(text)
        file.seek(0)
        words = [str(theirs.fileno()), str(os.getpid()), str(verifiers_rl.__file__)]
        process = subprocess.Popen(
            [python or sys.executable, "-c", MAIN, *words],
            pass_fds=[theirs.fileno()],
            stdin=file,
            env=clean_environment() if python else None,
            process_group=0,  # so that processes that it leaves behind can be ended
        )
    return process, connection


def clean_environment() -> dict[str, str]:
    """Return our variables without those by which our packages would hide another Python's."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in ours}


def wait_for_end(process: subprocess.Popen[bytes]) -> int:
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
