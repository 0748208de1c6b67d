"""Of the shape of verifiers' code_golf: attempts of one agent at a task, whose replies run as
programs, are compared with each other.
"""

import asyncio

import verifiers.v1 as vf

__all__ = ["GolfEnv", "GolfTaskset"]


class GolfTask(vf.Task[vf.TaskData]):
    @vf.metric
    async def measured(self, trace: vf.Trace, runtime: vf.Runtime) -> dict[str, float]:
        # The reply is data of a program of ours: a tiny model writes none that runs.
        await runtime.write("reply.txt", trace.last_reply.encode())
        done = await runtime.run(["wc", "-c", "reply.txt"], {})
        return {"ran": float(done.exit_code == 0), "size": float(done.stdout.split()[0])}

    @vf.reward
    async def ran_at_all(self, trace: vf.Trace) -> float:
        return trace.metrics.get("ran", 0.0)


class GolfEnvConfig(vf.EnvConfig):
    golfer: vf.AgentConfig = vf.AgentConfig()


class GolfEnv(vf.Env[GolfEnvConfig]):
    async def run(self, task, agents):
        await asyncio.gather(*(agents.golfer.run(task) for _ in range(2)))

    async def finalize(self, task, episode):
        sizes = [trace.metrics["size"] for trace in episode.traces]
        for trace, size in zip(episode.traces, sizes, strict=True):
            trace.record_reward("shortest", float(size == min(sizes)), 0.5)


class GolfTaskset(vf.Taskset[GolfTask, vf.TasksetConfig]):
    def load(self):
        for i, word in enumerate(("sum", "sort")):
            yield GolfTask(vf.TaskData(idx=i, prompt=word), self.config.task)
