"""`RLConfig`: every option once, with its help and its range check."""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
import os
from collections.abc import Collection, Container, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, SkipValidation, ValidationError
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType

from verifiers_rl.advantages import ADVANTAGES, AdvantageFn, of_rewards
from verifiers_rl.data import group_by_role
from verifiers_rl.losses import (
    DEFAULT_MASKS,
    LOSSES,
    MASKS,
    AdaptiveKL,
    LossFn,
    MaskFn,
    add_terms,
    bind_options,
    entropy_bonus,
    reference_kl,
    with_masks,
)
from verifiers_rl.option_rules import (
    PATH_RULE,
    ConfigError,
    NotNegativeInt,
    NotNegativeNumber,
    PositiveInt,
    PositiveNumber,
    Share,
    ShareBelow1,
    Texts,
    can_be_path,
    checked_as,
    checkers,
    did_you_mean,
    load_user_code,
    must,
    one_of,
    problem_of,
)
from verifiers_rl.process.secret_names import without_secrets
from verifiers_rl.types import MAX_MASK, Rollout

DEFAULT_MASK = 256  # top_k where a sampling mask needs one
# Options that one environment may have for itself. Not the temperature: the trainer computes all
# logprobs of a batch at one temperature.
_CUTS = ("top_p", "top_k", "min_p")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
SAMPLING_OF_ONE_ENV = (
    "max_tokens",
    *_CUTS,
    *_PENALTIES,
    "stop",
    "include_stop_str_in_output",
    "chat_template_kwargs",
)


UNTRAINED = {"sampling_mask": False, "router_replay": False}  # where nothing is trained on replies

_T = TypeVar("_T")


# --- Rules ----------------------------------------------------------------------------------------

UPLOAD = "a run uploads nothing; upload its final model by `hf upload`, as docs/resume.md shows"
# Options of TrainingArguments that this trainer cannot honour, and what to use.
# Setting one is an error, not a no-op.
_UNUSED_BASE_OPTIONS = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "auto_find_batch_size"),
        "set batch_size and micro_batch_size",
    ),
    **dict.fromkeys(
        (
            "prediction_loss_only",
            "per_device_eval_batch_size",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "eval_accumulation_steps",
            "include_for_metrics",
            "batch_eval_metrics",
            "bf16_full_eval",
            "fp16_full_eval",
        ),
        "evaluation runs the environment; see eval_strategy and eval_examples",
    ),
    **dict.fromkeys(
        (
            "dataloader_drop_last",
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context",
            "dataloader_in_order",
            "remove_unused_columns",
            "label_names",
            "train_sampling_strategy",
            "length_column_name",
        ),
        "data comes from the environment; see batch_size, shuffle and seed",
    ),
    "save_only_model": "a run goes on from its checkpoints, with their optimizer",
    **dict.fromkeys(
        (
            "use_liger_kernel",
            "liger_kernel_config",
            "parallelism_config",
            "torch_empty_cache_steps",
        ),
        "it is not supported yet",
    ),
    **dict.fromkeys(
        ("torch_compile_backend", "torch_compile_mode"),
        "set torch_compile; rows of any length need the default backend and mode",
    ),
    "average_tokens_across_devices": "the loss is always divided by the loss tokens of all ranks",
    "num_train_epochs": "set max_steps",
    **dict.fromkeys(
        (
            "push_to_hub",
            "hub_model_id",
            "hub_strategy",
            "hub_token",
            "hub_always_push",
            "hub_revision",
        ),
        UPLOAD,
    ),
    "label_smoothing_factor": "the loss is loss_fn",
    "fp16": "set bf16",
    "data_seed": "set seed",
    "neftune_noise_alpha": "noise in the trainer alone would make importance ratios wrong",
    "include_num_input_tokens_seen": "tokens are counted in num_tokens",
    "enable_jit_checkpoint": "a run always saves a checkpoint upon SIGTERM; see docs/resume.md",
    "ignore_data_skip": "a resumed run always goes on with the examples that come next",
    "ddp_find_unused_parameters": "the LM head runs outside of forward, so DDP would treat it as "
    "unused",
}


def _usable(reasons_against: dict[str, str]) -> Any:
    """Make a rule that refuses names which begin or end with a key; its value is the reason."""

    def check(value: str) -> str:
        for part, reason in reasons_against.items():
            if value.startswith(part) or value.endswith(part):
                raise ValueError(f"cannot be used here: {reason}")
        return value

    return AfterValidator(check)


_can_be_path = must(PATH_RULE, can_be_path)
_stays_inside = must(
    "not lead out of the folder outputs: no part of it may be '.' or '..'",
    lambda name: {".", ".."}.isdisjoint(name.split("/")),
)
_LAYERWISE = (
    "it updates weights inside the backward pass: a batch of several microbatches would be several "
    "updates, without max_grad_norm"
)
_NO_EPOCHS = _usable({"epoch": "a run counts steps, not epochs; set 'steps'"})
_NO_LOSS = "it follows the loss of evaluations, and an evaluation on an environment has none"
# Rules of inherited options, one for each.
_INHERITED_RULES: dict[str, Any] = {
    **dict.fromkeys(("adam_beta1", "adam_beta2"), checked_as(ShareBelow1)),
    **dict.fromkeys(
        ("weight_decay", "max_grad_norm", "warmup_steps"), checked_as(NotNegativeNumber)
    ),
    # TrainingArguments takes or sets other types than it declares.
    **dict.fromkeys(
        ("accelerator_config", "debug", "deepspeed", "fsdp", "fsdp_config"), SkipValidation()
    ),
    **dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), _NO_EPOCHS),
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "lr_scheduler_kwargs"), checked_as(dict[str, Any])
    ),
    "output_dir": _can_be_path,
    "run_name": checked_as(Annotated[str | None, _can_be_path, _stays_inside]),
    "eval_steps": checked_as(PositiveNumber | None),
    "seed": checked_as(Annotated[int, Field(ge=0, lt=2**32)]),
    "resume_from_checkpoint": checked_as(str | bool),  # a path, or true for the newest
    "metric_for_best_model": _usable({"loss": "an evaluation has no loss; set reward"}),
    "lr_scheduler_type": _usable(dict.fromkeys(("reduce_lr_on_plateau", "greedy"), _NO_LOSS)),
    "optim": _usable(
        {
            "schedule_free": "its weights differ between training and evaluation, and the "
            "server would sample from the wrong ones",
            **dict.fromkeys(("lomo", "adalomo", "layerwise"), _LAYERWISE),
        }
    ),
}


_Table = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]
_Layers = Literal["all-linear"] | Annotated[list[str], Field(min_length=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_is_host = must(
    "be a name or an address alone, such as 127.0.0.1; the port is vllm_server_port",
    lambda value: bool(value) and "/" not in value and value.count(":") != 1,  # IPv6 has more
)


def address_of(server: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[IPv6]:port". Raises ValueError for other texts."""
    with suppress(ValueError):  # urllib's, which name no fix
        parts = urlsplit(f"//{server}")
        if parts.hostname and parts.port and parts.netloc == server and "@" not in server:
            return parts.hostname, parts.port
    raise ValueError(f"{server!r} must be host:port; an IPv6 address is in brackets")


_are_servers = must(
    "be a list of servers, each as host:port and only once; an IPv6 address is in brackets",
    lambda servers: len({address_of(server) for server in servers}) == len(servers) > 0,
)


def _refuse_unknown(of: str, options: dict[str, Any], known: Collection[str]) -> None:
    for name, value in options.items():
        if name not in known:
            hint = did_you_mean(name, known, f"known: {', '.join(known)}")
            raise ConfigError(f"{of}.{name}={value!r}: cannot be set there; {hint}")


def with_hints(cls: type[_T]) -> type[_T]:
    """Let `__init__` of a config class say what to set instead of an unknown option, where that of
    dataclass raises a bare TypeError.
    """
    init, known = cast(Any, cls).__init__, [f.name for f in fields(cast(Any, cls))]
    others = "docs/reference.md lists the options, docs/from_trl.md names those of TRL"

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                hint = did_you_mean(name.replace("-", "_"), known, others)
                raise ConfigError(f"{name}: is no option; {hint}")
        init(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def default_options(config: Any) -> dict[str, Any]:
    """Return the default of each field of a config's class."""
    return {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(config)
    }


@dataclass(frozen=True)
class GroupFilter:
    """Decides by the rewards of surviving rollouts whether a group is worth training on. A group of
    several agents passes if the rewards of any agent pass. A group without survivors passes,
    because replacing it would delay the error of an environment that always fails. A group with
    `added_advantages`, or with advantages that its environment has set, passes, because it can be
    learned from whatever its rewards are.

    Attributes:
        min_reward_variance: a group with a smaller variance (over n) does not pass; 0: all pass.
        min_reward, max_reward: bounds of the mean reward.
        max_oversampling: the most groups that are generated for one group of a batch, >= 1.

    Raises:
        ValueError: bounds exclude each other, or one is without effect. The message begins with its
            name.
    """

    min_reward_variance: NotNegativeNumber = 0.0
    min_reward: float = -math.inf
    max_reward: float = math.inf
    max_oversampling: Annotated[float, Field(ge=1)] = 3.0

    def __post_init__(self) -> None:
        if self.min_reward > self.max_reward:
            raise ValueError(
                f"min_reward={self.min_reward!r}: must not be above max_reward={self.max_reward!r}"
            )
        if self.lets_all_pass and self.max_oversampling != GroupFilter.max_oversampling:
            raise ValueError(
                f"max_oversampling={self.max_oversampling!r}: without effect unless "
                "min_reward_variance, min_reward or max_reward is set"
            )

    @property
    def lets_all_pass(self) -> bool:
        bounds = self.min_reward_variance, self.min_reward, self.max_reward
        return bounds == (0, -math.inf, math.inf)

    def passes(self, group: Sequence[Rollout]) -> bool:
        taught = (r.has_own_advantages or r.added_advantages is not None for r in group)
        if self.lets_all_pass or any(taught):
            return True
        roles = group_by_role(group)
        return not roles or any(map(self._passes, roles))

    def _passes(self, survivors: Sequence[Rollout]) -> bool:
        rewards = np.array([rollout.reward for rollout in survivors])
        is_between = self.min_reward <= rewards.mean() <= self.max_reward
        return bool(is_between and rewards.var() >= self.min_reward_variance)


@with_hints
@dataclass
class RLConfig(TrainingArguments):
    """Options of `RLTrainer`: its own, and those of `transformers.TrainingArguments`, some with
    other defaults.

    Raises:
        ConfigError: an option is unknown, has a value of the wrong type or out of range, does not
            fit another option, or is inherited and has no effect here.
    """

    # What differs in a config that extends this one, such as `SFTConfig`.
    TRAINER = "RLTrainer"
    BEST = "reward"  # the default of metric_for_best_model
    UNUSED, INHERITED_RULES, NAMED_LOSSES = _UNUSED_BASE_OPTIONS, _INHERITED_RULES, LOSSES

    # --- Inherited options with other defaults ----------------------------------------------------
    output_dir: Annotated[str | None, must("name a folder", bool)] = None
    """Folder of the run: checkpoints, metrics.jsonl, rollouts. Default outputs/RUN_NAME."""
    overwrite_output_dir: bool = False
    """Remove the run that output_dir holds. If False, a folder that holds a run is refused, unless
    that run is resumed."""
    run_name: str | None = "rl"
    """Name of the run, for the folder and the trackers."""
    max_steps: PositiveInt = 500
    """Optimizer steps. Each trains on one batch of rollouts."""
    learning_rate: NotNegativeNumber = 1e-5
    """Peak learning rate."""
    lr_scheduler_type: SchedulerType | str = "constant"
    """Schedule of the learning rate. With warmup_steps, constant first rises to learning_rate."""
    # None until __post_init__ decides, then a bool, as the base class declares it.
    bf16: bool = None  # type: ignore[assignment]
    """Compute in bfloat16; trained weights stay in float32. Default: if the GPU supports it."""
    # None if not set; before transformers 5.18 the base class declares a bool.
    gradient_checkpointing: bool = None  # type: ignore[assignment]
    """Recompute activations in backward: less memory, more time. Default: on a GPU, in as many
    layers as its free memory asks for; elsewhere in none."""
    logging_steps: PositiveNumber = 1
    """Steps between lines of metrics and tables of rollouts."""
    save_steps: PositiveNumber = 100
    """Steps between checkpoints."""
    report_to: list[str] | None | str = "none"
    """Trackers, such as wandb or tensorboard."""

    # --- LoRA -------------------------------------------------------------------------------------
    use_lora: bool = True
    """Train a LoRA adapter; False trains all weights."""
    lora_rank: PositiveInt = 16
    """Rank of the adapter."""
    lora_alpha: PositiveNumber = 16
    """The adapter's output is scaled by alpha / rank."""
    lora_dropout: ShareBelow1 = 0.0
    """Dropout in front of the adapter while training."""
    lora_target_modules: _Layers | None = None
    """Layers that get an adapter: a list of names, or "all-linear" as in PEFT. Default: all linear
    layers of the decoder's blocks except routers and experts."""
    lora_modules_to_save: list[str] | None = None
    """Modules of which all weights are trained, beside the adapter. vLLM takes no such modules in
    an adapter, so merged weights are sent."""
    lora_use_rslora: bool = False
    """Scale the adapter by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)."""
    save_final: Literal["adapter", "merged"] = "adapter"
    """What is saved at the end. adapter: the adapter alone. merged: also a plain model, that is the
    base model with the adapter merged in, in the folder merged of output_dir. Without LoRA the
    final model is a plain one anyway."""

    # --- Batches ----------------------------------------------------------------------------------
    batch_size: PositiveInt = 512
    """Rollouts of one optimizer step, over all ranks."""
    rollouts_per_example: PositiveInt = 16
    """Rollouts of one example; their mean reward is the baseline."""
    micro_batch_size: PositiveInt | None = None
    """Samples of max_seq_len tokens in one forward pass of one rank. The token budget is the
    product, so more samples fit when they are shorter. Default: 8; on a GPU, 32,768 tokens if these
    are more, and fewer if its free memory does not hold what a pass keeps for backward."""
    max_tokens_per_microbatch: PositiveInt | None = None
    """Tokens of one forward pass on one rank, padding included; replaces micro_batch_size. Default:
    micro_batch_size * max_seq_len; see there."""
    share_prefixes: bool = True
    """Compute tokens that samples have in common at their beginning once, where the model can keep
    the samples apart: a group's prompt, the trunk of a trajectory that branches. False: each sample
    is computed whole."""
    head_dtype: Literal["model", "float32"] = "model"
    """In which the LM head multiplies. model: as the rest of the model, bfloat16 with bf16.
    float32: more exact logits, and more time; to gain by it, the server has to do the same: vf-vllm
    --hf-overrides '{"head_dtype": "float32"}'."""
    attn_implementation: str | None = None
    """Attention of the policy, as transformers names it: sdpa, eager, flex_attention,
    flash_attention_2, or kernels-community/flash-attn2, which the package kernels loads. Default:
    what transformers chooses for the model."""
    max_seq_len: Annotated[int, Field(ge=2)] = 2048
    """Longest sequence in tokens, prompt included. A longer one is cut and counts as truncated."""
    max_prompt_len: PositiveInt | None = None
    """Examples whose prompt has more tokens are left out. None: those whose prompt fills
    max_seq_len, which leaves no room for a reply."""
    shuffle: bool = True
    """Shuffle the examples anew in each epoch. The order follows from seed."""
    max_off_policy_steps: NotNegativeInt = 1
    """Batches requested in advance. 0: each batch is sampled with the newest weights. 1: the next
    batch is sampled while the trainer works on this one, or waits for its slowest rollouts; weights
    then change while the server generates. No token is older than so many steps. More keep the
    server busy where a rollout takes longer than a step."""

    # --- Sampling ---------------------------------------------------------------------------------
    max_tokens: PositiveInt | None = None
    """Longest reply of one turn, in tokens. None: the reply may fill max_seq_len."""
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 0.7
    """Sampling temperature. The trainer computes its logprobs at the same temperature. vLLM takes a
    lower one than 0.01 for 0.01."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of likeliest tokens whose total probability reaches this."""
    top_k: PositiveInt | None = None
    """Sample from the k likeliest tokens; None for all."""
    min_p: Share = 0.0
    """Leave out tokens whose probability is below this share of the likeliest token's."""
    sampling_mask: bool = False
    """The server returns which tokens top_p, top_k and min_p allowed at each position, and the
    trainer takes logprobs over these. Ratios are then exact with such options. top_k is 256 if left
    out, and at most 1024."""
    repetition_penalty: PositiveNumber = 1.0
    """Above 1, tokens that the prompt or the reply already has become less likely."""
    presence_penalty: _Penalty = 0.0
    """Above 0, tokens already in a reply are less likely."""
    frequency_penalty: _Penalty = 0.0
    """Above 0, a token is less likely the more often the reply has this token already."""
    stop: Texts | None = None
    """A reply ends where it has one of these strings; one string may stand alone. The tokens of the
    string are trained, because they were sampled. vf-vllm takes 64 strings at most, or as many as
    VLLM_MAX_STOP_STRINGS says there."""
    include_stop_str_in_output: bool = False
    """Whether the string of stop that ended a reply stays in its text, which the environment sees
    and scores."""
    chat_template_kwargs: _Table = field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking = false} or {reasoning_effort =
    "low"}. The template ignores those that it does not know."""
    deterministic: bool = False
    """Give each request for a rollout a seed that follows from seed and the rollout's place, so
    that the same run samples the same tokens again. vf-rl starts a server on GPUs with vLLM's batch
    invariance. Needs max_off_policy_steps 0 or 1; docs/mismatch.md says where it holds."""
    generation_timeout: PositiveNumber = 600.0
    """Seconds that one rollout may take; a longer one counts as an error."""
    max_concurrent: PositiveInt = 512
    """Rollouts in flight at a time."""
    env_workers: Literal["auto"] | NotNegativeInt = "auto"
    """Rollout workers: processes that run the environments, so that their Python code does not wait
    for the trainer's. auto: one for each four cores, at most 8; an environment that cannot be made
    again in a worker runs in a thread of the trainer, and one line says why. 0 runs all
    environments in a thread of the trainer."""

    router_replay: bool = False
    """For mixtures of experts: the trainer sends each token to the experts that the server chose
    (R3, arXiv:2510.11370). vf-vllm needs a GPU and --enable-return-routed-experts, which vf-rl
    sets."""

    # --- What enters the loss ---------------------------------------------------------------------
    mask_env_responses: bool = True
    """Leave the environment's own tokens between turns out of the loss."""
    mask_truncated_completions: bool = False
    """Leave truncated rollouts out of the loss; they stay in the baseline."""
    zero_truncated_completions: bool = False
    """Give truncated rollouts a reward of 0."""
    group_filter: _Table = field(default_factory=dict)
    """Groups that are replaced by new ones: {min_reward_variance = 1e-6} replaces those whose
    rewards vary less, so that all are equal; min_reward and max_reward those with a lower or higher
    mean reward, too hard or too easy. At most max_oversampling (3.0) * batch_size rollouts are
    generated for one batch. Replacements start only in the first generation_timeout seconds times
    the number of pending batches. If too few groups pass, the batch is smaller."""
    advantage: Annotated[str, one_of(ADVANTAGES)] = "mean"
    """How a group's rewards become advantages. mean: minus their mean; std: that, divided by their
    standard deviation (GRPO); leave_one_out: minus the mean of the others (RLOO); maxrl: minus
    their mean, divided by their mean; or "module:function" for your own, see advantages.py."""
    loss: Annotated[str, one_of(LOSSES)] = "cispo"
    """One of cispo, ppo, truncated_is, icepop, dppo, gspo, reinforce, see losses.py; or
    "module:function" for your own, from a module beside the script or the TOML."""
    loss_args: _Table = field(default_factory=dict)
    """Arguments of the loss, such as {eps_high = 4.0} for cispo. See losses.py."""
    gradient_masks: dict[Annotated[str, one_of(MASKS)], dict[str, Any]] | None = None
    """Tokens that get no gradient, under any loss: a table of masks, each with its arguments, such
    as {dppo = {max_divergence = 0.2}}; {} for none. Known: ratio, ppo, ipo, dppo, sequence_mean,
    sequence_product, see losses.py; or "module:function". Default: {dppo = {max_divergence = 0.05}}
    if loss is cispo, else {}."""
    loss_normalization: Literal["token", "sequence", "constant"] = "token"
    """token: the mean over the batch's loss tokens. sequence: the mean over rollouts of each
    rollout's mean. constant: the sum divided by batch_size * max_seq_len."""
    kl_beta: NotNegativeNumber = 0.0
    """Weight of a penalty on KL(policy || reference). The reference is the model without its
    adapter. Without LoRA it is a copy of the model at the start."""
    kl_target: PositiveNumber | None = None
    """Hold the mean of this KL per token near this value, in nats: after each step, kl_beta rises
    by up to 2 % if the KL was above it, and falls if it was below."""
    entropy_beta: NotNegativeNumber = 0.0
    """Weight of a bonus on the entropy of the policy, in nats per token. The bonus keeps the policy
    from becoming certain too early."""

    # --- Server -----------------------------------------------------------------------------------
    vllm_server_host: Annotated[str, _is_host] = "127.0.0.1"
    """Host of the vf-vllm server."""
    vllm_server_port: Annotated[int, Field(gt=0, lt=2**16)] = 8000
    """Port of the vf-vllm server."""
    vllm_servers: Annotated[Texts | None, _are_servers] = None
    """Several vf-vllm servers of the same model, each as host:port, in place of vllm_server_host
    and vllm_server_port. Each gets all weights and a part of the rollouts."""
    vllm_server_timeout: PositiveNumber = 600.0
    """Seconds to wait for the server at the start, for a lost server to come back, and for one
    weight sync."""
    weight_sync_backend: Literal["auto", "nccl", "http"] = "auto"
    """How weights travel: nccl (from GPU to GPU; each side has its own), or http (in the requests
    to the server's port). auto chooses nccl where each side has GPUs of its own, and http if nccl
    cannot connect. On one GPU that both sides share, auto sends all weights through the GPU's
    memory, and an adapter over http."""
    lora_sync: Literal["auto", "adapter", "merged"] = "auto"
    """What is sent with LoRA. adapter: the adapter alone; merged: all weights, adapter added; auto:
    merged if the server computes in float32 (where merging loses nothing and vLLM is faster without
    an adapter) and was started without --enable-lora, else adapter."""

    # --- Evaluation and what a person sees --------------------------------------------------------
    eval_examples: PositiveInt = 256
    """Number of examples in one evaluation: the first of each environment's eval split."""
    eval_rollouts_per_example: PositiveInt = 1
    """Rollouts of each example in an evaluation. Above 1, the evaluation also logs pass@k."""
    eval_sampling: _Table = field(default_factory=dict)
    """Sampling of evaluations where it differs from that of training, in each environment: such as
    {temperature = 0, max_tokens = 512}. A temperature of 0 takes the likeliest token, and a top_k
    of 0 all tokens."""
    log_rollouts: Share = 0.05
    """All rollouts are written into output_dir/rollouts, and two of a step are shown in the
    terminal: see docs/watching.md. The number is the share of the groups that are written with
    their tokens: logprobs of server and trainer, entropy, masks; about 8 bytes a token. 0: nothing
    is written or shown."""

    def __post_init__(self) -> None:
        import torch

        self._check_unused_base_options()
        self.ddp_find_unused_parameters = False
        self._check()
        if self.deepspeed and not importlib.util.find_spec("deepspeed"):
            raise ConfigError(
                f"deepspeed={self.deepspeed!r}: DeepSpeed is not installed; "
                "`make DEEPSPEED=1 install`, or uv pip install -e '.[deepspeed]', in a clone"
            )
        if self.report_to is None:
            self.report_to = "none"  # TrainingArguments would take all that are installed
        if self.output_dir is None:
            self.output_dir = f"outputs/{self.run_name or 'rl'}"
        if self.bf16 is None:
            # Emulated, as on a T4, it would be slow, and such a GPU's server computes in float16.
            self.bf16 = (
                not self.use_cpu
                and torch.cuda.is_available()
                and torch.cuda.is_bf16_supported(including_emulation=False)
            )
        # The new name of gradient_checkpointing; transformers warns if only the old one is set.
        if self.gradient_checkpointing is not None and hasattr(self, "activation_checkpointing"):
            self.activation_checkpointing = self.gradient_checkpointing
        if self.warmup_steps and self.lr_scheduler_type == "constant":
            self.lr_scheduler_type = "constant_with_warmup"  # plain constant ignores warmup_steps
        wants_best = self.load_best_model_at_end or self.save_strategy == "best"
        if wants_best and self.metric_for_best_model is None:
            self.metric_for_best_model = self.BEST  # TrainingArguments would take the loss
        # `load_policy` compiles the layers. TrainingArguments would have the whole model compiled.
        compiles, self.torch_compile = self.torch_compile, False
        try:
            super().__post_init__()
        except (ValueError, FileNotFoundError) as error:
            raise ConfigError(str(error)) from error
        self.torch_compile = compiles
        # Code of an environment in this process may change the working directory.
        self.output_dir = os.path.abspath(self.output_dir)

    # --- Checks -----------------------------------------------------------------------------------

    def _check_unused_base_options(self) -> None:
        defaults = default_options(self)
        # False by TrainingArguments or ourselves. A copy of an RLConfig has it.
        may_be_false = {"include_num_input_tokens_seen", "ddp_find_unused_parameters"}
        may_be_false |= {"dataloader_pin_memory"} if self.use_cpu else set()
        for name in self.UNUSED.keys() & defaults.keys():
            value = getattr(self, name)
            is_ours = name in may_be_false and value is False
            if value != defaults[name] and not is_ours:
                given = without_secrets(f"{name}={value!r}")
                raise ConfigError(
                    f"{given} has no effect in {self.TRAINER}: {self.UNUSED[name]}. Remove it"
                )

    def _check(self) -> None:
        """Check all values, and bring those of a command line into their form."""
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None or f.default is not None:
                setattr(self, f.name, self._checked(f.name, value))
        self._check_sampling("eval_sampling", self.eval_sampling, ("temperature",))
        if self.loss in self.NAMED_LOSSES:  # the trainer loads a user's own loss
            self.make_loss()
        self.make_masks(MASKS)
        self.make_filter()
        self._check_together()

    def _checked(self, name: str, value: Any, where: str = "", owner: Any = None) -> Any:
        """Return a value of this option in its form.

        Args:
            where: what has the value, if it is not the option itself: "eval_sampling.".
            owner: the class that declares it, if it is not that of the options.
        """
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        value = value.item() if isinstance(value, np.generic) else value
        try:
            checked = checkers(cast(Any, owner or type(self)))[name].validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"{where}{name}={value!r}: {problem_of(error)}") from error
        return value if value == checked else checked  # 16 stays an integer

    def _check_sampling(self, of: str, options: dict[str, Any], more: tuple[str, ...] = ()) -> None:
        """Check sampling options that stand in place of this config's, and bring them into form.

        Args:
            of: what has them.
            more: names beside those that one environment may have; these may be 0, for the
                likeliest token, and top_k for all tokens.
        """
        _refuse_unknown(of, options, (*SAMPLING_OF_ONE_ENV, *more))
        for name, value in options.items():
            if value != 0 or not more or name not in ("top_k", *more):
                options[name] = self._checked(name, value, f"{of}.")
        self._check_length(f"{of}.max_tokens", options.get("max_tokens"))

    def _check_length(self, name: str, value: int | None) -> None:
        if value is not None and value >= self.max_seq_len:
            rule = f"must be below max_seq_len={self.max_seq_len}, or left out"
            raise ConfigError(f"{name}={value!r}: {rule}")

    def _check_together(self) -> None:
        """Check values that depend on each other."""
        num_groups = math.ceil(self.batch_size / self.rollouts_per_example)
        is_whole = num_groups * self.rollouts_per_example == self.batch_size
        is_alone = (self.vllm_server_host, self.vllm_server_port) == ("127.0.0.1", 8000)
        for name, holds, rule in (
            (
                "batch_size",
                is_whole,
                f"must be a multiple of rollouts_per_example={self.rollouts_per_example}; try "
                f"batch_size={num_groups * self.rollouts_per_example}",
            ),
            (
                "kl_target",
                self.kl_target is None or self.kl_beta > 0,
                "without effect if kl_beta=0; set kl_beta, the weight at the start, such as 0.01",
            ),
            (
                "deterministic",
                not self.deterministic or self.max_off_policy_steps <= 1,
                f"with max_off_policy_steps={self.max_off_policy_steps} weights change during "
                "generation; set 0 or 1",
            ),
            (
                "top_k",
                not self.sampling_mask or (self.top_k or DEFAULT_MASK) <= MAX_MASK,
                f"must be at most {MAX_MASK} with sampling_mask, which travels for each token",
            ),
            (
                "shuffle",
                self.shuffle or self.make_filter().lets_all_pass,
                "with group_filter it must be True, or every epoch would leave out the same "
                "examples",
            ),
            (
                "eval_steps",
                self.eval_steps is None or self.eval_strategy != "no",
                "without effect unless eval_strategy = 'steps'",
            ),
            (
                "save_strategy",
                self.save_strategy != "best" or self.eval_strategy != "no",
                "without evaluations no checkpoint is the best; set eval_strategy = 'steps'",
            ),
            (
                "vllm_servers",
                self.vllm_servers is None or is_alone,
                "takes the place of vllm_server_host and vllm_server_port; remove these two",
            ),
        ):
            if not holds:
                raise ConfigError(f"{name}={getattr(self, name)!r}: {rule}")
        self._check_length("max_prompt_len", self.max_prompt_len)
        self._check_length("max_tokens", self.max_tokens)

    # --- What the options name --------------------------------------------------------------------

    def servers(self) -> list[tuple[str, int]]:
        """Return host and port of each inference server."""
        if self.vllm_servers:
            return [*map(address_of, self.vllm_servers)]
        return [(self.vllm_server_host, self.vllm_server_port)]

    def make_loss(self) -> LossFn:
        """Return the loss that `loss` and `loss_args` name.

        Raises:
            ConfigError: the loss cannot be loaded, or does not take these arguments.
        """
        return self._load(self.NAMED_LOSSES, self.loss, "loss", "loss_args of loss", self.loss_args)

    def masks(self) -> dict[str, dict[str, Any]]:
        """Return `gradient_masks`, or if it is not set, what stands for it under this loss."""
        if self.gradient_masks is None:
            return dict(DEFAULT_MASKS.get(self.loss, {}))
        return self.gradient_masks

    def make_masks(self, of: Container[str] | None = None) -> dict[str, MaskFn]:
        """Return the functions of `masks()`, by name.

        Args:
            of: only those with one of these names.

        Raises:
            ConfigError: a mask cannot be loaded, or does not take its arguments.
        """
        field = "gradient_masks"
        return {
            name: self._load(MASKS, name, field, field, options)
            for name, options in self.masks().items()
            if of is None or name in of
        }

    def complete_loss(self, loss_fn: LossFn | None) -> LossFn:
        """Return a loss under its masks, plus the terms of `kl_beta` and `entropy_beta`, to which
        the masks do not apply.

        Args:
            loss_fn: replaces the loss that `loss` names. It gets only masks that are set.

        Raises:
            ConfigError: see `make_loss` and `make_masks`.
        """
        has_masks = loss_fn is None or self.gradient_masks is not None
        terms: list[LossFn] = []
        if self.kl_target is not None:
            terms.append(AdaptiveKL(self.kl_beta, self.kl_target))
        elif self.kl_beta:
            terms.append(partial(reference_kl, beta=self.kl_beta))
        if self.entropy_beta:
            terms.append(partial(entropy_bonus, beta=self.entropy_beta))
        return add_terms(
            with_masks(loss_fn or self.make_loss(), self.make_masks() if has_masks else {}), *terms
        )

    @staticmethod
    def _load(known: dict[str, Any], name: str, field: str, of: str, options: Any) -> Any:
        """Return the function that a field names, one of `known` or a user's own, with options."""
        try:
            function = known.get(name) or load_user_code(name, field)
            return bind_options(function, f"{of}={name!r}", options)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def make_advantage(self) -> AdvantageFn:
        """Return the function that `advantage` names.

        Raises:
            ConfigError: the function cannot be loaded.
        """
        if self.advantage in ADVANTAGES:
            if self.rollouts_per_example < 2:
                raise ConfigError(
                    f"rollouts_per_example={self.rollouts_per_example}: must be >= 2: the baseline "
                    f"of advantage={self.advantage!r} is taken over a group"
                )
            return of_rewards(ADVANTAGES[self.advantage])
        return load_user_code(self.advantage, "advantage")

    def make_filter(self) -> GroupFilter:
        """Return the filter that `group_filter` describes.

        Raises:
            ConfigError: it has an unknown key, or a value that cannot work.
        """
        _refuse_unknown("group_filter", self.group_filter, [f.name for f in fields(GroupFilter)])
        bounds = {
            name: self._checked(name, value, "group_filter.", GroupFilter)
            for name, value in self.group_filter.items()
        }
        try:
            return GroupFilter(**bounds)
        except ValueError as error:
            raise ConfigError(f"group_filter.{error}") from error

    # --- What follows from the options ------------------------------------------------------------

    @property
    def token_budget(self) -> int:
        """Tokens of one forward pass on one rank, before its memory is looked at."""
        return self.max_tokens_per_microbatch or (self.micro_batch_size or 8) * self.max_seq_len

    @property
    def groups_per_batch(self) -> int:
        return self.batch_size // self.rollouts_per_example

    @property
    def max_groups_per_batch(self) -> int:
        """The most groups generated for one batch, including those that the filter rejects."""
        group_filter = self.make_filter()
        if group_filter.lets_all_pass:
            return self.groups_per_batch
        # 1e-9: 100 * 1.15 is 114.99999999999999
        return max(int(self.groups_per_batch * group_filter.max_oversampling + 1e-9), 1)

    def with_sampling(self, options: dict[str, Any]) -> RLConfig:
        """Return a copy with these sampling options, for one of several environments.

        Raises:
            ConfigError: an option is out of range, or cannot differ between environments.
        """
        self._check_sampling("sampling", options := dict(options))
        copied = self.changed(options)
        copied._check_together()
        return copied

    def changed(self, options: dict[str, Any]) -> RLConfig:
        """Return a copy with these options, unchecked."""
        copied = copy.copy(self)
        vars(copied).update(options)
        return copied

    def sampling_args(self) -> dict[str, Any]:
        """Return the sampling options of a rollout request. Neutral values are included, because
        the model's generation_config.json may set other defaults on the server.
        """
        names = ("max_tokens", "temperature", "top_p", "min_p", *_PENALTIES)
        sent = {name: getattr(self, name) for name in names}
        sent["top_k"] = self.top_k or (DEFAULT_MASK if self.sampling_mask else -1)
        if self.stop:
            sent["stop"] = self.stop
            sent["include_stop_str_in_output"] = self.include_stop_str_in_output
        if self.sampling_mask:
            sent["sampling_mask"] = True
        if self.router_replay:
            sent["routed_experts"] = True
        if self.chat_template_kwargs:
            sent["chat_template_kwargs"] = self.chat_template_kwargs
        return sent

    def eval_sampling_args(self) -> dict[str, Any]:
        """Do as `sampling_args`, for evaluations."""
        return self.changed({**self.eval_sampling, **UNTRAINED}).sampling_args()

    def sampling_changes_probabilities(self) -> list[str]:
        """Return the options that make the server sample from another distribution than the
        trainer's: softmax(logits / temperature), over the tokens of the sampling mask if there is
        one.
        """
        neutral = default_options(RLConfig)  # also in a class that extends it
        names = _PENALTIES if self.sampling_mask else (*_CUTS, *_PENALTIES)
        return [name for name in names if getattr(self, name) != neutral[name]]
