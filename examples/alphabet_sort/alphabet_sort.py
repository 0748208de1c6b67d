"""An environment of `verifiers.v1` with user turns: keep a growing set of letters in alphabetical
order.

Each user turn adds letters; each answer must be all letters so far, sorted. Data is generated;
nothing is downloaded.
"""

import difflib
import random
from collections.abc import Iterator
from itertools import accumulate

import verifiers.v1 as vf

__all__ = ["AlphabetSortEnv", "AlphabetSortTaskset"]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_TURNS = 3
LETTERS_PER_TURN = 2


class AlphabetSortConfig(vf.TasksetConfig):
    num_tasks: int = 4096
    instruction: str = (
        "You get letters, and then more letters. Answer each time with all letters so far in "
        "alphabetical order, as one word without spaces, and with nothing else.\n\n"
    )
    held_out: bool = False
    """Load the tasks for evaluation instead; none has the same letters as a training task."""


class AlphabetSortData(vf.TaskData):
    turns: list[str]
    """The letters that each user turn adds."""


class AlphabetSortTask(vf.Task[AlphabetSortData, vf.State, vf.TaskConfig]):
    def answers(self, trace: vf.Trace) -> list[tuple[str, str]]:
        """Return what was said and what is right, for each turn that was answered."""
        said = [message.content or "" for message in trace.assistant_messages]
        return list(zip(said, right_answers(self.data.turns), strict=False))

    @vf.reward
    async def similarity(self, trace: vf.Trace) -> float:
        """Return the similarity to the right answers, 0 to 1 (difflib's ratio), mean over turns."""
        pairs = self.answers(trace)
        return sum(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs) / NUM_TURNS

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        """Return 1 if the answers of all turns are right, else 0."""
        pairs = self.answers(trace)
        return float(len(pairs) == NUM_TURNS and all(said == right for said, right in pairs))


class AlphabetSortTaskset(vf.Taskset[AlphabetSortTask, AlphabetSortConfig]):
    def load(self) -> Iterator[AlphabetSortTask]:
        """Yield the tasks, all with different letters. Letters that add up to a multiple of 16 are
        held out.
        """
        config, rng, seen = self.config, random.Random(0), set[str]()
        while len(seen) < config.num_tasks:
            turns = make_turns(rng)
            letters = in_order("".join(turns))
            if letters in seen or (sum(map(ord, letters)) % 16 == 0) != config.held_out:
                continue
            prompt = config.instruction + turns[0]
            data = AlphabetSortData(idx=len(seen), prompt=prompt, turns=turns)
            seen.add(letters)
            yield AlphabetSortTask(data, config.task)


class AlphabetSortEnvConfig(vf.EnvConfig):
    sorter: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class AlphabetSortEnv(vf.Env[AlphabetSortEnvConfig]):
    async def run(self, task: AlphabetSortTask, agents: vf.Agents) -> None:
        """The user adds the next letters, whatever the agent answered."""
        async with agents.sorter.interaction(task) as chat:
            reply = await chat.turn()  # the answer to the task's prompt
            for added in task.data.turns[1:]:
                if reply.terminated:
                    break
                reply = await chat.turn(added)


def make_turns(rng: random.Random) -> list[str]:
    """Draw the letters that each user turn adds, all different."""
    letters = "".join(rng.sample(LETTERS, NUM_TURNS * LETTERS_PER_TURN))
    starts = range(0, len(letters), LETTERS_PER_TURN)
    return [letters[i : i + LETTERS_PER_TURN] for i in starts]


def in_order(letters: str) -> str:
    return "".join(sorted(letters))


def right_answers(turns: list[str]) -> list[str]:
    """Return the right answer of each turn: all letters so far, sorted."""
    return [in_order(letters) for letters in accumulate(turns)]


def demonstrations(num: int, seed: int, noise: float) -> list[dict]:
    """Make demonstrations for warm_start.py: conversations with the right answers, in which each
    letter is replaced by a random one with probability `noise`.
    """
    rng = random.Random(seed)
    conversations = []
    for _ in range(num):
        turns, messages = make_turns(rng), []
        for added, right in zip(turns, right_answers(turns), strict=True):
            said = "".join(rng.choice(LETTERS) if rng.random() < noise else c for c in right)
            messages.append({"role": "user", "content": added})
            messages.append({"role": "assistant", "content": said})
        conversations.append({"messages": messages})
    return conversations
