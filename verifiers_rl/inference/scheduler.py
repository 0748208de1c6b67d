"""vLLM's scheduler, which sends a reply's logprobs with its last token.

vLLM sends those of each token by itself, in three arrays. Of 512 replies at a time the server's
process needs 10 ms a step or more to read these, about as long as a GPU needs to compute the step
of a small model (benchmarks/README.md).
"""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists

from verifiers_rl.inference.generation import join_logprobs


class RolloutScheduler(Scheduler):
    """Until a request ends, it keeps its logprobs itself."""

    def update_from_output(self, *step: Any) -> Any:
        requests = {**self.requests}  # vLLM removes those that end
        of_clients = super().update_from_output(*step)
        for outputs in of_clients.values():
            for output in outputs.outputs:
                keep_logprobs(requests[output.request_id], output)
        return of_clients


class AsyncRolloutScheduler(RolloutScheduler, AsyncScheduler):
    """The same on a GPU."""


def keep_logprobs(request: Any, output: Any) -> None:
    """Move the logprobs of one step's output to the request, or all of them into its last output.
    Not of a stream, nor where the server's process looks for the end of the reply (`stop`).
    """
    kept = vars(request).setdefault("kept_logprobs", [])
    sampling, new = request.sampling_params, output.new_logprobs
    is_whole = sampling is not None and sampling.output_kind == RequestOutputKind.FINAL_ONLY
    if new is not None and is_whole and not sampling.stop:
        # Copies: these are views of the arrays of all requests.
        kept.append(LogprobsLists(*(part.copy() for part in new[:3])))
        output.new_logprobs = None
    if kept and output.finish_reason is not None:
        output.new_logprobs = LogprobsLists(*join_logprobs(kept))
