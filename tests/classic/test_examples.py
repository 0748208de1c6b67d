"""The examples' environments, without a server: what is right wins, and held-out data stays out."""

import asyncio

import pytest

from tests.classic.test_environments import ScriptedClient, WordTokenizer
from tests.helpers import ROOT, load_example
from verifiers_rl.envs.base import RunnerOptions
from verifiers_rl.envs.classic import ClassicEnvironment

NAMES = ["reverse_text", "alphabet_sort", "letter_hunt", "calculator"]


def play(env, reply, num_examples=20):
    """One rollout of each of the first examples, by what `reply(last message)` says."""
    runner = ClassicEnvironment(
        env, RunnerOptions("http://unused", WordTokenizer(), max_seq_len=512)
    )

    async def answer(text):
        return reply(text)

    runner._client = ScriptedClient(answer)

    async def run():
        slots = asyncio.Semaphore(8)
        return [
            rollout
            for index in range(num_examples)
            for rollout in await runner.run_group("train", index, 1, "m", {}, 0, slots)
        ]

    rollouts = asyncio.run(run())
    assert [rollout.error for rollout in rollouts] == [None] * num_examples
    return rollouts


@pytest.mark.parametrize("name", NAMES)
def test_held_out_examples_are_not_trained_on(name):
    env = load_example(name).load_environment(num_eval=50)

    def keys(split):
        return {str((row["question"], row.get("answer"), row.get("info"))) for row in split}

    train, held_out = keys(env.get_dataset()), keys(env.get_eval_dataset())
    assert len(held_out) == 50 and len(train) > 500 and not train & held_out


def test_reverse_text_is_the_same_task_as_classic_and_as_v1_environment():
    classic, v1 = load_example("reverse_text"), load_example("reverse_text_v1")
    env = classic.load_environment(num_train=500, num_eval=100)
    for split, held_out in ((env.get_dataset(), False), (env.get_eval_dataset(), True)):
        config = v1.ReverseTextConfig(id="reverse_text_v1", num_tasks=len(split), held_out=held_out)
        tasks = list(v1.ReverseTextTaskset(config).load())
        assert [row["prompt"][-1]["content"] for row in split] == [t.data.prompt for t in tasks]
        assert list(split["answer"]) == [task.data.answer for task in tasks]
    assert classic.demonstrations(20, 3, 0.2) == v1.demonstrations(20, 3, 0.2)


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_are_right_and_noise_makes_mistakes(name):
    module = load_example(name)
    clean, noisy = (
        [conversation["messages"] for conversation in module.demonstrations(16, 3, noise)]
        for noise in (0.0, 0.5)
    )
    assert len(clean) == 16 and clean != noisy
    assert module.demonstrations(16, 3, 0.5) == module.demonstrations(16, 3, 0.5)
    tokenizer = load_example("warm_start").make_tokenizer(getattr(module, "EXTRA_TOKENS", None))
    for messages in clean:
        assert messages[-1]["role"] == "assistant"
        assert tokenizer.apply_chat_template(messages, return_dict=False)


def test_letters_that_stay_sorted_win():
    module = load_example("alphabet_sort")
    env, said = module.load_environment(num_train=50, num_eval=10), []

    def reply(added):
        if len(said) % 3 == 0:
            reply.letters = ""
        reply.letters += added
        said.append("".join(sorted(reply.letters)))
        return said[-1]

    rollouts = play(env, reply)
    assert all(r.reward == 1.0 and r.metrics["exact"] == 1.0 and r.num_turns == 3 for r in rollouts)
    wrong = play(env, lambda added: added)
    assert all(0 < r.reward < 1 and r.metrics["exact"] == 0.0 for r in wrong)


def test_halving_the_range_always_finds_the_letter():
    module = load_example("letter_hunt")
    env = module.load_environment(num_eval=50)

    def middle(text):
        letters = module.LETTERS[module.LETTERS.index(text[0]) : module.LETTERS.index(text[2]) + 1]
        return letters[len(letters) // 2]

    won = play(env, middle, 100)
    assert all(r.reward == 1.0 and r.metrics["legal"] == 1.0 and r.num_turns <= 5 for r in won)
    lost = play(env, lambda text: "?")
    assert all(r.reward == 0.0 and r.metrics["legal"] == 0.0 and r.num_turns == 5 for r in lost)


def test_the_calculators_questions_have_the_answers_of_its_tools():
    module = load_example("calculator")
    env = module.load_environment(num_train=200, num_eval=10)
    names = set()
    for row in env.get_dataset():
        name, arguments = module.parse_question(row["question"])
        names.add(name)
        assert row["answer"] == module.run_tool(name, arguments)
    assert names == {"add", "subtract", "multiply"} == {tool.name for tool in env.tool_defs}
    assert module.run_tool("multiply", {"a": 27, "b": 481}) == "12987"
    guessed = play(env, lambda text: "1")
    assert all(r.reward == 0.0 and r.num_turns == 1 for r in guessed)


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_has_the_commands_that_make_it_run(name):
    folder = ROOT / "examples" / name
    text = (folder / "README.md").read_text()
    assert f"examples/warm_start.py examples/{name}/{name}.py" in text
    assert f"vf-rl @ examples/{name}/rl.toml" in text
