"""What both kinds of environments share."""

import math
import sys
from types import SimpleNamespace

import pytest

from tests.helpers import StubRunner, make_samples, only_runner
from verifiers_rl import RLConfig, WeightedEnv, env_from
from verifiers_rl.cli.config import EnvTable
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.make import Environments, Part, make_runner
from verifiers_rl.report.means import batch_metrics, evaluation_metrics
from verifiers_rl.types import Rollout


def scored(env, reward, score=None):
    """A rollout of two turns; without a reward, one that failed."""
    metrics = {} if score is None else {"score": score}
    rollout = Rollout(0, "p", env=env, num_turns=2, samples=make_samples(1), metrics=metrics)
    rollout.reward, rollout.error = (math.nan, ValueError()) if reward is None else (reward, None)
    return rollout


def test_a_group_that_failed_is_not_uniform():
    failed, mixed, alike = (
        [scored("a", reward) for reward in rewards]
        for rewards in ((None, None), (0.0, 1.0), (1.0, 1.0))
    )
    assert batch_metrics([failed, mixed])["uniform_group_share"] == 0
    assert batch_metrics([failed, mixed, alike])["uniform_group_share"] == 0.5


def test_metrics_of_several_environments_are_kept_apart():
    groups = [
        [scored("a", 1.0, 0.5), scored("a", 0.0, 0.7)],
        [scored("b", 4.0), scored("b", None)],
    ]
    metrics = batch_metrics(groups)
    assert (metrics["reward"], metrics["a/reward"], metrics["b/reward"]) == (5 / 3, 0.5, 4.0)
    assert metrics["a/score"] == pytest.approx(0.6) and "b/score" not in metrics
    assert (metrics["error_share"], metrics["b/error_share"]) == (0.25, 0.5)
    assert metrics["a/group_share"] == 0.5 and metrics["broken_turn_share"] == 0.0
    evaluated = evaluation_metrics(groups)
    assert (evaluated["reward"], evaluated["b/reward"]) == (1.25, 2.0)
    assert evaluated["a/score"] == pytest.approx(0.6) and "score" not in evaluated
    # Two samples of two turns: each second turn started anew.
    groups[0][0].samples = make_samples(2)
    assert batch_metrics(groups)["broken_turn_share"] == pytest.approx(1 / 3)
    alone = batch_metrics(groups[:1])
    assert alone["a/score"] == pytest.approx(0.6) and "a/reward" not in alone


def test_a_runner_of_ones_own_is_run_as_it_is(capsys):
    async def nothing(*args): ...

    own = SimpleNamespace(
        weights=[1.0], sizes=lambda split: [2], open=nothing, close=nothing, run_group=nothing
    )
    args = RLConfig()
    assert only_runner(make_runner(own, "http://unused", None, args)) is own
    assert capsys.readouterr().out == (
        "environment runs in a thread of the trainer, which makes both slower: "
        "SimpleNamespace has no method `recipe`\n"
    )
    mix = [WeightedEnv(own, "mine", 3.0), WeightedEnv(SimpleNamespace(**vars(own)), "other")]
    mix[1].env.weights, mix[1].env.sizes = [1.0, 3.0], lambda split: [2, 5]
    mixed = make_runner(mix, "http://unused", None, args)
    assert (mixed.weights, mixed.sizes("train")) == ([3.0, 0.25, 0.75], [2, 2, 5])
    del own.open, own.weights
    message = "environment 'env': SimpleNamespace has no weights, open; requests.EnvRunner"
    with pytest.raises(InvalidEnvironmentError, match=message):
        make_runner(own, "http://unused", None, args)


@pytest.mark.parametrize(
    "parts, said",
    [
        ([("a", {"only": "eval"})], "no environment is for training"),
        ([("a", {}), ("a", {"only": "eval"})], "two environments are named 'a'"),
        ([("e", {"only": "test"})], "'e': only='test': must be 'train' or 'eval'"),
        ([("e", {"eval_examples": 0})], "'e': eval_examples=0: must be greater than or equal to 1"),
    ],
)
def test_environments_that_contradict_each_other_are_refused(parts, said):
    with pytest.raises(InvalidEnvironmentError, match=said):
        Environments(
            [Part(WeightedEnv(None, name, **own), StubRunner(), {}) for name, own in parts]
        )


@pytest.mark.parametrize("env", [3, None, {"id": "e"}])
def test_what_is_no_environment_is_refused(env):
    args = RLConfig()
    with pytest.raises(InvalidEnvironmentError, match=r"expected an Env or a Taskset .* got"):
        make_runner(env, "http://unused", None, args)


def test_an_option_of_classic_environments_is_refused():
    args = RLConfig(client_type="renderer")
    with pytest.raises(InvalidEnvironmentError, match="leave client_type out"):
        make_runner(env_from(["a"], lambda completion: 1.0), "http://unused", None, args)


def test_a_classic_environment_in_this_python_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "old_one.py").write_text("def load_environment():\n    ...\n")
    with pytest.raises(InvalidEnvironmentError) as caught:
        EnvTable(id="old-one").load(tmp_path)
    said = str(caught.value)
    assert "id='old-one' is a classic environment" in said
    assert "'verifiers>=0.3.1,<0.4' 'renderers==0.1.10' 'openai<3', and set python =" in said
