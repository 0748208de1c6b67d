"""What vLLM runs in each process of a server (`vllm.general_plugins` in pyproject.toml)."""

from __future__ import annotations

import os
import time


def sleep_instead_of_spinning() -> None:
    """On a CPU, in processes of vf-vllm: let engine and worker wait for each other asleep.

    vLLM waits in a loop around `sched_yield` that takes a whole core. A GPU host can spare the
    core. On a laptop the API server and the trainer need it, and rollouts of a small model take
    three times as long (benchmarks/README.md).
    """
    if "VERIFIERS_RL_SERVER_PID" not in os.environ:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.distributed.device_communicators import shm_broadcast

        # Until vLLM lets one set how long its `SpinCondition` stays busy.
        shm_broadcast.sched_yield = lambda: time.sleep(200e-6)
