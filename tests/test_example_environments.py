"""The environments of docs/environments.md and of the examples, against a stand-in for vf-vllm that
answers over HTTP.
"""

import asyncio
import json
import os
import sys
import tracemalloc
from importlib import import_module

import pytest
from aiohttp import web

from tests import test_environments_v1 as v1
from tests.helpers import ROOT, load_example
from tests.serving import chat_reply, in_thread, serving
from verifiers_rl.envs.base import RunnerOptions
from verifiers_rl.envs.v1 import V1Environment
from verifiers_rl.envs.workers import WorkerEnvironment, WorkerPool

tokenizer, play_group = v1.tokenizer, v1.play  # fixtures

NAMES = (
    *("number_guess", "price_lookup", "judged_answer", "code_words"),
    *("alphabet_sort", "letter_hunt", "math_python", "kuhn_poker", "guess_number"),
)
FOLDERS = [str(ROOT / "examples" / name) for name in ("environments", *NAMES[4:])]


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(FOLDERS))


def load(name, **options):
    return v1.load(name, harness=None, options=options)


@pytest.fixture
def play(play_group):
    """Plays a group of the first task of an example. Its rollouts are to be trained as they were
    sampled, or, if it `fails`, have an error.
    """
    return lambda name, say, options={}, **more: play_group(say, load(name, **options), **more)[0]


@pytest.fixture
def problems(tmp_path):
    row = {"problem": "What is 6 times 7?", "solution": "It is $\\boxed{42}$."}
    (tmp_path / "problems").mkdir()
    (tmp_path / "problems/train.jsonl").write_text(json.dumps(row))
    return f"{tmp_path}/problems"


@pytest.mark.parametrize("name", NAMES)
def test_an_example_can_be_played_in_a_worker(name, tokenizer, problems):
    env = load(name, **({"dataset": problems} if name == "math_python" else {}))
    runner = V1Environment(env, RunnerOptions("http://unused", tokenizer, 900))
    assert WorkerEnvironment(runner, WorkerPool(1, 60.0)).sizes("train")[0] > 0


def test_the_game_answers_each_guess_and_rewards_few_of_them(play):
    secret = next(iter(load("number_guess").taskset)).data.secret

    def say(prompt):
        return ["what?", str(secret + 1), str(secret)][prompt.count("<|user|>") - 1]

    (rollout,) = play("number_guess", say)
    assert (rollout.reward, rollout.num_turns) == (pytest.approx(1 / 3), 3)
    assert "Answer with a number." in rollout.completion and "lower" in rollout.completion
    assert len(rollout.samples) == 1  # all turns are one sequence


def test_the_tool_tells_prices_and_the_sum_is_rewarded(play):
    prices = import_module("price_lookup").PRICES

    def shop(prompt):
        things = [thing for thing in prices if f"one {thing}" in prompt]
        told = prompt.count("<|tool|>")
        if told < 2:
            return {"name": "price", "arguments": f'{{"thing": "{things[told]}"}}'}
        return str(sum(prices[thing] for thing in things))

    (rollout,) = play("price_lookup", shop)
    assert (rollout.reward, rollout.metrics["num_calls"], rollout.num_turns) == (1.0, 2.0, 3)
    (rollout,) = play("price_lookup", lambda _: "1000")
    assert (rollout.reward, rollout.metrics["num_calls"]) == (0.0, 0.0)


@pytest.mark.parametrize("verdict, reward", [("yes", 1.0), ("No.", 0.0), ("perhaps", None)])
def test_the_judges_verdict_is_the_reward_and_no_verdict_is_an_error(play, verdict, reward):
    asked = []

    async def judge(request):
        asked.append((await request.json())["messages"][0]["content"])
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response(chat_reply(verdict) | {"usage": usage})

    with in_thread(serving(judge)) as url:
        options = {"task": {"judge": {"base_url": f"{url}/v1"}}}
        fails = reward is None
        (rollout,) = play("judged_answer", lambda _: "It is Paris", options, fails=fails)
    assert "capital of France" in asked[0] and "Reply: It is Paris" in asked[0]
    if fails:
        assert "the judge answered 'perhaps'" in str(rollout.error)
    else:
        assert rollout.reward == reward


@pytest.mark.parametrize("names_it", [False, True])
def test_both_agents_are_trained_and_share_one_reward(play, names_it):
    animals = import_module("code_words").ANIMALS

    def say(prompt):
        if "Describe this animal" in prompt:  # by its number
            said = next(animal for animal in animals if f": {animal}<" in prompt)
            return f"no. {animals.index(said)} {said if names_it else ''}"
        return animals[int(prompt.split("no. ")[1].split()[0])]

    rollouts = play("code_words", say, num_rollouts=2)
    assert sorted(rollout.role for rollout in rollouts) == ["receiver"] * 2 + ["sender"] * 2
    assert {rollout.reward for rollout in rollouts} == {0.0 if names_it else 1.0}


def test_letters_that_stay_sorted_win_and_each_turn_counts(play):
    def right(prompt):
        turns = [part.partition("<")[0] for part in prompt.split("<|user|>")[1:]]
        return "".join(sorted("".join([turns[0].split("\n")[-1], *turns[1:]])))

    (rollout,) = play("alphabet_sort", right)
    assert (rollout.reward, rollout.metrics["exact"], rollout.num_turns) == (1.0, 1.0, 3)
    assert len(rollout.samples) == 1  # all turns are one sequence
    (rollout,) = play("alphabet_sort", lambda p: right(p) if p.count("<|user|>") == 1 else "?")
    assert rollout.reward == pytest.approx(1 / 3) and rollout.metrics["exact"] == 0.0


def test_halving_the_range_finds_the_letter_and_guesses_outside_are_illegal(play):
    def middle(prompt):
        text = prompt.split("<|user|>")[-1].partition("<")[0].split("\n")[-1]
        return chr((ord(text[0]) + ord(text[2]) + 1) // 2)

    for say, won in ((middle, 1.0), (lambda _: "?", 0.0)):
        (rollout,) = play("letter_hunt", say)
        assert (rollout.reward, rollout.metrics["legal"]) == (won, won)
        assert rollout.num_turns <= 5


def test_in_self_play_one_player_wins_what_the_other_loses(play):
    poker = import_module("kuhn_poker")
    chips = [poker.chips_of(0, "KJ", moves) for moves in poker.ENDS]  # player 0 has the K
    assert chips == [1, 1, 2, -1, 2]
    assert [poker.chips_of(1, "KJ", moves) for moves in poker.ENDS] == [-won for won in chips]
    rollouts = play("kuhn_poker", lambda _: "?")  # no move
    assert {one.role: one.reward for one in rollouts} == {"player0": -2.0, "player1": 2.0}


def test_halving_finds_the_number_by_hints_alone(play):
    def halve(prompt):
        low, high = 1, 15
        for hint in prompt.split("<|user|>")[2:]:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if hint[0] == ">" else (low, middle - 1)
        return str((low + high) // 2)

    (rollout,) = play("guess_number", halve)
    assert (rollout.reward, rollout.metrics["possible"]) == (1.0, 1.0) and rollout.num_turns <= 4
    (rollout,) = play("guess_number", lambda _: "16")
    assert (rollout.reward, rollout.metrics["possible"], rollout.num_turns) == (0.0, 0.0, 4)


@pytest.mark.parametrize("program, reward", [("print(6 * 7)", 1.0), ("print(6 + 7)", 0.0)])
def test_the_program_that_the_model_writes_runs_and_its_output_is_read(
    play, problems, program, reward
):
    def solve(prompt):
        output = prompt.partition("<|tool|>")[2].split("<")[0].strip()
        call = {"name": "python", "arguments": json.dumps({"code": program})}
        return f"It is \\boxed{{{output}}}" if output else call

    python = {"command": [sys.executable, "-I", "-"], "timeout_s": 5}
    (rollout,) = play("math_python", solve, {"dataset": problems, "python": python})
    assert (rollout.reward, rollout.num_turns) == (reward, 2)
    assert rollout.metrics["num_programs"] == 1.0


def test_only_the_end_of_what_a_program_prints_is_kept_in_memory():
    module = load_example("math_python")
    config = module.PythonConfig(command=(sys.executable, "-I", "-"), max_chars=5)
    tracemalloc.start()
    said = asyncio.run(module.Python(config).python("print('é' * 4_000_000 + 'end')"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert said == "éend\n" and peak < 2e6  # bytes, of 8e6


@pytest.mark.parametrize(
    "said, right, same",
    [
        ("1,000", "1000.0", True),
        ("\\dfrac{1}{2}", "0.5", True),
        ("$x + 1$", "x+1", True),
        ("\\text{Paris}", "Paris", True),
        ("2/0", "\\frac{2}{1}", False),
        (None, "42", False),
    ],
)
def test_answers_of_math_are_the_same_up_to_their_spelling(said, right, same):
    assert load_example("math_python").same_answer(said, right) is same


def test_the_last_box_is_the_answer_also_with_braces_inside():
    boxed = load_example("math_python").boxed
    assert boxed("\\boxed{1} or \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert boxed("\\boxed{1") is None and boxed("1") is None
