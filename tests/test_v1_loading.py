"""Environments of verifiers.v1 from scripts, ids and TOMLs, and streams of tasks."""

import asyncio
import sys
import tomllib
from types import ModuleType

import pytest
import verifiers.v1 as vf

from tests.helpers import only_runner
from tests.test_environments_v1 import HERE, on_the_path  # noqa: F401
from verifiers_rl import RLConfig
from verifiers_rl.data import ENDLESS, order_examples
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.chat_harness import IN_PROCESS
from verifiers_rl.envs.make import make_runner
from verifiers_rl.envs.v1_loading import NUM_KEPT, TaskStream, load_v1_environment


def toml(*lines):
    """What these lines of an `[env]` make, in a folder with the modules of tests/v1."""
    return load_v1_environment(tomllib.loads("\n".join(lines)), HERE)


def runner_of(env, tokenizer=None, **options):
    args = RLConfig(env_workers=0, **options)
    return only_runner(make_runner(env, "http://unused", tokenizer, args))


def prompts(runner, positions, split="train"):
    return [asyncio.run(runner.task(split, at)).data.prompt for at in positions]


def test_a_misspelt_sampling_option_of_an_agent_is_refused():
    env = toml('taskset = { id = "fix_it" }', "fixer.sampling = { max_token = 9, my_own = 1 }")
    with pytest.raises(InvalidEnvironmentError, match=r"\[env\.fixer\.sampling\].*'max_tokens'"):
        runner_of(env)


# --- One meaning of an id -------------------------------------------------------------------------


def test_an_id_a_taskset_and_a_toml_are_played_alike():
    from fix_it import FixItConfig, FixItTaskset

    taskset = FixItTaskset(FixItConfig(id="fix_it"))
    from_toml = toml('taskset = { id = "fix_it", num_tasks = 2 }', "eval_taskset.num_tasks = 1")
    for env in (from_toml, "fix_it", taskset):
        runner = runner_of(env)
        assert type(runner.env).__name__ == "FixItEnv" and runner.sizes("train") == [2]
        assert runner.sizes("eval") == [1 if env is from_toml else 2]
    assert runner.env.taskset is taskset


def test_what_a_script_defines_is_played_together(monkeypatch):
    """A script exports nothing by `__all__`."""
    from fix_it import FixItEnv
    from small_tasks import SmallConfig, SmallTaskset

    monkeypatch.setitem(sys.modules, "script", script := ModuleType("script"))
    script.Own = type("Own", (SmallTaskset,), {"__module__": "script"})
    taskset = script.Own(SmallConfig(id="script"))
    played = runner_of(taskset).env
    assert type(played).__name__ == "SingleAgentEnv" and played.taskset is taskset
    script.Plays = type("Plays", (FixItEnv,), {"__module__": "script"})
    assert type(runner_of(taskset).env) is script.Plays


def test_a_module_that_exports_two_environments_is_refused(monkeypatch):
    import fix_it

    monkeypatch.setattr(fix_it, "Other", type("Other", (fix_it.FixItEnv,), {}), raising=False)
    monkeypatch.setattr(fix_it, "__all__", [*fix_it.__all__, "Other"])
    with pytest.raises(InvalidEnvironmentError, match=r"exports 2 Env .*FixItEnv.*Other"):
        runner_of("fix_it")


# --- One default harness --------------------------------------------------------------------------

SMALL, FIX_IT = 'taskset.id = "small_tasks"', 'taskset.id = "fix_it"'
BASH = 'harness.id = "bash"'
DOCKER = 'runtime.type = "docker"'
STREAMING = 'harness.id = "streaming_harness"'  # it runs no programs of the model


@pytest.mark.parametrize(
    "lines, expected",
    [
        ([SMALL, 'agent.harness.id = "null"'], ("agent", IN_PROCESS, "subprocess")),
        ([SMALL, f"agent.{DOCKER}"], ("agent", IN_PROCESS, "docker")),
        ([FIX_IT], ("fixer", IN_PROCESS, "subprocess")),
        ([FIX_IT, f"fixer.{DOCKER}", f"fixer.{BASH}"], ("fixer", "bash", "docker")),
        ([SMALL, f"agent.{STREAMING}"], ("agent", "streaming_harness", "subprocess")),
    ],
)
def test_agents_chat_here_unless_another_harness_is_set(lines, expected):
    config = runner_of(toml(*lines)).env.config
    ((role, harness),) = config.agent_harnesses().items()
    assert (role, harness.id, getattr(config, role).runtime.type) == expected


def test_a_harness_that_runs_programs_of_the_model_needs_a_sandbox(tmp_path, monkeypatch):
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    said = r"'agent' plays in the harness 'bash', .*\[env.agent.runtime\] type = \"docker\""
    with pytest.raises(InvalidEnvironmentError, match=said):
        runner_of(toml(SMALL, f"agent.{BASH}"))


def test_a_tasksets_own_harness_stays_its_default(monkeypatch):
    import small_tasks
    from streaming_harness import StreamingHarness

    monkeypatch.setattr(small_tasks, "StreamingHarness", StreamingHarness, raising=False)
    monkeypatch.setattr(small_tasks, "__all__", ["SmallTaskset", "StreamingHarness"])
    played = runner_of(toml(SMALL)).env
    assert type(played._harnesses["agent"]) is StreamingHarness
    assert played.config.agent.runtime.type == "subprocess"


def test_an_environment_of_the_script_is_played_as_it_is():
    class Own(vf.SingleAgentEnv):
        bonus = 1

    env = Own(toml(SMALL).config)
    env.bonus = 5  # changed since it was made
    played = runner_of(env).env
    assert (type(played), played.bonus) == (Own, 5)
    assert played.config.agent.harness.id == IN_PROCESS
    assert env.config.agent.harness is None  # the script's own object is not changed


# --- Streams --------------------------------------------------------------------------------------


def test_a_stream_is_trained_in_its_order_after_the_tasks_of_evaluations():
    runner = runner_of("stream_tasks", eval_examples=3)
    assert (runner.sizes("train"), runner.sizes("eval")) == ([ENDLESS], [3])
    assert prompts(runner, range(3), "eval") == ["task 0", "task 1", "task 2"]
    # A resumed run begins somewhere, and a lost server has earlier ones asked for again.
    for positions in (range(100, 102), range(101)):
        asked = order_examples(positions, sizes=[ENDLESS])
        assert prompts(runner, asked) == [f"task {i + 3}" for i in positions]


def test_evaluations_of_a_stream_may_have_a_taskset_of_their_own():
    env = toml('taskset.id = "stream_tasks"', 'eval_taskset.name_of_task = "held out"')
    runner = runner_of(env, eval_examples=2)
    assert prompts(runner, range(2), "eval") == ["held out 0", "held out 1"]
    assert prompts(runner, range(2)) == ["task 0", "task 1"]


def test_a_stream_keeps_few_tasks_in_memory_and_makes_each_once():
    made = []

    def iterate():
        for i in range(10**9):
            made.append(i)
            yield i

    stream = TaskStream(iterate)
    for position in (0, 5, NUM_KEPT + 100, NUM_KEPT + 50):
        assert stream[position] == position
    assert len(stream._kept) == NUM_KEPT and len(made) == NUM_KEPT + 101
    assert stream[5] == 5 and len(made) == NUM_KEPT + 101 + 6  # begun anew


def test_a_stream_that_ends_says_after_how_many_tasks():
    runner = runner_of(toml('taskset = { id = "stream_tasks", end = 4 }'), eval_examples=2)
    assert prompts(runner, range(2)) == ["task 2", "task 3"]
    with pytest.raises(InvalidEnvironmentError, match="infinite and ended after 4 tasks"):
        prompts(runner, [2])


def test_overlong_prompts_are_left_out_of_a_stream(tokenizer):
    env = toml('taskset = { id = "stream_tasks", padding = 50 }')
    runner = runner_of(env, tokenizer, max_prompt_len=30, eval_examples=2)
    assert prompts(runner, range(2), "eval") == ["task 0", "task 2"]
    assert prompts(runner, range(2)) == ["task 4", "task 6"]
    with pytest.raises(InvalidEnvironmentError, match=r"1000 tasks .* max_prompt_len=3"):
        runner_of(env, tokenizer, max_prompt_len=3)
