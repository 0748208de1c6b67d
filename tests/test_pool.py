"""Several servers for one trainer, with stand-ins for them: pushes, routing, faults."""

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from tests.conftest import wait_until
from tests.helpers import StubServer, make_request, make_tiny_model
from verifiers_rl import RLConfig
from verifiers_rl.config import ConfigError
from verifiers_rl.inference import InferenceServerError, ServerLostError
from verifiers_rl.process.interrupts import Interrupted, Interrupts
from verifiers_rl.requests import Places
from verifiers_rl.sync import ServerPool
from verifiers_rl.sync.sources import Source, what_to_send
from verifiers_rl.sync.weight_sync import WeightSync, push_to_all
from verifiers_rl.types import Rollout

MODEL = make_tiny_model()

# --- Pushes ---------------------------------------------------------------------------------------


def syncs_to(servers, bucket_bytes=2**14):
    return [WeightSync(server, timeout_s=30, bucket_bytes=bucket_bytes) for server in servers]


def has_weights(server):
    wanted, got = dict(MODEL.named_parameters()), server.weights
    return got.keys() == wanted.keys() and all(torch.equal(got[n], p) for n, p in wanted.items())


@pytest.mark.parametrize("fault", ["", "dies", "hangs"])
def test_each_tensor_is_gathered_once_and_a_server_with_a_fault_costs_itself_only(
    monkeypatch, fault
):
    times_made = Counter()

    def counting(model, lora_sync):
        def make(name, source):
            times_made[name] += 1
            return source.make()

        sources, adapter = what_to_send(model, lora_sync)
        for name, source in sources.items():
            sources[name] = source._replace(make=partial(make, name, source))
        return sources, adapter

    monkeypatch.setattr("verifiers_rl.sync.weight_sync.what_to_send", counting)
    servers = [StubServer(n) for n in range(3)]
    syncs = syncs_to(servers)
    if fault:
        hangs = fault == "hangs"
        servers[1].on_write = lambda given_up: given_up.wait(30) if hangs else servers[1].die()
    monkeypatch.setattr("verifiers_rl.sync.weight_sync.STALL_S", 0.5)
    errors = push_to_all(syncs, MODEL, 7)
    assert set(times_made.values()) == {1} and len(times_made) > 10
    assert ("did not end in time" in str(errors[1])) == (fault == "hangs")
    for number, (server, sync, error) in enumerate(zip(servers, syncs, errors, strict=True)):
        is_lost = bool(fault) and number == 1
        assert isinstance(error, ServerLostError) == (sync.connection is None) == is_lost
        assert is_lost or (server.policy_version == 7 and has_weights(server))


def test_a_signal_ends_a_push_to_servers_that_hang():
    servers = [StubServer(n) for n in range(2)]
    syncs, told = syncs_to(servers), []
    both_hang = threading.Barrier(2, partial(os.kill, os.getpid(), signal.SIGTERM))

    def hang(given_up):
        told.append(given_up)
        both_hang.wait(30)
        given_up.wait(30)

    for server in servers:
        server.on_write = hang
    with pytest.raises(Interrupted), Interrupts().handled(None, says=False):
        push_to_all(syncs, MODEL, 7)
    assert all(sync.connection is None for sync in syncs)
    assert len(told) == 2 and all(given_up.is_set() for given_up in told)


def test_a_push_keeps_two_buckets_in_memory_however_slow_a_server_is(monkeypatch):
    made, slow = [], threading.Semaphore(0)
    source = Source((10,), torch.float32, lambda: made.append(1) or torch.zeros(10))
    sources = {str(i): source for i in range(12)}
    monkeypatch.setattr("verifiers_rl.sync.weight_sync.what_to_send", lambda *_: (sources, None))
    servers = [StubServer(n) for n in range(2)]
    servers[0].on_write = lambda given_up: slow.acquire()
    syncs = syncs_to(servers, bucket_bytes=40)
    with ThreadPoolExecutor(1) as thread:
        pushing = thread.submit(push_to_all, syncs, MODEL, 7)
        wait_until(lambda: len(made) == 2)  # one is sent, and one waits for that
        time.sleep(0.2)
        num_made = len(made)
        slow.release(12)
        assert pushing.result(20) == [None, None] and num_made == 2 and len(made) == 12


# --- The pool -------------------------------------------------------------------------------------


@pytest.fixture
def make_pool(monkeypatch):
    """A pool of stand-in servers, and these. `wrong` has the errors of those that are to disagree
    with the trainer.
    """
    monkeypatch.setattr("verifiers_rl.sync.pool.POLL_S", 0.02)
    monkeypatch.setattr("verifiers_rl.sync.pool.PAUSE_S", 0.0)
    made = []

    def make(num_servers, timeout_s=5.0, wrong=None):
        def compare(model, server, name):
            if server in (wrong or {}):
                raise wrong[server]

        make_sync = partial(WeightSync, timeout_s=30, trainer="this one")
        servers = [StubServer(n) for n in range(num_servers)]
        made.append(ServerPool(servers, make_sync, check_agreement=compare, timeout_s=timeout_s))
        return made[-1], servers

    yield make
    for pool in made:
        pool.close()
    assert not [t for t in threading.enumerate() if t.name == "replica"]


def push(pool, version):
    return pool.push(MODEL, version)["num_servers"]


def states(pool):
    def of(replica):
        if replica.sync is None:
            return "lost"
        return "found" if replica.policy_version is None else "serving"

    return [of(replica) for replica in pool.replicas]


@pytest.mark.parametrize("connection", [None, "of another", "broken"])
def test_a_server_that_started_anew_or_has_another_trainer_is_lost(make_pool, connection):
    pool, (server,) = make_pool(1)
    pool.wait_until_ready()
    push(pool, 0)
    sync = pool.replicas[0].sync
    if connection == "broken":
        sync.close()  # as a push that breaks does, before the pool has heard of it
    else:
        server.connection = connection
    with pytest.raises(ServerLostError, match="started anew, or the connection"):
        sync.check_server()


def test_one_failed_look_at_a_server_that_lives_does_not_lose_it(make_pool):
    pool, (server,) = make_pool(1)
    pool.wait_until_ready()
    push(pool, 0)
    status, failing = server.status, iter([ServerLostError("no answer")])

    def look():
        if (error := next(failing, None)) is not None:
            raise error
        return status()

    server.status = look
    pool.check_server()
    assert states(pool) == ["serving"]


def test_a_server_is_compared_before_and_after_a_step_and_whenever_it_connects_anew(make_pool):
    compared, steps = [], iter(range(100))
    pool, (server,) = make_pool(1)
    pool._check_agreement = lambda *_: compared.append(server.policy_version)
    pool.wait_until_ready()

    def versions_of_four():
        compared.clear()
        for _ in range(4):
            push(pool, next(steps))
        return [*compared]

    assert versions_of_four() == [0, 1, 2]  # a first step of a warmup changes nothing either
    server.die()
    server.is_up = True
    pool.wait_for_server()
    assert versions_of_four() == [4, 5, 6]
    server.hold.give_up()  # a cut connection, and the server lives: the push makes it anew
    assert versions_of_four() == [8, 9, 10] and server.held == ["this one"]


@pytest.mark.parametrize("pushes_before", [0, 1])
def test_a_server_that_begins_or_goes_on_with_another_model_is_refused(make_pool, pushes_before):
    wrong = {}
    pool, servers = make_pool(1 if pushes_before else 2, wrong=wrong)
    pool.wait_until_ready()
    for version in range(pushes_before):
        push(pool, version)
    wrong[servers[0]] = InferenceServerError("it samples from a different model")
    with pytest.raises(InferenceServerError, match="a different model"):
        push(pool, pushes_before)


def test_servers_that_can_sleep_do_so_between_pushes(make_pool, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(server.calls)))
    pool, (server,) = make_pool(1)
    server.sleeps = True
    pool.wait_until_ready()
    for version in range(2):
        push(pool, version)
        pool.sleep()
    assert pool.sleeps and server.calls == 2 * ["push", "sleep"]
    assert emptied == [0, 2]  # first the trainer's memory goes, then the server takes its own


def test_if_all_servers_are_lost_the_trainer_waits_for_one(make_pool):
    pool, servers = make_pool(2)
    lost = []
    pool.on_lost = lost.append
    pool.wait_until_ready()
    assert pool.lora_sync == "merged"  # "auto", of a server in float32 without --enable-lora
    push(pool, 0)
    for server in servers:
        server.die()
    for use in (pool.check_server, lambda: push(pool, 1)):
        with pytest.raises(ServerLostError, match=r"no answer from .*:0; no answer from .*:1$"):
            use()
    assert {*lost} == {server.base_url for server in servers}
    threading.Timer(0.3, setattr, [servers[1], "is_up", True]).start()
    pool.wait_for_server()
    assert pool.policy_version is None  # else the trainer would not push these weights again
    assert push(pool, 1) == 1
    servers[0].is_up = True
    wait_until(lambda: states(pool) == ["found", "serving"])
    assert pool.take(1) == servers[1].base_url  # until the next push
    assert push(pool, 2) == 2 and has_weights(servers[0])


def test_a_server_that_joins_is_used_from_the_next_push_on(make_pool, monkeypatch):
    pool, servers = make_pool(1)
    pool.wait_until_ready()
    push(pool, 0)
    new = StubServer(7)
    monkeypatch.setattr("verifiers_rl.sync.pool.InferenceClient", lambda host, port: new)
    servers[0].joined = [("127.0.0.1", 7)]
    wait_until(lambda: states(pool) == ["serving", "found"])
    assert push(pool, 1) == 2 and has_weights(new)


def test_servers_that_never_come_are_an_error(make_pool):
    pool, (server,) = make_pool(1, timeout_s=0.3)
    server.is_up = False
    with pytest.raises(InferenceServerError, match=r"no server at .*vf-vllm.*--port 0.*_port"):
        pool.wait_until_ready()


def test_a_server_of_another_model_or_dtype_that_comes_later_is_left_out(make_pool, caplog):
    wrong = {}
    pool, servers = make_pool(3, 0.1, wrong)
    servers[0].is_up = servers[1].is_up = False
    wrong[servers[0]] = InferenceServerError("it samples from a different model")
    pool.wait_until_ready()
    push(pool, 0)
    servers[1].dtype, servers[0].is_up, servers[1].is_up = "bfloat16", True, True
    wait_until(lambda: states(pool) == ["found", "lost", "serving"])
    assert push(pool, 1) == 1
    wait_until(lambda: "cannot be used: the server at http://127.0.0.1:1 has {" in caplog.text)


def test_a_new_rollout_goes_where_the_fewest_run_among_those_with_its_version(make_pool):
    pool, _ = make_pool(4)
    replicas = pool.replicas
    for replica, running, version in zip(replicas, (3, 1, 0, 0), (5, 5, 4, 5), strict=True):
        replica.num_running, replica.policy_version = running, version
    replicas[3].is_in_doubt = True
    assert pool.take(5) == replicas[1].url and pool.take(4) == replicas[2].url
    with pytest.raises(ServerLostError, match="no server has version 6"):
        pool.take(6)


def test_a_server_that_a_rollout_could_not_reach_gets_none_until_it_answers(make_pool):
    pool, servers = make_pool(2)
    pool.wait_until_ready()
    push(pool, 0)
    pool.release(servers[0].base_url, is_lost=True)
    assert {pool.take(0) for _ in range(4)} == {servers[1].base_url}
    wait_until(lambda: not pool.replicas[0].is_in_doubt)


@pytest.mark.parametrize(
    "num_servers, error, message",
    [(5, ConnectionError("500"), "500"), (1, None, "is lost, after 0 moves to others")],
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

    request = make_request(places=Places(8, pool), policy_version=3)
    (poisoned,) = asyncio.run(request.play(0, fail_everywhere))
    assert str(poisoned.error).endswith(message) and poisoned.num_moves == len(tried) - 1
    assert len(tried) == len({*tried}) == min(num_servers, 4)
    assert pool.take(3)  # all answer, and the next rollout is played
    assert sum(replica.num_running for replica in pool.replicas) == 1


# --- Options --------------------------------------------------------------------------------------


def test_servers_are_given_by_their_addresses(tmp_path):
    make = partial(RLConfig, output_dir=tmp_path, use_cpu=True)
    given = make(vllm_servers=["a:1", "10.0.0.5:8000", "[::1]:80"])
    assert given.servers() == [("a", 1), ("10.0.0.5", 8000), ("::1", 80)]
    for wrong in ([], ["http://a:1"], ["::1:80"], ["a:1", "a:1"], ["a:70000"]):
        with pytest.raises(ConfigError, match=r"vllm_servers=.*host:port"):
            make(vllm_servers=wrong)
    with pytest.raises(ConfigError, match="vllm_server_host"):
        make(vllm_servers=["a:1"], vllm_server_port=8001)
