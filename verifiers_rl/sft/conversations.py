"""Rows of a dataset as tokens to train on, and which of these tokens are in the loss.

    messages               a conversation, `tools` beside it if it has some
    prompt, completion     two strings, or the messages of a conversation in two parts; only the
                           completion is in the loss
    text                   a string, all of it in the loss

The loss tokens of a conversation are those that the assistant says, with the token that ends each
of its turns; not those of a message with `"weight": 0`, as in OpenAI's data. A chat template that
marks them (`{% generation %}`) decides, if the assistant alone is in the loss. Otherwise they are
what the template adds to the messages before:

    rendered up to the turn, with the beginning of a reply    <user>2+2?<end><assistant>
    rendered with the turn                                    <user>2+2?<end><assistant>4<end>
    in the loss                                                                         4<end>

So the model learns to continue exactly what a server would send it. Some templates render a past
turn otherwise than the last one; Qwen3's drops its thinking. Then no single sequence has the tokens
of all turns, and the conversation becomes several samples, as it would in a rollout.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from verifiers_rl.envs.rendering import as_vllm_renders
from verifiers_rl.option_rules import ConfigError
from verifiers_rl.process.waiting import WaitingLine
from verifiers_rl.types import Sample

ROLES = ("system", "user", "assistant", "tool")
_OF_ROW = "chat_template_kwargs"
COLUMNS = "messages, or prompt and completion, or text"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The tokens of one sample, (T,) int32, and which of them are in the loss, (T,) bool.
Tokens = tuple[np.ndarray, np.ndarray]


class DatasetError(ConfigError):
    """The data cannot be trained on; the message names the data, the row, and what to change."""


@dataclass
class TokenizedRows:
    """The rows of a dataset that have loss tokens.

    Attributes:
        rows: for each row its samples, at least one.
        num_left_out: rows without a loss token among their first `max_seq_len` tokens.
        num_cut: rows with a sample that was longer.
        num_split: conversations that became several samples.
    """

    rows: list[list[Tokens]] = field(default_factory=list)
    num_left_out: int = 0
    num_cut: int = 0
    num_split: int = 0

    def describe(self) -> str:
        """Return what is in the rows, as one line for people."""
        samples = [sample for row in self.rows for sample in row]
        tokens, in_loss = sum(len(ids) for ids, _ in samples), sum(int(m.sum()) for _, m in samples)
        line = f"{len(self.rows)} rows with {tokens} tokens, {in_loss} of them in the loss"
        for number, what in (
            (self.num_split, "conversations of several samples"),
            (self.num_cut, "cut at max_seq_len"),
            (self.num_left_out, "left out, without a loss token in max_seq_len"),
        ):
            line += f"; {number} {what}" if number else ""
        return line


# --- Reading --------------------------------------------------------------------------------------


FILES = (".jsonl", ".json", ".parquet")


def is_file(name: str) -> bool:
    """Return whether data is a local file, not a name on the hub."""
    return name.endswith(FILES) or name.startswith(("/", ".", "~"))


def read_dataset(
    names: Sequence[str], split: str | None = "train", subset: str | None = None
) -> Any:
    """Read local files or datasets of the hub, one after the other.

    Args:
        names: paths of .jsonl, .json (a list of rows) or .parquet files, or names on the hub.
        split: of each of them, such as "train" or "train[:90%]". The rows of a file are its split
            train. None: all rows of a file, and the split test of a dataset of the hub.
        subset: of the hub's datasets that have several; None for the default one.

    Returns:
        Rows that can be counted and indexed, each a mapping from column to value.

    Raises:
        DatasetError: there is no such data, or it has another form.
    """
    parts = [_read_one(name, split, subset) for name in names]
    return parts[0] if len(parts) == 1 else [row for part in parts for row in part]


def _read_one(name: str, split: str | None, subset: str | None) -> Any:
    if is_file(name) or Path(name).exists():
        rows = _read_file(name)
        parts = parts_of_file(name, split, len(rows))
        return [row for start, stop in parts for row in rows[start:stop]]
    import datasets

    split = split or "test"
    try:
        return datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError) as error:  # DatasetNotFoundError is an OSError
        raise DatasetError(
            f"data {name!r}, split {split!r}: {error}; a local file ends in .jsonl, .json or "
            ".parquet"
        ) from error


def parts_of_file(name: str, split: str | None, num_rows: int) -> list[tuple[int, int]]:
    """Return the first row and the end of each part that a split such as "train[:90%]" takes of a
    file with so many rows.

    Raises:
        DatasetError: it is no such split, or one that a file does not have.
    """
    if split in (None, "train"):
        return [(0, num_rows)]
    from datasets import ReadInstruction

    try:
        parts = ReadInstruction.from_spec(split).to_absolute({"train": num_rows})
    except ValueError as error:
        raise DatasetError(
            f"data {name!r}, split {split!r}: {error} A file has the split 'train' alone; write a "
            "part of it, such as 'train[:90%]'"
        ) from error
    return [(part.from_, part.to) for part in parts]


def _read_file(name: str) -> list[Any]:
    path = Path(name).expanduser()
    if path.suffix not in FILES:
        raise DatasetError(
            f"data {name!r}: must be a .jsonl, .json or .parquet file, or a name on the hub"
        )
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path).to_pylist()
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:  # pyarrow's errors are ValueErrors
        reason = getattr(error, "strerror", None) or error
        raise DatasetError(f"data {name!r}: {reason}; correct the path or the file") from error
    if path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), 1)
        return [_from_json(line, f"data {name}, line {n}") for n, line in lines if line.strip()]
    rows = _from_json(text, f"data {name}")
    if not isinstance(rows, list):
        raise DatasetError(f"data {name!r}: must be a JSON list of rows; one row a line is .jsonl")
    return rows


def _from_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DatasetError(f"{where}: no JSON: {error}; correct it") from error


# --- From rows to tokens --------------------------------------------------------------------------


class Tokenization:
    """Makes tokens of rows.

    Args:
        tokenizer: of the model, with a chat template if rows are conversations.
        loss_on: roles whose messages are in the loss, of `ROLES`.
        max_seq_len: longest sample in tokens; the rest of a longer one is cut off.
        template: variables of the chat template, under those of a row's `chat_template_kwargs`.
    """

    def __init__(
        self,
        tokenizer: Any,
        loss_on: Sequence[str] = ("assistant",),
        max_seq_len: int = 2048,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._loss_on = frozenset(loss_on)
        self._max_seq_len = max_seq_len
        self._template = dict(template or {})
        self._special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self._ends = {*tokenizer.all_special_ids} | {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }

    def of_rows(
        self, rows: Any, name: str, report: Callable[[str], None] = lambda line: None
    ) -> TokenizedRows:
        """Make tokens of all rows.

        Args:
            rows: can be counted and indexed; each is a mapping from column to value.
            name: of the data, for errors.
            report: called with one line about the result.

        Raises:
            DatasetError: a row cannot be used, or none has a loss token.
        """
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise DatasetError(
                f"data {name}: {type(rows).__name__} cannot be counted and indexed; pass a list of "
                "rows, or a datasets.Dataset, not a stream"
            )
        if not len(rows):
            raise DatasetError(f"data {name}: it has no rows; look at the file and at its split")
        result = TokenizedRows()
        with WaitingLine(lambda: f"the tokens of rows: {number} of {len(rows)}") as line:
            for number in range(len(rows)):
                if number % 1000 == 0:
                    line.show()
                try:
                    self._add(self.of_row(rows[number]), result)
                except DatasetError as error:
                    raise DatasetError(f"data {name}, row {number}: {error}") from error
        if not result.rows:
            raise DatasetError(
                f"data {name}: none of its {len(rows)} rows has a loss token among the first "
                f"{self._max_seq_len} (max_seq_len): raise max_seq_len, or look at loss_on"
            )
        report(f"data {name}: {result.describe()}")
        return result

    def _add(self, samples: list[Tokens], result: TokenizedRows) -> None:
        """Add the samples of a row, cut."""
        result.num_split += len(samples) > 1
        result.num_cut += any(len(ids) > self._max_seq_len for ids, _ in samples)
        cut = [(ids[: self._max_seq_len], mask[: self._max_seq_len]) for ids, mask in samples]
        if kept := [(ids, mask) for ids, mask in cut if mask.any()]:
            result.rows.append(kept)
        else:
            result.num_left_out += 1

    def last_token(self, rows: Iterable[Sequence[Tokens]]) -> int | None:
        """Return the special token with which the loss of a row ends, the first one that is not
        cut; None if it ends with no such token.

        Args:
            rows: the samples of each row, cut at max_seq_len.
        """
        for *_, (ids, mask) in rows:
            if len(ids) < self._max_seq_len:
                last = int(ids[mask][-1])
                return last if last in self._ends else None
        return None

    def of_row(self, row: Any) -> list[Tokens]:
        """Return the samples of a row, whole.

        Raises:
            DatasetError: the row has other columns, or the chat template does not fit it.
        """
        if not isinstance(row, Mapping):
            raise DatasetError(f"must be a mapping from column to value, not {row!r:.80}")
        if row.get("messages") is not None:
            return self._of_conversation(row, [], row["messages"])
        prompt, completion = row.get("prompt"), row.get("completion")
        if prompt is not None and completion is not None:
            if isinstance(prompt, str) != isinstance(completion, str):
                raise DatasetError("prompt and completion must both be strings, or both messages")
            if isinstance(prompt, str):
                return [self._of_text(prompt, completion)]
            return self._of_conversation(row, prompt, completion)
        if isinstance(row.get("text"), str):
            return [self._of_text("", row["text"])]
        raise DatasetError(f"has the columns {', '.join(map(str, row))}; it needs {COLUMNS}")

    def _of_text(self, prompt: str, completion: str) -> Tokens:
        """Return the tokens of two strings, the second of which ends with the end of a text."""
        end = self._tokenizer.eos_token or ""
        if not completion.endswith(end):
            completion += end
        before = self._encode(prompt, special=True) if prompt else []
        ids = self._longer(before, prompt, prompt + completion, special=True)
        return _tokens(ids, [(len(before), len(ids))])

    def _of_conversation(self, row: Mapping[str, Any], prompt: Any, rest: Any) -> list[Tokens]:
        """Return the samples of `prompt` and `rest`, of which only `rest` is in the loss."""
        before = _messages(prompt, "prompt")
        messages = before + _messages(rest, "completion" if before else "messages")
        if not messages:
            raise DatasetError("has no messages")
        tools, of_row = (_value_of(row.get(name), name) for name in ("tools", _OF_ROW))
        template = {**self._template, **(of_row or {}), "tools": tools or None}
        try:
            source = self._tokenizer.get_chat_template(tools=template["tools"])
        except ValueError as error:
            raise DatasetError(
                "it is a conversation, and the tokenizer has no chat template: give the model "
                "one, or use the columns prompt and completion, with strings"
            ) from error
        weights = [message.pop("weight") for message in messages]
        weights[: len(before)] = [0] * len(before)
        if _MARKS.search(source) and self._loss_on == {"assistant"}:
            return self._by_marks(messages, weights, template)
        return self._by_difference(messages, weights, template)

    def _by_marks(
        self, messages: list[dict[str, Any]], weights: Sequence[int], template: dict[str, Any]
    ) -> list[Tokens]:
        """Return the sample of a conversation. What the template marks is in the loss, except of
        messages with a weight of 0.
        """
        try:
            found = self._tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, **template
            )
        except TemplateError as error:
            raise DatasetError(f"the chat template refuses its messages: {error}") from error
        mask = np.array(found["assistant_masks"], bool)
        said = [w for m, w in zip(messages, weights, strict=True) if m["role"] == "assistant"]
        if said and not mask.any():
            raise DatasetError(
                "the chat template has {% generation %} marks, and they mark nothing of it: "
                "correct the template, or remove its marks"
            )
        if not all(said):
            # Which message each token in the loss is of: each one is marked without a gap.
            message = np.cumsum(np.diff(mask, prepend=False) & mask) - 1
            if message[-1] + 1 != len(said):
                return self._by_difference(messages, weights, template)
            mask &= np.array(said, bool)[message]
        mask[0] = False  # nothing predicts it
        return [(np.array(found["input_ids"], np.int32), mask)]

    def _by_difference(
        self, messages: list[dict[str, Any]], weights: Sequence[int], template: dict[str, Any]
    ) -> list[Tokens]:
        """Return the samples of a conversation, of which the messages with a weight of 1 may be in
        the loss. A turn whose prompt continues the text so far continues its sample.
        """
        samples: list[Tokens] = []
        text, ids, spans = "", list[int](), list[tuple[int, int]]()
        for number, message in enumerate(messages):
            if not weights[number] or message["role"] not in self._loss_on:
                continue
            where = f"messages[{number}] (role {message['role']!r})"
            is_reply = message["role"] == "assistant"
            try:
                before = self._render(messages[:number], is_reply, template)
                whole = self._render(messages[: number + 1], False, template)
            except TemplateError as error:
                raise DatasetError(
                    f"{where}: the chat template refuses the messages up to it: {error}"
                ) from error
            if not whole.startswith(before):
                raise DatasetError(f"{where}: {_difference(before, whole, self._loss_on)}")
            if spans and not before.startswith(text):
                samples.append(_tokens(ids, spans))
                text, ids, spans = "", [], []
            try:
                ids = self._longer(ids, text, before)
                start, text = len(ids), before
                ids = self._longer(ids, text, whole)
            except DatasetError as error:
                raise DatasetError(f"{where}: {error}") from error
            text = whole
            spans.append((start, self._end_of_turn(ids, start) if is_reply else len(ids)))
        return [*samples, _tokens(ids, spans)] if spans else samples or [_nothing()]

    def _render(
        self, messages: list[dict[str, Any]], is_prompt: bool, template: dict[str, Any]
    ) -> str:
        if not messages:  # which no template takes
            return ""
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=is_prompt, **template
        )

    def _longer(self, ids: list[int], text: str, longer: str, special: bool = False) -> list[int]:
        """Return the tokens of `longer`, which begins with `text`. The first ones are `ids`.

        A tokenizer may make one token of the end of `text` and what follows. A model that is given
        `text` writes other tokens then: those of the rest alone.

        Raises:
            DatasetError: the rest alone is another text to this tokenizer.
        """
        whole = self._encode(longer, special)
        if whole[: len(ids)] == ids:
            return whole
        pieces = ids + self._encode(longer[len(text) :])
        if self._tokenizer.decode(pieces) != self._tokenizer.decode(whole):
            raise DatasetError(
                "the tokens of the messages before are not the first ones of what they are with "
                f"it: the tokenizer joins {text[-20:]!r} and {longer[len(text) :][:20]!r}; use a "
                "chat template whose messages begin with a special token"
            )
        return pieces

    def _encode(self, text: str, special: bool = False) -> list[int]:
        return self._tokenizer(text, add_special_tokens=special)["input_ids"]

    def _end_of_turn(self, ids: list[int], start: int) -> int:
        """Return where a reply ends: behind its last special token, if only blanks follow that, as
        in Qwen's templates. A model never writes these blanks, because its turn has ended.
        """
        stop = len(ids)
        while stop > start and self._tokenizer.decode(ids[stop - 1 : stop]).isspace():
            stop -= 1
        return stop if stop > start and ids[stop - 1] in self._special else len(ids)


def make_samples(rows: Sequence[Sequence[Tokens]]) -> list[Sample]:
    """Return the samples of some rows. Those of one row are of one rollout and group."""
    samples = []
    for number, row in enumerate(rows):
        for token_ids, loss_mask in row:
            # NaN: no policy sampled these tokens.
            logprobs = np.where(loss_mask, np.float32(np.nan), np.float32(0))
            versions = np.full(len(token_ids), -1, np.int32)
            sample = Sample(token_ids, loss_mask, logprobs, versions)
            sample.rollout_id = sample.group_id = number
            samples.append(sample)
    return samples


def _tokens(ids: Sequence[int], spans: Iterable[tuple[int, int]]) -> Tokens:
    mask = np.zeros(len(ids), bool)
    for start, stop in spans:
        mask[start:stop] = True
    mask[:1] = False  # nothing predicts the first token
    return np.array(ids, np.int32), mask


def _nothing() -> Tokens:
    """Return a sample without a loss token, of a conversation in which no such role speaks."""
    return np.zeros(1, np.int32), np.zeros(1, bool)


def _messages(messages: Any, column: str) -> list[dict[str, Any]]:
    """Return messages as vLLM passes them to a chat template, without keys that are None, and
    beside that each one's weight.

    Raises:
        DatasetError: one of them is no message, or has other parts than text.
    """
    messages = _value_of(messages, column)
    if not isinstance(messages, list):
        raise DatasetError(f"{column} must be a list of messages, not {messages!r:.80}")
    found = []
    for number, message in enumerate(messages):
        where = f"{column}[{number}]"
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise DatasetError(
                f"{where} must be a message with a role of {', '.join(ROLES)}, not {message!r:.80}"
            )
        given = {"content": "", **message}
        weight = given.pop("weight", 1)
        if weight not in (0, 1):
            raise DatasetError(f"{where}: weight must be 0 or 1, not {weight!r}")
        calls = given.pop("tool_calls", None)
        if calls is not None and len(calls):
            if not all(
                isinstance(c, Mapping) and isinstance(c.get("function"), Mapping) for c in calls
            ):
                raise DatasetError(
                    f"{where}: each of tool_calls must be "
                    '{"type": "function", "function": {"name": ..., "arguments": ...}}'
                )
            given["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": call["function"].get("arguments") or {},
                    },
                }
                for call in calls
            ]
        try:
            found.append({**as_vllm_renders(given), "weight": int(weight)})
        except ValueError as error:
            raise DatasetError(f"{where}: {error}") from error
    return found


def without_none(value: Any) -> Any:
    """Return a value of a row without keys that are None, at any depth: in a table, each object of
    a column has the keys of all. JSON that is a string stays as it is.
    """
    if isinstance(value, Mapping):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple | np.ndarray):
        return [without_none(inner) for inner in value]
    return value


def _value_of(value: Any, column: str) -> Any:
    """Return a value that may be JSON, without keys that are None."""
    return _from_json(value, column) if isinstance(value, str) else without_none(value)


def _difference(before: str, whole: str, loss_on: Set[str]) -> str:
    """Describe where the text with a message leaves the text before it."""
    at = len(os.path.commonprefix([before, whole]))
    marks = "mark what the assistant says by {% generation %} in the template, or "
    if loss_on != {"assistant"}:  # where marks do not decide
        marks = "leave loss_on out, or "
    return (
        "the chat template does not continue the text before it: where that has "
        f"{before[at : at + 30]!r}, behind {before[max(at - 20, 0) : at]!r}, it has "
        f"{whole[at : at + 30]!r} with this message; {marks}set what differs by "
        "chat_template_kwargs"
    )
