"""An environment that misbehaves in the ways that a rollout worker has to survive. It needs neither
verifiers nor a server, so that its workers start at once.
"""

import asyncio
import contextlib
import io
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from verifiers_rl.envs.base import RunnerOptions
from verifiers_rl.types import Rollout, Sample

QUESTIONS = (
    "be well", "die", "die once", "die late", "stop once", "raise", "print", "fork", "block",
    "sleep", "wait",
)  # fmt: skip

NOBODY = -1


@dataclass
class Recipe:
    folder: Path
    makers: int
    load_s: float

    def __call__(self):
        if self.makers == NOBODY:
            if os.fork() == 0:  # it has our end of the connection, too
                time.sleep(600)
            os._exit(9)
        if self.makers not in (0, os.getpid()):
            raise ValueError("a file of the worker is missing")
        time.sleep(self.load_s)
        return Runner(self.folder)


class TroubledEnv:
    """
    Args:
        folder: for files by which its rollouts tell of themselves, from any process.
        makers: the only process that can make it; 0: all can. One dies of `NOBODY`.
        load_s: seconds that it takes to make it.
    """

    name, description = "env", ""
    weights = (1.0,)
    options = RunnerOptions("http://unused", None, 100)

    def __init__(self, folder, makers=0, load_s=0.0):
        self._recipe = Recipe(folder, makers, load_s)

    def recipe(self):
        return self._recipe

    def sizes(self, split):
        return [len(QUESTIONS)]

    async def task(self, split, index):
        return QUESTIONS[index]


class Runner:
    num_playing = 0  # rollouts that have a place

    def __init__(self, folder):
        self.folder = folder

    async def open(self): ...

    async def close(self): ...

    async def run_task(self, question, request):
        async def one(number):
            rollout = Rollout(0, question, env="env", metrics={"pid": os.getpid()})
            async with request.begin(number):
                self.num_playing += 1
                rollout.metrics["num_playing"] = self.num_playing
                try:
                    await self.answer(question, number)
                    rollout.reward = 3.0
                    sample = Sample(
                        [1, 2], [False, True], [0.0, -0.5], [-1, request.policy_version]
                    )
                    rollout.samples = [sample]
                except LookupError as error:
                    rollout.error = error
                finally:
                    self.num_playing -= 1
            return rollout

        return await asyncio.gather(*(one(number) for number in range(request.num_rollouts)))

    def is_first(self):
        """Whether none has died before, in any process."""
        died = self.folder / "died"
        is_first = not died.exists()
        died.touch()
        return is_first

    async def answer(self, question, number):
        match question:
            case "die":
                os._exit(7)
            case "die once":
                if self.is_first():
                    os._exit(7)
            case "die late":
                if number and self.is_first():
                    await asyncio.sleep(0.3)  # the other rollout of the group ends meanwhile
                    os._exit(7)
            case "stop once":
                if self.is_first():
                    os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise LookupError("no answer key")
            case "print":
                print("the environment prints")
                sys.stdout.buffer.write(b"\xff\x00 bytes\n")
                sys.stdout.flush()
            case "fork":
                if os.fork() == 0:
                    (self.folder / "forked").write_text(str(os.getpid()))
                    time.sleep(600)
                    os._exit(0)
            case "block":
                (self.folder / "blocked").write_text(str(os.getpid()))
                with contextlib.redirect_stderr(io.StringIO()):  # as around a program of a model
                    await asyncio.sleep(0.5)
                    block_the_loop()
            case "sleep":
                await asyncio.sleep(0.2)
            case "wait":
                (self.folder / "waits").touch()
                try:
                    await asyncio.sleep(600)
                finally:
                    (self.folder / "waits").unlink()


def block_the_loop():
    time.sleep(600)


def num_letters(completion: str) -> float:
    """A reward for environments that run in workers, which import this module at once."""
    return float(len(set(completion)))
