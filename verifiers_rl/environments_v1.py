"""Environments of `verifiers.v1`: tasksets, agents in harnesses, episodes; behind the same calls as
classic ones.

    episode            agents play a task; each leaves a trace of what it did
    trace              one rollout, if its agent is trained: a graph of messages
    branch             one sample: a path from the graph's root to a leaf, its tokens one after the
                       other; what was sampled is in the loss once

Model calls come to verifiers' interception endpoint, in this process. `_TokenClient` takes them
from there to `vf-vllm` as tokens: those so far as they were, and those of new messages from the
trainer's own tokenizer; so the turns of a trace are one sequence wherever its messages are.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import verifiers.v1 as vf
from jinja2 import TemplateError
from pydantic import PrivateAttr
from verifiers.v1.dialects import Dialect
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import server as interception
from verifiers.v1.utils.prime import ensure_prime_auth

from verifiers_rl.chat_template import as_vllm_renders
from verifiers_rl.environments import (
    InvalidEnvironmentError,
    Split,
    text_of,
    versions_of_tokens,
)
from verifiers_rl.server_client import ServerClient, policy_versions
from verifiers_rl.types import LOAD_S, Rollout, Sample, Slots
from verifiers_rl.v1_versions import (
    is_for_training,
    is_infinite,
    prompt_too_long,
    ran_out_of_time,
    tokens_so_far,
)

logger = logging.getLogger(__name__)

IN_PROCESS = "verifiers_rl"  # id of `chat_harness.ChatHarness`
EXIT_S = 30.0  # an environment has so long to end what its episodes share


class EpisodeError(RuntimeError):
    """What verifiers recorded of an episode that failed; its traceback is a note."""


def load_v1_environment(table: Mapping[str, Any], search_path: Path | None = None) -> vf.Env:
    """The environment of a TOML's table: `harness` of the only agent, `eval_taskset`, and whatever
    else verifiers' `EnvConfig` takes.

    Raises:
        InvalidEnvironmentError: verifiers refuses it; the message is verifiers'.
    """
    from verifiers.v1.utils.loaders import load_environment, load_taskset, resolve_env_config

    if search_path is not None:
        if str(search_path) not in sys.path:
            sys.path.insert(0, str(search_path))
        _let_tool_servers_import_from(search_path)
    table = dict(table)
    try:
        if "harness" in table:
            agent = dict(table.get("agent", {}))
            table["agent"] = agent | {"harness": table.pop("harness")}
        of_evaluation = table.pop("eval_taskset", None)
        env = load_environment(resolve_env_config(table))
        if of_evaluation is not None:
            config = {"taskset": dict(table["taskset"]) | of_evaluation}
            env.eval_taskset = load_taskset(resolve_env_config(table | config).taskset)
        return env
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise InvalidEnvironmentError(
            f"cannot load the environment {table}: {type(error).__name__}: {error}"
        ) from error


def _let_tool_servers_import_from(folder: Path) -> None:
    """They are processes of their own, which import the taskset's module too."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, paths)])


def load_v1_taskset(taskset_id: str) -> vf.Taskset:
    """An installed taskset with its defaults.

    Raises:
        InvalidEnvironmentError: there is none, or it does not load; the message is verifiers'.
    """
    from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

    try:
        return load_taskset(resolve_env_config({"taskset": {"id": taskset_id}}).taskset)
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise InvalidEnvironmentError(
            f"cannot load the taskset {taskset_id!r}: {type(error).__name__}: {error}. (Not a "
            "taskset? Pass the environment itself)"
        ) from error


class V1Environment:
    """An environment of `verifiers.v1` for the orchestrator, with the calls of
    `environments_classic.ClassicEnvironment`.

    An agent in the `null` harness gets `chat_harness.ChatHarness`, and the local runtime unless
    another is set; other harnesses run as they are.

    Args:
        env: an `Env`, or a taskset, which one agent plays (in a chat, if it has no harness of its
            own). Evaluations use its attribute `eval_taskset`, if it has one, else its taskset.
        base_url, tokenizer, max_prompt_len, mask_env_responses, timeout_s, name, sampling_args: as
            for `ClassicEnvironment`.
        max_seq_len: replies end there, and the trace counts as truncated.
        client_type: only the default.

    Raises:
        InvalidEnvironmentError: no tasks or infinitely many, another client_type.
    """

    RUNS_IN_WORKERS = False
    bounds_replies = True  # to what is left of max_seq_len

    def __init__(
        self,
        env: Any,
        base_url: str,
        tokenizer: Any,
        max_seq_len: int,
        max_prompt_len: int | None = None,
        mask_env_responses: bool = True,
        timeout_s: float = 600.0,
        client_type: str = "openai_chat_completions_token",
        name: str = "env",
        sampling_args: dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(env, vf.Env | vf.Taskset):
            raise InvalidEnvironmentError(
                f"environment {name!r}: expected an Env or a Taskset, got {type(env).__name__}"
            )
        if client_type != "openai_chat_completions_token":
            raise InvalidEnvironmentError(
                f"environment {name!r}: client_type={client_type!r}: environments of verifiers.v1 "
                'are run with "openai_chat_completions_token" only; leave client_type out'
            )
        of_evaluation = getattr(env, "eval_taskset", None)
        module = sys.modules.get(type(getattr(env, "taskset", env)).__module__)
        folder = Path(getattr(module, "__file__", None) or "").parent
        if str(folder) in sys.path and "site-packages" not in folder.parts:  # beside a script
            _let_tool_servers_import_from(folder)
        try:
            env = _played_by_one_agent(env) if isinstance(env, vf.Taskset) else env
            self.env = _with_chat_harness(env)
        except (ValueError, TypeError) as error:
            raise InvalidEnvironmentError(f"environment {name!r}: {error}") from error
        self.base_url = base_url
        self.tokenizer = tokenizer
        self.special_ids: set[int] = set()
        if tokenizer is not None:
            self.special_ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self.max_seq_len = max_seq_len
        self.mask_env_responses = mask_env_responses
        self.timeout_s = timeout_s
        self.name = name
        self.sampling_args = sampling_args
        self.weights = [1.0]
        self.is_multi_turn = True
        # Of each trace that is running: replies, and the policy versions of their tokens.
        self.versions: dict[str, list[tuple[Any, list[tuple[int, int]]]]] = {}
        self.num_overlong_prompts = 0
        self._tasks = {"train": self._within(env.taskset, max_prompt_len)}
        self._tasks["eval"] = (
            self._within(of_evaluation, max_prompt_len) if of_evaluation else self._tasks["train"]
        )
        if not self._tasks["train"]:
            left_out = (
                f", {self.num_overlong_prompts} were longer than max_prompt_len"
                if self.num_overlong_prompts
                else ""
            )
            raise InvalidEnvironmentError(f"environment {name!r} has no tasks{left_out}")
        self._serving: asyncio.Task[None] | None = None
        self.endpoint_session: aiohttp.ClientSession | None = None  # of `chat_harness`

    def _within(self, taskset: Any, max_prompt_len: int | None) -> list[Any]:
        """Its tasks without those whose first prompt is too long."""
        if is_infinite(taskset):
            raise InvalidEnvironmentError(
                f"environment {self.name!r}: its taskset is infinite; pass the first n tasks, "
                "taskset.take(n) (before verifiers 0.4: head)"
            )
        tasks = list(taskset)
        if max_prompt_len is None or self.tokenizer is None:
            return tasks
        kept = [t for t in tasks if len(self.render(first_messages(t))) <= max_prompt_len]
        if len(kept) < len(tasks):
            self.num_overlong_prompts += len(tasks) - len(kept)
            logger.warning(
                "%d prompts longer than max_prompt_len=%d left out",
                len(tasks) - len(kept),
                max_prompt_len,
            )
        return kept

    def sizes(self, split: Split) -> list[int]:
        """Tasks of this split, one number for each environment."""
        return [len(self._tasks[split])]

    @property
    def first_prompt(self) -> list[Any]:
        return next((m for task in self._tasks["train"] if (m := first_messages(task))), [])

    @property
    def eval_dataset(self) -> Any:
        return self._tasks["eval"]

    def render(self, messages: list[Any], is_prompt: bool = True, **template: Any) -> list[int]:
        """Token ids of messages, with the beginning of a reply if `is_prompt`; `template` goes to
        the chat template. Of no messages (a user opens the conversation) none.
        """
        if not messages:
            return []
        return self.tokenizer.apply_chat_template(
            [as_vllm_renders(message) for message in messages],
            add_generation_prompt=is_prompt,
            return_dict=False,
            **template,
        )

    async def open(self) -> None:
        """Start what the environment shares between episodes.

        Raises:
            InvalidEnvironmentError: a runtime that needs a login, or not ready in time.
        """
        roles = self.env.config.agent_harnesses()
        if any(getattr(self.env.config, role).runtime.type == "prime" for role in roles):
            try:
                ensure_prime_auth()
            except SystemExit as error:
                raise InvalidEnvironmentError(
                    f"environment {self.name!r}: {error}; or set a runtime for the agent, "
                    'runtime = { type = "docker" } or "subprocess"'
                ) from error
        self.endpoint_session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        is_up = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Event()

        async def serve() -> None:  # in a task of its own: what opens a context also closes it
            try:
                async with self.env.serving():
                    is_up.set_result(None)
                    await self._stopping.wait()
            except Exception as error:
                if is_up.done():
                    raise
                is_up.set_exception(error)

        self._serving = asyncio.create_task(serve())
        deadline_s = max(self.timeout_s, LOAD_S)
        try:
            await asyncio.wait_for(is_up, deadline_s)
        except TimeoutError as error:
            raise InvalidEnvironmentError(
                f"environment {self.name!r}: not ready within {deadline_s:g} s; raise "
                "generation_timeout"
            ) from error

    async def close(self) -> None:
        if self.endpoint_session is not None:
            await self.endpoint_session.close()
        if self._serving is not None:
            self._stopping.set()
            _, late = await asyncio.wait([self._serving], timeout=EXIT_S)
            for task in late:
                logger.warning("environment %r: not closed within %g s", self.name, EXIT_S)
                task.cancel()

    async def run_group(
        self,
        split: Split,
        index: int,
        num_rollouts: int,
        model: str,
        sampling_args: dict[str, Any],
        policy_version: int,
        slots: Slots,
    ) -> list[Rollout]:
        """`num_rollouts` episodes of one task, each a rollout for each trace of a trained agent. An
        error costs its own episode only.
        """
        config = _TokenClientConfig(
            base_url=self.base_url,
            api_key_var="VLLM_API_KEY",
            sampling=self.sampling_args or sampling_args,
        )
        config._environment = self
        context = vf.ModelContext(model=model, client=config)
        task = self._tasks[split][index]
        runs = [self._run(task, context, policy_version, slots) for _ in range(num_rollouts)]
        rollouts = [rollout for episode in await asyncio.gather(*runs) for rollout in episode]
        for rollout in rollouts:
            rollout.example_id = index
        return rollouts

    async def _run(
        self, task: vf.Task, context: vf.ModelContext, policy_version: int, slots: Slots
    ) -> list[Rollout]:
        (slot,) = self.env.slots(task)
        failed = Rollout(0, task.data.prompt_text, env=self.name)
        async with slots:
            try:
                episode = await asyncio.wait_for(self.env.run_slot(slot, context), self.timeout_s)
                if not episode.ok:
                    raise _failure_of(episode)
                if late := [t.agent.name for t in episode.traces if ran_out_of_time(t)]:
                    raise EpisodeError(
                        f"the agent {late[0]!r} ran out of its own time; raise what is set under "
                        f"[env.{late[0]}.timeout]"
                    )
                traces = [trace for trace in episode.traces if trace.agent.trainable]
                if not traces:
                    raise ValueError("no agent of the episode is trainable")
                temperature = context.client.sampling["temperature"]
                return [self._rollout(trace, policy_version, temperature) for trace in traces]
            except TimeoutError:
                failed.error = TimeoutError(
                    f"an episode took longer than generation_timeout ({self.timeout_s:g} s)"
                )
            except Exception as error:  # whatever the environment's own code raises
                failed.error = error
            finally:
                for trace in slot.traces:
                    self.versions.pop(trace.id, None)
        return [failed]

    def _rollout(self, trace: vf.Trace, policy_version: int, temperature: float) -> Rollout:
        """Raises ValueError for what cannot be trained."""
        if not isinstance(trace.agent.config.client, _TokenClientConfig):
            raise ValueError(
                f"the agent {trace.agent.name!r} has a client of its own, so its tokens are not of "
                "the model that is trained; mark it trainable = False in the environment's setup()"
            )
        own = trace.agent.config.sampling
        if own is not None and own.temperature not in (None, temperature):
            raise ValueError(
                f"the agent {trace.agent.name!r} samples at temperature={own.temperature:g}, and "
                f"the trainer takes logprobs at {temperature:g}; take it out of its sampling"
            )
        versions = {id(message): spans for message, spans in self.versions.get(trace.id, [])}
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward}
        scores |= {name: value for name, value in trace.metrics.items() if value is not None}
        # Not trace.is_truncated, for which max_turns is a truncation too.
        is_cut = any(call.finish_reason == "length" for call in trace.calls)
        rollout = Rollout(
            example_id=0,
            prompt=trace.task.data.prompt_text,
            completion=_completion_of(trace),
            env=self.name,
            role=trace.agent.name,
            reward=float(trace.reward),
            metrics={name: float(value) for name, value in scores.items()},
            samples=samples_from_trace(trace, versions, policy_version, self.mask_env_responses),
            num_turns=trace.num_turns,
            is_truncated=is_cut or trace.stop_condition == "context_length",
            generation_s=trace.timing.agent.duration,
        )
        if not rollout.num_sampled_tokens:
            raise ValueError(
                "no token was sampled: the prompt fills max_seq_len, or the agent took no turn"
            )
        if not math.isfinite(rollout.reward):
            raise ValueError(f"the environment's reward is {rollout.reward}")
        return rollout


def _failure_of(episode: vf.Episode) -> EpisodeError:
    # A trace that was retried also has the errors of its attempts before.
    ends = [episode, *(trace for trace in episode.traces if trace.has_error)]
    last = [end.last_error for end in ends if end.last_error is not None]
    if not last:
        return EpisodeError("the episode did not complete")
    failure = EpisodeError(f"{last[0].type}: {last[0].message}")
    failure.add_note(last[0].traceback or "")
    return failure


def _completion_of(trace: Any) -> str:
    """What came after the prompt, in the last branch."""
    nodes = trace.branches[-1].nodes if trace.branches else []
    start = next((at for at, node in enumerate(nodes) if node.sampled), len(nodes))
    return text_of([node.message for node in nodes[start:]])


def samples_from_trace(
    trace: Any,
    versions: Mapping[int, list[tuple[int, int]]],
    policy_version: int,
    mask_env_responses: bool = True,
) -> list[Sample]:
    """One sample for each branch; what branches share is in the loss of the first.

    Args:
        trace: a `verifiers.v1.Trace`.
        versions: the policy versions of a reply's tokens, by the `id` of its message.
        policy_version: for replies that are not there.
        mask_env_responses: leave tokens that the environment put between turns out of the loss.

    Raises:
        ValueError: a reply without its tokens (an interceptor rewrote it).
    """
    trained: set[int] = set()
    samples = []
    for branch in filter(is_for_training, trace.branches):
        token_ids, loss_mask, inference_logprobs, versions_of = [], [], [], []
        has_begun = False
        for node in branch.nodes:
            if node.sampled and not any(node.mask):
                raise ValueError("a reply was rewritten; its tokens are not those sampled")
            is_new = id(node) not in trained
            trained.add(id(node))
            spans = versions.get(id(node.message)) or [(0, policy_version)]
            own = zip(node.logprobs, versions_of_tokens(spans, sum(node.mask)), strict=True)
            for token, is_sampled in zip(node.token_ids, node.mask, strict=True):
                logprob, version = next(own) if is_sampled else (0.0, -1)
                is_between = has_begun and not is_sampled and not mask_env_responses
                token_ids.append(token)
                loss_mask.append(is_new and (is_sampled or is_between))
                # NaN: no policy sampled these; the loss takes the trainer's own logprob, ratio 1.
                inference_logprobs.append(math.nan if is_between else logprob)
                versions_of.append(version if is_new else -1)
                has_begun = has_begun or is_sampled
        if any(loss_mask):
            samples.append(Sample(token_ids, loss_mask, inference_logprobs, versions_of))
    return samples


def first_messages(task: vf.Task) -> list[dict[str, Any]]:
    """The first prompt, as a chat template takes it."""
    data = task.data
    messages = [] if not data.system_prompt else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*messages, {"role": "user", "content": data.prompt}]
    return messages + [message_to_wire(message) for message in data.prompt or []]


def _with_chat_harness(env: vf.Env) -> vf.Env:
    """The environment with our harness where it has the `null` one."""
    changed = {}
    for role, harness in env.config.agent_harnesses().items():
        if harness.id in ("null", IN_PROCESS):
            from verifiers_rl.chat_harness import ChatHarnessConfig

            agent = getattr(env.config, role)
            ours = ChatHarnessConfig(**harness.model_dump(exclude={"id"}))
            default = type(agent).model_fields["runtime"].default
            is_default = agent.runtime.model_dump() == default.model_dump()
            runtime = vf.SubprocessConfig() if is_default else agent.runtime
            changed[role] = agent.model_copy(update={"harness": ours, "runtime": runtime})
    if not changed:
        return env
    copy = type(env)(env.config.model_copy(update=changed))
    own = {name: value for name, value in vars(env).items() if name not in vars(copy)}
    vars(copy).update(own, taskset=env.taskset)
    return copy


def _played_by_one_agent(taskset: vf.Taskset) -> vf.Env:
    """In the taskset's own harness, if it has one, else in a chat."""
    config = vf.SingleAgentEnvConfig(taskset=taskset.config)
    if config.agent_harnesses()["agent"].id == "bash":  # verifiers' default
        config = vf.SingleAgentEnvConfig(taskset=taskset.config, agent={"harness": {"id": "null"}})
    env = vf.SingleAgentEnv(config)
    env.taskset = taskset
    return env


# --- Model calls ----------------------------------------------------------------------------------


class _TokenClientConfig(vf.TrainClientConfig):
    """Which of our environments a model call belongs to, and its sampling options."""

    sampling: dict[str, Any]
    _environment: V1Environment = PrivateAttr()


class _TokenClient(vf.Client):
    """From the interception endpoint to `vf-vllm`'s `/v1/chat/completions/tokens`."""

    def __init__(self, config: _TokenClientConfig) -> None:
        self._env = config._environment
        self._sampling = {**config.sampling}
        self._sampling |= self._sampling.pop("extra_body", {})
        self._http = ServerClient(f"{config.base_url}/v1", self._env.timeout_s)

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: vf.SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(
                f"{type(dialect).__name__}: only chat completions can be trained on; use a harness "
                "that asks for them",
                status_code=400,
            )
        own = sampling.model_dump(exclude_none=True)  # the agent's
        extra = {k: v for k, v in own.pop("extra_body", {}).items() if v is not None}
        options = self._sampling | extra | own
        template = {"tools": body.get("tools")}
        template |= options.pop("chat_template_kwargs", body.get("chat_template_kwargs", {}))
        prompt_ids = self._prompt_ids(body["messages"], turn, template)
        room = self._env.max_seq_len - len(prompt_ids)
        if room < 1:
            raise prompt_too_long(
                turn,
                f"maximum context length: {len(prompt_ids)} tokens fill max_seq_len="
                f"{self._env.max_seq_len}",
                IN_PROCESS,
            )
        request = body | options | {"tokens": prompt_ids}
        # verifiers makes a stream of the whole reply for a program that asks for one; and the limit
        # of the next line is the only one.
        for name in ("stream", "stream_options", "max_completion_tokens"):
            request.pop(name, None)
        request["max_tokens"] = min(options.get("max_tokens") or room, room)
        # The tokens are the prompt. vLLM renders messages all the same, and refuses them if they,
        # rendered anew, have more tokens than those.
        request["messages"] = [{"role": "user", "content": "."}]
        policy_versions.set(None)
        try:
            reply = await self._http.post(
                "/chat/completions/tokens", cast_to=httpx.Response, body=request
            )
        except openai.OpenAIError as error:
            if "context length" in str(error):
                raise prompt_too_long(turn, str(error), IN_PROCESS) from error
            status = getattr(error, "status_code", 503)
            raise ProviderError(str(error), status_code=status) from error
        completion = reply.json()
        (choice,) = completion["choices"]
        tokens, logprobs = choice.pop("token_ids"), choice.pop("logprobs")["content"]
        completion.pop("prompt_token_ids", None)
        response = dialect.parse_response(dialect.validate_response(completion))
        response.raw = completion
        response.tokens = vf.TurnTokens(
            prompt_ids=prompt_ids,
            completion_ids=tokens,
            completion_logprobs=[entry["logprob"] for entry in logprobs],
        )
        if session_id and (spans := policy_versions.get()):
            self._env.versions.setdefault(session_id, []).append((response.message, spans))
        return response

    def _prompt_ids(
        self, messages: list[Any], turn: PendingTurn | None, template: dict[str, Any]
    ) -> list[int]:
        """The tokens so far and those of new messages; all anew where that cannot be."""
        tokens = tokens_so_far(turn) if turn is not None else None
        if turn is not None and tokens is not None:
            last = turn.prefix_node_ids[-1]
            was_cut = any(c.node == last and c.finish_reason == "length" for c in turn.trace.calls)
            all_new = turn.tail and all(message.role != "assistant" for message in turn.tail)
            if all_new and not was_cut:
                added = self._tokens_after(messages, len(turn.tail), tokens[-1], template)
                if added is not None:
                    return tokens + added
        return self._env.render(messages, **template)

    def _tokens_after(
        self, messages: list[Any], num_new: int, last_token: int, template: dict[str, Any]
    ) -> list[int] | None:
        """What the template writes after a reply that ended with this token, for the last
        `num_new` messages; None if that is no token by which replies end.

        A short reply stands in for the real one, whose tokens are known, and which the template
        may render otherwise than it was sampled.
        """
        if last_token not in self._env.special_ids:
            return None
        question = {"role": "user", "content": "?"}
        reply = {**messages[-num_new - 1], "content": "."}
        reply = {k: reply[k] for k in ("role", "content", "tool_calls") if reply.get(k)}
        try:
            before = self._env.render([question], is_prompt=False, **template)
            after = self._env.render([question, reply, *messages[-num_new:]], **template)
        except TemplateError:
            return None  # it takes no such conversation
        ends = [at for at, token in enumerate(after) if token == last_token]
        num_before = before.count(last_token)
        return after[ends[num_before] + 1 :] if len(ends) > num_before else None

    async def relay(self, *args: Any, **kwargs: Any) -> Any:
        raise ProviderError("streamed replies cannot be trained on", status_code=400)

    async def close(self) -> None:
        await self._http.close()


_stock_resolve_client = interception.resolve_client


def _resolve_client(config: Any) -> vf.Client:
    """verifiers makes its clients from their configurations, and knows two kinds."""
    if isinstance(config, _TokenClientConfig):
        return _TokenClient(config)
    return _stock_resolve_client(config)


interception.resolve_client = _resolve_client
