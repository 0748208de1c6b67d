"""A taskset of verifiers.v1 for tests/test_environments_v1.py; their folder is on its path."""

import verifiers.v1 as vf

__all__ = ["SmallTaskset"]


class SmallConfig(vf.TasksetConfig):
    num_tasks: int = 4
    prompt: str = ""  # of all tasks; by default each has its own


class SmallTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        if self.data.idx == 3:
            raise ValueError("no answer key")
        return float(len(trace.last_reply))

    @vf.metric
    async def tools_called(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class SmallTaskset(vf.Taskset[SmallTask, SmallConfig]):
    def load(self):
        for i in range(self.config.num_tasks):
            prompt = self.config.prompt or f"question {i}"
            data = vf.TaskData(idx=i, prompt=prompt, system_prompt="be brief" if i == 2 else None)
            yield SmallTask(data, self.config.task)
