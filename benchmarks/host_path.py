"""What does a token cost from the server to the microbatch? Packed against OpenAI's form.

    python benchmarks/host_path.py [--rollouts 512] [--lengths 1024 4096 16384] [--batch 4194304]

Four parts, each in a process of its own. "Before" is the way with one Python object or more for
each token, written out here as plainly as possible; "after" is the code of this repository.

    server    what vLLM's API server does with each token from the engine, and the reply's bytes:
              the real classes of vLLM
    trainer   reply's bytes -> Turn -> Sample -> Batch -> plan -> microbatches, all on
              one thread; with a worker, the bytes of its message -> Sample -> and so on
    memory    peak of the same way, by tracemalloc, with at most 1 M tokens
    ranks     two gloo ranks take a batch, from rank 0's `Batch` to the samples of each

Times are seconds of the thread that holds the interpreter's lock (`time.thread_time`), but for the
ranks, where they are seconds of the clock.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
PROMPT, VOCAB = 64, 259
MAX_TOKENS = 16_384  # of a microbatch, or one sample if that is longer
MEMORY_TOKENS = 2**20  # tracemalloc is slow


def sampled_by_the_server(length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(0, 256, length, dtype=np.int32)
    return token_ids, -rng.random(length, dtype=np.float32)


def node_of(token_ids: list[int], logprobs: list[float]) -> Any:
    """What verifiers keeps of a reply: lists."""
    return SimpleNamespace(
        sampled=True, token_ids=[*range(PROMPT), *token_ids], logprobs=logprobs, message=None,
        mask=[False] * PROMPT + [True] * len(token_ids),
    )  # fmt: skip


# --- Trainer: before ------------------------------------------------------------------------------


def openai_reply(token_ids: np.ndarray, logprobs: np.ndarray) -> bytes:
    content = [
        {"token": chr(97 + i % 26), "logprob": p, "bytes": [97 + i % 26], "top_logprobs": []}
        for i, p in zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    ]
    choice = {"index": 0, "token_ids": token_ids.tolist(), "logprobs": {"content": content}}
    return json.dumps({"choices": [choice], "prompt_token_ids": [*range(PROMPT)]}).encode()


def sample_of_openai_reply(reply: bytes) -> dict[str, list[Any]]:
    (choice,) = json.loads(reply)["choices"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    node = node_of(choice["token_ids"], logprobs)
    sample: dict[str, list[Any]] = {"ids": [], "mask": [], "logprobs": [], "versions": []}
    own = iter(node.logprobs)
    for token, is_sampled in zip(node.token_ids, node.mask, strict=True):
        sample["ids"].append(token)
        sample["mask"].append(is_sampled)
        sample["logprobs"].append(next(own) if is_sampled else 0.0)
        sample["versions"].append(3 if is_sampled else -1)
    sample["advantages"] = [0.5 if in_loss else 0.0 for in_loss in sample["mask"]]
    return sample


def train_on_lists(samples: list[dict[str, list[Any]]]) -> None:
    import torch

    from verifiers_rl.packing import plan_microbatches

    lengths = [len(sample["ids"]) for sample in samples]
    assert sum(sum(sample["mask"]) for sample in samples)
    versions = [v for sample in samples for v in sample["versions"] if v >= 0]
    assert sum(versions) / len(versions) == 3
    (plan,) = plan_microbatches(lengths, MAX_TOKENS)
    for rows in plan:
        width = max(sum(lengths[i] for i in row) for row in rows)
        fields = {name: torch.zeros(len(rows), width) for name in samples[0]}
        fields["ids"] = fields["ids"].long()
        for r, row in enumerate(rows):
            start = 0
            for i in row:
                stop = start + lengths[i]
                for name, values in samples[i].items():
                    fields[name][r, start:stop] = torch.tensor(values)
                start = stop


# --- Trainer: after -------------------------------------------------------------------------------


def packed_reply(token_ids: np.ndarray, logprobs: np.ndarray) -> bytes:
    from verifiers_rl.inference.packed_tokens import pack_sampled

    choice = {"index": 0, "logprobs": {"content": []}}
    packed = pack_sampled(token_ids, logprobs)
    return json.dumps({"packed_tokens": packed, "choices": [choice]}).encode()


def sample_of_packed_reply(reply: bytes) -> Any:
    from verifiers_rl.envs.base import Turn, samples_from_turns
    from verifiers_rl.inference import ChatReply
    from verifiers_rl.inference.packed_tokens import unpack_sampled

    sampled = unpack_sampled(json.loads(reply)["packed_tokens"])
    turn = Turn([*range(PROMPT)], ChatReply({}, None, sampled, None, None))
    (sample,) = samples_from_turns([turn], policy_version=3)
    sample.set_advantage(0.5)
    return sample


def frame_from_worker(token_ids: np.ndarray, logprobs: np.ndarray) -> bytes:
    """A rollout as a worker process sends it; the work until here is the worker's."""
    from verifiers_rl.envs.workers import pack_group, sender
    from verifiers_rl.types import Rollout

    sample = sample_of_packed_reply(packed_reply(token_ids, logprobs))
    packed, arrays = pack_group([Rollout(0, "", samples=[sample], reward=0.5, num_turns=1)])
    written = bytearray()

    async def send() -> None:
        writer = SimpleNamespace(write=written.extend, is_closing=bool)
        sender(cast(Any, writer))(arrays, group=0, **packed)
        await asyncio.sleep(0)  # what is sent in a turn of the loop is written behind it

    asyncio.run(send())
    return bytes(written)


def sample_of_frame(data: bytes) -> Any:
    from verifiers_rl.envs.workers import receive, unpack_group

    async def read() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        return await receive(reader)

    message, arrays = asyncio.run(read())
    (rollout,) = unpack_group(message, arrays)
    rollout.set_advantage(0.5)
    return rollout.samples[0]


def train_on_arrays(samples: list[Any]) -> None:
    from verifiers_rl.losses import weigh_samples
    from verifiers_rl.packing import collate, plan_microbatches
    from verifiers_rl.types import Batch

    batch = Batch(3, 3, samples)
    sizes = batch.sizes
    assert batch.staleness()["staleness"] == 0
    (plan,) = plan_microbatches(sizes.lengths.tolist(), MAX_TOKENS)
    weights, _ = weigh_samples(sizes.num_loss_tokens, sizes.rollout_ids, "token", 1.0)
    for rows in plan:
        collate(batch.samples, rows, weights, 0)


WAYS: dict[str, tuple[Callable[..., bytes], Callable[..., Any], Callable[..., None]]] = {
    "before": (openai_reply, sample_of_openai_reply, train_on_lists),
    "after": (packed_reply, sample_of_packed_reply, train_on_arrays),
    "after, with a worker": (frame_from_worker, sample_of_frame, train_on_arrays),
}


def cost_in_trainer(way: str, num_rollouts: int, length: int, traced: bool) -> dict[str, float]:
    """Microseconds, or bytes at the peak if `traced`, for each token of prompt and reply."""
    make_reply, sample_of, train_on = WAYS[way]
    # A few replies over and over: the bytes of all replies at once are no part of the way.
    replies = [make_reply(*sampled_by_the_server(length, seed)) for seed in range(4)]
    train_on([sample_of(replies[0])])  # imports
    if traced:
        tracemalloc.start()
    start = time.thread_time()
    train_on([sample_of(replies[i % len(replies)]) for i in range(num_rollouts)])
    seconds = time.thread_time() - start
    num_tokens = num_rollouts * (PROMPT + length)
    if traced:
        return {"trainer B/token": tracemalloc.get_traced_memory()[1] / num_tokens}
    return {
        "trainer us/token": 1e6 * seconds / num_tokens,
        "reply B/token": sum(map(len, replies)) / (len(replies) * length),
    }


# --- Server ---------------------------------------------------------------------------------------


def cost_in_server(way: str, num_rollouts: int, length: int) -> dict[str, float]:
    """Microseconds of the API server's thread for each sampled token."""
    import verifiers_rl  # noqa: F401 (before vLLM: see its torchvision_operators.py)

    # isort: split
    from starlette.responses import JSONResponse
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionResponse,
        ChatCompletionResponseChoice,
        ChatMessage,
    )
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.serve.engine.protocol import UsageInfo
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    from examples.warm_start import make_tokenizer
    from verifiers_rl.inference.engine import keep_arrays
    from verifiers_rl.inference.generation import TokenRequest
    from verifiers_rl.inference.packed_tokens import pack_numbers

    tokenizer = make_tokenizer()
    asked: Any = SimpleNamespace(sampling_params=SamplingParams(logprobs=0))
    chat: Any = OpenAIServingChat.__new__(OpenAIServingChat)
    chat.return_tokens_as_token_ids = False

    def serve(token_ids: np.ndarray, logprobs: np.ndarray) -> bytes:
        is_packed = way == "after"
        fields = {"tokens": pack_numbers([1]), "seeds": [None]}
        request = TokenRequest(fields, VOCAB, 2 * MAX_TOKENS)
        processor = LogprobsProcessor.from_new_request(tokenizer, asked)
        if is_packed:
            keep_arrays(processor)
        num = length if is_packed else 1  # the engine sends one token a step, or all at the end
        for at in range(0, length, num):
            here = slice(at, at + num)
            ranks = np.ones(num, np.int32)
            new = LogprobsLists(token_ids[here, None], logprobs[here, None], ranks)
            processor.update_from_output(EngineCoreOutput("r", [], new_logprobs=new))
        ids = token_ids.tolist()
        kept = processor.logprobs
        ended = SimpleNamespace(index=0, token_ids=ids, logprobs=kept, weight_versions=None)
        content = None
        if not is_packed:
            content = chat._create_chat_logprobs(
                token_ids=ids, top_logprobs=processor.logprobs, tokenizer=tokenizer,
                num_output_top_logprobs=0,
            )  # fmt: skip
        choice = ChatCompletionResponseChoice(
            index=0, message=ChatMessage(role="assistant", content=""), logprobs=content,
            token_ids=None if is_packed else ids,
        )  # fmt: skip
        response = ChatCompletionResponse(model="m", choices=[choice], usage=UsageInfo())
        if is_packed:
            return request.line_of(ended, response.model_dump_json()).encode()
        return bytes(JSONResponse(response.model_dump()).body)

    inputs = [sampled_by_the_server(length, seed) for seed in range(4)]
    serve(*inputs[0])
    start = time.thread_time()
    for i in range(num_rollouts):
        serve(*inputs[i % len(inputs)])
    return {"server us/token": 1e6 * (time.thread_time() - start) / (num_rollouts * length)}


# --- Ranks ----------------------------------------------------------------------------------------


def broadcast_lists(samples: list[dict[str, list[Any]]], device: Any) -> list[Any]:
    """Every rank gets every sample, as five float64 a token."""
    import torch
    from torch import distributed

    is_source = distributed.get_rank() == 0
    lengths = torch.tensor([len(sample["ids"]) for sample in samples])
    count = torch.tensor(len(lengths))
    distributed.broadcast(count, 0)
    lengths = lengths if is_source else torch.empty(int(count), dtype=torch.int64)
    distributed.broadcast(lengths, 0)
    fields = torch.empty((5, int(lengths.sum())), dtype=torch.float64)
    if is_source:
        names = samples[0]
        columns = [[float(v) for sample in samples for v in sample[name]] for name in names]
        fields = torch.tensor(columns, dtype=torch.float64)
    distributed.broadcast(fields, 0)
    if is_source:
        return samples
    received = []
    for part in fields.split(lengths.tolist(), dim=1):
        ids, mask, logprobs, versions, advantages = part.tolist()
        kinds = ((int, ids), (bool, mask), (float, logprobs), (int, versions), (float, advantages))
        received.append([[kind(v) for v in values] for kind, values in kinds])
    return received


def share_batch(samples: list[Any], device: Any) -> Any:
    from verifiers_rl.distributed import broadcast_batch
    from verifiers_rl.types import Batch

    return broadcast_batch(Batch(3, 3, samples) if samples else None).samples


def cost_in_ranks(way: str, num_tokens: int) -> dict[str, float]:
    """Seconds until both ranks have the batch; called in each rank, and returned by rank 0."""
    import torch
    from torch import distributed

    from verifiers_rl import RLConfig
    from verifiers_rl.distributed import connect_hosts, let_gloo_threads_finish

    connect_hosts(RLConfig(use_cpu=True))
    is_source = distributed.get_rank() == 0
    length = MAX_TOKENS - PROMPT
    samples = []
    if is_source:
        make_reply, sample_of, _ = WAYS[way]
        replies = [make_reply(*sampled_by_the_server(length, seed)) for seed in range(4)]
        samples = [sample_of(replies[i % 4]) for i in range(num_tokens // MAX_TOKENS)]
    share = broadcast_lists if way == "before" else share_batch
    share(samples[:1], torch.device("cpu"))  # imports, connections
    distributed.barrier()
    start = time.monotonic()
    received = share(samples, torch.device("cpu"))
    distributed.barrier()
    seconds = time.monotonic() - start
    assert len(received)
    distributed.destroy_process_group()
    let_gloo_threads_finish()
    return {"two ranks s": seconds} if is_source else {}


# --- All of it ------------------------------------------------------------------------------------


def in_a_process(*arguments: Any, num_ranks: int = 1) -> dict[str, float]:
    launcher = []
    if num_ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, __file__, "--part", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


def run_part(kind: str, way: str, *numbers: str) -> dict[str, float]:
    sizes = [int(number) for number in numbers]
    if kind == "server":
        return cost_in_server(way, *sizes)
    if kind == "ranks":
        return cost_in_ranks(way, *sizes)
    return cost_in_trainer(way, *sizes, traced=kind == "memory")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16_384])
    parser.add_argument("--batch", type=int, default=2**22, help="tokens that two ranks share")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        if result := run_part(*options.part):
            print(json.dumps(result))
        return
    print("| rollouts x tokens | what | before | after | before / after | with a worker |")
    print("| --- | --- | --- | --- | --- | --- |")

    def compare(shape: str, kind: str, *sizes: int, num_ranks: int = 1) -> None:
        ways = list(WAYS) if kind in ("trainer", "memory") else list(WAYS)[:2]
        costs = [in_a_process(kind, way, *sizes, num_ranks=num_ranks) for way in ways]
        for name in costs[0]:
            before, after, *others = (cost[name] for cost in costs)
            with_worker = f"{others[0]:.3f}" if others else ""
            print(
                f"| {shape} | {name} | {before:.3f} | {after:.3f} | {before / after:.1f} | "
                f"{with_worker} |",
                flush=True,
            )

    for length in options.lengths:
        shape = f"{options.rollouts} x {length}"
        compare(shape, "server", max(options.rollouts // 16, 1), length)
        compare(shape, "trainer", options.rollouts, length)
        compare(shape, "memory", min(options.rollouts, max(MEMORY_TOKENS // length, 1)), length)
    compare(f"{options.batch} tokens", "ranks", options.batch, num_ranks=2)


if __name__ == "__main__":
    main()
