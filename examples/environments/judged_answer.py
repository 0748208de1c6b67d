"""A taskset whose reward comes from a judge: a model behind an OpenAI-compatible endpoint compares
the reply with the right answer. Nothing is downloaded."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["JudgedTaskset"]

QUESTIONS = {
    "What is the capital of France?": "Paris",
    "How many legs does a spider have?": "eight",
    "Which gas do plants take from the air?": "carbon dioxide",
    "In which month does the year end?": "December",
}


class SameMeaning(vf.Judge[bool]):
    prompt = (
        "Question: {question}\nRight answer: {answer}\nReply: {reply}\n"
        "Does the reply say the right answer? Answer with yes or no."
    )

    def parse(self, response: vf.JudgeResponse[bool]) -> bool:
        """Raises ValueError if the judge gave no verdict: the rollout is then left out."""
        verdict = response.text.strip().lower().rstrip(".")
        if verdict not in ("yes", "no"):
            raise ValueError(f"the judge answered {response.text!r}, not yes or no")
        return verdict == "yes"


class JudgedTaskConfig(vf.TaskConfig):
    judge: vf.JudgeConfig = vf.JudgeConfig(
        base_url="http://127.0.0.1:8100/v1", model="judge", api_key_var="JUDGE_API_KEY"
    )


class JudgedData(vf.TaskData):
    answer: str


class JudgedTask(vf.Task[JudgedData, vf.State, JudgedTaskConfig]):
    @vf.reward
    async def judged_right(self, trace: vf.Trace) -> float:
        verdict = await SameMeaning(self.config.judge).evaluate(
            trace=trace,
            question=self.data.prompt,
            answer=self.data.answer,
            reply=trace.last_reply,
        )
        return float(verdict.parsed)


class JudgedConfig(vf.TasksetConfig):
    task: JudgedTaskConfig = JudgedTaskConfig()


class JudgedTaskset(vf.Taskset[JudgedTask, JudgedConfig]):
    def load(self) -> Iterator[JudgedTask]:
        for idx, (question, answer) in enumerate(QUESTIONS.items()):
            yield JudgedTask(JudgedData(idx=idx, prompt=question, answer=answer), self.config.task)
