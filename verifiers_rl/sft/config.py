"""`SFTConfig`: the options of supervised finetuning. They are those of `RLConfig`, some with other
defaults, without those of rollouts, and with a few of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from verifiers_rl.advantages import AdvantageFn
from verifiers_rl.config import SAMPLING_OF_ONE_ENV, ConfigError, RLConfig, with_hints
from verifiers_rl.losses import LossFn, cross_entropy
from verifiers_rl.option_rules import (
    NotNegativeNumber,
    PositiveInt,
    PositiveNumber,
    Share,
    must,
    one_of,
)

LOSSES: dict[str, LossFn] = {"cross_entropy": cross_entropy}
_OF_ROLLOUTS = (
    *(name for name in SAMPLING_OF_ONE_ENV if name != "chat_template_kwargs"),
    "rollouts_per_example",
    "max_off_policy_steps",
    "deterministic",
    "max_prompt_len",
    "sampling_mask",
    "router_replay",
    "mask_truncated_completions",
    "zero_truncated_completions",
    "generation_timeout",
    "max_concurrent",
    "eval_examples",
    "eval_rollouts_per_example",
    "eval_sampling",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_servers",
    "log_rollouts",
    "env_workers",
    "weight_sync_backend",
)
_UNUSED = {
    **{k: v for k, v in RLConfig.UNUSED.items() if k != "num_train_epochs"},
    **dict.fromkeys(_OF_ROLLOUTS, "the data has the replies, so nothing is sampled"),
    **dict.fromkeys(("advantage", "group_filter"), "the data has no rewards"),
    "neftune_noise_alpha": "it is not supported",
    "mask_env_responses": "only what the assistant says is in the loss",
    "temperature": "logprobs are taken at 1",
    "gradient_masks": "no policy has sampled the tokens, so there are no importance ratios",
}
_is_loss = must("be 'loss', of the held-out rows", lambda name: name in ("loss", "eval_loss"))


@with_hints
@dataclass
class SFTConfig(RLConfig):
    """Options of `SFTTrainer`.

    Raises:
        ConfigError: see `RLConfig`.
    """

    TRAINER, BEST = "SFTTrainer", "loss"
    UNUSED, NAMED_LOSSES = _UNUSED, LOSSES
    INHERITED_RULES = RLConfig.INHERITED_RULES | {"metric_for_best_model": _is_loss}

    # --- Supervised finetuning --------------------------------------------------------------------
    num_train_epochs: PositiveNumber = 1.0
    """How often each row is trained on, in another order each time; or set max_steps."""
    max_steps: Annotated[int, must("be >= 1, or -1", lambda steps: steps == -1 or steps > 0)] = -1
    """Optimizer steps, through as many epochs as these take. -1: num_train_epochs decides."""
    batch_size: PositiveInt = 32
    """Rows of one optimizer step, over all ranks."""
    learning_rate: NotNegativeNumber = 1e-4
    """Peak learning rate. The default is for LoRA; all weights need about a tenth of it."""
    run_name: str | None = "sft"
    """Name of the run, for the folder and the trackers."""
    loss: Annotated[str, one_of(LOSSES)] = "cross_entropy"
    """cross_entropy, or "module:function" for your own."""
    rollouts_per_example: PositiveInt = 1
    temperature: PositiveNumber = 1.0
    max_off_policy_steps: int = 0
    log_rollouts: Share = 0.0

    def _check_together(self) -> None:
        super()._check_together()
        if self.max_steps != -1 and self.num_train_epochs != 1.0:
            raise ConfigError(
                f"num_train_epochs={self.num_train_epochs!r}: without effect beside "
                f"max_steps={self.max_steps}; remove one of the two"
            )

    def make_advantage(self) -> AdvantageFn:
        """Return what nobody calls: there are no rewards."""
        return lambda group: []
