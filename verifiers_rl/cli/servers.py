"""What `vf-rl` starts again when it dies: servers, one or several, and a node's rollout workers."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from verifiers_rl.cli import env_workers
from verifiers_rl.cli.children import Child, answers, ended_early
from verifiers_rl.cli.config import RunConfig
from verifiers_rl.cli.node_meeting import NodeError
from verifiers_rl.inference.client import InferenceClient
from verifiers_rl.inference.port import RESERVED_VARIABLE

MAX_RESTARTS = 5  # in a row, without an answer of the server in between
BACKOFF_S = 1.0  # before the first restart, doubled before each further one
SERVERS_VARIABLE = "VERIFIERS_RL_SERVERS"  # tells the trainer where several servers are


class SupervisedServer:
    """One `vf-vllm`.

    Args:
        name: in front of its output.
        what: what messages call it.
        command: see `plan.server_command`.
        env: what its environment has besides ours.
        log: a file for its output, or None.

    Attributes:
        is_given_up: it has died too often.
    """

    def __init__(
        self,
        name: str,
        what: str,
        command: list[str],
        env: dict[str, str],
        client: InferenceClient,
        log: Path | None,
    ) -> None:
        self.name, self.what, self.client, self.log = name, what, client, log
        self._command = command
        # We have reserved its port, also for restarts.
        self._env = {**env, RESERVED_VARIABLE: str(client.port)}
        self.child = self._start()
        self.is_given_up = False
        self._was_ready, self._num_deaths = False, 0
        self._start_at: float | None = None

    def _start(self) -> Child:
        return Child(self.name, self._command, self._env, self.log, inherit=False)

    def look(self, config: RunConfig) -> None:
        """Start it again some time after its death.

        Raises:
            InferenceServerError: it ended before it was ready for the first time.
        """
        if self.is_given_up:
            return
        if self._start_at is not None:
            if time.monotonic() >= self._start_at:
                self._start_at = None
                self.child = self._start()
            return
        if self.child.process.poll() is None:
            if (self._num_deaths or not self._was_ready) and answers(self.client):
                self._was_ready, self._num_deaths = True, 0
            return
        if not self._was_ready:
            raise ended_early(self.child, self.log, config)
        self.child.stop()  # ends vLLM's own children too, if they outlive it
        self._num_deaths += 1
        ended = f"{self.what} ended with status {self.child.process.returncode}"
        if self._num_deaths > MAX_RESTARTS:
            print(f"vf-rl: {ended} and is not restarted; see its log", file=sys.stderr)
            self.is_given_up = True
            return
        delay_s = BACKOFF_S * 2.0 ** (self._num_deaths - 1)
        # A new line: the trainer's progress bar may be in the middle of one.
        print(f"\nvf-rl: {ended}; starting it again in {delay_s:g} s", flush=True)
        self._start_at = time.monotonic() + delay_s


class SupervisedWorkers:
    """The process that keeps the rollout workers of a node that does not train.

    Args:
        command: see `plan.workers_command`.
        env: what its environment has besides ours.
    """

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._command, self._env = command, env
        self._num_deaths = 0
        self.child = self._start()

    def _start(self) -> Child:
        return Child("env", self._command, self._env, None, inherit=False)

    def look(self) -> None:
        """Start it again if a signal has ended it.

        Raises:
            NodeError: it has ended by itself, or too often. Only workers that cannot start here
                end the run; others cost their own work.
        """
        if self.child.process.poll() is None:
            return
        self.child.stop()
        status = self.child.process.returncode
        self._num_deaths += 1
        if status >= 0 or self._num_deaths > MAX_RESTARTS:
            raise NodeError(
                f"the rollout workers of this node ended with status {status}; see their output",
                does_not_start=status >= 0 and status != env_workers.LOST,
            )
        print(f"\nvf-rl: a signal ({-status}) ended the rollout workers; starting them again")
        self.child = self._start()


def servers_of_vf_rl() -> list[str] | None:
    """Return the addresses of the servers that `vf-rl` has started, if they are several."""
    given = os.environ.get(SERVERS_VARIABLE)
    return given.split() if given else None


def log_of(log: Path, number: int, num_servers: int) -> Path:
    """Return the file for the output of one of several servers: server-1.log for server.log."""
    return log if num_servers == 1 else log.with_stem(f"{log.stem}-{number}")


def cores_of_replicas(num_replicas: int, num_workers: int) -> list[str]:
    """Divide the first half of this machine's cores among the servers, on a CPU: the value of
    VLLM_CPU_OMP_THREADS_BIND of each.
    """
    from verifiers_rl.inference.server import server_cores

    cores = sorted(os.sched_getaffinity(0))
    chunks = server_cores(cores, num_replicas * num_workers).split("|")
    return ["|".join(chunks[i * num_workers : (i + 1) * num_workers]) for i in range(num_replicas)]
