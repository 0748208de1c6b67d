"""`vf-vllm` on a CPU with `--enable-return-routed-experts`, which vLLM has on a GPU only.

    python -m tests.experts_on_cpu --model MODEL --enable-return-routed-experts

vLLM returns the experts of each token from its second model runner, which needs Triton. Both ends
of vLLM's own connector fit the first one too, so these classes join them to it:

    scheduler  which rows a reply has already ──► worker: begin_step, prepare_output, process_output
               rows of the reply's new tokens ◄──
"""

import verifiers_rl  # noqa: F401 (before vLLM, for torchvision)

# isort: split
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from verifiers_rl.inference import server
from verifiers_rl.inference.scheduler import RolloutScheduler


class RoutingScheduler(RolloutScheduler):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.aux_output_connector = AuxOutputSchedulerConnector()


class RoutingWorker(CPUWorker):
    def init_device(self):
        super().init_device()
        self.model_runner = RoutingModelRunner(self.vllm_config, self.device)


class RoutingModelRunner(CPUModelRunner):
    def initialize_kv_cache(self, kv_cache_config, *args, **options):
        super().initialize_kv_cache(kv_cache_config, *args, **options)
        self.experts = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)
        self.experts_of_step = None

    def execute_model(self, scheduled, *args, **options):
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

    def sample_tokens(self, *args, **options):
        output = super().sample_tokens(*args, **options)
        of_step, self.experts_of_step = self.experts_of_step, None
        if of_step is not None:
            num = len(of_step.request_ids)
            # A part of a prompt samples no token, so the scheduler asks for no rows yet.
            of_step.enqueue_cpu_copy(~self.discard_request_mask.np[:num], np.zeros(num, int))
            result = getattr(output, "_model_runner_output", output)  # of an asynchronous step
            result.aux_output_connector_output = of_step.process_output()
        return output


def with_these_classes(args):
    """The flags of vLLM, which refuses its own one for experts. Its connector keeps rows by the
    hashes of prefixes.
    """
    module = "tests.experts_on_cpu"
    classes = {
        "worker_cls": f"{module}.RoutingWorker",
        "scheduler_cls": f"{module}.RoutingScheduler",
    }
    flags = {"enable_return_routed_experts": False, "enable_prefix_caching": True}
    return Namespace(**vars(args) | classes | flags)


if __name__ == "__main__":
    fit, make_engine_args = server.fit_to_cpu, AsyncEngineArgs.from_cli_args
    server.fit_to_cpu = lambda args: fit(with_these_classes(args))
    AsyncEngineArgs.from_cli_args = lambda args: make_engine_args(with_these_classes(args))
    server.main()
