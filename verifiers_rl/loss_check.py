"""Checks in the first step that a loss keeps its contract: it is a sum over tokens, the term of
each token is multiplied by its weight, and what it depends on has a gradient. The gradient of each
token is computed

    with the whole microbatch, twice                    g, and g again if nothing is random
    with the first half of the samples alone            g, if the loss is a sum
    with the other half, and weights twice as large     2 g, if it also follows the weights

All of this uses detached tensors, beside the step: there is no forward of the model, and nothing of
what is learned changes. A loss that breaks its contract draws a warning, and trains.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map_only

from verifiers_rl.losses import LossFn, LossInputs, LossOutputs

logger = logging.getLogger(__name__)

register_dataclass(LossInputs)
NUM_TRIES = 16  # microbatches that may show nothing, such as one with a single sample
TOLERANCE = 1e-3  # of a gradient's norm, which rounding does not reach
MEAN = (
    "half of a microbatch has larger gradients for a token than the whole. Look for a mean or "
    "another division, and return (inputs.weights * per_token).sum(); the trainer divides once"
)
BROADCAST = (
    "half of a microbatch has smaller gradients for a token than the whole. Look for an (N, N) "
    "tensor, which shapes (N,) and (N, 1) make, and for numbers that all tokens together give"
)
CONSTANT = (
    "it depends on inputs.entropy, which has no gradient unless "
    '@needs("entropy_gradient") stands above the loss'
)
UNWEIGHTED = (
    "with inputs.weights twice as large, its gradient is not twice as large. Multiply each term by "
    "its weight; else masks and loss_normalization have no effect"
)


def checked(loss_fn: LossFn, trainer: Any) -> LossFn:
    """Return the loss, which is checked on the first microbatch that can show something. Random
    numbers and losses with a state, see `Checkpoints.kept`, then go on as if it had not been.
    """
    tries_left = NUM_TRIES

    @wraps(loss_fn)  # with its needs
    def checking(inputs: LossInputs) -> LossOutputs:
        nonlocal tries_left
        outputs = loss_fn(inputs)
        if tries_left:
            states = [
                (part, deepcopy(part.state_dict(0)))
                for part in trainer.checkpoints.kept.values()
                if callable(part)
            ]
            try:
                with _random_numbers_kept():
                    problem = problem_of(loss_fn, inputs)
            except Exception as error:  # of the user's code, which the whole has not raised
                problem = f"for half of a microbatch it raises {error!r}"
            for part, state in states:
                part.load_state_dict(state)
            tries_left = problem is None and tries_left - 1
            if problem and trainer.is_world_process_zero():
                logger.warning(f"the loss breaks its contract (docs/losses.md): {problem}")
        return outputs

    return checking


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    of_python, of_numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def problem_of(loss_fn: LossFn, inputs: LossInputs) -> str | None:
    """Return what is wrong with a loss, "" if nothing is, and None if these tokens do not show it,
    because they are of one sample or half of them have no gradient.
    """
    # The advantages of a group add up to 0, and so does what a loss makes of their sum.
    positive = replace(inputs, advantages=inputs.advantages.abs() + 1)
    return _problem_with(loss_fn, positive) or _problem_with(loss_fn, inputs)


def _problem_with(loss_fn: LossFn, inputs: LossInputs) -> str | None:

    def gradient(tokens: Tensor, scale: float) -> Tensor:
        """Return the derivatives by logprobs and entropy, (2, tokens)."""
        part = tree_map_only(Tensor, lambda values: values.detach()[tokens], inputs)
        part.sequence_ids -= part.sequence_ids.min()
        part.weights *= scale
        shift = part.weights.new_zeros(2, len(part.weights)).requires_grad_()
        part.trainer_logprobs += shift[0]
        part.entropy += shift[1]
        return torch.autograd.grad(loss_fn(part).loss, shift)[0]

    ids = inputs.sequence_ids
    is_first, every = ids <= ids.max() // 2, ids >= 0
    whole = gradient(every, 1.0)
    if whole[1].any() and not inputs.entropy.requires_grad:
        return CONSTANT
    for tokens, scale, problem in (
        (every, 1.0, ""),
        (is_first, 1.0, MEAN),
        (~is_first, 2.0, UNWEIGHTED),
    ):
        expected = scale * whole[:, tokens]
        if not expected.any():
            return None
        found = gradient(tokens, scale)
        if (found - expected).norm() > TOLERANCE * expected.norm():
            return BROADCAST if problem == MEAN and found.norm() < expected.norm() else problem
    return ""
