"""`env_from`: prompts and a Python function as an environment."""

import asyncio
import functools
import json
import math
from pathlib import Path

import numpy as np
import openai
import pandas
import pyarrow
import pytest
import torch
import verifiers.v1 as vf
from aiohttp import web
from datasets import Dataset, DatasetDict
from verifiers.v1.errors import TaskError

from tests.helpers import make_request
from tests.serving import serving
from tests.test_environments_v1 import Server
from verifiers_rl import RLConfig, env_from
from verifiers_rl.envs.base import InvalidEnvironmentError, RunnerOptions
from verifiers_rl.envs.dataset import DatasetEnvironment
from verifiers_rl.envs.make import make_runner
from verifiers_rl.envs.v1 import V1Environment

ROWS = [{"prompt": "2 + 3", "answer": "5"}, {"prompt": "1 + 1", "answer": "2"}]
CHAT = [{"role": "user", "content": "hi"}]


class Reply:
    """What a task needs of a trace to score it."""

    last_reply = "5"
    record_reward, reward = vf.Trace.record_reward, vf.Trace.reward

    def __init__(self):
        self.rewards, self.metrics = {}, {}


def scored(env):
    """The rollouts of the tasks, as verifiers scores them."""

    async def score():
        traces = [Reply() for _ in env]
        for task, trace in zip(env, traces, strict=True):
            await task.score(trace)
        return traces

    return asyncio.run(score())


def rewards(env):
    return [trace.reward for trace in scored(env)]


def exact(completion, answer):
    return float(completion == answer)


def sizes_of(env):
    args = RLConfig(env_workers=0)
    runner = make_runner(env, "http://unused", None, args)
    return runner.sizes("train"), runner.sizes("eval")


class Polars:
    """A frame of polars, which we do not install: it iterates over its columns."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, name):
        return [row[name] for row in ROWS]

    def __iter__(self):
        return iter([self["prompt"], self["answer"]])

    def to_dicts(self):
        return ROWS


class MapStyle(torch.utils.data.Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, number):
        return ROWS[number]


@pytest.mark.parametrize(
    "dataset",
    [
        ROWS,
        Dataset.from_list(ROWS),
        tuple(ROWS),
        pandas.DataFrame(ROWS, index=[7, 3]),
        pyarrow.Table.from_pylist(ROWS),
        Polars(),
        MapStyle(),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_a_reward_function_gets_the_columns_that_it_names(dataset):
    env = env_from(dataset, exact)
    assert [task.data.prompt for task in env] == ["2 + 3", "1 + 1"]
    assert rewards(env) == [1.0, 0.0]
    assert sizes_of(env) == ([2], [2])


def test_reward_functions_of_all_kinds():
    async def waits(completion, answer):
        await asyncio.sleep(0)
        return exact(completion, answer)

    class Judge:
        def __call__(self, answer, completion):
            return exact(completion, answer)

    def of_all(**row):
        return float(row == {"completion": "5", "prompt": "2 + 3", "answer": "5"})

    def with_default(prompt, bonus=2, *rest):
        return bonus * len(prompt)

    for function in (waits, Judge(), of_all):
        assert rewards(env_from(ROWS, function)) == [1.0, 0.0]
    assert rewards(env_from(ROWS, with_default)) == [10.0, 10.0]
    assert rewards(env_from(ROWS, functools.partial(with_default, bonus=1))) == [5.0, 5.0]


def short(completion):
    return -float(len(completion))


def test_several_rewards_are_summed_by_weight_and_each_is_kept():
    async def right(completion, answer):
        return exact(completion, answer)

    for weights, expected in ((None, [0.0, -1.0]), (np.array([1, 0.2]), [0.8, -0.2])):
        traces = scored(env_from(ROWS, [right, short], weights=weights))
        assert [trace.reward for trace in traces] == pytest.approx(expected)
        scores = [{name: one.score for name, one in trace.rewards.items()} for trace in traces]
        assert scores == [{"right": 1.0, "short": -1.0}, {"right": 0.0, "short": -1.0}]
    (task, _) = env_from(ROWS, (right, short))
    assert task.row == {"answer": "5"}


@pytest.mark.parametrize(
    "functions, weights, message",
    [
        ([exact, short], [1], r"weights=\[1\]: .* as many .* functions, \['exact', 'short'\]"),
        ([exact, short], [1, math.nan], r"weights=\[1, nan\]: must be as many numbers"),
        ([exact, short], [1, "2"], r"weights=\[1, '2'\]: must be as many numbers"),
        ([exact], [], r"weights=\[\]: must be as many numbers"),
        ([exact], 0.5, "weights=0.5: must be as many numbers"),
        ([short, short], None, r"named \['short', 'short'\]; give each a name of its own"),
        ([], None, r"reward_fn=\[\] is no function"),
        ([exact, "short"], None, r"'short'\] is no function"),
    ],
)
def test_functions_and_weights_that_do_not_fit_are_one_line(functions, weights, message):
    with pytest.raises(InvalidEnvironmentError, match=message):
        env_from(ROWS, functions, weights=weights)


def test_the_sum_alone_is_named_reward():
    def reward(completion):
        return 1

    with pytest.raises(InvalidEnvironmentError, match="and none 'reward'"):
        env_from(ROWS, [exact, reward])
    (trace, _) = scored(env_from(ROWS, reward))
    assert [*trace.rewards] == ["reward"]


@pytest.mark.parametrize("value", [True, 1, np.float32(1), np.bool_(True), torch.tensor(1.0)])
def test_numbers_of_all_kinds_are_rewards(value):
    (reward,) = rewards(env_from(["p"], lambda completion: value))
    assert (reward, type(reward)) == (1.0, float)


@pytest.mark.parametrize("value", [None, "1.0", math.nan, [1.0], torch.ones(2), 1j, 10**400])
def test_what_is_no_number_costs_the_rollout(value):
    with pytest.raises(TaskError, match=r"function '.*' returned .*, which is no finite number"):
        rewards(env_from(["p"], lambda completion: value))


def test_prompts_of_all_kinds_and_a_system_prompt():
    env = env_from([{"prompt": "a"}, {"prompt": CHAT}], lambda prompt: 1, system_prompt="be brief")
    first, second = env
    assert (first.data.prompt, first.data.system_prompt) == ("a", "be brief")
    assert second.data.prompt == [vf.UserMessage(content="hi")]
    assert second.row["prompt"] is CHAT  # the function gets what the dataset has
    for texts in (["a", "b"], np.array(["a", "b"]), pandas.Series(["a", "b"], index=[1, 0])):
        assert env_from(texts, lambda completion: 1).tasks[1].data.prompt == "b"


def test_evaluations_may_have_rows_of_their_own():
    env = env_from(ROWS, exact, eval_dataset=[{"prompt": "0", "answer": "0"}])
    assert sizes_of(env) == ([2], [1])
    with pytest.raises(InvalidEnvironmentError, match="eval_dataset: the reward function 'exact'"):
        env_from(ROWS, exact, eval_dataset=["0"])


@pytest.mark.parametrize(
    "dataset, message",
    [
        ([], "dataset is empty"),
        ([{"question": "a"}], "row 0 has no column 'prompt', only 'question'"),
        (pandas.DataFrame({"question": ["a"]}), "row 0 has no column 'prompt', only 'question'"),
        ([{"prompt": "a", "anwser": 1}], "did you mean 'anwser'.*'prompt', 'anwser'"),
        ([ROWS[0], {"prompt": "b"}], "'answer', which is no column"),
        ([{"prompt": 3, "answer": ""}], "row 0: prompt=3 is neither"),
        ([{"prompt": "", "answer": ""}], "row 0: the prompt is empty"),
        ([{"prompt": [CHAT[0] | {"role": "system"}], "answer": ""}], "row 0: .*leave system_pro"),
        ([["a"]], "row 0 is a list"),
        ([ROWS[0] | {"completion": "5"}], "dataset has a column 'completion'.* another name"),
        ("abc", "not a str"),
        ({"a", "b"}, "not a set; .* of a set, a sorted list"),
        (DatasetDict(train=Dataset.from_list(ROWS)), "of a DatasetDict, pass one of its"),
        (Dataset.from_list(ROWS).to_iterable_dataset(), r"pass list\(stream.take\(n\)\)"),
    ],
)
def test_a_dataset_that_cannot_be_an_environment_is_one_line(dataset, message):
    with pytest.raises(InvalidEnvironmentError, match=message):
        env_from(dataset, exact, system_prompt="be brief")


@pytest.mark.parametrize(
    "reward, message",
    [
        (lambda completions, **row: 1, "'completions', which is no column .* mean 'completion'"),
        (lambda answer, /: 1, "'answer', which is no column that can be passed by its name"),
        ("exact", "reward_fn='exact' is no function"),
    ],
)
def test_a_reward_function_that_cannot_be_called_is_one_line(reward, message):
    with pytest.raises(InvalidEnvironmentError, match=message):
        env_from(ROWS, reward)


# --- Rollouts -------------------------------------------------------------------------------------


@pytest.fixture
def play(monkeypatch):
    """Plays a group by a kind of runner: its rollouts, and the requests that it made."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "v1"))
    from light_tokenizer import LightTokenizer

    def play(kind, env, answer=None, say="5", sampling=None, num_rollouts=2):
        async def run():
            server = Server(LightTokenizer(), lambda prompt: say)
            async with serving(answer or server.answer, "/v1/chat/completions/tokens") as url:
                made = kind(env, RunnerOptions(url, LightTokenizer(), 200))
                await made.open()
                try:
                    given = sampling or {"temperature": 1.0, "max_tokens": 90}
                    request = make_request(0, num_rollouts, sampling_args=given, timeout_s=5.0)
                    return await made.run_group(request), server.requests
                finally:
                    await made.close()

        return asyncio.run(run())

    return play


@pytest.mark.parametrize("say", ["5", "a long reply", ""])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_tokens": 3}, {"sampling_mask": True, "top_k": 20, "router_replay": True}],
    ids=str,
)
def test_a_rollout_is_the_one_that_verifiers_machinery_would_make(play, tmp_path, say, options):
    """But for its times."""
    prompt = [{"role": "system", "content": "be brief"}, *CHAT]
    env = env_from([{"prompt": prompt, "answer": "5"}], exact)
    options = {"max_tokens": 90, **options}
    sampling = RLConfig(output_dir=str(tmp_path), use_cpu=True, **options).sampling_args()
    ours, asked = play(DatasetEnvironment, env, say=say, sampling=sampling)
    theirs, asked_by_theirs = play(V1Environment, env, say=say, sampling=sampling)
    for body, _ in asked + asked_by_theirs:
        del body["messages"]  # the server does not render them
    assert asked == asked_by_theirs and len(asked) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert one.error is None and other.error is None and one.generation_s > 0
        names = ("reward", "metrics", "prompt", "completion", "role", "num_turns", "is_truncated")
        assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]
        ((sample,), (expected,)) = one.samples, other.samples
        assert sample.extras.keys() == expected.extras.keys()
        for name in (*sample.DTYPES, *sample.extras):
            np.testing.assert_array_equal(sample.column(name), expected.column(name))
        records = [json.loads(rollout.record) for rollout in (one, other)]
        for record in records:
            assert record.pop("begun_at") > 0
            for turn in record["turns"]:
                assert 0 <= turn.pop("begin_s") < turn.pop("end_s")
        assert records[0] == records[1]


def failing(completion):
    raise RuntimeError(f"not {completion}")


async def refuse(request):
    return web.json_response({"error": {"message": "trouble"}}, status=404)


async def hang(request):
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    "reward, answer, error, message, roles",
    [
        (failing, None, RuntimeError, "not 5", ["user", "assistant"]),
        (exact, refuse, openai.NotFoundError, "trouble", ["user"]),
        (exact, hang, TimeoutError, "took longer than generation_timeout", ["user"]),
    ],
)
def test_a_rollout_that_fails_says_why_and_what_was_said(
    play, reward, answer, error, message, roles
):
    (rollout,), _ = play(DatasetEnvironment, env_from(ROWS, reward), answer, num_rollouts=1)
    assert isinstance(rollout.error, error) and message in str(rollout.error)
    assert not rollout.samples and math.isnan(rollout.reward)
    assert [one["role"] for one in json.loads(rollout.record)["messages"]] == roles
