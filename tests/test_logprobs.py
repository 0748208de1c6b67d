import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from tests.helpers import make_tiny_model
from verifiers_rl.logprobs import (
    chunked_logprobs_and_entropy,
    hidden_states_in_place_of_logits,
    reason_against_chunking,
    token_logprobs_and_entropy,
)


def reference(logits, targets, temperature):
    """Plain loops in float64."""
    logprobs, entropies = [], []
    for row, target in zip(logits.double() / temperature, targets, strict=True):
        total = sum(value.exp() for value in row - row.max())
        log_softmax = [value - row.max() - total.log() for value in row]
        logprobs.append(log_softmax[target])
        entropies.append(-sum(value.exp() * value for value in log_softmax))
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_equal_a_float64_loop(temperature):
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 11), torch.randint(11, (5,))
    logprobs, entropy = token_logprobs_and_entropy(logits, targets, temperature)
    expected_logprobs, expected_entropy = reference(logits, targets, temperature)
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-6)


def test_impossible_tokens_give_a_finite_entropy():
    _, entropy = token_logprobs_and_entropy(
        torch.tensor([[0.0, -torch.inf]]), torch.tensor([0]), 1.0
    )
    assert entropy.tolist() == [0.0]


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_chunks_give_the_same_values_and_gradients(chunk_size):
    torch.manual_seed(0)
    head = nn.Linear(6, 17)
    targets, weights = torch.randint(17, (20,)), torch.randn(20)

    def grads(function):
        torch.manual_seed(1)
        hidden = torch.randn(20, 6, requires_grad=True)
        head.zero_grad()
        logprobs, entropy = function(hidden)
        (logprobs * weights).sum().backward()
        return (
            logprobs.detach(),
            entropy,
            hidden.grad,
            head.weight.grad.clone(),
            head.bias.grad.clone(),
        )

    whole = grads(lambda hidden: token_logprobs_and_entropy(head(hidden), targets, 0.9))
    chunked = grads(
        lambda hidden: chunked_logprobs_and_entropy(hidden, head, targets, 0.9, chunk_size)
    )
    for expected, actual in zip(whole, chunked, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_the_model_returns_hidden_states_only_while_asked_to():
    model = make_tiny_model()
    input_ids = torch.randint(200, (2, 5))
    logits = model(input_ids).logits
    with hidden_states_in_place_of_logits(model.get_output_embeddings()) as head:
        hidden = model(input_ids).logits
        assert hidden.shape == (2, 5, model.config.hidden_size)
        torch.testing.assert_close(head(hidden), logits)
    torch.testing.assert_close(model(input_ids).logits, logits)


def test_a_model_with_soft_capped_logits_is_not_chunked():
    config = Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
    )
    reason = reason_against_chunking(Gemma2ForCausalLM(config))
    assert reason is not None and "final_logit_softcapping" in reason
    assert reason_against_chunking(make_tiny_model()) is None
