import asyncio
import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from pydantic import ValidationError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from tests.helpers import (
    TARGETS,
    StubServer,
    StubSource,
    make_tiny_model,
    make_tiny_moe,
    push_to,
    run_script,
    skip_without_deepspeed,
    stub_servers,
    weights_of,
)
from tests.test_router_replay import make as make_of_kind
from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.inference import InferenceServerError, ServerLostError
from verifiers_rl.inference.expected import (
    check_plan,
    fit_to_server,
    trained_model,
)
from verifiers_rl.sync import nccl
from verifiers_rl.sync.plan import TransferPlan
from verifiers_rl.sync.shared_buffers import GivenUpError, SharedBuffers, shared_with_workers
from verifiers_rl.sync.sources import (
    Source,
    adapter_sources,
    check_adapter,
    full_sources,
    merged_sources,
    what_to_send,
)
from verifiers_rl.sync.weight_sync import WeightSync, choose_backend, make_plan
from verifiers_rl.wiring import Replaced, make_source_and_sink


def with_trained_adapter(model, **options):
    model = get_peft_model(
        model, LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **options})
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


ADAPTER = {"r": 1, "lora_alpha": 2, "use_rslora": False, "bias": "none", "target_modules": ["q"]}


def plan_with(shapes, bucket_bytes=2**20, **fields):
    fields = {"dtype": "float32", **fields}
    return TransferPlan(tensors=shapes, bucket_bytes=bucket_bytes, **fields)


@pytest.mark.parametrize(
    "change, field",
    [
        ({"bucket_bytes": 2**40}, "bucket_bytes"),
        ({"tensors": {"a": [-1]}}, "tensors.a.0"),
    ],
)
def test_what_is_no_plan_is_refused(change, field):
    plan = plan_with({"a": (2, 3)}, 10, adapter=ADAPTER)
    assert TransferPlan.model_validate_json(plan.model_dump_json()) == plan
    with pytest.raises(ValidationError) as raised:
        TransferPlan.model_validate_json(json.dumps(plan.model_dump() | change))
    assert ".".join(map(str, raised.value.errors()[0]["loc"])) == field


async def pieces(data, taken):
    for start in range(0, len(data), 7):
        taken.append(start)
        yield data[start : start + 7]


def test_a_buffer_is_not_filled_again_before_the_slowest_worker_has_copied_it():
    with shared_with_workers(2, 2, 16) as (shared, address):
        fast, slow = (SharedBuffers(*address) for _ in range(2))
    filled, taken = [], []

    async def fill():
        async for _ in shared.fill(pieces(bytes(64), taken), [16] * 4):
            filled.append(True)

    async def run():
        filling = asyncio.ensure_future(fill())
        for worker, num_filled in ((None, 2), (fast, 2), (fast, 2), (slow, 3)):
            if worker is not None:
                worker.receive(worker is slow, 16)
            while len(filled) < num_filled:
                await asyncio.sleep(0.01)
            # It looks many times, and would at once take a piece of the next bucket from the body.
            await asyncio.sleep(0.05)
            assert len(taken) == math.ceil(num_filled * 16 / 7)
        filling.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    "wanted, own, workers, chosen",
    [
        ("auto", None, [None], "http"),
        ("auto", "gpu-0", ["gpu-0"], "ipc"),  # NCCL refuses two ranks on one GPU
        ("auto", "gpu-0", ["gpu-1", "gpu-2"], "nccl"),
        ("auto", "gpu-0", ["gpu-0", "gpu-1"], "http"),
        ("http", "gpu-0", ["gpu-1"], "http"),
    ],
)
def test_the_backend_is_one_that_works_between_these_gpus(wanted, own, workers, chosen):
    assert choose_backend(wanted, own, workers, False) == chosen
    of_an_adapter = "http" if chosen == "ipc" else chosen
    assert choose_backend(wanted, own, workers, True) == of_an_adapter
    with pytest.raises(InferenceServerError, match="weight_sync_backend='nccl'"):
        choose_backend("nccl", own, [own], False)


class StubNccl:
    """A transport that carries nothing, and fails with its error, or once the server replies."""

    way, error, is_abandoned = "NCCL", None, False

    def __init__(self, *ranks, is_given_up, make_group):
        self.has_reply = is_given_up

    def unique_id(self):
        return bytes(range(128))

    def wait_until_connected(self): ...

    def send(self, buffer):
        if self.has_reply():
            raise GivenUpError("the server has replied")
        if self.error is not None:
            raise self.error

    def abandon(self):
        self.is_abandoned = True


@pytest.fixture
def over_nccl(monkeypatch):
    """A WeightSync that is connected over stand-ins for NCCL, and its model."""
    monkeypatch.setattr("verifiers_rl.sync.weight_sync.ProcessGroupTransport", StubNccl)
    monkeypatch.setattr("verifiers_rl.sync.weight_sync.choose_backend", lambda *_: "nccl")
    sync, model = WeightSync(StubServer(), timeout_s=30), make_tiny_model()
    sync.connect(model, *what_to_send(model, "merged"))
    return sync, model


@pytest.mark.parametrize(
    "wanted, fails_at, dies, says",
    [
        ("auto", "wait_until_connected", False, None),
        # On the same GPU, whose memory cannot be shared.
        ("auto", "unique_id", False, None),
        ("auto", "wait_until_connected", True, "^no answer from"),
        ("nccl", "wait_until_connected", False, "took too long"),
    ],
)
def test_where_nccl_cannot_connect_http_is_next_unless_the_server_is_lost(
    monkeypatch, caplog, wanted, fails_at, dies, says
):
    def fail(transport):
        server.is_up = not dies
        raise nccl.TransportError("connecting took too long")

    monkeypatch.setattr("verifiers_rl.sync.weight_sync.gpu_uuid", lambda device: "gpu-0")
    monkeypatch.setattr("verifiers_rl.sync.weight_sync.ProcessGroupTransport", StubNccl)
    monkeypatch.setattr(StubNccl, fails_at, fail)
    gpu = "gpu-0" if fails_at == "unique_id" else "gpu-1"
    server, model = StubServer(gpus=[gpu]), make_tiny_model()
    sync = WeightSync(server, wanted, timeout_s=30)
    if says:
        with pytest.raises(ServerLostError, match=says):
            push_to(sync, model, 0)
        assert not caplog.text
    else:
        push_to(sync, model, 0)
        push_to(sync, model, 1)
        assert sync._transport is None and server.policy_version == 1
        assert caplog.text.count("connecting took too long; HTTP is tried next") == 1


REFUSED = InferenceServerError("500: RuntimeError: out of memory")


@pytest.mark.parametrize(
    "says, message",
    [
        (REFUSED, "^500: RuntimeError: out of memory"),
        (ServerLostError("no answer"), "weights to .*: NCCL failed: a worker left; no answer$"),
    ],
)
def test_over_nccl_the_servers_error_says_why_and_ends_our_part(
    monkeypatch, over_nccl, says, message
):
    def answer(request, timeout_s):
        raise says

    sync, model = over_nccl
    transport = sync._transport
    sync._hold.has_reply = lambda: False
    monkeypatch.setattr("tests.helpers.StubRequest.answer", answer)
    monkeypatch.setattr("tests.helpers.StubRequest.has_reply", lambda request: says is REFUSED)
    transport.error = nccl.TransportError("NCCL failed: a worker left")
    with pytest.raises(InferenceServerError, match=message) as caught:
        push_to(sync, model, 0)
    assert isinstance(caught.value, ServerLostError) == (says is not REFUSED)
    assert transport.is_abandoned


@pytest.mark.parametrize(
    "options, lora_sync, message",
    [
        ({"use_dora": True}, "merged", "no DoRA"),
        ({"rank_pattern": {"q_proj": 2}}, "adapter", "rank_pattern.*set lora_sync='merged'"),
        ({"rank_pattern": {"q_proj": 2}}, "merged", None),
        ({"init_lora_weights": "pissa"}, "adapter", "='pissa': .* the base weights are.*'merged'"),
        ({"init_lora_weights": "pissa_niter_4"}, "merged", "set 'pissa'"),
        ({"init_lora_weights": "orthogonal"}, "adapter", None),
    ],
)
def test_an_adapter_the_server_could_not_reproduce_is_refused(options, lora_sync, message):
    config = LoraConfig(r=4, target_modules=TARGETS, **options)
    if message is None:
        check_adapter(config, lora_sync)
    else:
        with pytest.raises(ValueError, match=message):
            check_adapter(config, lora_sync)


# --- What a server takes ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served():
    config = make_tiny_model().config
    config.architectures = ["Qwen3ForCausalLM"]
    return trained_model(config)


def test_a_model_that_fsdp_split_travels_under_the_names_of_its_own_class():
    config = GPTNeoXConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = GPTNeoXForCausalLM(config)
    expected = [*what_to_send(model, "adapter")[0]]
    assert "embed_out.weight" in expected  # lm_head.weight in transformers
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert [*what_to_send(model, "adapter")[0]] == expected
    finally:
        dist.destroy_process_group()


def test_a_push_begun_again_makes_its_parts_anew():
    model = make_tiny_moe()
    sources, _ = what_to_send(model, "adapter")
    prefix = "model.layers.0.mlp.experts"
    sources[f"{prefix}.0.gate_proj.weight"].make()  # and no further
    with torch.no_grad():
        expert = model.get_parameter(f"{prefix}.gate_up_proj").add_(1.0)[0]
    made = {name: source.make() for name, source in sources.items()}
    assert torch.equal(made[f"{prefix}.0.gate_proj.weight"], expert[:32])
    assert torch.equal(made[f"{prefix}.0.up_proj.weight"], expert[32:])


OF_PEFT = "ignore::RuntimeWarning"  # about patterns of its own


@pytest.mark.filterwarnings(OF_PEFT)
@pytest.mark.parametrize(
    "lora_sync, modules_to_save, sent",
    [
        ("adapter", None, None),
        ("auto", None, None),
        ("merged", None, "merged"),
        ("auto", ["gate"], "adapter"),
    ],
)
def test_an_adapter_of_experts_is_refused_before_the_run_where_it_is_not_sent_merged(
    monkeypatch, lora_sync, modules_to_save, sent
):
    servers = stub_servers(monkeypatch, dtype="bfloat16")
    args = RLConfig(use_cpu=True, lora_sync=lora_sync, vllm_server_port=1)
    config = LoraConfig(r=2, target_modules=TARGETS, modules_to_save=modules_to_save)
    policy = get_peft_model(make_tiny_moe(), config)
    given = policy, None, args, None, Replaced(orchestrator=StubSource()), None
    if sent:
        assert make_source_and_sink(*given)[1].lora_sync == sent
        assert what_to_send(policy, sent)[1] is None  # no adapter
    else:
        with pytest.raises(ConfigError, match=r"target_parameters=.*; set lora_sync='merged'"):
            make_source_and_sink(*given)
        assert bool(servers[0].num_asked) == (lora_sync == "auto")


def make_gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=261, n_embd=32, n_layer=1, n_head=4))


TIED, EXPERTS = partial(make_tiny_model, tie_word_embeddings=True), partial(make_of_kind, "qwen3")
PATTERNS = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 3}}
TENSORS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OF_GPT_OSS = {"target_modules": ["q_proj"], "target_parameters": TENSORS}


@pytest.mark.filterwarnings(OF_PEFT)
@pytest.mark.parametrize(
    "make, options, adapted",
    [
        (TIED, {"use_rslora": True}, "q_proj up_proj"),
        (make_tiny_model, PATTERNS, "q_proj k_proj"),
        # It changes the base weights.
        (make_tiny_model, {"init_lora_weights": "pissa"}, "q_proj"),
        (make_tiny_model, {"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens"),
        # Of an untied model only: peft unties a head that it trains a copy of.
        (make_tiny_model, {"modules_to_save": ["lm_head"]}, "lm_head"),
        # Its layers keep their weights transposed.
        (make_gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}, "c_proj"),
        (EXPERTS, {}, "experts.down_proj experts.gate_up_proj"),
        # The routers, too.
        (EXPERTS, {"target_modules": "all-linear"}, "experts.down_proj gate.weight"),
        # Its tensors of experts are transposed.
        (partial(make_of_kind, "gpt_oss"), OF_GPT_OSS, "experts.down_proj"),
    ],
)
def test_merged_weights_equal_those_peft_merges_and_leave_the_trainer_alone(make, options, adapted):
    rtol = 1e-5 if "experts" in adapted else 1e-6
    model = with_trained_adapter(make(), **options)
    before = weights_of(model)
    merged = {name: source.make().clone() for name, source in merged_sources(model).items()}
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    expected = dict(model.merge_and_unload().named_parameters())
    plain = dict(make().named_parameters())
    # In the order of the model's parameters, as vLLM wants the parts of a layer.
    assert [*merged] == [*plain] and merged.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            merged[name], expected[name], rtol=rtol, atol=rtol / 10, msg=name
        )
    changed = " ".join(name for name in plain if not torch.allclose(merged[name], plain[name]))
    assert all(part in changed for part in adapted.split())
    assert ("gate.weight" in changed) == ("gate.weight" in adapted)


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_an_adapter_travels_without_the_weights_that_it_adapts(tmp_path, target):
    """PEFT itself also gives an embedding and a head that are adapted, or that have another number
    of rows than in the folder of the base model.
    """
    model = make_tiny_model()
    model.save_pretrained(tmp_path)
    model.name_or_path = str(tmp_path)
    model.resize_token_embeddings(300, mean_resizing=False)
    sources, _ = what_to_send(with_trained_adapter(model, target_modules=[target]), "adapter")
    assert sources and all(".lora_" in name and target in name for name in sources)


EMBEDDING = "model.embed_tokens.weight"
OTHER = "base_model.model.x.lora_A.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": (1,)}, r"'x' has shape None in .* \(1,\) at"),
        ({"lm_head.weight": None}, r"'lm_head.weight' has shape \(261, 32\) in .* None at"),
        ({EMBEDDING: (10**9, 32)}, r"\(261, 32\) in .* \(1000000000, 32\) at"),
        ({OTHER: (4, 4)}, f"'{OTHER}' has shape None .*lora_sync='merged'"),
    ],
)
def test_a_plan_for_another_model_is_refused_before_memory_is_allocated(served, change, message):
    sources, adapter = full_sources(make_tiny_model()), None
    if OTHER in change:
        sources, adapter = adapter_sources(with_trained_adapter(make_tiny_model()))
    wanted = {name: source.shape for name, source in sources.items()} | change
    wanted = {name: shape for name, shape in wanted.items() if shape is not None}
    with pytest.raises(ValueError, match=message):
        check_plan(plan_with(wanted, adapter=adapter), served)


def test_quantised_weights_are_not_sent():
    sources = {"a": Source((2,), torch.int8, lambda: None)}
    with pytest.raises(InferenceServerError, match=r"'a' has dtype torch\.int8"):
        make_plan(sources, None, {"dtype": "float32", "lora_dtype": None}, 16)


def test_an_unknown_architecture_is_named():
    config = make_tiny_model().config
    config.architectures = ["NoSuchModel"]
    with pytest.raises(ValueError, match="no architecture 'NoSuchModel'"):
        trained_model(config)


@pytest.mark.parametrize(
    "rank, served_rank, quantization, message",
    [
        (8, None, None, "--enable-lora --max-lora-rank 8"),
        (32, 16, None, "--max-lora-rank 32"),
        (None, 16, None, "without --enable-lora"),
        (None, None, {"quant_method": "mxfp4"}, r"\(mxfp4\).*lora_sync='adapter'"),
    ],
)
def test_a_server_names_the_flags_that_a_plan_needs(rank, served_rank, quantization, message):
    config = make_tiny_model().config
    config.quantization_config = quantization
    lora = served_rank and SimpleNamespace(max_lora_rank=served_rank)
    server = SimpleNamespace(lora_config=lora, model_config=SimpleNamespace(hf_config=config))
    plan = plan_with({"a": (1,)}, adapter=rank and ADAPTER | {"r": rank})
    with pytest.raises(ValueError, match=message):
        fit_to_server(plan, server)


# --- Models split over ranks --------------------------------------------------------------------

SPLIT = """
import gc, os, sys, weakref, torch, torch.distributed as dist
os.environ["DS_ACCELERATOR"] = "cpu"
from tests.helpers import make_tiny_model, make_tiny_moe, packed_weights
from tests.test_weight_sync import with_trained_adapter
from verifiers_rl.sync import sources as sources_of
from verifiers_rl import RLConfig
from verifiers_rl.distributed import connect_hosts, let_gloo_threads_finish
from verifiers_rl.sync.sources import gathering
from verifiers_rl.sync.sources import what_to_send

connect_hosts(RLConfig(use_cpu=True))
rank = dist.get_rank()
live, peak = 0, 0
original = sources_of.gather_full

def counted(tensor):
    global live, peak
    full = original(tensor)
    if full is not tensor:
        size = full.numel() * full.element_size()
        live += size
        peak = max(peak, live)
        weakref.finalize(full, freed, size)
    return full

def freed(size):
    global live
    live -= size

def split(kind, what):
    global live, peak
    lora = what == "merged"
    model = make_tiny_moe() if what == "experts" else make_tiny_model()
    if lora:
        model = with_trained_adapter(model)
    sources, _ = what_to_send(model, "merged")
    expected = {name: source.make().clone() for name, source in sources.items()}
    largest = max(parameter.numel() * 4 for parameter in model.parameters())
    gc.collect()
    assert live == 0
    peak = 0
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (2,))
        for layer in (model.get_base_model() if lora else model).model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        import deepspeed
        model = deepspeed.initialize(model=model, config={
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
        })[0].module
    with gathering(model, "merged"):
        if rank == 0:
            sources, _ = what_to_send(model, "merged")
            got = packed_weights(sources, model)
    if rank == 0:
        assert got.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-6, atol=1e-7)
        total = sum(t.numel() * 4 for t in expected.values())
        assert 0 < peak <= 1.5 * largest < total / 2, (peak, largest, total)
        print("gathered", what, total, "peak", peak, file=sys.stderr)

sources_of.gather_full = counted
for what in sys.argv[2:]:
    split(sys.argv[1], what)
dist.destroy_process_group()
let_gloo_threads_finish()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, models",
    [
        ("fsdp2", "full merged experts"),  # the ranks take long to start
        *(("zero3", model) for model in ("full", "merged", "experts")),
    ],
)
def test_a_split_model_is_gathered_one_tensor_at_a_time(kind, models, tmp_path):
    skip_without_deepspeed(kind)
    said = run_script(tmp_path, SPLIT, kind, *models.split())
    assert all(f"gathered {what}" in said for what in models.split())
