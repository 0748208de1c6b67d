"""Environments of verifiers.v1 from scripts, ids and TOMLs, and streams of tasks."""

import asyncio
import json
import runpy
import tomllib
from functools import partial

import pytest
import verifiers.v1 as vf

from tests.helpers import only_runner
from tests.test_environments_v1 import HERE, on_the_path  # noqa: F401
from verifiers_rl import RLConfig, WeightedEnv
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
    made = make_runner(env, "http://unused", tokenizer, args)
    return made if isinstance(env, list) else only_runner(made)


def prompts(runner, positions, split="train"):
    async def ask():
        return [(await runner.task(split, at)).data.prompt for at in positions]

    return asyncio.run(ask())


# --- In a script ----------------------------------------------------------------------------------

SCRIPT = """
import json
import verifiers.v1 as vf
from verifiers_rl import RLConfig
from verifiers_rl.envs.make import make_runner


class Config(vf.TasksetConfig):
    num_tasks: int  # without a default


class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Own(vf.Taskset[Task, Config]):
    def __init__(self, config, word="own"):
        super().__init__(config)
        self.word = word

    def load(self):
        for i in range(self.config.num_tasks):
            yield Task(vf.TaskData(idx=i, prompt=f"{self.word} {i}"), self.config.task)


class Plain(vf.Taskset[Task]):
    def load(self):
        yield Task(vf.TaskData(idx=0, prompt="plain"), self.config.task)

ENVIRONMENT

def show(env):
    args = RLConfig(output_dir="OUT", use_cpu=True, env_workers=0)
    runner = make_runner(env, "http://unused", None, args).parts["train"][0].runner
    task = asyncio.run(runner.task("train", 0))
    return [task.data.prompt, type(runner.env).__name__, runner.sizes("train"),
            [harness.id for harness in runner.env.config.agent_harnesses().values()]]

import asyncio
if __name__ == "__main__":
    own = Own(Config(num_tasks=3), word="mine")
    shown = [show(Plain(vf.TasksetConfig())), show(Plain(vf.TasksetConfig(id="plain"))), show(own)]
    shown.append(show(Own(Config(id="train", num_tasks=2))))  # the script's own name
    LAST
    print(json.dumps(shown))
else:
    raise SystemExit("the script ran once more")
"""
OF_AN_ENVIRONMENT = """
class PairConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class Pair(vf.Env[PairConfig]):
    async def run(self, task, agents):
        await agents.first.run(task)
"""


@pytest.fixture
def run_script(tmp_path, monkeypatch, capsys):
    """What a script as `__main__` printed. (Another process would import for half a minute.)"""
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(environment="", last=""):
        script = SCRIPT.replace("ENVIRONMENT", environment).replace("LAST", last)
        (tmp_path / "train.py").write_text(script.replace("OUT", str(tmp_path)))
        runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_a_taskset_in_the_script_that_runs_is_played(run_script):
    *lines, shown = run_script()
    assert json.loads(shown) == [
        [prompt, "SingleAgentEnv", [size], ["verifiers_rl"]]
        # The third is this very one, not another of its class.
        for prompt, size in (("plain", 1), ("plain", 1), ("mine 0", 3), ("own 0", 2))
    ]
    assert lines[2].startswith("environment: agent plays in verifiers_rl's chat")


def test_an_environment_in_the_script_plays_its_tasksets(run_script):
    # With a config of its own it needs the id of a module that exports the taskset.
    last = "__all__ = ['Plain']; config = PairConfig(taskset={'id': __name__})\n"
    last += "    shown.append(show(Pair(config)))"
    shown = json.loads(run_script(OF_AN_ENVIRONMENT, last)[-1])
    assert [[name, harnesses] for _, name, _, harnesses in shown] == [
        ["Pair", ["verifiers_rl", "verifiers_rl"]]
    ] * 5


# --- One meaning of an id -------------------------------------------------------------------------


def test_an_id_a_taskset_and_a_toml_are_played_alike():
    from fix_it import FixItConfig, FixItTaskset

    taskset = FixItTaskset(FixItConfig(id="fix_it"))
    from_toml = toml('taskset = { id = "fix_it", num_tasks = 2 }', "eval_taskset.num_tasks = 1")
    for env in (from_toml, "fix_it", taskset, FixItTaskset(FixItConfig())):
        runner = runner_of(env)
        assert type(runner.env).__name__ == "FixItEnv" and runner.sizes("train") == [2]
        assert list(runner.env.config.agent_harnesses()) == ["fixer"]
        assert runner.sizes("eval") == [1 if env is from_toml else 2]
    played = runner_of(taskset).env
    assert played.taskset is taskset and played.config.taskset.num_tasks == 2


def test_a_taskset_that_cannot_be_played_says_what_to_pass(monkeypatch):
    import fix_it

    class Forgetful(vf.Taskset):
        def __init__(self):
            pass

        def load(self):
            return []

    with pytest.raises(InvalidEnvironmentError, match=r"call super\(\).__init__\(config\)"):
        runner_of(Forgetful())
    monkeypatch.setattr(fix_it, "Other", type("Other", (fix_it.FixItEnv,), {}), raising=False)
    monkeypatch.setattr(fix_it, "__all__", [*fix_it.__all__, "Other"])
    with pytest.raises(InvalidEnvironmentError, match=r"exports 2 Env .*FixItEnv.*Other"):
        runner_of(fix_it.FixItTaskset(fix_it.FixItConfig()))


# --- One default harness --------------------------------------------------------------------------

SMALL, FIX_IT = 'taskset.id = "small_tasks"', 'taskset.id = "fix_it"'
BASH = 'harness.id = "bash"'
DOCKER = 'runtime.type = "docker"'


@pytest.mark.parametrize(
    "env, expected",
    [
        ("small_tasks", ("agent", "verifiers_rl", "subprocess")),
        ([SMALL], ("agent", "verifiers_rl", "subprocess")),
        ([SMALL, 'agent.harness.id = "null"'], ("agent", "verifiers_rl", "subprocess")),
        ([SMALL, f"agent.{DOCKER}"], ("agent", "verifiers_rl", "docker")),
        ([FIX_IT], ("fixer", "verifiers_rl", "subprocess")),
        ([FIX_IT, f"fixer.{DOCKER}", f"fixer.{BASH}"], ("fixer", "bash", "docker")),
        # It runs no programs of the model.
        (
            [SMALL, 'agent.harness.id = "streaming_harness"'],
            ("agent", "streaming_harness", "subprocess"),
        ),
    ],
)
def test_agents_chat_here_unless_another_harness_is_set(monkeypatch, env, expected):
    import streaming_harness

    monkeypatch.setattr(streaming_harness.StreamingHarness, "EXECUTES_CODE", False)
    config = runner_of(toml(*env) if isinstance(env, list) else env).env.config
    ((role, harness),) = config.agent_harnesses().items()
    assert (role, harness.id, getattr(config, role).runtime.type) == expected


def test_a_harness_that_runs_programs_of_the_model_needs_a_sandbox(tmp_path, monkeypatch):
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InvalidEnvironmentError) as caught:
        runner_of(toml(SMALL, f"agent.{BASH}"))
    assert "the agent 'agent' plays in the harness 'bash', by verifiers' default" in str(
        caught.value
    )
    assert '[env.agent.runtime] type = "docker"' in str(caught.value)


def test_a_tasksets_own_harness_stays_its_default(monkeypatch):
    import small_tasks
    from streaming_harness import StreamingHarness

    monkeypatch.setattr(StreamingHarness, "EXECUTES_CODE", False)
    monkeypatch.setattr(small_tasks, "StreamingHarness", StreamingHarness, raising=False)
    monkeypatch.setattr(small_tasks, "__all__", ["SmallTaskset", "StreamingHarness"])
    for env in (toml(SMALL), small_tasks.SmallTaskset(small_tasks.SmallConfig())):
        played = runner_of(env).env
        assert type(played._harnesses["agent"]) is StreamingHarness
        assert played.config.agent.runtime.type == "subprocess"


def test_an_environment_of_the_script_is_played_as_it_is():
    class Own(vf.SingleAgentEnv):
        def __init__(self, config, judge):
            super().__init__(config)
            self.judge, self.bonus = judge, 1

    env = Own(toml(SMALL).config, "a judge")
    env.bonus = 5  # changed since it was made
    played = runner_of(env).env
    assert (type(played), played.judge, played.bonus) == (Own, "a judge", 5)
    assert played.config.agent.harness.id == IN_PROCESS
    assert env.config.agent.harness is None  # the script's own object is not changed


def test_the_line_at_the_start_says_what_is_played_where(capsys):
    mix = [
        WeightedEnv("fix_it", "fix"),
        WeightedEnv(toml(SMALL, f"agent.{BASH}", f"agent.{DOCKER}"), "b"),
        WeightedEnv("stream_tasks", "s"),
    ]
    runner_of(mix, eval_examples=5)
    here = "plays in verifiers_rl's chat in this process, with its programs on this machine"
    assert capsys.readouterr().out.splitlines() == [
        f"environment 'fix': FixItEnv, fixer {here}; 2 tasks, also for evaluations",
        "environment 'b': agent plays in the harness 'bash', with its programs in docker; "
        "4 tasks, also for evaluations",
        f"environment 's': agent {here}; a stream of tasks, in its order, 5 for evaluations",
    ]


# --- Errors of a TOML -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines, message",
    [
        (f'{FIX_IT}\nharness.id = "null"', r"\[env\]:? a harness belongs to a seat: "),
        ('taskset.id = "bare"', r"'bare' defines no `__all__`"),
    ],
)
def test_what_verifiers_says_to_a_toml_is_one_line(lines, message, tmp_path, monkeypatch):
    """What we say ourselves is in wrong_configs.txt."""
    (tmp_path / "bare.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidEnvironmentError, match=message) as caught:
        toml(lines)
    assert len(str(caught.value).splitlines()) == 1


# --- Streams --------------------------------------------------------------------------------------


def test_a_stream_is_trained_in_its_order_after_the_tasks_of_evaluations():
    runner = runner_of("stream_tasks", eval_examples=3)
    assert (runner.sizes("train"), runner.sizes("eval")) == ([ENDLESS], [3])
    assert prompts(runner, range(3), "eval") == ["task 0", "task 1", "task 2"]
    order = partial(order_examples, sizes=runner.sizes("train"))
    assert prompts(runner, order(range(2, 5))) == ["task 5", "task 6", "task 7"]
    # A resumed run begins somewhere, and a lost server has earlier ones asked for again.
    again = runner_of("stream_tasks", eval_examples=3)
    assert prompts(again, order(range(100, 102))) == ["task 103", "task 104"]
    assert prompts(again, order(range(101))) == [f"task {i + 3}" for i in range(101)]


def test_evaluations_of_a_stream_may_have_a_taskset_of_their_own():
    env = toml('taskset.id = "stream_tasks"', 'eval_taskset.name_of_task = "held out"')
    runner = runner_of(env, eval_examples=2)
    assert prompts(runner, range(2), "eval") == ["held out 0", "held out 1"]
    assert prompts(runner, range(2)) == ["task 0", "task 1"]


def test_streams_and_lists_mix_by_weight():
    sizes = [ENDLESS, 4, ENDLESS]
    order = partial(order_examples, sizes=sizes, weights=[1, 2, 1])
    drawn = order(range(40))
    for first in (0, ENDLESS + 4):  # a stream's tasks, each once and in its order
        own = [index - first for index in drawn if first <= index < first + ENDLESS]
        assert own == [*range(len(own))] and 8 <= len(own) <= 12
    assert order(range(20, 40)) == drawn[20:]


def test_a_stream_keeps_few_tasks_in_memory_and_makes_each_once():
    num_made = 0

    def iterate():
        nonlocal num_made
        for i in range(10**9):
            num_made += 1
            yield i

    stream = TaskStream(iterate, num_skipped=10)
    for position in (0, 5, NUM_KEPT + 100, NUM_KEPT + 50):
        assert stream[position] == position + 10
    assert len(stream._kept) == NUM_KEPT and num_made == NUM_KEPT + 111
    assert stream[5] == 15 and num_made == NUM_KEPT + 111 + 16  # begun anew
    assert stream[NUM_KEPT + 101] == NUM_KEPT + 111 and len(stream._kept) <= NUM_KEPT


def test_a_stream_that_ends_says_after_how_many_tasks():
    env = toml('taskset = { id = "stream_tasks", end = 4 }')
    runner = runner_of(env, eval_examples=2)
    assert prompts(runner, range(2)) == ["task 2", "task 3"]
    with pytest.raises(InvalidEnvironmentError, match="infinite and ended after 4 tasks"):
        prompts(runner, [2])


def test_overlong_prompts_are_left_out_of_a_stream(tokenizer):
    env = toml('taskset = { id = "stream_tasks", padding = 50 }')
    runner = runner_of(env, tokenizer, max_prompt_len=30, eval_examples=2)
    assert prompts(runner, range(2), "eval") == ["task 0", "task 2"]
    assert prompts(runner, range(2)) == ["task 4", "task 6"]
    with pytest.raises(
        InvalidEnvironmentError, match=r"1000 tasks .* longer than max_prompt_len=3"
    ):
        runner_of(env, tokenizer, max_prompt_len=3)
