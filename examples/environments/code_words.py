"""An environment of several agents: a sender describes an animal without its name, a receiver names
it, and both get the same reward. Nothing is downloaded."""

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["CodeWordsEnv", "CodeWordsTaskset"]

ANIMALS = ("bee", "cat", "cow", "dog", "fish", "frog", "horse", "owl", "snake", "wolf")


class SecretData(vf.TaskData):
    secret: str


class SecretTask(vf.Task[SecretData, vf.State, vf.TaskConfig]):
    """What the sender plays. Its reward is set in `CodeWordsEnv.finalize`."""


class CodeWordsConfig(vf.TasksetConfig):
    num_tasks: int = 1024


class CodeWordsTaskset(vf.Taskset[SecretTask, CodeWordsConfig]):
    def load(self) -> Iterator[SecretTask]:
        rng = random.Random(0)
        for idx in range(self.config.num_tasks):
            secret = rng.choice(ANIMALS)
            prompt = f"Describe this animal in one sentence, without its name: {secret}"
            yield SecretTask(SecretData(idx=idx, prompt=prompt, secret=secret), self.config.task)


class CodeWordsEnvConfig(vf.EnvConfig):
    sender: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    receiver: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    train_receiver: bool = True


class CodeWordsEnv(vf.Env[CodeWordsEnvConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.receiver.trainable = self.config.train_receiver

    async def run(self, task: SecretTask, agents: vf.Agents) -> None:
        sent = await agents.sender.run(task)
        prompt = f"Which animal is this? {sent.last_reply} Answer with one of {', '.join(ANIMALS)}."
        await agents.receiver.run(vf.Task(vf.TaskData(idx=task.data.idx, prompt=prompt)))

    async def finalize(self, task: SecretTask, episode: vf.Episode) -> None:
        traces = {trace.agent.name: trace for trace in episode.traces}
        secret, said = task.data.secret, traces["sender"].last_reply.lower()
        is_right = traces["receiver"].last_reply.lower().rstrip(".").split()[-1:] == [secret]
        for trace in traces.values():
            trace.record_reward("understood", float(is_right and secret not in said))
