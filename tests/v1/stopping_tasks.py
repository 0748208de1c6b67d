"""tool_tasks.py whose task stops after two turns of the agent."""

import verifiers.v1 as vf
from small_tasks import SmallConfig, SmallTask
from tool_tasks import ToolTaskset

__all__ = ["StoppingTaskset"]


class StoppingTask(SmallTask):
    @vf.stop
    async def said_enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 2


class StoppingTaskset(ToolTaskset, vf.Taskset[StoppingTask, SmallConfig]):
    def load(self):
        for task in super().load():
            yield StoppingTask(task.data, task.config)
