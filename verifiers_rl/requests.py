"""One request: what the orchestrator asks of an environment, and what it gives for it. And many
requests at once: those of a batch, in which a group that the filter rejects is replaced.

Orchestrator ── GroupRequest ──►  EnvRunner.run_group ──► each rollout:
                                      async with request.begin(number) as session:
                                          its model calls, with this session
             ◄── list[Rollout] ──
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from verifiers_rl.inference import RolloutSession, SessionLostError
from verifiers_rl.process.loop_thread import gather_or_cancel
from verifiers_rl.process.terminal import describe_error
from verifiers_rl.types import Rollout, Split

logger = logging.getLogger(__name__)

MAX_MOVES = 3  # of one rollout, to other servers
CHECK_S = 30.0  # between two checks of the server


@dataclass
class Progress:
    """Counts the rollouts of a batch or an evaluation.

    Attributes:
        num_requested: rollouts that were requested so far.
        num_done: rollouts that have ended.
        num_groups: groups that have ended.
    """

    num_requested: int = 0
    num_done: int = 0
    num_groups: int = 0

    def __str__(self) -> str:
        return f"{self.num_done} of {self.num_requested}"


@dataclass(frozen=True)
class GroupRequest:
    """What an environment needs to run the rollouts of one example.

    Attributes:
        split, index: the example. Examples are numbered consecutively over all environments.
        num_rollouts: rollouts to run, or episodes with a rollout for each agent.
        model: the model name in requests to the server.
        policy_version: version of tokens for which the server reports none.
        sampling_args: sampling options of a request, unless the environment has its own.
        places: gives each rollout a place and a server, as `Places` does; see `begin`.
        timeout_s: deadline of one rollout, seconds.
        seed: of the group, for `deterministic`; None: its requests have no seeds.
        progress: counts its rollouts.
    """

    split: Split
    index: int
    num_rollouts: int
    model: str
    policy_version: int
    sampling_args: dict[str, Any]
    places: Any
    timeout_s: float = 600.0
    seed: int | None = None
    progress: Progress = field(default_factory=Progress)

    @asynccontextmanager
    async def begin(self, number: int) -> AsyncIterator[RolloutSession]:
        """Hold a place for a rollout of the group while it uses the server. What is yielded goes to
        `ServerClient.of_rollout`.

        Args:
            number: of the rollout in its group.

        Raises:
            ServerLostError: there is no server.
        """
        async with self.places.take(self, number) as session:
            yield session
        self.progress.num_done += not session.is_lost  # else it begins again

    async def play(
        self, number: int, play: Callable[[RolloutSession], Awaitable[list[Rollout]]]
    ) -> list[Rollout]:
        """Play a rollout of the group in its place. If its server is lost, play all of it again in
        a new place at another server, also if the environment has gone on without its last reply.

        Args:
            number: of the rollout in its group.
            play: returns at least one rollout. What it waits for is inside `session.limited`.

        Raises:
            ServerLostError: there is no server.
        """
        rollouts: list[Rollout] = []
        lost: str | None = None
        for num_moves in range(MAX_MOVES + 1):
            async with self.begin(number) as session:
                if rollouts and session.url == lost:
                    break  # no other one is there
                rollouts, lost = await play(session), session.url
            for rollout in rollouts:
                rollout.num_moves = num_moves
                if session.has_passed and isinstance(rollout.error, TimeoutError):
                    rollout.error = TimeoutError(
                        f"a rollout took longer than generation_timeout ({self.timeout_s:g} s)"
                    )
            if not session.is_lost:
                return rollouts
        failed = rollouts[0]
        failed.error = failed.error or SessionLostError(
            f"the server at {lost} is lost, after {failed.num_moves} moves to others"
        )
        return [failed]


class Places:
    """Bounds the rollouts that use the server at a time, and gives each of them its session. On one
    event loop.

    Args:
        num: of rollouts at a time.
        router: chooses the server of each rollout, a `sync.ServerPool`; None: there is one server.
    """

    def __init__(self, num: int, router: Any = None) -> None:
        self._slots = asyncio.Semaphore(num)
        self._router = router
        self._sessions: set[RolloutSession] = set()  # those in use

    @asynccontextmanager
    async def take(self, request: GroupRequest, number: int) -> AsyncIterator[RolloutSession]:
        """Wait for a place of this rollout of the group, and hold it.

        Raises:
            ServerLostError: there is no server.
        """
        router, version = self._router, request.policy_version
        async with self._slots:
            url = router.take(version) if router is not None else None
            session = RolloutSession(version, url, request.seed, number)
            self._sessions.add(session)
            try:
                yield session
            finally:
                self._sessions.discard(session)
                if url is not None:
                    router.release(url, session.is_lost)

    def lose(self, url: str) -> None:
        """End the requests that wait for this server, which is lost."""
        for session in self._sessions:
            if session.url == url:
                session.fail()


class EnvRunner(Protocol):
    """Runs rollouts of one environment, or of several mixed. `RLTrainer(env=...)` takes an object
    with these members as it is; `envs/` has a class for each kind of environment.

    Examples are numbered consecutively over all its environments. A runner of several sets
    `Rollout.env` to the name of the environment, and `Rollout.example_id`. A runner ends each
    rollout at `GroupRequest.timeout_s`, and returns at least one rollout for a group. The run's
    `max_prompt_len` and `mask_env_responses` do not reach a runner that a user passes.

    Attributes:
        weights: share of the groups for each of its environments, up to a common factor.
    """

    weights: list[float]

    def sizes(self, split: Split) -> list[int]:
        """Return the size of this split in each environment; `data.ENDLESS` for a stream."""

    async def open(self) -> None:
        """Get ready. Called on the event loop that will run the groups."""

    async def close(self) -> None: ...

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run and score the rollouts of one example. An error fails only its own rollout, which
        gets it as `error`.
        """


class GroupScorer(Protocol):
    """Scores the training rollouts of one environment beside their rewards, as a teacher does.
    `WeightedEnv(scorer=...)` takes one.

    Attributes:
        longest_wait_s: a group may wait so long for it, beside the time of its rollouts.
    """

    longest_wait_s: float

    def connect(self, options: Any, args: Any, example: Any) -> None:
        """Learn of the run.

        Args:
            options: `envs.base.RunnerOptions` of the environment.
            args: the `RLConfig` with the environment's own sampling options.
            example: `async example(split, index)` returns the fields of an example; or None.
        """

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def score(self, group: Sequence[Rollout], request: GroupRequest) -> None:
        """Set `added_advantages` of rollouts that have not failed.

        Args:
            group: of one example.
            request: for which they were run; its `index` is that in the scorer's environment.
        """


# --- Many at once ---------------------------------------------------------------------------------


class RolloutError(RuntimeError):
    """No batch could be generated. The message says what failed most often, or what to change.

    Attributes:
        groups: those whose rollouts all failed.
        split: of their examples.
    """

    groups: Sequence[Sequence[Rollout]] = ()
    split: Split = "train"


async def run_groups(
    run: Callable[[int], Coroutine[Any, Any, list[Rollout]]],
    passes: Callable[[list[Rollout]], bool],
    examples: Iterable[int],
    num_groups: int,
    replace_until: float,
) -> list[tuple[list[Rollout], bool]]:
    """Run `num_groups` groups at once. When one is complete and does not pass, the group of the
    next example begins in its place. If one raises, or this is cancelled, the others are cancelled.

    Args:
        run: runs the group of an example.
        passes: says whether a complete group passes.
        examples: `num_groups` or more; no group begins when all are used.
        replace_until: event loop's time after which no replacement begins.

    Returns:
        All groups in the order of their examples, each with whether it passes.
    """
    unused = iter(enumerate(examples))
    complete: dict[int, tuple[list[Rollout], bool]] = {}

    async def fill_place() -> None:
        for number, example in unused:
            group = await run(example)
            complete[number] = group, (is_good := passes(group))
            if is_good or asyncio.get_running_loop().time() > replace_until:
                return

    await gather_or_cancel(fill_place() for _ in range(num_groups))
    return [complete[number] for number in sorted(complete)]


async def while_served(rollouts: Awaitable[Any], check_server: Callable[[], None]) -> Any:
    """Wait for rollouts and return their result. Check the server meanwhile, because no request
    fails if the server hangs or its machine is lost; and at the end, because a restarted server
    samples from the wrong weights.

    Raises:
        Whatever `check_server` or the rollouts raise.
    """
    waiting = asyncio.ensure_future(rollouts)
    try:
        while not (await asyncio.wait({waiting}, timeout=CHECK_S))[0]:
            await asyncio.to_thread(check_server)
        result = waiting.result()
        await asyncio.to_thread(check_server)
        return result
    finally:
        waiting.cancel()


def warn_of_failures(
    groups: Sequence[Sequence[Rollout]], split: Split = "train", may_all_fail: bool = False
) -> None:
    """Warn of rollouts of this split that failed. Raises RolloutError if all did and may not."""
    rollouts = [rollout for group in groups for rollout in group]
    errors = [rollout.error for rollout in rollouts if rollout.error is not None]
    kinds = Counter(describe_error(error) for error in errors)
    whose = " of the evaluation" if split == "eval" else ""
    if len(errors) == len(rollouts) and not may_all_fail:
        failure = RolloutError(
            f"all {len(rollouts)} rollouts{whose} failed; most often: "
            f"{kinds.most_common(1)[0][0]}. The first one's traceback is above"
        )
        failure.groups, failure.split = groups, split
        raise failure from errors[0]
    for kind, count in kinds.most_common():
        logger.warning(
            f"{count} of {len(rollouts)} rollouts{whose} failed and are left out: {kind}"
        )
