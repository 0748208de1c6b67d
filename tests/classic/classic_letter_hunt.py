"""The game of examples/letter_hunt as a classic environment, for tests: find a secret letter in at
most 5 guesses.

Each user turn names the range that holds the secret, such as "c-v". A wrong guess in the range
narrows it; a guess outside leaves it unchanged. The only reward comes at the end: 1 if the letter
was found.
"""

import random

import verifiers as vf
from datasets import Dataset

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MIN_LETTERS = 16  # in the range of a game
NUM_GUESSES = 5  # enough for all 26 letters by halving

Game = tuple[str, str]  # the letters of the range, and the secret


def all_games() -> list[Game]:
    ranges = [
        LETTERS[start:stop]
        for start in range(len(LETTERS))
        for stop in range(start + MIN_LETTERS, len(LETTERS) + 1)
    ]
    return [(letters, secret) for letters in ranges for secret in letters]


def narrow(letters: str, guess: str, secret: str) -> str:
    """Return the range that is left after a wrong guess."""
    if len(guess) != 1 or guess not in letters:
        return letters
    before, after = letters.split(guess)
    return before if secret in before else after


def as_text(letters: str) -> str:
    return f"{letters[0]}-{letters[-1]}"


class LetterHuntEnv(vf.MultiTurnEnv):
    """Narrows the range until the letter is found or max_turns guesses are made."""

    async def setup_state(self, state: vf.State) -> None:
        state["letters"] = state["info"]["letters"]
        state["guesses_inside"] = 0

    async def add_trajectory_step(self, state: vf.State, trajectory_step: vf.TrajectoryStep):
        await super().add_trajectory_step(state, trajectory_step)
        guess = trajectory_step["completion"][-1].content
        state["guesses_inside"] += len(guess) == 1 and guess in state["letters"]
        state["found"] = guess == state["answer"]
        if not state["found"]:
            state["letters"] = narrow(state["letters"], guess, state["answer"])

    @vf.stop
    async def letter_found(self, state: vf.State) -> bool:
        return state.get("found", False)

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        return [vf.UserMessage(content=as_text(state["letters"]))]


def won(state: vf.State) -> float:
    return float(state["found"])


def legal(state: vf.State) -> float:
    return state["guesses_inside"] / len(state["trajectory"])


def make_split(games: list[Game]) -> Dataset:
    return Dataset.from_dict(
        {
            "question": [as_text(letters) for letters, _ in games],
            "answer": [secret for _, secret in games],
            "info": [{"letters": letters} for letters, _ in games],
        }
    )


def load_environment(num_eval: int = 256, seed: int = 0) -> vf.Environment:
    """Reward: 1 if the letter was found, else 0. Metric: legal, the share of guesses in the range.

    A game is a range and the secret in it. No game of the held-out split is in the training split.
    """
    games = all_games()
    random.Random(seed).shuffle(games)
    return LetterHuntEnv(
        max_turns=NUM_GUESSES,
        dataset=make_split(games[num_eval:]),
        eval_dataset=make_split(games[:num_eval]),
        rubric=vf.Rubric(funcs=[won, legal], weights=[1.0, 0.0]),
    )
