"""From a trace of `verifiers.v1` to a rollout: each branch, a path from the root of the trace's
graph of messages to a leaf, is one token sequence.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from verifiers_rl.envs.base import check_logprobs, versions_of_tokens
from verifiers_rl.envs.records import record_of_trace, text_of
from verifiers_rl.inference import allowed_tokens
from verifiers_rl.types import ALLOWED_TOKENS, ROUTED_EXPERTS, Rollout, Sample


def rollout_of_trace(trace: Any, policy_version: int, mask_env_responses: bool = True) -> Rollout:
    """Make the rollout of a trace whose agent's tokens are trained.

    Args:
        policy_version: version of replies that do not say which policy sampled them.
        mask_env_responses: leave tokens that the environment put between turns out of the loss.

    Raises:
        ValueError: the trace cannot be trained on.
    """
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward}
    scores |= {name: value for name, value in trace.metrics.items() if value is not None}
    # Not trace.is_truncated, which counts max_turns as a truncation too.
    is_cut = any(call.finish_reason == "length" for call in trace.calls)
    nodes = trace.branches[-1].nodes if trace.branches else []
    first_reply = next((at for at, node in enumerate(nodes) if node.sampled), len(nodes))
    rollout = Rollout(
        example_id=0,
        prompt=trace.task.data.prompt_text,
        completion=text_of([node.message for node in nodes[first_reply:]]),
        role=trace.agent.name,
        reward=float(trace.reward),
        metrics={name: float(value) for name, value in scores.items()},
        samples=samples_from_trace(trace, policy_version, mask_env_responses),
        num_turns=trace.num_turns,
        is_truncated=is_cut or trace.stop_condition == "context_length",
        generation_s=trace.timing.agent.duration,
        record=record_of_trace(trace, policy_version),
    )
    trained = [branch for branch in trace.branches if branch.trainable]
    rollout.has_own_advantages = any(branch.advantages is not None for branch in trained)
    if rollout.has_own_advantages and rollout.samples:
        rollout.set_advantage(np.concatenate([s.advantages for s in rollout.samples]))
    if not rollout.num_sampled_tokens:
        raise ValueError(
            "no token was sampled: the prompt fills max_seq_len, or the agent took no turn"
        )
    if not math.isfinite(rollout.reward):
        raise ValueError(f"the environment's reward is {rollout.reward}")
    return rollout


def samples_from_trace(
    trace: Any, policy_version: int, mask_env_responses: bool = True
) -> list[Sample]:
    """Return one sample for each branch that has tokens for the loss. Tokens that branches share
    are in the loss of the first branch only. Advantages that the environment gave to the tokens of
    a branch become those of its sample.

    Args:
        trace: a `verifiers.v1.Trace`.
        policy_version, mask_env_responses: see `rollout_of_trace`.

    Raises:
        ValueError: a reply has lost its tokens (an interceptor rewrote it), or its logprobs are no
            numbers.
    """
    trained: set[int] = set()  # nodes, by id
    samples = []
    for branch in trace.branches:
        if not branch.trainable:
            continue  # a compaction attempt that the harness gave up
        is_sampled = np.asarray(branch.sampled_mask, bool)
        is_new, versions = np.zeros(len(is_sampled), bool), np.full(len(is_sampled), -1, np.int32)
        stop = 0
        for node in branch.nodes:
            start, stop = stop, stop + len(node.token_ids)
            num_sampled = int(np.count_nonzero(node.mask))
            if node.sampled and not num_sampled:
                raise ValueError("a reply was rewritten; its tokens are not those sampled")
            if id(node) in trained:
                continue
            trained.add(id(node))
            if len(node.logprobs) != num_sampled:
                raise ValueError(f"{num_sampled} sampled tokens but {len(node.logprobs)} logprobs")
            check_logprobs(node.logprobs)
            is_new[start:stop] = True
            spans = getattr(node.message, "policy_versions", None) or [(0, policy_version)]
            versions[start:stop][is_sampled[start:stop]] = versions_of_tokens(spans, num_sampled)
        in_loss, logprobs = is_sampled & is_new, np.asarray(branch.logprobs, np.float32)
        if not mask_env_responses:
            is_between = ~is_sampled & np.logical_or.accumulate(is_sampled)
            in_loss |= is_between & is_new
            # NaN: no policy sampled these. The loss uses the trainer's logprob, so ratio 1.
            logprobs[is_between] = math.nan
        if not in_loss.any():
            continue
        sample = Sample(branch.token_ids, in_loss, logprobs, versions)
        if (mask := branch.sampling_mask) is not None:
            sample.extras[ALLOWED_TOKENS] = allowed_tokens(mask.counts, mask.ids)
        if (experts := branch.routed_experts) is not None:
            sample.extras[ROUTED_EXPERTS] = experts = experts.astype(np.int16)
            experts[-1] = -1  # no step has computed the last token
        if branch.advantages is not None:
            sample.set_advantage(branch.advantages)
        samples.append(sample)
    return samples
