"""`helpers.make_env` for verifiers.v1."""

import verifiers.v1 as vf

__all__ = ["GivenTaskset"]


class GivenData(vf.TaskData):
    answer: str


class GivenTask(vf.Task[GivenData, vf.State, vf.TaskConfig]):
    functions = None

    async def setup(self, trace, runtime):
        self.functions[1]()

    @vf.reward
    async def given(self, trace: vf.Trace) -> float:
        return self.functions[0](self.data.prompt, trace.last_reply, self.data.answer)


class GivenTaskset(vf.Taskset[GivenTask, vf.TasksetConfig]):
    def load(self):
        for i, (question, answer) in enumerate(self.questions.items()):
            task = GivenTask(GivenData(idx=i, prompt=question, answer=answer), self.config.task)
            task.functions = self.functions
            yield task


def make_taskset(questions, reward, setup):
    taskset = GivenTaskset(vf.TasksetConfig(id="given_tasks"))
    taskset.questions, taskset.functions = questions, (reward, setup)
    return taskset
