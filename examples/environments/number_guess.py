"""An environment of several turns: guess a number, and hear after each guess whether it is higher
or lower. Nothing is downloaded."""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessConfig(vf.TasksetConfig):
    num_tasks: int = 1024
    largest: int = 20


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def few_guesses(self, trace: vf.Trace) -> float:
        """Return 1 / number of guesses if the last one is right, else 0."""
        is_right = guess_of(trace.last_reply) == self.data.secret
        return is_right / len(trace.assistant_messages)


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self) -> Iterator[GuessTask]:
        config, rng = self.config, random.Random(0)
        prompt = f"Guess a number from 1 to {config.largest}. Answer with the number only."
        for idx in range(config.num_tasks):
            data = GuessData(idx=idx, prompt=prompt, secret=rng.randint(1, config.largest))
            yield GuessTask(data, config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    max_guesses: int = 5


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as game:
            reply = await game.turn()  # the answer to the task's prompt
            for _ in range(self.config.max_guesses - 1):
                guess = guess_of(reply.last_reply)
                if reply.terminated or guess == task.data.secret:
                    break
                reply = await game.turn(hint(guess, task.data.secret))


def guess_of(text: str) -> int | None:
    """Return the last number in a reply, because some models think first; None if it has none."""
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else None


def hint(guess: int | None, secret: int) -> str:
    if guess is None:
        return "Answer with a number."
    return "higher" if secret > guess else "lower"
