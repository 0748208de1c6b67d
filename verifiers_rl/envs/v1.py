"""Environments of `verifiers.v1` (tasksets, agents in harnesses, episodes), with the interface of
classic ones.

    episode            agents play a task; each leaves a trace of what it did
    trace              one rollout, if its agent is trained: a graph of messages
    branch             one sample: a path from the graph's root to a leaf, its tokens one after the
                       other; each sampled token is in the loss once

Agents send model calls to verifiers' interception endpoint in this process. `v1_client.TokenClient`
passes them on to `vf-vllm` as tokens: the tokens so far unchanged, and those of new messages from
the trainer's own tokenizer. So if each turn's messages extend those before, its tokens do too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from verifiers_rl.envs import v1_changes as v1_changes
from verifiers_rl.envs.base import InvalidEnvironmentError, RunnerOptions, pickle_for_worker
from verifiers_rl.envs.local_tools import LocalTools
from verifiers_rl.envs.records import record_of_trace
from verifiers_rl.envs.rendering import Renderer
from verifiers_rl.envs.v1_client import TokenClientConfig
from verifiers_rl.envs.v1_loading import (
    check_tool_servers,
    describe,
    environment_of,
    let_tool_servers_import_from,
    plays_in_our_chat_here,
    with_local_chat,
)
from verifiers_rl.envs.v1_samples import rollout_of_trace
from verifiers_rl.envs.v1_tasks import (
    MAX_OVERLONG,
    TaskStream,
    first_messages,
    without_tasks,
)
from verifiers_rl.inference import RolloutSession
from verifiers_rl.process.limits import FILES_OF_ROLLOUT, raise_open_files
from verifiers_rl.requests import GroupRequest
from verifiers_rl.types import LOAD_S, Rollout, Split

logger = logging.getLogger(__name__)

EXIT_S = 30.0  # deadline for an environment to end what its episodes share


class EpisodeError(RuntimeError):
    """The error that verifiers recorded for a failed episode; its traceback is a note."""


class V1TaskRunner:
    """Runs groups of tasks of an environment of `verifiers.v1`.

    An agent in the `null` harness, or for which nobody chose a harness, gets
    `chat_harness.ChatHarness`, and the local runtime unless another is set. Other harnesses stay;
    see `with_local_chat`.

    Args:
        env: an `Env` or a `Taskset`. A taskset is played by the environment of its module, or else
            by one agent.
        options: `client_type` must be the default.

    Raises:
        ValueError, TypeError: tools are defined in the script that runs, a remote sandbox lacks its
            key, client_type is another, or verifiers refuses the environment.
    """

    def __init__(self, env: Any, options: RunnerOptions) -> None:
        if options.client_type != "openai_chat_completions_token":
            raise InvalidEnvironmentError(
                f"client_type={options.client_type!r}: environments of verifiers.v1 are run with "
                '"openai_chat_completions_token" only; leave client_type out'
            )
        self.taskset = env if isinstance(env, vf.Taskset) else env.taskset
        self.options, self.name = options, options.name
        module = sys.modules.get(type(self.taskset).__module__)
        folder = Path(getattr(module, "__file__", None) or "").parent
        if str(folder) in sys.path and "site-packages" not in folder.parts:  # a script's
            let_tool_servers_import_from(folder)
        self.env = with_local_chat(environment_of(env) if env is self.taskset else env)
        has_tools_here = options.tools_in_process and plays_in_our_chat_here(self.env)
        self._local_tools = LocalTools(self.env, has_tools_here)
        check_tool_servers(self.env, has_tools_here)
        raise_open_files(FILES_OF_ROLLOUT * options.max_concurrent)
        self.renderer = Renderer(options.tokenizer)
        self.warned: set[tuple[str, str]] = set()  # agents and options that bias logprobs
        self._serving: asyncio.Task[None] | None = None

    @staticmethod
    def can_run(env: Any) -> bool:
        return isinstance(env, vf.Env | vf.Taskset)

    async def open(self) -> None:
        """Start what the environment shares between episodes.

        Raises:
            InvalidEnvironmentError: the environment is not ready in time.
        """
        is_up = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Event()

        async def serve() -> None:  # the task that opens a context must also close it
            try:
                tools = self._local_tools.open()
                async with tools, self.env.serving():
                    if not is_up.done():  # nobody waits for it any more
                        is_up.set_result(None)
                    await self._stopping.wait()
            except Exception as error:
                if is_up.done():
                    raise
                is_up.set_exception(error)

        self._serving = asyncio.create_task(serve())
        deadline_s = max(self.options.timeout_s, LOAD_S)
        try:
            await asyncio.wait_for(is_up, deadline_s)
        except TimeoutError as error:
            raise InvalidEnvironmentError(
                f"environment {self.name!r}: not ready within {deadline_s:g} s; raise "
                "generation_timeout"
            ) from error

    async def close(self) -> None:
        if self._serving is not None:
            self._stopping.set()
            await asyncio.wait([self._serving], timeout=EXIT_S)

    async def run_task(self, task: vf.Task, request: GroupRequest) -> list[Rollout]:
        """Run the episodes of one task. Each gives a rollout for each trace of a trained agent. An
        error fails only its own episode.
        """
        play = partial(self._play, self._local_tools.of_task(task), request)
        runs = [request.play(number, play) for number in range(request.num_rollouts)]
        return [rollout for episode in await asyncio.gather(*runs) for rollout in episode]

    async def _play(
        self, task: vf.Task, request: GroupRequest, session: RolloutSession
    ) -> list[Rollout]:
        (slot,) = self.env.slots(task)
        client = TokenClientConfig.of_episode(self, request, session)
        version = request.policy_version
        try:
            async with session.limited(request.timeout_s):
                context = vf.ModelContext(model=request.model, client=client)
                traces = trained_traces(await self.env.run_slot(slot, context))
            for trace in traces:
                client.check(trace, is_trained=request.split == "train")
            masks_env = self.options.mask_env_responses
            return [rollout_of_trace(trace, version, masks_env) for trace in traces]
        except Exception as error:  # whatever the environment's own code raises
            failed = Rollout(0, task.data.prompt_text, error=error)
            if slot.traces:
                failed.record = record_of_trace(slot.traces[-1], version)
            return [failed]


def _make_again(kind: type[vf.Env], config: vf.EnvConfig, options: RunnerOptions) -> V1TaskRunner:
    return V1TaskRunner(kind(config), options)


class V1Environment(V1TaskRunner):
    """The `EnvRunner` of an environment of `verifiers.v1`.

    A taskset without end is a stream: training uses its tasks in their order, each once.
    Evaluations then use its first `num_eval_tasks`, which training leaves out, unless evaluations
    have a taskset of their own.

    Args:
        env: see `V1TaskRunner`. Evaluations use its attribute `eval_taskset` if it has one, else
            its taskset.
        options: see `V1TaskRunner`.

    Raises:
        InvalidEnvironmentError: there are no tasks, a prompt has images, or for an error of
            `V1TaskRunner`.
    """

    def __init__(self, env: Any, options: RunnerOptions) -> None:
        self.weights, self.num_overlong_prompts = [1.0], 0
        try:
            super().__init__(env, options)
            self._take_tasks(getattr(env, "eval_taskset", None))
        except (ValueError, TypeError) as error:
            raise InvalidEnvironmentError(f"environment {options.name!r}: {error}") from error
        self.description = self._describe()
        self._given = env

    def _take_tasks(self, of_evaluation: vf.Taskset | None) -> None:
        taskset, num_eval_tasks = self.taskset, self.options.num_eval_tasks
        self._tasks: list[vf.Task] | TaskStream
        if taskset.bounded:
            self._tasks = self._eval_tasks = list(self._iterate(taskset))
        else:
            num_held_out = 0 if of_evaluation is not None else num_eval_tasks
            self._eval_tasks = list(itertools.islice(self._iterate(taskset), num_held_out))
            self._tasks = TaskStream(lambda: self._iterate(taskset), len(self._eval_tasks))
            self._tasks[0]  # raises if there is none
        if of_evaluation is not None:
            stop = None if of_evaluation.bounded else num_eval_tasks
            self._eval_tasks = list(itertools.islice(self._iterate(of_evaluation), stop))
        left_out = ""
        if num := self.num_overlong_prompts:
            left_out = f"; {num} prompts longer than max_prompt_len={self.options.max_prompt_len}"
            logger.warning("environment %r%s left out", self.name, left_out)
        if not self._tasks:
            raise InvalidEnvironmentError(f"it has no tasks{left_out}")

    def _iterate(self, taskset: Any) -> Iterator[vf.Task]:
        """Yield the taskset's tasks, without those whose first prompt is too long."""
        limit, template = self.options.max_prompt_len, self.options.chat_template_kwargs
        num_in_a_row = 0
        for task in taskset:
            prompt = first_messages(task)
            if limit is None or self.options.tokenizer is None:
                yield task
            elif len(self.renderer.render(prompt, **template)) <= limit:
                num_in_a_row = 0
                yield task
            else:
                self.num_overlong_prompts += 1
                num_in_a_row += 1
                if not taskset.bounded and num_in_a_row >= MAX_OVERLONG:
                    raise InvalidEnvironmentError(
                        f"{num_in_a_row} tasks of its stream one after the other have a prompt "
                        f"longer than max_prompt_len={limit}"
                    )

    def sizes(self, split: Split) -> list[int]:
        """Return the number of tasks of this split, as a list of one; `ENDLESS` for a stream."""
        return [len(self._tasks if split == "train" else self._eval_tasks)]

    def _describe(self) -> str:
        """Return one line for the start of a run."""
        tasks = "a stream of tasks, in its order"
        if not isinstance(self._tasks, TaskStream):
            tasks = f"{len(self._tasks)} tasks"
        num_eval_tasks = "also" if self._eval_tasks is self._tasks else len(self._eval_tasks)
        which = "environment" if self.name == "env" else f"environment {self.name!r}"
        return f"{which}: {describe(self.env)}; {tasks}, {num_eval_tasks} for evaluations"

    def recipe(self) -> Callable[[], V1TaskRunner]:
        for task in (self._tasks[0], *self._eval_tasks[:1]):
            pickle_for_worker(task)
        if isinstance(self._given, vf.Taskset):
            return partial(V1TaskRunner, without_tasks(self._given), self.options)
        return partial(_make_again, type(self._given), self._given.config, self.options)

    async def example(self, split: Split, index: int) -> dict[str, Any]:
        """Return the fields of an example, by their names."""
        task = await self.task(split, index)
        return task.data.model_dump() | dict(getattr(task, "row", {}))

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        return await self.run_task(await self.task(request.split, request.index), request)

    async def task(self, split: Split, index: int) -> vf.Task:
        tasks = self._tasks if split == "train" else self._eval_tasks
        if not isinstance(tasks, TaskStream):
            return tasks[index]
        deadline_s = max(self.options.timeout_s, LOAD_S)
        try:
            # On a thread: a resumed run makes all earlier tasks, and a stream may read files.
            return await asyncio.wait_for(asyncio.to_thread(tasks.__getitem__, index), deadline_s)
        except TimeoutError as error:
            raise InvalidEnvironmentError(
                f"environment {self.name!r}: task {index} of its stream did not come within "
                f"{deadline_s:g} s; raise generation_timeout"
            ) from error


def trained_traces(episode: vf.Episode) -> list[vf.Trace]:
    """Return the traces of an episode whose agents are trained.

    Raises:
        EpisodeError: it failed, or there are none.
    """
    if not episode.ok:
        # A retried trace also has the errors of its earlier attempts, so the last one counts.
        ends = [episode, *(trace for trace in episode.traces if trace.has_error)]
        last = [end.last_error for end in ends if end.last_error is not None]
        if not last:
            raise EpisodeError("the episode did not complete")
        failure = EpisodeError(f"{last[0].type}: {last[0].message}")
        failure.add_note(last[0].traceback or "")
        raise failure
    if late := [trace.agent.name for trace in episode.traces if trace.is_timeout]:
        raise EpisodeError(
            f"the agent {late[0]!r} ran out of its own time; raise what is set under "
            f"[env.{late[0]}.timeout]"
        )
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not traces:
        raise EpisodeError("no agent of the episode is trainable")
    return traces
