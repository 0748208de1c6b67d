"""How evenly the tokens go to the experts of a mixture: measured, and asked for by a loss.

    the server chose experts (router_replay)     expert_load: metrics, counted on the host
    config.json has output_router_logits = true  keep_router_logits: the routers' logits are kept in
                                                 each forward; add_balance_loss: the model's own
                                                 auxiliary loss of them

The auxiliary loss is that of Switch Transformers (arXiv:2101.03961, equations 4 to 6), as
transformers has it beside each model: num_experts * sum_e f_e P_e, where f_e is the number of times
a token chose expert e, divided by the number of tokens, and P_e the mean probability of e. Only P_e
has a gradient. The tokens are those of one microbatch, so this term depends on how a batch is
split, as in other trainers. No other loss here does.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiers_rl.losses import LossOutputs
from verifiers_rl.packing import Microbatch
from verifiers_rl.router_replay import routers_of
from verifiers_rl.types import ROUTED_EXPERTS, Sample

logger = logging.getLogger(__name__)

MAX_COUNTED = 2**15  # tokens of a batch, about, whose experts are counted; the host takes 0.1 s


def expert_load(model: Any, samples: Sequence[Sample]) -> dict[str, float]:
    """Return how evenly the tokens of these samples went to the experts, see docs/metrics.md; {} if
    no sample has experts. Of a large batch, every k-th sample is counted.

    Args:
        model: its routers say which layers have experts, and how many.
        samples: with the experts that the server chose.
    """
    known = [s.extras[ROUTED_EXPERTS] for s in samples if ROUTED_EXPERTS in s.extras]
    if not known:
        return {}
    num_tokens = sum(len(experts) for experts in known)
    counted = known[:: -(-num_tokens // MAX_COUNTED)]
    largest, spread = [], []
    for layer, router in routers_of(model):
        chosen = np.concatenate([experts[:, layer].ravel() for experts in counted])
        counts = np.bincount(chosen[chosen >= 0], minlength=router.num_experts)
        load = counts / max(counts.mean(), 1e-9)  # (experts,), 1 where it is even
        largest.append(load.max())
        spread.append(load.std())
    return {
        "expert_load_max": float(np.mean(largest)),
        "expert_load_cv": float(np.mean(spread)),
        "expert_bytes": sum(experts.nbytes for experts in known) / num_tokens,
    }


class _Balance:
    """What the hooks below keep of a model, at its decoder and at each router.

    Args:
        loss_of: the model's own auxiliary loss.
        coefficient: its weight in the loss.
        num_experts: of a layer.
        top_k: experts of a token.
    """

    def __init__(
        self, loss_of: Callable[..., Any], coefficient: float, num_experts: int, top_k: int
    ) -> None:
        self.loss_of, self.coefficient = loss_of, coefficient
        self.num_experts, self.top_k = num_experts, top_k
        self.logits: list[Tensor] = []  # (tokens, experts) of each layer
        self.is_open = False  # during a forward, but not where backward computes it again


_HELD = "verifiers_rl_balance"


# The hooks are functions of a module, so that a copy of the model has its own `_Balance`.
def _begin(decoder: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    balance = getattr(decoder, _HELD)
    balance.is_open = torch.is_grad_enabled()
    if balance.is_open:
        balance.logits = []
    # The model itself would take its auxiliary loss beside a mask of another form.
    return args, {**kwargs, "output_router_logits": False}


def _keep(router: Any, args: Any, outputs: Any) -> None:
    balance = getattr(router, _HELD)
    if balance.is_open:
        # Most routers return their logits first, those of GraniteMoE behind indices and weights.
        logits = next(
            output
            for output in outputs
            if output.is_floating_point() and output.shape[-1] == router.num_experts
        )
        balance.logits.append(logits)


def _end(decoder: Any, args: Any, outputs: Any) -> None:
    getattr(decoder, _HELD).is_open = False


def keep_router_logits(model: Any) -> None:
    """If the model's config asks for router logits, let each forward with gradients keep them for
    `add_balance_loss`. Warn if the model has no auxiliary loss that is known here.

    Args:
        model: the causal LM of transformers, without wrappers around it.
    """
    config = model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if hasattr(decoder, _HELD):  # a model that was loaded before
        return
    loss_of = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    routers = [router for _, router in routers_of(model)]
    if loss_of is None or not routers or decoder is model:
        logger.warning(
            "the model's config has output_router_logits = true, but no auxiliary loss of %s is "
            "known here; none is computed",
            type(model).__name__,
        )
        return
    coefficient = float(getattr(config, "router_aux_loss_coef", 0.0))
    balance = _Balance(loss_of, coefficient, routers[0].num_experts, routers[0].top_k)
    for module in (decoder, *routers):
        setattr(module, _HELD, balance)
    decoder.register_forward_pre_hook(_begin, with_kwargs=True)
    decoder.register_forward_hook(_end)
    for router in routers:
        router.register_forward_hook(_keep)
    logger.info("auxiliary loss of the routers, times router_aux_loss_coef = %g", coefficient)


def has_balance(model: Any) -> bool:
    """Return whether `add_balance_loss` adds something for this model. Then all samples must be
    computed, also those without advantage, because their tokens count in the auxiliary loss.
    """
    return hasattr(model.get_decoder() if hasattr(model, "get_decoder") else model, _HELD)


def add_balance_loss(outputs: LossOutputs, model: Any, microbatch: Microbatch) -> LossOutputs:
    """Return a loss with the auxiliary loss of the forward before it, if the model's config asks
    for one. It is weighed as the microbatch's loss tokens are, so the loss of a batch has
    `router_aux_loss_coef` times its mean. With `loss_normalization = "constant"`, it is multiplied
    by the share that the batch's loss tokens have of that constant.

    Args:
        outputs: of the loss of this microbatch.
        model: the causal LM; `keep_router_logits` has seen it.
        microbatch: what was computed. Padding does not count; tokens that samples have in common
            count once.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    balance = getattr(decoder, _HELD, None)
    if balance is None:
        return outputs
    logits, balance.logits = tuple(balance.logits), []
    weights = microbatch.targets.weights
    loss = weights.new_zeros(())
    if microbatch.has_loss:
        is_token = torch.ones_like(microbatch.input_ids)  # (B, T)
        for segment in microbatch.segments:
            if segment.is_padding:
                is_token[segment.row, segment.start : segment.stop] = 0
        loss = balance.loss_of(logits, balance.num_experts, balance.top_k, is_token)
    return LossOutputs(
        outputs.loss + balance.coefficient * loss * weights.sum(),
        {**outputs.metrics, "router_aux_loss": loss.detach().expand(len(weights))},
    )
