"""Of the shape of verifiers' proposer_solver: one agent's reply is the task of another, which plays
it several times, and the first is judged by what the others made of it.
"""

import asyncio

import verifiers.v1 as vf

__all__ = ["ProposeTaskset", "ProposerEnv"]


class ProposeTask(vf.Task[vf.TaskData]):
    pass


class SolveTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ProposerEnvConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()


class ProposerEnv(vf.Env[ProposerEnvConfig]):
    async def run(self, task, agents):
        proposed = await agents.proposer.run(task)
        problem = SolveTask(vf.TaskData(idx=task.data.idx, prompt=f"solve {proposed.last_reply}"))
        await asyncio.gather(*(agents.solver.run(problem) for _ in range(2)))

    async def finalize(self, task, episode):
        solved = [t.rewards["length"].score for t in episode.traces if t.agent.name == "solver"]
        for trace in episode.traces:
            if trace.agent.name == "proposer":
                trace.record_reward("hardness", -sum(solved) / len(solved))


class ProposeTaskset(vf.Taskset[ProposeTask, vf.TasksetConfig]):
    def load(self):
        return [
            ProposeTask(vf.TaskData(idx=i, prompt=topic), self.config.task)
            for i, topic in enumerate(("numbers", "words"))
        ]
