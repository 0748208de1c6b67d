"""Whether the first step finds out what is wrong with a loss, and what a loss can ask for."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers import StubSource, make_samples
from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.loss_check import BROADCAST, CONSTANT, MEAN, UNWEIGHTED, problem_of
from verifiers_rl.losses import LOSSES, MASKS, LossInputs, LossOutputs, needs, reinforce
from verifiers_rl.types import Batch, Rollout


def per_token(inputs):
    return -inputs.advantages * inputs.trainer_logprobs


def mean(inputs):
    return LossOutputs((inputs.weights * per_token(inputs)).mean())


def broadcast(inputs):
    return LossOutputs((inputs.weights[:, None] * per_token(inputs)).sum())


def unweighted(inputs):
    return LossOutputs(per_token(inputs).sum())


def random_subset(inputs):
    kept = torch.rand_like(inputs.weights) < 0.5
    return LossOutputs((inputs.weights * kept * per_token(inputs)).sum())


def random_inputs(num_samples):
    torch.manual_seed(0)
    ids = torch.arange(num_samples).repeat_interleave(torch.randint(1, 9, (num_samples,)))

    def numbers(low, high):
        return torch.empty(len(ids)).uniform_(low, high)

    logprobs = numbers(-3, -0.3)
    return LossInputs(
        trainer_logprobs=logprobs.clone().requires_grad_(),
        inference_logprobs=logprobs + numbers(-0.28, 0.26),
        advantages=torch.randn(num_samples)[ids],
        weights=numbers(0.1, 2),
        sequence_ids=ids,
        entropy=numbers(0, 2).requires_grad_(),
        reference_logprobs=numbers(-3, -0.05),
    )


@pytest.mark.parametrize(
    "loss_fn, problem",
    [(mean, MEAN), (broadcast, BROADCAST), (unweighted, UNWEIGHTED), (random_subset, "")],
)
def test_each_wrong_loss_is_named(loss_fn, problem):
    assert problem_of(loss_fn, random_inputs(7)) == problem


def test_an_nn_tensor_is_named_where_advantages_add_up_to_zero():
    inputs = random_inputs(8)
    inputs.advantages = torch.tensor([1.0, -1.0]).repeat(len(inputs.weights))[: len(inputs.weights)]
    inputs.weights = torch.ones_like(inputs.weights)
    assert problem_of(broadcast, inputs) == BROADCAST


def test_a_bonus_on_an_entropy_without_gradient_is_named():
    inputs = random_inputs(7)

    def bonus(inputs):
        return LossOutputs((inputs.weights * (per_token(inputs) - inputs.entropy)).sum())

    assert problem_of(bonus, inputs) == ""
    inputs.entropy.requires_grad_(False)
    assert problem_of(bonus, inputs) == CONSTANT

    def mask(inputs):
        return LossOutputs((inputs.weights * (inputs.entropy < 1) * per_token(inputs)).sum())

    assert problem_of(mask, inputs) == ""


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
    """A wrong loss that draws random numbers, with a state that each call changes."""

    calls = 0

    def __call__(self, inputs):
        self.calls += 1
        random.random(), np.random.rand(), torch.rand(1)
        return unweighted(inputs)

    def state_dict(self, step):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_the_first_step_says_it_once_and_changes_nothing(
    make_trainer, caplog, monkeypatch, tmp_path
):
    def train(name):
        loss_fn = Counting()
        trainer = make_trainer(
            loss_fn=loss_fn, micro_batch_size=2, max_steps=1, output_dir=f"{tmp_path}/{name}"
        )
        trainer.checkpoints.kept["counting"] = loss_fn
        trainer.train()
        numbers = random.random(), np.random.rand(), torch.rand(1).item()
        return trainer.state.log_history[0]["loss"], *numbers, loss_fn.calls

    with_check = train("checked")
    said = [text for text in caplog.messages if "the loss breaks its contract" in text]
    assert [text.partition(": ")[2] for text in said] == [UNWEIGHTED]
    monkeypatch.setattr("verifiers_rl.loss_check.NUM_TRIES", 0)
    assert train("unchecked") == with_check


@pytest.mark.parametrize("state", [{"calls": np.float32(1)}, None])
def test_a_kept_part_without_a_state_of_json_is_named_before_the_first_step(make_trainer, state):
    trainer, part = make_trainer(max_steps=1), SimpleNamespace()
    if state:
        part.state_dict = lambda step: state
    trainer.checkpoints.kept["mine"] = part
    with pytest.raises(ConfigError, match=r"checkpoints\.kept\['mine'\]: .*; it needs state_dict"):
        trainer.train()


def test_a_loss_has_the_columns_that_it_asks_for_in_the_order_of_tokens(make_trainer, monkeypatch):
    monkeypatch.setattr("verifiers_rl.loss_check.NUM_TRIES", 0)
    names, found = ("rollout_id", "group_id", "reward", "num_tokens", "positions"), []

    @needs(*names)
    def asking(inputs):
        assert inputs.sequence_ids.tolist() == sorted(inputs.sequence_ids.tolist())
        columns = (inputs.extras[name].tolist() for name in (*names, "own"))
        found.extend(zip(*columns, strict=True))
        return LossOutputs(reinforce(inputs).loss, {"my_metric": inputs.extras["own"]})

    samples, source = make_samples(8), StubSource()
    for sample in samples:
        sample.extras["own"] = np.array(sample.token_ids, np.float32)
    rollouts = [Rollout(i // 4, "", reward=i / 8, samples=[s]) for i, s in enumerate(samples)]
    source.get = lambda: Batch(0, 0, samples, rollouts)
    trainer = make_trainer(source=source, loss_fn=asking, micro_batch_size=2, max_steps=1)
    trainer.train()
    expected = [
        (number, number // 4, number / 8, sample.num_tokens, position, sample.token_ids[position])
        for number, sample in enumerate(samples)
        for position in sample.loss_mask.nonzero()[0].tolist()
    ]
    # Samples are in the order of their microbatches.
    assert sorted(found, key=lambda row: row[0]) == expected
    mean = np.mean([row[-1] for row in expected])
    assert trainer.state.log_history[0]["my_metric"] == pytest.approx(mean)
