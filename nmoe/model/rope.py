"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout of Llama and Qwen."""

# Shapes: T tokens, N heads turned (query and key heads together), C head width.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rope_table(context_tokens: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[context_tokens, head_dim / 2]`, computed in fp64 and kept in fp32: a table in bf16 is a known
    source of sampler/learner mismatch."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(context_tokens, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def _rotate(x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
    half = x_TNC.shape[-1] // 2
    first, second = x_TNC[..., :half], x_TNC[..., half:]
    out_TNC = torch.empty_like(x_TNC, memory_format=torch.contiguous_format)
    torch.mul(first, cos_T1c, out=out_TNC[..., :half]).addcmul_(second, sin_T1c, value=-1)
    torch.mul(second, cos_T1c, out=out_TNC[..., half:]).addcmul_(first, sin_T1c)
    return out_TNC


class _Rotate(torch.autograd.Function):
    """A rotation; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1c, sin_T1c)
        return _rotate(x_TNC, cos_T1c, sin_T1c)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_T1c, sin_T1c = ctx.saved_tensors
        return _rotate(grads[0], cos_T1c, -sin_T1c), None, None


def rotate(x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
    """Turns each pair `(x[i], x[i + C/2])` of every head by its position's angle. cos and sin are `[T, 1, C/2]`."""
    out: Tensor = _Rotate.apply(x_TNC, cos_T1c, sin_T1c)
    return out
