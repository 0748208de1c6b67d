import shutil
from importlib.util import find_spec

import pytest
import torch
import transformers
from torch import nn
from torch._inductor.exc import InductorError
from transformers import LlamaForCausalLM

from verifiers_rl import logprobs as logprobs_module
from verifiers_rl.config import ConfigError
from verifiers_rl.forward import check_head, reason_against_sharing_rows
from verifiers_rl.logprobs import (
    chunk_size_for,
    chunked_logprobs_and_entropy,
    hidden_states_in_place_of_logits,
    plain_logprobs_and_entropy,
    token_logprobs_and_entropy,
)
from verifiers_rl.losses import LOSSES, LossInputs


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
@pytest.mark.parametrize("autocast", [False, True])  # float32 all the same
def test_logprobs_and_entropy_equal_a_float64_loop(temperature, autocast):
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 11), torch.randint(11, (5,))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logprobs, entropy = token_logprobs_and_entropy(logits, targets, temperature)
    expected_logprobs, expected_entropy = reference(logits, targets, temperature)
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
def test_impossible_tokens_give_a_finite_entropy(autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, entropy = token_logprobs_and_entropy(
            torch.tensor([[0.0, -torch.inf]]), torch.tensor([0]), 1.0
        )
    assert entropy.tolist() == [0.0]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_impossible_tokens_give_a_finite_loss_and_gradients(name, overwrite):
    # The server sampled tokens that the trainer's model rules out.
    logits = torch.tensor([[0.0, -torch.inf]] * 3, requires_grad=True)
    logprobs, entropy = token_logprobs_and_entropy(
        logits.clone(), torch.tensor([1, 1, 1]), 0.5, overwrite=overwrite
    )
    assert entropy.tolist() == [0.0] * 3
    inputs = LossInputs(
        trainer_logprobs=logprobs,
        inference_logprobs=torch.tensor([-0.1, -0.2, -torch.inf]),
        advantages=torch.tensor([100.0, 100.0, -100.0]),
        weights=torch.ones(3),
        sequence_ids=torch.tensor([0, 0, 1]),
        entropy=entropy,
    )
    loss = LOSSES[name](inputs).loss
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_logits_keep_their_values_unless_they_may_be_overwritten(overwrite, with_entropy, dtype):
    torch.manual_seed(0)
    leaf, targets = torch.randn(5, 11, dtype=dtype, requires_grad=True), torch.randint(11, (5,))
    expected_logprobs, expected_entropy = reference(leaf, targets, 0.7)
    (expected_grad,) = torch.autograd.grad(expected_logprobs.sum(), leaf)
    logits = leaf * 1  # as a head gives them: what came before does not need them in backward
    before = logits.detach().clone()
    mode = "value" if with_entropy else "none"
    logprobs, entropy = token_logprobs_and_entropy(logits, targets, 0.7, mode, overwrite)
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-5, atol=1e-6)
    expected_entropy = expected_entropy if with_entropy else torch.zeros(5, dtype=torch.float64)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-6)
    for _ in range(2):  # nothing that backward needs is lost in a backward
        (grad,) = torch.autograd.grad(logprobs.sum(), leaf, retain_graph=True)
        torch.testing.assert_close(grad, expected_grad)
    assert torch.equal(logits, before) == (not overwrite or dtype == torch.bfloat16)


def test_a_derivative_of_the_gradient_is_an_error_not_a_wrong_value():
    logits = torch.randn(5, 11, requires_grad=True)
    logprobs, _ = token_logprobs_and_entropy(logits, torch.arange(5), 1.0)
    (grad,) = torch.autograd.grad(logprobs.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("last", [nn.Tanh(), nn.Sigmoid(), nn.Softmax(-1), nn.ReLU()])
@pytest.mark.parametrize("head_is_trained", [False, True])
def test_a_head_whose_backward_needs_its_logits_keeps_them(head_is_trained, last):
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(6, 11), last).requires_grad_(head_is_trained)
    hidden, targets = torch.randn(6, 6, requires_grad=True), torch.randint(11, (6,))
    wanted = [hidden, *(p for p in head.parameters() if head_is_trained)]
    whole = head(hidden).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    chunked, _ = chunked_logprobs_and_entropy(
        hidden, head, targets, 1.0, chunk_size=2, head_is_trained=head_is_trained
    )
    torch.testing.assert_close(chunked, whole)
    factors = torch.arange(6.0)
    for given, expected in zip(
        torch.autograd.grad((chunked * factors).sum(), wanted),
        torch.autograd.grad((whole * factors).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(given, expected)


def test_a_chunk_of_logits_takes_256_mb_and_on_a_gpu_1_gb():
    assert chunk_size_for(151_936, "cpu") == 441 and 441 * 151_936 * 4 < 2**28
    assert chunk_size_for(151_936, "cuda") == 1766 and 1766 * 151_936 * 4 < 2**30
    assert chunk_size_for(10**9, "cpu") == 1


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


# As on a GPU. Once it is compiled, too, which takes a while on a CPU.
@pytest.mark.parametrize(
    ("is_compiled", "entropy", "temperature", "device"),
    [
        (False, "none", 1.0, "cpu"),
        (False, "value", 0.7, "cpu"),
        (False, "gradient", 0.7, "cpu"),
        pytest.param(True, "value", 0.7, "cpu", marks=[pytest.mark.slow, needs_compiler]),
        pytest.param(True, "gradient", 0.7, "cpu", marks=[pytest.mark.slow, needs_compiler]),
        pytest.param(True, "gradient", 0.7, "cuda", marks=[pytest.mark.gpu, needs_gpu]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile's own
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # which it hides by itself
def test_the_compiled_function_equals_the_loops_and_has_their_gradient(
    monkeypatch, is_compiled, entropy, temperature, device
):
    monkeypatch.setattr(logprobs_module, "COMPILED_ON", (device,))
    if not is_compiled:
        monkeypatch.setattr(logprobs_module, "compiled", lambda: plain_logprobs_and_entropy)
    torch.manual_seed(0)
    leaf = torch.randn(5, 11, requires_grad=True)
    targets = torch.randint(11, (5,))
    given = token_logprobs_and_entropy(
        (leaf * 1).to(device), targets.to(device), temperature, entropy
    )
    given = [numbers.cpu() for numbers in given]
    expected = reference(leaf, targets, temperature)
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    assert given[1].requires_grad == (entropy == "gradient")
    factors = torch.linspace(-1, 1, 5)
    with_entropy = entropy == "gradient"
    sums = [(a * factors).sum() + with_entropy * (b * factors).sum() for a, b in (given, expected)]
    grads = [torch.autograd.grad(total, leaf)[0] for total in sums]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_in_the_compiled_function_impossible_tokens_are_finite(entropy):
    leaf = torch.tensor([[0.0, -torch.inf, 1.0]] * 2, requires_grad=True)
    logprobs, entropies = plain_logprobs_and_entropy(leaf * 1, torch.tensor([1, 2]), 0.5, entropy)
    (logprobs.sum() + entropies.sum()).backward()
    assert logprobs.isfinite().all() and entropies.isfinite().all()
    assert leaf.grad.isfinite().all()


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


def test_backward_begins_with_the_last_chunk_and_computes_only_the_others_again():
    head, calls = nn.Linear(1, 5), []
    hidden = torch.arange(6.0, requires_grad=True)

    def recorded(rows):
        calls.append(rows.flatten().tolist())
        logits, first = head(rows), rows[0].item()
        logits.register_hook(lambda _: calls.append(first))
        return logits

    targets = torch.zeros(6, dtype=torch.int64)
    logprobs, _ = chunked_logprobs_and_entropy(hidden[:, None], recorded, targets, 1.0, 2)
    assert calls == [[0, 1], [2, 3], [4, 5]]
    calls.clear()
    logprobs.sum().backward()
    assert calls == [4, [2, 3], 2, [0, 1], 0]


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
    "wide heads": lambda: make_small("Llama", head_dim=32),  # flex needs 16 at least
    "tied": lambda: make_small("Qwen3", head_dim=8, tie_word_embeddings=True),
    "bias in the head": lambda: make_small("Phi"),
    "soft cap": lambda: make_small("Gemma2", head_dim=8, final_logit_softcapping=3.0),
    "divided": lambda: make_small("Granite", logits_scaling=8.0),
    "multiplied": lambda: make_small("Cohere", logit_scale=0.0625),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_logits_of_many_architectures_come_from_hidden_states(name):
    model = ARCHITECTURES[name]()
    input_ids = torch.randint(64, (2, 5))
    logits = model(input_ids).logits
    with hidden_states_in_place_of_logits(model) as to_logits:
        hidden = model(input_ids).logits
        assert hidden.shape == (2, 5, 16)
    torch.testing.assert_close(to_logits(hidden), logits)
    torch.testing.assert_close(model(input_ids).logits, logits)
    check_head(model, model)


def head_results(model, hidden, targets, chunk_size, head_dtype=None, autocast=False):
    """Logprobs, and the gradients of the hidden states and of the head's weights."""
    head = model.get_output_embeddings()
    head.zero_grad()
    rows = hidden.clone().requires_grad_()
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        hidden_states_in_place_of_logits(model, head_dtype) as to_logits,
    ):
        is_trained = head.weight.requires_grad
        logprobs, _ = chunked_logprobs_and_entropy(
            rows, to_logits, targets, 0.7, chunk_size, head_is_trained=is_trained
        )
    (logprobs * (1 + torch.arange(len(targets)) % 3)).sum().backward()
    return logprobs.detach(), rows.grad, head.weight.grad


def relative_error(given, expected):
    return ((given.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("name", ["tied", "bias in the head", "soft cap"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_head_in_float32_is_exact_where_the_model_is_bfloat16(name, is_trained, weights):
    model = ARCHITECTURES[name]().to(weights)
    model.get_output_embeddings().requires_grad_(is_trained)
    hidden, targets = torch.randn(40, 16).bfloat16(), torch.randint(64, (40,))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # logits of usual size
    results = {
        dtype: head_results(model, hidden, targets, 7, dtype, autocast=weights == torch.float32)
        for dtype in (None, torch.float32)
    }
    expected = head_results(model.double(), hidden.double(), targets, 40)
    errors = [relative_error(results[dtype][0], expected[0]) for dtype in results]
    assert errors[0] > 1e-4 and errors[1] < 1e-6
    # Gradients are rounded once at the end, to the dtype of what they belong to.
    assert relative_error(results[torch.float32][1], expected[1]) < 4e-3
    if is_trained:
        tolerance = 1e-6 if weights == torch.float32 else 4e-3
        assert relative_error(results[torch.float32][2], expected[2]) < tolerance


@pytest.mark.parametrize("head_dtype", [None, torch.float32])
def test_a_rounded_heads_gradient_is_summed_over_chunks_in_float32(head_dtype):
    """Where weights themselves are bfloat16, as inside FSDP2 and DeepSpeed."""
    model = ARCHITECTURES["plain"]().bfloat16()
    hidden, targets = torch.randn(512, 16).bfloat16(), torch.randint(64, (512,))
    *_, in_one = head_results(model, hidden, targets, 512, head_dtype)
    *_, in_512 = head_results(model, hidden, targets, 1, head_dtype)
    assert in_512.dtype == torch.bfloat16
    *_, exact = head_results(model.double(), hidden.double(), targets, 512)
    of_one, of_512 = relative_error(in_one, exact), relative_error(in_512, exact)
    assert of_one < 4e-3 and of_512 < 4e-3
    # Summed in bfloat16, it would be off by several times as much.
    parts = [
        head_results(model.bfloat16(), h, t, 1, head_dtype)[2]
        for h, t in zip(hidden.split(1), targets.split(1), strict=True)
    ]
    factors = 1 + torch.arange(512) % 3
    rounded = torch.zeros_like(parts[0])
    for part, factor in zip(parts, factors.tolist(), strict=True):
        rounded += part * factor
    assert relative_error(rounded, exact) > 2 * of_512


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_a_frozen_head_gives_what_a_trained_one_gives(name, chunk_size):
    model = ARCHITECTURES[name]()
    hidden, targets = torch.randn(8, 16), torch.randint(64, (8,))
    calls, results = [], []
    for head_is_trained in (True, False):
        model.get_output_embeddings().requires_grad_(head_is_trained)
        rows = hidden.clone().requires_grad_()
        with hidden_states_in_place_of_logits(model) as to_logits:

            def head(rows, to_logits=to_logits, is_trained=head_is_trained):
                calls.append(is_trained)
                return to_logits(rows)

            logprobs, entropy = chunked_logprobs_and_entropy(
                rows, head, targets, 0.7, chunk_size, head_is_trained=head_is_trained
            )
            (logprobs * torch.arange(8.0)).sum().backward()
        results.append((logprobs.detach(), entropy, rows.grad))
    for given, expected in zip(*results, strict=True):
        torch.testing.assert_close(given, expected)
    assert calls.count(True) == 2 * calls.count(False) - 1  # in backward all but the last again


@pytest.mark.parametrize("head_is_trained", [True, False])
def test_the_head_can_be_called_more_often_than_there_are_rows(head_is_trained):
    head, calls = torch.nn.Linear(16, 64).requires_grad_(head_is_trained), []

    def run(min_chunks):
        torch.manual_seed(0)
        rows, targets = torch.randn(3, 16, requires_grad=True), torch.randint(64, (3,))
        calls.clear()
        logprobs, _ = chunked_logprobs_and_entropy(
            rows,
            lambda rows: calls.append(1) or head(rows),
            targets,
            1.0,
            head_is_trained=head_is_trained,
            min_chunks=min_chunks,
        )
        (logprobs * torch.arange(3.0)).sum().backward()
        return logprobs, rows.grad

    expected = run(1)
    given = run(5)
    assert len(calls) == (9 if head_is_trained else 5)  # in backward all but the last again
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other)


class Shifted(LlamaForCausalLM):
    """Adds a constant to the logits of one token, behind the head."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits + torch.arange(outputs.logits.shape[-1])
        return outputs


def test_a_model_that_changes_its_logits_in_a_way_of_its_own_is_found_out():
    model = Shifted(make_small("Llama").config)
    with pytest.raises(ConfigError, match="not those of its head"):
        check_head(model, model)
    assert model.training  # as it was


needs_flash = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("flash_attn") is None,
    reason="flash attention needs a GPU and the flash_attn package",
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler, for flex
# Gemma 2 has sliding windows, and no SDPA, which cannot soft-cap attention scores.
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("plain", "sdpa"),
        ("plain", "eager"),
        ("soft cap", "eager"),
        pytest.param("wide heads", "flex_attention", marks=pytest.mark.slow),
        pytest.param("wide heads", "flash_attention_2", marks=[pytest.mark.gpu, needs_flash]),
    ],
)
def test_a_sequence_in_a_pack_gets_the_logprobs_it_gets_alone(name, attention):
    model = ARCHITECTURES[name]()
    on_gpu = attention.startswith("flash")
    if on_gpu:
        model = model.to("cuda", torch.bfloat16)
    elif attention == "flex_attention" and torch.cuda.is_available():
        model = model.to("cuda")
    model.set_attn_implementation(attention)
    try:
        assert reason_against_sharing_rows(model, model) is None
        check_isolation(model, rows_at_once=1 if on_gpu else 3)
    except InductorError as error:
        # It takes a compiler; with the masks of transformers 5.23, torch 2.13 writes wrong C++.
        pytest.skip(f"torch could not compile flex attention here: {str(error).splitlines()[0]}")


def check_isolation(model, rows_at_once):
    """Flash attention takes one row at once, the "flat" layout."""
    generator = torch.Generator().manual_seed(0)
    lengths = [[5, 9, 2], [16], [1, 12]]
    rows = [[torch.randint(64, (n,), generator=generator) for n in row] for row in lengths]
    width = 16
    input_ids = torch.zeros(3, width, dtype=torch.int64)
    position_ids = torch.arange(width).repeat(3, 1)
    for r, row in enumerate(rows):
        start = 0
        for sequence in row:
            input_ids[r, start : start + len(sequence)] = sequence
            position_ids[r, start:] = torch.arange(width - start)
            start += len(sequence)
    input_ids, position_ids = input_ids.to(model.device), position_ids.to(model.device)
    batches = torch.arange(3).split(rows_at_once)
    with torch.no_grad():
        packed = torch.cat(
            [
                model(input_ids=input_ids[b], position_ids=position_ids[b], use_cache=False).logits
                for b in batches
            ]
        )
        for r, row in enumerate(rows):
            start = 0
            for sequence in row:
                alone = model(input_ids=sequence[None].to(model.device)).logits[0]
                here = packed[r, start : start + len(sequence)]
                if model.dtype == torch.bfloat16:  # its rounding only
                    assert (here - alone).float().norm() < 5e-2 * alone.float().norm()
                else:
                    torch.testing.assert_close(here, alone, rtol=1e-4, atol=1e-4)
                start += len(sequence)


def test_models_whose_rows_cannot_be_shared_are_found_out():
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4
    )
    mamba = transformers.MambaForCausalLM(config)
    assert reason_against_sharing_rows(mamba, mamba) is not None
    config = transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)
    bloom = transformers.BloomForCausalLM(config)
    assert "no position_ids" in reason_against_sharing_rows(bloom, bloom)
