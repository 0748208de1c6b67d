"""Environments in separate processes, so that their Python code takes no time from the trainer.

    trainer process                                 worker process
    WorkerEnvironment ── an example ─────────►  ClassicEnvironment.run_example: rollouts, scores
                      ◄── their Rollouts ─────

A worker loads the environment again, by its id and arguments. We do not use the environment server
of `verifiers`: its workers talk to the model through stock clients, which lose policy versions and
empty replies, and a worker whose environment does not load is restarted forever.

Messages are pickled and go through a socket pair that no other process can reach.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from dataclasses import replace
from typing import Any

from verifiers_rl.data import describe_error
from verifiers_rl.envs.base import InvalidEnvironmentError, RunnerOptions
from verifiers_rl.envs.classic import ClassicEnvironment, load_environment
from verifiers_rl.process.parent import die_with_parent
from verifiers_rl.types import LOAD_S, Progress, Rollout, Slots

logger = logging.getLogger(__name__)

EXIT_S = 30.0  # deadline for a worker to end by itself


class EnvWorkerError(RuntimeError):
    """A rollout failed in a worker; the traceback from there is a note of this error."""


class WorkerEnvironment(ClassicEnvironment):
    """A `ClassicEnvironment` whose groups run in worker processes.

    A group goes to the worker with the fewest groups. When a worker dies, its rollouts fail, and
    another worker is started for the next group.

    Args:
        env: made by `verifiers.load_environment`. Later changes of it do not reach the workers.

    Raises:
        InvalidEnvironmentError: `env` has no id to load it by, or arguments that cannot be pickled.
    """

    def __init__(self, env: Any, options: RunnerOptions) -> None:
        super().__init__(env, options)
        num_workers = options.num_workers
        if not env.env_id:
            raise InvalidEnvironmentError(
                f"environment {self.name!r}: env_workers={num_workers} loads it again in other "
                "processes, by its id, and it has none; make it with "
                "verifiers.load_environment(id, ...) or set env_workers=0"
            )
        setup = {
            "env_id": env.env_id,
            "env_args": env.env_args,
            # The trainer sends the examples, and has already measured their prompts.
            "options": replace(options, max_prompt_len=None),
            "looks": _fingerprint(env),
        }
        try:
            frame = _frame(setup)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidEnvironmentError(
                f"environment {self.name!r}: env_workers={num_workers}: its arguments or the "
                f"tokenizer cannot be sent to another process: {error}; set env_workers=0"
            ) from error
        deadline_s = max(options.timeout_s, LOAD_S)
        self._workers = [_Worker(self.name, frame, deadline_s) for _ in range(num_workers)]

    async def open(self) -> None:
        """Start the workers, and wait until all have loaded the environment."""
        starts = [worker.open() for worker in self._workers]
        for problem in await asyncio.gather(*starts, return_exceptions=True):
            if problem is not None:
                await self.close()
                raise problem

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def run_example(
        self,
        index: int,
        row: dict[str, Any],
        num_rollouts: int,
        model: str,
        sampling_args: dict[str, Any],
        policy_version: int,
        slots: Slots | Progress,
    ) -> list[Rollout]:
        """Do as the base, in a worker, and hold a slot for each rollout until all are done."""
        try:
            async with slots.several(num_rollouts):
                worker = min(self._workers, key=lambda worker: worker.num_groups)
                return await worker.run_example(
                    index, row, num_rollouts, model, sampling_args, policy_version
                )
        except EnvWorkerError as error:
            return [
                self._rollout(index, row, None, error, policy_version) for _ in range(num_rollouts)
            ]


def _fingerprint(env: Any) -> list[Any]:
    """Return what must be equal in two environments if they are the same."""
    names: list[str] = []
    rubrics = [env.rubric]
    for rubric in rubrics:
        rubrics += getattr(rubric, "rubrics", [])
        for func in map(inspect.unwrap, rubric.funcs):
            names.append(getattr(func, "__name__", type(func).__name__))
    return [type(env).__name__, len(env.get_dataset()), sorted(names)]


class _Worker:
    """The trainer's side of one worker process.

    Args:
        name: name of the environment, for messages.
        setup: first message to the process.
        load_s: deadline of its start, seconds.
    """

    def __init__(self, name: str, setup: bytes, load_s: float) -> None:
        self.name = name
        self.num_groups = 0  # given to it and not returned yet
        self._setup = setup
        self._load_s = load_s
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._replies: dict[int, asyncio.Future[list[Rollout]]] = {}
        self._numbers = itertools.count()
        self._starting: asyncio.Lock

    async def open(self) -> None:
        self._starting = asyncio.Lock()  # made on the event loop that uses it
        await self._start()

    async def _start(self) -> None:
        """Start the process, and wait until it has loaded the environment.

        Raises:
            InvalidEnvironmentError: it could not load the environment, or not within the deadline.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            setup = [str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)]
            self._process = subprocess.Popen(
                [sys.executable, "-c", MAIN, *setup],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            _feed_eof_when_ended(self._process, reader)
            self._writer.write(self._setup)
            problem = await asyncio.wait_for(_receive(reader), self._load_s)
        except (asyncio.IncompleteReadError, ConnectionError):
            problem = await self._how_it_ended()
        except TimeoutError:
            self._process.kill()
            problem = f"not loaded within {self._load_s:g} s; raise generation_timeout"
        except BaseException:
            await self.close()
            raise
        if problem is not None:
            await self.close()
            raise InvalidEnvironmentError(f"environment {self.name!r}, in a worker: {problem}")
        self._reading = asyncio.create_task(self._read(reader))

    async def run_example(self, *args: Any) -> list[Rollout]:
        """Run one group.

        Raises:
            EnvWorkerError: the process died, or could not send the group back.
        """
        self.num_groups += 1
        number = next(self._numbers)
        try:
            async with self._starting:
                if self._process is None:
                    await self._start()
            reply = self._replies[number] = asyncio.get_running_loop().create_future()
            self._send(number, args)
            return await reply
        except asyncio.CancelledError:
            self._send(number, None)
            raise
        finally:
            self.num_groups -= 1
            self._replies.pop(number, None)

    def _send(self, number: int, args: tuple[Any, ...] | None) -> None:
        if self._writer is not None:
            self._writer.write(_frame((number, args)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, group, problem = await _receive(reader)
                if (reply := self._replies.get(number)) and not reply.done():
                    if problem is None:
                        reply.set_result(group)
                    else:
                        reply.set_exception(EnvWorkerError(problem))
        except (asyncio.IncompleteReadError, ConnectionError):
            problem = await self._how_it_ended()
        except Exception as error:  # whatever unpickling a reply raises
            problem = f"unreadable reply: {describe_error(error)}"
        logger.warning("environment %r: %s; another is started", self.name, problem)
        lost, self._replies = self._replies, {}
        await self.close()
        for reply in lost.values():
            if not reply.done():
                reply.set_exception(EnvWorkerError(problem))

    async def _how_it_ended(self) -> str:
        assert self._process is not None
        status = await asyncio.to_thread(_end, self._process)
        return f"the worker process {self._process.pid} ended with status {status}"

    async def close(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None and reading is not asyncio.current_task():
            reading.cancel()
        process, self._process = self._process, None
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()  # makes the process end
        if process is not None:
            await asyncio.to_thread(_end, process)


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

    threading.Thread(target=wait, name="environment worker's end", daemon=True).start()


def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait for its end, and kill it if it does not end by itself. Return its exit status."""
    try:
        return process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(EXIT_S)


def _frame(message: Any) -> bytes:
    data = pickle.dumps(message)
    return len(data).to_bytes(8, "big") + data


async def _receive(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(8), "big")
    return pickle.loads(await reader.readexactly(size))


# --- In the worker --------------------------------------------------------------------------------


# The worker gets the trainer's sys.path, which may have folders that only its script knows.
MAIN = """
import json, sys
descriptor, parent, path = sys.argv[1:]
sys.path[:] = json.loads(path)
from verifiers_rl.envs.workers import main
main(int(descriptor), int(parent))
"""


def main(descriptor: int, parent: int) -> None:
    die_with_parent(parent)  # works even if the environment blocks the event loop
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("verifiers").setLevel(logging.WARNING)
    connection = socket.socket(fileno=descriptor)
    with connection.makefile("rb") as stream:  # the trainer sends no more before our answer
        setup = pickle.loads(stream.read(int.from_bytes(stream.read(8), "big")))
    problem = None
    try:
        # Outside the event loop, because an environment may run its own loop to load its data.
        env = load_environment(setup["env_id"], setup["env_args"])
        if _fingerprint(env) != setup["looks"]:
            problem = (
                f"loaded by its id, {setup['env_id']!r}, it has (class, examples, rewards) "
                f"{_fingerprint(env)}, and the trainer's {setup['looks']}: what is changed after "
                "load_environment is not in the workers; set env_workers=0"
            )
        runner = ClassicEnvironment(env, setup["options"])
    except Exception as error:  # whatever the environment's own code raises
        problem = describe_error(error)
    connection.sendall(_frame(problem))
    if problem is None:
        # Ctrl-C reaches us too, but the trainer decides when we end. Set after the environment is
        # loaded, because environments set a handler of their own.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.collect()
        gc.freeze()  # as Orchestrator.start does
        asyncio.run(_serve(connection, runner))


async def _serve(connection: socket.socket, runner: ClassicEnvironment) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    await runner.open()
    slots = Slots(runner.options.max_concurrent)
    running: dict[int, asyncio.Task[None]] = {}

    async def run(number: int, args: tuple[Any, ...]) -> None:
        try:
            index, row, num_rollouts, model, sampling, policy_version = args
            group = await runner.run_example(
                index, row, num_rollouts, model, sampling, policy_version, slots
            )
            for rollout in group:
                if rollout.error is not None:
                    rollout.error = _picklable_copy(rollout.error)
            writer.write(_frame((number, group, None)))
        except Exception as error:  # sent, so that the trainer does not wait forever
            writer.write(_frame((number, None, describe_error(error))))
        finally:
            del running[number]

    try:
        while True:
            number, args = await _receive(reader)
            if args is not None:
                running[number] = asyncio.create_task(run(number, args))
            elif number in running:
                running[number].cancel()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the trainer has closed its end, or is gone
    tasks = list(running.values())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await runner.close()


def _picklable_copy(error: BaseException) -> EnvWorkerError:
    """Copy an error so that it can be pickled and the trainer knows its class. The error of an
    environment may hold what cannot be pickled, or have a class that the trainer does not know.
    """
    copy = EnvWorkerError(describe_error(error))
    copy.add_note("".join(traceback.format_exception(error)))
    return copy
