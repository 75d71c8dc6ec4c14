"""The head's logits, never rounded below fp32, and sums over the vocabulary."""

# Shapes: N rows, D width, V vocabulary.

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nmoe.model.ops.table import ops_for

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
        return ops_for(x_ND, exact).linear(x_ND, weight_VD)
    if exact:
        wide_ND = x_ND.float()
        return ops_for(wide_ND, exact).linear(wide_ND, weight_VD.float())
    return ops_for(x_ND).linear_in_fp32(x_ND, weight_VD)


def prepared(weight_VD: Tensor, exact: bool) -> Callable[[Tensor], Tensor]:
    """`head_product(x, weight, exact)` without gradients, for several x."""
    if weight_VD.dtype not in _LOW:
        return ops_for(weight_VD, exact).prepared(weight_VD)
    if exact:
        wide_VD = weight_VD.float()
        head = ops_for(wide_VD, exact).prepared(wide_VD)
        return lambda x_ND: head(x_ND.float())
    return ops_for(weight_VD).prepared_in_fp32(weight_VD)
