"""Self-play as an environment of `verifiers.v1`: Kuhn poker, in which two agents with the same
weights play against each other, and both are trained.

Three cards, J < Q < K. Each player gets one and puts one chip into the pot. Player 0 begins; a move
is "p" (pass: check, or fold after a bet) or "b" (bet one more chip: bet, or call a bet). The game
ends as "pp", "bp", "bb", "pbp" or "pbb". A reply that is no move loses two chips. Nothing is
downloaded.
"""

import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Literal

import verifiers.v1 as vf

__all__ = ["KuhnEnv", "KuhnTaskset"]

CARDS = "JQK"
MOVES = "pb"
ENDS = ("pp", "bp", "bb", "pbp", "pbb")
WORST = -2  # chips


class KuhnConfig(vf.TasksetConfig):
    num_tasks: int = 2048
    instruction: str = (
        "You play Kuhn poker. There are three cards: J is lower than Q, Q is lower than K. Each "
        "of the two players has a card and one chip in the pot. A message is your card and the "
        "moves so far, such as Qpb. Answer with one letter: p to pass (a fold after a bet), or b "
        "to bet one chip more (a call after a bet)."
    )
    opponent: Literal["self", "random"] = "self"
    """random: the model plays one seat, and the other one moves at random. That shows progress: in
    self-play, what one seat wins the other one loses."""


class KuhnData(vf.TaskData):
    instruction: str
    cards: str
    """Of player 0 and player 1, such as "KJ"."""
    random_seat: int | None
    """The seat that moves at random, if there is one."""


class KuhnTask(vf.Task[KuhnData, vf.State, vf.TaskConfig]):
    pass


class KuhnTaskset(vf.Taskset[KuhnTask, KuhnConfig]):
    def load(self) -> Iterator[KuhnTask]:
        config, rng = self.config, random.Random(0)
        for idx in range(config.num_tasks):
            data = KuhnData(
                idx=idx,
                prompt=None,  # each player gets messages of its own
                instruction=config.instruction,
                cards="".join(rng.sample(CARDS, 2)),
                random_seat=None if config.opponent == "self" else idx % 2,
            )
            yield KuhnTask(data, config.task)


class KuhnEnvConfig(vf.EnvConfig):
    player0: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    player1: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class KuhnEnv(vf.Env[KuhnEnvConfig]):
    async def run(self, task: KuhnTask, agents: vf.Agents) -> None:
        data, moves = task.data, ""
        rng = random.Random(data.idx)
        seen = vf.TaskData(idx=data.idx, prompt=None, system_prompt=data.instruction or None)
        async with AsyncExitStack() as stack:
            players = {}
            for seat, agent in enumerate((agents.player0, agents.player1)):
                if seat != data.random_seat:
                    interaction = agent.interaction(vf.Task(seen))
                    players[seat] = await stack.enter_async_context(interaction)
            while moves not in ENDS:
                seat = len(moves) % 2
                if seat == data.random_seat:
                    move = rng.choice(MOVES)
                else:
                    reply = await players[seat].turn(data.cards[seat] + moves)
                    move = reply.last_reply
                moves += move if move in MOVES and len(move) == 1 else "?"
                if moves[-1] == "?":
                    break
        for seat, player in players.items():
            player.trace.record_reward("chips", float(chips_of(seat, data.cards, moves)))
            player.trace.record_metric("legal", float(moves[seat::2][-1:] != "?"))
            player.trace.record_metric("sound", float(is_sound(seat, data.cards, moves)))


def chips_of(seat: int, cards: str, moves: str) -> int:
    """Return the chips that a player has won at the end of a game."""
    if moves[-1] == "?":  # of the player who has moved last
        loser = (len(moves) - 1) % 2
        return WORST if seat == loser else -WORST
    if moves in ("bp", "pbp"):  # a fold, of the player who has moved last
        return -1 if seat == (len(moves) - 1) % 2 else 1
    at_stake = 2 if moves.endswith("bb") else 1
    return at_stake if cards[seat] == max(cards, key=CARDS.index) else -at_stake


def is_sound(seat: int, cards: str, moves: str) -> bool:
    """Return whether a player made none of the moves that are wrong whatever the other one has: to
    fold the K, and to call with the J. A reply that is no move is not sound either.
    """
    answers = [moves[at] for at in range(seat, len(moves), 2) if moves[:at].endswith("b")]
    wrong = {"J": "b", "Q": "", "K": "p"}[cards[seat]]
    return "?" not in moves[seat::2] and not any(move in wrong for move in answers)


def demonstrations(num: int, seed: int, noise: float) -> list[dict]:
    """Make demonstrations for warm_start.py: games of one player who moves at random or, with
    probability `noise`, answers with any letter.
    """
    rng = random.Random(seed)
    conversations = []
    for _ in range(num):
        card, moves, messages = rng.choice(CARDS), "", []
        seat = rng.randrange(2)
        while moves not in ENDS:
            move = rng.choice(MOVES)
            if len(moves) % 2 == seat:
                said = rng.choice("abcdefghijklmnopqrstuvwxyz") if rng.random() < noise else move
                messages.append({"role": "user", "content": card + moves})
                messages.append({"role": "assistant", "content": said})
            moves += move
        conversations.append({"messages": messages})
    return conversations
