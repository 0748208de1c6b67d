"""Of the shape of verifiers' glossary: a tool server of each rollout's own."""

import os

import verifiers.v1 as vf

__all__ = ["LookupTaskset"]


class LookupTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Lookup(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def double(self, x: int) -> str:
        """Twice a number."""
        return str(2 * x)

    @vf.tool
    async def process(self) -> str:
        """The process that runs this."""
        return str(os.getpid())


class LookupTask(vf.Task[vf.TaskData, vf.State, LookupTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Lookup(config.tools)]

    @vf.reward(weight=2.0)
    async def looked_up(self, trace: vf.Trace) -> float:
        return float("8" in trace.last_reply) + len(trace.last_reply) / 100


class LookupConfig(vf.TasksetConfig):
    task: LookupTaskConfig = LookupTaskConfig()


class LookupTaskset(vf.Taskset[LookupTask, LookupConfig]):
    def load(self):
        return [LookupTask(vf.TaskData(idx=0, prompt="four"), self.config.task)]


if __name__ == "__main__":
    Lookup.run()
