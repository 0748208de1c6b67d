"""A taskset of verifiers.v1 with tools of all kinds, of a rollout's own and shared ones; see
small_tasks.py.
"""

import asyncio
import sys

import verifiers.v1 as vf
from mcp.server.mcpserver import Image
from pydantic import Field
from small_tasks import SmallConfig, SmallTask, SmallTaskset

__all__ = ["ManyTaskset"]

HAPPENED = []  # in this process


class ManyState(vf.State):
    notes: list[str] = Field(default_factory=list)


async def keep(toolset, text):
    """Keep a text in the state of the rollout that calls, and return all of its texts."""
    notes = [*toolset.state.notes, text]
    await asyncio.sleep(0.01)  # others run
    toolset.state.notes = notes
    return notes


class Own(vf.Toolset[vf.ToolsetConfig, ManyState]):
    """Of each rollout's own."""

    num_calls = 0

    async def setup(self):
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
        return await keep(self, text)

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
    async def draw(self):
        """Returns a text and a picture."""
        return ["seen", Image(data=b"pixels", format="png")]


class Pad(vf.Toolset[vf.SharedToolsetConfig, ManyState]):
    """Of all rollouts."""

    TOOL_PREFIX = None
    num_calls = 0

    @vf.tool
    async def note(self, text: str) -> str:
        """Keep a text, and say how many texts this rollout and how many calls all have."""
        self.num_calls = number = self.num_calls + 1
        return f"{len(await keep(self, text))} of {number}"


class ManyTask(SmallTask, vf.Task[vf.TaskData, ManyState, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Own(vf.ToolsetConfig())]

    @vf.metric
    async def notes(self, trace: vf.Trace) -> float:
        return float("".join(trace.state.notes) or 0)


class ManyTaskset(SmallTaskset, vf.Taskset[ManyTask, SmallConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Pad(vf.SharedToolsetConfig())]

    def load(self):
        for task in super().load():
            yield ManyTask(task.data, task.config)
