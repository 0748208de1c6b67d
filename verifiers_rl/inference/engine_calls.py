"""Calls of vLLM's engines and workers. Each has a deadline and ends when an engine dies: vLLM
itself leaves the caller of a dead engine waiting.

`engine` is a `RolloutEngine` everywhere. With data parallelism it has several engine cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from fastapi import HTTPException

from verifiers_rl.sync.shared_buffers import GivenUpError

RESUME_DEADLINE_S = 30.0
POLL_S = 0.2  # vLLM has no event for the death of an engine


async def answer_of(engine: Any, call: Awaitable[Any], timeout_s: float, name: str) -> Any:
    """Await a call of the engines.

    Raises:
        RuntimeError: an engine died.
        TimeoutError: an engine did not answer within `timeout_s`.
    """
    task = asyncio.ensure_future(call)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    try:
        while not task.done():
            if engine.errored:
                raise RuntimeError("vLLM's engine died; see the server's log")
            if (left_s := deadline - loop.time()) <= 0:
                raise TimeoutError(f"vLLM's engine did not answer {name} within {timeout_s:g} s")
            await asyncio.wait([task], timeout=min(POLL_S, left_s))
    finally:
        task.cancel()
    return task.result()


async def call_engines(engine: Any, timeout_s: float, method: str, *args: Any) -> list[Any]:
    """Call a method of each engine core; return their results. vLLM's own calls of engine cores
    return the answer of the first one only. Raises what `answer_of` does.
    """
    call = engine.engine_core.call_utility_all_async(method, *args)
    return await answer_of(engine, call, timeout_s, method)


async def call_workers(engine: Any, timeout_s: float, method: str, *args: Any) -> list[Any]:
    """Call a method of `WeightSyncWorker` in all workers of all engines; return their results.

    vLLM gets no deadline: once that had passed, vLLM would take the workers' late answers for the
    answers to its next call.
    """
    answers = await call_engines(engine, timeout_s, "collective_rpc", method, None, args, None)
    return [answer for of_engine in answers for answer in of_engine]


async def run_in_workers(engine: Any, timeout_s: float, method: str, *args: Any) -> None:
    """Call a method that ends within about `timeout_s`, and returns None or the text of an error.

    Raises:
        HTTPException: with a worker's error; its log says where. If one worker failed and the
            others only heard that it left, with the error of the one that failed.
    """
    answers = await call_workers(engine, 2 * timeout_s + 60.0, method, *args)
    errors = [answer for answer in answers if answer is not None]
    if errors:
        first = min(errors, key=lambda error: error.startswith(GivenUpError.__name__))
        # A ValueError is about what the trainer sends, so sending it again would not help.
        raise HTTPException(400 if first.startswith(ValueError.__name__) else 500, first)


@asynccontextmanager
async def paused(engine: Any, timeout_s: float) -> AsyncIterator[None]:
    """Inside, no engine takes a step; requests keep the tokens that they have."""
    pausing = asyncio.ensure_future(engine.pause_generation(mode="keep", clear_cache=False))
    try:
        await answer_of(engine, asyncio.shield(pausing), timeout_s, "pause")
        yield
    finally:
        if not engine.errored:
            # Engines in lockstep that are still pausing refuse to resume.
            await asyncio.wait([pausing], timeout=RESUME_DEADLINE_S)
            await answer_of(engine, engine.resume_generation(), RESUME_DEADLINE_S, "resume")


@asynccontextmanager
async def updating(engine: Any, timeout_s: float) -> AsyncIterator[None]:
    """Inside, weights may change: new requests wait, and those that run are frozen.

    Engines of a mixture of experts with data parallelism run their steps in lockstep, with or
    without requests. One that takes an update early would leave the others waiting in a step.
    """
    config = engine.vllm_config
    engine.admits.clear()
    try:
        # Nothing is awaited in between, so no request can be missed.
        freezes = engine.output_processor.has_unfinished_requests()
        freezes |= config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe
        async with paused(engine, timeout_s) if freezes else nullcontext():
            yield
    finally:
        engine.admits.set()
