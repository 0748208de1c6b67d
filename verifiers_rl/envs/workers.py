"""Rollout workers: environments in processes of their own, so that their Python code takes no time
from the trainer. This file has both ends of the connection.

    trainer's process                                   worker's process
    WorkerEnvironment ── group: example, request ──►    the environment's rollouts
                      ◄── rollout: needs a place ──     each asks before it begins
                      ── its server ──────────────►     (and again if its server is lost)
                      ◄── rollout: has ended ──────
                      ◄── Rollouts, as arrays ─────

So places, servers and what is done of a batch are counted in the trainer's process alone. A worker
makes each environment again from its recipe. If parts of it are defined in the script that runs,
the worker imports the script, as multiprocessing's "spawn" does. Messages are JSON and bytes, on a
pair of sockets that no other process can reach; recipes and tasks in them are pickles. Workers may
run in another Python than the trainer's, see foreign.py: then nothing is pickled. A worker loads
neither torch nor vLLM.

We do not use the environment server of `verifiers`: a worker of it that dies is not started again,
and its messages have no place for policy versions.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import itertools
import json
import logging
import multiprocessing.spawn
import os
import pickle
import shutil
import signal
import socket
import sys
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

import verifiers_rl
from verifiers_rl.envs.base import (
    HOW_TO_MAKE_PYTHON,
    InvalidEnvironmentError,
    needs_script,
    pickle_for_worker,
)
from verifiers_rl.inference import RolloutSession, SessionLostError
from verifiers_rl.process import parent as parent_of_worker
from verifiers_rl.process.loop_thread import cancel_all_others, contain_tasks, run_contained
from verifiers_rl.process.terminal import (
    describe_error,
    end_without_noise,
    print_all_characters,
    printable,
)
from verifiers_rl.requests import GroupRequest, Progress
from verifiers_rl.types import LOAD_S, Rollout, pack_samples, unpack_samples

logger = logging.getLogger(__name__)

EXIT_S = 30.0  # deadline for a worker to end by itself
ALIVE_S = 2.0  # a worker says so often that its event loop runs
BLOCKED_S = 30.0  # a worker that has said nothing for so long is reported
MAX_ATTEMPTS = 3  # of a group whose worker dies
MAX_DEATHS = 5  # of a worker that has returned no group in between
MAX_AUTO_WORKERS = 8


class WorkerError(RuntimeError):
    """A rollout failed in a worker; the traceback from there is a note of this error."""


class WorkerLostError(RuntimeError):
    """The worker process has ended, or was ended because it did not answer."""


# --- Messages -------------------------------------------------------------------------------------
# JSON on one line, which has the number of the bytes behind it, and these.
LONGEST_LINE = 2**40  # bytes; a line is not cut


def sender(writer: asyncio.StreamWriter | None = None) -> Callable[..., None]:
    """Return what sends a message: its content, bytes or an array of bytes, and what its JSON has.
    Without a connection, messages are lost.

    All of one turn of the event loop are written at once: each write gives the interpreter's lock
    away, and a trainer that computes takes milliseconds to give it back.
    """
    frames = list[Any]()

    def flush() -> None:
        if writer is not None and not writer.is_closing():
            writer.write(b"".join(frames))
        frames.clear()

    def send(content: bytes | np.ndarray = b"", /, **message: Any) -> None:
        if not frames:
            asyncio.get_running_loop().call_soon(flush)
        line = json.dumps({**message, "size": len(content)}) + "\n"
        frames.extend((line.encode(), content))

    return send


async def receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """Read one message: its JSON and its bytes.

    Raises:
        asyncio.IncompleteReadError: the other side has closed the connection.
    """
    message = json.loads(await reader.readuntil())
    return message, await reader.readexactly(message.pop("size"))


def pack_group(group: Sequence[Rollout]) -> tuple[dict[str, Any], np.ndarray]:
    """Return rollouts in a form for `sender`: their samples are the bytes. An error becomes its
    description and its traceback, because its class may be known to this process only.
    """
    message, content = pack_samples([sample for rollout in group for sample in rollout.samples])
    rollouts = []
    for rollout in group:
        packed = {field.name: getattr(rollout, field.name) for field in fields(rollout)}
        packed |= {"samples": len(rollout.samples), "record": rollout.record.decode()}
        if rollout.error is not None:
            trace = printable("".join(traceback.format_exception(rollout.error)))
            packed["error"] = describe_error(rollout.error), trace
        rollouts.append(packed)
    return {"rollouts": rollouts, **message}, content


def unpack_group(message: dict[str, Any], content: bytes) -> list[Rollout]:
    """Return the rollouts that `pack_group` packed."""
    samples = iter(unpack_samples(message, content))
    group = []
    for packed in message["rollouts"]:
        packed["samples"] = [*itertools.islice(samples, packed["samples"])]
        packed["record"] = packed["record"].encode()
        if failure := packed["error"]:
            packed["error"] = WorkerError(failure[0])
            packed["error"].add_note(failure[1])
        group.append(Rollout(**packed))
    return group


def failed_group(request: GroupRequest, error: Exception) -> list[Rollout]:
    """Return what becomes of a group that could not be run."""
    return [
        Rollout(request.index, f"example {request.index}", error=error)
        for _ in range(request.num_rollouts)
    ]


# --- In the trainer's process ---------------------------------------------------------------------


def count_workers(env_workers: int | str) -> int:
    """Return how many processes `env_workers` asks for. "auto" asks for one for each four cores
    that this process may use: at least 1, at most `MAX_AUTO_WORKERS`.
    """
    if isinstance(env_workers, int):
        return env_workers
    return min(max(len(os.sched_getaffinity(0)) // 4, 1), MAX_AUTO_WORKERS)


class WorkerEnvironment:
    """The `EnvRunner` of an environment whose groups run in worker processes.

    Args:
        env: the environment in this process, an `EnvRunner` with `name`, `description` and

            recipe()                    how to make in a worker what runs its tasks: a function
                                        without arguments that can be pickled, or a dict of JSON for
                                        `made_there.make_environment`. It may raise NotPortableError
            async task(split, index)    an example, which is pickled for `run_task` of what the
                                        recipe makes; None: the workers have the examples, and
                                        `run_group` is called

            Later changes of it do not reach the workers.
        pool: workers for all environments of the run that use one Python.

    Raises:
        NotPortableError: a worker could not make it again.
    """

    def __init__(self, env: Any, pool: WorkerPool) -> None:
        self.env, self.pool = env, pool
        self.weights, self.sizes = env.weights, env.sizes
        self.description = env.description.replace("in this process", "in rollout workers")
        self.open, self.close = pool.open, pool.close
        self._number = pool.add(env.name, env.recipe())

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Do as `EnvRunner.run_group`, in a worker. If the worker dies, the group begins again.

        Raises:
            NotPortableError: the example cannot be sent.
        """
        task = await self.env.task(request.split, request.index)
        pickled = b"" if task is None else pickle_for_worker(task)
        for num_restarts in range(MAX_ATTEMPTS):
            # One of the groups whose worker has died may have ended it: these run one at a time.
            async with self.pool.suspects if num_restarts else nullcontext():
                # The worker with the least to do.
                worker = min(self.pool.workers, key=lambda one: (one.is_blocked, len(one.groups)))
                try:
                    group = await worker.run_group(self._number, request, pickled)
                    break
                except WorkerLostError as error:
                    group = failed_group(request, error)
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
        self._recipes: list[dict[str, Any]] = []
        self._make = partial(Worker, self._recipes, timeout_s, python)
        self._num_workers, self.workers = num_workers, list[Worker]()
        self.suspects = asyncio.Lock()  # who has it runs a group that may have ended a worker

    def add(self, name: str, recipe: Any, is_quiet: bool = True) -> int:
        """Take up an environment; return its number.

        Args:
            name: of the environment.
            recipe: see `WorkerEnvironment`.
            is_quiet: what it logs as it is made was said when it was made the first time.

        Raises:
            NotPortableError: a worker could not make it again.
        """
        if not isinstance(recipe, dict):
            data = pickle_for_worker(recipe)
            recipe = {"pickled": data.hex(), "script": needs_script(data)}
        self._recipes.append({"name": name, "is_quiet": is_quiet, **recipe})
        return len(self._recipes) - 1

    async def open(self) -> list[dict[str, Any]]:
        """Start the workers, and wait until all have opened all environments.

        Returns:
            The sizes and the description of those that have their examples there.

        Raises:
            InvalidEnvironmentError: a worker could not make one, or not within the deadline.
        """
        self.workers = [self._make() for _ in range(self._num_workers)]
        facts = await asyncio.gather(*(asyncio.shield(one.ready) for one in self.workers))
        return facts[0]

    async def close(self) -> None:
        """End the workers."""
        running = [worker.running for worker in self.workers]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Worker:
    """A worker process, and this side of its connection. A process that ends is started again. Made
    on the event loop.

    Args:
        recipes: of its environments.
        timeout_s, python: see `WorkerPool`.

    Attributes:
        groups: those that it was given and has not returned, by their number: what it says of each,
            or an error that ends the group.
        ready: what the process says when it has opened its environments; of the next one if it has
            ended. InvalidEnvironmentError if it could not.
        running: ends the process when it is cancelled.
    """

    def __init__(self, recipes: Sequence[dict[str, Any]], timeout_s: float, python: str) -> None:
        self.groups: dict[int, asyncio.Queue[Any]] = {}
        self._recipes, self._python = recipes, python
        self._load_s, self._limit_s = max(timeout_s, LOAD_S), max(timeout_s, BLOCKED_S)
        self._num_deaths = 0  # since it returned a group
        self._silent_s = 0.0  # so long it has said nothing
        self._send = sender()
        self._numbers = itertools.count()
        self.ready: asyncio.Future[list[dict[str, Any]]] = asyncio.Future()
        self.running = asyncio.create_task(self._run())

    @property
    def is_blocked(self) -> bool:
        """Whether it has said nothing for `BLOCKED_S`."""
        return self._silent_s >= BLOCKED_S

    @property
    def _what(self) -> str:
        return f"environment {', '.join(recipe['name'] for recipe in self._recipes)!r}"

    def _error(self, problem: str) -> InvalidEnvironmentError:
        where = f"python={self._python!r}" if self._python else "a worker"
        return InvalidEnvironmentError(f"{self._what}, in {where}: {problem}")

    async def _run(self) -> None:
        """Run a process, and another one whenever it has ended."""
        try:
            while True:
                problem = await self._run_process()
                # From here on, new groups wait for the new process.
                self.ready = asyncio.Future()
                self._num_deaths += 1
                logger.warning(
                    f"{self._what}: {problem}; another one is started, and its {len(self.groups)} "
                    "groups begin again"
                )
                for said in self.groups.values():
                    said.put_nowait(WorkerLostError(problem))
                if self._num_deaths == MAX_DEATHS:
                    raise self._error(
                        f"died {MAX_DEATHS} times and returned no group in between; at last "
                        f"{problem}"
                    )
        except Exception as error:  # whatever keeps a process from starting
            self.ready.set_exception(error)
            self.ready.exception()  # nobody may need the worker any more

    async def _run_process(self) -> str:
        """Start the process and take its messages until it has ended. Return why it has.

        Raises:
            InvalidEnvironmentError: it could not make its environments.
        """
        if shutil.which(self._python or sys.executable) is None:
            raise self._error(f"no such program; {HOW_TO_MAKE_PYTHON}")
        process, reader, writer = await start_process(self._python, self._recipes)
        self._send, self._silent_s = sender(writer), 0.0
        watching = asyncio.create_task(self._watch(process))
        said, problem = dict[str, Any](), ""
        try:
            said, _ = await asyncio.wait_for(receive(reader), self._load_s)
            problem = said["problem"]
            if not problem:
                self.ready.set_result(said["facts"])
            while not problem:
                message, content = await receive(reader)
                self._silent_s = 0.0
                if message.get("group") in self.groups:  # else it is alive, or that was cancelled
                    self.groups[message["group"]].put_nowait((message, content))
        except TimeoutError:
            problem = f"not loaded within {self._load_s:g} s; raise generation_timeout"
        except (EOFError, OSError, ValueError, KeyError, TypeError):
            pass  # it has ended, or what it says is no message
        finally:
            watching.cancel()
            writer.close()  # makes the process end
            if self.is_blocked or not said:  # it would not notice
                kill_group(process)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), EXIT_S)
            kill_group(process)
            status = await process.wait()
        end = f"the worker process {process.pid} ended with status {status}"
        if not self.ready.done():
            raise self._error(problem or f"{end}; see its output above")
        return problem or end

    async def run_group(self, env: int, request: GroupRequest, task: bytes) -> list[Rollout]:
        """Run one group.

        Args:
            env: number of the environment.
            task: pickled; b"" if the worker has the examples.

        Raises:
            WorkerLostError: the worker has ended.
            ServerLostError: no server is there for one of its rollouts.
            InvalidEnvironmentError: a new process could not make the environments.
        """
        number = next(self._numbers)
        said = self.groups[number] = asyncio.Queue[Any]()
        ended: dict[int, asyncio.Queue[bool]] = {}  # of rollouts that have a place
        holding = list[asyncio.Task[None]]()
        try:
            await asyncio.shield(self.ready)
            sent = vars(request) | {"places": None, "progress": None}  # those stay here
            self._send(task, group=number, env=env, request=sent)
            while True:
                what = await said.get()
                if isinstance(what, Exception):
                    request.progress.num_done -= sum(task.done() for task in holding)
                    raise what
                message, content = what
                if "rollouts" in message:
                    self._num_deaths = 0
                    await asyncio.gather(*holding)  # each hears that its rollout has ended
                    return unpack_group(message, content)
                rollout = message["rollout"]
                if message["begins"]:
                    ended[rollout] = asyncio.Queue()
                    work = self._hold_place(number, rollout, request, ended[rollout])
                    holding.append(asyncio.create_task(work))
                else:
                    ended[rollout].put_nowait(message["is_lost"])
        finally:
            del self.groups[number]
            self._send(group=number, cancel=True)  # if it has not ended
            for place in holding:
                place.cancel()

    async def _hold_place(
        self, group: int, rollout: int, request: GroupRequest, ended: asyncio.Queue[bool]
    ) -> None:
        """Hold the place of a rollout that runs in the worker, until it has ended there."""
        to = {"group": group, "rollout": rollout}
        try:
            async with request.begin(rollout) as session:
                self._send(**to, server=session.url)
                async with session.watching():
                    session.is_lost = await ended.get()
        except SessionLostError:
            self._send(**to, is_lost=True)
        except Exception as error:  # the group cannot go on, whatever it is
            if group in self.groups:
                self.groups[group].put_nowait(error)

    async def _watch(self, process: Process) -> None:
        """Report a process that is blocked, and end it after `_limit_s`. If it has ended, end what
        it has started, which may hold its end of the connection open.

        Its silence is counted and not measured, because this process may have been blocked itself.
        """
        exited = asyncio.create_task(process.wait())
        while not exited.done() and self._silent_s < self._limit_s:
            await asyncio.wait({exited}, timeout=ALIVE_S)
            self._silent_s += ALIVE_S * self.ready.done()  # before, it has `_load_s`
            if 0 <= self._silent_s - BLOCKED_S < ALIVE_S:
                logger.warning(
                    f"{self._what}: worker {process.pid} has not answered for {BLOCKED_S:g} s; "
                    "other workers get its new groups. Its output says where its event loop is "
                    "blocked"
                )
        kill_group(process)


# The worker's Python may have packages of its own, and this one not. So it gets the folder of this
# package alone, not the folder in which the package lies, where all others are.
_MAIN = """
import importlib.util, json, socket, sys
descriptor, parent, package, hint = sys.argv[1:]
sys.path[:] = [folder for folder in sys.path if folder]
spec = importlib.util.spec_from_file_location("verifiers_rl", package)
sys.modules["verifiers_rl"] = module = importlib.util.module_from_spec(spec)
try:
    if importlib.util.find_spec("verifiers") is None:
        raise ImportError("No module named 'verifiers'")
    spec.loader.exec_module(module)
    from verifiers_rl.envs.made_there import make_environment
    from verifiers_rl.envs.workers import main
except (ImportError, SyntaxError) as error:  # this Python is too old, or lacks packages
    line = json.dumps({"problem": f"{error}; {hint}", "size": 0}) + "\\n"
    with socket.socket(fileno=int(descriptor)) as connection:
        connection.sendall(line.encode())
    sys.exit()
main(int(descriptor), int(parent), make_environment)
"""


_OF_PACKAGES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


async def start_process(
    python: str, recipes: Sequence[dict[str, Any]]
) -> tuple[Process, asyncio.StreamReader, asyncio.StreamWriter]:
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
    connection, theirs = socket.socketpair()
    try:
        with theirs:
            words = [theirs.fileno(), os.getpid(), verifiers_rl.__file__, HOW_TO_MAKE_PYTHON]
            process = await asyncio.create_subprocess_exec(
                python or sys.executable,
                "-c",
                _MAIN,
                *map(str, words),
                pass_fds=[theirs.fileno()],
                stdin=PIPE,
                # Without the variables by which our packages would hide another Python's.
                env={k: v for k, v in os.environ.items() if not (python and k in _OF_PACKAGES)},
                process_group=0,  # so that processes that it leaves behind can be ended
            )
        stdin: Any = process.stdin
        # A script may have put something else into sys.path or sys.argv, such as a Path.
        stdin.write(json.dumps(setup, default=str).encode())
        stdin.close()
        return process, *await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
    except BaseException:  # it ends with the connection
        connection.close()
        raise


def kill_group(process: Process) -> None:
    """Kill a worker process, if it is still there, and what it has left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# --- In the worker's process ----------------------------------------------------------------------


def main(descriptor: int, parent: int, make_environment: Callable[[Any], Any]) -> None:
    """Make environments, and run groups until the trainer's process closes the connection. What to
    make is read from stdin.

    Args:
        descriptor: of our end of the connection.
        parent: id of the process that started us.
        make_environment: makes the `EnvRunner` of a recipe that is not pickled.
    """
    parent_of_worker.is_rollout_worker = True
    parent_of_worker.die_with_parent(parent)  # works even if the environment blocks the event loop
    # When memory runs out, Linux shall end this process, which is replaced, before the trainer.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
    print_all_characters()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("verifiers").setLevel(logging.WARNING)
    setup = json.load(sys.stdin)
    runners: list[Any] = []
    problem = where = ""
    try:
        multiprocessing.spawn.prepare(setup["process"])  # imports the script, if it is named
        for recipe in setup["recipes"]:
            logging.disable(logging.WARNING if recipe["is_quiet"] else logging.NOTSET)
            # Outside the event loop, because an environment may run its own loop to load its data.
            where = f"environment {recipe['name']!r}: " if len(setup["recipes"]) > 1 else ""
            pickled = bytes.fromhex(recipe.get("pickled", ""))
            runners.append(pickle.loads(pickled)() if pickled else make_environment(recipe))
    except (Exception, SystemExit) as error:  # whatever the environment's own code raises
        problem = where + describe_error(error)
    logging.disable(logging.NOTSET)
    # Ctrl-C may reach us too, but the trainer decides when we end. Set after the environments are
    # made, because environments set a handler of their own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # as Orchestrator.start does
    # Python looks after each 700 new objects, and a rollout of verifiers.v1 makes thousands.
    gc.set_threshold(20_000)
    with socket.socket(fileno=descriptor) as connection:
        asyncio.run(_serve(connection, runners, setup, problem))
    end_without_noise(0)  # verifiers removes sandboxes and tunnels at exit


async def _serve(
    connection: socket.socket, runners: list[Any], setup: dict[str, Any], problem: str
) -> None:
    """Run groups until the connection ends. If there is a problem with the environments, the
    trainer's process ends it.
    """
    contain_tasks(asyncio.get_running_loop())
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
    send = sender(writer)
    facts = []
    try:
        if not problem:
            await asyncio.gather(*(runner.open() for runner in runners))
            facts = [
                {
                    "sizes": {split: runner.sizes(split) for split in ("train", "eval")},
                    "description": runner.description,
                }
                for runner, recipe in zip(runners, setup["recipes"], strict=True)
                if "pickled" not in recipe
            ]
    except Exception as error:  # whatever the environment's own code raises
        problem = describe_error(error)
    send(problem=problem, facts=facts)
    running: dict[int, tuple[asyncio.Task[None], _Places]] = {}
    is_alive = asyncio.create_task(_say_alive(send, setup["alive_s"], setup["blocked_s"]))

    async def run(number: int, runner: Any, request: GroupRequest, task: bytes) -> None:
        try:
            # Without a task, the environment has its examples here.
            run_task = partial(runner.run_task, pickle.loads(task)) if task else runner.run_group
            packed = pack_group(await run_contained(run_task(request)))
        except Exception as error:  # sent, so that the trainer does not wait forever
            packed = pack_group(failed_group(request, error))
        finally:
            del running[number]
        message, content = packed
        send(content, group=number, **message)

    try:
        while True:
            message, content = await receive(reader)
            number = message.pop("group")
            if "request" in message:
                places = _Places(partial(send, group=number))
                own = {"places": places, "progress": Progress()}
                request = GroupRequest(**message["request"] | own)
                work = run(number, runners[message["env"]], request, content)
                running[number] = asyncio.create_task(work), places
            elif number in running:  # else the group has ended
                task, places = running[number]
                if "cancel" in message:
                    task.cancel()
                else:
                    places.take_message(**message)
    except (EOFError, OSError):
        pass  # the trainer has closed its end, or is gone
    is_alive.cancel()

    async def close() -> None:
        if not problem:
            await asyncio.gather(*(runner.close() for runner in runners))

    await cancel_all_others(close)


class _Places:
    """The `requests.Places` of one group: asks the trainer's process.

    Args:
        send: sends a message about this group to the trainer's process.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._sessions: dict[int, tuple[RolloutSession, asyncio.Event]] = {}

    @asynccontextmanager
    async def take(self, request: GroupRequest, number: int) -> AsyncIterator[RolloutSession]:
        """Wait for a place of this rollout of the group, and hold it."""
        session = RolloutSession(request.policy_version, None, request.seed, number)
        self._sessions[number] = session, (has_place := asyncio.Event())
        self._send(rollout=number, begins=True)
        try:
            await has_place.wait()
            yield session
        finally:
            self._send(rollout=number, begins=False, is_lost=session.is_lost)

    def take_message(self, rollout: int, server: str | None = None, is_lost: bool = False) -> None:
        """Take the server of a rollout that begins, or that its server is lost."""
        session, has_place = self._sessions[rollout]
        if is_lost:
            session.fail()
        else:
            session.url = server
            has_place.set()


async def _say_alive(send: Callable[..., None], alive_s: float, blocked_s: float) -> None:
    """Say every `alive_s` that the event loop runs. If the loop is blocked for `blocked_s`, the
    stacks of all threads go to stderr, even if the code that blocks holds the GIL.
    """
    try:
        while True:
            # A little earlier, so that they are there when the trainer's process reports.
            faulthandler.dump_traceback_later(0.9 * blocked_s, file=2)  # whatever sys.stderr is
            await asyncio.sleep(alive_s)
            send()
    finally:
        faulthandler.cancel_dump_traceback_later()
