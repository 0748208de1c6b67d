"""An event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 30.0


class LoopThread:
    """A daemon thread that runs an event loop, from construction until `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
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
