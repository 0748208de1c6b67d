"""`RLTrainer`: one optimizer step on one batch of rollouts, then the weights go to the server.

    for step in range(max_steps):
        send the newest weights                    weight_sync.push(model, version)
        request the batch of the next step         orchestrator.submit(step + 1)
        wait for the batch of this step            orchestrator.get()
        train on the batch of this step            forward, loss_fn, backward for each microbatch;
                                                   optimizer.step()

With max_off_policy_steps = 1, as above, the server generates while the trainer trains, and each
batch is requested with weights that are one step older than those that it trains. While the trainer
waits for a batch, the next one uses what this one leaves of the server; what is left of this one
is then sampled from the newer weights. With 0, each step first sends the weights and requests its
batch, and each side waits for the other. With k > 1, k batches are requested in advance. An
evaluation begins behind a push, runs beside the step, and ends before the next push, see
evaluation.py.

Everything else (optimizer, schedule, clipping, logging, checkpoints, callbacks) is
transformers.Trainer's own. The class reads from top to bottom:

    The loss               what a microbatch adds to it: a term per token, a second loss
    The step               microbatches, accumulation of gradients, more than one update a batch
    Batches and weights    the rhythm: when weights are sent and batches are requested
    Evaluations, the run, the hooks of Trainer
    Rank 0                 what it does alone; signals; a lost server
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from peft.helpers import disable_input_dtype_casting
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, set_seed

from verifiers_rl.advantages import AdvantageFn
from verifiers_rl.checkpoints import Checkpoints, SavingTrainer, check_final, seed_step
from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.data import ExampleOrder
from verifiers_rl.distributed import (
    NotFiniteError,
    accumulating,
    broadcast_batch,
    broadcast_values,
    connect_hosts,
    failing_together,
    host_group,
    prepare_ranks,
    raise_if_gradient_not_finite,
    raise_if_not_finite,
)
from verifiers_rl.evaluation import Evaluations
from verifiers_rl.forward import evaluating, predict_targets, try_model
from verifiers_rl.inference.client import ServerLostError
from verifiers_rl.logprobs import Entropy
from verifiers_rl.loss_check import checked
from verifiers_rl.losses import LossFn, LossInputs, adaptive_kl_of, needs_of, weigh_samples
from verifiers_rl.models import absolute_path, check_policy, load_policy, tokenizer_of
from verifiers_rl.orchestrator import Orchestrator
from verifiers_rl.packing import Microbatch, ModelSupport, collate, copy_to, plan_batch
from verifiers_rl.process.interrupts import Interrupted, Interrupts
from verifiers_rl.process.terminal import print_all_characters
from verifiers_rl.report.metrics import (
    ShortProgress,
    StepMetrics,
    StepWindow,
    device_metrics,
    model_flops,
)
from verifiers_rl.report.recording import RunFiles
from verifiers_rl.report.run_folder import enter_run_folder
from verifiers_rl.sync.sources import adapter_of, base_of, gathering
from verifiers_rl.types import Batch, BatchSource, WeightSink
from verifiers_rl.wiring import Replaced, check_arguments, make_source_and_sink

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class RLTrainer(SavingTrainer):
    """Trains a causal language model by reinforcement learning on a `verifiers` environment.

    Args:
        model: a folder, a name on the hub, or a loaded model. An adapter that the folder or the
            model has already is trained further.
        env: an `Env` or a `Taskset` of `verifiers.v1`, the id of a taskset, an
            `EnvRunner`, or a list of `WeightedEnv` to mix; None if `orchestrator` is given.
        args: all options.
        processing_class: the tokenizer; default: the model's own.
        loss_fn: `LossInputs -> LossOutputs`, called on each microbatch; replaces `args.loss`.
        advantage_fn: computes advantages from the rollouts of a group, one per rollout or one per
            token (see advantages.py); replaces `args.advantage`.
        example_order: chooses the examples of a step (see data.py); replaces `args.shuffle`
            and the weights of several environments.
        peft_config: any PEFT config in place of the LoRA that `args` describes.
        orchestrator: gives batches in place of the `Orchestrator` of `env`.
        weight_sync: takes weights in place of the `WeightSync` to the server.
        **trainer_kwargs: `callbacks`, `optimizers` and whatever else `transformers.Trainer` takes.

    Raises:
        ConfigError: an option or an argument cannot work, or would have no effect.
        InvalidEnvironmentError: the environment cannot be trained on.
        InferenceServerError: there is no server, it serves another model, or it cannot take these
            weights.
    """

    args: RLConfig
    config_class = RLConfig  # the class that `vf-train` makes from [trainer.args]
    evaluates_at_once = False  # else beside the steps
    steps_per_epoch = 0  # 0: the run has no epochs
    # On rank 0. The other ranks have neither.
    orchestrator: BatchSource = cast(Any, None)
    weight_sync: WeightSink = cast(Any, None)

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module,
        env: Any = None,
        args: RLConfig = None,  # type: ignore[assignment]
        processing_class: Any = None,
        loss_fn: LossFn | None = None,
        peft_config: Any = None,
        *,
        advantage_fn: AdvantageFn | None = None,
        example_order: ExampleOrder | None = None,
        orchestrator: BatchSource | None = None,
        weight_sync: WeightSink | None = None,
        **trainer_kwargs: Any,
    ) -> None:
        print_all_characters()
        replaced = Replaced(loss_fn, advantage_fn, example_order, orchestrator, weight_sync)
        check_arguments(model, env, args, processing_class, replaced, trainer_kwargs)
        connect_hosts(args)
        model = absolute_path(model)
        if processing_class is None:
            processing_class = tokenizer_of(model)
        if not hasattr(processing_class, "pad_token_id"):  # a processor, for text and images
            processing_class = processing_class.tokenizer
        self.loss_fn = checked(args.complete_loss(loss_fn), self)
        set_seed(args.seed)  # also determines the weights of a new adapter
        policy = load_policy(model, args, peft_config)
        optimizers = trainer_kwargs.get("optimizers", [])
        check_policy(policy, args, needs_of(self.loss_fn), *optimizers[:1])
        check_final(policy, args)
        if args.process_index == 0:
            self.orchestrator, self.weight_sync = make_source_and_sink(
                policy, env, args, processing_class, replaced, Orchestrator
            )
        # Trainer requires a dataset for eval_strategy. Evaluations use the environment's own.
        trainer_kwargs["eval_dataset"] = []
        super().__init__(policy, args, processing_class=processing_class, **trainer_kwargs)
        self.batch: Batch | None = None  # that is being trained on
        self._is_serving = False
        self._metrics = dict[str, float]()  # of the step: what rank 0 has waited for and sent
        self._num_flops = 0  # of the step, of this rank's share
        # The KL penalty's reference, copied before the model is prepared for training. With LoRA it
        # is the model without its adapter.
        needs_copy = "reference_logprobs" in needs_of(self.loss_fn)
        needs_copy &= not hasattr(policy, "disable_adapter")
        prepare_ranks(self.accelerator, args, needs_copy)
        self._reference = copy.deepcopy(policy).requires_grad_(False).eval() if needs_copy else None
        # Rank 0 has chosen, and the others gather what it sends.
        lora_sync = getattr(self.weight_sync, "lora_sync", args.lora_sync)
        self._lora_sync = broadcast_values({"lora_sync": lora_sync})["lora_sync"]
        self._interrupts, self._window = Interrupts(), StepWindow()
        self.evaluations = Evaluations(self)
        self.checkpoints, self._files = Checkpoints(self), RunFiles(self)
        if (adaptive_kl := adaptive_kl_of(self.loss_fn)) is not None:
            self.checkpoints.kept["adaptive_kl"] = adaptive_kl
        # Trainer's own progress bar or printer, which it adds last. `RunFiles` prints.
        self.callback_handler.callbacks.pop()
        progress = [] if args.disable_tqdm else [ShortProgress()]
        ours = [self.evaluations, self.checkpoints, *progress, self._files, self._window]
        self.callback_handler.callbacks[:0] = ours  # before others close files, or fail

    # --- The loss ---------------------------------------------------------------------------------

    def microbatch_loss(
        self, model: nn.Module, microbatch: Microbatch, metrics: StepMetrics
    ) -> Tensor:
        """Compute the loss of a microbatch: a scalar, the SUM over its N loss tokens.

        Args:
            model: as it was prepared for training.
            microbatch: on the device of the model.
            metrics: takes what is logged: (N,) tensors by name.

        Samples whose advantages are all 0 are not here if the loss needs nonzero ones, see `needs`.
        """
        targets, needs = microbatch.targets, needs_of(self.loss_fn)
        entropy_mode: Entropy = "gradient" if "entropy_gradient" in needs else "value"
        logprobs, entropy = self.token_logprobs(model, microbatch, entropy_mode)  # (N,) each
        has_reference = "reference_logprobs" in needs
        inputs = LossInputs(
            trainer_logprobs=logprobs,
            # NaN marks tokens that no policy sampled (mask_env_responses=False). Their ratio is 1.
            inference_logprobs=torch.where(
                targets.inference_logprobs.isnan(), logprobs.detach(), targets.inference_logprobs
            ),
            advantages=targets.advantages,
            weights=targets.weights,
            sequence_ids=targets.sequence_ids,
            entropy=entropy,
            reference_logprobs=self.reference_logprobs(microbatch) if has_reference else None,
            extras=targets.extras,
        )
        outputs = self.loss_fn(inputs)
        metrics.add(inputs, outputs.metrics, microbatch)
        return outputs.loss if microbatch.has_loss else 0.0 * (logprobs.sum() + entropy.sum())

    def token_logprobs(
        self, model: nn.Module, microbatch: Microbatch, entropy: Entropy = "value"
    ) -> tuple[Tensor, Tensor]:
        """Compute the logprob of each target, and the entropy of its prediction, (N,) each. See
        forward.py.
        """
        # accelerate adds autocast to a prepared model's forward. Head and reference need it here.
        with self.accelerator.autocast():
            return predict_targets(
                model, self._base_of(model), microbatch, self.args, self.tried_support, entropy
            )

    @torch.no_grad()
    def reference_logprobs(self, microbatch: Microbatch) -> Tensor:
        """Compute the targets' logprobs (N,) under the reference: the model without its adapter, or
        the frozen copy of the model at the start.
        """
        if self._reference is not None:
            return self.token_logprobs(self._reference, microbatch, "none")[0]
        model: Any = self.accelerator.unwrap_model(self.model)
        with evaluating(model), model.disable_adapter():
            return self.token_logprobs(model, microbatch, "none")[0]

    # --- The step ---------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Train on this step's batch: forward and backward. Trainer then takes the optimizer's
        step.

        Returns:
            Scalar: this rank's share of the loss, times world_size. Its mean over ranks is the
            batch's loss.
        """
        self._metrics, self._window.step_began = {}, time.monotonic()
        seed_step(self.args, self.state.global_step)
        self.batch = batch = self._next_batch()
        start = time.monotonic()
        metrics = StepMetrics(batch, self._files.values_of(batch))
        loss = self.train_on(model, batch, metrics)
        self.checkpoints.can_repeat_step = False  # until the optimizer has changed all weights
        metrics.reduce()  # waits for the device
        train_s = time.monotonic() - start
        if (adaptive_kl := adaptive_kl_of(self.loss_fn)) is not None:
            adaptive_kl.update(metrics.means)  # the same on all ranks
        num_flops = model_flops(
            self._base_of(self.model), metrics.num_tokens, metrics.num_loss_tokens
        )
        self._num_flops = num_flops // self.args.world_size
        self._window.steps.append(
            {**batch.metrics, **self._metrics, "train_s": train_s, **metrics.means}
            | metrics.counts()
            | device_metrics(self.args.device, self._num_flops, train_s)
        )
        return loss

    def train_on(
        self,
        model: nn.Module,
        batch: Batch,
        metrics: StepMetrics,
        chosen: np.ndarray | None = None,
    ) -> Tensor:
        """Run forward and backward on this rank's share of a batch, and return its loss.

        The loss of each microbatch is a sum. This method divides it once, by a number that belongs
        to the batch on all ranks (`loss_normalization`). DDP averages gradients over ranks; the
        factor `world_size` undoes this. So the gradient does not depend on how the batch was split.

        Args:
            chosen: (S,) bool, the samples to train on; all by default. A step of two updates calls
                this for a part of the samples, then `update_now`, and again for the others.
        """
        args, sizes = self.args, batch.sizes
        num_loss_tokens = sizes.num_loss_tokens
        if chosen is not None:
            num_loss_tokens = np.where(chosen, num_loss_tokens, 0)
        constant = args.batch_size * args.max_seq_len
        loss_weights, denominator = weigh_samples(
            num_loss_tokens, sizes.rollout_ids, args.loss_normalization, constant
        )
        # Samples without gradient count in the denominator, but are not computed.
        is_computed = num_loss_tokens > 0
        if "nonzero_advantages" in needs_of(self.loss_fn):
            is_computed &= sizes.has_advantage > 0
        model.train()
        batch_loss = torch.zeros((), device=args.device)
        # Without loss tokens there is no gradient at all, and the optimizer changes nothing.
        own = self._microbatches(batch, is_computed, loss_weights) if num_loss_tokens.any() else ()
        with disable_input_dtype_casting(model, self.accelerator.native_amp):  # autocast does it
            for microbatch, is_last in own:
                # A signal ends the run here, unless the step cannot be repeated.
                if self.checkpoints.can_repeat_step:
                    self._interrupts.check_all(waits=False)
                with accumulating(self.accelerator, args, model, is_last):
                    with self.compute_loss_context_manager():
                        loss = self.microbatch_loss(model, microbatch, metrics)
                        loss = loss * args.world_size / denominator
                    batch_loss += loss.detach()
                    if is_last:
                        raise_if_not_finite(batch_loss)
                        if self.is_deepspeed_enabled:  # it takes its step in this backward
                            self.checkpoints.can_repeat_step = False
                    self.accelerator.backward(loss)
        raise_if_gradient_not_finite(model)
        return batch_loss

    def update_now(self, model: nn.Module) -> None:
        """Take a step of the optimizer between two calls of `train_on`. Trainer takes the last one
        of a batch, whose `grad_norm` is logged. In between, signals wait and nothing is
        saved, because the step could not be repeated.
        """
        self.checkpoints.can_repeat_step = False
        if self.args.max_grad_norm:
            self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
        optimizer: Any = self.optimizer
        optimizer.step()
        optimizer.zero_grad()

    def _microbatches(
        self, batch: Batch, is_computed: np.ndarray, loss_weights: np.ndarray
    ) -> Iterator[tuple[Microbatch, bool]]:
        """Pack samples of a batch. Give this rank's microbatches on its device, each with whether
        it is the last one.

        Args:
            is_computed: (S,) bool, the samples to pack.
            loss_weights: (S,), of the loss tokens of each sample.
        """
        args, support = self.args, self.tried_support
        max_tokens = support.token_budget or args.token_budget
        plans, num_shared = plan_batch(
            batch.sizes, is_computed, max_tokens, args.world_size, support
        )
        own = plans[args.process_index]
        pad = cast(Any, self.processing_class).pad_token_id or 0
        for number, rows in enumerate(own, 1):
            microbatch = collate(batch.samples, rows, loss_weights, pad, num_shared)
            yield copy_to(microbatch, args.device), number == len(own)

    @cached_property
    def tried_support(self) -> ModelSupport:
        """What the model can compute, and how much at once, as a few forward passes show when this
        is read first: in the first step, on all ranks, because only then the model is wrapped and
        split as for training.
        """
        with self.accelerator.autocast():  # as in each step
            return try_model(
                self.model_wrapped, self._base_of(self.model), self.args, self.optimizer
            )

    # --- Batches and weights ----------------------------------------------------------------------

    def _next_batch(self) -> Batch:
        """Return this step's batch on every rank, and request the batches ahead."""
        batch = self._on_rank_0(self._take_batch)
        self.evaluations.log_ended()
        return broadcast_batch(batch)

    def _take_batch(self) -> Batch:
        """Send the weights that this step starts from, and request the batches of this step and of
        the next max_off_policy_steps ones that are not pending. Then wait for this step's, and
        return it. With 0, servers sleep behind it, if they can.
        """
        step, num_ahead = self.state.global_step, self.args.max_off_policy_steps
        start = time.monotonic()
        if self.args.deterministic:
            self.orchestrator.wait()  # a token's version must not depend on time
        wait_s = time.monotonic() - start
        self.evaluations.begin()  # also where no batch is requested
        last = min(step + num_ahead, self.args.max_steps - 1)
        for ahead in range(step + self.orchestrator.num_pending, last + 1):
            self.push_weights()
            version = self.weight_sync.policy_version or 0
            self.orchestrator.submit(ahead, self.weight_sync.model_name, version)
        start = time.monotonic()
        batch = self.orchestrator.get()
        self._metrics["wait_s"] = wait_s + time.monotonic() - start
        batch.add_columns(needs_of(self.loss_fn))
        if not num_ahead and self.weight_sync.sleeps:
            self.evaluations.end()
            self.weight_sync.sleep()
        return batch

    def push_weights(self) -> None:
        """Send the weights of this step to the server, unless the server has them. The policy
        version is the step's number.
        """
        version = self.state.global_step
        if self.weight_sync.policy_version != version:
            self.evaluations.end()  # all of its rollouts have one version
            model = self.accelerator.unwrap_model(self.model)
            self._metrics |= self.weight_sync.push(model, version)

    # --- Evaluations ------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate the current weights on the environment's eval split, and wait for the results:
        the mean reward and metrics, `eval_reward` and so on.

        An evaluation has `eval_examples` examples with `eval_rollouts_per_example` rollouts each.
        This one starts after all pending batches are generated. The evaluations of `eval_strategy`
        do not: they run beside training, see `_evaluate` and evaluation.py.
        """
        if eval_dataset is not None:
            raise ConfigError("evaluate() takes no dataset: env has its own")

        def now() -> None:
            self.orchestrator.wait()
            self.evaluations.is_due = True
            self.evaluations.finish()

        self._on_rank_0(now)
        return self.evaluations.log_ended(metric_key_prefix)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Let an evaluation begin with the next push, and go on training. Trainer calls this
        between two steps. If `metric_for_best_model` is set, as for `load_best_model_at_end`,
        `save_strategy="best"` and early stopping, Trainer needs the result at once and gets it. So
        does, without `eval_strategy`, a callback that has asked for an evaluation.
        """
        self.control.should_evaluate = False
        if skip_scheduler and self.state.global_step:  # eval_on_start, and the run began before
            return {}
        self.evaluations.is_due = self.is_world_process_zero() and not self.evaluates_at_once
        if (
            self.evaluates_at_once
            or self.args.metric_for_best_model
            or (self.args.eval_strategy == "no" and not skip_scheduler)  # a callback has asked
        ):
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        return {}  # `_next_batch` logs the result later

    # --- The run ----------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: bool | str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Do as `Trainer.train`. At the end the server has the final weights, and `output_dir` has
        the model or the adapter. The orchestrator stops in any case, also after an error.

        Inside, on the main thread, the first SIGINT or SIGTERM ends the run when the microbatch is
        done, with a checkpoint of the steps so far; a second one ends the process at once.

        Raises:
            RunFolderError: output_dir holds a run already, or there is no run to resume.
            Interrupted: on every rank, after the checkpoint. It is a SystemExit with the status 128
                + signal, and a KeyboardInterrupt.
        """
        if self.is_deepspeed_enabled and self.model_wrapped is not self.model:
            raise RuntimeError(
                "with DeepSpeed, train() works once per RLTrainer; make a new one, or resume"
            )
        resume = enter_run_folder(self.args, resume_from_checkpoint, adapter_of(self.model))
        hosts = host_group()
        with (
            self._interrupts.handled(hosts, self.is_world_process_zero()),
            ExitStack() as parts,
        ):
            with failing_together():  # the others wait for rank 0, which opens the environment
                parts.enter_context(self._serving())
                parts.enter_context(self._files.open())
                parts.enter_context(self.checkpoints.of_run(hosts, resume))
            # Of several ranks, one may fail alone, and the others would not save with it.
            of_all = NotFiniteError if self.args.world_size > 1 else Exception
            try:
                result = super().train(resume, *args, **kwargs)
            except (of_all, Interrupted):
                self.checkpoints.save_or_say()
                raise
            result = result._replace(training_loss=result.metrics["train_loss"])  # see `log`
            is_best = self.args.load_best_model_at_end and self.state.best_model_checkpoint
            if is_best and self.is_world_process_zero():
                self.weight_sync.policy_version = None  # the server has the last weights
            # First, because the server may be lost below.
            self.checkpoints.save_final()
            with suppress(Interrupted):  # the model is saved; `handled` raises it
                self._on_rank_0(self.push_weights)
        return result

    def _base_of(self, model: Any) -> Any:
        """Return the Hugging Face model inside DDP and PEFT."""
        return base_of(self.accelerator.unwrap_model(model))

    # --- Hooks of Trainer -------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Give Trainer one placeholder for each step of an epoch. The orchestrator has the data."""
        # No list, because there may be a billion.
        steps = range(self.steps_per_epoch or self.args.max_steps)
        return DataLoader(steps, collate_fn=lambda step: {"step": step})  # type: ignore[arg-type]

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of forward and backward for this rank's share of the batch."""
        return self._num_flops

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Do as Trainer, but complete or not at all, after the evaluation of earlier weights."""
        self._on_rank_0(self.evaluations.end)
        self.evaluations.log_ended()
        self.checkpoints.save(partial(super()._save_checkpoint, *args, **kwargs))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add means over the steps since the last line to Trainer's numbers."""
        if "loss" in logs and self._window.steps:
            logs |= self._window.take()
        if "train_loss" in logs:  # of the whole run; Trainer's is of the steps since it was resumed
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    # --- Rank 0, signals, a lost server -----------------------------------------------------------

    def _on_rank_0(self, job: Callable[[], _T]) -> _T | None:
        """Do this job on rank 0, while the other ranks wait, and help to gather split weights. It
        is done again when the server was lost meanwhile and came back. An error is raised behind a
        checkpoint of the steps so far.

        Returns:
            What the job has returned; None on the other ranks.

        Raises:
            Interrupted: a signal has come to a rank.
            RuntimeError: on the other ranks, when the job has failed on rank 0.
        """
        model = self.accelerator.unwrap_model(self.model)
        try:
            self._interrupts.check_all(waits=True)
            with failing_together(), self._serving(), gathering(model, self._lora_sync):
                is_main = self.is_world_process_zero()
                return self._retry_when_server_lost(job) if is_main else None
        except Exception:
            self.checkpoints.save_or_say()
            raise

    def _retry_when_server_lost(self, job: Callable[[], _T]) -> _T:
        """Do a job. If the server is lost meanwhile, wait until the server is back and do it again,
        which then sends the weights again.

        Raises:
            InferenceServerError: the server did not come back within vllm_server_timeout, or was
                lost in three attempts at this job.
        """
        num_lost = 0
        while True:
            try:
                return job()
            except ServerLostError as error:
                num_lost += 1
                if num_lost == 3:
                    raise
                logger.warning(f"{error}; waiting for it to come back")
                self.orchestrator.discard()
                self.evaluations.begin_again()
                self.weight_sync.wait_for_server()
                logger.warning("the inference server is back; its weights are sent again")

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """Run the orchestrator during `train()`, or during an `evaluate()` outside of it."""
        if self._is_serving or not self.is_world_process_zero():
            yield
            return
        self._is_serving = True
        self.evaluations.forget()
        with ExitStack() as ending:
            ending.callback(self.weight_sync.close)
            ending.callback(self.orchestrator.stop)
            ending.callback(setattr, self, "_is_serving", False)
            self.orchestrator.start()
            yield
