"""`vf-rl replay RUN --step 40 --loss my_loss:a --loss ppo`: what losses make of one step of a run.

    rollouts of step 40, with all tokens    the batch      ┐  the gradient of the batch, a step of
    checkpoint-39                           the weights    ┘  the optimizer, the batch once more

For each loss the run's own trainer resumes at the checkpoint, in a folder that is removed. So all
of a step is the trainer's: packing, forward, normalisation, clipping. Nothing is sampled.

    replay/step-000040.parquet      in the run's folder: the weight of each token under each loss,
                                    by which the page of `vf-rl view` colors tokens
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from verifiers_rl.advantages import AdvantageFn, set_advantages
from verifiers_rl.checkpoints import seed_step
from verifiers_rl.cli.config import load_run_config, make_importable
from verifiers_rl.cli.resolved import RESOLVED
from verifiers_rl.config import ConfigError
from verifiers_rl.envs.records import text_of
from verifiers_rl.losses import (
    LossFn,
    LossInputs,
    LossOutputs,
    log_importance_ratio,
    needs,
    needs_of,
)
from verifiers_rl.report.metrics import StepMetrics
from verifiers_rl.report.rollouts import SCHEMA
from verifiers_rl.report.run_folder import (
    ROLLOUTS,
    checkpoints_of,
    read_run,
    replace_file,
    rollouts_file,
)
from verifiers_rl.trainer import RLTrainer
from verifiers_rl.types import Batch, BatchSource, Rollout, Sample, WeightSink, idle

# Columns that the samples get: the number of a token in its rollout, its place among the loss
# tokens of its sample, above 0 to 1, and the logprob that the trainer had of it.
NUMBER, PLACE, RECORDED = "_number", "_place", "_trainer_logprobs"
# Of the run's options, those that would reach beyond the folder that is removed.
CHANGED: dict[str, Any] = {
    "overwrite_output_dir": False,
    "resume_from_checkpoint": None,
    "eval_on_start": False,
    "report_to": "none",
    "disable_tqdm": True,
    "accelerator_config": None,  # run.json has only its description
}
# What a step with these needs is not in the rollouts, or not in one process.
UNKNOWN = ("sampling_mask", "router_replay", "fsdp", "deepspeed")
MAX_MOVED = 0.1  # nats, in the mean, before anything has moved; rounding makes less


class Outcome(NamedTuple):
    """What one loss makes of the batch.

    Attributes:
        gradient: (P,) float32, of all trained parameters, before clipping, on the CPU.
        metrics: before and after the optimizer's step: what the trainer logs of tokens, the `loss`
            of the batch, and as means over tokens `gain`, r_t * A_t, and `moved`, the distance of
            the trainer's logprob from the recorded one in nats.
        tokens: (7, N) float, of each loss token the number of its rollout, its number in it, the
            logprob that the run recorded, its place, its weight, its logprob and its advantage. The
            weight is -dL / dlogprob_t, before the sum L is divided by the batch's denominator. It
            is A_t for REINFORCE.
    """

    gradient: Tensor
    metrics: list[dict[str, float]]
    tokens: Tensor


class Replayed(BaseException):
    """The step is done, and training must not go on."""


# --- What the run has written ---------------------------------------------------------------------


def read_rows(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return the rows of the groups that a step trained on, without rollouts that failed.

    Raises:
        ConfigError: there are none, some have no tokens, or a file is not as a run writes it.
    """
    files = sorted(filter(Path.is_file, (folder / ROLLOUTS).glob("step-*.parquet")))
    for path in files:
        if path < rollouts_file(folder, step):
            continue
        try:
            found = pq.read_table(
                path, filters=[("step", "=", step), ("split", "=", "train")]
            ).select(SCHEMA.names)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}; bring it back as the run has written it, or take "
                "the step of another file"
            ) from error
        rows = [row for row in found.to_pylist() if row["error"] is None]
        groups = {row["group"] for row in rows if row["in_loss"]}
        rows = [row for row in rows if row["group"] in groups]
        if any(row["num_tokens"] and not row["has_tokens"] for row in rows):
            raise ConfigError(
                f"--step {step}: {path} lacks the tokens of some groups; a run with log_rollouts=1 "
                "writes those of all"
            )
        if rows:
            return rows
    last = [path.name for path in files[-1:]]
    raise ConfigError(
        f"--step {step}: no rollout in {folder / ROLLOUTS} was in its loss; its last file: {last}"
    )


def make_batch(rows: list[dict[str, Any]], step: int, advantage_fn: AdvantageFn | None) -> Batch:
    """Return the batch of a step, with its advantages, or with those of a function.

    Raises:
        ConfigError: there are more or fewer advantages or other numbers than tokens.
    """
    try:
        groups = [[*map(rollout_of, own)] for _, own in groupby(rows, itemgetter("group"))]
        for group in groups:
            if advantage_fn is not None:
                set_advantages(group, advantage_fn)
    except ValueError as error:
        raise ConfigError(f"--step {step}: {error}") from error
    rollouts = [*chain(*groups)]
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    return Batch(step - 1, step - 1, samples, rollouts, groups=groups)


def rollout_of(row: dict[str, Any]) -> Rollout:
    """Return a rollout, with what an advantage function may read."""
    messages = row["messages"] or []
    is_reply = [message["role"] == "assistant" for message in messages]
    prompt, reply = np.split(messages, [[*is_reply, True].index(True)])
    samples = []
    if row["has_tokens"]:
        row[NUMBER], ends = range(row["num_tokens"]), np.flatnonzero(np.diff(row["sample"])) + 1
        names = [*Sample.DTYPES, "trainer_logprobs", NUMBER]
        for *own, recorded, number in zip(*(np.split(row[n], ends) for n in names), strict=True):
            sample = Sample(*own)
            sample.extras = {
                NUMBER: number,
                PLACE: np.cumsum(sample.loss_mask) / max(sample.num_loss_tokens, 1),
                RECORDED: recorded,
            }
            samples.append(sample)
    metrics = {part["name"]: part["value"] for part in row["rewards"] or []}
    return Rollout(
        row["example"],
        text_of(prompt),
        text_of(reply),
        row["env"],
        row["role"] or "",
        row["reward"],
        metrics,
        samples,
        row["num_turns"],
        row["is_truncated"],
    )


# --- The step -------------------------------------------------------------------------------------


def replay(
    folder: Path, step: int, losses: Sequence[str] = (), advantages: Sequence[str] = ()
) -> dict[str, Outcome]:
    """Return by name what each of these losses makes of a step, under each of these advantages.

    Args:
        folder: of the run.
        step: from 1, as in metrics.jsonl.
        losses: as the option `loss` has them; default: that of the run.
        advantages: as the option `advantage` has them; default: the recorded ones.

    Raises:
        ConfigError: the run has not written what is needed, or an option cannot be used.
        TomlError, RunFolderError: the run's configuration or checkpoint cannot be read.
        WritingError: the weights of tokens cannot be written.
    """
    rows, run, kind = read_rows(folder, step), read_run(folder), RLTrainer
    model, options = run["model"], {**run["args"], **CHANGED}
    for name in UNKNOWN:
        if options.get(name):
            raise ConfigError(f"{name}={options[name]!r}: no step of such a run can be replayed")
    checkpoint, found = folder / f"checkpoint-{step - 1}", checkpoints_of(folder)
    if step > 1 and checkpoint not in found:
        raise ConfigError(
            f"--step {step}: it starts from {checkpoint}, and the run's checkpoints are "
            f"{[path.name for path in found]}; take the step behind one, or step 1"
        )
    if (folder / RESOLVED).is_file():
        config = load_run_config(folder / RESOLVED, checks_model=False)
        make_importable(config.folders)
        model, kind = config.model, config.trainer_class()
    make_importable([Path.cwd()])
    parts = {"orchestrator": idle(BatchSource)(), "weight_sync": idle(WeightSink)()}
    own, outcomes = options.setdefault("loss", kind.config_class.loss), dict[str, Outcome]()
    for loss, advantage in product(losses or [own], advantages or [""]):
        changed = {} if loss == own else {"loss": loss, "loss_args": {}}
        changed |= {"advantage": advantage} if advantage else {}
        with tempfile.TemporaryDirectory(prefix="vf-rl-replay-") as output_dir:
            args = kind.config_class(**{**options, **changed, "output_dir": output_dir})
            batch = make_batch(rows, step, args.make_advantage() if advantage else None)
            trainer = kind(model, None, args, **parts)
            outcome = replay_step(trainer, batch, str(checkpoint) if step > 1 else None)
        del trainer
        gc.collect()  # it is in cycles, and the next one needs its memory
        if (moved := outcome.metrics[0]["moved"]) > MAX_MOVED:
            raise ConfigError(
                f"--step {step}: logprobs are {moved:.2g} nats away from those that it had; has "
                f"{model} changed, or did a script give another model than run.json says?"
            )
        outcomes[f"{loss} {advantage}".strip()] = outcome
    columns = [*outcome.tokens[:3], *(one.tokens[4] for one in outcomes.values())]
    path = folder / "replay" / rollouts_file(folder, step).name
    table = pa.table([*np.stack(columns)], ["rollout", "token", "trainer_logprob", *outcomes])
    pq.write_table(table, sink := pa.BufferOutputStream())
    replace_file(path, sink.getvalue())
    return outcomes


def replay_step(trainer: Any, batch: Batch, checkpoint: str | None) -> Outcome:
    """Let a trainer resume, and do this step."""
    metrics, gradients, seen = list[dict[str, float]](), list[Tensor](), list[Tensor]()

    def training_step(model: Any, *args: Any) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        for _ in ("before", "after"):
            seed_step(trainer.args, trainer.state.global_step)  # for an adapter's dropout
            of_step = StepMetrics(batch)
            loss = trainer.train_on(model, batch, of_step).item()
            of_step.reduce()
            metrics.append({"loss": loss, **of_step.means})
            if not gradients:
                grads = (torch.zeros_like(p) if p.grad is None else p.grad for p in trained)
                gradients.append(torch.cat([grad.flatten().float().cpu() for grad in grads]))
            trainer.update_now(model)
        raise Replayed

    trainer.loss_fn, trainer.training_step = watch(trainer.loss_fn, seen), training_step
    batch.add_columns(needs_of(trainer.loss_fn))
    with suppress(Replayed):
        trainer.train(checkpoint)
    before = torch.cat(seen, 1)[:, : batch.num_loss_tokens]
    return Outcome(gradients[0], metrics, before)


def watch(loss_fn: LossFn, seen: list[Tensor]) -> LossFn:
    """Return a loss that adds `Outcome.tokens` to `seen`. Samples without an advantage are computed
    for it too, so that all losses see the same tokens.
    """

    @needs("rollout_id", *needs_of(loss_fn) - {"nonzero_advantages"})
    def watched(inputs: LossInputs) -> LossOutputs:
        outputs, logprobs = loss_fn(inputs), inputs.trainer_logprobs
        (gradient,) = torch.autograd.grad(
            outputs.loss, logprobs, retain_graph=True, materialize_grads=True
        )
        columns = [inputs.extras[name] for name in ("rollout_id", NUMBER, RECORDED, PLACE)]
        columns += [0 - gradient, logprobs, inputs.advantages]
        seen.append(torch.stack(columns).detach().cpu())
        metrics = {
            "has_gradient": (gradient != 0).float(),
            "gain": (log_importance_ratio(inputs).exp() * inputs.advantages).detach(),
            # NaN: that token was not computed.
            "moved": (logprobs.detach() - inputs.extras[RECORDED]).abs().nan_to_num(),
        }
        return LossOutputs(outputs.loss, metrics | outputs.metrics)

    return watched
