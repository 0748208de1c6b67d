"""Distillation on the student's own rollouts: a teacher adds to the advantages of their tokens.

    a finished group ──► the teacher's logprobs of its tokens ──► Rollout.added_advantages

The teacher is asked on the orchestrator's event loop, when a group's rollouts have given their
places at the student's server back. So the student goes on generating meanwhile.
"""

from __future__ import annotations

import asyncio
import copy
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic.dataclasses import dataclass

from verifiers_rl.distill.teacher import Teacher, TeacherClient, check_vocabulary
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.option_rules import STRICT, Algorithm, PositiveNumber
from verifiers_rl.requests import GroupRequest
from verifiers_rl.types import Rollout, Sample


def teacher_advantages(
    samples: Sequence[Sample], teacher_logprobs: Sequence[np.ndarray], distill_coef: float
) -> tuple[np.ndarray, float]:
    """Compute what a teacher adds to the advantages of one rollout's tokens.

    A_t = -distill_coef * (log mu_t - log pi_T,t), the reverse KL of each sampled token alone
    (Thinking Machines, "On-policy distillation", 2025). Its expectation under the policy mu is the
    gradient of KL(mu || pi_T) at this token, and later tokens do not count (discount 0). Tokens
    that were not sampled, or that are not in the loss, get 0.

    Args:
        samples: of the rollout. log mu are their `inference_logprobs`.
        teacher_logprobs: for each sample (T,), log pi_T of its tokens; NaN is allowed where the
            token was not sampled.
        distill_coef: weight of the teacher.

    Returns:
        (sum of T,) float64, the advantages of one sample after the other; and the mean of
        log mu_t - log pi_T,t over the sampled tokens in the loss, an estimate of KL(mu || pi_T).

    Raises:
        ValueError: a logprob of a sampled token is missing or not finite.
    """
    gaps, num_tokens = [], 0
    for sample, theirs in zip(samples, teacher_logprobs, strict=True):
        if theirs.shape != sample.token_ids.shape:
            raise ValueError(
                f"{len(theirs)} teacher logprobs for a sample of {sample.num_tokens} tokens"
            )
        is_scored = sample.loss_mask & (sample.policy_versions >= 0)
        gap = np.where(is_scored, sample.inference_logprobs.astype(np.float64) - theirs, 0.0)
        if not np.isfinite(gap).all():
            at = np.flatnonzero(~np.isfinite(gap))[0]
            raise ValueError(
                f"a teacher's logprob is {theirs[at]}, and the student's of the same token is "
                f"{sample.inference_logprobs[at]}"
            )
        gaps.append(gap)
        num_tokens += int(is_scored.sum())
    gap = np.concatenate(gaps)
    return -distill_coef * gap, float(gap.sum()) / max(num_tokens, 1)


@dataclass(config=STRICT)
class Distillation:
    """A `requests.GroupScorer`: lets a teacher score the training rollouts of one environment.

    Attributes:
        teacher: None with "opsd": the policy itself, at its own server.
        algorithm: "opd": the teacher's advantages are all, and rewards are only reported. "rl":
            they are added to those of the rewards. "opsd": as "opd", by a teacher that reads the
            hint first.
        distill_coef: weight of the teacher.
        hint: for "opsd": text with fields of the example in braces, "The answer is {answer}."

    Raises:
        pydantic.ValidationError: a value cannot work, is missing, or would have no effect.
    """

    teacher: Teacher | None = None
    algorithm: Algorithm = "opd"
    distill_coef: PositiveNumber = 1.0
    hint: str = ""

    def __post_init__(self) -> None:
        self.longest_wait_s = self.teacher.timeout_s if self.teacher is not None else 0.0
        hint, algorithm, problem = self.hint, f"algorithm={self.algorithm!r}", ""
        if self.algorithm == "opsd":
            try:
                list(string.Formatter().parse(hint))
            except ValueError as error:
                problem = f"hint={hint!r}: {error}; write {{{{ and }}}} for braces"
            if not hint:
                problem = f"{algorithm} needs a hint for its teacher, such as 'It is {{answer}}.'"
        elif self.teacher is None:
            problem = f"{algorithm} needs a teacher; set teacher, or remove it"
        elif hint:
            problem = f"hint={hint!r} is for algorithm='opsd'; remove it"
        if problem:
            raise ValueError(problem)

    def connect(self, options: Any, args: Any, example: Any) -> None:
        """Learn of the run, and compare the teacher with it; see `requests.GroupScorer`.

        Raises:
            InvalidEnvironmentError: the teacher's logprobs and the student's cannot be compared.
            TeacherError: the teacher has another vocabulary.
        """
        self._options, self._example = options, example
        what = f"environment {options.name!r}: algorithm={self.algorithm!r}"
        plain = copy.copy(args)
        plain.sampling_mask = False  # a teacher has no mask
        changed = plain.sampling_changes_probabilities() + ["sampling_mask"] * args.sampling_mask
        if args.temperature != 1.0:
            changed = [f"temperature={args.temperature:g}", *changed]
        if changed:
            raise InvalidEnvironmentError(
                f"{what}: a teacher's logprobs are those of temperature 1 without cuts, and "
                f"{', '.join(changed)} makes the student's others; remove it, or the teacher"
            )
        if self.hint and example is None:
            raise InvalidEnvironmentError(
                f"{what}: the fields of its examples are not known here, for the hint; leave out "
                "python=..., or give an EnvRunner of your own a method `async example(split, "
                "index)` that returns them"
            )
        if self.teacher is not None:
            if options.tokenizer is not None:
                check_vocabulary(self.teacher, options.tokenizer)
            # vLLM always generates one token more than it is asked about.
            self._client = TeacherClient(self.teacher, args.max_seq_len + 1)
            return
        if args.vllm_servers and len(args.vllm_servers) > 1:
            raise InvalidEnvironmentError(
                f"{what}: with several servers, the policy cannot be its own teacher; set teacher "
                "to a server of the model, or use one server"
            )
        own = Teacher(
            "policy",
            options.base_url,
            "the student itself",
            TOKEN_VARIABLE,
            args.generation_timeout,
        )
        self._client = TeacherClient(own, is_own=True)

    async def open(self) -> None:
        await self._client.open()

    async def close(self) -> None:
        await self._client.close()

    async def score(self, group: Sequence[Rollout], request: GroupRequest) -> None:
        """Set `added_advantages` of each rollout, and its metrics `teacher_kl`, nats, and
        `teacher_s`, seconds until the teacher's last reply.

        Raises:
            TeacherError: the teacher has not answered by its deadline, or with wrong numbers.
        """
        hint = await self._hint_tokens(request.index) if self.hint else []
        await asyncio.gather(*(self._score(r, request.model, hint) for r in group if r.samples))

    async def _score(self, rollout: Rollout, model: str, hint: list[int]) -> None:
        loop = asyncio.get_running_loop()
        start, samples = loop.time(), rollout.samples
        theirs = await asyncio.gather(*(self._ask(s.token_ids, model, hint) for s in samples))
        rollout.added_advantages, kl = teacher_advantages(samples, theirs, self.distill_coef)
        rollout.metrics |= {"teacher_kl": kl, "teacher_s": loop.time() - start}
        if self.algorithm != "rl":
            rollout.set_advantage(0.0)  # the teacher's are added to these
            rollout.has_own_advantages = True

    async def _ask(self, token_ids: np.ndarray, model: str, hint: list[int]) -> np.ndarray:
        """Return the teacher's logprobs of these tokens, which it reads behind the hint."""
        bos = getattr(self._options.tokenizer, "bos_token_id", None)
        # If the hint has the beginning of a text in front, the rollout's own is not read again.
        num_left_out = int(bool(hint) and hint[0] == token_ids[0] == bos)
        prompt = np.concatenate([np.array(hint, np.int64), token_ids[num_left_out:]])
        logprobs = await self._client.logprobs(prompt, model)
        return logprobs[len(hint) - num_left_out :]  # the first token is never in the loss

    async def _hint_tokens(self, index: int) -> list[int]:
        """Return the privileged tokens that the teacher of "opsd" reads: a system message of its
        own, in front of all tokens of the rollout, which stay as they are.
        """
        fields = dict(await self._example("train", index))
        for key in ("task", "data", "row", "info"):  # where kinds of environments pack them
            if isinstance(fields.get(key), dict):
                fields |= fields[key]
        try:
            text = self.hint.format_map(fields)
        except (KeyError, AttributeError, ValueError) as error:
            raise InvalidEnvironmentError(
                f"environment {self._options.name!r}: hint={self.hint!r}: {error!r}; an example "
                f"has the fields {', '.join(sorted(map(str, fields)))}"
            ) from error
        message, kwargs = {"role": "system", "content": text}, self._options.chat_template_kwargs
        tokens = self._options.tokenizer.apply_chat_template(
            [message], add_generation_prompt=False, return_dict=False, **kwargs
        )
        return list(tokens)
