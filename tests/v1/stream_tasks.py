"""A taskset of verifiers.v1 without end; see small_tasks.py."""

import itertools

import verifiers.v1 as vf
from small_tasks import SmallTask

__all__ = ["StreamTaskset"]


class StreamConfig(vf.TasksetConfig):
    end: int | None = None  # where it ends, though it should not
    padding: int = 0  # characters after each second prompt


class StreamTaskset(vf.Taskset[SmallTask, StreamConfig]):
    INFINITE = True

    def load(self):
        for i in itertools.islice(itertools.count(), self.config.end):
            prompt = f"task {i}" + "x" * self.config.padding * (i % 2)
            yield SmallTask(vf.TaskData(idx=i, prompt=prompt), self.config.task)
