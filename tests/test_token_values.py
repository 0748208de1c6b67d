"""Numbers of single tokens, from the trainer's own forward passes to their samples."""

import numpy as np
import pytest
import torch

from tests.helpers import StubSource, make_samples, make_tiny_model
from tests.reference import reference_policy
from tests.tree_samples import make_tree
from verifiers_rl.losses import LossOutputs, needs
from verifiers_rl.report.metrics import TOKEN_VALUES
from verifiers_rl.report.recording import TokenTexts, choose_samples
from verifiers_rl.types import Batch, Rollout


class OneBatch(StubSource):
    """The same samples in each step, one rollout a sample, `per_group` rollouts a group."""

    def __init__(self, samples, per_group=2):
        super().__init__()
        rollouts = [Rollout(i // per_group, "", samples=[s]) for i, s in enumerate(samples)]
        self.get = lambda: Batch(0, 0, samples, rollouts)


def step_values(trainer):
    """The trainer's values of the loss tokens of each sample after one step: logprobs, entropies,
    masks. Those of other tokens must be NaN.
    """
    trainer.orchestrator.start()
    trainer.state.max_steps = 1
    trainer.training_step(trainer.model, {})
    found = {}
    for i, sample in enumerate(trainer.batch.samples):
        if TOKEN_VALUES[0] in sample.extras:
            values = np.array([sample.extras[name] for name in TOKEN_VALUES])
            assert np.isnan(values[:, ~sample.loss_mask]).all()
            found[i] = values[:, sample.loss_mask]
    return found


@pytest.mark.parametrize("options", [
    {"share_prefixes": False, "loss_normalization": "sequence", "kl_beta": 0.1},
    {"share_prefixes": True, "use_lora": True, "max_tokens_per_microbatch": 20},
])  # fmt: skip
def test_values_are_those_of_a_forward_of_each_sample(make_trainer, options):
    samples = make_tree(3)
    trainer = make_trainer(
        source=OneBatch(samples), temperature=0.7, log_rollouts=1.0, batch_size=16, **options
    )
    values = step_values(trainer)
    assert trainer.tried_support.shares_prefixes == options["share_prefixes"]
    assert sorted(values) == list(range(len(samples)))
    model = make_tiny_model().double()
    for i, sample in enumerate(samples):
        policy = reference_policy(model, sample.token_ids, 0.7)
        rows = [(policy[t - 1], sample.token_ids[t]) for t in sample.loss_mask.nonzero()[0]]
        expected = [row[token].item() for row, token in rows]
        assert values[i][0] == pytest.approx(expected, abs=1e-5)
        entropies = [-(row.exp() * row).sum().item() for row, _ in rows]
        assert values[i][1] == pytest.approx(entropies, abs=1e-5)


def test_what_is_not_computed_is_nan_and_what_is_masked_is_marked(make_trainer):
    samples = make_samples(4, seed=1)
    samples[1].set_advantage(0.0)  # its gradient is zero
    samples[2].loss_mask[:] = False

    @needs("nonzero_advantages")
    def plain(inputs):
        loss = -(inputs.weights * inputs.advantages * inputs.trainer_logprobs).sum()
        is_first = torch.arange(len(inputs.weights)) == 0
        return LossOutputs(loss, {"masked_share/mine": is_first.float()})

    trainer = make_trainer(source=OneBatch(samples), loss_fn=plain, log_rollouts=1.0)
    values = step_values(trainer)
    assert np.isnan(values[1]).all() and values[1].shape == (3, samples[1].num_loss_tokens)
    assert values[2].shape == (3, 0)
    marked = np.concatenate([values[0][2], values[3][2]])
    assert sorted(marked) == [0.0] * (len(marked) - 1) + [1.0]


def test_a_share_of_the_groups_of_a_run_is_chosen_and_the_first_group_always(make_trainer):
    source = OneBatch(make_samples(12), per_group=3)
    sizes = source.get().sizes  # four groups of three

    def groups(share):
        numbers = np.concatenate([choose_samples(sizes, step, 4, share) for step in range(6)])
        numbers = numbers.reshape(-1, 3)
        assert (numbers.all(axis=1) == numbers.any(axis=1)).all()  # whole groups
        return numbers[:, 0].nonzero()[0].tolist()

    assert groups(0.0) == [] and groups(1.0) == list(range(24))
    assert groups(0.25) == [*range(0, 24, 4)] and groups(0.1) == [0, 10, 20]
    for share, chosen in ((0, []), (0.25, [0, 1, 2])):  # others cost nothing
        assert [*step_values(make_trainer(source=source, log_rollouts=share))] == chosen


def test_the_text_of_tokens_joins_to_the_text_that_was_tokenized(tokenizer):
    text = "a b\n数<|assistant|>ß"
    ids, texts = np.array(tokenizer(text)["input_ids"]), TokenTexts(tokenizer)
    pieces = texts.of(ids)
    assert "".join(pieces) == text and "<|assistant|>" in pieces and len(pieces) == len(ids) > 7
    assert pieces[-2:] == ["", "ß"]  # the last of two tokens has it
    assert texts.of(ids[:-1])[-1] == "\ufffd" and texts.of(np.array([10**6])) == [""]
