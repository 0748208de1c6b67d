"""Agents that exist already: a program, or a Python function, that asks an OpenAI endpoint.

environment ── row ──► AgentHarness ── base_url, key, model ──► the agent
                                                                   │ chat completions
vf-vllm ◄── tokens ── v1_client.TokenClient ◄── verifiers' endpoint ◄┘

Each reply becomes tokens of the rollout's samples, whatever the order of the calls. The end of the
agent is the end of the rollout. Rewards score what it printed or returned, and files it has left.

load_agent_environment   a program: `[env] command` of a TOML
env_from_agent           a function, in a script
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.errors import HarnessError

from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.dataset import (
    ExampleTaskset,
    RewardFn,
    columns_of,
    env_from,
    examples_of,
    parameters_from,
)
from verifiers_rl.envs.v1_loading import load_v1_environment
from verifiers_rl.process.loop_thread import run_contained

__all__ = ["AgentHarness", "AgentTaskset"]  # what verifiers finds in this module

IN_AGENT = "verifiers_rl_agent"  # id of the harness
sys.modules[IN_AGENT] = sys.modules[__name__]  # where verifiers looks for it
# What `launch` gives to a function beside its row, and to a program as variables OPENAI_...
OF_ROLLOUT = ("base_url", "api_key", "model")
MAX_PRINTED = 65_536  # bytes at the end of what a program prints, which are kept
EXIT_S = 5.0  # deadline for the end of its stdout, after its exit
_COLUMN = re.compile(r"(?<!\$)\{(\w+)\}")  # ${NAME} is one of a shell


class AgentHarnessConfig(vf.HarnessConfig):
    id: str = IN_AGENT
    command: list[str] = Field([])  # none: the agent is the function of `AgentData`


class AgentData(vf.TaskData):
    """A row for a function, which has the row's columns, but not yet what belongs to a rollout."""

    agent: Any = Field(exclude=True)


class AgentHarness(vf.Harness[AgentHarnessConfig]):
    """Lets an agent play a rollout, whose last reply is what the agent printed or returned."""

    EXECUTES_CODE = False  # who wrote the agent knows what it does with replies
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
    ) -> vf.ProgramResult:
        given = {"base_url": endpoint, "api_key": secret, "model": ctx.model}
        if isinstance(data, AgentData):
            wanted = {name: given[name] for name in given if name in data.agent.keywords}
            answer = await run_contained(call(partial(data.agent, **wanted)))
        else:
            variables = {f"OPENAI_{name.upper()}": value for name, value in given.items()}
            variables["PATH"] = os.environ.get("PATH", os.defpath)
            variables["HOME"] = folder = str(runtime.workdir)
            variables = runtime.process_env(variables)
            columns = {  # JSON, if they are no text
                name: value if isinstance(value, str) else json.dumps(value)
                for name, value in data.model_dump(mode="json").items()
            }
            command = self.config.command
            words = [_COLUMN.sub(lambda name: columns[name[1]], word) for word in command]
            status, answer, said = await run_program(words, variables, folder)
            if status:
                end = said[-2000:]  # enough to see why
                raise HarnessError(f"{shlex.join(command)} ended with status {status}: {end}")
        if not trace.calls:
            raise HarnessError(
                "the agent asked for no reply: it must send its chat completions to "
                "OPENAI_BASE_URL, or to the base_url that it gets"
            )
        trace.root_reply = answer if answer is None else str(answer)
        return vf.ProgramResult(0, "", "")


# --- A program ------------------------------------------------------------------------------------


def load_agent_environment(given: Mapping[str, Any], *folders: Path) -> vf.Env:
    """Make the environment of a table with a `command`, which is otherwise one for
    `load_v1_environment`. Words that name files in the folders become paths, because the program
    runs in a folder of its own.

    Raises:
        InvalidEnvironmentError: the command has no program, names no column of the tasks, or has
            one in code; or as for that function.
    """
    table, agent = dict(given), given.get("agent", {})
    command = table.pop("command")
    if beside := agent.keys() & {"harness", "runtime"}:
        raise InvalidEnvironmentError(
            f"command: it plays, on this machine; leave out {min(beside)} in [env.agent]"
        )
    paths = {
        word: str(path)
        for folder in reversed(folders)
        for word in command
        if os.path.isfile(path := folder.absolute() / word)
    }
    words = [paths.get(word, word) for word in command]
    table["agent"] = agent | {"harness": {"id": IN_AGENT, "command": words}}
    env = load_v1_environment(table, *folders)
    columns = type(env.taskset).task_type().data_type().model_fields
    problem = ""
    if not words or not shutil.which(words[0]):
        problem = "there is no such program on the PATH"
    for before, word in pairwise(["", *words]):
        for name in _COLUMN.findall(word):
            if name not in columns:
                problem = f"{name!r} is no column of the tasks: {', '.join(columns)}"
            elif re.fullmatch(r"-\w*c", before):  # of a shell also -lc
                problem = f"put {{{name}}} behind the code, where it is data, not code"
    if problem:
        raise InvalidEnvironmentError(f"command={command}: {problem}")
    return env


class Program(asyncio.SubprocessProtocol):
    """A program that runs, and the last bytes of its stdout and stderr."""

    def __init__(self) -> None:
        self.exited, self.closed = asyncio.Event(), asyncio.Event()
        self.kept = {1: b"", 2: b""}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.kept[fd] = (self.kept[fd] + data)[-MAX_PRINTED:]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, error: Any) -> None:
        self.closed.set()


async def run_program(words: list[str], variables: dict[str, str], folder: str) -> list[Any]:
    """Run a program with its arguments, this environment and in this folder, until it exits; kill
    what it has started, and the program too if this is cancelled.

    Returns:
        Its exit status, and the ends of its stdout and stderr.
    """
    transport, program = await asyncio.get_running_loop().subprocess_exec(
        Program,
        *words,
        env=variables,
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        await program.exited.wait()
    finally:
        with suppress(ProcessLookupError):  # nobody is left
            os.killpg(transport.get_pid(), signal.SIGKILL)
        with suppress(TimeoutError):  # a process that left the group has its stdout
            await asyncio.wait_for(program.closed.wait(), EXIT_S)
        transport.close()
    texts = (kept.decode(errors="replace") for kept in program.kept.values())
    return [transport.get_returncode(), *texts]


# --- A function -----------------------------------------------------------------------------------


async def call(agent: partial[Any]) -> Any:
    """Call a function: an async one in this event loop, another one on a thread of its own."""
    if any(map(inspect.iscoroutinefunction, (agent, type(agent.func).__call__))):
        return await agent()
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # after the deadline, its result is nobody's

    def run() -> None:
        try:
            future.set_result(agent())
        except BaseException as error:  # raised to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)


class AgentTaskset(ExampleTaskset):
    """The examples of a taskset of `env_from`, and the function that plays them."""

    def __init__(self, given: Any, rows: Any, agent: Callable[..., Any]) -> None:
        self.__dict__.update(given.__dict__)
        known = [*OF_ROLLOUT, *columns_of(rows)]
        wanted = parameters_from(agent, known, "env_from_agent: the agent")
        for task, row in zip(self.tasks, rows, strict=True):
            own = partial(agent, **{name: row.get(name) for name in wanted})
            task.data = AgentData(**dict(task.data), agent=own)


def env_from_agent(
    dataset: Any,
    reward_fn: RewardFn | Sequence[RewardFn],
    agent: Callable[..., Any],
    eval_dataset: Any = None,
    weights: Sequence[float] | None = None,
) -> vf.Taskset:
    """Make an environment in which a function of yours is the agent, a taskset of `verifiers.v1`.

    It sends chat completions to `base_url` with the key `api_key`, as many as it likes and in any
    order. The policy answers them, whatever model they name, with the run's sampling options.

    Args:
        dataset, eval_dataset, weights: as for `env_from`. Prompts are only passed to the agent. The
            three names below stand for what the rollout has, not for columns.
        reward_fn: as for `env_from`. `completion` is what the agent returned, or the last reply of
            the model if it returned None.
        agent: gets what its parameters name: `base_url`, `api_key`, `model`, any column of the
            dataset; `**kwargs` gets all of these. An async function must not block. Another one has
            a thread of its own, which nothing can end: after the rollout's deadline, the endpoint
            refuses its requests. It runs where reward functions do, with their rights.

    Raises:
        InvalidEnvironmentError: as for `env_from`; or the agent names something else.
    """

    examples: Any = env_from(dataset, reward_fn, None, eval_dataset, weights)
    taskset = AgentTaskset(examples, examples_of(dataset, "dataset"), agent)
    if eval_dataset is not None:
        eval_rows = examples_of(eval_dataset, "eval_dataset")
        taskset.eval_taskset = AgentTaskset(examples.eval_taskset, eval_rows, agent)
    return taskset
