"""The Triton kernels of `combine` and of `dispatch`'s backward: each token's K rows pass once, sums are in fp32."""

# Shapes: T tokens, K chosen experts, R = T * K rows sorted by expert, D width.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    y_ptr, weights_ptr, row_ptr, out_ptr, D: tl.constexpr, K: tl.constexpr, d: tl.constexpr, WEIGHTED: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    at_d = tl.program_id(1) * d + tl.arange(0, d)
    sum_d = tl.zeros([d], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        y_d = tl.load(y_ptr + row * D + at_d, mask=at_d < D, other=0.0).to(tl.float32)
        if WEIGHTED:
            y_d = y_d * tl.load(weights_ptr + token * K + k).to(tl.float32)
        sum_d += y_d
    tl.store(out_ptr + token * D + at_d, sum_d.to(out_ptr.dtype.element_ty), mask=at_d < D)


@triton.jit
def _spread(  # type: ignore[no-untyped-def]
    grad_ptr,
    y_ptr,
    weights_ptr,
    row_ptr,
    grad_y_ptr,
    grad_weights_ptr,
    D: tl.constexpr,
    d: tl.constexpr,
):
    """Computes `spread_rows`, with one program per token and chosen expert (Triton kernel)."""
    pick = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + pick).to(tl.int64)
    weight = tl.load(weights_ptr + pick).to(tl.float32)
    product_d = tl.zeros([d], tl.float32)
    for start in tl.static_range(0, D, d):
        at_d = start + tl.arange(0, d)
        grad_d = tl.load(grad_ptr + token * D + at_d, mask=at_d < D, other=0.0).to(tl.float32)
        product_d += grad_d * tl.load(y_ptr + row * D + at_d, mask=at_d < D, other=0.0).to(tl.float32)
        tl.store(grad_y_ptr + row * D + at_d, (grad_d * weight).to(grad_y_ptr.dtype.element_ty), mask=at_d < D)
    tl.store(grad_weights_ptr + pick, tl.sum(product_d, 0).to(grad_weights_ptr.dtype.element_ty))


def sum_rows(y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
    """Returns `out[t] = sum over k of weights[t, k] * y[row[t, k]]`, or the plain sum without weights."""
    tokens, k = row_TK.shape
    y_RD, row_TK = y_RD.contiguous(), row_TK.contiguous()
    width = y_RD.shape[1]
    out_TD = torch.empty(tokens, width, device=y_RD.device, dtype=y_RD.dtype)
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    if tokens:
        _sum[(tokens, triton.cdiv(width, columns))](
            y_RD,
            y_RD if weights_TK is None else weights_TK.contiguous(),
            row_TK,
            out_TD,
            D=width,
            K=k,
            d=columns,
            WEIGHTED=weights_TK is not None,
            num_warps=4,
        )
    return out_TD


def spread_rows(grad_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `sum_rows` with respect to the rows and to the weights."""
    tokens, k = row_TK.shape
    y_RD = y_RD.contiguous()
    grad_RD = torch.empty_like(y_RD)
    grad_weights_TK = torch.empty(tokens, k, device=y_RD.device, dtype=weights_TK.dtype)
    if tokens:
        width = y_RD.shape[1]
        _spread[(tokens, k)](
            grad_TD.contiguous(),
            y_RD,
            weights_TK.contiguous(),
            row_TK.contiguous(),
            grad_RD,
            grad_weights_TK,
            D=width,
            d=min(_COLUMNS, triton.next_power_of_2(width)),
            num_warps=4,
        )
    return grad_RD, grad_weights_TK
