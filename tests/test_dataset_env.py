"""`env_from`: prompts and a Python function as an environment."""

import asyncio
import json
import math
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pandas
import pyarrow
import pytest
import torch
import verifiers.v1 as vf
from datasets import Dataset

from tests import test_environments_v1 as v1
from tests.helpers import chat
from tests.test_env_workers import DIFFERENT
from verifiers_rl import RLConfig, env_from
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.dataset import ExampleTaskset
from verifiers_rl.envs.make import make_runner

tokenizer, on_the_path, play = v1.tokenizer, v1.on_the_path, v1.play  # fixtures

ROWS = [{"prompt": "2 + 3", "answer": "5"}, {"prompt": "1 + 1", "answer": "2"}]
CHAT = chat("hi")


def scores(env):
    """What the functions give the reply "5" to each task, by their names."""
    return [asyncio.run(task.scores_of("5")) for task in env]


def exact(completion, answer):
    return float(completion == answer)


class Polars(list):
    """A frame of polars, which we do not install: it iterates over its columns."""

    def to_dicts(self):
        return ROWS


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.from_list(ROWS),
        tuple(ROWS),
        pandas.DataFrame(ROWS, index=[7, 3]),
        pyarrow.Table.from_pylist(ROWS),
        Polars(["prompt", "answer"]),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_a_reward_function_gets_the_columns_that_it_names(dataset):
    env = env_from(dataset, exact)
    assert [task.data.prompt for task in env] == ["2 + 3", "1 + 1"]
    assert scores(env) == [{"exact": 1.0}, {"exact": 0.0}]


class Endless:
    """A sequence of one's own, which makes a row for whatever number."""

    def __len__(self):
        return 3

    def __getitem__(self, number):
        return {"prompt": str(number)}


def test_a_sequence_ends_with_its_length():
    assert [task.data.prompt for task in env_from(Endless(), short)] == ["0", "1", "2"]


class Judge:
    def __call__(self, answer, completion):
        return exact(completion, answer)


async def waits(completion, answer):
    await asyncio.sleep(0)
    return exact(completion, answer)


def of_all(**row):
    return float(row == {"completion": "5", "prompt": "2 + 3", "answer": "5"})


def with_default(prompt, bonus=2, *rest):
    return bonus * len(prompt)


def test_a_column_that_a_row_lacks_is_left_to_the_default_of_the_parameter():
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": "5"}]

    def named(prompt, answer="none"):
        return answer == {"a": "none", "b": "5"}[prompt]

    def whole(completion, **row):
        return row == rows["ab".index(row["prompt"])]

    assert scores(env_from(rows, [named, whole])) == [{"named": 1.0, "whole": 1.0}] * 2
    with pytest.raises(InvalidEnvironmentError, match=r"'answer', .* no column of row 0"):
        env_from(rows, exact)


class Number:
    def __float__(self):
        return 0.5


@pytest.mark.parametrize(
    "function, expected",
    [
        *[(function, [1.0, 0.0]) for function in (waits, Judge(), of_all)],
        (partial(with_default, bonus=1), [5.0, 5.0]),
        (lambda completion: Number(), [0.5, 0.5]),
    ],
)
def test_reward_functions_of_all_kinds(function, expected):
    found = scores(env_from(ROWS, function))
    assert [score for given in found for score in given.values()] == expected


def test_what_a_reward_function_changes_in_a_row_no_other_call_sees():
    lock = threading.Lock()
    rows = [{"prompt": "a", "answers": [{"of": "5"}], "lock": lock}, {"prompt": "b", "lock": lock}]

    def pops(completion, answers=(), lock=None):
        return len(answers and answers.pop().popitem())

    def counts(answers=(), **row):
        return 10 * len(answers) + (row["lock"] is lock)

    env = env_from(rows, [pops, counts])
    for _ in range(2):
        assert scores(env) == [{"pops": 2.0, "counts": 11.0}, {"pops": 0.0, "counts": 1.0}]


def reward(completion):
    return 1


def short(completion):
    return -float(len(completion))


class OfAnAgent(ExampleTaskset):
    """As `env_from` makes it, but played by verifiers' machinery."""


@pytest.mark.parametrize("kind", [ExampleTaskset, OfAnAgent])
@pytest.mark.parametrize("weights, expected", [(None, 0.0), (np.array([1, 0.2]), 0.8)])
def test_several_rewards_are_summed_by_weight_and_each_is_kept(play, kind, weights, expected):
    env = env_from(ROWS, (exact, short), weights=weights, kind=kind)
    (rollout,), _ = play("5", env)
    assert rollout.reward == pytest.approx(expected)
    assert rollout.metrics == {"exact": 1.0, "short": -1.0}
    assert env.tasks[0].row == {"answer": "5"}


@pytest.mark.parametrize(
    "functions, weights, message",
    [
        ([exact, short], [1], r"weights=\[1\]: .* as many .* functions, \['exact', 'short'\]"),
        ([exact, short], [1, math.nan], r"weights=\[1, nan\]"),
        ([short, short], None, r"\['short', 'short'\]; give each a name of its own"),
        ([exact, reward], None, "and none 'reward'"),  # their sum has that name
        ([exact, "short"], None, r"'short'\] is no function"),
        ([exact, short], [[1], [1, 2]], r"weights=\[\[1\], \[1, 2\]\]: must be as many numbers"),
        (max, None, "function 'max' does not say what its parameters are; put a function of yours"),
        (lambda completions, **row: 1, None, "'completions', .* mean 'completion'"),
        (lambda answer, /: 1, None, "'answer', which is no column that can be passed by its name"),
    ],
)
def test_functions_and_weights_that_do_not_fit_are_one_line(functions, weights, message):
    with pytest.raises(InvalidEnvironmentError, match=message):
        env_from(ROWS, functions, weights=weights)


@pytest.mark.parametrize(
    "value",
    [None, "1.0", b"1", math.nan, torch.ones(2), 10**400, "x" * 10**6],
    ids=lambda value: f"{value!r:.20}",
)
def test_what_is_no_number_costs_the_rollout(value):
    said = r"function '.*' returned .{1,80}, which is no finite number"
    with pytest.raises(ValueError, match=said):
        scores(env_from(["p"], lambda completion: value))


@pytest.mark.parametrize("value", [True, np.float32(1), torch.tensor(1.0)])
def test_numbers_of_all_kinds_are_rewards(value):
    assert scores(env_from(["p"], lambda completion: value)) == [{"<lambda>": 1.0}]


def test_prompts_of_all_kinds_and_a_system_prompt():
    env = env_from([{"prompt": "a"}, {"prompt": CHAT}], lambda prompt: 1, system_prompt="be brief")
    first, second = env
    assert (first.data.prompt, first.data.system_prompt) == ("a", "be brief")
    assert second.data.prompt == [vf.UserMessage(content="hi")]
    assert second.row["prompt"] is CHAT  # the function gets what the dataset has
    texts = pandas.Series(["a", "b"], index=[1, 0])
    assert [task.data.prompt for task in env_from(texts, short)] == ["a", "b"]


def test_evaluations_may_have_rows_of_their_own():
    for eval_rows, size in ((None, 2), (ROWS[1:], 1)):
        env = env_from(ROWS, exact, eval_dataset=eval_rows)
        runner = make_runner(env, "http://unused", None, RLConfig(env_workers=0))
        assert (runner.sizes("train"), runner.sizes("eval")) == ([2], [size])
    with pytest.raises(InvalidEnvironmentError, match="eval_dataset: the reward function 'exact'"):
        env_from(ROWS, exact, eval_dataset=["0"])


@pytest.mark.parametrize(
    "dataset, message",
    [
        ([], "dataset is empty"),
        (pandas.DataFrame({"question": ["a"]}), "row 0 has no column 'prompt', only 'question'"),
        ([{"prompt": "a", "anwser": 1}], "did you mean 'anwser'"),
        ([{"prompt": 3, "answer": ""}], "row 0: prompt=3"),
        ([{"prompt": "", "answer": ""}], "row 0: prompt='' is empty; give one"),
        ([{"prompt": [], "answer": ""}], r"row 0: prompt=\[\] is empty; give one"),
        ([{"prompt": None, "answer": ""}], "row 0: prompt=None is empty; give one"),
        ([{"prompt": [CHAT[0] | {"role": "system"}], "answer": ""}], "row 0: .*leave system_pro"),
        ([["a"]], "row 0 is a list"),
        ([ROWS[0] | {"completion": "5"}], "'completion'.* another name"),
        ([ROWS[0] | {"self": 5}], "a column 'self', which no reward function can get by this name"),
        (pandas.DataFrame([["a", "5", 1]], columns=["prompt", "answer", 7]), "a column 7, which"),
        (
            pyarrow.table([["a"], ["5"], ["6"]], names=["prompt", "answer", "answer"]),
            r"columns of one name among \['prompt', 'answer'\]; rename",
        ),
        (Dataset.from_list(ROWS).to_iterable_dataset(), r"pass list\(stream.take\(n\)\)"),
    ],
)
def test_a_dataset_that_cannot_be_an_environment_is_one_line(dataset, message):
    with pytest.raises(InvalidEnvironmentError, match=message):
        env_from(dataset, exact, system_prompt="be brief")


@pytest.mark.parametrize(
    "say, options",
    [
        ("5", {}),
        ("", {}),
        ("a long reply", {"max_tokens": 3}),
        ("a long reply", {"sampling_mask": True, "top_k": 20, "router_replay": True}),
    ],
    ids=str,
)
def test_a_rollout_is_the_one_that_verifiers_machinery_would_make(play, say, options):
    """But for its times."""
    prompt = [{"role": "system", "content": "be brief"}, *CHAT]
    found = []
    for kind in (ExampleTaskset, OfAnAgent):
        env = env_from([{"prompt": prompt, "answer": "5"}], exact, kind=kind)
        (rollout,), ((body, _),) = play(say, env, **options)
        del body["messages"]  # the server does not render them
        record = json.loads(rollout.record)
        assert record.pop("begun_at") > 0 and rollout.generation_s > 0
        for turn in record["turns"]:
            assert 0 <= turn.pop("begin_s") < turn.pop("end_s")
        (sample,) = rollout.samples
        columns = {name: sample.column(name) for name in (*sample.DTYPES, *sample.extras)}
        found.append((replace(rollout, **DIFFERENT), body, record, columns))
    np.testing.assert_equal(*found)


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_rollout_that_fails_says_why_and_what_was_said(play, monkeypatch, is_slow):
    error, message, num_messages, options = ValueError, "returned None", 2, {}
    if is_slow:
        monkeypatch.setattr(
            "verifiers_rl.inference.ServerClient.reply_to",
            lambda *args, **kwargs: asyncio.sleep(60),
        )
        error, message, num_messages = TimeoutError, "longer than generation_timeout", 1
        options["generation_timeout"] = 1.0
    env = env_from(ROWS, lambda completion: None)
    (rollout,), _ = play(env=env, fails=True, **options)
    assert isinstance(rollout.error, error) and message in str(rollout.error)
    assert math.isnan(rollout.reward)
    assert len(json.loads(rollout.record)["messages"]) == num_messages


class Starts:
    keywords = None  # of a partial too, but this is none

    def __call__(self, completion):
        return float(completion.startswith("5"))


def test_rewards_have_names_that_stay_whatever_they_are():
    env = env_from(ROWS, [partial(partial(exact), answer="5"), Starts()])
    assert [*scores(env)[0]] == ["exact", "Starts"]
    with pytest.raises(InvalidEnvironmentError, match="are named \\['exact', 'exact'\\]"):
        env_from(ROWS, [exact, partial(exact, answer="5")])


def test_what_a_partial_has_bound_is_not_replaced_by_a_column():
    bound = [partial(exact, answer="no"), partial(of_all, prompt="a", answer="b")]
    assert scores(env_from(ROWS, bound)) == [{"exact": 0.0, "of_all": 0.0}] * 2
    rows = [{"prompt": "2 + 3", "answer": "no"}]
    assert scores(env_from(rows, partial(of_all, answer="5"))) == [{"of_all": 1.0}]


def test_a_prompt_may_have_tool_calls_as_openai_has_them(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = [{"role": "tool", "tool_call_id": "1", "content": "5"}]
    rows = [{"prompt": CHAT + said + answer}]
    # As pandas reads them back: arrays, in which each object has the keys of all.
    pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    for dataset in (rows, pandas.read_parquet(tmp_path / "rows.parquet")):
        (task,) = env_from(dataset, lambda completion: 1.0)
        assert [message.role for message in task.data.prompt] == ["user", "assistant", "tool"]
        assert task.data.prompt[1].tool_calls[0].name == "add"
    with pytest.raises(InvalidEnvironmentError, match=r"row 0: prompt=.*'developer'.*Input"):
        env_from([{"prompt": [{"role": "developer", "content": "hi"}]}], lambda completion: 1.0)
