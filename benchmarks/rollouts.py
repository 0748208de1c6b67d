"""Rollouts a second through the Orchestrator, against the same requests sent raw.

    python benchmarks/rollouts.py [--concurrent 64 256 1024] [--clients ...] [--rounds 5]
    python benchmarks/rollouts.py --workers [0 1 2] [--rounds 5]
    python benchmarks/rollouts.py --v1 [--rounds 5]

Run it with .venv-classic/bin/python, which `make CLASSIC=1 install` makes: it needs classic
environments.

A real vf-vllm serves a model of 0.85 M parameters to a `verifiers` environment of one turn and to
one of four. "Ours" includes environment, scoring, advantages and samples. "Raw" posts the request
bodies of ours again with aiohttp: the turns of a rollout one after the other, and as many rollouts
at a time as ours; it parses only JSON. Every reply has the same number of tokens (`min_tokens`).
The server's prefix cache is off, because raw would find all of its prompts there. Ours and raw take
turns; each figure is the median over all rounds but the first. Clients other than the default are
measured only at the second concurrency.

With --workers: the same environment of one turn runs in this process (0) or in the given number of
others, with a reward function that spends some time in Python. Meanwhile this thread trains a small
model as a trainer would. Figures: rollouts a second, and training speed over that of training
alone.

With --v1: the same conversations as an environment of verifiers.v1, in our chat harness and in the
stock `null` harness (only 16 rollouts, each a Python process). Figures: rollouts a second, and that
rate over the rate of the classic environment.
"""

import argparse
import asyncio
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import verifiers as vf
import verifiers.v1 as vf1
from datasets import Dataset

if find_spec("verifiers.legacy") is None:
    sys.exit(
        "benchmarks/rollouts.py: no classic environments here; run it with .venv-classic/bin/python"
    )

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
GROUP, REPLY_TOKENS, TIMEOUT_S = 16, 8, 300.0
CLIENT_TYPES = ("openai_chat_completions_token", "openai_chat_completions", "renderer")


__all__ = ["Talk", "TalkTaskset"]  # verifiers.v1 loads this module as a plugin


class Conversation(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [vf.UserMessage(content=f"and then, after {len(state['trajectory'])} of them?")]


def load_environment(num_turns: int, scoring_s: float = 0.0) -> vf.Environment:
    questions = [f"question {i:04d}: what is it that you say?" for i in range(512)]
    dataset = Dataset.from_dict({"question": questions, "answer": ["a"] * len(questions)})

    def length(completion: Any) -> float:
        end = time.perf_counter() + scoring_s
        while time.perf_counter() < end:
            pass
        return float(len(completion))

    return Conversation(
        dataset=dataset, eval_dataset=dataset, rubric=vf.Rubric(funcs=[length]), max_turns=num_turns
    )


class TalkTask(vf1.Task[vf1.TaskData, vf1.State, vf1.TaskConfig]):
    @vf1.reward
    async def length(self, trace: vf1.Trace) -> float:
        return float(len(trace.nodes))


class TalkTaskset(vf1.Taskset[TalkTask, vf1.TasksetConfig]):
    def load(self) -> Iterator[TalkTask]:
        for i in range(512):
            prompt = f"question {i:04d}: what is it that you say?"
            yield TalkTask(vf1.TaskData(idx=i, prompt=prompt), self.config.task)


class TalkConfig(vf1.EnvConfig):
    agent: vf1.AgentConfig = vf1.AgentConfig(
        harness=vf1.HarnessConfig(id="null"), runtime=vf1.SubprocessConfig()
    )
    num_turns: int = 1


class Talk(vf1.Env[TalkConfig]):
    async def run(self, task: vf1.Task, agents: vf1.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            for turn in range(1, self.config.num_turns):
                await interaction.turn(f"and then, after {turn} of them?")


class Recorder:
    """Keeps the bodies that a client posts, by rollout (a rollout is one asyncio task)."""

    def __init__(self, client: Any) -> None:
        self.conversations: dict[Any, list[tuple[str, Any]]] = {}
        self.client = client
        self.post = client.post
        client.post = self.record

    async def record(self, path: str, **kwargs: Any) -> Any:
        key = asyncio.current_task()
        self.conversations.setdefault(key, []).append((path, kwargs["body"]))
        return await self.post(path, **kwargs)


async def send_raw(url: str, conversations: list[list[tuple[str, Any]]], concurrent: int) -> float:
    """Send all conversations; return the seconds that it took."""
    places = asyncio.Semaphore(concurrent)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one(turns: list[tuple[str, Any]]) -> None:
            async with places:
                for path, body in turns:
                    target = path if path.startswith("http") else f"{url}/v1{path}"
                    async with session.post(target, json=body) as reply:
                        reply.raise_for_status()
                        await reply.json()

        start = time.perf_counter()
        await asyncio.gather(*map(one, conversations))
        return time.perf_counter() - start


def measure(url: str, model: str, tokenizer: Any, options: Any) -> None:
    from verifiers_rl import Orchestrator, RLConfig
    from verifiers_rl.envs.make import make_runner

    print("| turns | client_type | concurrent | ours, rollouts/s | raw, rollouts/s | ours / raw |")
    print("| --- | --- | --- | --- | --- | --- |")
    for num_turns in (1, 4):
        for client_type in options.clients:
            is_default = client_type == CLIENT_TYPES[0]
            if num_turns == 1 and not is_default:
                continue  # their first turn is like the default's, or nearly
            env = load_environment(num_turns)
            for concurrent in options.concurrent if is_default else options.concurrent[1:2]:
                num_rollouts = max(concurrent, 512 // num_turns)
                args = RLConfig(
                    output_dir=options.folder, use_cpu=True, temperature=1.0, max_seq_len=512,
                    max_tokens=REPLY_TOKENS, client_type=client_type,
                    batch_size=num_rollouts, rollouts_per_example=GROUP,
                )  # fmt: skip
                runner = make_runner(env, url, tokenizer, args)
                sampling = args.sampling_args()
                sampling["extra_body"] |= {"ignore_eos": True, "min_tokens": REPLY_TOKENS}
                orchestrator = Orchestrator(
                    runner, lambda: None, batch_size=num_rollouts, rollouts_per_example=GROUP,
                    sampling_args=sampling, max_concurrent=concurrent,
                )  # fmt: skip
                orchestrator.start()
                times: dict[str, list[float]] = {"ours": [], "raw": []}
                try:
                    recorder = Recorder(runner._client.client)
                    for step in range(options.rounds + 1):
                        recorder.conversations.clear()
                        start = time.perf_counter()
                        orchestrator.submit(step, model, 0)
                        batch = orchestrator.get()
                        times["ours"].append(time.perf_counter() - start)
                        sampled = sum(rollout.num_sampled_tokens for rollout in batch.rollouts)
                        if sampled != num_rollouts * num_turns * REPLY_TOKENS:
                            raise RuntimeError(f"{sampled} tokens sampled")
                        sent = list(recorder.conversations.values())
                        times["raw"].append(asyncio.run(send_raw(url, sent, concurrent)))
                finally:
                    orchestrator.stop()
                ours, raw = (num_rollouts / statistics.median(t[1:]) for t in times.values())
                print(
                    f"| {num_turns} | {client_type} | {concurrent} | {ours:.0f} | {raw:.0f} | "
                    f"{ours / raw:.2f} |",
                    flush=True,
                )


def measure_workers(url: str, model: str, tokenizer: Any, options: Any) -> None:
    import torch
    from warm_start import make_model

    from verifiers_rl import Orchestrator, RLConfig
    from verifiers_rl.envs.make import make_runner

    torch.set_num_threads(1)
    trained = make_model(tokenizer)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    ids = torch.randint(len(tokenizer), (4, 32))

    def train_until(ended: Callable[[], bool]) -> float:
        """Train until `ended()`; return the steps per second."""
        start, steps = time.perf_counter(), 0
        while not ended():
            trained(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        return steps / (time.perf_counter() - start)

    num_rollouts = 512
    print("| scoring ms | env_workers | rollouts/s | training steps over those alone |")
    print("| --- | --- | --- | --- |")
    for scoring_s in (0.0, 0.01):
        env = vf.load_environment("rollouts", num_turns=1, scoring_s=scoring_s)
        for env_workers in options.workers:
            args = RLConfig(
                output_dir=options.folder, use_cpu=True, temperature=1.0, max_seq_len=512,
                max_tokens=REPLY_TOKENS, batch_size=num_rollouts, rollouts_per_example=GROUP,
                env_workers=env_workers,
            )  # fmt: skip
            orchestrator = Orchestrator(
                make_runner(env, url, tokenizer, args), lambda: None, batch_size=num_rollouts,
                rollouts_per_example=GROUP, sampling_args=args.sampling_args(),
            )  # fmt: skip
            orchestrator.start()
            rates, shares = [], []
            try:
                for step in range(options.rounds + 1):
                    end = time.perf_counter() + 2
                    alone = train_until(lambda end=end: time.perf_counter() > end)
                    start = time.perf_counter()
                    orchestrator.submit(step, model, 0)
                    batch, *_ = orchestrator._pending[0]
                    shares.append(train_until(batch.done) / alone)
                    orchestrator.get()
                    rates.append(num_rollouts / (time.perf_counter() - start))
            finally:
                orchestrator.stop()
            rate, share = (statistics.median(values[1:]) for values in (rates, shares))
            print(f"| {1000 * scoring_s:.0f} | {env_workers} | {rate:.0f} | {share:.2f} |")


def measure_v1(url: str, model: str, tokenizer: Any, options: Any) -> None:
    from verifiers_rl import Orchestrator, RLConfig
    from verifiers_rl.envs import v1 as environments_v1
    from verifiers_rl.envs.make import make_runner

    print("| turns | environment | rollouts/s | over classic |")
    print("| --- | --- | --- | --- |")
    ours = environments_v1.with_local_chat
    for num_turns in (1, 4):
        table = {"taskset": {"id": "rollouts"}, "num_turns": num_turns}
        v1 = environments_v1.load_v1_environment(table)
        classic_rate = 0.0
        for name, env, num_rollouts, num_rounds in (
            ("classic", load_environment(num_turns), 512 // num_turns, options.rounds),
            ("v1, chat harness", v1, 512 // num_turns, options.rounds),
            ("v1, stock null harness", v1, 16, 1),
        ):
            is_stock = name.endswith("stock null harness")
            environments_v1.with_local_chat = (lambda env: env) if is_stock else ours
            args = RLConfig(
                output_dir=options.folder, use_cpu=True, temperature=1.0, max_seq_len=512,
                max_tokens=REPLY_TOKENS, batch_size=num_rollouts, rollouts_per_example=GROUP,
            )  # fmt: skip
            sampling = args.sampling_args()
            sampling["extra_body"] |= {"ignore_eos": True, "min_tokens": REPLY_TOKENS}
            orchestrator = Orchestrator(
                make_runner(env, url, tokenizer, args), lambda: None, batch_size=num_rollouts,
                rollouts_per_example=GROUP, sampling_args=sampling, max_concurrent=256,
            )  # fmt: skip
            orchestrator.start()
            times = []
            try:
                for step in range(num_rounds + 1):
                    start = time.perf_counter()
                    orchestrator.submit(step, model, 0)
                    batch = orchestrator.get()
                    times.append(time.perf_counter() - start)
                    sampled = sum(rollout.num_sampled_tokens for rollout in batch.rollouts)
                    if sampled != num_rollouts * num_turns * REPLY_TOKENS:
                        raise RuntimeError(f"{sampled} tokens sampled")
            finally:
                orchestrator.stop()
            rate = num_rollouts / statistics.median(times[1:])
            classic_rate = classic_rate or rate
            print(f"| {num_turns} | {name} | {rate:.1f} | {rate / classic_rate:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrent", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--clients", choices=CLIENT_TYPES, nargs="+", default=CLIENT_TYPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="*")
    parser.add_argument("--v1", action="store_true")
    options = parser.parse_args()

    from transformers import set_seed
    from warm_start import make_model, make_tokenizer

    from tests.conftest import running_server
    from verifiers_rl.inference.client import TOKEN_VARIABLE

    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(16))
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        set_seed(0)
        tokenizer = make_tokenizer()
        make_model(tokenizer).save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
        flags = ("--max-model-len", "512", "--max-num-seqs", "256", "--no-enable-prefix-caching")
        with running_server(Path(folder, "model"), Path(folder, "server.log"), *flags) as server:
            if options.v1:
                measure_v1(server.url, f"{folder}/model", tokenizer, options)
            elif options.workers is None:
                measure(server.url, f"{folder}/model", tokenizer, options)
            else:
                options.workers = options.workers or [0, 1, 2]
                measure_workers(server.url, f"{folder}/model", tokenizer, options)


if __name__ == "__main__":
    main()
