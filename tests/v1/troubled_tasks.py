"""Tasks that misbehave in the ways that a rollout worker has to survive. Each question names one.

A file in `folder` counts how often the task `die once` was scored, in all processes.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["TroubledTaskset"]

QUESTIONS = (
    "be well", "die", "die once", "raise", "print", "fork", "leak", "block", "sleep", "be odd",
)  # fmt: skip


class TroubledConfig(vf.TasksetConfig):
    folder: str = ""
    makers: int = 0  # only this process can make the taskset; 0: all can


class TroubledTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    held: list[bytes] = []  # noqa: RUF012 - leaked on purpose

    @vf.metric
    async def pid(self, trace: vf.Trace) -> float:
        return float(os.getpid())

    @vf.reward
    async def judged(self, trace: vf.Trace) -> float:
        folder = Path(self.data.name or "")
        match self.data.prompt:
            case "die":
                os._exit(7)
            case "die once":
                if not (folder / "died").exists():
                    (folder / "died").touch()
                    os._exit(7)
            case "raise":
                raise LookupError("no answer key")
            case "print":
                print("the environment prints")
                sys.stdout.buffer.write(b"\xff\x00 bytes\n")
                sys.stdout.flush()
            case "fork":
                if os.fork() == 0:
                    (folder / "forked").write_text(str(os.getpid()))
                    time.sleep(600)
                    os._exit(0)
            case "leak":
                self.held.append(bytes(20_000_000))
            case "block":
                (folder / "blocked").write_text(str(os.getpid()))
                block_the_loop()
            case "sleep":
                await asyncio.sleep(0.1)
            case "be odd":

                class OddError(Exception):
                    held = lambda self: None  # noqa: E731

                raise OddError("cannot be pickled")
        return float(len(trace.last_reply))


def block_the_loop():
    time.sleep(600)


class TroubledTaskset(vf.Taskset[TroubledTask, TroubledConfig]):
    def __init__(self, config: TroubledConfig) -> None:
        super().__init__(config)
        if config.makers not in (0, os.getpid()):
            raise ValueError("a file of the worker is missing")

    def load(self):
        for i, question in enumerate(QUESTIONS):
            data = vf.TaskData(idx=i, prompt=question, name=self.config.folder)
            yield TroubledTask(data, self.config.task)
