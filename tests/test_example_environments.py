"""The environments of docs/environments.md and of the examples, in a real rollout worker, against a
stand-in for vf-vllm that answers over HTTP.
"""

import asyncio
import json
import os
import sys
from importlib import import_module

import pytest
from aiohttp import web

from tests.helpers import ROOT, load_example, make_request
from tests.serving import chat_reply, in_thread, serving
from tests.test_environments_v1 import Server, check_tokens
from tests.test_environments_v1 import tokenizer as tokenizer
from verifiers_rl import RLConfig, WeightedEnv
from verifiers_rl.envs.make import make_runner
from verifiers_rl.envs.v1_loading import load_v1_environment
from verifiers_rl.requests import Places

NAMES = (
    *("number_guess", "price_lookup", "judged_answer", "code_words"),
    *("alphabet_sort", "letter_hunt", "math_python", "kuhn_poker"),
)
FOLDERS = [str(ROOT / "examples" / name) for name in ("environments", *NAMES[4:])]


@pytest.fixture(scope="module", autouse=True)
def on_the_path():
    with pytest.MonkeyPatch.context() as patch:
        for folder in FOLDERS:
            patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join(FOLDERS))
        yield


class Judge:
    """A judge's endpoint that answers with `verdict`, and keeps what it was asked."""

    verdict = "yes"

    async def answer(self, request):
        body = await request.json()
        self.question = body["messages"][0]["content"]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response(chat_reply(self.verdict) | {"usage": usage})


@pytest.fixture(scope="module")
def judge():
    return Judge()


@pytest.fixture(scope="module")
def play(tokenizer, judge, on_the_path, tmp_path_factory):
    """Plays a group of an environment; all of them are in one rollout worker. Its rollouts are to
    be trained as they were sampled, or, if it `fails`, have an error.
    """
    server, folder = Server(tokenizer, None), tmp_path_factory.mktemp("run")

    async def answer(request):
        return await (server if request.path.endswith("tokens") else judge).answer(request)

    options = {"max_seq_len": 900, "max_tokens": 90, "use_cpu": True, "env_workers": 1}
    args = RLConfig(output_dir=str(folder), **options)
    row = {"problem": "What is 6 times 7?", "solution": "It is $\\boxed{42}$."}
    (folder / "problems").mkdir()
    (folder / "problems/train.jsonl").write_text(json.dumps(row))
    with (
        in_thread(serving(answer, "/v1/chat/completions{tokens:(/tokens)?}")) as url,
        asyncio.Runner() as loop,
    ):
        python = {"command": [sys.executable, "-I", "-"], "timeout_s": 5}
        options = {
            "judged_answer": {"task": {"judge": {"base_url": f"{url}/v1"}}},
            "math_python": {"dataset": str(folder / "problems"), "python": python},
        }

        def make(name):
            taskset = {"id": name} | options.get(name, {})
            return WeightedEnv(load_v1_environment({"taskset": taskset}), name)

        runner = make_runner([*map(make, NAMES)], url, tokenizer, args)
        sizes = runner.sizes("train")
        loop.run(runner.open())

        def play(name, say, num_rollouts=1, fails=False):
            server.say, server.requests = say, []
            sampling = {"sampling_args": args.sampling_args(), "places": Places(1)}
            request = make_request(sum(sizes[: NAMES.index(name)]), num_rollouts, **sampling)
            group = loop.run(runner.run_group(request))
            for rollout in group:
                assert (rollout.error is not None) == fails, rollout.error
            if not fails:
                check_tokens(group, server.requests)
            return group

        yield play
        loop.run(runner.close())


@pytest.mark.slow
def test_the_game_answers_each_guess_and_rewards_few_of_them(play):
    module = import_module("number_guess")
    first = next(iter(module.GuessTaskset(module.GuessConfig(id="number_guess"))))

    def search(prompt):
        """Halves the range, as the replies of the environment say."""
        low, high = 1, 20
        for turn in prompt.split("<|assistant|>")[1:]:
            guess, _, reply = turn.partition("<|user|>")
            guess = int("".join(filter(str.isdigit, guess)) or 0)
            low = guess + 1 if "higher" in reply else low
            high = guess - 1 if "lower" in reply else high
        return str((low + high) // 2)

    (rollout,) = play("number_guess", search)
    assert 1 < rollout.num_turns <= 5 and rollout.reward == pytest.approx(1 / rollout.num_turns)
    assert len(rollout.samples) == 1  # all turns are one sequence
    assert rollout.completion.endswith(str(first.data.secret))
    (rollout,) = play("number_guess", lambda _: "what?")
    assert rollout.reward == 0 and rollout.num_turns == 5
    assert "Answer with a number." in rollout.completion


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_judges_verdict_is_the_reward_and_no_verdict_is_an_error(play, judge):
    for verdict, reward in (("yes", 1.0), ("No.", 0.0), ("perhaps", None)):
        judge.verdict = verdict
        (rollout,) = play("judged_answer", lambda _: "It is Paris", fails=reward is None)
        assert "capital of France" in judge.question and "Reply: It is Paris" in judge.question
        assert reward is None or rollout.reward == reward
    assert "the judge answered 'perhaps'" in str(rollout.error) and not rollout.samples


@pytest.mark.slow
def test_both_agents_are_trained_and_share_one_reward(play):
    animals = import_module("code_words").ANIMALS

    def say(prompt):
        if "Describe this animal" in prompt:
            return "no. " + str(next(i for i, a in enumerate(animals) if f": {a}<" in prompt))
        return animals[int(prompt.split("no. ")[1].split()[0])]

    rollouts = play("code_words", say, num_rollouts=2)
    assert sorted(rollout.role for rollout in rollouts) == ["receiver"] * 2 + ["sender"] * 2
    assert {rollout.reward for rollout in rollouts} == {1.0}

    def name_it(prompt):
        return next(a for a in animals if f": {a}<" in prompt or f"this? {a} " in prompt)

    rollouts = play("code_words", name_it)
    assert {rollout.reward for rollout in rollouts} == {0.0}  # the sender said the name


@pytest.mark.slow
def test_letters_that_stay_sorted_win_and_each_turn_counts(play):
    def right(prompt):
        turns = [part.partition("<")[0] for part in prompt.split("<|user|>")[1:]]
        return "".join(sorted("".join([turns[0].split("\n")[-1], *turns[1:]])))

    (rollout,) = play("alphabet_sort", right)
    assert (rollout.reward, rollout.metrics["exact"], rollout.num_turns) == (1.0, 1.0, 3)
    assert len(rollout.samples) == 1  # all turns are one sequence
    (rollout,) = play("alphabet_sort", lambda p: right(p) if p.count("<|user|>") == 1 else "?")
    assert rollout.reward == pytest.approx(1 / 3) and rollout.metrics["exact"] == 0.0


@pytest.mark.slow
def test_halving_the_range_finds_the_letter_and_guesses_outside_are_illegal(play):
    def middle(prompt):
        text = prompt.split("<|user|>")[-1].partition("<")[0].split("\n")[-1]
        return chr((ord(text[0]) + ord(text[2]) + 1) // 2)

    (rollout,) = play("letter_hunt", middle)
    assert (rollout.reward, rollout.metrics["legal"]) == (1.0, 1.0) and rollout.num_turns <= 5
    (rollout,) = play("letter_hunt", lambda _: "?")
    assert (rollout.reward, rollout.metrics["legal"], rollout.num_turns) == (0.0, 0.0, 5)


@pytest.mark.slow
def test_in_self_play_one_player_wins_what_the_other_loses(play):
    poker = import_module("kuhn_poker")
    for seat, sign in ((0, 1), (1, -1)):  # player 0 has the K
        chips = [poker.chips_of(seat, "KJ", moves) for moves in poker.ENDS]
        assert chips == [sign * won for won in (1, 1, 2, -1, 2)]
    rollouts = play("kuhn_poker", lambda _: "?")  # no move
    assert {one.role: one.reward for one in rollouts} == {"player0": -2.0, "player1": 2.0}


@pytest.mark.slow
def test_the_program_that_the_model_writes_runs_and_its_output_is_read(play):
    for program, reward in (("print(6 * 7)", 1.0), ("print(6 + 7)", 0.0)):
        call = {"name": "python", "arguments": json.dumps({"code": program})}

        def solve(prompt, call=call):
            output = prompt.partition("<|tool|>")[2].split("<")[0].strip()
            return f"It is \\boxed{{{output}}}" if output else call

        (rollout,) = play("math_python", solve)
        assert (rollout.reward, rollout.metrics["num_programs"]) == (reward, 1.0)
        assert rollout.num_turns == 2


@pytest.mark.parametrize(
    ("said", "right", "same"),
    [
        ("42", "42.0", True),
        ("1,000", "1000", True),
        ("\\dfrac{1}{2}", "0.5", True),
        ("1/2", "\\frac{1}{2}", True),
        ("-\\frac{1}{2}", "\\frac{-1}{2}", True),
        ("$x + 1$", "x+1", True),
        ("\\text{Paris}", "Paris", True),
        ("2/0", "\\frac{2}{1}", False),
        ("41", "42", False),
        (None, "42", False),
    ],
)
def test_answers_of_math_are_the_same_up_to_their_spelling(said, right, same):
    assert load_example("math_python").same_answer(said, right) is same


def test_the_last_box_is_the_answer_also_with_braces_inside():
    boxed = load_example("math_python").boxed
    assert boxed("\\boxed{1} or \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert boxed("\\boxed{1") is None and boxed("1") is None
