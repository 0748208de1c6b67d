"""What do tools cost? Rollouts a second with tools in the worker, in processes, and without tools.

    python benchmarks/tools.py [--rollouts 512] [--with-processes 8] [--concurrent 64] [--rounds 5]

The environment has the shape of verifiers' glossary (tests/v1/glossary_like.py): one look-up tool,
of each rollout's own. A rollout calls it once and answers, so it has two model calls. A stand-in
for vf-vllm, in a process of its own, answers at once; so the figures are those of environment,
harness and Orchestrator. Four environments take turns, in each of several rounds:

    in the worker   as it is
    in processes    an MCP server process for each rollout, as verifiers starts it; only
                    `--with-processes` rollouts, in the first round alone
    two turns       no tools, as many model calls: a user says what the tool would
    one turn        no tools, and half as many model calls

Figures: rollouts a second, medians over all rounds but the first, and their ratios.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
PLUGINS = [str(ROOT / "tests/v1"), str(Path(__file__).parent)]  # of verifiers.v1
sys.path[:0] = [str(ROOT), *PLUGINS]

import numpy as np  # noqa: E402
import verifiers.v1 as vf  # noqa: E402
from glossary_like import LookupConfig, LookupTask  # noqa: E402

__all__ = ["NoToolsEnv", "NoToolsTaskset"]  # verifiers.v1 loads this module as a plugin
GROUP = 16


class NoToolsTask(LookupTask):
    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []


class NoToolsTaskset(vf.Taskset[NoToolsTask, LookupConfig]):
    def load(self) -> list[NoToolsTask]:
        return [NoToolsTask(vf.TaskData(idx=0, prompt="four"), self.config.task)]


class NoToolsConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(harness=vf.HarnessConfig(id="null"))
    num_turns: int = 1


class NoToolsEnv(vf.Env[NoToolsConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            for _ in range(1, self.config.num_turns):
                await interaction.turn("8")


def serve(folder: str) -> None:
    """Answer model calls: with a tool call if there are tools and no result yet, else with text."""
    from aiohttp import web
    from transformers import AutoTokenizer

    from verifiers_rl.inference.packed_tokens import pack_sampled, unpack_numbers

    tokenizer = AutoTokenizer.from_pretrained(folder)
    (result,) = tokenizer("<|tool|>", add_special_tokens=False).input_ids
    call = {"id": "call-1", "type": "function"}
    call["function"] = {"name": "double", "arguments": '{"x": 4}'}
    said = {
        "stop": ("it is 8", {"content": "it is 8", "tool_calls": []}),
        "tool_calls": ('<tool_call>{"x": 4}', {"content": None, "tool_calls": [call]}),
    }
    replies = {}
    for finish, (text, message) in said.items():
        tokens = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        choice = {"index": 0, "finish_reason": finish, "logprobs": {"content": []}}
        choice["message"] = {"role": "assistant", "refusal": None, **message}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "usage": None}
        packed = pack_sampled(tokens, np.full(len(tokens), -0.5))
        reply |= {"choices": [choice], "packed_tokens": packed}
        replies[finish] = json.dumps(reply).encode()

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        has_result = result in unpack_numbers(body["tokens"])
        finish = "tool_calls" if body.get("tools") and not has_result else "stop"
        places = range(len(body["seeds"]))
        return web.Response(body=b"".join(b"%d 0:0 %b\n" % (n, replies[finish]) for n in places))

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/v1/chat/completions/tokens", answer)
    runner = web.AppRunner(app, access_log=None)

    async def run() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until its end

    asyncio.run(run())


@contextmanager
def stand_in(folder: str) -> Iterator[str]:
    """The URL of `serve` in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.wait(30)


def measure(url: str, tokenizer: Any, options: Any) -> dict[str, float]:
    """Return the rollouts a second of each environment."""
    from verifiers_rl import Orchestrator, RLConfig
    from verifiers_rl.envs.make import make_runner
    from verifiers_rl.envs.v1_loading import load_v1_environment

    with_tools = {"taskset": {"id": "glossary_like"}, "agent": {"harness": {"id": "null"}}}
    without = {"taskset": {"id": "tools"}, "id": "tools"}
    tables: dict[str, tuple[dict[str, Any], int, int]] = {
        "in the worker": (with_tools, options.rollouts, options.rounds),
        "in processes": (with_tools, options.with_processes, 0),
        "two turns": (without | {"num_turns": 2}, options.rollouts, options.rounds),
        "one turn": (without, options.rollouts, options.rounds),
    }
    played = {}
    for name, (table, num_rollouts, rounds) in tables.items():
        if not num_rollouts:
            continue
        group = min(GROUP, num_rollouts)
        has_processes = name == "in processes"
        if has_processes:  # here, not in the workers
            patch("verifiers_rl.envs.tools.runs_here", lambda toolset: False).start()
        args = RLConfig(
            output_dir=options.folder, use_cpu=True, max_seq_len=512, max_tokens=64,
            batch_size=num_rollouts, rollouts_per_example=group,
            max_concurrent=options.concurrent, env_workers=0 if has_processes else "auto",
        )  # fmt: skip
        runner = make_runner(load_v1_environment(table), url, tokenizer, args)
        orchestrator = Orchestrator(runner, args, lambda: None)
        orchestrator.start()
        played[name] = (orchestrator, num_rollouts, rounds, list[float]())
    try:
        for number in range(options.rounds + 1):
            for name, (orchestrator, _, rounds, times) in played.items():
                if number > rounds:
                    continue
                start = time.perf_counter()
                orchestrator.submit(number, "m", 0)
                batch = orchestrator.get()
                times.append(time.perf_counter() - start)
                num_turns = {rollout.num_turns for rollout in batch.rollouts}
                if num_turns != {1 if name == "one turn" else 2}:
                    raise RuntimeError(f"{name}: rollouts of {num_turns} turns")
    finally:
        for orchestrator, *_ in played.values():
            orchestrator.stop()
    return {
        name: num_rollouts / statistics.median(times[1:] or times)
        for name, (_, num_rollouts, _, times) in played.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--with-processes", type=int, default=8)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return

    from tests.helpers import load_example

    os.environ["PYTHONPATH"] = os.pathsep.join([*PLUGINS, os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("VERIFIERS_RL_TOKEN", "benchmark")
    with tempfile.TemporaryDirectory() as options.folder:
        tokenizer = load_example("warm_start").make_tokenizer(["<|tool|>", "<tool_call>"])
        tokenizer.save_pretrained(options.folder)
        with stand_in(options.folder) as url:
            rates = measure(url, tokenizer, options)
    print("| tools | rollouts/s | in the worker / it |")
    print("| --- | --- | --- |")
    for name, rate in rates.items():
        print(f"| {name} | {rate:.1f} | {rates['in the worker'] / rate:.2f} |")


if __name__ == "__main__":
    main()
