"""Of the shape of verifiers' kuhn_poker: two agents play against each other, on tasks without end
that have no prompt of their own. Who says "fold" forfeits, also before the other has had a turn.
"""

import itertools
import random

import verifiers.v1 as vf

__all__ = ["DuelEnv", "DuelTaskset"]

CHAT = vf.AgentConfig(harness={"id": "null"})


class DuelData(vf.TaskData):
    seed: int


class DuelTask(vf.Task[DuelData]):
    pass


class DuelEnvConfig(vf.EnvConfig):
    player0: vf.AgentConfig = CHAT
    player1: vf.AgentConfig = CHAT


class DuelEnv(vf.Env[DuelEnvConfig]):
    async def run(self, task, agents):
        cards = random.Random(task.data.seed).sample("JQK", 2)
        tasks = [
            vf.Task(vf.TaskData(idx=task.data.idx, system_prompt=f"you have {card}"))
            for card in cards
        ]
        async with (
            agents.player0.interaction(tasks[0]) as first,
            agents.player1.interaction(tasks[1]) as second,
        ):
            bids = []
            for at, player in enumerate((first, second, first)):
                segment = await player.turn(f"bid {at}, after {bids[-1:]}")
                if segment.last_reply == "fold":
                    break
                bids.append(0 if segment.terminated else len(segment.last_reply))
        gain = float(bids[0] + bids[2] > bids[1]) if len(bids) == 3 else -9.0
        first.trace.record_reward("payoff", gain)
        second.trace.record_reward("payoff", -gain)


class DuelTaskset(vf.Taskset[DuelTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for i in itertools.count():
            yield DuelTask(DuelData(idx=i, seed=i), self.config.task)
