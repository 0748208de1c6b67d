"""Rollouts a second through the Orchestrator, against the same requests sent raw.

    python benchmarks/rollouts.py [--concurrent 64 256 1024] [--turns 1 4]
    python benchmarks/rollouts.py --scoring 0 1 10 100

A real vf-vllm serves a model of 0.85 M parameters to a `verifiers` environment of one turn and to
one of four, in a rollout worker, as by default: "v1". "env_from" has the same prompts, for one
turn. Their time includes environment, scoring, advantages and samples. "raw" posts the bodies of
v1's requests again with aiohttp, one for each rollout, from a process of its own: the turns of a
rollout one after the other, and as many rollouts at a time; it parses only JSON. Every reply has
the same number of tokens (`min_tokens`). The server's prefix cache is off, because raw would find
all of its prompts there.

All are measured alone, and while a real RLTrainer takes steps in this process: forward, backward
and optimizer on 64 samples of 64 tokens, on one thread. They take turns; each figure is the median
over all rounds but the first.

With --scoring: a reward function that spends so many milliseconds in Python, and a rollout worker
(`env_workers = "auto"`). Figures: rollouts a second, and training steps over those of training
alone.
"""

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import verifiers.v1 as vf1

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(Path(__file__).parent)]
GROUP, REPLY_TOKENS = 16, 8

__all__ = ["Talk", "TalkTaskset"]  # verifiers.v1 loads this module as a plugin


def question(number: int) -> str:
    return f"question {number:04d}: what is it that you say?"


def spend(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class TalkData(vf1.TaskData):
    scoring_s: float


class TalkTask(vf1.Task[TalkData, vf1.State, vf1.TaskConfig]):
    @vf1.reward
    async def length(self, trace: vf1.Trace) -> float:
        spend(self.data.scoring_s)
        return float(len(trace.nodes))


class TalkTasksetConfig(vf1.TasksetConfig):
    scoring_s: float = 0.0


class TalkTaskset(vf1.Taskset[TalkTask, TalkTasksetConfig]):
    def load(self) -> Iterator[TalkTask]:
        for i in range(512):
            data = TalkData(idx=i, prompt=question(i), scoring_s=self.config.scoring_s)
            yield TalkTask(data, self.config.task)


class TalkConfig(vf1.EnvConfig):
    agent: vf1.AgentConfig = vf1.AgentConfig(
        harness=vf1.HarnessConfig(id="null"), runtime=vf1.SubprocessConfig()
    )
    num_turns: int = 1


rollout: ContextVar[Any] = ContextVar("rollout", default=None)  # seen by the calls that it makes


def is_said(completion: str) -> float:
    return float(bool(completion))


class Talk(vf1.Env[TalkConfig]):
    async def run(self, task: vf1.Task, agents: vf1.Agents) -> None:
        rollout.set(object())
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            for turn in range(1, self.config.num_turns):
                await interaction.turn(f"and then, after {turn} of them?")


class Bench:
    """A model, its server, and what the measurements share."""

    def __init__(self, url: str, folder: str, tokenizer: Any) -> None:
        self.url, self.folder, self.tokenizer = url, folder, tokenizer
        self.model = f"{folder}/model"
        self.take_step: Callable[[], None]

    def make_trainer(self) -> None:
        """Let `take_step` take a step of a real RLTrainer, without rollouts. Called after
        `make_orchestrator`: an RLConfig resets the state of accelerate.
        """
        import numpy as np
        from warm_start import make_model

        from tests.helpers import StubSink, StubSource
        from verifiers_rl import RLConfig, RLTrainer
        from verifiers_rl.types import Batch, Sample

        length = 64
        mask = np.arange(length) >= length // 2
        samples = [
            Sample(ids, mask, np.full(length, -5.0), np.where(mask, 0, -1), mask * float(i % 2))
            for i, ids in enumerate(np.random.default_rng(0).integers(256, size=(64, length)))
        ]

        class OneBatch(StubSource):
            num_pending = 1  # type: ignore[assignment]

            def get(self) -> Batch:
                return Batch(0, 0, samples)

        args = RLConfig(
            output_dir=f"{self.folder}/run", use_cpu=True, use_lora=False, max_seq_len=length,
            temperature=1.0, max_steps=1, learning_rate=1e-5, disable_tqdm=True,
            micro_batch_size=64,
        )  # fmt: skip
        trainer = RLTrainer(
            make_model(self.tokenizer), None, args, self.tokenizer,
            orchestrator=OneBatch(), weight_sync=StubSink(),
        )  # fmt: skip
        optimizer = trainer.create_optimizer()

        def take_step() -> None:
            trainer.training_step(trainer.model, {})
            optimizer.step()
            optimizer.zero_grad()

        self.take_step = take_step

    def train_until(self, ended: Callable[[], bool]) -> float:
        """Train until `ended()`; return the steps per second."""
        start, steps = time.perf_counter(), 0
        while not ended():
            self.take_step()
            steps += 1
        return steps / (time.perf_counter() - start)

    def make_orchestrator(
        self, num_rollouts: int, concurrent: int, num_turns: int,
        scoring_s: float = 0.0, env_workers: Any = "auto", kind: str = "v1",
    ) -> Any:  # fmt: skip
        from verifiers_rl import Orchestrator, RLConfig, env_from
        from verifiers_rl.envs.make import make_runner
        from verifiers_rl.envs.v1_loading import load_v1_environment

        env: Any
        if kind == "env_from":
            env = env_from([{"prompt": question(number)} for number in range(512)], is_said)
        else:
            taskset = {"id": "rollouts", "scoring_s": scoring_s}
            env = load_v1_environment({"taskset": taskset, "num_turns": num_turns})
        args = RLConfig(
            output_dir=self.folder, use_cpu=True, temperature=1.0, max_seq_len=512,
            max_tokens=REPLY_TOKENS, batch_size=num_rollouts, rollouts_per_example=GROUP,
            env_workers=env_workers, max_concurrent=concurrent,
        )  # fmt: skip
        runner = make_runner(env, self.url, self.tokenizer, args)
        orchestrator = Orchestrator(runner, args, lambda: None)
        orchestrator.sampling["train"] |= {"ignore_eos": True, "min_tokens": REPLY_TOKENS}
        return orchestrator

    def record(self, num_rollouts: int, num_turns: int) -> list[list[Any]]:
        """Run a batch in this process; return the bodies of each rollout's requests."""
        from rollouts import rollout  # not __main__, whose Talk verifiers does not run

        from verifiers_rl.inference import ServerClient
        from verifiers_rl.inference.packed_tokens import pack_numbers

        conversations: dict[Any, list[Any]] = {}
        reply_to, message = ServerClient.reply_to, {"role": "user", "content": "."}

        async def recording(client: Any, body: Any, prompt_ids: Any, **kwargs: Any) -> Any:
            sent = {"tokens": pack_numbers(prompt_ids), "seeds": [None], "messages": [message]}
            conversations.setdefault(rollout.get(), []).append(body | sent)
            return await reply_to(client, body, prompt_ids, **kwargs)

        orchestrator = self.make_orchestrator(num_rollouts, 256, num_turns, env_workers=0)
        orchestrator.start()
        try:
            with patch.object(ServerClient, "reply_to", recording):
                orchestrator.submit(0, self.model, 0)
                orchestrator.get()
        finally:
            orchestrator.stop()
        if len(conversations) != num_rollouts:
            raise RuntimeError(f"{len(conversations)} conversations of {num_rollouts} rollouts")
        return list(conversations.values())


class Ours:
    """The environment, through the Orchestrator."""

    def __init__(self, bench: Bench, num_rollouts: int, *args: Any, **kwargs: Any):
        self.bench, self.num_tokens = bench, num_rollouts * REPLY_TOKENS
        self.orchestrator = bench.make_orchestrator(num_rollouts, *args, **kwargs)
        self.orchestrator.start()
        self.step = 0

    def begin(self) -> Future[Any]:
        self.orchestrator.submit(self.step, self.bench.model, 0)
        self.step += 1
        return self.orchestrator._pending[0].result

    def end(self, num_turns: int) -> None:
        batch = self.orchestrator.get()
        sampled = sum(rollout.num_sampled_tokens for rollout in batch.rollouts)
        if sampled != self.num_tokens * num_turns:
            raise RuntimeError(f"{sampled} tokens sampled")

    def close(self) -> None:
        self.orchestrator.stop()


class Raw:
    """The same requests, from a process of its own."""

    def __init__(self, url: str, conversations: list[Any], concurrent: int, folder: str) -> None:
        file = Path(folder, "conversations.json")
        file.write_text(json.dumps(conversations))
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--raw", url, str(file), str(concurrent)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pool = ThreadPoolExecutor(1)

    def begin(self) -> Future[Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.pool.submit(self.process.stdout.readline)

    def end(self, num_turns: int) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the raw client ended with {self.process.returncode}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.pool.shutdown()


def serve_raw(url: str, file: str, concurrent: str) -> None:
    """Send all conversations for each line of stdin, and answer with a line."""
    from verifiers_rl.inference.client import generation_key

    conversations = json.loads(Path(file).read_text())
    headers = {"Authorization": f"Bearer {generation_key(url)}"}
    target = f"{url}/v1/chat/completions/tokens"

    async def send() -> None:
        places = asyncio.Semaphore(int(concurrent))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

            async def one(turns: list[Any]) -> None:
                async with places:
                    for body in turns:
                        async with session.post(target, json=body) as reply:
                            reply.raise_for_status()
                            json.loads((await reply.read()).split(b" ", 2)[2])

            await asyncio.gather(*map(one, conversations))

    for _ in sys.stdin:
        asyncio.run(send())
        print("sent", flush=True)


def time_round(bench: Bench, played: Any, num_turns: int, trains: bool) -> float:
    """Return the seconds until all rollouts have ended."""
    start, end = time.perf_counter(), 0.0

    def note(future: Future[Any]) -> None:
        nonlocal end
        end = time.perf_counter()

    future = played.begin()
    future.add_done_callback(note)
    if trains:
        bench.train_until(future.done)
    future.result(600)
    played.end(num_turns)
    return end - start


@contextmanager
def closing_all(played: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for one in played.values():
            one.close()


def measure(bench: Bench, options: Any) -> None:
    print("| turns | concurrent | kind | alone, rollouts/s | / raw | beside training | / raw |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for num_turns in options.turns:
        most = max(*options.concurrent, 512 // num_turns)
        conversations = bench.record(most, num_turns)
        for concurrent in options.concurrent:
            num_rollouts = max(concurrent, 512 // num_turns)
            played: dict[str, Any] = {
                "raw": Raw(bench.url, conversations[:num_rollouts], concurrent, bench.folder)
            }
            with closing_all(played):
                for kind in ("env_from", "v1") if num_turns == 1 else ("v1",):
                    played[kind] = Ours(bench, num_rollouts, concurrent, num_turns, kind=kind)
                bench.make_trainer()
                seconds: dict[tuple[str, bool], list[float]] = {}
                for _ in range(options.rounds + 1):
                    for trains in (False, True):
                        for name, one in played.items():
                            seconds.setdefault((name, trains), []).append(
                                time_round(bench, one, num_turns, trains)
                            )
            rates = {
                key: num_rollouts / statistics.median(times[1:]) for key, times in seconds.items()
            }
            for name in played:
                cells = []
                for trains in (False, True):
                    rate = rates[name, trains]
                    cells += [f"{rate:.0f}", f"{rate / rates['raw', trains]:.2f}"]
                print(f"| {num_turns} | {concurrent} | {name} | {' | '.join(cells)} |", flush=True)


def measure_scoring(bench: Bench, options: Any) -> None:
    print("| scoring ms | rollouts/s | training steps over those alone |")
    print("| --- | --- | --- |")
    for scoring_ms in options.scoring:
        num_rollouts = 512 if scoring_ms <= 1 else 256 if scoring_ms <= 10 else 64
        one = Ours(bench, num_rollouts, 256, 1, scoring_s=scoring_ms / 1000)
        bench.make_trainer()
        rates, shares = [], []
        with closing_all({"v1": one}):
            for _ in range(options.rounds + 1):
                until = time.perf_counter() + 3
                alone = bench.train_until(lambda until=until: time.perf_counter() > until)
                start = time.perf_counter()
                future = one.begin()
                shares.append(bench.train_until(future.done) / alone)
                one.end(1)
                rates.append(num_rollouts / (time.perf_counter() - start))
        rate, share = (statistics.median(values[1:]) for values in (rates, shares))
        print(f"| {scoring_ms:g} | {rate:.0f} | {share:.2f} |", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--raw"]:
        return serve_raw(*sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrent", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scoring", type=float, nargs="+", metavar="MS")
    options = parser.parse_args()

    import verifiers_rl  # noqa: F401 (before transformers: see its torchvision_operators.py)

    # isort: split
    import torch
    from transformers import set_seed
    from warm_start import make_model, make_tokenizer

    from tests.conftest import running_server
    from verifiers_rl.inference.client import TOKEN_VARIABLE

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(16))
    with tempfile.TemporaryDirectory() as folder:
        set_seed(0)
        tokenizer = make_tokenizer()
        make_model(tokenizer).save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
        flags = ("--max-model-len", "512", "--max-num-seqs", "256", "--no-enable-prefix-caching")
        log, dtype = Path(folder, "server.log"), "float32"
        if torch.cuda.is_available():  # which serves the model; everything else is on the CPU
            flags, dtype = (*flags, "--gpu-memory-utilization", "0.3"), "bfloat16"
        with running_server(Path(folder, "model"), log, *flags, dtype=dtype) as server:
            bench = Bench(server.url, folder, tokenizer)
            (measure if options.scoring is None else measure_scoring)(bench, options)


if __name__ == "__main__":
    main()
