"""Supervised finetuning beside RL: an environment whose training examples a teacher answers.

    an example ──► the environment, played by the teacher ──► messages
               ──► the student's tokens (conversations.py) ──► Rollout, its logprobs all NaN

NaN stands for "no policy sampled this": the importance ratio is then 1. So with an advantage of 1,
the run's policy gradient is that of cross entropy.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from verifiers_rl.conversations import DatasetError, Tokenization, make_samples
from verifiers_rl.envs.base import text_of
from verifiers_rl.envs.distilled import gather
from verifiers_rl.envs.generate import Endpoint, GeneratingEnvironment
from verifiers_rl.inference import TeacherClient
from verifiers_rl.types import EnvRunner, Progress, Rollout, Slots, Split, TeacherScore


class AnsweredEnvironment:
    """An `EnvRunner` whose rollouts of the training split are the teacher's, and the student learns
    them by cross entropy. Evaluations are the student's own.

    Args:
        env: runs the evaluations.
        answers: the same environment, played by the teacher.
        client: knows when the teacher is there, and how many rollouts it takes at a time.
        tokenization: makes the student's tokens of what was said.
        max_seq_len: longest sample in tokens; a longer answer counts as cut.
        coef: weight of the cross entropy.
        endpoint: of the teacher; its model is known when the client is open.
    """

    def __init__(
        self,
        env: EnvRunner,
        answers: GeneratingEnvironment,
        client: TeacherClient,
        tokenization: Tokenization,
        max_seq_len: int,
        coef: float,
        endpoint: Endpoint,
    ) -> None:
        self._env, self._answers, self._client = env, answers, client
        self._tokenization, self._max_seq_len = tokenization, max_seq_len
        self._coef, self._endpoint = coef, endpoint
        self._places: asyncio.Semaphore

    @property
    def files_per_rollout(self) -> int:
        """See `types.EnvRunner`. The teacher's rollouts run in this process in any case."""
        return self._env.files_per_rollout + self._answers.files_per_rollout

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of a copy that has no fields yet
            raise AttributeError(name)
        return getattr(self._env, name)

    async def open(self) -> None:
        self._places = asyncio.Semaphore(self._client.teacher.max_concurrent)
        await gather([self._env.open(), self._client.open(), self._answers.open()])
        self._answers.ask(replace(self._endpoint, model=self._client.served_model))

    async def close(self) -> None:
        await asyncio.gather(self._env.close(), self._client.close(), self._answers.close())

    async def run_group(
        self,
        split: Split,
        index: int,
        num_rollouts: int,
        model: str,
        sampling_args: dict[str, Any],
        policy_version: int,
        slots: Slots | Progress,
    ) -> list[Rollout]:
        """Let the teacher answer an example of the training split; evaluate as the environment
        does.

        Raises:
            TeacherError: the teacher is away, and has not come back by its deadline.
        """
        if split == "eval":
            return await self._env.run_group(
                split, index, num_rollouts, model, sampling_args, policy_version, slots
            )
        played = await gather([self._play(index, slots) for _ in range(num_rollouts)])
        return [rollout for rollouts in played for rollout in rollouts]

    async def _play(self, index: int, slots: Slots | Progress) -> list[Rollout]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        async with self._places:
            rows = await self._answers.play("train", index, slots)
            if isinstance(rows, Exception):
                # The slots count a rollout once, and none is held while the teacher is away.
                await self._client.wait()
                rows = await self._answers.play("train", index, nullcontext())
        if isinstance(rows, Exception):
            return [Rollout(index, "", env=self._env.name, error=rows)]
        return [self._rollout(index, row, loop.time() - start) for row in rows]

    def _rollout(self, index: int, row: dict[str, Any], seconds: float) -> Rollout:
        """Return what the teacher said as a rollout."""
        messages = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
        prompt, said = messages[: row["first_reply"]], messages[row["first_reply"] :]
        rollout = Rollout(
            index, text_of(prompt), text_of(said), env=self._env.name, role=row["agent"],
            generation_s=seconds,
            num_turns=sum(one["role"] == "assistant" and one.get("weight", 1) for one in said),
        )  # fmt: skip
        try:
            tokens = self._tokenization.of_row(row)
        except DatasetError as error:
            rollout.error = error
            return rollout
        longest = self._max_seq_len
        rollout.samples = make_samples([[(ids[:longest], mask[:longest]) for ids, mask in tokens]])
        rollout.reward = row["reward"]
        is_cut = any(len(ids) > longest for ids, _ in tokens)
        rollout.is_truncated = row["is_truncated"] or is_cut
        rollout.set_advantage(self._coef)
        rollout.has_own_advantages = True
        if row["is_truncated"]:  # it would learn to end where a limit has ended the answer
            rollout.leave_out_of_loss()
        num_tokens = sum(len(sample.token_ids) for sample in rollout.samples)
        rollout.teacher = TeacherScore(np.zeros(num_tokens), 0.0, 0, 0.0)
        return rollout
