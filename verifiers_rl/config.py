"""`RLConfig`: every option once, with its help and its range check."""

from __future__ import annotations

import copy
import importlib.util
import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from transformers import TrainingArguments

from verifiers_rl.advantages import ADVANTAGES
from verifiers_rl.losses import make_loss
from verifiers_rl.rollouts import GroupFilter
from verifiers_rl.types import LOAD_S

# Not temperature: the trainer takes the logprobs of a batch at one.
_SAMPLING_OF_ONE_ENV = (
    *("max_tokens", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
CLIENT_TYPES = ("openai_chat_completions", "openai_chat_completions_token", "renderer")


class ConfigError(ValueError):
    """An option has a value that cannot work;
    the message names the field, the value and the fix.
    """


def _option(default: Any, help: str) -> Any:
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata={"help": help})
    return field(default=default, metadata={"help": help})


# Options of TrainingArguments that this trainer cannot honour, and what to use.
# Setting one is an error, not a no-op.
_BATCHES = "set batch_size and micro_batch_size"
_DATA = "data comes from the environment; see batch_size, shuffle and seed"
_EVALUATION = "evaluation runs the environment; see eval_strategy and eval_examples"
_UNSUPPORTED = "it is not supported yet"
_UNUSED_BASE_OPTIONS = {
    "per_device_train_batch_size": _BATCHES,
    "gradient_accumulation_steps": _BATCHES,
    "auto_find_batch_size": _BATCHES,
    "average_tokens_across_devices": "the loss is always divided by the loss tokens of all ranks",
    "num_train_epochs": "set max_steps",
    "label_smoothing_factor": "the loss is loss_fn",
    "fp16": "set bf16",
    "neftune_noise_alpha": "noise in the trainer alone would make importance ratios wrong",
    "use_liger_kernel": _UNSUPPORTED,
    "torch_compile": _UNSUPPORTED,
    "parallelism_config": _UNSUPPORTED,
    "torch_empty_cache_steps": _UNSUPPORTED,
    "include_num_input_tokens_seen": "tokens are counted in num_tokens",
    "ignore_data_skip": "a resumed run always goes on with the examples that come next",
    "per_device_eval_batch_size": _EVALUATION,
    "prediction_loss_only": _EVALUATION,
    "eval_do_concat_batches": _EVALUATION,
    "eval_use_gather_object": _EVALUATION,
    "eval_accumulation_steps": _EVALUATION,
    "include_for_metrics": _EVALUATION,
    "batch_eval_metrics": _EVALUATION,
    "bf16_full_eval": _EVALUATION,
    "fp16_full_eval": _EVALUATION,
    "data_seed": "set seed",
    "dataloader_drop_last": _DATA,
    "dataloader_num_workers": _DATA,
    "dataloader_pin_memory": _DATA,
    "dataloader_persistent_workers": _DATA,
    "dataloader_prefetch_factor": _DATA,
    "dataloader_multiprocessing_context": _DATA,
    "dataloader_in_order": _DATA,
    "remove_unused_columns": _DATA,
    "label_names": _DATA,
    "train_sampling_strategy": _DATA,
    "length_column_name": _DATA,
}


@dataclass
class RLConfig(TrainingArguments):
    """Options of `RLTrainer`:
    those of `transformers.TrainingArguments`, with the defaults below, and its own.

    Raises:
        ConfigError: a value out of range, sizes that do not divide, or an inherited option without
            effect here.
    """

    # --- Inherited options with other defaults ----------------------------------------------------
    output_dir: str | None = _option(
        None, "Folder of the run: checkpoints, metrics.jsonl, curves.png. Default outputs/RUN_NAME."
    )
    run_name: str | None = _option("rl", "Name of the run, for the folder and the trackers.")
    max_steps: int = _option(500, "Optimizer steps; one batch of rollouts each.")
    learning_rate: float = _option(1e-5, "Peak learning rate.")
    lr_scheduler_type: str = _option(
        "constant", "Schedule of the learning rate; constant rises first where warmup_steps is set."
    )
    warmup_steps: float = _option(
        0, "Steps, or a share of all below 1, over which the learning rate rises from 0."
    )
    max_grad_norm: float = _option(
        1.0, "Gradients of the whole batch are scaled down to this norm; 0 for no limit."
    )
    # None until __post_init__ decides, then a bool, as the base class declares it.
    bf16: bool = _option(
        None,
        "Compute in bfloat16 with float32 masters of what is trained. Default: where the GPU can.",
    )
    # None where it is not set; before transformers 5.18 the base class declares a bool.
    gradient_checkpointing: bool = _option(
        None, "Recompute activations in backward: less memory, more time."
    )
    logging_steps: float = _option(1, "Steps between lines of metrics and tables of rollouts.")
    save_steps: float = _option(100, "Steps between checkpoints.")
    report_to: Any = _option("none", "Trackers, such as wandb or tensorboard.")
    ddp_find_unused_parameters: bool | None = _option(
        False, "As torch's DDP; the LM head is used outside of forward, so False."
    )

    # --- LoRA -------------------------------------------------------------------------------------
    use_lora: bool = _option(True, "Train a LoRA adapter; False trains all weights.")
    lora_rank: int = _option(16, "Rank of the adapter.")
    lora_alpha: float = _option(16, "The adapter's output is scaled by alpha / rank.")
    lora_dropout: float = _option(0.0, "Dropout in front of the adapter while training.")
    lora_target_modules: list[str] = _option(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "Layers that get an adapter.",
    )
    lora_modules_to_save: list[str] | None = _option(
        None,
        "Modules trained whole beside the adapter. vLLM takes none in an adapter: "
        "merged weights are synced then.",
    )
    lora_use_rslora: bool = _option(
        False, "Scale by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)."
    )

    # --- Batches ----------------------------------------------------------------------------------
    batch_size: int = _option(512, "Rollouts of one optimizer step, over all ranks.")
    rollouts_per_example: int = _option(
        16, "Rollouts of one example; their mean reward is the baseline."
    )
    micro_batch_size: int = _option(
        8, "Longest samples that one forward pass on one rank holds, or more that are shorter."
    )
    max_tokens_per_microbatch: int | None = _option(
        None,
        "Tokens of one forward pass on one rank, padding included; replaces micro_batch_size. "
        "Default: micro_batch_size * max_seq_len.",
    )
    max_seq_len: int = _option(
        2048,
        "Longest sequence in tokens, prompt included; longer ones are cut and count as truncated.",
    )
    max_prompt_len: int | None = _option(
        None, "Examples whose prompt has more tokens are left out; None for no limit."
    )
    shuffle: bool = _option(
        True, "Draw the examples of each epoch in an order that follows from seed."
    )
    max_off_policy_steps: int = _option(
        1,
        "Batches generated ahead. 1: the next one while training on this one. 0: each batch with "
        "the newest weights. 2 and more keep the server busy while a batch waits for its slowest "
        "rollouts; weights then change in mid-rollout, and no token is older than this many steps.",
    )

    # --- Sampling ---------------------------------------------------------------------------------
    max_tokens: int | None = _option(
        None,
        "Longest reply of one turn in tokens; None: up to max_seq_len, or in classic environments "
        "the server's max_model_len.",
    )
    temperature: float = _option(
        0.7, "Sampling temperature; the trainer's logprobs are taken at it too."
    )
    top_p: float = _option(1.0, "Sample from the smallest set of tokens with this probability.")
    top_k: int | None = _option(None, "Sample from the k likeliest tokens; None for all.")
    min_p: float = _option(
        0.0, "Leave out tokens less likely than this share of the likeliest one."
    )
    repetition_penalty: float = _option(1.0, "Above 1, tokens that have occurred are less likely.")
    presence_penalty: float = _option(0.0, "Above 0, tokens sampled before are less likely.")
    frequency_penalty: float = _option(
        0.0, "Above 0, tokens are less likely the more often they were sampled."
    )
    generation_timeout: float = _option(
        600.0, "Seconds that one rollout may take; a longer one counts as an error."
    )
    max_concurrent: int = _option(512, "Rollouts in flight at a time.")
    env_workers: int = _option(
        0,
        "Processes for each environment, off the trainer's interpreter; 0 runs environments in a "
        "thread of the trainer.",
    )
    client_type: Literal["openai_chat_completions", "openai_chat_completions_token", "renderer"] = (
        _option(
            "openai_chat_completions_token",
            "What a turn sends to the server. openai_chat_completions_token: the tokens so far and "
            "those of new messages; openai_chat_completions: messages, tokenised anew at each "
            "turn; renderer: tokens made by the renderers package. See clients.py.",
        )
    )

    # --- What enters the loss ---------------------------------------------------------------------
    mask_env_responses: bool = _option(
        True, "Leave the environment's own tokens between turns out of the loss."
    )
    mask_truncated_completions: bool = _option(
        False, "Leave truncated rollouts out of the loss; they stay in the baseline."
    )
    zero_truncated_completions: bool = _option(False, "Give truncated rollouts a reward of 0.")
    min_reward_variance: float = _option(
        0.0,
        "Groups whose rewards vary less than this are replaced by new ones: 1e-6 replaces those "
        "with one reward only, 0 none.",
    )
    min_reward: float | None = _option(
        None, "Groups with a lower mean reward, too hard, are replaced; None for no limit."
    )
    max_reward: float | None = _option(
        None, "Groups with a higher mean reward, too easy, are replaced; None for no limit."
    )
    max_oversampling: float = _option(
        3.0,
        "With one of these three set, at most this times batch_size rollouts are generated for a "
        "batch, none begun after generation_timeout for each batch pending; it stays smaller if "
        "that is not enough.",
    )
    advantage: str = _option(
        "mean",
        "Rewards of a group to advantages: mean, minus their mean; std, also divided by their std "
        "(GRPO); leave_one_out, minus the mean of the others (RLOO); maxrl, divided by their mean.",
    )
    loss: str = _option(
        "cispo", "cispo, ppo, truncated_is, icepop, dppo, gspo or reinforce; see losses.py."
    )
    loss_args: dict[str, float] = _option(
        {}, "Arguments of the loss, such as {eps_high = 4.0} for cispo; see losses.py."
    )
    loss_normalization: Literal["token", "sequence", "constant"] = _option(
        "token",
        "Mean over the batch's loss tokens; or over samples of each one's mean; "
        "or the sum divided by batch_size * max_seq_len.",
    )
    kl_beta: float = _option(
        0.0,
        "Weight of a penalty on KL(policy || reference). The reference is the model without its "
        "adapter; without LoRA a copy of the model at the start.",
    )

    # --- Server -----------------------------------------------------------------------------------
    vllm_server_host: str = _option("127.0.0.1", "Host of the vf-vllm server.")
    vllm_server_port: int = _option(8000, "Port of the vf-vllm server.")
    vllm_server_timeout: float = _option(
        300.0,
        "Seconds to wait for the server to come up, or to come back when it was lost, "
        "and for one weight sync.",
    )
    weight_sync_backend: Literal["auto", "nccl", "ipc", "gloo"] = _option(
        "auto",
        "How weights travel: nccl (each side has its own GPUs), ipc (both share one GPU), gloo; "
        "auto takes what fits.",
    )
    lora_sync: Literal["adapter", "merged"] = _option(
        "adapter",
        "With LoRA, send the adapter alone, or merged: all weights with the adapter added.",
    )

    # --- Evaluation and what a person sees --------------------------------------------------------
    eval_examples: int = _option(
        256, "Examples of the environment's eval split in one evaluation, from the first on."
    )
    eval_rollouts_per_example: int = _option(
        1, "Rollouts of each of them; above 1 the evaluation has pass@k too."
    )
    num_rollouts_to_print: int = _option(
        2, "Rollouts in the table at each logging step; 0 for no table."
    )

    def __post_init__(self) -> None:
        import torch

        self._check_unused_base_options()
        self._check_ranges()
        if self.deepspeed and not importlib.util.find_spec("deepspeed"):
            raise ConfigError(
                f"deepspeed={self.deepspeed!r}: DeepSpeed is not installed; "
                "`make DEEPSPEED=1 install`, or uv pip install -e '.[deepspeed]', in a clone"
            )
        if self.output_dir is None:
            self.output_dir = f"outputs/{self.run_name}"
        if self.bf16 is None:
            self.bf16 = (
                not self.use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
            )
        # transformers' new name for it; the old one alone draws a warning.
        if self.gradient_checkpointing is not None and hasattr(self, "activation_checkpointing"):
            self.activation_checkpointing = self.gradient_checkpointing
        # The other ranks wait for rank 0's batch, or its evaluation after that: not shorter than
        # rank 0 may take for it, in three attempts.
        num_batches = max(self.max_off_policy_steps, 1)
        num_rollouts = self.max_groups_per_batch * self.rollouts_per_example * num_batches
        num_rollouts += self.eval_examples * self.eval_rollouts_per_example
        waves = math.ceil(num_rollouts / self.max_concurrent)
        waiting_s = (2 * waves + num_batches + 1) * self.generation_timeout
        if self.env_workers:  # load their environments first
            waiting_s += max(self.generation_timeout, LOAD_S)
        longest_s = 3 * (waiting_s + 5 * self.vllm_server_timeout + 240)
        self.ddp_timeout = max(self.ddp_timeout, math.ceil(longest_s))
        if self.warmup_steps and self.lr_scheduler_type == "constant":
            self.lr_scheduler_type = "constant_with_warmup"  # plain constant ignores warmup_steps
        super().__post_init__()

    def _check_unused_base_options(self) -> None:
        defaults = {
            f.name: f.default_factory() if f.default_factory is not MISSING else f.default
            for f in fields(TrainingArguments)
        }
        for name, instead in _UNUSED_BASE_OPTIONS.items():
            value = getattr(self, name, None)
            # TrainingArguments replaces a few None by what they stand for;
            # the first construction sees the user's value.
            if (
                name in defaults
                and value != defaults[name]
                and not (name == "dataloader_pin_memory" and self.use_cpu)
            ):
                raise ConfigError(
                    f"{name}={value!r} has no effect in RLTrainer: {instead}. Remove it"
                )

    def _check_ranges(self) -> None:
        def check(name: str, holds: bool, rule: str) -> None:
            if not holds:
                raise ConfigError(f"{name}={getattr(self, name)!r}: {rule}")

        for name in (
            "lora_rank",
            "batch_size",
            "micro_batch_size",
            "max_concurrent",
            "max_steps",
            "eval_examples",
            "eval_rollouts_per_example",
        ):
            check(
                name,
                _is_int(getattr(self, name)) and getattr(self, name) >= 1,
                "must be an integer >= 1",
            )
        check(
            "env_workers",
            _is_int(self.env_workers) and self.env_workers >= 0,
            "must be an integer >= 0",
        )
        for name in ("max_tokens", "max_prompt_len", "top_k", "max_tokens_per_microbatch"):
            value = getattr(self, name)
            check(
                name,
                value is None or (_is_int(value) and value >= 1),
                "must be an integer >= 1, or left out",
            )
        for name in (
            "generation_timeout",
            "vllm_server_timeout",
            "temperature",
            "repetition_penalty",
            "lora_alpha",
        ):
            check(
                name,
                _is_number(getattr(self, name)) and getattr(self, name) > 0,
                "must be a number > 0",
            )
        for name in (
            "learning_rate",
            "max_grad_norm",
            "warmup_steps",
            "kl_beta",
            "min_reward_variance",
            "num_rollouts_to_print",
        ):
            check(
                name,
                _is_number(getattr(self, name)) and getattr(self, name) >= 0,
                "must be a number >= 0",
            )
        check("temperature", self.temperature <= 2, "must be at most 2, which is vLLM's limit")
        for name in ("presence_penalty", "frequency_penalty"):
            check(
                name,
                _is_number(getattr(self, name)) and -2 <= getattr(self, name) <= 2,
                "must be from -2 to 2",
            )
        for name in ("min_reward", "max_reward"):
            value = getattr(self, name)
            check(name, value is None or _is_number(value), "must be a number, or left out")
        low, high = self.min_reward, self.max_reward
        check(
            "min_reward",
            low is None or high is None or low <= high,
            f"must not be above max_reward={high!r}",
        )
        check(
            "max_oversampling",
            _is_number(self.max_oversampling) and self.max_oversampling >= 1,
            "must be a number >= 1",
        )
        if self.group_filter().lets_all_pass:
            check(
                "max_oversampling",
                self.max_oversampling == 3.0,
                "without effect unless min_reward_variance, min_reward or max_reward is set",
            )
        else:
            check("shuffle", self.shuffle, "with a filter it must be True, or every epoch would "
                  "leave out the same examples")  # fmt: skip
        check("lora_dropout", 0 <= self.lora_dropout < 1, "must be >= 0 and < 1")
        check("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "must be > 0 and <= 1")
        check("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "must be from 0 to 1")
        check(
            "vllm_server_port",
            _is_int(self.vllm_server_port) and 0 < self.vllm_server_port < 65536,
            "must be a port, 1 to 65535",
        )
        check(
            "max_seq_len",
            _is_int(self.max_seq_len) and self.max_seq_len >= 2,
            "must be an integer >= 2",
        )
        for name, choices in (
            ("weight_sync_backend", ("auto", "nccl", "ipc", "gloo")),
            ("lora_sync", ("adapter", "merged")),
            ("client_type", CLIENT_TYPES),
            ("advantage", ADVANTAGES),
            ("loss_normalization", ("token", "sequence", "constant")),
        ):
            check(name, getattr(self, name) in choices, f"must be one of {', '.join(choices)}")
        try:
            make_loss(self.loss, self.loss_args)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        check(
            "max_off_policy_steps",
            _is_int(self.max_off_policy_steps) and self.max_off_policy_steps >= 0,
            "must be an integer >= 0",
        )
        check(
            "rollouts_per_example",
            self.rollouts_per_example >= 2,
            "must be >= 2: the baseline is the mean of a group",
        )
        if self.batch_size % self.rollouts_per_example:
            groups = math.ceil(self.batch_size / self.rollouts_per_example)
            raise ConfigError(
                f"batch_size={self.batch_size} is not a multiple of "
                f"rollouts_per_example={self.rollouts_per_example}; "
                f"try batch_size={groups * self.rollouts_per_example}"
            )
        for name in ("max_prompt_len", "max_tokens"):
            value = getattr(self, name)
            check(
                name,
                value is None or value < self.max_seq_len,
                f"must be below max_seq_len={self.max_seq_len}",
            )

    @property
    def token_budget(self) -> int:
        """Tokens of one forward pass on one rank."""
        return self.max_tokens_per_microbatch or self.micro_batch_size * self.max_seq_len

    @property
    def groups_per_batch(self) -> int:
        return self.batch_size // self.rollouts_per_example

    def group_filter(self) -> GroupFilter:
        return GroupFilter(self.min_reward_variance, self.min_reward, self.max_reward)

    @property
    def max_groups_per_batch(self) -> int:
        """Groups generated for one batch at most, those that the filter rejects included."""
        if self.group_filter().lets_all_pass:
            return self.groups_per_batch
        # 1e-9: 100 * 1.15 is 114.99999999999999
        return max(int(self.groups_per_batch * self.max_oversampling + 1e-9), 1)

    def with_sampling(self, options: dict[str, Any]) -> RLConfig:
        """A copy with these sampling options in place of its own, for one of several environments.

        Raises:
            ConfigError: one is out of range, or cannot differ between environments.
        """
        copied = copy.copy(self)
        for name, value in options.items():
            if name not in _SAMPLING_OF_ONE_ENV:
                raise ConfigError(
                    f"{name}={value!r}: cannot be set for one environment; known: "
                    f"{', '.join(_SAMPLING_OF_ONE_ENV)}"
                )
            setattr(copied, name, value)
        copied._check_ranges()
        return copied

    def sampling_args(self) -> dict[str, Any]:
        """What a rollout request carries. Neutral values are left out, except those whose default
        the server may change through the model's generation_config.json.
        """
        extra: dict[str, Any] = {
            "top_k": self.top_k if self.top_k is not None else -1,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "return_token_ids": True,
        }
        return {
            # None: verifiers leaves it out, and the server fills up its max_model_len.
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logprobs": True,
            "extra_body": extra,
        }

    def sampling_changes_probabilities(self) -> list[str]:
        """Options by which the server samples from another distribution than
        softmax(logits / temperature).
        """
        neutral = {
            "top_p": 1.0,
            "top_k": None,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        return [name for name, value in neutral.items() if getattr(self, name) != value]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
