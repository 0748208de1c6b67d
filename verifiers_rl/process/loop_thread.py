"""An event loop on a thread of its own, and tasks that code of a user cannot end it with."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Never

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 30.0


class ExitError(RuntimeError):
    """Code that runs in a task raised what is no `Exception`, such as SystemExit."""


class _Contained(Coroutine[Any, Any, Any]):
    """The coroutine of a task, out of which only an `Exception` comes, and the CancelledError that
    was thrown into it because somebody cancels the task or what it waits for.

    asyncio lets SystemExit and KeyboardInterrupt end the loop, and takes a task that raises
    CancelledError itself for a cancelled one, for whose result nobody waits. Code of environments
    and of models raises all of them: `exit()` is usual.

    It is no `async def` around the other, because a task that is cancelled before it begins would
    leave the inner coroutine without an end.
    """

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # anyio asks how far a coroutine is

    def __await__(self) -> Any:
        return self._inner.__await__()

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except Exception:  # also StopIteration, by which it returns
            raise
        except BaseException as error:
            _raise_contained(error, None)

    def throw(self, thrown: Any, *others: Any) -> Any:
        try:
            return self._inner.throw(thrown, *others)
        except Exception:
            raise
        except BaseException as error:
            _raise_contained(error, thrown)

    def close(self) -> None:
        self._inner.close()


def _raise_contained(error: BaseException, thrown: BaseException | None) -> Never:
    task: Any = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and (error is thrown or task.cancelling()):
        raise error
    raise ExitError(f"code of the environment raised {error!r}") from error


def contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Let each task of this loop end with a result, an `Exception`, or because it is cancelled.
    What else its code raises becomes an `ExitError`.
    """

    def make_task(loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_Contained(coroutine), loop=loop, **options)

    loop.set_task_factory(make_task)


async def run_contained(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that runs in a task of its own.

    Raises:
        ExitError: it ended with what is no `Exception`, or was cancelled though nobody cancels the
            task that waits for it.
        Exception: whatever else it raises.
    """
    task = asyncio.create_task(coroutine)
    try:
        return await task
    except asyncio.CancelledError as error:
        waiting: Any = asyncio.current_task()
        if waiting.cancelling():
            raise
        raise ExitError(f"code of the environment raised {error!r}") from error


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
            self.run(_cancel_all_others(close)).result(timeout=2 * STOP_DEADLINE_S)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(timeout=STOP_DEADLINE_S)
            if self.thread.is_alive():
                raise RuntimeError(f"the {self.thread.name}'s thread is blocked by an environment")
            self.loop.close()


async def _cancel_all_others(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others and (left := (await asyncio.wait(others, timeout=STOP_DEADLINE_S))[1]):
        logger.warning("%d tasks of the environment do not end when cancelled", len(left))
    await close()
