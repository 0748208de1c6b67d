"""Rollouts at several servers: each rollout gets a server when it begins, and keeps it.

RoutedEnvironment ── run_group(..., RoutedSlots) ──►  an environment in this process:
                                                        each rollout enters the slots, and its
                                                        task then has a `Lease`
                                                      rollout workers:
                                                        the request has a server for each
                                                        rollout; `GroupLeases` answers a worker
                                                        whose server is lost
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from verifiers_rl.inference import Lease, ServerLostError, current_lease
from verifiers_rl.types import EnvRunner, Progress, Rollout, Slots, Split


class Router(Protocol):
    """Chooses servers: see `inference.pool.ReplicaPool`."""

    def take(self, policy_version: int) -> str: ...
    def release(self, url: str) -> None: ...
    def report_lost(self, url: str) -> None: ...
    def call_when_lost(self, callback: Callable[[str], None]) -> None: ...


class RoutedEnvironment:
    """An `EnvRunner` whose rollouts use the servers that a router chooses.

    An `EnvRunner` of a user's own gets the server by entering `slots`, which then gives a `Lease`.

    Args:
        env: runs the groups.
        router: chooses the servers.
    """

    def __init__(self, env: EnvRunner, router: Router) -> None:
        self._env, self._router = env, router
        self._leases: set[Lease | GroupLeases] = set()  # those in use
        self._loop: asyncio.AbstractEventLoop | None = None
        router.call_when_lost(self._on_lost)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._env.open()

    async def close(self) -> None:
        self._loop = None
        await self._env.close()

    async def run_group(
        self,
        split: Split,
        index: int,
        num_rollouts: int,
        model: str,
        sampling_args: dict[str, Any],
        policy_version: int,
        slots: Slots | Progress,
    ) -> list[Rollout]:
        routed: Any = RoutedSlots(slots, self._router, self._leases, policy_version)
        return await self._env.run_group(
            split, index, num_rollouts, model, sampling_args, policy_version, routed
        )

    def _on_lost(self, url: str) -> None:
        """On any thread: end the requests that wait for this server."""

        def lose() -> None:
            for lease in list(self._leases):
                lease.lose(url)

        if (loop := self._loop) is not None:
            loop.call_soon_threadsafe(lose)


def find_other(router: Router, url: str, policy_version: int) -> str | None:
    """Take another server for a rollout that has lost this one; None if there is none."""
    router.report_lost(url)
    try:
        return router.take(policy_version)
    except ServerLostError:
        return None


class RoutedSlots:
    """The slots of one group, which also give each of its rollouts a server."""

    def __init__(
        self,
        slots: Slots | Progress,
        router: Router,
        leases: set[Lease | GroupLeases],
        policy_version: int,
    ) -> None:
        self._slots, self._router, self._leases = slots, router, leases
        self._policy_version = policy_version

    async def __aenter__(self) -> Lease:
        await self._slots.__aenter__()
        try:
            url = self._router.take(self._policy_version)
        except BaseException:
            await self._slots.__aexit__(None, None, None)
            raise

        async def other(lost: str) -> str | None:
            found = find_other(self._router, lost, self._policy_version)
            if found is not None:
                self._router.release(lost)
            return found

        lease = Lease(url, self._policy_version, other)
        self._leases.add(lease)
        current_lease.set(lease)
        return lease

    async def __aexit__(self, *error: Any) -> None:
        lease = current_lease.get()
        assert lease is not None
        current_lease.set(None)
        self._leases.discard(lease)
        self._router.release(lease.url)
        await self._slots.__aexit__(*error)

    @asynccontextmanager
    async def several(self, num: int) -> AsyncIterator[GroupLeases]:
        """Do as `Slots.several`. The function that it gives has the servers of the rollouts too."""
        async with self._slots.several(num) as end_one:
            group = GroupLeases(self._router, self._policy_version, num, end_one)
            self._leases.add(group)
            try:
                yield group
            finally:
                self._leases.discard(group)
                group.release_all()


class GroupLeases:
    """The servers of a group's rollouts, which run in another process.

    Args:
        num: rollouts in the group.
        end_one: frees the slot of a rollout that has ended.

    Attributes:
        urls: of the servers that its rollouts use now.
    """

    def __init__(
        self, router: Router, policy_version: int, num: int, end_one: Callable[[], None]
    ) -> None:
        self._router, self._policy_version, self._end_one = router, policy_version, end_one
        self._num, self._tell_lost = num, lambda url: None
        self.urls: list[str] = []

    def begin(self, tell_lost: Callable[[str], None]) -> list[str]:
        """The group begins, perhaps again: return a server for each of its rollouts.

        Args:
            tell_lost: tells the process that runs the group that a server is lost.

        Raises:
            ServerLostError: there is no server.
        """
        self.release_all()
        self._tell_lost = tell_lost
        for _ in range(self._num):
            self.urls.append(self._router.take(self._policy_version))
        return list(self.urls)

    def __call__(self, url: str | None = None) -> None:
        """A rollout at this server has ended."""
        if url in self.urls:
            self.urls.remove(url)
            self._router.release(url)
        self._end_one()

    def move(self, url: str) -> str | None:
        """Return another server for a rollout that has lost this one; None if there is none."""
        other = find_other(self._router, url, self._policy_version)
        if other is not None:
            self.urls.append(other)
            if url in self.urls:
                self.urls.remove(url)
                self._router.release(url)
        return other

    def lose(self, url: str) -> None:
        if url in self.urls:
            self._tell_lost(url)

    def release_all(self) -> None:
        urls, self.urls = self.urls, []
        for url in urls:
            self._router.release(url)
