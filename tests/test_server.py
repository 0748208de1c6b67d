"""The parts of vf-vllm that need no running engine."""

import asyncio
import json
import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from verifiers_rl.inference.client import TOKEN_VARIABLE, find_token, save_token
from verifiers_rl.inference.server import (
    VERSIONS_HEADER,
    BadRequest,
    InFlight,
    WeightSyncRoutes,
    WorkerError,
    format_spans,
    paused,
    require,
)
from verifiers_rl.inference.vllm_versions import call_engines


def test_a_swap_splits_the_tokens_of_each_request_in_flight():
    in_flight = InFlight()
    in_flight.spans = {"a": [(0, 3)], "b": [(0, 3)], "queued": [(0, 3)]}
    in_flight.swap({"a": 17, "b": 1}, policy_version=4)
    in_flight.swap({"a": 17, "b": 5}, policy_version=5)  # "a" has sampled nothing in between
    assert format_spans(in_flight.spans["a"]) == "0:3,17:5"
    assert format_spans(in_flight.spans["b"]) == "0:3,1:4,5:5"
    assert format_spans(in_flight.spans["queued"]) == "0:5"


def generation(body, chunks=1, policy_version=4, is_salted=False):
    """A request through the middleware.

    Returns:
        What vLLM reads of it, and the versions that the reply's header claims.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = -(-len(data) // chunks)
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    messages = [
        {"type": "http.request", "body": part, "more_body": i < len(parts) - 1}
        for i, part in enumerate(parts)
    ]
    messages.append({"type": "http.disconnect"})
    read, replied = [], []

    async def receive():
        return messages.pop(0)

    async def send(message):
        replied.append(message)

    async def vllm(scope, receive, send):
        assert routes.num_running == 1
        message = await receive()
        assert await receive() == {"type": "http.disconnect"}
        assert not message["more_body"]
        length = dict(scope["headers"])[b"content-length"]
        assert int(length) == len(message["body"])
        read.append(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    routes = WeightSyncRoutes(vllm)

    async def run():
        routes.policy_version, routes.is_salted = policy_version, is_salted
        headers = [(b"content-length", str(len(data)).encode())]
        scope = {"type": "http", "path": "/v1/completions", "headers": headers}
        await routes(scope, receive, send)
        assert not routes.in_flight.spans and routes.num_running == 0

    asyncio.run(run())
    return read[0], dict(replied[0]["headers"]).get(VERSIONS_HEADER.encode())


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_request_gets_the_cache_salt_of_its_policy(chunks):
    body, _ = generation({"prompt": "a"}, chunks, is_salted=True)
    assert json.loads(body) == {"prompt": "a", "cache_salt": "policy-4"}


def test_a_cache_salt_of_the_client_stays_and_what_is_no_object_is_passed_on():
    body, _ = generation({"cache_salt": "mine"}, is_salted=True)
    assert json.loads(body) == {"cache_salt": "mine"}
    assert generation(b"[1]", is_salted=True)[0] == b"[1]"
    assert generation(b"{", is_salted=True)[0] == b"{"


@pytest.mark.parametrize(
    ("body", "versions"),
    [
        ({"prompt": "a"}, b"0:4"),
        ({"prompt": [1, 2], "n": 1}, b"0:4"),
        ({"messages": [], "n": None}, b"0:4"),
        ({"prompt": "a", "n": 2}, None),
        ({"prompt": ["a", "b"]}, None),
        ({"prompt": [[1], [2]]}, None),
        ({"token_ids": [1], "sampling_params": {"n": 2}}, None),
        ({"prompt": "a", "use_beam_search": True}, None),
    ],
)
def test_a_reply_of_one_completion_claims_its_version_and_others_none(body, versions):
    assert generation(body)[1] == versions
    assert generation(body, policy_version=None)[1] is None


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


def test_a_request_whose_body_arrives_in_an_update_waits_for_its_end():
    async def run():
        arrived, passed = asyncio.Event(), []

        async def receive():
            await arrived.wait()
            return {"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False}

        async def vllm(scope, receive, send):
            passed.append(dict(routes.in_flight.spans))

        routes = WeightSyncRoutes(vllm)
        routes.policy_version = 3
        scope = {"type": "http", "path": "/v1/completions", "headers": []}
        request = asyncio.create_task(routes(scope, receive, None))
        await asyncio.sleep(0)  # it waits for its body
        routes.open.clear()  # an update begins
        arrived.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not passed and not routes.num_running
        routes.policy_version = 4
        routes.open.set()
        await asyncio.wait_for(request, 5)
        assert [list(spans.values()) for spans in passed] == [[[(0, 4)]]]

    asyncio.run(run())


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_processes_of_a_vf_vllm_on_a_cpu_sleep_where_vllm_spins(is_ours):
    script = (
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from vllm.distributed.device_communicators import shm_broadcast\n"
        "print(shm_broadcast.sched_yield.__module__)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "VERIFIERS_RL_SERVER_PID"}
    if is_ours:
        environment["VERIFIERS_RL_SERVER_PID"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    module = done.stdout.splitlines()[-1]
    assert (module == "verifiers_rl.inference.vllm_versions") == is_ours


class TwoEngines:
    """What stands behind an `AsyncLLM` with two data-parallel engines, and what they answer."""

    core_engines = (0, 1)

    def __init__(self, **answers):
        self.answers = {"collective_rpc": [[None], [None]], "reset_prefix_cache": [True, True]}
        self.answers |= answers

    async def _call_utility_async(self, method, *args, engine):
        return self.answers[method][engine]


def config_of(num_engines=2, is_moe=False):
    parallel = SimpleNamespace(data_parallel_size=num_engines, world_size_across_dp=num_engines)
    return SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(is_moe=is_moe), lora_config=None
    )


def routes_after_an_update(in_flight, **answers):
    routes = WeightSyncRoutes(None)
    routes.connection = "c"
    idle = SimpleNamespace(has_unfinished_requests=lambda: False)
    core = TwoEngines(**answers)
    engine = SimpleNamespace(
        engine_core=core, output_processor=idle, errored=False, vllm_config=config_of()
    )
    body = {"connection": "c", "policy_version": 3, "in_flight": in_flight, "timeout_s": 1.0}
    assert asyncio.run(routes.receive(engine, body)) == (200, {"policy_version": 3})
    return routes


def test_the_second_engine_is_asked_too():
    assert not routes_after_an_update("keep").is_salted
    assert routes_after_an_update("keep", reset_prefix_cache=[True, False]).is_salted
    with pytest.raises(RuntimeError, match="could not reset its prefix cache"):
        routes_after_an_update("recompute", reset_prefix_cache=[True, False])
    with pytest.raises(WorkerError, match="ValueError: too large"):
        routes_after_an_update("recompute", collective_rpc=[[None], ["ValueError: too large"]])


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
            calls.append(args[0] if method == "collective_rpc" else method)
            told = "ValueError: broken" if fails else None
            return [told] if method == "collective_rpc" else True

        async def pause_generation(self, mode, clear_cache):
            assert (mode, clear_cache) == ("keep", False)
            calls.append("pause")

        async def resume_generation(self):
            calls.append("resume")

    async def updates(routes, engine):
        request = {"host": "h", "port": 1, "backend": "gloo", "timeout_s": 1.0}
        request["world_size"] = 1 + num_engines
        plan = {"kind": "full", "tensors": [["x", "float32", [1]]], "bucket_bytes": 8}
        request["plan"] = {**plan, "adapter": {}}
        with pytest.raises(WorkerError) if fails else nullcontext():
            await routes.connect(engine, None, request)
        routes.connection = "c"
        body = {"connection": "c", "policy_version": 3, "in_flight": "keep", "timeout_s": 1.0}
        with pytest.raises(WorkerError) if fails else nullcontext():
            await routes.receive(engine, body)

    monkeypatch.setattr("verifiers_rl.inference.server.check_plan", lambda *_: None)
    Engine.vllm_config.model_config.dtype = "torch.float32"
    routes = WeightSyncRoutes(None)
    routes.shapes = {"full": {}}
    asyncio.run(updates(routes, Engine()))
    connect, receive = (
        ["weight_sync_connect"] * num_engines,
        ["weight_sync_receive"] * num_engines + ["reset_prefix_cache"] * num_engines * (not fails),
    )
    if is_moe and num_engines == 2:
        connect, receive = (["pause", *done, "resume"] for done in (connect, receive))
    assert calls == connect + receive
    assert routes.open.is_set()


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
        url=SimpleNamespace(path="/weight_sync/receive"),
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


REPACK = """
import torch
from verifiers_rl.inference.vllm_versions import repack_for_cpu

model = torch.nn.Module()
repack_for_cpu(model)
print("nothing to pack")
model.experts = torch.nn.Module()
model.experts.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 2))
repack_for_cpu(model)
"""


def test_experts_that_cannot_be_packed_anew_are_an_error_and_not_wrong_weights():
    # In a process of its own: vLLM warns when it is imported.
    done = subprocess.run(
        [sys.executable, "-c", REPACK], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "nothing to pack" in done.stdout
    assert "RuntimeError: on a CPU this vLLM cannot take new weights of a mixture" in done.stderr


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
    async def body():
        return {"connection": "c", "policy_version": 3, "in_flight": "keep", "timeout_s": 60.0}

    monkeypatch.setenv(TOKEN_VARIABLE, "t")
    routes = WeightSyncRoutes(None)
    routes.connection = "c"
    request = SimpleNamespace(
        method="POST",
        url=SimpleNamespace(path="/weight_sync/receive"),
        headers={"authorization": "Bearer t"},
        app=SimpleNamespace(state=SimpleNamespace(engine_client=DyingEngine(fails, dies))),
        json=body,
    )
    answering = asyncio.wait_for(routes.answer(request), 20)
    assert asyncio.run(answering) == (status, {"error": error})
    assert routes.open.is_set() and routes.policy_version is None
