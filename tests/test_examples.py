"""The examples' tasksets, without a server: held-out tasks stay out, demonstrations are right.
Rewards are tested in test_example_environments.py, and on the real server (test_e2e_train.py).
"""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, load_example

TASKSETS = {
    "reverse_text": ("ReverseTextTaskset", "ReverseTextConfig"),
    "calculator": ("CalculatorTaskset", "CalculatorConfig"),
    "alphabet_sort": ("AlphabetSortTaskset", "AlphabetSortConfig"),
    "letter_hunt": ("LetterHuntTaskset", "LetterHuntConfig"),
}


def right_replies(name, module, said):
    """What a clean demonstration must reply to each of these user turns."""
    if name == "calculator":
        return [module.solve(said[0])[2]]
    if name == "alphabet_sort":
        return ["".join(sorted("".join(said[: turn + 1]))) for turn in range(3)]
    if name == "letter_hunt":
        at = [(module.LETTERS.index(text[0]), module.LETTERS.index(text[2])) for text in said]
        return [module.LETTERS[(first + last + 1) // 2] for first, last in at]
    return [said[0][::-1]]


def make_taskset(name, **options):
    module = load_example(name)
    taskset, config = (getattr(module, part) for part in TASKSETS[name])
    return module, taskset(config(id=name, **options))


@pytest.mark.parametrize("name", TASKSETS)
def test_held_out_tasks_are_not_trained_on(name):
    def keys(**options):
        tasks = [task.data for task in make_taskset(name, **options)[1]]
        if name == "alphabet_sort":
            return ["".join(sorted("".join(data.turns))) for data in tasks]
        return [(data.prompt, getattr(data, "secret", None)) for data in tasks]

    train, held_out = keys(), keys(held_out=True)
    assert len({*train}) == len(train) > 1000 and len({*held_out}) == len(held_out) >= 256
    assert not {*train} & {*held_out}


@pytest.mark.parametrize("name", TASKSETS)
def test_demonstrations_are_right_and_noise_makes_mistakes(name):
    module, _ = make_taskset(name)
    clean, noisy = (module.demonstrations(16, 3, noise) for noise in (0.0, 0.5))
    assert len(clean) == 16 and clean != noisy and module.demonstrations(16, 3, 0.5) == noisy
    tokenizer = load_example("warm_start").make_tokenizer(getattr(module, "EXTRA_TOKENS", None))
    for conversation in clean:
        messages = conversation["messages"]
        by_role = {role: [m["content"] for m in messages if m["role"] == role]
                   for role in ("user", "assistant")}  # fmt: skip
        replies = [reply for reply in by_role["assistant"] if reply]  # not those that call a tool
        assert replies == right_replies(name, module, by_role["user"])
        assert tokenizer.apply_chat_template(messages, return_dict=False)


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


def test_the_demo_looks_at_its_port_before_it_makes_the_model():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["CPU=1", f"BIN={Path(sys.executable).parent}", f"PORT={port}", "demo"]
        make = ["make", "-o", ".venv-cpu/installed-cpu", *words]  # which installs nothing
        done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "warm start" not in done.stdout
    assert f"cannot listen on 127.0.0.1:{port}: " in done.stdout
    assert "make demo PORT=8001" in done.stdout
