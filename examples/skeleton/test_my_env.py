"""Tests of my_env.py, without a model and without a server: `python -m pytest`."""

import asyncio
from types import SimpleNamespace

import pytest
from my_env import MyConfig, MyTaskset, score


def make_taskset(**options):
    return MyTaskset(MyConfig(id="my_env", **options))


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("oea", 1.0),
        ("The vowels are OEA", 1.0),
        ("oe", 2 / 3),
        ("oeaa", 3 / 4),  # too long
        ("eao", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_the_share_that_is_right(reply, reward):
    assert score(reply, "oea") == pytest.approx(reward)


def test_the_right_answer_of_a_task_gets_the_whole_reward():
    for task in make_taskset(num_tasks=50):
        right = SimpleNamespace(last_reply=task.data.answer)  # all that the reward looks at
        assert asyncio.run(task.right_letters(right)) == 1.0
        assert asyncio.run(task.exact_match(right)) == 1.0
        assert asyncio.run(task.right_letters(SimpleNamespace(last_reply="x"))) == 0.0


def test_the_prompt_has_the_instruction_and_the_text():
    (task,) = make_taskset(num_tasks=1, instruction="Vowels: ")
    assert task.data.prompt.startswith("Vowels: ")
    assert set(task.data.answer) <= set(task.data.prompt)


def test_tasks_for_evaluation_are_not_trained_on():
    train, held_out = (
        {task.data.prompt for task in make_taskset(num_tasks=200, held_out=is_held_out)}
        for is_held_out in (False, True)
    )
    assert len(train) == len(held_out) == 200 and not train & held_out
