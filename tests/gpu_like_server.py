"""`vf-vllm` on a CPU with what is there on a GPU only: asynchronous scheduling, in which the engine
schedules a step while the worker computes the one before, the flag for sleep mode, and memory that
a trainer on the same GPU can share. On a CPU, a worker that is to sleep frees nothing, but the
engine pauses, drops keys and values and wakes as on a GPU.

    python -m tests.gpu_like_server --model MODEL [--enable-sleep-mode]
"""

import verifiers_rl  # noqa: F401 (before vLLM, for torchvision)

# isort: split
from vllm.platforms.cpu import CpuPlatform

from tests.helpers import map_memory_of_cpu
from verifiers_rl.inference import server
from verifiers_rl.inference.worker import WeightSyncWorker
from verifiers_rl.sync import nccl

nccl.map_in = map_memory_of_cpu  # also in a worker, which imports `Worker`


class Worker(WeightSyncWorker):
    """Receives weights in memory of the CPU."""


def be_like_a_gpu() -> None:
    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, config):
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    CpuPlatform.is_sleep_mode_available = lambda self: True
    server.WORKER_EXTENSION = "tests.gpu_like_server.Worker"


if __name__ == "__main__":
    be_like_a_gpu()
    server.main()
