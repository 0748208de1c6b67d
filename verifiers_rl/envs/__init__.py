"""Environments of both generations of `verifiers`. No other module imports verifiers."""

from typing import TYPE_CHECKING

from verifiers_rl.lazy import load_on_first_use

if TYPE_CHECKING:
    from verifiers_rl.envs.base import InvalidEnvironmentError as InvalidEnvironmentError
    from verifiers_rl.envs.base import WeightedEnv as WeightedEnv
    from verifiers_rl.envs.chat_harness import ChatHarness as ChatHarness
    from verifiers_rl.envs.dataset import env_from as env_from
    from verifiers_rl.envs.make import make_runner as make_runner
    from verifiers_rl.envs.v1_loading import load_v1_environment as load_v1_environment

HOME = {
    "ChatHarness": "chat_harness",
    "InvalidEnvironmentError": "base",
    "WeightedEnv": "base",
    "env_from": "dataset",
    "load_v1_environment": "v1_loading",
    "make_runner": "make",
}
__getattr__, __dir__ = load_on_first_use(__name__, HOME)
