"""SwiGLU in one pass, forward and backward."""

# Shapes: N rows, F hidden units.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.numerics import sigmoid

# gpt-oss's sigmoid slope (its release; also the common approximation of GELU by x * sigmoid(1.702 x)).
SLOPE = 1.702


def swiglu(gate_up_NF: Tensor, limit: float = 0.0, exact: bool = False) -> Tensor:
    """`silu(gate) * up`, of the two halves of the last axis (Shazeer 2020, arXiv:2002.05202). With a limit, gpt-oss's
    clamped form: gate at most and up within the limit, then `gate * sigmoid(1.702 gate) * (up + 1)`. `exact` is that of
    `nmoe.model.numerics`."""
    if gate_up_NF.is_cuda and gate_up_NF.dtype != torch.float64:
        out: Tensor = _SwiGLU.apply(gate_up_NF, limit)
        return out
    return swiglu_reference(gate_up_NF, limit, exact)


def swiglu_reference(gate_up_NF: Tensor, limit: float = 0.0, exact: bool = False) -> Tensor:
    """The same, left to torch."""
    gate_NF, up_NF = gate_up_NF.chunk(2, dim=-1)
    if limit:
        gate_NF, up_NF = gate_NF.clamp(max=limit), up_NF.clamp(-limit, limit)
        return gate_NF * sigmoid(SLOPE * gate_NF, exact) * (up_NF + 1)
    return (gate_NF * sigmoid(gate_NF, exact) if exact else F.silu(gate_NF)) * up_NF


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_NF: Tensor, limit: float) -> Tensor:
        from nmoe.model.kernels.swiglu_triton import swiglu_forward

        ctx.save_for_backward(gate_up_NF)
        ctx.limit = limit
        return swiglu_forward(gate_up_NF, limit)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        from nmoe.model.kernels.swiglu_triton import swiglu_backward

        (gate_up_NF,) = ctx.saved_tensors
        return swiglu_backward(grads[0], gate_up_NF, ctx.limit), None
