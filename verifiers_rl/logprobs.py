"""Log-probabilities and entropy of given tokens, from hidden states and the LM head.
Pure functions.

The full logits (tokens x vocabulary) are the largest tensor of a training step: 8 sequences of 2048
tokens over Qwen3's 151,936 entries take 10 GB in float32, several times that with gradients. Here
they exist for one chunk of tokens at a time. If the head is trained, backward recomputes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        if ctx.entropy_has_gradient:
            ctx.save_for_backward(exp_x, z, targets, entropy)
        else:
            ctx.save_for_backward(exp_x, z, targets)
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # d logprob / d logit_v = (1 if v is the target, else 0) - p(v), over the temperature
        exp_x, z, targets, *saved = ctx.saved_tensors
        grad = grads[0] / ctx.temperature
        grad_logits = exp_x * (-grad / z)[:, None]
        grad_logits.scatter_add_(1, targets[:, None], grad[:, None])
        if ctx.entropy_has_gradient:
            # d H / d logit_v = - p(v) (log p(v) + H), over the temperature; p = exp_x / z
            (entropy,) = saved
            of_entropy = torch.xlogy(exp_x, exp_x)
            of_entropy.addcmul_(exp_x, (entropy - z.log())[:, None])
            grad_logits.sub_(of_entropy.mul_((grads[1] / ctx.temperature / z)[:, None]))
        return grad_logits.to(ctx.dtype), None, None, None, None, None


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
        targets: Tensor,
        temperature: float,
        num_chunks: int,
        entropy_mode: Entropy,
        allowed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        results = []
        # A pass for each output that has a gradient: only one backward follows each call of the
        # head, as the hooks of ZeRO-3 expect, and the memory of a pass is free for the next one.
        modes: list[Entropy] = [entropy_mode]
        if entropy_mode == "gradient":
            modes = ["none", "gradient"]
        for chunk, chunk_targets, chunk_allowed in _chunks(hidden, targets, allowed, num_chunks):
            chunk = chunk.detach().requires_grad_()
            gradients: list[Tensor] = []
            for number, mode in enumerate(modes):
                with torch.enable_grad():
                    outputs = token_logprobs_and_entropy(
                        head(chunk),
                        chunk_targets,
                        temperature,
                        mode,
                        overwrite=True,
                        allowed=chunk_allowed,
                    )
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
        return sum(terms[1:], terms[0]).to(gradients[0].dtype), *[None] * 6


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
    if hidden.requires_grad and torch.is_grad_enabled() and not head_is_trained:
        return _FrozenHead.apply(hidden, head, targets, temperature, num_chunks, entropy, allowed)

    def run_chunk(
        chunk: Tensor, chunk_targets: Tensor, chunk_allowed: Tensor | None, is_last: bool
    ) -> tuple[Tensor, Tensor]:
        is_recomputed = False

        def project(chunk: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal is_recomputed
            # Backward does not need an entropy that has no gradient.
            mode = "none" if is_recomputed and entropy == "value" else entropy
            is_recomputed = True
            # Otherwise all chunks share one bfloat16 copy of the head and sum gradients in it.
            torch.clear_autocast_cache()
            return token_logprobs_and_entropy(
                head(chunk),
                chunk_targets,
                temperature,
                mode,
                overwrite=True,
                allowed=chunk_allowed,
            )

        # Backward begins with the last chunk, so a checkpoint of it would save nothing.
        return project(chunk) if is_last else checkpoint(project, chunk, use_reentrant=False)

    chunks = [
        run_chunk(*parts, is_last=i == num_chunks - 1)
        for i, parts in enumerate(_chunks(hidden, targets, allowed, num_chunks))
    ]
    return torch.cat([c[0] for c in chunks]), torch.cat([c[1] for c in chunks])


def _chunks(
    hidden: Tensor, targets: Tensor, allowed: Tensor | None, num_chunks: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Split hidden states (N, hidden_size), targets (N,) and what is allowed into chunks."""
    nothing = [None] * num_chunks
    return zip(
        hidden.tensor_split(num_chunks),
        targets.tensor_split(num_chunks),
        nothing if allowed is None else allowed.tensor_split(num_chunks),
        strict=True,
    )


# Number of logits in a chunk: 256 MB in float32.
_CHUNK_ELEMENTS = 2**26


def chunk_size_for(vocab_size: int) -> int:
    """Return how many tokens have 256 MB of float32 logits: 441 at Qwen3's 151,936 entries."""
    return max(_CHUNK_ELEMENTS // vocab_size, 1)


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()


class _HeadIn(TorchFunctionMode):
    """While open, the LM head multiplies in another dtype, or sums its gradient in float32.

    Weights that are not float32 are cast once to float32, and all calls of the head share that
    copy. So autograd sums the gradients of the calls in float32, and rounds their sum once.

    Args:
        head: its weights, as they are at each call: FSDP2 replaces them.
        dtype: of the multiplication; None for that of weights or autocast.
        shares: whether weights with gradient get a shared copy. ZeRO-3 frees them after each call,
            so there the calls cannot share one.
    """

    def __init__(self, head: nn.Module, dtype: torch.dtype | None, shares: bool) -> None:
        super().__init__()
        self._head, self._dtype, self._shares = head, dtype, shares
        self._copies: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear or kwargs or not self._is_of_head(args[1]):
            return func(*args, **(kwargs or {}))
        hidden, *weights = (a for a in args if a is not None)
        weights = [self._copy_of(weight) for weight in weights]
        if self._dtype is not None:
            with torch.autocast(hidden.device.type, enabled=False):
                return func(*(a.to(self._dtype) for a in (hidden, *weights)))
        if torch.is_autocast_enabled(hidden.device.type):
            return func(hidden, *weights)
        return func(hidden, *(weight.to(hidden.dtype) for weight in weights))

    def _is_of_head(self, weight: Tensor) -> bool:
        return any(weight is parameter for parameter in self._head.parameters())

    def _copy_of(self, weight: Tensor) -> Tensor:
        is_rounded = weight.dtype in (torch.bfloat16, torch.float16)
        if not (is_rounded and self._shares and weight.requires_grad and torch.is_grad_enabled()):
            return weight
        if id(weight) not in self._copies:
            self._copies[id(weight)] = weight.float()
        return self._copies[id(weight)]


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
    config = _text_config(model)
    real_forward, cap = head.forward, getattr(config, "final_logit_softcapping", None)
    # ZeRO-3 gathers weights in hooks around the call of a module, in forward and backward. FSDP2
    # keeps the head's weights gathered until the backward, and its hooks expect a single call.
    has_to_gather = any(hasattr(p, "ds_id") for p in head.parameters())
    in_dtype = _HeadIn(head, head_dtype, shares=not has_to_gather)

    def to_logits(hidden: Tensor) -> Tensor:
        with _with_forward(head, real_forward), in_dtype:
            logits = head(hidden) if has_to_gather else real_forward(hidden)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # A copy, because FSDP2 cannot hook a view.
    with _with_forward(head, lambda hidden: hidden.clone()):
        if cap is not None:
            config.final_logit_softcapping = None
        try:
            yield to_logits
        finally:
            if cap is not None:
                config.final_logit_softcapping = cap


@contextmanager
def _with_forward(module: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    patched = module.__dict__.get("forward")  # for example by a hook of accelerate
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # the class's own forward applies again
        if patched is not None:
            module.forward = patched
