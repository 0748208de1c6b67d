"""The server's half of the protocol that `weight_sync.py` compares with: one HTTP call a parameter.

It follows TRL's vLLM server mode (`update_named_param`): each call announces one tensor and is
answered at once; then the worker receives that tensor alone and gives it to vLLM's `load_weights`.
It runs in the real vLLM: `vf-vllm` takes the two classes by `--worker-extension-cls` and
`--middleware`.

This file is separate from `weight_sync.py` because it imports vLLM, which the trainer's process
must not.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.inference.worker import WeightSyncWorker
from verifiers_rl.sync.plan import torch_dtype

CALL_TIMEOUT_S = 300.0


class PerParameterWorker(WeightSyncWorker):
    """Receives tensors over the transport that `weight_sync_connect` made.

    With `load` false they are only received: vLLM cannot load a part of an adapter.
    """

    def per_parameter_begin(self, load: bool) -> None:
        if load:
            initialize_layerwise_reload(self.model_runner.get_model())

    def per_parameter_receive(self, name: str, dtype: str, shape: list[int], load: bool) -> None:
        num_bytes = math.prod(shape) * torch_dtype(dtype).itemsize
        buffer = self._weight_sync_transport.receive(num_bytes)()
        tensor = buffer.view(torch_dtype(dtype)).view(shape)
        if load:
            model = self.model_runner.get_model()
            with torch.device(self.device), set_current_vllm_config(self.vllm_config):
                model.load_weights([(name, tensor.to(self.device))])

    def per_parameter_finish(self, load: bool) -> None:
        if not load:
            return
        model = self.model_runner.get_model()
        with (
            torch.device(self.device),
            set_current_vllm_config(self.vllm_config),
            torch.no_grad(),
        ):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            # The tied LM head, as in WeightSyncWorker.
            if isinstance(model.lm_head.quant_method, UnquantizedEmbeddingMethod):
                model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


class PerParameterRoutes:
    """ASGI middleware: POST /per_parameter/begin, receive (one tensor), finish."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.pending: list[asyncio.Task] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/per_parameter/"):
            await self.app(scope, receive, send)
            return
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        request = Request(scope, receive)
        wanted = f"Bearer {os.environ[TOKEN_VARIABLE]}"
        given = request.headers.get("authorization", "")
        step = scope["path"].removeprefix("/per_parameter/")
        if not secrets.compare_digest(given.encode(), wanted.encode()):
            status = 401
        elif step not in ("begin", "receive", "finish"):
            status = 404
        else:
            status = 200
            await self.call(request.app.state.engine_client, step, await request.json())
        await JSONResponse({}, status)(scope, receive, send)

    async def call(self, engine: Any, step: str, body: dict[str, Any]) -> None:
        call = engine.collective_rpc(f"per_parameter_{step}", timeout=CALL_TIMEOUT_S, kwargs=body)
        if step == "receive":
            # Answer before the call is done, as TRL does: the worker waits for our caller's tensor.
            self.pending.append(asyncio.create_task(call))
            return
        await asyncio.gather(*self.pending)
        self.pending.clear()
        await call
        if step == "finish" and not await engine.reset_prefix_cache():
            raise RuntimeError("vLLM could not reset its prefix cache")
