"""Reinforcement learning for language models on `verifiers` environments.

The public names load on first use, so that `import verifiers_rl` stays fast.
"""

from typing import TYPE_CHECKING

from verifiers_rl import torchvision_operators as torchvision_operators  # before torchvision
from verifiers_rl.lazy import load_on_first_use

if TYPE_CHECKING:
    from verifiers_rl.config import RLConfig
    from verifiers_rl.envs.agents import env_from_agent
    from verifiers_rl.envs.base import WeightedEnv
    from verifiers_rl.envs.chat_harness import ChatHarness
    from verifiers_rl.envs.dataset import env_from
    from verifiers_rl.losses import LossInputs, LossOutputs, cispo
    from verifiers_rl.orchestrator import Orchestrator
    from verifiers_rl.tiny import tiny_model
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
    "env_from_agent",
    "tiny_model",
]

HOME = {
    "ChatHarness": "envs.chat_harness",
    "LossInputs": "losses",
    "LossOutputs": "losses",
    "Orchestrator": "orchestrator",
    "RLConfig": "config",
    "RLTrainer": "trainer",
    "WeightedEnv": "envs.base",
    "cispo": "losses",
    "env_from": "envs.dataset",
    "env_from_agent": "envs.agents",
    "tiny_model": "tiny",
}


__getattr__, __dir__ = load_on_first_use(__name__, HOME)
