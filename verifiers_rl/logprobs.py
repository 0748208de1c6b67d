"""Log-probabilities and entropy of given tokens, from hidden states and the LM head.
Pure functions.

The full logits (tokens x vocabulary) are the largest tensor of a training step: 8 sequences of 2048
tokens over Qwen3's 151,936 entries take 10 GB in float32, several times that with gradients. Here
they exist for one chunk of tokens at a time. If the head is trained, backward recomputes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

# How to return the entropy: not at all (zeros), its value, or its value with gradient.
Entropy = Literal["none", "value", "gradient"]


class _TokenLogprobs(torch.autograd.Function):
    """Log softmax of one token per position, and the entropy there. Each pass over the logits costs
    time, and so does each new tensor of their size. So this function keeps only one such tensor for
    backward, and backward makes one more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_mode: Entropy,
        overwrite: bool,
        allowed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        with_entropy = entropy_mode != "none"
        x = logits.to(torch.float32, copy=not overwrite)
        if allowed is not None:  # the others get logit -inf, so probability and gradient 0
            first = allowed[:, :1]
            # A place behind the last id has the first one once more; without ids nothing changes.
            ids = torch.where(allowed < 0, first, allowed).clamp(min=0).long()
            kept = x.gather(-1, ids)
            x.masked_fill_(first >= 0, -torch.inf)
            x.scatter_(-1, ids, kept)
        if temperature != 1:
            x.div_(temperature)
        x.sub_(x.amax(-1, keepdim=True))
        x_target = x.gather(-1, targets[:, None])[:, 0]
        exp_x = x.exp() if with_entropy else x.exp_()
        z = exp_x.sum(-1)
        log_z = z.log()
        # A token with logit -inf gives 0 * -inf = NaN, and nansum counts it as 0.
        entropy = log_z - x.mul_(exp_x).nansum(-1) / z if with_entropy else torch.zeros_like(z)
        # The clamp keeps sums over a batch finite even if a target has logit -inf.
        logprobs = (x_target - log_z).clamp(min=-1e30)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.entropy_has_gradient = entropy_mode == "gradient"
        ctx.save_for_backward(exp_x, z, targets, entropy)
        if not ctx.entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # d logprob / d logit_v = (1 if v is the target, else 0) - p(v), over the temperature
        exp_x, z, targets, entropy = ctx.saved_tensors
        grad = grads[0] / ctx.temperature
        grad_logits = exp_x * (-grad / z)[:, None]
        grad_logits.scatter_add_(1, targets[:, None], grad[:, None])
        if ctx.entropy_has_gradient:
            # d H / d logit_v = - p(v) (log p(v) + H), over the temperature; p = exp_x / z
            of_entropy = torch.xlogy(exp_x, exp_x)
            of_entropy.addcmul_(exp_x, (entropy - z.log())[:, None])
            grad_logits.sub_(of_entropy.mul_((grads[1] / ctx.temperature / z)[:, None]))
        return grad_logits.to(ctx.dtype), None, None, None, None, None


def plain_logprobs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float, entropy_has_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Like `token_logprobs_and_entropy` over the whole vocabulary. Compiled, it is one kernel that
    reads the logits in their own dtype, and one that writes their gradient. So the entropy costs
    nothing, and is always returned.
    """
    # The clamp keeps a logit of -inf from making NaN.
    log_p = (logits.float() / temperature).log_softmax(-1).clamp(min=-1e30)
    # With a gather, backward would write zeros of the size of the logits first.
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    logprobs = torch.where(is_target, log_p, 0.0).sum(-1)
    if not entropy_has_gradient:
        log_p = log_p.detach()
    return logprobs, -(log_p.exp() * log_p).sum(-1)


@functools.cache  # when it is needed: torch then loads its compiler
def compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(plain_logprobs_and_entropy)


COMPILED_ON = ("cuda",)  # kinds of devices


def token_logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: Entropy = "value",
    overwrite: bool = False,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target, and the entropy of its distribution,
    softmax(logits / temperature), over the tokens that are allowed.

    Args:
        logits: (N, vocabulary), any float dtype; computed in float32.
        targets: (N,) int64.
        temperature: the sampling temperature, > 0.
        entropy: "none" returns zeros in its place, "gradient" returns it with gradient.
        overwrite: compute in the memory of `logits` and lose their values. This happens only if
            they are float32, and if the operation that made them does not need them in backward
            (tanh needs them).
        allowed: (N, K) integers, the ids from which the target was sampled, with -1 behind them;
            only -1 for the whole vocabulary. None: the whole vocabulary for all.

    Returns:
        logprobs (N,) float32 in nats, with gradient; entropy (N,) float32 in nats.
    """
    if logits.device.type in COMPILED_ON and allowed is None:
        # Once for any number of tokens.
        for tensor in (logits, targets):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled()(logits, targets, temperature, entropy == "gradient")
    # An autograd node has this attribute if it saves its own output, as the node of tanh does.
    overwrite = overwrite and not hasattr(logits.grad_fn, "_raw_saved_result")
    return _TokenLogprobs.apply(logits, targets, temperature, entropy, overwrite, allowed)


class _FrozenHead(torch.autograd.Function):
    """Logprobs and entropy for a head without trained weights. Each value depends on one hidden
    state only, so forward computes its gradient with respect to that state, except for a factor.
    Backward recomputes no logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
        predictions: Sequence[Callable[..., tuple[Tensor, Tensor]]],
        entropy_mode: Entropy,
    ) -> tuple[Tensor, Tensor]:
        results = []
        # A pass for each output that has a gradient: only one backward follows each call of the
        # head, as the hooks of ZeRO-3 expect, and the memory of a pass is free for the next one.
        modes: list[Entropy] = (
            ["none", "gradient"] if entropy_mode == "gradient" else [entropy_mode]
        )
        for states, predict in zip(hidden.tensor_split(len(predictions)), predictions, strict=True):
            chunk = states.detach().requires_grad_()
            gradients: list[Tensor] = []
            for number, mode in enumerate(modes):
                with torch.enable_grad():
                    outputs = predict(head(chunk), entropy=mode)
                    gradients += torch.autograd.grad(outputs[number].sum(), chunk)
            results.append((*(output.detach() for output in outputs), *gradients))
        logprobs, entropy, *gradients = (torch.cat(parts) for parts in zip(*results, strict=True))
        ctx.save_for_backward(*gradients)
        if entropy_mode != "gradient":
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors  # of the logprobs, and of the entropy if it has one
        terms = [grad[:, None] * gradient for grad, gradient in zip(grads, gradients, strict=False)]
        return sum(terms[1:], terms[0]).to(gradients[0].dtype), None, None, None


def chunked_logprobs_and_entropy(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: float,
    chunk_size: int = 1024,
    entropy: Entropy = "value",
    head_is_trained: bool = True,
    min_chunks: int = 1,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `token_logprobs_and_entropy`, from hidden states, `chunk_size` tokens at a time.
    Backward recomputes the logits of every chunk except the last; with a frozen head it recomputes
    none.

    Args:
        hidden: (N, hidden_size).
        head: the LM head, (n, hidden_size) -> (n, vocabulary).
        targets: (N,) int64.
        temperature: the sampling temperature, > 0.
        chunk_size: tokens projected at once; the result does not depend on it.
        entropy: as in `token_logprobs_and_entropy`.
        head_is_trained: False if no weight of the head requires a gradient.
        min_chunks: call the head at least this often, if necessary with no tokens.
        allowed: as in `token_logprobs_and_entropy`.

    Returns:
        logprobs (N,) and entropy (N,), as from `token_logprobs_and_entropy`.
    """
    num_chunks = max(-(-len(targets) // chunk_size), min_chunks)
    ids = [None] * num_chunks if allowed is None else allowed.tensor_split(num_chunks)
    predict = partial(token_logprobs_and_entropy, temperature=temperature, overwrite=True)
    predictions = [
        partial(predict, targets=chunk_targets, allowed=chunk_ids)
        for chunk_targets, chunk_ids in zip(targets.tensor_split(num_chunks), ids, strict=True)
    ]
    if hidden.requires_grad and torch.is_grad_enabled() and not head_is_trained:
        return _FrozenHead.apply(hidden, head, predictions, entropy)

    def run_chunk(chunk: Tensor, predict: Callable[..., Any]) -> Any:
        is_recomputed = False

        def project(chunk: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal is_recomputed
            # Backward does not need an entropy that has no gradient.
            mode = "none" if is_recomputed and entropy == "value" else entropy
            is_recomputed = True
            return predict(head(chunk), entropy=mode)

        # Backward begins with the last chunk, so a checkpoint of it would save nothing.
        is_last = predict is predictions[-1]
        return project(chunk) if is_last else checkpoint(project, chunk, use_reentrant=False)

    results = map(run_chunk, hidden.tensor_split(num_chunks), predictions)
    logprobs, entropies = zip(*results, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def chunk_size_for(vocab_size: int, device_type: str) -> int:
    """Return how many tokens have the logits of a chunk: at Qwen3's 151,936 entries 441 on a CPU,
    1,766 on a GPU. Other devices, such as a Mac's, have those of a CPU.
    """
    # 1 GB in float32, or 256 MB. On a GPU each chunk reads the head's weights, and adds to their
    # gradient, in about the time of its products.
    return max((2**28 if device_type == "cuda" else 2**26) // vocab_size, 1)


class _InPlaceOf(torch.autograd.Function):
    """Gives a copy of a weight in another dtype, whose gradient goes to the weight in float32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].float(), None


class _HeadIn(TorchFunctionMode):
    """While open, the LM head multiplies in another dtype, and sums its gradient in float32.

    All calls of the head share a copy of each weight in the dtype of the multiplication, and for
    one that is not float32 another copy in float32. Autograd sums the gradients of the calls in
    that, and rounds their sum once.

    Args:
        head: its weights, as they are at each call: FSDP2 replaces them.
        dtype: of the multiplication; None for that of weights or autocast.
        shares: ZeRO-3 frees weights after each call, so there the calls cannot share a copy.
    """

    def __init__(self, head: nn.Module, dtype: torch.dtype | None, shares: bool) -> None:
        super().__init__()
        self._head, self._dtype, self._shares = head, dtype, shares
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_linear = func is nn.functional.linear and not kwargs
        if not is_linear or not any(args[1] is weight for weight in self._head.parameters()):
            return func(*args, **(kwargs or {}))
        hidden, *weights = (a for a in args if a is not None)
        kind, dtype = hidden.device.type, hidden.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        dtype = self._dtype or dtype
        with torch.autocast(kind, enabled=False):
            return func(hidden.to(dtype), *(self._in_dtype(weight, dtype) for weight in weights))

    def _in_dtype(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        needs_grad = weight.requires_grad and torch.is_grad_enabled()
        if weight.dtype == dtype and (dtype.itemsize > 2 or not needs_grad):
            return weight
        if not self._shares:
            return weight.to(dtype)
        if id(weight) not in self._copies:
            summed = weight.float() if needs_grad else weight
            self._copies[id(weight)] = summed, summed.detach().to(dtype)
        summed, copy = self._copies[id(weight)]
        return summed if summed.dtype == dtype else _InPlaceOf.apply(summed, copy)


@contextmanager
def hidden_states_in_place_of_logits(
    model: nn.Module, head_dtype: torch.dtype | None = None
) -> Iterator[Callable[[Tensor], Tensor]]:
    """While open, the causal LM returns hidden states as its `logits`: its head passes them on.

    If the model scales its logits (Granite, Cohere), it then scales the hidden states, with the
    same result. Gemma's soft cap of the logits would give another result, so it is removed from the
    model and applied here. `forward.py` tests both for a given model.

    Args:
        model: the causal LM.
        head_dtype: in which the head multiplies; None for the dtype of its weights or of autocast.

    Yields:
        Hidden states (n, hidden_size) -> logits (n, vocabulary).
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    real_forward, cap = head.forward, getattr(config, "final_logit_softcapping", None)
    # ZeRO-3 gathers weights in hooks around the call of a module, in forward and backward. FSDP2
    # keeps the head's weights gathered until the backward, and its hooks expect a single call.
    has_to_gather = any(hasattr(p, "ds_id") for p in head.parameters())
    in_dtype = _HeadIn(head, head_dtype, shares=not has_to_gather)

    def to_logits(hidden: Tensor) -> Tensor:
        with _replaced(head, "forward", real_forward), in_dtype:
            logits = head(hidden) if has_to_gather else real_forward(hidden)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # A copy, because FSDP2 cannot hook a view.
    with (
        _replaced(head, "forward", lambda hidden: hidden.clone()),
        _replaced(config, "final_logit_softcapping", None),
    ):
        yield to_logits


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, this attribute has another value."""
    own = {key: old for key, old in vars(owner).items() if key == name}
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)  # that of the class applies again, such as its forward
        vars(owner).update(own)  # for example a forward that a hook of accelerate has set
