"""What vLLM runs in each process of a server (`vllm.general_plugins` in pyproject.toml)."""

from __future__ import annotations

import os
import time

from verifiers_rl.process.ending import end_with

SERVER_PID = "VERIFIERS_RL_SERVER_PID"  # of the vf-vllm that started this process


def set_up() -> None:
    """Called first by vLLM in each of its processes; has an effect in those of a vf-vllm."""
    if SERVER_PID not in os.environ:
        return
    end_with_server()
    os.register_at_fork(after_in_child=end_with_server)  # a forked process has its plugins already
    sleep_instead_of_spinning()


def end_with_server() -> None:
    """When the API server ends in whatever way, end this process: one of vLLM's engines, of their
    workers, or the coordinator of data-parallel engines.

    Without this, they live on after their API server is killed, and hold the GPU's memory.
    """
    pid = int(os.environ[SERVER_PID])
    if os.getpid() != pid:
        end_with({pid}, grace_s=0.0)


def sleep_instead_of_spinning() -> None:
    """On a CPU, let engine and worker wait for each other asleep.

    vLLM waits in a loop around `sched_yield` that takes a whole core. A GPU host can spare the
    core. On a laptop the API server and the trainer need it, and rollouts of a small model take
    three times as long (benchmarks/README.md).
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.distributed.device_communicators import shm_broadcast

        # Until vLLM lets one set how long its `SpinCondition` stays busy.
        shm_broadcast.sched_yield = lambda: time.sleep(200e-6)
