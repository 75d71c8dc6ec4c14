"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout of Llama and Qwen."""

# Shapes: T tokens, N heads turned (query and key heads together), C dimensions turned, c = C / 2 pairs.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nmoe.model.config import RopeScaling


def rope_frequencies(dimensions: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians per token of each pair, `[dimensions / 2]`, in fp64."""
    frequencies_c = theta ** (-torch.arange(0, dimensions, 2, dtype=torch.float64) / dimensions)
    if scaling is None:
        return frequencies_c
    if scaling.kind == "linear":
        return frequencies_c / scaling.factor
    if scaling.kind == "llama3":
        turns_c = scaling.original_context_tokens * frequencies_c / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept_c = ((turns_c - low) / (high - low)).clamp(0, 1)
    else:
        kept_c = 1 - _yarn_ramp(dimensions, theta, scaling)
    return frequencies_c * kept_c + frequencies_c / scaling.factor * (1 - kept_c)


def _yarn_ramp(dimensions: int, theta: float, scaling: RopeScaling) -> Tensor:
    """0 for the pairs that turn more than `beta_fast` times in the original context, 1 below `beta_slow`, linear between them
    (arXiv:2309.00071, section 3.2, over pairs as in its reference code)."""

    def pair_of(turns: float) -> float:
        return dimensions * math.log(scaling.original_context_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dimensions - 1)
    pairs_c = torch.arange(dimensions // 2, dtype=torch.float64)
    # Where betas are the wrong way round high lies below low, and the ramp falls: so does transformers'.
    return ((pairs_c - low) / ((high - low) or 0.001)).clamp(0, 1)


def rope_table(
    context_tokens: int, dimensions: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[context_tokens, dimensions / 2]`, computed in fp64 and kept in fp32: a table in bf16 is a known
    source of sampler/learner mismatch."""
    frequencies_c = rope_frequencies(dimensions, theta, scaling)
    angles = torch.outer(torch.arange(context_tokens, dtype=torch.float64), frequencies_c)
    factor = scaling.attention_factor if scaling is not None and scaling.kind == "yarn" else 1.0
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def _rotate(x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
    if x_TNC.is_cuda and x_TNC.dtype != torch.float64:
        from nmoe.model.kernels.rotary_triton import rotate_triton

        return rotate_triton(x_TNC, cos_T1c, sin_T1c)
    half = x_TNC.shape[-1] // 2
    first, second = x_TNC[..., :half], x_TNC[..., half:]
    out_TNC = torch.empty_like(x_TNC, memory_format=torch.contiguous_format)
    torch.mul(first, cos_T1c, out=out_TNC[..., :half]).addcmul_(second, sin_T1c, value=-1)
    torch.mul(second, cos_T1c, out=out_TNC[..., half:]).addcmul_(first, sin_T1c)
    return out_TNC


class _Rotate(torch.autograd.Function):
    """A rotation, scaled where the table is; its gradient is the transposed map, the rotation back."""

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
    if not torch.is_grad_enabled():
        return _rotate(x_TNC, cos_T1c, sin_T1c)
    out: Tensor = _Rotate.apply(x_TNC, cos_T1c, sin_T1c)
    return out
