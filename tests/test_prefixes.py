"""Samples with a common beginning: their rows, what attention sees there, and the gradient."""

import itertools
import os.path
import random
import shutil
import traceback
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import make_tiny_llama, make_tiny_model
from tests.reference import (
    LOSS_OPTIONS,
    batch_gradients,
    check_against_reference,
    move_away,
    switch_checkpointing_on,
    with_logprobs_near,
)
from tests.tree_samples import make_sample, make_tree
from verifiers_rl import forward
from verifiers_rl.losses import cispo
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
        ids = [np.array([rng.choice([0, 1, 2, 300, 301]) for _ in range(rng.randrange(1, 7))])
               for _ in range(12)]  # fmt: skip
        order, num_shared = order_by_beginning(ids)
        lists = [ids[i].tolist() for i in order]
        assert sorted(order) == list(range(12)) and lists == sorted(lists)
        pairs = itertools.pairwise(lists)
        common = [len(os.path.commonprefix([a, b])) for a, b in pairs]
        assert num_shared.tolist() == [0, *common]


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


@pytest.mark.parametrize(("max_tokens", "num_ranks"), [(1, 2), (12, 1), (30, 2), (1000, 1)])
def test_every_sample_is_found_again_in_its_row(max_tokens, num_ranks):
    for seed in range(5):
        samples = make_tree(seed)
        sizes, is_computed = SampleSizes.of(samples), np.arange(len(samples)) != seed
        support = ModelSupport(shares_prefixes=True)
        plans, num_shared = plan_batch(sizes, is_computed, max_tokens, num_ranks, support)
        seen, num_targets, num_tokens = [], 0, 0
        for rows in itertools.chain(*plans):
            microbatch = collate(samples, rows, [1.0] * len(samples), 0, num_shared)
            paths = paths_of(microbatch, samples, rows)
            assert sorted(paths) == sorted(i for row in rows for i in row)
            seen += paths
            num_targets += microbatch.has_loss * len(microbatch.targets.rows)
            num_tokens += microbatch.num_tokens
            assert not rows or max_tokens <= 12 or microbatch.input_ids.numel() <= max_tokens
        assert sorted(seen) == is_computed.nonzero()[0].tolist()
        assert num_targets == sizes.num_loss_tokens[is_computed].sum()
        assert num_tokens == (sizes.lengths - num_shared)[is_computed].sum()
        assert max_tokens < 1000 or num_tokens < 0.75 * sizes.lengths[is_computed].sum()


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
    assert bundles(512, 600, 16, hidden_size=1024) == [16]
    assert bundles(900, 100, 4) == [4] and bundles(900, 100, 4, attention="eager") == [1] * 4


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
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa
):
    """What torch's `varlen_attn` computes, which needs a GPU: each query of a sequence sees the
    keys up to its own place from the end.
    """
    assert window_size == (-1, 0) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    borders = [cu_seq_q.tolist(), cu_seq_k.tolist()]
    assert [max(np.diff(border)) for border in borders] == [max_q, max_k]
    assert [border[-1] for border in borders] == [len(query), len(key)] and len(key) == len(value)
    outputs = []
    for (q0, q1), (k0, k1) in zip(*map(itertools.pairwise, borders), strict=True):
        num_q, num_k = q1 - q0, k1 - k0
        sees = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        parts = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        outputs.append(
            scaled_dot_product_attention(*parts, sees, scale=scale, enable_gqa=enable_gqa)
        )
    return torch.cat(outputs, 1).transpose(0, 1)


def make_sharing_trainer(make_trainer, make_model, attention, lora, checkpointing, **options):
    """A trainer whose model is not the one that it started from."""
    model = make_model()
    model.set_attn_implementation(attention)
    trainer = make_trainer(
        model, use_lora=lora, lora_rank=4, gradient_checkpointing=checkpointing, temperature=0.7,
        max_tokens_per_microbatch=60, share_prefixes=True, **options,
    )  # fmt: skip
    if checkpointing:
        switch_checkpointing_on(trainer)
    move_away(trainer)
    return trainer


# The lists have different lengths, so that each meets many of the others.
SHARED = [
    *zip(
        [*LOSS_OPTIONS, "ppo", "cispo", "cispo", "ppo", "gspo", "icepop"],
        [*["sdpa", "sdpa in calls", "eager"] * 3, *["sdpa in varlen"] * 4],
        cycle([make_tiny_model, make_tiny_llama, make_tiny_llama, make_tiny_model]),
        cycle([False, True]),
        cycle([(False, 10_000), (True, 7), (False, 1), (True, 10_000), (False, 7)]),
        strict=False,
    )
]


@pytest.mark.parametrize(
    ("loss", "attention", "make_model", "lora", "way"), SHARED, indirect=["attention"]
)
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
    trainer = make_sharing_trainer(
        make_trainer, make_tiny_llama, attention, use_lora, use_lora, torch_compile=True,
        loss="ppo", loss_args=LOSS_OPTIONS["ppo"],
    )  # fmt: skip
    num_graphs = []
    for seed in (2, 5):
        samples = with_logprobs_near(make_tiny_llama(), make_tree(seed), 0.7)
        check_against_reference(trainer, make_tiny_llama, samples)
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] > 0 and num_graphs[1] <= num_graphs[0] + 2


def logits_of_samples(model, microbatch, inputs):
    logits = model(input_ids=microbatch.input_ids, use_cache=False, **inputs).logits
    return [logits[segment.row, torch.from_numpy(segment.path)] for segment in microbatch.segments]


@torch.no_grad()
def test_flash_attention_gets_the_sequences_of_the_samples(monkeypatch):
    """A stand-in for flash attention, which needs a GPU: the sequences that it is given."""
    emulate_varlen(monkeypatch)
    model = make_tiny_llama().eval()
    samples = make_tree(4)[:10]
    (plan,), num_shared = plan_all(samples, 10**6, layout="flat")
    microbatch = collate(samples, plan[0], [1.0] * len(samples), 0, num_shared)
    expected = logits_of_samples(
        model, microbatch, forward.inputs_of_shared_rows(microbatch, "sdpa")
    )
    inputs = forward.inputs_of_shared_rows(microbatch, "flash_attention_2")
    functions = forward.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions._global_mapping, "flash_by_hand", forward._varlen)
    forward.wrap_attention("flash_by_hand")
    monkeypatch.setitem(functions._local_mapping, "sdpa", functions["flash_by_hand"])
    given = logits_of_samples(model, microbatch, inputs)
    assert_close(given, expected, rtol=1e-4, atol=1e-5)


def grouped_qkv(device, dtype):
    """Queries of 4 heads, keys and values of 2, of a row of 7 tokens; as a model gives them."""
    torch.manual_seed(0)
    parts = [torch.randn(1, 7, heads, 8).to(device, dtype) for heads in (4, 2, 2)]
    return [part.transpose(1, 2).requires_grad_() for part in parts]


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
    expected, expected_grads = gradients_in("calls", "cpu", torch.float64)
    dtype, bound = torch.bfloat16, 1.5e-2  # twice what calls in bfloat16 are off
    if device == "cpu":
        emulate_varlen(monkeypatch)
        dtype, bound = torch.float64, 1e-14
    given, grads = gradients_in("varlen", device, dtype)
    for ours, theirs in zip((given, *grads), (expected, *expected_grads), strict=True):
        assert (ours.double().cpu() - theirs).norm() < bound * theirs.norm()


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


def make_windowed(kind, sliding_window):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=261, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=sliding_window,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config).float()


@pytest.mark.parametrize("kind", ["Mistral", "Gemma2"])
def test_a_window_shorter_than_samples_is_found(kind):
    model = make_windowed(kind, 64)
    assert forward.reason_against_sharing_prefixes(model, model, 64) is None
    reason = forward.reason_against_sharing_prefixes(model, model, 65)
    assert reason == "its sliding_window of 64 tokens is shorter than max_seq_len=65"


def test_a_model_that_cannot_share_is_trained_whole_and_a_line_says_why(make_trainer, caplog):
    trainers = make_trainer(make_windowed("Mistral", 16)), make_trainer(share_prefixes=False)
    for trainer in trainers:
        assert batch_gradients(trainer, make_tree(5))[2]["prefix_sharing"] == 1.0
    assert "its sliding_window of 16 tokens is shorter than max_seq_len=32" in caplog.text


def test_attention_that_ignores_the_samples_is_found(monkeypatch):
    model = make_tiny_llama()
    monkeypatch.setattr(
        forward, "inputs_of_shared_rows",
        lambda microbatch, *_: {"position_ids": torch.arange(16)[None]},
    )  # fmt: skip
    reason = forward.reason_against_sharing_prefixes(model, model, 32)
    assert reason == "a sample sees others (attention 'sdpa')"


# --- What has no gradient -------------------------------------------------------------------------


def test_samples_without_gradient_are_not_computed_but_count(make_trainer):
    samples = make_tree(6)
    for sample in samples[::3]:
        sample.set_advantage(0.0)
    samples[1].loss_mask[:] = False

    def run(loss_fn=None, **options):
        """Gradients, metrics, and how many positions the model has computed."""
        trainer = make_trainer(loss_fn=loss_fn, share_prefixes=False, **options)
        trainer.tried_support, computed = ModelSupport("padded"), []
        trainer.model.model.register_forward_pre_hook(
            lambda module, args, kwargs: computed.append(kwargs["input_ids"].numel()),
            with_kwargs=True,
        )
        loss, grads, row = batch_gradients(trainer, samples)
        return {**grads, "loss": torch.tensor(loss)}, row, sum(computed)

    gradients, row, num_computed = run()
    # A loss of one's own may have a gradient anywhere.
    expected, row_of_all, num_all = run(lambda inputs: cispo(inputs))
    assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
    assert num_computed < 0.8 * num_all and num_all == run(entropy_beta=0.1)[2]
    idle = [s for s in samples if not s.num_loss_tokens or not s.advantages.any()]
    assert row["idle_sample_share"] == len(idle) / len(samples) > 0.3
    without_loss = [s for s in samples if not s.num_loss_tokens]
    assert row_of_all["idle_sample_share"] == len(without_loss) / len(samples)
    assert row["num_loss_tokens"] == row_of_all["num_loss_tokens"]
    # Means are over the tokens that were computed.
    sizes = np.concatenate([abs(s.advantages[s.loss_mask]) for s in samples if s.advantages.any()])
    assert row["advantage_abs"] == pytest.approx(sizes.mean(), rel=1e-5)
    assert row_of_all["advantage_abs"] < 0.9 * sizes.mean()
    for sample in samples:
        sample.set_advantage(0.0)
    gradients, row, _ = run()  # of a step that computes nothing
    assert gradients["loss"] == 0 and row["idle_sample_share"] == 1
    assert not {"entropy", "mismatch_kl", "importance_ratio", "advantage_abs"} & row.keys()


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


ROWS = cycle(["one sample a row", "several", "tree", "tree in calls", "tree in varlen"])


@pytest.mark.parametrize(("loss", "rows"), [*zip(LOSS_OPTIONS, ROWS, strict=False)])
def test_forward_and_backward_of_a_microbatch_wait_for_nothing(
    make_trainer, monkeypatch, loss, rows
):
    monkeypatch.setattr(forward, "_is_cheaper_in_calls", lambda *_: "calls" in rows)
    if "varlen" in rows:
        emulate_varlen(monkeypatch)
    samples = [sample for sample in make_tree(8) if sample.num_loss_tokens]
    trainer = make_trainer(
        loss=loss, loss_args=LOSS_OPTIONS[loss], use_lora=True, kl_beta=0.1, entropy_beta=0.1
    )
    assert trainer.tried_support.shares_prefixes
    numbers = [[i] for i in range(3)] if "one" in rows else [[0, 1, 2], [3]]
    num_shared = None
    if "tree" in rows:
        layout = trainer.tried_support.layout
        ((numbers, *_),), num_shared = plan_all(samples, 1000, layout=layout)
    microbatch = collate(samples, numbers, [1.0] * len(samples), 0, num_shared)
    assert microbatch.shares_prefixes == ("tree" in rows)
    means = TokenMeans()
    trainer.loss_fn = trainer.loss_fn.__wrapped__  # as after the check of the first step
    with Waits() as waits:
        trainer.microbatch_loss(trainer.model, microbatch, means).backward()
    assert not waits.found, waits.found[0]


# --- The way to the device ------------------------------------------------------------------------


def test_a_microbatch_goes_to_the_device_with_all_its_columns():
    samples = make_tree(7)[:3]
    for sample in samples:
        length = len(sample.token_ids)
        sample.extras["allowed_tokens"] = np.ones((length, 2), np.int32)
        sample.extras["routed_experts"] = np.arange(3 * length, dtype=np.int16).reshape(-1, 3, 1)
        sample.extras["of_a_fork"] = np.arange(length, dtype=np.float32)
    microbatch = collate(samples, [[0], [1, 2]], [0.5] * 3, 9)
    own = microbatch.targets.extras["of_a_fork"].tolist()
    assert own == [float(t) for s in samples for t in s.loss_mask.nonzero()[0]]
    copied = copy_to(microbatch, torch.device("meta"))

    def tensors_of(part, names):
        return {name: getattr(part, name) for name in names} | part.extras

    own, of_targets = ["input_ids", "position_ids", "visible_until"], {*Targets.__slots__}
    for part, names in (("", own), ("targets", of_targets - {"extras"})):
        here, there = (getattr(of, part) if part else of for of in (copied, microbatch))
        assert there.extras.keys()
        expected = {n: tensor.to("meta") for n, tensor in tensors_of(there, names).items()}
        assert_close(tensors_of(here, names), expected)
