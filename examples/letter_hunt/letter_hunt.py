"""A game as an environment of `verifiers.v1`: find a secret letter in at most 5 guesses.

Each user turn names the range that holds the secret, such as "c-v". A wrong guess in the range
narrows it; a guess outside leaves it unchanged. The only reward comes at the end: 1 if the letter
was found. Nothing is downloaded.
"""

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["LetterHuntEnv", "LetterHuntTaskset"]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MIN_LETTERS = 16  # in the range of a game
NUM_GUESSES = 5  # enough for all 26 letters by halving
NUM_HELD_OUT = 256  # of all 1276 games


class LetterHuntConfig(vf.TasksetConfig):
    instruction: str = (
        "Find the secret letter. I tell you a range that holds it, such as c-v; you guess one "
        "letter of it. Answer with this letter only.\n\n"
    )
    held_out: bool = False
    """Load the games for evaluation instead; none of them is a training game."""


class LetterHuntData(vf.TaskData):
    letters: str
    """The range at the beginning, such as "cdefghijklmnopqrstuv"."""
    secret: str


class LetterHuntTask(vf.Task[LetterHuntData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def won(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.secret)

    @vf.metric
    async def legal(self, trace: vf.Trace) -> float:
        """Return the share of guesses that are in the range."""
        letters, num_legal = self.data.letters, 0
        guesses = [message.content or "" for message in trace.assistant_messages]
        for guess in guesses:
            num_legal += is_inside(guess, letters)
            letters = narrow(letters, guess, self.data.secret)
        return num_legal / max(len(guesses), 1)


class LetterHuntTaskset(vf.Taskset[LetterHuntTask, LetterHuntConfig]):
    def load(self) -> Iterator[LetterHuntTask]:
        """Yield the games. A game is a range and the secret in it."""
        games = all_games()
        random.Random(0).shuffle(games)
        chosen = games[:NUM_HELD_OUT] if self.config.held_out else games[NUM_HELD_OUT:]
        for idx, (letters, secret) in enumerate(chosen):
            prompt = self.config.instruction + as_text(letters)
            data = LetterHuntData(idx=idx, prompt=prompt, letters=letters, secret=secret)
            yield LetterHuntTask(data, self.config.task)


class LetterHuntEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class LetterHuntEnv(vf.Env[LetterHuntEnvConfig]):
    async def run(self, task: LetterHuntTask, agents: vf.Agents) -> None:
        """Narrow the range until the letter is found or `NUM_GUESSES` guesses are made."""
        letters, secret = task.data.letters, task.data.secret
        async with agents.player.interaction(task) as game:
            reply = await game.turn()  # the answer to the task's prompt
            for _ in range(NUM_GUESSES - 1):
                if reply.terminated or reply.last_reply == secret:
                    break
                letters = narrow(letters, reply.last_reply, secret)
                reply = await game.turn(as_text(letters))


def all_games() -> list[tuple[str, str]]:
    """Return the letters of the range, and the secret, of each possible game."""
    ranges = [
        LETTERS[start:stop]
        for start in range(len(LETTERS))
        for stop in range(start + MIN_LETTERS, len(LETTERS) + 1)
    ]
    return [(letters, secret) for letters in ranges for secret in letters]


def is_inside(guess: str, letters: str) -> bool:
    return len(guess) == 1 and guess in letters


def narrow(letters: str, guess: str, secret: str) -> str:
    """Return the range that is left after a guess."""
    if not is_inside(guess, letters) or guess == secret:
        return letters
    before, after = letters.split(guess)
    return before if secret in before else after


def as_text(letters: str) -> str:
    return f"{letters[0]}-{letters[-1]}"


def demonstrations(num: int, seed: int, noise: float) -> list[dict]:
    """Make demonstrations for warm_start.py: games in which a guess is the middle of the range or,
    with probability `noise`, a random letter.
    """
    rng = random.Random(seed)
    conversations = []
    for letters, secret in rng.choices(all_games(), k=num):
        messages = []
        for _ in range(NUM_GUESSES):
            middle = letters[len(letters) // 2]
            guess = rng.choice(LETTERS) if rng.random() < noise else middle
            messages.append({"role": "user", "content": as_text(letters)})
            messages.append({"role": "assistant", "content": guess})
            if guess == secret:
                break
            letters = narrow(letters, guess, secret)
        conversations.append({"messages": messages})
    return conversations
