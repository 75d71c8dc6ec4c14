"""Gradients of linear layers whose products are a table's own."""

# Shapes: N rows, D inputs, F outputs, R rows sorted by expert, E experts.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nmoe.model.ops.torch import TorchOps


class Linear(torch.autograd.Function):
    """y = x W' + b:  dx = dy W,  dW = dy' x,  db = the sum of dy's rows."""

    @staticmethod
    def forward(ctx: Any, ops: TorchOps, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_ND, weight_FD)
        ctx.ops = ops
        return ops.product(x_ND, weight_FD, bias_F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_FD = ctx.saved_tensors
        (grad_NF,) = grads
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            None,
            ctx.ops.input_gradient(grad_NF, weight_FD) if needs_x else None,
            ctx.ops.weight_gradient(x_ND, grad_NF) if needs_weight else None,
            grad_NF.sum(0) if needs_bias else None,
        )


class LinearByGroup(torch.autograd.Function):
    """The same for each group of rows."""

    @staticmethod
    def forward(ctx: Any, ops: TorchOps, x_RD: Tensor, weight_EDF: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x_RD, weight_EDF)
        ctx.ops, ctx.counts = ops, counts
        return ops.product_by_group(x_RD, weight_EDF, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_EDF = ctx.saved_tensors
        parts = grads[0].split(ctx.counts)
        grad_x_RD = grad_weight_EDF = None
        _, needs_x, needs_weight, _ = ctx.needs_input_grad
        if needs_x:
            grad_x_RD = torch.cat([ctx.ops.input_gradient(part, weight_EDF[e].t()) for e, part in enumerate(parts)])
        if needs_weight:
            grad_weight_EDF = torch.empty_like(weight_EDF)
            for e, (x_ND, grad_NF) in enumerate(zip(x_RD.split(ctx.counts), parts, strict=True)):
                grad_weight_EDF[e] = ctx.ops.weight_gradient(x_ND, grad_NF).t()
        return None, grad_x_RD, grad_weight_EDF, None
