"""`env_from`: makes an environment of one turn from prompts and reward functions, as a taskset of
verifiers, and `DatasetEnvironment` plays it.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.dialects.chat import parse_message

from verifiers_rl.envs.base import (
    InvalidEnvironmentError,
    Turn,
    finite_reward,
    samples_from_turns,
)
from verifiers_rl.envs.chat_harness import first_messages
from verifiers_rl.envs.records import message_of, text_of, without_none
from verifiers_rl.envs.v1 import V1Environment
from verifiers_rl.inference import RolloutSession
from verifiers_rl.json_text import as_json
from verifiers_rl.option_rules import did_you_mean
from verifiers_rl.process.loop_thread import run_contained
from verifiers_rl.requests import GroupRequest
from verifiers_rl.types import Rollout

REPLY = "completion"  # the parameter of a reward function that gets the model's reply
RewardFn = Callable[..., Any]


class ExampleTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """An example of a dataset: its prompt, and rewards from the functions of its taskset.

    Attributes:
        row: what the functions get of the example.
        rewards: name, weight and function of each reward, and the function's parameters.
    """

    row: Mapping[str, Any]
    rewards: list[Any]

    @vf.reward
    async def reward(self, trace: vf.Trace) -> dict[str, float]:
        """Record each reward with its weight. Returns {}: there is no other one."""
        scores = await self.scores_of(trace.last_reply)
        for name, weight, *_ in self.rewards:
            trace.record_reward(name, scores[name], weight)
        return {}

    async def scores_of(self, reply: str) -> dict[str, float]:
        """Return what each reward function gives a reply, by its name.

        Raises:
            ValueError: a function returns no finite number.
        """
        values, scores = {**self.row, REPLY: reply}, dict[str, float]()
        for name, _, reward_fn, parameters in self.rewards:
            # A column that only other rows have is left to the parameter's default.
            own = {one: _copied(values[one]) for one in parameters if one in values}
            given = reward_fn(**own)
            if inspect.isawaitable(given):
                given = await given
            try:
                # Of Python, of numpy, or in a tensor; float() would take texts.
                scores[name] = given.__float__()
            except Exception:  # whatever its type raises
                scores[name] = math.nan
            if not math.isfinite(scores[name]):
                raise ValueError(
                    f"the reward function {name!r} returned {given!r:.80}, which is no finite "
                    "number"
                )
        return scores


def _copied(value: Any) -> Any:
    """Return a copy, so that others do not see what a function changes in it."""
    with suppress(Exception):
        return copy.deepcopy(value)
    return value  # a lock cannot be copied, and is shared


def _as_verifiers(message: Any) -> Any:
    """Return a message with tool calls of OpenAI's form as verifiers has it; others as they are."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not any(isinstance(call, dict) and "function" in call for call in calls or ()):
        return message
    return parse_message(message)


class ExampleTaskset(vf.Taskset[ExampleTask, vf.TasksetConfig]):
    """The examples of a dataset.

    Attributes:
        columns: all that rows have, and the number of the first row that lacks it, or None.
    """

    def __init__(
        self,
        dataset: Any,
        rewards: list[Any],
        system_prompt: str | None,
        name: str,
    ) -> None:
        super().__init__(vf.TasksetConfig())
        rows, what = examples_of(dataset, name), f"env_from: {name}"
        self.columns = {
            column: next((number for number, row in enumerate(rows) if column not in row), None)
            for column in dict.fromkeys(chain.from_iterable(rows))
        }
        known = {REPLY: None} | self.columns
        # A worker that gets the taskset imports the functions' scripts.
        self.rewards = [
            (one, weight, fn, parameters_from(fn, known, f"{what}: the reward function {one!r}"))
            for one, weight, fn in rewards
        ]
        wanted = {name for *_, parameters in self.rewards for name in parameters}
        self.tasks: list[ExampleTask] = []
        for number, row in enumerate(rows):
            try:
                prompt = without_none(row["prompt"])
                if isinstance(prompt, list):  # its tool calls may have OpenAI's form
                    prompt = [_as_verifiers(message) for message in prompt]
                data = vf.TaskData(idx=number, prompt=prompt, system_prompt=system_prompt)
            except ValidationError as error:
                raise InvalidEnvironmentError(
                    f"{what}, row {number}: prompt={row['prompt']!r:.80} is neither a "
                    'string nor a list of messages like {"role": "user", "content": "..."}: '
                    f"{error.errors()[0]['msg']}"
                ) from error
            if not data.prompt:
                raise InvalidEnvironmentError(
                    f"{what}, row {number}: prompt={prompt!r} is empty; give one, or leave the row "
                    "out"
                )
            messages = [] if isinstance(data.prompt, str) else data.prompt
            if system_prompt is not None and any(m.role == "system" for m in messages):
                raise InvalidEnvironmentError(
                    f"{what}, row {number}: the prompt has a system message of its own; leave "
                    "system_prompt out"
                )
            task = ExampleTask(data, self.config.task)
            task.row = {name: row[name] for name in row if name in wanted}
            task.rewards = self.rewards
            self.tasks.append(task)

    def load(self) -> Iterable[ExampleTask]:
        return self.tasks

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tasks": []}  # a worker gets them one by one


class DatasetEnvironment(V1Environment):
    """The `EnvRunner` of `env_from`. A rollout is a prompt, a request and a reward, so it needs
    neither an endpoint nor a trace, which take most of the time of other short rollouts.
    """

    async def _play(
        self, task: Any, request: GroupRequest, session: RolloutSession
    ) -> list[Rollout]:
        prompt, begun_at, turns = first_messages(task.data), time.time(), []
        rollout = Rollout(0, task.data.prompt_text, role="agent")
        messages = [*map(message_of, prompt)]
        try:
            async with session.limited(request.timeout_s):
                body = {**request.sampling_args, "model": request.model}
                prompt_ids = self.renderer.render(prompt, **body.pop("chat_template_kwargs", {}))
                limit = self.options.max_seq_len
                if (room := limit - len(prompt_ids)) < 1:
                    raise ValueError(
                        f"the prompt's {len(prompt_ids)} tokens fill max_seq_len={limit}"
                    )
                body["max_tokens"] = min(body.get("max_tokens") or room, room)
                reply = await self.client.of_rollout(session).reply_to(
                    body, prompt_ids, is_first=True
                )
                (choice,) = reply.completion["choices"]
                message, finish_reason = choice["message"], choice["finish_reason"]
                message |= {"reasoning_content": message.get("reasoning")}
                (sample,) = samples_from_turns([Turn(prompt_ids, reply)], request.policy_version)
                rollout.generation_s = time.time() - begun_at
                rollout.num_turns, rollout.is_truncated = 1, finish_reason == "length"
                rollout.completion = text_of([message])
                messages.append(message_of(message))
                turns.append(
                    {
                        "message": len(prompt),
                        "begin_s": 0.0,
                        "end_s": rollout.generation_s,
                        "num_prompt_tokens": len(prompt_ids),
                        "num_sampled_tokens": sample.num_loss_tokens,
                        "policy_version": int(sample.policy_versions[-1]),
                        "finish_reason": finish_reason,
                    }
                )
                scores = rollout.metrics = await run_contained(
                    task.scores_of((message.get("content") or "").strip())
                )
                total = sum(scores[name] * weight for name, weight, *_ in task.rewards)
                rollout.reward, rollout.samples = finite_reward(total), [sample]
        except Exception as error:  # whatever the reward function raises
            rollout.error = error
        rollout.record = as_json({"begun_at": begun_at, "messages": messages, "turns": turns})
        return [rollout]


def env_from(
    dataset: Any,
    reward_fn: RewardFn | Sequence[RewardFn],
    system_prompt: str | None = None,
    eval_dataset: Any = None,
    weights: Sequence[float] | None = None,
    kind: Callable[..., ExampleTaskset] = ExampleTaskset,
) -> vf.Taskset:
    """Make an environment of one turn, as a taskset of `verifiers.v1`.

    Args:
        dataset: a list of dicts, a `datasets.Dataset` or a frame (pandas, polars, pyarrow), whose
            column `prompt` holds strings or lists of messages; or a list of prompts as strings.
        reward_fn: returns the reward of one reply. It gets what its parameters name: `completion`,
            the reply as text; `prompt`; any other column of the dataset; `**kwargs` gets all of
            these. A column that a row lacks is left to the parameter's default, and what a partial
            has bound stays. It runs in a rollout worker (`env_workers`) if it is defined in a
            module, or in a script that has `if __name__ == "__main__":`, else in the trainer's
            process. A function that waits should be async, because otherwise all rollouts of its
            process wait with it. Of several, the reward is the sum; each one's own score has the
            function's name in the metrics and in `Rollout.metrics`.
        system_prompt: put before each prompt.
        eval_dataset: for evaluations, in place of `dataset`.
        weights: of the functions in that sum; by default 1 each.
        kind: class of the taskset.

    Raises:
        InvalidEnvironmentError: there are no examples or no prompts, a parameter of a reward
            function names no column, or weights or names do not fit the functions.
    """
    if not isinstance(system_prompt, str | None):
        raise InvalidEnvironmentError(f"env_from: system_prompt={system_prompt!r} is no string")
    functions = reward_fn if isinstance(reward_fn, list | tuple) else [reward_fn]
    if not functions or not all(map(callable, functions)):
        raise InvalidEnvironmentError(f"env_from: reward_fn={reward_fn!r} is no function")
    names = [*map(_name_of, functions)]
    try:
        numbers = np.array([1.0] * len(names) if weights is None else weights)
    except ValueError:  # lists of different lengths
        numbers = np.array(None)
    if (
        numbers.shape != (len(names),)
        or numbers.dtype.kind not in "iuf"
        or not np.isfinite(numbers).all()
    ):
        raise InvalidEnvironmentError(
            f"env_from: weights={weights}: must be as many numbers as reward functions, {names}"
        )
    if len({"reward", *names}) <= len(names) > 1:  # the metric `reward` is their sum
        raise InvalidEnvironmentError(
            f"env_from: the reward functions are named {names}; give each a name of its own, and "
            "none 'reward'"
        )
    rewards = [*zip(names, numbers.tolist(), functions, strict=True)]
    taskset = kind(dataset, rewards, system_prompt, "dataset")
    if eval_dataset is not None:
        taskset.eval_taskset = kind(eval_dataset, rewards, system_prompt, "eval_dataset")
    return taskset


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def examples_of(dataset: Any, name: str) -> list[Mapping[str, Any]]:
    """Return the rows of a dataset of this name.

    Raises:
        InvalidEnvironmentError: it has none, or one that is no example.
    """
    is_listed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")  # in an order
    if isinstance(dataset, str | Mapping) or not is_listed:
        raise InvalidEnvironmentError(
            f"env_from: {name} must be a list of dicts, a datasets.Dataset, a frame or a list of "
            f"strings, not a {type(dataset).__name__}; of a DatasetDict, pass one of its splits, "
            f"{name}[...]; of a stream, pass list(stream.take(n)); of a set, a sorted list"
        )
    records: Any = islice(dataset, len(dataset))  # a sequence of one's own may have no end
    if hasattr(dataset, "to_pylist"):  # of pyarrow
        records = dataset.to_pylist()
    elif hasattr(dataset, "to_dicts"):  # of polars
        records = dataset.to_dicts()
    elif hasattr(dataset, "iterrows"):  # of pandas
        records = dataset.to_dict("records")
    rows = [{"prompt": row} if isinstance(row, str) else row for row in records]
    if not rows:
        raise InvalidEnvironmentError(f"env_from: {name} is empty")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InvalidEnvironmentError(
                f"env_from: {name}, row {number} is a {type(row).__name__}: {row!r}; expected a "
                "dict or a string"
            )
        if "prompt" not in row:
            raise InvalidEnvironmentError(
                f"env_from: {name}, row {number} has no column 'prompt', only "
                f"{', '.join(map(repr, row))}; rename the one that holds the prompt"
            )
        for column in row:
            if column in (REPLY, "self") or not isinstance(column, str):
                raise InvalidEnvironmentError(
                    f"env_from: {name} has a column {column!r}, which no reward function can get "
                    f"by this name ({REPLY!r} is the reply); give the column another name, such as "
                    "'answer'"
                )
    # Columns of a frame may have one name, and a row has the last of them.
    if isinstance(records, list) and len(rows[0]) < getattr(dataset, "shape", [0])[-1]:
        raise InvalidEnvironmentError(
            f"env_from: {name} has columns of one name among {[*rows[0]]}; rename all but one"
        )
    return rows


def parameters_from(
    function: Callable[..., Any], known: Mapping[str, int | None], what: str
) -> tuple[str, ...]:
    """Return the names of the arguments that a function is called with.

    Args:
        known: the names that there are, and the number of the first row that lacks it, or None.
        what: names the function in errors.

    Raises:
        InvalidEnvironmentError: it needs another one, or one that a row lacks; or it has no
            signature.
    """
    wanted = []
    if isinstance(function, partial):  # what it has bound stays as it is
        known = {name: known[name] for name in known if name not in function.keywords}
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:  # Python's own may have none
        raise InvalidEnvironmentError(
            f"{what} does not say what its parameters are; put a function of yours around it"
        ) from error
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            return tuple(known)
        is_needed = parameter.default is parameter.empty
        if name in known and parameter.kind is not parameter.POSITIONAL_ONLY:
            wanted.append(name)
            if is_needed and (number := known[name]) is not None:
                raise InvalidEnvironmentError(
                    f"{what} has a parameter {name!r}, which is no column of row {number}; give "
                    "each row the column, or the parameter a default"
                )
        elif is_needed and parameter.kind is not parameter.VAR_POSITIONAL:
            raise InvalidEnvironmentError(
                f"{what} has a parameter {name!r}, "
                f"which is no column that can be passed by its name. {did_you_mean(name, known)} "
                f"It may name {', '.join(map(repr, known))}"
            )
    return tuple(wanted)
