"""The trainer on stubs, without server and environment, to try an edit of it or a loss, on a CPU:

python examples/stubs.py
"""

import numpy as np
import torch
from warm_start import make_model, make_tokenizer

from verifiers_rl import RLConfig, RLTrainer
from verifiers_rl.types import Batch, Rollout, Sample


def nothing(*args): ...


class Batches:
    """A `BatchSource`. Its tokens are random, not the policy's, so the reward does not rise."""

    start = wait = begin_evaluation = load_state_dict = stop = nothing
    num_pending = property(lambda self: len(self.pending))

    def __init__(self):
        self.pending = []  # the step and the policy version of each request
        self.discard = self.pending.clear

    def submit(self, step, model, policy_version):
        self.pending.append((step, policy_version))

    def get(self):
        step, version = self.pending.pop(0)
        rng = np.random.default_rng(step)
        rollouts = [make_rollout(rng, version, reward) for reward in (0.0, 1.0, 1.0, 0.0)]
        samples = [sample for rollout in rollouts for sample in rollout.samples]
        return Batch(step, version, samples, rollouts, {"reward": 0.5}, groups=[rollouts])

    def end_evaluation(self):
        return {"reward": 0.5}, []

    def state_dict(self, step):
        return {}


def make_rollout(rng, version, reward):
    is_reply = np.arange(8) >= 3
    logprobs, versions = np.where(is_reply, -np.log(256), 0), np.where(is_reply, version, -1)
    sample = Sample(rng.integers(256, size=8), is_reply, logprobs, versions)
    rollout = Rollout(0, "prompt", "reply", reward=reward, samples=[sample], num_turns=1)
    rollout.set_advantage(reward - 0.5)
    return rollout


class Weights:
    """A `WeightSink`: remembers the version of the weights, and sends them nowhere."""

    policy_version, model_name, sleeps = None, "policy", False
    check_server = sleep = wait_for_server = close = nothing

    def push(self, model, policy_version):
        self.policy_version = policy_version
        return {"sync_s": 0.0}


def train(kind=RLTrainer, **options):
    """Train with this class, or your own. The options are fields of `RLConfig`."""
    args = {"output_dir": "outputs/stubs", "overwrite_output_dir": True, "save_strategy": "no"}
    args |= {"use_cpu": True, "max_steps": 5, "batch_size": 4, "rollouts_per_example": 4}
    args |= {"temperature": 1.0, **options}
    torch.manual_seed(0)  # all runs are equal, up to an edit
    tokenizer, parts = make_tokenizer(), {"orchestrator": Batches(), "weight_sync": Weights()}
    trainer = kind(make_model(tokenizer), None, RLConfig(**args), tokenizer, **parts)
    trainer.train()
    return trainer


if __name__ == "__main__":
    train()
