"""Logprobs over the tokens that the server could sample: the mask's way from reply to gradient."""

import numpy as np
import pytest
import torch

from verifiers_rl.inference.generation import TokenRequest, allowed_of
from verifiers_rl.inference.packed_tokens import (
    allowed_tokens,
    pack_numbers,
    pack_sampled,
    unpack_mask,
)
from verifiers_rl.logprobs import chunked_logprobs_and_entropy
from verifiers_rl.packing import collate
from verifiers_rl.types import ALLOWED_TOKENS, Sample


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
    torch.manual_seed(0)
    head = torch.randn(6, 5, requires_grad=head_is_trained)
    hidden = torch.randn(5, 5, requires_grad=True)
    targets, allowed = [2, 0, 4, 3, 5], [[2], [0, 3], [], [1, 3, 5, 0], [5, 4, 0, 1, 2]]
    weights, of_entropy = torch.randn(2, 5)
    logprobs, entropy = chunked_logprobs_and_entropy(
        hidden, lambda h: h @ head.T, torch.tensor(targets), 0.7, chunk_size, "gradient",
        head_is_trained, allowed=torch.from_numpy(column(allowed)),
    )  # fmt: skip
    loss = (weights * logprobs + of_entropy * entropy).sum()
    logits = hidden.double() @ head.double().T
    expected = float64_loop(logits, targets, allowed, weights, of_entropy)
    wanted = [hidden, head] if head_is_trained else [hidden]
    given, gradients = (torch.autograd.grad(total, wanted) for total in (loss, expected))
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(given, gradients, rtol=1e-5, atol=1e-5)
    assert entropy[0].item() == 0 and logprobs[0].item() == 0  # one token was possible


def test_a_microbatch_has_the_masks_of_its_loss_tokens_in_their_order():
    plain = Sample([5, 6], [0, 1], [0, -1], [-1, 0])
    masked = Sample([9, 2, 7, 3], [0, 1, 0, 1], [0, -1, 0, -1], [-1, 0, -1, 0])
    masked.extras[ALLOWED_TOKENS] = column([(), (1, 2), (), (3, 1, 4)])
    microbatch = collate([masked, plain], [[1, 0]], [1.0] * 2, 0)
    found = microbatch.targets.extras[ALLOWED_TOKENS].tolist()
    assert found == [[-1, -1, -1], [1, 2, -1], [3, 1, 4]]
    assert not microbatch.extras  # the model itself needs no mask
    assert not collate([plain], [[0]], [1.0], 0).targets.extras


def test_a_reply_has_the_mask_in_its_packed_tokens():
    def packed(*mask):
        return pack_sampled([4, 6], np.array([-0.5, 0.0]), tuple(map(np.array, mask)) or None)

    assert allowed_tokens(*unpack_mask(packed([2, 1], [4, 5, 6]))).tolist() == [[4, 5], [6, -1]]
    assert unpack_mask(packed()) is None


def test_a_mask_has_all_tokens_that_could_be_sampled():
    """The sampled one comes first; also where it is not among the likeliest ones."""
    ids = np.array([[4, 4, 5], [6, 6, 9], [7, 2, 3]])
    logprobs = np.array([[-1, -1, -2], [0, 0, -np.inf], [-1, -1, -1]])
    counts, allowed = allowed_of(ids, logprobs)
    assert counts.tolist() == [2, 1, 3] and allowed.tolist() == [4, 5, 6, 7, 2, 3]


def test_a_request_with_a_mask_asks_vllm_for_the_likeliest_tokens():
    def num_logprobs(top_k, sampling_mask=True):
        fields = {"tokens": pack_numbers([1]), "seeds": [0], "sampling_mask": sampling_mask}
        fields["top_k"] = top_k
        return TokenRequest(fields, vocab_size=300, max_model_len=5).num_logprobs

    assert (num_logprobs(100), num_logprobs(290)) == (132, 300)  # the whole vocabulary
    for top_k in (None, 0, 1025, True):
        with pytest.raises(ValueError, match=f"needs top_k from 1 to 1024, not {top_k}"):
            num_logprobs(top_k)
    with pytest.raises(ValueError, match=r"sampling_mask\n.*boolean"):
        num_logprobs(5, 1)
