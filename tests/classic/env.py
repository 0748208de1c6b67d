"""Small classic environments; `make_classic_env` is `helpers.make_env`."""

import verifiers as vf
from datasets import Dataset


class GivenEnv(vf.SingleTurnEnv):
    def __init__(self, setup, **options):
        super().__init__(**options)
        self.setup = setup

    async def setup_state(self, state):
        self.setup()
        return state


def make_classic_env(questions, reward, setup):
    def given(prompt, completion, answer):
        return reward(prompt[-1]["content"], completion[-1]["content"], answer)

    columns = {"question": list(questions), "answer": list(questions.values())}
    return GivenEnv(setup, dataset=Dataset.from_dict(columns), rubric=vf.Rubric(funcs=[given]))


class Conversation(vf.MultiTurnEnv):
    """Three turns, whatever is answered."""

    def __init__(self, **options):
        dataset = Dataset.from_dict({"question": ["ab", "cd"], "answer": ["", ""]})
        rubric = vf.Rubric(funcs=[lambda completion: float(len(str(completion)) % 7)])
        super().__init__(dataset=dataset, rubric=rubric, max_turns=3, **options)

    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content=f"turn {len(state['trajectory']) + 1}?")]


def double(x: int) -> int:
    """Twice a number."""
    return 2 * x


def make_tool_env():
    dataset = Dataset.from_dict({"question": ["four", "four"], "answer": ["", ""]})
    rubric = vf.Rubric(funcs=[lambda completion: float(len(completion))])
    return vf.ToolEnv(tools=[double], dataset=dataset, rubric=rubric, max_turns=3)
