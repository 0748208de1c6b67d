"""Reinforcement learning for language models on `verifiers` environments.

The heavy names load on first use, so that `import verifiers_rl` stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiers_rl.config import RLConfig
    from verifiers_rl.envs.base import WeightedEnv
    from verifiers_rl.envs.chat_harness import ChatHarness
    from verifiers_rl.envs.dataset import env_from
    from verifiers_rl.losses import LossInputs, LossOutputs, cispo
    from verifiers_rl.orchestrator import Orchestrator
    from verifiers_rl.trainer import RLTrainer

__version__ = "0.1.0"
__all__ = [
    "ChatHarness",
    "LossInputs",
    "LossOutputs",
    "Orchestrator",
    "RLConfig",
    "RLTrainer",
    "WeightedEnv",
    "cispo",
    "env_from",
]

_HOME = {
    "ChatHarness": "envs.chat_harness",
    "LossInputs": "losses",
    "LossOutputs": "losses",
    "Orchestrator": "orchestrator",
    "RLConfig": "config",
    "RLTrainer": "trainer",
    "WeightedEnv": "envs.base",
    "cispo": "losses",
    "env_from": "envs.dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'verifiers_rl' has no attribute {name!r}")
    return getattr(import_module(f"verifiers_rl.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
