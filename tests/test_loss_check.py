"""Whether the first step finds out what is wrong with a loss, and what a loss can ask for."""

import random

import numpy as np
import pytest
import torch

from tests.helpers import StubSource, run_script
from tests.test_losses import make_inputs
from verifiers_rl.config import RLConfig
from verifiers_rl.loss_check import BROADCAST, MEAN, UNWEIGHTED, problem_of
from verifiers_rl.losses import LOSSES, MASKS, LossOutputs, needs, reinforce
from verifiers_rl.types import Batch


def per_token(inputs):
    return -inputs.advantages * inputs.trainer_logprobs


def mean(inputs):
    return LossOutputs((inputs.weights * per_token(inputs)).mean())


def broadcast(inputs):
    return LossOutputs((inputs.weights[:, None] * per_token(inputs)).sum())


def unweighted(inputs):
    return LossOutputs(per_token(inputs).sum())


def mean_of_entropy(inputs):
    return LossOutputs(reinforce(inputs).loss - 0.1 * inputs.entropy.mean())


def random_subset(inputs):
    kept = torch.rand_like(inputs.weights) < 0.5
    random.random(), np.random.rand()
    return LossOutputs((inputs.weights * kept * per_token(inputs)).sum())


PROBLEMS = [
    (mean, MEAN),
    (broadcast, BROADCAST),
    (unweighted, UNWEIGHTED),
    (mean_of_entropy, MEAN),
    (random_subset, ""),
]


def random_inputs(num_samples):
    torch.manual_seed(0)
    sizes = torch.randint(1, 9, (num_samples,))

    def numbers(low, high):
        return torch.empty(int(sizes.sum())).uniform_(low, high).tolist()

    probabilities = numbers(0.05, 0.75)
    moved = [p * f for p, f in zip(probabilities, numbers(0.75, 1.3), strict=True)]
    inputs = make_inputs(
        probabilities, moved, torch.randn(num_samples).repeat_interleave(sizes).tolist(),
        torch.arange(num_samples).repeat_interleave(sizes).tolist(), numbers(0.1, 2),
        reference_logprobs=numbers(0.05, 0.95),
    )  # fmt: skip
    inputs.entropy = torch.tensor(numbers(0, 2), requires_grad=True)
    for name in ("inference_logprobs", "advantages", "weights", "reference_logprobs"):
        setattr(inputs, name, getattr(inputs, name).float())
    inputs.trainer_logprobs = inputs.trainer_logprobs.detach().float().requires_grad_()
    return inputs


@pytest.mark.parametrize(("loss_fn", "problem"), PROBLEMS)
def test_each_wrong_loss_is_named(loss_fn, problem):
    assert problem_of(loss_fn, random_inputs(7)) == problem


@pytest.mark.parametrize(
    "options",
    [
        *({"loss": loss, "gradient_masks": {}} for loss in LOSSES),
        *({"gradient_masks": {mask: {}}, "entropy_beta": 0.01} for mask in MASKS),
        {"kl_beta": 0.1, "kl_target": 0.1},
    ],
)
def test_no_loss_of_this_library_is_wrong(options):
    loss_fn = RLConfig(use_cpu=True, **options).complete_loss(None)
    assert problem_of(loss_fn, random_inputs(60)) == ""


class Counting:
    """A loss with a state that each call changes."""

    calls = 0

    def __call__(self, inputs):
        self.calls += 1
        return random_subset(inputs)

    def state_dict(self, step):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


@pytest.mark.parametrize(("loss_fn", "problem"), [(unweighted, UNWEIGHTED), (Counting(), "")])
def test_the_first_step_says_it_once_and_changes_nothing(
    make_trainer, caplog, monkeypatch, tmp_path, loss_fn, problem
):
    def train(name):
        options = {"micro_batch_size": 2, "max_steps": 1, "output_dir": str(tmp_path / name)}
        trainer = make_trainer(loss_fn=loss_fn, **options)
        if isinstance(loss_fn, Counting):
            loss_fn.calls, trainer.checkpoints.kept["counting"] = 0, loss_fn
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        return (
            losses,
            random.random(),
            np.random.rand(),
            torch.rand(1),
            getattr(loss_fn, "calls", 0),
        )

    with_check = train("checked")
    said = [text for text in caplog.messages if "the loss breaks its contract" in text]
    assert [text.partition(": ")[2] for text in said] == ([problem] if problem else [])
    monkeypatch.setattr("verifiers_rl.loss_check.NUM_TRIES", 0)
    assert train("unchecked") == with_check


TWO_RANKS = """
import logging, os, sys
import tests.sharding_on_cpu
from tests.conftest import OF_TINY_RUN
from tests.helpers import StubSink, StubSource, load_example, make_tiny_model
from tests.test_loss_check import mean
from verifiers_rl import RLConfig, RLTrainer

logging.basicConfig(format=f"rank {os.environ['RANK']}: %(message)s")
args = RLConfig(output_dir=sys.argv[1], batch_size=8, rollouts_per_example=4, max_steps=2,
                log_rollouts=0, **OF_TINY_RUN)
trainer = RLTrainer(
    make_tiny_model(), None, args, load_example("warm_start").make_tokenizer(), mean,
    orchestrator=StubSource(), weight_sync=StubSink(),
)
trainer.train()
logging.warning(f"trained {trainer.state.global_step} steps")
"""


@pytest.mark.slow
def test_a_wrong_loss_is_named_once_under_two_ranks(tmp_path):
    said = run_script(tmp_path, TWO_RANKS, str(tmp_path / "run")).replace(" (docs/losses.md)", "")
    assert f"rank 0: the loss breaks its contract: {MEAN}" in said
    assert said.count("breaks its contract") == 1
    assert all(f"rank {rank}: trained 2 steps" in said for rank in (0, 1))


def test_a_loss_has_the_columns_that_it_asks_for_in_the_order_of_tokens(make_trainer, monkeypatch):
    monkeypatch.setattr("verifiers_rl.loss_check.NUM_TRIES", 0)
    names, found = ("rollout_id", "group_id", "reward", "num_tokens", "positions"), []

    @needs(*names)
    def asking(inputs):
        assert inputs.extras["reward"].dtype == torch.float32
        assert inputs.sequence_ids.tolist() == sorted(inputs.sequence_ids.tolist())
        found.extend(zip(*(inputs.extras[name].tolist() for name in names), strict=True))
        return reinforce(inputs)

    class Source(StubSource):
        def get(self):
            batch = super().get()
            for number, rollout in enumerate(batch.rollouts):
                rollout.example_id, rollout.reward = number // 4, number / 8
            return Batch(batch.step, 0, batch.samples, batch.rollouts)

    trainer = make_trainer(source=Source(), loss_fn=asking, micro_batch_size=2, max_steps=1)
    trainer.train()
    expected = [
        (number, number // 4, number / 8, sample.num_tokens, position)
        for number, sample in enumerate(trainer.batch.samples)
        for position in sample.loss_mask.nonzero()[0].tolist()
    ]
    # Samples are in the order of their microbatches.
    assert sorted(found, key=lambda row: row[0]) == expected
