"""`RLTrainer`: one optimizer step on one batch of rollouts, then the weights go to the server.

    for step in range(max_steps):
        wait for the batch of this step            orchestrator.get()
        send the newest weights                    weight_sync.push(model, version)
        ask for the batch of the next step         orchestrator.submit(step + 1)
        train on this one                          forward, loss_fn, backward for each microbatch;
                                                   optimizer.step()

With max_off_policy_steps = 1, as above, the batch was sampled by the weights of one step ago, and
the server works while the trainer does. With 0 the weights are sent and the batch asked for first,
and both sides wait for each other.

Everything else (optimizer, schedule, clipping, logging, checkpoints, callbacks) is
transformers.Trainer's own.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from verifiers_rl.config import RLConfig
from verifiers_rl.inference.client import ServerLostError
from verifiers_rl.logprobs import (
    chunked_logprobs_and_entropy,
    hidden_states_in_place_of_logits,
    reason_against_chunking,
    token_logprobs_and_entropy,
)
from verifiers_rl.losses import LossFn, LossInputs, cispo
from verifiers_rl.metrics import (
    RewardProgressCallback,
    RunFilesCallback,
    TokenMeans,
    print_rollouts,
)
from verifiers_rl.packing import assign_microbatches, collate, flatten_samples, unflatten_samples
from verifiers_rl.types import Batch, Microbatch

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class BatchSource(Protocol):
    """What the trainer needs of an orchestrator;
    a stub with these methods makes it run without a server.
    """

    @property
    def is_pending(self) -> bool: ...
    def start(self) -> None: ...
    def submit(self, step: int, model: str, policy_version: int) -> None: ...
    def raise_if_failed(self) -> None: ...
    def wait(self) -> None: ...
    def get(self) -> Batch: ...
    def discard(self) -> None: ...
    def evaluate(self, num_examples: int, model: str, policy_version: int) -> dict[str, float]: ...
    def stop(self) -> None: ...


class WeightSink(Protocol):
    """What the trainer needs of a weight sync."""

    policy_version: int | None

    @property
    def model_name(self) -> str: ...
    def push(self, model: nn.Module, policy_version: int) -> dict[str, float]: ...
    def wait_for_server(self) -> None: ...
    def close(self) -> None: ...


class RLTrainer(Trainer):
    """Trains a causal language model by reinforcement learning on a `verifiers` environment.

    Args:
        model: a folder, a name on the hub, or a `PreTrainedModel` (or a PEFT model) that is trained
            as it is.
        env: a classic `verifiers.Environment`.
        args: all options.
        processing_class: the tokenizer; default: the model's own.
        loss_fn: `LossInputs -> LossOutputs`, called on each microbatch. `cispo` takes its bound
            from `args`.
        peft_config: any PEFT config in place of the LoRA that `args` describes.
        orchestrator, weight_sync: replace the parts that talk to the server, for tests and for
            forks.
        **trainer_kwargs: `callbacks`, `optimizers` and whatever else `transformers.Trainer` takes.

    Raises:
        ConfigError: an option has a value that cannot work.
        InvalidEnvironmentError: the environment cannot be trained on.
        InferenceServerError: no server, another model's server, or one that cannot take these
            weights.
    """

    args: RLConfig

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module,
        env: Any,
        args: RLConfig,
        processing_class: Any = None,
        loss_fn: LossFn = cispo,
        peft_config: Any = None,
        *,
        orchestrator: BatchSource | None = None,
        weight_sync: WeightSink | None = None,
        **trainer_kwargs: Any,
    ) -> None:
        if processing_class is None:
            processing_class = AutoTokenizer.from_pretrained(
                model if isinstance(model, str) else model.name_or_path
            )
        set_seed(args.seed)  # a new adapter's weights follow from it too
        if isinstance(model, str):
            # Full finetuning keeps float32 masters: in bfloat16 a small update is rounded away.
            dtype = torch.bfloat16 if args.use_lora and args.bf16 else torch.float32
            model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        policy: Any = self._with_adapter(model, args, peft_config)
        self.loss_fn = partial(cispo, eps_high=args.cispo_eps_high) if loss_fn is cispo else loss_fn
        self.batch: Batch | None = None  # the one being trained on
        # Metrics of the steps since the last line of logs.
        self._window: list[dict[str, float]] = []
        self._window_start = 0.0
        self._sync_metrics: dict[str, float] = {}
        self._num_tokens = 0
        self._num_parameters: int | None = None
        self._is_serving = False
        self.orchestrator: BatchSource | None = None
        self.weight_sync: WeightSink | None = None

        runner = None
        if orchestrator is None and args.process_index == 0:
            runner = self._make_server_side(policy, env, args, processing_class)
        # Trainer insists on an eval dataset for eval_strategy;
        # what is evaluated is the environment's own.
        trainer_kwargs.setdefault("eval_dataset", runner.eval_dataset if runner else [])
        super().__init__(
            model=policy, args=args, processing_class=processing_class, **trainer_kwargs
        )
        if args.world_size > 1 and torch.distributed.get_backend() == "gloo":
            # gloo's threads must end before the interpreter does, which else may abort.
            atexit.register(_leave_process_group)
        self.loss_is_scaled_for_ga = True  # by training_step, once, over the whole batch
        if orchestrator is not None and args.process_index == 0:
            self.orchestrator, self.weight_sync = orchestrator, weight_sync
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.remove_callback(PrinterCallback)
            self.add_callback(RewardProgressCallback())
        self.add_callback(RunFilesCallback())

        self._why_full_logits = reason_against_chunking(self._base_model)
        if self._why_full_logits:
            logger.warning(
                "full logits are held in memory for this model: %s", self._why_full_logits
            )

    # --- Setting up -------------------------------------------------------------------------------

    @staticmethod
    def _with_adapter(model: Any, args: RLConfig, peft_config: Any) -> Any:
        if hasattr(model, "peft_config"):
            return model
        if peft_config is None and not args.use_lora:
            if any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()):
                logger.warning("the model's weights become float32 masters for full finetuning")
            return model.float()
        from peft import LoraConfig, get_peft_model

        peft_config = peft_config or LoraConfig(
            task_type="CAUSAL_LM",
            r=args.lora_rank,
            lora_alpha=args.lora_alpha,
            lora_dropout=args.lora_dropout,
            target_modules=args.lora_target_modules,
            modules_to_save=args.lora_modules_to_save,
            use_rslora=args.lora_use_rslora,
        )
        with warnings.catch_warnings():
            # peft asks transformers for a property by its deprecated name.
            warnings.filterwarnings(
                "ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning
            )
            return get_peft_model(model, peft_config)

    def _make_server_side(self, model: Any, env: Any, args: RLConfig, tokenizer: Any) -> Any:
        """Rank 0's orchestrator and weight sync; returns the environment's runner."""
        from verifiers_rl.environments import ClassicEnvironment
        from verifiers_rl.inference.client import InferenceClient
        from verifiers_rl.orchestrator import Orchestrator
        from verifiers_rl.weight_sync import WeightSync

        client = InferenceClient(
            args.vllm_server_host, args.vllm_server_port, args.vllm_server_timeout
        )
        runner = ClassicEnvironment(
            env,
            client.base_url,
            tokenizer,
            max_seq_len=args.max_seq_len,
            max_prompt_len=args.max_prompt_len,
            mask_env_responses=args.mask_env_responses,
            timeout_s=args.generation_timeout,
        )
        if biased := args.sampling_changes_probabilities():
            logger.warning(
                "%s: the server samples from another distribution than the trainer's softmax; "
                "importance ratios will be off, watch mismatch_kl",
                ", ".join(biased),
            )
        status = client.wait_until_ready()
        if args.use_cpu and status["device"] == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            # The server beside us has pinned its threads to the first half of the cores.
            num_cores = os.cpu_count() or 1
            torch.set_num_threads(max(num_cores - max(num_cores // 2, 1), 1))
        client.check_model(model.config)
        if args.max_tokens is None and status["max_model_len"] > args.max_seq_len:
            logger.warning(
                "the server goes on to max_model_len=%d tokens, of which max_seq_len=%d are used; "
                "start vf-vllm with --max-model-len %d, or set max_tokens",
                status["max_model_len"],
                args.max_seq_len,
                args.max_seq_len,
            )
        self.weight_sync = weight_sync = WeightSync(
            client, args.weight_sync_backend, args.lora_sync, args.vllm_server_timeout
        )
        self.orchestrator = Orchestrator(
            runner,
            weight_sync.check_server,
            batch_size=args.batch_size,
            rollouts_per_example=args.rollouts_per_example,
            sampling_args=args.sampling_args(),
            max_concurrent=args.max_concurrent,
            rollout_timeout_s=args.generation_timeout,
            shuffle=args.shuffle,
            seed=args.seed,
            mask_truncated_completions=args.mask_truncated_completions,
            zero_truncated_completions=args.zero_truncated_completions,
        )
        return runner

    @property
    def _base_model(self) -> Any:
        """The Hugging Face model inside DDP and PEFT."""
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if hasattr(model, "peft_config") else model

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer.train; the server ends with the final weights,
        and the orchestrator stops however this ends.
        """
        with self._serving():
            result = super().train(*args, **kwargs)
            self._surviving(self._sync_weights)
            return result

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """The orchestrator's thread and the communicator,
        open during train() or during an evaluate() alone.
        """
        if self.orchestrator is None or self.weight_sync is None or self._is_serving:
            yield
            return
        self._is_serving = True
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
        """One placeholder a step: Trainer counts steps with it,
        the data comes from the orchestrator.
        """
        steps = [{"step": step} for step in range(self.args.max_steps)]
        return DataLoader(steps, batch_size=1)  # type: ignore[arg-type]

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward on all microbatches of this step's batch.

        The loss of each microbatch is a sum; it is divided here, once, by the loss tokens of the
        global batch. Gradients are averaged over ranks by DDP, which the factor `world_size`
        undoes. So the gradient is that of the whole batch, however it was split.

        Returns:
            Scalar, this rank's share of the loss times world_size; its mean over ranks is the
            batch's loss.
        """
        start = time.monotonic()
        if not self._window:
            self._window_start = start
        model.train()
        self._sync_metrics = {}
        self.batch = batch = self._next_batch()
        waited_s = time.monotonic() - start
        world_size = self.args.world_size
        tokenizer: Any = self.processing_class
        lengths = [len(sample.token_ids) for sample in batch.samples]
        assignment = assign_microbatches(lengths, self.args.micro_batch_size, world_size)[
            self.args.process_index
        ]
        num_loss_tokens = max(batch.num_loss_tokens, 1)
        means = TokenMeans()
        batch_loss = torch.zeros((), device=self.args.device)
        for number, positions in enumerate(assignment):
            if self.orchestrator is not None:
                self.orchestrator.raise_if_failed()
            microbatch = collate([batch.samples[i] for i in positions], tokenizer.pad_token_id or 0)
            is_last = number == len(assignment) - 1
            # The one reduction of gradients happens in the last backward.
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            with nullcontext() if is_last else self.accelerator.no_sync(model):
                with self.compute_loss_context_manager():
                    loss = (
                        self.microbatch_loss(model, microbatch, means)
                        * world_size
                        / num_loss_tokens
                    )
                self.accelerator.backward(loss)
            batch_loss += loss.detach()
        self._num_tokens = sum(lengths)
        metrics = {
            **batch.metrics,
            **self._sync_metrics,
            **means.reduce(num_loss_tokens, world_size),
            "num_tokens": float(sum(lengths)),
            "num_loss_tokens": float(batch.num_loss_tokens),
            "policy_version": float(batch.policy_version),
            "staleness": float(batch.step - batch.policy_version),
            "wait_s": waited_s,
        }
        self._window.append(metrics)
        return batch_loss

    def microbatch_loss(
        self, model: nn.Module, microbatch: Microbatch, means: TokenMeans
    ) -> Tensor:
        """loss_fn on one microbatch: logprobs of the tokens that carry loss,
        never of the others. Scalar, a sum.
        """
        device = self.args.device
        # Position t predicts token t + 1.
        predicts = microbatch.loss_mask[:, 1:].clone()  # (B, T - 1)
        has_loss = bool(predicts.any())
        if not has_loss:
            # The head must take part in every backward, or DDP waits for its gradient.
            predicts[0, 0] = True
        rows, columns = predicts.nonzero(as_tuple=True)  # (N,)
        targets = microbatch.input_ids[rows, columns + 1].to(device)
        logprobs, entropy = self.token_logprobs(
            model, microbatch, rows.to(device), columns.to(device), targets
        )
        inference_logprobs = microbatch.inference_logprobs[rows, columns + 1].to(device)
        inputs = LossInputs(
            trainer_logprobs=logprobs,
            # NaN marks tokens that no policy sampled (mask_env_responses=False): ratio 1.
            inference_logprobs=torch.where(
                inference_logprobs.isnan(), logprobs.detach(), inference_logprobs
            ),
            advantages=microbatch.advantages[rows, columns + 1].to(device),
            loss_mask=torch.full_like(targets, has_loss, dtype=torch.bool),
            sequence_ids=rows.to(device),
        )
        outputs = self.loss_fn(inputs)
        means.add(inputs, outputs, entropy)
        return outputs.loss

    def token_logprobs(
        self,
        model: nn.Module,
        microbatch: Microbatch,
        rows: Tensor,
        columns: Tensor,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Trainer's logprobs of `targets`, each predicted at (row, column),
        and the entropy there. (N,) each.
        """
        temperature = self.args.temperature
        model_inputs = {
            "input_ids": microbatch.input_ids.to(self.args.device),
            "attention_mask": microbatch.attention_mask.to(self.args.device),
            "use_cache": False,
        }
        if self._why_full_logits:
            logits = model(**model_inputs).logits  # (B, T, vocabulary)
            return token_logprobs_and_entropy(logits[rows, columns], targets, temperature)
        with hidden_states_in_place_of_logits(self._base_model.get_output_embeddings()) as head:
            hidden = model(**model_inputs).logits  # (B, T, hidden_size)
        # Forward had it from accelerate; the head runs outside of forward.
        with self.accelerator.autocast():
            return chunked_logprobs_and_entropy(hidden[rows, columns], head, targets, temperature)

    def floating_point_ops(self, inputs: Any) -> int:
        """Six operations a parameter and token, forward and backward; this rank's share."""
        if self._num_parameters is None:
            model: Any = self.model
            self._num_parameters = sum(p.numel() for p in model.parameters())
        return 6 * self._num_parameters * self._num_tokens // self.args.world_size

    # --- Batches and weights ----------------------------------------------------------------------

    def _next_batch(self) -> Batch:
        """This step's batch, on every rank; the next one is asked for on the way.

        When there is none, what has been trained so far is saved before the error goes on.
        """
        batch = None
        try:
            try:
                if self.orchestrator is not None:
                    batch = self._surviving(partial(self._take_batch, self.orchestrator))
                    next_step = self.state.global_step + 1
                    if self.args.max_off_policy_steps > 0 and next_step < self.args.max_steps:
                        self._surviving(self._sync_weights)
                        self._submit(next_step)
            except BaseException:
                batch = None
                raise
            finally:
                if self.args.world_size > 1:  # an error too: the other ranks are waiting
                    batch = self._broadcast_batch(batch)
        except Exception:
            self._save_unfinished()
            raise
        assert batch is not None
        return batch

    def _take_batch(self, orchestrator: BatchSource) -> Batch:
        if not orchestrator.is_pending:  # the first step, max_off_policy_steps = 0, a lost server
            self._sync_weights()
            self._submit(self.state.global_step)
        return orchestrator.get()

    def _surviving(self, work: Callable[[], _T]) -> _T:
        """Run `work`; when the server is lost on the way, wait for it to come back and run it again
        with the weights sent anew.

        Raises:
            InferenceServerError: it did not come back within vllm_server_timeout, or was lost three
                times in this one piece of work.
        """
        for attempt in range(1, 4):
            try:
                return work()
            except ServerLostError as error:
                if self.weight_sync is None or self.orchestrator is None or attempt == 3:
                    raise
                logger.warning("%s; waiting for it to come back", error)
                self.orchestrator.discard()
                self.weight_sync.wait_for_server()
                logger.warning("the inference server is back; its weights are sent again")
        raise AssertionError("unreachable")

    def _save_unfinished(self) -> None:
        """A checkpoint of the steps done so far, where checkpoints are wanted at all."""
        step = self.state.global_step
        if step > 0 and self.args.save_strategy != "no" and self.model is not None:
            self._save_checkpoint(self.model, trial=None)
            logger.warning("step %d is saved in %s", step, self.args.output_dir)

    def _submit(self, step: int) -> None:
        assert self.orchestrator is not None and self.weight_sync is not None
        self.orchestrator.submit(
            step, self.weight_sync.model_name, self.weight_sync.policy_version or 0
        )

    def _broadcast_batch(self, batch: Batch | None) -> Batch:
        """Rank 0's batch to all ranks as plain tensors; None on rank 0 means that it failed."""
        device, is_source = self.args.device, self.args.process_index == 0
        # ok, step, policy version, number of samples
        header = torch.zeros(4, dtype=torch.int64, device=device)
        lengths = fields = None
        if batch is not None:
            lengths, fields = flatten_samples(batch.samples)
            header = torch.tensor(
                [1, batch.step, batch.policy_version, len(lengths)], device=device
            )
        torch.distributed.broadcast(header, 0)
        ok, step, policy_version, num_samples = header.tolist()
        if not ok:
            if is_source:
                return Batch(0, 0, [])  # rank 0 is raising its own error
            raise RuntimeError("rank 0 could not get a batch; its error is in its own output")
        lengths = (
            lengths.to(device)
            if lengths is not None
            else torch.empty(num_samples, dtype=torch.int64, device=device)
        )
        torch.distributed.broadcast(lengths, 0)
        shape = (5, int(lengths.sum()))
        fields = (
            fields.to(device)
            if fields is not None
            else torch.empty(shape, dtype=torch.float64, device=device)
        )
        torch.distributed.broadcast(fields, 0)
        return batch or Batch(step, policy_version, unflatten_samples(lengths.cpu(), fields.cpu()))

    def _sync_weights(self) -> None:
        """Send the weights of this step to the server, unless it has them.
        The policy version is the step's number.
        """
        version = self.state.global_step
        if self.weight_sync is None or self.weight_sync.policy_version == version:
            return
        model = self.accelerator.unwrap_model(self.model)
        self._sync_metrics = self.weight_sync.push(model, version)

    # --- Evaluation, logs -------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Mean reward and metrics of the environment's eval split under the current weights:
        `eval_reward` and so on.

        `eval_examples` examples, one rollout each, with the sampling options of training. The
        pending batch is waited for first, so that it is sampled by one policy only.
        """
        start = time.monotonic()
        metrics: dict[str, float] = {}
        if self.orchestrator is not None and self.weight_sync is not None:
            with self._serving():
                results = self._surviving(self._evaluate_on_server)
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in results.items()}
            metrics[f"{metric_key_prefix}_runtime"] = time.monotonic() - start
        metrics = self._from_rank_0(metrics)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _evaluate_on_server(self) -> dict[str, float]:
        assert self.orchestrator is not None and self.weight_sync is not None
        self.orchestrator.wait()
        self._sync_weights()
        version = self.weight_sync.policy_version or 0
        return self.orchestrator.evaluate(
            self.args.eval_examples, self.weight_sync.model_name, version
        )

    def _from_rank_0(self, metrics: dict[str, float]) -> dict[str, float]:
        """The same numbers on every rank, where save_strategy="best" decides by them."""
        if self.args.world_size == 1:
            return metrics
        payload = torch.tensor(
            list(json.dumps(metrics).encode()), dtype=torch.uint8, device=self.args.device
        )
        size = torch.tensor(len(payload), device=self.args.device)
        torch.distributed.broadcast(size, 0)
        if self.args.process_index != 0:
            payload = torch.empty(int(size), dtype=torch.uint8, device=self.args.device)
        torch.distributed.broadcast(payload, 0)
        return json.loads(bytes(payload.tolist()))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the means over the steps since the last line to Trainer's own numbers,
        and shows a few rollouts.
        """
        if "loss" in logs and self._window:
            window, self._window = self._window, []
            names = dict.fromkeys(name for metrics in window for name in metrics)
            for name in names:
                values = [metrics[name] for metrics in window if name in metrics]
                logs[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
            logs["step_s"] = (time.monotonic() - self._window_start) / len(window)
            if self.batch is not None and self.is_world_process_zero():
                print_rollouts(
                    self.batch.rollouts, self.state.global_step, self.args.num_rollouts_to_print
                )
        super().log(logs, start_time)


def _leave_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
