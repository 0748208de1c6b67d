"""An environment of verifiers.v1 with a user who asks three things; see small_tasks.py."""

import verifiers.v1 as vf
from small_tasks import SmallTaskset

__all__ = ["SmallTaskset", "UserEnv"]


class UserEnvConfig(vf.EnvConfig):
    assistant: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class UserEnv(vf.Env[UserEnvConfig]):
    question = None  # in place of the text

    async def run(self, task, agents):
        async with agents.assistant.interaction(task) as interaction:
            segment = await interaction.turn()
            for question in ("and?", "more?"):
                if segment.terminated:
                    break
                text = f"{question} {len(segment.last_reply)}"
                asked = [vf.UserMessage(content=self.question)] if self.question else text
                segment = await interaction.turn(asked)
