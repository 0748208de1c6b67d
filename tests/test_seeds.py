"""Seeds of requests follow from the run's seed and the rollout's place, and from nothing else."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from aiohttp import web

from tests.helpers import StubRunner, make_tiny_model, serving, stub_servers
from verifiers_rl import RLConfig
from verifiers_rl.inference import RolloutSession, ServerClient, derive_seed
from verifiers_rl.inference.client import InferenceServerError
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


def test_each_group_of_a_run_has_a_seed_of_its_own_whatever_ran_before(make_orchestrator):
    def seeds_of(*steps, **options):
        """The seeds of the groups of these steps, which are policy versions too."""
        runner, sizes = Recorder(), {"batch_size": 4, "rollouts_per_example": 2}
        in_turn = {"example_order": lambda positions, sizes: [p % 3 for p in positions]}
        orchestrator = make_orchestrator(runner, **in_turn, **sizes, **options)
        for step in steps:
            orchestrator.submit(step, "m", step)
            orchestrator.get()
        orchestrator.begin_evaluation(2, 1, "m", steps[-1])
        orchestrator.end_evaluation()
        return runner.seeds

    def values(seeds):
        return [seed for of_place in seeds.values() for seed in of_place]

    own = {"deterministic": True, "seed": 42}
    seeds = seeds_of(0, 1, 1, 2, **own)  # one step twice, as after a lost server
    every = values(seeds)
    assert len({*every}) == len(every) == 4 * 2 + 2
    assert all(0 <= seed < 2**63 for seed in every)
    resumed = seeds_of(2, **own)
    assert resumed == {place: seeds[place] for place in resumed}
    assert not {*every} & {*values(seeds_of(0, deterministic=True, seed=43))}
    assert {*values(seeds_of(0))} == {None}


def test_a_client_sends_the_seeds_unless_the_request_has_its_own():
    bodies, seeded = [], RolloutSession(0, group_seed=5, number=3)

    async def handler(request):
        bodies.append(await request.json())
        return web.json_response({})

    async def ask():
        async with serving(handler) as url:
            client = ServerClient(f"{url}/v1", 10.0)
            own = client.of_rollout(seeded)
            try:
                for sender, fields in ((client, {}), (own, {}), (own, {}), (own, {"seed": 9})):
                    await sender.post("/chat/completions", cast_to=httpx.Response, body=fields)
            finally:
                await own.close()

    asyncio.run(ask())
    expected = [derive_seed(5, 3, number) for number in (1, 2)]
    assert bodies == [{}, *({"seed": seed} for seed in (*expected, 9))]


def test_a_server_that_lacks_what_options_need_is_refused(caplog):
    exact = {"takes_seeds": True, "batch_invariant": True, "max_model_len": 64}
    exact["returns_experts"] = True
    args = SimpleNamespace(router_replay=True, deterministic=True, max_seq_len=64)
    check_options("http://s", exact, args)
    assert not caplog.messages
    check_options("http://s", {**exact, "batch_invariant": False}, args)
    (message,) = caplog.messages
    assert "VLLM_BATCH_INVARIANT=1" in message
    for lacking, problem in (
        ({"takes_seeds": False}, "vf-vllm with --no-enable-chunked-prefill"),
        ({"returns_experts": False}, "router_replay=True: .* --enable-return-routed-experts"),
        ({"max_model_len": 63}, "max_seq_len=64: the server at http://s has max_model_len=63; "),
    ):
        with pytest.raises(InferenceServerError, match=problem):
            check_options("http://s", {**exact, **lacking}, args)


def test_each_server_of_several_is_asked_and_named(monkeypatch):
    servers = stub_servers(monkeypatch, takes_seeds=False)
    args = RLConfig(
        use_cpu=True, deterministic=True, vllm_server_timeout=0.1,
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
