"""Evaluations beside training: when each begins and ends.

    step k ends        request(k)    the weights of version k are to be evaluated
    step k             push version k, begin(): rollouts of the evaluation and of the pending
                       batches share the server, and have version k from here on
    step k + 1         end(): wait for the evaluation, then push version k + 1

So an evaluation adds no push, and holds up only the push after its own, by what it still needs
when the step before that push is done. In the last `max_off_policy_steps` steps no batch is
requested, and so nothing is pushed; an evaluation that is due there makes a push of its own. One
that is due behind the last step uses the push of the final weights.

A checkpoint says whether the evaluation of its weights was still to begin or to end. The resumed
run then begins it, and removes what the killed run may have logged of it. Before a checkpoint, the
evaluation of earlier weights is awaited, except where a signal or an error ends the run: then the
resumed run evaluates the checkpoint's weights in their place.
"""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from verifiers_rl.config import ConfigError
from verifiers_rl.distributed import broadcast_values
from verifiers_rl.types import Rollout


class Evaluations(TrainerCallback):
    """The evaluation that is due, the one that runs, and the results of those that have ended.
    On rank 0; on the other ranks nothing is ever due.

    Args:
        trainer: the `RLTrainer`.

    Attributes:
        groups: of evaluations that have ended, to be written, by the step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.forget()

    def forget(self) -> None:
        """Forget the evaluations of a run before."""
        self.is_due = False  # the weights of this step are to be evaluated
        self._running: int | None = None  # the step of the evaluation that has begun
        self.ended: dict[int, dict[str, float]] = {}  # metrics, by the step of the weights
        self.groups: dict[int, list[list[Rollout]]] = {}

    def begin(self) -> None:
        """Begin the evaluation that is due, if one is. The server gets the weights of this step
        first, unless it has them.
        """
        if not self.is_due:
            return
        self.end()
        trainer, step = self._trainer, self._trainer.state.global_step
        trainer.push_weights()
        trainer.orchestrator.begin_evaluation(trainer.weight_sync.model_name, step)
        self._running, self.is_due = step, False

    def end(self) -> None:
        """Wait for the evaluation that runs, if one does.

        Raises:
            ConfigError: `metric_for_best_model` is none of its metrics.
        """
        if self._running is None:
            return
        start = time.monotonic()
        metrics, self.groups[self._running] = self._trainer.orchestrator.end_evaluation()
        best = (self._trainer.args.metric_for_best_model or "").removeprefix("eval_")
        if best and best not in metrics:
            if metrics.get("error_share") != 1:
                raise ConfigError(
                    f"metric_for_best_model={best!r}: evaluations have {', '.join(metrics)}; set "
                    "one of these. With eval_on_start=True, a run says it before its first step"
                )
            metrics[best] = 0.0  # as a failed rollout counts
        self.ended[self._running] = {**metrics, "wait_s": time.monotonic() - start}
        self._running = None

    def finish(self) -> None:
        """Wait for the evaluations that run or are due."""
        self.begin()
        self.end()

    def begin_again(self) -> None:
        """Evaluate this step's weights in place of those of a running evaluation, which was
        discarded: the server has lost its weights, and the trainer may have newer ones.
        """
        if self._running is not None:
            self._running, self.is_due = None, True

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the evaluations that run or are due, and log them."""
        self._trainer._on_rank_0(self.finish)
        self.log_ended()

    def log_ended(self, prefix: str = "eval") -> dict[str, float]:
        """Log the results of evaluations that have ended on rank 0 since the last call, each at the
        step whose weights were evaluated, and tell callbacks. Every rank calls this. Return the
        metrics of the trainer's current step; {} if none of them is of it.

        Args:
            prefix: of the names of the current step's metrics; earlier ones have "eval".
        """
        ended = broadcast_values({str(step): results for step, results in self.ended.items()})
        trainer, state = self._trainer, self._trainer.state
        now = state.global_step, state.epoch
        current: dict[str, float] = {}
        for key, results in ended.items():
            step = int(key)
            self.ended.pop(step, None)  # on rank 0. If a callback fails, the others stay
            is_current = step == now[0]
            own_prefix = prefix if is_current else "eval"
            metrics = {f"{own_prefix}_{name}": value for name, value in results.items()}
            if not is_current:
                state.global_step, state.epoch = step, step / state.max_steps
            try:
                trainer.log(metrics)
                trainer.control = trainer.callback_handler.on_evaluate(
                    trainer.args, state, trainer.control, metrics
                )
                if not is_current:
                    # Begun anew by a resumed run; Trainer does this for those that it waits for.
                    trainer._determine_best_metric(metrics, None)
            finally:
                state.global_step, state.epoch = now
            current = metrics if is_current else current
        return current

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return whether a run that continues at this step has an evaluation to begin."""
        return {"due": self.is_due or self._running is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._trainer.args.process_index == 0:
            self.is_due = state["due"]
