"""Which of several servers a rollout uses: the same one for all of its turns, because that server
has the rollout's tokens so far in its prefix cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar

MAX_MOVES = 3  # of one rollout, to other servers


class LeaseLostError(RuntimeError):
    """The server of a rollout is lost, or has another policy than the rollout needs."""


class Lease:
    """A rollout's place at a server.

    Args:
        url: of the server, without /v1.
        policy_version: all tokens must be of this version of the policy, or of a later one.
        find_other: takes the URL of a lost server, and returns another one's, or None.

    Attributes:
        is_lost: the server does not answer, or has lost the policy.
        has_failed: a request of the rollout has failed by that, so the rollout must begin again.
        num_moves: how often the rollout has begun again at another server.
    """

    def __init__(
        self, url: str, policy_version: int, find_other: Callable[[str], Awaitable[str | None]]
    ) -> None:
        self.url = url
        self.policy_version = policy_version
        self.is_lost = False
        self.has_failed = False
        self.num_moves = 0
        self._find_other = find_other
        self._requests: set[asyncio.Timeout] = set()

    def lose(self, url: str) -> None:
        """If the server at this URL is the rollout's, mark it as lost, and end the requests that
        wait for it. On the event loop.
        """
        if url != self.url:
            return
        self.is_lost = True
        for request in self._requests:
            if not request.expired():
                request.reschedule(asyncio.get_running_loop().time())

    def fail(self) -> None:
        """Mark the server as lost, and let the rollout begin again."""
        self.has_failed = True
        self.lose(self.url)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """For one request. It ends with LeaseLostError when the server is lost."""
        lost = LeaseLostError(f"the server at {self.url} is lost")
        if self.is_lost:
            raise lost
        request = asyncio.timeout(None)
        self._requests.add(request)
        try:
            async with request:
                yield
        except TimeoutError:
            if request.expired():
                raise lost from None
            raise
        finally:
            self._requests.discard(request)

    def check_versions(self, spans: list[tuple[int, int]] | None) -> None:
        """Raise LeaseLostError unless the server says that a policy which is new enough has sampled
        every token of its reply.

        Args:
            spans: (first token, policy version) pairs; None if the server said nothing.
        """
        if spans and spans[0][0] == 0 and min(v for _, v in spans) >= self.policy_version:
            return
        said = f"versions {sorted({v for _, v in spans})}" if spans else "no version"
        raise LeaseLostError(
            f"the server at {self.url} replied with {said} of the policy, not with version "
            f"{self.policy_version}: has it started anew?"
        )

    async def move(self) -> bool:
        """Take another server if the rollout must begin again. Return whether it has one.

        Raises:
            LeaseLostError: there is no other server, or the rollout has moved `MAX_MOVES` times.
        """
        if not self.has_failed:
            return False
        url = await self._find_other(self.url) if self.num_moves < MAX_MOVES else None
        if url is None:
            moves = f" after {self.num_moves} moves" if self.num_moves else ""
            raise LeaseLostError(
                f"the server at {self.url} is lost, and no other one is there{moves}"
            )
        self.url, self.is_lost, self.has_failed = url, False, False
        self.num_moves += 1
        return True


# Of the rollout that runs in this task, or in one that it has started; None with one server.
current_lease: ContextVar[Lease | None] = ContextVar("lease", default=None)
