"""`RLTrainer`: one optimizer step on one batch of rollouts, then the weights go to the server.

    for step in range(max_steps):
        wait for the batch of this step            orchestrator.get()
        send the newest weights                    weight_sync.push(model, version)
        request the batch of the next step         orchestrator.submit(step + 1)
        train on the batch of this step            forward, loss_fn, backward for each microbatch;
                                                   optimizer.step()

With max_off_policy_steps = 1, as above, each batch is sampled from weights that are one step old,
and the server generates while the trainer trains. With 0, each step first sends the weights and
requests its batch, and each side waits for the other. With k > 1, k batches are requested in
advance, and weights change while the server generates. An evaluation begins behind a push, runs
beside the next step, and ends before the next push, see evaluation.py.

Everything else (optimizer, schedule, clipping, logging, checkpoints, callbacks) is
transformers.Trainer's own.
"""

from __future__ import annotations

import atexit
import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedModel, set_seed

from verifiers_rl.advantages import AdvantageFn
from verifiers_rl.arguments import Replaced, check_arguments
from verifiers_rl.checkpoints import Checkpoints, check_final
from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.data import ExampleOrder
from verifiers_rl.distributed import (
    broadcast_batch,
    broadcast_outcome,
    host_group,
    let_gloo_threads_finish,
    prepare_sharding,
    raise_if_gradient_not_finite,
    raise_if_not_finite,
    reduces_each_microbatch,
    scatter_samples,
)
from verifiers_rl.evaluation import AtTrainEnd, Evaluations, log_results
from verifiers_rl.expert_balance import add_balance_loss, has_balance
from verifiers_rl.forward import predict_targets
from verifiers_rl.hub import SavingTrainer
from verifiers_rl.inference.client import ServerLostError
from verifiers_rl.logprobs import Entropy
from verifiers_rl.losses import (
    AdaptiveKL,
    LossFn,
    LossInputs,
    is_of_advantages,
    needs_of,
    weigh_samples,
)
from verifiers_rl.model_trials import choose_layout
from verifiers_rl.models import absolute_path, check_policy, load_policy
from verifiers_rl.orchestrator import Orchestrator
from verifiers_rl.packing import Layout, Microbatch, collate, copy_to, plan_batch
from verifiers_rl.process.interrupts import Interrupted, Interrupts
from verifiers_rl.report.metrics import (
    EarlyWarnings,
    RunFilesCallback,
    StepCounts,
    StepWindow,
    TokenMeans,
    device_metrics,
    model_flops,
    replace_progress_bar,
)
from verifiers_rl.report.recording import RolloutFiles
from verifiers_rl.report.run_folder import enter_run_folder
from verifiers_rl.sync.gather import gathering, is_split
from verifiers_rl.types import Batch, BatchSource, WeightSink

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

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module,
        env: Any,
        args: RLConfig,
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
        replaced = Replaced(loss_fn, advantage_fn, example_order, orchestrator, weight_sync)
        check_arguments(model, env, args, processing_class, replaced, trainer_kwargs)
        model = absolute_path(model)
        if processing_class is None:
            processing_class = AutoTokenizer.from_pretrained(
                model if isinstance(model, str) else model.name_or_path
            )
        self.loss_fn = args.complete_loss(loss_fn)
        set_seed(args.seed)  # also determines the weights of a new adapter
        policy = load_policy(model, args, peft_config)
        check_policy(policy, args)
        check_final(policy, args)
        self.batch: Batch | None = None  # the batch that is being trained on
        self._env = env
        self._sync_metrics: dict[str, float] = {}
        self._waited_s = 0.0  # for this step's batch
        self._is_serving = False
        self.orchestrator: BatchSource | None = None  # on rank 0 only, like weight_sync
        self.weight_sync: WeightSink | None = None
        # Called once, after the first push, with the model and its name at the server.
        self._check_agreement: Callable[[nn.Module, str], None] | None = None
        if args.process_index == 0:
            from verifiers_rl.server_side import connect

            server_side = connect(policy, env, args, processing_class, replaced, Orchestrator)
            self.orchestrator, self.weight_sync, self._check_agreement = server_side
        self.evaluations = Evaluations(args)
        # Trainer requires a dataset for eval_strategy. Evaluations use the environment's own.
        trainer_kwargs["eval_dataset"] = []
        super().__init__(policy, args, processing_class=processing_class, **trainer_kwargs)
        # Rank 0 has chosen, and the others gather what it sends.
        lora_sync = getattr(self.weight_sync, "lora_sync", args.lora_sync)
        self._lora_sync = broadcast_outcome({"lora_sync": lora_sync}, args.device)["lora_sync"]
        if args.world_size > 1 and torch.distributed.get_backend() == "gloo":
            atexit.register(let_gloo_threads_finish)
        self.loss_is_scaled_for_ga = True  # training_step does it once, for the whole batch
        if not args.disable_tqdm:
            replace_progress_bar(self)
        self._interrupts, self._window = Interrupts(), StepWindow()
        self.checkpoints, self._files = Checkpoints(self, self._window), RolloutFiles(self)
        own = (RunFilesCallback(lambda: self.evaluations.due), EarlyWarnings(self._window))
        terms = getattr(self.loss_fn, "terms", ())
        self._adaptive_kl = next((term for term in terms if isinstance(term, AdaptiveKL)), None)
        if self._adaptive_kl is not None:
            self.checkpoints.kept["adaptive_kl"] = self._adaptive_kl
        for callback in (self.checkpoints, self._files, *own, self._window):
            self.add_callback(callback)
        self.callback_handler.callbacks.insert(0, AtTrainEnd(self._end_evaluations))
        self._why_full_logits: str | None = None
        self._layout: Layout | None = None  # set in the first step
        self._shares_prefixes = False  # also set there
        self._counts = StepCounts()  # of the last step
        self._needs = needs_of(self.loss_fn)
        has_adapter = hasattr(self.model, "disable_adapter")
        needs_copy = "reference_logprobs" in self._needs and not has_adapter
        prepare_sharding(self.accelerator, args, needs_copy)
        self._reduces_each = reduces_each_microbatch(self.accelerator, args, has_adapter)
        self._reference: Any = None  # with LoRA: None, the adapter is switched off instead
        if needs_copy:
            reference = copy.deepcopy(cast(nn.Module, self.model))
            self._reference = reference.requires_grad_(False).eval()

    # --- Setting up -------------------------------------------------------------------------------

    def _base_of(self, model: Any) -> Any:
        """Return the Hugging Face model inside DDP and PEFT."""
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if hasattr(model, "peft_config") else model

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
        resume = enter_run_folder(self.args, resume_from_checkpoint)
        with (
            host_group(self.args) as hosts,
            self._interrupts.handled(hosts, self.is_world_process_zero()),
            self._serving(),
            self._files.open(),
            self.checkpoints.of_run(hosts, resume),
        ):
            try:
                result = super().train(resume, *args, **kwargs)
            except Interrupted:
                self.checkpoints.save_unfinished()
                raise
            is_best = self.args.load_best_model_at_end and self.state.best_model_checkpoint
            if is_best and self.weight_sync is not None:
                self.weight_sync.policy_version = None  # the server has the last weights
            # First, because the server may be lost below.
            self.push_to_hub() if self.args.push_to_hub else self.checkpoints.save_final()
            with suppress(Interrupted):  # the model is saved; `handled` raises it
                self._on_server(lambda orchestrator: self._sync_weights())
        return result

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """Run the orchestrator during `train()`, or during an `evaluate()` outside of it."""
        if self.orchestrator is None or self.weight_sync is None or self._is_serving:
            yield
            return
        self._is_serving = True
        self.evaluations.forget()
        try:
            self.orchestrator.start()
            yield
        finally:
            self._is_serving = False
            try:
                self.orchestrator.stop()
            finally:
                self.weight_sync.close()

    # --- The step ---------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Give Trainer one placeholder per step to count. The orchestrator has the data."""
        steps = [{"step": step} for step in range(self.args.max_steps)]
        return DataLoader(steps, batch_size=1)  # type: ignore[arg-type]

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run forward and backward on this step's batch. Trainer then takes the optimizer's step.

        Returns:
            Scalar: this rank's share of the loss, times world_size. Its mean over ranks is the
            batch's loss.
        """
        if self._layout is None:
            self._layout = self._choose_layout(model)
        model.train()
        self._sync_metrics, self._waited_s = {}, 0.0
        self.batch = batch = self.checkpoints.save_on_error(self._next_batch)
        start = time.monotonic()
        means, self._counts = TokenMeans(self._files.values_of(batch)), StepCounts()
        batch_loss = self._train_on(model, batch, means)
        # This waits for the device.
        token_means = means.reduce(self._counts.num_loss_tokens, self.args.world_size)
        if self._adaptive_kl is not None and "reference_kl" in token_means:
            self._adaptive_kl.update(token_means["reference_kl"])  # the same on all ranks
        train_s = time.monotonic() - start
        metrics = {
            **batch.metrics,
            **self._sync_metrics,
            **token_means,
            **device_metrics(self.args.device, self.floating_point_ops({}), train_s),
            **self._counts.metrics(batch, self._base_of(model)),
            "wait_s": self._waited_s,
            "train_s": train_s,
        }
        self._window.add(metrics)
        return batch_loss

    def _train_on(self, model: nn.Module, batch: Batch, means: TokenMeans) -> Tensor:
        """Run forward and backward on this rank's share of a batch, and return its loss.

        The loss of each microbatch is a sum. This method divides it once, by a number that belongs
        to the batch on all ranks (`loss_normalization`). DDP averages gradients over ranks; the
        factor `world_size` undoes this. So the gradient does not depend on how the batch was split.
        """
        args, tokenizer, sizes = self.args, cast(Any, self.processing_class), batch.sizes
        weights, denominator = weigh_samples(
            sizes.num_loss_tokens.tolist(),
            sizes.rollout_ids.tolist(),
            args.loss_normalization,
            args.batch_size * args.max_seq_len,
        )
        # Samples without gradient count in the denominator, but are not computed.
        is_computed = sizes.num_loss_tokens > 0
        if is_of_advantages(self.loss_fn) and not has_balance(self._base_of(model)):
            is_computed &= sizes.has_advantage > 0
        config = self._base_of(self.model).config.get_text_config()
        plans, num_shared = plan_batch(
            sizes,
            is_computed,
            args.token_budget,
            args.world_size,
            cast(Layout, self._layout),
            getattr(config, "hidden_size", 1024),
            self._shares_prefixes,
            config._attn_implementation,
        )
        samples = scatter_samples(batch, plans, args.device)
        # Without loss tokens there is no gradient, so the optimizer changes nothing.
        plan = plans[args.process_index] if sizes.num_loss_tokens.any() else []
        self._counts.add_samples(sizes, is_computed, num_shared)
        batch_loss = torch.zeros((), device=args.device)
        for number, rows in enumerate(plan):
            if self.checkpoints.can_repeat_step:
                self._interrupts.check_all(waits=False)
            if self.orchestrator is not None and args.world_size == 1:
                # Stop now if the next batch has failed. With several ranks, the others would wait
                # for this rank's gradients, so there _next_batch raises the error on all.
                self.checkpoints.save_on_error(self.orchestrator.raise_if_failed)
            microbatch = copy_to(
                collate(samples, rows, weights, tokenizer.pad_token_id or 0, num_shared),
                args.device,
            )
            self._counts.add_microbatch(microbatch)
            is_last = number == len(plan) - 1
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            reduces = is_last or self._reduces_each  # gradients over ranks
            with nullcontext() if reduces else self.accelerator.no_sync(model):
                with self.compute_loss_context_manager():
                    loss = self.microbatch_loss(model, microbatch, means)
                    loss = loss * args.world_size / denominator
                batch_loss += loss.detach()
                if is_last:  # before the backward in which DeepSpeed takes its step
                    self.checkpoints.save_on_error(
                        partial(raise_if_not_finite, batch_loss, args.world_size)
                    )
                    if self.is_deepspeed_enabled:
                        self.checkpoints.weights_change()
                self.accelerator.backward(loss)
        self.checkpoints.save_on_error(
            partial(raise_if_gradient_not_finite, model, args.world_size)
        )
        return batch_loss

    def _choose_layout(self, model: nn.Module) -> Layout:
        """Test what the model supports, after it is wrapped and split as for training."""
        with self.accelerator.autocast():  # as in each step
            layout, self._shares_prefixes, self._why_full_logits = choose_layout(
                model, self._base_of(model), self.args
            )
        return layout

    def microbatch_loss(
        self, model: nn.Module, microbatch: Microbatch, means: TokenMeans
    ) -> Tensor:
        """Compute logprobs of a microbatch's loss tokens only, and their loss: a scalar, a sum."""
        targets = microbatch.targets
        logprobs, entropy = self.token_logprobs(
            model, microbatch, "gradient" if "entropy_gradient" in self._needs else "value"
        )
        has_reference = "reference_logprobs" in self._needs
        reference_logprobs = self.reference_logprobs(microbatch) if has_reference else None
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
            reference_logprobs=reference_logprobs,
        )
        outputs = add_balance_loss(self.loss_fn(inputs), self._base_of(model), microbatch)
        means.add(inputs, outputs.metrics, microbatch)
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
                model,
                self._base_of(model),
                microbatch,
                self.args,
                cast(Layout, self._layout),
                self._shares_prefixes,
                bool(self._why_full_logits),
                entropy,
            )

    @torch.no_grad()
    def reference_logprobs(self, microbatch: Microbatch) -> Tensor:
        """Compute the targets' logprobs (N,) under the reference: the model without its adapter, or
        the frozen copy of the model at the start.
        """
        if self._reference is not None:
            return self.token_logprobs(self._reference, microbatch, "none")[0]
        model: Any = self.accelerator.unwrap_model(self.model)
        model.eval()
        try:
            with model.disable_adapter():
                return self.token_logprobs(model, microbatch, "none")[0]
        finally:
            model.train()

    def floating_point_ops(self, inputs: Any) -> int:
        """Count the operations of forward and backward for this rank's share of the batch."""
        if self.batch is None:
            return 0
        computed = self._counts.num_tokens, self._counts.num_loss_tokens
        return model_flops(self._base_of(self.model), *computed) // self.args.world_size

    # --- Batches and weights ----------------------------------------------------------------------

    def _next_batch(self) -> Batch:
        """Return this step's batch on every rank, and request the batches ahead."""

        batch: Batch | None = None

        def take(orchestrator: BatchSource) -> dict[str, Any]:
            nonlocal batch
            batch = self._retry_when_server_lost(partial(self._take_batch, orchestrator))
            if self.args.max_off_policy_steps > 0:
                self._retry_when_server_lost(partial(self._submit_ahead, orchestrator))
            return self.evaluations.take_ended()

        log_results(self, self._on_rank_0(take))
        return broadcast_batch(batch, self.args.device)

    def _on_rank_0(self, work: Callable[[BatchSource], dict[str, Any]]) -> dict[str, Any]:
        """Run `work` on rank 0, while the others help to gather weights. Return its result, numbers
        and texts, on every rank, or raise Interrupted there if a signal has come.
        """
        self._interrupts.check_all(waits=True)
        outcome: dict[str, Any] | Interrupted | None = None
        try:
            with self._serving(), self._gathering():
                if self.orchestrator is not None:
                    outcome = work(self.orchestrator)
        except Interrupted as interrupted:
            outcome = interrupted
            raise
        finally:  # also after an error: the others wait
            told = broadcast_outcome(outcome, self.args.device)
        return told

    def _take_batch(self, orchestrator: BatchSource) -> Batch:
        if not orchestrator.num_pending:  # first step, lost server, or max_off_policy_steps = 0
            self._sync_weights()
            self._submit(self.state.global_step)
        start = time.monotonic()
        batch = orchestrator.get()
        self._waited_s = time.monotonic() - start
        return batch

    def _submit_ahead(self, orchestrator: BatchSource) -> None:
        """Send the weights that this step starts from. Request the batches of the next
        max_off_policy_steps steps, except those that are pending already.
        """
        step = self.state.global_step
        if self.evaluations.due is not None:  # also where no batch is requested any more
            self._sync_weights()
        first, last = step + 1 + orchestrator.num_pending, step + self.args.max_off_policy_steps
        for ahead in range(first, min(last, self.args.max_steps - 1) + 1):
            self._sync_weights()
            self._submit(ahead)

    def _retry_when_server_lost(self, work: Callable[[], _T]) -> _T:
        """Run `work`. If the server is lost meanwhile, wait until the server is back and run `work`
        again, which then sends the weights again.

        Raises:
            InferenceServerError: the server did not come back within vllm_server_timeout, or was
                lost in three attempts at this work.
        """
        for attempt in range(1, 4):
            try:
                return work()
            except ServerLostError as error:
                if self.weight_sync is None or self.orchestrator is None or attempt == 3:
                    raise
                logger.warning("%s; waiting for it to come back", error)
                self.orchestrator.discard()
                self.evaluations.begin_again(self.state.global_step)
                self.weight_sync.wait_for_server()
                logger.warning("the inference server is back; its weights are sent again")
        raise AssertionError("unreachable")

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Do as Trainer, but complete or not at all, after the evaluation of earlier weights."""
        if self.args.eval_strategy != "no":
            log_results(self, self._on_server(self.evaluations.end))
        checkpoint = self.checkpoints.save(partial(super()._save_checkpoint, *args, **kwargs))
        if self.args.push_to_hub:
            self.push_checkpoint(checkpoint)

    def _submit(self, step: int) -> None:
        assert self.orchestrator is not None and self.weight_sync is not None
        self.orchestrator.submit(
            step, self.weight_sync.model_name, self.weight_sync.policy_version or 0
        )

    def _gathering(self) -> AbstractContextManager[None]:
        """Enter this where rank 0 may send weights: other ranks help to gather a split model."""
        return gathering(self.accelerator.unwrap_model(self.model), self._lora_sync)

    def _sync_weights(self) -> None:
        """Send the weights of this step to the server, unless the server has them, and begin the
        evaluation that is due. The policy version is the step's number.
        """
        version = self.state.global_step
        if self.weight_sync is None or self.orchestrator is None:
            return
        if self.weight_sync.policy_version != version:
            self.evaluations.end(self.orchestrator)  # all of its rollouts have one version
            model = self.accelerator.unwrap_model(self.model)
            is_idle = self.orchestrator.num_pending == 0
            in_flight: Literal["recompute", "keep"] = "recompute" if is_idle else "keep"
            self._sync_metrics = self.weight_sync.push(model, version, in_flight)
            if self._check_agreement is not None and not is_split(model):  # it needs all ranks
                self._check_agreement(model, self.weight_sync.model_name)
            self._check_agreement = None
        self.evaluations.begin(self.orchestrator, self.weight_sync.model_name, version)

    # --- Evaluation, logs -------------------------------------------------------------------------

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

        def now(orchestrator: BatchSource) -> None:
            orchestrator.wait()
            self.evaluations.due = self.state.global_step
            self._sync_weights()
            self.evaluations.end(orchestrator)

        return log_results(self, self._on_server(now), metric_key_prefix)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Let an evaluation begin with the next push, and go on training. Trainer calls this
        between two steps. If `metric_for_best_model` is set, as for `load_best_model_at_end`,
        `save_strategy="best"` and early stopping, Trainer needs the result at once and gets it.
        """
        self.control.should_evaluate = False
        if skip_scheduler and self.state.global_step:  # eval_on_start, and the run began before
            return {}
        if self.is_world_process_zero():
            self.evaluations.due = self.state.global_step
        if self.args.metric_for_best_model is not None:
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        return {}

    def log_ended_evaluations(self) -> None:
        """Log the evaluations that have ended on rank 0 by now. Every rank calls this."""
        if self.args.eval_strategy != "no":
            ended = self.evaluations.take_ended()
            log_results(self, broadcast_outcome(ended, self.args.device))

    def _end_evaluations(self) -> None:
        """Wait for the evaluations that run or are due, and log them."""

        def end(orchestrator: BatchSource) -> None:
            if self.evaluations.due is not None:
                self._sync_weights()
            self.evaluations.end(orchestrator)

        if self.args.eval_strategy != "no":
            log_results(self, self._on_server(end))

    def _on_server(self, work: Callable[[BatchSource], None]) -> dict[str, dict[str, float]]:
        """Run `work` on rank 0. Return the results of evaluations that then have ended."""

        def run(orchestrator: BatchSource) -> dict[str, dict[str, float]]:
            self._retry_when_server_lost(partial(work, orchestrator))
            return self.evaluations.take_ended()

        return self.checkpoints.save_on_error(partial(self._on_rank_0, run))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add means over the steps since the last line to Trainer's numbers."""
        if "loss" in logs and self._window.steps:
            logs |= self._window.take()
        if "train_loss" in logs:  # of the whole run; Trainer's is of the steps since it was resumed
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)
