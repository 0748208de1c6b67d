"""Reserve a server's port from the start of its run.

vLLM listens only after it has loaded the model, most of a minute later. Until then a bound socket
does not help: it does not keep out a process that sets SO_REUSEADDR, and servers set it. So a name
that stands for the port is reserved: an abstract socket of Linux. The name reaches as far as the
port (one network namespace). It ends with the process that holds it, however the process dies, and
leaves no file behind.
"""

from __future__ import annotations

import os
import socket

# Set by `vf-rl` for its server: `vf-rl` holds the reservation, also while its server restarts.
RESERVED_VARIABLE = "VERIFIERS_RL_RESERVED_PORT"


class PortError(RuntimeError):
    """Nobody can listen here; the message says why and what to do."""


def reserve_port(host: str, port: int) -> tuple[int, socket.socket]:
    """Reserve this port, for all addresses, until the second result is closed or this process ends.
    Only Linux has abstract sockets: elsewhere nothing is reserved.

    Args:
        port: 0: a free one that the system chooses. The first result is the port.

    Raises:
        PortError: a process listens there or has reserved the port, or `host` is no address of this
            machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            port = port or probe.getsockname()[1]
        if os.environ.get(RESERVED_VARIABLE) != str(port):
            reservation.bind(f"\0verifiers_rl/port-{port}")
    except OSError as error:
        reservation.close()
        raise PortError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; stop what uses it, or "
            "another vf-rl or vf-vllm that has reserved it, or choose another --port"
        ) from error
    return port, reservation
