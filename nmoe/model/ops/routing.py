"""Moving rows between tokens and experts with no atomics and in a fixed order.

`Dispatch` copies every token's row to the experts that it chose; `Combine` adds up what came back, each row times its weight.
torch's backward of a gather adds rows in the order in which threads arrive, and on CUDA rounds each sum to bf16; here it is a
sum of K rows in order.
"""

# Shapes: T tokens, K chosen experts, R = T * K rows sorted by expert, D width.

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class RowOps(Protocol):
    """The operations that `Dispatch` and `Combine` are made of."""

    def sum_rows(self, y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor: ...

    def spread_rows(
        self, grad_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor
    ) -> tuple[Tensor, Tensor]: ...


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: RowOps, x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        ctx.ops = ops
        return x_TD.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        (row_TK,) = ctx.saved_tensors
        return None, ctx.ops.sum_rows(grads[0], None, row_TK), None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: RowOps, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(y_RD, weights_TK, row_TK)
        ctx.ops = ops
        return ops.sum_rows(y_RD, weights_TK, row_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor, None]:
        return None, *ctx.ops.spread_rows(grads[0], *ctx.saved_tensors), None


def sum_rows(y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
    """`out[t] = sum over k of weights[t, k] * y[row[t, k]]`."""
    if weights_TK is None:
        return _gathered(y_RD, row_TK).sum(1)
    return torch.bmm(weights_TK.to(y_RD.dtype).unsqueeze(1), _gathered(y_RD, row_TK)).squeeze(1)


def sum_rows_in_order(y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
    """The same, element by element, one expert after another: a batched product takes another kernel for another shape."""
    parts = zip(weights_TK.to(y_RD.dtype).split(1, 1), row_TK.unbind(1), strict=True)
    products = (y_RD.index_select(0, row_T).mul_(weight_T1) for weight_T1, row_T in parts)
    out_TD = next(products)
    for product_TD in products:
        out_TD += product_TD
    return out_TD


def spread_rows(grad_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `sum_rows` for its rows and its weights."""
    grad_weights_TK = torch.bmm(_gathered(y_RD, row_TK), grad_TD.unsqueeze(-1)).squeeze(-1).to(weights_TK.dtype)
    grad_TKD = grad_TD.unsqueeze(1) * weights_TK.to(y_RD.dtype).unsqueeze(-1)
    grad_RD = torch.empty_like(y_RD).index_copy_(0, row_TK.reshape(-1), grad_TKD.flatten(0, 1))
    return grad_RD, grad_weights_TK


def _gathered(y_RD: Tensor, row_TK: Tensor) -> Tensor:
    return y_RD.index_select(0, row_TK.reshape(-1)).view(*row_TK.shape, -1)
