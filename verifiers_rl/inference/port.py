"""The port of a server, reserved from the start of its run on.

vLLM listens after it has loaded the model, most of a minute later, and a bound socket that does not
listen yet keeps nobody out who sets SO_REUSEADDR, as servers do. So what is reserved is a name
beside the port: an abstract socket of Linux. It reaches as far as the port does (one network
namespace), ends with the process that holds it, however that dies, and leaves no file behind.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

# Set by `vf-rl` for its server: it holds the reservation itself, over restarts of the server too.
RESERVED_VARIABLE = "VERIFIERS_RL_RESERVED_PORT"


class PortError(RuntimeError):
    """Nobody can listen here; the message says why and what to do."""


def reserve_port(host: str, port: int) -> socket.socket:
    """Nobody else gets a reservation of this port, on whatever address, until the result is closed
    or this process ends. Only Linux has such names: elsewhere nothing is reserved.

    Raises:
        PortError: somebody listens there or has reserved it, or it is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise _error(host, port, error.strerror or str(error)) from error
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if sys.platform == "linux" and port and os.environ.get(RESERVED_VARIABLE) != str(port):
        name = f"\0verifiers_rl/port-{port}"
        try:
            reservation.bind(name)
        except OSError as error:
            reservation.close()
            reason = f"process {_holder_of(name)}, a vf-rl or vf-vllm, has reserved the port"
            raise _error(host, port, reason) from error
        reservation.listen()  # for those who ask whose it is; nothing is accepted
    return reservation


def port_error(host: str, port: int) -> str | None:
    """Why this address cannot be listened on, or None."""
    try:
        reserve_port(host, port).close()
    except PortError as error:
        return str(error)
    return None


def _error(host: str, port: int, reason: str) -> PortError:
    return PortError(
        f"cannot listen on {host}:{port}: {reason}; stop what uses it or choose another --port"
    )


def _holder_of(name: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(name)
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError:
            return "(unknown)"  # it has just ended, or too many ask
    return str(struct.unpack("3i", credentials)[0])
