"""Seeds of requests follow from the run's seed and the rollout's place, and from nothing else."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
import torch
from aiohttp import web

from tests.helpers import serving
from verifiers_rl import server_side
from verifiers_rl.envs.seeded import SeededEnvironment
from verifiers_rl.inference import (
    ServerClient,
    begin_rollout,
    current_group_seed,
    current_seeds,
    derive_seed,
)
from verifiers_rl.inference.client import InferenceServerError
from verifiers_rl.server_side import check_determinism


class Recorder:
    """An EnvRunner whose rollouts take two seeds each, and end in an order of their own."""

    name = "recorder"

    async def run_group(self, split, index, num_rollouts, model, sampling, version, slots):
        async def one(number):
            await asyncio.sleep(0.001 * (number % 2))
            seeds = begin_rollout(number)
            return None if seeds is None else [current_seeds.get().take(), seeds.take()]

        return await asyncio.gather(*(one(number) for number in range(num_rollouts)))


def run(env, *places):
    async def groups():
        return await asyncio.gather(*(
            env.run_group(split, index, 4, "m", {}, version, None)
            for split, index, version in places
        ))  # fmt: skip

    return asyncio.run(groups())


PLACES = [("train", 0, 0), ("train", 1, 0), ("train", 0, 1), ("eval", 0, 0), ("train", 0, 0)]


def test_each_request_of_a_run_has_a_seed_of_its_own():
    seeds = [s for group in run(SeededEnvironment(Recorder(), 42), *PLACES) for two in group
             for s in two]  # fmt: skip
    assert len({*seeds}) == len(seeds) == 5 * 4 * 2  # also where a batch has an example twice
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_same_run_has_the_same_seeds_in_any_order_of_other_groups():
    first = run(SeededEnvironment(Recorder(), 42), *PLACES)
    assert run(SeededEnvironment(Recorder(), 42), *PLACES[3::-1]) == first[3::-1]
    assert run(SeededEnvironment(Recorder(), 42), PLACES[2]) == [first[2]]  # in a run of its own
    assert run(SeededEnvironment(Recorder(), 43), *PLACES)[0] != first[0]


def test_a_group_without_seed_gives_its_requests_none():
    assert run(Recorder(), PLACES[0]) == [[None] * 4]
    env = SeededEnvironment(Recorder(), 1)
    assert env.name == "recorder"

    async def before_and_behind():
        await env.run_group("train", 0, 1, "m", {}, 0, None)
        return current_group_seed.get()

    assert asyncio.run(before_and_behind()) is None


def test_a_seed_depends_on_each_part_and_on_their_order():
    seeds = {derive_seed(*parts) for parts in [(1, 2), (2, 1), (12,), (1, 2, 3), ("1", 2)]}
    assert len(seeds) == 5
    assert derive_seed(1, 2) == derive_seed(1, 2)


def test_a_client_sends_the_seeds_unless_the_request_has_its_own():
    bodies = []

    async def handler(request):
        bodies.append(json.loads(await request.text()))
        return web.json_response({})

    async def ask():
        async with serving(handler) as url:
            client = ServerClient(f"{url}/v1", 10.0)

            async def post(**fields):
                await client.post("/chat/completions", cast_to=httpx.Response, body=fields)

            try:
                await post(x=1)
                current_group_seed.set(5)
                begin_rollout(3)
                await post(x=2)
                await post(x=3)
                await post(x=4, seed=9)
                await post(sampling_params={"top_p": 0.5})
            finally:
                await client.close()

    asyncio.run(ask())
    assert bodies == [
        {"x": 1},
        {"x": 2, "seed": derive_seed(5, 3, 1)},
        {"x": 3, "seed": derive_seed(5, 3, 2)},
        {"x": 4, "seed": 9},
        {"sampling_params": {"top_p": 0.5, "seed": derive_seed(5, 3, 4)}},
    ]


def test_a_server_that_a_seed_could_kill_is_refused(caplog):
    exact = {"takes_seeds": True, "batch_invariant": True}
    check_determinism(exact, "http://s")
    assert not caplog.messages
    check_determinism({**exact, "batch_invariant": False}, "http://s")
    (message,) = caplog.messages
    assert "a token may differ now and then" in message and "VLLM_BATCH_INVARIANT=1" in message
    with pytest.raises(InferenceServerError, match="vf-vllm with --no-enable-chunked-prefill"):
        check_determinism({**exact, "takes_seeds": False}, "http://s")


def test_each_server_of_several_is_asked_and_named(monkeypatch):
    class Server:
        def __init__(self, url, takes_seeds):
            self.base_url, self.takes_seeds = url, takes_seeds

        def check_model(self, config): ...

        def status(self):
            return {"takes_seeds": self.takes_seeds, "batch_invariant": True}

    monkeypatch.setattr(
        server_side, "ReplicaPool", lambda clients, make_sync, push, check, s: check
    )
    monkeypatch.setattr(server_side, "check_agreement", lambda *args: None)
    args = SimpleNamespace(router_replay=False, deterministic=True, vllm_server_timeout=1)
    servers = [Server("http://gpu", True), Server("http://cpu", False)]
    policy, model = SimpleNamespace(config=None), torch.nn.Linear(1, 1)
    check = server_side._make_pool(servers, policy, None, args)
    check(model, servers[0], "model")
    with pytest.raises(InferenceServerError, match="the server at http://cpu runs on a CPU"):
        check(model, servers[1], "model")
    args.deterministic = False
    check(model, servers[1], "model")
