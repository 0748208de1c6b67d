"""What all kinds of environment share. Each kind is a class that satisfies `requests.EnvRunner`:

v1.py       `verifiers.v1`: tasksets, agents, episodes; v1_loading.py makes them, v1_client.py takes
            their model calls to the server
agents.py   agents that exist already, programs and functions, play them; a leaf
dataset.py  prompts and reward functions, one turn each (`env_from`)
played.py   `verifiers.v1`, played by a model behind any endpoint; nothing is trained
workers.py  environments in processes of their own
foreign.py  environments that another Python makes, in workers of their own, by made_there.py
classic.py  `verifiers.Environment`, up to verifiers 0.3, in such a worker
make.py     chooses the kind for what a user passes as `env`, and mixes several
"""

from __future__ import annotations

import ast
import importlib
import math
import os
import pickle
import pickletools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydantic.dataclasses

from verifiers_rl.inference import allowed_tokens
from verifiers_rl.option_rules import STRICT, EnvName, PositiveInt, PositiveNumber
from verifiers_rl.types import (
    ALLOWED_TOKENS,
    LARGEST_REWARD,
    ROUTED_EXPERTS,
    Sample,
    Split,
    join_column,
)

# For errors. A classic environment gets the last verifiers that has those, and what works with it.
HOW_TO_MAKE_PYTHON = (
    "make a Python of 3.11 or later for it: `uv venv NAME && uv pip install --python NAME "
    "verifiers`, or for a classic environment 'verifiers>=0.3.1,<0.4' 'renderers==0.1.10' "
    "'openai<3', and set python = \"NAME/bin/python\""
)


class NotPortableError(Exception):
    """The environment cannot be made again in another process; the message says why."""


class InvalidEnvironmentError(ValueError):
    """The environment cannot be used for training; the message says why and what to change."""


def pickle_for_worker(thing: Any) -> bytes:
    """Pickle something for a rollout worker of this Python.

    Raises:
        NotPortableError: that is not possible, or it needs the script that runs, and the script
            cannot be imported in another process.
    """
    try:
        data = pickle.dumps(thing)
    except Exception as error:  # whatever a part of it raises
        raise NotPortableError(f"its parts cannot be sent to another process: {error}") from error
    if needs_script(data):
        check_importable(sys.modules["__main__"])
    return data


def needs_script(pickled: bytes) -> bool:
    """Return whether a pickle has a class or a function of the script that runs; a text that has
    `__main__` in it is none.
    """
    return b"__main__" in pickled and "__main__" in (
        argument for _, argument, _ in pickletools.genops(pickled)
    )


def check_importable(script: Any) -> None:
    """Raise NotPortableError if the module of the script that runs cannot be imported in another
    process.
    """
    path = Path(getattr(script, "__file__", None) or "")
    if not path.is_file():
        raise NotPortableError(
            "parts of it are defined in an interactive session, which a worker cannot import"
        )
    if path.name == "__main__.py":
        raise NotPortableError(
            f"parts of it are defined in {path}, and multiprocessing imports no __main__.py; move "
            "them into another module of the package"
        )
    # Python reads bytes as it reads a script: in the encoding that the script declares.
    tests = [part.test for part in ast.parse(path.read_bytes()).body if isinstance(part, ast.If)]
    if not any("__name__" in ast.unparse(test) for test in tests):
        raise NotPortableError(
            f"parts of it are defined in {path.name}, which a worker would import, and which "
            'lacks `if __name__ == "__main__":` around what starts the training'
        )


def add_folders(*folders: Path) -> None:
    """Make the modules in these folders importable, first those of the first folder: here, and by
    PYTHONPATH in processes that are started from here, such as tool servers.
    """
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    for paths in (sys.path, inherited):
        paths[:0] = [name for name in map(str, folders) if name not in paths]
    os.environ["PYTHONPATH"] = os.pathsep.join(inherited)
    importlib.invalidate_caches()


def module_name(env_id: str) -> str:
    """Return the module of an id: that of verifiers' hub, owner/name@version, is installed as name,
    with underscores.
    """
    return env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


class Turn(NamedTuple):
    """A model call of a rollout, as tokens.

    Attributes:
        prompt_ids: all tokens before the reply.
        reply: the `ChatReply`.
        advantages: what the environment has given to each of them; None: nothing.
    """

    prompt_ids: list[int]
    reply: Any
    advantages: list[float] | None = None


def samples_from_turns(
    turns: Iterable[Turn],
    policy_version: int,
    mask_env_responses: bool = True,
) -> list[Sample]:
    """Merge the turns of one rollout into as few samples as stay token-exact.

    If the prompt of a turn begins with all tokens of a sample so far, the turn continues it, and
    the tokens that the environment added between are appended without loss. Otherwise (a template
    that drops thinking, a compaction, a second conversation) the turn starts a new sample. So every
    sampled token is in the loss of exactly one sample, after exactly the tokens that were its
    context when it was sampled.

    Args:
        turns: the `Turn`s in their order.
        policy_version: version for replies that say none.
        mask_env_responses: leave tokens that the environment put between turns out of the loss.

    Raises:
        ValueError: the numbers of a turn's tokens and logprobs differ, or a logprob is no number.
    """
    chains: list[Any] = []  # for each sample, a list for each of its columns
    for prompt, reply, given in turns:
        sampled, new_logprobs = (values.tolist() for values in reply.sampled)
        num = len(sampled)
        # NaN would mean that no policy sampled the token, see below.
        if not np.isfinite(new_logprobs).all():
            raise ValueError(
                "the server's logprob of a sampled token is NaN or infinite: its logits overflow; "
                "use another dtype there"
            )
        chain = next((one for one in reversed(chains) if prompt[: len(one[0])] == one[0]), None)
        trains_added = not (chain is None or mask_env_responses)
        if chain is None:
            chains.append(chain := [[] for _ in range(7)])
        token_ids, in_loss, logprobs, versions, advantages, masks, experts = chain
        num_added = len(prompt) - len(token_ids)
        token_ids[:] = [*prompt, *sampled]
        in_loss += [trains_added] * num_added + [True] * num
        # NaN: no policy sampled these. The trainer's logprob is used, so ratio 1.
        logprobs += [math.nan if trains_added else 0.0] * num_added + new_logprobs
        spans = reply.policy_versions or [(0, policy_version)]
        starts, own = np.array(spans, np.int32).T
        versions += [-1] * num_added + np.repeat(own, np.diff(starts, append=num)).tolist()
        advantages += [0.0] * num_added + (given or [0.0] * num)
        allowed = allowed_tokens(*reply.mask) if reply.mask else None
        masks += [(num_added, None), (num, allowed)]
        if reply.experts is not None:  # of the tokens before, too: the first time sampled them
            new = reply.experts[sum(num for num, _ in experts) : len(token_ids)]
            experts.append((len(new), new))
    samples = []
    for *columns, masks, experts in chains:
        samples.append(sample := Sample(*columns))
        experts.append((len(sample.token_ids) - sum(num for num, _ in experts), None))
        for name, parts in ((ALLOWED_TOKENS, masks), (ROUTED_EXPERTS, experts)):
            if (column := join_column(name, parts)) is not None:
                sample.extras[name] = column
    return samples


def finite_reward(reward: Any) -> float:
    """Return a reward as a number. Raises ValueError if it is NaN, infinite or too large."""
    if not abs(number := float(reward)) <= LARGEST_REWARD:  # NaN is not, either
        raise ValueError(
            f"the environment's reward is {number:g}; it must be a number from "
            f"{-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
        )
    return number


@dataclass(frozen=True)
class RunnerOptions:
    """Options for running an environment.

    Attributes:
        base_url: URL of the inference server, without /v1.
        tokenizer: the model's. It measures prompts and makes the tokens of new messages. Without
            one, no prompt is left out.
        max_seq_len: longest sequence in tokens. A rollout ends there, and counts as truncated.
        max_prompt_len: examples whose first prompt has more tokens are left out; None: those whose
            prompt fills max_seq_len.
        mask_env_responses: leave tokens that the environment put between turns out of the loss.
        timeout_s: deadline of one rollout, seconds.
        name: prefix of its metrics.
        max_concurrent: rollouts at a time, for which files must be opened.
        num_eval_tasks: tasks of a stream that evaluations use.
        chat_template_kwargs: variables of the chat template, for measuring prompts. Those of a
            request are among its sampling options.
    """

    base_url: str
    tokenizer: Any
    max_seq_len: int
    max_prompt_len: int | None = None
    mask_env_responses: bool = True
    timeout_s: float = 600.0
    name: str = "env"
    max_concurrent: int = 512
    num_eval_tasks: int = 64
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt_limit(self) -> int:
        """The most tokens of a first prompt; behind it there must be room for one."""
        return self.max_prompt_len or self.max_seq_len - 1

    @property
    def why_overlong(self) -> str:
        """What overlong prompts are longer than, and what to do."""
        if self.max_prompt_len is not None:
            return f"prompts longer than max_prompt_len={self.max_prompt_len}"
        return f"prompts that fill max_seq_len={self.max_seq_len} (raise it, or set max_prompt_len)"


@pydantic.dataclasses.dataclass(config=STRICT)
class WeightedEnv:
    """One of several environments to train on.

    Attributes:
        env: an `Env` or a `Taskset` of `verifiers.v1`, a taskset's id, or a `requests.EnvRunner` of
            this name. With `python`: an id, or a dict with what [env] has in a TOML, such as
            {"id": "gsm8k", "args": {"num_train": 64}}.
        name: prefix of its metrics, of letters, digits, blanks and "_.:@+-".
        weight: its share of the groups, up to a common factor.
        sampling_args: in place of the run's, such as {"max_tokens": 64} or {"top_p": 0.9}.
            `temperature` is not allowed: the trainer computes all logprobs at a single one.
        only: "train" or "eval": it is used for this only. None: for both.
        eval_examples: it has at most so many examples in an evaluation; None: `eval_examples` of
            the run.
        scorer: a `requests.GroupScorer` of its training rollouts beside their rewards, such as a
            `distill.Distillation`.
        python: interpreter of its rollout workers, such as "venv/bin/python"; there a classic
            environment finds verifiers 0.3. "": the one of this process.
        folders: where modules for `python` are, beside those that are installed for it.

    Raises:
        pydantic.ValidationError: a value cannot work.
    """

    env: Any
    name: EnvName
    weight: PositiveNumber = 1.0
    sampling_args: dict[str, Any] = field(default_factory=dict)
    only: Split | None = None
    eval_examples: PositiveInt | None = None
    scorer: Any = None
    python: str = ""
    folders: Sequence[str | Path] = ()

    def __post_init__(self) -> None:
        if self.scorer is not None and self.only == "eval":
            raise ValueError(
                f"environment {self.name!r}: a scorer, such as a teacher, has no effect beside "
                "only='eval'; remove one of the two"
            )
