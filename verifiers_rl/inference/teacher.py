"""A teacher: a model behind vLLM's OpenAI-compatible server. It says how probable tokens are.

    score(token_ids, top_k)  ──►  POST /v1/completions, prompt_logprobs = top_k, max_tokens = 1
                             ◄──  for each token of the prompt, its logprob and its rank, and those
                                  of the top_k likeliest tokens in its place

The teacher may be away for some time, because it starts, or starts again. Requests wait for it up
to `Teacher.timeout_s`, and then raise one error. A reply that does not fit the request raises too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from verifiers_rl.inference.client import (
    LOOPBACK,
    InferenceServerError,
    ServerLostError,
    generation_key,
)
from verifiers_rl.types import TeacherTop

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25  # after a failed attempt; doubled after each further one
LONGEST_PAUSE_S = 5.0
LOWEST_LOGPROB = -9999.0  # what vLLM writes into JSON in place of -inf


MAX_LOGPROBS_HINT = "start it with --max-logprobs of at least distill_top_k"


class TeacherError(InferenceServerError):
    """The teacher cannot be used; the message names the teacher, its URL and what to do."""


@dataclass(frozen=True)
class Teacher:
    """A model that an environment's rollouts are compared with, at a server of its own.

    Attributes:
        model: a folder, or a name on the hub. Its tokenizer must be that of the trained model.
        base_url: URL of the server, such as "http://10.0.0.2:8000", with /v1 or without. The server
            is vLLM, or gives `prompt_logprobs` on /v1/completions as vLLM does.
        name: what messages call it; default: `model`.
        key_variable: the environment variable with the server's API key; "": it needs none.
        timeout_s: a request waits for the teacher at most so many seconds, while the teacher starts
            or has died. Then the run ends.
        max_concurrent: requests at a time, of one environment.

    Raises:
        TeacherError: a value cannot work.
    """

    model: str
    base_url: str
    name: str = ""
    key_variable: str = ""
    timeout_s: float = 300.0
    max_concurrent: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.model)
        what = f"teacher {self.name!r}"
        if not self.model or not isinstance(self.model, str):
            raise TeacherError(
                f"{what}: model={self.model!r} must be a folder or a name on the hub, also beside "
                "base_url: its tokenizer is compared with the student's"
            )
        url = self.base_url.rstrip("/").removesuffix("/v1")
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise TeacherError(f"{what}: base_url={self.base_url!r} must be like http://host:8000")
        object.__setattr__(self, "base_url", url)
        is_number = isinstance(self.timeout_s, int | float)
        if not is_number or not 0 < self.timeout_s < math.inf:
            raise TeacherError(f"{what}: timeout_s={self.timeout_s!r} must be a number > 0")
        if type(self.max_concurrent) is not int or self.max_concurrent < 1:
            raise TeacherError(
                f"{what}: max_concurrent={self.max_concurrent!r} must be an integer >= 1"
            )

    def key(self) -> str:
        """Return the API key, or "".

        Raises:
            TeacherError: the variable is not set.
        """
        if self.key_variable and not os.environ.get(self.key_variable):
            raise TeacherError(
                f"teacher {self.name!r}: the environment variable {self.key_variable} of its API "
                "key is not set; set it, or correct key_variable"
            )
        return os.environ[self.key_variable] if self.key_variable else ""


def check_vocabulary(teacher: Teacher, tokenizer: Any) -> None:
    """Compare the teacher's tokenizer with the student's: each id must be the same token.

    Args:
        tokenizer: the student's.

    Raises:
        TeacherError: they differ; the message names the first such id. Or there is no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(teacher.model)
    except (OSError, ValueError) as error:
        raise TeacherError(
            f"teacher {teacher.name!r}: no tokenizer can be loaded from model={teacher.model!r}: "
            f"{' '.join(str(error).split())}; give the folder or the hub's name of its model"
        ) from error
    one, other = (
        {number: token for token, number in getattr(t, "tokenizer", t).get_vocab().items()}
        for t in (tokenizer, theirs)
    )
    for number in sorted(one.keys() | other.keys()):
        if one.get(number) != other.get(number):
            raise TeacherError(
                f"teacher {teacher.name!r}: its vocabulary is not the student's: token id {number} "
                f"is {other.get(number)!r} at the teacher and {one.get(number)!r} at the student. "
                "Distillation compares the logprobs of single tokens; take a teacher with the same "
                "tokenizer"
            )


class TokenScores(NamedTuple):
    """What a teacher says of T tokens, each after those before it.

    Attributes:
        logprobs: (T,) float64, log pi_T of each token; NaN for the first one, which nothing
            predicts.
        ranks: (T,) float64, 1 for a token that the teacher finds likeliest; NaN where it is not
            told.
        top: the likeliest tokens in the place of each; None if they were not asked for.
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top: TeacherTop | None = None

    def after(self, start: int) -> TokenScores:
        """Return those of the tokens from `start` on. The first one has no logprob."""
        logprobs, ranks, top = self.logprobs[start:], self.ranks[start:], self.top
        logprobs[0] = ranks[0] = math.nan
        if top is not None:
            top = TeacherTop(top.token_ids[start:], top.logprobs[start:], top.coef)
            top.logprobs[0] = -math.inf
        return TokenScores(logprobs, ranks, top)


class TeacherClient:
    """Asks a teacher for logprobs. All methods run on one event loop.

    Args:
        teacher: the teacher.
        min_model_len: tokens that a request may have; checked when the client opens.
    """

    def __init__(self, teacher: Teacher, min_model_len: int = 0) -> None:
        self.teacher = teacher
        self.min_model_len = min_model_len
        self._what = f"teacher {teacher.name!r} at {teacher.base_url}"
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
        self._open(self.teacher.key())
        try:
            models = (await self._request("GET", "/v1/models")).get("data") or []
            self._model, longest = self._served(models)
        except BaseException:
            await self.close()
            raise
        if longest is not None and longest < self.min_model_len:
            await self.close()
            raise TeacherError(
                f"{self._what} takes {longest} tokens at most, and needs {self.min_model_len}: "
                f"max_seq_len and one more; start it with --max-model-len {self.min_model_len}"
            )

    def _open(self, key: str) -> None:
        host = urlsplit(self.teacher.base_url).hostname
        self._places = asyncio.Semaphore(self.teacher.max_concurrent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            trust_env=host not in LOOPBACK,  # a proxy set for the internet is not for this machine
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def served_model(self) -> str:
        """What its server calls it; "" before the client is open."""
        return self._model

    async def wait(self) -> None:
        """Wait until the teacher answers again.

        Raises:
            TeacherError: it has not by its deadline.
        """
        await self._request("GET", "/v1/models")

    async def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """Return `score(token_ids).logprobs`."""
        return (await self.score(token_ids)).logprobs

    async def score(self, token_ids: np.ndarray, top_k: int = 0) -> TokenScores:
        """Return what the teacher says of these tokens.

        Args:
            token_ids: (T,).
            top_k: return also so many of the likeliest tokens in the place of each.

        Raises:
            TeacherError: no answer by the deadline, or one that does not fit the request.
        """
        return await self._score(self._model, token_ids, top_k)

    async def _score(self, model: str, token_ids: np.ndarray, top_k: int) -> TokenScores:
        ids = [int(token) for token in token_ids]
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0}
        body["prompt_logprobs"] = top_k
        async with self._places:
            reply = await self._request("POST", "/v1/completions", body)
        try:
            # Of thousands of tokens, top_k each, this takes a while.
            return await asyncio.to_thread(scores_of, reply, ids, top_k)
        except ValueError as error:
            raise TeacherError(
                f"{self._what} does not answer as vLLM does: {error}; is it a vLLM server of "
                f"{self.teacher.model!r}?"
            ) from error

    def _served(self, models: list[dict[str, Any]]) -> tuple[str, int | None]:
        """Return what the server calls the teacher's model, and how many tokens it takes."""
        names = [str(one.get("id")) for one in models]
        known = [one for one in models if one.get("id") == self.teacher.model]
        if not known and len(models) == 1:
            known = models
        if not known:
            raise TeacherError(
                f"{self._what} serves {', '.join(names) or 'no model'}, not "
                f"{self.teacher.model!r}; start it with --served-model-name {self.teacher.model}"
            )
        return str(known[0]["id"]), known[0].get("max_model_len")

    async def _request(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request until it is answered, up to the deadline. Return the reply."""
        loop, timeout_s = asyncio.get_running_loop(), self.teacher.timeout_s
        deadline, pause_s = loop.time() + timeout_s, FIRST_PAUSE_S
        while True:
            assert self._session is not None, "call open() first"
            left_s = max(deadline - loop.time(), 0.001)
            try:
                async with self._session.request(
                    method,
                    self.teacher.base_url + path,
                    json=body,
                    timeout=aiohttp.ClientTimeout(total=left_s),
                    allow_redirects=False,  # the key is for this server only
                ) as answer:
                    status, text = answer.status, await answer.text()
            except (aiohttp.ClientError, TimeoutError) as error:
                problem: str = str(error) or type(error).__name__
            else:
                if status == 200:
                    self._is_away = False
                    try:
                        return json.loads(text)
                    except ValueError as error:
                        raise TeacherError(
                            f"{self._what} answered {method} {path} with what is no JSON"
                        ) from error
                problem = f"status {status}: {' '.join(text.split())[:300]}"
                if status < 500 and status != 429:
                    raise self._refused(f"{method} {path}: {problem}")
            self._lost(problem)
            left_s = deadline - loop.time()
            if left_s <= 0:
                raise TeacherError(
                    f"{self._what} gave no answer within {timeout_s:g} s (timeout_s); at last: "
                    f"{problem}. Start it again, correct its base_url, or raise its timeout_s; "
                    "then resume the run"
                )
            await asyncio.sleep(min(pause_s, left_s))  # there is nothing to await
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _refused(self, problem: str) -> Exception:
        hint = "is the model right, and its --max-model-len above max_seq_len?"
        if "max allowed" in problem:
            hint = MAX_LOGPROBS_HINT
        if "status 401" in problem or "status 403" in problem:
            hint = "set key_variable to the environment variable with its API key"
        return TeacherError(f"{self._what} refuses: {problem}; {hint}")

    def _lost(self, problem: str) -> None:
        """An attempt has failed; another may follow."""
        if not self._is_away:
            self._is_away = True
            logger.warning(
                "%s does not answer (%s); waiting up to %g s", self._what, problem,
                self.teacher.timeout_s,
            )  # fmt: skip


class OwnServerClient(TeacherClient):
    """Asks the student's own server, at the policy that it has now.

    A server that does not answer is lost for the trainer too, which then waits for it and requests
    the batch again. So nothing is asked twice here: the server would answer with other weights.

    Args:
        base_url: of the server, without /v1.
        timeout_s: deadline of a request.
    """

    def __init__(self, base_url: str, timeout_s: float) -> None:
        super().__init__(Teacher("policy", base_url, "the student itself", timeout_s=timeout_s))

    async def open(self) -> None:
        self._open(generation_key(self.teacher.base_url))

    async def score_under(self, model: str, token_ids: np.ndarray, top_k: int = 0) -> TokenScores:
        """Do as `score`, for the policy that requests reach by this name."""
        return await self._score(model, token_ids, top_k)

    def _refused(self, problem: str) -> Exception:
        if "status 404" in problem:  # a server that started anew does not know the adapter
            return ServerLostError(f"{self._what}: {problem}")
        hint = "; its max_model_len must hold a rollout and the hint"
        if "max allowed" in problem:
            hint = f"; {MAX_LOGPROBS_HINT}"
        elif "prompt_logprobs" in problem:  # vf-vllm says what to do
            hint = ""
        return TeacherError(f"{self._what} refuses: {problem}{hint}")

    def _lost(self, problem: str) -> None:
        if not problem.startswith("status 429"):
            raise ServerLostError(f"{self._what} does not answer: {problem}")


def logprobs_of(reply: dict[str, Any], token_ids: list[int]) -> np.ndarray:
    """Return the logprobs of a prompt's tokens from a reply of vLLM, (T,) float64; NaN for the
    first one.

    Raises:
        ValueError: the reply is of other tokens, or a logprob is missing or not finite.
    """
    choices = reply.get("choices") or [{}]
    found = choices[0].get("prompt_logprobs")
    if not isinstance(found, list):
        raise ValueError("the reply has no prompt_logprobs")
    if len(found) != len(token_ids):
        raise ValueError(f"{len(found)} prompt_logprobs for a prompt of {len(token_ids)} tokens")
    values = np.full(len(token_ids), math.nan)
    for place in range(1, len(token_ids)):
        entry = (found[place] or {}).get(str(token_ids[place]))
        logprob = entry.get("logprob") if isinstance(entry, dict) else None
        if not isinstance(logprob, int | float) or not LOWEST_LOGPROB < logprob <= 1e-3:
            said = "is missing" if logprob is None else f"is {logprob}"
            raise ValueError(f"the logprob of token {token_ids[place]} at position {place} {said}")
        values[place] = logprob
    return values


def scores_of(reply: dict[str, Any], token_ids: list[int], top_k: int) -> TokenScores:
    """Return what a reply of vLLM says of a prompt's tokens.

    Raises:
        ValueError: see `logprobs_of`; or the reply has fewer than `top_k` tokens in a place.
    """
    logprobs = logprobs_of(reply, token_ids)
    found = reply["choices"][0]["prompt_logprobs"]
    ranks = np.full(len(token_ids), math.nan)
    top_ids = np.zeros((len(token_ids), top_k), np.int32)
    of_top = np.full((len(token_ids), top_k), -math.inf, np.float32)
    for place in range(1, len(token_ids)):
        rank = found[place][str(token_ids[place])].get("rank")
        ranks[place] = rank if isinstance(rank, int) and rank > 0 else math.nan
        if not top_k:
            continue
        if len(found[place]) < top_k:
            raise ValueError(f"{len(found[place])} of {top_k} tokens at position {place}")
        of_place = [(entry.get("logprob"), int(token)) for token, entry in found[place].items()]
        if not all(isinstance(logprob, int | float) and logprob <= 1e-3 for logprob, _ in of_place):
            raise ValueError(f"a logprob at position {place} is missing or no logprob")
        likeliest = sorted(of_place, key=lambda pair: (-pair[0], pair[1]))[:top_k]
        top_ids[place] = likeliest[0][1]  # also where an entry is impossible
        for k, (logprob, token) in enumerate(likeliest):
            if logprob > LOWEST_LOGPROB:
                top_ids[place, k], of_top[place, k] = token, min(logprob, 0.0)
    return TokenScores(logprobs, ranks, TeacherTop(top_ids, of_top) if top_k else None)
