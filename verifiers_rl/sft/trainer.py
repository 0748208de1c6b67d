"""`SFTTrainer`: supervised finetuning as `RLTrainer`'s own step on other batches.

    rows ──► tokens and loss masks ──► DatasetSource.get(): Batch ──► RLTrainer's step
             conversations.py          in place of the orchestrator   cross_entropy as its loss

Packing, chunked logprobs, LoRA, several ranks, checkpoints and metrics are those of `RLTrainer`.
Without an environment there is no server. With one, evaluations run on it through `vf-vllm`, which
gets the weights for them only; the loss on a held-out dataset needs no server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedModel

from verifiers_rl.config import ConfigError
from verifiers_rl.data import example_index
from verifiers_rl.distributed import broadcast_batch, broadcast_outcome, reduce_over_ranks
from verifiers_rl.losses import LossFn
from verifiers_rl.models import absolute_path
from verifiers_rl.report.run_folder import rl_state_of
from verifiers_rl.sft.config import SFTConfig, is_loss
from verifiers_rl.sft.conversations import Tokenization, Tokens, make_samples
from verifiers_rl.trainer import RLTrainer
from verifiers_rl.types import Batch, BatchSource

logger = logging.getLogger(__name__)
# What a step logs of rollouts, and nothing is known of where there are none.
_OF_ROLLOUTS = (
    *("importance_ratio", "importance_ratio_max", "mismatch_kl", "clamped_share", "advantage_abs"),
    *("idle_sample_share", "num_masked_samples", "policy_version", "wait_s", "sync_s"),
)


class DatasetSource:
    """A `BatchSource` that takes the batches from a dataset, one behind the other. A resumed run
    goes on behind the rows of its checkpoint, also with another batch_size or more epochs.

    Args:
        rows: the samples of each row; only rank 0 needs them.
        batch_size: rows of a batch.
        shuffle: take the rows in another order in each epoch, which follows from `seed`.
        seed: see `data.example_index`.
        num_positions: rows of the whole run, each counted every time; None: no end. The last batch
            has what is left.
    """

    # Options that have an effect beside this source (arguments.py).

    def __init__(
        self,
        rows: Sequence[Sequence[Tokens]],
        batch_size: int,
        shuffle: bool = True,
        seed: int = 42,
        num_positions: int | None = None,
    ) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._num_positions = num_positions
        self._steps: list[int] = []  # submitted
        self._first = (0, 0)  # the step with which this run began, and its position
        self.evaluator: BatchSource | None = None  # runs the evaluations on environments
        self._evaluates: int | None = None  # the policy version that the evaluator has

    @property
    def num_pending(self) -> int:
        return len(self._steps)

    @property
    def evaluated(self) -> Any:
        """The groups of the last evaluations, see `Orchestrator`; None without an environment."""
        return getattr(self.evaluator, "evaluated", None)

    @property
    def has_evaluated(self) -> bool:
        """Whether the evaluation that was begun last has all its rollouts, and nobody has taken
        its results.
        """
        return bool(self.evaluated) and self.evaluated[-1][0] == self._evaluates

    def position(self, step: int) -> int:
        """Return how many rows a run has trained on when this step begins, each counted every
        time.
        """
        first_step, first = self._first
        position = first + (step - first_step) * self._batch_size
        return position if self._num_positions is None else min(position, self._num_positions)

    def num_epochs(self, step: int) -> float:
        """Return how often each row was trained on when this step begins."""
        return self.position(step) / len(self._rows)

    def submit(self, step: int, model: str, policy_version: int) -> None:
        self._steps.append(step)

    def get(self) -> Batch:
        step, num_rows = self._steps.pop(0), len(self._rows)
        start, stop = self.position(step), self.position(step + 1)
        rows = [
            self._rows[example_index(position, num_rows, self._shuffle, self._seed)]
            for position in range(start, stop)
        ]
        return Batch(step, step, make_samples(rows), metrics={"num_epochs": stop / num_rows})

    def start(self) -> None:
        self._first = (0, 0)
        if self.evaluator is not None:
            self.evaluator.start()

    def stop(self) -> None:
        self._steps.clear()
        if self.evaluator is not None:
            self.evaluator.stop()

    def raise_if_failed(self) -> None:
        if self.evaluator is not None:
            self.evaluator.raise_if_failed()

    def wait(self) -> None: ...

    def discard(self) -> None:
        self._steps.clear()
        self._evaluates = None
        if self.evaluator is not None:
            self.evaluator.discard()

    def begin_evaluation(
        self, num_examples: int, num_rollouts: int, model: str, policy_version: int
    ) -> None:
        assert self.evaluator is not None
        self.evaluator.begin_evaluation(num_examples, num_rollouts, model, policy_version)
        self._evaluates = policy_version

    def end_evaluation(self) -> dict[str, float]:
        assert self.evaluator is not None
        self._evaluates = None
        return self.evaluator.end_evaluation()

    def state_dict(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "position": self.position(step),
            "num_rows": len(self._rows),
            "batch_size": self._batch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:  # of a run that saved no position
            return
        self._first = (state["step"], state["position"])
        for name, now in (("num_rows", len(self._rows)), ("batch_size", self._batch_size)):
            if now != state[name]:
                logger.warning(
                    "%s is %d, and was %d before the checkpoint: the run goes on behind its first "
                    "%d rows%s",
                    name,
                    now,
                    state[name],
                    state["position"],
                    ", and epochs of other rows have another order" if name == "num_rows" else "",
                )


class NoServer:
    """A `WeightSink` where nobody samples from the weights: it sends nothing."""

    policy_version: int | None = None
    model_name = ""

    def push(
        self, model: nn.Module, policy_version: int, in_flight: Literal["recompute", "keep"]
    ) -> dict[str, float]:
        self.policy_version = policy_version
        return {}

    def check_server(self) -> None: ...
    def wait_for_server(self) -> None: ...
    def close(self) -> None: ...


class SFTTrainer(RLTrainer):
    """Trains a causal language model on what a dataset says.

    Args:
        model: a folder, a name on the hub, or a loaded model, as in `RLTrainer`.
        args: all options.
        train_dataset: rows that can be counted and indexed: a list of dicts, or a
            `datasets.Dataset`. conversations.py says which columns they have.
        eval_dataset: rows that are not trained on. `eval_strategy` says when their loss is taken.
        env: an environment, or several, as `RLTrainer` takes them. Evaluations run on it, through
            a `vf-vllm` that runs already.
        processing_class: the tokenizer; default: the model's own.
        loss_fn: replaces `args.loss`, see losses.py.
        peft_config: any PEFT config in place of the LoRA that `args` describes.
        **others: `callbacks`, `optimizers` and whatever else `RLTrainer` takes.

    Raises:
        ConfigError: an option, an argument or the data cannot work, or would have no effect.
        InvalidEnvironmentError, InferenceServerError: see `RLTrainer`; only with `env`.
    """

    args: SFTConfig
    config_class = SFTConfig

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module,
        args: SFTConfig,
        train_dataset: Any,
        eval_dataset: Any = None,
        *,
        env: Any = None,
        processing_class: Any = None,
        loss_fn: LossFn | None = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        if not isinstance(args, SFTConfig):
            raise ConfigError(f"args: expected an SFTConfig, got {type(args).__name__}")
        if args.eval_strategy != "no" and eval_dataset is None and env is None:
            raise ConfigError(
                "eval_strategy: there is nothing to evaluate on; give an eval_dataset (eval under "
                "[data]) or an env, or set it to 'no'"
            )
        args = args.for_evaluations(eval_dataset is not None, env is not None)
        model = absolute_path(model)
        if processing_class is None:
            named = model if isinstance(model, str) else model.name_or_path
            processing_class = AutoTokenizer.from_pretrained(named)
        train, held_out = list[list[Tokens]](), list[list[Tokens]]()
        last_token: int | None = None
        if args.process_index == 0:
            tokens = Tokenization(
                processing_class,
                args.loss_on,
                args.max_seq_len,
                cast(dict[str, Any], args.chat_template_kwargs),
            )
            train = tokens.of_rows(train_dataset, "for training", print).rows
            last_token = tokens.last_token(train)
            if eval_dataset is not None:
                held_out = tokens.of_rows(eval_dataset, "for evaluations", print).rows
        found = broadcast_outcome({"num_rows": len(train), "last_token": last_token}, args.device)
        num_positions = args.num_positions(found["num_rows"])
        args = args.counted(found["num_rows"])
        source = DatasetSource(train, args.batch_size, args.shuffle, args.seed, num_positions)
        if env is None:
            others = {"orchestrator": source, "weight_sync": NoServer(), **others}
        super().__init__(
            model, _for_evaluations(env), args, processing_class, loss_fn, peft_config, **others
        )
        if env is not None and self.orchestrator is not None:
            source.evaluator, self.orchestrator = self.orchestrator, source
            self.checkpoints.kept["orchestrator"] = source
        self._source = source if args.process_index == 0 else None
        self._held_out = make_samples(held_out)
        self._has_held_out = eval_dataset is not None
        self._let_servers_stop_at(found["last_token"])

    def _let_servers_stop_at(self, token: int | None) -> None:
        """Add the token that ends replies to those in the model's generation_config, which is saved
        with it. A server goes on behind any other token, up to its length limit.
        """
        config = getattr(self._base_of(self.model), "generation_config", None)
        if token is None or config is None:
            return
        known = config.eos_token_id
        known = [known] if isinstance(known, int) else list(known or [])
        if token in known:
            return
        config.eos_token_id = [*known, token]
        if self.is_world_process_zero():
            text = cast(Any, self.processing_class).decode([token])
            then = "generation_config.json of the saved model names it now"
            if hasattr(self.model, "peft_config") and self.args.save_final != "merged":
                then = "an adapter alone cannot say so; set save_final = 'merged'"
            print(f"replies end with {text!r}, and the model's server does not stop there: {then}")

    # --- The step ---------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Count the steps of the run: those before its checkpoint, if it has one, and those that
        take the rows behind.
        """
        resumed = self.checkpoints._resumed
        if resumed is not None:
            self.args.max_steps = self.args.max_steps_behind(rl_state_of(resumed))
        return super().get_train_dataloader()

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Do as `RLTrainer`, and log nothing of rollouts."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        for name in _OF_ROLLOUTS:
            self._window.steps[-1].pop(name, None)
        return loss

    def _take_batch(self, orchestrator: BatchSource) -> None:
        """Take the next batch. The weights are sent only where an evaluation is to begin."""
        if self.evaluations.due is not None:
            self._sync_weights()
        elif getattr(orchestrator, "has_evaluated", False):  # and its results are to be logged
            self.evaluations.end(orchestrator)
        orchestrator.submit(self.state.global_step, "", self.state.global_step)
        self.batch = orchestrator.get()

    # --- Evaluation, logs -------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Do as `RLTrainer.log`, with the epochs of the data. Trainer takes all steps of a run for
        one.
        """
        epoch = self.state.epoch
        if epoch is not None and self._source is not None:
            self.state.epoch = self._source.num_epochs(self.state.global_step)
        try:
            super().log(logs, start_time)
        finally:
            self.state.epoch = epoch

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate the current weights: the loss on the held-out rows, and on the environment as
        `RLTrainer.evaluate` does. Both are logged.
        """
        if self._env is None and not self._has_held_out:
            raise ConfigError("there is nothing to evaluate on; give an eval_dataset or an env")
        metrics: dict[str, float] = {}
        if self._env is not None:
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        elif eval_dataset is not None:
            raise ConfigError("evaluate() takes no dataset: SFTTrainer(eval_dataset=...) does")
        if self._has_held_out:
            found = self._log_held_out_loss(metric_key_prefix)
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, found
            )
            metrics |= found
        return metrics

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Take the loss on the held-out rows now. An evaluation on an environment begins with the
        next push, and training goes on; if `metric_for_best_model` is set, both are done now.
        """
        waits = self.args.metric_for_best_model is not None
        if self._env is not None and (waits or not self._has_held_out):
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        self.control.should_evaluate = False
        if skip_scheduler and self.state.global_step:  # eval_on_start, and the run began before
            return {}
        if self._env is None:
            return self.evaluate()
        super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        return self._log_held_out_loss("eval")

    def _log_held_out_loss(self, prefix: str) -> dict[str, float]:
        start = time.monotonic()
        with self.checkpoints.saving_on_error():
            loss = self.held_out_loss()
        metrics = {f"{prefix}_loss": loss, f"{prefix}_loss_s": time.monotonic() - start}
        self.log(metrics)
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Do as Trainer, except where a resumed run has begun the evaluation on the environment
        again, and the best model is that of the smallest loss on the held-out rows.
        """
        if is_loss(self.args.metric_for_best_model) and "eval_loss" not in metrics:
            return False
        return super()._determine_best_metric(metrics, trial)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean cross entropy, in nats, of the loss tokens of the held-out rows. Every
        rank calls this.
        """
        args, model = self.args, self.model_wrapped
        if self.support is None:
            self.support = self._try_model(model)
        batch = Batch(0, 0, self._held_out) if args.process_index == 0 else None
        batch = broadcast_batch(batch, args.device)
        sizes = batch.sizes
        weights = [1.0] * len(sizes.lengths)
        total = torch.zeros((), dtype=torch.float64, device=args.device)
        was_training = model.training
        model.eval()
        try:
            for microbatch, _ in self._microbatches(batch, sizes.num_loss_tokens > 0, weights):
                self._interrupts.check_all(waits=False)
                logprobs, _ = self.token_logprobs(model, microbatch, "none")
                if microbatch.has_loss:
                    total -= logprobs.double().sum()
        finally:
            model.train(was_training)
        return reduce_over_ranks(total).item() / int(sizes.num_loss_tokens.sum())


def _for_evaluations(env: Any) -> Any:
    """Return an environment, or a mix of several, in which those for evaluations alone may also
    stand where others are trained on, because none is.
    """
    mixed = env if isinstance(env, list | tuple) else ()
    is_apart = bool(mixed) and all(getattr(one, "only", None) == "eval" for one in mixed)
    return [replace(one, only=None) for one in mixed] if is_apart else env
