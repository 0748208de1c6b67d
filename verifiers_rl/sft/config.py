"""`SFTConfig`: the options of supervised finetuning. They are those of `RLConfig`, some with other
defaults, without those of rollouts, and with a few of their own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Annotated, Any

from verifiers_rl.advantages import ADVANTAGES, AdvantageFn, of_rewards
from verifiers_rl.config import ConfigError, RLConfig, _option, refuse_unknown_options
from verifiers_rl.losses import LossFn, cross_entropy
from verifiers_rl.option_rules import (
    NotNegativeNumber,
    PositiveInt,
    PositiveNumber,
    must,
    one_of,
)
from verifiers_rl.sft.conversations import ROLES

LOSSES = {"cross_entropy": cross_entropy}
_ROLLOUTS = "the data has the replies, so nothing is sampled to train on"
_REWARDS = "the data has no rewards"
_RATIOS = "no policy has sampled the tokens, so there are no importance ratios"
_UNUSED = {
    **{k: v for k, v in RLConfig.UNUSED.items() if k != "num_train_epochs"},
    "neftune_noise_alpha": "it is not supported",
    "rollouts_per_example": _ROLLOUTS,
    "max_off_policy_steps": _ROLLOUTS,
    "deterministic": _ROLLOUTS,
    "max_prompt_len": _ROLLOUTS,
    "mask_env_responses": "loss_on chooses what is in the loss",
    "temperature": "logprobs are taken at 1; eval_sampling is that of evaluations",
    "advantage": _REWARDS,
    "group_filter": _REWARDS,
    "mask_truncated_completions": _ROLLOUTS,
    "zero_truncated_completions": _ROLLOUTS,
    "gradient_masks": _RATIOS,
    "sampling_mask": _ROLLOUTS,
    "router_replay": _ROLLOUTS,
}
_are_roles = must(
    f"be a list of roles, each of {', '.join(ROLES)}",
    lambda value: bool(value) and set(value) <= {*ROLES},
)
_RULES = {k: v for k, v in RLConfig.INHERITED_RULES.items() if k != "metric_for_best_model"}


def is_loss(metric: str | None) -> bool:
    """Return whether a name of `metric_for_best_model` is that of the loss on held-out rows."""
    return metric in ("loss", "eval_loss")


@refuse_unknown_options
@dataclass
class SFTConfig(RLConfig):
    """Options of `SFTTrainer`.

    Raises:
        ConfigError: see `RLConfig`.
    """

    TRAINER, METHOD, BEST = "SFTTrainer", "supervised finetuning", "loss"
    UNUSED, INHERITED_RULES = _UNUSED, _RULES

    # --- Supervised finetuning --------------------------------------------------------------------
    loss_on: Annotated[list[str], _are_roles] = _option(
        ["assistant"],
        "Roles whose messages are in the loss. A completion beside a prompt, and a text, have no "
        "roles and are in the loss whole.",
    )
    num_train_epochs: PositiveNumber = _option(
        1.0, "How often each row is trained on, in another order each time; or set max_steps."
    )
    max_steps: Annotated[int, must("be >= 1, or -1", lambda steps: steps == -1 or steps > 0)] = (
        _option(
            -1,
            "Optimizer steps, through as many epochs as these take. -1: num_train_epochs decides.",
        )
    )
    batch_size: PositiveInt = _option(32, "Rows of one optimizer step, over all ranks.")
    learning_rate: NotNegativeNumber = _option(
        1e-4, "Peak learning rate. The default is for LoRA; all weights need about a tenth of it."
    )
    run_name: str | None = _option("sft", "Name of the run, for the folder and the trackers.")
    loss: Annotated[str, one_of(LOSSES)] = _option(
        "cross_entropy", 'cross_entropy, or "module:function" for your own.'
    )
    rollouts_per_example: PositiveInt = 1
    temperature: PositiveNumber = 1.0
    max_off_policy_steps: int = 0

    def __post_init__(self) -> None:
        self._num_positions: int | None = None  # of a run whose rows are counted
        self._best_is_open = self.metric_for_best_model is None
        super().__post_init__()

    def _check_together(self) -> None:
        super()._check_together()
        if self.max_steps != -1 and self.num_train_epochs != 1.0 and self._num_positions is None:
            raise ConfigError(
                f"num_train_epochs={self.num_train_epochs!r}: without effect beside "
                f"max_steps={self.max_steps}; remove one of the two"
            )

    def make_loss(self) -> LossFn:
        return self._load(LOSSES, self.loss, "loss", "loss_args of loss", self.loss_args)

    def make_advantage(self) -> AdvantageFn:
        """Return what an evaluation's orchestrator needs and never calls."""
        return of_rewards(ADVANTAGES["mean"])

    def for_evaluations(self, has_held_out: bool, has_env: bool) -> SFTConfig:
        """Return a copy for these evaluations. Where only an environment is evaluated and nobody
        has chosen `metric_for_best_model`, it is the reward.

        Raises:
            ConfigError: no evaluation has the metric.
        """
        chosen = copy.copy(self)
        metric = self.metric_for_best_model
        if metric is None or self.eval_strategy == "no":
            return chosen
        if is_loss(metric) and not has_held_out:
            if not self._best_is_open:
                raise ConfigError(
                    f"metric_for_best_model={metric!r}: no evaluation has a loss, because there "
                    "are no held-out rows; set it to 'reward', or give an eval_dataset (eval under "
                    "[data])"
                )
            chosen.metric_for_best_model, chosen.greater_is_better = "reward", True
        elif not is_loss(metric) and not has_env:
            raise ConfigError(
                f"metric_for_best_model={metric!r}: evaluations on held-out rows have a loss only; "
                "set it to 'loss', or give an env"
            )
        return chosen

    def counted(self, num_rows: int) -> SFTConfig:
        """Return a copy for a run on this many rows, whose `max_steps` is set."""
        counted, num_positions = copy.copy(self), self.num_positions(num_rows)
        if num_positions is not None:
            counted.max_steps = -(-num_positions // self.batch_size)
            counted._num_positions = num_positions
        return counted

    @property
    def length_option(self) -> str:
        return "max_steps" if self._num_positions is None else "num_train_epochs"

    def max_steps_behind(self, state: dict[str, Any]) -> int:
        """Return the steps before the checkpoint, and those that take the rows behind it. Steps
        before may have had another `batch_size`.
        """
        position = (state.get("orchestrator") or {}).get("position")
        if self._num_positions is None or position is None:
            return self.max_steps
        num_left = self._num_positions - position
        # A part of a batch is a step. What was trained on too much is steps too many.
        num_steps = (
            -(-num_left // self.batch_size) if num_left >= 0 else num_left // self.batch_size
        )
        return int(state["orchestrator"]["step"] + num_steps)

    def num_positions(self, num_rows: int) -> int | None:
        """Return how many rows a run trains on, each counted every time; None: max_steps says."""
        if self.max_steps != -1:
            return None
        return max(round(self.num_train_epochs * num_rows), 1)
