"""Sampling from a batch of logits, each row with separate settings and a separate uniform draw; and the counter-based draws."""

# Shapes: B rows, V vocabulary.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmoe.errors import DivergenceError
from nmoe.model.logprobs import row_sums
from nmoe.model.ops.table import ops_for

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WITHOUT_SIGN = 0x7FFFFFFF


@dataclass(frozen=True)
class SamplingColumns:
    """The sampling settings of a batch's rows. `plain` says that every row samples at temperature 1, `cuts` that some row has
    top-k, top-p or min_p. `min_p_B` is None if no row has min_p."""

    temperature_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor
    plain: bool
    cuts: bool
    min_p_B: Tensor | None = None


def sample(logits_BV: Tensor, columns: SamplingColumns, uniforms_B: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Samples one token per row. Returns tokens `[B]`, their log-probabilities `[B]` under the distribution they were sampled from,
    and, if any row has top-k, top-p or min_p, the kept mask `[B, V]`.

    Greedy rows (temperature 0) take the largest logit, with log-probability 0, since all mass is there. Raises DivergenceError if
    a logit is not finite.
    """
    if not columns.cuts:
        sampled = ops_for(logits_BV).sample(logits_BV, columns.temperature_B, uniforms_B)
        if sampled is not None:
            tokens_B, logprobs_B, finite = sampled
            _check_finite(finite)
            return tokens_B, logprobs_B, None
    kept_BV = None
    greedy_B = None
    if not columns.plain:
        greedy_B = columns.temperature_B == 0
        logits_BV = logits_BV / torch.where(greedy_B, 1.0, columns.temperature_B).unsqueeze(-1)
    if columns.cuts:
        kept_BV = kept_mask(logits_BV, columns.top_p_B, columns.top_k_B)
        if columns.min_p_B is not None:
            kept_BV = kept_BV & likely_mask(logits_BV, columns.min_p_B)
        logits_BV = logits_BV.masked_fill(~kept_BV, float("-inf"))
    shifted_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    masses_BV = shifted_BV.exp()
    cumulative_BV = masses_BV.cumsum(-1)
    # Inverse CDF: the first token whose cumulative mass exceeds the draw. The draw stays below the total, so that a token without
    # mass is never chosen.
    total_B1 = cumulative_BV[:, -1:]
    draw_B1 = torch.minimum(uniforms_B.unsqueeze(-1) * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    tokens_B1 = torch.searchsorted(cumulative_BV, draw_B1, right=True)
    if greedy_B is not None:
        tokens_B1 = torch.where(greedy_B.unsqueeze(-1), logits_BV.argmax(-1, keepdim=True), tokens_B1)
    # A cumulative sum adds in another order than a sum, and the learner's log-sum-exp adds in the order of `sum`.
    log_total_B = row_sums(masses_BV).log()
    _check_finite(bool(log_total_B.isfinite().all()))
    logprobs_B = shifted_BV.gather(-1, tokens_B1).squeeze(-1) - log_total_B
    if greedy_B is not None:
        logprobs_B = torch.where(greedy_B, 0.0, logprobs_B)
    return tokens_B1.squeeze(-1), logprobs_B, kept_BV


def _check_finite(finite: bool) -> None:
    if not finite:
        raise diverged("logits")


def diverged(what: str) -> DivergenceError:
    """Returns the error for a model whose `what` ("logits", say) have NaN or infinite values."""
    return DivergenceError(
        f"the model's {what} are not finite: its weights have diverged, or hold NaN. Go back to the last checkpoint, with a lower "
        "optimizer.learning_rate if this model is being trained"
    )


def kept_mask(logits_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor:
    """Returns the mask `[B, V]` of the tokens that remain after top-k and then top-p: the k largest, and of these the fewest whose
    renormalised mass reaches p (Holtzman et al. 2019, arXiv:1904.09751). Ties are kept in order of token id. The largest logit is
    always kept.
    """
    kept_BV = ops_for(logits_BV).kept_mask(logits_BV, top_p_B, top_k_B)
    if kept_BV is not None:
        return kept_BV
    sorted_BV, order_BV = logits_BV.sort(stable=True, dim=-1, descending=True)
    rank_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    within_BV = (rank_V < top_k_B.unsqueeze(-1)) | (top_k_B == 0).unsqueeze(-1)
    probs_BV = sorted_BV.masked_fill(~within_BV, float("-inf")).softmax(-1)
    before_BV = probs_BV.cumsum(-1) - probs_BV
    within_BV &= (before_BV < top_p_B.unsqueeze(-1)) | (top_p_B >= 1).unsqueeze(-1)
    within_BV[:, 0] = True
    return torch.zeros_like(within_BV).scatter_(-1, order_BV, within_BV)


def likely_mask(logits_BV: Tensor, min_p_B: Tensor) -> Tensor:
    """Returns the mask `[B, V]` of the tokens that have at least the share `min_p` of the largest probability (Nguyen et al. 2024,
    arXiv:2407.01082). The largest logit is always kept."""
    return (logits_BV - logits_BV.amax(-1, keepdim=True)).exp() >= min_p_B.unsqueeze(-1)


def penalized(
    logits_BV: Tensor, tokens_BP: Tensor, sampled_B: Tensor, presence_B: Tensor, frequency_B: Tensor
) -> Tensor:
    """Returns the logits less OpenAI's penalties: from each token of the first `sampled_B` of `tokens_BP`, `presence_B` once and
    `frequency_B` for each time that it is there."""
    counted_BP = torch.arange(tokens_BP.shape[1], device=tokens_BP.device) < sampled_B.unsqueeze(-1)
    counts_BV = torch.zeros_like(logits_BV).scatter_add_(1, tokens_BP, counted_BP.to(logits_BV.dtype))
    return logits_BV - frequency_B.unsqueeze(-1) * counts_BV - presence_B.unsqueeze(-1) * (counts_BV > 0)


def raw_logprobs(logits_NV: Tensor, targets_N: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `log softmax(logits)[target]`, `[N]`, and the `most` largest of each row with their token ids, `[N, most]` each: the
    largest first, and of equal ones the lower id first."""
    shifted_NV = logits_NV - logits_NV.amax(-1, keepdim=True)
    logprobs_NV = shifted_NV - row_sums(shifted_NV.exp()).log().unsqueeze(-1)
    found_N = logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
    # One number orders by log-probability, then by id. No log-probability is above 0, so that the bits without the sign grow as it
    # falls.
    magnitude_NV = (logprobs_NV.view(torch.int32) & _WITHOUT_SIGN).long()
    order_NV = (magnitude_NV << 32) | torch.arange(logits_NV.shape[-1], device=logits_NV.device)
    first_NM = order_NV.topk(most, dim=-1, largest=False, sorted=True).values
    return found_N, 0 - (first_NM >> 32).int().view(torch.float32), first_NM & 0xFFFFFFFF


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure
    14)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, samples: int, positions: int) -> NDArray[np.float32]:
    """Returns uniform draws in [0, 1), `[samples, positions]`, on a grid of 2^-24. Each is a pure function of (seed, sample,
    position).

    The samples of a seed and the positions of a sample are each a SplitMix64 stream, so that a draw does not depend on how many
    samples or positions are asked for.
    """
    with np.errstate(over="ignore"):
        root = _mix(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN)
        sample = _mix(root + _GOLDEN * np.arange(1, samples + 1, dtype=np.uint64))
        draws = _mix(sample[:, None] + _GOLDEN * np.arange(1, positions + 1, dtype=np.uint64))
    return (draws >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
