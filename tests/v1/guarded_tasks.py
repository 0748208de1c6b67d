"""small_tasks.py whose task puts another reply in the place of a bad one, and rewards that."""

import verifiers.v1 as vf
from small_tasks import SmallConfig, SmallTask, SmallTaskset

__all__ = ["GuardedTaskset"]


class GuardedTask(SmallTask):
    @vf.intercept
    async def guard(self, response: vf.Response) -> vf.Response | None:
        if "bad" not in (response.message.content or ""):
            return None
        refusal = vf.AssistantMessage(content="I must not say that.")
        return response.model_copy(update={"message": refusal})

    @vf.reward
    async def guarded(self, trace: vf.Trace) -> float:
        return -100.0 * len(trace.response_rewrites)


class GuardedTaskset(SmallTaskset, vf.Taskset[GuardedTask, SmallConfig]):
    def load(self):
        for task in super().load():
            yield GuardedTask(task.data, task.config)
