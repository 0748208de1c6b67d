"""The tasks of a taskset of `verifiers.v1`: by their position, also in a stream without end."""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from verifiers_rl.data import ENDLESS
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.rendering import as_vllm_renders

logger = logging.getLogger(__name__)

NUM_KEPT = 4096  # tasks of a stream in memory: more than the groups of all pending batches
MAX_OVERLONG = 1000  # overlong prompts in a row after which no shorter one is expected


def first_messages(task: vf.Task) -> list[dict[str, Any]]:
    """Return the first prompt as messages for a chat template. Raises InvalidEnvironmentError if it
    has an image.
    """
    data, prompt = task.data, task.data.prompt
    messages = [] if not data.system_prompt else [{"role": "system", "content": data.system_prompt}]
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    messages += [message_to_wire(message) for message in prompt or []]
    try:
        for message in messages:
            as_vllm_renders(message)
    except ValueError as error:
        raise InvalidEnvironmentError(f"task {data.idx}: {error}") from error
    return messages


def without_tasks(taskset: vf.Taskset) -> vf.Taskset:
    """Return a copy of a taskset that can be pickled. A view of a taskset chooses tasks by a
    closure; whoever gets the copy gets the chosen tasks one by one.
    """
    bare = copy.copy(taskset)
    vars(bare).pop("transform", None)
    vars(bare).pop("eval_taskset", None)
    return bare


class TaskStream:
    """The tasks that an iterator yields without end, by their position.

    Tasks are made when they are requested, on any thread, and the last `NUM_KEPT` are kept. An
    older task, or one that a resumed run requests, is made again with all tasks before it. So the
    iterator must yield the same tasks each time.

    Args:
        iterate: starts the iteration from the beginning.
        num_skipped: tasks at the beginning that the stream leaves out.
    """

    def __init__(self, iterate: Callable[[], Iterator[vf.Task]], num_skipped: int = 0) -> None:
        self._iterate = iterate
        self._num_skipped = num_skipped
        self._tasks: Iterator[vf.Task] = iter(())
        self._next = -1  # position of the next task from `_tasks`; -1: not begun
        self._kept: dict[int, vf.Task] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, position: int) -> vf.Task:
        """Return one task. Raises InvalidEnvironmentError if the stream ends before it."""
        with self._lock:
            if position not in self._kept and not 0 <= self._next <= position:
                self._tasks = itertools.islice(self._iterate(), self._num_skipped, None)
                self._next = 0
            while position not in self._kept:
                try:
                    self._kept[self._next] = next(self._tasks)
                except StopIteration:
                    raise InvalidEnvironmentError(
                        f"the taskset says that it is infinite and ended after "
                        f"{self._num_skipped + self._next} tasks"
                    ) from None
                self._next += 1
                if len(self._kept) > NUM_KEPT:
                    del self._kept[next(iter(self._kept))]
            return self._kept[position]
