"""Of the shape of verifiers' scratchpad: one tool server of all rollouts, which keeps a state for
each of them.
"""

import verifiers.v1 as vf

__all__ = ["PadTaskset"]


class PadState(vf.State):
    calls: int = 0


class Pad(vf.Toolset[vf.SharedToolsetConfig, PadState]):
    TOOL_PREFIX = None

    @vf.tool
    async def double(self, x: int) -> str:
        """Twice a number."""
        self.state.calls += 1
        return str(2 * x)


class PadTask(vf.Task[vf.TaskData, PadState]):
    @vf.stop
    async def done(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 4

    @vf.reward
    async def called(self, trace: vf.Trace) -> float:
        return float(trace.state.calls)

    @vf.metric
    async def lost_calls(self, trace: vf.Trace) -> float:
        """Answers of the tool that its state does not know. The answer to a broken call is an
        error's text, and no number.
        """
        answers = [str(message.content) for message in trace.tool_messages]
        numbers = [answer for answer in answers if answer.removeprefix("-").isdecimal()]
        return float(len(numbers) - trace.state.calls)


class PadTaskset(vf.Taskset[PadTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Pad(vf.SharedToolsetConfig())]

    def load(self):
        return [PadTask(vf.TaskData(idx=i, prompt="four"), self.config.task) for i in range(3)]


if __name__ == "__main__":
    Pad.run()
