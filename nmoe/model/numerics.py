"""Numerics that do not depend on what else is in the batch, so that engine and learner compute the same bits.

A library takes another kernel for another number of rows, and its kernels add in another order: MKL by blocks of rows that are
other ones on another processor, oneDNN in products of one row, torch's attention by how many queries and keys there are.
`numerics = "exact"` leaves no sum to them. Products and attention are our own kernels, which add a row's products and a query's
keys in order (`nmoe.model.kernels.cpu`, `nmoe.model.exact_attention`), or, where these cannot run, sums that are exact in fp64
whatever their order (`nmoe.model.order_free`). A token's experts are added in order (`nmoe.model.kernels.combine`), and a row of
logits never by two threads (`row_sums`). torch's sigmoid and silu give other bits where a piece of work ends, by up to a unit in
the last place, and where that is depends on the batch and the threads: "exact" takes the sigmoid from the exponential.

What stays torch's works element by element or row by row: norms, softmax, exponential, logarithm. Whether it gives a row the same
bits in any batch on the machine at hand is tried when a run starts (`nmoe.model.exactness`).
"""

# Shapes: N rows, D width, V vocabulary.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from nmoe.model import products

Numerics = Literal["fast", "exact"]

_LOW = (torch.bfloat16, torch.float16)

# torch adds up a single row of this many numbers with all its threads, each a part (GRAIN_SIZE of its TensorIterator).
_SHARED_ROW = 32_768


def row_sums(x_NV: Tensor) -> Tensor:
    """`x.sum(-1)`, a row having the same bits alone as among others."""
    if x_NV.shape[0] != 1 or x_NV.shape[1] < _SHARED_ROW:
        return x_NV.sum(-1)
    return torch.cat([x_NV, x_NV]).sum(-1)[:1]


def head_product(x_ND: Tensor, weight_VD: Tensor, exact: bool) -> Tensor:
    """`x @ weight.T` in fp32 at least: logits of some tens rounded to bf16 are wrong by some hundredths."""
    if x_ND.dtype not in _LOW:
        return products.linear(x_ND, weight_VD, exact=exact)
    if exact:
        return products.linear(x_ND.float(), weight_VD.float(), exact=True)
    return products.linear_in_fp32(x_ND, weight_VD)


def prepared(weight_VD: Tensor, exact: bool) -> Callable[[Tensor], Tensor]:
    """`head_product(x, weight, exact)` without gradients, for several x."""
    if weight_VD.dtype not in _LOW:
        return products.prepared(weight_VD, exact)
    if exact:
        head = products.prepared(weight_VD.float(), exact)
        return lambda x_ND: head(x_ND.float())
    return products.prepared_in_fp32(weight_VD)


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
