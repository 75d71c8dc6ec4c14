"""Dequantises MXFP4: four bits per number and a shared power of two for each 32 numbers."""

# Shapes: E experts, N outputs, G blocks of 32 numbers, W bytes of a block, H pairs of numbers.

from __future__ import annotations

import torch
from torch import Tensor

from nmoe.errors import UserError

# The values of the four bits of E2M1 (OCP Microscaling Formats, version 1.0, section 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

BLOCK = 32

# The largest scale under which 6.0 is finite in bf16; 255 is NaN.
LARGEST_SCALE = 252


def from_pairs(pairs_NH: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of bytes that hold two of four bits each, the lower bits first; the last axis is twice as long."""
    values = torch.tensor(E2M1, dtype=dtype)
    # All pairs of values, indexed by byte: looking up a whole byte is six times faster than looking up its halves.
    both = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1).to(pairs_NH.device)
    return both.index_select(0, pairs_NH.flatten().int()).view(*pairs_NH.shape[:-1], -1)


def dequantised(blocks_ENGW: Tensor, scales_ENG: Tensor) -> Tensor:
    """Dequantises MXFP4 experts to bf16, `[E, inputs, N]` as a view of `[E, N, inputs]`. A byte holds two numbers of four bits, the
    lower bits first; each block of 32 numbers has a power of two, `2 ** (scale - 127)`, where a scale of 255 is NaN. Exact: bf16
    holds every product.

    Raises UserError if blocks and scales do not match.
    """
    found = (
        f"blocks {list(blocks_ENGW.shape)} {blocks_ENGW.dtype} and scales {list(scales_ENG.shape)} {scales_ENG.dtype}"
    )
    if blocks_ENGW.dim() != 4 or blocks_ENGW.shape[:-1] != scales_ENG.shape or blocks_ENGW.shape[-1] != BLOCK // 2:
        raise UserError(f"{found} are not MXFP4: [E, N, G, 16] and [E, N, G]")
    if blocks_ENGW.dtype != torch.uint8 or scales_ENG.dtype != torch.uint8:
        raise UserError(f"{found} are not MXFP4: both are bytes")
    device = blocks_ENGW.device
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - 127).to(torch.bfloat16)
    powers[255] = torch.nan
    powers = powers.to(device)
    out_ENGX = torch.empty(*scales_ENG.shape, BLOCK, dtype=torch.bfloat16, device=device)
    for out_NGX, blocks_NGW, scales_NG in zip(out_ENGX, blocks_ENGW, scales_ENG, strict=True):
        # One expert at a time, because indices take four times the memory of the bytes.
        torch.mul(from_pairs(blocks_NGW, torch.bfloat16), powers[scales_NG.int()].unsqueeze(-1), out=out_NGX)
    return out_ENGX.flatten(-2).transpose(1, 2)
