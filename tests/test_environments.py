"""What both kinds of environments share."""

import math
from types import SimpleNamespace

import pytest

from tests.helpers import StubRunner, make_samples, only_runner
from verifiers_rl import RLConfig, WeightedEnv
from verifiers_rl.cli.config import EnvTable
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.make import Environments, Part, make_runner
from verifiers_rl.report.means import batch_metrics, evaluation_metrics
from verifiers_rl.types import Rollout


def scored(env, *rewards, score=0.5, num_samples=1):
    """A group of rollouts of two turns. One with the reward NaN has failed."""
    return [
        Rollout(
            0, "p", env=env, num_turns=2, samples=make_samples(num_samples), reward=reward,
            metrics={"score": score}, error=ValueError() if math.isnan(reward) else None,
        )
        for reward in rewards
    ]  # fmt: skip


def runner_of(env, **options):
    return make_runner(env, "http://unused", None, RLConfig(use_cpu=True, **options))


def test_a_group_that_failed_is_not_uniform():
    groups = [scored("a", math.nan, math.nan), scored("a", 0.0, 1.0)]
    assert batch_metrics(groups, 2)["uniform_group_share"] == 0
    assert batch_metrics([*groups, scored("a", 1.0, 1.0)], 2)["uniform_group_share"] == 0.5


def test_metrics_of_several_environments_are_kept_apart():
    groups = [scored("a", 1.0, 0.0), scored("b", 4.0, math.nan, score=0.7)]
    metrics = batch_metrics(groups, 2)
    assert (metrics["reward"], metrics["a/reward"], metrics["b/reward"]) == (5 / 3, 0.5, 4.0)
    assert (metrics["a/score"], metrics["b/score"]) == pytest.approx((0.5, 0.7))
    assert (metrics["error_share"], metrics["b/error_share"]) == (0.25, 0.5)
    assert metrics["a/group_share"] == 0.5 and metrics["broken_turn_share"] == 0.0
    evaluated = evaluation_metrics(groups, 2)
    assert (evaluated["reward"], evaluated["b/reward"]) == (1.25, 2.0)
    # Two samples of two turns: each second turn started anew.
    alone = batch_metrics([scored("a", 1.0, num_samples=2)], 1)
    assert alone["broken_turn_share"] == 1.0
    assert alone["a/score"] == 0.5 and "a/reward" not in alone


def failed():
    """What an episode that failed has left."""
    return Rollout(0, "p", env="a", error=ValueError())


def of_agents(**rewards):
    """The rollouts of an episode: each agent's reward, and for the first agent a metric."""
    group = [Rollout(0, "p", env="a", role=name, reward=r) for name, r in rewards.items()]
    group[0].metrics = {"bluffed": 1.0}
    return group


def test_a_failed_episode_counts_as_one_whoever_plays_in_the_others():
    groups = [[*of_agents(first=4.0, second=2.0), failed()], [failed(), failed()]]
    # Four episodes of two agents, of which one has ended.
    expected = {"reward": 3 / 4, "error_share": 3 / 4, "num_rollouts": 4, "pass@2": 1 / 2}
    expected |= {"first/reward": 4.0, "second/reward": 2.0}
    found = evaluation_metrics(groups, 2)
    assert {name: found[name] for name in expected} == expected
    assert batch_metrics(groups, 2)["error_share"] == 3 / 4
    # Each episode is played by one of the agents.
    chosen = [[*of_agents(first=1.0), *of_agents(second=1.0), failed(), *of_agents(first=1.0)]]
    found = evaluation_metrics(chosen, 4)
    assert (found["reward"], found["error_share"], found["pass@4"]) == (0.75, 0.25, 1.0)
    assert batch_metrics(chosen, 4)["error_share"] == 0.25
    assert evaluation_metrics([[failed(), failed()]], 2)["reward"] == 0.0
    # A group that fails as a whole may have one rollout that says so.
    assert evaluation_metrics([[failed()]], 2)["error_share"] == 1.0


def test_the_mean_of_a_metric_is_over_the_rollouts_that_have_it():
    groups = [[*of_agents(first=1.0, second=-1.0), *of_agents(first=1.0, second=-1.0)]]
    groups[0][0].metrics = {"bluffed": 0.5}
    assert batch_metrics(groups, 2)["a/bluffed"] == 0.75
    assert evaluation_metrics(groups, 2)["bluffed"] == 0.75
    # A rollout that failed counts as 0.
    with_failed = [[*groups[0], failed(), failed()]]
    assert batch_metrics(with_failed, 4)["a/bluffed"] == 0.75
    assert evaluation_metrics(with_failed, 4)["bluffed"] == 0.375


def test_a_score_that_is_named_like_another_number_gets_a_name_of_its_own(caplog):
    names = ("reward", "reward_score", "runtime", "loss", "wait_s", "num_rollouts", "pass@2", "own")
    group = scored("a", 1.0, 0.0)
    for rollout in group:
        rollout.metrics = {name: 10.0 + number for number, name in enumerate(names)}
    renamed = {name: f"{name}_score" for name in names if name != "own"}
    renamed["reward_score"] = "reward_score_score"
    found = evaluation_metrics([group], 2)
    assert [found[renamed.get(name, name)] for name in names] == [10.0 + n for n in range(8)]
    assert (found["reward"], found["num_rollouts"], found["pass@2"]) == (0.5, 2, 1.0)
    assert not {"runtime", "wait_s", "loss"} & {*found}
    lines = caplog.text.splitlines()
    assert len(lines) == 7 and "metric 'runtime' is logged as 'runtime_score', because" in lines[5]
    # In training it has the same name.
    batch = batch_metrics([group], 2)
    assert [batch[f"a/{renamed.get(name, name)}"] for name in names] == [10.0 + n for n in range(8)]
    several = batch_metrics([group, scored("b", 1.0)], 2)
    assert (several["a/reward"], several["a/reward_score"]) == (0.5, 10.0)
    # It is said once; and where the only score is the reward, there is no second name for it.
    assert len(caplog.text.splitlines()) == 7
    for rollout in group:
        rollout.metrics = {"reward": rollout.reward}
    assert "reward_score" not in evaluation_metrics([group], 2)
    assert "a/reward_score" not in batch_metrics([group], 2)


def test_a_runner_of_ones_own_is_run_as_it_is(capsys):
    own = StubRunner()
    assert only_runner(runner_of(own)) is own
    (line,) = capsys.readouterr().out.splitlines()
    assert "in a thread of the trainer" in line and "StubRunner has no method `recipe`" in line
    several = StubRunner()
    several.weights, several.sizes = [1.0, 3.0], lambda split: [2, 5]
    mixed = runner_of([WeightedEnv(own, "mine", 3.0), WeightedEnv(several, "other")])
    assert (mixed.weights, mixed.sizes("train")) == ([3.0, 0.25, 0.75], [10, 2, 5])
    limited = runner_of([WeightedEnv(own, "mine", eval_examples=3)])
    assert (limited.sizes("train"), limited.sizes("eval")) == ([10], [3])
    with pytest.raises(
        InvalidEnvironmentError, match=r"'other': eval_examples is for one .* has 2"
    ):
        runner_of([WeightedEnv(several, "other", eval_examples=1)])
    lacking = SimpleNamespace(run_group=own.run_group, sizes=own.sizes, close=own.close)
    with pytest.raises(InvalidEnvironmentError, match="SimpleNamespace has no weights, open"):
        runner_of(lacking)


@pytest.mark.parametrize(
    "parts, said",
    [
        ([("a", {"only": "eval"})], "no environment is for training"),
        ([("a", {}), ("a", {"only": "eval"})], "two environments are named 'a'"),
        ([("e", {"only": "test"})], r"only\s.*'train' or 'eval'.*input_value='test'"),
        ([("e", {"sampling": {"max_tokens": 2}})], r"sampling\s.*Unexpected keyword argument"),
        *(([(name, {})], "must be a name of letters") for name in ("", " ", "a\nb", "a/b")),
        ([("e", {"eval_examples": 0})], r"eval_examples\s.*equal to 1 .*input_value=0"),
    ],
)
def test_environments_that_contradict_each_other_are_refused(parts, said):
    with pytest.raises(ValueError, match=said):
        Environments(
            [Part(WeightedEnv(None, name, **own), StubRunner(), {}) for name, own in parts]
        )


def test_evaluations_of_nothing_are_refused_at_the_start():
    envs = [WeightedEnv(StubRunner(), "a", only="train")]
    for options in ({"eval_strategy": "steps"}, {"eval_on_start": True}):
        with pytest.raises(InvalidEnvironmentError, match="no environment has an example for eval"):
            runner_of(envs, **options)


@pytest.mark.parametrize("env, kind", [(3, "int"), ({"id": "e"}, "dict")])
def test_what_is_no_environment_is_refused(env, kind):
    said = f"expected an Env or a Taskset .* got {kind}"
    with pytest.raises(InvalidEnvironmentError, match=said):
        runner_of(env)


def test_a_classic_environment_in_this_python_says_what_to_install(tmp_path, kept_path):
    (tmp_path / "old_one.py").write_text("def load_environment():\n    ...\n")
    said = "id='old-one' is a classic environment.*'verifiers>=0.3.1,<0.4'.* set python ="
    with pytest.raises(InvalidEnvironmentError, match=said):
        EnvTable(id="old-one").load(tmp_path)
