"""Routed experts on a CPU (`--enable-return-routed-experts`), for router replay without a GPU.

vLLM returns the experts of each token from its second model runner only, which needs Triton. Both
ends of vLLM's own connector fit the first one too, so these classes join them to it. vf-vllm names
the classes to vLLM (`--worker-cls`, `--scheduler-cls`), and they go when vLLM has its second model
runner for CPUs.

    scheduler  which rows a reply has already ──► worker: begin_step, prepare_output, process_output
               rows of the reply's new tokens ◄──
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


class RoutingScheduler(Scheduler):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.aux_output_connector = AuxOutputSchedulerConnector()


class RoutingWorker(CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        self.model_runner = RoutingModelRunner(self.vllm_config, self.device)


class RoutingModelRunner(CPUModelRunner):
    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **options: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **options)
        self.experts = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)
        self.experts_of_step: Any = None

    def execute_model(self, scheduled: Any, *args: Any, **options: Any) -> Any:
        self.experts.begin_step(scheduled.aux_output_connector_metadata)
        output = super().execute_model(scheduled, *args, **options)
        if scheduled.total_num_scheduled_tokens:
            request_ids = list(self.input_batch.req_ids)
            nums = [scheduled.num_scheduled_tokens[request_id] for request_id in request_ids]
            starts = self.input_batch.num_computed_tokens_cpu[: len(nums)].copy()
            self.experts_of_step = self.experts.prepare_output(
                SimpleNamespace(  # the fields that it reads of the second runner's batch
                    req_ids=request_ids,
                    query_start_loc_np=np.cumsum([0, *nums]),
                    num_computed_tokens_np=starts,
                )
            )
        return output

    def sample_tokens(self, *args: Any, **options: Any) -> Any:
        output = super().sample_tokens(*args, **options)
        of_step, self.experts_of_step = self.experts_of_step, None
        if of_step is not None:
            num = len(of_step.request_ids)
            # A part of a prompt samples no token, so the scheduler asks for no rows yet.
            of_step.enqueue_cpu_copy(~self.discard_request_mask.np[:num], np.zeros(num, int))
            result = getattr(output, "_model_runner_output", output)  # of an asynchronous step
            result.aux_output_connector_output = of_step.process_output()
        return output
