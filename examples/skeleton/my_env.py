"""Your environment: what the model is asked, and what its reply is worth.

It runs as it is: the model is asked for the vowels of a text. Replace the task, the prompt and the
reward by yours. docs/environments.md shows environments with several turns, tools, a judge and
several agents.
"""

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["MyTaskset"]  # what `id = "my_env"` in a TOML finds

VOWELS = "aeiou"
LETTERS = VOWELS + "bcdfglmnprst"


class MyConfig(vf.TasksetConfig):
    """What a TOML may set under [env.taskset]."""

    num_tasks: int = 4096
    instruction: str = "Write the vowels of this text in their order, as one word:\n\n"
    held_out: bool = False
    """Load the tasks for evaluation instead; they share no text with the training tasks."""


class MyData(vf.TaskData):
    """What one task consists of: its `prompt`, and what the reward needs."""

    answer: str


class MyTask(vf.Task[MyData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right_letters(self, trace: vf.Trace) -> float:
        return score(trace.last_reply, self.data.answer)

    @vf.metric
    async def exact_match(self, trace: vf.Trace) -> float:
        """Return 1 for the right answer, else 0. A metric is logged, and not trained on."""
        return float(score(trace.last_reply, self.data.answer) == 1.0)


class MyTaskset(vf.Taskset[MyTask, MyConfig]):
    def load(self) -> Iterator[MyTask]:
        """Yield the tasks. Texts whose letters add up to a multiple of 16 are held out."""
        config, rng, seen = self.config, random.Random(0), set[str]()
        while len(seen) < config.num_tasks:
            text = make_text(rng)
            if text in seen or (sum(map(ord, text)) % 16 == 0) != config.held_out:
                continue
            prompt = config.instruction + text
            data = MyData(idx=len(seen), prompt=prompt, answer=vowels_of(text))
            seen.add(text)
            yield MyTask(data, config.task)


def score(reply: str, answer: str) -> float:
    """Return the reward of a reply, 0 to 1: how many letters are right from the first on, over the
    length of the answer or of the reply, whichever is longer.

    Partial credit matters: a group of rollouts that all get 0 teaches nothing.
    """
    said = (reply.split() or [""])[-1].lower()  # the last word: some models explain first
    num_right = 0
    while num_right < min(len(said), len(answer)) and said[num_right] == answer[num_right]:
        num_right += 1
    return num_right / max(len(said), len(answer))


def make_text(rng: random.Random) -> str:
    """Draw a text of six to ten letters, at least two of them vowels."""
    letters = rng.choices(VOWELS, k=2) + rng.choices(LETTERS, k=rng.randint(4, 8))
    rng.shuffle(letters)
    return "".join(letters)


def vowels_of(text: str) -> str:
    return "".join(letter for letter in text if letter in VOWELS)


def demonstrations(num: int, seed: int, noise: float) -> list[dict]:
    """Make demonstrations for warm_start.py, which makes a tiny model for a CPU: texts and their
    vowels, each replaced by a random one with probability `noise`. A real model needs none.
    """
    rng = random.Random(seed)
    conversations = []
    for _ in range(num):
        text = make_text(rng)
        said = "".join(rng.choice(VOWELS) if rng.random() < noise else v for v in vowels_of(text))
        roles = (("user", text), ("assistant", said))
        conversations.append({"messages": [{"role": r, "content": c} for r, c in roles]})
    return conversations
