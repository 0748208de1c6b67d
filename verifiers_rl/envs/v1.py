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
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import verifiers.v1 as vf

from verifiers_rl.data import ENDLESS, describe_sizes
from verifiers_rl.envs import v1_changes as v1_changes
from verifiers_rl.envs.base import (
    InvalidEnvironmentError,
    RunnerOptions,
    check_logprobs,
    text_of,
    versions_of_tokens,
)
from verifiers_rl.envs.local_tools import LocalTools
from verifiers_rl.envs.records import record_of_trace
from verifiers_rl.envs.rendering import Renderer
from verifiers_rl.envs.v1_client import TokenClientConfig
from verifiers_rl.envs.v1_loading import (
    IN_PROCESS,
    check_login,
    check_tool_servers,
    describe,
    environment_of,
    let_tool_servers_import_from,
    plays_in_our_chat_here,
    tool_servers,
    warn_of_plain_functions,
    with_local_chat,
)
from verifiers_rl.envs.v1_loading import load_v1_environment as load_v1_environment
from verifiers_rl.envs.v1_tasks import (
    MAX_OVERLONG,
    TaskStream,
    check_portable,
    check_text_only,
    first_messages,
    pack_task,
    unpack_task,
    without_tasks,
)
from verifiers_rl.inference import RolloutDeadline, RolloutSession, SessionLostError
from verifiers_rl.process.limits import rollouts_at_once
from verifiers_rl.requests import GroupRequest
from verifiers_rl.types import (
    ALLOWED_TOKENS,
    LOAD_S,
    ROUTED_EXPERTS,
    Rollout,
    Sample,
    Split,
    join_column,
    join_experts,
)

logger = logging.getLogger(__name__)

EXIT_S = 30.0  # deadline for an environment to end what its episodes share

# Request options that make vLLM sample from another distribution than the softmax of the logits at
# the run's temperature, and the values at which they do not. The options `guided_...`, which bind a
# reply to a grammar, do so too.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
}


# With a sampling mask, these do not: they only take tokens away.
_OF_MASK = ("top_p", "top_k", "min_p", "bad_words", "allowed_token_ids", "min_tokens", "ignore_eos")


class EpisodeError(RuntimeError):
    """The error that verifiers recorded for a failed episode; its traceback is a note."""


class V1ExampleRunner:
    """The `ExampleRunner` of an environment of `verifiers.v1`.

    An agent in the `null` harness, or for which nobody chose a harness, gets
    `chat_harness.ChatHarness`, and the local runtime unless another is set. Other harnesses stay;
    see `with_local_chat`.

    Args:
        env: an `Env` or a `Taskset`. A taskset is played by the environment of its module, or else
            by one agent.
        eval_taskset: the taskset of evaluations; None: they use that of `env`.
        options: `client_type` must be the default.

    Raises:
        InvalidEnvironmentError: tools are defined in the script that runs, a remote sandbox lacks
            its key, or client_type is another.
    """

    def __init__(self, env: Any, eval_taskset: Any, options: RunnerOptions) -> None:
        name = options.name
        if not self.can_run(env):
            raise InvalidEnvironmentError(
                f"environment {name!r}: expected an Env or a Taskset, got {type(env).__name__}"
            )
        if options.client_type != "openai_chat_completions_token":
            raise InvalidEnvironmentError(
                f"environment {name!r}: client_type={options.client_type!r}: environments of "
                'verifiers.v1 are run with "openai_chat_completions_token" only; leave client_type '
                "out"
            )
        module = sys.modules.get(type(getattr(env, "taskset", env)).__module__)
        folder = Path(getattr(module, "__file__", None) or "").parent
        if str(folder) in sys.path and "site-packages" not in folder.parts:  # a script's
            let_tool_servers_import_from(folder)
        try:
            env = environment_of(env) if isinstance(env, vf.Taskset) else env
            self.env = with_local_chat(env)
            has_tools_here = options.tools_in_process and plays_in_our_chat_here(self.env)
            self._local_tools = LocalTools(self.env) if has_tools_here else None
            check_tool_servers(self.env, has_tools_here)
            check_login(self.env)
            warn_of_plain_functions(self.env)
        except (ValueError, TypeError) as error:
            raise InvalidEnvironmentError(f"environment {name!r}: {error}") from error
        self.tasksets = {"train": env.taskset, "eval": eval_taskset or env.taskset}
        self.options = options
        self.tokenizer = tokenizer = options.tokenizer
        self._renderer = Renderer(tokenizer)
        self.special_ids: set[int] = set()
        self.end_id = -1  # the token that ends the template's replies; -1: none
        if tokenizer is not None:
            self.special_ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
            self.end_id = -1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self.name = name
        self._warned: set[tuple[str, str]] = set()  # agent, option
        # For each running trace, its replies with the policy versions of their tokens.
        self.versions: dict[str, list[tuple[Any, list[tuple[int, int]]]]] = {}
        # And its replies with the tokens that could be sampled, where the run asks for them.
        self.masks: dict[str, list[tuple[Any, np.ndarray]]] = {}
        # And with the experts of their tokens and of those before.
        self.experts: dict[str, list[tuple[Any, np.ndarray]]] = {}
        self._sessions: dict[int, tuple[Any, RolloutSession]] = {}  # of the episodes that run
        self.files_per_rollout = self._files_per_rollout()
        at_once = rollouts_at_once(options.max_concurrent, self.files_per_rollout)
        self._slots = asyncio.Semaphore(at_once)
        self._serving: asyncio.Task[None] | None = None

    @staticmethod
    def can_run(env: Any) -> bool:
        return isinstance(env, vf.Env | vf.Taskset)

    def _files_per_rollout(self) -> int:
        """Return how many sockets and pipes a rollout holds in this process at most: one connection
        to the server, and those of tool servers and of an agent's program. A program also has a
        connection to the endpoint, with both ends here.
        """
        config = self.env.config
        harnesses = config.agent_harnesses().values()
        num_files = 1 + 4 * len(tool_servers(self.env, self._local_tools is not None))
        if any(harness.id != IN_PROCESS for harness in harnesses):
            num_files += 7
        return num_files * (config.max_concurrent_agents or len(harnesses))

    def render(self, messages: list[Any], is_prompt: bool = True, **template: Any) -> list[int]:
        """Return token ids of messages, with the beginning of a reply if `is_prompt`. `template`
        goes to the chat template. Without messages (a user opens the conversation) return [].
        """
        return self._renderer.render(messages, is_prompt, **template)

    async def open(self) -> None:
        """Start what the environment shares between episodes.

        Raises:
            InvalidEnvironmentError: the environment is not ready in time.
        """
        is_up = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Event()

        async def serve() -> None:  # the task that opens a context must also close it
            try:
                tools = nullcontext() if self._local_tools is None else self._local_tools.open()
                async with tools, self.env.serving():
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
            _, late = await asyncio.wait([self._serving], timeout=EXIT_S)
            for task in late:
                logger.warning("environment %r: not closed within %g s", self.name, EXIT_S)
                task.cancel()

    def warn_of_bias(
        self, agent: str, request: Mapping[str, Any], of_run: Mapping[str, Any]
    ) -> None:
        """Warn once for each agent and option by which its tokens come from another distribution
        than the trainer's. Options equal to the run's are skipped: `make_runner` warned of them.
        """
        for name, value in request.items():
            is_neutral = value is None or value in _NEUTRAL.get(name, (value,))
            if name in _OF_MASK and of_run.get("sampling_mask"):
                continue  # the trainer knows which tokens they left
            if name == "temperature" or name.startswith("guided_"):
                is_neutral = value in (None, of_run.get(name))
            if is_neutral or value == of_run.get(name) or (agent, name) in self._warned:
                continue
            self._warned.add((agent, name))
            logger.warning(
                "environment %r: the agent %r samples with %s=%r, from another distribution than "
                "the trainer's softmax; importance ratios will be off, watch mismatch_kl",
                self.name, agent, name, value,
            )  # fmt: skip

    async def run_example(self, example: dict[str, Any], request: GroupRequest) -> list[Rollout]:
        """Do as `run_task`, for a task that came from another process."""
        return await self.run_task(
            unpack_task(self.tasksets[request.split], example["task"]), request
        )

    async def run_task(self, task: vf.Task, request: GroupRequest) -> list[Rollout]:
        """Run the episodes of one task. Each gives a rollout for each trace of a trained agent. An
        error fails only its own episode.
        """
        config = TokenClientConfig(
            base_url=self.options.base_url,
            api_key_var="VLLM_API_KEY",
            sampling=request.sampling_args,
        )
        config._environment = self
        if self._local_tools is not None:
            task = self._local_tools.of_task(task)
        context = vf.ModelContext(model=request.model, client=config)
        runs = [self._run(task, context, request, number) for number in range(request.num_rollouts)]
        return [rollout for episode in await asyncio.gather(*runs) for rollout in episode]

    async def _run(
        self, task: vf.Task, context: vf.ModelContext, request: GroupRequest, number: int
    ) -> list[Rollout]:
        async with self._slots, request.begin(number) as session:
            while True:
                rollouts = await self._play(task, context, request, session)
                try:  # all of it again, also if an agent has gone on without its last reply
                    if not await session.move():
                        break
                except SessionLostError as error:
                    rollouts[0].error = rollouts[0].error or error
                    rollouts = rollouts[:1]
                    break
        for rollout in rollouts:
            rollout.num_moves = session.num_moves
        return rollouts

    async def _play(
        self,
        task: vf.Task,
        context: vf.ModelContext,
        request: GroupRequest,
        session: RolloutSession,
    ) -> list[Rollout]:
        policy_version = request.policy_version
        (slot,) = self.env.slots(task)
        failed = Rollout(0, task.data.prompt_text, env=self.name)
        deadline = RolloutDeadline(request.timeout_s)
        self._sessions[id(slot)] = slot, session
        try:
            async with deadline:
                episode = await self.env.run_slot(slot, context)
            if not episode.ok:
                raise failure_of(episode)
            if late := [t.agent.name for t in episode.traces if t.is_timeout]:
                raise EpisodeError(
                    f"the agent {late[0]!r} ran out of its own time; raise what is set under "
                    f"[env.{late[0]}.timeout]"
                )
            traces = [trace for trace in episode.traces if trace.agent.trainable]
            if not traces:
                raise ValueError("no agent of the episode is trainable")
            # Nothing is trained on an evaluation, so its agents may sample at any temperature.
            temperature = (
                context.client.sampling["temperature"] if request.split == "train" else None
            )
            return [self._rollout(trace, policy_version, temperature) for trace in traces]
        except Exception as error:  # whatever the environment's own code raises
            failed.error = error
            if deadline.is_cause_of(error):
                failed.num_lost_tokens = deadline.num_lost_tokens
                failed.error = TimeoutError(
                    f"an episode took longer than generation_timeout ({request.timeout_s:g} s)"
                )
            if slot.traces:
                failed.record = self._record(slot.traces[-1], policy_version)
        finally:
            self._sessions.pop(id(slot))
            for trace in slot.traces:
                self.versions.pop(trace.id, None)
                self.masks.pop(trace.id, None)
                self.experts.pop(trace.id, None)
        return [failed]

    def session_of(self, trace_id: str | None) -> RolloutSession:
        """Return the session of the episode that this trace belongs to."""
        return next(
            session
            for slot, session in self._sessions.values()
            if any(trace.id == trace_id for trace in slot.traces)
        )

    def _record(self, trace: vf.Trace, policy_version: int) -> bytes:
        versions = {id(message): spans for message, spans in self.versions.get(trace.id, [])}
        return record_of_trace(trace, versions, policy_version)

    def _rollout(self, trace: vf.Trace, policy_version: int, temperature: float | None) -> Rollout:
        """Make the rollout of a trace. Raises ValueError if it cannot be trained on, at this
        temperature if one is given.
        """
        if not isinstance(trace.agent.config.client, TokenClientConfig):
            raise ValueError(
                f"the agent {trace.agent.name!r} has a client of its own, so its tokens are not of "
                "the model that is trained; mark it trainable = False in the environment's setup()"
            )
        own = trace.agent.config.sampling
        wanted = (None, temperature)
        if own is not None and temperature is not None and own.temperature not in wanted:
            raise ValueError(
                f"the agent {trace.agent.name!r} samples at temperature={own.temperature:g}, and "
                f"the trainer takes logprobs at {temperature:g}; remove temperature from the "
                "agent's sampling"
            )
        versions = {id(message): spans for message, spans in self.versions.get(trace.id, [])}
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward}
        scores |= {name: value for name, value in trace.metrics.items() if value is not None}
        # Not trace.is_truncated, which counts max_turns as a truncation too.
        is_cut = any(call.finish_reason == "length" for call in trace.calls)
        rollout = Rollout(
            example_id=0,
            prompt=trace.task.data.prompt_text,
            completion=_completion_of(trace),
            env=self.name,
            role=trace.agent.name,
            reward=float(trace.reward),
            metrics={name: float(value) for name, value in scores.items()},
            samples=samples_from_trace(
                trace,
                versions,
                policy_version,
                self.options.mask_env_responses,
                {id(message): mask for message, mask in self.masks.get(trace.id, [])},
                {id(message): rows for message, rows in self.experts.get(trace.id, [])},
            ),
            num_turns=trace.num_turns,
            is_truncated=is_cut or trace.stop_condition == "context_length",
            generation_s=trace.timing.agent.duration,
        )
        rollout.has_own_advantages = any(
            branch.advantages is not None for branch in trace.branches if branch.trainable
        )
        if rollout.has_own_advantages and rollout.samples:
            rollout.set_advantage(np.concatenate([s.advantages for s in rollout.samples]))
        if not rollout.num_sampled_tokens:
            raise ValueError(
                "no token was sampled: the prompt fills max_seq_len, or the agent took no turn"
            )
        if not math.isfinite(rollout.reward):
            raise ValueError(f"the environment's reward is {rollout.reward}")
        rollout.record = self._record(trace, policy_version)
        return rollout


@dataclass(frozen=True)
class V1Recipe:
    """The `EnvRecipe` of a `V1Environment`.

    Attributes:
        env: the class of an `Env` and its config, or a taskset without its tasks.
        eval_taskset: the taskset of evaluations, without its tasks; None: they use that of `env`.
        options: those of the `V1Environment`.
    """

    env: tuple[type[vf.Env], vf.EnvConfig] | vf.Taskset
    eval_taskset: vf.Taskset | None
    options: RunnerOptions

    def make(self) -> V1ExampleRunner:
        env: Any = self.env
        if isinstance(env, tuple):
            kind, config = env
            env = kind(config)
        return V1ExampleRunner(env, self.eval_taskset, self.options)


class V1Environment(V1ExampleRunner):
    """The `EnvRunner` of an environment of `verifiers.v1`.

    A taskset without end is a stream: training uses its tasks in their order, each once.
    Evaluations then use its first `num_eval_tasks`, which training leaves out, unless evaluations
    have a taskset of their own.

    Args:
        env: see `V1ExampleRunner`. Evaluations use its attribute `eval_taskset` if it has one, else
            its taskset.
        options: see `V1ExampleRunner`.

    Raises:
        InvalidEnvironmentError: there are no tasks, a prompt has images, or an error of
            `V1ExampleRunner`.
    """

    def __init__(self, env: Any, options: RunnerOptions) -> None:
        of_evaluation = getattr(env, "eval_taskset", None)
        super().__init__(env, of_evaluation, options)
        self._given = env
        self.weights = [1.0]
        self.num_overlong_prompts = 0
        self.max_prompt_len = None if self.tokenizer is None else options.max_prompt_len
        self._eval_tasks: list[vf.Task] = []
        self._tasks: list[vf.Task] | TaskStream
        try:
            self._take_tasks(self.tasksets["train"], of_evaluation)
        except InvalidEnvironmentError as error:
            raise InvalidEnvironmentError(f"environment {self.name!r}: {error}") from error
        self.description = self._describe()

    def _take_tasks(self, taskset: Any, of_evaluation: Any) -> None:
        num_eval_tasks = self.options.num_eval_tasks
        if of_evaluation is not None:
            tasks = self._iterate(of_evaluation)
            limit = None if of_evaluation.bounded else num_eval_tasks
            self._eval_tasks = list(itertools.islice(tasks, limit))
        if not taskset.bounded:
            if of_evaluation is None:
                tasks = self._iterate(taskset)
                self._eval_tasks = list(itertools.islice(tasks, num_eval_tasks))
            num_skipped = 0 if of_evaluation is not None else len(self._eval_tasks)
            self._tasks = TaskStream(lambda: self._iterate(taskset), num_skipped)
            first = [self._tasks.at(0)]
        else:
            self._tasks = first = list(self._iterate(taskset))
            if of_evaluation is None:
                self._eval_tasks = self._tasks
        if self.num_overlong_prompts:
            logger.warning(
                "%d prompts longer than max_prompt_len=%s left out",
                self.num_overlong_prompts,
                self.max_prompt_len,
            )
        if not first:
            left_out = (
                f"; {self.num_overlong_prompts} were longer than max_prompt_len"
                if self.num_overlong_prompts
                else ""
            )
            raise InvalidEnvironmentError(f"it has no tasks{left_out}")

    def _iterate(self, taskset: Any) -> Iterator[vf.Task]:
        """Yield the taskset's tasks, without those whose first prompt is too long."""
        num_in_a_row = 0
        for task in taskset:
            check_text_only(task)
            if self._is_overlong(task):
                self.num_overlong_prompts += 1
                num_in_a_row += 1
                if not taskset.bounded and num_in_a_row >= MAX_OVERLONG:
                    raise InvalidEnvironmentError(
                        f"{num_in_a_row} tasks of its stream one after the other have a prompt "
                        f"longer than max_prompt_len={self.max_prompt_len}"
                    )
                continue
            num_in_a_row = 0
            yield task

    def _is_overlong(self, task: vf.Task) -> bool:
        limit = self.max_prompt_len
        if limit is None:
            return False
        template = self.options.chat_template_kwargs
        return len(self.render(first_messages(task), **template)) > limit

    def sizes(self, split: Split) -> list[int]:
        """Return the number of tasks of this split, as a list of one; `ENDLESS` for a stream."""
        tasks = self._tasks if split == "train" else self._eval_tasks
        return [ENDLESS if isinstance(tasks, TaskStream) else len(tasks)]

    def _describe(self) -> str:
        """Return one line for the start of a run."""
        num_held_out = len(self._eval_tasks)
        of_evaluation = f", {num_held_out} for evaluations"
        if self._eval_tasks is self._tasks:
            of_evaluation = ", also for evaluations"
        tasks = describe_sizes(self.sizes("train"))
        tasks += " of tasks, in its order" if isinstance(self._tasks, TaskStream) else " tasks"
        which = "environment" if self.name == "env" else f"environment {self.name!r}"
        has_tools_here = self._local_tools is not None and self._local_tools.has_any
        of_tools = "; its tools are called in this process" if has_tools_here else ""
        return f"{which}: {describe(self.env)}{of_tools}; {tasks}{of_evaluation}"

    def recipe(self) -> V1Recipe:
        first = self._tasks.at(0) if isinstance(self._tasks, TaskStream) else self._tasks[0]
        check_portable(self.tasksets["train"], first)
        if self._eval_tasks:
            check_portable(self.tasksets["eval"], self._eval_tasks[0])
        env = self._given
        given = without_tasks(env) if isinstance(env, vf.Taskset) else (type(env), env.config)
        of_evaluation = getattr(env, "eval_taskset", None)
        if of_evaluation is not None:
            of_evaluation = without_tasks(of_evaluation)
        return V1Recipe(given, of_evaluation, self.options)

    async def example(self, split: Split, index: int) -> dict[str, Any]:
        task = await self._task(split, index)
        return {"task": pack_task(self.tasksets[split], task)}

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Do as `V1ExampleRunner.run_task`, for this task of its split."""
        rollouts = await self.run_task(await self._task(request.split, request.index), request)
        for rollout in rollouts:
            rollout.example_id = request.index
        return rollouts

    async def _task(self, split: Split, index: int) -> vf.Task:
        if split == "eval":
            return self._eval_tasks[index]
        if not isinstance(self._tasks, TaskStream):
            return self._tasks[index]
        deadline_s = max(self.options.timeout_s, LOAD_S)
        try:
            # On a thread: a resumed run makes all earlier tasks, and a stream may read files.
            return await asyncio.wait_for(asyncio.to_thread(self._tasks.at, index), deadline_s)
        except TimeoutError as error:
            raise InvalidEnvironmentError(
                f"environment {self.name!r}: task {index} of its stream did not come within "
                f"{deadline_s:g} s; raise generation_timeout"
            ) from error


def failure_of(episode: vf.Episode) -> EpisodeError:
    """Return the error that verifiers recorded for a failed episode."""
    # A retried trace also has the errors of its earlier attempts, so the last one counts.
    ends = [episode, *(trace for trace in episode.traces if trace.has_error)]
    last = [end.last_error for end in ends if end.last_error is not None]
    if not last:
        return EpisodeError("the episode did not complete")
    failure = EpisodeError(f"{last[0].type}: {last[0].message}")
    failure.add_note(last[0].traceback or "")
    return failure


def _completion_of(trace: Any) -> str:
    """Return what came after the prompt in the last branch, as text."""
    nodes = trace.branches[-1].nodes if trace.branches else []
    start = next((at for at, node in enumerate(nodes) if node.sampled), len(nodes))
    return text_of([node.message for node in nodes[start:]])


def samples_from_trace(
    trace: Any,
    versions: Mapping[int, list[tuple[int, int]]],
    policy_version: int,
    mask_env_responses: bool = True,
    masks: Mapping[int, np.ndarray] = MappingProxyType({}),
    experts: Mapping[int, np.ndarray] = MappingProxyType({}),
) -> list[Sample]:
    """Return one sample for each branch. Tokens that branches share are in the loss of the first
    branch only. Advantages that the environment gave to the tokens of a branch become those of its
    sample.

    Args:
        trace: a `verifiers.v1.Trace`.
        versions: the policy versions of a reply's tokens, by the `id` of its message.
        policy_version: version for replies that are not in `versions`.
        mask_env_responses: leave tokens that the environment put between turns out of the loss.
        masks: from which tokens a reply's were sampled, by the `id` of its message.
        experts: of a reply's tokens and all before, by the `id` of its message.

    Raises:
        ValueError: a reply has lost its tokens (an interceptor rewrote it).
    """
    trained: set[int] = set()
    samples = []
    for branch in trace.branches:
        if not branch.trainable:
            continue  # a compaction attempt that the harness gave up
        parts = []
        masks_of_parts: list[tuple[int, np.ndarray | None]] = []
        has_begun = False
        for node in branch.nodes:
            is_sampled = np.asarray(node.mask, bool)
            if node.sampled and not is_sampled.any():
                raise ValueError("a reply was rewritten; its tokens are not those sampled")
            is_new = id(node) not in trained
            trained.add(id(node))
            num_sampled = int(np.count_nonzero(is_sampled))
            if len(node.logprobs) != num_sampled:
                raise ValueError(f"{num_sampled} sampled tokens but {len(node.logprobs)} logprobs")
            check_logprobs(node.logprobs)
            in_loss = is_sampled & is_new
            logprobs = np.zeros(len(is_sampled), np.float32)
            logprobs[is_sampled] = node.logprobs
            if not mask_env_responses:
                is_between = ~is_sampled & (has_begun | np.logical_or.accumulate(is_sampled))
                in_loss |= is_between & is_new
                # NaN: no policy sampled these. The loss uses the trainer's logprob, so ratio 1.
                logprobs[is_between] = math.nan
            versions_of = np.full(len(is_sampled), -1, np.int32)
            if is_new:
                spans = versions.get(id(node.message)) or [(0, policy_version)]
                versions_of[is_sampled] = versions_of_tokens(spans, num_sampled)
            parts.append((np.asarray(node.token_ids, np.int32), in_loss, logprobs, versions_of))
            mask = masks.get(id(node.message)) if num_sampled else None
            if mask is not None:
                rows = np.full((len(is_sampled), mask.shape[1]), -1, np.int32)
                rows[is_sampled] = mask
                mask = rows
            masks_of_parts.append((len(is_sampled), mask))
            has_begun = has_begun or num_sampled > 0
        fields = [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]
        if fields and fields[1].any():  # a token is in the loss
            of_replies = [experts.get(id(node.message)) for node in branch.nodes]
            extras = {
                ALLOWED_TOKENS: join_column(masks_of_parts),
                ROUTED_EXPERTS: join_experts(len(fields[0]), of_replies),
            }
            known = {name: column for name, column in extras.items() if column is not None}
            sample = Sample(*fields, extras=known)
            if branch.advantages is not None:
                sample.set_advantage(branch.advantages)
            samples.append(sample)
    return samples
