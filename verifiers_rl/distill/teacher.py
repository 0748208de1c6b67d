"""Distillation on the student's own rollouts: a teacher adds to the advantages of their tokens.

    a finished group ──► POST /v1/completions of vLLM, prompt_logprobs = 0, max_tokens = 1
                     ◄── for each token its logprob ──► Rollout.added_advantages

The teacher is asked on the orchestrator's event loop, when a group's rollouts have given their
places at the student's server back. So the student goes on generating meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence
from string import Formatter
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from jinja2 import TemplateError
from pydantic import Field
from pydantic.dataclasses import dataclass

from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.rendering import Renderer
from verifiers_rl.inference import InferenceServerError, ServerLostError, generation_key
from verifiers_rl.inference.client import LOOPBACK, TOKEN_VARIABLE
from verifiers_rl.option_rules import STRICT, Algorithm, PositiveInt, PositiveNumber, Url
from verifiers_rl.requests import GroupRequest
from verifiers_rl.types import Rollout, Sample

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0  # doubled after each failed attempt
LOWEST_LOGPROB = -9999.0  # what vLLM writes into JSON in place of -inf


@dataclass(frozen=True, config=STRICT)
class Teacher:
    """A model that an environment's rollouts are compared with, at a server of its own.

    Attributes:
        model: a folder, or a name on the hub. Its tokenizer must be that of the trained model.
        base_url: of a vLLM server, such as "http://10.0.0.2:8000", with /v1 or without.
        key_variable: the environment variable with the server's API key; "": it needs none. With
            that of the run's token, the server may also be a `vf-vllm` that made its own.
        timeout_s: a request waits for the teacher at most so many seconds, and for one answer half
            as long. Then the run ends.
        max_concurrent: requests at a time, of one environment.

    Raises:
        pydantic.ValidationError: a value cannot work.
    """

    model: Annotated[str, Field(min_length=1)]
    base_url: Url
    key_variable: str = ""
    timeout_s: PositiveNumber = 300.0
    max_concurrent: PositiveInt = 64

    def __str__(self) -> str:
        return f"teacher {self.model!r} at {self.base_url}"

    def headers(self) -> dict[str, str]:
        """Return those with the key. Raises InferenceServerError if its variable is not set."""
        key = os.environ.get(self.key_variable, "")
        key = generation_key(self.base_url) if self.key_variable == TOKEN_VARIABLE else key
        if self.key_variable and not key:
            raise InferenceServerError(f"{self}: {self.key_variable} is not set; set it to the key")
        return {"Authorization": f"Bearer {key}"} if key else {}


def check_vocabulary(teacher: Teacher, tokenizer: Any) -> None:
    """Raise InferenceServerError unless the teacher's vocabulary is that of this tokenizer."""
    from transformers import AutoTokenizer

    problem = "its vocabulary is not the student's; take a teacher with the same tokenizer"
    try:
        theirs = AutoTokenizer.from_pretrained(teacher.model)
    except (OSError, ValueError) as error:
        problem = f"model={teacher.model!r} has no tokenizer: {' '.join(str(error).split())}"
        raise InferenceServerError(f"{teacher}: {problem}") from error
    if theirs.get_vocab() != getattr(tokenizer, "tokenizer", tokenizer).get_vocab():
        raise InferenceServerError(f"{teacher}: {problem}")


def logprobs_of(text: str, token_ids: list[int]) -> np.ndarray:
    """Return the logprobs of a prompt's tokens from a reply of vLLM, (T,) float64; NaN for the
    first one. Raises an error if the reply is of other tokens, or a logprob is no finite number.
    """
    entries = json.loads(text)["choices"][0]["prompt_logprobs"][1:]
    tokens = zip(token_ids[1:], entries, strict=True)
    values = np.array([entry[str(token)]["logprob"] for token, entry in tokens], np.float64)
    if len(wrong := values[~((values > LOWEST_LOGPROB) & (values <= 1e-3))]):
        raise ValueError(f"the logprob of a token is {wrong[0]}")
    return np.concatenate([[np.nan], values])


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
    """
    is_scored = np.concatenate([s.loss_mask & (s.policy_versions >= 0) for s in samples])
    ours = np.concatenate([s.inference_logprobs.astype(np.float64) for s in samples])
    gap = np.where(is_scored, ours - np.concatenate(teacher_logprobs), 0.0)
    return -distill_coef * gap, float(gap.sum()) / max(int(is_scored.sum()), 1)


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
        what = f"algorithm={self.algorithm!r}"
        if bool(self.hint) != (self.algorithm == "opsd"):
            raise ValueError(f"{what}, hint={self.hint!r}: 'opsd' needs a hint, others have none")
        [*Formatter().parse(self.hint)]  # raises ValueError for a lone brace
        if self.algorithm != "opsd" and self.teacher is None:
            raise ValueError(f"{what} needs a teacher; set teacher, or remove it")

    def connect(self, options: Any, args: Any, example: Any) -> None:
        """Learn of the run, and compare the teacher with it; see `requests.GroupScorer`.

        Raises:
            InvalidEnvironmentError: the teacher's logprobs and the student's cannot be compared.
            InferenceServerError: the teacher has another vocabulary.
        """
        self._options, self._example, problem = options, example, ""
        changed = ["temperature"] * (args.temperature != 1.0)
        changed += args.sampling_changes_probabilities() + ["sampling_mask"] * args.sampling_mask
        if changed:
            problem = f"teachers have temperature 1 without cuts; remove {', '.join(changed)}"
        elif self.hint and example is None:
            problem = "the hint needs examples: no python, or `async example(split, index)`"
        elif self.teacher is None and len(args.servers()) > 1:
            problem = "with several servers, the policy cannot be its own teacher; set teacher"
        if problem:
            what = f"environment {options.name!r}: algorithm={self.algorithm!r}"
            raise InvalidEnvironmentError(f"{what}: {problem}")
        own = ("policy", options.base_url, TOKEN_VARIABLE, args.generation_timeout)
        self._model, self._is_away = self.teacher or Teacher(*own), False
        self._http: Any = None
        if self.teacher is not None and options.tokenizer is not None:
            check_vocabulary(self.teacher, options.tokenizer)

    async def open(self) -> None:
        """Raises InferenceServerError if the variable of the teacher's key is not set."""
        host = urlsplit(self._model.base_url).hostname
        self._places = asyncio.Semaphore(self._model.max_concurrent)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),  # the server's is 5
            headers=self._model.headers(),
            trust_env=host not in LOOPBACK,  # a proxy for the internet is not for this machine
            timeout=aiohttp.ClientTimeout(self._model.timeout_s / 2),  # an answer may get lost once
        )

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def score(self, group: Sequence[Rollout], request: GroupRequest) -> None:
        """Set `added_advantages` of each rollout, and its metrics `teacher_kl`, nats, and
        `teacher_s`, seconds until the teacher's last reply. Raises what `logprobs` does.
        """
        hint = await self._hint_tokens(request.index) if self.hint else []
        model = request.model if self.teacher is None else None
        await asyncio.gather(*(self._score(r, model, hint) for r in group if r.samples))

    async def _score(self, rollout: Rollout, model: str | None, hint: list[int]) -> None:
        bos = getattr(self._options.tokenizer, "bos_token_id", None)

        async def ask(token_ids: np.ndarray) -> np.ndarray:
            # If the hint has the beginning of a text in front, the rollout's own is not read again.
            num_left_out = int(bool(hint) and hint[0] == token_ids[0] == bos)
            prompt = np.concatenate([np.array(hint, np.int64), token_ids[num_left_out:]])
            logprobs = await self.logprobs(prompt, model)
            return logprobs[len(hint) - num_left_out :]  # the first token is never in the loss

        start, samples = time.monotonic(), rollout.samples
        theirs = await asyncio.gather(*(ask(sample.token_ids) for sample in samples))
        rollout.added_advantages, kl = teacher_advantages(samples, theirs, self.distill_coef)
        rollout.metrics |= {"teacher_kl": kl, "teacher_s": time.monotonic() - start}
        if self.algorithm != "rl":
            rollout.set_advantage(0.0)  # the teacher's are added to these
            rollout.has_own_advantages = True

    async def logprobs(self, token_ids: np.ndarray, model: str | None = None) -> np.ndarray:
        """Ask the teacher until it answers, up to its deadline.

        The student's own server is asked once. If it does not answer, the trainer waits for it and
        requests the batch again: later it would answer with other weights.

        Args:
            token_ids: (T,).
            model: the name by which requests reach the model; None: the one that is served.

        Returns:
            log pi_T of each token after those before it, (T,) float64; NaN for the first.

        Raises:
            InferenceServerError: no answer by the deadline, or one that does not fit the request.
            ServerLostError: the student's own server does not answer.
        """
        body = {
            "model": model,
            "prompt": token_ids.tolist(),
            "prompt_logprobs": 0,
            "max_tokens": 1,
            "temperature": 1.0,
        }
        url, status = f"{self._model.base_url}/v1/completions", 0
        said, pause_s, timeout_s = "nothing came", FIRST_PAUSE_S, self._model.timeout_s
        try:
            async with self._places, asyncio.timeout(timeout_s):
                while status != 200:
                    try:
                        async with self._http.post(url, json=body, allow_redirects=False) as reply:
                            status, said = reply.status, await reply.text()
                    except (aiohttp.ClientError, TimeoutError) as error:
                        status, said = 0, str(error) or type(error).__name__
                    if status != 200:
                        self._raise_unless_busy(status, said)
                        await asyncio.sleep(pause_s)  # there is nothing to await
                        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            return await asyncio.to_thread(logprobs_of, said, body["prompt"])
        except TimeoutError as error:
            problem = f"no answer in {timeout_s:g} s (timeout_s), at last {status} {said[:300]!r}"
            raise InferenceServerError(f"{self._model}: {problem}; start it again") from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"does not answer as vLLM does: {error!r}; is it a vLLM server of its model?"
            raise InferenceServerError(f"{self._model} {problem}") from error

    def _raise_unless_busy(self, status: int, said: str) -> None:
        """Raise what ends the wait for a teacher; else say once that there is one."""
        problem = f"status {status}: {' '.join(said.split())[:300]}"
        if self.teacher is None and (status in (0, 404) or status >= 500):  # 404: it started anew
            raise ServerLostError(f"{self._model}: {problem}")
        if 300 <= status < 500 and status != 429:
            hint = "; is the model right, and its --max-model-len above max_seq_len, and the hint?"
            if status in (401, 403):
                hint = f"; set key_variable to its key's variable ({TOKEN_VARIABLE} of a vf-vllm)"
            hint *= "prompt_logprobs" not in problem  # vf-vllm says what to do
            raise InferenceServerError(f"{self._model} refuses: {problem}{hint}")
        if not self._is_away:
            logger.warning(f"{self._model} is not there ({problem}); waiting for it")
        self._is_away = True

    async def _hint_tokens(self, index: int) -> list[int]:
        """Return the privileged tokens that the teacher of "opsd" reads: a system message of its
        own, in front of all tokens of the rollout, which stay as they are.
        """
        fields = await self._example("train", index)
        try:
            message = {"role": "system", "content": self.hint.format_map(fields)}
            template = self._options.chat_template_kwargs
            return Renderer(self._options.tokenizer).render([message], is_prompt=False, **template)
        except (LookupError, AttributeError, TypeError, ValueError, TemplateError) as error:
            known = f"an example has the fields {', '.join(sorted(map(str, fields)))}"
            where = f"environment {self._options.name!r}: hint={self.hint!r}"
            raise InvalidEnvironmentError(f"{where}: {error!r}; {known}") from error
