"""Runs as the page shows them. Files are read again when they have changed, because a run may go
on, be resumed (which removes its last rows) or be replaced. Nothing on disk is changed.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow

from verifiers_rl.report.run_folder import METRICS, ROLLOUTS, RUN
from verifiers_rl.view.files import RolloutFile, Rollouts, Stamp, stamp_of

MAX_RUNS = 500  # of a folder of runs
_DEPTH = 4  # of folders in a folder of runs
_HASH_LENGTH = 64  # of a SHA-256 in hexadecimal digits
_QUIET_S = 120.0  # a run of which nothing was written for so long may have ended
_RETRIES = 3
_TAIL = 256  # bytes before the place where reading goes on, by which a replaced file is noticed
_Answer = TypeVar("_Answer")


class ViewError(ValueError):
    """A page cannot be made of these runs; the message names the folder and the fix."""


class Runs:
    """The runs in some folders, which may get more of them.

    Args:
        paths: each a run's folder, or a folder of runs.

    Raises:
        ViewError: a path is no folder.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._paths = [Path(path).expanduser().absolute() for path in paths]
        for path in self._paths:
            if not path.is_dir():
                why = "is a file" if path.exists() else "no such folder"
                raise ViewError(f"{path}: {why}; give the folder of a run, or a folder of runs")
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self.problem = ""

    def find(self) -> list[Run]:
        """Return the runs that are there now. A run keeps its name."""
        with self._lock:
            folders: dict[Path, None] = {}
            self.problem = ""
            for path in self._paths:
                inside = list(_folders_of_runs(path))
                # A folder without files of a run: perhaps one that begins soon.
                folders |= dict.fromkeys(inside or [path])
            if len(folders) > MAX_RUNS:
                self.problem = f"{len(folders)} runs; the first {MAX_RUNS} are shown"
            named = {run.folder: run for run in self._runs.values()}
            new = [folder for folder in list(folders)[:MAX_RUNS] if folder not in named]
            for folder in new:
                name = _free_name(folder, self._runs, new)
                self._runs[name] = named[folder] = Run(name, folder)
            return [named[folder] for folder in folders if folder in named]

    def __getitem__(self, name: str) -> Run:
        """Return a run by its name. Raises KeyError if there is none."""
        return self._runs[name]


def _folders_of_runs(folder: Path) -> Iterator[Path]:
    for at, inside, files in os.walk(folder):  # past folders that cannot be read
        path = Path(at)
        is_run = not {RUN, METRICS}.isdisjoint(files)
        if is_run:
            yield path
        is_last = is_run or len(path.relative_to(folder).parts) == _DEPTH
        inside[:] = [] if is_last else sorted(name for name in inside if name[0] != ".")


def _free_name(folder: Path, taken: dict[str, Run], others: list[Path]) -> str:
    """Return the last parts of a path, as many as tell it from others."""
    parts = folder.parts
    for count in range(1, len(parts) + 1):
        name = "/".join(parts[-count:])
        same = [other for other in others if "/".join(other.parts[-count:]) == name]
        if name not in taken and len(same) == 1:
            break
    return name.encode(errors="backslashreplace").decode()  # a file's name may be no UTF-8


class Run:
    """One run's folder. Methods may be called from several threads.

    Args:
        name: by which the page calls it.
        folder: of the run.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self._metrics = MetricsFile(folder / METRICS)
        self._read: tuple[Stamp, dict[str, Any]] | None = None  # run.json
        self._lock = threading.Lock()
        self._files: dict[Path, RolloutFile] = {}
        self._broken: list[str] = []  # which files cannot be read, and why
        self._envs: dict[str, int] = {}
        self._rollouts: Rollouts | None = None  # those of `_files`; None: not read yet

    def state(self) -> dict[str, Any]:
        """Return what the page shows of the run as a whole, as JSON can have it.

        Keys: `name`, `run` (of run.json; of code only the hashes), `status` (see `_status`),
        `step`, `written_at` (unix seconds, None if there are no files), `num_rollouts`, `envs`
        (once rollouts were read), `rows` (lines of metrics), `generation` (changes when lines were
        removed), `problems`.
        """
        run, problem = self._run()
        with self._lock:
            metrics = self._metrics.refresh()
            problems = [one for one in (problem, metrics.problem) if one]
            if metrics.num_unreadable:
                problems.append(f"{METRICS}: {metrics.num_unreadable} lines cannot be read")
            steps = metrics.columns.get("step")
            step = int(max(steps)) if steps else 0
            rows, generation = metrics.num_rows, metrics.generation
            self._look()
            problems += self._broken
            num_rollouts = sum(file.num_rows for file in self._files.values())
        written_at = max(_mtime(self.folder / name) for name in (RUN, METRICS, ROLLOUTS))
        status = _status(run, written_at)
        return {
            "name": self.name,
            "run": {
                key: _hashes(value) for key, value in run.items() if key not in ("pid", "host")
            },
            "status": status,
            "step": step,
            "written_at": written_at or None,
            "num_rollouts": num_rollouts,
            "envs": list(self._envs),
            "rows": rows,
            "generation": generation,
            "problems": problems,
        }

    def code(self) -> dict[str, str]:
        """Return the texts of the run's code, by name."""
        code = self._run()[0].get("code")
        known = code.items() if isinstance(code, dict) else ()
        return {name: value[1] for name, value in known if _is_source(value)}

    def _run(self) -> tuple[dict[str, Any], str]:
        """Return run.json, which is read again when it has changed, and what is wrong with it; {}
        if it is absent.
        """
        try:
            stamp = stamp_of(path := self.folder / RUN)
            if self._read is None or self._read[0] != stamp:
                run = json.loads(path.read_bytes())
                if not isinstance(run, dict):
                    return {}, f"{RUN} is no JSON object"
                self._read = stamp, run
            return self._read[1], ""
        except FileNotFoundError:
            return {}, ""
        except (OSError, ValueError, RecursionError) as error:
            return {}, f"{RUN} cannot be read: {error}"

    def metrics(self, generation: int = -1, start: int = 0) -> dict[str, Any]:
        """Return the lines of metrics.jsonl from `start` on as columns; all lines if `generation`
        is not the present one. A value that is absent or not finite is None.

        Keys: `generation`, `start`, `columns` (values by name), `not_finite` (by name: how many,
        and the step of the first).
        """
        with self._lock:
            found = self._metrics.refresh()
            if generation != found.generation or not 0 <= start <= found.num_rows:
                start = 0
            columns = {name: _numbers(values[start:]) for name, values in found.columns.items()}
            not_finite = {name: list(what) for name, what in found.not_finite.items()}
            generation = found.generation
        return {
            "generation": generation,
            "start": start,
            "columns": columns,
            "not_finite": not_finite,
        }

    def _look(self) -> None:
        """Look which files of rollouts there are now."""
        files, self._broken = {}, []
        for path in sorted((self.folder / ROLLOUTS).glob("step-*.parquet")):
            try:
                stamp, file = stamp_of(path), self._files.get(path)
                if file is None or file.stamp != stamp:
                    file = RolloutFile(path, stamp)
                files[path] = file
            except FileNotFoundError:  # removed in between
                continue
            except (OSError, ValueError) as error:
                self._broken.append(f"{path.name} cannot be read: {error}")
        if files != self._files:
            self._files, self._rollouts = files, None

    def rollouts(self) -> Rollouts | None:
        """Return the rollouts that are on disk now; None if the run has written none."""
        with self._lock:
            self._look()
            if self._rollouts is None and self._files:
                self._rollouts = Rollouts(list(self._files.values()), self._envs)
            return self._rollouts

    def ask(self, question: Callable[[Rollouts], _Answer]) -> _Answer | None:
        """Return the answer of a function of the rollouts; None if the run has written none. It is
        asked again if a file was replaced meanwhile.
        """
        for _ in range(_RETRIES):
            try:
                rollouts = self.rollouts()
                return None if rollouts is None else question(rollouts)
            except FileNotFoundError as error:
                replaced = error
            finally:  # memory that the reads of this thread have left
                pyarrow.default_memory_pool().release_unused()
        raise replaced


# --- metrics.jsonl --------------------------------------------------------------------------------


class MetricsFile:
    """The numbers of a metrics.jsonl that grows. Only new lines are read.

    Attributes:
        columns: by name, one float for each line; NaN where it is absent or not finite.
        not_finite: by name, how often the value was NaN or infinite, and the step of the first.
        num_rows: lines.
        num_unreadable: lines that are not JSON objects with a step.
        problem: why the file cannot be read, or "".
        generation: changes when the file was replaced.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.generation = 0
        self._forget()

    def _forget(self) -> None:
        self.columns: dict[str, array[float]] = {}
        self.not_finite: dict[str, tuple[int, int]] = {}
        self.num_rows = self.num_unreadable = 0
        self._offset, self._tail = 0, b""

    def refresh(self) -> MetricsFile:
        """Read what is new. Returns this object."""
        self.problem = ""
        try:
            stamp_of(self._path)
            with self._path.open("rb") as file:
                if self._offset:
                    file.seek(self._offset - len(self._tail))
                    if file.read(len(self._tail)) != self._tail:
                        self._begin_again()
                file.seek(self._offset)
                new = file.read()
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self.problem = f"{METRICS} cannot be read: {error}"
            if self._offset:
                self._begin_again()
            return self
        new = new[: new.rfind(b"\n") + 1]  # the rest is not finished
        if new:
            for line in new.splitlines():
                self._add(line)
            self._offset += len(new)
            self._tail = (self._tail + new)[-_TAIL:]
        return self

    def _begin_again(self) -> None:
        self._forget()
        self.generation += 1

    def _add(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            step = row["step"]
            if not isinstance(step, int):
                raise TypeError(step)
            numbers = {  # None: it was NaN or infinite
                name: math.nan if value is None else float(value)
                for name, value in row.items()
                if isinstance(value, int | float | None)
            }
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            self.num_unreadable += bool(line.strip())
            return
        for name, value in numbers.items():
            if row[name] is None:
                count, first = self.not_finite.get(name, (0, step))
                self.not_finite[name] = (count + 1, first)
            if name not in self.columns:
                self.columns[name] = array("d", [math.nan]) * self.num_rows
            self.columns[name].append(value if math.isfinite(value) else math.nan)
        self.num_rows += 1
        for values in self.columns.values():
            if len(values) < self.num_rows:
                values.append(math.nan)


def _numbers(values: array[float]) -> list[float | None]:
    """Return values with seven digits, which a picture does not show, and None for NaN."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]


# --- run.json -------------------------------------------------------------------------------------


def _is_source(value: Any) -> bool:
    """Return whether this is the hash and the text of some code, and not an option's two names."""
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(isinstance(v, str) for v in value) and len(value[0]) == _HASH_LENGTH


def _hashes(value: Any) -> Any:
    """Return a value of run.json with the hash in place of each source."""
    if _is_source(value):
        return value[0]
    if isinstance(value, dict):
        return {key: _hashes(inner) for key, inner in value.items()}
    return [_hashes(inner) for inner in value] if isinstance(value, list) else value


def _status(run: dict[str, Any], written_at: float) -> str:
    """Return `running`, `finished`, `interrupted` or `failed` as run.json says; `lost` if it says
    that the run goes on on this machine, which has no such process, and nothing was written for a
    while; `unknown` without a run.json; `empty` without files.
    """
    status = run.get("status")
    if not written_at:
        return "empty"
    if not isinstance(status, str):
        return "unknown"
    if status != "running":
        return status
    is_quiet = time.time() - written_at > _QUIET_S
    is_here = run.get("host") == socket.gethostname()
    return "lost" if is_quiet and is_here and not _is_alive(run.get("pid")) else "running"


def _is_alive(pid: Any) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True  # another user's
    except (OSError, OverflowError):
        return False
    return True


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
