"""Samples with a common beginning: their rows, what attention sees there, and the gradient."""
# ruff: noqa: F811 (fixtures of another file)

import itertools
import random
import shutil
import traceback
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from tests.helpers import make_tiny_llama, make_tiny_model
from tests.test_trainer import (  # noqa: F401
    LOSS_OPTIONS,
    away_from_the_start,
    batch_gradients,
    check_against_reference,
    make_trainer,
    switch_checkpointing_on,
    tokenizer,
    with_logprobs_near,
)
from tests.tree_samples import make_sample, make_tree
from verifiers_rl import forward
from verifiers_rl.losses import LOSSES, add_terms, cispo, entropy_bonus, needs_of
from verifiers_rl.packing import ModelSupport, Targets, collate, copy_to, plan_batch
from verifiers_rl.report.metrics import TokenMeans
from verifiers_rl.types import SampleSizes, order_by_beginning


def plan_all(samples, max_tokens, **options):
    is_computed = np.ones(len(samples), bool)
    support = ModelSupport(shares_prefixes=True, **options)
    return plan_batch(SampleSizes.of(samples), is_computed, max_tokens, 1, support)


def paths_of(microbatch, samples, rows):
    """The columns of each sample, found again from what a token sees."""
    found = {}
    for r, row in enumerate(rows):
        until = microbatch.visible_until[r].tolist()
        ids, positions = microbatch.input_ids[r].tolist(), microbatch.position_ids[r].tolist()
        for i in row:
            wanted = samples[i].token_ids.tolist()
            for last in range(len(ids)):
                seen = [k for k in range(last + 1) if last < until[k]]
                if [ids[k] for k in seen] == wanted:
                    assert [positions[k] for k in seen] == list(range(len(wanted)))
                    found[i] = seen
    return found


def test_neighbours_in_order_have_the_longest_common_beginnings():
    rng = random.Random(0)
    for _ in range(50):
        ids = [
            np.array(
                [rng.randrange(3) + 300 * rng.randrange(2) for _ in range(rng.randrange(1, 7))]
            )
            for _ in range(12)
        ]
        order, num_shared = order_by_beginning(ids)
        lists = [ids[i].tolist() for i in order]
        assert sorted(order) == list(range(12)) and lists == sorted(lists)

        def common(a, b):
            return next(
                (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)),
            )

        pairs = itertools.pairwise(lists)
        assert num_shared.tolist() == [0, *(common(a, b) for a, b in pairs)]


def test_the_row_of_the_documentation():
    texts = ["abg", "abcd", "abcef"]
    samples = [make_sample([ord(c) for c in text], 1, 0.5) for text in texts]
    plan, num_shared = plan_all(samples, 100)
    assert plan == [[[[1, 2, 0]]]]
    microbatch = collate(samples, plan[0][0], [1.0] * 3, 0, num_shared)
    assert "".join(map(chr, microbatch.input_ids[0])) == "abcdefg"
    assert microbatch.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 2]]
    assert microbatch.visible_until.tolist() == [[7, 7, 6, 4, 6, 6, 7]]
    # "c" is predicted by "b" for two samples; "e" by the "c" that they have in common.
    targets = microbatch.targets
    assert targets.columns.tolist() == [0, 1, 2, 0, 1, 2, 4, 0, 1]
    assert "".join(map(chr, targets.token_ids)) == "bcdbcefbg"
    assert targets.sequence_ids.tolist() == [0] * 3 + [1] * 4 + [2] * 2
    assert [s.path.tolist() for s in microbatch.segments] == [
        [0, 1, 2, 3], [0, 1, 2, 4, 5], [0, 1, 6],
    ]  # fmt: skip


@pytest.mark.parametrize("max_tokens", [1, 12, 30, 1000])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_sample_is_found_again_in_its_row(max_tokens, num_ranks):
    for seed in range(5):
        samples = make_tree(seed)
        sizes = SampleSizes.of(samples)
        is_computed = np.arange(len(samples)) != seed
        plans, num_shared = plan_batch(
            sizes, is_computed, max_tokens, num_ranks, ModelSupport(shares_prefixes=True)
        )
        seen, targets, num_tokens = [], 0, 0
        for rows in (rows for plan in plans for rows in plan):
            microbatch = collate(samples, rows, [1.0] * len(samples), 0, num_shared)
            paths = paths_of(microbatch, samples, rows)
            assert sorted(paths) == sorted({i for row in rows for i in row})
            seen += paths
            targets += microbatch.has_loss * len(microbatch.targets.rows)
            num_tokens += microbatch.num_tokens
            if rows and max_tokens > 12:
                assert microbatch.input_ids.numel() <= max_tokens
        assert sorted(seen) == [i for i in range(len(samples)) if i != seed]
        kept = [s for i, s in enumerate(samples) if i != seed]
        assert targets == sum(s.num_loss_tokens for s in kept)
        assert num_tokens == (sizes.lengths - num_shared)[is_computed].sum()
        if max_tokens == 1000:
            assert num_tokens < 0.75 * sum(len(s.token_ids) for s in kept)


def test_sharing_stops_where_a_mask_costs_more():
    def bundles(prompt, reply, number, hidden_size=128):
        rng = np.random.default_rng(0)
        begin = rng.integers(1000, size=prompt)
        samples = [
            make_sample(np.append(begin, rng.integers(1000, size=reply)), prompt, 0.5)
            for _ in range(number)
        ]
        (plan,), _ = plan_all(samples, 10**6, hidden_size=hidden_size)
        return [len(row) for rows in plan for row in rows]

    assert bundles(33, 7, 64) == [64]
    assert max(bundles(2, 100, 64)) < 64  # a mask of 6,402 x 6,402 to save 126 tokens
    assert bundles(512, 600, 16, hidden_size=1024) == [16]  # too wide for a mask, so without one


@pytest.fixture(params=["sdpa", "sdpa in calls", "sdpa in varlen", "eager"])
def attention(request, monkeypatch):
    """The name of an attention implementation; of SDPA with a mask, with a call per sample, and as
    on a GPU.
    """
    in_calls = request.param == "sdpa in calls"
    monkeypatch.setattr(forward, "_is_cheaper_in_calls", lambda *_: in_calls)
    if request.param == "sdpa in varlen":
        emulate_varlen(monkeypatch)
    return request.param.split()[0]


def emulate_varlen(monkeypatch):
    monkeypatch.setattr(forward, "HAS_VARLEN", ("cpu",))
    monkeypatch.setattr(forward, "varlen_attn", varlen_by_hand)


def varlen_by_hand(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
    scale=None, window_size=(-1, -1), enable_gqa=False,
):  # fmt: skip
    """What torch's `varlen_attn` computes, which needs a GPU: each query of a sequence sees the
    keys up to its own place from the end.
    """
    assert window_size == (-1, 0) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    repeats, rest = divmod(query.shape[1], key.shape[1])
    assert rest == 0 and (enable_gqa or repeats == 1)
    ends = [cu_seq_q.tolist(), cu_seq_k.tolist()]
    assert [max(np.diff(end)) for end in ends] == [max_q, max_k]
    assert [end[-1] for end in ends] == [len(query), len(key)] and len(key) == len(value)
    outputs = []
    for q0, q1, k0, k1 in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        k, v = (x[k0:k1].repeat_interleave(repeats, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], k) * (scale or query.shape[2] ** -0.5)
        is_seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril((k1 - k0) - (q1 - q0))
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


def test_with_eager_attention_rows_with_a_common_beginning_stay_narrow():
    prompt = list(range(900))
    samples = [make_sample(prompt + [n] * 100, 900, 1.0) for n in range(4)]
    for name, widths in (("sdpa", [1300]), ("eager", [1000, 1000, 1000, 1000])):
        plans, num_shared = plan_all(samples, 4096, attention=name)
        rows = [row for of_rank in plans for microbatch in of_rank for row in microbatch]
        lengths = [len(samples[i].token_ids) - int(num_shared[i]) for i in range(4)]
        assert sorted(sum(lengths[i] for i in row) for row in rows) == widths


MODEL_OF_LOSS = list(
    zip(sorted(LOSS_OPTIONS), cycle([make_tiny_model, make_tiny_llama]), strict=False)
)


@pytest.mark.parametrize(("loss", "make_model"), MODEL_OF_LOSS)
def test_every_loss_with_shared_beginnings_equals_a_float64_reference(
    make_trainer, make_model, loss, attention
):
    samples = with_logprobs_near(make_model(), make_tree(1), 0.7)
    model = make_model()
    model.set_attn_implementation(attention)
    trainer = make_trainer(
        model, loss=loss, loss_args=LOSS_OPTIONS[loss], temperature=0.7, share_prefixes=True,
        max_tokens_per_microbatch=60,
    )  # fmt: skip
    check_against_reference(trainer, make_model, samples)
    (row,) = trainer._window.steps
    assert row["num_microbatches"] > 1 and row["prefix_sharing"] > 1.3


@pytest.mark.parametrize("use_lora", [False, True])
@pytest.mark.parametrize(
    ("gradient_checkpointing", "chunk_size"), [(False, 10_000), (True, 7), (False, 1)]
)
def test_the_shared_step_equals_the_reference_under_every_option(
    make_trainer,
    monkeypatch,
    attention,
    use_lora,
    gradient_checkpointing,
    chunk_size,
):
    from verifiers_rl import forward as module

    monkeypatch.setattr(module, "chunk_size_for", lambda *_: chunk_size)
    samples = with_logprobs_near(make_tiny_llama(), make_tree(2), 1.0)
    model = make_tiny_llama()
    model.set_attn_implementation(attention)
    trainer = make_trainer(
        model, loss="ppo", loss_args=LOSS_OPTIONS["ppo"], use_lora=use_lora, lora_rank=4,
        gradient_checkpointing=gradient_checkpointing, loss_normalization="sequence",
        kl_beta=0.1 if use_lora else 0.0, entropy_beta=0.2, temperature=1.0,
        max_tokens_per_microbatch=60, share_prefixes=True,
    )  # fmt: skip
    if gradient_checkpointing:
        switch_checkpointing_on(trainer)
    adapter = away_from_the_start(trainer) if use_lora else None
    check_against_reference(trainer, make_tiny_llama, samples, adapter)
    assert trainer._window.steps[0]["prefix_sharing"] > 1.3


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize(
    ("attention", "use_lora"), [("sdpa", False), ("sdpa in calls", True)], indirect=["attention"]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile's own
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # which it hides by itself
def test_compiled_layers_keep_samples_apart_and_serve_rows_of_any_length(
    make_trainer, attention, use_lora
):
    torch._dynamo.reset()
    counters.clear()
    samples = with_logprobs_near(make_tiny_llama(), make_tree(2), 1.0)
    model = make_tiny_llama()
    model.set_attn_implementation(attention)
    trainer = make_trainer(
        model, loss="ppo", loss_args=LOSS_OPTIONS["ppo"], use_lora=use_lora, lora_rank=4,
        gradient_checkpointing=use_lora, temperature=1.0, max_tokens_per_microbatch=60,
        share_prefixes=True, torch_compile=True,
    )  # fmt: skip
    if use_lora:
        switch_checkpointing_on(trainer)
    adapter = away_from_the_start(trainer) if use_lora else None
    check_against_reference(trainer, make_tiny_llama, samples, adapter)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    trainer._window.steps.clear()
    trainer.model.zero_grad()
    samples = with_logprobs_near(make_tiny_llama(), make_tree(5), 1.0)
    check_against_reference(trainer, make_tiny_llama, samples, adapter)
    assert counters["stats"]["unique_graphs"] <= num_graphs + 2


def logits_of_samples(model, microbatch, inputs):
    logits = model(input_ids=microbatch.input_ids, use_cache=False, **inputs).logits
    return [logits[segment.row, torch.from_numpy(segment.path)] for segment in microbatch.segments]


@pytest.mark.parametrize(
    ("attention", "way"),
    [("sdpa", "mask"), ("sdpa", "calls"), ("sdpa", "varlen"), ("eager", None)],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile's own
@torch.no_grad()
def test_each_token_sees_its_own_sample_only(monkeypatch, attention, way):
    emulate_varlen(monkeypatch)
    model = make_tiny_llama().eval()
    samples = [sample for sample in make_tree(3) if len(sample.token_ids) > 1]
    (plan,), num_shared = plan_all(samples, 100, layout="flat" if way == "varlen" else "packed")
    expected = {
        tuple(s.token_ids): model(input_ids=torch.tensor(s.token_ids[None]).long()).logits[0]
        for s in samples
    }
    model.set_attn_implementation(attention)
    if attention == "sdpa":
        forward.wrap_attention("sdpa")
    seen = 0
    for rows in plan:
        microbatch = collate(samples, rows, [1.0] * len(samples), 0, num_shared)
        inputs = forward.inputs_of_shared_rows(microbatch, attention, way)
        given = logits_of_samples(model, microbatch, inputs)
        for segment, logits in zip(microbatch.segments, given, strict=True):
            ids = tuple(microbatch.input_ids[segment.row, torch.from_numpy(segment.path)].tolist())
            if ids in expected:  # else it is padding
                torch.testing.assert_close(logits, expected[ids], rtol=1e-4, atol=1e-5)
                seen += 1
    assert seen == len(expected)


def sequences_by_hand(module, query, key, value, mask, scaling=None, **lengths):
    """What flash attention computes for sequences of these lengths: each query of a sequence sees
    the keys up to its own place from the end.
    """
    outputs = []
    heads = query.shape[1] // key.shape[1]
    borders = [lengths[f"cu_seq_lens_{x}"].tolist() for x in "qk"]
    longest = [max(np.diff(border)) for border in borders]
    assert longest == [lengths[f"max_length_{x}"] for x in "qk"] and mask is None
    for q0, q1, k0, k1 in zip(borders[0], borders[0][1:], borders[1], borders[1][1:], strict=False):
        q = query[0, :, q0:q1]
        k, v = (x[0, :, k0:k1].repeat_interleave(heads, 0) for x in (key, value))
        scores = q @ k.transpose(1, 2) * scaling
        hidden = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril((k1 - k0) - (q1 - q0))
        outputs.append(scores.masked_fill(~hidden, -torch.inf).softmax(-1) @ v)
    return torch.cat(outputs, 1).transpose(0, 1)[None], None


@torch.no_grad()
def test_flash_attention_gets_the_sequences_of_the_samples(monkeypatch):
    """A stand-in for flash attention, which needs a GPU: the sequences that it is given."""
    model = make_tiny_llama().eval()
    samples = make_tree(4)[:10]
    (plan,), num_shared = plan_all(samples, 10**6, layout="flat")
    microbatch = collate(samples, plan[0], [1.0] * len(samples), 0, num_shared)
    expected = logits_of_samples(
        model, microbatch, forward.inputs_of_shared_rows(microbatch, "sdpa")
    )
    inputs = forward.inputs_of_shared_rows(microbatch, "flash_attention_2")
    functions = forward.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions._global_mapping, "flash_by_hand", sequences_by_hand)
    forward.wrap_attention("flash_by_hand")
    monkeypatch.setitem(functions._local_mapping, "sdpa", functions["flash_by_hand"])
    given = logits_of_samples(model, microbatch, inputs)
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def grouped_qkv(device, dtype):
    """Queries of 4 heads, keys and values of 2, of a row of 7 tokens; as a model gives them."""
    torch.manual_seed(0)
    return [
        torch.randn(1, 7, heads, 8, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (4, 2, 2)
    ]


def row_of_the_documentation(device):
    samples = [make_sample([ord(c) for c in text], 1, 0.5) for text in ("abcd", "abcef", "abg")]
    return copy_to(collate(samples, [[0, 1, 2]], [1.0] * 3, 0, [0, 3, 2]), torch.device(device))


def gradients_in(way, device, dtype):
    """Attention of a row with a common beginning, and the gradients."""
    forward.wrap_attention("sdpa")
    qkv = grouped_qkv(device, dtype)
    inputs = forward.inputs_of_shared_rows(row_of_the_documentation(device), "sdpa", way)
    segments = inputs[forward.KEYWORD]
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    attend = forward.ALL_ATTENTION_FUNCTIONS["sdpa"]
    output, _ = attend(
        module, *qkv, inputs["attention_mask"], sample_segments=segments, scaling=0.4
    )
    return output, torch.autograd.grad(output.square().sum(), qkv)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def test_varlen_and_its_gradient_equal_a_call_for_each_sample(monkeypatch, device):
    expected, expected_grads = gradients_in("calls", "cpu", torch.float32)
    is_cpu = device == "cpu"
    if is_cpu:
        emulate_varlen(monkeypatch)
    given, grads = gradients_in("varlen", device, torch.float32 if is_cpu else torch.bfloat16)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if is_cpu else {"rtol": 5e-2, "atol": 5e-2}
    for ours, theirs in zip((given, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(ours.float().cpu(), theirs, **tolerance)


def test_backward_keeps_no_copies_of_common_keys(monkeypatch):
    emulate_varlen(monkeypatch)
    numbers = []

    def pack(tensor):
        numbers.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gradients_in("varlen", "cpu", torch.float32)
    assert 7 * 2 * 8 in numbers and (4 + 5 + 3) * 2 * 8 not in numbers  # keys of 2 heads of 8


def test_varlen_gets_all_in_the_dtype_of_the_values():
    """A norm with float32 weights gives float32 queries and keys. Shapes and dtypes alone."""
    inputs = forward.inputs_of_shared_rows(row_of_the_documentation("cpu"), "sdpa", "varlen")
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value = grouped_qkv("cpu", torch.float32)
        segments, half = inputs[forward.KEYWORD], value.bfloat16()
        output, _ = forward._in_sequences(
            forward._varlen, segments, None, query, key, half, scaling=0.4
        )
        assert (output.shape, output.dtype) == ((1, 7, 4, 8), torch.bfloat16)
        grads = torch.autograd.grad(output.sum(), [query, key, value])
    assert [grad.dtype for grad in grads] == [torch.float32] * 3


@torch.no_grad()
def test_flash_attention_looks_at_no_positions_where_each_row_is_a_sample(monkeypatch):
    """It would wait for the device in each layer, to see whether they restart."""
    seen = []

    def attend(module, query, key, value, mask, position_ids=None, **kwargs):
        seen.append((mask, position_ids))
        return query.transpose(1, 2), None

    functions = forward.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions._global_mapping, "flash_that_sees", attend)
    forward.wrap_attention("flash_that_sees")
    monkeypatch.setitem(functions._local_mapping, "sdpa", functions["flash_that_sees"])
    ids = torch.arange(6).reshape(2, 3)
    inputs = forward.inputs_of_whole_rows("flash_attention_2", ids.device)
    make_tiny_model()(input_ids=ids, use_cache=False, **inputs)
    assert seen == [(None, None)] * 2  # a layer each


def make_mistral(sliding_window):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=261, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=sliding_window,
    )  # fmt: skip
    return MistralForCausalLM(config).float()


def make_gemma(sliding_window):
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=261, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=sliding_window,
    )  # fmt: skip
    return Gemma2ForCausalLM(config).float()


@pytest.mark.parametrize("make_model", [make_mistral, make_gemma])
def test_a_window_shorter_than_samples_is_found(make_model):
    reason = forward.reason_against_sharing_prefixes
    model = make_model(64)
    assert reason(model, model, 64) is None
    assert reason(model, model, 65) == (
        "its sliding_window of 64 tokens is shorter than max_seq_len=65"
    )


def test_a_model_that_cannot_share_is_trained_whole_and_a_line_says_why(
    make_trainer,
    caplog,
):
    model = make_mistral(16)
    trainer = make_trainer(model)
    batch_gradients(trainer, make_tree(5))
    assert "its sliding_window of 16 tokens is shorter than max_seq_len=32" in caplog.text
    assert trainer._window.steps[0]["prefix_sharing"] == 1.0
    trainer = make_trainer(share_prefixes=False)
    batch_gradients(trainer, make_tree(5))
    assert trainer._window.steps[0]["prefix_sharing"] == 1.0


def test_attention_that_ignores_the_samples_is_found(monkeypatch):
    model = make_tiny_llama()
    monkeypatch.setattr(
        forward, "inputs_of_shared_rows",
        lambda microbatch, *_: {"position_ids": torch.arange(16)[None]},
    )  # fmt: skip
    reason = forward.reason_against_sharing_prefixes(model, model, 32)
    assert reason == "a sample sees others (attention 'sdpa')"


# --- What has no gradient -------------------------------------------------------------------------


def test_losses_without_gradient_at_an_advantage_of_zero_are_marked():
    from tests.test_losses import make_inputs

    for name, loss in LOSSES.items():
        inputs = make_inputs([-1.0, -2.0], [-1.5, -1.0], [0.0, 0.0])
        inputs.trainer_logprobs.requires_grad_()
        loss(inputs).loss.backward()
        assert not inputs.trainer_logprobs.grad.any(), name
        assert "advantages" in needs_of(loss), name
    assert "advantages" in needs_of(add_terms(cispo))
    assert "advantages" not in needs_of(add_terms(cispo, entropy_bonus))
    assert "advantages" not in needs_of(lambda inputs: cispo(inputs))


def test_samples_without_gradient_are_not_computed_but_count(make_trainer):
    samples = make_tree(6)
    for sample in samples[::3]:
        sample.set_advantage(0.0)
    samples[1].loss_mask[:] = False

    def run(loss_fn=None, **options):
        trainer = make_trainer(loss_fn=loss_fn, share_prefixes=False, **options)
        counted = []
        trainer.model.model.register_forward_pre_hook(
            lambda module, args, kwargs: counted.append(kwargs["input_ids"].numel()),
            with_kwargs=True,
        )
        trainer.support = ModelSupport("padded")
        loss, grads = batch_gradients(trainer, samples)
        return loss, grads, sum(counted), trainer._window.steps[0]

    loss, grads, computed, row = run()
    # A loss of one's own may have a gradient anywhere.
    expected_loss, expected_grads, all_positions, all_row = run(lambda inputs: cispo(inputs))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6)
    idle = [s for s in samples if not s.num_loss_tokens or not s.advantages.any()]
    assert row["idle_sample_share"] == len(idle) / len(samples) > 0.3
    assert computed < 0.8 * all_positions
    without_loss = sum(s.num_loss_tokens == 0 for s in samples)
    assert all_row["idle_sample_share"] == without_loss / len(samples)
    assert row["num_loss_tokens"] == all_row["num_loss_tokens"]
    # Means are over the tokens that were computed.
    mean_size = np.concatenate(
        [abs(s.advantages[s.loss_mask]) for s in samples if s.advantages.any()]
    ).mean()
    assert row["advantage_abs"] == pytest.approx(mean_size, rel=1e-5)
    assert all_row["advantage_abs"] < 0.9 * mean_size
    _, _, with_kl, _ = run(entropy_beta=0.1)
    assert with_kl == all_positions


# --- Without waiting for the device ---------------------------------------------------------------


class Waits(TorchDispatchMode):
    """Finds operations for which the host would wait for a GPU."""

    OPERATIONS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.partition("::")[2]
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in self.OPERATIONS or by_mask:
            self.found.append((name, traceback.extract_stack()[-4:-1]))
        return func(*args, **(kwargs or {}))


def test_waiting_is_found():
    with Waits() as waits:
        assert torch.ones(2).sum().item() == 2
        bool(torch.ones(1).any())
        torch.ones(3)[torch.tensor([True, False, True])]
    assert [name for name, _ in waits.found] == ["_local_scalar_dense"] * 2 + ["index"]


ROWS = cycle(["one sample a row", "several", "tree", "tree in calls"])


@pytest.mark.parametrize(("loss", "rows"), list(zip(sorted(LOSS_OPTIONS), ROWS, strict=False)))
def test_forward_and_backward_of_a_microbatch_wait_for_nothing(
    make_trainer, monkeypatch, loss, rows
):
    monkeypatch.setattr(forward, "_is_cheaper_in_calls", lambda *_: "calls" in rows)
    samples = [sample for sample in make_tree(8) if sample.num_loss_tokens]
    trainer = make_trainer(
        loss=loss, loss_args=LOSS_OPTIONS[loss], use_lora=True, kl_beta=0.1, entropy_beta=0.1
    )
    assert trainer.support.shares_prefixes
    numbers = [[i] for i in range(3)] if "one" in rows else [[0, 1, 2], [3]]
    num_shared = None
    if "tree" in rows:
        ((numbers, *_),), num_shared = plan_all(samples, 1000)
    microbatch = collate(samples, numbers, [1.0] * len(samples), 0, num_shared)
    assert microbatch.shares_prefixes == ("tree" in rows)
    means = TokenMeans()
    with Waits() as waits:
        trainer.microbatch_loss(trainer.model, microbatch, means).backward()
    assert not waits.found, waits.found[0]


# --- The way to the device ------------------------------------------------------------------------


def test_a_microbatch_goes_to_the_device_with_all_its_columns(monkeypatch):
    samples = make_tree(7)
    for sample in samples[:3]:
        length = len(sample.token_ids)
        sample.extras["allowed_tokens"] = np.ones((length, 2), np.int32)
        sample.extras["routed_experts"] = np.arange(3 * length, dtype=np.int16).reshape(-1, 3, 1)
        sample.extras["of_a_fork"] = np.arange(length, dtype=np.float32)
    microbatch = collate(samples, [[0], [1, 2]], [0.5] * len(samples), 9)
    own = microbatch.targets.extras["of_a_fork"].tolist()
    assert own == [float(t) for s in samples[:3] for t in s.loss_mask.nonzero()[0]]
    copied = copy_to(microbatch, torch.device("meta"))
    pairs = [(getattr(copied, n), getattr(microbatch, n))
             for n in ("input_ids", "position_ids", "visible_until")]  # fmt: skip
    for here, there in ((copied, microbatch), (copied.targets, microbatch.targets)):
        assert here.extras.keys() == there.extras.keys()
        pairs += [(here.extras[n], there.extras[n]) for n in there.extras]
    for name in {*Targets.__slots__} - {"extras"}:
        pairs.append((getattr(copied.targets, name), getattr(microbatch.targets, name)))
    for value, expected in pairs:
        assert value.is_meta and (value.dtype, value.shape) == (expected.dtype, expected.shape)


def test_a_step_that_computes_nothing_logs_no_means_over_tokens(make_trainer):
    samples = make_tree(6)
    for sample in samples:
        sample.set_advantage(0.0)
    trainer = make_trainer()
    trainer.support = ModelSupport("padded")
    loss, _ = batch_gradients(trainer, samples)
    row = trainer._window.steps[0]
    assert loss == 0 and row["idle_sample_share"] == 1
    assert not {"entropy", "mismatch_kl", "importance_ratio", "advantage_abs"} & row.keys()
