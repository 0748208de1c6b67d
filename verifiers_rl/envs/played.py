"""An environment of `verifiers.v1`, played by a model behind any OpenAI-compatible endpoint.

Nothing is trained on the tokens here, so verifiers' own client sends the requests. What was said
has the form of a row that `vf-sft` reads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf

from verifiers_rl.envs.base import RunnerOptions, finite_reward
from verifiers_rl.envs.records import message_of
from verifiers_rl.envs.v1 import V1Environment, is_cut, trained_traces
from verifiers_rl.types import Split


class PlayedEnvironment(V1Environment):
    """Plays an environment and returns what was said.

    Args:
        env: an `Env` or a `Taskset` of `verifiers.v1`.
        options: see `V1Environment`; its `base_url` is that of the endpoint, with /v1.
        model: its name in requests.
        key_variable: environment variable that has the endpoint's key.
        sampling: options of each request.

    Raises:
        InvalidEnvironmentError: see `V1Environment`.
    """

    def __init__(
        self,
        env: Any,
        options: RunnerOptions,
        model: str,
        key_variable: str,
        sampling: Mapping[str, Any],
    ) -> None:
        super().__init__(env, options)
        client = vf.EvalClientConfig(base_url=options.base_url, api_key_var=key_variable)
        self._context = vf.ModelContext(
            model=model, client=client, sampling=vf.SamplingConfig(**sampling)
        )
        self._template = sampling.get("chat_template_kwargs")

    async def play(self, split: Split, number: int) -> list[tuple[dict[str, Any], bool]]:
        """Play a task once. Return for each trained agent that took a turn a row, and whether a
        length limit cut it.

        Raises:
            Exception: whatever the environment's own code raises.
        """
        async with asyncio.timeout(self.options.timeout_s):
            slot = self.slot_of(await self.task(split, number))
            episode = await self.env.run_slot(slot, self._context)
        rows = [self._row(trace, number) for trace in trained_traces(episode)]
        return [row for row in rows if row is not None]

    def _row(self, trace: Any, number: int) -> tuple[dict[str, Any], bool] | None:
        nodes = trace.branches[-1].nodes if trace.branches else []
        sampled = [place for place, node in enumerate(nodes) if node.sampled]
        if not sampled:
            return None
        # What follows the last reply, such as an answer of the environment, teaches nothing.
        messages = [message_of(node.message) for node in nodes[: sampled[-1] + 1]]
        prompt, completion = messages[: sampled[0]], messages[sampled[0] :]
        # Replies that nobody sampled are not learned: the task's own examples, or what the
        # environment says in the assistant's name.
        for place, message in enumerate(completion, sampled[0]):
            if message["role"] == "assistant" and place not in sampled:
                message["weight"] = 0
        row: dict[str, Any] = {"messages": messages}
        if any(message["role"] == "assistant" for message in prompt):
            row = {"prompt": prompt, "completion": completion}
        if tools := trace.tools:
            # As text: a parameter may have the default null, and a row's keys of null are left out.
            fields = {"name", "description", "parameters"}
            functions = [tool.model_dump(include=fields) for tool in tools]
            row["tools"] = json.dumps([{"type": "function", "function": f} for f in functions])
        if self._template:
            row["chat_template_kwargs"] = self._template
        row |= {
            "reward": finite_reward(trace.reward),
            "environment": self.name,
            "agent": trace.agent.name,
            "example": number,
            "model": self._context.model,
        }
        return row, is_cut(trace)
