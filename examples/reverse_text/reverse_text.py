"""A taskset of `verifiers.v1`: reverse a short string. Data is generated; nothing is downloaded."""

import difflib
import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["ReverseTextTaskset"]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
INSTRUCTION = (
    "Reverse the following text character by character. Answer with the reversed text only.\n\n"
)


class ReverseTextConfig(vf.TasksetConfig):
    num_tasks: int = 4096
    min_length: int = 3
    max_length: int = 8
    instruction: str = INSTRUCTION
    held_out: bool = False
    """Load the tasks for evaluation instead; they share no string with the training tasks."""


class ReverseTextData(vf.TaskData):
    answer: str


class ReverseTextTask(vf.Task[ReverseTextData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def similarity(self, trace: vf.Trace) -> float:
        """Return the similarity to the answer, 0 to 1 (difflib's ratio)."""
        return difflib.SequenceMatcher(None, trace.last_reply, self.data.answer).ratio()

    @vf.metric
    async def exact_match(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    def load(self) -> Iterator[ReverseTextTask]:
        """Yield the tasks. Strings whose letters add up to a multiple of 16 are held out."""
        config, rng, seen = self.config, random.Random(0), set[str]()
        while len(seen) < config.num_tasks:
            length = rng.randint(config.min_length, config.max_length)
            text = "".join(rng.choices(LETTERS, k=length))
            if text in seen or (sum(map(ord, text)) % 16 == 0) != config.held_out:
                continue
            data = ReverseTextData(
                idx=len(seen), prompt=config.instruction + text, answer=text[::-1]
            )
            seen.add(text)
            yield ReverseTextTask(data, config.task)


def demonstrations(num: int, seed: int, noise: float) -> list[dict]:
    """Make demonstrations for warm_start.py: strings and their reversals. Each letter of a
    reversal is replaced by a random one with probability `noise`.
    """
    rng = random.Random(seed)
    conversations = []
    for _ in range(num):
        text = "".join(rng.choices(LETTERS, k=rng.randint(3, 8)))
        answer = "".join(rng.choice(LETTERS) if rng.random() < noise else c for c in text[::-1])
        roles = (("user", text), ("assistant", answer))
        conversations.append({"messages": [{"role": r, "content": c} for r, c in roles]})
    return conversations
