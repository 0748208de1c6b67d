"""Credit for each turn: GRPO with process supervision (arXiv:2402.03300, section 4.1.3).

An environment says how good each turn was, in metrics `turn_0`, `turn_1` and so on, as by
`trace.record_metric("turn_0", 0.5)` of `verifiers.v1`. A turn's tokens get what this turn and the
later ones of the rollout have brought, so a bad last turn does not blame a good first one alone:

    A of turn n = sum over turns m >= n of (r_m - mean(r)) / (std(r) + 1e-6)

Mean and standard deviation are over all turns of the group; of a single turn, std(r) is 0. Pass it
as `advantage_fn=turn_credit`, or as `advantage = "turn_credit:turn_credit"` in a TOML beside this
file.
"""

import numpy as np

from verifiers_rl.types import Rollout


def turn_credit(group: list[Rollout]) -> list[np.ndarray]:
    """Return for each rollout the advantages of its tokens, (tokens,)."""
    rewards = [[r.metrics[f"turn_{n}"] for n in range(r.num_turns)] for r in group]
    of_all = np.concatenate(rewards)
    mean, std = of_all.mean(), of_all.std(ddof=1) if len(of_all) > 1 else 0.0
    scores = [(np.array(own) - mean) / (std + 1e-6) for own in rewards]
    return [of_tokens(rollout, own) for rollout, own in zip(group, scores, strict=True)]


def of_tokens(rollout: Rollout, scores: np.ndarray) -> np.ndarray:
    """Return what each token's turn and the later ones have brought."""
    to_go = np.append(scores[::-1].cumsum()[::-1], 0.0)  # behind the turns: for the prompt
    # The reply of a turn is a run of sampled tokens; the first token of a sample is none.
    sampled = np.concatenate(
        [np.zeros(0, bool), *(s.policy_versions >= 0 for s in rollout.samples)]
    )
    begins = sampled & ~np.roll(sampled, 1)
    if begins.sum() != len(scores):
        raise ValueError(f"{begins.sum()} replies of a rollout with {len(scores)} turns")
    return to_go[begins.cumsum() - 1]
