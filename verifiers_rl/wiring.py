"""Builds what rank 0 has besides the model: the servers, the environment, the orchestrator."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from verifiers_rl.arguments import Replaced
from verifiers_rl.config import ConfigError
from verifiers_rl.data import order_examples
from verifiers_rl.envs.make import make_runner
from verifiers_rl.inference.client import InferenceClient, InferenceServerError
from verifiers_rl.models import warn_of_experts
from verifiers_rl.sync import ServerPool, WeightSync, check_adapter, check_agreement, is_split
from verifiers_rl.types import BatchSource, WeightSink

logger = logging.getLogger(__name__)


def make_source_and_sink(
    policy: Any,
    env: Any,
    args: Any,
    tokenizer: Any,
    replaced: Replaced,
    make_orchestrator: Callable[..., BatchSource],
) -> tuple[BatchSource, WeightSink]:
    """Make the orchestrator and the weight sync, except what is replaced, and wait for the servers.
    If both are replaced, there is no server to wait for.

    Args:
        policy: the model that is trained.
        env, args, tokenizer, replaced: those of the `RLTrainer`.
        make_orchestrator: the class `Orchestrator`, or its copy in a fork.

    Raises:
        ConfigError: example_order is given beside environments of different weights, or the server
            could not reproduce the adapter.
        InvalidEnvironmentError: the environment cannot be trained on.
        InferenceServerError: there is no server, or it serves another model.
    """
    if replaced.loss_fn is None:
        warn_of_experts(policy, args)
    if replaced.orchestrator is not None and replaced.weight_sync is not None:
        return replaced.orchestrator, replaced.weight_sync
    pool = make_pool(policy, tokenizer, args)
    weight_sync: Any = pool if replaced.weight_sync is None else replaced.weight_sync
    sends_adapter = weight_sync is pool and hasattr(policy, "peft_config")
    adapter = policy.peft_config["default"] if sends_adapter else None
    runner = None
    # What can be wrong without a server comes before the wait for it.
    if replaced.orchestrator is None:
        runner = make_runner(env, pool.replicas[0].url, tokenizer, args)
        if replaced.example_order is not None and len(set(runner.weights)) > 1:
            raise ConfigError(
                f"example_order decides which environment comes next, so weights {runner.weights} "
                "of the environments have no effect; leave them out"
            )
    if adapter is not None:
        # What "auto" will be is not known yet; less can be sent as an adapter than merged.
        check_adapter(adapter, args.lora_sync if args.lora_sync != "auto" else "merged")
    status = pool.wait_until_ready()
    if adapter is not None:
        check_adapter(adapter, pool.lora_sync)
    if args.use_cpu and status["device"] == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # The server on this machine has pinned its threads to the first half of the cores.
        num_cores = os.cpu_count() or 1
        torch.set_num_threads(max(num_cores - max(num_cores // 2, 1), 1))
    if runner is None:
        assert replaced.orchestrator is not None
        return replaced.orchestrator, weight_sync
    orchestrator = make_orchestrator(
        runner,
        weight_sync.check_server,
        batch_size=args.batch_size,
        rollouts_per_example=args.rollouts_per_example,
        sampling_args=args.sampling_args(),
        max_concurrent=args.max_concurrent,
        eval_sampling_args=args.eval_sampling_args(),
        rollout_timeout_s=args.generation_timeout,
        scoring_timeout_s=runner.scoring_timeout_s,
        example_order=replaced.example_order
        or partial(order_examples, weights=runner.weights, shuffle=args.shuffle, seed=args.seed),
        group_filter=args.make_filter(),
        max_groups=args.max_groups_per_batch,
        advantage_fn=replaced.advantage_fn or args.make_advantage(),
        mask_truncated_completions=args.mask_truncated_completions,
        zero_truncated_completions=args.zero_truncated_completions,
        router=pool if weight_sync is pool else None,
        seed=args.seed if args.deterministic else None,
    )
    return orchestrator, weight_sync


def make_pool(policy: Any, tokenizer: Any, args: Any) -> ServerPool:
    """Make the pool of the run's servers, one or several."""

    def check_server(client: InferenceClient) -> None:
        client.check_model(policy.config)
        check_options(client.base_url, client.status(), args)

    def compare(model: Any, client: InferenceClient, model_name: str) -> None:
        if not is_split(model):  # else it would need all ranks
            check_agreement(model, client, model_name, tokenizer, args)

    timeout_s = args.vllm_server_timeout
    make_sync = partial(
        WeightSync,
        backend=args.weight_sync_backend,
        timeout_s=timeout_s,
        trainer=secrets.token_hex(8),  # a server that was lost may still count on the hold before
    )
    clients = [InferenceClient(host, port, timeout_s) for host, port in args.servers()]
    return ServerPool(clients, make_sync, check_server, compare, args.lora_sync, timeout_s)


def check_options(url: str, status: dict[str, Any], args: Any) -> None:
    """Say what a server of this status lacks for options of the run.

    Raises:
        InferenceServerError: the run needs it.
    """
    if args.router_replay and not status.get("returns_experts"):
        raise InferenceServerError(
            f"router_replay=True: the server at {url} returns no experts; start vf-vllm with "
            "--enable-return-routed-experts"
        )
    if not args.deterministic:
        return
    if not status.get("takes_seeds", True):
        raise InferenceServerError(
            f"deterministic=True: the server at {url} runs on a CPU, where vLLM's engine dies of a "
            "seed if a prompt is prefilled in parts; start vf-vllm with --no-enable-chunked-prefill"
        )
    if not status.get("batch_invariant"):
        logger.warning(
            "deterministic=True: the last bits of the server's logits depend on the requests that "
            "run beside, so a token may differ now and then. On GPUs, start vf-vllm with "
            "VLLM_BATCH_INVARIANT=1; vLLM has no such mode on a CPU"
        )
