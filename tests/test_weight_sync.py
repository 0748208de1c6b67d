import asyncio
import gc
import json
import os
import random
import re
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from pydantic import ValidationError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

from tests.helpers import (
    StubRequest,
    StubServer,
    StubSource,
    make_tiny_model,
    make_tiny_moe,
    push_body,
    push_to,
    run_script,
    stub_servers,
)
from tests.test_router_replay import make as make_of_kind
from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.inference.client import InferenceServerError, ServerLostError
from verifiers_rl.inference.expected import (
    check_plan,
    fit_to_server,
    trained_model,
)
from verifiers_rl.sync import nccl, weight_sync
from verifiers_rl.sync.plan import TransferPlan, receive_buckets
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

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_trained_adapter(model, **options):
    model = get_peft_model(
        model, LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **options})
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


Q = "model.layers.0.self_attn.q_proj"
ADAPTER = {"r": 1, "lora_alpha": 2, "use_rslora": False, "bias": "none", "target_modules": ["q"]}


def plan_with(shapes, bucket_bytes=2**20, **fields):
    fields = {"dtype": "float32", **fields}
    return TransferPlan(tensors=shapes, bucket_bytes=bucket_bytes, **fields)


@pytest.mark.parametrize(
    "change, field",
    [
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"bucket_bytes": 2**40}, "bucket_bytes"),
        ({"adapter": ADAPTER | {"r": "8"}}, "adapter.r"),
        ({"tensors": {"a": [-1]}}, "tensors.a.0"),
        ({"tensors": {}}, "tensors"),
        ({"dtype": "nn"}, "dtype"),
    ],
)
def test_what_is_no_plan_is_refused(change, field):
    plan = plan_with({"a": (2, 3)}, 10, adapter=ADAPTER)
    assert TransferPlan.model_validate_json(plan.model_dump_json()) == plan
    with pytest.raises(ValidationError) as raised:
        TransferPlan.model_validate_json(json.dumps(plan.model_dump() | change))
    assert ".".join(map(str, raised.value.errors()[0]["loc"])) == field


def shared_by(num_workers, num_buffers, buffer_bytes):
    """Memory as the server's process sees it, and as each worker does."""
    with shared_with_workers(num_workers, num_buffers, buffer_bytes) as (shared, address):
        return shared, [SharedBuffers(*address) for _ in range(num_workers)]


async def pieces(data, size=7):
    for start in range(0, len(data), size):
        yield data[start : start + size]


@pytest.mark.parametrize("num_buffers", [1, 2, 5])
def test_three_pushes_reach_all_workers_through_shared_memory(num_buffers):
    plan = plan_with({str(i): (i % 3 + 1, 3) for i in range(5)}, 16)
    sizes = [bucket.num_bytes for bucket in plan.buckets]
    bodies = [random.randbytes(sum(sizes)) for _ in range(3)]
    shared, seen = shared_by(2, num_buffers, max(sizes))
    got = [[], []]

    def work(worker):
        def receive(num_bytes):
            return lambda: seen[worker].receive(worker, num_bytes, 20.0)

        for _ in bodies:  # views of one bucket are read after the next has come
            tensors = [t for bucket in list(receive_buckets(plan, receive, 30)) for t in bucket]
            got[worker].append(tensors)

    async def fill():
        for body in bodies:
            async for _ in shared.fill(pieces(push_body(body, sizes)), sizes):
                pass

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    asyncio.run(asyncio.wait_for(fill(), 20))
    for thread in threads:
        thread.join(20)
    for of_worker in got:
        for tensors, body in zip(of_worker, bodies, strict=True):
            assert {name: tensor.shape for name, tensor in tensors} == plan.tensors
            packed = torch.cat([tensor.flatten() for _, tensor in tensors])
            assert bytes(packed.view(torch.uint8).numpy()) == body


def test_a_buffer_is_not_filled_again_before_the_slowest_worker_has_copied_it():
    shared, (fast, slow) = shared_by(2, 2, 16)
    filled = []

    async def fill():
        async for _ in shared.fill(pieces(push_body(bytes(64), [16] * 4)), [16] * 4):
            filled.append(True)

    async def run():
        filling = asyncio.ensure_future(fill())
        await asyncio.sleep(0.05)
        fast.receive(0, 16, 5.0), fast.receive(0, 16, 5.0)
        await asyncio.sleep(0.05)
        assert len(filled) == 2
        slow.receive(1, 16, 5.0)
        await asyncio.sleep(0.05)
        assert len(filled) == 3
        filling.cancel()

    asyncio.run(run())


def test_a_wait_for_shared_memory_ends_at_its_deadline_or_when_the_push_is_given_up():
    shared, (seen,) = shared_by(1, 1, 16)
    with pytest.raises(TimeoutError, match=r"no weights came in 0\.1 s \(vllm_server_timeout\)"):
        seen.receive(0, 16, 0.1)
    timer = threading.Timer(0.1, shared.give_up)
    timer.start()
    start = time.monotonic()
    with pytest.raises(GivenUpError):
        seen.receive(0, 16, 30.0)
    assert time.monotonic() - start < 5
    with pytest.raises(ValueError, match="the body ends 6 bytes before a bucket does"):
        asyncio.run(anext(shared.fill(pieces(bytes(10)), [16])))


def test_shared_memory_leaves_no_file_and_no_descriptor():
    gc.collect()
    files, descriptors = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    shared = shared_by(2, 2, 2**20)
    assert set(os.listdir("/dev/shm")) == files
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 3  # one of each view's mapping
    del shared
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_push_that_takes_too_long_ends_though_each_bucket_comes_in_time():
    def receive(num_bytes):
        return lambda: (time.sleep(0.05), torch.empty(num_bytes, dtype=torch.uint8))[1]

    plan = plan_with({str(i): (4,) for i in range(100)}, 16)
    with pytest.raises(TimeoutError, match=r"longer than 0\.2 s \(vllm_server_timeout\)"):
        list(receive_buckets(plan, receive, 0.2))


@pytest.mark.parametrize(
    "wanted, own, workers, of_all_weights, of_an_adapter",
    [
        ("auto", None, [None], "http", "http"),
        ("auto", "gpu-0", ["gpu-0"], "ipc", "http"),  # NCCL refuses two ranks on one GPU
        ("auto", "gpu-0", ["gpu-1", "gpu-2"], "nccl", "nccl"),
        ("auto", "gpu-0", ["gpu-0", "gpu-1"], "http", "http"),
        ("auto", "gpu-0", ["gpu-0", "gpu-0"], "http", "http"),
        ("http", "gpu-0", ["gpu-1"], "http", "http"),
        ("http", "gpu-0", ["gpu-0"], "http", "http"),
        ("nccl", "gpu-0", ["gpu-0"], None, None),
        ("nccl", None, [None], None, None),
    ],
)
def test_the_backend_is_one_that_works_between_these_gpus(
    wanted, own, workers, of_all_weights, of_an_adapter
):
    for is_adapter, chosen in ((False, of_all_weights), (True, of_an_adapter)):
        if chosen is None:
            with pytest.raises(InferenceServerError, match=f"sync_backend='{wanted}'.*'auto'"):
                choose_backend(wanted, own, workers, is_adapter)
        else:
            assert choose_backend(wanted, own, workers, is_adapter) == chosen


@pytest.fixture
def sync_with():
    """A WeightSync to a stub server."""
    syncs = []

    def make(lora_dtype=None, **options):
        server = StubServer(lora_dtype=lora_dtype)
        syncs.append(WeightSync(server, **{"timeout_s": 30, **options}))
        return syncs[-1]

    yield make
    for sync in syncs:
        sync.close()


@pytest.mark.parametrize("kind", ["full", "merged", "adapter"])
def test_weights_travel_in_bodies_of_several_buckets(sync_with, kind):
    lora = kind != "full"
    model = with_trained_adapter(make_tiny_model()) if lora else make_tiny_model()
    lora_sync = "adapter" if kind == "adapter" else "merged"
    dtype = "float32" if kind == "adapter" else None
    sync = sync_with(lora_dtype=dtype, lora_sync=lora_sync, bucket_bytes=1000)
    server = sync.client
    for version in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        push_to(sync, model, version)
        assert len(server.plan.buckets) > 2
        sources, _ = what_to_send(model, lora_sync)
        wanted = {name: source.make() for name, source in sources.items()}
        assert server.policy_version == version
        assert server.weights.keys() == wanted.keys()
        assert all(torch.equal(server.weights[name], wanted[name]) for name in wanted)
        assert sync.plan.num_bytes == sum(tensor.nbytes for tensor in wanted.values())


class StubNccl:
    """A transport that carries nothing, and fails if it is told to, or once the server replies."""

    way = "NCCL"

    def __init__(self, rank, world_size, device, timeout_s, is_given_up, make_group=None):
        self.group = make_group
        self.ranks, self.error, self.is_abandoned = (rank, world_size), None, False
        self.waits_for_reply, self.has_reply = False, is_given_up

    def unique_id(self):
        return bytes(range(128))

    def wait_until_connected(self): ...

    def send(self, buffer):
        if self.waits_for_reply:
            assert self.has_reply()
            raise GivenUpError("the server has replied")
        if self.error is not None:
            raise self.error

    def abandon(self):
        self.is_abandoned = True


@pytest.fixture
def over_nccl(monkeypatch, sync_with):
    """A WeightSync that is connected over stand-ins for NCCL, and its model."""
    monkeypatch.setattr(weight_sync, "NcclTransport", StubNccl)
    monkeypatch.setattr(weight_sync, "choose_backend", lambda *_: "nccl")
    sync, model = sync_with(), make_tiny_model()
    sync.connect(model, *what_to_send(model, "merged"))
    return sync, model


def test_memory_that_cannot_be_shared_is_told_and_http_is_next(monkeypatch, sync_with, caplog):
    def refuses(memory):
        raise RuntimeError("not of a part of a GPU")

    monkeypatch.setattr(weight_sync, "gpu_uuid", lambda device: "gpu-0")
    monkeypatch.setattr("verifiers_rl.sync.nccl.share", refuses)
    sync, model = sync_with(), make_tiny_model()
    status = sync.client.status()
    sync.client.status = lambda: status | {"gpus": ["gpu-0"]}
    push_to(sync, model, 0)  # once: the pool makes another WeightSync for a server that was lost
    assert re.search(r"over CUDA IPC .*of a part of a GPU; HTTP is tried", caplog.text)
    assert sync._nccl is None and sync.client.policy_version == 0


@pytest.mark.parametrize("has_nccl", [False, True])
def test_what_fails_on_our_side_is_told_as_it_is_and_ends_the_request(
    monkeypatch, sync_with, over_nccl, has_nccl
):
    def out_of_memory():
        raise RuntimeError("out of memory while merging")

    sync, model = over_nccl[0] if has_nccl else sync_with(), make_tiny_model()
    transport = sync._nccl
    sources = {name: Source((1,), torch.float32, out_of_memory) for name in full_sources(model)}
    monkeypatch.setattr(weight_sync, "what_to_send", lambda *_: (sources, None))
    with pytest.raises(RuntimeError, match="while merging"):
        push_to(sync, model, 0)
    assert sync.connection is None and (transport is None or transport.is_abandoned)
    monkeypatch.undo()
    if has_nccl:  # connects again, though its last request was given up
        monkeypatch.setattr(weight_sync, "NcclTransport", StubNccl)
        monkeypatch.setattr(weight_sync, "choose_backend", lambda *_: "nccl")
        sync.connect(model, *what_to_send(model, "merged"))
        assert sync.connection is not None


OF_SERVER = InferenceServerError("500: RuntimeError: out of memory")


@pytest.mark.parametrize(
    "says, fails, message",
    [
        (OF_SERVER, True, "^500: RuntimeError: out of memory"),
        (OF_SERVER, False, "^500: RuntimeError: out of memory"),
        (ServerLostError("no answer"), True, "over NCCL .* NCCL failed: a worker left; no answer$"),
        (None, True, "over NCCL .* NCCL failed: a worker left$"),
    ],
)
def test_over_nccl_the_servers_error_says_why_and_ends_our_part(
    monkeypatch, over_nccl, says, fails, message
):
    sync, model = over_nccl
    transport = sync._nccl
    sync._hold.has_reply = lambda: False

    def answer(request, timeout_s=None, stays_open=False):
        assert timeout_s == weight_sync.LAST_WORD_S
        if says is not None:
            raise says

    monkeypatch.setattr(StubRequest, "answer", answer)
    monkeypatch.setattr(StubRequest, "has_reply", lambda request: True)
    transport.error = nccl.NcclError("NCCL failed: a worker left") if fails else None
    transport.waits_for_reply = not fails
    with pytest.raises(InferenceServerError, match=message) as caught:
        push_to(sync, model, 0)
    assert isinstance(caught.value, ServerLostError) == (says is not OF_SERVER)
    assert transport.is_abandoned


@pytest.mark.parametrize("kind", ["pissa", "olora", "orthogonal", "gaussian", False])
def test_merged_weights_are_the_models_own_where_a_kind_of_adapter_changes_the_base(kind):
    model = make_tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    lora = LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=kind)
    keeps = kind not in ("pissa", "olora")
    model = get_peft_model(model, lora)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    unchanged = torch.equal(layer.base_layer.weight, before[f"{Q}.weight"])
    assert unchanged == keeps  # what `check_adapter` tells them by
    if kind is not False:  # a random adapter
        merged = merged_sources(model)[f"{Q}.weight"].make()
        torch.testing.assert_close(merged, before[f"{Q}.weight"], rtol=0, atol=1e-4)


def test_merged_weights_travel_in_the_order_of_the_models_parameters():
    expected = list(full_sources(make_tiny_model()))
    for options in ({"target_modules": ["q_proj", "v_proj"]}, {"modules_to_save": ["norm"]}):
        model = with_trained_adapter(make_tiny_model(), **options)
        assert list(merged_sources(model)) == expected
        assert list(what_to_send(model, "merged")[0]) == expected


BOTH = ("adapter", "merged")


@pytest.mark.parametrize(
    "options, lora_sync, message",
    [
        ({"use_dora": True}, "merged", "no DoRA"),
        ({"rank_pattern": {"q_proj": 2}}, "adapter", "rank_pattern.*set lora_sync='merged'"),
        ({"bias": "all"}, "adapter", "bias='all'.*set lora_sync='merged'"),
        ({"rank_pattern": {"q_proj": 2}}, "merged", None),
        ({}, "adapter", None),
        ({"init_lora_weights": "pissa"}, "adapter", "='pissa': it changes.*'merged'"),
        *(({"init_lora_weights": "pissa_niter_4"}, kind, "set 'pissa'") for kind in BOTH),
        ({"init_lora_weights": "olora"}, "merged", None),
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


def plan_of(sources, adapter=None):
    return plan_with({name: source.shape for name, source in sources.items()}, adapter=adapter)


def test_a_model_that_fsdp_split_travels_under_the_names_of_its_own_class():
    config = GPTNeoXConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = GPTNeoXForCausalLM(config)
    sources, _ = what_to_send(model, "adapter")
    expected = {name: source.make().clone() for name, source in sources.items()}
    assert "embed_out.weight" in expected  # lm_head.weight in transformers
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        sources, _ = what_to_send(model, "adapter")
        made = {name: source.make() for name, source in sources.items()}
    finally:
        dist.destroy_process_group()
    assert made.keys() == expected.keys()
    for name in made:
        assert torch.equal(made[name], expected[name]), name


def test_a_push_begun_again_makes_its_parts_anew():
    model = make_tiny_moe()
    sources, _ = what_to_send(model, "adapter")
    names = [name for name in sources if ".experts." in name and "up_proj" in name]
    sources[names[0].replace("up_proj", "gate_proj")].make()  # and no further
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj.add_(1.0)
    made = {name: source.make() for name, source in sources.items()}
    expert = model.model.layers[0].mlp.experts.gate_up_proj[0]
    assert torch.equal(made["model.layers.0.mlp.experts.0.gate_proj.weight"], expert[:32])
    assert torch.equal(made["model.layers.0.mlp.experts.0.up_proj.weight"], expert[32:])


OF_PEFT = "ignore::RuntimeWarning"  # about patterns of its own


@pytest.mark.filterwarnings(OF_PEFT)
@pytest.mark.parametrize("lora_sync", ["adapter", "auto", "merged"])
@pytest.mark.parametrize("modules_to_save", [None, ["gate"]])
def test_an_adapter_of_experts_is_refused_before_the_run_where_it_is_not_sent_merged(
    monkeypatch, lora_sync, modules_to_save
):
    servers = stub_servers(monkeypatch, dtype="bfloat16")
    args = RLConfig(use_cpu=True, lora_sync=lora_sync, vllm_server_port=1)
    config = LoraConfig(r=2, target_modules=TARGETS, modules_to_save=modules_to_save)
    policy = get_peft_model(make_tiny_moe(), config)

    def connect():
        replaced = Replaced(orchestrator=StubSource())
        return make_source_and_sink(policy, None, args, None, replaced, None)[1]

    if lora_sync == "merged" or modules_to_save:
        assert connect().lora_sync == ("merged" if lora_sync == "merged" else "adapter")
        assert what_to_send(policy, connect().lora_sync)[1] is None  # no adapter
    else:
        with pytest.raises(ConfigError, match=r"target_parameters=.*; set lora_sync='merged'"):
            connect()
        assert bool(servers[0].num_asked) == (lora_sync == "auto")


def make_gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=261, n_embd=32, n_layer=1, n_head=4))


TIED, EXPERTS = partial(make_tiny_model, tie_word_embeddings=True), partial(make_of_kind, "qwen3")
OF_GPT_OSS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.filterwarnings(OF_PEFT)
@pytest.mark.parametrize(
    "make, options, adapted, rtol",
    [
        (make_tiny_model, {}, "q_proj up_proj", 1e-6),
        (TIED, {}, "q_proj", 1e-6),
        (TIED, {"use_rslora": True}, "q_proj", 1e-6),
        (
            make_tiny_model,
            {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 3}},
            "q_proj k_proj",
            1e-6,
        ),
        (make_tiny_model, {"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens", 1e-6),
        # Of an untied model only: peft unties a head that it trains a copy of.
        (make_tiny_model, {"modules_to_save": ["lm_head"]}, "lm_head", 1e-6),
        # Its layers keep their weights transposed.
        (
            make_gpt2,
            {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
            "c_proj",
            1e-6,
        ),
        (EXPERTS, {}, "experts.down_proj experts.gate_up_proj", 1e-5),
        (
            EXPERTS,
            {"target_modules": "all-linear", "use_rslora": True},  # the routers, too
            "experts.down_proj gate.weight",
            1e-5,
        ),
        (
            EXPERTS,
            {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]},
            "experts.down_proj",
            1e-5,
        ),
        # Its tensors of experts are transposed.
        (
            partial(make_of_kind, "gpt_oss"),
            {"target_modules": ["q_proj"], "target_parameters": OF_GPT_OSS},
            "experts.down_proj",
            1e-5,
        ),
    ],
)
def test_merged_weights_equal_those_peft_merges_and_leave_the_trainer_alone(
    make, options, adapted, rtol
):
    model = with_trained_adapter(make(), **options)
    before = {name: p.clone() for name, p in model.named_parameters()}
    merged = {name: source.make().clone() for name, source in merged_sources(model).items()}
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    expected = dict(model.merge_and_unload().named_parameters())
    plain = dict(make().named_parameters())
    assert merged.keys() == expected.keys() == plain.keys()
    for name in expected:
        torch.testing.assert_close(
            merged[name], expected[name], rtol=rtol, atol=rtol / 10, msg=name
        )
    changed = " ".join(name for name in plain if not torch.allclose(merged[name], plain[name]))
    assert all(part in changed for part in adapted.split())
    assert ("gate.weight" in changed) == ("gate.weight" in adapted)


EMBEDDING = "model.embed_tokens.weight"
LAYER = f"base_model.model.{Q}.lora_A.weight"
OTHER = "base_model.model.x.lora_A.weight"


@pytest.mark.parametrize(
    "kind, change, dtype, message",
    [
        ("full", {"x": (1,)}, "float32", "has no tensor 'x'"),
        ("full", {"lm_head.weight": None}, "float32", r"no weights for \['lm_head.weight'\]"),
        (
            "full",
            {EMBEDDING: (10**9, 10**9)},
            "float32",
            r"\[1000000000, 1000000000\].*\[261, 32\]",
        ),
        ("full", {}, "bfloat16", "have dtype 'bfloat16', the server's 'float32'"),
        ("adapter", {LAYER: None}, "float32", rf"no weights for \['base_model.model.{Q}.lora_A"),
        ("adapter", {OTHER: (4, 4)}, "float32", f"'{OTHER}' belongs to no linear layer"),
        ("adapter", {LAYER: (5, 32)}, "float32", "served model's has"),
    ],
)
def test_a_plan_for_another_model_is_refused_before_memory_is_allocated(
    served, kind, change, dtype, message
):
    sources, adapter = full_sources(make_tiny_model()), None
    if kind == "adapter":
        sources, adapter = adapter_sources(with_trained_adapter(make_tiny_model()))
    wanted = {name: source.shape for name, source in sources.items()} | change
    wanted = {name: shape for name, shape in wanted.items() if shape is not None}
    with pytest.raises(ValueError, match=message):
        check_plan(plan_with(wanted, dtype=dtype, adapter=adapter), served, "float32")


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
    "rank, served_rank, message",
    [
        (8, None, "--enable-lora --max-lora-rank 8"),
        (32, 16, "--max-lora-rank 32"),
        (None, 16, "start vf-vllm without --enable-lora"),
    ],
)
def test_a_server_names_the_flags_that_a_plan_needs(rank, served_rank, message):
    lora = served_rank and SimpleNamespace(max_lora_rank=served_rank)
    model = SimpleNamespace(hf_config=make_tiny_model().config)
    plan = plan_with({"a": (1,)}, adapter=rank and ADAPTER | {"r": rank})
    with pytest.raises(ValueError, match=message):
        fit_to_server(plan, SimpleNamespace(lora_config=lora, model_config=model))


def test_a_server_of_a_quantised_checkpoint_says_what_to_do_about_full_weights():
    config = make_tiny_model().config
    config.quantization_config = {"quant_method": "mxfp4"}
    served = SimpleNamespace(lora_config=None, model_config=SimpleNamespace(hf_config=config))
    with pytest.raises(ValueError, match=r"\(mxfp4\).*lora_sync='adapter'"):
        fit_to_server(plan_with({"a": (1,)}), served)


# --- Models split over ranks --------------------------------------------------------------------

SPLIT = """
import gc, os, sys, weakref, torch, torch.distributed as dist
os.environ["DS_ACCELERATOR"] = "cpu"
from tests.helpers import make_tiny_model, make_tiny_moe, packed_weights
from tests.test_weight_sync import plan_of, with_trained_adapter
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
        ("fsdp2", ["full", "merged", "experts"]),  # the ranks take long to start
        ("zero3", ["full"]),
        ("zero3", ["merged"]),
        ("zero3", ["experts"]),
    ],
    ids=["fsdp2", "zero3-full", "zero3-merged", "zero3-experts"],
)
def test_a_split_model_is_gathered_one_tensor_at_a_time(kind, models, tmp_path):
    if kind == "zero3":
        pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
    said = run_script(tmp_path, SPLIT, kind, *models)
    for what in models:
        assert f"gathered {what}" in said
