"""Environments in worker processes, against a stand-in for the server that answers over HTTP."""

import asyncio
import json
import os
import signal
import sys
import textwrap

import pytest
import verifiers as vf
from aiohttp import web

from tests.helpers import serving, values_of
from verifiers_rl import RLConfig
from verifiers_rl.config import ConfigError
from verifiers_rl.envs.base import InvalidEnvironmentError, WeightedEnv
from verifiers_rl.envs.make import make_runner
from verifiers_rl.envs.workers import EnvWorkerError
from verifiers_rl.orchestrator import Orchestrator
from verifiers_rl.types import Slots

MODULE = """
    import os, time
    import verifiers as vf
    from datasets import Dataset
    
    class Tokenizer:  # transformers takes seconds to load, in each worker
        def apply_chat_template(self, *args, **kwargs):
            raise ValueError("no template, so messages go to the server")

    def load_environment(size=4, fail=False, forks=False, only_in=None):
        if only_in is not None and os.getpid() != only_in:
            raise ValueError("a file of the worker is missing")
        dataset = Dataset.from_dict(
            {"question": [f"q{i}" for i in range(size)], "answer": ["a"] * size}
        )

        def pid(completion) -> float:
            return float(os.getpid())

        def score(completion, prompt) -> float:
            question = prompt[-1]["content"]
            if question == "q1" and fail:
                class Odd(Exception):
                    held = lambda self: None
                raise Odd("no answer key")
            if question == "q2" and fail:
                if forks and os.fork() == 0:
                    time.sleep(5)
                    os._exit(0)
                os._exit(7)
            return float(len(completion[-1]["content"]))

        rubric = vf.Rubric(funcs=[score, pid], weights=[1.0, 0.0])
        return vf.SingleTurnEnv(dataset=dataset, eval_dataset=dataset, rubric=rubric)
"""


@pytest.fixture
def make_env(tmp_path, monkeypatch):
    """Loads the environment above, which only this process's sys.path knows of."""
    (tmp_path / "env_of_workers.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda **args: vf.load_environment("env-of-workers", **args)
    sys.modules.pop("env_of_workers", None)


class Server:
    """Answers each request with three tokens of version 5, unless it is to hold it."""

    def __init__(self):
        self.num_running = self.peak = self.num_aborted = 0
        self.holds = False

    async def answer(self, request):
        body = await request.json()
        self.num_running += 1
        self.peak = max(self.peak, self.num_running)
        try:
            await asyncio.sleep(3600 if self.holds else 0.02)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1
        logprob = {"token": "x", "logprob": -0.5, "top_logprobs": []}
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "yes"},
            "token_ids": [5, 6, 7],
            "logprobs": {"content": [logprob] * 3},
        }
        reply = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
            "prompt_token_ids": [1, 2],
        }
        return web.json_response(reply, headers={"X-Policy-Versions": "0:5"})


def roll_out(env, tmp_path, use, server=None, **options):
    """What `use(run, runner)` returns, where `run(index)` gives a group of two rollouts."""
    defaults = {"max_seq_len": 64, "use_cpu": True, "env_workers": 0}
    args = RLConfig(output_dir=str(tmp_path), **defaults | options)

    server = server or Server()

    async def main():
        async with serving(server.answer) as url:
            runner = make_runner(env, url, sys.modules["env_of_workers"].Tokenizer(), args)
            slots = Slots(args.max_concurrent)

            async def run(index):
                sampling = args.sampling_args()
                return await runner.run_group("train", index, 2, "m", sampling, 2, slots)

            try:
                await runner.open()
                return await use(run, runner)
            finally:
                await runner.close()

    return asyncio.run(asyncio.wait_for(main(), 120))


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_rollouts_in_workers_are_those_of_this_process(make_env, tmp_path):
    async def all_of_them(run, runner):
        return await asyncio.gather(*map(run, range(4)))

    env = make_env()
    here = roll_out(env, tmp_path, all_of_them)
    there = roll_out(env, tmp_path, all_of_them, env_workers=2)
    pids = {rollout.metrics["pid"] for group in there for rollout in group}
    assert len(pids) == 2 and os.getpid() not in pids
    assert not any(is_running(int(pid)) for pid in pids)
    assert {r.metrics.pop("pid") for group in here for r in group} == {os.getpid()}
    for group, same in zip(here, there, strict=True):
        for rollout, other in zip(group, same, strict=True):
            other.metrics.pop("pid")
            assert rollout.generation_s > 0 and other.generation_s > 0
            rollout.generation_s = other.generation_s = 0.0
            (sample,), (same_sample,) = rollout.samples, other.samples
            assert values_of(sample) == values_of(same_sample)
            assert other.samples[0].policy_versions.tolist() == [-1, -1, 5, 5, 5]
            rollout.samples = other.samples = []
            record, same_record = json.loads(rollout.record), json.loads(other.record)
            for each in (record, same_record):  # when and where it ran
                assert each.pop("begun_at") > 0
            assert record == same_record
            rollout.record = other.record = b""
            assert rollout == other


def test_errors_cost_their_own_group_and_a_worker_that_dies_is_replaced(make_env, tmp_path):
    async def use(run, runner):
        together = await asyncio.gather(run(1), run(3))
        return *together, await run(2), await run(0)

    failed, well, lost, after = roll_out(make_env(fail=True), tmp_path, use, env_workers=1)
    for rollout in failed:
        assert isinstance(rollout.error, EnvWorkerError)
        assert str(rollout.error) == "Odd: no answer key"
        assert "env_of_workers.py" in rollout.error.__notes__[0]  # its traceback there
    assert len(lost) == 2
    assert all("ended with status 7" in str(rollout.error) for rollout in lost)
    assert [(r.prompt, r.reward) for r in well] == [("q3", 3.0)] * 2
    assert [(r.prompt, r.reward) for r in after] == [("q0", 3.0)] * 2
    assert well[0].metrics["pid"] != after[0].metrics["pid"]


def test_cancelled_groups_and_killed_workers_leave_the_others_alone(make_env, tmp_path):
    server = Server()

    async def use(run, runner):
        server.holds = True
        group = asyncio.create_task(run(0))
        while server.num_running < 2:
            await asyncio.sleep(0.01)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        while server.num_running:  # until the worker has let go of its requests
            await asyncio.sleep(0.01)
        assert server.num_aborted == 2
        assert [worker.num_groups for worker in runner.pool.workers] == [0, 0]
        server.holds = False
        first, second = (worker._process.pid for worker in runner.pool.workers)
        os.kill(first, signal.SIGKILL)
        groups = await asyncio.gather(*map(run, range(4)))
        return second, [rollout for group in groups for rollout in group]

    second, rollouts = roll_out(make_env(), tmp_path, use, server, env_workers=2)
    assert [rollout.error for rollout in rollouts] == [None] * 8
    assert second in {int(rollout.metrics["pid"]) for rollout in rollouts}
    assert not is_running(second)


@pytest.mark.parametrize(
    ("env_args", "message"),
    [
        ({"only_in": os.getpid()}, "'env', in a worker: .*a file of the worker is missing"),
        ({"size": lambda: 3}, "cannot be sent to another process.*env_workers=0"),
    ],
)
def test_an_environment_that_a_worker_cannot_load_is_one_error(
    make_env, tmp_path, env_args, message
):
    env = make_env(**env_args) if "only_in" in env_args else make_env()
    env.env_args = env_args
    with pytest.raises(InvalidEnvironmentError, match=message):
        roll_out(env, tmp_path, None, env_workers=1)


def test_an_environment_without_an_id_runs_here_or_is_told_apart(make_env, tmp_path):
    env = make_env()
    env.env_id = ""

    async def use(run, runner):
        return await run(0)

    (rollout, _) = roll_out(env, tmp_path, use, env_workers="auto")
    assert rollout.error is None and rollout.metrics["pid"] == os.getpid()
    with pytest.raises(InvalidEnvironmentError, match=r"has no id to load it by.*env_workers=0"):
        roll_out(env, tmp_path, None, env_workers=1)


def test_a_worker_that_does_not_load_in_time_is_an_error(make_env, tmp_path, monkeypatch):
    monkeypatch.setattr("verifiers_rl.envs.workers.LOAD_S", 0.05)
    with pytest.raises(InvalidEnvironmentError, match="not loaded within"):
        roll_out(make_env(), tmp_path, None, env_workers=1, generation_timeout=0.05)


def test_a_worker_whose_environment_differs_is_an_error(make_env, tmp_path):
    env = make_env()
    env.rubric.add_reward_func(lambda completion: 1.0)
    with pytest.raises(InvalidEnvironmentError, match=r"is not in the workers; set env_workers=0"):
        roll_out(env, tmp_path, None, env_workers=1)


def test_a_worker_that_leaves_a_process_behind_is_replaced_too(make_env, tmp_path):
    """That process holds the worker's end of the connection."""

    async def use(run, runner):
        lost = await run(2)
        return lost, await run(0)

    lost, after = roll_out(make_env(fail=True, forks=True), tmp_path, use, env_workers=1)
    assert all("ended with status 7" in str(rollout.error) for rollout in lost)
    assert [rollout.reward for rollout in after] == [3.0, 3.0]


def test_max_concurrent_holds_over_all_workers_and_environments(make_env, tmp_path):
    server = Server()
    envs = [WeightedEnv(make_env(), "a", weight=3), WeightedEnv(make_env(size=2), "b")]

    async def use(run, runner):
        return await asyncio.gather(*map(run, range(sum(runner.sizes("train")))))

    options = {"env_workers": 1, "max_concurrent": 3}
    groups = roll_out(envs, tmp_path, use, server, **options)
    assert [rollout.error for group in groups for rollout in group] == [None] * 12
    assert server.peak in (2, 3)  # a group of two, and one of another when the first has ended
    one_by_one = Server()
    roll_out(make_env(), tmp_path, use, one_by_one, **options | {"max_concurrent": 1})
    assert one_by_one.peak == 1


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_env_workers_must_be_a_number_of_processes(tmp_path, value):
    with pytest.raises(ConfigError, match="env_workers"):
        RLConfig(output_dir=str(tmp_path), env_workers=value)


def test_stopping_the_orchestrator_ends_its_workers(make_env, tmp_path):
    args = RLConfig(output_dir=str(tmp_path), env_workers=2, use_cpu=True, batch_size=4,
                    rollouts_per_example=2, max_seq_len=64)  # fmt: skip
    runner = make_runner(make_env(), "http://127.0.0.1:9", None, args)
    orchestrator = Orchestrator(
        runner, lambda: None, batch_size=4, rollouts_per_example=2, sampling_args={}
    )
    orchestrator.start()
    pids = [worker._process.pid for worker in runner.pool.workers]
    assert all(map(is_running, pids))
    orchestrator.submit(0, "m", 0)
    orchestrator.stop()
    assert not any(map(is_running, pids))
