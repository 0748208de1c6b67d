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
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, cast

from verifiers_rl.data import describe_error
from verifiers_rl.envs.base import ExampleRunner, HoldsExamples
from verifiers_rl.envs.messages import frame, pack_group, receive
from verifiers_rl.envs.tables import facts_of, make_environment
from verifiers_rl.inference import Lease, current_group_seed, current_lease
from verifiers_rl.process import parent as parent_of_worker
from verifiers_rl.process.limits import rollouts_at_once
from verifiers_rl.types import Slots


def main(descriptor: int, stack: int, parent: int) -> None:
    """Run until the orchestrator's process closes the connection. What to run is read from stdin.

    Args:
        descriptor: of our end of the connection.
        stack: descriptor of a file for the stack of a blocked event loop.
        parent: id of the process that started us.
    """
    parent_of_worker.is_rollout_worker = True
    parent_of_worker.die_with_parent(parent)  # works even if the environment blocks the event loop
    _die_before_trainer()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("verifiers").setLevel(logging.WARNING)
    connection = socket.socket(fileno=descriptor)
    with open(0, "rb", closefd=False) as stream:  # a file from the process that started us
        setup = json.load(stream)
    recipes, only_describes = setup["recipes"], setup.get("only_describes", False)
    runners: list[ExampleRunner] = []
    said: dict[str, Any] = {"problem": None}
    where = ""
    try:
        multiprocessing.spawn.prepare(setup["process"])  # imports the script, if it is named
        if not only_describes:
            logging.disable(logging.WARNING)  # what is to be said of them has been said
        for recipe in recipes:
            # Outside the event loop, because an environment may run its own loop to load its data.
            where = f"environment {recipe['name']!r}: " if len(recipes) > 1 else ""
            runners.append(_make(recipe))
        if only_describes:
            said["facts"] = facts_of(cast(HoldsExamples, runners[0]))
    except (Exception, SystemExit) as error:  # whatever the environment's own code raises
        said["problem"] = where + describe_error(error)
    logging.disable(logging.NOTSET)
    if only_describes or said["problem"] is not None:
        connection.sendall(b"".join(frame(said)))
        os._exit(0)
    # Ctrl-C may reach us too, but the trainer decides when we end. Set after the environments are
    # made, because environments set a handler of their own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # as Orchestrator.start does
    asyncio.run(_serve(connection, stack, runners, setup))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without what compiled modules print when they are unloaded


def _make(recipe: dict[str, Any]) -> ExampleRunner:
    if "pickled" in recipe:
        return pickle.loads(base64.b64decode(recipe["pickled"])).make()
    return make_environment(recipe)


def _die_before_trainer() -> None:
    """When memory runs out, let Linux end this process, which is replaced, before the trainer."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


class _Places:
    """Takes a place of this process for each rollout, and tells when the rollout has ended.

    Args:
        send: sends a message about this group to the orchestrator's process.
        servers: of its rollouts, if there are several servers.
        policy_version: that their tokens must have, or a later one.
    """

    def __init__(
        self,
        slots: Slots,
        send: Callable[..., None],
        servers: list[str] | None,
        policy_version: int,
    ) -> None:
        self._slots = slots
        self._send = send
        self._servers = servers
        self._policy_version = policy_version
        self._leases: set[Lease] = set()
        self._moving: deque[asyncio.Future[str | None]] = deque()  # in the order of the questions

    async def __aenter__(self) -> Lease | None:
        await self._slots.acquire()
        if not self._servers:
            return None
        lease = Lease(self._servers.pop(), self._policy_version, self._find_other)
        self._leases.add(lease)
        current_lease.set(lease)
        return lease

    async def _find_other(self, url: str) -> str | None:
        self._moving.append(asyncio.get_running_loop().create_future())
        self._send(lost=url)
        return await self._moving[-1]

    def take_answer(self, url: str | None) -> None:
        """Another server for the rollout that asked first; None if there is none."""
        asked = self._moving.popleft()
        if not asked.done():  # the rollout may have been cancelled
            asked.set_result(url)

    def lose(self, url: str) -> None:
        """End what waits for this server, which is lost."""
        for lease in self._leases:
            lease.lose(url)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._slots.release()
        lease = current_lease.get()
        if lease is None:
            self._send()
            return
        current_lease.set(None)
        self._leases.discard(lease)
        self._send(server=lease.url)


async def _serve(
    connection: socket.socket, stack: int, runners: list[ExampleRunner], setup: dict[str, Any]
) -> None:
    """Run groups until the connection ends."""
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        await asyncio.gather(*(runner.open() for runner in runners))
    except Exception as error:  # whatever the environment's own code raises
        writer.writelines(frame({"problem": describe_error(error)}))
        await writer.drain()
        return
    writer.writelines(frame({"problem": None}))
    files = max(runner.files_per_rollout for runner in runners)
    slots = Slots(rollouts_at_once(setup["max_concurrent"], files))
    running: dict[int, asyncio.Task[None]] = {}
    places_of: dict[int, _Places] = {}
    is_alive = asyncio.create_task(_say_alive(writer, stack, setup["alive_s"], setup["blocked_s"]))

    async def run(number: int, request: dict[str, Any]) -> None:
        try:
            env = request.pop("env")
            places = places_of[number] = _Places(
                slots,
                lambda **said: writer.writelines(frame({"group": number, **said})),
                request.pop("servers", None),
                request["policy_version"],
            )
            current_group_seed.set(request.pop("group_seed", None))  # of this group's task
            example = json.loads(request["example"])
            if "table" in setup["recipes"][env]:  # then it is the place of one
                example = await cast(HoldsExamples, runners[env]).example(**example)
            request["example"] = example
            group = await runners[env].run_example(**request, slots=places)
            rollouts, arrays = pack_group(group)
            answer = frame({"group": number, "rollouts": rollouts}, arrays)
        except Exception as error:  # sent, so that the trainer does not wait forever
            answer = frame({"group": number, "problem": describe_error(error)})
        finally:
            del running[number]
            places_of.pop(number, None)
        writer.writelines(answer)
        await writer.drain()

    try:
        while True:
            request, _ = await receive(reader)
            number = request.pop("group")
            if "moved" in request or "lost" in request:
                if (places := places_of.get(number)) is None:
                    continue  # the group has ended
                if "moved" in request:
                    places.take_answer(request["moved"])
                else:
                    places.lose(request["lost"])
            elif "cancel" not in request:
                running[number] = asyncio.create_task(run(number, request))
            elif number in running:
                running[number].cancel()
    except (EOFError, OSError):
        pass  # the trainer has closed its end, or is gone
    is_alive.cancel()
    tasks = list(running.values())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, is_alive, return_exceptions=True)
    await asyncio.gather(*(runner.close() for runner in runners))


async def _say_alive(
    writer: asyncio.StreamWriter, stack: int, alive_s: float, blocked_s: float
) -> None:
    """Say every `alive_s` that the event loop runs. If the loop is blocked for `blocked_s`, all
    threads' stacks are written to the file `stack`, even if the code that blocks holds the GIL.
    """
    file = os.fdopen(stack, "wb", closefd=False)
    try:
        while True:
            # A little earlier, so that the orchestrator's process finds it when it reports.
            faulthandler.dump_traceback_later(0.9 * blocked_s, file=file)
            await asyncio.sleep(alive_s)
            writer.writelines(frame({}))
    finally:
        faulthandler.cancel_dump_traceback_later()
