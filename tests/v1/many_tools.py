"""A taskset of verifiers.v1 with tools of all kinds, of a rollout's own and shared ones; see
small_tasks.py.
"""

import asyncio
import os
import sys

import verifiers.v1 as vf
from pydantic import Field
from small_tasks import SmallTask

__all__ = ["ManyTaskset"]

HAPPENED = []  # in this process


class ManyState(vf.State):
    notes: list[str] = Field(default_factory=list)


class OwnConfig(vf.ToolsetConfig):
    fails: str = ""  # the hook that raises


class Own(vf.Toolset[OwnConfig, ManyState]):
    """Of each rollout's own."""

    def __init__(self, config):
        super().__init__(config)
        self.num_calls = 0

    async def setup(self):
        if self.config.fails == "setup":
            raise ValueError("no database")
        HAPPENED.append("setup")
        self._exit_stack.callback(HAPPENED.append, "closed")

    async def setup_task(self, task):
        self.question = task.prompt

    @vf.tool
    async def count(self) -> int:
        """Calls of this rollout so far, with this one."""
        self.num_calls += 1
        return self.num_calls

    @vf.tool(name="asked")
    def sync_tool(self) -> str:
        """What was asked."""
        return self.question

    @vf.tool
    async def note(self, text: str) -> list[str]:
        """Keep a text."""
        notes = [*self.state.notes, text]
        await asyncio.sleep(0.01)  # others run
        self.state.notes = notes
        return notes

    @vf.tool
    async def process(self) -> str:
        """The process that runs this."""
        return str(os.getpid())

    @vf.tool
    async def hang(self) -> str:
        """Never answers."""
        await asyncio.sleep(100)
        return ""

    @vf.tool
    def leave(self) -> str:
        """Ends its process."""
        sys.exit(3)

    @vf.tool
    async def fail(self, what: str, times: int = 2) -> str:
        """Raises an error."""
        raise KeyError(what * times)

    @vf.tool
    def shape(self, kind: str, factor: float | None = None):
        """Returns something else than text."""
        return {
            "object": {"a": [1, 2]},
            "number": 1.5,
            "nothing": None,
            "list": ["x", {"y": factor}],
        }[kind]


class Pad(vf.Toolset[vf.SharedToolsetConfig, ManyState]):
    """Of all rollouts."""

    TOOL_PREFIX = None

    async def setup(self):
        self.num_calls = 0

    @vf.tool
    async def note(self, text: str) -> str:
        """Keep a text, and say how many texts this rollout and how many calls all have."""
        self.num_calls = number = self.num_calls + 1
        notes = [*self.state.notes, text]
        await asyncio.sleep(0.01)
        self.state.notes = notes
        return f"{len(notes)} of {number}"


class Failing(Pad):
    async def setup(self):
        raise ValueError("no database")


class ManyTaskConfig(vf.TaskConfig):
    own: OwnConfig = OwnConfig()
    twice: bool = False


class BareOwn(Own):
    TOOL_PREFIX = None


class ManyTask(SmallTask, vf.Task[vf.TaskData, ManyState, ManyTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        if config.twice:  # beside Pad, whose `note` has no prefix either
            return [BareOwn(config.own)]
        return [Own(config.own)]

    @vf.metric
    async def notes(self, trace: vf.Trace) -> float:
        return float("".join(trace.state.notes) or 0)


class ManyConfig(vf.TasksetConfig):
    task: ManyTaskConfig = ManyTaskConfig()
    shared_fails: bool = False


class ManyTaskset(vf.Taskset[ManyTask, ManyConfig]):
    @classmethod
    def toolsets(cls, config):
        return [(Failing if config.shared_fails else Pad)(vf.SharedToolsetConfig())]

    def load(self):
        for i in range(3):
            yield ManyTask(vf.TaskData(idx=i, prompt=f"question {i}"), self.config.task)


if __name__ == "__main__":
    (Own if "fails" in os.environ.get("VF_CONFIG", "") else Pad).run()
