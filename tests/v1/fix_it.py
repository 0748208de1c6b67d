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
    num_tries: int = 2


class FixItEnv(vf.Env[FixItEnvConfig]):
    async def run(self, task, agents):
        async with agents.fixer.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(self.config.num_tries - 1):
                if not segment.terminated:
                    segment = await interaction.turn("again")
