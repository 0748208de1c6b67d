"""Checks what `RLTrainer` is given, and builds what rank 0 has besides the model: the servers, the
environment, the orchestrator.
"""

from __future__ import annotations

import inspect
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Trainer

from verifiers_rl.advantages import AdvantageFn
from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.data import ExampleOrder
from verifiers_rl.envs.make import make_runner
from verifiers_rl.inference.checkpoint import model_error
from verifiers_rl.inference.client import LOOPBACK, InferenceClient, InferenceServerError
from verifiers_rl.losses import LossFn
from verifiers_rl.option_rules import did_you_mean
from verifiers_rl.process import parent
from verifiers_rl.report.trackers import tracker_error
from verifiers_rl.sync import ServerPool, WeightSync, check_agreement
from verifiers_rl.sync.sources import adapter_of, check_adapter, is_split
from verifiers_rl.types import BatchSource, WeightSink, missing_members

logger = logging.getLogger(__name__)

_DATA = (
    "data and rewards belong to env: RLTrainer(model, env_from(prompts, reward, eval_dataset=...), "
    "RLConfig(...)); docs/from_trl.md has an example"
)
_WITHOUT_EFFECT = {
    **dict.fromkeys(("train_dataset", "eval_dataset", "data_collator"), _DATA),
    "compute_metrics": "an evaluation logs the metrics of the environment",
    "preprocess_logits_for_metrics": "an evaluation logs the metrics of the environment",
    "compute_loss_func": "pass loss_fn",
    "model_init": "pass model",
    "tokenizer": "pass processing_class",
}


class Replaced(NamedTuple):
    """Parts that the caller gives in place of the `RLTrainer`'s own; None keeps its own part."""

    loss_fn: LossFn | None = None
    advantage_fn: AdvantageFn | None = None
    example_order: ExampleOrder | None = None
    orchestrator: BatchSource | None = None
    weight_sync: WeightSink | None = None


def check_variables(args: RLConfig) -> None:
    """Raise ConfigError if a variable of the environment (accelerate's, torch's, oneDNN's) would
    change the numbers of a step otherwise than the options say, or if a launcher has started
    processes that know nothing of each other.
    """
    # The first one that is there counts. On CPUs, the processes of a launcher find each other if
    # they are told to. A batch script of Slurm is one process, and has SLURM_NTASKS too.
    launchers = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    name = next(filter(os.environ.get, launchers), "")
    if name and os.environ[name] != "1" and args.world_size == 1:
        raise ConfigError(
            f"{name}={os.environ[name]}: a launcher has started so many processes, and each would "
            "train alone, in the same folder. Without GPUs set use_cpu=True (in a TOML gpus = 0 "
            "under [trainer]); let srun or mpirun start one process on each machine, and that one "
            f"the ranks, by torchrun or accelerate launch; or unset {name}, if only one trains"
        )
    for name, harmless, option, is_said in (
        ("ACCELERATE_MIXED_PRECISION", "no", "bf16", args.bf16),
        ("ACCELERATE_DYNAMO_BACKEND", "no", "torch_compile", False),  # it compiles other parts
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0", "tf32", args.tf32),
        ("DNNL_DEFAULT_FPMATH_MODE", "strict", "bf16", args.bf16),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "strict", "bf16", args.bf16),
    ):
        value = os.environ.get(name, harmless)
        if value.lower() != harmless and not is_said:
            raise ConfigError(
                f"{name}={value} in the environment, where a launcher may have set it, would "
                f"change the numbers of each step; unset it. The option in its place is {option}"
            )


def check_arguments(
    model: Any,
    env: Any,
    args: Any,
    processing_class: Any,
    replaced: Replaced,
    others: Mapping[str, Any],
) -> None:
    """Raise ConfigError for arguments that cannot work or would have no effect.

    Args:
        model, env, args, processing_class: as `RLTrainer` takes them.
        replaced: the parts that the caller gives.
        others: the arguments that go to `transformers.Trainer`.
    """
    if parent.is_rollout_worker:
        raise ConfigError(
            'an RLTrainer is made outside of `if __name__ == "__main__":`, where a rollout worker '
            "makes it again when it imports the script; move it inside, or set env_workers=0"
        )
    trainer = getattr(args, "TRAINER", RLConfig.TRAINER)
    for name in others:
        if name in _WITHOUT_EFFECT:
            raise ConfigError(f"{name} has no effect in {trainer}: {_WITHOUT_EFFECT[name]}")
        known = inspect.signature(Trainer.__init__).parameters.keys() | {*Replaced._fields}
        if name not in known:
            elsewhere = "options belong into RLConfig; see docs/from_trl.md"
            hint = _DATA if name.startswith("reward_") else did_you_mean(name, known, elsewhere)
            raise ConfigError(f"{trainer} takes no argument {name!r}: {hint}")
    if not isinstance(args, RLConfig):
        raise ConfigError(f"args: expected an RLConfig, got {type(args).__name__}")
    check_variables(args)
    if isinstance(processing_class, str):
        raise ConfigError(
            f"processing_class={processing_class!r}: expected a tokenizer, such as "
            "AutoTokenizer.from_pretrained(...); leave it out for the model's own"
        )
    _check_replaced(env, replaced)
    is_path = isinstance(model, str) and model.startswith(("/", ".", "~"))
    is_path = is_path and not (Path(model).expanduser() / "adapter_config.json").is_file()
    if problem := (model_error(model) if is_path else None) or tracker_error(args.report_to):
        raise ConfigError(problem)


def _check_replaced(env: Any, replaced: Replaced) -> None:
    """Raise ConfigError if a part lacks what is called, or makes another argument useless."""
    given = {"env": env, **replaced._asdict()}
    for name in ("loss_fn", "advantage_fn", "example_order"):
        function = given[name]
        if function is not None and not callable(function):
            hint = f"; one that has a name is set by RLConfig({name.removesuffix('_fn')}=...)"
            raise ConfigError(f"{name}={function!r} is no function{hint * name.endswith('_fn')}")
    for name, protocol in (("orchestrator", BatchSource), ("weight_sync", WeightSink)):
        part = given[name]
        lacking = missing_members(part, protocol) if part is not None else []
        if lacking:
            raise ConfigError(
                f"{name}: {type(part).__name__} has no {', '.join(lacking)}; "
                f"types.{protocol.__name__} says what it needs"
            )
    if replaced.orchestrator is not None:
        for name in ("env", "advantage_fn", "example_order"):
            if given[name] is not None:
                raise ConfigError(
                    f"{name}: without effect beside orchestrator, which makes the batches; give it "
                    "to your orchestrator, and leave it out here"
                )
    elif env is None:
        raise ConfigError("env is None: pass an environment, or an orchestrator that has its own")


# --- What rank 0 has besides the model ------------------------------------------------------------


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
        InferenceServerError: there is no server, or it lacks what the run needs.
    """
    if replaced.orchestrator is not None and replaced.weight_sync is not None:
        return replaced.orchestrator, replaced.weight_sync
    pool = make_pool(tokenizer, args)
    weight_sync: Any = pool if replaced.weight_sync is None else replaced.weight_sync
    adapter = adapter_of(policy) if weight_sync is pool else None
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
    if parent.ask_for_server:
        parent.ask_for_server(policy, adapter, args)
    status = pool.wait_until_ready()
    if adapter is not None:
        check_adapter(adapter, pool.lora_sync)
    is_beside = any(host in LOOPBACK for host, _ in args.servers())
    is_beside &= args.device.type == status["device"] == "cpu"
    if is_beside and "OMP_NUM_THREADS" not in os.environ:
        # The server on this machine has pinned its threads to the first half of the cores.
        num_cores = os.cpu_count() or 1
        torch.set_num_threads(num_cores - num_cores // 2)
    if runner is None:
        assert replaced.orchestrator is not None
        return replaced.orchestrator, weight_sync
    orchestrator = make_orchestrator(
        runner,
        args,
        weight_sync.check_server,
        router=pool if weight_sync is pool else None,
        advantage_fn=replaced.advantage_fn,
        example_order=replaced.example_order,
    )
    return orchestrator, weight_sync


def make_pool(tokenizer: Any, args: Any) -> ServerPool:
    """Make the pool of the run's servers, one or several."""

    def compare(model: Any, client: InferenceClient, model_name: str) -> None:
        if not is_split(model):  # else it would need all ranks
            check_agreement(model, client, model_name, tokenizer, args)

    make_sync = partial(
        WeightSync,
        backend=args.weight_sync_backend,
        timeout_s=args.vllm_server_timeout,
        trainer=secrets.token_hex(8),  # a server that was lost may still count on the hold before
    )
    return ServerPool(
        [InferenceClient(*address) for address in args.servers()],
        make_sync,
        partial(check_options, args),
        compare,
        args.lora_sync,
        args.vllm_server_timeout,
    )


def check_options(args: Any, url: str, status: dict[str, Any]) -> None:
    """Say what a server of this status lacks for options of the run.

    Raises:
        InferenceServerError: the run needs it.
    """
    if args.router_replay and not status["returns_experts"]:
        raise InferenceServerError(
            f"router_replay=True: the server at {url} returns no experts; start vf-vllm with "
            "--enable-return-routed-experts"
        )
    if (longest := status["max_model_len"]) < args.max_seq_len:
        raise InferenceServerError(
            f"max_seq_len={args.max_seq_len}: the server at {url} has max_model_len={longest}; "
            f"start it with --max-model-len {args.max_seq_len}, or set max_seq_len={longest}"
        )
    if not args.deterministic:
        return
    if not status["takes_seeds"]:
        raise InferenceServerError(
            f"deterministic=True: the server at {url} runs on a CPU, where vLLM's engine dies of a "
            "seed if a prompt is prefilled in parts; start vf-vllm with --no-enable-chunked-prefill"
        )
    if not status["batch_invariant"]:
        logger.warning(
            "deterministic=True: the last bits of the server's logits depend on the requests that "
            "run beside, so a token may differ now and then. On GPUs, start vf-vllm with "
            "VLLM_BATCH_INVARIANT=1; vLLM has no such mode on a CPU"
        )
