"""Rollouts as the page shows them: a choice among many, one of them, its group, its tokens.

A choice is made in the index. Files are read for what is shown, a page of rows at a time, and for a
search in texts, which has a deadline. All results are of values that JSON has.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from verifiers_rl.json_text import without_nan
from verifiers_rl.report.rollouts import TOKENS
from verifiers_rl.view.files import (
    HAS_ERROR,
    HAS_TOKENS,
    IN_LOSS,
    IS_EVAL,
    IS_TRUNCATED,
    Rollouts,
)

PAGE = 50  # rows of a page
SEARCH_S = 1.0  # for a search in texts; the page asks again for the rest
MAX_TOKENS = 2_000  # in one answer
MAX_GROUP = 64  # rollouts of a group that are shown side by side
_PREVIEW, _GROUP_TEXT, _TEXT = 200, 4_000, 400_000  # characters of a text
_BINS = 20  # of a histogram
_LARGEST = 2**31 - 1  # of the index's numbers
_IN_LIST = (
    "step",
    "split",
    "env",
    "example",
    "group",
    "reward",
    "in_loss",
    "is_truncated",
    "error",
    "num_turns",
    "num_sampled_tokens",
    "has_tokens",
)
KINDS = {  # of rollouts: flags that are looked at, and what they must be
    "failed": (HAS_ERROR, HAS_ERROR),
    "scored": (HAS_ERROR, 0),
    "truncated": (IS_TRUNCATED, IS_TRUNCATED),
    "in_loss": (IN_LOSS, IN_LOSS),
    "not_in_loss": (IN_LOSS, 0),
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

    from_step: int = -_LARGEST
    to_step: int = _LARGEST
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
    chosen = (index["step"] >= wanted.from_step) & (index["step"] <= wanted.to_step)
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
        return numbers[np.argsort(-index["num_tokens"][numbers], kind="stable")]
    return numbers


# --- A list of rollouts ---------------------------------------------------------------------------


def page_of(
    rollouts: Rollouts,
    wanted: Filter,
    start: int = 0,
    upto: int = sys.maxsize,
) -> dict[str, Any]:
    """Return rows of the list of rollouts.

    Args:
        start: place in the choice from which on rows are wanted.
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
    place = start = min(max(start, 0), len(numbers))
    shown: list[int] = []
    deadline = time.monotonic() + SEARCH_S
    while place < len(numbers) and len(shown) < PAGE:
        number = int(numbers[place])
        if wanted.text and place > start and time.monotonic() > deadline:
            break
        if not wanted.text or rollouts.has_text(number, wanted.text):
            shown.append(number)
        place += 1
    texts = ("messages", "other_branches") if wanted.text else ("messages",)
    rows = zip(shown, rollouts.rows(shown, (*_IN_LIST, *texts)), strict=True)
    return {
        "rows": [summary_of(number, row, wanted.text) for number, row in rows],
        "num_chosen": len(numbers),
        "num_all": min(len(rollouts), max(upto, 0)),
        "envs": rollouts.envs,
        "start": start,
        "next": place if place < len(numbers) else None,
        "histogram": histogram(rollouts.index["reward"][numbers]),
    }


def summary_of(number: int, row: dict[str, Any], text: str = "") -> dict[str, Any]:
    """Return what a list shows of a rollout: `number`, the keys of `_IN_LIST`, and `preview`."""
    common = {name: cut_texts(row[name], _PREVIEW) for name in _IN_LIST}
    return without_nan({"number": number, **common, "preview": preview_of(row, text)})


def preview_of(row: dict[str, Any], text: str = "") -> str:
    """Return a line about a rollout: what is around `text`, its error, or its last reply."""
    found = next((t for t in texts_of(row) if text.lower() in t.lower()), "") if text else ""
    messages = row["messages"] or []
    if not found and row["error"]:
        found = row["error"]
    elif not found and messages:
        replies = [message for message in messages if message["role"] == "assistant"]
        # A reply may be a call and nothing else.
        found = " ".join(_texts_of_message((replies or messages)[-1]))
    place = max(found.lower().find(text.lower()), 0)
    begin = max(place - _PREVIEW // 4, 0)
    part = " ".join(found[begin : begin + 2 * _PREVIEW].split())[:_PREVIEW]
    return ("…" if begin else "") + part


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
    num_bins = [columns.max() + 1, _BINS if high > low else 1]
    counts = np.histogram2d(columns, rewards, num_bins)[0].astype(int)
    return {
        "first": first,
        "last": last,
        "steps_of_column": width,
        "low": float(low),
        "high": float(high),
        "counts": counts.tolist(),
    }


# --- One rollout, its group, its tokens -----------------------------------------------------------


def rollout_of(rollouts: Rollouts, number: int) -> dict[str, Any] | None:
    """Return a rollout with its `number` and the numbers of its `group_numbers`, in order. Very
    long texts are cut. None if there is no such rollout.
    """
    if not 0 <= number < len(rollouts):
        return None
    (row,) = rollouts.rows([number])
    row = cut_texts(complete(row), _TEXT)
    return {**row, "number": number, "group_numbers": _group_numbers(rollouts, number)}


def group_of(rollouts: Rollouts, number: int) -> dict[str, Any] | None:
    """Return the group of a rollout: `rollouts`, with their numbers and with long texts cut, and
    `num_more`, those beyond `MAX_GROUP`. None if there is no such rollout.
    """
    if not 0 <= number < len(rollouts):
        return None
    numbers = _group_numbers(rollouts, number)
    shown = numbers[:MAX_GROUP]
    members = [
        {**cut_texts(complete(row), _GROUP_TEXT), "number": one}
        for one, row in zip(shown, rollouts.rows(shown), strict=True)
    ]
    return {"rollouts": members, "num_more": len(numbers) - len(members)}


def complete(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with `rewards` by name, and with what messages have to do with turns: a reply
    has its `turn`, and `begin_s` and `end_s` of it. What follows a reply, such as results of tools,
    has the time between that turn and the next one.
    """
    turns = row["turns"] or []
    messages = [
        {name: value for name, value in message.items() if value is not None}
        for message in row["messages"] or []
    ]
    turn_of = {turn["message"]: number for number, turn in enumerate(turns)}
    last = None
    for place, message in enumerate(messages):
        if place in turn_of:
            last = turn_of[place]
            begin_s, end_s = turns[last]["begin_s"], turns[last]["end_s"]
            message |= {"turn": last, "begin_s": begin_s, "end_s": end_s}
        elif last is not None:
            next_s = turns[last + 1]["begin_s"] if last + 1 < len(turns) else None
            message |= {"begin_s": turns[last]["end_s"], "end_s": next_s}
    rewards = {part["name"]: part["value"] for part in row["rewards"] or []}
    return {**row, "messages": messages, "rewards": rewards}


def tokens_of(rollouts: Rollouts, number: int, start: int = 0) -> dict[str, Any] | None:
    """Return the tokens of a rollout from `start` on.

    Returns:
        `num_tokens`, `start`; the columns of `TOKENS` (report/rollouts.py), of at most
        `MAX_TOKENS` tokens; `versions`: all policy versions that sampled tokens;
        `max_advantage`: the largest absolute value. Of a step that was replayed also `weight NAME`,
        a column for each loss, and `max_weight`, over all of them. None if the rollout has no
        tokens on disk.
    """
    if not 0 <= number < len(rollouts) or not rollouts.index["flags"][number] & HAS_TOKENS:
        return None
    (columns,) = rollouts.rows([number], TOKENS.names)
    part = slice(max(start, 0), max(start, 0) + MAX_TOKENS)
    weights = rollouts.weights(number, columns["trainer_logprobs"])
    sizes = np.abs(np.nan_to_num(list(weights.values())))
    columns |= {f"weight {name}": values.tolist() for name, values in weights.items()}
    return {
        "num_tokens": len(columns["token_ids"]),
        "start": part.start,
        "versions": sorted({version for version in columns["policy_versions"] if version >= 0}),
        "max_advantage": max(map(abs, columns["advantages"]), default=0.0),
        "max_weight": float(sizes.max(initial=0.0)),
        **{name: _short(values[part]) for name, values in columns.items()},
    }


def _short(values: list[Any]) -> list[Any]:
    if not any(isinstance(value, float) for value in values):
        return values
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def _group_numbers(rollouts: Rollouts, number: int) -> list[int]:
    index = rollouts.index
    record = index[number]
    is_in = (index["step"] == record["step"]) & (index["group"] == record["group"])
    is_in &= (index["flags"] & IS_EVAL) == (record["flags"] & IS_EVAL)
    return np.flatnonzero(is_in).tolist()


# --- Texts ----------------------------------------------------------------------------------------


def texts_of(row: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a rollout: of its messages, its tool calls and its error."""
    yield row["error"] or ""
    for messages in (row["messages"], *(row["other_branches"] or [])):
        for message in messages or []:
            yield from _texts_of_message(message)


def _texts_of_message(message: dict[str, Any]) -> Iterator[str]:
    yield message["content"] or ""
    yield message["reasoning_content"] or ""
    for call in message["tool_calls"] or []:
        yield from (text or "" for text in call["function"].values())


def cut_texts(value: Any, limit: int) -> Any:
    """Return a value whose texts have at most `limit` characters."""
    if isinstance(value, str):
        more = len(value) - limit
        return value if more <= 0 else f"{value[:limit]}… ({more:,} more characters)"
    if isinstance(value, dict):
        return {name: cut_texts(part, limit) for name, part in value.items()}
    return [cut_texts(part, limit) for part in value] if isinstance(value, list) else value
