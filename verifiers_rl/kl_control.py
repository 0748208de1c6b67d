"""Changes the weight of the KL penalty after each step (`kl_target`); keeps it in checkpoints."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from verifiers_rl.losses import AdaptiveKL, LossFn
from verifiers_rl.report.metrics import StepWindow


class KLControl(TrainerCallback):
    """Updates the `AdaptiveKL` of a loss with the KL of each step. A step without loss tokens
    leaves the weight as it is.

    The KL is a mean over all ranks, so all ranks go on with the same weight.

    Args:
        loss_fn: from `RLConfig.complete_loss`. Without an `AdaptiveKL` nothing is done.
        window: has the metrics of the last step.
    """

    def __init__(self, loss_fn: LossFn, window: StepWindow) -> None:
        terms = getattr(loss_fn, "terms", ())
        self._term = next((term for term in terms if isinstance(term, AdaptiveKL)), None)
        self._window = window

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._term is None:
            return
        kl = self._window.steps[-1].get("reference_kl")
        if kl is not None:
            self._term.update(kl)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the weight; see `checkpoints.Kept`."""
        return {} if self._term is None else {"beta": self._term.beta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the weight of a checkpoint."""
        if self._term is not None and state:
            self._term.beta = state["beta"]
