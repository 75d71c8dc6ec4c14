"""Sampling from a batch of logits, every row by its own settings and its own uniform draw."""

# Shapes: B rows, V vocabulary.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nmoe.errors import DivergenceError
from nmoe.model.kernels.cpu import library, operations
from nmoe.model.numerics import row_sums


@dataclass(frozen=True)
class SamplingColumns:
    """The rows' settings. `plain` says that every row samples at temperature 1 from its whole support; `cuts` that some row has
    top-k or top-p."""

    temperature_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor
    plain: bool
    cuts: bool


def sample(logits_BV: Tensor, columns: SamplingColumns, uniforms_B: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens `[B]`, their log-probabilities `[B]` under what was sampled from, and the kept mask `[B, V]` where rows cut.

    Greedy rows (temperature 0) take the largest logit, with log-probability 0: all mass is there. Raises DivergenceError for
    logits that are not finite.
    """
    if not columns.cuts and library.usable(logits_BV):
        tokens_B, logprobs_B, finite = operations.sample(logits_BV, columns.temperature_B, uniforms_B)
        _check_finite(finite)
        return tokens_B, logprobs_B, None
    kept_BV = None
    greedy_B = None
    if not columns.plain:
        greedy_B = columns.temperature_B == 0
        logits_BV = logits_BV / torch.where(greedy_B, 1.0, columns.temperature_B).unsqueeze(-1)
    if columns.cuts:
        kept_BV = kept_mask(logits_BV, columns.top_p_B, columns.top_k_B)
        logits_BV = logits_BV.masked_fill(~kept_BV, float("-inf"))
    shifted_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    masses_BV = shifted_BV.exp()
    cumulative_BV = masses_BV.cumsum(-1)
    # Inverse CDF: the first token whose cumulative mass exceeds the draw. The draw stays below the total, so a token of
    # no mass is never met.
    total_B1 = cumulative_BV[:, -1:]
    draw_B1 = torch.minimum(uniforms_B.unsqueeze(-1) * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    tokens_B1 = torch.searchsorted(cumulative_BV, draw_B1, right=True)
    if greedy_B is not None:
        tokens_B1 = torch.where(greedy_B.unsqueeze(-1), logits_BV.argmax(-1, keepdim=True), tokens_B1)
    # A cumulative sum adds in another order than a sum; the learner's log-sum-exp adds as `sum` does.
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
    """The error for a model that computed `what` with NaN or infinite values."""
    return DivergenceError(
        f"the model's {what} are not finite: its weights have diverged, or hold NaN. Go back to the last checkpoint, with a lower "
        "optimizer.learning_rate if this model is being trained"
    )


def kept_mask(logits_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor:
    """The tokens that top-k, then top-p leave: the k largest, and of their renormalised mass the fewest that reach p (Holtzman
    et al. 2019, arXiv:1904.09751). Equal logits are kept in order of token id. The largest is always kept."""
    sorted_BV, order_BV = logits_BV.sort(stable=True, dim=-1, descending=True)
    rank_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    within_BV = (rank_V < top_k_B.unsqueeze(-1)) | (top_k_B == 0).unsqueeze(-1)
    probs_BV = sorted_BV.masked_fill(~within_BV, float("-inf")).softmax(-1)
    before_BV = probs_BV.cumsum(-1) - probs_BV
    within_BV &= (before_BV < top_p_B.unsqueeze(-1)) | (top_p_B >= 1).unsqueeze(-1)
    within_BV[:, 0] = True
    return torch.zeros_like(within_BV).scatter_(-1, order_BV, within_BV)
