"""A run on this machine: its processes are children of this one."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from verifiers_rl.cli.children import Child, LocalChild
from verifiers_rl.cli.config import RunConfig, TomlError
from verifiers_rl.cli.plan import ServerPlan, assign_gpus, trainer_command
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.inference.port import (
    RESERVED_VARIABLE,
    PortError,
    reserve_free_port,
    reserve_port,
)

LOGS = "logs"  # in the run's folder


class ThisMachine:
    """See `supervise.Launcher`. When it is made, it assigns GPUs, and gives each
    plan a port that is reserved until `close`.

    Args:
        plans: of all servers.
        logs: a folder, in which NAME.log gets the output of the server of this name.
        options: of the command line, for the trainer. Its output is ours.

    Raises:
        TomlError: a port is taken, or see `assign_gpus`.
    """

    def __init__(
        self,
        config: RunConfig,
        plans: Sequence[ServerPlan],
        logs: Path,
        options: argparse.Namespace | None = None,
    ) -> None:
        self._config, self._logs, self._options, self._plans = config, logs, options, plans
        self.gpus = assign_gpus(config, plans)
        with ExitStack() as reserved:
            for plan in plans:
                try:
                    if plan.port:
                        reservation = reserve_port(plan.host, plan.port)
                    else:
                        plan.port, reservation = reserve_free_port(plan.host)
                except PortError as error:
                    option = "vllm_server_port in [trainer.args]"
                    raise TomlError(str(error).replace("--port", option)) from error
                reserved.enter_context(reservation)
            self._reserved = reserved.pop_all()

    def open(self) -> None:
        """Draw the token of the run, which all children inherit. Begin empty logs.

        Raises:
            TomlError: a log cannot be written.
        """
        if not self._plans:
            return
        os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            for plan in self._plans:
                self._log(plan).write_bytes(b"")
        except OSError as error:
            raise TomlError(
                f"{self._logs}, for the servers' output: {error.strerror}; choose another "
                "output_dir"
            ) from error
        print(f"vf-rl: the servers' output is in {self._logs}", flush=True)

    def _log(self, plan: ServerPlan) -> Path:
        return self._logs / f"{plan.name}.log"

    def start_server(self, plan: ServerPlan) -> Child:
        env = {**plan.env, "CUDA_VISIBLE_DEVICES": self.gpus[plan.name]}
        env[RESERVED_VARIABLE] = str(plan.port)
        address = plan.host, plan.port
        return LocalChild(plan.name, plan.command(*address), env, self._log(plan), address=address)

    def start_trainers(self, env: dict[str, str]) -> Iterator[Child]:
        assert self._options is not None
        words = trainer_command(self._config, self._options)
        env = {**env, "CUDA_VISIBLE_DEVICES": self.gpus["trainer"]}
        yield LocalChild("trainer", words, env)

    def close(self) -> None:
        self._reserved.close()
