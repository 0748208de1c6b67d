"""A `verifiers` environment with tools: call a calculator, then answer with its result. Data is
generated; nothing is downloaded."""

import json
import random

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """a plus b"""
    return a + b


def subtract(a: int, b: int) -> int:
    """a minus b"""
    return a - b


def multiply(a: int, b: int) -> int:
    """a times b"""
    return a * b


TOOLS = {"plus": add, "minus": subtract, "times": multiply}
# The parts that all calls share, as the chat template of ../warm_start.py and vLLM's hermes parser
# spell them. Each is one token; otherwise a rollout would be twice as long.
CALL = ["<tool_call>", '{"name": "', '", "arguments": {"a": ', ', "b": ', "}}", "</tool_call>"]
EXTRA_TOKENS = ["<|tool|>", *CALL]


def make_questions(
    num_questions: int, seed: int, exclude: frozenset[str] = frozenset()
) -> list[str]:
    """Distinct questions such as "27 times 481", none of them in `exclude`."""
    rng = random.Random(seed)
    questions: dict[str, None] = {}
    while len(questions) < num_questions:
        a, b = (rng.randint(10, 999) for _ in range(2))
        question = f"{a} {rng.choice(list(TOOLS))} {b}"
        if question not in exclude:
            questions[question] = None
    return list(questions)


def parse_question(question: str) -> tuple[str, dict[str, int]]:
    """Return name and arguments of the call that answers the question."""
    a, word, b = question.split()
    return TOOLS[word].__name__, {"a": int(a), "b": int(b)}


def run_tool(name: str, arguments: dict[str, int]) -> str:
    return str({tool.__name__: tool for tool in TOOLS.values()}[name](**arguments))


def make_split(questions: list[str]) -> Dataset:
    answers = [run_tool(*parse_question(question)) for question in questions]
    return Dataset.from_dict({"question": questions, "answer": answers})


def demonstrations(num: int, seed: int, noise: float) -> list[dict]:
    """Make demonstrations for ../warm_start.py: question, tool call, its result, answer. Each of
    these mistakes has probability `noise`: a guess instead of the call, a random tool instead of
    the right one, and for each copied digit a random digit.
    """
    rng = random.Random(seed)

    def copied(number: int | str) -> str:
        """Copy with mistakes in any digit, but no new 0: JSON allows no leading 0."""
        digits = [
            rng.choice("123456789") if c.isdigit() and rng.random() < noise else c
            for c in str(number)
        ]
        return "".join(digits)

    conversations = []
    for question in make_questions(num, seed):
        name, arguments = parse_question(question)
        messages = [{"role": "user", "content": question}]
        result = run_tool(name, arguments)
        if rng.random() < noise:
            guess = "".join(rng.choice("123456789") for _ in result)
            messages.append({"role": "assistant", "content": guess})
        else:
            if rng.random() < noise:
                name = rng.choice([tool.__name__ for tool in TOOLS.values()])
            arguments = {key: int(copied(value)) for key, value in arguments.items()}
            result = run_tool(name, arguments)
            call = {"type": "function", "function": {"name": name, "arguments": arguments}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": result},
                {"role": "assistant", "content": copied(result)},
            ]
        conversations.append({"messages": messages})
    return conversations


def load_environment(
    num_train: int = 4096, num_eval: int = 256, max_turns: int = 3, seed: int = 0
) -> vf.Environment:
    """Reward: 1 for the right answer after the tool calls, else 0. Metric: whether the first call
    is the right one. `verifiers` adds the number of calls of each tool.

    The held-out split shares no question with the training split.
    """
    held_out = make_questions(num_eval, seed=seed + 1)
    train = make_questions(num_train, seed, exclude=frozenset(held_out))

    def right_answer(completion, answer) -> float:
        last = completion[-1]
        return float(last.role == "assistant" and (last.content or "").strip() == answer)

    def right_call(prompt, completion) -> float:
        for call in completion[0].tool_calls or []:
            try:
                arguments = json.loads(call.arguments)
            except ValueError:
                return 0.0
            return float((call.name, arguments) == parse_question(prompt[-1].content))
        return 0.0

    return vf.ToolEnv(
        tools=list(TOOLS.values()),
        max_turns=max_turns,
        dataset=make_split(train),
        eval_dataset=make_split(held_out),
        rubric=vf.Rubric(funcs=[right_answer, right_call], weights=[1.0, 0.0]),
    )
