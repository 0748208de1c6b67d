"""Logprobs over the tokens that the server could sample: the mask's way from reply to gradient."""

import numpy as np
import pytest
import torch

from tests.helpers import sent
from verifiers_rl import RLConfig
from verifiers_rl.inference.generation import TokenRequest
from verifiers_rl.inference.packed_tokens import (
    allowed_tokens,
    pack_ids,
    pack_sampled,
    unpack_mask,
)
from verifiers_rl.logprobs import chunked_logprobs_and_entropy, token_logprobs_and_entropy
from verifiers_rl.packing import collate
from verifiers_rl.types import ALLOWED_TOKENS, Rollout, Sample

INF = float("inf")


def rows_of(allowed):
    """The ids of each position."""
    return [[i for i in row if i >= 0] for row in allowed.tolist()]


def column(mask):
    """(tokens, K), as a sample has it."""
    widest = max(map(len, mask))
    return np.array([[*ids, *[-1] * (widest - len(ids))] for ids in mask], np.int32)


def masked_sample(mask=((), (1, 2), (), (3, 1, 4))):
    extras = {ALLOWED_TOKENS: column(mask)}
    zeros = [0.0, -0.5, 0.0, -0.25]
    return Sample([9, 2, 7, 3], [0, 1, 0, 1], zeros, [-1, 3, -1, 3], extras=extras)


def float64_loop(logits, targets, allowed, temperature, weights, of_entropy):
    """Sum of weights * logprob + of_entropy * entropy, and its gradient by the logits; token after
    token, over the allowed ids only.
    """
    total, gradient = 0.0, np.zeros(logits.shape)
    for n, (row, target) in enumerate(zip(logits.astype(np.float64), targets, strict=True)):
        ids = allowed[n] or list(range(len(row)))
        x = row[ids] / temperature
        log_p = x - x.max() - np.log(np.exp(x - x.max()).sum())
        p = np.exp(log_p)
        entropy = -(p * log_p).sum()
        total += weights[n] * log_p[ids.index(target)] + of_entropy[n] * entropy
        for place, v in enumerate(ids):
            gradient[n, v] += weights[n] * ((v == target) - p[place]) / temperature
            gradient[n, v] -= of_entropy[n] * p[place] * (log_p[place] + entropy) / temperature
    return total, gradient


@pytest.mark.parametrize("head_is_trained", [True, False])
@pytest.mark.parametrize("chunk_size", [2, 3, 100])
def test_gradients_over_the_allowed_tokens_equal_a_float64_loop(chunk_size, head_is_trained):
    random = np.random.default_rng(0)
    num, size, vocab = 7, 5, 23
    head = torch.from_numpy(random.normal(size=(vocab, size)).astype(np.float32))
    hidden = torch.from_numpy(3 * random.normal(size=(num, size)).astype(np.float32))
    head.requires_grad_(head_is_trained)
    hidden.requires_grad_()
    targets = random.integers(0, vocab, num)
    allowed = [
        [] if n == 2 else [int(t), *(int(v) for v in random.permutation(vocab)[:n] if v != t)]
        for n, t in enumerate(targets)
    ]
    mask = torch.from_numpy(column(allowed))
    weights, of_entropy = random.normal(size=(2, num))
    logprobs, entropy = chunked_logprobs_and_entropy(
        hidden, lambda h: h @ head.T, torch.from_numpy(targets), 0.7, chunk_size, "gradient",
        head_is_trained, allowed=mask,
    )  # fmt: skip
    loss = (torch.from_numpy(weights) * logprobs + torch.from_numpy(of_entropy) * entropy).sum()
    loss.backward()
    logits = (hidden.double() @ head.double().T).detach().numpy()
    expected, of_logits = float64_loop(logits, targets, allowed, 0.7, weights, of_entropy)
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(hidden.grad, of_logits @ head.detach().double().numpy(), atol=1e-5)
    if head_is_trained:
        np.testing.assert_allclose(
            head.grad, of_logits.T @ hidden.detach().double().numpy(), atol=1e-5
        )
    assert entropy[0].item() == 0 and logprobs[0].item() == 0  # one token was possible


def test_tokens_that_the_server_left_out_have_no_gradient_and_others_all_of_it():
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], requires_grad=True)
    allowed = torch.tensor([[1, 0], [-1, -1]])
    logprobs, _ = token_logprobs_and_entropy(logits, torch.tensor([1, 1]), 1.0, allowed=allowed)
    logprobs.sum().backward()
    assert logits.grad[0, 2] == 0 and logits.grad[1, 2] != 0
    assert logits.grad[0].tolist() == pytest.approx([-0.2689414, 0.2689414, 0], abs=1e-6)
    assert logits.detach().tolist() == [[1, 2, 3], [1, 2, 3]]  # unless it may be overwritten


def test_a_microbatch_has_the_masks_of_its_loss_tokens_in_their_order():
    plain = Sample([5, 6], [0, 1], [0, -1], [-1, 0])
    samples = [masked_sample(), plain, masked_sample(((), (2,), (), (3, 8)))]
    microbatch = collate(samples, [[2, 1], [0]], [1.0] * 3, 0)
    targets = microbatch.targets
    assert targets.token_ids.tolist() == [2, 3, 6, 2, 3]
    assert rows_of(targets.extras[ALLOWED_TOKENS]) == [[2], [3, 8], [], [1, 2], [3, 1, 4]]
    assert not microbatch.extras  # the model itself needs no mask
    assert not collate([plain], [[0]], [1.0], 0).targets.extras
    Rollout(0, "", samples=samples[:1]).leave_out_of_loss()
    assert not collate(samples, [[0]], [1.0] * 3, 0).targets.extras


def test_masks_are_sent_with_their_samples():
    plain = Sample([5, 6, 7], [0, 1, 1], [0, -1, -1], [-1, 0, 0])
    samples = [masked_sample(), plain, masked_sample(((), (), (), (3,)))]
    copies = sent(samples)
    found = [rows_of(copy.extras[ALLOWED_TOKENS]) for copy in copies]
    assert found == [[[], [1, 2], [], [3, 1, 4]], [[], [], []], [[], [], [], [3]]]
    assert not sent([plain])[0].extras


def test_a_reply_has_the_mask_in_its_packed_tokens():
    mask = np.array([2, 1]), np.array([4, 5, 6])
    packed = pack_sampled([4, 6], np.array([-0.5, 0.0]), mask)
    assert allowed_tokens(*unpack_mask(packed)).tolist() == [[4, 5], [6, -1]]
    assert unpack_mask(pack_sampled([4], np.array([-0.5]))) is None
    with pytest.raises(ValueError, match="1 tokens but a sampling mask of 2"):
        unpack_mask(pack_sampled([4], np.array([-0.5]), mask))
    with pytest.raises(ValueError, match="with 2 ids for 3"):
        unpack_mask(pack_sampled([4, 6], np.zeros(2), (mask[0], mask[1][:2])))


def test_a_request_with_a_mask_asks_vllm_for_the_likeliest_tokens():
    def make(**fields):
        fields = {"tokens": pack_ids([1]), "sampling_mask": True, **fields}
        return TokenRequest(fields, vocab_size=300, max_model_len=5), fields

    request, fields = make(top_k=100)
    assert request.num_logprobs == 132 and "sampling_mask" not in fields
    assert make(top_k=290)[0].num_logprobs == 300  # the whole vocabulary
    for top_k in (None, -1, 0, 1025, True):
        with pytest.raises(ValueError, match=f"needs top_k from 1 to 1024, not {top_k}"):
            make(top_k=top_k)
    with pytest.raises(ValueError, match="sampling_mask=1: must be true or false"):
        make(top_k=5, sampling_mask=1)


def keep(with_mask, *positions):
    """What is kept of positions, each as vLLM gives them: token ids and their logprobs."""
    from verifiers_rl.inference.engine import SampledTokens

    kept = SampledTokens(with_mask)
    for token_ids, logprobs in positions:
        kept.append_fast(token_ids, logprobs, iter(()), iter(()))
    return kept


@pytest.mark.slow  # it imports vLLM
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_possible_tokens_are_those_whose_probability_is_not_0():
    positions = [
        ([7, 5, 7, 9, 1], [-1.0, -0.5, -1.0, -INF, -INF]),
        ([3, 3, 8, 2, 4], [0.0, 0.0, -INF, -INF, -INF]),
        ([6, 1, 2, 3, 4], [-2.0, -1.0, -1.5, -2.0, -2.0]),  # as likely as tokens left out
    ]
    kept = keep(True, *positions)
    assert (kept.counts, kept.allowed) == ([2, 1, 5], [5, 7, 3, 1, 2, 3, 4, 6])
    assert kept.logprobs == keep(False, *positions).logprobs == [-1.0, 0.0, -2.0]
    assert keep(False, *positions).counts == keep(True).counts == []


def test_the_option_asks_for_the_mask_and_bounds_top_k(tmp_path):
    def make(**options):
        return RLConfig(output_dir=str(tmp_path), use_cpu=True, **options)

    extra = make(sampling_mask=True, top_p=0.9).sampling_args()["extra_body"]
    assert extra["sampling_mask"] is True and extra["top_k"] == 256
    assert make(sampling_mask=True, top_k=7).sampling_args()["extra_body"]["top_k"] == 7
    evaluation = make(sampling_mask=True, top_p=0.9).eval_sampling_args()["extra_body"]
    assert "sampling_mask" not in evaluation and evaluation["top_k"] == -1
    assert "sampling_mask" not in make(top_p=0.9).sampling_args()["extra_body"]
    biased = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    assert make(**biased).sampling_changes_probabilities() == [*biased]
    masked = make(sampling_mask=True, **biased)
    assert masked.sampling_changes_probabilities() == ["repetition_penalty"]
    with pytest.raises(ValueError, match="top_k=1025: must be at most 1024 with sampling_mask"):
        make(sampling_mask=True, top_k=1025)
    with pytest.raises(ValueError, match="sampling_mask=True: client_type='renderer' gets none"):
        make(sampling_mask=True, client_type="renderer")
