"""Which server a rollout should use: sticky and least loaded against round robin and hashing.

    python benchmarks/routing.py [--servers 8] [--rollouts 4096] [--concurrent 512] [--seeds 5]

A simulation in virtual time, without a network. The servers are stand-ins; the function that
chooses for "sticky, least loaded" is `sync.pool.least_loaded`, with which the pool routes.

    rollout   1 to 8 turns (uniform). The reply of each turn has lognormal tokens, the tool result
              after it 200. The prompt has 500.
    server    A reply's token takes TOKEN_S alone and TOKEN_S * (1 + n / BATCH) beside n others, as
              decoding is bound by memory first and by arithmetic later. Tokens of a prompt that are
              not in the server's prefix cache cost PREFILL_S each before that. The cache keeps
              CACHE tokens, the latest used.

The servers together always have `--concurrent` rollouts until the last have begun.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from verifiers_rl.sync.pool import Replica, least_loaded

TOKEN_S, BATCH, PREFILL_S, CACHE = 0.015, 64, 0.0001, 400_000
PROMPT, TOOL, MEDIAN, SIGMA = 500, 200, 200, 1.0


class Server:
    """Requests share its time; how fast each goes on depends on how many there are."""

    def __init__(self) -> None:
        self.left: dict[int, float] = {}  # seconds alone that each request still needs
        self.now, self.version = 0.0, 0
        self.cache: OrderedDict[int, int] = OrderedDict()  # tokens, by rollout

    def advance(self, now: float) -> None:
        done = (now - self.now) / (1 + max(len(self.left) - 1, 0) / BATCH)
        self.left = {request: left - done for request, left in self.left.items()}
        self.now, self.version = now, self.version + 1

    def next_end(self) -> tuple[float, int]:
        request = min(self.left, key=self.left.__getitem__)
        slowdown = 1 + (len(self.left) - 1) / BATCH
        return self.now + max(self.left[request], 0.0) * slowdown, request

    def cached(self, rollout: int, num_tokens: int) -> bool:
        """Whether all tokens so far are in the cache."""
        return self.cache.get(rollout, 0) >= num_tokens

    def keep(self, rollout: int, num_tokens: int) -> None:
        self.cache[rollout] = num_tokens
        self.cache.move_to_end(rollout)
        while sum(self.cache.values()) > CACHE:
            self.cache.popitem(last=False)


def simulate(
    pick: Callable[[int, int, list[Replica]], int], options: Any, seed: int
) -> tuple[list[float], float, float]:
    """Run all rollouts.

    Args:
        pick: takes rollout, turn and the replicas, and returns the server of this turn.

    Returns:
        Seconds of each rollout, the share of turns after the first whose server has the prefix, and
        the seconds of all.
    """
    rng = np.random.default_rng(seed)
    random.seed(seed)
    num_turns = rng.integers(1, 9, options.rollouts)
    replies = [rng.lognormal(np.log(MEDIAN), SIGMA, n).astype(int) + 1 for n in num_turns]
    servers = [Server() for _ in range(options.servers)]
    replicas = [Replica(SimpleNamespace(base_url=str(n))) for n in range(options.servers)]  # type: ignore[arg-type]
    for replica in replicas:
        replica.policy_version = 0
    events: list[tuple[float, int, int, int]] = []  # time, server, its version, rollout
    turn = [0] * options.rollouts
    where = [-1] * options.rollouts
    context = [PROMPT] * options.rollouts
    began = [0.0] * options.rollouts
    took: list[float] = []
    num_later = num_found = 0
    waiting = iter(range(options.rollouts))

    def expect(number: int) -> None:
        if servers[number].left:
            at, request = servers[number].next_end()
            heapq.heappush(events, (at, number, servers[number].version, request))

    def request(rollout: int, now: float) -> None:
        nonlocal num_later, num_found
        number = pick(rollout, turn[rollout], replicas)
        if where[rollout] != number:
            if where[rollout] >= 0:
                replicas[where[rollout]].num_running -= 1
            replicas[number].num_running += 1
            where[rollout] = number
        server = servers[number]
        num_known = context[rollout] - TOOL if turn[rollout] else 0
        is_found = turn[rollout] > 0 and server.cached(rollout, num_known)
        if turn[rollout]:
            num_later, num_found = num_later + 1, num_found + is_found
        num_new = context[rollout] - (num_known if is_found else 0)
        length = int(replies[rollout][turn[rollout]])
        server.advance(now)
        server.left[rollout] = num_new * PREFILL_S + length * TOKEN_S
        context[rollout] += length
        server.keep(rollout, context[rollout])
        expect(number)

    def begin(now: float) -> None:
        if (rollout := next(waiting, None)) is not None:
            began[rollout] = now
            request(rollout, now)

    for _ in range(options.concurrent):
        begin(0.0)
    now = 0.0
    while events:
        now, number, version, rollout = heapq.heappop(events)
        server = servers[number]
        if version != server.version:
            continue
        server.advance(now)
        del server.left[rollout]
        expect(number)
        context[rollout] += TOOL
        turn[rollout] += 1
        if turn[rollout] < num_turns[rollout]:
            request(rollout, now)
        else:
            replicas[where[rollout]].num_running -= 1
            took.append(now - began[rollout])
            begin(now)
    return took, num_found / max(num_later, 1), now


def ways(num_servers: int) -> dict[str, Callable[[int, int, list[Replica]], int]]:
    sticky: dict[int, int] = {}
    turns, rollouts = itertools.count(), itertools.count()
    mine: dict[int, int] = {}

    def sticky_least_loaded(rollout: int, turn: int, replicas: list[Replica]) -> int:
        if turn == 0:
            sticky[rollout] = replicas.index(least_loaded(replicas))
        return sticky[rollout]

    def round_robin_of_rollouts(rollout: int, turn: int, replicas: list[Replica]) -> int:
        if turn == 0:
            mine[rollout] = next(rollouts) % num_servers
        return mine[rollout]

    return {
        "sticky, least loaded": sticky_least_loaded,
        "round robin of requests": lambda *_: next(turns) % num_servers,
        "round robin of rollouts": round_robin_of_rollouts,
        "hash of the rollout": lambda rollout, *_: random.Random(rollout).randrange(num_servers),
        "least loaded, each request": lambda rollout, turn, replicas: min(
            range(num_servers), key=lambda n: replicas[n].num_running
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("servers", 8), ("rollouts", 4096), ("concurrent", 512), ("seeds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print("| | mean (s) | p90 (s) | all (s) | turns with their prefix |")
    print("| --- | --- | --- | --- | --- |")
    for name in ways(options.servers):
        rows = []
        for seed in range(options.seeds):
            took, share, end = simulate(ways(options.servers)[name], options, seed)
            rows.append((np.mean(took), np.quantile(took, 0.9), end, share))
        mean, p90, end, share = np.mean(rows, axis=0)
        print(f"| {name} | {mean:.1f} | {p90:.1f} | {end:.0f} | {share:.1%} |", flush=True)


if __name__ == "__main__":
    main()
