"""A taskset of verifiers.v1 with tools, over MCP; see small_tasks.py."""

import os

import verifiers.v1 as vf
from small_tasks import SmallConfig, SmallTask, SmallTaskset

__all__ = ["ToolTaskset"]


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def double(self, x: int) -> str:
        """Twice a number."""
        return str(2 * x)

    @vf.tool
    async def variables(self) -> str:
        """The names of all variables of the process that runs this."""
        return " ".join(os.environ)


class ToolTaskset(SmallTaskset, vf.Taskset[SmallTask, SmallConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Calculator.run()
