"""Numerics that do not depend on what else is in the batch, so that engine and learner compute the same bits.

On a CPU in fp32, a product gives a row the same bits in any batch of at least two rows (oneDNN; where that is missing, MKL's
eight rows to each thread), and other bits in smaller ones; attention sums in an order that depends on how many queries and keys
there are. `numerics = "exact"` takes kernels that sum a row's products and a query's keys in order (`nmoe.model.kernels.cpu`,
`nmoe.model.exact_attention`); where there are none it pads small products and attends in fp64. torch's sigmoid and silu give
other bits where a piece of work ends, by up to a unit in the last place, and where that is depends on the batch and the threads:
"exact" takes the sigmoid from the exponential, which does not. Everything else works row by row.
"""

# Shapes: N rows, D and F widths, V vocabulary, R routed rows sorted by expert, E experts.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model import products
from nmoe.model.kernels.cpu.library import serves_exact

Numerics = Literal["fast", "exact"]

_MKL_ROWS_PER_THREAD = 8
_LOW = (torch.bfloat16, torch.float16)


def least_rows(x: Tensor) -> int:
    """From how many rows on a product of `x` gives a row bits of its own."""
    return 2 if products.by_onednn(x) else least_rows_of_mkl()


def least_rows_of_mkl() -> int:
    return _MKL_ROWS_PER_THREAD * torch.get_num_threads()


def enough_rows(x_ND: Tensor, least: int) -> Tensor:
    """`x`, below it rows of zeros up to so many."""
    missing = least - x_ND.shape[0]
    return F.pad(x_ND, (0, 0, 0, missing)) if missing > 0 else x_ND


def linear(x_ND: Tensor, weight_FD: Tensor, exact: bool, bias_F: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`; with `exact`, by the kernel or in no fewer rows than `least_rows`."""
    if not exact or serves_exact(x_ND):
        return products.linear(x_ND, weight_FD, bias_F, exact)
    return products.linear(enough_rows(x_ND, least_rows(x_ND)), weight_FD, bias_F)[: x_ND.shape[0]]


def head_product(x_ND: Tensor, weight_VD: Tensor, exact: bool) -> Tensor:
    """`linear(x, weight, exact)` in fp32 at least: logits of some tens rounded to bf16 are wrong by some hundredths."""
    return products.linear_in_fp32(x_ND, weight_VD) if x_ND.dtype in _LOW else linear(x_ND, weight_VD, exact)


def prepared(weight_VD: Tensor, exact: bool) -> Callable[[Tensor], Tensor]:
    """`head_product(x, weight, exact)` without gradients, for several x."""
    if weight_VD.dtype in _LOW:
        return products.prepared_in_fp32(weight_VD)
    if exact and serves_exact(weight_VD):
        return products.prepared(weight_VD)
    return lambda x_ND: linear(x_ND, weight_VD, exact)


def with_full_groups(
    experts: Callable[[Tensor, Tensor], Tensor], rows_RD: Tensor, expert_R: Tensor, counts_E: Tensor, least: int
) -> Tensor:
    """`experts(rows, counts)` with every group padded by rows of zeros up to `least`, and to one of 16 sizes of its octave:
    oneDNN makes a program for each new shape, for about a millisecond, and groups have other sizes at every step. `expert_R` is
    each row's expert, ascending."""
    octave_E = counts_E.clamp(min=1).log2().floor().long()
    step_E = torch.bitwise_left_shift(torch.ones_like(counts_E), (octave_E - 4).clamp(min=3))
    padded_E = ((counts_E + step_E - 1) // step_E * step_E).clamp(min=least)
    shift_E = (padded_E.cumsum(0) - padded_E) - (counts_E.cumsum(0) - counts_E)
    place_R = torch.arange(rows_RD.shape[0], device=rows_RD.device) + shift_E[expert_R]
    padded = rows_RD.new_zeros(int(padded_E.sum()), rows_RD.shape[1]).index_copy(0, place_R, rows_RD)
    return experts(padded, padded_E).index_select(0, place_R)


class _Sigmoid(torch.autograd.Function):
    """s = 1 / (1 + exp(-x)), ds/dx = s (1 - s)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.exp(-x).add_(1).reciprocal_()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grads[0] * out * (1 - out)


def sigmoid(x: Tensor, exact: bool) -> Tensor:
    """1 / (1 + exp(-x)); with `exact`, with bits that do not depend on an element's place."""
    if not exact:
        return torch.sigmoid(x)
    out: Tensor = _Sigmoid.apply(x)
    return out
