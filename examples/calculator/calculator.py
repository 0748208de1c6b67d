"""A taskset of `verifiers.v1` with tools: call a calculator, then answer with its result. Data is
generated; nothing is downloaded. Run as a program, it serves the tools over MCP."""

import json
import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["CalculatorTaskset"]

# For each word the tool, and the function that it computes.
TOOLS = {
    "plus": ("add", int.__add__),
    "minus": ("subtract", int.__sub__),
    "times": ("multiply", int.__mul__),
}
# The parts that all calls share, as the chat template of warm_start.py and vLLM's hermes parser
# spell them. Each is one token; otherwise a rollout would be twice as long.
CALL = ["<tool_call>", '{"name": "', '", "arguments": {"a": ', ', "b": ', "}}", "</tool_call>"]
EXTRA_TOKENS = ["<|tool|>", *CALL]


class CalculatorConfig(vf.TasksetConfig):
    num_tasks: int = 4096
    held_out: bool = False
    """Load the questions for evaluation instead; none of them is a training question."""


class CalculatorData(vf.TaskData):
    answer: str


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """a plus b"""
        return str(a + b)

    @vf.tool
    async def subtract(self, a: int, b: int) -> str:
        """a minus b"""
        return str(a - b)

    @vf.tool
    async def multiply(self, a: int, b: int) -> str:
        """a times b"""
        return str(a * b)


class CalculatorTask(vf.Task[CalculatorData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right_answer(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def right_call(self, trace: vf.Trace) -> float:
        """Return 1 if the first call is the right one, else 0."""
        first = trace.assistant_messages[0]
        for call in first.tool_calls or []:
            try:
                arguments = json.loads(call.arguments)
            except ValueError:
                return 0.0
            name, expected, _ = solve(self.data.prompt)
            return float((call.name, arguments) == (name, expected))
        return 0.0

    @vf.metric
    async def num_calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    @classmethod
    def toolsets(cls, config: CalculatorConfig) -> list[vf.Toolset]:
        return [Calculator(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[CalculatorTask]:
        """Yield the tasks. Questions whose numbers add up to a multiple of 16 are held out."""
        config, rng, seen = self.config, random.Random(0), set[str]()
        while len(seen) < config.num_tasks:
            question = make_question(rng)
            _, arguments, answer = solve(question)
            is_held_out = sum(arguments.values()) % 16 == 0
            if question in seen or is_held_out != config.held_out:
                continue
            data = CalculatorData(idx=len(seen), prompt=question, answer=answer)
            seen.add(question)
            yield CalculatorTask(data, config.task)


def make_question(rng: random.Random) -> str:
    """Make a question such as "27 times 481"."""
    return f"{rng.randint(10, 999)} {rng.choice(list(TOOLS))} {rng.randint(10, 999)}"


def solve(question: str) -> tuple[str, dict[str, int], str]:
    """Return name and arguments of the call that answers the question, and its result."""
    a, word, b = question.split()
    name, compute = TOOLS[word]
    return name, {"a": int(a), "b": int(b)}, str(compute(int(a), int(b)))


def demonstrations(num: int, seed: int, noise: float) -> list[dict]:
    """Make demonstrations for warm_start.py: question, tool call, its result, answer. Each of
    these mistakes has probability `noise`: a guess instead of the call, a random tool instead of
    the right one, and for each copied digit a random digit.
    """
    rng = random.Random(seed)
    functions = dict(TOOLS.values())

    def copied(number: int | str) -> str:
        """Copy with mistakes in any digit, but no new 0: JSON allows no leading 0."""
        digits = [
            rng.choice("123456789") if c.isdigit() and rng.random() < noise else c
            for c in str(number)
        ]
        return "".join(digits)

    conversations = []
    for _ in range(num):
        question = make_question(rng)
        name, arguments, result = solve(question)
        messages = [{"role": "user", "content": question}]
        if rng.random() < noise:
            guess = "".join(rng.choice("123456789") for _ in result)
            messages.append({"role": "assistant", "content": guess})
        else:
            if rng.random() < noise:
                name = rng.choice(list(functions))
            arguments = {key: int(copied(value)) for key, value in arguments.items()}
            result = str(functions[name](*arguments.values()))
            call = {"type": "function", "function": {"name": name, "arguments": arguments}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": result},
                {"role": "assistant", "content": copied(result)},
            ]
        conversations.append({"messages": messages})
    return conversations


if __name__ == "__main__":
    Calculator.run()
