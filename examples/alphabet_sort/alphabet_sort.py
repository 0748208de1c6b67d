"""A multi-turn `verifiers` environment: keep a growing set of letters in alphabetical order.

Each user turn adds letters; each answer must be all letters so far, sorted. Data is generated;
nothing is downloaded.
"""

import difflib
import random
from itertools import accumulate

import verifiers as vf
from datasets import Dataset

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_TURNS = 3
LETTERS_PER_TURN = 2


def make_conversations(
    num: int, seed: int, exclude: frozenset[str] = frozenset()
) -> list[list[str]]:
    """Make `num` conversations: the letters that each user turn adds, all different.

    No two conversations have the same set of letters. None has a set that is in `exclude`, whose
    elements are sorted letters.
    """
    rng = random.Random(seed)
    conversations: dict[str, list[str]] = {}
    while len(conversations) < num:
        letters = "".join(rng.sample(LETTERS, NUM_TURNS * LETTERS_PER_TURN))
        if (key := in_order(letters)) not in exclude:
            starts = range(0, len(letters), LETTERS_PER_TURN)
            conversations[key] = [letters[i : i + LETTERS_PER_TURN] for i in starts]
    return list(conversations.values())


def in_order(letters: str) -> str:
    return "".join(sorted(letters))


def right_answers(turns: list[str]) -> list[str]:
    """Return the right answer of each turn: all letters so far, sorted."""
    return [in_order(letters) for letters in accumulate(turns)]


def demonstrations(num: int, seed: int, noise: float) -> list[dict]:
    """Make demonstrations for ../warm_start.py: conversations with the right answers, in which each
    letter is replaced by a random one with probability `noise`.
    """
    rng = random.Random(seed)
    conversations = []
    for turns in make_conversations(num, seed):
        messages = []
        for added, right in zip(turns, right_answers(turns), strict=True):
            said = "".join(rng.choice(LETTERS) if rng.random() < noise else c for c in right)
            messages.append({"role": "user", "content": added})
            messages.append({"role": "assistant", "content": said})
        conversations.append({"messages": messages})
    return conversations


class AlphabetSortEnv(vf.MultiTurnEnv):
    """The user adds the next letters, whatever the assistant answered."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        added = state["info"]["turns"][len(state["trajectory"])]
        return [vf.UserMessage(content=added)]


def make_split(conversations: list[list[str]]) -> Dataset:
    return Dataset.from_dict(
        {
            "question": [turns[0] for turns in conversations],
            "info": [{"turns": turns} for turns in conversations],
        }
    )


def load_environment(num_train: int = 4096, num_eval: int = 256, seed: int = 0) -> vf.Environment:
    """Reward: similarity of an answer to the right one, 0 to 1 (difflib's ratio), mean over turns.
    Metric: exact, whether all turns are right.

    No conversation of the held-out split has the same letters as one of the training split.
    """
    held_out = make_conversations(num_eval, seed + 1)
    exclude = frozenset(in_order("".join(turns)) for turns in held_out)
    train = make_conversations(num_train, seed, exclude)

    def answers(completion: vf.Messages, info: dict) -> list[tuple[str, str]]:
        """Return what was said and what is right, for each turn."""
        said = [message.content for message in completion if message.role == "assistant"]
        return list(zip(said, right_answers(info["turns"]), strict=True))

    def similarity(completion: vf.Messages, info: dict) -> float:
        ratios = [
            difflib.SequenceMatcher(None, *pair).ratio() for pair in answers(completion, info)
        ]
        return sum(ratios) / NUM_TURNS

    def exact(completion: vf.Messages, info: dict) -> float:
        return float(all(said == right for said, right in answers(completion, info)))

    return AlphabetSortEnv(
        max_turns=NUM_TURNS,
        dataset=make_split(train),
        eval_dataset=make_split(held_out),
        rubric=vf.Rubric(funcs=[similarity, exact], weights=[1.0, 0.0]),
    )
