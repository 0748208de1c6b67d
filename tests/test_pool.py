"""Several servers for one trainer, with stand-ins for them: pushes, routing, faults."""

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial

import pytest
import torch
from aiohttp import web

from tests.helpers import ROOT, StubServer, make_request, make_tiny_model, serving
from tests.test_environments_v1 import (  # noqa: F401
    HERE,
    Server,
    load,
    on_the_path,
    think,
)
from tests.troubled_env import QUESTIONS, TroubledEnv
from verifiers_rl import RLConfig
from verifiers_rl.config import ConfigError
from verifiers_rl.envs.make import make_runner
from verifiers_rl.envs.workers import WorkerEnvironment, WorkerPool
from verifiers_rl.inference.client import InferenceServerError, ServerLostError
from verifiers_rl.process.interrupts import Interrupted, Interrupts
from verifiers_rl.requests import Places
from verifiers_rl.sync import pool as pool_module
from verifiers_rl.sync import weight_sync
from verifiers_rl.sync.pool import ServerPool
from verifiers_rl.sync.sources import Source, what_to_send
from verifiers_rl.sync.weight_sync import WeightSync, push_to_all
from verifiers_rl.types import Rollout

# --- Pushes ---------------------------------------------------------------------------------------


@pytest.fixture
def syncs_to():
    """WeightSyncs to such servers; both ends are closed at last."""
    made = []

    def make(*servers, bucket_bytes=2**14):
        made.extend(WeightSync(one, timeout_s=30, bucket_bytes=bucket_bytes) for one in servers)
        return made[-len(servers) :]

    yield make
    for sync in made:
        sync.close()


def has_weights_of(server, model):
    wanted = dict(model.named_parameters())
    got = server.weights
    return got.keys() == wanted.keys() and all(torch.equal(got[n], p) for n, p in wanted.items())


@pytest.fixture
def times_made(monkeypatch):
    """How often each tensor was gathered."""
    made = Counter()

    def counting(model, lora_sync):
        sources, adapter = what_to_send(model, lora_sync)

        def count(name, source):
            def make():
                made[name] += 1
                return source.make()

            return source._replace(make=make)

        return {name: count(name, source) for name, source in sources.items()}, adapter

    monkeypatch.setattr(weight_sync, "what_to_send", counting)
    return made


def test_each_tensor_is_gathered_once_for_three_servers(syncs_to, times_made):
    model, servers = make_tiny_model(), [StubServer(n) for n in range(3)]
    syncs = syncs_to(*servers)
    assert push_to_all(syncs, model, 7) == [None] * 3
    assert all(has_weights_of(server, model) for server in servers)
    assert [server.policy_version for server in servers] == [7] * 3
    assert set(times_made.values()) == {1} and len(times_made) > 10
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert push_to_all(syncs, model, 8) == [None] * 3
    assert all(has_weights_of(server, model) for server in servers)
    assert set(times_made.values()) == {2}


@pytest.mark.parametrize("hangs", [False, True])
def test_a_server_that_dies_or_hangs_in_mid_push_costs_itself_only(syncs_to, times_made, hangs):
    model, servers = make_tiny_model(), [StubServer(n) for n in range(3)]
    syncs = syncs_to(*servers)
    servers[1].on_write = lambda given_up: given_up.wait(30) if hangs else servers[1].die()
    start = time.monotonic()
    first, second, third = push_to_all(syncs, model, 7, stall_s=0.5)
    assert time.monotonic() - start < 15  # not the 30 s of its own deadline
    assert first is None and third is None and isinstance(second, ServerLostError)
    assert ("did not end in time" in str(second)) == hangs
    assert has_weights_of(servers[0], model) and has_weights_of(servers[2], model)
    assert [sync.connection is None for sync in syncs] == [False, True, False]
    assert set(times_made.values()) == {1}


def sends_sigterm_soon():
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM]).start()


def test_a_signal_ends_a_push_to_servers_that_hang(syncs_to):
    servers = [StubServer(n) for n in range(2)]
    syncs, told = syncs_to(*servers), []
    for server in servers:
        server.on_write = lambda given_up: told.append(given_up) or given_up.wait(30)
    with pytest.raises(Interrupted), Interrupts().handled(None, says=False):
        sends_sigterm_soon()
        push_to_all(syncs, make_tiny_model(), 7)
    assert all(sync.connection is None for sync in syncs)
    assert len(told) == 2 and all(given_up.is_set() for given_up in told)


def test_a_push_keeps_two_buckets_in_memory_however_slow_a_server_is(syncs_to, monkeypatch):
    made, slow = [], threading.Semaphore(0)

    def source(i):
        return Source((10,), torch.float32, lambda: made.append(i) or torch.full((10,), float(i)))

    sources = {str(i): source(i) for i in range(12)}
    monkeypatch.setattr(weight_sync, "what_to_send", lambda *_: (sources, None))
    servers = [StubServer(n) for n in range(2)]
    servers[0].on_write = lambda given_up: slow.acquire()
    syncs, errors = syncs_to(*servers, bucket_bytes=40), []
    model = torch.nn.Linear(1, 1)
    thread = threading.Thread(target=lambda: errors.extend(push_to_all(syncs, model, 7)))
    thread.start()
    soon(lambda: len(made) == 2)  # one is sent, and one waits for that
    time.sleep(0.2)
    assert len(made) == 2
    for _ in range(2 * 12):  # a bucket and its checksum
        slow.release()
    thread.join(20)
    assert errors == [None, None] and made == [*range(12)]
    for server in servers:
        assert [server.weights[str(i)][0].item() for i in range(12)] == [*range(12)]


# --- The pool -------------------------------------------------------------------------------------


@pytest.fixture
def make_pool(monkeypatch):
    """A pool of stand-in servers, and these. `wrong` has the errors of those that are to disagree
    with the trainer.
    """
    monkeypatch.setattr(pool_module, "POLL_S", 0.02)
    monkeypatch.setattr(pool_module, "PAUSE_S", 0.0)
    made = []

    def make(num_servers, timeout_s=5.0, wrong=None):
        def compare(model, server, name):
            if server in (wrong or {}):
                raise wrong[server]

        make_sync = partial(WeightSync, timeout_s=30, trainer="this one")
        servers = [StubServer(n) for n in range(num_servers)]
        check = lambda server: None  # noqa: E731
        made.append(ServerPool(servers, make_sync, check, compare, "auto", timeout_s))
        return made[-1], servers

    yield make
    for pool in made:
        pool.close()
    assert not [t for t in threading.enumerate() if t.name == "replica"]


MODEL = make_tiny_model()


def push(pool, version):
    return pool.push(MODEL, version)["num_servers"]


def soon(holds):
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def states(pool):
    def of(replica):
        if replica.sync is None:
            return "lost"
        return "found" if replica.policy_version is None else "serving"

    return [of(replica) for replica in pool.replicas]


def test_a_server_that_dies_serves_again_after_the_next_push(make_pool, caplog):
    pool, servers = make_pool(3)
    lost = []
    pool.on_lost = lost.append
    pool.wait_until_ready()
    assert states(pool) == ["found"] * 3 and pool.lora_sync == "merged"
    assert push(pool, 0) == 3
    assert states(pool) == ["serving"] * 3 and pool.policy_version == 0
    assert pool.model_name == "base"
    servers[1].die()
    soon(lambda: states(pool) == ["serving", "lost", "serving"])
    soon(lambda: lost == [servers[1].base_url])
    assert "its 0 rollouts begin again" in caplog.text
    pool.check_server()  # two are enough
    assert push(pool, 1) == 2
    servers[1].is_up = True
    soon(lambda: states(pool) == ["serving", "found", "serving"])
    assert {pool.take(1) for _ in range(8)} == {servers[0].base_url, servers[2].base_url}
    assert push(pool, 2) == 3 and has_weights_of(servers[1], MODEL)
    assert pool.take(2) == servers[1].base_url  # it has the fewest running
    # A hold that a cut link has left at a server does not keep the pool out.
    assert {trainer for server in servers for trainer in server.held} == {"this one"}


@pytest.mark.parametrize(
    "connection, message", [(None, "started anew"), ("of another", "another trainer has conn")]
)
def test_a_server_that_started_anew_is_lost_and_one_of_another_trainer_no_reason_to_wait(
    make_pool, connection, message
):
    pool, (server,) = make_pool(1)
    pool.wait_until_ready()
    push(pool, 0)
    server.connection = connection
    with pytest.raises(InferenceServerError, match=message) as caught:
        pool.check_server()
    assert isinstance(caught.value, ServerLostError) == (connection is None)
    soon(lambda: states(pool) == ["found"])


def test_a_server_is_compared_before_and_after_a_step_and_whenever_it_connects_anew(make_pool):
    compared, steps = [], iter(range(100))
    pool, (server,) = make_pool(1)
    pool._check_agreement = lambda *_: compared.append(server.policy_version)
    pool.wait_until_ready()

    def versions(num_pushes):
        compared.clear()
        for _ in range(num_pushes):
            push(pool, next(steps))
        return [*compared]

    assert versions(4) == [0, 1]  # an adapter changes nothing before the first step
    server.die()
    server.is_up = True
    pool.wait_for_server()
    assert versions(3) == [4, 5]
    server.hold.give_up()  # a cut connection, and the server lives: the push makes it anew
    assert versions(3) == [7, 8] and server.held == ["this one"]


@pytest.mark.parametrize("pushes_before", [1, 2])
def test_a_server_that_comes_back_or_goes_on_with_another_model_is_refused(
    make_pool, pushes_before
):
    wrong = {}
    pool, (server,) = make_pool(1, wrong=wrong)
    pool.wait_until_ready()
    for version in range(pushes_before):
        push(pool, version)
    wrong[server] = InferenceServerError("it samples from a different model")
    if pushes_before == 2:
        server.die()
        server.is_up = True
        pool.wait_for_server()
    with pytest.raises(InferenceServerError, match="a different model"):
        push(pool, pushes_before)


def test_servers_that_can_sleep_do_so_between_pushes(make_pool, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(servers[0].calls)))
    pool, servers = make_pool(2)
    for server in servers:
        server.sleeps = True
    assert not pool.sleeps
    pool.wait_until_ready()
    assert pool.sleeps
    for version in range(2):
        assert push(pool, version) == 2
        pool.sleep()
    assert servers[0].calls == servers[1].calls == 2 * ["push", "sleep"]
    assert emptied == [0, 2]  # first the trainer's memory goes, then the servers take theirs
    servers[0].die()
    pool.sleep()  # one that is lost meanwhile costs itself only
    assert states(pool) == ["lost", "serving"]


@pytest.mark.parametrize("num_servers", [1, 2])
def test_if_all_servers_are_lost_the_trainer_waits_for_one(make_pool, num_servers):
    pool, servers = make_pool(num_servers)
    pool.wait_until_ready()
    push(pool, 0)
    for server in servers:
        server.die()
    said = "; ".join(f"no answer from {server.base_url}" for server in servers)
    for use in (pool.check_server, lambda: push(pool, 1)):
        with pytest.raises(ServerLostError, match=f"^{said}$"):
            use()
    threading.Timer(0.3, lambda: setattr(servers[-1], "is_up", True)).start()
    pool.wait_for_server()
    assert pool.policy_version is None  # else the trainer would not push these weights again
    assert push(pool, 1) == 1
    assert states(pool)[-1] == "serving"


def test_a_signal_ends_the_wait_for_servers_that_are_all_lost(make_pool):
    pool, servers = make_pool(2, timeout_s=300)
    for server in servers:
        server.is_up = False
    with pytest.raises(Interrupted), Interrupts().handled(None, says=False):
        sends_sigterm_soon()
        pool.wait_for_server()


def test_a_server_whose_push_has_broken_is_lost_and_not_taken_by_another(make_pool):
    pool, _ = make_pool(1)
    pool.wait_until_ready()
    push(pool, 0)
    sync = pool.replicas[0].sync
    sync.close()  # as a push that breaks does, before the pool has heard of it
    with pytest.raises(ServerLostError):
        sync.check_server()


def test_a_server_that_joins_is_used_from_the_next_push_on(make_pool, monkeypatch):
    pool, servers = make_pool(1)
    pool.wait_until_ready()
    push(pool, 0)
    new = StubServer(7)
    monkeypatch.setattr(pool_module, "InferenceClient", lambda host, port: new)
    servers[0].joined = [("127.0.0.1", 7)]
    soon(lambda: states(pool) == ["serving", "found"])
    assert push(pool, 1) == push(pool, 2) == 2 and has_weights_of(new, MODEL)
    assert states(pool) == ["serving"] * 2
    new.die()  # it is watched like the others
    soon(lambda: states(pool) == ["serving", "lost"])


def test_servers_that_never_come_are_an_error_and_one_is_a_warning(make_pool, caplog):
    pool, servers = make_pool(2, timeout_s=0.3)
    servers[0].is_up = False
    pool.wait_until_ready()
    assert "no server at http://127.0.0.1:0 after 0.3 s" in caplog.text
    pool, servers = make_pool(1, timeout_s=0.3)
    servers[0].is_up = False
    with pytest.raises(InferenceServerError, match=r"no server at .*vf-vllm.*--port 0.*_port"):
        pool.wait_until_ready()


def test_a_server_of_another_model_ends_a_run_at_its_start_and_is_left_out_later(make_pool):
    wrong = {}
    pool, servers = make_pool(2, wrong=wrong)
    wrong[servers[0]] = InferenceServerError("it samples from a different model")
    pool.wait_until_ready()
    with pytest.raises(InferenceServerError, match="a different model"):
        push(pool, 0)
    wrong.clear()
    pool, servers = make_pool(2, 0.1, wrong)
    servers[0].is_up = False
    wrong[servers[0]] = InferenceServerError("it samples from a different model")
    pool.wait_until_ready()
    push(pool, 0)
    servers[0].is_up = True
    soon(lambda: states(pool) == ["found", "serving"])
    assert push(pool, 1) == 1


def test_servers_of_different_dtypes_are_refused(make_pool, caplog):
    pool, servers = make_pool(2)
    servers[1].dtype = "bfloat16"
    with pytest.raises(InferenceServerError, match="start all servers with the same --model"):
        pool.wait_until_ready()
    pool, servers = make_pool(2, 0.1)
    servers[1].is_up = False
    pool.wait_until_ready()
    push(pool, 0)
    servers[1].is_up, servers[1].dtype = True, "bfloat16"
    soon(lambda: "cannot be used: the server at http://127.0.0.1:1 has {" in caplog.text)
    assert states(pool) == ["serving", "lost"]


def test_a_new_rollout_goes_where_the_fewest_run_among_those_with_its_version(make_pool):
    pool, _ = make_pool(4)
    replicas = pool.replicas
    for replica, running, version in zip(replicas, (3, 1, 0, 0), (5, 5, 4, 5), strict=True):
        replica.num_running, replica.policy_version = running, version
    replicas[3].is_in_doubt = True
    assert pool.take(5) == replicas[1].url and pool.take(4) == replicas[2].url
    with pytest.raises(ServerLostError, match="no server has version 6"):
        pool.take(6)
    taken = set()
    for _ in range(50):
        replicas[0].num_running = replicas[1].num_running = 1
        taken.add(pool.take(5))
    assert taken == {replicas[0].url, replicas[1].url}


def test_a_server_that_a_rollout_could_not_reach_gets_none_until_it_answers(make_pool):
    pool, servers = make_pool(2)
    pool.wait_until_ready()
    push(pool, 0)
    pool.release(servers[0].base_url, is_lost=True)
    assert {pool.take(0) for _ in range(4)} == {servers[1].base_url}
    soon(lambda: states(pool) == ["serving"] * 2)


@pytest.mark.parametrize(
    "num_servers, error, message",
    [
        (5, ConnectionError("500"), "500"),
        (5, None, "is lost, after 3 moves to others"),
        (1, None, "is lost, after 0 moves to others"),
    ],
)
def test_a_request_that_every_server_fails_moves_three_times_and_costs_its_own_rollout(
    make_pool, num_servers, error, message
):
    pool, _ = make_pool(num_servers)
    for replica in pool.replicas:
        replica.policy_version = 3
    tried = []

    async def fail_everywhere(session):
        tried.append(session.url)
        session.fail()
        return [Rollout(0, "", error=error), Rollout(0, "", error=error)]

    async def main():
        places = Places(8, pool)
        request = make_request(0, 1, places=places, policy_version=3)
        (poisoned,) = await request.play(0, fail_everywhere)
        async with places.take(request, 1) as session:
            return poisoned, session.url

    poisoned, url = asyncio.run(main())
    assert str(poisoned.error).endswith(message) and poisoned.num_moves == len(tried) - 1
    urls = {replica.url for replica in pool.replicas}
    assert len(tried) == len({*tried} & urls) == min(num_servers, 4)
    assert url in urls  # all answer, and the next rollout is played
    assert [replica.num_running for replica in pool.replicas] == [0] * num_servers


# --- Rollouts -------------------------------------------------------------------------------------


class Routing:
    """A router over stand-in servers, as the pool is one."""

    def __init__(self, urls):
        self.running = dict.fromkeys(urls, 0)
        self.lost, self.taken, self.on_lost = [], [], None

    def take(self, policy_version):
        if not self.running:
            raise ServerLostError("no server")
        url = min(self.running, key=lambda one: (one in self.lost, self.running[one]))
        self.running[url] += 1
        self.taken.append(url)
        return url

    def release(self, url, is_lost):
        self.running[url] -= 1
        self.lost += [url] * is_lost


class Fault(Server):
    """A stand-in server at which `trouble(number of the request)` may happen in place of an
    answer: "hang up", "hang", "version", or an HTTP status.
    """

    def __init__(self, tokenizer, trouble, version=9):
        super().__init__(tokenizer, think)
        self.trouble, self.version, self.num_asked = trouble, version, 0
        self.is_hanging = asyncio.Event()

    async def answer(self, request):
        self.num_asked += 1
        match self.trouble(self.num_asked):
            case "hang up":
                request.transport.close()
                return web.Response()
            case "hang":
                self.is_hanging.set()
                await asyncio.sleep(60)
            case int(status):
                return web.json_response({"error": {"message": "trouble"}}, status)
            case "version":
                reply = await super().answer(request)
                reply.headers["X-Policy-Versions"] = f"0:{self.version - 1}"
                self.requests.pop()
                return reply
        reply = await super().answer(request)
        reply.headers["X-Policy-Versions"] = f"0:{self.version}"
        return reply


@pytest.fixture
def tokenizer(on_the_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(HERE), str(ROOT))))  # of workers too
    from light_tokenizer import LightTokenizer

    return LightTokenizer()


def roll_out(tokenizer, tmp_path, servers, num_rollouts=4, env_workers=0, env=None, during=None):
    """A group at these servers, and the router that chose among them."""
    args = RLConfig(
        output_dir=str(tmp_path), max_seq_len=200, max_tokens=40, use_cpu=True,
        env_workers=env_workers,
    )  # fmt: skip
    env = env or load(id="user_env", harness=None)

    async def main():
        async with AsyncExitStack() as stack:
            path = "/v1/chat/completions/tokens"
            urls = [await stack.enter_async_context(serving(s.answer, path)) for s in servers]
            router = Routing(urls)
            runner, places = make_runner(env, urls[0], tokenizer, args), Places(8, router)
            router.on_lost = places.lose
            try:
                await runner.open()
                sampling = args.sampling_args()
                request = make_request(0, num_rollouts, sampling_args=sampling, places=places)
                group = asyncio.ensure_future(runner.run_group(request))
                if during is not None:
                    await during(router)
                return await group, router
            finally:
                await runner.close()

    return asyncio.run(asyncio.wait_for(main(), 100))


def test_all_turns_of_a_rollout_go_to_one_server_and_rollouts_are_spread(tokenizer, tmp_path):
    servers = [Fault(tokenizer, lambda n: None) for _ in range(2)]
    group, router = roll_out(tokenizer, tmp_path, servers)
    assert [rollout.error for rollout in group] == [None] * 4
    num_turns = group[0].num_turns
    assert num_turns > 1 and [len(s.requests) for s in servers] == [2 * num_turns] * 2
    for server in servers:
        lengths = Counter(len(body["tokens"]) for body, _ in server.requests)
        assert set(lengths.values()) == {2}  # each turn of two rollouts
    assert sorted(router.taken) == sorted([*router.running] * 2)
    assert set(router.running.values()) == {0}  # all are given back
    assert [rollout.num_moves for rollout in group] == [0] * 4


@pytest.mark.parametrize(
    "trouble, env_workers",
    [
        *[(trouble, 0) for trouble in ("hang up", "version", 500, 404)],
        pytest.param("hang up", 1, marks=pytest.mark.slow),
    ],
)
def test_rollouts_of_a_lost_server_begin_again_at_another_one(
    tokenizer, tmp_path, env_workers, trouble
):
    broken = Fault(tokenizer, lambda n: trouble if n > 3 else None)
    good = Fault(tokenizer, lambda n: None)
    group, router = roll_out(tokenizer, tmp_path, [broken, good], env_workers=env_workers)
    assert [rollout.error for rollout in group] == [None] * 4
    assert sorted(rollout.num_moves for rollout in group) == [0, 0, 1, 1]
    check_tokens_of_version(group, 9)
    assert set(router.lost) == {next(iter(router.running))}
    assert set(router.running.values()) == {0}
    num_turns = group[0].num_turns
    assert len(good.requests) == 4 * num_turns  # whole rollouts


def check_tokens_of_version(group, version):
    for rollout in group:
        for sample in rollout.samples:
            assert {*sample.policy_versions.tolist()} == {-1, version}


@pytest.mark.parametrize("env_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_request_to_a_server_that_hangs_ends_when_the_pool_finds_it_lost(
    tokenizer, tmp_path, env_workers
):
    hanging = Fault(tokenizer, lambda n: "hang")
    good = Fault(tokenizer, lambda n: None)

    async def lose(router):
        await hanging.is_hanging.wait()
        url = next(iter(router.running))
        router.lost.append(url)
        router.on_lost(url)

    servers = [hanging, good]
    group, _ = roll_out(tokenizer, tmp_path, servers, env_workers=env_workers, during=lose)
    assert [rollout.error for rollout in group] == [None] * 4
    assert sorted(rollout.num_moves for rollout in group) == [0, 0, 1, 1]


def test_a_group_that_begins_again_in_another_worker_gets_servers_anew(tmp_path):
    router = Routing(["a", "b"])

    async def main():
        env = WorkerEnvironment(TroubledEnv(tmp_path), WorkerPool(1, 60.0))
        await env.open()
        try:
            index = QUESTIONS.index("die once")
            return await env.run_group(make_request(index, 2, places=Places(4, router)))
        finally:
            await env.close()

    group = asyncio.run(main())
    assert [(rollout.error, rollout.num_restarts) for rollout in group] == [(None, 1)] * 2
    assert sorted(router.taken) == ["a", "a", "b", "b"]
    assert router.running == {"a": 0, "b": 0}


def test_the_calls_of_a_program_go_to_the_server_of_its_rollout(tokenizer, tmp_path):
    env = load(harness={"id": "streaming_harness"}, agent={"runtime": {"type": "subprocess"}})
    broken = Fault(tokenizer, lambda n: "hang up")
    good = Fault(tokenizer, lambda n: None)
    group, _ = roll_out(tokenizer, tmp_path, [broken, good], env=env)
    assert [rollout.error for rollout in group] == [None] * 4
    assert sorted(rollout.num_moves for rollout in group) == [0, 0, 1, 1]
    assert len(good.requests) == 4


def test_no_server_at_the_beginning_of_a_group_is_a_lost_server(tokenizer, tmp_path):
    router = Routing([])
    args = RLConfig(output_dir=str(tmp_path), use_cpu=True, env_workers=0)

    async def main():
        runner = make_runner(load(), "http://unused", tokenizer, args)
        places, given = Places(1, router), {"sampling_args": args.sampling_args()}
        with pytest.raises(ServerLostError):
            await runner.run_group(make_request(places=places, **given))
        router.running["a"] = 0
        async with asyncio.timeout(1), places.take(make_request(), 0) as session:
            assert session.url == "a"  # the place was given back

    asyncio.run(main())


# --- Options --------------------------------------------------------------------------------------


def test_servers_are_given_by_their_addresses(tmp_path):
    def make(**options):
        return RLConfig(output_dir=str(tmp_path), use_cpu=True, **options)

    assert make().servers() == [("127.0.0.1", 8000)]
    given = make(vllm_servers=["a:1", "10.0.0.5:8000", "[::1]:80"])
    assert given.servers() == [("a", 1), ("10.0.0.5", 8000), ("::1", 80)]
    for wrong in ([], ["a"], ["http://a:1"], ["::1:80"], ["a:1", "a:1"], ["a:70000"]):
        with pytest.raises(ConfigError, match=r"vllm_servers=.*host:port"):
            make(vllm_servers=wrong)
    with pytest.raises(ConfigError, match=r"takes the place of vllm_server_host"):
        make(vllm_servers=["a:1"], vllm_server_port=8001)
