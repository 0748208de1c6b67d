"""vLLM's engine client for rollouts: every generation request of `vf-vllm` goes through it.

    server.py ──► vLLM's handler ──► RolloutEngine.generate ──► vLLM's handler ──► server.py
     Request      parses fields,      prompt, salt, first        message with       headers,
                  renders messages    token, policy versions     tool calls         packed tokens

vLLM's handlers know nothing of this. The engine client finds the `Request` in a context variable of
the request's task.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from verifiers_rl.inference.generation import Request, current_request

ONLY_THE_LAST = 2**30  # tokens between two outputs, more than any reply has


class SampledTokens(FlatLogprobs):
    """What vLLM keeps of the logprobs of a packed request: those of the sampled tokens and, for a
    sampling mask, those of the tokens that could be sampled in their place. In plain lists; vLLM's
    own container also has ranks and texts, and makes an object of each token on the way out.
    """

    has_mask = False

    def append_fast(
        self, token_ids: list[int], logprobs: list[float], *ranks_and_texts: Any
    ) -> None:
        self.start_indices.append(len(self.logprobs))
        # The sampled token comes first, then the likeliest ones in their order: as many as the
        # request of this step that asks for most wants. The sampling options give probability 0
        # to those that could not be sampled.
        num = len(logprobs) if self.has_mask else 1
        if num > 1 and logprobs[-1] == -math.inf:
            num = logprobs.index(-math.inf, 1)
        self.token_ids += token_ids[:num]
        self.logprobs += logprobs[:num]
        self.end_indices.append(len(self.logprobs))

    def __getitem__(self, index: Any) -> Any:
        return FlatLogprobs()  # vLLM copies a part of it for each output; nothing reads it


class RolloutEngine(AsyncLLM):
    """Attributes:
    cache_salt: of requests without one. A salt for each version of the weights keeps cached keys
        and values of older ones from being used.
    """

    cache_salt: str | None = None

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        request = current_request.get() or Request()
        request.num_completions += sampling_params.n
        if sampling_params.prompt_logprobs is not None and (why := self._reason_against_prompts()):
            raise ValueError(why)
        if request.tokens is not None:
            prompt = request.tokens.fit(prompt, sampling_params)
            options["reasoning_ended"] = None  # vLLM looked at the messages' tokens
        if self.cache_salt is not None and not prompt.get("cache_salt"):
            prompt = {**prompt, "cache_salt": self.cache_salt}
        # vLLM gives one output, the last, and only a request for deltas has one at its first token.
        is_whole = (
            sampling_params.n == 1 and sampling_params.output_kind == RequestOutputKind.FINAL_ONLY
        )
        if is_whole:
            sampling_params.output_kind = RequestOutputKind.DELTA
            sampling_params.stream_interval = ONLY_THE_LAST
        whole: Any = None
        async with aclosing(
            super().generate(prompt, sampling_params, request_id, **options)
        ) as outputs:
            async for output in outputs:
                request.begin()
                if not is_whole:
                    yield output
                elif whole is None:
                    whole = output
                else:
                    whole.add(output, aggregate=True)
        if whole is not None:
            request.end(whole.outputs[0])
            yield whole

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
    ) -> Any:
        queue = await super().add_request(request_id, prompt, params, *args, **options)
        request = current_request.get()
        state = self.output_processor.request_states.get(queue.request_id)
        if request is None or state is None:  # several completions have a state each
            return queue
        request.state = state
        if request.tokens is not None and request.tokens.is_packed:
            # Before its first token. vLLM's own would decode each token once more.
            kept = state.logprobs_processor
            kept.logprobs, kept.tokenizer = SampledTokens(), None
            kept.logprobs.has_mask = request.tokens.num_logprobs > 0
        return queue

    def _reason_against_prompts(self) -> str | None:
        """Return why a request for the logprobs of its prompt would end the engine, or None. With
        adapters on a CPU, vLLM computes the head's LoRA for one row of each request, and needs one
        row of each token of the prompt.
        """
        config = self.vllm_config
        if config.lora_config is None or config.device_config.device_type != "cpu":
            return None
        return (
            "prompt_logprobs: vLLM on a CPU dies at a prompt's logprobs if it has --enable-lora; "
            "start vf-vllm without that flag (the trainer's lora_sync = 'merged'), or ask a server "
            "of its own (a [[teacher]])"
        )
