"""A taskset with tools: what do these things cost together? The prices are in a shop that only the
tools can see. Run as a program, it serves the tools over MCP. Nothing is downloaded."""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["PriceTaskset"]

PRICES = {"apple": 3, "bread": 7, "cheese": 12, "honey": 9, "lamp": 25, "pen": 2}


class Shop(vf.Toolset[vf.SharedToolsetConfig]):
    """One object for all rollouts, because it keeps nothing of a rollout."""

    TOOL_PREFIX = None  # the model sees `price`, not `shop_price`

    @vf.tool
    async def price(self, thing: str) -> str:
        """The price of one thing, in coins."""
        return str(PRICES[thing]) if thing in PRICES else f"the shop has no {thing}"


class PriceData(vf.TaskData):
    answer: int


class PriceTask(vf.Task[PriceData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right_sum(self, trace: vf.Trace) -> float:
        """Return 1 if the last number of the reply is right; some models think first."""
        return float(re.findall(r"\d+", trace.last_reply)[-1:] == [str(self.data.answer)])

    @vf.metric
    async def num_calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class PriceConfig(vf.TasksetConfig):
    num_tasks: int = 1024


class PriceTaskset(vf.Taskset[PriceTask, PriceConfig]):
    @classmethod
    def toolsets(cls, config: PriceConfig) -> list[vf.Toolset]:
        return [Shop(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[PriceTask]:
        rng = random.Random(0)
        for idx in range(self.config.num_tasks):
            first, second = rng.sample(sorted(PRICES), 2)
            prompt = f"What do one {first} and one {second} cost together? Answer with the number."
            answer = PRICES[first] + PRICES[second]
            yield PriceTask(PriceData(idx=idx, prompt=prompt, answer=answer), self.config.task)


if __name__ == "__main__":
    Shop.run()
