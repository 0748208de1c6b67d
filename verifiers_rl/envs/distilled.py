"""Distillation on the student's own rollouts: an environment whose rollouts a teacher scores.

    run_group of the environment ──► rollouts ──► the teacher's logprobs of their tokens
                                                  ──► Rollout.teacher, which adds to the advantages
                                              or, with distill_loss = "topk",
                                                  ──► Sample.teacher_top, which adds to the loss

The teacher is asked on the orchestrator's event loop, when a group's rollouts have given their
places at the student's server back. So the student goes on generating meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from verifiers_rl.advantages import score_by_teacher, taught_tokens
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.inference import OwnServerClient, TeacherClient, TokenScores
from verifiers_rl.types import EnvRunner, Progress, Rollout, Slots, Split, TeacherTop

Algorithm = Literal["rl", "opd", "opsd"]
DistillLoss = Literal["sampled", "topk"]


class DistilledEnvironment:
    """An `EnvRunner` whose training rollouts a teacher scores. Evaluations are as without one.

    Args:
        env: runs the groups.
        algorithm: "rl": the teacher adds to the advantages of the rewards. "opd": the teacher's are
            all; rewards are only reported. "opsd": as "opd", by a teacher that sees a hint.
        client: asks the teacher.
        distill_coef: weight of the teacher.
        hint: makes the tokens of the hint for an example of the training split, for "opsd".
        distill_loss: "sampled": the teacher changes advantages. "topk": it adds a term to the loss.
        top_k: how many of its likeliest tokens the teacher gives for "topk", and the bound of the
            metric `outside_top_k_share`.
        masked_ids: tokens about which the teacher has no say.
    """

    def __init__(
        self,
        env: EnvRunner,
        algorithm: Algorithm,
        client: TeacherClient,
        distill_coef: float,
        hint: Callable[[int], Awaitable[list[int]]] | None = None,
        *,
        distill_loss: DistillLoss = "sampled",
        top_k: int = 20,
        masked_ids: Sequence[int] = (),
    ) -> None:
        self._env, self._algorithm, self._client = env, algorithm, client
        self._distill_coef, self._hint = distill_coef, hint
        self._is_topk, self._top_k = distill_loss == "topk", top_k
        self._masked_ids = list(masked_ids)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of a copy that has no fields yet
            raise AttributeError(name)
        return getattr(self._env, name)

    async def open(self) -> None:
        await asyncio.gather(self._env.open(), self._client.open())

    async def close(self) -> None:
        await asyncio.gather(self._env.close(), self._client.close())

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
        """Do as the environment does, and let the teacher score what is for training.

        Raises:
            TeacherError: the teacher has not answered by its deadline, or with wrong numbers.
        """
        group = await self._env.run_group(
            split, index, num_rollouts, model, sampling_args, policy_version, slots
        )
        if split == "train":
            hint = await self._hint(index) if self._hint is not None else []
            await gather([self._score(r, model, hint) for r in group if r.error is None])
        return group

    async def _score(self, rollout: Rollout, model: str, hint: list[int]) -> None:
        if not rollout.samples:
            return
        loop = asyncio.get_running_loop()
        start = loop.time()
        theirs = await gather([self._ask(s.token_ids, model, hint) for s in rollout.samples])
        score = score_by_teacher(
            rollout.samples, [scores.logprobs for scores in theirs], self._distill_coef,
            loop.time() - start, self._masked_ids,
        )  # fmt: skip
        has_say = [taught_tokens(sample, self._masked_ids) for sample in rollout.samples]
        ranks = np.concatenate([t.ranks[at] for t, at in zip(theirs, has_say, strict=True)])
        if not np.isnan(ranks).any():
            score = replace(score, num_outside_top_k=int((ranks > self._top_k).sum()))
        if self._is_topk:
            score = replace(score, advantages=np.zeros_like(score.advantages))
            for sample, scores, at in zip(rollout.samples, theirs, has_say, strict=True):
                assert scores.top is not None
                logprobs = np.where(at[:, None], scores.top.logprobs, -np.inf)
                sample.teacher_top = TeacherTop(scores.top.token_ids, logprobs, self._distill_coef)
        rollout.teacher = score
        if self._algorithm != "rl":
            rollout.set_advantage(0.0)  # the teacher's are added to these
            rollout.has_own_advantages = True

    async def _ask(self, token_ids: np.ndarray, model: str, hint: list[int]) -> TokenScores:
        """Return what the teacher says of these tokens, which it reads behind the hint."""
        if hint and hint[0] == token_ids[0] == getattr(self._hint, "bos_token_id", None):
            token_ids = token_ids[1:]  # the beginning of a text is in front of the hint
            prompt, kept_from = np.concatenate([hint, token_ids]), len(hint) - 1
        else:
            prompt, kept_from = np.concatenate([hint, token_ids]), len(hint)
        client, top_k = self._client, self._top_k if self._is_topk else 0
        if isinstance(client, OwnServerClient):
            scores = await client.score_under(model, prompt, top_k)
        else:
            scores = await client.score(prompt, top_k)
        return scores.after(kept_from)  # the first token is never in the loss


async def gather(work: list[Any]) -> list[Any]:
    """Do all of it at once. If one raises or this is cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def fields_of(example: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an example, however its kind of environment packs them."""
    found = dict(example)
    for key in ("task", "data", "row", "info"):
        inner = found.get(key)
        if isinstance(inner, dict):
            found |= inner
    return found


class Hints:
    """Makes the privileged tokens that a teacher of "opsd" reads before a rollout: a message of its
    own, in front of all tokens of the rollout, which stay as they are.

    Args:
        env: the name of the environment, for errors.
        hint: text with fields of the example in braces, such as "The answer is {answer}."
        example: gives an example of the training split, as JSON.
        tokenizer: the model's, whose chat template makes the message.
        chat_template_kwargs: variables of the chat template.
    """

    ROLE = "system"

    def __init__(
        self,
        env: str,
        hint: str,
        example: Callable[[Split, int], Awaitable[dict[str, Any]]],
        tokenizer: Any,
        chat_template_kwargs: dict[str, Any],
    ) -> None:
        self._env, self._hint, self._example = env, hint, example
        self._tokenizer, self._kwargs = tokenizer, chat_template_kwargs
        self.bos_token_id = getattr(tokenizer, "bos_token_id", None)

    async def __call__(self, index: int) -> list[int]:
        fields = fields_of(await self._example("train", index))
        try:
            text = self._hint.format_map(fields)
        except KeyError as error:
            raise InvalidEnvironmentError(
                f"environment {self._env!r}: hint={self._hint!r}: an example has no field "
                f"{error.args[0]!r}, only {', '.join(sorted(map(str, fields)))}"
            ) from error
        return list(
            self._tokenizer.apply_chat_template(
                [{"role": self.ROLE, "content": text}],
                add_generation_prompt=False,
                return_dict=False,
                **self._kwargs,
            )
        )
