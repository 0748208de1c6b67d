"""Connects rank 0 to the inference server: client, environment, orchestrator, weight sync."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from verifiers_rl.advantages import AdvantageFn
from verifiers_rl.arguments import Replaced
from verifiers_rl.config import ConfigError
from verifiers_rl.data import ExampleOrder, order_examples
from verifiers_rl.envs.make import Environments, make_runner
from verifiers_rl.inference.client import InferenceClient, InferenceServerError
from verifiers_rl.inference.pool import ReplicaPool
from verifiers_rl.models import warn_of_experts
from verifiers_rl.sync import (
    WeightSync,
    check_adapter,
    check_agreement,
    choose_lora_sync,
    is_split,
    push_to_all,
)
from verifiers_rl.types import BatchSource, WeightSink

logger = logging.getLogger(__name__)


class ServerSide(NamedTuple):
    """The parts that `connect` makes.

    Attributes:
        check_agreement: compares the logprobs of trainer and server. The caller calls it once,
            with the model whose weights the server has just received, and the name by which
            requests reach these weights. None if `weight_sync` is replaced, because the weights
            may then go to another server than our `vf-vllm`.
    """

    orchestrator: BatchSource
    weight_sync: WeightSink
    check_agreement: Callable[[Any, str], None] | None


def connect(
    policy: Any,
    env: Any,
    args: Any,
    tokenizer: Any,
    replaced: Replaced,
    make_orchestrator: Callable[..., BatchSource],
) -> ServerSide:
    """Wait for the server, check that it serves the policy's model, and make the parts that talk to
    it, except those that are replaced. If both are replaced, there is no server to wait for.

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
    orchestrator, weight_sync = replaced.orchestrator, replaced.weight_sync
    if orchestrator is not None and weight_sync is not None:
        return ServerSide(orchestrator, weight_sync, None)
    clients = [
        InferenceClient(host, port, args.vllm_server_timeout) for host, port in args.servers()
    ]
    client = clients[0]
    pool = _make_pool(clients, policy, tokenizer, args) if args.vllm_servers else None
    runner = advantage_fn = None
    if orchestrator is None:  # made before waiting for the server, so its errors come at once
        advantage_fn = replaced.advantage_fn or args.make_advantage()
        runner = make_runner(env, client.base_url, tokenizer, args)
        if replaced.example_order is not None and len(set(runner.weights)) > 1:
            raise ConfigError(
                f"example_order decides which environment comes next, so weights {runner.weights} "
                "of the environments have no effect; leave them out"
            )
    peft_config = None
    if weight_sync is None and hasattr(policy, "peft_config"):
        peft_config = policy.peft_config["default"]
        # What "auto" will be is not known yet; less can be sent as an adapter than merged.
        check_adapter(peft_config, args.lora_sync if args.lora_sync != "auto" else "merged")
    status = (pool or client).wait_until_ready()
    if peft_config is not None:
        check_adapter(peft_config, choose_lora_sync(args.lora_sync, status))
    if args.use_cpu and status["device"] == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # The server on this machine has pinned its threads to the first half of the cores.
        num_cores = os.cpu_count() or 1
        torch.set_num_threads(max(num_cores - max(num_cores // 2, 1), 1))
    if pool is not None:
        pool.check_models(policy.config)
        weight_sync = pool
    else:
        client.check_model(policy.config)
        _check_server(client.base_url, status, args)
    if weight_sync is None:
        lora_sync = choose_lora_sync(args.lora_sync, status)
        weight_sync = WeightSync(
            client, args.weight_sync_backend, lora_sync, args.vllm_server_timeout
        )
    if runner is not None:
        orchestrator = _orchestrate(
            make_orchestrator,
            runner,
            weight_sync,
            args,
            advantage_fn,
            replaced.example_order,
            pool,
        )
    assert orchestrator is not None

    def check(model: Any, model_name: str) -> None:
        check_agreement(model, client, model_name, tokenizer, args)

    # A pool compares each of its servers itself, also one that comes later.
    is_ours = replaced.weight_sync is None and pool is None
    return ServerSide(orchestrator, weight_sync, check if is_ours else None)


def _check_server(url: str, status: dict[str, Any], args: Any) -> None:
    """Raise InferenceServerError if the server lacks what an option of the run needs."""
    if args.router_replay and not status.get("returns_experts"):
        raise InferenceServerError(
            f"router_replay=True: the server at {url} returns no experts; start vf-vllm with "
            "--enable-return-routed-experts (vLLM 0.31)"
        )
    if args.deterministic:
        check_determinism(status, url)


def check_determinism(status: dict[str, Any], url: str) -> None:
    """Say what `deterministic` lacks at a server of this status.

    Raises:
        InferenceServerError: a request with a seed may kill its engine.
    """
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


def _make_pool(clients: list[InferenceClient], policy: Any, tokenizer: Any, args: Any) -> Any:
    trainer = secrets.token_hex(8)  # a server that was lost may still count on the hold before

    def make_sync(client: InferenceClient) -> WeightSync:
        lora_sync = choose_lora_sync(args.lora_sync, client.status())
        return WeightSync(
            client, args.weight_sync_backend, lora_sync, args.vllm_server_timeout, trainer=trainer
        )

    def check(model: Any, client: InferenceClient, model_name: str) -> None:
        client.check_model(policy.config)
        _check_server(client.base_url, client.status(), args)
        if not is_split(model):  # else it would need all ranks
            check_agreement(model, client, model_name, tokenizer, args)

    return ReplicaPool(clients, make_sync, push_to_all, check, args.vllm_server_timeout)


def _orchestrate(
    make_orchestrator: Callable[..., BatchSource],
    runner: Environments,
    weight_sync: WeightSink,
    args: Any,
    advantage_fn: AdvantageFn | None,
    example_order: ExampleOrder | None,
    pool: ReplicaPool | None,
) -> BatchSource:
    if example_order is None:
        example_order = partial(
            order_examples, weights=runner.weights, shuffle=args.shuffle, seed=args.seed
        )
    return make_orchestrator(
        runner,
        weight_sync.check_server,
        batch_size=args.batch_size,
        rollouts_per_example=args.rollouts_per_example,
        sampling_args=args.sampling_args(),
        max_concurrent=args.max_concurrent,
        eval_sampling_args=args.eval_sampling_args(),
        rollout_timeout_s=args.generation_timeout,
        scoring_timeout_s=runner.scoring_timeout_s,
        example_order=example_order,
        group_filter=args.make_filter(),
        max_groups=args.max_groups_per_batch,
        advantage_fn=advantage_fn,
        mask_truncated_completions=args.mask_truncated_completions,
        zero_truncated_completions=args.zero_truncated_completions,
        router=pool,
        seed=args.seed if args.deterministic else None,
    )
