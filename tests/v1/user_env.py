"""An environment of verifiers.v1 with a user who asks three things; see small_tasks.py."""

import verifiers.v1 as vf
from small_tasks import SmallTaskset

__all__ = ["SmallTaskset", "UserEnv"]


class UserEnvConfig(vf.EnvConfig):
    assistant: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class UserEnv(vf.Env[UserEnvConfig]):
    async def run(self, task, agents):
        async with agents.assistant.interaction(task) as interaction:
            segment = await interaction.turn()
            for question in ("and?", "more?"):
                if segment.terminated:
                    break
                segment = await interaction.turn(f"{question} {len(segment.last_reply)}")
