"""tool_tasks.py whose task refuses each tool call before it runs."""

import verifiers.v1 as vf
from small_tasks import SmallConfig, SmallTask
from tool_tasks import ToolTaskset

__all__ = ["GatedTaskset"]


class GatedTask(SmallTask):
    @vf.intercept
    async def refuse(self, request: vf.Request) -> vf.Request | None:
        last = request.messages[-1]
        if not isinstance(last, vf.ToolMessage):
            return None
        refused = last.model_copy(update={"content": "not today"})
        return request.model_copy(update={"messages": [*request.messages[:-1], refused]})


class GatedTaskset(ToolTaskset, vf.Taskset[GatedTask, SmallConfig]):
    def load(self):
        for task in super().load():
            yield GatedTask(task.data, task.config)
