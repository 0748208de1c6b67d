"""A rollout worker: makes environments from their recipes, and runs groups for the orchestrator's
process, on an event loop of its own. It may run in another Python than the trainer's, and loads
neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import base64
import faulthandler
import gc
import json
import logging
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from verifiers_rl.data import describe_error
from verifiers_rl.envs.messages import Outbox, frame, pack_group, receive
from verifiers_rl.envs.tables import make_environment
from verifiers_rl.inference import RolloutSession
from verifiers_rl.process import parent as parent_of_worker
from verifiers_rl.requests import GroupRequest


def main(descriptor: int, parent: int) -> None:
    """Run until the orchestrator's process closes the connection. What to run is read from stdin.

    Args:
        descriptor: of our end of the connection.
        parent: id of the process that started us.
    """
    parent_of_worker.is_rollout_worker = True
    parent_of_worker.die_with_parent(parent)  # works even if the environment blocks the event loop
    # When memory runs out, Linux shall end this process, which is replaced, before the trainer.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("verifiers").setLevel(logging.WARNING)
    with open(0, "rb", closefd=False) as stream:  # a file from the process that started us
        setup = json.load(stream)
    with socket.socket(fileno=descriptor) as connection:
        _run(connection, setup)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without what compiled modules print when they are unloaded


def _run(connection: socket.socket, setup: dict[str, Any]) -> None:
    recipes, problem, where = setup["recipes"], "", ""
    runners: list[Any] = []
    try:
        multiprocessing.spawn.prepare(setup["process"])  # imports the script, if it is named
        for recipe in recipes:
            logging.disable(logging.WARNING if recipe.get("is_quiet") else logging.NOTSET)
            # Outside the event loop, because an environment may run its own loop to load its data.
            where = f"environment {recipe['name']!r}: " if len(recipes) > 1 else ""
            pickled = base64.b64decode(recipe.get("pickled", ""))
            runners.append(pickle.loads(pickled)() if pickled else make_environment(recipe))
    except (Exception, SystemExit) as error:  # whatever the environment's own code raises
        problem = where + describe_error(error)
    logging.disable(logging.NOTSET)
    if problem:
        connection.sendall(b"".join(frame({"problem": problem})))
        return
    # Ctrl-C may reach us too, but the trainer decides when we end. Set after the environments are
    # made, because environments set a handler of their own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # as Orchestrator.start does
    asyncio.run(_serve(connection, runners, setup))


def facts_of(env: Any) -> dict[str, Any]:
    """Return what the trainer needs to know of an environment that has its examples here."""
    sizes = {split: env.sizes(split) for split in ("train", "eval")}
    return {"sizes": sizes, "description": env.description}


class _Places:
    """The `requests.Places` of one group: asks the orchestrator's process.

    Args:
        send: sends a message about this group to the orchestrator's process.
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
        await has_place.wait()
        try:
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


async def _serve(connection: socket.socket, runners: list[Any], setup: dict[str, Any]) -> None:
    """Run groups until the connection ends."""
    reader, writer = await asyncio.open_connection(sock=connection)
    outbox = Outbox(writer)

    def send(**message: Any) -> None:
        outbox.send(message)

    try:
        await asyncio.gather(*(runner.open() for runner in runners))
    except Exception as error:  # whatever the environment's own code raises
        writer.writelines(frame({"problem": describe_error(error)}))
        await writer.drain()
        return
    send(problem="", facts=[facts_of(runner) for runner in runners if hasattr(runner, "sizes")])
    running: dict[int, tuple[asyncio.Task[None], _Places]] = {}
    is_alive = asyncio.create_task(_say_alive(send, setup["alive_s"], setup["blocked_s"]))

    async def run(number: int, env: int, request: GroupRequest, task: bytes) -> None:
        try:
            if task:
                group = await runners[env].run_task(pickle.loads(task), request)
            else:  # the environment has its examples here
                group = await runners[env].run_group(request)
            rollouts, content = pack_group(group)
            outbox.send({"group": number, "rollouts": rollouts}, content)
        except Exception as error:  # sent, so that the trainer does not wait forever
            send(group=number, problem=describe_error(error))
        finally:
            del running[number]

    try:
        while True:
            message, content = await receive(reader)
            number = message.pop("group")
            if "request" in message:
                places = _Places(partial(send, group=number))
                request = GroupRequest(**message["request"], places=places)
                work = run(number, message["env"], request, content)
                running[number] = asyncio.create_task(work), places
            elif number not in running:
                pass  # the group has ended
            elif "cancel" in message:
                running[number][0].cancel()
            else:
                running[number][1].take_message(**message)
    except (EOFError, OSError):
        pass  # the trainer has closed its end, or is gone
    tasks = [is_alive, *(task for task, _ in running.values())]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(runner.close() for runner in runners))


async def _say_alive(send: Callable[..., None], alive_s: float, blocked_s: float) -> None:
    """Say every `alive_s` that the event loop runs. If the loop is blocked for `blocked_s`, the
    stacks of all threads go to stderr, even if the code that blocks holds the GIL.
    """
    try:
        while True:
            # A little earlier, so that they are there when the orchestrator's process reports.
            faulthandler.dump_traceback_later(0.9 * blocked_s)
            await asyncio.sleep(alive_s)
            send()
    finally:
        faulthandler.cancel_dump_traceback_later()
