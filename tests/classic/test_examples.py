"""The classic example and a classic game, without a server: what is right wins, and held-out data
stays out.
"""

import asyncio

import pytest

from tests.classic import classic_letter_hunt
from tests.classic.test_environments import ScriptedClient, WordTokenizer
from tests.helpers import EXAMPLE, load_example
from verifiers_rl.envs.base import RunnerOptions
from verifiers_rl.envs.classic import ClassicEnvironment


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


@pytest.mark.parametrize("name", ["classic_reverse_text", "classic_letter_hunt"])
def test_held_out_examples_are_not_trained_on(name):
    module = load_example(name) if name == "classic_reverse_text" else classic_letter_hunt
    env = module.load_environment(num_eval=50)

    def keys(split):
        return {str((row["question"], row.get("answer"), row.get("info"))) for row in split}

    train, held_out = keys(env.get_dataset()), keys(env.get_eval_dataset())
    assert len(held_out) == 50 and len(train) > 500 and not train & held_out


def test_reverse_text_is_the_same_task_as_classic_and_as_v1_environment():
    classic, v1 = load_example("classic_reverse_text"), load_example("reverse_text")
    env = classic.load_environment(num_train=500, num_eval=100)
    for split, held_out in ((env.get_dataset(), False), (env.get_eval_dataset(), True)):
        config = v1.ReverseTextConfig(id="reverse_text", num_tasks=len(split), held_out=held_out)
        tasks = list(v1.ReverseTextTaskset(config).load())
        assert [row["prompt"][-1]["content"] for row in split] == [t.data.prompt for t in tasks]
        assert list(split["answer"]) == [task.data.answer for task in tasks]
    assert classic.demonstrations(20, 3, 0.2) == v1.demonstrations(20, 3, 0.2)


def test_demonstrations_are_right_and_noise_makes_mistakes():
    module = load_example("classic_reverse_text")
    clean, noisy = (module.demonstrations(16, 3, noise) for noise in (0.0, 0.5))
    assert len(clean) == 16 and clean != noisy and module.demonstrations(16, 3, 0.5) == noisy
    for conversation in clean:
        question, answer = conversation["messages"]
        assert answer == {"role": "assistant", "content": question["content"][::-1]}


def test_halving_the_range_always_finds_the_letter():
    module = classic_letter_hunt
    env = module.load_environment(num_eval=50)

    def middle(text):
        letters = module.LETTERS[module.LETTERS.index(text[0]) : module.LETTERS.index(text[2]) + 1]
        return letters[len(letters) // 2]

    won = play(env, middle, 100)
    assert all(r.reward == 1.0 and r.metrics["legal"] == 1.0 and r.num_turns <= 5 for r in won)
    lost = play(env, lambda text: "?")
    assert all(r.reward == 0.0 and r.metrics["legal"] == 0.0 and r.num_turns == 5 for r in lost)


def test_the_readme_has_the_commands_that_make_it_run():
    text = (EXAMPLE / "README.md").read_text()
    assert "examples/warm_start.py examples/classic/classic_reverse_text.py" in text
    assert "vf-rl @ examples/classic/rl.toml" in text
