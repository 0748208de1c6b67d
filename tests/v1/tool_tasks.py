"""A taskset of verifiers.v1 with a tool, over MCP; see small_tasks.py."""

import asyncio

import verifiers.v1 as vf
from small_tasks import SmallConfig, SmallTask, SmallTaskset

__all__ = ["ToolTaskset"]


class ToolsConfig(vf.SharedToolsetConfig):
    pass


class Calculator(vf.Toolset[ToolsConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def double(self, x: int) -> str:
        """Twice a number."""
        await asyncio.sleep(max(-x, 0))  # so many seconds
        return str(2 * x)


class ToolTaskset(SmallTaskset, vf.Taskset[SmallTask, SmallConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(ToolsConfig())]


if __name__ == "__main__":
    Calculator.run()
