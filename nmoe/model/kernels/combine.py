"""Moving rows between tokens and experts with no atomics and in a fixed order.

`dispatch` copies every token's row to the experts that it chose; `combine` adds up what came back, each row times its weight.
torch's own backward of a gather adds rows in whatever order threads come (on CUDA also rounding to bf16 at each); here it is a
sum of K rows.
"""

# Shapes: T tokens, K chosen experts, R = T * K rows sorted by expert, D width.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return x_TD.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (row_TK,) = ctx.saved_tensors
        if _on_gpu(grads[0]):
            from nmoe.model.kernels.combine_triton import sum_rows

            return sum_rows(grads[0], None, row_TK), None, None
        return _gathered(grads[0], row_TK).sum(1), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor, exact: bool) -> Tensor:
        ctx.save_for_backward(y_RD, weights_TK, row_TK)
        if _on_gpu(y_RD):
            from nmoe.model.kernels.combine_triton import sum_rows

            return sum_rows(y_RD, weights_TK, row_TK)
        if exact:
            return _in_order(y_RD, weights_TK, row_TK)
        return combine_reference(y_RD, weights_TK, row_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y_RD, weights_TK, row_TK = ctx.saved_tensors
        if _on_gpu(y_RD):
            from nmoe.model.kernels.combine_triton import spread_rows

            return *spread_rows(grads[0], y_RD, weights_TK, row_TK), None, None
        grad_TD1 = grads[0].unsqueeze(-1)
        grad_weights_TK = torch.bmm(_gathered(y_RD, row_TK), grad_TD1).squeeze(-1).to(weights_TK.dtype)
        grad_TKD = grads[0].unsqueeze(1) * weights_TK.to(y_RD.dtype).unsqueeze(-1)
        grad_RD = torch.empty_like(y_RD).index_copy_(0, row_TK.reshape(-1), grad_TKD.flatten(0, 1))
        return grad_RD, grad_weights_TK, None, None


def dispatch(x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
    """Row r of the result is token `token_R[r]`'s. `row_TK` is the way back: where each token's K rows went."""
    out: Tensor = _Dispatch.apply(x_TD, token_R, row_TK)
    return out


def combine(y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor, exact: bool = False) -> Tensor:
    """Each token's weighted sum over its own K rows, `[T, D]`: no token's sum depends on another's place. With `exact` its bits do
    not depend on how many tokens there are either."""
    out: Tensor = _Combine.apply(y_RD, weights_TK, row_TK, exact)
    return out


def _in_order(y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
    """`combine_reference`, element by element: a batched product is another kernel's in another shape."""
    parts = zip(weights_TK.to(y_RD.dtype).split(1, 1), row_TK.unbind(1), strict=True)
    products = (y_RD.index_select(0, row_T).mul_(weight_T1) for weight_T1, row_T in parts)
    out_TD = next(products)
    for product_TD in products:
        out_TD += product_TD
    return out_TD


def combine_reference(y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
    """`out[t] = sum over k of weights[t, k] * y[row[t, k]]`."""
    return torch.bmm(weights_TK.to(y_RD.dtype).unsqueeze(1), _gathered(y_RD, row_TK)).squeeze(1)


def _gathered(y_RD: Tensor, row_TK: Tensor) -> Tensor:
    return y_RD.index_select(0, row_TK.reshape(-1)).view(*row_TK.shape, -1)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64
