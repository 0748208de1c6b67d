"""The numbers of a run: means over the tokens of a step and over steps, and the progress bar."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from verifiers_rl.distributed import reduce_over_ranks
from verifiers_rl.losses import MAX_LOG_RATIO, LossInputs, log_importance_ratio
from verifiers_rl.models import num_experts
from verifiers_rl.packing import Microbatch
from verifiers_rl.process.terminal import show
from verifiers_rl.report.run_folder import short
from verifiers_rl.types import Batch

logger = logging.getLogger(__name__)

# For these, a line of logs has the maximum over the steps since the last line, not the mean.
MAXIMA = ("importance_ratio_max", "staleness_max")


OF_TRAINER = ("loss", "grad_norm", "learning_rate", "epoch", "step")  # its names in a line of logs
# The last one is 1 where a mask took the token out.
TOKEN_VALUES = ("trainer_logprobs", "entropy", "is_masked")


class TokenValues:
    """Collects the trainer's numbers of the loss tokens of some samples, from the microbatches of a
    step on all ranks. They become extras of the samples, `TOKEN_VALUES`: float32, NaN in
    a sample that was not computed, and where a token is not in the loss.

    Args:
        batch: that is trained on.
        is_chosen: (S,) bool, the samples.
        device: of this rank.
    """

    def __init__(self, batch: Batch, is_chosen: np.ndarray, device: torch.device) -> None:
        self._samples, self._lengths = batch.samples, batch.sizes.num_loss_tokens.tolist()
        # What each loss token has: TOKEN_VALUES, and 1 where computed.
        self._values = {
            i: torch.zeros((4, self._lengths[i]), device=device)
            for i in np.flatnonzero(is_chosen).tolist()
        }

    def add(
        self, sample_ids: Sequence[int], inputs: LossInputs, metrics: Mapping[str, Tensor]
    ) -> None:
        """Add a microbatch. The host does not wait for the device.

        Args:
            sample_ids: the samples whose loss tokens `inputs` has, one sample after the other.
            inputs: what the loss got.
            metrics: what the loss returned; those named `masked_share` say which tokens a mask
                took out.
        """
        if self._values.keys().isdisjoint(sample_ids):
            return
        logprobs = inputs.trainer_logprobs.detach().float()
        of_masks = [v.float() for name, v in metrics.items() if name.startswith("masked_share")]
        masked = torch.stack([torch.zeros_like(logprobs), *of_masks]).amax(0)
        rows = [logprobs, inputs.entropy.float(), masked, torch.ones_like(logprobs)]
        parts = torch.stack(rows).detach().split([self._lengths[i] for i in sample_ids], dim=1)
        for i, part in zip(sample_ids, parts, strict=True):
            if i in self._values:
                self._values[i] = part

    def collect(self) -> None:
        """Bring the values of all ranks together, and wait for them. Every rank must call this."""
        # Each sample is computed by at most one rank; the others have zeros.
        found = reduce_over_ranks(torch.cat([*self._values.values()], dim=1)).cpu()
        parts = found.split([self._lengths[i] for i in self._values], dim=1)
        for i, part in zip(self._values, parts, strict=True):
            sample, (*values, is_computed) = self._samples[i], part.numpy()
            of_tokens = np.full((3, sample.num_tokens), np.nan, np.float32)
            of_tokens[:, sample.loss_mask] = np.where(is_computed, values, np.nan)
            sample.extras |= zip(TOKEN_VALUES, of_tokens, strict=True)


class StepMetrics:
    """The numbers of a step: what was computed of its batch, and means over its loss tokens. All
    are summed over microbatches, and then over ranks.

    Args:
        batch: that is trained on.
        values: collects the values of some tokens beside.

    Attributes:
        num_microbatches, num_positions: of this rank; the positions of their rows, with padding.
        num_own_tokens: of this rank, without padding; what samples have in common counts once.
        num_tokens: the same of all ranks, from `reduce` on, like the rest.
        num_tokens_of_samples: of the samples that were computed.
        num_loss_tokens: of these.
        num_samples: that were computed.
        means: over the loss tokens that were computed; {} if there is none.
    """

    def __init__(self, batch: Batch, values: TokenValues | None = None) -> None:
        self._batch, self._values = batch, values
        self.num_microbatches = self.num_positions = self.num_own_tokens = 0
        self.num_tokens = self.num_tokens_of_samples = self.num_loss_tokens = self.num_samples = 0
        self.means: dict[str, float] = {}
        self._names: list[str] = []  # of what is summed
        self._sums = torch.zeros(0, dtype=torch.float64)  # one for each name
        self._largest_ratio = torch.zeros(())

    def add(self, inputs: LossInputs, metrics: dict[str, Tensor], microbatch: Microbatch) -> None:
        """Add one microbatch: (N,) tensors over its loss tokens, with the same names each time. Of
        one without loss tokens only the names count: the ranks add up the same ones.

        Raises:
            ValueError: the loss has returned other names before, or one that is taken.
        """
        if self._values is not None:
            self._values.add(microbatch.sample_ids, inputs, metrics)
        self.num_microbatches += 1
        self.num_positions += microbatch.input_ids.numel()
        self.num_own_tokens += microbatch.num_tokens
        self.num_tokens_of_samples += int(self._batch.sizes.lengths[microbatch.sample_ids].sum())
        self.num_samples += len(microbatch.sample_ids)
        log_ratio = log_importance_ratio(inputs).detach()
        ratio = log_ratio.exp()
        tokens = {
            "importance_ratio": ratio,
            # KL(inference || trainer), estimated from tokens that the inference side sampled:
            # k3 of http://joschu.net/blog/kl-approx.html
            "mismatch_kl": ratio - 1 - log_ratio,
            "clamped_share": (log_ratio.abs() >= MAX_LOG_RATIO).float(),
            "entropy": inputs.entropy,
            "advantage_abs": inputs.advantages.abs(),
        }
        if taken := metrics.keys() & {*tokens, *self._batch.metrics, *OF_TRAINER}:
            raise ValueError(
                f"the loss returns a metric {taken}, a name that the step's own have; rename it"
            )
        tokens |= metrics
        sums = torch.stack([values.detach().float().sum().double() for values in tokens.values()])
        if not self._names:
            self._names, self._sums = list(tokens), torch.zeros_like(sums)
            self._largest_ratio = torch.zeros_like(ratio[0])
        if self._names != list(tokens):
            raise ValueError(
                f"the loss returned the metrics {list(metrics)}, and for another microbatch others "
                f"of {self._names}; it must return the same ones, in one order"
            )
        if microbatch.has_loss:
            self.num_loss_tokens += len(ratio)
            self._sums = self._sums + sums
            self._largest_ratio = torch.maximum(self._largest_ratio, ratio.max())

    def reduce(self) -> None:
        """Sum the numbers of all ranks. Every rank must call this once, with the same names."""
        if self._values is not None:
            self._values.collect()
        if not self._names:  # no rank has a microbatch
            return
        counts = self._sums.new_tensor(
            [
                self.num_own_tokens,
                self.num_tokens_of_samples,
                self.num_loss_tokens,
                self.num_samples,
            ]
        )
        numbers = reduce_over_ranks(torch.cat([counts, self._sums])).tolist()
        largest = reduce_over_ranks(self._largest_ratio, torch.distributed.ReduceOp.MAX).item()
        self.num_tokens, self.num_tokens_of_samples, self.num_loss_tokens, self.num_samples = map(
            int, numbers[:4]
        )
        if self.num_loss_tokens:
            sums = zip(self._names, numbers[4:], strict=True)
            self.means = {name: value / self.num_loss_tokens for name, value in sums}
            self.means["importance_ratio_max"] = largest

    def counts(self) -> dict[str, float]:
        """Return what a step logs of its batch and of what was computed; see docs/metrics.md."""
        batch, num_loss_tokens = self._batch, self._batch.sizes.num_loss_tokens
        return {
            "num_tokens": batch.num_tokens,
            "num_loss_tokens": batch.num_loss_tokens,
            "num_masked_samples": int((num_loss_tokens == 0).sum()),
            "num_microbatches": self.num_microbatches,
            "padding_share": (self.num_positions - self.num_own_tokens)
            / max(self.num_positions, 1),
            "idle_sample_share": (len(num_loss_tokens) - self.num_samples)
            / max(len(num_loss_tokens), 1),
            "prefix_sharing": self.num_tokens_of_samples / max(self.num_tokens, 1),
            "skipped_update_share": float(not self.num_microbatches),
            "policy_version": batch.policy_version,
            **batch.staleness(),
        }


# Rounding to bfloat16 moves a logprob by 0.01 to 0.03 nats. mismatch_kl is about half the mean
# square of that: below 0.001. It is ten times as much where rounding also changes the choice of
# experts.
FIRST_MISMATCH_KL = 0.02
UNIFORM_STEPS = 10  # so many batches in a row that teach nothing draw a warning


class StepWindow(TrainerCallback):
    """The steps since the last line of logs: their metrics, and the time that each took, in which
    evaluations and checkpoints between the steps do not count. Warns if nothing can be learned,
    and, at the first step of a run, if the server does not sample from the model that is trained.

    Attributes:
        steps: their metrics.
        step_began: when the step that runs has begun, by the monotonic clock.
        left_out: metrics of this name are not logged.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.left_out: tuple[str, ...] = ()
        self.step_began, self._is_first, self._num_uniform = 0.0, True, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        metrics = self.steps[-1]
        metrics["step_s"] = time.monotonic() - self.step_began
        # No advantage_fn has made a difference of its own.
        is_uniform = metrics.get("uniform_group_share") == 1.0 and not metrics.get("advantage_abs")
        self._num_uniform = self._num_uniform + 1 if is_uniform else 0
        if self._num_uniform == UNIFORM_STEPS and state.is_world_process_zero:
            logger.warning(
                f"nothing can be learned: in the last {UNIFORM_STEPS} batches no group had two "
                f"different rewards; their mean is {metrics.get('reward', float('nan')):.3g}. Does "
                "the reward depend on the reply? If it does, take easier or harder examples, or "
                "raise temperature or rollouts_per_example, so that replies to one example differ"
            )
        # The weights of both sides are equal in the first step, if its batch is new.
        is_equal = self._is_first and metrics.get("staleness") == 0.0
        self._is_first, mismatch_kl = False, metrics.get("mismatch_kl", 0.0)
        if is_equal and mismatch_kl > FIRST_MISMATCH_KL and state.is_world_process_zero:
            logger.warning(
                f"mismatch_kl is {mismatch_kl:.2g} in the first step, which the rounding of dtypes "
                f"does not explain (it stays below {FIRST_MISMATCH_KL:g}): the tokens were not "
                "sampled from the model that is trained. Look at the server's model, at sampling "
                "options such as top_p, and at what the environment or its harness puts into a "
                "request"
            )

    def take(self) -> dict[str, float]:
        """Return the mean of each metric over the steps that have it (the maximum for `MAXIMA`),
        and the tokens per second. Empties the window.
        """
        steps, self.steps = self.steps, []
        result = {}
        for name in dict.fromkeys(chain(*steps)):
            values = [metrics[name] for metrics in steps if name in metrics]
            if name not in self.left_out:
                result[name] = max(values) if name in MAXIMA else sum(values) / len(values)
        return {**result, "tokens_per_s": result["num_tokens"] / result["step_s"]}


# Dense bfloat16 operations a second, from the vendors' data sheets.
PEAK_FLOPS = {
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "B200": 2250e12,
}


def peak_flops(device_name: str) -> float | None:
    """Return the `PEAK_FLOPS` of a GPU, by the name that torch gives it; None if not known,
    and for a part of a GPU (MIG).
    """
    return next(
        (
            flops
            for name, flops in PEAK_FLOPS.items()
            if re.search(rf"\b{name}\b(?!.* MIG )", device_name)
        ),
        None,
    )


def model_flops(model: nn.Module, num_tokens: int, num_loss_tokens: int) -> int:
    """Count the operations that forward and backward need. Recomputation and padding do not count.

    Each weight needs two operations per token in forward, two for the gradient of its input, and
    two for its own gradient if it is trained. Embeddings are lookups and need none. The head
    counts for loss tokens only. Each token uses `num_experts_per_tok` of the experts. Attention
    scores are not counted.

    Args:
        model: the causal LM, without wrappers around it.
        num_tokens: tokens of the batch.
        num_loss_tokens: tokens of the batch that carry loss.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    head = getattr(model, "get_output_embeddings", lambda: None)() or nn.Identity()
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding))
    num_all = num_experts(config) or 1
    num_used = getattr(config, "num_experts_per_tok", None) or num_all
    # Of parameters, by id. PEFT's modules_to_save leaves the original module, unused, beside the
    # trained copy; the original of a tied head is the embedding.
    tokens = {id(p): 0 for module in embeddings for p in module.parameters()}
    of_head = (id(p) for name, p in head.named_parameters() if "original_module." not in name)
    tokens |= dict.fromkeys(of_head, num_loss_tokens)
    flops = 0
    for name, parameter in model.named_parameters():
        if ".original_module." not in name:
            size = getattr(parameter, "ds_numel", parameter.numel())  # full size, in ZeRO-3
            if ".experts." in name:
                size = size * num_used // num_all
            size *= 6 if parameter.requires_grad else 4
            flops += size * tokens.get(id(parameter), num_tokens)
    return flops


def device_metrics(device: torch.device, num_flops: int, seconds: float) -> dict[str, float]:
    """Return the peak memory since the last call (GB), and the model FLOPs utilisation if the
    GPU's peak is known.

    Args:
        device: this rank's device. On a CPU the peak memory is the process's since its start.
        num_flops: operations of forward and backward for this rank's share of a batch.
        seconds: the time that forward and backward took.
    """
    if device.type != "cuda":
        import resource

        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_memory_gb": peak_kib * 1024 / 1e9}
    metrics = {"peak_memory_gb": torch.cuda.max_memory_allocated(device) / 1e9}
    torch.cuda.reset_peak_memory_stats(device)
    peak = peak_flops(torch.cuda.get_device_name(device))
    return metrics if peak is None else {**metrics, "mfu": num_flops / seconds / peak}


class ShortProgress(ProgressCallback):
    """Trainer's progress bar, with the reward on it, and a line of a few numbers at each logging
    step.
    """

    _SHOWN = ("reward", "loss", "grad_norm", "entropy", "mismatch_kl", "step_s")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        shown = {
            name: value
            for name, value in logs.items()
            if name in self._SHOWN or name.startswith("eval_")
        }
        if self.training_bar is not None and "reward" in logs:
            show(self.training_bar.set_postfix, reward=short(logs["reward"]))
        if shown:
            shown = {"step": state.global_step, **shown}
            show(super().on_log, args, state, control, shown, **kwargs)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        show(super().on_step_end, *args, **kwargs)
