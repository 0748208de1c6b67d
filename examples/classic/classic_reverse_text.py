"""A `verifiers` environment: reverse a short string. Data is generated; nothing is downloaded."""

import difflib
import random

import verifiers as vf
from datasets import Dataset

LETTERS = "abcdefghijklmnopqrstuvwxyz"
INSTRUCTION = (
    "Reverse the following text character by character. Answer with the reversed text only.\n\n"
)


def make_texts(num_texts: int, min_length: int, max_length: int, held_out: bool) -> list[str]:
    """Make distinct random strings, the same in the same order as ../reverse_text. Strings whose
    letters add up to a multiple of 16 are held out.
    """
    rng = random.Random(0)
    texts: dict[str, None] = {}
    while len(texts) < num_texts:
        text = "".join(rng.choices(LETTERS, k=rng.randint(min_length, max_length)))
        if (sum(map(ord, text)) % 16 == 0) == held_out:
            texts[text] = None
    return list(texts)


def make_split(texts: list[str], instruction: str) -> Dataset:
    return Dataset.from_dict(
        {"question": [instruction + text for text in texts], "answer": [t[::-1] for t in texts]}
    )


def load_environment(
    num_train: int = 4096,
    num_eval: int = 256,
    min_length: int = 3,
    max_length: int = 8,
    instruction: str = INSTRUCTION,
) -> vf.Environment:
    """Reward: similarity to the reversed text, 0 to 1 (difflib's ratio). Metric: exact match.

    The held-out split shares no string with the training split.
    """
    train = make_texts(num_train, min_length, max_length, held_out=False)
    held_out = make_texts(num_eval, min_length, max_length, held_out=True)
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
