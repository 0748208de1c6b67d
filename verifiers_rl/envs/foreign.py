"""Environments that only another Python can make: `python = "venv/bin/python"`. There a classic
environment finds the older verifiers that it needs, and others find packages that exclude ours.

trainer's process                                rollout worker, in the other Python
ForeignEnvironment ── its table, as JSON ──►     made_there.make_environment, with its examples
                   ◄── how many, ... ──────
                   ── request ─────────────►     rollouts, as in any worker

The other Python needs neither this package, which comes from the trainer's, nor torch and vLLM.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers_rl.envs.base import InvalidEnvironmentError, RunnerOptions
from verifiers_rl.envs.workers import WorkerPool
from verifiers_rl.process.loop_thread import LoopThread
from verifiers_rl.types import Split


class ForeignEnvironment:
    """An environment that only its rollout workers can make, see `workers.WorkerEnvironment`.

    Args:
        table: what [env] has in a TOML, see `v1_loading.load_v1_environment`.
        python: the interpreter of the workers.
        options: see `RunnerOptions`.
        folders: modules may be there, beside those that are installed for `python`.

    Raises:
        InvalidEnvironmentError: the interpreter cannot run workers, or not make the environment.
    """

    def __init__(
        self,
        table: Mapping[str, Any],
        python: str,
        options: RunnerOptions,
        folders: Sequence[str | Path] = (),
    ) -> None:
        if json.loads(json.dumps(table, default=repr)) != table:
            raise InvalidEnvironmentError(
                f"environment {options.name!r}: {table!r} would change in JSON, in which it goes "
                "to another Python; let keys be texts, and values lists, dicts, texts, numbers, "
                "True, False or None"
            )
        self.name, self.weights = options.name, [1.0]
        tokenizer: str | None = None
        if options.tokenizer is not None:
            tokenizer = tempfile.mkdtemp(prefix="verifiers-rl-tokenizer-")
            weakref.finalize(self, shutil.rmtree, tokenizer)
            options.tokenizer.save_pretrained(tokenizer)
        self._recipe = {
            "table": table,
            "folders": [*map(str, folders)],
            "model": getattr(options.tokenizer, "name_or_path", ""),
            "options": vars(options) | {"tokenizer": tokenizer},
        }
        # A worker says how many examples there are. An event loop may run here, so it has a thread.
        thread, pool = LoopThread("describing"), WorkerPool(1, options.timeout_s, python)
        pool.add(self.name, self._recipe, is_quiet=False)
        try:
            (facts,) = thread.run(pool.open()).result()
        finally:
            thread.stop(pool.close)
        self.sizes: Callable[[Split], list[int]] = facts["sizes"].get
        self.description = facts["description"]

    def recipe(self) -> dict[str, Any]:
        return self._recipe

    async def task(self, split: Split, index: int) -> None:
        """The workers have the examples."""
