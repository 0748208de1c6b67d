"""The parts of vf-vllm that need no running engine."""

import asyncio
import base64
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from tests.conftest import free_port
from verifiers_rl.inference.client import (
    PUSH_HEADER,
    TOKEN_VARIABLE,
    InferenceClient,
    InferenceServerError,
    RequestRefusedError,
    ServerLostError,
    find_token,
    generation_key,
    save_token,
)
from verifiers_rl.inference.generation import current_request
from verifiers_rl.inference.port import (
    RESERVED_VARIABLE,
    PortError,
    port_error,
    reserve_free_port,
    reserve_port,
)
from verifiers_rl.inference.server import (
    VERSIONS_HEADER,
    BadRequest,
    Holder,
    WeightSyncRoutes,
    WorkerError,
    call_engines,
    error_of_processes,
    flag_error,
    generation_keys,
    keep_alive,
    left,
    paused,
    require,
)
from verifiers_rl.sync.shared_buffers import shared_with_workers


def an_app():
    """What vLLM's HTTP server keeps for its routes."""
    model = SimpleNamespace(get_vocab_size=lambda: 10, max_model_len=5)
    args = SimpleNamespace(allowed_origins=[], generation_keys=[])
    engine = SimpleNamespace(model_config=model)
    return SimpleNamespace(state=SimpleNamespace(engine_client=engine, args=args))


def generation(path, body, chunks=1, **headers):
    """A request through the middleware, to a vLLM that replies with two tokens of policies 3 and 4.

    Returns:
        What vLLM reads of it, and the headers of the reply.
    """
    data = json.dumps(body).encode()
    size = -(-len(data) // chunks)
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    messages = [
        {"type": "http.request", "body": part, "more_body": i < len(parts) - 1}
        for i, part in enumerate(parts)
    ]
    read, replied = [], []

    async def receive():
        return messages.pop(0)

    async def send(message):
        replied.append(message)

    async def vllm(scope, receive, send):
        assert routes.num_running == 1
        assert scope["path"] in ("/v1/completions", "/v1/chat/completions")
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        assert int(dict(scope["headers"])[b"content-length"]) == len(body)
        read.append(json.loads(body))
        request = current_request.get()
        request.num_completions += read[0].get("n", 1)
        request.begin()
        spans = [SimpleNamespace(start=0, version="3"), SimpleNamespace(start=1, version="4")]
        request.end(SimpleNamespace(token_ids=[7, 8], weight_versions=spans))
        await asyncio.sleep(read[0].get("takes_s", 0))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    routes = WeightSyncRoutes(vllm)

    async def run():
        headers_ = [(b"content-length", str(len(data)).encode())]
        headers_ += [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        scope = {"type": "http", "path": path, "headers": headers_}
        scope |= {"method": "POST", "app": an_app()}
        await routes(scope, receive, send)
        assert routes.num_running == 0 and current_request.get() is None

    asyncio.run(run())
    return (read or [None])[0], replied[0]["status"], dict(replied[0]["headers"])


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_reply_says_which_policies_sampled_it_and_how_long_it_was_queued(chunks):
    read, status, headers = generation("/v1/completions", {"prompt": "a"}, chunks)
    assert read == {"prompt": "a"} and status == 200
    assert headers[VERSIONS_HEADER.encode()] == b"0:3,1:4"
    assert float(headers[b"x-queued-s"]) >= 0
    _, _, headers = generation("/v1/completions", {"prompt": "a", "n": 2}, chunks)
    assert VERSIONS_HEADER.encode() not in headers  # which of them?


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_request_with_tokens_becomes_a_chat_without_them(chunks):
    body = {"tokens": [1, 2], "messages": [], "max_tokens": 2}
    read, status, _ = generation("/v1/chat/completions/tokens", body, chunks)
    assert read == {"messages": [], "max_tokens": 2, "truncate_prompt_tokens": 1}
    read, status, _ = generation("/v1/chat/completions/tokens", body | {"tokens": [10]}, chunks)
    assert read is None and status == 400


def test_a_reply_that_takes_longer_than_its_limit_is_ended():
    body = {"prompt": "a", "takes_s": 5}
    _, status, headers = generation("/v1/completions", body, x_reply_timeout_s="0.01")
    assert status == 504 and b"x-num-tokens" in headers
    body["takes_s"] = 0
    assert generation("/v1/completions", body, x_reply_timeout_s="5")[1] == 200
    assert generation("/v1/completions", body, x_reply_timeout_s="soon")[1] == 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "port=None: must be of type int"),
        ({"port": "80", "timeout_s": 1}, "port='80': must be of type int"),
        ({"port": True, "timeout_s": 1}, "port=True"),
        ({"port": 80, "timeout_s": "1"}, "timeout_s='1': must be of type float"),
        ([], "port=None"),
    ],
)
def test_a_body_without_what_is_needed_is_refused(body, message):
    with pytest.raises(BadRequest, match=message):
        require(body, port=int, timeout_s=float)


def test_whole_seconds_are_seconds():
    require({"port": 80, "timeout_s": 1}, port=int, timeout_s=float)


def test_a_request_that_arrives_in_an_update_waits_for_its_end():
    async def run():
        passed = []

        async def vllm(scope, receive, send):
            passed.append(routes.num_running)

        routes = WeightSyncRoutes(vllm)
        scope = {"type": "http", "path": "/v1/completions", "headers": []}
        scope |= {"method": "POST", "app": an_app()}
        routes.open.clear()  # an update begins
        request = asyncio.create_task(routes(scope, None, None))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not passed and not routes.num_running
        routes.open.set()
        await asyncio.wait_for(request, 5)
        assert passed == [1]

    asyncio.run(run())


# Importing vLLM takes many seconds, and vLLM warns meanwhile. A process of its own does it once;
# each script runs in a fork of that.
WITH_VLLM = """
import json, os, sys, traceback
import verifiers_rl  # before vLLM, for torchvision
import torch, vllm.plugins

for script, variables, *outputs in json.load(sys.stdin):
    if (child := os.fork()) == 0:
        for descriptor, path in enumerate(outputs, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
        os.environ.update(variables)
        status = 1
        try:
            exec(script, {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""
YIELD = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.device_communicators import shm_broadcast
print(shm_broadcast.sched_yield.__module__)
"""
REPACK = """
import torch
from verifiers_rl.inference.reloading import repack_for_cpu

model = torch.nn.Module()
repack_for_cpu(model)
print("nothing to pack")
model.experts = torch.nn.Module()
model.experts.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 2))
repack_for_cpu(model)
"""

RELOAD = """
import torch, vllm.distributed
from types import SimpleNamespace
from vllm.model_executor.model_loader import reload
from verifiers_rl.inference.reloading import GptOssReload, lost_in_reload

class GptOssForCausalLM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.up = torch.nn.Linear(2, 2, bias=False)
        self.layer.attn = torch.nn.Module()
        self.layer.attn.sinks = torch.nn.Parameter(torch.zeros(2))

    def load_weights(self, weights):
        for name, weight in weights:
            parameter = self.get_parameter(name)
            if name.endswith("sinks"):
                parameter.data.copy_(weight)
            else:
                parameter.weight_loader(parameter, weight)
            yield name

model = GptOssForCausalLM()
reload.record_metadata_for_reloading(model)
sinks = torch.tensor([1.0, 2.0, 3.0, 4.0])
for weights in ([("layer.attn.sinks", sinks[:2])], [("layer.up.weight", torch.ones(2, 2))]):
    reload.initialize_layerwise_reload(model)
    print(lost_in_reload(model, set(model.load_weights(weights))))
    reload.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))
print(model.layer.attn.sinks.tolist(), model.layer.up.weight.tolist())

vllm.distributed.get_tensor_model_parallel_rank = lambda: 1
gpt_oss = GptOssReload(model)
experts = ("layer.mlp.experts.down_proj_bias", torch.tensor([[5.0], [6.0]]))
for name, tensor in gpt_oss.prepare([experts, ("layer.self_attn.sinks", sinks)]):
    print(name, tensor.tolist())
gpt_oss.finish()
print(model.layer.attn.sinks.tolist())
print([name for name, _ in GptOssReload(torch.nn.Linear(1, 1)).prepare([experts])])
"""


@pytest.fixture(scope="module")
def with_vllm(tmp_path_factory):
    """How the scripts above ended, each with its status, stdout and stderr."""
    folder = tmp_path_factory.mktemp("with_vllm")
    variables = {"yield, ours": {"VERIFIERS_RL_SERVER_PID": "1"}, "yield, not ours": {}}
    variables |= {"repack": {}, "reload": {}}
    scripts = {"repack": REPACK, "reload": RELOAD}
    cases = [
        (scripts.get(name, YIELD), given, f"{folder}/{name} 1", f"{folder}/{name} 2")
        for name, given in variables.items()
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITH_VLLM],
        input=json.dumps(cases),
        env={k: v for k, v in os.environ.items() if k != "VERIFIERS_RL_SERVER_PID"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return {
        name: SimpleNamespace(
            returncode=int(status),
            stdout=(folder / f"{name} 1").read_text(),
            stderr=(folder / f"{name} 2").read_text(),
        )
        for name, status in zip(variables, done.stdout.split(), strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("is_ours", [True, False])
def test_the_processes_of_a_vf_vllm_on_a_cpu_sleep_where_vllm_spins(with_vllm, is_ours):
    done = with_vllm["yield, ours" if is_ours else "yield, not ours"]
    assert done.returncode == 0, done.stderr
    module = done.stdout.splitlines()[-1]
    assert (module == "verifiers_rl.inference.plugin") == is_ours


class TwoEngines:
    """What stands behind an `AsyncLLM` with two data-parallel engines, and what they answer."""

    core_engines = (0, 1)

    def __init__(self, **answers):
        self.answers = {"collective_rpc": [[None], [None]], "reset_prefix_cache": [True, True]}
        self.answers |= answers
        self.labels = [[], []]

    async def _call_utility_async(self, method, *args, engine):
        if method == "set_weight_version":
            return self.labels[engine].append(args[0])
        return self.answers[method][engine]


def config_of(num_engines=2, is_moe=False):
    parallel = SimpleNamespace(data_parallel_size=num_engines, world_size_across_dp=num_engines)
    return SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(is_moe=is_moe), lora_config=None
    )


def shared_by(num_workers):
    with shared_with_workers(num_workers, 0, 0) as (shared, _):
        return shared


def a_push(engine, **fields):
    """The request of a push over NCCL, whose trainer stays."""

    async def stay():
        await asyncio.Event().wait()

    return SimpleNamespace(
        method="POST",
        url=SimpleNamespace(path="/weight_sync/receive"),
        headers={
            "authorization": f"Bearer {os.environ[TOKEN_VARIABLE]}",
            PUSH_HEADER.lower(): json.dumps(PUSH | fields),
            PUSH_HEADER: json.dumps(PUSH | fields),
            "content-length": "0",
        },
        app=SimpleNamespace(state=SimpleNamespace(engine_client=engine)),
        receive=stay,
        stream=lambda: None,
    )


def engine_after_an_update(in_flight="recompute", is_running=True, fails=None, **answers):
    """What the engines label their tokens with in an update of this kind."""
    routes = WeightSyncRoutes(None)
    routes.connection = "c"
    busy = SimpleNamespace(has_unfinished_requests=lambda: is_running)

    async def nothing(**options): ...

    engine = SimpleNamespace(
        engine_core=TwoEngines(**answers), output_processor=busy, errored=False, cache_salt=None,
        vllm_config=config_of(), pause_generation=nothing, resume_generation=nothing,
    )  # fmt: skip
    routes.shared = shared_by(2)
    request = a_push(engine, in_flight=in_flight, timeout_s=1.0)
    with pytest.raises(fails[0], match=fails[1]) if fails else nullcontext():
        assert asyncio.run(routes.receive(engine, request)) == (200, {"policy_version": 3})
    assert routes.policy_version == (None if fails else 3) and routes.open.is_set()
    return engine


def test_all_engines_label_tokens_of_mixed_weights_with_no_policy():
    engine = engine_after_an_update()
    assert engine.engine_core.labels == [["none", "3"]] * 2
    salt = engine.cache_salt
    assert salt and engine_after_an_update().cache_salt not in (None, salt)
    one_failed = [[None], ["ValueError: too large"]]
    engine = engine_after_an_update(
        fails=(WorkerError, "ValueError: too large"), collective_rpc=one_failed
    )
    assert engine.engine_core.labels == [["none"]] * 2 and engine.cache_salt


def test_the_second_engine_is_asked_too_whether_it_drops_old_keys_and_values():
    of_two = {"reset_prefix_cache": [True, False]}
    engine_after_an_update("keep", **of_two)  # it is not asked: requests keep theirs
    engine_after_an_update("recompute", is_running=False, **of_two)
    engine_after_an_update(fails=(RuntimeError, "could not drop the keys and values"), **of_two)


def test_of_several_workers_errors_the_one_that_began_it_is_told():
    left, cause = "GivenUpError: the trainer left", "RuntimeError: out of memory"
    for errors in ([left, cause], [cause, left]):
        engine_after_an_update(fails=(WorkerError, cause), collective_rpc=[errors, [left]])
    engine_after_an_update(fails=(WorkerError, left), collective_rpc=[[None, left], [None]])


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("is_moe", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_engines_in_lockstep_are_paused_though_no_request_runs(
    monkeypatch, num_engines, is_moe, fails
):
    calls = []

    class Engine:
        errored = False
        output_processor = SimpleNamespace(has_unfinished_requests=lambda: False)
        vllm_config = config_of(num_engines, is_moe)

        @property
        def engine_core(self):
            return self

        core_engines = tuple(range(num_engines))

        async def _call_utility_async(self, method, *args, engine):
            calls.append(args[0])
            told = "ValueError: broken" if fails else None
            return [told] if method == "collective_rpc" else True

        async def pause_generation(self, mode, clear_cache):
            assert (mode, clear_cache) == ("keep", False)
            calls.append("pause")

        async def resume_generation(self):
            calls.append("resume")

    async def updates(routes, engine):
        fields = {"backend": "http", "timeout_s": 1.0, "trainer": "first"}
        plan = {"kind": "full", "tensors": [["x", "float32", [1]]], "bucket_bytes": 8}
        request = a_push(engine)
        with pytest.raises(WorkerError) if fails else nullcontext():
            await routes.connect(engine, request, fields | {"plan": {**plan, "adapter": {}}})
        routes.connection, routes.sizes, routes.shared = "c", [], shared_by(num_engines)
        with pytest.raises(WorkerError) if fails else nullcontext():
            await routes.receive(engine, request)

    monkeypatch.setattr("verifiers_rl.inference.server.check_plan", lambda *_: None)
    monkeypatch.setattr("verifiers_rl.inference.server.as_served", lambda plan, _: plan)
    Engine.vllm_config.model_config.dtype = "torch.float32"
    Engine.vllm_config.model_config.hf_config = None
    routes = WeightSyncRoutes(None)
    routes.shapes = {"full": {}}
    routes.holder = Holder("first", "n")
    asyncio.run(updates(routes, Engine()))
    in_lockstep = is_moe and num_engines == 2
    before, after = (["pause"], ["resume"]) if in_lockstep else ([], [])
    told = [["none", "weight_sync_connect"], ["none", "weight_sync_receive", *["3"] * (not fails)]]
    connect, receive = ([name for name in names for _ in range(num_engines)] for names in told)
    # No step is taken while it connects; a label of no policy may come before.
    connect = [*connect[:num_engines], *before, *connect[num_engines:], *after]
    assert calls == [*connect, *before, *receive, *after]
    assert routes.open.is_set()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_layers_whose_adapter_vllm_would_drop_are_named():
    from verifiers_rl.inference.reloading import layers_without_adapter

    manager = SimpleNamespace(
        model=None,
        modules={"model.layers.0.mlp.gate_up_proj": None, "model.layers.0.mlp.down_proj": None},
        packed_modules={
            "model.layers.0.mlp.gate_up_proj": [
                "model.layers.0.mlp.gate_proj",
                "model.layers.0.mlp.up_proj",
            ]
        },
    )
    names = [
        f"base_model.model.model.layers.0.mlp.{layer}.lora_{half}.weight"
        for layer in ("gate_proj", "down_proj", "router")
        for half in "AB"
    ]
    assert layers_without_adapter(manager, names) == ["model.layers.0.mlp.router"]
    assert layers_without_adapter(manager, names[:4]) == []


def test_no_websocket_reaches_vllm():
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(WeightSyncRoutes(None)({"type": "websocket", "path": "/v1/realtime"}, None, send))
    assert sent == [{"type": "websocket.close"}]


def test_a_control_request_whose_body_does_not_arrive_keeps_nobody_out(monkeypatch):
    monkeypatch.setattr("verifiers_rl.inference.server.BODY_DEADLINE_S", 0.05)
    routes = WeightSyncRoutes(None)

    async def body():
        assert not routes.lock.locked()
        await asyncio.Event().wait()

    request = SimpleNamespace(
        headers={"authorization": f"Bearer {os.environ[TOKEN_VARIABLE]}"},
        method="POST",
        url=SimpleNamespace(path="/weight_sync/connect"),
        app=SimpleNamespace(state=SimpleNamespace(engine_client=None)),
        json=body,
    )
    error = {"error": "the body did not arrive within 0.05 s"}
    assert asyncio.run(routes.answer(request)) == (400, error)


def test_an_engine_that_does_not_answer_is_given_up():
    class Engine:
        errored = False
        core_engines = (0,)

        @property
        def engine_core(self):
            return self

        async def _call_utility_async(self, *args, engine):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match=r"did not answer reset_prefix_cache within 0\.05 s"):
        asyncio.run(call_engines(Engine(), 0.05, "reset_prefix_cache"))


def test_an_engine_whose_pause_comes_too_late_goes_on_afterwards():
    is_paused = False

    class Engine:
        errored = False

        async def pause_generation(self, mode, clear_cache):
            nonlocal is_paused
            await asyncio.sleep(0.05)  # a step that takes long
            is_paused = True

        async def resume_generation(self):
            nonlocal is_paused
            assert is_paused, "vLLM: resume_scheduler called while pause is still in flight"
            is_paused = False

    async def update():
        async with paused(Engine(), timeout_s=0.01):
            pytest.fail("updated while it took a step")

    with pytest.raises(TimeoutError):
        asyncio.run(update())
    assert not is_paused


@pytest.mark.parametrize("answers", [True, False])
def test_an_engine_that_dies_while_it_is_to_go_on_holds_nobody_up(answers):
    class Engine:
        errored = False

        async def pause_generation(self, mode, clear_cache):
            pass

        async def resume_generation(self):
            await asyncio.sleep(0.2)
            self.errored = True  # vLLM learns of it
            if answers:
                raise RuntimeError("EngineDeadError")
            await asyncio.Event().wait()

    async def update():
        async with paused(Engine(), timeout_s=1.0):
            raise RuntimeError("a worker was killed")

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="a worker was killed"):
        asyncio.run(update())
    assert time.monotonic() - start < 5


def test_engines_that_live_and_do_not_go_on_are_an_error(monkeypatch):
    class Engine:
        errored = False

        async def pause_generation(self, mode, clear_cache):
            pass

        async def resume_generation(self):
            await asyncio.Event().wait()

    async def update():
        async with paused(Engine(), timeout_s=1.0):
            pass

    monkeypatch.setattr("verifiers_rl.inference.server.RESUME_DEADLINE_S", 0.2)
    with pytest.raises(TimeoutError, match=r"did not go on within 0\.2 s"):
        asyncio.run(update())


@pytest.mark.slow
def test_experts_that_cannot_be_packed_anew_are_an_error_and_not_wrong_weights(with_vllm):
    done = with_vllm["repack"]
    assert done.returncode == 1 and "nothing to pack" in done.stdout
    assert "RuntimeError: on a CPU this vLLM cannot take new weights of a mixture" in done.stderr


@pytest.mark.slow
def test_what_vllms_reload_loses_is_named_and_gpt_oss_loses_nothing(with_vllm):
    done = with_vllm["reload"]
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("WARNING")]  # vLLM's
    assert said[-7:] == [
        "['layer.attn.sinks']",
        "[]",
        "[0.0, 0.0] [[1.0, 1.0], [1.0, 1.0]]",
        "layer.mlp.experts.0.down_proj_bias [5.0]",
        "layer.mlp.experts.1.down_proj_bias [6.0]",
        "[3.0, 4.0]",
        "['layer.mlp.experts.down_proj_bias']",
    ]


def test_a_token_left_on_this_machine_is_shown_to_no_other(monkeypatch, tmp_path):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = save_token(8000, "secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find_token("127.0.0.1", 8000) == find_token("localhost", 8000) == "secret"
    assert find_token("127.0.0.1", 8001) == ""
    assert find_token("gpu-box", 8000) == ""
    monkeypatch.setenv(TOKEN_VARIABLE, "for both")
    assert find_token("gpu-box", 8000) == "for both"


class DyingEngine:
    """An `AsyncLLM` whose update fails, or hangs, shortly before its engine is known to be dead."""

    def __init__(self, fails, dies):
        self.engine_core = self
        self.core_engines = (0,)
        self.output_processor = self
        self.request_states = {}
        self.fails, self.dies, self.errored = fails, dies, False

    def has_unfinished_requests(self):
        return True

    async def pause_generation(self, **options):
        pass

    async def resume_generation(self):
        if self.errored:
            raise RuntimeError("EngineDeadError")

    def die(self):
        self.errored = self.dies

    async def _call_utility_async(self, *args, engine):
        asyncio.get_running_loop().call_later(0.2, self.die)
        if self.fails:
            raise RuntimeError("cancelled")
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("fails", "dies", "status", "error"),
    [
        (True, True, 503, "RuntimeError: cancelled"),
        (False, True, 503, "RuntimeError: vLLM's engine died; see the server's log"),
        (True, False, 500, "RuntimeError: cancelled"),
    ],
)
def test_an_engine_that_dies_in_an_update_is_a_lost_server(monkeypatch, fails, dies, status, error):
    monkeypatch.setattr("verifiers_rl.inference.server.DYING_S", 0.5)  # it dies after 0.2 s
    routes = WeightSyncRoutes(None)
    routes.connection, routes.shared = "c", shared_by(1)
    request = a_push(DyingEngine(fails, dies), timeout_s=60.0)
    answering = asyncio.wait_for(routes.answer(request), 20)
    assert asyncio.run(answering) == (status, {"error": error})
    assert routes.open.is_set() and routes.policy_version is None


@contextmanager
def control_server(routes=WeightSyncRoutes, engine=None, **args):
    """The control routes behind uvicorn, as vLLM starts it; its InferenceClient."""
    app = Starlette()
    app.add_middleware(routes)
    config = uvicorn.Config(app, log_level="warning", lifespan="off")
    app.state.server = server = uvicorn.Server(config)
    state = an_app().state
    app.state.engine_client = engine or state.engine_client
    app.state.args = SimpleNamespace(**{**vars(state.args), **args})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        keep_alive(listener)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        client = InferenceClient("127.0.0.1", listener.getsockname()[1])
        try:
            yield client, server
        finally:
            server.should_exit = True
            thread.join(10)
            client.close()
            assert not thread.is_alive(), "a trainer that holds the server keeps it from ending"


# --- Pushes in the body of a request --------------------------------------------------------------

BUCKET = 2**19
NUM_BYTES = 4 * BUCKET
BODY = random.randbytes(NUM_BYTES)
PUSH = {"connection": "c", "policy_version": 3, "in_flight": "keep", "timeout_s": 5.0}


@contextmanager
def server_of_pushes(num_buffers=2, work=None):
    """A server with a trainer's connection, for pushes of four buckets. Its client, and a function
    that gives its policy version and what its two workers have got.

    Args:
        work: in place of a worker that copies all buckets: takes the worker's number and memory.
    """
    made, got = [], {}

    def copy_all(worker, shared):
        copies = [shared.receive(worker, BUCKET, 5.0) for _ in range(4)]
        got[worker] = b"".join(bytes(copy.numpy()) for copy in copies)

    def run(worker):
        try:
            (work or copy_all)(worker, made[0].shared)
        except RuntimeError as error:
            made[0].shared.give_up()
            return f"{type(error).__name__}: {error}"

    class Engine:
        errored = False
        output_processor = SimpleNamespace(has_unfinished_requests=lambda: False)
        vllm_config = config_of(1)
        core_engines = (0,)
        engine_core = property(lambda self: self)

        async def _call_utility_async(self, method, *args, engine):
            if method != "collective_rpc":
                return True
            return await asyncio.gather(*(asyncio.to_thread(run, worker) for worker in range(2)))

    def connected(app):
        made.append(WeightSyncRoutes(app))
        routes = made[0]
        routes.connection, routes.policy_version, routes.sizes = "c", 2, [BUCKET] * 4
        with shared_with_workers(2, num_buffers, BUCKET) as (routes.shared, _):
            return routes

    with control_server(connected, Engine()) as (client, _):
        answer_to(client, "GET", "/")  # makes the routes
        yield client, lambda: (made[0].policy_version, got)


def pushed(client, body=BODY, num_bytes=None, timeout_s=5.0, **change):
    pieces = (memoryview(body)[i : i + 2**16] for i in range(0, len(body), 2**16))
    return client.receive_weights(PUSH | change, num_bytes or len(body), pieces, timeout_s)


@pytest.mark.parametrize("num_buffers", [2, 4])
def test_a_push_in_the_body_of_a_request_reaches_all_workers_and_has_its_version(num_buffers):
    with server_of_pushes(num_buffers) as (client, state):
        for body in (BODY, BODY[::-1]):
            assert pushed(client, body).answer() == {"policy_version": 3}
            assert state() == (3, {0: body, 1: body})


@pytest.mark.parametrize(
    ("change", "body", "message"),
    [
        ({}, BODY + b"1", "400: a body of 2097153 bytes: this connection's plan has 2097152"),
        ({}, BODY[:-1], "400: a body of 2097151 bytes"),
        ({"connection": "d"}, BODY, "400: another trainer has connected"),
        ({"connection": 5}, BODY, "400: connection=5: must be of type str"),
        ({"in_flight": "drop"}, BODY, "400: in_flight='drop'"),
    ],
)
def test_a_push_that_is_not_the_announced_one_changes_nothing(change, body, message):
    with server_of_pushes() as (client, state):
        with pytest.raises(RequestRefusedError, match=message):
            pushed(client, body, **change).answer()
        assert state() == (2, {})
        assert pushed(client).answer() == {"policy_version": 3}


def test_a_push_in_a_body_needs_the_token(monkeypatch):
    with server_of_pushes() as (client, state):
        monkeypatch.setenv(TOKEN_VARIABLE, "wrong")
        with pytest.raises(InferenceServerError, match="401: wrong or missing token"):
            pushed(client).answer()
        assert state() == (2, {})


def begin_push(client, timeout_s, headers=f"Content-Length: {NUM_BYTES}\r\n", num_bytes=256):
    """Send the head of a push and the first bytes of its body."""
    connection = socket.create_connection(("127.0.0.1", client.port), timeout=10)
    connection.sendall(
        f"POST /weight_sync/receive HTTP/1.1\r\nHost: h\r\n{headers}"
        f"Authorization: Bearer {os.environ[TOKEN_VARIABLE]}\r\n"
        f"X-Weight-Sync: {json.dumps(PUSH | {'timeout_s': timeout_s})}\r\n\r\n".encode()
    )
    connection.sendall(b"100\r\n" + BODY[:num_bytes] + b"\r\n")
    return connection


@pytest.mark.parametrize("num_bytes", [256, 3 * BUCKET])
def test_a_trainer_that_hangs_in_a_push_is_told_at_the_deadline(num_bytes):
    """Before the workers have anything, the weights stay as they were; later, they are torn."""
    with server_of_pushes() as (client, state):
        with begin_push(client, 0.5, num_bytes=num_bytes) as hanging:
            reply = hanging.recv(2**16)
            assert b"400 Bad Request" in reply
            assert b"took longer than 0.5 s (vllm_server_timeout)" in reply
        assert state() == (2 if num_bytes < BUCKET else None, {})
        with pytest.raises(ServerLostError, match="409: no trainer is connected"):
            pushed(client).answer()  # what is left of the other push is not taken for this one


@pytest.mark.parametrize("num_bytes", [256, 3 * BUCKET])
def test_a_trainer_that_leaves_in_a_push_leaves_no_worker_waiting(num_bytes):
    with server_of_pushes() as (client, state):
        start = time.monotonic()
        begin_push(client, 60.0, num_bytes=num_bytes).close()
        with pytest.raises(ServerLostError, match="409: no trainer is connected"):
            pushed(client).answer()  # waits for the end of the other push
        assert time.monotonic() - start < 5
        assert state() == (2 if num_bytes < BUCKET else None, {})


def test_a_worker_that_fails_in_a_push_ends_it_for_all_and_says_why():
    def fail(worker, shared):
        shared.receive(worker, BUCKET, 5.0)
        if worker:
            raise RuntimeError("out of memory")
        shared.receive(worker, BUCKET, 5.0), shared.receive(worker, BUCKET, 5.0)

    with server_of_pushes(work=fail) as (client, state):
        start = time.monotonic()
        with pytest.raises(InferenceServerError, match="500: RuntimeError: out of memory"):
            pushed(client, num_bytes=NUM_BYTES).answer()
        assert time.monotonic() - start < 4
        assert state() == (None, {})


def test_a_push_that_is_given_up_by_another_thread_ends_at_once():
    is_half, is_over = threading.Event(), threading.Event()

    def half():
        yield memoryview(BODY)[: NUM_BYTES // 2]
        is_half.set()
        is_over.wait(20)
        yield memoryview(BODY)[NUM_BYTES // 2 :]

    with server_of_pushes() as (client, _):
        request, errors = client.receive_weights(PUSH, NUM_BYTES, half(), 20.0), []

        def answer():
            try:
                request.answer()
            except ServerLostError as error:
                errors.append(error)

        thread = threading.Thread(target=answer)
        thread.start()
        assert is_half.wait(10)
        request.give_up()
        is_over.set()
        thread.join(10)
        assert len(errors) == 1
        with pytest.raises(ServerLostError):
            request.answer()  # also one that begins later
        with pytest.raises(ServerLostError, match="409"):
            pushed(client).answer()


def test_a_body_without_an_announced_length_is_refused():
    with server_of_pushes() as (client, state):
        with begin_push(client, 5.0, "Transfer-Encoding: chunked\r\n") as connection:
            assert b"a body of None bytes" in connection.recv(2**16)
        assert state() == (2, {})


def test_a_server_that_takes_no_bytes_of_a_push_is_given_up_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listener:  # and never reads
        client = InferenceClient("127.0.0.1", listener.getsockname()[1])
        body = bytes(2**26)  # more than sockets hold
        start = time.monotonic()
        with pytest.raises(ServerLostError, match="/weight_sync/receive"):
            pushed(client, body, timeout_s=0.3).answer()
        assert time.monotonic() - start < 10
        client.close()


ADAPTER = "base_model.model.model.q_proj.lora_"


def connected(monkeypatch, kind="adapter", rows=2, **change):
    """Ask a server for a connection; return its routes and what its workers were told."""
    told = []

    class Engine:
        errored = False
        vllm_config = config_of(1)
        core_engines = (0,)
        engine_core = property(lambda self: self)

        async def _call_utility_async(self, method, *args, engine):
            if method == "collective_rpc":
                told.append(args[2])
            return [None]

    monkeypatch.setattr("verifiers_rl.inference.server.as_served", lambda plan, _: plan)
    engine, routes = Engine(), WeightSyncRoutes(None)
    engine.vllm_config.model_config.hf_config = None
    engine.vllm_config.model_config.dtype = "torch.float32"
    if kind == "adapter":
        engine.vllm_config.lora_config = SimpleNamespace(
            max_lora_rank=2, lora_dtype="torch.float32"
        )
    routes.shapes = {"adapter": {"model.q_proj.weight": (5, 3)}, "full": {"x": (1,), "y": (2,)}}
    routes.holder = Holder("first", "n")
    tensors = [[f"{ADAPTER}A.weight", "float32", [rows, 3]]]
    tensors += [[f"{ADAPTER}B.weight", "float32", [5, 2]]]
    if kind == "full":
        tensors = [["x", "float32", [1]], ["y", "float32", [2]]]
    plan = {"kind": kind, "tensors": tensors, "bucket_bytes": 8, "adapter": {"r": 2}}
    fields = {"backend": "http", "timeout_s": 1.0, "trainer": "first", "plan": plan} | change
    request = a_push(engine)
    request.app.state.openai_serving_models = SimpleNamespace(lora_requests={})
    status, _ = asyncio.run(routes.connect(engine, request, fields))
    assert status == 200 and routes.connection is not None
    return routes, told


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_a_connection_takes_tensors_that_fit_the_model_only(monkeypatch):
    routes, ((plan, shared, nccl_id, _),) = connected(monkeypatch)
    assert routes.sizes == [32, 48]  # 2 x 3 and 5 x 2 of 4 bytes, each up to 16 more
    assert shared[2:] == [1, 2, 48] and nccl_id is None and plan["kind"] == "adapter"
    routes, _ = connected(monkeypatch, "full")
    assert routes.sizes == [16, 16] and routes.shared.num_buffers == 2
    with pytest.raises(BadRequest, match=r"lora_A.weight' has shape \[4, 3\], .* has \[2, 3\]"):
        connected(monkeypatch, rows=4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_a_connection_over_nccl_hands_the_id_on_and_awaits_no_body(monkeypatch):
    unique_id = bytes(range(128))
    nccl = {"backend": "nccl", "nccl_id": base64.b64encode(unique_id).decode()}
    routes, ((_, shared, nccl_id, _),) = connected(monkeypatch, **nccl)
    assert nccl_id == unique_id and routes.sizes == [] and shared[2:] == [1, 0, 0]
    for wrong in ("AAAA", "not base64", base64.b64encode(bytes(129)).decode()):
        with pytest.raises(BadRequest, match="nccl_id: must be 128 bytes in base64"):
            connected(monkeypatch, **nccl | {"nccl_id": wrong})


@pytest.mark.parametrize("path", ["connect", "receive"])
def test_workers_in_nccl_hear_that_the_trainer_has_left(path):
    """They wait in NCCL for a trainer that was killed."""
    seen = []

    class Engine:
        errored = False
        vllm_config = config_of(1)
        output_processor = SimpleNamespace(has_unfinished_requests=lambda: False)
        core_engines = (0,)
        engine_core = property(lambda self: self)

        async def _call_utility_async(self, method, *args, engine):
            if method == "collective_rpc":
                while not seen[0].is_given_up():
                    await asyncio.sleep(0.01)
                return ["GivenUpError: the trainer left"]
            return True

    async def leave():
        return {"type": "http.disconnect"}

    routes = WeightSyncRoutes(None)
    shared = routes.shared = shared_by(1)
    seen.append(shared)
    routes.connection = "c"
    request = a_push(Engine())
    request.receive = leave
    if path == "receive":
        working = routes.receive(Engine(), request)
    else:

        async def connect():
            leaving = asyncio.ensure_future(left(request))
            await routes.work_while(leaving, shared, Engine(), "weight_sync_connect", 5.0)

        working = connect()
    with pytest.raises(BadRequest, match="the trainer left"):
        asyncio.run(asyncio.wait_for(working, 10))
    assert path == "connect" or (routes.shared is None and routes.policy_version is None)


# --- Who has the server ---------------------------------------------------------------------------

HOLDER = """
import multiprocessing, os, sys, time
from verifiers_rl.inference.client import InferenceClient
hold = InferenceClient("127.0.0.1", int(sys.argv[1])).hold("first")
if sys.argv[2] == "forks" and (child := os.fork()) == 0:
    time.sleep(60)
    os._exit(0)
print(child if sys.argv[2] == "forks" else 0, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("forks", ["forks", "alone"])
def test_a_second_trainer_is_refused_while_the_first_lives(monkeypatch, forks):
    with control_server() as (client, _):
        command = [sys.executable, "-c", HOLDER, str(client.port), forks]
        first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            child = int(first.stdout.readline())
            who = rf"process {first.pid} on {socket.gethostname()}, since 20\d\d-.*"
            with monkeypatch.context() as patch:
                patch.setattr("verifiers_rl.inference.server.HOLDER_GRACE_S", 0.2)
                with pytest.raises(InferenceServerError, match=f"423.*{who}vllm_server_port"):
                    client.hold("second")
            first.kill()  # and a process that it has forked lives on
            start = time.monotonic()
            client.hold("second").close()
            assert time.monotonic() - start < 1.5
        finally:
            first.kill()
            first.wait(10)
            first.stdout.close()
            if child:
                os.kill(child, signal.SIGKILL)


def test_a_trainer_that_connects_anew_or_leaves_is_not_in_the_way(monkeypatch):
    def is_refused(name):
        with monkeypatch.context() as patch:
            patch.setattr("verifiers_rl.inference.server.HOLDER_GRACE_S", 0.2)
            with pytest.raises(InferenceServerError, match="another trainer has this server"):
                client.hold(name)

    with control_server() as (client, _):
        first = client.hold("first")
        again = client.hold("first")  # its old connection is not closed yet
        first.close()
        is_refused("second")
        again.close()
        second = client.hold("second")
        is_refused("first")
        second.close()


def test_of_two_trainers_that_wait_for_a_third_one_gets_the_server():
    with control_server() as (client, _):
        first, held, refused = client.hold("first"), [], []

        def take(name):
            try:
                held.append(client.hold(name))
            except InferenceServerError as error:
                refused.append(str(error))

        takers = [threading.Thread(target=take, args=(name,)) for name in ("second", "third")]
        for taker in takers:
            taker.start()
        time.sleep(0.2)  # both wait by now
        first.close()
        for taker in takers:
            taker.join(10)
        assert len(held) == len(refused) == 1
        held[0].close()


def test_a_server_finds_out_when_the_machine_of_its_trainer_is_lost():
    with control_server() as (client, server):
        hold = client.hold("first")
        (connection,) = server.server_state.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        wait = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
        assert [sock.getsockopt(socket.IPPROTO_TCP, name) for name in wait] == [30, 10, 3]
        hold.close()


def test_a_server_that_ends_is_not_kept_by_its_trainer():
    with control_server() as (client, server):
        client.hold("first")
        server.should_exit = True


def test_only_the_trainer_that_holds_the_server_may_connect():
    routes = WeightSyncRoutes(None)
    fields = {"backend": "http", "timeout_s": 1.0, "trainer": "second"}
    plan = {"kind": "full", "tensors": [["x", "float32", [1]]], "bucket_bytes": 8, "adapter": {}}
    engine = SimpleNamespace(vllm_config=config_of())
    for holder in (None, Holder("first", "n")):
        routes.holder = holder
        connecting = routes.connect(engine, None, fields | {"plan": plan})
        status, reply = asyncio.run(connecting)
        assert status == 409 and "does not hold the server" in reply["error"]


def test_beyond_this_machine_generation_needs_the_token_or_a_key(monkeypatch):
    def keys(host, api_key=None, variable=None):
        if variable is not None:
            monkeypatch.setenv("VLLM_API_KEY", variable)
        args = SimpleNamespace(host=host, api_key=api_key)
        found = generation_keys(args, "token")
        # vLLM would refuse the token, and it prints the flags that it was given.
        assert args.api_key is None and "VLLM_API_KEY" not in os.environ
        return found

    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert keys("127.0.0.1") == keys("localhost") == []
    assert keys("0.0.0.0") == keys("") == keys("10.0.0.1") == ["token"]
    assert keys("127.0.0.1", ["a", "b"]) == ["token", "a", "b"]
    assert keys("127.0.0.1", variable="v") == ["token", "v"]


def answer_to(client, method, path, **headers):
    return httpx.request(method, client.base_url + path, headers=headers, trust_env=False)


def test_requests_without_a_key_are_refused_where_one_is_needed():
    with control_server(generation_keys=["token", "key"]) as (client, _):
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models/")):
            for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "key"}):
                reply = answer_to(client, method, path, **given)
                assert reply.status_code == 401 and "VLLM_API_KEY" in reply.json()["error"]
            for key in ("token", "key"):
                reply = answer_to(client, method, path, Authorization=f"Bearer {key}")
                assert reply.status_code == 404  # no vLLM is behind it
        assert answer_to(client, "GET", "/health").status_code == 404
        key = {"Authorization": "Bearer key"}
        assert answer_to(client, "GET", "/weight_sync/status", **key).status_code == 401


@pytest.mark.parametrize(
    ("allowed", "origin", "status"),
    [
        ([], "https://a.page", 403),
        ([], "null", 403),
        (["https://a.page"], "https://a.page", 404),
        (["https://a.page"], "https://another.page", 403),
        (["*"], "https://a.page", 404),
    ],
)
def test_only_web_pages_that_were_invited_reach_the_server(allowed, origin, status):
    with control_server(allowed_origins=allowed) as (client, _):
        for path in ("/v1/completions", "/health", "/weight_sync/hold"):
            token = {"Authorization": f"Bearer {os.environ[TOKEN_VARIABLE]}"}
            reply = answer_to(client, "POST", path, Origin=origin, **token)
            assert reply.status_code == (400 if status == 404 and "hold" in path else status)


def test_rollouts_show_the_token_or_else_the_key_that_is_set(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "the token")
    monkeypatch.setenv("VLLM_API_KEY", "a key, perhaps for another server")
    assert generation_key("http://gpu-box:8000/v1") == "the token"
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert generation_key("http://gpu-box:8000") == "a key, perhaps for another server"
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert generation_key("http://gpu-box:8000") == "none"


FLAGS = ["--max-model-len", "--max-num-seqs", "--dtype", "-tp", "--tensor-parallel-size"]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "unrecognized arguments: --max-modle-len 5 --x",
            "--max-modle-len: no such flag; did you mean --max-model-len?",
        ),
        (
            "unrecognized arguments: --rewards=3",
            "--rewards: no such flag; see vf-vllm --help=all",
        ),
        ("unrecognized arguments: 5", "'5' belongs to no flag"),
        (
            "argument --tensor-parallel-size/-tp: invalid int value: 'two'",
            "--tensor-parallel-size: invalid int value: 'two'",
        ),
        ("argument --dtype: invalid\n   choice: 'int7'", "--dtype: invalid choice: 'int7'"),
        ("--model is required", "--model is required"),
    ],
)
def test_a_bad_flag_is_one_line_that_begins_with_it(message, shown):
    assert flag_error(message, FLAGS) == shown


RESERVE = """
import sys
from verifiers_rl.inference.port import reserve_port
reservation = reserve_port("127.0.0.1", int(sys.argv[1]))
print("reserved", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, None),
        ({"api_server_count": 1, "data_parallel_size": 4, "data_parallel_size_local": 4}, None),
        ({"api_server_count": 4}, "--api-server-count 4: a vf-vllm is one API process"),
        ({"headless": True}, "--headless True: "),
        ({"data_parallel_rank": 0}, "--data-parallel-rank 0: "),
        ({"data_parallel_hybrid_lb": True}, "--data-parallel-hybrid-lb True: "),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 2},
            "--data-parallel-size-local 2: a vf-vllm is one API process with all its engines",
        ),
    ],
)
def test_flags_for_processes_on_other_machines_are_refused(flags, message):
    found = error_of_processes(SimpleNamespace(**{"data_parallel_size": 1} | flags))
    assert found is None if message is None else found.startswith(message)


def test_a_port_that_another_process_takes_first_is_replaced(monkeypatch):
    taken = []

    def reserve(host, port):
        taken.append(port)
        if len(taken) < failures + 1:
            raise PortError("taken")
        return "held"

    monkeypatch.setattr("verifiers_rl.inference.port.reserve_port", reserve)
    failures = 2
    assert reserve_free_port("127.0.0.1") == (taken[2], "held")
    taken, failures = [], 3
    with pytest.raises(PortError):
        reserve_free_port("127.0.0.1")
    assert len(taken) == 3


def test_a_reserved_port_is_refused_to_others_and_free_when_its_holder_dies(monkeypatch):
    port = free_port()
    command = [sys.executable, "-c", RESERVE, str(port)]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options) as holder:
        try:
            assert holder.stdout.readline() == "reserved\n"
            reason = f"process {holder.pid}, a vf-rl or vf-vllm, has reserved the port"
            assert reason in port_error("127.0.0.1", port)
            with pytest.raises(PortError, match=f"{reason}; stop what uses it or choose another"):
                reserve_port("0.0.0.0", port)
            # Nobody listens: who asks for the server is told so at once, and does not wait.
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=5)
            monkeypatch.setenv(RESERVED_VARIABLE, str(port))  # by the vf-rl that has started us
            reserve_port("127.0.0.1", port).close()
            monkeypatch.delenv(RESERVED_VARIABLE)
        finally:
            holder.kill()
    assert port_error("127.0.0.1", port) is None
    assert "cannot listen on 192.0.2.1" in port_error("192.0.2.1", port)


def test_an_error_while_a_connection_is_prepared_is_an_answer_and_changes_nothing(monkeypatch):
    def fail(*_):
        raise AttributeError("'VisionConfig' object has no attribute 'num_attention_heads'")

    async def body():
        plan = {"kind": "full", "tensors": [["x", "float32", [1]]], "bucket_bytes": 8}
        request = {"backend": "http", "timeout_s": 1.0}
        return request | {"plan": {**plan, "adapter": {}}, "trainer": "first"}

    async def connect():
        engine = SimpleNamespace(vllm_config=config_of(), errored=False)
        engine.vllm_config.model_config.hf_config = None
        request = SimpleNamespace(
            method="POST",
            url=SimpleNamespace(path="/weight_sync/connect"),
            headers={"authorization": f"Bearer {os.environ[TOKEN_VARIABLE]}"},
            app=SimpleNamespace(state=SimpleNamespace(engine_client=engine)),
            json=body,
        )
        return await routes.answer(request)

    monkeypatch.setattr("verifiers_rl.inference.server.expected_shapes", fail)
    monkeypatch.setattr("verifiers_rl.inference.server.DYING_S", 0.1)  # this engine does not die
    routes = WeightSyncRoutes(None)
    routes.holder, routes.connection, routes.policy_version = Holder("first", "n"), "c", 3
    status, reply = asyncio.run(connect())
    assert status == 500 and reply["error"].endswith("no attribute 'num_attention_heads'")
    assert (routes.connection, routes.policy_version) == ("c", 3)
    assert not routes.lock.locked()


def test_a_control_request_that_is_not_even_text_is_refused():
    with control_server() as (client, _):
        reply = httpx.post(
            f"{client.base_url}/weight_sync/hold",
            content=b"\xff{",
            headers={"Authorization": f"Bearer {os.environ[TOKEN_VARIABLE]}"},
            trust_env=False,
        )
        assert reply.status_code == 400 and "the body is not JSON" in reply.json()["error"]
