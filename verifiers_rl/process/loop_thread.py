"""An event loop on a thread of its own, and tasks that code of a user cannot end it with."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, Never

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 30.0


class ExitError(RuntimeError):
    """Code that runs in a task raised what is no `Exception`, such as SystemExit."""


def contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Let each task of this loop end with a result, an `Exception`, or because it is cancelled.
    What else its code raises becomes an `ExitError`.

    asyncio lets SystemExit and KeyboardInterrupt end the loop, and takes a task that raises
    CancelledError itself for a cancelled one, for whose result nobody waits. Code of environments
    and of models raises all of them: `exit()` is usual. A child that the code forks ends with its
    task, with the status of its `exit()`. A task that stops the loop gets a RuntimeError.
    """

    def make_task(loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(_contained(coroutine), loop=loop, **options)
        # One that is cancelled before it begins never gets to its coroutine.
        task.add_done_callback(lambda _: coroutine.close())
        return task

    loop.set_task_factory(make_task)
    stop = loop.stop

    def stop_unless_in_task() -> None:
        if asyncio.current_task(loop) is not None:
            raise RuntimeError("code of the environment stops the event loop that it runs in")
        stop()

    loop.stop = stop_unless_in_task  # type: ignore[method-assign]


async def _contained(coroutine: Coroutine[Any, Any, Any]) -> Any:
    pid, code = os.getpid(), 1
    try:
        return await coroutine
    except Exception:
        raise
    except BaseException as error:
        code = getattr(error, "code", 1) or 0
        _raise_contained(error)
    finally:
        # The child of a fork in the code has come back; here it would take this process's messages.
        if os.getpid() != pid:
            try:  # as Python ends a process
                if not isinstance(code, int):
                    print(code, file=sys.stderr)
            finally:
                os._exit(code if isinstance(code, int) else 1)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Let asyncio not warn of an error that nobody awaits, as it does not of a cancelled task.
    aiohttp's server ends the task of each closed connection by a CancelledError.
    """
    if not task.cancelled():
        task.exception()


def _raise_contained(error: BaseException) -> Never:
    if not asyncio._get_running_loop():  # it has ended, and the coroutine is thrown away
        raise error
    task: Any = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError):
        task.add_done_callback(_retrieve)
        if task.cancelling():
            raise error
    raise ExitError(f"code of the environment raised {error!r}") from error


async def run_contained(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that runs in a task of its own.

    Raises:
        ExitError: it ended with what is no `Exception`, or was cancelled though nobody cancels the
            task that waits for it.
        Exception: whatever else it raises.
    """
    try:
        return await asyncio.create_task(coroutine)
    except asyncio.CancelledError as error:
        _raise_contained(error)


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines at once, and return their results in their order. If one raises, or this is
    cancelled, the others are cancelled, and get some time to end.
    """
    tasks = [*map(asyncio.create_task, coroutines)]
    try:
        return await asyncio.gather(*tasks)  # which passes on once that it is cancelled
    except Exception:
        for task in tasks:
            task.cancel()
        raise
    finally:
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_DEADLINE_S)


async def call_on_thread(function: Callable[[], Any]) -> Any:
    """Call a function on a thread of its own, which does not keep the process from ending. If it is
    async, what it returns is awaited here.
    """
    future = Future[Any]()
    future.set_running_or_notify_cancel()  # after the deadline, its result is nobody's

    def run() -> None:
        try:
            future.set_result((function(), None))
        except BaseException as error:  # no exception of the future, which refuses StopIteration
            future.set_result((None, error))

    threading.Thread(target=run, daemon=True).start()
    answer, error = await asyncio.wrap_future(future)
    if error is not None:
        raise error
    return await answer if inspect.isawaitable(answer) else answer


class LoopThread:
    """A daemon thread that runs an event loop, from construction until `stop`. Its tasks are
    contained, see `contain_tasks`.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        contain_tasks(self.loop)
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on the loop. Those of one thread start in the order of the calls."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all tasks, run `close`, and join the thread.

        Raises:
            RuntimeError: something blocks the loop, so the thread does not end.
        """
        try:
            self.run(cancel_all_others(close)).result(timeout=3 * STOP_DEADLINE_S)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(timeout=STOP_DEADLINE_S)
            if self.thread.is_alive():
                raise RuntimeError(f"the {self.thread.name}'s thread is blocked by an environment")
            self.loop.close()


async def cancel_all_others(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Cancel all other tasks of this loop, give them some time to end, and run `close`."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others and (left := (await asyncio.wait(others, timeout=STOP_DEADLINE_S))[1]):
        logger.warning(f"{len(left)} tasks of the environment do not end when cancelled")
    await close()
