"""A game as an environment of `verifiers.v1`: find a secret number from 1 to 15 in at most 4
guesses, and hear after each wrong guess only whether the secret is higher or lower.

What is left of the range stands nowhere; the model must keep it in mind over the turns. The only
reward comes at the end: 1 if the number was found. Nothing is downloaded.
"""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["GuessNumberEnv", "GuessNumberTaskset"]

LARGEST = 15
NUM_GUESSES = 4  # enough for all 15 numbers by halving
EXTRA_TOKENS = [str(number) for number in range(10, LARGEST + 1)]  # for warm_start.py


class GuessNumberConfig(vf.TasksetConfig):
    num_tasks: int = 2048
    instruction: str = (
        f"Find the secret number from 1 to {LARGEST}. Answer with a number only. After each guess "
        "I say > if the secret is higher, and < if it is lower.\n\n"
    )


class GuessNumberData(vf.TaskData):
    secret: int


class GuessNumberTask(vf.Task[GuessNumberData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(number_of(trace.last_reply) == self.data.secret)

    @vf.metric
    async def possible(self, trace: vf.Trace) -> float:
        """Return the share of guesses that no hint before has ruled out."""
        low, high, num_possible = 1, LARGEST, 0
        guesses = [number_of(message.content or "") for message in trace.assistant_messages]
        for guess in guesses:
            if guess is not None and low <= guess <= high:
                num_possible += 1
                low, high = narrow(low, high, guess, self.data.secret)
        return num_possible / max(len(guesses), 1)


class GuessNumberTaskset(vf.Taskset[GuessNumberTask, GuessNumberConfig]):
    def load(self) -> Iterator[GuessNumberTask]:
        config = self.config
        secrets = [1 + idx % LARGEST for idx in range(config.num_tasks)]
        random.Random(0).shuffle(secrets)
        for idx, secret in enumerate(secrets):
            data = GuessNumberData(idx=idx, prompt=f"{config.instruction}?", secret=secret)
            yield GuessNumberTask(data, config.task)


class GuessNumberEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class GuessNumberEnv(vf.Env[GuessNumberEnvConfig]):
    async def run(self, task: GuessNumberTask, agents: vf.Agents) -> None:
        """Give hints until the number is found or `NUM_GUESSES` guesses are made."""
        secret = task.data.secret
        async with agents.player.interaction(task) as game:
            reply = await game.turn()  # the answer to the task's prompt
            for _ in range(NUM_GUESSES - 1):
                guess = number_of(reply.last_reply)
                if reply.terminated or guess == secret:
                    break
                reply = await game.turn(hint(guess, secret))


def number_of(text: str) -> int | None:
    """Return the last number in a reply, because some models think first; None if it has none."""
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else None


def hint(guess: int | None, secret: int) -> str:
    if guess is None:
        return "?"
    return ">" if secret > guess else "<"


def narrow(low: int, high: int, guess: int, secret: int) -> tuple[int, int]:
    """Return the range that is left after a guess in it."""
    if guess == secret:
        return low, high
    return (guess + 1, high) if secret > guess else (low, guess - 1)


def demonstrations(num: int, seed: int, noise: float) -> list[dict]:
    """Make demonstrations for warm_start.py: games in which a guess is the middle of what is left
    or, with probability `noise`, any number.
    """
    rng = random.Random(seed)
    conversations = []
    for _ in range(num):
        secret, low, high = rng.randint(1, LARGEST), 1, LARGEST
        messages, said = [], "?"
        for _ in range(NUM_GUESSES):
            guess = rng.randint(1, LARGEST) if rng.random() < noise else (low + high) // 2
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": str(guess)})
            if guess == secret:
                break
            said = hint(guess, secret)
            if low <= guess <= high:
                low, high = narrow(low, high, guess, secret)
        conversations.append({"messages": messages})
    return conversations
