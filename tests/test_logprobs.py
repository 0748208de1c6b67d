import copy
import math
import shutil
from importlib.util import find_spec
from itertools import product

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._inductor.exc import InductorError
from torch.testing import assert_close
from transformers.modeling_outputs import BaseModelOutputWithPast

from tests.helpers import needs_gpu
from verifiers_rl.forward import check_head, reason_against_rows
from verifiers_rl.logprobs import (
    chunk_size_for,
    chunked_logprobs_and_entropy,
    hidden_states_in_place_of_logits,
    plain_logprobs_and_entropy,
    token_logprobs_and_entropy,
)
from verifiers_rl.losses import LOSSES, LossInputs
from verifiers_rl.packing import ModelSupport


def reference(logits, targets, temperature):
    """Plain loops in float64."""
    logprobs, entropies = [], []
    for row, target in zip(logits.double() / temperature, targets, strict=True):
        total = sum(value.exp() for value in row - row.max())
        log_softmax = [value - row.max() - total.log() for value in row]
        logprobs.append(log_softmax[target])
        entropies.append(-sum(value.exp() * value for value in log_softmax))
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize(
    "overwrite, mode, dtype, autocast",
    [
        (False, "value", torch.float32, True),  # float32 all the same
        (True, "value", torch.float32, False),
        (True, "none", torch.float32, True),
        (False, "none", torch.bfloat16, False),
        (True, "value", torch.bfloat16, False),
    ],
)
def test_logprobs_entropy_and_gradient_equal_a_float64_loop(overwrite, mode, dtype, autocast):
    torch.manual_seed(0)
    leaf, targets = torch.randn(5, 11, dtype=dtype, requires_grad=True), torch.randint(11, (5,))
    expected, expected_entropy = reference(leaf, targets, 0.7)
    (expected_grad,) = torch.autograd.grad(expected.sum(), leaf)
    logits = leaf * 1  # as a head gives them: what came before does not need them in backward
    before = logits.detach().clone()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logprobs, entropy = token_logprobs_and_entropy(logits, targets, 0.7, mode, overwrite)
    assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-6)
    expected_entropy = expected_entropy * (mode == "value")
    assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-6)
    for _ in range(2):  # nothing that backward needs is lost in a backward
        (grad,) = torch.autograd.grad(logprobs.sum(), leaf, retain_graph=True)
        assert_close(grad, expected_grad)
    assert torch.equal(logits, before) == (not overwrite or dtype == torch.bfloat16)


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


@pytest.mark.parametrize(
    "function, option",
    [
        *product([token_logprobs_and_entropy], ["value", "gradient"]),
        *product([plain_logprobs_and_entropy], [False, True]),
    ],
)
def test_impossible_tokens_are_finite(function, option):
    leaf = torch.tensor([[0.0, -torch.inf, 1.0]] * 2, requires_grad=True)
    logprobs, entropies = function(leaf * 1, torch.tensor([1, 2]), 0.5, option)
    (logprobs.sum() + entropies.sum()).backward()
    assert logprobs.isfinite().all() and entropies.isfinite().all()
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize(
    "last, is_trained",
    [(nn.Tanh(), True), (nn.Sigmoid(), False), (nn.Softmax(-1), True), (nn.ReLU(), False)],
)
def test_a_head_whose_backward_needs_its_logits_keeps_them(last, is_trained):
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(6, 11), last).requires_grad_(is_trained)
    hidden, targets = torch.randn(6, 6, requires_grad=True), torch.randint(11, (6,))
    wanted = [hidden, *(p for p in head.parameters() if is_trained)]
    whole = head(hidden).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    chunked, _ = chunked_logprobs_and_entropy(
        hidden, head, targets, 1.0, chunk_size=2, head_is_trained=is_trained
    )
    assert_close(chunked, whole)
    given, expected = (
        torch.autograd.grad((values * torch.arange(6.0)).sum(), wanted)
        for values in (chunked, whole)
    )
    assert_close(given, expected)


def test_a_derivative_of_the_gradient_is_an_error_not_a_wrong_value():
    logits = torch.randn(5, 11, requires_grad=True)
    logprobs, _ = token_logprobs_and_entropy(logits, torch.arange(5), 1.0)
    (grad,) = torch.autograd.grad(logprobs.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_chunk_of_logits_takes_256_mb_and_on_a_gpu_1_gb():
    sizes = {kind: chunk_size_for(151_936, kind) for kind in ("cpu", "mps", "cuda")}
    assert sizes == {"cpu": 441, "mps": 441, "cuda": 1766} and chunk_size_for(10**9, "cpu") == 1


needs_compiler = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler"),
]


# As on a GPU. Once it is compiled, too, which takes a while on a CPU.
@pytest.mark.parametrize(
    "is_compiled, entropy, temperature, device",
    [
        (False, "none", 1.0, "cpu"),
        (False, "value", 0.7, "cpu"),
        (False, "gradient", 0.7, "cpu"),
        pytest.param(True, "value", 0.7, "cpu", marks=needs_compiler),
        pytest.param(True, "gradient", 0.7, "cpu", marks=needs_compiler),
        pytest.param(True, "gradient", 0.7, "cuda", marks=needs_gpu),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile's own
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # which it hides by itself
def test_the_compiled_function_equals_the_loops_and_has_their_gradient(
    monkeypatch, is_compiled, entropy, temperature, device
):
    monkeypatch.setattr("verifiers_rl.logprobs.COMPILED_ON", (device,))
    if not is_compiled:
        monkeypatch.setattr("verifiers_rl.logprobs.compiled", lambda: plain_logprobs_and_entropy)
    torch.manual_seed(0)
    leaf = torch.randn(5, 11, requires_grad=True)
    targets = torch.randint(11, (5,))
    given = token_logprobs_and_entropy(
        (leaf * 1).to(device), targets.to(device), temperature, entropy
    )
    given = [numbers.cpu() for numbers in given]
    expected = reference(leaf, targets, temperature)
    for ours, theirs in zip(given, expected, strict=True):
        assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    assert given[1].requires_grad == (entropy == "gradient")
    factors = torch.linspace(-1, 1, 5)
    with_entropy = entropy == "gradient"
    sums = [(a * factors).sum() + with_entropy * (b * factors).sum() for a, b in (given, expected)]
    grads = [torch.autograd.grad(total, leaf)[0] for total in sums]
    assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # as above
def test_the_function_is_compiled_once_for_any_number_of_tokens(monkeypatch):
    counter = CompileCounter()
    function = torch.compile(plain_logprobs_and_entropy, backend=counter)
    monkeypatch.setattr("verifiers_rl.logprobs.COMPILED_ON", ("cpu",))
    monkeypatch.setattr("verifiers_rl.logprobs.compiled", lambda: function)
    head = nn.Linear(6, 11)
    for num_tokens in (20, 9, 15):  # chunks of 7, 6, 5, 4, and all but the last once more
        hidden, targets = torch.randn(num_tokens, 6), torch.randint(11, (num_tokens,))
        chunked_logprobs_and_entropy(hidden, head, targets, 1.0, 7)[0].sum().backward()
    assert counter.frame_count == 1


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
    ids = torch.randint(64, (2, 5))
    logits = model(ids).logits
    with hidden_states_in_place_of_logits(model) as to_logits:
        hidden = model(ids).logits
        assert hidden.shape == (2, 5, 16)
    assert_close(to_logits(hidden), logits)
    assert_close(model(ids).logits, logits)
    check_head(model, model)
    hidden, targets = torch.randn(8, 16), torch.randint(64, (8,))
    expected = head_results(model, hidden, targets)
    for chunk_size, number in ((1, 8), (3, 3), (100, 1)):
        for is_trained in (True, False):
            head.requires_grad_(is_trained)
            given = head_results(model, hidden, targets, chunk_size)
            assert_close(given[:3], expected[:3])
            if is_trained:
                assert_close(given[3], expected[3])
            # In backward all but the last again.
            assert given[4] == (2 * number - 1 if is_trained else number)
    # As often as the rank with the most chunks, though there are fewer rows.
    given = head_results(model, hidden, targets, 3, min_chunks=9)
    assert_close(given[:3], expected[:3])
    assert given[4] == 9


def relative_error(given, expected):
    return ((given.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    "name, is_trained, weights",
    [
        ("tied", True, torch.bfloat16),
        ("bias in the head", False, torch.bfloat16),
        ("soft cap", True, torch.float32),
        ("tied", False, torch.float32),
    ],
)
def test_a_head_in_float32_is_exact_where_the_model_is_bfloat16(name, is_trained, weights):
    model = ARCHITECTURES[name]().to(weights)
    model.get_output_embeddings().requires_grad_(is_trained)
    hidden, targets = torch.randn(40, 16).bfloat16(), torch.randint(64, (40,))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # logits of usual size
    rounded, exact = (
        head_results(model, hidden, targets, 7, dtype, weights == torch.float32)
        for dtype in (None, torch.float32)
    )
    expected = head_results(model.double(), hidden.double(), targets)
    assert relative_error(rounded[0], expected[0]) > 1e-4
    assert relative_error(exact[0], expected[0]) < 1e-6
    # Gradients are rounded once at the end, to the dtype of what they belong to.
    assert relative_error(exact[2], expected[2]) < 4e-3
    if is_trained:
        tolerance = 1e-6 if weights == torch.float32 else 4e-3
        assert relative_error(exact[3], expected[3]) < tolerance


@pytest.mark.parametrize(
    "name, trained",
    [
        *[("bias in the head", "head"), ("bias in the head", "adapter"), ("divided", "adapter")],
        *[("soft cap", "head"), ("soft cap", "nothing"), ("multiplied", "nothing")],
    ],
)
def test_autocast_loses_no_more_than_its_rounding_to_bfloat16(name, trained):
    """Against float64 loops on the logits of transformers' own code, from the same hidden states
    and weights, which are rounded before. Each rounding is off by at most u = 2^-8 of a number.

    With r roundings on the way to a logit, none of a number larger than the largest logit, all
    logits of a token are off by at most d = r u max |logit| / temperature. So its logprob is off by
    at most 2 d; its entropy by 2 d log V, because the sum of p |log p + H| is at most 2 H; and each
    p, like each gradient by a logit, which is -p or the sum of the others' p, by a factor of at
    most exp(2 d). Backward adds at most 12 roundings, and then multiplies: its errors are at most
    those of the gradient by the logits times absolute values.
    """
    model = ARCHITECTURES[name]().requires_grad_(False)
    model.model.forward = lambda inputs_embeds, **_: BaseModelOutputWithPast(inputs_embeds)
    if trained == "adapter":
        get_peft_model(
            model,
            LoraConfig(r=4, lora_alpha=4, target_modules=["lm_head"], init_lora_weights=False),
        )
    for parameter in model.lm_head.parameters():
        parameter.data = (parameter / 8).bfloat16().float()
        parameter.requires_grad |= trained == "head"
    exact, hidden = copy.deepcopy(model).double(), torch.randn(1, 40, 16).bfloat16()
    leaves, exact_leaves = (
        [states.requires_grad_(), *(p for p in one.lm_head.parameters() if p.requires_grad)]
        for one, states in ((model, hidden), (exact, hidden.double()))
    )
    targets = torch.arange(40)
    with (
        torch.autocast("cpu", torch.bfloat16),
        hidden_states_in_place_of_logits(model) as to_logits,
    ):
        rows = model(inputs_embeds=leaves[0]).logits[0]
        given = chunked_logprobs_and_entropy(
            rows, to_logits, targets, 0.7, 7, head_is_trained=trained != "nothing"
        )
    logits = exact(inputs_embeds=exact_leaves[0]).logits
    expected = reference(logits[0], targets, 0.7)
    given += torch.autograd.grad((given[0] * (1 + targets % 3)).sum(), leaves)
    of_logits, *grads = torch.autograd.grad(
        (expected[0] * (1 + targets % 3)).sum(), [logits, *exact_leaves]
    )
    exact.config.final_logit_softcapping = None  # whose derivative is at most 1
    for parameter in (exact_leaves[0], *exact.lm_head.parameters()):
        parameter.data.abs_()
    num_roundings = 1 + 3 * (trained == "adapter") + 3 * (name == "soft cap")
    d = num_roundings * 2**-8 * logits[0].detach().abs().amax(-1) / 0.7
    errors = of_logits.abs() * (torch.expm1(2 * d) + 12 * 2**-8)[:, None]
    products = exact(inputs_embeds=exact_leaves[0]).logits
    bounds = [2 * d, 2 * math.log(64) * d, *torch.autograd.grad(products, exact_leaves, errors)]
    errors = [(a - b).abs() for a, b in zip(given, [*expected, *grads], strict=True)]
    assert all((e <= bound).all() for e, bound in zip(errors, bounds, strict=True))
    assert errors[0].max() > 1e-4  # which float32 would not reach


@pytest.mark.parametrize("head_dtype", [None, torch.float32])
def test_a_rounded_heads_gradient_is_summed_over_chunks_in_float32(head_dtype):
    """Where weights themselves are bfloat16, as inside FSDP2 and DeepSpeed."""
    model = ARCHITECTURES["plain"]().bfloat16()
    hidden, targets = torch.randn(512, 16).bfloat16(), torch.randint(64, (512,))
    in_512 = head_results(model, hidden, targets, 1, head_dtype)[3]
    parts = [
        head_results(model, h, t, 1, head_dtype)[3]
        for h, t in zip(hidden.split(3), targets.split(3), strict=True)
    ]
    exact = head_results(model.double(), hidden.double(), targets)[3]
    assert in_512.dtype == torch.bfloat16 and relative_error(in_512, exact) < 4e-3
    # Summed in bfloat16, it is off by several times as much.
    in_bfloat16 = torch.zeros_like(in_512)
    for part in parts:
        in_bfloat16 += part
    assert relative_error(in_bfloat16, exact) > 2 * relative_error(in_512, exact)


needs_flash = pytest.mark.skipif(
    find_spec("flash_attn") is None, reason="needs the flash_attn package"
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler, for flex
# Gemma 2 has sliding windows, and no SDPA, which cannot soft-cap attention scores.
@pytest.mark.parametrize(
    "name, attention",
    [
        ("plain", "sdpa"),
        ("plain", "eager"),
        ("soft cap", "eager"),
        pytest.param("wide heads", "flex_attention", marks=pytest.mark.slow),
        pytest.param("wide heads", "flash_attention_2", marks=[*needs_gpu, needs_flash]),
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
        check_isolation(model, rows_at_once=1 if on_gpu else 3)
        assert reason_against_rows(model, model, ModelSupport(attention=attention)) is None
    except InductorError as error:
        # It takes a compiler; with the masks of transformers 5.23, torch 2.13 writes wrong C++.
        pytest.skip(f"torch could not compile flex attention here: {str(error).splitlines()[0]}")


def check_isolation(model, rows_at_once):
    """Flash attention takes one row at once, the "flat" layout."""
    lengths = [[5, 9, 2], [16], [1, 12, 3]]
    input_ids = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(0))
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    input_ids, position_ids = input_ids.to(model.device), position_ids.to(model.device)
    with torch.no_grad():
        packed = torch.cat(
            [
                model(input_ids=input_ids[b], position_ids=position_ids[b], use_cache=False).logits
                for b in torch.arange(3).split(rows_at_once)
            ]
        )
        for ids, logits, row in zip(input_ids, packed, lengths, strict=True):
            for sequence, here in zip(ids.split(row), logits.split(row), strict=True):
                alone = model(input_ids=sequence[None]).logits[0]
                if model.dtype == torch.bfloat16:  # its rounding only
                    assert (here - alone).float().norm() < 5e-2 * alone.float().norm()
                else:
                    assert_close(here, alone, rtol=1e-4, atol=1e-4)
