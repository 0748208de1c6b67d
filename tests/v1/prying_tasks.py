"""A taskset of verifiers.v1 whose tool and whose program tell which variables they see."""

import os

import verifiers.v1 as vf

__all__ = ["PryingTaskset"]


class PryingConfig(vf.TasksetConfig):
    out: str = "/dev/null"


class Prying(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def environment(self) -> str:
        """The names of all variables."""
        return " ".join(os.environ)


class PryingTask(vf.Task[vf.TaskData]):
    def runtime_env(self):
        return {"GRADER_TOKEN": "given"}

    @vf.reward
    async def seen(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        done = await runtime.run(["python3", "-c", "import os; print(*os.environ)"], {})
        with open(self.out, "w") as file:
            file.write(done.stdout)
        return 1.0


class PryingTaskset(vf.Taskset[PryingTask, PryingConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Prying(vf.SharedToolsetConfig())]

    def load(self):
        task = PryingTask(vf.TaskData(idx=0, prompt="look"), self.config.task)
        task.out = self.config.out
        yield task


if __name__ == "__main__":
    Prying.run()
