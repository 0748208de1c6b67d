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
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.errors import HarnessError

from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.dataset import (
    ExampleTaskset,
    RewardFn,
    env_from,
    examples_of,
    parameters_from,
)
from verifiers_rl.envs.v1_client import CONTEXT
from verifiers_rl.envs.v1_loading import load_v1_environment
from verifiers_rl.process.loop_thread import call_on_thread, run_contained

__all__ = ["AgentHarness", "AgentTaskset"]  # what verifiers finds in this module

IN_AGENT = "verifiers_rl_agent"  # id of the harness
sys.modules[IN_AGENT] = sys.modules[__name__]  # where verifiers looks for it
# What `launch` gives to a function beside its row, and to a program as variables OPENAI_...
OF_ROLLOUT = ("base_url", "api_key", "model")
MAX_PRINTED = 65_536  # bytes at the end of what a program prints, which are kept
EXIT_S = 5.0  # deadline for the end of its stdout, after its exit
_COLUMN = re.compile(r"(?<!\$)\{(\w+)\}")  # ${NAME} is one of a shell
# A program and the word before its code: -c, of a shell also -lc.
_CODE = re.compile(r".* -\w*c|(node|perl|ruby|php|lua|Rscript)\S* (-\w*[eEpr]|--(eval|print))")


class AgentHarnessConfig(vf.HarnessConfig):
    id: str = IN_AGENT
    command: tuple[str, ...] = ()  # none: the agent is the function of `AgentData`


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
            wanted = {name: given[name] for name in given.keys() & data.agent.keywords}
            playing = run_contained(call_on_thread(partial(data.agent, **wanted)))
        else:
            variables = {f"OPENAI_{name.upper()}": value for name, value in given.items()}
            variables["PATH"] = os.environ.get("PATH", os.defpath)
            variables["HOME"] = str(runtime.workdir)
            row = data.model_dump(mode="json")
            playing = run_program(self.config.command, row, runtime.process_env(variables))
        try:
            answer = await playing
        except Exception:
            last = trace.calls[-1].error if trace.calls else None
            if last is None or CONTEXT not in last.message:
                raise
            answer = None
            trace.stop("context_length")  # max_seq_len cuts the rollout, and it is trained
        if not trace.calls:
            raise HarnessError(
                "the agent got no reply: it must send its chat completions to OPENAI_BASE_URL, or "
                "to the base_url that it gets, and with n of 1"
            )
        if not isinstance(answer, str | Real | None):
            raise HarnessError(
                f"the agent returned a {type(answer).__name__}; return a text, or None for the "
                "last reply"
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
    if not isinstance(agent, dict) or agent.keys() & {"harness", "runtime"}:
        raise InvalidEnvironmentError(
            "command: it plays, on this machine; [env.agent] must be a table without harness and "
            "runtime"
        )
    words = [
        next((path for f in folders if os.path.isfile(path := f"{f.absolute()}/{word}")), word)
        for word in command
    ]
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
            elif _CODE.fullmatch(f"{Path(words[0]).name} {before}"):
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


async def run_program(
    command: Sequence[str], row: dict[str, Any], variables: dict[str, str]
) -> str:
    """Run a program until it exits, in its HOME; then kill what it has started, and if this is
    cancelled, the program too. asyncio's own way would also wait for all that have its stdout.

    Args:
        command: may name columns of the row. What is no text there becomes JSON.
        variables: its environment.

    Returns:
        The end of its stdout.

    Raises:
        HarnessError: its exit status is not 0.
    """

    def value(name: re.Match[str]) -> str:
        return found if isinstance(found := row[name[1]], str) else json.dumps(found)

    transport, program = await asyncio.get_running_loop().subprocess_exec(
        Program,
        *(_COLUMN.sub(value, word) for word in command),
        env=variables,
        cwd=variables["HOME"],
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        await program.exited.wait()
    finally:
        with suppress(ProcessLookupError):  # nobody is left
            os.killpg(transport.get_pid(), signal.SIGKILL)
        # Who left the group has its key still.
        key = f"OPENAI_API_KEY={variables['OPENAI_API_KEY']}\0".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is of another user
                if key in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        with suppress(TimeoutError):  # a process that left the group has its stdout
            await asyncio.wait_for(program.closed.wait(), EXIT_S)
        transport.close()
    printed, said = (kept.decode(errors="replace") for kept in program.kept.values())
    if status := transport.get_returncode():
        end = said[-2000:]  # enough to see why
        raise HarnessError(f"{shlex.join(command)} ended with status {status}: {end}")
    return printed


# --- A function -----------------------------------------------------------------------------------


class AgentTaskset(ExampleTaskset):
    """The examples of a dataset, and the function that plays them."""

    def __init__(self, agent: Any, dataset: Any, *given: Any) -> None:
        if not callable(agent):
            raise InvalidEnvironmentError(f"env_from_agent: agent={agent!r} is no function")
        super().__init__(dataset, *given)
        rows, known = examples_of(dataset, given[-1]), self.columns | dict.fromkeys(OF_ROLLOUT)
        wanted = parameters_from(agent, known, "env_from_agent: the agent")
        for task, row in zip(self.tasks, rows, strict=True):
            names = (name for name in wanted if name in row or name in OF_ROLLOUT)
            own = partial(agent, **{name: row.get(name) for name in names})
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
    kind = partial(AgentTaskset, agent)
    return env_from(dataset, reward_fn, None, eval_dataset, weights, kind)
