"""How many tokens a second does one API process of vLLM pass on?

    python benchmarks/api_process.py [--requests 64 256 1024] [--steps 200]

Each engine step sends one token of each running request to the API process, in one message. The
script makes such messages with vLLM's own classes and measures, for each token, the time of the
API process's thread (`time.thread_time`): decoding the message, and `OutputProcessor` (stop
strings, text, logprobs, statistics), as `vf-vllm` sets it up for a rollout's request with packed
tokens. host_path.py has what a finished reply costs, and what OpenAI's form would. The rest of a
request, such as HTTP and rendering a chat, is counted per request and not here.
"""

import argparse
import gc
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from verifiers_rl.inference.vllm_versions import keep_logprobs_as_numbers


def messages(num_requests: int, steps: int) -> list[list[bytes]]:
    """Return what the engine would send, as frames."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackEncoder

    encoder = MsgpackEncoder()
    rng = np.random.default_rng(0)
    found = []
    for _ in range(steps):
        ids = rng.integers(0, 256, (num_requests, 1), dtype=np.int32)
        logprobs = -rng.random((num_requests, 1), dtype=np.float32)
        ranks = np.ones(num_requests, np.int32)
        outputs = [
            EngineCoreOutput(
                request_id=str(i),
                new_token_ids=ids[i].tolist(),
                new_logprobs=LogprobsLists(ids[i : i + 1], logprobs[i : i + 1], ranks[i : i + 1]),
            )
            for i in range(num_requests)
        ]
        frames = encoder.encode(EngineCoreOutputs(outputs=outputs))
        found.append([bytes(frame) for frame in frames])
    return found


def measure(num_requests: int, steps: int) -> tuple[float, float]:
    """Return microseconds a token of decoding and of processing."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.metrics.stats import IterationStats
    from vllm.v1.serial_utils import MsgpackDecoder

    from examples.warm_start import make_tokenizer

    processor = OutputProcessor(make_tokenizer(), log_stats=True)
    for i in range(num_requests):
        sampling = SamplingParams(
            max_tokens=10**6, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
        )
        request = EngineCoreRequest(
            request_id=str(i), prompt_token_ids=[1] * 64, mm_features=None,
            sampling_params=sampling, pooling_params=None, arrival_time=time.time(),
            lora_request=None, cache_salt=None, data_parallel_rank=None, external_req_id=str(i),
        )  # fmt: skip
        queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, str(i))
        processor.add_request(request, None, queue=queue)
        keep_logprobs_as_numbers(processor.request_states[str(i)])
    gc.collect()
    gc.freeze()  # as vLLM does when its API process has started
    decoder = MsgpackDecoder(EngineCoreOutputs)
    decoding = processing = 0.0
    for frames in messages(num_requests, steps):
        start = time.thread_time()
        outputs = decoder.decode(frames)
        middle = time.thread_time()
        processor.process_outputs(outputs.outputs, outputs.timestamp, IterationStats())
        processing += time.thread_time() - middle
        decoding += middle - start
    tokens = num_requests * steps
    return 1e6 * decoding / tokens, 1e6 * processing / tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    print("| requests | decoding, us/token | processing, us/token | tokens/s |")
    print("|" + " --- |" * 4)
    for number in options.requests:
        decoding, processing = measure(number, options.steps)
        print(
            f"| {number} | {decoding:.2f} | {processing:.2f} "
            f"| {1e6 / (decoding + processing):,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
