"""What the parts pass on to each other: Rollout -> Sample -> Batch.

This is data of numpy, because rollout workers load no torch. packing.py makes microbatches of it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args

import numpy as np

if TYPE_CHECKING:
    from torch import nn


# Seconds that an environment may take to start. A longer generation_timeout takes its place.
LOAD_S = 300.0
Split = Literal["train", "eval"]
# Of rewards; advantages may be ten times as large. The loss and its gradient have float32, in which
# the squares of larger ones, summed up over a batch, are no numbers.
LARGEST_REWARD = 1e15
MAX_MASK = 1024  # tokens that a sampling mask has at one position
# The extras of a token that this library itself fills and reads.
ROUTED_EXPERTS = "routed_experts"
ALLOWED_TOKENS = "allowed_tokens"
# What a loss can ask for of the sample of each token, as @needs("reward").
Column = Literal["positions", "num_tokens", "rollout_id", "group_id", "reward"]


def join_column(name: str, parts: Sequence[tuple[int, np.ndarray | None]]) -> Any:
    """Return a column of these parts, one after the other and as wide as the widest. What they
    leave free is -1, or NaN. None if no part has it.

    Args:
        name: of the column.
        parts: the number of tokens of each, and its numbers, (tokens, ...); None if its tokens have
            none.

    Raises:
        ValueError: its dtype has no number for tokens without one.
    """
    known = [part for _, part in parts if part is not None]
    if not known:
        return None
    shapes, own = {part.shape[1:] for part in known}, Sample.DTYPES.get(name)
    dtype = np.dtype(own or np.result_type(*{part.dtype for part in known}))
    if own is None and dtype.kind not in "if":
        raise ValueError(
            f"extras[{name!r}] has the dtype {dtype}, which has no -1 for a token without a "
            "number; make it signed integers or floats, such as .astype(np.int8)"
        )
    if len(shapes) == 1 and len(known) == len(parts):  # the usual case, and several times as fast
        return np.concatenate(known, dtype=dtype)
    shape = sum(num_tokens for num_tokens, _ in parts), *map(max, zip(*shapes, strict=True))
    column = np.full(shape, math.nan if dtype.kind == "f" else -1, dtype)
    start = 0
    for num_tokens, part in parts:
        if part is not None:
            column[(slice(start, start + num_tokens), *map(slice, part.shape[1:]))] = part
        start += num_tokens
    return column


@dataclass(slots=True, eq=False)
class Sample:
    """One token sequence to train on: arrays of one length, T. Sequences of numbers are converted;
    an array that has the type already is kept, not copied.

    Attributes:
        token_ids: (T,) int32, prompt, sampled and environment tokens in order, exactly as the
            server saw them.
        loss_mask: (T,) bool, True for tokens in the loss. The first token cannot be in it, because
            nothing predicts it.
        inference_logprobs: (T,) float32, natural-log probability under the sampling policy; 0 where
            not sampled, NaN for a token in the loss that no policy sampled
            (`mask_env_responses=False`).
        policy_versions: (T,) int32, version of the policy that sampled the token; -1 where not
            sampled.
        advantages: (T,) float32, advantage of each token; 0 where `loss_mask` is False. Zeros by
            default.
        rollout_id: position of its rollout in the batch; -1: the sample is a rollout of its own.
        group_id: position of its group in the batch; -1: the sample is a group of its own.
        reward: of its rollout; NaN if that is not in a batch.
        extras: whatever else belongs to the tokens, by name: (T, ...) numbers; -1 (or NaN) where a
            token has none. They travel with the sample. Those of this library:
            "routed_experts", (T, layers, top_k) int16: the experts that the server chose when it
            computed the token; -1 where it returned none, as for the last token of a reply.
            "allowed_tokens", (T, K) int32: the tokens from which top-p, top-k and min-p let the
            server choose this one, with -1 behind them; only -1 where it could choose any.
    """

    DTYPES: ClassVar[dict[str, type]] = {
        "token_ids": np.int32,
        "loss_mask": np.bool_,
        "inference_logprobs": np.float32,
        "policy_versions": np.int32,
        "advantages": np.float32,
    }

    token_ids: np.ndarray
    loss_mask: np.ndarray
    inference_logprobs: np.ndarray
    policy_versions: np.ndarray
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    rollout_id: int = field(default=-1, kw_only=True)
    group_id: int = field(default=-1, kw_only=True)
    reward: np.float32 = field(default=np.float32(math.nan), kw_only=True)
    extras: dict[str, np.ndarray] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if not len(self.advantages):
            self.advantages = np.zeros(self.num_tokens, np.float32)
        for name, dtype in self.DTYPES.items():
            setattr(self, name, np.asarray(getattr(self, name), dtype))
        shapes = {name: getattr(self, name).shape for name in self.DTYPES}
        if set(shapes.values()) != {(self.num_tokens,)} or not self.num_tokens:
            raise ValueError(f"Sample: all arrays must have one length >= 1, got {shapes}")
        for name, column in self.extras.items():
            if len(column) != self.num_tokens:
                raise ValueError(
                    f"Sample: extras[{name!r}] of shape {column.shape} for {self.num_tokens} tokens"
                )
        if self.loss_mask[0]:
            raise ValueError(
                "Sample: loss_mask[0] must be False, no token comes before the first one"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def positions(self) -> np.ndarray:
        return np.arange(self.num_tokens)

    def column(self, name: str) -> np.ndarray | None:
        """Return one of the five arrays, or of the extras; None if the sample does not have it."""
        return getattr(self, name) if name in self.DTYPES else self.extras.get(name)

    def set_advantage(self, advantage: float | Sequence[float] | np.ndarray) -> None:
        """Set one advantage for every loss token, or one for each token, (T,)."""
        with np.errstate(over="ignore"):  # `set_advantages` refuses what is too large
            values = np.asarray(advantage).astype(np.float32)
        if values.shape not in ((), self.loss_mask.shape):
            raise ValueError(
                f"advantages of shape {values.shape} for a sample of {self.num_tokens} tokens"
            )
        self.advantages = np.where(self.loss_mask, values, np.float32(0))


def pack_samples(samples: Sequence[Sample]) -> tuple[dict[str, Any], np.ndarray]:
    """Return samples in a form for another process: what `unpack_samples` must know of them, as
    JSON has it, and their columns, one after the other, as bytes (B,) uint8.
    """
    names = dict.fromkeys(name for s in samples for name in (*Sample.DTYPES, *s.extras))
    columns = {
        name: join_column(name, [(s.num_tokens, s.column(name)) for s in samples]) for name in names
    }
    kinds = [(name, column.dtype.str, column.shape[1:]) for name, column in columns.items()]
    numbers = [(s.num_tokens, s.rollout_id, s.group_id) for s in samples]
    content = [column.reshape(-1).view(np.uint8) for column in columns.values()]
    nothing = np.zeros(0, np.uint8)
    return {"columns": kinds, "samples": numbers}, np.concatenate([nothing, *content])


def unpack_samples(message: dict[str, Any], content: Any) -> list[Sample]:
    """Return the samples that `pack_samples` packed, without their rewards."""
    num_tokens, start = sum(num for num, *_ in message["samples"]), 0
    whole = {}
    for name, dtype, shape in message["columns"]:
        whole[name] = np.ndarray((num_tokens, *shape), dtype, content, start).copy()
        start += whole[name].nbytes
    samples = []
    start = 0
    for num_tokens, rollout_id, group_id in message["samples"]:
        own = {name: column[start : start + num_tokens] for name, column in whole.items()}
        start += num_tokens
        arrays = [own.pop(name) for name in Sample.DTYPES]
        samples.append(Sample(*arrays, rollout_id=rollout_id, group_id=group_id, extras=own))
    return samples


@dataclass(slots=True)
class Rollout:
    """One scored interaction with an environment.

    Attributes:
        example_id: position of the example in its dataset split.
        env: name of its environment.
        role: name of the agent; each agent of an episode has its own baseline.
        prompt: what was asked, as text, for people.
        completion: what was answered, as text, for people.
        reward: the environment's score; NaN when `error` is set.
        metrics: the environment's other scores by name.
        samples: its token sequences; several when a turn did not extend the tokens before it, none
            when the agent took no turn.
        num_turns: model calls.
        is_truncated: a length limit cut a turn.
        generation_s: seconds from the first request to the last reply.
        error: why it failed; such a rollout enters neither the baseline nor the batch.
        num_restarts: how often its group began again, because its worker process died.
        num_moves: how often it began again at another server, because its own was lost.
        advantage: set when its group is complete; the mean over its loss tokens if they differ.
        has_own_advantages: the environment has set the advantages of its samples; they are kept.
        record: what people look at besides: messages, turns and times, as a JSON object in UTF-8;
            b"" where nothing is known. See `envs/records.py`.
        added_advantages: for each token of its samples, one sample after the other, (sum of T,)
            float64: added to the advantages that its group gives it. None: nothing is added.
    """

    example_id: int
    prompt: str
    completion: str = ""
    env: str = "env"
    role: str = ""
    reward: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    num_turns: int = 0
    is_truncated: bool = False
    generation_s: float = 0.0
    error: BaseException | None = None
    num_restarts: int = 0
    num_moves: int = 0
    advantage: float = 0.0
    has_own_advantages: bool = False
    record: bytes = b""
    added_advantages: np.ndarray | None = None

    def set_advantage(self, advantage: float | Sequence[float] | np.ndarray) -> None:
        """Set the advantage of the rollout and of the loss tokens of its samples.

        Args:
            advantage: one number for all of them, or one for each token of its samples, one sample
                after the other.

        Raises:
            ValueError: there are more or fewer advantages than tokens.
        """
        values = np.asarray(advantage, float)
        lengths = [sample.num_tokens for sample in self.samples]
        if not lengths and not values.size:  # nothing was sampled
            return
        if values.ndim and len(values) != sum(lengths):
            raise ValueError(
                f"{len(values)} advantages for a rollout whose samples have {sum(lengths)} tokens"
            )
        parts = np.split(np.broadcast_to(values, sum(lengths)), np.cumsum(lengths)[:-1])
        for sample, part in zip(self.samples, parts, strict=False):
            sample.set_advantage(part)
        if values.ndim:
            of_loss = np.concatenate([s.advantages[s.loss_mask] for s in self.samples])
            values = of_loss.sum(dtype=float) / max(len(of_loss), 1)
        self.advantage = float(values)

    def leave_out_of_loss(self) -> None:
        """Take all its tokens out of the loss; they stay in the batch."""
        for sample in self.samples:
            sample.loss_mask = np.zeros_like(sample.loss_mask)
        self.set_advantage(0.0)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(int(np.count_nonzero(s.policy_versions >= 0)) for s in self.samples)


@dataclass(frozen=True, slots=True)
class SampleSizes:
    """What decides how the samples of a batch are computed. The arrays are (S,) int64, S the number
    of samples.

    Attributes:
        lengths: number of tokens.
        num_loss_tokens: number of tokens in the loss.
        rollout_ids: a number that exactly the samples of one rollout share.
        group_ids: a number that exactly the samples of one group share.
        has_advantage: 1 if a token in the loss has an advantage other than 0, else 0.
        order: the samples in an order in which those with a common beginning are neighbours.
        num_shared: how many tokens at its beginning the sample at this place of `order` has in
            common with the sample before it.
    """

    lengths: np.ndarray
    num_loss_tokens: np.ndarray
    rollout_ids: np.ndarray
    group_ids: np.ndarray
    has_advantage: np.ndarray
    order: np.ndarray
    num_shared: np.ndarray

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> SampleSizes:
        numbers = [
            (
                s.num_tokens,
                s.num_loss_tokens,
                s.rollout_id if s.rollout_id >= 0 else -1 - i,
                s.group_id if s.group_id >= 0 else -1 - i,
                np.any(s.advantages[s.loss_mask]),
            )
            for i, s in enumerate(samples)
        ]
        order = order_by_beginning([sample.token_ids for sample in samples])
        arrays = [*np.array(numbers, np.int64).reshape(-1, 5).T, *order]
        return cls(*arrays)


def order_by_beginning(sequences: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return `order` and `num_shared` of these sequences of token ids, see `SampleSizes`. A
    sequence that is the beginning of another comes before it.
    """
    # As big-endian numbers, their bytes are in the same order as they are.
    keys = [ids.astype(">i4").tobytes() for ids in sequences]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    num_shared = np.zeros(len(order), np.int64)
    for place in range(1, len(order)):
        before, ids = sequences[order[place - 1]], sequences[order[place]]
        differs = before[: len(ids)] != ids[: len(before)]
        num_shared[place] = differs.argmax() if differs.any() else len(differs)
    return np.array(order, np.int64), num_shared


@dataclass
class Batch:
    """What one optimizer step trains on.

    Attributes:
        step: the optimizer step it was generated for, from 0.
        policy_version: oldest version of the weights when one of its groups began; its tokens may
            be newer.
        samples: token sequences of all surviving rollouts.
        rollouts: for tables and logs; present on rank 0 only.
        metrics: means over the batch, already reduced; present on rank 0 only.
        groups: all that were generated for it, also rollouts that failed and groups that the filter
            rejected; present on rank 0 only.
    """

    step: int
    policy_version: int
    samples: list[Sample]
    rollouts: list[Rollout] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    groups: list[list[Rollout]] = field(default_factory=list)

    def __post_init__(self) -> None:
        group_of = {id(rollout): n for n, group in enumerate(self.groups) for rollout in group}
        group_id, last = -1, None
        for rollout_id, rollout in enumerate(self.rollouts):
            own = group_of.get(id(rollout), (rollout.env, rollout.example_id))
            group_id, last = group_id + (own != last), own  # its rollouts are neighbours
            for sample in rollout.samples:
                sample.rollout_id, sample.group_id = rollout_id, group_id
                sample.reward = np.float32(rollout.reward)

    def add_columns(self, names: frozenset[str]) -> None:
        """Add each `Column` that is among these names to the extras of the samples, on rank 0. It
        has the sample's attribute for each token.
        """
        for name in names.intersection(get_args(Column)):
            for sample in self.samples:
                sample.extras[name] = np.full(sample.num_tokens, getattr(sample, name))

    @cached_property
    def sizes(self) -> SampleSizes:
        return SampleSizes.of(self.samples)

    @property
    def num_tokens(self) -> int:
        return int(self.sizes.lengths.sum())

    @property
    def num_loss_tokens(self) -> int:
        return int(self.sizes.num_loss_tokens.sum())

    def staleness(self) -> dict[str, float]:
        """Return the optimizer steps between the weights that sampled a token and the weights that
        train on it: mean and maximum over sampled tokens.
        """
        sampled_by = (s.policy_versions[s.policy_versions >= 0] for s in self.samples)
        versions = np.concatenate([np.zeros(0), *sampled_by])
        if not len(versions):
            return {}
        return {
            "staleness": self.step - float(versions.mean()),
            "staleness_max": float(self.step - versions.min()),
        }


# What an evaluation gives: its metrics, and its groups.
Evaluated = tuple[dict[str, float], list[list[Rollout]]]


class BatchSource(Protocol):
    """What the trainer needs of an orchestrator. With a stub that has these methods, the trainer
    runs without a server. `orchestrator.py` says what each method does.
    """

    @property
    def num_pending(self) -> int: ...
    def start(self) -> None: ...
    def submit(self, step: int, model: str, policy_version: int) -> None: ...
    def wait(self) -> None: ...
    def get(self) -> Batch: ...
    def discard(self) -> None: ...
    def begin_evaluation(self, model: str, policy_version: int) -> None: ...
    def end_evaluation(self) -> Evaluated: ...
    def state_dict(self, step: int) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def stop(self) -> None: ...


class WeightSink(Protocol):
    """What the trainer and its orchestrator need of a weight sync.

    Attributes:
        policy_version: version of the weights that the server has; None if it needs them again.
        model_name: the model name in rollout requests.
        sleeps: a server can leave its GPU's memory to the trainer, until the next push.
    """

    policy_version: int | None
    sleeps: bool

    @property
    def model_name(self) -> str: ...
    def sleep(self) -> None: ...
    def push(self, model: nn.Module, policy_version: int) -> dict[str, float]: ...
    def check_server(self) -> None: ...
    def wait_for_server(self) -> None: ...
    def close(self) -> None: ...


def missing_members(part: Any, protocol: type) -> list[str]:
    """The names that this protocol has and the part has not."""
    names = [*protocol.__annotations__, *(n for n in vars(protocol) if not n.startswith("_"))]
    nothing = object()  # a property may ask the server, so none is called
    return [name for name in names if inspect.getattr_static(part, name, nothing) is nothing]


def idle(protocol: type) -> Any:
    """Return a class that has the members of this protocol: methods that do nothing and return
    None, and attributes that are None.
    """
    methods = dict.fromkeys(missing_members(None, protocol), lambda *args: None)
    return type(protocol.__name__, (), {**methods, **dict.fromkeys(protocol.__annotations__)})
