"""Seeds of requests follow from the run's seed and the rollout's place, and from nothing else."""

import pytest

from tests.helpers import StubRunner, stub_servers
from verifiers_rl import RLConfig
from verifiers_rl.inference import InferenceServerError, RolloutSession, derive_seed
from verifiers_rl.wiring import make_pool


def seeds_of_places(runner):
    """The seeds of a runner's groups, by their place."""
    seeds = {}
    for request in runner.seen:
        place = request.split, request.index, request.policy_version
        seeds.setdefault(place, []).append(request.seed)
    return seeds


def test_each_group_of_a_run_has_a_seed_of_its_own_whatever_ran_before(make_orchestrator):
    def seeds_of(*steps, **options):
        """The seeds of the groups of these steps, which are policy versions too; and all seeds."""
        runner = StubRunner()
        options |= {"example_order": lambda positions, sizes: [p % 3 for p in positions]}
        options |= {"rollouts_per_example": 2, "eval_examples": 2}
        orchestrator = make_orchestrator(runner, **options)
        for step in steps:
            orchestrator.submit(step, "m", step)
            orchestrator.get()
        orchestrator.begin_evaluation("m", steps[-1])
        orchestrator.end_evaluation()
        return seeds_of_places(runner), [request.seed for request in runner.seen]

    own = {"deterministic": True, "seed": 42}
    seeds, every = seeds_of(0, 1, 1, 2, **own)  # one step twice, as after a lost server
    assert len({*every}) == len(every) == 4 * 4 + 2
    resumed, _ = seeds_of(2, **own)
    assert resumed == {place: seeds[place] for place in resumed}
    assert not {*every} & {*seeds_of(0, deterministic=True, seed=43)[1]}
    assert {*seeds_of(0)[1]} == {None}


def test_a_run_that_goes_on_in_its_process_has_the_seeds_that_it_had(make_orchestrator):
    runner = StubRunner()
    orchestrator = make_orchestrator(runner, deterministic=True)
    for _ in range(2):
        orchestrator.submit(0, "m", 0)
        orchestrator.get()
        orchestrator.stop()
        orchestrator.start()
    assert all(first == again for first, again in seeds_of_places(runner).values())


def test_each_request_of_a_rollout_has_a_seed_of_its_own():
    seeded = RolloutSession(0, group_seed=5, number=3)
    assert [seeded.next_seed() for _ in range(2)] == [derive_seed(5, 3, n) for n in (1, 2)]
    assert RolloutSession(0).next_seed() is None


def test_a_server_that_lacks_what_options_need_is_refused(monkeypatch, caplog):
    exact = {"takes_seeds": True, "batch_invariant": True, "returns_experts": True}
    exact["max_model_len"] = 64
    args = RLConfig(
        use_cpu=True, deterministic=True, router_replay=True, max_seq_len=64,
        vllm_servers=["gpu:1", "cpu:2"],
    )  # fmt: skip

    def begin(**lacking):
        stub_servers(monkeypatch, **exact | lacking)
        make_pool(None, args).wait_until_ready()

    begin()
    assert not caplog.messages
    begin(batch_invariant=False)
    assert "VLLM_BATCH_INVARIANT=1" in caplog.text
    for lacking, problem in (
        ({"takes_seeds": False}, "--no-enable-chunked-prefill"),
        ({"returns_experts": False}, "router_replay=True: .* --enable-return-routed-experts"),
        ({"max_model_len": 63}, "max_seq_len=64: .*http://gpu:1 has max_model_len=63"),
    ):
        with pytest.raises(InferenceServerError, match=problem):
            begin(**lacking)
