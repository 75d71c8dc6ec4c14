"""The Triton kernel of `TorchOps.rotate`: all heads of a token turned in one launch."""

# Shapes: T tokens, N heads, C dimensions turned, c = C / 2 pairs.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x_ptr, cos_ptr, sin_ptr, out_ptr, x_row, x_head, N, PAIRS: tl.constexpr, n: tl.constexpr, c: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    at_n = tl.program_id(1) * n + tl.arange(0, n)
    at_c = tl.arange(0, c)
    turned = at_c < PAIRS
    mask = (at_n[:, None] < N) & turned[None, :]
    cos = tl.load(cos_ptr + token * PAIRS + at_c, mask=turned, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * PAIRS + at_c, mask=turned, other=0.0).to(tl.float32)[None, :]
    at = token * x_row + at_n[:, None] * x_head + at_c[None, :]
    first = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + PAIRS, mask=mask, other=0.0).to(tl.float32)
    to = (token * N + at_n[:, None]) * 2 * PAIRS + at_c[None, :]
    tl.store(out_ptr + to, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + to + PAIRS, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=mask)


_HEADS = 8


def rotate_triton(x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
    """See `TorchOps.rotate`; computed in fp32, rounded once."""
    tokens, heads, width = x_TNC.shape
    if x_TNC.stride(-1) != 1:
        x_TNC = x_TNC.contiguous()
    out_TNC = torch.empty(tokens, heads, width, device=x_TNC.device, dtype=x_TNC.dtype)
    n = min(_HEADS, triton.next_power_of_2(heads))
    if tokens:
        _rotate[(tokens, triton.cdiv(heads, n))](
            x_TNC,
            cos_T1c.contiguous(),
            sin_T1c.contiguous(),
            out_TNC,
            x_TNC.stride(0),
            x_TNC.stride(1),
            heads,
            PAIRS=width // 2,
            n=n,
            c=triton.next_power_of_2(width // 2),
            num_warps=4,
        )
    return out_TNC
