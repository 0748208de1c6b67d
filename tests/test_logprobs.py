import shutil
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.testing import assert_close

from verifiers_rl import logprobs as logprobs_module
from verifiers_rl.forward import check_head
from verifiers_rl.logprobs import (
    chunk_size_for,
    chunked_logprobs_and_entropy,
    hidden_states_in_place_of_logits,
    plain_logprobs_and_entropy,
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


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


# "plain" is what is compiled on a GPU. Compiled here, too, which takes a while on a CPU.
@pytest.mark.parametrize(
    ("kind", "mode", "dtype"),
    [
        ("kept", "value", torch.float32),
        ("overwritten", "gradient", torch.float32),
        ("kept", "none", torch.bfloat16),
        ("overwritten", "value", torch.bfloat16),
        ("plain", "none", torch.float32),
        ("plain", "gradient", torch.bfloat16),
        pytest.param("cpu", "gradient", torch.float32, marks=[pytest.mark.slow, needs_compiler]),
        pytest.param("cuda", "gradient", torch.float32, marks=[pytest.mark.gpu, needs_gpu]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile's own
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # which it hides by itself
def test_logprobs_entropy_and_gradient_equal_a_float64_loop(monkeypatch, kind, mode, dtype):
    device = "cuda" if kind == "cuda" else "cpu"
    if kind in ("plain", device):
        monkeypatch.setattr(logprobs_module, "COMPILED_ON", (device,))
    if kind == "plain":
        monkeypatch.setattr(logprobs_module, "compiled", lambda: plain_logprobs_and_entropy)
    torch.manual_seed(0)
    leaf, targets = torch.randn(5, 11, dtype=dtype, requires_grad=True), torch.randint(11, (5,))
    logits = (leaf * 1).to(device)  # as a head gives them: backward does not need them
    before = logits.detach().clone()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "kept"):  # float32 all the same
        given = token_logprobs_and_entropy(
            logits, targets.to(device), 0.7, mode, kind == "overwritten"
        )
    given, expected = [numbers.double().cpu() for numbers in given], reference(leaf, targets, 0.7)
    num_values = 1 if mode == "none" else 2
    assert_close(given[:num_values], [*expected[:num_values]], rtol=1e-5, atol=1e-6)
    assert kind != "kept" or torch.equal(logits, before)
    num_graded = 2 if mode == "gradient" else 1
    factors = torch.linspace(-1, 1, 5)
    totals = [sum((x * factors).sum() for x in values[:num_graded]) for values in (given, expected)]
    (expected_grad,) = torch.autograd.grad(totals[1], leaf)
    for retains in [False] if kind == device else [True, False]:  # backward loses nothing it needs
        (grad,) = torch.autograd.grad(totals[0], leaf, retain_graph=retains)
        assert_close(grad, expected_grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "compute",
    [
        plain_logprobs_and_entropy,
        token_logprobs_and_entropy,
        partial(token_logprobs_and_entropy, overwrite=True),
    ],
)
def test_impossible_tokens_are_finite(compute):
    # The server sampled tokens that the trainer's model rules out.
    leaf = torch.tensor([[0.0, -torch.inf, 1.0]] * 2, requires_grad=True)
    logprobs, entropies = compute(leaf * 1, torch.tensor([1, 2]), 0.5, entropy="gradient")
    (logprobs.sum() + entropies.sum()).backward()
    assert all(values.isfinite().all() for values in (logprobs, entropies, leaf.grad))


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_head_whose_backward_needs_its_logits_keeps_them(is_trained):
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(6, 11), nn.Tanh()).requires_grad_(is_trained)
    hidden, targets = torch.randn(6, 6, requires_grad=True), torch.randint(11, (6,))
    wanted = [hidden, *(p for p in head.parameters() if is_trained)]
    whole = head(hidden).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    chunked, _ = chunked_logprobs_and_entropy(
        hidden, head, targets, 1.0, chunk_size=2, head_is_trained=is_trained
    )
    assert_close(chunked, whole)
    given, expected = (torch.autograd.grad(values.sum(), wanted) for values in (chunked, whole))
    assert_close(given, expected)


def test_a_chunk_of_logits_takes_256_mb_and_on_a_gpu_1_gb():
    for device, num_tokens, limit in (
        ("cpu", 441, 2**28),
        ("mps", 441, 2**28),
        ("cuda", 1766, 2**30),
    ):
        assert chunk_size_for(151_936, device) == num_tokens == limit // (151_936 * 4)
    assert chunk_size_for(10**9, "cpu") == 1


SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def make_small(name, **options):
    """A causal LM of this architecture, with logits large enough for a cap to matter."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(50)
    return model


ARCHITECTURES = {
    "plain": lambda: make_small("Llama"),
    "tied": lambda: make_small("Qwen3", head_dim=8, tie_word_embeddings=True),
    "bias in the head": lambda: make_small("Phi"),
    "soft cap": lambda: make_small("Gemma2", head_dim=8, final_logit_softcapping=3.0),
    "divided": lambda: make_small("Granite", logits_scaling=8.0),
    "multiplied": lambda: make_small("Cohere", logit_scale=0.0625),
}


def head_results(
    model, hidden, targets, chunk_size=None, head_dtype=None, autocast=False, **options
):
    """Logprobs, entropies, the gradients of the hidden states and of the head's weights, and how
    often the head was called.

    Args:
        chunk_size: None for whole logits at once.
    """
    weight = model.get_output_embeddings().weight
    weight.grad = None
    rows, calls = hidden.clone().requires_grad_(), []
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        hidden_states_in_place_of_logits(model, head_dtype) as to_logits,
    ):
        if chunk_size is None:
            values = token_logprobs_and_entropy(to_logits(rows), targets, 0.7)
        else:
            values = chunked_logprobs_and_entropy(
                rows, lambda x: calls.append(1) or to_logits(x), targets, 0.7, chunk_size,
                head_is_trained=weight.requires_grad, **options,
            )  # fmt: skip
    (values[0] * (1 + torch.arange(len(targets)) % 3)).sum().backward()
    return values[0].detach(), values[1].detach(), rows.grad, weight.grad, len(calls)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chunks_of_many_architectures_give_what_whole_logits_give(name):
    model = ARCHITECTURES[name]()
    head = model.get_output_embeddings()
    check_head(model, model)
    hidden, targets = torch.randn(8, 16), torch.randint(64, (8,))
    expected = head_results(model, hidden, targets)
    # As often as the rank with the most chunks, though there are fewer rows.
    for chunk_size, min_chunks, number in ((1, 1, 8), (3, 1, 3), (100, 1, 1), (3, 9, 9)):
        for is_trained in (True, False):
            head.requires_grad_(is_trained)
            given = head_results(model, hidden, targets, chunk_size, min_chunks=min_chunks)
            assert_close(given[: 3 + is_trained], expected[: 3 + is_trained])
            # In backward all but the last again.
            assert given[4] == (2 * number - 1 if is_trained else number)


def relative_error(given, expected):
    return ((given.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("name", "is_trained", "weights"),
    [
        ("tied", True, torch.bfloat16),
        ("bias in the head", False, torch.bfloat16),
        ("soft cap", True, torch.float32),
        ("tied", False, torch.float32),
    ],
)
def test_a_head_in_float32_is_exact_where_the_model_is_bfloat16(name, is_trained, weights):
    model = ARCHITECTURES[name]().to(weights)
    head = model.get_output_embeddings().requires_grad_(is_trained)
    number, chunk_size = (200, 1) if weights == torch.bfloat16 else (40, 7)
    hidden, targets = torch.randn(number, 16).bfloat16(), torch.randint(64, (number,))
    with torch.no_grad():
        head.weight.mul_(20)  # logits of usual size
    rounded, exact = (
        head_results(model, hidden, targets, chunk_size, dtype, weights == torch.float32)
        for dtype in (None, torch.float32)
    )
    expected = head_results(model.double(), hidden.double(), targets)
    assert relative_error(rounded[0], expected[0]) > 1e-4
    # Each rounding, of weights and logits and three for a cap, moves a logit by 2^-8 at most.
    largest = (hidden.double().abs() @ head.weight.abs().T).amax(-1)
    assert (rounded[0] - expected[0]).abs().le(2 * 5 * 2**-8 * largest / 0.7).all()
    assert relative_error(exact[0], expected[0]) < 1e-6
    # Gradients are rounded once at the end, to the dtype of what they belong to: that of the head
    # is summed over its chunks in float32.
    assert relative_error(rounded[2], expected[2]) < 0.1
    assert relative_error(exact[2], expected[2]) < 4e-3
    if is_trained:
        tolerance = 1e-6 if weights == torch.float32 else 2e-3  # 2^-9
        assert relative_error(exact[3], expected[3]) < tolerance
