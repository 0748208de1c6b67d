"""A teacher: a model behind vLLM's OpenAI-compatible server. It says how probable tokens are.

    logprobs(token_ids)  ──►  POST /v1/completions, prompt_logprobs = 0, max_tokens = 1
                         ◄──  for each token of the prompt, its logprob

The teacher may be away for some time, because it starts, or starts again. Requests wait for it up
to `Teacher.timeout_s`, and then raise one error. A reply that does not fit the request raises too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from verifiers_rl.inference.client import (
    LOOPBACK,
    TOKEN_VARIABLE,
    InferenceServerError,
    ServerLostError,
    generation_key,
)
from verifiers_rl.option_rules import STRICT, PositiveInt, PositiveNumber, Url

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25  # after a failed attempt; doubled after each further one
LONGEST_PAUSE_S = 5.0
LOWEST_LOGPROB = -9999.0  # what vLLM writes into JSON in place of -inf


class TeacherError(InferenceServerError):
    """The teacher cannot be used; the message names the teacher, its URL and what to do."""


@dataclass(frozen=True, config=STRICT)
class Teacher:
    """A model that an environment's rollouts are compared with, at a server of its own.

    Attributes:
        model: a folder, or a name on the hub. Its tokenizer must be that of the trained model.
        base_url: of a vLLM server, such as "http://10.0.0.2:8000", with /v1 or without.
        name: what messages call it; default: `model`.
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
    name: str = ""
    key_variable: str = ""
    timeout_s: PositiveNumber = 300.0
    max_concurrent: PositiveInt = 64

    def __str__(self) -> str:
        return f"teacher {self.name or self.model!r}"

    def key(self) -> str:
        """Return the API key, or "". Raises TeacherError if the variable is not set."""
        if self.key_variable == TOKEN_VARIABLE:
            return generation_key(self.base_url)
        key = os.environ.get(self.key_variable, "") if self.key_variable else ""
        if self.key_variable and not key:
            raise TeacherError(
                f"{self}: the environment variable {self.key_variable} of its API key is not set; "
                "set it, or correct key_variable"
            )
        return key


def check_vocabulary(teacher: Teacher, tokenizer: Any) -> None:
    """Raise TeacherError unless each id is the same token for the student, whose tokenizer this is,
    and for the teacher. The message names the first that is not.
    """
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(teacher.model)
    except (OSError, ValueError) as error:
        raise TeacherError(
            f"{teacher}: no tokenizer can be loaded from model={teacher.model!r}: "
            f"{' '.join(str(error).split())}; give the folder or the hub's name of its model"
        ) from error
    one, other = (
        {number: token for token, number in getattr(t, "tokenizer", t).get_vocab().items()}
        for t in (tokenizer, theirs)
    )
    if differing := dict(one.items() ^ other.items()):
        number = min(differing)
        raise TeacherError(
            f"{teacher}: its vocabulary is not the student's: token id {number} "
            f"is {other.get(number)!r} at the teacher and {one.get(number)!r} at the student; "
            "take a teacher with the same tokenizer"
        )


class TeacherClient:
    """Asks a teacher for logprobs. All methods run on one event loop.

    Args:
        teacher: the teacher.
        min_model_len: tokens that a request may have; checked when the client opens.
        is_own: it is the student's own server, at the policy that it has now. If that does not
            answer, the trainer waits for it and requests the batch again, so nothing is asked twice
            here: the server would answer with other weights.
    """

    def __init__(self, teacher: Teacher, min_model_len: int = 0, is_own: bool = False) -> None:
        self.teacher, self._min_model_len, self._is_own = teacher, min_model_len, is_own
        self._what = f"{teacher} at {teacher.base_url}"
        self._session: aiohttp.ClientSession | None = None
        self._places: asyncio.Semaphore
        self._model = ""  # what its server calls it
        self._is_away = False

    async def open(self) -> None:
        """Wait until the teacher answers.

        Raises:
            TeacherError: it has not answered by its deadline, serves several models, or takes too
                few tokens.
        """
        key, host = self.teacher.key(), urlsplit(self.teacher.base_url).hostname
        self._places = asyncio.Semaphore(self.teacher.max_concurrent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            trust_env=host not in LOOPBACK,  # a proxy set for the internet is not for this machine
            # `_request` has the other half for another attempt: an answer can get lost on its way.
            timeout=aiohttp.ClientTimeout(total=self.teacher.timeout_s / 2),
        )
        try:
            if not self._is_own:
                await self._learn_name()
        except BaseException:
            await self.close()
            raise

    async def _learn_name(self) -> None:
        """Learn what its server calls it, from the models there and the tokens that they take."""
        models = (await self._request("GET", "/v1/models")).get("data") or []
        served = {str(model.get("id")): model.get("max_model_len") for model in models}
        own = self.teacher.model
        if own not in served and len(served) != 1:
            raise TeacherError(
                f"{self._what} serves {', '.join(served) or 'no model'}, not {own!r}; start it "
                f"with --served-model-name {own}"
            )
        self._model = own if own in served else next(iter(served))
        longest, needed = served[self._model], self._min_model_len
        if longest is not None and longest < needed:
            raise TeacherError(
                f"{self._what} takes {longest} tokens at most, and needs {needed}: max_seq_len and "
                f"one more; start it with --max-model-len {needed}"
            )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def logprobs(self, token_ids: np.ndarray, model: str = "") -> np.ndarray:
        """Return log pi_T of each token after those before it, (T,) float64; NaN for the first.

        Args:
            token_ids: (T,).
            model: of the student's own server, the name by which requests reach the policy.

        Raises:
            TeacherError: no answer by the deadline, or one that does not fit the request.
            ServerLostError: the student's own server does not answer.
        """
        ids = [int(token) for token in token_ids]
        body = {"model": model if self._is_own else self._model, "prompt": ids, "max_tokens": 1}
        body |= {"temperature": 1.0, "prompt_logprobs": 0}
        async with self._places:
            reply = await self._request("POST", "/v1/completions", body)
        try:
            return await asyncio.to_thread(logprobs_of, reply, ids)
        except (AttributeError, ValueError) as error:
            raise TeacherError(
                f"{self._what} does not answer as vLLM does: {error}; is it a vLLM server of "
                f"{self.teacher.model!r}?"
            ) from error

    async def _request(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request until it is answered, up to the deadline. Return the reply."""
        assert self._session is not None, "call open() first"
        url, timeout_s = self.teacher.base_url + path, self.teacher.timeout_s
        problem, pause_s = "nothing came back", FIRST_PAUSE_S
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        # No redirects: the key is for this server only.
                        async with self._session.request(
                            method, url, json=body, allow_redirects=False
                        ) as answer:
                            status, text = answer.status, await answer.text()
                        problem = f"status {status}: {' '.join(text.split())[:300]}"
                    except (aiohttp.ClientError, TimeoutError) as error:
                        status, problem = 0, str(error) or type(error).__name__
                    if status == 200:
                        self._is_away = False
                        return json.loads(text)
                    if status and status < 500 and status != 429:
                        raise self._refused(status, problem)
                    if self._is_own and status != 429:
                        raise ServerLostError(f"{self._what} does not answer: {problem}")
                    if not self._is_away:
                        self._is_away = True
                        waits = f"waiting up to {timeout_s:g} s"
                        logger.warning("%s does not answer (%s); %s", self._what, problem, waits)
                    await asyncio.sleep(pause_s)  # there is nothing to await
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        except TimeoutError as error:
            kind = ServerLostError if self._is_own else TeacherError
            raise kind(
                f"{self._what} gave no answer within {timeout_s:g} s (timeout_s); at last: "
                f"{problem}. Start it again, correct its base_url, or raise its timeout_s; then "
                "resume the run"
            ) from error
        except ValueError as error:
            raise TeacherError(f"{self._what}: {path}: no JSON: {error}") from error

    def _refused(self, status: int, problem: str) -> InferenceServerError:
        if self._is_own and status == 404:  # one that started anew does not know the adapter
            return ServerLostError(f"{self._what}: {problem}")
        hint = "; is the model right, and its --max-model-len above max_seq_len, and the hint?"
        if status in (401, 403):
            hint = "; set key_variable to the environment variable with its API key"
            hint += f", or to {TOKEN_VARIABLE} for a vf-vllm"
        if "prompt_logprobs" in problem:  # vf-vllm says what to do
            hint = ""
        return TeacherError(f"{self._what} refuses: {problem}{hint}")


def logprobs_of(reply: dict[str, Any], token_ids: list[int]) -> np.ndarray:
    """Return the logprobs of a prompt's tokens from a reply of vLLM, (T,) float64; NaN for the
    first one.

    Raises:
        ValueError: the reply is of other tokens, or a logprob is missing or not finite.
    """
    found = (reply.get("choices") or [{}])[0].get("prompt_logprobs")
    if not isinstance(found, list):
        raise ValueError("the reply has no prompt_logprobs")
    if len(found) != len(token_ids):
        raise ValueError(f"{len(found)} prompt_logprobs for a prompt of {len(token_ids)} tokens")
    values = [math.nan]
    for token, entries in zip(token_ids[1:], found[1:], strict=True):
        logprob = ((entries or {}).get(str(token)) or {}).get("logprob")
        if not isinstance(logprob, int | float) or not LOWEST_LOGPROB < logprob <= 1e-3:
            said = "is missing" if logprob is None else f"is {logprob}"
            raise ValueError(f"the logprob of token {token} at position {len(values)} {said}")
        values.append(logprob)
    return np.array(values)
