"""Rollouts as the page shows them: a choice among many, one of them, its group, its tokens.

A choice is made in the index, an array of 32 bytes a rollout. Lines are read for what is shown, a
page of rows at a time, and for a search in texts, which has a limit and a deadline. All results are
of values that JSON has.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, BinaryIO

import numpy as np

from verifiers_rl.json_text import without_nan
from verifiers_rl.report.rollouts import (
    HAS_ERROR,
    HAS_TOKENS,
    IS_EVAL,
    IS_TRUNCATED,
    NOT_IN_LOSS,
    ROLLOUTS,
    Rollouts,
)

PAGE = 50  # rows of a page
SEARCH_S = 1.0  # for a search in texts; the page asks again for the rest
MAX_TOKENS = 2_000  # in one answer
MAX_GROUP = 64  # rollouts of a group that are shown side by side
_PREVIEW, _GROUP_TEXT, _TEXT = 200, 4_000, 400_000  # characters of a text
_CHECK = 32  # lines that are read between two looks at the clock
_BINS = 20  # of a histogram
_LARGEST = 2**31 - 1  # of the index's numbers
_COMMON = ("step", "split", "env", "role", "example", "group", "reward", "advantage", "in_loss",
           "is_truncated", "error", "num_turns", "num_tokens", "num_sampled_tokens", "generation_s",
           "has_tokens")  # fmt: skip
KINDS = {  # of rollouts: flags that are looked at, and what they must be
    "failed": (HAS_ERROR, HAS_ERROR),
    "scored": (HAS_ERROR, 0),
    "truncated": (IS_TRUNCATED, IS_TRUNCATED),
    "in_loss": (NOT_IN_LOSS, 0),
    "not_in_loss": (NOT_IN_LOSS, NOT_IN_LOSS),
    "with_tokens": (HAS_TOKENS, HAS_TOKENS),
}
ORDERS = ("newest", "oldest", "lowest", "highest", "longest")


@dataclass(frozen=True)
class Filter:
    """Which rollouts, and in which order. None and "": all.

    Attributes:
        from_step, to_step: inclusive.
        min_reward, max_reward: inclusive; a rollout without reward is left out.
        split: train or eval.
        env: name of the environment.
        kind: one of `KINDS`.
        example: its number.
        text: what a message, a tool call or an error contains, in any case.
        order: one of `ORDERS`.
    """

    from_step: int | None = None
    to_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    split: str = ""
    env: str = ""
    kind: str = ""
    example: int | None = None
    text: str = ""
    order: str = "newest"

    @classmethod
    def parse(cls, values: Mapping[str, str]) -> Filter:
        """Return the filter that a query asks for. Raises ValueError, which names the value."""
        parsed: dict[str, Any] = {}
        for field in fields(cls):
            value = values.get(field.name, "")
            if value == "":
                continue
            try:
                if "int" in str(field.type):
                    parsed[field.name] = min(max(int(value), -_LARGEST), _LARGEST)
                else:
                    is_number = "float" in str(field.type)
                    parsed[field.name] = float(value) if is_number else value
            except ValueError:
                raise ValueError(f"{field.name}={value!r} is no number") from None
        for name, known in (("kind", KINDS), ("order", ORDERS), ("split", ("train", "eval"))):
            if name in parsed and parsed[name] not in known:
                raise ValueError(f"{name}={parsed[name]!r}; one of {', '.join(known)}")
        return cls(**parsed)


def select(rollouts: Rollouts, wanted: Filter) -> np.ndarray:
    """Return the numbers of the rollouts of a filter, in its order, whatever their text."""
    index = rollouts.index
    chosen = np.ones(len(index), bool)
    if wanted.from_step is not None:
        chosen &= index["step"] >= wanted.from_step
    if wanted.to_step is not None:
        chosen &= index["step"] <= wanted.to_step
    with np.errstate(over="ignore"):  # in the index's precision: there, 0.1 is not below 0.1
        if wanted.min_reward is not None:
            chosen &= index["reward"] >= np.float32(wanted.min_reward)
        if wanted.max_reward is not None:
            chosen &= index["reward"] <= np.float32(wanted.max_reward)
    if wanted.split:
        chosen &= (index["flags"] & IS_EVAL > 0) == (wanted.split == "eval")
    if wanted.env:
        number = rollouts.envs.index(wanted.env) if wanted.env in rollouts.envs else -1
        chosen &= index["env"] == number
    if wanted.kind:
        mask, value = KINDS[wanted.kind]
        chosen &= index["flags"] & mask == value
    if wanted.example is not None:
        chosen &= index["example"] == wanted.example
    numbers = np.flatnonzero(chosen)
    if wanted.order == "newest":
        return numbers[::-1]
    if wanted.order in ("lowest", "highest"):
        sign = 1 if wanted.order == "lowest" else -1  # without reward (NaN): last
        return numbers[np.argsort(sign * index["reward"][numbers], kind="stable")]
    if wanted.order == "longest":
        return numbers[np.argsort(-index["length"][numbers].astype(np.int64), kind="stable")]
    return numbers


class Lines:
    """Reads lines of rollouts.jsonl. Enter it, so that the file is opened once.

    Args:
        rollouts: whose lines.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        self._index, self._path = rollouts.index, rollouts.folder / ROLLOUTS
        self._file: BinaryIO | None = None

    def __enter__(self) -> Lines:
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:  # the run was removed
            self._file = None
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def bytes_of(self, number: int) -> bytes:
        record = self._index[number]
        if self._file is None:
            return b""
        self._file.seek(int(record["offset"]))
        return self._file.read(int(record["length"]))

    def row(self, number: int) -> dict[str, Any] | None:
        """Return a rollout; None if its line cannot be read, or is another's by now."""
        return self.parse(number, self.bytes_of(number))

    def parse(self, number: int, line: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(line)
        except ValueError:  # also if it is no UTF-8
            return None
        is_it = isinstance(row, dict) and row.get("step") == int(self._index["step"][number])
        return row if is_it else None


# --- A list of rollouts ---------------------------------------------------------------------------


def page_of(
    rollouts: Rollouts,
    wanted: Filter,
    start: int = 0,
    count: int = PAGE,
    upto: int = sys.maxsize,
) -> dict[str, Any]:
    """Return rows of the list of rollouts.

    Args:
        start: place in the choice from which on rows are wanted.
        count: of rows.
        upto: the choice is of the first so many rollouts. A list has this from its first page on,
            so that no row moves to another page while the run goes on.

    Returns:
        `rows`, each as `summary_of`; `num_chosen`: rollouts of the choice, whatever their text;
        `num_all`: rollouts that it is of; `envs`; `start`; `next`: place behind the last row or, of
        a search, behind the last rollout that was looked at; None at the end. `histogram` of the
        choice's rewards.
    """
    numbers = select(rollouts, wanted)
    numbers = numbers[numbers < upto]
    count = min(max(count, 1), 4 * PAGE)
    place = start = min(max(start, 0), len(numbers))
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + SEARCH_S
    with Lines(rollouts) as lines:
        contains = _search_for(wanted.text)
        while place < len(numbers) and len(rows) < count:
            if place > start and place % _CHECK == 0 and time.monotonic() > deadline:
                break
            number = int(numbers[place])
            place += 1
            line = lines.bytes_of(number)
            if wanted.text and not contains(line):
                continue
            row = lines.parse(number, line)
            if wanted.text and not (row and _find(texts_of(row), wanted.text)):
                continue
            rows.append(summary_of(rollouts, number, row, wanted.text))
    return {
        "rows": rows,
        "num_chosen": len(numbers),
        "num_all": min(len(rollouts), max(upto, 0)),
        "envs": rollouts.envs,
        "start": start,
        "next": place if place < len(numbers) else None,
        "histogram": histogram(rollouts.index["reward"][numbers]),
    }


def summary_of(
    rollouts: Rollouts, number: int, row: dict[str, Any] | None, text: str = ""
) -> dict[str, Any]:
    """Return what a list shows of a rollout: `number`, the keys of `_COMMON`, and `preview`.
    `is_unreadable` where its line cannot be read: only what the index has is there.
    """
    if row is not None:
        common = {name: cut_texts(row.get(name), _PREVIEW) for name in _COMMON}
        return without_nan({"number": number, **common, "preview": preview_of(row, text)})
    record = rollouts.index[number]
    env = int(record["env"])
    return without_nan({
        "number": number, "is_unreadable": True, "step": record["step"],
        "split": "eval" if record["flags"] & IS_EVAL else "train",
        "env": rollouts.envs[env] if env < len(rollouts.envs) else None,
        "example": record["example"], "group": record["group"], "reward": record["reward"],
        "is_truncated": bool(record["flags"] & IS_TRUNCATED),
    })  # fmt: skip


def preview_of(row: dict[str, Any], text: str = "") -> str:
    """Return a line about a rollout: what is around `text`, its error, or its last reply."""
    found = _find(texts_of(row), text) if text else None
    error = row.get("error")
    if found is None and isinstance(error, dict):
        found = str(error.get("message"))
    if found is None:
        messages = _messages(row.get("messages"))
        replies = [message for message in messages if message.get("role") == "assistant"]
        # A reply may be a call and nothing else.
        found = " ".join(_texts_of_message((replies or messages)[-1])) if messages else ""
    return _excerpt(found, text)


def histogram(rewards: np.ndarray) -> dict[str, Any] | None:
    """Return `low`, `high` and the `counts` of bins of one width between them; None without a
    reward. Of one reward there is one bin.
    """
    rewards = rewards[np.isfinite(rewards)].astype(np.float64)
    if not len(rewards):
        return None
    low, high = float(rewards.min()), float(rewards.max())
    num_bins = _BINS if high > low else 1
    counts, _ = np.histogram(rewards, num_bins, (low, high) if high > low else (low - 1, low + 1))
    return {"low": low, "high": high, "counts": counts.tolist()}


def rewards_over_steps(rollouts: Rollouts, num_columns: int = 120) -> dict[str, Any] | None:
    """Return how many rollouts of training had which reward at which time: `first`, `last` step,
    `low`, `high` reward, `counts`, one list of bins of rewards for each column of steps. None
    without a reward.
    """
    index = rollouts.index
    chosen = (index["flags"] & IS_EVAL == 0) & np.isfinite(index["reward"])
    if not chosen.any():
        return None
    steps, rewards = index["step"][chosen], index["reward"][chosen].astype(np.float64)
    first, last, low, high = int(steps.min()), int(steps.max()), rewards.min(), rewards.max()
    width = -(-(last - first + 1) // num_columns)  # steps of a column
    columns = (steps - first) // width
    bins = np.zeros(len(rewards), int)
    if high > low:
        bins = np.minimum((rewards - low) / (high - low) * _BINS, _BINS - 1).astype(int)
    counts = np.zeros((columns.max() + 1, _BINS if high > low else 1), int)
    np.add.at(counts, (columns, bins), 1)
    return {
        "first": first, "last": last, "steps_of_column": width,
        "low": float(low), "high": float(high), "counts": counts.tolist(),
    }  # fmt: skip


# --- One rollout, its group, its tokens -----------------------------------------------------------


def rollout_of(rollouts: Rollouts, number: int) -> dict[str, Any] | None:
    """Return a rollout with its `number` and the numbers of its `group_numbers`, in order. Very
    long texts are cut. None if there is no such rollout.
    """
    if not 0 <= number < len(rollouts):
        return None
    with Lines(rollouts) as lines:
        row = lines.row(number)
    row = cut_texts(row, _TEXT) if row is not None else summary_of(rollouts, number, None)
    return {**row, "number": number, "group_numbers": _group_numbers(rollouts, number)}


def group_of(rollouts: Rollouts, number: int) -> dict[str, Any] | None:
    """Return the group of a rollout: `rollouts`, with their numbers and with long texts cut, and
    `num_more`, those beyond `MAX_GROUP`. None if there is no such rollout.
    """
    if not 0 <= number < len(rollouts):
        return None
    numbers = _group_numbers(rollouts, number)
    members = []
    with Lines(rollouts) as lines:
        for one in numbers[:MAX_GROUP]:
            row = lines.row(one)
            row = summary_of(rollouts, one, None) if row is None else cut_texts(row, _GROUP_TEXT)
            members.append({**row, "number": one})
    return {"rollouts": members, "num_more": len(numbers) - len(members)}


def tokens_of(
    rollouts: Rollouts, number: int, start: int = 0, count: int = MAX_TOKENS
) -> dict[str, Any] | None:
    """Return the tokens of a rollout from `start` on.

    Returns:
        `num_tokens`, `start`; `text` and the arrays of `TOKEN_DTYPES`, as lists, of at most
        `MAX_TOKENS` tokens; `versions`: all policy versions that sampled tokens;
        `max_advantage`: the largest absolute value. None if the rollout has no tokens on disk.
    """
    if not 0 <= number < len(rollouts):
        return None
    arrays = rollouts.tokens(number)
    if arrays is None:
        return None
    num_tokens = len(arrays["text"])
    part = slice(max(start, 0), max(start, 0) + min(count, MAX_TOKENS))
    versions = np.unique(arrays["policy_versions"])
    return {
        "num_tokens": num_tokens,
        "start": part.start,
        "versions": versions[versions >= 0].tolist(),
        "max_advantage": float(np.abs(arrays["advantages"]).max(initial=0.0)),
        **{name: _as_list(values[part]) for name, values in arrays.items()},
    }


def _as_list(values: np.ndarray) -> list[Any]:
    if values.dtype.kind == "b":
        return values.astype(int).tolist()
    if values.dtype.kind != "f":
        return values.tolist()
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values.tolist()]


def _group_numbers(rollouts: Rollouts, number: int) -> list[int]:
    index = rollouts.index
    record = index[number]
    is_in = (index["step"] == record["step"]) & (index["group"] == record["group"])
    is_in &= (index["flags"] & IS_EVAL) == (record["flags"] & IS_EVAL)
    return np.flatnonzero(is_in).tolist()


# --- Texts ----------------------------------------------------------------------------------------


def _messages(value: Any) -> list[dict[str, Any]]:
    return [m for m in value if isinstance(m, dict)] if isinstance(value, list) else []


def texts_of(row: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a rollout: of its messages, its tool calls and its error."""
    error = row.get("error")
    if isinstance(error, dict):
        yield from (str(text) for text in error.values())
    branches = row.get("other_branches")
    for messages in (row.get("messages"), *(branches if isinstance(branches, list) else [])):
        for message in _messages(messages):
            yield from _texts_of_message(message)


def _texts_of_message(message: dict[str, Any]) -> Iterator[str]:
    for name in ("content", "reasoning"):
        if message.get(name):
            yield str(message[name])
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        if isinstance(call, dict):
            yield from (str(call.get(name)) for name in ("name", "arguments"))


def _search_for(text: str) -> Callable[[bytes], bool]:
    """Return a test of lines that never fails where a text of the rollout contains `text`. It is
    fast, and also finds keys of the JSON.
    """
    escaped = json.dumps(text.lower(), ensure_ascii=False)[1:-1]
    needle = escaped.encode(errors="replace")
    if escaped.isascii():
        return lambda line: needle in line.lower()
    return lambda line: escaped in line.decode(errors="replace").lower()


def _find(texts: Iterator[str], wanted: str) -> str | None:
    """Return the first text that contains `wanted`, in any case."""
    wanted = wanted.lower()
    return next((text for text in texts if wanted in text.lower()), None)


def _excerpt(text: str, wanted: str) -> str:
    """Return a part of a text, from its beginning on or around `wanted`."""
    place = text.lower().find(wanted.lower()) if wanted else 0
    begin = max(place - _PREVIEW // 4, 0)
    part = " ".join(text[begin : begin + 2 * _PREVIEW].split())[:_PREVIEW]
    return ("…" if begin else "") + part


def cut_texts(value: Any, limit: int) -> Any:
    """Return a value whose texts have at most `limit` characters."""
    if isinstance(value, str):
        more = len(value) - limit
        return value if more <= 0 else f"{value[:limit]}… ({more:,} more characters)"
    if isinstance(value, dict):
        return {name: cut_texts(part, limit) for name, part in value.items()}
    return [cut_texts(part, limit) for part in value] if isinstance(value, list) else value
