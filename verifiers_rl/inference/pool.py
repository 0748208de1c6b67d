"""Several `vf-vllm` servers for one trainer. Each of them is a replica of the same model.

    joining    it answers, and gets the weights with the next push
    synced     it has the weights; its logprobs are still to be compared with the trainer's
    serving    it has the weights, and gets rollouts
    draining   a rollout could not reach it: it gets no new rollouts until it has answered again
    dead       it does not answer, or it has lost the weights

         push                compared              a rollout lost it
    joining ──► synced ──────────────► serving ◄──────────────────────► draining
       ▲           │ no answer            │ no answer                      │ no answer
       └── dead ◄──┴──────────────────────┴────────────────────────────────┘
      it answers again

A new rollout goes to the serving replica with the fewest running rollouts, and stays there. If a
replica dies, its rollouts begin again at others. If all die, the trainer waits, as with one server.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any, Literal

from verifiers_rl.inference.client import InferenceClient, InferenceServerError, ServerLostError
from verifiers_rl.process.waiting import WaitingLine

logger = logging.getLogger(__name__)

LOOK_S = 2.0  # between two looks at a replica


class State(StrEnum):
    JOINING = "joining"
    SYNCED = "synced"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"


ALIVE_WITH_WEIGHTS = (State.SYNCED, State.SERVING, State.DRAINING)


class Replica:
    """One server of the pool. `ReplicaPool` changes it, under its lock.

    Attributes:
        sync: weights to this server; None while it is dead. One that comes back gets a new one.
        policy_version: of the weights that it has; None before the first push.
        num_running: rollouts that it has now.
        is_checked: its logprobs were compared with the trainer's.
        has_served: it was serving once.
    """

    def __init__(self, client: InferenceClient) -> None:
        self.client = client
        self.url = client.base_url
        self.sync: Any = None
        self.state = State.DEAD
        self.policy_version: int | None = None
        self.num_running = 0
        self.is_checked = False
        self.has_served = False
        self.wake = threading.Event()  # look at it now


def choose(replicas: Sequence[Replica], policy_version: int) -> Replica | None:
    """Return the replica for a new rollout: of those that serve this policy version or a later one,
    one with the fewest running rollouts. Return None if there is none.
    """
    able = [
        one
        for one in replicas
        if one.state == State.SERVING and (one.policy_version or 0) >= policy_version
    ]
    fewest = min((one.num_running for one in able), default=0)
    return random.choice([one for one in able if one.num_running == fewest] or [None])


class ReplicaPool:
    """The `WeightSink` of a trainer with several servers. Rollouts ask it which server they use.
    All methods except `push` and `wait_for_server` may be called from any thread.

    Args:
        clients: one for each server.
        make_sync: makes the `WeightSync` of a server that answers.
        push_to_all: `sync.push_to_all`.
        check: compares the logprobs of trainer and server: takes the model, the server's client and
            the model's name there. Raises InferenceServerError if they differ. None: nothing is
            compared, as for a model that is split over ranks.
        timeout_s: how long to wait for servers, at the start and when all are lost.
        make_client: makes the client of a server that joins the run: Ray has placed a lost one
            anew, at another address.
    """

    def __init__(
        self,
        clients: Sequence[InferenceClient],
        make_sync: Callable[[InferenceClient], Any],
        push_to_all: Callable[..., list[Exception | None]],
        check: Callable[[Any, InferenceClient, str], None] | None,
        timeout_s: float,
        make_client: Callable[..., InferenceClient] = InferenceClient,
    ) -> None:
        self._make_client = make_client
        self._make_sync, self._push_to_all, self._check = make_sync, push_to_all, check
        self.timeout_s = timeout_s
        self.replicas = [Replica(client) for client in clients]
        self.policy_version: int | None = None
        self._on_lost: list[Callable[[str], None]] = []
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._watching: list[threading.Thread] = []

    # --- As the trainer knows a weight sync -------------------------------------------------------

    @property
    def lora_sync(self) -> Literal["adapter", "merged"]:
        return self._any_sync().lora_sync

    @property
    def model_name(self) -> str:
        return self._any_sync().model_name

    def _any_sync(self) -> Any:
        """Return that of a replica that serves, or else of one that answers."""
        with self._lock:  # another thread may lose one meanwhile
            able = [one for one in self.replicas if one.state != State.DEAD]
            able.sort(key=lambda one: one.state != State.SERVING)
            if able:
                return able[0].sync
        raise ServerLostError(f"none of the servers answers: {self._describe()}")

    def push(
        self, model: Any, policy_version: int, in_flight: Literal["recompute", "keep"]
    ) -> dict[str, float]:
        """Replace the policy of all replicas that answer; return once they have the weights. One
        that fails is left out, and the others go on.

        Returns:
            `sync_s` seconds, `sync_bytes` bytes sent to all replicas together, and `num_servers`
            replicas that serve now.

        Raises:
            ServerLostError: no replica has taken the weights.
            InferenceServerError: a server that has never served refused them, or is another one
                than the trainer's model needs.
        """
        start = time.monotonic()
        self._take_in_joined()
        with self._lock:  # another thread may lose one meanwhile
            pushed = [(one, one.sync) for one in self.replicas if one.state != State.DEAD]
        if not pushed:
            raise ServerLostError(f"none of the servers answers: {self._describe()}")
        syncs = [sync for _, sync in pushed]
        try:
            errors = self._push_to_all(syncs, model, policy_version, in_flight)
        except BaseException:
            self.policy_version = None
            raise
        num_bytes = 0.0
        for (replica, sync), error in zip(pushed, errors, strict=True):
            is_first = not any(one.has_served for one in self.replicas)
            if error is not None and is_first and not isinstance(error, ServerLostError):
                raise error  # at the start, what is wrong with a server is the user's to mend
            if error is not None:
                self._lose(replica, sync, str(error))
                continue
            num_bytes += sync.plan.num_bytes
            with self._lock:
                if is_ours := replica.sync is sync:
                    replica.policy_version = policy_version
                    if replica.state == State.JOINING:
                        replica.state = State.SYNCED
            if is_ours:
                self._begin_to_serve(replica, sync, model)
            else:  # lost meanwhile
                sync.close()  # what it has connected anew would keep its successor out
        num_serving = sum(one.state == State.SERVING for one in self.replicas)
        if not num_serving:
            self.policy_version = None
            lost = [e for e in errors if isinstance(e, ServerLostError)]
            raise lost[0] if lost else ServerLostError(f"no server serves: {self._describe()}")
        self.policy_version = policy_version
        self._watch()
        return {
            "sync_s": time.monotonic() - start,
            "sync_bytes": num_bytes,
            "num_servers": float(num_serving),
        }

    def _take_in_joined(self) -> None:
        """Add the servers that have announced themselves to one that serves."""
        known = {one.url for one in self.replicas}
        for replica in [one for one in self.replicas if one.state == State.SERVING]:
            try:
                joined = replica.client.status().get("joined", [])
            except ServerLostError:
                continue  # its next look says so
            for host, port in joined:
                new = Replica(self._make_client(host, port))
                if new.url in known:
                    continue
                known.add(new.url)
                logger.warning("the server at %s joins the run", new.url)
                with self._lock:
                    self.replicas = [*self.replicas, new]
                try:
                    self._look_for(new)
                except InferenceServerError as error:  # the run goes on without it
                    logger.warning("the server at %s cannot be used: %s", new.url, error)

    def _begin_to_serve(self, replica: Replica, sync: Any, model: Any) -> None:
        """Compare the logprobs of a replica that is new, then let it serve."""
        if replica.state != State.SYNCED:
            return
        try:
            name = sync.model_name
            if name != self.model_name:
                raise InferenceServerError(
                    f"the server at {replica.url} serves {name!r}, another one serves "
                    f"{self.model_name!r}; start all servers with the same --model"
                )
            if self._check is not None and not replica.is_checked:
                self._check(model, replica.client, name)
        except InferenceServerError as error:
            is_first = not any(one.has_served for one in self.replicas)
            if is_first and not isinstance(error, ServerLostError):
                raise
            self._lose(replica, sync, str(error))
            return
        with self._lock:
            if replica.state == State.SYNCED and replica.sync is sync:
                replica.is_checked = True
                replica.state, replica.has_served = State.SERVING, True

    def check_server(self) -> None:
        """Look at all replicas that serve. Returns if one of them has the weights of the last push.

        Raises:
            ServerLostError: none has.
        """
        with self._lock:
            serving = [one for one in self.replicas if one.state in ALIVE_WITH_WEIGHTS]
        if serving:
            with ThreadPoolExecutor(len(serving)) as threads:
                list(threads.map(self._look_at, serving))
        if not any(one.state == State.SERVING for one in self.replicas):
            raise ServerLostError(f"no server has the policy any more: {self._describe()}")

    def wait_for_server(self) -> None:
        """Wait until a server answers. The next push connects again.

        Raises:
            InferenceServerError: none did within `timeout_s`.
            Interrupted: a signal asks the run to end.
        """
        for replica in self.replicas:
            if replica.state in ALIVE_WITH_WEIGHTS:
                self._lose(replica, replica.sync, "all servers are connected again")
        self.policy_version = None  # so that the trainer pushes again
        self._wait_for(1)

    def wait_until_ready(self) -> dict[str, Any]:
        """Wait until all servers answer, or until `timeout_s` has passed and one does. Return the
        status of the first that does.

        Raises:
            InferenceServerError: none did within `timeout_s`, or a server is not `vf-vllm`, or the
                token is wrong.
        """
        self._wait_for(len(self.replicas))
        missing = [one.url for one in self.replicas if one.state == State.DEAD]
        if missing:
            logger.warning(
                "no server at %s after %g s (vllm_server_timeout); the run begins with the other "
                "%d. A server that comes later gets the weights with the next push",
                ", ".join(missing),
                self.timeout_s,
                len(self.replicas) - len(missing),
            )
        first = next(one for one in self.replicas if one.state != State.DEAD)
        return first.client.status()

    def check_models(self, config: Any) -> None:
        """Raise InferenceServerError if a server that answers has another model than this one."""
        for replica in self.replicas:
            if replica.state != State.DEAD:
                replica.client.check_model(config)

    def _wait_for(self, number: int) -> None:
        deadline = time.monotonic() + self.timeout_s
        num_known = 0

        def describe() -> str:
            return (
                f"{number - num_known} of {len(self.replicas)} servers, {self.timeout_s:g} s "
                "at most,"
            )

        with WaitingLine(describe) as line:
            while True:
                for replica in self.replicas:
                    if replica.state == State.DEAD:
                        self._look_for(replica)
                num_known = sum(one.state != State.DEAD for one in self.replicas)
                if num_known >= number:
                    return
                line.show()
                if time.monotonic() >= deadline:
                    if num_known:
                        return
                    raise InferenceServerError(
                        f"no server at {', '.join(one.url for one in self.replicas)} after "
                        f"{self.timeout_s:g} s (vllm_server_timeout). Start them with `vf-vllm`, "
                        "or set vllm_servers"
                    )
                # Nothing to await: the servers are other processes that may not exist yet.
                time.sleep(0.25)

    def _look_for(self, replica: Replica) -> None:
        try:
            self._found(replica)
        except ServerLostError:
            pass  # it is not there yet

    def close(self) -> None:
        """Release all servers; the next push connects again."""
        self._stop.set()
        for replica in self.replicas:
            replica.wake.set()
        for thread in self._watching:
            thread.join()
        self._watching = []
        self.policy_version = None
        for replica in self.replicas:
            with self._lock:
                if replica.state in ALIVE_WITH_WEIGHTS:
                    replica.state = State.JOINING
            if replica.sync is not None:
                replica.sync.close()

    # --- For rollouts -----------------------------------------------------------------------------

    def take(self, policy_version: int) -> str:
        """Return the URL of the server for a new rollout, and count the rollout there.

        Raises:
            ServerLostError: no replica serves this version.
        """
        with self._lock:
            replica = choose(self.replicas, policy_version)
            if replica is None:
                raise ServerLostError(
                    f"no server has version {policy_version} of the policy: {self._describe()}"
                )
            replica.num_running += 1
            return replica.url

    def release(self, url: str) -> None:
        """A rollout has left this server."""
        with self._lock:
            for replica in self.replicas:
                if replica.url == url:
                    replica.num_running -= 1

    def report_lost(self, url: str) -> None:
        """A rollout could not reach this server. No new rollout goes there until it has answered
        the pool.
        """
        with self._lock:
            for replica in self.replicas:
                if replica.url == url and replica.state == State.SERVING:
                    replica.state = State.DRAINING
                    replica.wake.set()

    def call_when_lost(self, callback: Callable[[str], None]) -> None:
        """Call this with the URL of each server that is lost from now on, on any thread."""
        self._on_lost.append(callback)

    # --- Looking at the replicas ------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at all replicas in the background, each on a thread of its own, because one that
        hangs answers only at its deadline.
        """
        self._stop.clear()
        for replica in self.replicas[len(self._watching) :]:
            thread = threading.Thread(
                target=self._watch_one, args=(replica,), name="replica", daemon=True
            )
            self._watching.append(thread)
            thread.start()

    def _watch_one(self, replica: Replica) -> None:
        while not self._stop.is_set():
            replica.wake.wait(LOOK_S)
            replica.wake.clear()
            if not self._stop.is_set():
                self._look_at(replica)

    def _look_at(self, replica: Replica) -> None:
        with self._lock:
            state, sync = replica.state, replica.sync
        try:
            if state in ALIVE_WITH_WEIGHTS:
                sync.check_server()
                with self._lock:
                    if replica.state == State.DRAINING and replica.sync is sync:
                        replica.state = State.SERVING
            else:
                self._found(replica)
        except InferenceServerError as error:
            if state != State.DEAD:
                self._lose(replica, sync, str(error))

    def _found(self, replica: Replica) -> None:
        """Take in a replica that answers. Raises ServerLostError if it does not."""
        replica.client.status()
        if replica.state != State.DEAD:
            return
        sync = self._make_sync(replica.client)
        with self._lock:
            if replica.state != State.DEAD:
                return  # another thread has found it meanwhile
            replica.sync, replica.state = sync, State.JOINING
        if self.policy_version is not None:
            logger.warning(
                "the server at %s answers%s; it gets the weights with the next push",
                replica.url,
                " again" if replica.has_served else "",
            )

    def _lose(self, replica: Replica, sync: Any, reason: str) -> None:
        """Leave out a replica, unless it is another one by now than the caller has looked at."""
        with self._lock:
            if replica.sync is not sync or replica.state == State.DEAD:
                return
            replica.state = State.DEAD
            replica.policy_version, replica.is_checked = None, False
            replica.sync = None
            num_running = replica.num_running
        if self.policy_version is not None:
            logger.warning(
                "%s; its %d rollouts begin again at the other servers", reason, num_running
            )
        sync.forget_server()
        sync.close()
        for callback in self._on_lost:
            callback(replica.url)

    def _describe(self) -> str:
        return ", ".join(f"{one.url} is {one.state}" for one in self.replicas)
