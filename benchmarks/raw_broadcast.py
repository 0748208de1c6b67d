"""The lower bound that `weight_sync.py` compares with: buffers sent to a process that drops them.

They travel over one TCP connection, in the sizes of the real buckets. But they are packed and
touched beforehand on both sides: there is no HTTP, no cast, no fresh memory and no model.
"""

import json
import os
import socket
import subprocess
import sys

import torch

from verifiers_rl.inference.server import server_cores

SECRET = "none is needed here"


class RawReceiver:
    """The sender's end. It starts the receiver, which is this file run as a script."""

    def __init__(self, timeout_s: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(timeout_s)
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(listener.getsockname()[1]), str(timeout_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.connection, _ = listener.accept()
        self.connection.settimeout(timeout_s)
        self.buffer = torch.ones(0, dtype=torch.uint8)

    def push(self, sizes: list[int]) -> None:
        """Send buffers of these sizes, and return when all have arrived."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(sizes) + "\n")
        self.process.stdin.flush()
        if self.buffer.numel() < max(sizes):  # once, in the push that warms up
            self.buffer = torch.ones(max(sizes), dtype=torch.uint8)
        for size in sizes:
            self.connection.sendall(memoryview(self.buffer[:size].numpy()))
        # The receiver ends at its own deadline, and so does this wait.
        if self.process.stdout.readline() != "received\n":
            raise RuntimeError("the raw receiver failed")

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait(20)


def main(port: int, timeout_s: float) -> None:
    """Run the receiver, on the cores that the server's workers have."""
    if hasattr(os, "sched_setaffinity"):
        cores = server_cores(list(os.sched_getaffinity(0)))
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    connection = socket.create_connection(("127.0.0.1", port), timeout_s)
    buffer = torch.ones(0, dtype=torch.uint8)
    for line in sys.stdin:
        sizes = json.loads(line)
        if buffer.numel() < max(sizes):
            buffer = torch.ones(max(sizes), dtype=torch.uint8)
        for size in sizes:
            view = memoryview(buffer[:size].numpy())
            while view and (count := connection.recv_into(view)):
                view = view[count:]
        print("received", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
