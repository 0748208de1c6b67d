"""The servers of the [[teacher]]s that `vf-rl` starts: each a `vf-vllm` that gets no weights."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import httpx

from verifiers_rl.cli.children import LocalChild, Supervised
from verifiers_rl.cli.config import RunConfig
from verifiers_rl.cli.plan import teacher_command, teacher_env, teachers_to_start
from verifiers_rl.cli.teachers import KEY_VARIABLE, TEACHERS_VARIABLE
from verifiers_rl.inference.port import RESERVED_VARIABLE, reserve_free_port

HOST = "127.0.0.1"  # the trainer's rank 0, which asks them, is on this machine


def log_of_teacher(server_log: Path, name: str) -> Path:
    """Return the file for the output of a teacher's server, beside the log of the other servers."""
    return server_log.with_name(f"teacher-{name}.log")


class TeacherServers:
    """Reserves their ports when it is made.

    Args:
        gpus: CUDA_VISIBLE_DEVICES of each.
        server_log: the log of the other servers, or None.

    Raises:
        PortError: a port cannot be reserved.
    """

    def __init__(self, config: RunConfig, gpus: Sequence[str], server_log: Path | None) -> None:
        self._config, self._gpus, self._log = config, gpus, server_log
        self._key = secrets.token_urlsafe(32)
        self._ports: list[tuple[int, socket.socket]] = []
        for _ in teachers_to_start(config):
            self._ports.append(reserve_free_port(HOST))

    def trainer_env(self) -> dict[str, str]:
        """Return the variables that tell the trainer where they are; see `make_teachers`."""
        if not self._ports:
            return {}
        teachers = zip(teachers_to_start(self._config), self._ports, strict=True)
        urls = {table.name: f"http://{HOST}:{port}" for table, (port, _) in teachers}
        return {TEACHERS_VARIABLE: json.dumps(urls), KEY_VARIABLE: self._key}

    def start(self, timeout_s: float) -> Iterator[Supervised]:
        """Start them, and yield each. They load while the other servers do.

        Args:
            timeout_s: how long they may take, for people.
        """
        config = self._config
        for number, table in enumerate(teachers_to_start(config)):
            port, what = self._ports[number][0], f"teacher {table.name!r}"
            print(f"vf-rl: starting {what} on {HOST}:{port}, up to {timeout_s:g} s", flush=True)
            log = self._log and log_of_teacher(self._log, table.name)
            env = teacher_env(config, table, self._gpus[number], self._key)
            env[RESERVED_VARIABLE] = str(port)
            words = teacher_command(config, table, HOST, port)
            start = partial(LocalChild, f"teacher-{table.name}", words, env, log)
            is_up = partial(self._is_up, port)
            yield Supervised(what, start, is_up, config, table.at, log, is_needed=True)

    @staticmethod
    def _is_up(port: int) -> bool:
        """Return whether a teacher's server is up. Its control routes are for nobody."""
        try:
            return httpx.get(f"http://{HOST}:{port}/health", trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """Give their ports back."""
        for _, reservation in self._ports:
            reservation.close()
