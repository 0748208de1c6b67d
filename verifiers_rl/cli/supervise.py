"""The loop that keeps the processes of a run, wherever they are, until the trainer ends."""

from __future__ import annotations

import math
import shlex
import signal
import sys
import time
from types import FrameType
from typing import Protocol

from verifiers_rl.cli.children import POLL_S, STOP_GRACE_S, Child, ChildError, Supervised
from verifiers_rl.cli.config import RunConfig, TomlError
from verifiers_rl.cli.ending import SAVE_GRACE_S
from verifiers_rl.process.interrupts import handle_signals


class Stopped(Exception):
    """A signal asked us to stop."""


class Machines(Protocol):
    """Where the processes of a run start: this machine, or those of a Ray cluster.

    Attributes:
        servers: of the policy.
        others: the servers of teachers.
        trainers: with the ranks of a machine each, rank 0 first. They end together.
    """

    servers: list[Supervised]
    others: list[Supervised]
    trainers: list[Child]

    def start(self, timeout_s: float) -> None:
        """Start them all; those that have started are in the lists, also when it raises.

        Args:
            timeout_s: how long servers may take, for people; and a place for a process.
        """

    def close(self) -> None:
        """Give back what was reserved."""


def supervise(config: RunConfig, machines: Machines) -> int:
    """Start servers and trainer, restart a server when it dies, and end all when the trainer ends.
    The trainer waits while the servers load. Returns the trainer's exit status.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    handle_signals(on_signal)
    timeout_s = config.option("vllm_server_timeout")
    servers, trainers = machines.servers, machines.trainers
    deadline, grace_s = math.inf, SAVE_GRACE_S
    try:
        machines.start(timeout_s)
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
            for one in (*servers, *machines.others):
                one.look()
            # The trainer ends by itself without servers, and ranks when others have ended.
            if servers and all(server.is_given_up for server in servers):
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
            f"{SAVE_GRACE_S:g} s), and the server; Ctrl-C ends both at once",
            flush=True,
        )
        return 128 + signal.Signals[str(stopped)].value
    finally:
        others = [one.child for one in (*servers, *machines.others)]

        def end_at_once(number: int, frame: FrameType | None) -> None:
            for child in (*trainers, *others):
                child.kill()

        # From here on no signal raises, so that the clean-up is completed.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closing terminal may send several
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end_at_once)
        for child in others:
            child.mute()  # its last output is of no interest; a log file still gets it
        for trainer in trainers:
            trainer.terminate()
        for trainer in trainers:
            trainer.stop(grace_s)
        for child in others:
            child.terminate()
        for child in others:
            child.stop()
        machines.close()
