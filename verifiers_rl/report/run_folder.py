"""The folder of a run: whether it holds a run already, its newest checkpoint, its metrics.jsonl,
and the closing lines of a run. This module imports nothing heavy, so that `vf-rl` can check the
folder before it starts anything.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from verifiers_rl.json_text import as_json
from verifiers_rl.process.terminal import printable, show

logger = logging.getLogger(__name__)

RUN = "run.json"
METRICS = "metrics.jsonl"
RESOLVED = "resolved.toml"
ROLLOUTS = "rollouts"  # a folder of files, see rollouts.py
_ROLLOUTS = f"{ROLLOUTS}/step-*.parquet"
ADAPTER = "adapter_config.json"
STATE = "trainer_state.json"  # in a checkpoint: Trainer's own
RL_STATE = "rl_state.json"  # in a checkpoint: what our own parts need to continue
# In a checkpoint, written last: size and SHA-256 of each other file.
MANIFEST = "manifest.json"
# Options without which a checkpoint cannot be loaded, and what trains.
# Of an adapter, PEFT's names, because its config may be none of the options.
OF_WEIGHTS = (
    "TRAINER",
    "use_lora",
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "modules_to_save",
    "optim",
)
# Options whose values a checkpoint's optimizer has, so that new ones do not reach it.
OF_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_LARGE = 2**28  # bytes of a file that is read only once, when the run begins
# With several environments: eval_NAME/reward.
_SCORE = re.compile(r"eval_(.*/)?(?!(runtime|wait_s|num_rollouts|num_turns|loss_s)$)[^/]*")
# A folder that is written now. It has no use after the process has ended.
UNFINISHED = "_unfinished"
ABANDONED = "_abandoned"  # a folder for checkpoints behind one that a run went back to
MERGED = "merged"  # the final model with its adapter merged in
_MODEL = (
    ADAPTER,
    "adapter_model*.safetensors",
    "adapter_model.bin",
    "model*.safetensors",
    "pytorch_model*.bin",
)
# The final model and the files beside it. A base model has the same files, so they are removed only
# if run.json says that the run saved its final model.
MODEL_FILES = (
    *_MODEL,
    "*.safetensors.index.json",
    "*.bin.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "training_args.bin",
)


class RunFolderError(ValueError):
    """A run cannot start in this folder; the message names the folder and the fix."""


class WritingError(OSError):
    """A file of the run cannot be written; the message names the file and the fix."""


@contextmanager
def writing(path: Path, fix: str = "make room there") -> Iterator[None]:
    """Raise WritingError in place of an OSError, which does not name the file of a full disk."""
    try:
        yield
    except OSError as error:
        raise WritingError(f"{path} cannot be written: {error}; {fix}") from error


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the most steps, or None."""
    return next(reversed(checkpoints_of(folder)), None)


def checkpoints_of(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, from the first step on. Each got its name when it was whole,
    see checkpoints.py.
    """
    found = {path.name.removeprefix("checkpoint-"): path for path in folder.glob("checkpoint-*")}
    return [found[n] for n in sorted(filter(str.isdecimal, found), key=int) if found[n].is_dir()]


def prepare_run_folder(args: Any, resume: bool | str | None = None) -> Path | None:
    """Return the checkpoint to resume from, or None for a run from the start. Changes nothing on
    disk.

    Args:
        args: the `RLConfig`; its `resume_from_checkpoint` stands for `resume` if that is not set.
        resume: True for the newest checkpoint, or the path of one.

    Raises:
        RunFolderError: the folder holds a run that is neither resumed nor overwritten, there is no
            such checkpoint, it is damaged (of large files, only sizes are compared here), or the
            run is finished.
    """
    folder, resume = Path(args.output_dir), resume or args.resume_from_checkpoint
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"output_dir={str(folder)!r} is a file; choose another")
    found = ", ".join(traces_of_a_run(folder)[:4])
    if not resume:
        if found and not args.overwrite_output_dir:
            raise RunFolderError(
                f"output_dir={str(folder)!r} holds a run already ({found}). Go on with it: "
                "--resume, or train(resume_from_checkpoint=True); replace it: --overwrite, or "
                "overwrite_output_dir=True; or choose another output_dir or run_name"
            )
        return None
    if args.overwrite_output_dir:
        raise RunFolderError(
            "resuming goes on with the run in the folder, and overwrite_output_dir=True "
            "(--overwrite) removes it; leave one of them out"
        )
    checkpoint = _checkpoint_to_resume(folder, resume)
    raise_if_damaged(checkpoint)
    is_own = checkpoint.resolve().parent == folder.resolve()
    if found and not is_own:
        raise RunFolderError(
            f"{checkpoint} belongs to another run than the one in output_dir={str(folder)!r} "
            f"({found}); choose another output_dir or run_name"
        )
    step = _step_of(checkpoint)
    # A run that was killed behind its last step still has its final model to save.
    is_finished = not is_own or read_run(folder).get("status", "finished") == "finished"
    if 0 <= args.max_steps < step + is_finished:  # below 0: the data will say
        raise RunFolderError(
            f"{checkpoint} is already at step {step} of {args.max_steps}: raise max_steps (of "
            "vf-sft: num_train_epochs)"
        )
    return checkpoint


def _checkpoint_to_resume(folder: Path, resume: bool | str) -> Path:
    newest = newest_checkpoint(folder)
    if not isinstance(resume, str):
        if newest is None:
            raise RunFolderError(
                f"output_dir={str(folder)!r} holds no checkpoint to resume from; start "
                "without --resume (resume_from_checkpoint), or anew with --overwrite "
                "(overwrite_output_dir=True)"
            )
        return newest
    checkpoint = Path(os.path.expanduser(resume))
    for path in (checkpoint, folder / checkpoint):
        if os.path.isfile(path / STATE):  # also where no file can have this name
            return path
    raise RunFolderError(
        f"cannot resume from {str(checkpoint)!r}: no checkpoint is there; the newest one in "
        f"output_dir={str(folder)!r} is {newest or 'none'}"
    )


def enter_run_folder(args: Any, resume: bool | str | None, adapter: Any = None) -> str | None:
    """Prepare the folder of a run that begins now. Every rank calls this. Returns the checkpoint to
    resume from, or None.

    Args:
        args, resume: see `prepare_run_folder`.
        adapter: the PEFT config of the model that is trained, if it has one.

    Raises:
        RunFolderError: on rank 0; see `prepare_run_folder`. Large files of the checkpoint are read
            here, too.
        RuntimeError: on the other ranks, when rank 0 failed.
    """
    from verifiers_rl.distributed import broadcast_values, failing_together

    checkpoint, folder = None, Path(args.output_dir)
    with failing_together():  # rank 0 may rename checkpoints, so it alone looks
        if args.process_index == 0:
            checkpoint = prepare_run_folder(args, resume)
            keep_others_out(folder)
            if args.overwrite_output_dir:
                clear_run_folder(folder)
            if checkpoint is not None:
                raise_if_damaged(checkpoint, reads_all=True)
                saved = rl_state_of(checkpoint)["position"]["options"]
                if adapter is not None and (checkpoint / ADAPTER).exists():
                    saved |= vars(type(adapter).from_pretrained(checkpoint))
                for name in (*OF_OPTIMIZER, *OF_WEIGHTS):
                    now = getattr(adapter, name, getattr(args, name, None))
                    if now == (before := saved.get(name)):
                        continue
                    if name in OF_WEIGHTS:
                        raise RunFolderError(
                            f"{name}={now!r}: {checkpoint} is of a run with {before!r}. Resume "
                            "with that (lora_rank and the options beside it, or peft_config, say "
                            "what an adapter is), or begin a new run with the checkpoint as its "
                            "model"
                        )
                    logger.warning(
                        f"{name}={now}: a resumed run goes on with its optimizer, so {name} stays "
                        f"{before}. To change it, begin a new run with the checkpoint as its model"
                    )
                show(print, f"resuming from {checkpoint}")
                _set_later_aside(folder, _step_of(checkpoint))
    return broadcast_values({"checkpoint": checkpoint and str(checkpoint)})["checkpoint"]


_held: list[int] = []  # the folder in which this process runs


def keep_others_out(folder: Path) -> None:
    """Hold a run's folder until this process enters another one, or ends.

    Raises:
        RunFolderError: another process holds it.
    """
    while _held:
        os.close(_held.pop())
    folder.mkdir(parents=True, exist_ok=True)
    _held.append(os.open(folder, os.O_RDONLY))
    try:
        fcntl.flock(_held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunFolderError(
            f"output_dir={str(folder)!r}: another process trains in it (run.json has its pid); "
            "wait for its end, or choose another output_dir or run_name"
        ) from error


def _set_later_aside(folder: Path, step: int) -> None:
    """Rename the checkpoints of later steps. The run repeats these steps, and must not go on from
    such a checkpoint if it is killed.
    """
    for later in checkpoints_of(folder):
        if int(later.name.removeprefix("checkpoint-")) > step:
            target = later.with_name(ABANDONED) / later.name
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            later.rename(target)
            show(print, f"{later.name} has steps that are repeated: it is now {target}")


def clear_run_folder(folder: Path) -> None:
    """Remove what a run wrote into its folder: its metrics, rollouts and checkpoints, and
    its final models. Everything else stays, also a model that no run saved.
    """
    patterns = [RUN, METRICS, _ROLLOUTS, UNFINISHED, ABANDONED]
    if saved := read_run(folder).get("save_final"):
        patterns += [*MODEL_FILES, *([MERGED] if saved == "merged" else [])]
    found = [path for pattern in patterns for path in folder.glob(pattern)]
    for path in [*found, *checkpoints_of(folder)]:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def closing_lines(folder: Path) -> list[str]:
    """Return the last lines of a run: how its rewards changed, how to look at it, and where the
    model is.
    """
    if lines := summary(folder).splitlines():
        lines.append(f"look at it: vf-rl view {shlex.quote(str(folder))}")
    for file, what in ((ADAPTER, "adapter"), ("config.json", "model")):
        if (folder / file).is_file():
            lines.append(f"{what}: {folder}")
    if read_run(folder).get("save_final") == "merged":
        lines.append(f"merged: {folder / MERGED}")
    return lines


# --- metrics.jsonl --------------------------------------------------------------------------------


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, without lines that a killed process left
    unfinished; [] if there is no such file, or a pipe, at which one would wait for another program.
    Raises OSError if it cannot be read.
    """
    rows, path = [], folder / METRICS
    for line in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]


def write_metrics(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Replace a run's metrics.jsonl at once."""
    replace_file(folder / METRICS, b"".join(as_json(row) + b"\n" for row in rows))


def replace_file(target: Path, content: bytes, fix: str = "make room there") -> None:
    """Write a file that others may be reading, which find the old one or the new one, and no part.
    Its folder is made if it is not there.

    Raises:
        WritingError: it cannot be written.
    """
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    with writing(target, fix):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_bytes(content)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)


def short(number: float) -> str:
    """Return a number for people, with few digits however large it is."""
    return f"{number:.3f}" if abs(number) < 1e6 else f"{number:.3g}"


def summary(folder: Path) -> str:
    """Return the first and the last value of the reward (of the loss, where there are no rewards)
    and of each score of evaluations of a run.
    """
    rows = read_metrics(folder)
    names = dict.fromkeys(chain(*rows))
    lines = []
    for name in ["reward" if "reward" in names else "loss", *filter(_SCORE.fullmatch, names)]:
        # None: it was not finite.
        found = [row for row in rows if isinstance(row.get(name), int | float)]
        ends = [f"{short(row[name])} (step {row['step']})" for row in (*found[:1], *found[1:][-1:])]
        lines += [f"{name}: {' -> '.join(ends)}"] if ends else []
    return printable("\n".join(lines))


# --- Whether a checkpoint is as it was written ----------------------------------------------------


def write_manifest(checkpoint: Path) -> None:
    """Write down the size and the checksum of each file of a checkpoint."""
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        files = {
            str(path.relative_to(checkpoint)): [path.stat().st_size, checksum]
            for path, checksum in zip(paths, pool.map(_checksum, paths), strict=True)
        }
    (checkpoint / MANIFEST).write_text(json.dumps(files, indent=1), "utf-8")


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def raise_if_damaged(checkpoint: Path, reads_all: bool = False) -> None:
    """Raise RunFolderError if a checkpoint is not as it was written. The error names its files and
    the checkpoints that are.

    Args:
        reads_all: compare checksums of all files; otherwise only sizes, where a file is large.
    """
    if damaged := _damaged_files(checkpoint, reads_all):
        whole = [p for p in checkpoints_of(checkpoint.parent) if not _damaged_files(p, reads_all)]
        raise RunFolderError(
            f"{checkpoint} is damaged, missing or changed: {', '.join(damaged)}. Go on from "
            f"another one ({', '.join(map(str, whole)) or 'there is none'}) by --trainer.args."
            "resume_from_checkpoint in place of --resume, or by train(resume_from_checkpoint=...); "
            "or start anew with --overwrite (overwrite_output_dir=True)"
        )


def _damaged_files(checkpoint: Path, reads_all: bool) -> list[str]:
    """Return which files of a checkpoint are missing or changed; the manifest alone if it cannot be
    read.
    """
    try:
        files = json.loads((checkpoint / MANIFEST).read_bytes())
    except (FileNotFoundError, ValueError):
        return [MANIFEST]

    def is_whole(path: Path, size: int, checksum: str) -> bool:
        if not path.is_file() or path.stat().st_size != size:
            return False
        return (size >= _LARGE and not reads_all) or _checksum(path) == checksum

    return [name for name, known in files.items() if not is_whole(checkpoint / name, *known)]


# --- run.json and the rollouts --------------------------------------------------------------------


def read_run(folder: str | Path) -> dict[str, Any]:
    """Return run.json of a run; {} if there is none, or if it is damaged."""
    run, path = None, Path(folder) / RUN
    with suppress(ValueError, RecursionError):
        run = path.is_file() and json.loads(path.read_bytes())
    return run if isinstance(run, dict) else {}


def write_run(folder: Path, changes: Mapping[str, Any]) -> None:
    """Change keys of run.json. The file is replaced at once."""
    replace_file(folder / RUN, as_json({**read_run(folder), **changes}))


def rollouts_file(folder: Path, number: int) -> Path:
    return folder / ROLLOUTS / f"step-{number:06d}.parquet"


def remove_rollouts(folder: Path, behind: int) -> None:
    """Remove the files of rollouts that a run wrote behind the checkpoint of this step."""
    for path in folder.glob(_ROLLOUTS):
        if int(path.stem.removeprefix("step-")) > behind:
            path.unlink()


# --- What is in the folder ------------------------------------------------------------------------


def traces_of_a_run(folder: Path) -> list[str]:
    """Return the files that show that a run was here. Rows of step 0 show none: they are of
    evaluations before any training.
    """
    found = [path.name for path in checkpoints_of(folder)]
    if any(row["step"] > 0 for row in read_metrics(folder)):
        found.append(METRICS)
    return found + sorted(path.name for pattern in _MODEL for path in folder.glob(pattern))


def rl_state_of(checkpoint: str | Path) -> dict[str, Any]:
    """Return what our own parts have saved in a checkpoint, by name. It is as it was written; see
    `raise_if_damaged`.
    """
    return json.loads((Path(checkpoint) / RL_STATE).read_bytes())


def _step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint that is as it was written."""
    return json.loads((checkpoint / STATE).read_bytes())["global_step"]
