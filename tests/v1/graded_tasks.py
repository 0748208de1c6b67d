"""A taskset of verifiers.v1 that gives each sampled token an advantage of its own."""

import verifiers.v1 as vf

__all__ = ["GradedTaskset"]


class GradedTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def grade(self, trace: vf.Trace) -> float:
        if self.data.idx == 0:
            for node in trace.nodes:
                if node.sampled:
                    node.advantages = [0.5 + at for at in range(len(node.logprobs))]
        return 1.0


class GradedTaskset(vf.Taskset[GradedTask, vf.TasksetConfig]):
    def load(self):
        for i in range(2):
            yield GradedTask(vf.TaskData(idx=i, prompt="question"), self.config.task)
