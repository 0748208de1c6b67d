"""An environment of verifiers.v1 with three agents, of whom two are trained; see small_tasks.py."""

import verifiers.v1 as vf
from small_tasks import SmallTaskset

__all__ = ["SmallTaskset", "TeamEnv"]

JUDGES = vf.SamplingConfig(max_tokens=7)  # by which their requests are known
CHAT = vf.AgentConfig(harness={"id": "null"})


class TeamEnvConfig(vf.EnvConfig):
    writer: vf.AgentConfig = CHAT
    critic: vf.AgentConfig = CHAT
    judge: vf.AgentConfig = CHAT.model_copy(update={"sampling": JUDGES})


class TeamEnv(vf.Env[TeamEnvConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        await agents.writer.run(task)
        await agents.critic.run(task)
        await agents.judge.run(task)

    async def finalize(self, task, episode):
        writer, critic, _ = episode.traces
        writer.record_reward("judged", 10.0)
        critic.record_reward("judged", -1000.0)
