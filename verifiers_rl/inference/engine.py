"""vLLM's engine client for rollouts: every generation request of `vf-vllm` goes through it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from verifiers_rl.inference.generation import check_grammar, current_request


def refuse_beside_adapters(lora: Any) -> None:
    """Raise ValueError if a request for the logprobs of its prompt could end the engine. Where the
    head may have an adapter, vLLM computes that for one row of each request, while the prompt has
    one row of each token. On a CPU that is an error. A GPU reads or writes past the rows that are
    there, until vLLM's pull requests 51597 and 53842 are in a release.

    Args:
        lora: vLLM's `LoRAConfig`; None without --enable-lora.
    """
    if lora is not None and (lora.target_modules is None or "lm_head" in lora.target_modules):
        raise ValueError(
            "prompt_logprobs: vLLM can die at a prompt's logprobs if it has --enable-lora; start "
            "vf-vllm without that flag (the trainer's lora_sync = 'merged'), or with "
            "--lora-target-modules and the names of the adapted layers, or ask a server of its own "
            "(a [[teacher]])"
        )


class RolloutEngine(AsyncLLM):
    """Attributes:
    admits: cleared while weights change; requests that come then wait.
    cache_salt: of requests without one. A salt for each version of the weights keeps cached keys
        and values of older ones from being used.
    """

    cache_salt: str | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.admits = asyncio.Event()
        self.admits.set()

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        check_grammar(sampling_params.structured_outputs)
        scored = (sampling_params.prompt_logprobs, sampling_params.prompt_logprob_token_ids)
        if any(one is not None for one in scored):
            refuse_beside_adapters(self.vllm_config.lora_config)
        if (asked := current_request.get()) is None:
            outputs: Any = super().generate(prompt, sampling_params, request_id, **options)
        else:
            options["reasoning_ended"] = None  # vLLM looked at the messages' tokens
            prompt = asked.fit(prompt, sampling_params)
            given = asked.seeds, prompt, sampling_params, request_id
            outputs = self._complete_each(*given, **options)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def _complete_each(
        self, seeds: list[Any], prompt: Any, sampling: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """Yield a completion for each seed, when it has ended. vLLM's own `n` has one seed for all
        of them, and yields them together.
        """

        async def complete(number: int) -> Any:
            own = copy.copy(sampling)
            own.n, own.seed = 1, seeds[number]
            name = f"{request_id}-{number}"
            async for output in super(RolloutEngine, self).generate(prompt, own, name, **options):
                ended = output  # the only one, because nothing is streamed
            ended.outputs[0].index = number
            return ended

        tasks = [asyncio.create_task(complete(number)) for number in range(len(seeds))]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
    ) -> Any:
        await self.admits.wait()  # from here to vLLM's own list of requests, nothing is awaited
        if self.cache_salt is not None:  # also beside a salt that the request has
            salt = self.cache_salt + (prompt.get("cache_salt") or "")
            prompt = {**prompt, "cache_salt": salt}
        queue = await super().add_request(request_id, prompt, params, *args, **options)
        if current_request.get() is not None:
            state = self.output_processor.request_states[queue.request_id]
            keep_arrays(state.logprobs_processor)  # before its first token
        return queue


def keep_arrays(processor: Any) -> None:
    """Let vLLM's `LogprobsProcessor` of a new request keep the logprobs of sampled tokens as they
    come. Its own way makes objects of each, and decodes each token once more.
    """
    processor.logprobs = parts = list[Any]()
    take_others = processor.update_from_output

    def take(output: Any) -> None:
        if output.new_logprobs is not None:
            parts.append(output.new_logprobs)
            output.new_logprobs = None
        take_others(output)

    processor.update_from_output = take
