"""The parts of vf-vllm that need no running engine."""

import asyncio
import base64
import json
import os
import random
import signal
import socket
import stat
import struct
import threading
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlencode

import httpx
import pytest
import torch
import uvicorn
from aiohttp import web
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.conftest import wait_until
from tests.helpers import push_body, running_python
from tests.serving import in_thread, serving, uvicorn_in_thread
from verifiers_rl.inference import server as vf_vllm
from verifiers_rl.inference.client import (
    TOKEN_VARIABLE,
    InferenceClient,
    InferenceServerError,
    ServerLostError,
    find_token,
    generation_key,
    keep_alive,
)
from verifiers_rl.inference.engine_calls import paused
from verifiers_rl.inference.gateway import Gateway
from verifiers_rl.inference.generation import check_grammar
from verifiers_rl.inference.port import PortError, reserve_port
from verifiers_rl.inference.server import (
    error_of_flags,
    fit_to_cpu,
    generation_keys,
    limit_requests,
    make_parser,
    save_token,
)
from verifiers_rl.sync.plan import TransferPlan, receive_buckets
from verifiers_rl.sync.shared_buffers import SharedBuffers


class Engine:
    """What stands behind an `AsyncLLM` with its engine cores and workers.

    Args:
        num_engines: engine cores, each with a worker.
        work: what a worker does when it is called: takes the method, its number and the arguments,
            returns what it answers.
    """

    def __init__(self, num_engines=1, is_moe=False, is_running=False, work=lambda *_: None):
        self.num_engines, self.work = num_engines, work
        self.calls, self.errored, self.cache_salt = [], False, None
        self.is_falling, self.fails_to_wake = threading.Event(), False
        self.admits = asyncio.Event()
        self.admits.set()
        self.engine_core = self
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: is_running)
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                data_parallel_size=num_engines, world_size_across_dp=num_engines
            ),
            model_config=SimpleNamespace(is_moe=is_moe),
        )

    async def call_utility_all_async(self, method, *args):
        if method != "collective_rpc":
            self.calls.append((method, *args))
            return [None] * self.num_engines
        name, _, given, _ = args
        self.calls.append(name)
        works = (asyncio.to_thread(self.work, name, i, *given) for i in range(self.num_engines))
        return [[answer] for answer in await asyncio.gather(*works)]

    async def pause_generation(self, mode, clear_cache):
        assert (mode, clear_cache) == ("keep", False)
        self.calls.append("pause")

    async def resume_generation(self):
        self.calls.append("resume")

    async def sleep(self, level, mode):
        assert (level, mode) == (1, "keep")
        self.is_falling.set()
        await asyncio.sleep(0.1)
        self.calls.append("sleep")

    async def wake_up(self, tags):
        if self.fails_to_wake:
            self.fails_to_wake = False  # once
            raise RuntimeError("CUDA out of memory")
        self.calls.append(f"wake {tags[0]}" if tags else "wake up")


ROUTES = "verifiers_rl.inference.weight_routes"


@pytest.fixture(autouse=True)
def any_model(monkeypatch):
    """Servers take the plan of any trainer."""
    monkeypatch.setattr(f"{ROUTES}.fit_to_server", lambda plan, config: plan)


@contextmanager
def server_of(engine=None, **args):
    """The gateway behind uvicorn, as vLLM starts it; its InferenceClient, and uvicorn's server.
    What reaches vLLM gets the status 404, but for completions.
    """
    app = Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])
    app.add_middleware(Gateway)
    config = uvicorn.Config(app, log_level="warning", lifespan="off")
    app.state.server = server = uvicorn.Server(config)
    app.state.engine_client = engine or Engine(2, work=Workers())
    app.state.openai_serving_models = SimpleNamespace(lora_requests={})
    plain = {"host": "127.0.0.1", "allowed_origins": [], "generation_keys": []}
    app.state.args = SimpleNamespace(**plain | args)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        keep_alive(listener)
        with uvicorn_in_thread(server, listener, ends_within_s=10.0):
            yield InferenceClient("127.0.0.1", listener.getsockname()[1]), server


def answer_to(client, method, path, **headers):
    return httpx.request(method, client.base_url + path, headers=headers, trust_env=False)


# --- Generation requests --------------------------------------------------------------------------


async def complete(request):
    """In place of vLLM."""
    return JSONResponse({"read": len(await request.body())})


def test_no_websocket_reaches_vllm():
    sent = []

    async def send(message):
        sent.append(message["type"])

    asyncio.run(Gateway(None)({"type": "websocket", "path": "/v1/realtime"}, None, send))
    assert sent == ["websocket.close"]


OF_VLLM = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what it imports


@OF_VLLM
def test_layers_whose_adapter_vllm_would_drop_are_named():
    from verifiers_rl.inference.reloading import layers_without_adapter

    prefix = "model.layers.0.mlp"
    manager = SimpleNamespace(
        model=None,
        modules={f"{prefix}.gate_up_proj": None, f"{prefix}.down_proj": None},
        packed_modules={f"{prefix}.gate_up_proj": [f"{prefix}.gate_proj", f"{prefix}.up_proj"]},
    )
    names = [
        f"base_model.model.{prefix}.{layer}.lora_A.weight"
        for layer in ("gate_proj", "down_proj", "router")
    ]
    assert layers_without_adapter(manager, names) == [f"{prefix}.router"]


class GptOssForCausalLM(torch.nn.Linear):
    """Loads its sinks as vLLM's does: past the parameter's loader."""

    def __init__(self):
        super().__init__(2, 2, bias=False)
        self.sinks = torch.nn.Parameter(torch.zeros(2))

    def load_weights(self, weights):
        loaded = set()
        for name, weight in weights:
            loaded.add(own := name.removeprefix("attn."))
            parameter = self.get_parameter(own)
            if own == "sinks":
                parameter.data.copy_(weight)
            else:
                parameter.weight_loader(parameter, weight)
        return loaded


class Other(GptOssForCausalLM):
    """Of which nothing is known."""


@OF_VLLM
@pytest.mark.slow
def test_what_vllms_reload_loses_is_named_and_gpt_oss_loses_nothing():
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from verifiers_rl.inference.reloading import in_reloadable_form
    from verifiers_rl.inference.worker import WeightSyncWorker

    worker, gpt_oss, other = WeightSyncWorker(), GptOssForCausalLM(), Other()
    worker.device = torch.device("cpu")
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))

    def load(model):
        record_metadata_for_reloading(model)
        worker.model_runner = SimpleNamespace(get_model=lambda: model)
        weights = [("attn.sinks", torch.tensor([1.0, 2.0])), ("weight", torch.eye(2))]
        worker._load_full([weights])

    load(gpt_oss)
    assert gpt_oss.sinks.tolist() == [1, 2] and gpt_oss.weight.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(RuntimeError, match=r"vLLM's Other cannot take .*: \['sinks'\] would stay"):
        load(other)
    experts = ("a.mlp.experts.bias", torch.tensor([[5.0], [6.0]]))
    alone = [(name, tensor.tolist()) for name, tensor in in_reloadable_form(gpt_oss, [experts], [])]
    assert alone == [("a.mlp.experts.0.bias", [5]), ("a.mlp.experts.1.bias", [6])]


def test_a_token_left_on_this_machine_is_shown_to_no_other(monkeypatch, tmp_path):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stat.S_IMODE(save_token(8000, "secret").stat().st_mode) == 0o600
    assert find_token("127.0.0.1", 8000) == find_token("localhost", 8000) == "secret"
    assert find_token("127.0.0.1", 8001) == ""
    assert find_token("gpu-box", 8000) == ""
    monkeypatch.setenv(TOKEN_VARIABLE, "")  # as compose sets a variable that it does not have
    assert find_token("127.0.0.1", 8000) == "secret"
    monkeypatch.setenv(TOKEN_VARIABLE, "for both")
    assert find_token("gpu-box", 8000) == "for both"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch, tmp_path):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    assert find_token("127.0.0.1", 8000) == ""
    with pytest.raises(SystemExit, match="Set HOME or"):
        vf_vllm.make_token(8000)
    monkeypatch.delenv(TOKEN_VARIABLE)


def test_a_folder_too_long_for_sockets_is_named_at_once(monkeypatch):
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/" + "t" * 106)
    with pytest.raises(SystemExit, match=r"'/t+' is too long .* TMPDIR"):
        vf_vllm.main()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/tmp")  # where vLLM's sockets are then
    assert vf_vllm.sockets_error() is None


# --- Calls of the engines -------------------------------------------------------------------------


def test_an_engine_whose_pause_comes_too_late_goes_on_afterwards():
    class Slow(Engine):
        is_paused = False

        async def pause_generation(self, mode, clear_cache):
            await asyncio.sleep(0.05)  # a step that takes long
            self.is_paused = True

        async def resume_generation(self):
            assert self.is_paused, "vLLM: resume_scheduler called while pause is still in flight"
            self.is_paused = False

    async def update():
        engine = Slow()
        with pytest.raises(TimeoutError, match="did not answer pause"):
            async with paused(engine, timeout_s=0.01):
                pytest.fail("updated while it took a step")
        return engine.is_paused

    assert not asyncio.run(update())


@pytest.mark.parametrize("call", ["pause_generation", "resume_generation"])
def test_an_engine_that_dies_while_it_is_to_pause_or_resume_holds_nobody_up(call):
    engine = Engine()

    async def hang(*_, **__):
        asyncio.get_running_loop().call_later(0.1, setattr, engine, "errored", True)
        await asyncio.Event().wait()

    async def update():
        async with paused(engine, timeout_s=60.0):
            pass

    setattr(engine, call, hang)
    with pytest.raises(RuntimeError, match="vLLM's engine died"):  # not its deadline
        asyncio.run(update())


# --- Pushes ---------------------------------------------------------------------------------------

BUCKET = 2**19
WEIGHTS = random.randbytes(4 * BUCKET)
BODY = push_body(WEIGHTS, [BUCKET] * 4)
NUM_BYTES = len(BODY)
PUSHED = {"policy_version": 3}
SHAPES = dict.fromkeys("abcd", (BUCKET // 4,))
PLAN = TransferPlan(tensors=SHAPES, dtype="float32", bucket_bytes=BUCKET)
CONNECT = {"timeout_s": 5.0, "trainer": "first", "name": "a process", "plan": PLAN.model_dump()}


class Workers:
    """Two workers, which take a push of four buckets.

    Attributes:
        got: by number, the push that a worker has taken.
        shared: by number, the memory that a worker shares with the server.
    """

    def __init__(self, take=None):
        self.take = take or self.copy_all
        self.got, self.shared = {}, {}

    def copy_all(self, number, shared):
        def receive(num_bytes):
            return partial(shared.receive, number, num_bytes)

        loaded = [bucket for ((_, bucket),) in receive_buckets(PLAN, receive)]
        self.got[number] = b"".join(bucket.numpy().tobytes() for bucket in loaded)

    def __call__(self, method, number, *args):
        if method == "weight_sync_connect":
            self.shared[number] = SharedBuffers(*args[1])
            return None
        try:
            self.take(number, self.shared[number])
        except (RuntimeError, TimeoutError, ValueError) as error:
            self.shared[number].give_up()
            return f"{type(error).__name__}: {error}"


@contextmanager
def server_of_pushes(workers=None, **options):
    """A server that a trainer has connected to: its client, the name of the connection, and its
    engine.
    """
    engine = Engine(2, work=workers or Workers(), **options)
    with server_of(engine) as (client, _):
        hold, connection = connected(client)
        engine.calls.clear()
        yield client, connection, engine
        hold.close()


def connected(client, **change):
    """A request that holds the server, and the name of the connection."""
    request = client.post("/weight_sync/connect", CONNECT | change, 5.0).begin()
    return request, request.answer(stays_open=True)["connection"]


def pushed(client, connection, body=BODY, num_bytes=None, timeout_s=5.0, **change):
    fields = PUSHED | {"connection": connection, "timeout_s": timeout_s} | change
    path = f"/weight_sync/receive?{urlencode(fields)}"
    request = client.post(path, None, timeout_s, num_bytes or len(body)).begin()
    request.write(memoryview(body))
    return request


NONE, THREE = (("set_weight_version", label) for label in ("none", "3"))


# Engines of a mixture of experts step together, with or without requests.
@pytest.mark.parametrize("pauses", [{}, {"is_running": True}, {"is_moe": True}])
def test_a_push_reaches_all_workers_and_tokens_of_mixed_weights_are_of_no_policy(pauses):
    workers = Workers()
    with server_of_pushes(workers, **pauses) as (client, connection, engine):
        salts = set()
        for weights in (WEIGHTS, WEIGHTS[::-1]):
            reply = pushed(client, connection, push_body(weights, [BUCKET] * 4)).answer()
            assert reply == PUSHED and workers.got == {0: weights, 1: weights}
            salts.add(engine.cache_salt)
        assert len(salts) == 2 and None not in salts  # cached prefixes are of one version
    calls = [NONE, "weight_sync_receive", THREE]
    assert engine.calls == 2 * (["pause", *calls, "resume"] if pauses else calls)


@pytest.mark.parametrize(
    "change, body, message",
    [
        ({}, BODY[:-1], "400: a body of 2097183 bytes: this connection's plan has 2097184"),
        ({"connection": "d"}, BODY, "409: not connected"),
        ({"policy_version": "x"}, BODY, "422: .*'policy_version'.* a valid integer.*'x'"),
    ],
)
def test_a_push_that_is_not_the_announced_one_changes_nothing(change, body, message):
    with server_of_pushes() as (client, connection, engine):
        with pytest.raises(InferenceServerError, match=message):
            pushed(client, **{"connection": connection} | change, body=body).answer()
        assert engine.calls == []
        assert pushed(client, connection).answer() == PUSHED


@pytest.mark.parametrize("at", [0, 3 * BUCKET + 77, NUM_BYTES - 1, None])
def test_a_bucket_with_other_bytes_than_were_sent_is_loaded_by_no_worker(at):
    body, workers = bytearray(BODY), Workers()
    if at is None:
        body = bytes(NUM_BYTES)  # as memory that nobody has written
    else:
        body[at] ^= 1
    with server_of_pushes(workers) as (client, connection, _):
        with pytest.raises(
            ServerLostError, match="500: RuntimeError: a bucket of weights has other bytes"
        ):
            pushed(client, connection, bytes(body)).answer()
        assert workers.got == {}
        hold, connection = connected(client)  # as the trainer does now
        assert pushed(client, connection).answer() == PUSHED
        hold.close()


# Before the workers have anything, the weights stay as they were; later, they are torn.
@pytest.mark.parametrize("num_bytes, tears", [(256, []), (3 * BUCKET, [NONE])])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_trainer_that_hangs_or_leaves_in_a_push_leaves_no_worker_waiting(
    num_bytes, tears, leaves
):
    with server_of_pushes() as (client, connection, engine):
        timeout_s = 60.0 if leaves else 0.5
        hanging = pushed(client, connection, BODY[:num_bytes], NUM_BYTES, timeout_s)
        if leaves:
            hanging.close()
        else:  # 409, so the trainer connects again
            with pytest.raises(ServerLostError, match=r"409: .* 0\.5 s \(vllm_server_timeout\)"):
                hanging.answer(10.0)
        # What is left of it is not taken for the next one, which waits for its end.
        with pytest.raises(ServerLostError, match="409: not connected"):
            pushed(client, connection).answer()
        assert [call for call in engine.calls if call != "weight_sync_receive"] == tears


@pytest.mark.parametrize(
    "kind, status, others_first", [(RuntimeError, 500, False), (ValueError, 400, True)]
)
def test_a_worker_that_fails_in_a_push_ends_it_for_all_and_says_why(kind, status, others_first):
    def fail(number, shared):
        for _ in range(3):
            shared.receive(number, BUCKET)
            if number == others_first:
                raise kind("out of memory")

    message = f"{status}: {kind.__name__}: out of memory"
    with server_of_pushes(Workers(fail), is_running=True) as (client, connection, engine):
        with pytest.raises(InferenceServerError, match=message) as caught:
            pushed(client, connection).answer()
        assert isinstance(caught.value, ServerLostError) == (status == 500)  # and is sent again
        assert engine.calls == ["pause", NONE, "weight_sync_receive", "resume"]
        assert engine.admits.is_set()


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_push_that_stalls_until_the_deadline_or_is_reset_is_a_lost_connection(is_reset):
    def reset():
        connection, _ = listener.accept()
        connection.recv(2**16)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:  # and never reads
        if is_reset:
            threading.Thread(target=reset).start()
        client = InferenceClient("127.0.0.1", listener.getsockname()[1])
        body = bytes(2**26)  # more than sockets hold
        with pytest.raises(ServerLostError, match="/weight_sync/receive") as caught:
            pushed(client, "c", body, timeout_s=60.0 if is_reset else 0.3).answer()
        assert ("timed out" in str(caught.value)) == (not is_reset)


def test_over_nccl_workers_hear_that_the_trainer_has_left():
    begun, heard = threading.Event(), threading.Semaphore(0)

    def wait(number, shared):  # in NCCL, for a trainer that was killed
        begun.set()
        wait_until(shared.is_given_up)
        heard.release()
        raise RuntimeError("given up")

    with server_of_pushes(Workers(wait)) as (client, _, _engine):
        with pytest.raises(InferenceServerError, match=r"422: .*'unique_id'"):
            connected(client, unique_id=base64.b64encode(bytes(127)).decode())
        hold, connection = connected(client, unique_id=base64.b64encode(bytes(128)).decode())
        pushing = pushed(client, connection, b"", timeout_s=60.0)  # without a body
        assert begun.wait(10)
        pushing.close()
        assert heard.acquire(timeout=10) and heard.acquire(timeout=10)
        with pytest.raises(ServerLostError, match="409: not connected"):
            pushed(client, connection).answer()
        hold.close()


SLEEP, WAKE = "sleep", "wake up"


def begin_sleep(client, connection):
    fields = urlencode({"connection": connection, "timeout_s": 5.0})
    return client.post(f"/weight_sync/sleep?{fields}").begin()


@pytest.mark.parametrize("phase", ["falls asleep", "sleeps", "pushes"])
def test_a_server_wakes_when_its_trainer_leaves_in_whatever_phase(phase):
    with server_of(engine := Engine(2, work=Workers())) as (client, _):
        hold, connection = connected(client)
        sleeping = begin_sleep(client, connection)
        assert engine.is_falling.wait(10)
        if phase != "falls asleep":
            sleeping.answer()
        if phase == "pushes":
            sleeping = pushed(client, connection, BODY[: 3 * BUCKET], NUM_BYTES, 60.0)
        sleeping.close(), hold.close()
        wait_until(lambda: WAKE in engine.calls and engine.admits.is_set())
        hold, connection = connected(client, trainer="second")
        assert pushed(client, connection).answer() == PUSHED
        assert [call for call in engine.calls if call in (SLEEP, WAKE)] == [SLEEP, WAKE]
        hold.close()


def test_a_server_sleeps_until_the_next_push_and_tries_again_to_wake(monkeypatch):
    monkeypatch.setattr(f"{ROUTES}.WAKE_PAUSE_S", 0.05)
    with server_of_pushes() as (client, connection, engine):
        begin_sleep(client, connection).answer()
        assert not engine.admits.is_set()
        assert pushed(client, connection).answer() == PUSHED
        of_push = [NONE, "weight_sync_receive", THREE]
        assert engine.calls == [SLEEP, "wake weights", *of_push, WAKE] and engine.admits.is_set()
        begin_sleep(client, connection).answer()
        engine.fails_to_wake = True
        with pytest.raises(ServerLostError, match="500: RuntimeError: CUDA out of memory"):
            pushed(client, connection).answer()
        assert not engine.admits.is_set() and engine.calls[-1] == SLEEP
        hold, connection = connected(client)  # as the trainer does now
        assert engine.admits.is_set() and engine.calls[-3] == WAKE
        assert pushed(client, connection).answer() == PUSHED
        begin_sleep(client, connection).answer()
        engine.fails_to_wake = True
        hold.close()  # a trainer whose memory is free only later
        wait_until(engine.admits.is_set)
        assert not engine.fails_to_wake and engine.calls[-2:] == [SLEEP, WAKE]


NOT_OURS = "has no /weight_sync/status: it is not vf-vllm"


@pytest.mark.parametrize(
    "status, text, message, is_lost",
    [
        *((status, "bad gateway", f"{status}: bad gateway", True) for status in (429, 500, 502)),
        (423, "taken", "423: taken", False),
        (404, "", NOT_OURS, False),
        *((200, text, NOT_OURS, False) for text in ("<html>", "[]", '{"status": "ok"}')),
    ],
)
def test_a_proxy_that_fails_for_seconds_is_a_lost_connection_and_another_server_none_of_ours(
    status, text, message, is_lost
):
    async def answer(request):
        return web.Response(status=status, text=text)

    with (
        in_thread(serving(answer, "/weight_sync/status")) as url,
        pytest.raises(InferenceServerError, match=message) as caught,
    ):
        InferenceClient("127.0.0.1", int(url.rpartition(":")[2])).status()
    assert isinstance(caught.value, ServerLostError) == is_lost


@pytest.mark.parametrize("status, text", [(404, "no backend"), (200, "<html>"), (200, "[]")])
def test_a_proxy_that_answers_in_place_of_a_server_seen_before_is_a_lost_connection(status, text):
    replies = [(200, '{"policy_version": 3}'), (status, text)]

    async def answer(request):
        status, text = replies[0]
        return web.Response(status=status, text=text)

    with in_thread(serving(answer, "/weight_sync/status")) as url:
        client = InferenceClient("127.0.0.1", int(url.rpartition(":")[2]))
        assert client.status() == {"policy_version": 3}
        replies.pop(0)
        with pytest.raises(ServerLostError, match=NOT_OURS):
            client.status()
        replies[0] = 404, '{"detail": "Not Found"}'  # another server there, and no proxy
        with pytest.raises(InferenceServerError, match=NOT_OURS) as caught:
            client.status()
        assert not isinstance(caught.value, ServerLostError)


def test_a_control_request_that_makes_no_sense_is_refused():
    with server_of() as (client, _):
        with pytest.raises(InferenceServerError, match=r"422: .*'plan', 'tensors'.*Field required"):
            connected(client, plan={"dtype": "float32"})
        for content in (b"\xff{", b"{}", b"{"):
            url = f"{client.base_url}/weight_sync/connect"
            headers = {"Authorization": f"Bearer {generation_key(client.base_url)}"}
            reply = httpx.post(url, content=content, headers=headers, trust_env=False)
            assert reply.status_code in (400, 422) and reply.json()["detail"]


def test_a_request_that_another_thread_has_closed_is_a_lost_server():
    with server_of() as (client, _):
        request = client.post("/weight_sync/connect").begin()
        request.close()
        with pytest.raises(ServerLostError, match="/weight_sync/connect: given up"):
            request.answer()


# --- Who has the server ---------------------------------------------------------------------------

HOLDER = """
import json, os, sys, time
from verifiers_rl.inference.client import InferenceClient
client = InferenceClient("127.0.0.1", int(sys.argv[1]))
hold = client.post("/weight_sync/connect", json.loads(sys.argv[2])).begin()
hold.answer(stays_open=True)
if (child := os.fork()) == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def check_refused(client, monkeypatch, name):
    with monkeypatch.context() as patch:
        patch.setattr(f"{ROUTES}.HOLDER_GRACE_S", 0.2)
        with pytest.raises(InferenceServerError, match=r"423.*a process, since 20.*_server_port"):
            connected(client, trainer=name)


def test_a_second_trainer_is_refused_while_the_first_lives_or_connects_anew(monkeypatch):
    with (
        server_of() as (client, _),
        running_python("-c", HOLDER, client.port, json.dumps(CONNECT)) as first,
    ):
        child = int(first.stdout.readline())
        try:
            check_refused(client, monkeypatch, "second")
            first.kill()  # and a process that it has forked lives on
            second, _ = connected(client, trainer="second")
            again, _ = connected(client, trainer="second")  # its old connection is not closed yet
            second.close()
            check_refused(client, monkeypatch, "third")
            again.close()
            connected(client, trainer="third")[0].close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_server_that_ends_is_not_kept_by_its_trainer():
    with server_of() as (client, server):
        connected(client)
        server.should_exit = True


@pytest.mark.parametrize(
    "given, variable, is_open, keys",
    [
        (None, "", False, ["token"]),
        (["a", "b"], "", False, ["token", "a", "b"]),
        (None, "v", False, ["token", "v"]),
        (["a"], "v", True, []),
    ],
)
def test_generation_needs_the_token_or_a_key_unless_the_server_is_open(
    monkeypatch, given, variable, is_open, keys
):
    monkeypatch.setenv("VLLM_API_KEY", variable)
    args = SimpleNamespace(api_key=given, open=is_open)
    assert generation_keys(args, "token") == keys
    # vLLM would refuse the token, and it prints the flags that it was given.
    assert args.api_key is None and "VLLM_API_KEY" not in os.environ


@pytest.mark.parametrize("asked, limit", [(1056, 261), (20, 20)])
def test_limits_of_requests_follow_from_the_model(monkeypatch, asked, limit):
    monkeypatch.setattr(os, "environ", {})
    model = SimpleNamespace(max_logprobs=asked, get_vocab_size=lambda: 261)
    scheduler = SimpleNamespace(max_num_seqs=256)
    limit_requests(SimpleNamespace(model_config=model, scheduler_config=scheduler))
    assert model.max_logprobs == limit and os.environ == {"VLLM_MAX_N_SEQUENCES": "256"}


def test_a_grammar_that_takes_long_to_compile_is_refused():
    check_grammar(None)
    check_grammar(SimpleNamespace(choice=["yes", "no"]))
    with pytest.raises(ValueError, match=r"list of choices of \d+ characters is longer than 65536"):
        check_grammar(SimpleNamespace(choice=[str(i) for i in range(100_000)]))


@pytest.mark.parametrize(
    "path, announced", [("/v1/chat/completions/tokens", False), ("/v1/completions", True)]
)
def test_a_body_is_read_up_to_a_bound(monkeypatch, path, announced):
    monkeypatch.setattr("verifiers_rl.inference.gateway.MAX_BODY_BYTES", 10_000)
    sent = b'{"prompt": "%s"}' % (b"a" * 20_000)
    with server_of() as (client, _):
        content = sent if announced else iter([sent[:9_000], sent[9_000:]])
        reply = httpx.post(client.base_url + path, content=content, trust_env=False)
        assert reply.status_code == 413 and "more than 10000 bytes" in reply.text


PAGE = "https://a.page"


@pytest.mark.parametrize(
    "args, headers, status",
    [
        ({}, {"Host": "127.0.0.1:9000"}, 404),  # through a tunnel
        ({}, {"Host": "a.page:8000"}, 400),  # a name that a page has let lead here
        ({}, {"Host": "127.0.0.1.a.page"}, 400),
        ({"host": "0.0.0.0"}, {"Host": "gpu-box:8000"}, 404),
        ({}, {"Origin": PAGE}, 403),
        ({}, {"Origin": "null"}, 403),
        ({"allowed_origins": [PAGE]}, {"Origin": PAGE}, 404),
        ({"allowed_origins": [PAGE]}, {"Origin": "https://another.page"}, 403),
    ],
)
def test_a_server_is_asked_by_its_own_name_and_by_pages_that_were_invited(args, headers, status):
    headers = headers | {"Authorization": f"Bearer {os.environ[TOKEN_VARIABLE]}"}
    with server_of(**args) as (client, _):
        for path in ("/v1/models", "/metrics", "/weight_sync/nothing"):
            assert answer_to(client, "POST", path, **headers).status_code == status


def test_requests_without_a_key_are_refused_where_one_is_needed():
    with server_of(generation_keys=["token", "key"]) as (client, _):
        for path in ("/v1/completions", "/v1/models/", "/weight_sync/receive"):
            for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "key"}):
                reply = answer_to(client, "POST", path, **given)
                assert reply.status_code == 401 and "VLLM_API_KEY" in reply.text
        for key in ("token", "key"):
            given = {"Authorization": f"Bearer {key}"}
            assert answer_to(client, "GET", "/v1/models/", **given).status_code == 404  # no vLLM
            assert answer_to(client, "GET", "/weight_sync/status", **given).status_code == 401
        assert answer_to(client, "GET", "/health").status_code == 404


def test_neither_vllms_control_routes_nor_other_ways_to_generate_are_served():
    """No update would wait for the latter."""
    routes = ("collective_rpc", "update_weights", "pause", "sleep", "scale_elastic_ep")
    with server_of() as (client, _):
        for route in (*routes, "v1/responses", "v1/messages", "pooling", "invocations"):
            reply = answer_to(client, "POST", f"/{route}")
            assert reply.status_code == 404 and "vf-vllm does not serve" in reply.text


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"api_server_count": 1, "data_parallel_size": 4, "data_parallel_size_local": 4}, None),
        ({"data_parallel_rank": 0}, "--data-parallel-rank 0: "),
        ({"data_parallel_size_local": 2}, "--data-parallel-size-local 2: "),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode raw_logprobs: "),
        ({"enable_sleep_mode": True}, None),
        ({"enable_sleep_mode": True, "tensor_parallel_size": 2}, "--enable-sleep-mode: "),
    ],
)
def test_flags_that_training_cannot_have_are_refused(flags, message):
    sizes = {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data")}
    plain = {"logprobs_mode": "processed_logprobs", "enable_sleep_mode": False}
    found = error_of_flags(SimpleNamespace(**sizes | plain | flags))
    assert found is None if message is None else found.startswith(message)


def test_without_a_gpu_no_server_is_started_that_is_to_return_experts_or_to_draft():
    flags = SimpleNamespace(enable_return_routed_experts=True, speculative_config=None)
    found = fit_to_cpu(flags)
    assert found.startswith("--enable-return-routed-experts: ") and "router_replay" in found
    flags.speculative_config = {"method": "ngram"}
    assert fit_to_cpu(flags).startswith("--speculative-config: ")


@pytest.mark.slow  # it imports vLLM
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_vllms_parser_has_our_defaults_and_a_seed_for_each_server():
    first, second = (make_parser().parse_args(["--model", "m"]) for _ in range(2))
    assert (first.host, first.gpu_memory_utilization) == ("127.0.0.1", 0.88)
    assert first.seed != second.seed


def test_a_reserved_port_is_refused_to_others_until_its_holder_ends():
    port, held = reserve_port("127.0.0.1", 0)
    with pytest.raises(PortError, match=f":{port}: Address already in use"):
        reserve_port("0.0.0.0", port)
    held.close()
    reserve_port("127.0.0.1", port)[1].close()


def test_a_salt_of_a_request_stands_beside_that_of_the_weights(monkeypatch):
    """Else it would find prefixes that older weights have computed."""
    from verifiers_rl.inference.engine import AsyncLLM, RolloutEngine

    async def add_request(self, request_id, prompt, params):
        return prompt

    monkeypatch.setattr(AsyncLLM, "add_request", add_request)
    engine = object.__new__(RolloutEngine)
    engine.admits = asyncio.Event()
    engine.admits.set()
    engine.cache_salt = "v3"
    for prompt, expected in (({}, "v3"), ({"cache_salt": "own"}, "v3own")):
        asked = asyncio.run(engine.add_request("1", prompt, None))
        assert asked["cache_salt"] == expected


def test_a_push_that_takes_too_long_ends_though_each_bucket_comes_in_time():
    def load_slowly(number, shared):
        for _ in range(4):
            time.sleep(0.15)
            shared.receive(number, BUCKET)

    with (
        server_of_pushes(Workers(load_slowly)) as (client, connection, _),
        pytest.raises(ServerLostError, match=r"409: .* 0\.3 s \(vllm_server_timeout\)"),
    ):
        pushed(client, connection, timeout_s=0.3).answer(10.0)
