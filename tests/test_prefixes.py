"""Samples with a common beginning: their rows, what attention sees there, and the gradient."""

import itertools
import shutil
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DogeConfig, DogeForCausalLM, MistralConfig, MistralForCausalLM

from tests.helpers import TINY, make_tiny_llama, make_tiny_model, needs_gpu
from tests.reference import (
    LOSS_OPTIONS,
    batch_gradients,
    check_against_reference,
    move_away,
    switch_checkpointing_on,
    with_logprobs_near,
)
from tests.tree_samples import make_sample, make_tree
from verifiers_rl import cispo, forward
from verifiers_rl.packing import ModelSupport, collate, copy_to, plan_batch
from verifiers_rl.report.metrics import StepMetrics
from verifiers_rl.types import Batch, SampleSizes


def plan_all(samples, max_tokens, **options):
    is_computed = np.ones(len(samples), bool)
    support = ModelSupport(shares_prefixes=True, **options)
    return plan_batch(SampleSizes.of(samples), is_computed, max_tokens, 1, support)


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
    assert targets.offsets.tolist() == [0, 1, 2, 0, 1, 2, 4, 0, 1]
    assert "".join(map(chr, targets.token_ids)) == "bcdbcefbg"
    assert targets.sequence_ids.tolist() == [0] * 3 + [1] * 4 + [2] * 2
    assert [s.path.tolist() for s in microbatch.segments] == [
        [0, 1, 2, 3], [0, 1, 2, 4, 5], [0, 1, 6],
    ]  # fmt: skip


@pytest.mark.parametrize("max_tokens, num_ranks", [(1, 2), (12, 1), (30, 2), (1000, 1)])
def test_every_sample_is_in_one_row_and_rows_are_within_the_budget(max_tokens, num_ranks):
    for seed in range(5):
        samples = make_tree(seed)
        sizes, is_computed = SampleSizes.of(samples), np.arange(len(samples)) != seed
        support = ModelSupport(shares_prefixes=True)
        plans, num_shared = plan_batch(sizes, is_computed, max_tokens, num_ranks, support)
        seen = []
        for rows in itertools.chain(*plans):
            microbatch = collate(samples, rows, [1.0] * len(samples), 0, num_shared)
            seen += itertools.chain(*rows)
            assert not rows or max_tokens <= 12 or microbatch.input_ids.numel() <= max_tokens
        assert sorted(seen) == is_computed.nonzero()[0].tolist()


def test_sharing_stops_where_a_mask_costs_more():
    def bundles(prompt, reply, number, **options):
        samples = [
            make_sample([*range(prompt), *[1000 + n] * reply], prompt, 0.5) for n in range(number)
        ]
        (plan,), _ = plan_all(samples, 10**6, **options)
        return [len(row) for rows in plan for row in rows]

    assert bundles(33, 7, 64, hidden_size=128) == [64]
    # A mask of 6,402 x 6,402 to save 126 tokens.
    assert max(bundles(2, 100, 64, hidden_size=128)) < 64
    # Too wide for a mask, so without one; eager attention cannot do that.
    assert bundles(900, 100, 4) == [4] and bundles(900, 100, 4, attention="eager") == [1] * 4


KERNEL = "kernels-community/flash-attn2"


@pytest.fixture(params=["sdpa", "sdpa in calls", "sdpa in varlen", "eager", KERNEL])
def attention(request, monkeypatch):
    """The name of an attention implementation; of SDPA with a mask, with a call per sample, and as
    on a GPU. What the package `kernels` would load from the hub, for a GPU, has a stand-in.
    """
    kernel = SimpleNamespace(flash_attn_func=flash_by_hand, flash_attn_varlen_func=kernel_by_hand)
    monkeypatch.setattr("transformers.integrations.hub_kernels.is_kernels_available", lambda: True)
    monkeypatch.setattr(
        "transformers.integrations.hub_kernels.get_kernel", lambda *_, **options: kernel
    )
    in_calls = request.param == "sdpa in calls"
    monkeypatch.setattr(forward, "_is_cheaper_in_calls", lambda *_: in_calls)
    if request.param == "sdpa in varlen":
        emulate_varlen(monkeypatch)
    return request.param.split()[0]


def emulate_varlen(monkeypatch):
    monkeypatch.setattr(forward, "HAS_VARLEN", ("cpu",))
    monkeypatch.setattr(forward, "varlen_attn", varlen_by_hand)


def varlen_by_hand(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa
):
    """What torch's `varlen_attn` computes, which needs a GPU: each query of a sequence sees the
    keys up to its own place from the end.
    """
    assert window_size == (-1, 0) and query.dtype == key.dtype == value.dtype
    borders = [cu_seq_q.tolist(), cu_seq_k.tolist()]
    assert [max(np.diff(border)) for border in borders] == [max_q, max_k]
    outputs = []
    for (q0, q1), (k0, k1) in zip(*map(itertools.pairwise, borders), strict=True):
        num_q, num_k = q1 - q0, k1 - k0
        sees = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        parts = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        outputs.append(
            scaled_dot_product_attention(*parts, sees, scale=scale, enable_gqa=enable_gqa)
        )
    return torch.cat(outputs, 1).transpose(0, 1)


def kernel_by_hand(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal
):
    assert causal
    borders = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return varlen_by_hand(
        q, k, v, *borders, scale=softmax_scale, window_size=(-1, 0), enable_gqa=True
    )


def flash_by_hand(q, k, v, softmax_scale, causal):
    parts = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(
        *parts, is_causal=causal, scale=softmax_scale, enable_gqa=True
    ).transpose(1, 2)


def make_sharing_trainer(make_trainer, make_model, attention, lora, checkpointing, **options):
    """A trainer whose model is not the one that it started from."""
    trainer = make_trainer(
        make_model(), use_lora=lora, lora_rank=4, gradient_checkpointing=checkpointing,
        temperature=0.7, max_tokens_per_microbatch=60, share_prefixes=True,
        attn_implementation=attention, **options,
    )  # fmt: skip
    if checkpointing:
        switch_checkpointing_on(trainer)
    move_away(trainer)
    return trainer


# The lists have different lengths, so that each meets many of the others.
SHARED = [
    *zip(
        [*LOSS_OPTIONS, "ppo", "cispo", "cispo", "ppo", "gspo", "icepop", "cispo"],
        [*["sdpa", "sdpa in calls", "eager"] * 3, *["sdpa in varlen"] * 4, KERNEL],
        cycle([make_tiny_model, make_tiny_llama, make_tiny_llama, make_tiny_model]),
        cycle([False, True]),
        cycle([(False, 10_000), (True, 7), (False, 1), (True, 10_000), (False, 7)]),
        strict=False,
    )
]


@pytest.mark.parametrize("loss, attention, make_model, lora, way", SHARED, indirect=["attention"])
def test_the_step_with_shared_beginnings_equals_a_float64_reference(
    make_trainer, monkeypatch, loss, attention, make_model, lora, way
):
    checkpointing, chunk_size = way
    monkeypatch.setattr(forward, "chunk_size_for", lambda *_: chunk_size)
    trainer = make_sharing_trainer(
        make_trainer, make_model, attention, lora, checkpointing, loss=loss, kl_beta=0.1,
        loss_args=LOSS_OPTIONS[loss], entropy_beta=0.2, loss_normalization="sequence",
    )  # fmt: skip
    samples = with_logprobs_near(trainer.model, make_tree(2), 0.7)
    row = check_against_reference(trainer, make_model, samples)
    assert row["num_microbatches"] > 1 and row["prefix_sharing"] > 1.3


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("attention", ["sdpa", "sdpa in calls"], indirect=True)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile's own
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # which it hides by itself
def test_compiled_layers_keep_samples_apart_and_serve_rows_of_any_length(make_trainer, attention):
    torch._dynamo.reset()
    counters.clear()
    trainer = make_sharing_trainer(
        make_trainer, make_tiny_llama, attention, True, True, torch_compile=True,
        loss="ppo", loss_args=LOSS_OPTIONS["ppo"],
    )  # fmt: skip
    num_graphs = []
    for seed in (2, 5):
        samples = with_logprobs_near(make_tiny_llama(), make_tree(seed), 0.7)
        check_against_reference(trainer, make_tiny_llama, samples)
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] > 0 and num_graphs[1] <= num_graphs[0] + 2


def gradients_in(way, device, dtype, of_values):
    """Attention of a row with a common beginning, 4 heads on 2, and its gradients."""
    torch.manual_seed(0)
    forward.wrap_attention("sdpa")
    qkv = [
        torch.randn(1, 7, heads, 8).to(device, kind).transpose(1, 2).requires_grad_()
        for heads, kind in ((4, dtype), (2, dtype), (2, of_values))
    ]
    samples = [make_sample([ord(c) for c in text], 1, 0.5) for text in ("abcd", "abcef", "abg")]
    row = copy_to(collate(samples, [[0, 1, 2]], [1.0] * 3, 0, [0, 3, 2]), torch.device(device))
    support = ModelSupport(shares_prefixes=True, attention=way)
    inputs = forward.attention_inputs(row, support)
    output, _ = forward.ALL_ATTENTION_FUNCTIONS["sdpa"](
        SimpleNamespace(num_key_value_groups=2, is_causal=True), *qkv, inputs["attention_mask"],
        sample_segments=inputs[forward.KEYWORD], scaling=0.4,
    )  # fmt: skip
    return output, *torch.autograd.grad(output.square().sum(), qkv)


ROUNDED = 1.5e-2  # twice what calls in bfloat16 are off


@pytest.mark.parametrize(
    "device, dtype, of_values, bound",
    [
        ("cpu", torch.float64, torch.float64, 1e-14),
        # A norm with float32 weights gives float32 queries and keys.
        ("cpu", torch.float32, torch.bfloat16, ROUNDED),
        pytest.param("cuda", torch.float32, torch.bfloat16, ROUNDED, marks=needs_gpu),
    ],
)
def test_varlen_and_its_gradient_equal_a_call_for_each_sample(
    monkeypatch, device, dtype, of_values, bound
):
    expected = gradients_in("calls", "cpu", torch.float64, torch.float64)
    if device == "cpu":
        emulate_varlen(monkeypatch)
    given = gradients_in("varlen", device, dtype, of_values)
    assert [part.dtype for part in given] == [of_values, dtype, dtype, of_values]
    for ours, theirs in zip(given, expected, strict=True):
        assert (ours.double().cpu() - theirs).norm() < bound * theirs.norm()


def test_a_model_that_cannot_share_is_trained_whole_and_a_line_says_why(make_trainer, caplog):
    windowed = MistralForCausalLM(
        MistralConfig(**TINY, num_key_value_heads=2, sliding_window=16)
    ).float()
    for model, options in ((windowed, {}), (None, {"share_prefixes": False})):
        trainer = make_trainer(model, **options)
        assert batch_gradients(trainer, make_tree(5))[2]["prefix_sharing"] == 1.0
    assert "its sliding_window of 16 tokens is shorter than max_seq_len=32" in caplog.text


def test_a_model_that_gives_attention_its_mask_by_name_shares_prefixes():
    model = DogeForCausalLM(DogeConfig(**TINY, num_key_value_heads=2)).float()
    assert forward.reason_against_sharing_prefixes(model, model, 32) is None


def test_attention_that_ignores_the_samples_is_found(monkeypatch):
    model = make_tiny_llama()

    def inputs(microbatch, support):
        return {"position_ids": torch.arange(microbatch.input_ids.shape[1])[None]}

    monkeypatch.setattr(forward, "attention_inputs", inputs)
    assert forward.reason_against_rows(model, model, ModelSupport()) == (
        "a sample sees others (attention 'sdpa')"
    )
    reason = forward.reason_against_sharing_prefixes(model, model, 32)
    assert reason == "a sample sees others (attention 'mask')"


# --- What has no gradient -------------------------------------------------------------------------


def test_samples_without_gradient_are_not_computed_but_count(make_trainer):
    samples = make_tree(6)
    for sample in samples[::3]:
        sample.set_advantage(0.0)
    samples[1].loss_mask[:] = False

    def run(loss_fn=None):
        trainer = make_trainer(loss_fn=loss_fn, share_prefixes=False)
        return *batch_gradients(trainer, samples), trainer.floating_point_ops({})

    loss, gradients, row, num_computed = run()
    # A loss of one's own may have a gradient anywhere.
    expected_loss, expected, _, num_all = run(lambda inputs: cispo(inputs))
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
    assert num_computed < 0.8 * num_all
    idle = [s for s in samples if not s.num_loss_tokens or not s.advantages.any()]
    assert row["idle_sample_share"] == len(idle) / len(samples) > 0.3
    # Means are over the tokens that were computed.
    sizes = np.concatenate([abs(s.advantages[s.loss_mask]) for s in samples if s.advantages.any()])
    assert row["advantage_abs"] == pytest.approx(sizes.mean(), rel=1e-5)
    for sample in samples:
        sample.set_advantage(0.0)
    loss, _, row, _ = run()  # of a step that computes nothing
    assert loss == 0 and row["idle_sample_share"] == 1
    assert not {"entropy", "mismatch_kl", "importance_ratio", "advantage_abs"} & row.keys()


WAYS = cycle(["mask", "calls", "varlen"])


# --- Without waiting for the device ---------------------------------------------------------------


OPERATIONS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")


class NoWaits(TorchDispatchMode):
    """Refuses operations for which the host would wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.partition("::")[2]
        assert name not in OPERATIONS
        assert name != "index" or all(i is None or i.dtype != torch.bool for i in args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss, way", [*zip(LOSS_OPTIONS, WAYS, strict=False)])
def test_forward_and_backward_of_a_microbatch_wait_for_nothing(
    make_trainer, monkeypatch, loss, way
):
    monkeypatch.setattr(forward, "_is_cheaper_in_calls", lambda *_: way == "calls")
    if way == "varlen":
        emulate_varlen(monkeypatch)
    samples = [sample for sample in make_tree(8) if sample.num_loss_tokens]
    trainer = make_trainer(
        loss=loss, loss_args=LOSS_OPTIONS[loss], use_lora=True, kl_beta=0.1, entropy_beta=0.1
    )
    layout = trainer.tried_support.layout
    ((rows, *_),), num_shared = plan_all(samples, 1000, layout=layout)
    microbatch = collate(samples, rows, [1.0] * len(samples), 0, num_shared)
    assert num_shared.any()
    metrics = StepMetrics(Batch(0, 0, samples))
    trainer.loss_fn = trainer.loss_fn.__wrapped__  # as after the check of the first step
    with NoWaits():
        total = trainer.microbatch_loss(trainer.model, microbatch, metrics)
        total.backward()
        for wait in (total.item, total.__bool__, lambda: total[None][total[None] == total]):
            with pytest.raises(AssertionError):
                wait()


# --- The way to the device ------------------------------------------------------------------------


def test_a_microbatch_goes_to_the_device_with_all_its_columns():
    samples = make_tree(7)[:3]
    for sample in samples:
        sample.extras["routed_experts"] = np.zeros((len(sample.token_ids), 3, 1), np.int16)
        sample.extras["of_a_fork"] = np.zeros(len(sample.token_ids), np.float32)
    copied = copy_to(collate(samples, [[0], [1, 2]], [0.5] * 3, 9), torch.device("meta"))
    for part in (copied, copied.targets):
        columns = [*part.extras.values(), *(getattr(part, name) for name in part.__slots__)]
        assert {c.device.type for c in columns if isinstance(c, torch.Tensor)} == {"meta"}
        assert part.extras
