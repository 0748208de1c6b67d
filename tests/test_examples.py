"""The examples' tasksets, without a server: held-out tasks stay out, demonstrations are right.
Rewards are tested on the real server (test_e2e_train.py) and in tests/classic.
"""

import asyncio

import pytest

from tests.helpers import ROOT, load_example

TASKSETS = {
    "reverse_text": ("ReverseTextTaskset", "ReverseTextConfig"),
    "calculator": ("CalculatorTaskset", "CalculatorConfig"),
}


def make_taskset(name, **options):
    module = load_example(name)
    taskset, config = (getattr(module, part) for part in TASKSETS[name])
    return module, taskset(config(id=name, **options))


@pytest.mark.parametrize("name", TASKSETS)
def test_held_out_tasks_are_not_trained_on(name):
    train, held_out = (
        {task.data.prompt for task in make_taskset(name, **options)[1]}
        for options in ({}, {"held_out": True, "num_tasks": 50})
    )
    assert len(train) == 4096 and len(held_out) == 50 and not train & held_out


@pytest.mark.parametrize("name", TASKSETS)
def test_demonstrations_are_right_and_noise_makes_mistakes(name):
    module, _ = make_taskset(name)
    clean, noisy = (module.demonstrations(16, 3, noise) for noise in (0.0, 0.5))
    assert len(clean) == 16 and clean != noisy and module.demonstrations(16, 3, 0.5) == noisy
    tokenizer = load_example("warm_start").make_tokenizer(getattr(module, "EXTRA_TOKENS", None))
    for conversation in clean:
        question, *_, answer = conversation["messages"]
        right = (
            module.solve(question["content"])[2]
            if name == "calculator"
            else question["content"][::-1]
        )
        assert answer == {"role": "assistant", "content": right}
        assert tokenizer.apply_chat_template(conversation["messages"], return_dict=False)


def test_the_calculators_tools_compute_what_the_answers_are():
    module, taskset = make_taskset("calculator", num_tasks=30)
    names = set()
    for task in taskset:
        name, arguments, answer = module.solve(task.data.prompt)
        names.add(name)
        assert (
            asyncio.run(getattr(module.Calculator, name)(None, **arguments))
            == answer
            == task.data.answer
        )
    assert names == {"add", "subtract", "multiply"}


@pytest.mark.parametrize("name", TASKSETS)
def test_the_readme_has_the_commands_that_make_it_run(name):
    folder = ROOT / "examples" / name
    text = (folder / "README.md").read_text()
    assert f"examples/warm_start.py examples/{name}/{name}.py" in text
    assert f"vf-rl @ examples/{name}/rl.toml" in text
