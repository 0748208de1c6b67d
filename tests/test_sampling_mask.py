"""Logprobs over the tokens that the server could sample: the mask's way from reply to gradient."""

import numpy as np
import pytest
import torch

from verifiers_rl.inference.generation import TokenRequest
from verifiers_rl.inference.packed_tokens import (
    allowed_tokens,
    pack_ids,
    pack_sampled,
    unpack_mask,
)
from verifiers_rl.logprobs import chunked_logprobs_and_entropy
from verifiers_rl.packing import collate
from verifiers_rl.types import ALLOWED_TOKENS, Rollout, Sample


def column(mask):
    """(tokens, K), as a sample has it."""
    widest = max(map(len, mask))
    return np.array([[*ids, *[-1] * (widest - len(ids))] for ids in mask], np.int32)


def float64_loop(logits, targets, allowed, weights, of_entropy):
    """Sum of weights * logprob + of_entropy * entropy at a temperature of 0.7; token after token,
    over the allowed ids only.
    """
    total = torch.zeros((), dtype=torch.float64)
    for n, row in enumerate(logits / 0.7):
        ids = allowed[n] or list(range(len(row)))
        log_p = torch.log_softmax(row[ids], -1)
        entropy = -(log_p.exp() * log_p).sum()
        total = total + weights[n] * log_p[ids.index(targets[n])] + of_entropy[n] * entropy
    return total


@pytest.mark.parametrize(
    "chunk_size, head_is_trained", [(2, True), (3, False), (3, True), (100, False)]
)
def test_gradients_over_the_allowed_tokens_equal_a_float64_loop(chunk_size, head_is_trained):
    random = np.random.default_rng(0)
    num, size, vocab = 7, 5, 23
    head = torch.from_numpy(random.normal(size=(vocab, size))).float()
    hidden = torch.from_numpy(3 * random.normal(size=(num, size))).float().requires_grad_()
    head.requires_grad_(head_is_trained)
    targets = random.integers(0, vocab, num)
    allowed = [
        [] if n == 2 else [int(t), *(int(v) for v in random.permutation(vocab)[:n] if v != t)]
        for n, t in enumerate(targets)
    ]
    weights, of_entropy = torch.from_numpy(random.normal(size=(2, num)))
    logprobs, entropy = chunked_logprobs_and_entropy(
        hidden, lambda h: h @ head.T, torch.from_numpy(targets), 0.7, chunk_size, "gradient",
        head_is_trained, allowed=torch.from_numpy(column(allowed)),
    )  # fmt: skip
    loss = (weights * logprobs + of_entropy * entropy).sum()
    logits = hidden.double() @ head.double().T
    expected = float64_loop(logits, targets, allowed, weights, of_entropy)
    wanted = [hidden, head] if head_is_trained else [hidden]
    given, gradients = (torch.autograd.grad(total, wanted) for total in (loss, expected))
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(given, gradients, rtol=1e-5, atol=1e-5)
    assert entropy[0].item() == 0 and logprobs[0].item() == 0  # one token was possible


def test_a_microbatch_has_the_masks_of_its_loss_tokens_in_their_order():
    def make_sample(token_ids, *mask):
        zeros = [0] * len(token_ids)
        extras = {ALLOWED_TOKENS: column(mask)} if mask else {}
        return Sample(token_ids, [False, *zeros[1:]], zeros, zeros, extras=extras)

    masked = make_sample([9, 2, 7, 3], (), (1, 2), (), (3, 1, 4))
    masked.loss_mask[[1, 3]] = True
    plain = make_sample([5, 6])
    plain.loss_mask[1] = True
    microbatch = collate([masked, plain], [[1, 0]], [1.0] * 2, 0)
    assert microbatch.targets.token_ids.tolist() == [6, 2, 3]
    found = microbatch.targets.extras[ALLOWED_TOKENS].tolist()
    assert found == [[-1, -1, -1], [1, 2, -1], [3, 1, 4]]
    assert not microbatch.extras  # the model itself needs no mask
    Rollout(0, "", samples=[masked]).leave_out_of_loss()
    for sample in (plain, masked):
        assert not collate([sample], [[0]], [1.0], 0).targets.extras


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


@pytest.mark.slow  # it imports vLLM
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_possible_tokens_are_those_whose_probability_is_not_0():
    from verifiers_rl.inference.engine import SampledTokens

    inf, kept = np.inf, {with_mask: SampledTokens(with_mask) for with_mask in (True, False)}
    for token_ids, logprobs in (  # of each position, as vLLM gives them
        ([7, 5, 7, 9, 1], [-1.0, -0.5, -1.0, -inf, -inf]),
        ([3, 3, 8, 2, 4], [0.0, 0.0, -inf, -inf, -inf]),
        ([6, 1, 2, 3, 4], [-2.0, -1.0, -1.5, -2.0, -2.0]),  # as likely as tokens left out
    ):
        for tokens in kept.values():
            tokens.append_fast(token_ids, logprobs, iter(()), iter(()))
    assert kept[True].counts == [2, 1, 5] and kept[False].counts == []
    assert kept[True].allowed == [5, 7, 3, 1, 2, 3, 4, 6]
    assert kept[True].logprobs == kept[False].logprobs == [-1.0, 0.0, -2.0]
