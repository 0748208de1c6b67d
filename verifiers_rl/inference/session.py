"""What the requests of one rollout share: their server, their seeds and their deadline.

All turns of a rollout use one server, because that server has the rollout's tokens so far in its
prefix cache. If the server is lost, the whole rollout begins again with another session, see
`requests.GroupRequest.play`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


class SessionLostError(RuntimeError):
    """The server of a rollout is lost, or has another policy than the rollout needs."""


def derive_seed(*parts: int | str) -> int:
    """Return a seed from 0 to 2**63 - 1 that follows from these parts and their order."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(eq=False)
class RolloutSession:
    """The server, the seeds and the deadline of one rollout.

    Args:
        policy_version: all tokens must be of this version of the policy, or of a later one.
        url: of the server, without /v1. None: all rollouts use one server, which their client
            knows.
        group_seed: seed of its group; None: its requests have no seeds of ours.
        number: of the rollout in its group.

    Attributes:
        is_lost: the server does not answer, or has lost the policy; the rollout must begin again.
        deadline: by the event loop's clock, while the code inside `limited` runs.
        has_passed: whether the deadline has ended the code inside `limited`.
    """

    policy_version: int
    url: str | None = None
    group_seed: int | None = None
    number: int = 0
    is_lost: bool = False
    deadline: float | None = None
    has_passed: bool = False
    _num_seeds: int = 0
    _requests: set[asyncio.Timeout] = field(default_factory=set)

    @asynccontextmanager
    async def limited(self, timeout_s: float) -> AsyncIterator[RolloutSession]:
        """Inside, the rollout has this deadline. Raises TimeoutError when it has passed."""
        self.deadline = asyncio.get_running_loop().time() + timeout_s
        timeout = asyncio.timeout_at(self.deadline)
        try:
            async with timeout:
                yield self
        finally:
            # Requests that score it have no deadline of the rollout.
            self.deadline, self.has_passed = None, timeout.expired()

    def next_seed(self) -> int | None:
        """Return the seed of the rollout's next request."""
        if self.group_seed is None:
            return None
        self._num_seeds += 1
        return derive_seed(self.group_seed, self.number, self._num_seeds)

    def fail(self) -> None:
        """Mark the server as lost, and end the requests that wait for it. Without effect if there
        is only one server. On the event loop.
        """
        self.is_lost = self.url is not None
        for request in self._requests if self.is_lost else ():
            if not request.expired():
                request.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """For one request. It ends with SessionLostError when the server is lost."""
        lost = SessionLostError(f"the server at {self.url} is lost")
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

    def check_versions(self, spans: list[tuple[int, int]]) -> None:
        """Raise SessionLostError unless the server says that a policy which is new enough has
        sampled every token of its reply. A single server is not asked, because the orchestrator
        looks at it.

        Args:
            spans: (first token, policy version) pairs; none if the server said nothing.
        """
        if self.url is None:
            return
        if spans and spans[0][0] == 0 and min(v for _, v in spans) >= self.policy_version:
            return
        raise SessionLostError(
            f"the server at {self.url} replied with versions {spans} of the policy, not with "
            f"{self.policy_version}: has it started anew?"
        )
