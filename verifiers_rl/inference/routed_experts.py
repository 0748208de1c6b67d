"""Routed experts on a CPU (`--enable-return-routed-experts`), for router replay without a GPU.

vLLM returns the experts of each token from its second model runner only, which needs Triton. Its
parts fit the first one too: the routers' hooks, the buffer of a step, the fields in which rows
travel from worker to scheduler to reply. These classes join them; vf-vllm names them to vLLM
(`--worker-cls`, `--scheduler-cls`).

    worker        a step's rows ──► split by request ──► ModelRunnerOutput
    engine core   Scheduler.aux_output_connector.take_output: the rows that the reply has not yet

Prefix caching is off then: a cached token passes no router, so its experts would be unknown.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


class RoutingScheduler(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aux_output_connector = RowsOfRequests()


class RowsOfRequests:
    """Stands in for vLLM's `AuxOutputSchedulerConnector`."""

    def __init__(self) -> None:
        self._num_sent: dict[str, int] = {}

    def build_connector_meta(self, *_: Any) -> None:
        return None

    def take_output(self, request: Any, output: dict[str, Any] | None) -> np.ndarray | None:
        """Return the rows of this request that are new: up to the token before its last one, which
        no step has computed yet.
        """
        rows = (output or {}).get(request.request_id)
        if rows is None:
            return None
        start = self._num_sent.get(request.request_id, 0)
        stop = min(request.num_tokens - 1, rows.token_start + len(rows.rows))
        if rows.token_start > start:
            raise RuntimeError(
                f"request {request.request_id}: the experts of tokens {start} to "
                f"{rows.token_start} are unknown"
            )
        self._num_sent[request.request_id] = max(stop, start)
        return rows.rows[start - rows.token_start : stop - rows.token_start]

    def request_finished(self, request: Any) -> None:
        if request.is_finished():  # not only preempted
            self._num_sent.pop(request.request_id, None)

    def reset(self) -> None:
        pass


class RoutingWorker(CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        self.model_runner = RoutingModelRunner(self.vllm_config, self.device)


class RoutingModelRunner(CPUModelRunner):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        max_tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        self.routed_experts = RoutedExpertsCapturer(max_tokens, self.vllm_config)
        self.rows_of_requests: dict[str, Any] = {}  # of prompts that are computed in parts, too
        bind_routed_experts_capturer(self.model, self.routed_experts)

    def execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(scheduled, *args, **kwargs)
        for request_id in {*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())}:
            self.rows_of_requests.pop(request_id, None)
        total = scheduled.total_num_scheduled_tokens
        if total:
            rows = self.routed_experts.snapshot_routing_data(total).numpy()
            batch, at = self.input_batch, 0
            for i, request_id in enumerate(batch.req_ids):
                num = scheduled.num_scheduled_tokens[request_id]
                start = int(batch.num_computed_tokens_cpu[i])
                before = self.rows_of_requests.get(request_id)
                new = rows[at : at + num]
                if before is not None and before.token_start + len(before.rows) == start:
                    start, new = before.token_start, np.concatenate([before.rows, new])
                self.rows_of_requests[request_id] = AuxRequestOutput(start, new)
                at += num
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        of_step = getattr(output, "_model_runner_output", output)
        sent = {}
        for request_id in getattr(of_step, "req_ids", ()):
            rows = self.rows_of_requests.get(request_id)
            state = self.requests.get(request_id)
            if rows is None or state is None:
                continue
            # A part of a prompt samples no token, so the scheduler asks for no rows yet.
            if rows.token_start + len(rows.rows) >= state.num_prompt_tokens:
                sent[request_id] = self.rows_of_requests.pop(request_id)
        if sent:
            of_step.aux_output_connector_output = sent
        return output
