"""The lower bound that `weight_sync.py` compares with: buffers sent to a process that drops them.

They travel over the same sockets (TCP) and in the sizes of the real messages. But they are packed
and touched beforehand on both sides: there is no HTTP, no cast, no fresh memory and no model.
"""

import json
import os
import socket
import subprocess
import sys

import torch

from verifiers_rl.inference.server import server_cores
from verifiers_rl.process.connections import receive_into
from verifiers_rl.sync.transports.meeting import host_meeting, join_meeting
from verifiers_rl.sync.transports.tcp import SocketTransport

SECRET = "none is needed here"


class RawReceiver:
    """The sender's end. It starts the receiver, which is this file run as a script."""

    def __init__(self, timeout_s: float) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(port), str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.sockets = SocketTransport(host_meeting(listener, 1, SECRET, timeout_s), rank=0)
        self.buffer = torch.ones(0, dtype=torch.uint8)

    def push(self, sizes: list[int]) -> None:
        """Send buffers of these sizes, and return when all have arrived."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(sizes) + "\n")
        self.process.stdin.flush()
        if self.buffer.numel() < max(sizes):  # once, in the push that warms up
            self.buffer = torch.ones(max(sizes), dtype=torch.uint8)
        for size in sizes:
            self.sockets.send(self.buffer[:size])
        # The receiver ends at its own deadline, and so does this wait.
        if self.process.stdout.readline() != "received\n":
            raise RuntimeError("the raw receiver failed")

    def close(self) -> None:
        self.sockets.close()
        self.process.kill()
        self.process.wait(20)


def main(port: int, timeout_s: float) -> None:
    """Run the receiver, on the cores that the server's workers have."""
    if hasattr(os, "sched_setaffinity"):
        cores = server_cores(list(os.sched_getaffinity(0)))
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    connection = join_meeting("127.0.0.1", port, 1, SECRET, timeout_s)
    buffer = torch.ones(0, dtype=torch.uint8)
    for line in sys.stdin:
        sizes = json.loads(line)
        if buffer.numel() < max(sizes):
            buffer = torch.ones(max(sizes), dtype=torch.uint8)
        for size in sizes:
            receive_into(connection, memoryview(buffer[:size].numpy()))
        print("received", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
