"""Numbers of single tokens, from the trainer's own forward passes to their samples."""

import numpy as np
import pytest
import torch

from tests.helpers import StubSource, make_samples, make_tiny_model
from tests.reference import reference_policy
from tests.test_trainer import make_trainer, tokenizer  # noqa: F401 - fixtures
from tests.tree_samples import make_tree
from verifiers_rl.losses import LossOutputs, needs
from verifiers_rl.report.recording import TokenTexts, choose_samples
from verifiers_rl.types import Batch, Rollout, SampleSizes


class OneBatch(StubSource):
    """The same samples in each step, one rollout a sample, `per_group` rollouts a group."""

    def __init__(self, samples, per_group=2):
        super().__init__()
        self.samples, self.per_group = samples, per_group

    def get(self):
        step, _ = self.pending.pop(0)
        rollouts = [
            Rollout(i // self.per_group, "p", "c", samples=[sample])
            for i, sample in enumerate(self.samples)
        ]
        return Batch(step, 0, self.samples, rollouts)


def step_values(trainer):
    """The values of the loss tokens of each sample after one step."""
    trainer.orchestrator.start()
    trainer.create_optimizer_and_scheduler(3)
    trainer.state.max_steps = 1
    trainer.training_step(trainer.model, {})
    found = trainer._files._values.of_samples
    samples = [(i, s) for i, s in enumerate(trainer.batch.samples) if id(s) in found]
    assert all(np.isnan(found[id(s)][:, ~s.loss_mask]).all() for _, s in samples)
    return {i: found[id(s)][:, s.loss_mask] for i, s in samples}


def check_values(found, model, sample, temperature):
    """Logprobs and entropies of one sample against a forward pass of it alone, in float64."""
    policy = reference_policy(model, sample.token_ids, temperature)
    at = np.flatnonzero(sample.loss_mask)
    expected = [policy[t - 1, sample.token_ids[t]].item() for t in at]
    entropy = [-(policy[t - 1].exp() * policy[t - 1]).sum().item() for t in at]
    assert found[0] == pytest.approx(expected, abs=1e-5)
    assert found[1] == pytest.approx(entropy, abs=1e-5)


@pytest.mark.parametrize("options", [
    {"share_prefixes": False},
    {"share_prefixes": True},
    {"share_prefixes": True, "use_lora": True, "max_tokens_per_microbatch": 20},
    {"loss_normalization": "sequence", "kl_beta": 0.1, "max_tokens_per_microbatch": 20},
])  # fmt: skip
def test_values_are_those_of_a_forward_of_each_sample(make_trainer, options):  # noqa: F811
    samples = make_tree(3)
    trainer = make_trainer(
        source=OneBatch(samples), temperature=0.7, log_rollouts=1.0, batch_size=16,
        rollouts_per_example=4, **options,
    )  # fmt: skip
    values = step_values(trainer)
    assert trainer.support.shares_prefixes == (options.get("share_prefixes", True))
    assert sorted(values) == list(range(len(samples)))
    model = make_tiny_model().double()
    for i, sample in enumerate(samples):
        check_values(values[i], model, sample, 0.7)


def test_what_is_not_computed_is_nan_and_what_is_masked_is_marked(make_trainer):  # noqa: F811
    samples = make_samples(4, seed=1)
    samples[1].set_advantage(0.0)  # its gradient is zero
    samples[2].loss_mask[:] = False

    def mask_first(inputs):
        return torch.arange(len(inputs.weights)) == 0

    @needs("advantages")
    def plain(inputs):
        loss = -(inputs.weights * inputs.advantages * inputs.trainer_logprobs).sum()
        return LossOutputs(loss, {"masked_share/mine": mask_first(inputs).float()})

    trainer = make_trainer(source=OneBatch(samples), loss_fn=plain, log_rollouts=1.0)
    values = step_values(trainer)
    assert np.isnan(values[1]).all() and values[1].shape == (3, samples[1].num_loss_tokens)
    assert values[2].shape == (3, 0)
    marked = np.concatenate([values[0][2], values[3][2]])
    assert sorted(marked) == [0.0] * (len(marked) - 1) + [1.0]


def test_a_share_of_the_groups_of_a_run_is_chosen_and_the_first_group_always():
    samples = make_samples(12)
    sizes = Batch(0, 0, samples, [Rollout(i // 3, "", samples=[s]) for i, s in enumerate(samples)])
    sizes = sizes.sizes  # four groups of three

    def groups(share, num_steps):
        found = []
        for step in range(num_steps):
            chosen = choose_samples(sizes, step, 4, share)
            found += (4 * step + np.unique(sizes.group_ids[chosen])).tolist()
            assert np.isin(sizes.group_ids, sizes.group_ids[chosen]).sum() == chosen.sum()
        return found

    assert groups(0.0, 5) == [] and groups(1.0, 2) == list(range(8))
    assert groups(0.25, 5) == [0, 4, 8, 12, 16]
    assert groups(0.1, 6) == [0, 10, 20]


def test_tokens_that_are_not_chosen_cost_nothing(make_trainer):  # noqa: F811
    trainer = make_trainer(source=OneBatch(make_samples(8), 4), log_rollouts=0.5)
    assert sorted(step_values(trainer)) == [0, 1, 2, 3]
    trainer = make_trainer(source=OneBatch(make_samples(8), 4), log_rollouts=0)
    trainer.orchestrator.start()
    trainer.training_step(trainer.model, {})
    assert trainer._files._values is None


def test_the_text_of_tokens_joins_to_the_text_that_was_tokenized(tokenizer):  # noqa: F811
    text = "a b\n数<|assistant|>ß"
    ids = np.array(tokenizer(text)["input_ids"])
    pieces = TokenTexts(tokenizer).of(ids)
    assert "".join(pieces) == text and "<|assistant|>" in pieces and len(pieces) == len(ids) > 7
    assert pieces[-2:] == ["", "ß"]  # the last of two tokens has it
    assert TokenTexts(tokenizer).of(ids[:-1])[-1] == "\ufffd"
    assert TokenTexts(tokenizer).of(np.array([10**6])) == [""]


def test_the_text_of_tokens_of_sentencepiece_keeps_its_spaces():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"\u2581the": 0, "<0xC3>": 1, "s": 2, "<0x9F>": 3}
    raw = Tokenizer(models.BPE(vocab, merges=[], byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=raw))
    assert texts.of(np.array([0, 2, 1, 3])) == [" the", "s", "", "ß"]


def test_sizes_without_samples_choose_none():
    assert choose_samples(SampleSizes.of([]), 0, 4, 1.0).shape == (0,)
