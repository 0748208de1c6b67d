"""A run on this machine: its processes are children of this one."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from verifiers_rl.cli.children import Child, LocalChild, Supervised
from verifiers_rl.cli.config import RunConfig, TomlError
from verifiers_rl.cli.plan import ServerPlan, assign_gpus, trainer_command
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.inference.port import (
    RESERVED_VARIABLE,
    PortError,
    reserve_free_port,
    reserve_port,
)


class ThisMachine:
    """See `supervise.Launcher`. When it is made, it assigns GPUs and reserves ports, until `close`.

    Args:
        plans: of all servers.
        log: a file for the output of the policy's server; those of the others are beside it. None:
            all output comes here.
        options: of the command line, for the trainer.

    Raises:
        TomlError: a port is taken, a log cannot be written, or see `assign_gpus`.
    """

    def __init__(
        self,
        config: RunConfig,
        plans: Sequence[ServerPlan],
        log: Path | None = None,
        options: argparse.Namespace | None = None,
    ) -> None:
        self._config, self._log, self._options = config, log, options
        self.gpus = assign_gpus(config, plans)
        self._ports: dict[str, int] = {}
        with ExitStack() as reserved:
            for plan in plans:
                try:
                    port, reservation = (
                        (plan.port, reserve_port(plan.host, plan.port))
                        if plan.port
                        else reserve_free_port(plan.host)
                    )
                except PortError as error:
                    option = "vllm_server_port in [trainer.args]"
                    raise TomlError(str(error).replace("--port", option)) from error
                self._ports[plan.name] = port
                reserved.enter_context(reservation)
                if log is not None:
                    _begin_log(plan.log(log))
            self._reserved = reserved.pop_all()

    def open(self) -> None:
        """Draw the token of the run, which all children inherit."""
        if self._ports:
            os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)

    def start_server(self, plan: ServerPlan) -> Child:
        port = self._ports[plan.name]
        env = {**plan.env, "CUDA_VISIBLE_DEVICES": self.gpus[plan.name]}
        env[RESERVED_VARIABLE] = str(port)
        log = plan.log(self._log) if self._log is not None else None
        words = plan.command(plan.host, port)
        return LocalChild(plan.name, words, env, log, address=(plan.host, port))

    def supervise(self, plan: ServerPlan) -> Supervised:
        """Start one server alone."""
        return Supervised(plan, partial(self.start_server, plan), self._config)

    def start_trainers(self, env: dict[str, str]) -> Iterator[Child]:
        assert self._options is not None
        words = trainer_command(self._config, self._options)
        env = {**env, "CUDA_VISIBLE_DEVICES": self.gpus["trainer"]}
        yield LocalChild("trainer", words, env, inherit=self._log is not None)

    def close(self) -> None:
        self._reserved.close()


def _begin_log(path: Path) -> None:
    """Create an empty log file, whatever an earlier run left there.

    Raises:
        TomlError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    except OSError as error:
        raise TomlError(f"--server-log {path}: {error.strerror}; choose another") from error
