"""Which policy sampled which tokens of the requests that `vf-vllm` is answering.

    request comes in ──► vLLM's output processor knows it ──► it is finished ──► its reply begins
      0 tokens so far      counts its tokens                    all tokens are there

At a swap of weights the engines are paused, so a swap can cut a request in two only in the middle
part. This module watches the calls of the output processor, because they tell where a request is. A
swap waits only for tokens that the engines have sampled and the output processor has not counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class Request:
    """A request for one completion.

    Args:
        policy_version: of the weights when it came; None if the server has none of a trainer.
        on_begin: called when its first token was sampled.
        arrived: when it came (`time.monotonic`); None for now.

    Attributes:
        spans: (first token, policy version) of each policy that has sampled tokens of the request.
        state: what vLLM's output processor keeps about the request; None before it knows of it.
        queued_s: seconds from its arrival to its first token; None before that.
    """

    def __init__(
        self,
        policy_version: int | None,
        on_begin: Callable[[], None] = lambda: None,
        arrived: float | None = None,
    ) -> None:
        self.spans = [] if policy_version is None else [(0, policy_version)]
        self.state: Any = None
        self.queued_s: float | None = None
        self._arrived = time.monotonic() if arrived is None else arrived
        self._on_begin = on_begin

    def begin(self) -> None:
        self.queued_s = time.monotonic() - self._arrived
        self._on_begin()

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return 0 if self.state is None else self.state.detokenizer.num_output_tokens()


_request: ContextVar[Request | None] = ContextVar("request", default=None)


class InFlight:
    """The requests that have been passed on to vLLM, and whose replies have not begun."""

    def __init__(self) -> None:
        self.requests: set[Request] = set()
        self._states: dict[str, Any] = {}  # vLLM's states of its unfinished requests
        self._queued: dict[str, Request] = {}  # those without a token so far, by vLLM's id
        self._outputs: asyncio.Queue[Any] | None = None  # from the engines, not yet processed
        self._is_processing = False
        self._waiting: list[asyncio.Future[None]] = []

    def watch(self, engine: Any) -> None:
        """Watch the output processor of this `AsyncLLM`; call this before its first request."""
        if self._outputs is not None:
            return
        self._outputs = engine.engine_core.outputs_queue
        processor = engine.output_processor
        self._states = processor.request_states
        add, process = processor.add_request, processor.process_outputs
        end = processor.update_scheduler_stats

        def add_request(added: Any, *args: Any, **kwargs: Any) -> None:
            add(added, *args, **kwargs)
            request = _request.get()  # set in the request's task and in those it starts
            if request is not None:
                request.state = self._states[added.request_id]
                self._queued[added.request_id] = request

        def process_outputs(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._is_processing = True  # one chunk of what was taken from the queue
            for output in outputs if self._queued else ():
                if (request := self._queued.pop(output.request_id, None)) is not None:
                    request.begin()
            return process(outputs, *args, **kwargs)

        def update_scheduler_stats(*args: Any, **kwargs: Any) -> None:
            end(*args, **kwargs)  # vLLM calls it after the last chunk
            self._is_processing = False
            if self._is_idle():
                for waiting in self._waiting:
                    if not waiting.done():
                        waiting.set_result(None)
                self._waiting.clear()

        processor.add_request = add_request
        processor.process_outputs = process_outputs
        processor.update_scheduler_stats = update_scheduler_stats

    @contextmanager
    def passing_on(self, request: Request | None) -> Iterator[None]:
        """Inside, what vLLM is asked for belongs to this request."""
        if request is not None and request.spans:
            self.requests.add(request)
        context = _request.set(request)
        try:
            yield
        finally:
            _request.reset(context)
            if request is not None:
                self.requests.discard(request)
                if request.state is not None:
                    self._queued.pop(request.state.request_id, None)

    def begin_reply(self, request: Request) -> str:
        """Return the value of the header that says which policy sampled which tokens. Later swaps
        do not change it.
        """
        self.requests.discard(request)
        return format_spans(request.spans)

    def _is_idle(self) -> bool:
        return not self._is_processing and (self._outputs is None or self._outputs.empty())

    async def all_counted(self, timeout_s: float) -> None:
        """Wait until the output processor has counted every token that the engines sampled before
        they were paused. An engine reports the pause after it has sent its last tokens, but these
        tokens may not be processed yet.

        Raises:
            TimeoutError: the output processor did not count them within `timeout_s`.
        """
        if self._is_idle():
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            await asyncio.wait_for(waiting, timeout_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"vLLM did not process within {timeout_s:g} s what its engines had sampled; "
                "see the server's log"
            ) from error

    def forget_versions(self) -> None:
        """Claim no version for the requests that go on: a push has failed, so their next tokens may
        be of two versions mixed. Called as `swap` is.
        """
        for request in list(self.requests):
            if request.state is None or request.state.request_id in self._states:
                request.spans.clear()
                self.requests.discard(request)

    def swap(self, policy_version: int) -> None:
        """Record that another policy samples from here on. Called while the engines are paused and
        all tokens are counted.
        """
        for request in self.requests:
            if request.state is None:
                start = 0  # vLLM is still preparing it
            elif request.state.request_id in self._states:
                start = request.state.detokenizer.num_output_tokens()
            else:
                continue  # finished: only its reply has not begun
            if request.spans[-1][0] == start:
                request.spans.pop()  # no token was sampled under that version
            request.spans.append((start, policy_version))


def format_spans(spans: list[tuple[int, int]]) -> str:
    return ",".join(f"{start}:{version}" for start, version in spans)
