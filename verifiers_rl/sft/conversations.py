"""Rows of a dataset as tokens to train on, and which of these tokens are in the loss.

    messages               a conversation, `tools` beside it if it has some
    prompt, completion     two strings, or the messages of a conversation in two parts; only the
                           completion is in the loss
    text                   a string, all of it in the loss

The loss tokens of a conversation are those that the assistant says, with the token that ends each
of its turns; not those of a message with `"weight": 0`, as in OpenAI's data. They are what the chat
template adds to the messages before:

    rendered up to the turn, with the beginning of a reply    <user>2+2?<end><assistant>
    rendered with the turn                                    <user>2+2?<end><assistant>4<end>
    in the loss                                                                         4<end>

So the model learns to continue exactly what a server would send it, and a template needs no marks
for training. In some templates, such as GLM's, a turn has no end of its own: a server stops where
the next role begins, which such data does not teach; `Tokenization.of_rows` says so. Some templates
render a past turn otherwise than the last one; Qwen3's drops its thinking. Then no single sequence
has the tokens of all turns, and the conversation becomes several samples, as it would in a rollout.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from verifiers_rl.envs.records import without_none
from verifiers_rl.envs.rendering import as_vllm_renders
from verifiers_rl.option_rules import ConfigError
from verifiers_rl.process.terminal import describe_error, show
from verifiers_rl.process.waiting import WaitingLine

ROLES = ("system", "user", "assistant", "tool")
FILES = (".jsonl", ".parquet")
# The tokens of one sample, (T,) int32, and which of them are in the loss, (T,) bool.
Tokens = tuple[np.ndarray, np.ndarray]


class DatasetError(ConfigError):
    """The data cannot be trained on; the message names the data, the row, and what to change."""


# --- Reading --------------------------------------------------------------------------------------


def is_file(name: str) -> bool:
    """Return whether data is a local file, not a name on the hub."""
    return name.endswith(FILES) or name.startswith(("/", ".", "~"))


def read_dataset(
    names: Sequence[str], split: str | None = "train", subset: str | None = None
) -> Any:
    """Read local files or datasets of the hub, one after the other.

    Args:
        names: paths of .jsonl or .parquet files, or names on the hub.
        split: of each of them, such as "train" or "train[:90%]". The rows of a file are its split
            train. None: all rows of a file, and the split test of a dataset of the hub.
        subset: of the hub's datasets that have several; None for the default one.

    Returns:
        Rows that can be counted and indexed, each a mapping from column to value.

    Raises:
        DatasetError: there is no such data, or it has another form.
    """
    import datasets

    parts = list[Any]()
    for name in names:
        try:
            if is_file(name):
                parts.append(_read_file(name, split or "train"))
            else:
                parts.append(datasets.load_dataset(name, subset, split=split or "test"))
        except Exception as error:  # whatever datasets, pyarrow or the hub raise
            raise DatasetError(
                f"data {name!r}, split {split!r}: {describe_error(error)}; correct it: a .jsonl or "
                ".parquet file, or a name on the hub. A file has the split 'train' alone, or a "
                "part of it, such as 'train[:90%]'"
            ) from error
    return parts[0] if len(parts) == 1 else [row for part in parts for row in part]


def _read_file(name: str, split: str) -> list[Any]:
    from datasets import ReadInstruction

    path = Path(name).expanduser()
    if path.suffix == ".parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
    elif path.suffix == ".jsonl":
        lines = enumerate(path.read_bytes().split(b"\n"), 1)
        rows = [_from_json(line, f"line {number}") for number, line in lines if line.strip()]
    else:
        raise ValueError("it is neither .jsonl nor .parquet")
    parts = ReadInstruction.from_spec(split).to_absolute({"train": len(rows)})
    return [row for part in parts for row in rows[part.from_ : part.to]]


def _from_json(text: str | bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: no JSON: {error}") from error


# --- From rows to tokens --------------------------------------------------------------------------


class Tokenization:
    """Makes tokens of rows.

    Args:
        tokenizer: of the model, with a chat template if rows are conversations.
        max_seq_len: longest sample in tokens; the rest of a longer one is cut off.
        template: variables of the chat template, under those of a row's `chat_template_kwargs`.
        num_embeddings: of the model, so no token may have this number or a larger one.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_seq_len: int = 2048,
        template: Mapping[str, Any] | None = None,
        num_embeddings: float = math.inf,
    ) -> None:
        self._tokenizer, self._max_seq_len = tokenizer, max_seq_len
        self._template = dict(template or {})
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids} | {n for n, token in added if token.special}
        self._num_embeddings = num_embeddings
        whole, letter = tokenizer("a")["input_ids"], self._encode("a")
        # What it puts before a text, such as its BOS.
        self._begin = whole[: whole.index(letter[0])] if letter else []

    def of_rows(self, rows: Any, name: str) -> list[list[Tokens]]:
        """Return the samples of each row that has a loss token among its first `max_seq_len`, cut
        there. Print one line about them.

        Args:
            rows: can be counted and indexed; each is a mapping from column to value.
            name: of the data, for that line and for errors.

        Raises:
            DatasetError: a row cannot be used, or none has a loss token.
        """
        is_listed = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
        if isinstance(rows, Mapping) or hasattr(rows, "columns") or not is_listed:
            raise DatasetError(
                f"data {name}: {type(rows).__name__} cannot be counted and indexed by rows; pass a "
                "list of rows, or a datasets.Dataset: of a DatasetDict, one of its splits; of a "
                "frame, Dataset.from_pandas(frame); of a stream, list(stream.take(n))"
            )
        if not len(rows):
            raise DatasetError(f"data {name}: it has no rows; look at the file and at its split")
        found, num, longest = list[list[Tokens]](), Counter[str](), self._max_seq_len
        line = WaitingLine(lambda: f"the tokens of rows: {number} of {len(rows)}")
        for number in range(len(rows)):
            if number % 1000 == 0:
                line.show()
            try:
                samples = self.of_row(rows[number])
            except Exception as error:  # also of the tokenizer, or of what holds the rows
                problem = f"{type(error).__name__}: {error}; correct the row, or leave it out"
                problem = str(error) if isinstance(error, DatasetError) else problem
                raise DatasetError(f"data {name}, row {number}: {problem}") from error
            num["conversations of several samples"] += len(samples) > 1
            is_open = not _ends_of(samples) <= self._special
            num["with a turn that no special token ends, so a server would go on"] += is_open
            num["cut at max_seq_len"] += any(len(ids) > longest for ids, _ in samples)
            cut = [(ids[:longest], mask[:longest]) for ids, mask in samples]
            if kept := [(ids, mask) for ids, mask in cut if mask.any()]:
                found.append(kept)
        if not found:
            raise DatasetError(
                f"data {name}: none of its {len(rows)} rows has a loss token among the first "
                f"{longest} (max_seq_len): raise max_seq_len, or look at the rows"
            )
        num["left out, without a loss token in max_seq_len"] = len(rows) - len(found)
        masks = [mask for samples in found for _, mask in samples]
        said = f"data {name}: {len(found)} rows with {sum(map(len, masks))} tokens, "
        said += f"{sum(int(mask.sum()) for mask in masks)} of them in the loss"
        parts = [said, *(f"{number} {what}" for what, number in num.items() if number)]
        show(print, "; ".join(parts))
        return found

    def end_tokens(self, rows: Iterable[Sequence[Tokens]]) -> list[int]:
        """Return the special tokens with which turns in the loss end, of samples that are not
        cut.
        """
        whole = (sample for row in rows for sample in row if len(sample[0]) < self._max_seq_len)
        return sorted(_ends_of(whole) & self._special)

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
        if (text := row.get("text")) is not None:
            if not isinstance(text, str):
                raise DatasetError(f"text must be a string, not {text!r:.80}")
            prompt, completion = "", text
        if prompt is None or completion is None:
            raise DatasetError(
                f"has the columns {', '.join(map(str, row))}; it needs messages, or prompt and "
                "completion, or text"
            )
        if isinstance(prompt, str) != isinstance(completion, str):
            raise DatasetError("prompt and completion must both be strings, or both messages")
        if not isinstance(prompt, str):
            return self._of_conversation(row, prompt, completion)
        end = self._tokenizer.eos_token or ""
        text = completion.rstrip()  # a template may have put a line break behind its end
        text = text if end and text.endswith(end) else completion + end
        before = self._encode(prompt)
        ids = self._longer(before, prompt, prompt + text)
        begin = self._begin if ids[: len(self._begin)] != self._begin else []
        start = len(begin) + len(before)
        return [self._sample([*begin, *ids], [(start, len(begin) + len(ids))])]

    def _of_conversation(self, row: Mapping[str, Any], prompt: Any, rest: Any) -> list[Tokens]:
        """Return the samples of `prompt` and `rest`, of which only `rest` is in the loss. A turn
        whose prompt continues the text so far continues its sample.
        """
        before = _messages(prompt, "prompt")
        messages = before + _messages(rest, "completion" if before else "messages")
        if not messages:
            raise DatasetError("has no messages")
        tools, own = (_value_of(row.get(n), n) or None for n in ("tools", "chat_template_kwargs"))
        template = {**self._template, **(own or {}), "tools": tools}
        if not self._tokenizer.chat_template:
            raise DatasetError(
                "it is a conversation, and the tokenizer has no chat template: give the model "
                "one, or use the columns prompt and completion, with strings"
            )
        weights = [message.pop("weight") for message in messages]
        samples: list[Tokens] = []
        text, ids, spans = "", list[int](), list[tuple[int, int]]()
        for number, message in enumerate(messages):
            is_reply = message["role"] == "assistant"
            # A reply with nothing before it would have its role and the template's own system
            # prompt in the loss.
            if number < max(len(before), 1) or not (is_reply and weights[number]):
                continue
            try:
                asked = self._render(messages[:number], True, template)
                whole = self._render(messages[: number + 1], False, template)
                if not whole.startswith(asked):
                    raise DatasetError(_difference(asked, whole))
                if spans and not asked.startswith(text):
                    samples.append(self._sample(ids, spans))
                    text, ids, spans = "", [], []
                ids = self._longer(ids, text, asked)
                # A model never writes blanks behind a special token, because its turn has ended.
                start, text = len(ids), asked + whole[len(asked) :].rstrip()
                ids = self._longer(ids, asked, text)
            except DatasetError as error:
                raise DatasetError(f"messages[{number}] (role 'assistant'): {error}") from error
            spans.append((start, len(ids)))
        return [*samples, self._sample(ids or [0], spans)]

    def _render(
        self, messages: list[dict[str, Any]], is_prompt: bool, template: dict[str, Any]
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=is_prompt, **template
            )
        except Exception as error:  # what the template raises, and what Python does in it
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            problem = f"the chat template refuses the messages up to it: {kind}{error}"
            raise DatasetError(problem) from error

    def _longer(self, ids: list[int], text: str, longer: str) -> list[int]:
        """Return the tokens of `longer`, which begins with `text`. The first ones are `ids`.

        Special tokens divide a text, and each part is tokenized for itself. So what is before the
        last special token of `text` is not tokenized again, and a conversation takes linear time.

        A tokenizer may make one token of the end of `text` and what follows. A model that is given
        `text` writes other tokens then: those of the rest alone.

        Raises:
            DatasetError: the rest alone is another text to this tokenizer.
        """
        at = next((at for at in reversed(range(len(ids))) if ids[at] in self._special), -1)
        begin = text.rfind(self._tokenizer.convert_ids_to_tokens(ids[at])) if at >= 0 else -1
        at, begin = (at, begin) if begin >= 0 else (0, 0)
        known, whole = ids[at:], self._encode(longer[begin:])
        if whole[: len(known)] == known:
            return ids[:at] + whole
        pieces = known + self._encode(longer[len(text) :])
        if self._tokenizer.decode(pieces) != self._tokenizer.decode(whole):
            raise DatasetError(
                "the tokens of the messages before are not the first ones of what they are with "
                f"it: the tokenizer joins {text[-20:]!r} and {longer[len(text) :][:20]!r}; use a "
                "chat template whose messages begin with a special token, or a completion that "
                "begins with a blank"
            )
        return ids[:at] + pieces

    def _sample(self, ids: Sequence[int], spans: Iterable[tuple[int, int]]) -> Tokens:
        """Return a sample of these tokens. Those from the first place of a span to its second are
        in the loss.

        Raises:
            DatasetError: the model has no embedding for a token.
        """
        if (token := max(ids, default=0)) >= self._num_embeddings:
            raise DatasetError(
                f"it has token {token} ({self._tokenizer.convert_ids_to_tokens(token)!r}), and the "
                f"model's embedding has {self._num_embeddings} rows, counted from 0. Take the "
                "model's own tokenizer, or save the model with more rows (resize_token_embeddings)"
            )
        mask = np.zeros(len(ids), bool)
        for start, stop in spans:
            mask[start:stop] = True
        mask[:1] = False  # nothing predicts the first token
        return np.array(ids, np.int32), mask

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without those that the tokenizer puts around texts."""
        text.encode()  # half a surrogate pair, as JSON can have: this error names it
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _ends_of(samples: Iterable[Tokens]) -> set[int]:
    """Return the tokens with which a stretch of loss tokens ends."""
    ends = (ids[np.diff(mask, append=False) & mask] for ids, mask in samples)
    return {token for part in ends for token in part.tolist()}


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
        message = {"content": "", "weight": 1, **message}
        content = message["content"]
        if not isinstance(content, str | list | None):
            raise DatasetError(
                f"{where}: content must be a string, or a list of parts, not {content!r:.80}"
            )
        if message["weight"] not in (0, 1):
            raise DatasetError(f"{where}: weight must be 0 or 1, not {message['weight']!r}")
        try:
            for call in message.get("tool_calls") or ():
                call["function"].setdefault("arguments", {})
            found.append(as_vllm_renders(message))
        except (AttributeError, KeyError, TypeError) as error:
            raise DatasetError(
                f'{where}: each part of content must be {{"type": "text", "text": ...}}, each of '
                'tool_calls {"type": "function", "function": {"name": ..., "arguments": ...}}'
            ) from error
        except ValueError as error:
            raise DatasetError(f"{where}: {error}") from error
    return found


def _value_of(value: Any, column: str) -> Any:
    """Return a value that may be JSON, without keys that are None."""
    return _from_json(value, column) if isinstance(value, str) else without_none(value)


def _difference(before: str, whole: str) -> str:
    """Describe where the text with a message leaves the text before it."""
    at = len(os.path.commonprefix([before, whole]))
    return (
        "the chat template does not continue the text before it: where that has "
        f"{before[at : at + 30]!r}, behind {before[max(at - 20, 0) : at]!r}, it has "
        f"{whole[at : at + 30]!r} with this message; correct the template, or "
        "set what differs by chat_template_kwargs"
    )
