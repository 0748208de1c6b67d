"""Seeds of requests follow from the run's seed and the rollout's place, and from nothing else."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from aiohttp import web

from tests.helpers import StubRunner, make_tiny_model, serving, stub_servers
from verifiers_rl import RLConfig
from verifiers_rl.inference import RolloutSession, ServerClient, derive_seed
from verifiers_rl.inference.client import InferenceServerError
from verifiers_rl.orchestrator import Orchestrator
from verifiers_rl.wiring import check_options, make_pool


class Recorder(StubRunner):
    """Keeps the seeds of its groups, by their place."""

    def __init__(self):
        super().__init__()
        self.seeds = {}

    async def run_group(self, request):
        place = request.split, request.index, request.policy_version
        self.seeds.setdefault(place, []).append(request.seed)
        return await super().run_group(request)


def seeds_of(seed, *steps):
    """The seeds of the groups of these steps, which are policy versions too."""
    runner = Recorder()
    seeds = {} if seed is None else {"deterministic": True, "seed": seed}
    args = RLConfig(use_cpu=True, batch_size=4, rollouts_per_example=2, **seeds)
    orchestrator = Orchestrator(
        runner, args, lambda: None,
        example_order=lambda positions, sizes: [position % 3 for position in positions],
    )  # fmt: skip
    orchestrator.start()
    try:
        for step in steps:
            orchestrator.submit(step, "m", step)
            orchestrator.get()
        orchestrator.begin_evaluation(2, 1, "m", steps[-1])
        orchestrator.end_evaluation()
    finally:
        orchestrator.stop()
    return runner.seeds


def test_each_group_of_a_run_has_a_seed_of_its_own_whatever_ran_before():
    seeds = seeds_of(42, 0, 1, 1, 2)  # one step twice, as after a lost server
    every = [seed for of_place in seeds.values() for seed in of_place]
    assert len({*every}) == len(every) == 4 * 2 + 2
    assert all(0 <= seed < 2**63 for seed in every)
    resumed = seeds_of(42, 2)
    assert resumed == {place: seeds[place] for place in resumed}
    assert not {*every} & {seed for of_place in seeds_of(43, 0).values() for seed in of_place}
    assert {seed for of_place in seeds_of(None, 0).values() for seed in of_place} == {None}


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
                client = client.of_rollout(RolloutSession(0, group_seed=5, number=3))
                await post(x=2)
                await post(x=3)
                await post(x=4, seed=9)
            finally:
                await client.close()

    asyncio.run(ask())
    assert bodies == [
        {"x": 1},
        {"x": 2, "seed": derive_seed(5, 3, 1)},
        {"x": 3, "seed": derive_seed(5, 3, 2)},
        {"x": 4, "seed": 9},
    ]


def test_a_server_that_a_seed_could_kill_is_refused(caplog):
    exact = {"takes_seeds": True, "batch_invariant": True}
    args = SimpleNamespace(router_replay=False, deterministic=True, max_seq_len=64)
    check_options("http://s", exact, args)
    assert not caplog.messages
    check_options("http://s", {**exact, "batch_invariant": False}, args)
    (message,) = caplog.messages
    assert "a token may differ now and then" in message and "VLLM_BATCH_INVARIANT=1" in message
    with pytest.raises(InferenceServerError, match="vf-vllm with --no-enable-chunked-prefill"):
        check_options("http://s", {**exact, "takes_seeds": False}, args)


def test_a_server_that_takes_shorter_sequences_is_refused():
    args = SimpleNamespace(router_replay=False, deterministic=False, max_seq_len=64)
    check_options("http://s", {"max_model_len": 64}, args)
    said = "max_seq_len=64: the server at http://s has max_model_len=63; start it with --max-model-"
    with pytest.raises(InferenceServerError, match=said):
        check_options("http://s", {"max_model_len": 63}, args)


def test_each_server_of_several_is_asked_and_named(monkeypatch, tmp_path):
    servers = stub_servers(monkeypatch, takes_seeds=False)
    args = RLConfig(
        output_dir=str(tmp_path), use_cpu=True, deterministic=True, vllm_server_timeout=0.1,
        vllm_servers=["gpu:1", "cpu:2"],
    )  # fmt: skip
    pool = make_pool(make_tiny_model(), None, args)
    with pytest.raises(InferenceServerError, match="the server at http://gpu:1 runs on a CPU"):
        pool.wait_until_ready()
    servers[0].is_up = False
    with pytest.raises(InferenceServerError, match="the server at http://cpu:2 runs on a CPU"):
        pool.wait_until_ready()
    args.deterministic = False
    pool.wait_until_ready()
