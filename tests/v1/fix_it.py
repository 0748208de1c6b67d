"""A taskset of verifiers.v1 whose module also exports the environment that plays it."""

import verifiers.v1 as vf
from small_tasks import SmallConfig, SmallTask, SmallTaskset

__all__ = ["FixItEnv", "FixItTaskset"]


class FixItConfig(SmallConfig):
    num_tasks: int = 2


class FixItTaskset(SmallTaskset, vf.Taskset[SmallTask, FixItConfig]):
    pass


class FixItEnvConfig(vf.EnvConfig):
    fixer: vf.AgentConfig = vf.AgentConfig()


class FixItEnv(vf.Env[FixItEnvConfig]):
    async def run(self, task, agents):
        await agents.fixer.run(task)
