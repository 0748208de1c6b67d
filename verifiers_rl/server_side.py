"""What rank 0 has of the inference server: its client, the environment, rollouts, weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from verifiers_rl.data import ExampleOrder
from verifiers_rl.envs.make import make_runner, warn_of_replies_beyond_use
from verifiers_rl.inference.client import InferenceClient
from verifiers_rl.orchestrator import Orchestrator
from verifiers_rl.sync.agreement import check_agreement
from verifiers_rl.sync.weight_sync import WeightSync


class ServerSide(NamedTuple):
    """What `connect` makes.

    Attributes:
        check_agreement: compares both sides' logprobs; to be called once, with the model whose
            weights the server has just got, and the name by which requests reach them.
    """

    runner: Any
    orchestrator: Orchestrator
    weight_sync: WeightSync
    check_agreement: Callable[[Any, str], None]


def connect(policy: Any, env: Any, args: Any, tokenizer: Any) -> ServerSide:
    """Wait for the server, check that it goes with the policy, and make what talks to it.

    Args:
        policy: the model that is trained.
        env, args, tokenizer: of the `RLTrainer`.

    Raises:
        InvalidEnvironmentError: the environment cannot be trained on.
        InferenceServerError: no server, or another model's.
    """
    client = InferenceClient(args.vllm_server_host, args.vllm_server_port, args.vllm_server_timeout)
    runner = make_runner(env, client.base_url, tokenizer, args)
    status = client.wait_until_ready()
    if args.use_cpu and status["device"] == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # The server beside us has pinned its threads to the first half of the cores.
        num_cores = os.cpu_count() or 1
        torch.set_num_threads(max(num_cores - max(num_cores // 2, 1), 1))
    client.check_model(policy.config)
    warn_of_replies_beyond_use(runner, status["max_model_len"], args)
    weight_sync = WeightSync(
        client, args.weight_sync_backend, args.lora_sync, args.vllm_server_timeout
    )
    orchestrator = Orchestrator(
        runner,
        weight_sync.check_server,
        batch_size=args.batch_size,
        rollouts_per_example=args.rollouts_per_example,
        sampling_args=args.sampling_args(),
        max_concurrent=runner.max_concurrent,
        rollout_timeout_s=args.generation_timeout,
        order=ExampleOrder(runner.sizes("train"), runner.weights, args.shuffle, args.seed),
        group_filter=args.group_filter(),
        max_groups=args.max_groups_per_batch,
        advantage=args.advantage,
        mask_truncated_completions=args.mask_truncated_completions,
        zero_truncated_completions=args.zero_truncated_completions,
    )

    def check(model: Any, model_name: str) -> None:
        check_agreement(model, client, model_name, tokenizer, args)

    return ServerSide(runner, orchestrator, weight_sync, check)
