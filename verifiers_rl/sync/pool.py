"""The inference servers of a trainer, one or several. Each is a replica of the same model.

    lost       it does not answer, or does not have the weights any more
    found      it answers, and gets the weights with the next push
    serving    it has the weights, its logprobs were compared with the trainer's, it gets rollouts

           answers           push, compared
    lost ──────────► found ─────────────────► serving
     ▲                 │ no answer               │ no answer
     └─────────────────┴─────────────────────────┘

A new rollout goes to the serving replica with the fewest running rollouts, and stays there. One
that a rollout could not reach is in doubt, and comes last until it has answered again. If a replica
is lost, its rollouts begin again at others. If all are lost, the trainer waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from verifiers_rl.inference import InferenceClient, InferenceServerError, ServerLostError
from verifiers_rl.process.waiting import wait_until
from verifiers_rl.sync.sources import choose_lora_sync
from verifiers_rl.sync.weight_sync import WeightSync, push_to_all

logger = logging.getLogger(__name__)

POLL_S = 2.0  # between two looks at a replica
# Before a lost connection is made anew. What has broken it, a proxy perhaps, may need seconds.
PAUSE_S = 5.0
# Pushes of each connection after which both sides are compared. The first one shows whether the
# server has the trainer's model. An adapter changes nothing before the first step, nor in it where
# a warmup begins at a learning rate of 0, so only the third one shows whether the server applies it
# as the trainer does.
NUM_COMPARED = 3


@dataclass(eq=False)
class Replica:
    """One server of the pool. `ServerPool` changes it, under its lock.

    Attributes:
        sync: weights to this server; None while it is lost. One that comes back gets a new one.
        policy_version: of the weights that it serves; None until it serves.
        is_in_doubt: a rollout could not reach it, and it has not answered since.
        num_running: rollouts that it has now.
        error: by which it was lost.
    """

    client: InferenceClient
    sync: WeightSync | None = None
    policy_version: int | None = None
    is_in_doubt: bool = False
    num_running: int = 0
    error: InferenceServerError | None = None

    @property
    def url(self) -> str:
        return self.client.base_url


def least_loaded(replicas: Sequence[Replica]) -> Replica:
    """Return the one with the fewest running rollouts, one in doubt only where all are."""
    return min(replicas, key=lambda one: (one.is_in_doubt, one.num_running))


class ServerPool:
    """The `WeightSink` of a trainer. Rollouts ask it which server they use.
    All methods except `push` and `wait_for_server` may be called from any thread.

    Args:
        clients: one for each server.
        make_sync: makes the `WeightSync` of a server that answers, from its client and what to send
            with LoRA.
        check_status: raises InferenceServerError if a server of this URL and status is not what the
            run needs. Called when it is found.
        check_agreement: compares the logprobs of trainer and server: takes the model, the server's
            client and the model's name there. Raises InferenceServerError if they differ. Called
            after each of the first three pushes over a connection, before the server serves them.
        lora_sync: see `RLConfig`; "auto" is decided by the first server that answers.
        timeout_s: how long to wait for servers, at the start and when all are lost.

    Attributes:
        policy_version: of the last push; None if the servers need the weights again.
        model_name: the model name in rollout requests, from the first push on.
        sleeps: a server can leave its GPU's memory to the trainer between pushes.
        on_lost: called with the URL of each server that is lost, on any thread.
    """

    def __init__(
        self,
        clients: Sequence[InferenceClient],
        make_sync: Callable[..., WeightSync] = WeightSync,
        check_status: Callable[[str, dict[str, Any]], None] = lambda *_: None,
        check_agreement: Callable[[nn.Module, InferenceClient, str], None] = lambda *_: None,
        lora_sync: Literal["auto", "adapter", "merged"] = "auto",
        timeout_s: float = 300.0,
    ) -> None:
        self.replicas = [Replica(client) for client in clients]
        self.lora_sync = lora_sync
        self.timeout_s = timeout_s
        self.policy_version: int | None = None
        self.model_name = ""
        self.sleeps = False
        self._make_sync = make_sync
        self._check_status, self._check_agreement = check_status, check_agreement
        self._facts: dict[str, Any] = {}  # in which all servers are alike
        self.on_lost: Callable[[str], None] = lambda url: None
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._watching: list[threading.Thread] = []

    # --- For the trainer --------------------------------------------------------------------------

    def wait_until_ready(self) -> dict[str, Any]:
        """Wait until all servers answer, or until `timeout_s` has passed and one does. Return the
        status of the first that does.

        Raises:
            InferenceServerError: none has answered, or one is another server than the run needs, or
                is not `vf-vllm`, or the token is wrong.
            Interrupted: a signal asks the run to end.
        """
        answers = self._wait_for(len(self.replicas))
        if missing := [one.url for one in self.replicas if one.sync is None]:
            logger.warning(
                f"no server at {', '.join(missing)} after {self.timeout_s:g} s "
                f"(vllm_server_timeout); the run begins with the other {len(answers)}. A server "
                "that comes later gets the weights with the next push"
            )
        return answers[0]

    def wait_for_server(self) -> None:
        """Wait until a server answers. The next push connects again.

        Raises:
            InferenceServerError: see `wait_until_ready`.
            Interrupted: a signal asks the run to end.
        """
        for replica in self._serving():
            self._lose(replica, replica.sync, ServerLostError("all servers connect again"))
        self.policy_version = None  # so that the trainer pushes again
        torch.cuda.empty_cache()  # one that starts again on this GPU needs the room
        wait_until(lambda: False, "another attempt", PAUSE_S)
        self._wait_for(1)

    def _wait_for(self, number: int) -> list[dict[str, Any]]:
        """Ask the servers until `number` of them have answered, or `timeout_s` has passed and one
        has. Return their status, in the order in which they came. Raises as `wait_until_ready`.
        """
        answers, missing = list[dict[str, Any]](), [*self.replicas]

        def ask() -> bool:
            for replica in [*missing]:
                with suppress(ServerLostError):
                    answers.append(self._find(replica))
                    missing.remove(replica)
            return len(answers) >= number

        where = ", ".join(replica.url for replica in missing)
        limit = f"{self.timeout_s:g} s"
        wait_until(ask, f"the server at {where}, {limit} at most,", self.timeout_s)
        if not answers:
            raise InferenceServerError(
                f"no server at {where} after {limit} (vllm_server_timeout). "
                "`vf-rl train.py` starts one for a script; or start one with "
                f"`vf-vllm --model ... --port {missing[0].client.port}`, or set vllm_server_host "
                "and vllm_server_port, or vllm_servers for several"
            )
        return answers

    def push(self, model: nn.Module, policy_version: int) -> dict[str, float]:
        """Replace the policy of all replicas that answer; return once they have the weights. One
        that fails is left out, and the others go on.

        Returns:
            `sync_s` seconds, `sync_bytes` bytes sent to all replicas together, and `num_servers`
            replicas that serve now.

        Raises:
            ServerLostError: no replica has taken the weights.
            InferenceServerError: a server refused them, or is another one than the trainer's model
                needs, and no other one serves, or none has served yet.
        """
        start = time.monotonic()
        is_first = self.model_name == ""
        # Read once: another thread may lose one meanwhile.
        pushed = [(one, sync) for one in self.replicas if (sync := one.sync) is not None]
        if not pushed:
            raise self._error_of_all()
        self.policy_version, num_bytes = None, 0
        if self.sleeps:
            torch.cuda.empty_cache()  # the servers take their memory again
        errors = push_to_all([sync for _, sync in pushed], model, policy_version)
        for (replica, sync), error in zip(pushed, errors, strict=True):
            try:
                if error is not None:
                    raise error
                self.model_name = sync.model_name
                if sync.num_pushes <= NUM_COMPARED:
                    self._check_agreement(model, replica.client, self.model_name)
            except InferenceServerError as error:
                if is_first and not isinstance(error, ServerLostError):
                    raise  # at the start, what is wrong with a server is the user's to mend
                self._lose(replica, sync, error)
                continue
            num_bytes += sync.plan.num_bytes
            with self._lock:
                if replica.sync is sync:
                    replica.policy_version, replica.is_in_doubt = policy_version, False
                else:  # lost meanwhile; what it has connected anew would keep its successor out
                    sync.close()
        serving = self._serving()
        if not serving:
            raise self._error_of_all()
        self.policy_version = policy_version
        self._watch()
        return {
            "sync_s": time.monotonic() - start,
            "sync_bytes": float(num_bytes),
            "num_servers": float(len(serving)),
        }

    def sleep(self) -> None:
        """Let the servers leave their GPU's memory to the trainer until the next push. All have
        --enable-sleep-mode, and no rollout runs.
        """
        for replica in self._serving():
            sync = replica.sync
            try:
                if sync is not None:
                    sync.sleep()
            except InferenceServerError as error:
                self._lose(replica, sync, error)

    def check_server(self) -> None:
        """Look at all replicas that serve. Returns if one of them has the weights of the last push.

        Raises:
            ServerLostError: none has.
            InferenceServerError: none has, and waiting would not help.
        """
        with ThreadPoolExecutor(len(self.replicas)) as threads:
            list(threads.map(self._poll, self._serving()))
        if not self._serving():
            raise self._error_of_all()

    def close(self) -> None:
        """Release all servers; the next push connects again."""
        self._stop.set()
        for thread in self._watching:
            thread.join()
        self._watching, self.policy_version = [], None
        for replica in self.replicas:
            replica.policy_version = None
            if (sync := replica.sync) is not None:
                sync.close()

    def _serving(self) -> list[Replica]:
        return [one for one in self.replicas if one.policy_version is not None]

    def _error_of_all(self) -> InferenceServerError:
        """Return why no server serves. If one may come back, it is a ServerLostError."""
        errors = [one.error for one in self.replicas if one.error is not None]
        is_final = errors and not any(isinstance(error, ServerLostError) for error in errors)
        kind = InferenceServerError if is_final else ServerLostError
        return kind("; ".join(map(str, errors)) or "no server has the weights yet")

    # --- For rollouts -----------------------------------------------------------------------------

    def take(self, policy_version: int) -> str:
        """Return the URL of the server for a new rollout, and count the rollout there.

        It is a server of this policy version or a later one, with the fewest running rollouts; one
        in doubt where all are: a request that every server answers with an error has that effect.

        Raises:
            ServerLostError: no replica has this version.
        """
        with self._lock:
            able = [one for one in self._serving() if (one.policy_version or 0) >= policy_version]
            if not able:
                raise ServerLostError(
                    f"no server has version {policy_version} of the policy: {self._error_of_all()}"
                )
            replica = least_loaded(able)
            replica.num_running += 1
            return replica.url

    def release(self, url: str, is_lost: bool = False) -> None:
        """A rollout has left this server. If it could not reach the server, new rollouts go to
        others until the server has answered the pool.
        """
        with self._lock:
            for replica in self.replicas:
                if replica.url == url:
                    replica.num_running -= 1
                    replica.is_in_doubt |= is_lost

    # --- Looking at the replicas ------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at all replicas in the background, each on a thread of its own, because one that
        hangs answers only at its deadline.
        """
        self._stop.clear()

        def watch(replica: Replica) -> None:
            while not self._stop.wait(POLL_S):
                self._poll(replica)

        for replica in self.replicas[len(self._watching) :]:
            thread = threading.Thread(target=watch, args=(replica,), name="replica", daemon=True)
            thread.start()
            self._watching.append(thread)

    def _poll(self, replica: Replica) -> None:
        sync = replica.sync
        try:
            if sync is None or replica.policy_version is None:
                self._find(replica)
            else:
                self._take_in(sync.check_server()["joined"])
        except InferenceServerError as error:
            is_news = str(error) != str(replica.error)
            if sync is None and is_news and not isinstance(error, ServerLostError):
                logger.warning(f"the server at {replica.url} cannot be used: {error}")
                replica.error = error
            self._lose(replica, sync, error)
        else:
            with self._lock:
                replica.is_in_doubt &= replica.sync is not sync

    def _take_in(self, joined: Sequence[tuple[str, int]]) -> None:
        """Add the servers of these addresses, which a server has named: Ray may have placed a lost
        one anew.
        """
        for host, port in joined:
            new = Replica(InferenceClient(host, port))
            with self._lock:
                if new.url in {replica.url for replica in self.replicas}:
                    continue
                self.replicas = [*self.replicas, new]
            logger.warning(f"the server at {new.url} joins the run")
            self._poll(new)

    def _find(self, replica: Replica) -> dict[str, Any]:
        """Take in a replica that answers; return its status.

        Raises:
            ServerLostError: it does not answer.
            InferenceServerError: it is another server than the run needs.
        """
        status = replica.client.status()
        if replica.sync is not None:
            return status
        facts = {name: status[name] for name in ("served_model_name", "dtype", "lora_dtype")}
        self._facts = self._facts or facts
        if facts != self._facts:
            raise InferenceServerError(
                f"the server at {replica.url} has {facts}, the first one {self._facts}; start all "
                "servers with the same --model, --dtype and --lora-dtype"
            )
        self.lora_sync = choose_lora_sync(self.lora_sync, status)
        self.sleeps |= status.get("sleeps", False)
        self._check_status(replica.url, status)
        with self._lock:
            if replica.sync is not None:
                return status  # another thread has found it meanwhile
            replica.sync = self._make_sync(replica.client, lora_sync=self.lora_sync)
        if self.policy_version is not None:
            logger.warning(
                f"the server at {replica.url} answers; it gets the weights with the next push"
            )
        return status

    def _lose(self, replica: Replica, sync: WeightSync | None, error: InferenceServerError) -> None:
        """Leave out a replica, unless it is another one by now than the caller has looked at."""
        with self._lock:
            if sync is None or replica.sync is not sync:
                return
            replica.sync, replica.policy_version, replica.error = None, None, error
            replica.is_in_doubt = False
        if self._serving():
            logger.warning(
                f"{error}; its {replica.num_running} rollouts begin again at the other servers"
            )
        sync.close()
        self.on_lost(replica.url)
