"""The servers of the [[teacher]]s that `vf-rl` starts: each a `vf-vllm` that gets no weights."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from verifiers_rl.cli.config import RunConfig
from verifiers_rl.cli.plan import teacher_command, teacher_env, teachers_to_start
from verifiers_rl.cli.servers import SupervisedServer, TeacherProbe
from verifiers_rl.cli.teachers import KEY_VARIABLE, TEACHERS_VARIABLE
from verifiers_rl.inference.client import InferenceServerError
from verifiers_rl.inference.port import reserve_free_port

HOST = "127.0.0.1"  # the trainer's rank 0, which asks them, is on this machine


def log_of_teacher(server_log: Path, name: str) -> Path:
    """Return the file for the output of a teacher's server, beside the log of the other servers."""
    return server_log.with_name(f"teacher-{name}.log")


class TeacherServers:
    """Reserves their ports when it is made.

    Args:
        gpus: CUDA_VISIBLE_DEVICES of each.
        server_log: the log of the other servers, or None.

    Attributes:
        servers: those that are started.

    Raises:
        PortError: a port cannot be reserved.
    """

    def __init__(self, config: RunConfig, gpus: Sequence[str], server_log: Path | None) -> None:
        self._config, self._gpus, self._log = config, gpus, server_log
        self._key = secrets.token_urlsafe(32)
        self.servers: list[SupervisedServer] = []
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

    def start(self, timeout_s: float) -> None:
        """Start them. They load while the other servers do.

        Args:
            timeout_s: how long they may take, for people.
        """
        for number, table in enumerate(teachers_to_start(self._config)):
            port, what = self._ports[number][0], f"teacher {table.name!r}"
            print(f"vf-rl: starting {what} on {HOST}:{port}, up to {timeout_s:g} s", flush=True)
            self.servers.append(
                SupervisedServer(
                    f"teacher-{table.name}",
                    what,
                    teacher_command(self._config, table, HOST, port),
                    teacher_env(self._config, table, self._gpus[number], self._key),
                    TeacherProbe(HOST, port, timeout_s),
                    self._log and log_of_teacher(self._log, table.name),
                    table.at,
                )
            )

    def look(self) -> None:
        """Start those again that have died.

        Raises:
            InferenceServerError: one did not start, or has died too often.
        """
        for server in self.servers:
            server.look(self._config)
            if server.is_given_up:
                raise InferenceServerError(f"{server.what} has died too often; see its log")

    def close(self) -> None:
        """End them, and give their ports back."""
        for server in self.servers:
            server.child.stop()
            server.client.close()
        for _, reservation in self._ports:
            reservation.close()
