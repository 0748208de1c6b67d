"""Rollout workers of a machine where the trainer does not run.

this machine                                           the trainer's machine
WorkerHost ── connects, proves to know the secret ──►  WorkerPool
    │ starts, with the recipes and the connection
    ▼
worker process  ◄── examples, as JSON ──────────────   _RemoteWorker
                ─── Rollouts, as arrays ────────────►
"""

from __future__ import annotations

import math
import queue
import select
import socket
import subprocess
import threading
import time

from verifiers_rl.envs.messages import EnvWorkerError
from verifiers_rl.envs.worker_main import NOT_MADE
from verifiers_rl.envs.workers import (
    MAX_DEATHS,
    WorkerLostError,
    end_worker,
    kill_group,
    start_worker,
)
from verifiers_rl.process.connections import (
    HELLO_S,
    MeetingError,
    check_trainer,
    close_all,
    keep,
)

AGAIN_S = 1.0  # between two attempts to connect
PATIENCE_S = 120.0  # without the trainer, until a line says so
SHORT_S = 60.0  # a worker that lived for less has failed
CLOSE_S = 15.0  # for workers to end by themselves


class WorkerHost:
    """Keeps worker processes for a trainer on another machine. One that ends is started again, with
    a new connection.

    Args:
        address: host and port where the trainer waits for workers. Nobody may listen there yet.
        secret: see `workers.secret_of_workers`.
        setup: see `WorkerPool.setup`.
    """

    def __init__(self, address: tuple[str, int], secret: str, setup: bytes) -> None:
        self._address, self._secret, self._setup = address, secret, setup
        self._is_closing = threading.Event()
        self._problems: queue.SimpleQueue[EnvWorkerError | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: dict[int, tuple[socket.socket, subprocess.Popen[bytes]]] = {}

    def run(self, num_workers: int) -> None:
        """Keep so many workers, until `close` or an error.

        Raises:
            EnvWorkerError: what listens there does not know the secret, or the environments cannot
                be made here.
            WorkerLostError: workers only die.
        """
        for number in range(num_workers):
            # The threads live as long as their processes, which Linux ends with them.
            thread = threading.Thread(target=self._keep_one, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()
        problem = self._problems.get()
        if problem is not None:
            raise problem

    def close(self) -> None:
        """End the workers, and what they have started."""
        self._is_closing.set()
        self._problems.put(None)
        close_all([connection for connection, _ in list(self._running.values())])
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        for _, process in list(self._running.values()):
            kill_group(process)

    def _keep_one(self, number: int) -> None:
        num_deaths, has_served = 0, False
        while (connection := self._connect(number)) is not None:
            began = time.monotonic()
            try:
                status: int | None = self._run_one(number, connection)
            except (OSError, subprocess.TimeoutExpired) as error:
                print(f"rollout worker {number}: {error}", flush=True)
                status = None
            finally:
                self._running.pop(number, None)
                close_all([connection])
            if self._is_closing.is_set():
                return
            if status:
                print(f"rollout worker {number} ended with status {status}", flush=True)
            if status == NOT_MADE and not has_served:
                problem = "could not make the environments; the trainer's output says why"
                self._problems.put(EnvWorkerError(f"rollout worker {number} {problem}"))
                return
            lived = status != NOT_MADE and time.monotonic() - began >= SHORT_S
            has_served = has_served or lived
            num_deaths = 0 if lived else num_deaths + 1
            if num_deaths == MAX_DEATHS:
                self._problems.put(
                    WorkerLostError(
                        f"rollout worker {number} ended {MAX_DEATHS} times within {SHORT_S:g} s of "
                        f"its start, at last with status {status}; see its output above"
                    )
                )
                return

    def _connect(self, number: int) -> socket.socket | None:
        """Connect to the trainer once it waits for workers; None if there is no need any more."""
        host, port = self._address
        num_refusals, late = 0, time.monotonic() + PATIENCE_S
        while not self._is_closing.is_set():
            try:
                connection = socket.create_connection((host, port), HELLO_S)
            except OSError as error:  # not there yet; whoever started us ends us with the run
                if time.monotonic() > late:
                    print(
                        f"rollout worker {number} does not reach the trainer at {host}:{port} "
                        f"({error}); it keeps trying. Does a firewall stop it? The port is "
                        "MASTER_PORT + 2",
                        flush=True,
                    )
                    late = math.inf
                self._is_closing.wait(AGAIN_S)
                continue
            try:
                check_trainer(connection, number, self._secret)
                keep(connection)
                return connection
            except TimeoutError:  # it is there, but busy
                connection.close()
            except (OSError, MeetingError) as error:
                connection.close()
                num_refusals += 1
                if num_refusals == MAX_DEATHS:
                    self._problems.put(
                        EnvWorkerError(
                            f"the trainer at {host}:{port} has another token, or another program "
                            f"listens there ({error})"
                        )
                    )
                    return None
                self._is_closing.wait(AGAIN_S)
        return None

    def _run_one(self, number: int, connection: socket.socket) -> int:
        """Run a worker until it or the connection ends; return its exit status."""
        process = start_worker(connection.fileno(), 2, self._setup)
        self._running[number] = connection, process

        def hang_up() -> None:
            process.wait()  # others that it has started may hold the connection open
            _shut_down(connection)

        threading.Thread(target=hang_up, daemon=True).start()
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        poll.poll()
        try:
            return end_worker(process)
        finally:
            kill_group(process)


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended already
