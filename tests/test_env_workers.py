"""Rollout workers with environments of verifiers.v1, against a stand-in for vf-vllm."""

import asyncio
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.conftest import is_running, wait_until
from tests.helpers import (
    ROOT,
    make_request,
    make_samples,
    make_tokenizer,
    only_runner,
    run_python,
    values_of,
    worker_pids,
)
from tests.test_environments_v1 import (  # noqa: F401
    HERE,
    Server,
    check_tokens,
    load,
    on_the_path,
    running,
)
from tests.troubled_env import NOBODY, QUESTIONS, TroubledEnv
from verifiers_rl import RLConfig, WeightedEnv, env_from
from verifiers_rl.envs.base import (
    InvalidEnvironmentError,
    NotPortableError,
    check_importable,
    needs_script,
    pickle_for_worker,
)
from verifiers_rl.envs.make import make_runner
from verifiers_rl.envs.workers import (
    WorkerEnvironment,
    WorkerError,
    WorkerPool,
    count_workers,
    pack_group,
    unpack_group,
)
from verifiers_rl.process.loop_thread import contain_tasks
from verifiers_rl.requests import Places, Progress
from verifiers_rl.types import Rollout


@pytest.fixture
def tokenizer(on_the_path):  # noqa: F811
    from light_tokenizer import LightTokenizer

    return LightTokenizer()


def roll_out(env, tokenizer, tmp_path, use, say=lambda prompt: "yes", **options):
    """What `use(run, runner)` returns, where `run(index)` gives a group of two rollouts."""
    defaults = {"max_seq_len": 200, "max_tokens": 40, "use_cpu": True, "env_workers": 1}
    args = RLConfig(output_dir=tmp_path, **defaults | options)
    server = Server(tokenizer, say)
    given = {"places": Places(args.max_concurrent), "sampling_args": args.sampling_args()}

    async def main():
        async with running(env, server, tokenizer, args) as runner:
            return await use(
                lambda index: runner.run_group(make_request(index, 2, **given)), runner
            )

    return asyncio.run(asyncio.wait_for(main(), 120)), server.requests


def survive(tmp_path, use, num_workers=1, timeout_s=60.0, places=None, **trouble):
    """What `use(run, pool)` returns, where `run(question)` gives a group of two rollouts."""

    async def main():
        pool = WorkerPool(num_workers, timeout_s)
        env = WorkerEnvironment(TroubledEnv(tmp_path, **trouble), pool)
        shared = places or Places(64)

        async def run(question, **fields):
            request = make_request(QUESTIONS.index(question), 2, places=shared, **fields)
            return await env.run_group(request)

        try:
            await env.open()
            return await use(run, pool)
        finally:
            await env.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


def errors_of(groups):
    return [rollout.error for group in groups for rollout in group]


DIFFERENT = {"samples": [], "record": b"", "generation_s": 0.0}  # in two runs
FOREIGN = WeightedEnv(
    {"taskset": {"id": "small_tasks", "num_tasks": 3}}, "env", python=sys.executable, folders=[HERE]
)


@pytest.mark.parametrize("foreign", [None, [FOREIGN]], ids=["this Python", "another Python"])
def test_groups_of_workers_are_those_of_this_process(tokenizer, tmp_path, foreign):
    async def all_of_them(run, runner):
        is_in_workers = "in rollout workers" in only_runner(runner).description
        groups = await asyncio.gather(*map(run, range(3)))
        rollouts = [rollout for group in groups for rollout in group]
        return rollouts, runner.sizes("train"), is_in_workers

    tokenizer = make_tokenizer() if foreign else tokenizer
    env = load(options={"num_tasks": 3})
    (here, sizes, _), _ = roll_out(env, tokenizer, tmp_path, all_of_them, env_workers=0)
    # Another Python has one worker at least.
    (there, *facts), requests = roll_out(
        foreign or env, tokenizer, tmp_path, all_of_them, env_workers=0 if foreign else 1
    )
    assert facts == [sizes, True]
    for rollout, other in zip(here, there, strict=True):
        assert other.error is None, other.error
        assert replace(rollout, **DIFFERENT) == replace(other, **DIFFERENT)
        messages = [json.loads(one.record)["messages"] for one in (rollout, other)]
        assert messages[0] == messages[1] and other.generation_s > 0
    check_tokens(there, requests)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("verifiers_rl.envs.workers.ALIVE_S", 0.2)
    monkeypatch.setattr("verifiers_rl.envs.workers.BLOCKED_S", 1.0)


@pytest.mark.parametrize("question, status", [("die once", 7), ("stop once", -9)])
def test_a_worker_that_dies_or_stops_is_replaced_and_its_groups_begin_again(
    tmp_path, impatient, caplog, question, status
):
    async def use(run, pool):
        before = worker_pids()
        groups = await asyncio.gather(run(question), run("sleep"))
        return before, groups, worker_pids()

    before, groups, after = survive(tmp_path, use, timeout_s=2.0)
    assert errors_of(groups) == [None] * 4
    for group in groups:
        assert [rollout.num_restarts for rollout in group] == [1, 1]
        assert {rollout.metrics["pid"] for rollout in group} == set(after)
        assert group[0].samples[0].policy_versions.tolist() == [-1, 9]
    assert before != after and not any(map(is_running, before + after))
    said = f"ended with status {status}; another one is started, and its 2 groups begin"
    assert said in caplog.text


def test_a_worker_that_only_dies_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("verifiers_rl.envs.workers.MAX_DEATHS", 2)
    with pytest.raises(InvalidEnvironmentError, match="died 2 times and returned no group"):
        survive(tmp_path, lambda run, pool: run("die"))


def test_an_environment_that_dies_raises_prints_or_forks_costs_its_own_rollouts(tmp_path, capfd):
    async def use(run, pool):
        score = Path(f"/proc/{worker_pids()[0]}/oom_score_adj").read_text()
        assert int(score) == 500  # without memory, Linux ends the worker, not the trainer
        names = ("die", "raise", "print", "be well", "fork", "sleep")
        return await asyncio.gather(*map(run, names))

    dead, raised, *others = survive(tmp_path, use)
    for rollout in dead:
        assert "ended with status 7" in str(rollout.error) and rollout.num_restarts == 2
    for rollout in raised:
        assert isinstance(rollout.error, WorkerError) and "no answer key" in str(rollout.error)
        assert "troubled_env.py" in rollout.error.__notes__[0]  # its traceback there
    assert errors_of(others) == [None] * 8
    assert "the environment prints" in capfd.readouterr().out
    forked = int((tmp_path / "forked").read_text())
    wait_until(lambda: not is_running(forked))  # it ends with its worker


def test_a_cancelled_group_is_cancelled_in_its_worker(tmp_path):
    async def use(run, pool):
        group = asyncio.create_task(run("wait"))
        await asyncio.to_thread(wait_until, (tmp_path / "waits").exists)
        group.cancel()
        await asyncio.to_thread(wait_until, lambda: not (tmp_path / "waits").exists())
        assert group.cancelled()
        return await run("be well")

    assert errors_of([survive(tmp_path, use)]) == [None, None]


def test_a_blocked_worker_is_named_with_its_stack_and_holds_up_no_other(
    tmp_path, impatient, caplog, capfd
):
    async def use(run, pool):
        blocked = asyncio.create_task(run("block"))
        await asyncio.to_thread(
            wait_until, lambda: any(worker.is_blocked for worker in pool.workers)
        )
        # Together, so that a worker with the least to do would get its share.
        groups = await asyncio.gather(*map(run, ["sleep"] * 4))
        assert not blocked.done()
        blocked.cancel()
        pid = int((tmp_path / "blocked").read_text())
        os.kill(pid, signal.SIGKILL)
        return pid, groups

    pid, others = survive(tmp_path, use, num_workers=2)
    assert errors_of(others) == [None] * 8
    assert pid not in {rollout.metrics["pid"] for group in others for rollout in group}
    assert f"worker {pid} has not answered for 1 s" in caplog.text
    assert "in block_the_loop" in capfd.readouterr().err


def test_an_environment_that_a_worker_cannot_make_is_one_error(tmp_path, monkeypatch):
    with pytest.raises(InvalidEnvironmentError, match=r"'env', in a worker: .*a file"):
        survive(tmp_path, None, makers=os.getpid())
    with pytest.raises(InvalidEnvironmentError, match="ended with status 9; see its output above"):
        survive(tmp_path, None, makers=NOBODY)
    monkeypatch.setattr("verifiers_rl.envs.workers.LOAD_S", 0.05)
    with pytest.raises(InvalidEnvironmentError, match="not loaded within"):
        survive(tmp_path, None, timeout_s=0.05, load_s=60.0)


def reward_of_info(completion, info):
    """9 if the info is that of the last row, as it was given."""
    return 9.0 * (info == {1: (completion,)})


class Counted:
    """A reward with a part that only inheritance brings to another process, as its error says."""

    def __init__(self):
        self.lock = multiprocessing.Lock()

    def __call__(self, completion):
        return 1.0


def test_what_cannot_be_made_again_runs_here_and_one_line_says_why(tokenizer, capfd):
    reason = "cannot be sent to another process"
    for reward in (Counted(), lambda completion: 1.0):
        env = env_from(["a"], reward)
        runner = make_runner(env, "http://unused", tokenizer, RLConfig())
        assert not isinstance(only_runner(runner), WorkerEnvironment)
        assert re.search(f"in a thread of the trainer, .*{reason}", capfd.readouterr().out)
    with pytest.raises(InvalidEnvironmentError, match=f"env_workers=1: .*{reason}.*env_workers=0"):
        make_runner(env, "http://unused", tokenizer, RLConfig(env_workers=1))
    rows = [{"prompt": "a", "info": info} for info in ("x", lambda: "x")]
    env = env_from(rows, reward_of_info)
    with pytest.raises(InvalidEnvironmentError, match=f"task 1: its parts {reason}"):
        make_runner(env, "http://unused", tokenizer, RLConfig(env_workers=1))


async def reward_of_code(completion):
    """A reward that runs code of a model."""
    match completion:
        case "await":  # what was cancelled
            other = asyncio.get_running_loop().create_future()
            other.cancel()
            await other
        case "exit":
            sys.exit(3)
        case "cancel":
            raise asyncio.CancelledError("by the code")
    return 1.0


@pytest.mark.parametrize("env_workers", [0, 1])
def test_rewards_that_end_the_process_or_the_task_cost_their_own_rollouts(
    tokenizer, tmp_path, env_workers, caplog
):
    ends = {
        "exit": "SystemExit(3)",
        "cancel": "CancelledError('by the code')",
        "await": "CancelledError()",
    }
    left = [*ends]

    def say(prompt):  # the first of each prompt's two rollouts is the code
        word = next((word for word in left if word in prompt), "fine")
        left[:] = {*left} - {word}
        return word

    async def use(run, runner):
        contain_tasks(asyncio.get_running_loop())  # as the orchestrator's
        return await asyncio.gather(*map(run, range(len(ends))))

    env, options = env_from(list(ends), reward_of_code), {"generation_timeout": 5.0}
    options["env_workers"] = env_workers
    groups, _ = roll_out(env, tokenizer, tmp_path, use, say, **options)
    for group, end in zip(groups, ends.values(), strict=True):
        (error,) = [rollout.error for rollout in group if rollout.error is not None]
        assert end in str(error)
        assert {rollout.num_restarts for rollout in group} == {0}
    assert "another one is started" not in caplog.text


SCRIPT = """
import asyncio, os, sys
import verifiers.v1 as vf
from pathlib import Path
from light_tokenizer import LightTokenizer
from tests.helpers import make_request, serving
from tests.troubled_env import QUESTIONS, TroubledEnv
from tests.test_environments_v1 import Server
from verifiers_rl import RLConfig, env_from
from verifiers_rl.envs.make import make_runner

print("imported as", __name__, flush=True)
sys.path.insert(0, Path("lib"))

def reward(completion):
    return float(os.getpid())

class ScriptTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def pid(self, trace: vf.Trace) -> float:
        return reward("")

class ScriptTaskset(vf.Taskset[ScriptTask, vf.TasksetConfig]):
    def load(self):
        yield ScriptTask(vf.TaskData(idx=0, prompt="a"), self.config.task)

def main():
    tokenizer = LightTokenizer()
    args = RLConfig(output_dir="out", max_seq_len=99, max_tokens=9, use_cpu=True)
    server = Server(tokenizer, lambda prompt: "yes")
    async def run():
        async with serving(server.answer, "/v1/chat/completions/tokens") as url:
            for env in (env_from(["a"], reward), ScriptTaskset(vf.TasksetConfig())):
                runner = make_runner(env, url, tokenizer, args)
                await runner.open()
                sampling = args.sampling_args()
                group = await runner.run_group(make_request(sampling_args=sampling))
                await runner.close()
                print("here" if group[0].reward == os.getpid() else "elsewhere", group[0].error)
    asyncio.run(run())
"""


MAKES_A_TRAINER = """
from verifiers_rl import RLTrainer
if __name__ == "__main__":
    main()
else:
    RLTrainer("model", None, RLConfig(output_dir="out", use_cpu=True))
"""


@pytest.mark.parametrize("guard", ["if '__main__' == __name__: main()", "main()", MAKES_A_TRAINER])
def test_a_worker_imports_the_script_that_defines_the_environment(tmp_path, guard):
    script = tmp_path / "train.py"
    # Python runs all this; a Path in sys.path is without effect.
    declared = "# coding: latin-1\nNAME = 'gr\u00fc\u00df'\n"
    script.write_bytes((declared + SCRIPT + guard).encode("latin-1"))
    fails = guard == MAKES_A_TRAINER
    done = run_python(script, folder=tmp_path, status=int(fails), PYTHONPATH=f"{ROOT}:{HERE}")
    lines = done.stdout.splitlines()
    if fails:
        assert "in a worker: ConfigError: an RLTrainer is made outside of `if" in done.stderr
    elif guard == "main()":
        assert lines.count("here None") == 2, done.stdout + done.stderr
        assert sum("train.py, which a worker would import" in x for x in lines) == 2
        assert lines.count("imported as __main__") == 1
    else:
        assert lines.count("elsewhere None") == 2, done.stdout + done.stderr
        assert lines.count("imported as __mp_main__") == 2


def test_messages_keep_every_field_of_a_rollout():
    samples = make_samples(2)
    samples[0].inference_logprobs[-1] = np.nan
    samples[0].extras["experts"] = np.ones((samples[0].num_tokens, 1, 2), np.int16)
    well = Rollout(3, "p", "c", "env", "role", 0.5, {"m": 1.0}, samples, 2, True, 0.25)
    well.has_own_advantages, well.record = True, '{"messages": ["ß"]}'.encode()
    failed = Rollout(4, "q", error=ValueError("what"))

    message, content = pack_group([well, failed])
    first, second = unpack_group(json.loads(json.dumps(message)), content.tobytes())
    assert replace(first, samples=[]) == replace(well, samples=[])
    found, given = ([values_of(sample) for sample in them] for them in (first.samples, samples))
    np.testing.assert_equal(found, given)  # NaN is NaN
    for sample, number in zip(first.samples, (1, -1), strict=True):
        experts = sample.extras["experts"]
        assert experts.dtype == np.int16 and (experts == number).all()
        sample.token_ids += 1  # the arrays can be written
    assert str(second.error) == "ValueError: what" and second.example_id == 4


def test_a_rollout_in_a_worker_holds_one_place_of_the_run_and_is_counted_once(tmp_path):
    progress = Progress()

    async def use(run, pool):
        again = await run("die late", progress=progress)  # its places are free again
        return again, await run("sleep", progress=progress)

    again, group = survive(tmp_path, use, places=Places(1))
    assert [rollout.num_restarts for rollout in again] == [1, 1]
    assert [rollout.metrics["num_playing"] for rollout in group] == [1, 1]
    assert progress.num_done == 4


def test_auto_takes_a_quarter_of_the_cores_and_eight_at_most(monkeypatch):
    for num_cores, expected in ((1, 1), (8, 2), (256, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, num=num_cores: range(num))
        assert count_workers("auto") == expected


def test_only_what_the_script_defines_needs_the_script():
    """That it does is tested above."""
    code = 'if __name__ == "__main__":\n    main()'  # a task of a dataset of programs
    assert not needs_script(pickled := pickle_for_worker({"prompt": code}))
    assert pickle.loads(pickled) == {"prompt": code}


def test_a_script_that_multiprocessing_does_not_import_is_not_portable(tmp_path):
    (main := tmp_path / "__main__.py").write_text('if __name__ == "__main__":\n    main()')
    with pytest.raises(NotPortableError, match="multiprocessing imports no __main__"):
        check_importable(
            SimpleNamespace(__file__=str(main), __spec__=SimpleNamespace(name="package.__main__"))
        )
    with pytest.raises(NotPortableError, match="an interactive session"):
        check_importable(SimpleNamespace())


def test_examples_and_a_reward_function_go_to_a_worker(tokenizer, tmp_path):
    # A task may hold anything that can be pickled; columns that the reward leaves out stay here.
    rows = [{"prompt": "a", "info": {}}, {"prompt": "b", "info": {1: ("yes",)}}]
    rows[0]["unused"] = object()

    async def use(run, runner):
        assert isinstance(only_runner(runner), WorkerEnvironment)
        return [rollout.reward for index in (0, 1) for rollout in await run(index)]

    env = env_from(rows, reward_of_info)
    rewards, _ = roll_out(env, tokenizer, tmp_path, use, env_workers="auto")
    assert rewards == [0.0, 0.0, 9.0, 9.0]
