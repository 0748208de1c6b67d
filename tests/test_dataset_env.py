"""`env_from`: prompts and a Python function as an environment."""

import asyncio
import functools
import math

import numpy as np
import pandas
import pyarrow
import pytest
import torch
import verifiers.v1 as vf
from datasets import Dataset, DatasetDict

from verifiers_rl import RLConfig, env_from
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.make import make_runner

ROWS = [{"prompt": "2 + 3", "answer": "5"}, {"prompt": "1 + 1", "answer": "2"}]


class Reply:
    last_reply = "5"


def rewards(env):
    async def score():
        return [await task.reward(Reply()) for task in env]

    return asyncio.run(score())


def exact(completion, answer):
    return float(completion == answer)


def runner_of(env, tmp_path):
    return make_runner(
        env, "http://unused", None, RLConfig(output_dir=str(tmp_path), env_workers=0)
    )


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
def test_a_reward_function_gets_the_columns_that_it_names(dataset, tmp_path):
    env = env_from(dataset, exact)
    assert [task.data.prompt for task in env] == ["2 + 3", "1 + 1"]
    assert rewards(env) == [1.0, 0.0]
    runner = runner_of(env, tmp_path)
    assert (runner.sizes("train"), runner.sizes("eval")) == ([2], [2])


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


@pytest.mark.parametrize("value", [True, 1, np.float32(1), np.bool_(True), torch.tensor(1.0)])
def test_numbers_of_all_kinds_are_rewards(value):
    (reward,) = rewards(env_from(["p"], lambda completion: value))
    assert (reward, type(reward)) == (1.0, float)


@pytest.mark.parametrize("value", [None, "1.0", math.nan, [1.0], torch.ones(2), 1j])
def test_what_is_no_number_costs_the_rollout(value):
    def odd(completion):
        return value

    with pytest.raises(ValueError, match=r"function 'odd' returned .*, which is no finite number"):
        rewards(env_from(["p"], odd))


def test_prompts_of_all_kinds_and_a_system_prompt():
    chat = [{"role": "user", "content": "hi"}]
    env = env_from([{"prompt": "a"}, {"prompt": chat}], lambda prompt: 1, system_prompt="be brief")
    first, second = env
    assert (first.data.prompt, first.data.system_prompt) == ("a", "be brief")
    assert second.data.prompt == [vf.UserMessage(content="hi")]
    assert second.row["prompt"] is chat  # the function gets what the dataset has
    for texts in (["a", "b"], np.array(["a", "b"]), pandas.Series(["a", "b"], index=[1, 0])):
        assert env_from(texts, lambda completion: 1).tasks[1].data.prompt == "b"


def test_evaluations_may_have_rows_of_their_own(tmp_path):
    env = env_from(ROWS, exact, eval_dataset=[{"prompt": "0", "answer": "0"}])
    runner = runner_of(env, tmp_path)
    assert (runner.sizes("train"), runner.sizes("eval")) == ([2], [1])
    with pytest.raises(InvalidEnvironmentError, match="eval_dataset: the reward function 'exact'"):
        env_from(ROWS, exact, eval_dataset=["0"])


def completions(completions, **kwargs):
    return 1.0


def positional(answer, /):
    return 1.0


@pytest.mark.parametrize(
    ("dataset", "reward", "message"),
    [
        ([], exact, "dataset is empty"),
        ([{"question": "a"}], exact, r"row 0 has no column 'prompt', only 'question'"),
        ([{"prompt": "a", "anwser": 1}], exact, "did you mean 'anwser'.*'prompt', 'anwser'"),
        (ROWS, completions, "a parameter 'completions', which is no column .* mean 'completion'"),
        (ROWS, positional, "'answer', which is no column that can be passed by its name"),
        ([ROWS[0], {"prompt": "b"}], exact, "'answer', which is no column"),
        (ROWS, "exact", "reward_fn='exact' is no function"),
        ([{"prompt": 3, "answer": ""}], exact, "row 0: prompt=3 is neither"),
        ([{"prompt": "", "answer": ""}], exact, "row 0: the prompt is empty"),
        ([["a"]], exact, "row 0 is a list"),
        ("abc", exact, "not a str"),
        ({"a", "b"}, exact, "not a set; .* of a set, a sorted list"),
        (pandas.DataFrame({"question": ["a"]}), exact, "row 0 has no column 'prompt', only 'quest"),
        (DatasetDict(train=Dataset.from_list(ROWS)), exact, "of a DatasetDict, pass one of its"),
        (Dataset.from_list(ROWS).to_iterable_dataset(), exact, r"pass list\(stream.take\(n\)\)"),
        ([{"prompt": [{"role": "system", "content": "a"}], "answer": ""}], exact, "leave system_p"),
    ],
)
def test_what_cannot_be_an_environment_is_one_line(dataset, reward, message):
    with pytest.raises(InvalidEnvironmentError, match=message):
        env_from(dataset, reward, system_prompt="be brief")
