"""The tables of operations with exact numerics: a row has the same bits in any batch, with gradients and without.

torch's sigmoid and silu differ by up to a unit in the last place at the end of a thread's piece of work, whose position depends on
the batch and the threads. So the sigmoid is computed from the exponential. Gradients are the same as with fast numerics.
"""

# Shapes: see `nmoe.model.ops.torch`.

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmoe.model.ops import delta
from nmoe.model.ops.attention import AttentionLayer
from nmoe.model.ops.cpu import operations, packing
from nmoe.model.ops.cpu.ops import CpuOps, Linear, LinearByGroup
from nmoe.model.ops.cpu.packing import kept
from nmoe.model.ops.exact import order_free
from nmoe.model.ops.torch import TorchOps

_LINEAR = 20.0
_GELU = 2 * math.sqrt(2 / math.pi)


class ExactSums(TorchOps, ABC):
    """The common part of all tables with exact numerics. Subclasses define how weights are prepared and multiplied."""

    exact = True

    def linear(self, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return self.product(x_ND, weight_FD, bias_F)
        out_NF: Tensor = Linear.apply(self, x_ND, weight_FD, bias_F)
        return out_NF

    def product(self, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
        return self.product_of(x_ND, self.weights_of(weight_FD), weight_FD.shape[0], bias_F)

    @abstractmethod
    def weights_of(self, weight_FD: Tensor) -> Tensor:
        """Prepares a weight for `product_of`."""

    @abstractmethod
    def product_of(self, x_ND: Tensor, prepared: Tensor, outputs: int, bias_F: Tensor | None) -> Tensor:
        """Returns `x @ weight.T + bias` for a weight that `weights_of` prepared."""

    def head_weight(self, weight_VD: Tensor) -> Tensor:
        return self.weights_of(weight_VD)

    def logits(self, x_ND: Tensor, head_weight: Tensor, vocabulary: int) -> Tensor:
        return self.product_of(x_ND, head_weight, vocabulary, None)

    def linear_by_group(self, x_RD: Tensor, weight_EDF: Tensor, counts: Sequence[int]) -> Tensor:
        if not torch.is_grad_enabled():
            return self.product_by_group(x_RD, weight_EDF, counts)
        out_RF: Tensor = LinearByGroup.apply(self, x_RD, weight_EDF, tuple(counts))
        return out_RF

    def sigmoid(self, x: Tensor) -> Tensor:
        out: Tensor = _Sigmoid.apply(x)
        return out

    def silu(self, x: Tensor) -> Tensor:
        return x * self.sigmoid(x)

    def softplus(self, x: Tensor) -> Tensor:
        # From 20 on it is x to the last bit, in fp32.
        return torch.where(x > _LINEAR, x, x.clamp(max=_LINEAR).exp().log1p())

    def gelu(self, x: Tensor) -> Tensor:
        # (1 + tanh(y)) / 2 is the sigmoid of 2y.
        return x * self.sigmoid(_GELU * (x + 0.044715 * (x * x * x)))

    def causal_attention(
        self, layer: AttentionLayer, q_BHLC: Tensor, k_BJSC: Tensor, v_BJSU: Tensor, earlier: int = 0
    ) -> Tensor:
        return order_free.causal_attention(layer, q_BHLC, k_BJSC, v_BJSU, earlier)

    def delta_rule(
        self,
        q_BLHC: Tensor,
        k_BLHC: Tensor,
        v_BLHU: Tensor,
        decay_BLH: Tensor,
        beta_BLH: Tensor,
        memory_BHCU: Tensor,
    ) -> tuple[Tensor, Tensor]:
        # Chunks would depend on where a prompt is cut, and decoding takes one token at a time.
        return delta.scan(q_BLHC, k_BLHC, v_BLHU, decay_BLH, beta_BLH, memory_BHCU)


class OrderFreeSums(ExactSums):
    """Exact numerics by products of numbers rounded to a grid, whose sums are the same in any order (see `order_free`)."""

    def weights_of(self, weight_FD: Tensor) -> Tensor:
        return kept(weight_FD, _grid)

    def product_of(self, x_ND: Tensor, prepared: Tensor, outputs: int, bias_F: Tensor | None) -> Tensor:
        out_NF = order_free.product(order_free.on_grid(x_ND), prepared).to(x_ND.dtype)
        return out_NF if bias_F is None else out_NF + bias_F

    def product_by_group(self, x_RD: Tensor, weight_EDF: Tensor, counts: Sequence[int]) -> Tensor:
        parts, weights_EFD = order_free.on_grid(x_RD).split(list(counts)), kept(weight_EDF, _each_grid)
        return torch.cat([order_free.product(part, weights_EFD[e]) for e, part in enumerate(parts)]).to(x_RD.dtype)


class _InOrder(CpuOps):
    """Sums over a token's experts on a CPU, one expert after another, so that a row's bits do not depend on the batch."""

    def sum_rows(self, y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
        if weights_TK is None:  # of a gradient
            return super().sum_rows(y_RD, weights_TK, row_TK)
        # Element by element, one expert after another: a batched product takes another kernel for another shape.
        parts = zip(weights_TK.to(y_RD.dtype).split(1, 1), row_TK.unbind(1), strict=True)
        products = (y_RD.index_select(0, row_T).mul_(weight_T1) for weight_T1, row_T in parts)
        out_TD = next(products)
        for product_TD in products:
            out_TD += product_TD
        return out_TD


class OrderFreeOps(OrderFreeSums, _InOrder):
    """Operations with exact numerics on a CPU where the C++ kernels cannot run."""


class ExactOps(ExactSums, _InOrder):
    """Operations with exact numerics in fp32 on a CPU: C++ kernels, which sum a row's products and a query's keys in order."""

    attends_in_blocks = True

    def weights_of(self, weight_FD: Tensor) -> Tensor:
        return kept(weight_FD, packing.panels)

    def product_of(self, x_ND: Tensor, prepared: Tensor, outputs: int, bias_F: Tensor | None) -> Tensor:
        return operations.linear(x_ND, prepared, outputs, bias_F)

    def product_by_group(self, x_RD: Tensor, weight_EDF: Tensor, counts: Sequence[int]) -> Tensor:
        panels = kept(weight_EDF, packing.each_panels)
        return operations.linear_by_group(x_RD, panels, weight_EDF.shape[2], counts)

    attend_in_blocks = staticmethod(operations.attention)


class _Sigmoid(torch.autograd.Function):
    """The sigmoid s = 1 / (1 + exp(-x)) and its gradient ds/dx = s (1 - s)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.exp(-x).add_(1).reciprocal_()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grads[0] * out * (1 - out)


def _grid(weight_FD: Tensor) -> list[Tensor]:
    return [order_free.on_grid(weight_FD)]


def _each_grid(weight_EDF: Tensor) -> list[Tensor]:
    return [order_free.on_grid(weight_EDF.mT)]
