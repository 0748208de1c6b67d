"""A taskset of `verifiers.v1`: problems of the MATH dataset, and a tool that runs Python.

The tool runs each program that the model writes in a container of its own, without a network.
`load` downloads the dataset from the hub.
"""

import asyncio
import contextlib
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["MathPythonTaskset"]

# Reads a program on stdin, and ends it after 20 s. podman takes the same words. Without a log of
# the engine, a program that prints without end does not fill the disk.
CONTAINER = (
    *("docker", "run", "--rm", "--interactive", "--network=none", "--memory=512m"),
    *("--pids-limit=64", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--log-driver=none"),
    *("python:3.12-slim", "timeout", "20", "python", "-"),
)
INSTRUCTION = (
    "Solve the problem. The tool `python` runs a program and returns what it prints. Give the "
    "answer as \\boxed{...} at the end.\n\n"
)


class PythonConfig(vf.SharedToolsetConfig):
    command: tuple[str, ...] = CONTAINER
    """Runs Python in isolation: it gets the program on stdin, and ends it in time."""
    timeout_s: float = 40.0
    """When the command itself is given up, such as a container engine that hangs."""
    max_chars: int = 2000
    """Of the output, the last characters are what the model sees."""


class Python(vf.Toolset[PythonConfig]):
    """One object for all rollouts, because it keeps nothing of a rollout."""

    TOOL_PREFIX = None  # the model sees `python`, not `python_python`

    @vf.tool
    async def python(self, code: str) -> str:
        """Run a Python program. Returns what it prints; print what you want to know."""
        process = await asyncio.create_subprocess_exec(
            *self.config.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdin is not None and process.stdout is not None
        output, max_bytes = b"", 4 * self.config.max_chars  # of UTF-8
        try:
            async with asyncio.timeout(self.config.timeout_s):
                process.stdin.write(code.encode())
                process.stdin.write_eof()
                while part := await process.stdout.read(65_536):
                    output = (output + part)[-max_bytes:]  # the program may print without end
                await process.wait()
        except TimeoutError:
            return f"stopped after {self.config.timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                process.kill()
        return output.decode(errors="replace")[-self.config.max_chars :] or "it printed nothing"


class MathPythonConfig(vf.TasksetConfig):
    dataset: str = "DigitalLearningGmbH/MATH-lighteval"
    split: str = "train"
    python: PythonConfig = PythonConfig()


class MathPythonData(vf.TaskData):
    answer: str


class MathPythonTask(vf.Task[MathPythonData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right_answer(self, trace: vf.Trace) -> float:
        return float(same_answer(boxed(trace.last_reply), self.data.answer))

    @vf.metric
    async def num_programs(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class MathPythonTaskset(vf.Taskset[MathPythonTask, MathPythonConfig]):
    @classmethod
    def toolsets(cls, config: MathPythonConfig) -> list[vf.Toolset]:
        return [Python(config.python)]

    def load(self) -> Iterator[MathPythonTask]:
        from datasets import load_dataset

        for idx, row in enumerate(load_dataset(self.config.dataset, split=self.config.split)):
            answer = boxed(row["solution"])
            if answer is None:
                continue
            prompt = INSTRUCTION + row["problem"]
            yield MathPythonTask(
                MathPythonData(idx=idx, prompt=prompt, answer=answer), self.config.task
            )


def boxed(text: str) -> str | None:
    """Return what the last \\boxed{...} of a text has inside, None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    inside = text[start + len("\\boxed{") :]
    depth = 1
    for at, letter in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return inside[:at]
    return None


def same_answer(said: str | None, right: str) -> bool:
    """Return whether two answers are the same number, or the same LaTeX up to its spelling.

    This is strict: x+1 is not 1+x. math-verify is the thorough way.
    """
    if said is None:
        return False
    first, second = plain(said), plain(right)
    return first == second or (number(first) is not None and number(first) == number(second))


def plain(latex: str) -> str:
    """Return LaTeX without spaces, dollars, units of text and the variants of a fraction."""
    latex = re.sub(r"\\(?:text|mbox|mathrm)\{([^{}]*)\}", r"\1", latex)
    latex = re.sub(r"\\(?:left|right|,|!|;|:|\$|%)|[\s$%]", "", latex)
    return latex.replace("dfrac", "frac").replace("tfrac", "frac").rstrip(".")


def number(text: str) -> float | None:
    """Return the value of a number or of a simple fraction, None for anything else."""
    fraction = re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(\d+)\}|(-?)(\d+)/(\d+)", text)
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if fraction:
            sign, above, below = (part for part in fraction.groups() if part is not None)
            return int(f"{sign}1") * int(above) / int(below)
        return float(text.replace(",", ""))
    return None


if __name__ == "__main__":
    Python.run()
