"""Environments of `verifiers.v1`: tasksets, agents in harnesses, episodes.

    episode            agents play a task; each leaves a trace of what it did
    trace              one rollout, if its agent is trained: a graph of messages
    turn               one model call, as tokens; those that extend each other are one sample

Agents send model calls to verifiers' interception endpoint in this process. `v1_client.TokenClient`
passes them on to `vf-vllm` as tokens: the tokens so far unchanged, and those of new messages from
the trainer's own tokenizer. So if each turn's messages extend those before, its tokens do too.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import verifiers.v1 as vf

from verifiers_rl.envs import v1_changes as v1_changes
from verifiers_rl.envs.base import (
    InvalidEnvironmentError,
    NotPortableError,
    RunnerOptions,
    Turn,
    add_folders,
    finite_reward,
    pickle_for_worker,
    samples_from_turns,
)
from verifiers_rl.envs.chat_harness import first_messages
from verifiers_rl.envs.records import record_of_trace, text_of
from verifiers_rl.envs.rendering import Renderer, as_vllm_renders
from verifiers_rl.envs.tools import open_shared, with_local_urls
from verifiers_rl.envs.v1_client import Said, TokenClientConfig
from verifiers_rl.envs.v1_loading import (
    TaskStream,
    check_tool_servers,
    describe,
    environment_of,
    plays_in_our_chat_here,
    with_local_chat,
)
from verifiers_rl.inference import RolloutSession, ServerClient
from verifiers_rl.process.limits import FILES_OF_ROLLOUT, raise_open_files
from verifiers_rl.process.loop_thread import call_on_thread, gather_or_cancel, run_contained
from verifiers_rl.process.terminal import printable
from verifiers_rl.requests import GroupRequest
from verifiers_rl.types import LOAD_S, Rollout, Split

logger = logging.getLogger(__name__)

EXIT_S = 30.0  # deadline for an environment to end what its episodes share
MAX_OVERLONG = 1000  # overlong prompts in a row after which no shorter one is expected


class EpisodeError(RuntimeError):
    """The error that verifiers recorded for a failed episode; its traceback is a note."""


class V1Environment:
    """The `EnvRunner` of an environment of `verifiers.v1`.

    An agent in the `null` harness, or for which nobody chose a harness, gets
    `chat_harness.ChatHarness`, and the local runtime unless another is set. Other harnesses stay;
    see `with_local_chat`.

    A taskset without end is a stream: training uses its tasks in their order, each once.
    Evaluations then use its first `num_eval_tasks`, which training leaves out, unless evaluations
    have a taskset of their own.

    Args:
        env: an `Env` or a `Taskset`. A taskset is played by the environment of its module, or else
            by one agent. Evaluations use the attribute `eval_taskset` if there is one, else the
            taskset.
        has_tasks: False in a rollout worker, where each task comes with its group.

    Raises:
        InvalidEnvironmentError: it is something else, there are no tasks, a prompt has images,
            tools are defined in the script that runs, a remote sandbox lacks its key, or verifiers
            refuses the environment.
    """

    def __init__(self, env: Any, options: RunnerOptions, has_tasks: bool = True) -> None:
        self.options, self.name, self.weights = options, options.name, [1.0]
        if not isinstance(env, vf.Env | vf.Taskset):
            what = type(env).__name__
            if isinstance(env, type):
                what = f"the class {env.__name__}; make an object of it, {env.__name__}(config)"
            raise InvalidEnvironmentError(
                f"environment {self.name!r}: expected an Env or a Taskset of verifiers.v1, got "
                f"{what}. Prompts and a reward function become one by env_from(prompts, reward)"
            )
        self._given, self.num_overlong_prompts = env, 0
        self.taskset = env if isinstance(env, vf.Taskset) else env.taskset
        self.renderer = Renderer(options.tokenizer)
        self.warned: set[tuple[str, str]] = set()  # agents and options that bias logprobs
        self._serving: asyncio.Task[None] | None = None
        self._client = TokenClientConfig(base_url=options.base_url, api_key_var="VLLM_API_KEY")
        self._client._runner = self
        try:
            self._prepare()
            if has_tasks:
                self._take_tasks(getattr(env, "eval_taskset", None))
        except (OSError, ValueError, TypeError) as error:
            raise InvalidEnvironmentError(f"environment {self.name!r}: {error}") from error

    def _prepare(self) -> None:
        """Make the environment that is played here."""
        module = sys.modules.get(type(self.taskset).__module__)
        folder = Path(getattr(module, "__file__", None) or "").parent
        if str(folder) in sys.path and "site-packages" not in folder.parts:  # a script's
            add_folders(folder)  # for tool servers, which import its module
        given = self._given
        self.env = with_local_chat(environment_of(given) if given is self.taskset else given)
        self._is_our_chat = plays_in_our_chat_here(self.env)
        if self._is_our_chat and self.taskset.toolsets(self.taskset.config):
            self.env.taskset = with_local_urls(self.env.taskset)
        check_tool_servers(self.env, self._is_our_chat)
        raise_open_files(FILES_OF_ROLLOUT * self.options.max_concurrent)

    # --- Tasks ------------------------------------------------------------------------------------

    def _take_tasks(self, of_evaluation: vf.Taskset | None) -> None:
        taskset, num_eval_tasks = self.taskset, self.options.num_eval_tasks
        self._num_held_out = 0  # tasks at the beginning of a stream
        iterate = partial(self._iterate, taskset)
        train: Any = list(iterate()) if taskset.bounded else TaskStream(iterate)
        evaluated = train
        if of_evaluation is not None:
            stop = None if of_evaluation.bounded else num_eval_tasks
            evaluated = list(itertools.islice(self._iterate(of_evaluation), stop))
        elif not taskset.bounded:
            self._num_held_out = num_eval_tasks
            evaluated = [train[at] for at in range(num_eval_tasks)]
        tasks = f"{len(train)} tasks"
        if not taskset.bounded:
            train[self._num_held_out]  # raises if there is none
            tasks = "a stream of tasks, in its order"
        # Lists, or a `TaskStream`.
        self._tasks: dict[Split, Any] = {"train": train, "eval": evaluated}
        left_out = ""
        if num := self.num_overlong_prompts:
            left_out = f"; {num} {self.options.why_overlong}"
            logger.warning(f"environment {self.name!r}{left_out} left out")
        if not train:
            raise InvalidEnvironmentError(f"it has no tasks{left_out}")
        num_eval = "also" if evaluated is train else len(evaluated)
        plays = f"environment {self.name!r}: {describe(self.env)}"
        self.description = f"{plays}; {tasks}, {num_eval} for evaluations"

    def _iterate(self, taskset: Any) -> Iterator[vf.Task]:
        """Yield the taskset's tasks, without those whose first prompt is too long."""
        options = self.options
        limit, template = options.prompt_limit, options.chat_template_kwargs
        # Other harnesses may show the model less than the prompt.
        has_limit = options.tokenizer is not None and (
            self._is_our_chat or options.max_prompt_len is not None
        )
        num_in_a_row = 0
        for task in taskset:
            prompt = first_messages(task.data)
            try:
                for message in prompt:
                    as_vllm_renders(message)  # refuses images
                is_longer = has_limit and self.renderer.is_longer(prompt, limit, **template)
            except ValueError as error:
                raise InvalidEnvironmentError(f"task {task.data.idx}: {error}") from error
            if not is_longer:
                num_in_a_row = 0
                yield task
            else:
                self.num_overlong_prompts += 1
                num_in_a_row += 1
                if not taskset.bounded and num_in_a_row >= MAX_OVERLONG:
                    raise InvalidEnvironmentError(
                        f"{num_in_a_row} tasks of its stream one after the other have "
                        f"{options.why_overlong}"
                    )

    def sizes(self, split: Split) -> list[int]:
        """Return the number of tasks of this split, as a list of one; `ENDLESS` for a stream."""
        return [len(self._tasks[split])]

    async def task(self, split: Split, index: int) -> vf.Task:
        if not isinstance(tasks := self._tasks[split], TaskStream):
            return tasks[index]
        # On a thread: a resumed run makes all earlier tasks, and a stream may read files.
        return await call_on_thread(partial(tasks.__getitem__, index + self._num_held_out))

    async def example(self, split: Split, index: int) -> dict[str, Any]:
        """Return the fields of an example, by their names."""
        task = await self.task(split, index)
        return task.data.model_dump() | dict(getattr(task, "row", {}))

    def recipe(self) -> Callable[[], V1Environment]:
        train, evaluated = self._tasks["train"], self._tasks["eval"]
        tasks = [train[0]] if isinstance(train, TaskStream) else train
        for task in tasks if evaluated is train else itertools.chain(tasks, evaluated):
            try:
                pickle_for_worker(task)
            except NotPortableError as error:
                raise NotPortableError(f"task {task.data.idx}: {error}") from error
        if self._given is self.taskset:
            # A view of a taskset chooses tasks by a closure, and no worker needs that: it gets the
            # chosen tasks one by one.
            bare = copy.copy(self.taskset)
            for name in ("transform", "eval_taskset"):
                vars(bare).pop(name, None)
            return partial(type(self), bare, self.options, False)
        return partial(_make_again, type(self._given), self._given.config, self.options)

    # --- Episodes ---------------------------------------------------------------------------------

    async def open(self) -> None:
        """Make the connections to the server, and start what episodes share.

        Raises:
            InvalidEnvironmentError: the environment is not ready in time.
        """
        self.client = ServerClient(f"{self.options.base_url}/v1", self.options.timeout_s)
        is_up = asyncio.get_running_loop().create_future()

        async def serve() -> None:  # the task that opens a context must also close it
            async with open_shared(self.env.taskset), self.env.serving():
                is_up.set_result(None)
                await asyncio.Event().wait()  # until it is cancelled

        self._serving = serving = asyncio.create_task(serve())
        deadline_s = max(self.options.timeout_s, LOAD_S)
        await asyncio.wait(
            {is_up, serving}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
        )
        if serving.done():
            await serving  # raises why it is not up
        if not is_up.done():
            raise InvalidEnvironmentError(
                f"environment {self.name!r}: not ready within {deadline_s:g} s; raise "
                "generation_timeout"
            )

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving], timeout=EXIT_S)
            await self.client.close()

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        return await self.run_task(await self.task(request.split, request.index), request)

    async def run_task(self, task: vf.Task, request: GroupRequest) -> list[Rollout]:
        """Run the episodes of one task. Each gives a rollout for each trace of a trained agent. An
        error fails only its own episode.
        """
        play = partial(self._play, task, request)
        runs = (request.play(number, play) for number in range(request.num_rollouts))
        return [rollout for episode in await gather_or_cancel(runs) for rollout in episode]

    async def _play(
        self, task: vf.Task, request: GroupRequest, session: RolloutSession
    ) -> list[Rollout]:
        slot = self.slot_of(task)
        client = self._client.of_episode(request, session)
        version = request.policy_version
        try:
            async with session.limited(request.timeout_s):
                context = vf.ModelContext(model=request.model, client=client)
                episode = await run_contained(self.env.run_slot(slot, context))
                traces = trained_traces(episode)
            for trace in traces:
                client.check(trace, is_trained=request.split == "train")
            masks_env = self.options.mask_env_responses
            return [
                rollout_of_trace(trace, client.said_in(trace), version, masks_env)
                for trace in traces
            ]
        except Exception as error:  # whatever the environment's own code raises
            failed = Rollout(0, task.data.prompt_text, error=error)
            for trace in slot.traces[-1:]:
                failed.record = record_of_trace(trace, client.said_in(trace), version)
            return [failed]

    def slot_of(self, task: vf.Task) -> Any:
        """Return verifiers' plan of one episode of a task."""
        (slot,) = self.env.slots(with_local_urls(task) if self._is_our_chat else task)
        return slot


def _make_again(kind: type[vf.Env], config: vf.EnvConfig, options: RunnerOptions) -> V1Environment:
    return V1Environment(kind(config), options, has_tasks=False)


def trained_traces(episode: vf.Episode) -> list[vf.Trace]:
    """Return the traces of an episode whose agents are trained. One may have no turn, as after the
    forfeit of another agent; then it has no sample, and its reward counts.

    Raises:
        EpisodeError: it failed, or there are none, or one has no turn because its calls failed.
    """
    if not episode.ok:
        # A retried trace also has the errors of its earlier attempts, so the last one counts.
        ends = [episode, *(trace for trace in episode.traces if trace.has_error)]
        last = [end.last_error for end in ends if end.last_error is not None]
        if not last:
            raise EpisodeError("the episode did not complete")
        failure = EpisodeError(printable(f"{last[0].type}: {last[0].message}"))
        failure.add_note(printable(last[0].traceback or ""))
        raise failure
    if late := [trace.agent.name for trace in episode.traces if trace.is_timeout]:
        raise EpisodeError(
            f"the agent {late[0]!r} ran out of its own time; raise what is set under "
            f"[env.{late[0]}.timeout]"
        )
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not traces:
        raise EpisodeError("no agent of the episode is trainable")
    for trace in traces:
        failures = [call.error.message for call in trace.calls if call.error is not None]
        if failures and not trace.num_turns:
            raise EpisodeError(f"the agent {trace.agent.name!r} got no reply: {failures[-1]}")
    return traces


# --- From a trace to a rollout --------------------------------------------------------------------


def rollout_of_trace(
    trace: Any, said: Sequence[Said], policy_version: int, mask_env_responses: bool
) -> Rollout:
    """Make the rollout of a trace whose agent's tokens are trained.

    Args:
        policy_version: version of replies that do not say which policy sampled them.
        mask_env_responses: leave tokens that the environment put between turns out of the loss.
        said: all replies of the policy. Where the environment has put another one in the place of
            one of these (`@vf.intercept`), the trace has the other one, which is an observation;
            the one that was sampled is trained on, in a sample that ends with it.

    Raises:
        ValueError: the trace cannot be trained on.
    """
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward}
    scores |= {name: value for name, value in trace.metrics.items() if value is not None}
    nodes = trace.branches[-1].nodes if trace.branches else []
    from_first_reply = itertools.dropwhile(lambda node: not node.sampled, nodes)
    rollout = Rollout(
        0,
        trace.task.data.prompt_text,
        completion=text_of([node.message for node in from_first_reply]),
        role=trace.agent.name,
        reward=finite_reward(trace.reward),
        metrics={name: float(value) for name, value in scores.items()},
        num_turns=trace.num_turns,
        is_truncated=is_cut(trace),
        generation_s=trace.timing.agent.duration,
        record=record_of_trace(trace, said, policy_version),
    )
    turns = [*turns_of_trace(trace, said)]
    rollout.samples = samples_from_turns(turns, policy_version, mask_env_responses)
    rollout.has_own_advantages = any(turn.advantages is not None for turn in turns)
    if rollout.has_own_advantages:
        rollout.set_advantage(np.concatenate([s.advantages for s in rollout.samples]))
    return rollout


def turns_of_trace(trace: Any, said: Sequence[Said]) -> Iterator[Turn]:
    """Yield the turns to train on, with the advantages that the environment gave to their tokens.
    These are the replies that the trace has, and those in whose place it has others. A reply that
    came when the rollout had ended is none, nor is a compaction that the harness gave up.

    Args:
        said: see `rollout_of_trace`.
    """
    branches = [branch.nodes for branch in trace.branches if branch.trainable]
    nodes = {id(node.message): node for nodes in branches for node in nodes}
    replaced = [node.parent for node in trace.nodes if node.sampled and not node.token_ids]
    answered = [trace.nodes[parent].message for parent in replaced]
    for asked, message, turn in said:
        if node := nodes.get(id(message)):
            yield turn._replace(advantages=node.advantages)
        elif asked.prompt[-1] in answered:
            yield turn


def is_cut(trace: Any) -> bool:
    """Return whether a length limit cut a turn. verifiers' own `is_truncated` counts max_turns as a
    truncation too.
    """
    return trace.stop_condition == "context_length" or any(
        call.finish_reason == "length" for call in trace.calls
    )
