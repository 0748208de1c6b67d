"""`SFTTrainer`: supervised finetuning as `RLTrainer`'s own step on other batches.

    rows ──► tokens and loss masks ──► DatasetSource.get(): Batch ──► RLTrainer's step
             conversations.py          in place of the orchestrator   cross_entropy as its loss

Packing, chunked logprobs, LoRA, several ranks, checkpoints and metrics are those of `RLTrainer`.
There is no server: nothing is sampled, and an evaluation takes the loss on held-out rows.
"""

from __future__ import annotations

import copy
import math
import time
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from verifiers_rl.config import ConfigError
from verifiers_rl.data import example_index
from verifiers_rl.distributed import broadcast_batch, broadcast_values, reduce_over_ranks
from verifiers_rl.forward import evaluating
from verifiers_rl.process.terminal import show
from verifiers_rl.sft.config import SFTConfig
from verifiers_rl.sft.conversations import Tokenization, Tokens
from verifiers_rl.trainer import RLTrainer
from verifiers_rl.types import Batch, BatchSource, Sample, WeightSink, idle

# What a step logs of rollouts, and nothing is known of where there are none.
_OF_ROLLOUTS = (
    "importance_ratio",
    "importance_ratio_max",
    "mismatch_kl",
    "clamped_share",
    "advantage_abs",
    "idle_sample_share",
    "num_masked_samples",
    "policy_version",
    "wait_s",
    "sync_s",
)


# With methods that do nothing, but for those below: no environment has to start, to wait or to end.
_Idle: Any = idle(BatchSource)


class DatasetSource(_Idle):
    """A `BatchSource` that takes the batches from rows, each row once in an epoch. The last batch
    of an epoch has the rows that are left. The rows of a step follow from its number alone, so a
    resumed run goes on with the rows that come next.

    Args:
        args: the `SFTConfig`. With `shuffle`, each epoch has the rows in another order, which
            follows from `seed`.

    Attributes:
        rows: the samples of each row; only rank 0 needs them.
    """

    num_pending = 0  # a batch is made when the trainer asks for it

    def __init__(self, args: SFTConfig) -> None:
        self.rows: Sequence[Sequence[Tokens]] = []
        self._args, self._step = args, 0

    def submit(self, step: int, model: str, policy_version: int) -> None:
        self._step = step

    def get(self) -> Batch:
        num_rows, args = len(self.rows), self._args
        epoch, number = divmod(self._step, math.ceil(num_rows / args.batch_size))
        start = number * args.batch_size
        rows = [
            self.rows[example_index(epoch * num_rows + place, num_rows, args.shuffle, args.seed)]
            for place in range(start, min(start + args.batch_size, num_rows))
        ]
        return Batch(self._step, self._step, make_samples(rows))

    def state_dict(self, step: int) -> dict[str, Any]:
        order = {name: getattr(self._args, name) for name in ("batch_size", "shuffle", "seed")}
        checksum = 0  # of their tokens
        for token_ids, _ in chain(*self.rows):
            checksum = zlib.crc32(np.array(token_ids).tobytes(), checksum)
        return {"num_rows": len(self.rows), "rows": checksum, **order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ConfigError if the steps so far had other rows than these would say."""
        for name, now in self.state_dict(0).items():
            if now != state[name]:
                raise ConfigError(
                    f"{name}={now}: it was {state[name]} before the checkpoint, so the run cannot "
                    "go on with the rows that come next; take the same data, batch_size, shuffle "
                    "and seed, or start a new run from the checkpoint's model"
                )


class SFTTrainer(RLTrainer):
    """Trains a causal language model on what a dataset says.

    Args:
        model: a folder, a name on the hub, or a loaded model, as in `RLTrainer`.
        args: all options.
        train_dataset: rows that can be counted and indexed: a list of dicts, or a
            `datasets.Dataset`. conversations.py says which columns they have.
        eval_dataset: rows that are not trained on. `eval_strategy` says when their loss is taken.
        processing_class: the tokenizer; default: the model's own.
        **others: `loss_fn`, `peft_config`, `callbacks` and whatever else `RLTrainer` takes.

    Raises:
        ConfigError: an option, an argument or the data cannot work, or would have no effect.
    """

    args: SFTConfig
    config_class = SFTConfig
    evaluates_at_once = True

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module,
        args: SFTConfig,
        train_dataset: Any,
        eval_dataset: Any = None,
        *,
        processing_class: Any = None,
        **others: Any,
    ) -> None:
        if not isinstance(args, SFTConfig):
            raise ConfigError(f"args: expected an SFTConfig, got {type(args).__name__}")
        if args.eval_strategy != "no" and eval_dataset is None:
            raise ConfigError(
                "eval_strategy: there is nothing to evaluate on; give an eval_dataset (eval under "
                "[data]), or set it to 'no'"
            )
        source = DatasetSource(args)
        super().__init__(
            model,
            None,
            copy.copy(args),
            processing_class,
            orchestrator=source,
            weight_sync=idle(WeightSink)(),
            **others,
        )
        self._window.left_out = _OF_ROLLOUTS
        self._held_out: list[Sample] | None = None if eval_dataset is None else []
        ends: list[int] = []
        if args.process_index == 0:
            tokens = Tokenization(
                self.processing_class,
                args.max_seq_len,
                args.chat_template_kwargs,
                self._base_of(self.model).config.get_text_config().vocab_size,
            )
            source.rows = tokens.of_rows(train_dataset, "for training")
            ends = tokens.end_tokens(source.rows)
            if eval_dataset is not None:
                self._held_out = make_samples(tokens.of_rows(eval_dataset, "for evaluations"))
        found = broadcast_values({"num_rows": len(source.rows), "ends": ends})
        self.steps_per_epoch = math.ceil(found["num_rows"] / args.batch_size)
        if args.max_steps == -1:
            self.args.max_steps = math.ceil(args.num_train_epochs * self.steps_per_epoch)
        self._let_servers_stop_at(found["ends"])

    def _let_servers_stop_at(self, ends: list[int]) -> None:
        """Add the tokens that end replies to those in the model's generation_config, which is saved
        with it. A server goes on behind any other token, up to its length limit.
        """
        config = getattr(self._base_of(self.model), "generation_config", None)
        if config is None:
            return
        known = config.eos_token_id
        known = [known] if isinstance(known, int) else list(known or [])
        new = [token for token in ends if token not in known]
        if not new:
            return
        config.eos_token_id = [*known, *new]
        if self.is_world_process_zero():
            texts = ", ".join(repr(cast(Any, self.processing_class).decode(one)) for one in new)
            show(
                print,
                f"replies end with {texts}, and the model's server does not stop there: "
                "generation_config.json of the saved model names it now; that of an adapter needs "
                "save_final = 'merged'",
            )

    # --- The step ---------------------------------------------------------------------------------

    def push_weights(self) -> None:
        """Send nothing, because there is no server."""

    # --- Evaluation -------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Take the loss on the held-out rows, and log it."""
        if eval_dataset is not None or self._held_out is None:
            raise ConfigError("evaluate() takes the rows of SFTTrainer(eval_dataset=...)")
        start = time.monotonic()
        self.evaluations.ended[self.state.global_step] = {
            "loss": self.held_out_loss(),
            "loss_s": time.monotonic() - start,
        }
        return self.evaluations.log_ended(metric_key_prefix)

    def held_out_loss(self) -> float:
        """Return the mean cross entropy, in nats, of the loss tokens of the held-out rows. Every
        rank calls this.
        """
        args, model = self.args, self.model_wrapped
        batch = Batch(0, 0, self._held_out or []) if args.process_index == 0 else None
        batch = broadcast_batch(batch)
        sizes = batch.sizes
        weights = np.ones(len(sizes.lengths))
        total = torch.zeros((), dtype=torch.float64, device=args.device)
        with evaluating(model):
            for microbatch, _ in self._microbatches(batch, sizes.num_loss_tokens > 0, weights):
                self._interrupts.check_all(waits=False)
                logprobs, _ = self.token_logprobs(model, microbatch, "none")
                if microbatch.has_loss:
                    total -= logprobs.double().sum()
        return reduce_over_ranks(total).item() / int(sizes.num_loss_tokens.sum())


def make_samples(rows: Sequence[Sequence[Tokens]]) -> list[Sample]:
    """Return the samples of some rows. Those of one row are of one rollout and group."""
    return [
        Sample(
            token_ids,
            loss_mask,
            np.where(loss_mask, np.nan, 0),  # no policy sampled these tokens
            np.full(len(token_ids), -1),
            rollout_id=number,
            group_id=number,
        )
        for number, row in enumerate(rows)
        for token_ids, loss_mask in row
    ]
