"""Where trainer and server disagree about sampled tokens, and which option mends it: pure functions
of numpy arrays. docs/mismatch.md explains the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifiers_rl.types import Sample

# Both sides agree if no token differs by more, in nats: float32 makes 1e-6, a sum in another order.
AGREES = 1e-4
# Lower bounds of the groups of tokens by the probability that the server gave them.
PROBABILITIES = (0.9, 0.5, 0.1, 0.01, 0.001, 0.0)
# Tokens of a group that are enough for its mean to say something.
MIN_TOKENS = 16


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """N tokens that the server sampled, and what both sides say of each.

    Attributes:
        trainer_logprobs, inference_logprobs: (N,) nats, at the sampling temperature.
        positions: (N,) place among the sampled tokens of its reply, from 1.
        lengths: (N,) sampled tokens of its reply.
    """

    trainer_logprobs: np.ndarray
    inference_logprobs: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, samples: Sequence[Sample], trainer_logprobs: Sequence[np.ndarray]) -> SampledTokens:
        """Collect the loss tokens of these samples. Those that no policy sampled are left out.

        Args:
            trainer_logprobs: for each sample, those of its loss tokens.
        """
        parts: list[list[np.ndarray]] = [[], [], [], []]
        for sample, ours in zip(samples, trainer_logprobs, strict=True):
            theirs = sample.inference_logprobs[sample.loss_mask]
            is_sampled = ~np.isnan(theirs)
            num = int(is_sampled.sum())
            arrays = ours[is_sampled], theirs[is_sampled], np.arange(1, num + 1), np.full(num, num)
            for part, array in zip(parts, arrays, strict=True):
                part.append(array)
        return cls(*(np.concatenate(part or [np.zeros(0)]) for part in parts))

    @property
    def log_ratios(self) -> np.ndarray:
        """(N,) float64, log pi_train - log pi_server."""
        return self.trainer_logprobs.astype(np.float64) - self.inference_logprobs


@dataclass(frozen=True)
class Row:
    """A group of tokens.

    Attributes:
        cause: by what the tokens are grouped.
        group: which of them it has, for people.
        mean, largest: of |log pi_train - log pi_server|, nats.
        mismatch_kl: mean of r - 1 - log r, as in docs/metrics.md.
    """

    cause: str
    group: str
    num_tokens: int
    mean: float
    largest: float
    mismatch_kl: float


def row_of(tokens: SampledTokens, is_in: np.ndarray, cause: str, group: str) -> Row:
    """Measure those tokens for which `is_in`, (N,) bool, is True. At least one must be."""
    log_ratios = tokens.log_ratios[is_in]
    apart = np.abs(log_ratios)
    kl = np.exp(np.minimum(log_ratios, 20.0)) - 1 - log_ratios
    return Row(cause, group, len(apart), float(apart.mean()), float(apart.max()), float(kl.mean()))


def mismatch_table(tokens: SampledTokens) -> list[Row]:
    """Return a row for all tokens, and one for each group by position in the reply, by length of
    the reply and by probability. Groups without tokens are left out.

    Raises:
        ValueError: there are no tokens.
    """
    if not len(tokens.positions):
        raise ValueError("there is no sampled token to compare")
    rows = [row_of(tokens, np.ones(len(tokens.positions), bool), "all", "")]
    for cause, values in (("position", tokens.positions), ("length", tokens.lengths)):
        low = 1
        while low <= values.max():
            high = max(4 * (low - 1), 1)  # 1, 2 to 4, 5 to 16, 17 to 64, ...
            is_in = (values >= low) & (values <= high)
            if is_in.any():
                group = f"{low}" if low == high else f"{low} to {high}"
                rows.append(row_of(tokens, is_in, cause, group))
            low = high + 1
    probabilities = np.exp(tokens.inference_logprobs)
    above = np.inf
    for bound in PROBABILITIES:
        is_in = (probabilities >= bound) & (probabilities < above)
        if is_in.any():
            group = f"{bound:g} and more" if bound else f"below {above:g}"
            rows.append(row_of(tokens, is_in, "probability", group))
        above = bound
    return rows


def as_lines(rows: Sequence[Row]) -> list[str]:
    """Return the table as text, with a line of names first."""
    cells = [("tokens by", "", "tokens", "mean", "largest", "mismatch_kl")]
    cells += [
        (r.cause, r.group, f"{r.num_tokens}", f"{r.mean:.1e}", f"{r.largest:.1e}",
         f"{r.mismatch_kl:.1e}")
        for r in rows
    ]  # fmt: skip
    widths = [max(len(line[column]) for line in cells) for column in range(6)]
    return [
        "  ".join(
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]


@dataclass(frozen=True)
class Setup:
    """What is known of both sides, and decides which options apply.

    Attributes:
        trainer_dtype, server_dtype: in which they compute, such as "bfloat16".
        reshaping: sampling options that change the server's distribution and not the trainer's.
        quantization: of the server's weights, or None.
        trainer_head, server_head: dtype of the LM head, such as "float32"; "model" for another one.
        has_experts: the model chooses experts.
        router_replay: the trainer uses the server's choice.
    """

    trainer_dtype: str
    server_dtype: str
    reshaping: Sequence[str] = ()
    quantization: str | None = None
    trainer_head: str = "model"
    server_head: str = "model"
    has_experts: bool = False
    router_replay: bool = False


# Options whose effect a sampling mask makes up for.
OF_MASK = ("top_p", "top_k", "min_p")


def advise(tokens: SampledTokens, setup: Setup) -> list[str]:
    """Return which options mend the mismatch, the largest cause first; [] if both sides agree.

    What applies follows from the setup. The figures of the tokens say how much of it shows.
    """
    log_ratios = tokens.log_ratios
    apart = np.abs(log_ratios)
    if apart.max() <= AGREES:
        return []
    advice = []
    higher = f"the server gives its tokens {-log_ratios.mean():.2g} nats more on average"
    if masked := [name for name in setup.reshaping if name in OF_MASK]:
        advice.append(
            f"sampling_mask = true: {' and '.join(masked)} took tokens away at the server only; "
            f"{higher}"
        )
    if others := [name for name in setup.reshaping if name not in OF_MASK]:
        advice.append(
            f"leave out {' and '.join(others)}: the trainer's softmax knows nothing of it; {higher}"
        )
    if setup.quantization:
        advice.append(
            f"leave quantization out of [inference.args]: {setup.quantization} rounds the server's "
            "weights and not the trainer's; if it has to stay, a mask such as dppo bounds what the "
            "importance ratio corrects"
        )
    if setup.trainer_dtype != setup.server_dtype:
        advice.append(
            f'dtype = "{setup.trainer_dtype}" in [inference.args]: the trainer computes in '
            f"{setup.trainer_dtype}, the server in {setup.server_dtype}"
        )
    if setup.has_experts and not setup.router_replay:
        advice.append(
            "router_replay = true: both sides may choose other experts; the largest difference is "
            f"{apart.max() / max(np.median(apart), 1e-12):.0f} x the median"
        )
    if "bfloat16" in (setup.trainer_dtype, setup.server_dtype):
        missing = []
        if setup.trainer_head != "float32":
            missing.append('head_dtype = "float32" in [trainer.args]')
        if setup.server_head != "float32":
            missing.append('hf_overrides = { head_dtype = "float32" } in [inference.args]')
        if missing:
            advice.append(f"{' and '.join(missing)}: {_of_unlikely(tokens)}")
    if grows := _growth(tokens):
        advice.append(
            f"no option: {grows}, as if rope, sliding windows or a recurrent state differed; "
            "compare config.json with hf_overrides in [inference.args]"
        )
    if not advice:
        advice.append(
            f"no option is known: {setup.trainer_dtype} on both sides, and {apart.max():.2g} nats "
            "apart; look at what the environment or its harness puts into requests, and at "
            "hf_overrides in [inference.args]"
            if setup.trainer_dtype == "float32"
            else f"what is left is rounding to {setup.trainer_dtype}; float32 on both sides tells "
            "it from another model"
        )
    return advice


def _of_unlikely(tokens: SampledTokens) -> str:
    """Say how unlikely tokens compare with likely ones."""
    apart, probabilities = np.abs(tokens.log_ratios), np.exp(tokens.inference_logprobs)
    unlikely, likely = apart[probabilities < 0.1], apart[probabilities >= 0.5]
    if min(len(unlikely), len(likely)) < MIN_TOKENS:
        return "logits are rounded to bfloat16"
    return (
        "logits are rounded to bfloat16; tokens of probability below 0.1 are "
        f"{unlikely.mean():.1e} apart, those of 0.5 and more {likely.mean():.1e}"
    )


def _growth(tokens: SampledTokens) -> str | None:
    """Say that the difference grows along the reply, if its last quarter of positions has four
    times the mean of the first. Tokens of the same probability are compared, because unlikely ones
    differ more and may come later.
    """
    apart, probabilities = np.abs(tokens.log_ratios), np.exp(tokens.inference_logprobs)
    is_open = probabilities < 0.9
    last = float(tokens.positions.max())
    early = apart[is_open & (tokens.positions <= last / 4)]
    late = apart[is_open & (tokens.positions > 3 * last / 4)]
    if min(len(early), len(late)) < MIN_TOKENS or not late.mean() > 4 * max(early.mean(), AGREES):
        return None
    return f"the difference grows along the reply, from {early.mean():.1e} to {late.mean():.1e}"


def layer_lines(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], is_exact: bool
) -> tuple[list[str], str]:
    """Return the relative difference of both sides' hidden states behind each layer as lines, and
    where it begins, in words.

    A layer stands out if the difference behind it is four times that behind the layer before, and
    above what rounding makes in one layer.

    Args:
        ours, theirs: (layers, hidden) of the same token; [] for a layer that was not computed.
        is_exact: both sides compute in float32.

    Raises:
        ValueError: the sides have different layers.
    """
    sizes = [[len(state) for state in side if state] for side in (ours, theirs)]
    if sizes[0] != sizes[1] or not sizes[0]:
        raise ValueError(
            f"hidden states of {len(sizes[0])} layers here and {len(sizes[1])} there, or of "
            "different sizes: layers cannot be compared"
        )
    pairs = [(number, a, b) for number, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a]
    before = rounding = 1e-4 if is_exact else 0.02
    lines, begin = [], None
    for number, a, b in pairs:
        norm = max(float(np.linalg.norm(a)), 1e-30)
        apart = float(np.linalg.norm(np.subtract(a, b))) / norm
        lines.append(f"behind layer {number:3}  {apart:.1e}")
        if begin is None and not apart <= max(4 * before, rounding):  # True for NaN, too
            begin = number
        before = apart
    if begin is None:
        return lines, f"no layer stands out; {apart:.1e} behind the last one"
    return lines, f"it begins in layer {begin}; {apart:.1e} behind the last one"


def scale_of_change(
    trainer_logprobs: np.ndarray, inference_logprobs: np.ndarray, before: np.ndarray
) -> float:
    """Return how far a push moved the server's logprobs, relative to the trainer's: 1 if both have
    the new weights, 0 if the server has the old ones, and about 2 if it scales an adapter twofold.

    It is the slope of a line through 0, by least squares.

    Args:
        before: (N,) the trainer's logprobs with the weights before the push.
    """
    ours = trainer_logprobs.astype(np.float64) - before
    theirs = inference_logprobs.astype(np.float64) - before
    return float(ours @ theirs / max(ours @ ours, 1e-30))
