"""GDPO (arXiv:2601.05242): each of several rewards is normalised by itself.

Where a reward that varies much is summed with one that varies little, the second is hardly seen in
the advantage. Here each counts by its weight alone:

    A_i = sum over rewards k of w_k * (r_ik - mean(r_k)) / (std(r_k) + 1e-6)    in a group
    A_i <- (A_i - mean(A)) / (std(A) + 1e-6)                                    in the batch

An advantage function sees one group, so the second line is a method of the trainer:

    env = env_from(rows, [right, short])
    GDPOTrainer(model, env, args, advantage_fn=partial(gdpo, weights={"right": 1, "short": 0.2}))
"""

from collections.abc import Mapping

import numpy as np
import torch

from verifiers_rl import RLTrainer
from verifiers_rl.advantages import scale_by_group_std
from verifiers_rl.types import Batch, Rollout

WEIGHTS = {"right": 1.0, "short": 0.2}


def gdpo(group: list[Rollout], weights: Mapping[str, float] = WEIGHTS) -> list[float]:
    """Return the advantage of each rollout, before it is normalised in the batch.

    Args:
        weights: by the name of a reward function, or of any other score of the environment.
    """
    scores = torch.tensor([[r.metrics[name] for name in weights] for r in group]).double()
    columns = zip(weights.values(), scores.T, strict=True)
    return sum(weight * scale_by_group_std(column) for weight, column in columns).tolist()


class GDPOTrainer(RLTrainer):
    """Normalises advantages in the batch."""

    def _take_batch(self) -> Batch:
        batch = super()._take_batch()
        advantages = [rollout.advantage for rollout in batch.rollouts]
        if len(advantages) > 1:  # one has no deviation
            mean, std = np.mean(advantages), np.std(advantages, ddof=1)
            for rollout in batch.rollouts:
                rollout.set_advantage(float((rollout.advantage - mean) / (std + 1e-6)))
        return batch
