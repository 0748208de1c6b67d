"""Checkpoints: complete or absent, whichever process ends when; and the final model.

    output_dir/_unfinished/checkpoint-N    all ranks write into this folder
                                           one process brings it to the disk
    output_dir/checkpoint-N                the folder gets its name; only then old ones are removed

A killed run leaves at most `_unfinished`, which the next start removes. Beside what Trainer saves,
a checkpoint has rl_state.json, the state of each part in `Checkpoints.kept`, and manifest.json, by
which a resumed run finds out what is missing or was changed.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import Trainer, TrainerCallback, set_seed

from verifiers_rl.config import UPLOAD, ConfigError, RLConfig
from verifiers_rl.distributed import HostGroup, reduce_over_ranks
from verifiers_rl.process.disk import put_in_place, remove_folder, sync_tree
from verifiers_rl.process.interrupts import say
from verifiers_rl.process.terminal import show
from verifiers_rl.report.run_folder import (
    MERGED,
    OF_OPTIMIZER,
    OF_WEIGHTS,
    RL_STATE,
    STATE,
    UNFINISHED,
    WritingError,
    checkpoints_of,
    closing_lines,
    newest_checkpoint,
    raise_if_damaged,
    read_run,
    rl_state_of,
    write_manifest,
    write_run,
)
from verifiers_rl.sync.sources import (
    adapter_of,
    check_adapter,
    gather_full,
    merged_sources,
    plain_name,
    without_weights,
)

logger = logging.getLogger(__name__)

SAVE_S = 1800.0  # deadline for the slowest rank to write its part of a checkpoint


class Stateful(Protocol):
    """A part of a run whose state a checkpoint keeps. Both methods run on every rank."""

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return what a run that continues at this step needs, as JSON can have it."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpoints(TrainerCallback):
    """Writes the checkpoints and the final model of a run, and reads what a checkpoint keeps.

    Args:
        trainer: the `RLTrainer`.

    Attributes:
        kept: parts whose state is in each checkpoint, by name. Rank 0's state is saved, and every
            rank that has the part loads it. Add a part before `train()`.
        can_repeat_step: the weights are those of a whole step. A step that changes them before its
            end sets this to False until then: if it is broken off, nothing is saved.
        run_dir: where Trainer writes now in place of output_dir; None while nothing is saved.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._folder = Path(trainer.args.output_dir)
        self._hosts: HostGroup | None = None
        self._is_end_new = False  # whether an end of the run would be told, and saved
        self.kept: dict[str, Stateful] = {"position": self, "evaluations": trainer.evaluations}
        if trainer.orchestrator is not None:
            self.kept["orchestrator"] = trainer.orchestrator
        self.can_repeat_step = True
        self.run_dir: str | None = None
        self._resumed: str | None = None
        self._saved_step: int | None = None  # of the newest checkpoint of this run

    # --- The run ----------------------------------------------------------------------------------

    @contextmanager
    def of_run(self, hosts: HostGroup | None, resume: str | None) -> Iterator[None]:
        """Enter this around a run from the checkpoint `resume`, or from the start."""
        self._hosts, self._resumed, self._is_end_new = hosts, resume, True
        self._saved_step, self.can_repeat_step = None, True
        self._trainer._window.steps = []  # those of a run before
        args = self._trainer.args  # the optimizer keeps its own; of the weights, no other can go on
        self._options = {name: getattr(args, name, None) for name in (*OF_OPTIMIZER, *OF_WEIGHTS)}
        # A step that was broken off in this process has left it at False, and FSDP2 would not load
        # the optimizer.
        self._trainer.accelerator.gradient_state._set_sync_gradients(True)
        try:
            yield
        finally:
            self._hosts, self._is_end_new = None, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.local_process_index == 0:
            shutil.rmtree(self._folder / UNFINISHED, ignore_errors=True)
        state.compute_steps(args, state.max_steps)  # not those of the run before
        for name, part in self.kept.items():  # before there is something to lose
            try:
                json.dumps(part.state_dict(state.global_step))
            except (AttributeError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"checkpoints.kept[{name!r}]: {error}; it needs state_dict(step), which "
                    "returns what JSON has, and load_state_dict(state)"
                ) from error
        if self._resumed is None:
            return
        self._saved_step = state.global_step
        self._find_best()
        states = rl_state_of(self._resumed)
        for name, part in self.kept.items():
            if name in states:
                part.load_state_dict(states[name])

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return where the run is between two lines of logs: what Trainer and the window of steps
        have summed; and the options that only a new run can change, see `enter_run_folder`.
        """
        trainer = self._trainer
        return {
            "window": trainer._window.steps,
            "loss": reduce_over_ranks(trainer._tr_loss).item() / trainer.args.world_size,
            "last_logged": trainer._globalstep_last_logged,
            "total_loss": trainer._total_loss_scalar,
            "options": self._options,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer._window.steps = state["window"]
        trainer._tr_loss += state["loss"]
        trainer._globalstep_last_logged = state["last_logged"]
        trainer._total_loss_scalar = state["total_loss"]
        self._options = state["options"]

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.can_repeat_step = self._is_end_new = True

    # --- Saving -----------------------------------------------------------------------------------

    def save(self, write: Callable[[], None]) -> None:
        """Save a checkpoint of this step, unless there is one. Every rank calls this.

        Args:
            write: Trainer's own saving, into a folder below `run_dir`.
        """
        trainer, args, step = self._trainer, self._trainer.args, self._trainer.state.global_step
        if step == self._saved_step:
            return
        # A run that goes on from the checkpoint does not write rows up to this step again.
        trainer._files.checkpoint()
        states = {name: part.state_dict(step) for name, part in self.kept.items()}
        with self._complete(f"checkpoint-{step}") as folder:
            self.run_dir = str(folder.parent)
            try:
                write()
            finally:
                self.run_dir = None
            self._find_best()
            self._meet("all ranks to write their part of a checkpoint")
            if args.should_save:
                trainer.state.save_to_json(str(folder / STATE))  # with the path of the best one
                (folder / RL_STATE).write_text(json.dumps(states), "utf-8")
                write_manifest(folder)
        self._saved_step = step
        if args.should_save:
            self._remove_old()

    def save_or_say(self) -> None:
        """Save a checkpoint of the steps done so far, where the run ends inside a step, unless
        save_strategy is "no", and say where the newest one is. A full disk or a broken GPU costs
        the checkpoint, and does not hide the other reason for which the run ends. Every rank calls
        this. Outside of a run, or again at this step, it does nothing.
        """
        trainer, step = self._trainer, self._trainer.state.global_step
        if not self._is_end_new:
            return
        self._is_end_new = False  # the same error may come here again
        try:
            if step not in (0, self._saved_step):
                trainer.evaluations.log_ended()
                if trainer.args.save_strategy != "no" and self.can_repeat_step:
                    self.save(partial(Trainer._save_checkpoint, trainer, trainer.model, None))
                    trainer.control = trainer.callback_handler.on_save(
                        trainer.args, trainer.state, trainer.control
                    )
        except Exception as error:  # of a disk, a GPU, a callback
            logger.error(f"no checkpoint of the steps so far: {error}")
        if trainer.is_world_process_zero():
            newest = newest_checkpoint(self._folder)
            say(
                f"the run ends at step {step}; the newest checkpoint is {newest}; go on with "
                "--resume, or with train(resume_from_checkpoint=True)"
                if newest
                else f"the run ends at step {step}; nothing of its steps is saved"
            )

    def save_final(self) -> None:
        """Save the final model into output_dir, note that in run.json, and print the closing lines
        of the run. Every rank calls this.
        """
        trainer, args = self._trainer, self._trainer.args
        with self._complete("final", only_files=True) as folder:
            trainer.save_model(str(folder), _internal_call=True)
            (folder / "README.md").unlink(missing_ok=True)  # PEFT's form, with nothing filled in
        was_merged = read_run(self._folder).get("save_final") == "merged"
        if args.save_final == "merged":
            with self._complete(MERGED) as folder:
                model = trainer.accelerator.unwrap_model(trainer.model)
                save_merged(model, trainer.processing_class, folder, writes=args.should_save)
        elif args.should_save and was_merged:  # of fewer steps
            remove_folder(self._folder / MERGED, self._folder / UNFINISHED)
        if trainer.is_world_process_zero():
            write_run(self._folder, {"save_final": args.save_final})
            show(print, "\n".join(closing_lines(self._folder)))

    # --- All ranks --------------------------------------------------------------------------------

    @contextmanager
    def _complete(self, name: str, only_files: bool = False) -> Iterator[Path]:
        """Give an empty folder, in which all ranks may write inside. At the end, bring it to the
        disk; then rank 0 puts it into output_dir, and one process of each other machine does, if
        that has a disk of its own.

        Args:
            name: of the folder in output_dir.
            only_files: put the folder's files there, not the folder.
        """
        args, folder = self._trainer.args, self._folder / UNFINISHED / name

        def place() -> None:
            # Without its configuration a model is none, so a part of one is not taken for it.
            files = sorted(folder.iterdir(), key=lambda path: path.name.endswith("config.json"))
            for path in files if only_files else [folder]:
                put_in_place(path, self._folder / path.name)
            if only_files:
                folder.rmdir()

        if args.local_process_index == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        self._meet("all ranks to begin a checkpoint")
        try:
            yield folder
            self._meet("all ranks to end their part of a checkpoint")
            if args.local_process_index == 0 and folder.is_dir():
                sync_tree(folder)
        except (OSError, SafetensorError, RuntimeError) as error:
            # This is how they name a full disk. Others, such as a GPU's memory, are what they are.
            if isinstance(error, RuntimeError) and "inline_container" not in str(error):
                raise
            raise WritingError(f"{folder} cannot be written: {error}; make room there") from error
        self._meet("all machines to have a checkpoint on their disks")
        if args.process_index == 0:
            place()
        self._meet("a checkpoint to get its name")
        if args.local_process_index == 0 and args.process_index > 0 and folder.is_dir():
            place()

    def _meet(self, what: str) -> None:
        if self._hosts is not None:
            self._hosts.barrier(what, SAVE_S)

    # --- What is around a checkpoint --------------------------------------------------------------

    def _find_best(self) -> None:
        """Set the path of the best checkpoint. The one in trainer_state.json may be of a folder
        that was moved.
        """
        state = self._trainer.state
        best = self._folder / f"checkpoint-{state.best_global_step}"
        if state.best_global_step and (
            best.is_dir() or state.best_global_step == state.global_step
        ):
            state.best_model_checkpoint = str(best)

    def _remove_old(self) -> None:
        """Keep the newest save_total_limit checkpoints; the best one counts and always stays."""
        limit = self._trainer.args.save_total_limit or 0
        found = checkpoints_of(self._folder)
        best = Path(self._trainer.state.best_model_checkpoint or "").name
        removable = [path for path in found[:-1] if path.name != best]
        for path in removable[: max(len(found) - limit, 0)] if limit > 0 else ():
            remove_folder(path, self._folder / UNFINISHED)


def check_final(policy: Any, args: RLConfig) -> None:
    """Raise ConfigError if the final model cannot be saved as `save_final` asks."""
    if args.save_final == "adapter":
        return
    if (adapter := adapter_of(policy)) is None:
        raise ConfigError(
            f"save_final={args.save_final!r}: without effect where all weights are trained: the "
            "final model is a plain one; leave it out"
        )
    try:
        check_adapter(adapter, "merged")
    except ValueError as error:
        raise ConfigError(f"save_final={args.save_final!r}: {error}") from error


def seed_step(args: Any, step: int) -> None:
    """Let all random numbers of a step, such as those of an adapter's dropout, follow from the seed
    and the step's number. So a step that is repeated has them again.
    """
    set_seed((args.seed + step) % 2**32)


# --- The final model, plain -----------------------------------------------------------------------


@torch.no_grad()
def save_merged(model: Any, tokenizer: Any, folder: Path, *, writes: bool) -> None:
    """Save the base model of a PEFT model with its adapter merged in, as transformers and vLLM load
    it. Each weight is merged in float32 and saved in the dtype that the base model has here. The
    model in memory does not change.

    Args:
        model: the PEFT model. If it is split over ranks, all ranks must call this, because each
            weight is gathered.
        tokenizer: saved beside it.
        folder: exists.
        writes: whether this rank writes. It holds the whole model in CPU memory.

    Raises:
        RuntimeError: a weight of the base model is not among the merged ones.
    """
    base = model.get_base_model()
    merged = merged_sources(model)
    # A vision tower's, too. Tied parameters come once.
    held = {
        plain_name(name): tensor
        for name, tensor in chain(base.named_parameters(), base.named_buffers())
        if ".lora_" not in name and ".modules_to_save." not in name
    }
    weights: dict[str, Tensor] = {}
    for name in {**merged, **held}:
        source = merged.get(name)
        tensor = source.make() if source else gather_full(held[name])  # on every rank
        if writes:
            dtype = held[name].dtype if name in held else tensor.dtype
            weights[name] = tensor.to(dtype).cpu().contiguous()
    if not writes:
        return
    plain = without_weights(base)
    plain.generation_config = base.generation_config
    wanted = plain.state_dict().keys()
    if missing := wanted - weights.keys() - plain.all_tied_weights_keys.keys():
        raise RuntimeError(
            f"the merged model lacks {sorted(missing)[:3]}; set save_final='adapter'"
        )
    plain.save_pretrained(folder, state_dict={n: t for n, t in weights.items() if n in wanted})
    tokenizer.save_pretrained(folder)


class SavingTrainer(Trainer):
    """A Trainer that saves through `Checkpoints`, and uploads nothing."""

    checkpoints: Checkpoints
    args: Any

    def _get_output_dir(self, trial: Any) -> str:
        return self.checkpoints.run_dir or super()._get_output_dir(trial)

    def _load_best_model(self) -> None:
        """Do as Trainer. If the run fails behind it, these weights are not the last step's."""
        self.checkpoints.can_repeat_step = False
        raise_if_damaged(Path(str(self.state.best_model_checkpoint)), reads_all=True)
        super()._load_best_model()

    def init_hf_repo(self, token: str | None = None) -> None:
        """Refuse what Trainer's `push_to_hub` begins with: it would upload the rollouts too."""
        raise ConfigError(f"push_to_hub: {UPLOAD}")
