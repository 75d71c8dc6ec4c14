"""Rotary turns (Su et al. 2021, arXiv:2104.09864) in the half-split layout of Llama and Qwen, with their gradient."""

# Shapes: T tokens, N heads turned (query and key heads together), C dimensions turned, c = C / 2 pairs.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def turn(x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
    """Turns each pair `(x[i], x[i + C/2])` of every head by its position's angle."""
    half = x_TNC.shape[-1] // 2
    first, second = x_TNC[..., :half], x_TNC[..., half:]
    out_TNC = torch.empty_like(x_TNC, memory_format=torch.contiguous_format)
    torch.mul(first, cos_T1c, out=out_TNC[..., :half]).addcmul_(second, sin_T1c, value=-1)
    torch.mul(second, cos_T1c, out=out_TNC[..., half:]).addcmul_(first, sin_T1c)
    return out_TNC


Turn = Callable[[Tensor, Tensor, Tensor], Tensor]


class Rotate(torch.autograd.Function):
    """A rotation, scaled where the table is; its gradient is the transposed map, the rotation back."""

    @staticmethod
    def forward(ctx: Any, turn: Turn, x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1c, sin_T1c)
        ctx.turn = turn
        return turn(x_TNC, cos_T1c, sin_T1c)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        cos_T1c, sin_T1c = ctx.saved_tensors
        return None, ctx.turn(grads[0], cos_T1c, -sin_T1c), None, None
