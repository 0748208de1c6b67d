"""The loop that keeps the processes of a run, wherever they are, until the trainer ends."""

from __future__ import annotations

import math
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Protocol

from verifiers_rl.cli.children import POLL_S, STOP_GRACE_S, Child, ChildError, Supervised
from verifiers_rl.cli.config import RunConfig, TomlError
from verifiers_rl.cli.ending import SAVE_GRACE_S
from verifiers_rl.cli.plan import ServerPlan, host_and_port, trainer_env
from verifiers_rl.process.interrupts import handle_signals


class Stopped(Exception):
    """A signal asked us to stop."""


class Launcher(Protocol):
    """Starts the processes of a run: on this machine, or on those of a Ray cluster."""

    def open(self) -> None:
        """Reserve what they need."""

    def start_server(self, plan: ServerPlan) -> Child: ...

    def start_trainers(self, env: dict[str, str]) -> Iterator[Child]:
        """Start the trainer: the ranks of a machine each, rank 0 first. They end together.

        Args:
            env: variables of all of them.
        """

    def close(self) -> None:
        """Give back what was reserved."""


def supervise(config: RunConfig, plans: Sequence[ServerPlan], launcher: Launcher) -> int:
    """Start servers and trainer, restart a server when it dies, and end all when the trainer ends.
    The trainer waits while the servers load. Returns the trainer's exit status.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    handle_signals(on_signal)
    timeout_s = config.option("vllm_server_timeout")
    servers: list[Supervised] = []
    trainers: list[Child] = []
    deadline, grace_s = math.inf, SAVE_GRACE_S
    try:
        launcher.open()
        for plan in plans:
            servers.append(Supervised(plan, launcher.start_server, config))
        addresses = {}
        for server in servers:
            addresses[server.plan.name] = address = server.child.find_address()
            where = host_and_port(*address)
            print(
                f"vf-rl: starting {server.plan.what} on {where}, up to {timeout_s:g} s", flush=True
            )
        policy = [server for server in servers if not server.plan.is_needed]
        env = trainer_env(addresses)
        for trainer in launcher.start_trainers(env):
            trainers.append(trainer)
        while True:
            running = [trainer for trainer in trainers if trainer.poll() is None]
            if lost := next((trainer for trainer in trainers if trainer.is_lost), None):
                grace_s = STOP_GRACE_S  # without its ranks, the others cannot save
                raise ChildError(
                    f"{lost.name} {lost.end}. Go on from the last checkpoint: "
                    f"{shlex.join(['vf-rl', *config.words])} --resume"
                )
            if not running:
                return next((status for trainer in trainers if (status := trainer.poll())), 0)
            for server in servers:
                server.poll()
            # The trainer ends by itself without servers, and ranks when others have ended.
            if policy and all(server.is_given_up for server in policy):
                deadline = min(deadline, time.monotonic() + timeout_s + 60.0)
            if len(running) < len(trainers):
                deadline = min(deadline, time.monotonic() + SAVE_GRACE_S + 60.0)
            if time.monotonic() > deadline:
                raise ChildError("the trainer did not end after its server, or after other ranks")
            running[0].wait(POLL_S)
    except (ChildError, TomlError) as error:
        print(f"vf-rl: error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(
            f"\nvf-rl: {stopped}: ending the trainer, which saves a checkpoint (up to "
            f"{SAVE_GRACE_S:g} s), and the servers; Ctrl-C ends all at once",
            flush=True,
        )
        return 128 + signal.Signals[str(stopped)].value
    finally:
        others = [server.child for server in servers]

        def end_at_once(number: int, frame: FrameType | None) -> None:
            for child in (*trainers, *others):
                child.signal(signal.SIGKILL)

        # From here on no signal raises, so that the clean-up is completed.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closing terminal may send several
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end_at_once)
        for group, patience_s in ((trainers, grace_s), (others, STOP_GRACE_S)):
            for child in group:
                child.terminate()
            for child in group:
                child.stop(patience_s)
        launcher.close()
