"""A `verifiers` environment: reverse a short string. Data is generated; nothing is downloaded."""

import difflib
import random

import verifiers as vf
from datasets import Dataset

LETTERS = "abcdefghijklmnopqrstuvwxyz"
INSTRUCTION = (
    "Reverse the following text character by character. Answer with the reversed text only.\n\n"
)


def make_texts(
    num_texts: int,
    min_length: int,
    max_length: int,
    seed: int,
    exclude: frozenset[str] = frozenset(),
):
    """Distinct random strings of lower-case letters, none of them in `exclude`."""
    rng = random.Random(seed)
    texts: dict[str, None] = {}
    while len(texts) < num_texts:
        text = "".join(rng.choices(LETTERS, k=rng.randint(min_length, max_length)))
        if text not in exclude:
            texts[text] = None
    return list(texts)


def make_split(texts: list[str], instruction: str) -> Dataset:
    return Dataset.from_dict(
        {"question": [instruction + text for text in texts], "answer": [t[::-1] for t in texts]}
    )


def demonstrations(num: int, seed: int, noise: float) -> list[dict]:
    """Texts and their reversal, its letters replaced by random ones with probability `noise`;
    for ../warm_start.py.
    """
    rng = random.Random(seed)
    conversations = []
    for text in make_texts(num, 3, 8, seed):
        answer = "".join(rng.choice(LETTERS) if rng.random() < noise else c for c in text[::-1])
        roles = (("user", text), ("assistant", answer))
        conversations.append({"messages": [{"role": r, "content": c} for r, c in roles]})
    return conversations


def load_environment(
    num_train: int = 4096,
    num_eval: int = 256,
    min_length: int = 3,
    max_length: int = 8,
    instruction: str = INSTRUCTION,
    seed: int = 0,
) -> vf.Environment:
    """Reward: similarity to the reversed text, 0 to 1 (difflib's ratio). Metric: exact match.

    The held-out split shares no string with the training split.
    """
    held_out = make_texts(num_eval, min_length, max_length, seed=seed + 1)
    train = make_texts(num_train, min_length, max_length, seed, exclude=frozenset(held_out))
    parser = vf.Parser()

    def similarity(completion, answer) -> float:
        return difflib.SequenceMatcher(None, parser.parse_answer(completion) or "", answer).ratio()

    def exact_match(completion, answer) -> float:
        return float((parser.parse_answer(completion) or "").strip() == answer)

    return vf.SingleTurnEnv(
        dataset=make_split(train, instruction),
        eval_dataset=make_split(held_out, instruction),
        parser=parser,
        rubric=vf.Rubric(funcs=[similarity, exact_match], weights=[1.0, 0.0], parser=parser),
    )
